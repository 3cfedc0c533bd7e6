"""`benchmarks gpu`: every item on tiny shapes, resuming, failures, and the tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import planner_steps
from benchmarks.__main__ import main
from benchmarks.gpu import calls, items, published, quick
from benchmarks.gpu.items import Bench, Item, Row, attempt
from benchmarks.gpu.quick import ITEMS
from benchmarks.options import GPUBench
from firstlight.errors import TrainingError
from firstlight.hardware.device import find_hardware

BENCH = Bench(find_hardware("cpu"))
SHARED = {
    "commit": "c1",
    "describe": "v1",
    "source": "s1",
    "torch": "2.13",
    "driver": "",
    "device": "H100",
    "dry": False,
}


def _run_folder(folder: Path) -> Row:
    """Write a run of `firstlight train` into a folder, and return the result of the command."""
    peaks = {"predicted": {"peak_bytes": 5 * 2**30}, "measured": {"peak_bytes": 2**32}}
    run = folder / "runs" / "stdlib"
    run.mkdir(parents=True)
    (run / "report.png").write_bytes(b"PNG")
    (run / "forecast.json").write_text(json.dumps(peaks), encoding="utf-8")
    steps = [{"step": n, "tokens_seen": 4096 * n, "tokens_per_second": 1e5 + n} for n in range(4)]
    text = "".join(json.dumps(step) + "\n" for step in steps)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    return {
        "run_folder": "runs/stdlib",
        "choices": {"parameters": 54_820_000, "choices": []},
        "bits_per_byte": 1.046,
        "gzip_bits_per_byte": 1.945,
        "xz_bits_per_byte": 1.609,
        "expected_bits_per_byte": [0.92, 1.19],
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_gpu_quick_dry_run_has_rows_for_every_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = []

    def ask(module: str, request: Row, environment: dict[str, str], seconds: float) -> Row:
        assert module == planner_steps.__name__
        settings.append(environment["PYTORCH_ALLOC_CONF"])
        return planner_steps.measure(request)

    commands = []

    def train(command: Sequence[str], folder: Path) -> tuple[Row, float]:
        commands.append(command)
        return _run_folder(folder), 171.0

    monkeypatch.setattr(items, "ask", ask)
    monkeypatch.setattr(published, "train", train)
    call = ["gpu", "--out", str(tmp_path), "--device", "cpu", "--commit", "here"]
    assert main(call) == 0
    assert settings == ["expandable_segments:True", "expandable_segments:False"]
    assert main(call) == 0
    lines = quick.read_lines(tmp_path / "lines.jsonl")
    assert [line["item"] for line in lines] == [item.name for item in ITEMS], "each is there once"
    failed = {line["item"]: line["error"] for line in lines if "error" in line}
    assert failed == {}
    # The CPU has none of these attention kernels, and the dry grid contains few configurations.
    empty = [line["item"] for line in lines if not line["rows"]]
    assert empty == ["L-2", "L-3", "L-4", "L-5", "L-6", "L-quantized"]
    missing = ("No available kernel", "No viable backend")
    for line in lines:
        for row in line["rows"]:
            assert not row.get("error") or any(text in row["error"] for text in missing), row
    by_item = {line["item"]: line["rows"] for line in lines}
    for name in ("D-1b", "E", "F", "G-eager", "H-bf16", "M", "O"):
        first = by_item[name][0]
        assert first["kernels"], name
        assert first["attention"], name
        assert first["tokens_per_s"] > 0, name
    assert by_item["Q"] == [
        {
            "row": "as it is",
            "wall_s": 171.0,
            "bits_per_byte": 1.046,
            "gzip": 1.945,
            "xz": 1.609,
            "parameters": 54_820_000,
            "steps": 3,
            "tokens": 12288,
            "tokens_per_s": 100_002,
            "measured_peak_gib": 4.0,
            "predicted_peak_gib": 5.0,
            "expected_bits_per_byte": "0.92 to 1.19",
        }
    ]
    capsys.readouterr()
    assert main(["gpu", "--report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for item in ITEMS:
        assert f"## {item.name}: {item.title}\n" in printed


def _item(name: str, seconds: float, rows: Callable[[Bench], Iterator[Row]]) -> Item:
    return Item(name, f"Title of {name}", seconds, rows)


def _figure(_: Bench) -> Iterator[Row]:
    yield {"row": "one", "ms": 2.0}


def _broken(_: Bench) -> Iterator[Row]:
    yield {"row": "one", "ms": 2.0}
    raise RuntimeError("no\n kernel")


def test_gpu_quick_call_without_time_for_item_leaves_it_to_next_call(
    tmp_path: Path,
) -> None:
    three = [_item("A", 5, _figure), _item("B", 50, _figure), _item("C", 5, _figure)]
    assert quick.measure(three, BENCH, tmp_path, 20.0, SHARED, clock=lambda: 0.0) == ["B"]
    assert quick.measure(three, BENCH, tmp_path, 60.0, SHARED, clock=lambda: 0.0) == []
    lines = quick.read_lines(tmp_path / "lines.jsonl")
    assert [line["item"] for line in lines] == ["A", "C", "B"]
    assert lines[0] == {**SHARED, **lines[0], "rows": [{"row": "one", "ms": 2.0}]}
    # Figures of other source code are measured again, except those that depend only on the machine.
    changed = {**SHARED, "source": "s2"}
    both = [three[0], replace(three[2], of_machine=True)]
    quick.measure(both, BENCH, tmp_path, 60.0, changed, clock=lambda: 0.0)
    lines = quick.read_lines(tmp_path / "lines.jsonl")
    assert [line["item"] for line in lines[3:]] == ["A"]


def test_gpu_quick_failed_item_keeps_rows_ends_no_other_and_is_retried(tmp_path: Path) -> None:
    two = [_item("A", 1, _broken), _item("B", 1, _figure)]
    for _ in range(2):
        assert quick.measure(two, BENCH, tmp_path, 60.0, SHARED, clock=lambda: 0.0) == []
    lines = quick.read_lines(tmp_path / "lines.jsonl")
    assert [line["item"] for line in lines] == ["A", "B", "A"]
    assert lines[0]["error"] == "RuntimeError: no kernel"
    assert lines[0]["rows"] == [{"row": "one", "ms": 2.0}]


def test_gpu_quick_item_past_time_limit_is_stopped_within_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless() -> Row:
        while True:
            pass

    def never_ends(_: Bench) -> Iterator[Row]:
        yield attempt("endless", endless)

    limits = []

    @contextlib.contextmanager
    def limit(seconds: float) -> Iterator[None]:
        limits.append(seconds)
        with before(0.0):
            yield

    before = quick._time_limit
    monkeypatch.setattr(quick, "_time_limit", limit)
    item = _item("A", 10, never_ends)
    quick.measure([item], BENCH, tmp_path, 1000.0, SHARED, clock=lambda: 0.0)
    (line,) = quick.read_lines(tmp_path / "lines.jsonl")
    assert line["error"].startswith("OutOfTimeError: stopped")
    assert limits == [80.0]


def test_gpu_quick_line_truncated_by_kill_is_skipped_and_terminated(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"item": "A"}\n{"item": "B', encoding="utf-8")
    quick.append_line(path, {"item": "C"})
    assert [line["item"] for line in quick.read_lines(path)] == ["A", "C"]


def test_gpu_quick_report_compares_medians_of_two_commits(tmp_path: Path) -> None:
    def line(commit: str, ms: float) -> dict[str, Any]:
        row = {"row": "as it is", "ms": ms, "attention": "fmha", "kernels": [["gemm", 1.5, 12]]}
        return {**SHARED, "describe": commit, "item": "E", "date": "2026-11-28", "rows": [row]}

    for name, ms in (("v1", 11.0), ("v1", 10.0), ("v1", 30.0), ("v2", 7.5)):
        quick.append_line(tmp_path / "lines.jsonl", line(name, ms))
    text = quick.report([tmp_path])
    assert "| as it is | v1 | 11 | fmha |\n| as it is | v2 | 7.5 | fmha |\n" in text
    assert "| gemm | 1.500 | 12 |" in text
    assert "## A:" not in text


def test_gpu_quick_failed_run_raises_with_last_words(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"firstlight train: .*missing\.txt"):
        published.train(["train", "missing.txt", "--json"], tmp_path)


class _Graph:
    """Replaces torch.cuda.CUDAGraph: a replay runs the recorded call again."""

    call: Callable[[], object]
    replays = 0

    def replay(self) -> None:
        _Graph.replays += 1
        self.call()


def test_recorded_call_on_gpu_runs_before_recording_and_at_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    @contextlib.contextmanager
    def graph(recording: _Graph) -> Iterator[None]:
        before = len(ran)
        yield
        assert len(ran) == before + 1, "what is recorded runs once"
        recording.call = call

    ran: list[int] = []

    def call() -> None:
        ran.append(len(ran))

    for name, value in {
        "CUDAGraph": _Graph,
        "graph": graph,
        "Stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    replay = calls.recorded(call, torch.device("cuda"))
    assert len(ran) == 3
    replay()
    assert (len(ran), _Graph.replays) == (4, 1)


def test_gpu_quick_compiled_code_is_kept_for_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    path = tmp_path / "inductor.cache"
    for made in (None, (b"first", None), (b"second", None), None):
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda made=made: made)
        quick.save_cache(path)
        quick.load_cache(path)
    assert loaded == [b"first", b"second", b"second"]


def test_gpu_profile_overlapping_kernels_count_as_busy_once() -> None:
    spans = [("gemm", 0.0, 2.0), ("flash_fwd", 1.0, 3.0), ("gemm", 10.0, 1.0)]
    found = calls._summary(spans)
    assert found["kernels_ms"] == 5.0
    assert found["launches"] == 3
    assert found["attention"] == "flash_fwd"
    assert found["kernels"] == [["gemm", 3.0, 2], ["flash_fwd", 3.0, 1]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs --out DIR to measure, --report DIR to print the tables, or --fit DIR"),
        (["--out", "a", "--report", "b"], "needs --out DIR to measure, --report DIR to print"),
        (["--out", "a", "--items", "A,G-egaer"], "item 'G-egaer' is unknown (did you mean 'G-eag"),
        (["--out", "a", "--device", "gpu"], "device 'gpu' is unknown"),
        (["--out", "a", "--seconds", "0"], "--seconds 0: must be greater than 0"),
        (["--report", "missing"], "missing has no lines.jsonl"),
    ],
)
def test_gpu_command_errors_print_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_gpu_items_of_speed_work_fit_into_one_call() -> None:
    longest = GPUBench(Path()).seconds
    assert sum(item.seconds for item in items.ITEMS) <= longest
    assert max(item.seconds for item in ITEMS) < longest
    assert len({item.name for item in ITEMS}) == len(ITEMS)
