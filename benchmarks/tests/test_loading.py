"""`python -m benchmarks loading`, with a checkpoint of a few megabytes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import loading, rows
from benchmarks.__main__ import main, show_loading
from benchmarks.loading import (
    DEFAULT_WAY,
    LARGEST,
    LAYOUTS,
    ROWS,
    SHARDED,
    SINGLE,
    SMALLEST,
    LoadingRow,
    compare,
    draw,
    loading_rows,
    make_checkpoints,
    model_config,
    parse_count,
)
from benchmarks.options import LoadingBench
from firstlight.errors import ConfigError, InputError, ModelError, StorageError
from firstlight.hardware.device import Hardware
from firstlight.hardware.environment import SHORT_SPIN, for_generation
from firstlight.lora.loading import load_model
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.weights.loading import LOADING_MODES

pytestmark = pytest.mark.usefixtures("forked_processes")

_TINY = 2_000_000
_MEASURED = {
    "import_seconds",
    "load_seconds",
    "load_cpu_seconds",
    "first_logits_seconds",
    "first_logits_cpu_seconds",
    "load_peak_bytes",
    "peak_bytes",
    "total_peak_bytes",
    "model_bytes",
    "device_peak_bytes",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint of two million parameters in bfloat16, as one file and in shards."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoints(_TINY, "bfloat16", folder, LAYOUTS)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a separate folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    "text, count",
    [
        ("0.5B", 500_000_000),
        ("2M", 2_000_000),
        ("1.5m", 1_500_000),
        ("300K", 300_000),
        ("1234567", 1_234_567),
    ],
)
def test_parse_count_accepts_unit_letter(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "0.5 B", "-1M", "1T", "1e9", "½B", "٣M", "1.M"])
def test_parse_count_invalid_text_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a number of parameters: use for instance 0\.5B"):
        parse_count(text)


@given(st.integers(SMALLEST, LARGEST))
def test_loading_bench_model_has_requested_size(parameters: int) -> None:
    total = count_parameters(meta_model(model_config(parameters))).total
    assert abs(total - parameters) <= 0.005 * parameters


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parameters": SMALLEST - 1}, "1,499,999 parameters are outside"),
        ({"parameters": LARGEST + 1}, "outside the supported range"),
        ({"repeats": 0}, "repeats is 0"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of bfloat16, float32"),
        ({"ways": ["sequentail"]}, r"way 'sequentail' is unknown \(did you mean 'sequential'\?\)"),
        ({"ways": ["transformers"], "no_transformers": True}, "no loading mode is left to measure"),
    ],
)
def test_loading_bench_invalid_options_raise_config_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loading_rows(LoadingBench(**options))


def test_loading_bench_rows_can_be_chosen() -> None:
    assert loading_rows(LoadingBench()) == list(ROWS)
    names = [row.name for row in loading_rows(LoadingBench(no_transformers=True))]
    assert names == [*LOADING_MODES, "sharded", "per-tensor", "per-tensor-sequential", "cast"]
    chosen = loading_rows(LoadingBench(ways=["transformers", "mmap"]))
    assert [row.name for row in chosen] == ["mmap", "transformers"]


def test_loading_bench_checkpoint_is_one_model_in_one_file_and_in_shards(checkpoint: Path) -> None:
    single, sharded, per_tensor = (load_model(checkpoint / name).model for name in LAYOUTS)
    assert len(list((checkpoint / "single").glob("*.safetensors"))) == 1
    assert len(list((checkpoint / "sharded").glob("*.safetensors"))) > 2
    assert (checkpoint / "sharded" / "model.safetensors.index.json").is_file()
    weights = single.state_dict()
    for other in (sharded, per_tensor):
        assert all(torch.equal(weights[name], w) for name, w in other.state_dict().items())
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert weights["model.embed_tokens.weight"].float().std() == pytest.approx(0.02, rel=0.05)


def test_loading_bench_measures_every_row_and_deletes_checkpoint(temporary: Path) -> None:
    ways = [DEFAULT_WAY, "sharded", "per-tensor", "transformers"]
    result = loading.bench_loading(LoadingBench(parameters=_TINY, repeats=1, ways=ways))
    assert list(temporary.iterdir()) == []
    assert result["checkpoint"]["parameters"] == _TINY
    assert result["checkpoint"]["file_bytes"] == pytest.approx(2 * _TINY, rel=0.01)
    assert result["machine"]["transformers"] is not None
    assert [row["name"] for row in result["rows"]] == ways
    for row in result["rows"]:
        assert row.keys() >= _MEASURED
        assert row["model_bytes"] == (4 if row["cast"] else 2) * _TINY
        assert row["peak_to_file"] > 0
        assert row["peak_to_model"] > 0
        assert row["time_to_transformers"] > 0
        assert len(row["runs"]) == 1
    assert [row["name"] for row in result["rows"] if row["default"]] == [DEFAULT_WAY]
    assert draw(result).startswith(b"\x89PNG")


def test_loading_bench_command_prints_table_and_one_json_object(
    temporary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out"
    command = (
        "loading --parameters 2M --ways mmap --no-transformers --repeats 2 --device cpu "
        f"--dir {kept} --out {out} --json"
    )
    assert main(command.split()) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((out / "loading.json").read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert (row["name"], row["time_to_transformers"]) == ("mmap", None)
    assert len(row["runs"]) == 2
    lines = captured.err.splitlines()
    assert any(line.startswith("way") and "first logits" in line for line in lines)
    assert any(line.startswith("mmap") and "no GPU used" in line for line in lines)
    assert (out / "loading.png").read_bytes().startswith(b"\x89PNG")
    assert list(temporary.iterdir()) == []
    assert [path.name for path in kept.iterdir()] == ["single"]


def test_loading_bench_reuses_only_its_own_kept_checkpoint(tmp_path: Path) -> None:
    make_checkpoints(_TINY, "bfloat16", tmp_path, [SINGLE])
    weights = tmp_path / "single" / "model.safetensors"
    before = weights.stat()
    make_checkpoints(_TINY, "bfloat16", tmp_path, [SINGLE])
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    with pytest.raises(
        InputError, match="contains something other than this benchmark's checkpoint"
    ):
        make_checkpoints(_TINY, "float32", tmp_path, [SINGLE])


def test_loading_bench_too_little_space_raises_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * 2 * _TINY  # the bytes of both folders, without the twentieth that must remain free
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    message = r"the checkpoint needs 0\.008 GB, but .* has only 0\.008 GB free: choose another"
    with pytest.raises(StorageError, match=message):
        make_checkpoints(_TINY, "bfloat16", tmp_path / "new", [SINGLE, SHARDED])
    assert list((tmp_path / "new").iterdir()) == []
    make_checkpoints(_TINY, "bfloat16", tmp_path / "new", [SINGLE])


def test_loading_bench_failed_row_shows_last_output_of_process(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint / "single", tmp_path / "single")
    os.truncate(tmp_path / "single" / "model.safetensors", 1000)
    message = r"loading with 'this' failed: .* is damaged"
    with pytest.raises(ModelError, match=message):
        loading.measure(LoadingRow("this", "firstlight", way="sequential"), tmp_path, "bfloat16")


def test_loading_bench_without_transformers_omits_its_rows(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "has_package", lambda name: False)
    measured = dict.fromkeys(_MEASURED, 1.0)
    monkeypatch.setattr(loading, "measure", lambda *_: measured)
    result = loading.bench_loading(LoadingBench(parameters=_TINY, repeats=1))
    assert {row["program"] for row in result["rows"]} == {"firstlight"}
    assert "transformers is not installed: its rows are skipped" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="transformers is not installed"):
        loading.bench_loading(LoadingBench(parameters=_TINY, ways=["transformers"]))


def test_loading_bench_ratios_of_medians_are_against_fastest_of_same_kind() -> None:
    seconds = {
        "sequential": [3.0, 9.0, 6.0],
        "cast": [8.0, 8.0, 8.0],
        "transformers": [4.0, 4.0, 4.0],
        "transformers-huge-pages": [3.0, 3.0, 100.0],
        "transformers-cast": [2.0, 16.0, 16.0],
    }
    runs = {
        name: [
            {"first_logits_seconds": value, "peak_bytes": 300.0, "model_bytes": 200.0}
            for value in values
        ]
        for name, values in seconds.items()
    }
    rows = [row for row in ROWS if row.name in seconds]
    result = {row["name"]: row for row in compare(rows, runs, file_bytes=100)}
    ratios = {name: row["time_to_transformers"] for name, row in result.items()}
    assert ratios == {
        "sequential": 2.0,
        "cast": 0.5,
        "transformers": pytest.approx(4 / 3),
        "transformers-huge-pages": 1.0,
        "transformers-cast": 1.0,
    }
    assert result["cast"]["peak_to_file"] == 3.0
    assert result["cast"]["peak_to_model"] == 1.5


def test_loading_bench_gpu_peak_is_shown_in_column_and_panel(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Hardware(torch.device("cuda"), "a GPU", 2**34, bf16=True)
    monkeypatch.setattr(loading, "find_hardware", lambda device: gpu)
    devices: list[str] = []

    def ask(module: str, request: dict[str, Any], environment: object) -> dict[str, float]:
        devices.append(request["device"])
        return {**dict.fromkeys(_MEASURED, 1.0), "device_peak_bytes": 3e6}

    monkeypatch.setattr(loading, "ask", ask)
    bench = LoadingBench(parameters=_TINY, ways=["auto"], folder=checkpoint, device="cuda")
    result = loading.bench_loading(bench)
    assert devices == ["cuda"] * 3
    show_loading(result)
    header, row = capsys.readouterr().out.splitlines()[1:]
    assert row.index("3 MB") + len("3 MB") == header.index("peak GPU memory") + 15
    on_cpu = {**result, "rows": [{**result["rows"][0], "device_peak_bytes": None}]}
    assert draw(result) != draw(on_cpu)


def test_loading_bench_huge_pages_follow_command_line_or_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert loading.HUGE_PAGES not in SHORT_SPIN | for_generation()
    seen: list[str] = []

    def ask(module: str, request: object, environment: dict[str, str]) -> dict[str, Any]:
        seen.append(environment[loading.HUGE_PAGES])
        return {}

    monkeypatch.setattr(loading, "ask", ask)
    ours, plain, huge = (LoadingRow("x", "x", huge_pages=pages) for pages in (None, False, True))
    for value in (None, "1"):
        monkeypatch.delenv(loading.HUGE_PAGES, raising=False)
        if value is not None:
            monkeypatch.setenv(loading.HUGE_PAGES, value)
        for row in (ours, plain, huge):
            loading.measure(row, tmp_path, "bfloat16")
    assert seen == ["0", "0", "1", "1", "0", "1"]
