"""`firstlight convert` as people and programs use it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from firstlight.cli.main import main
from firstlight.lora.loading import load_model
from firstlight.training.loop import train


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    exit_code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run `firstlight convert` in this process."""

    def run_here(*arguments: str | Path) -> Answer:
        capfdbinary.readouterr()
        exit_code = main(["convert", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return Answer(exit_code, out.decode("utf-8"), err.decode("utf-8"))

    return run_here


@pytest.fixture
def trained(recipe: dict[str, Any]) -> Path:
    """A run folder with checkpoints."""
    train(recipe)
    return Path(recipe["run"]["dir"])


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    """A model folder."""
    newest = max((trained / "checkpoints").iterdir())
    assert newest.name == "step-00000012"
    return Path(shutil.copytree(newest, tmp_path / "model"))


def test_convert_command_run_becomes_model_folder(run: Run, trained: Path, tmp_path: Path) -> None:
    answer = run(trained, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.err) == (0, "")
    newest = trained / "checkpoints" / "step-00000012"
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*names, "model.safetensors"]
    )
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (newest / name).read_bytes()
    weights = [
        safetensors.torch.load_file(f / "model.safetensors") for f in (newest, tmp_path / "out")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    lines = [line.split("  ", 1) for line in answer.out.splitlines()]
    assert {name.strip(): value.strip() for name, value in lines}.items() >= {
        "source": "Hugging Face, llama",
        "written": str(tmp_path / "out"),
        "parameters": f"{sum(t.numel() for t in weights[0].values()):,} in f32",
        "chat template": "none",
    }.items()
    assert "logits         the same in both (largest logit: " in answer.out
    assert load_model(tmp_path / "out").tokenizer is not None


def test_convert_command_names_gguf_after_run(run: Run, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for source in (trained, trained / "checkpoints" / "step-00000008"):
        out = tmp_path / f"out-{source.name}"
        options = ("--to", "gguf", "--dtype", "q8_0", "--out", out, "--json")
        answer = run(source, *options)
        assert answer.exit_code == 0
        assert answer.out.count("\n") == 1
        result = json.loads(answer.out)
        assert result["file"] == str(out / "run-q8_0.gguf")
        assert result["out"] == str(out)
        assert (result["dtype"], result["program"]) == ("q8_0", "Hugging Face")
        assert 0 < result["largest_difference"] < 0.1 * result["largest_logit"]
        assert [path.name for path in out.iterdir()] == ["run-q8_0.gguf"]
        assert f"parameters     {result['parameters']:,} in q8_0" in answer.err


def test_convert_command_prints_notes(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    (checkpoint / "manifest.json").unlink()
    answer = run(checkpoint, "--out", tmp_path / "out", "--json")
    assert "note: there is no tokenizer: specify one with --tokenizer\n" in answer.err
    assert json.loads(answer.out)["notes"] == [
        ("there is no tokenizer: specify one with --tokenizer")
    ]


Arguments = Callable[[Path], list[str | Path]]


@pytest.mark.parametrize(
    "arguments, exit_code, kind, message",
    [
        (lambda f: [f / "modle"], 1, "ModelError", "/model'?)"),
        (lambda f: [f / "ckpt.pt"], 1, "InputError", "ckpt.pt does not exist"),
        (lambda f: [f / "notes.pth"], 1, "ModelError", "is not a PyTorch checkpoint"),
        (lambda f: [f / "model" / "model.safetensors"], 1, "InputError", "use its folder"),
        (lambda f: [f / "a.gguf"], 1, "ModelError", "the file is damaged or truncated"),
        (
            lambda f: [f / "model", "--dtype", "q8_0"],
            2,
            "ConfigError",
            "hf does not support dtype",
        ),
        (lambda f: [f / "model", "--tolerance", "-1"], 2, "ConfigError", "is invalid"),
        (lambda f: [f / "model", "--tolerance", "wide"], 2, "UsageError", "not a valid float"),
        (lambda f: [f / "model", "--to", "onnx"], 2, "UsageError", "not one of 'hf', 'gguf'"),
        (
            lambda f: [f / "model", "--config", f / "x"],
            2,
            "ConfigError",
            "--config applies only to other",
        ),
        (lambda f: [f / "model", "--tokenizer", f / "x"], 1, "TokenizerError", "does not exist"),
        (lambda f: [f / "broken"], 1, "ModelError", "NaN or infinity (model.norm.weight):"),
        (lambda f: [f / "small"], 1, "ModelError", "lacks tensors: model.norm.weight"),
    ],
)
def test_convert_command_mistakes_print_one_line_and_leave_nothing(
    arguments: Arguments,
    exit_code: int,
    kind: str,
    message: str,
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    (checkpoint / "manifest.json").unlink()
    (tmp_path / "notes.pth").write_text("dear diary")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    for name, changed in (
        ("small", tensors),
        ("broken", {**tensors, "model.norm.weight": norm * torch.inf}),
    ):
        shutil.copytree(checkpoint, tmp_path / name)
        safetensors.torch.save_file(changed, tmp_path / name / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    plain = run(*arguments(tmp_path), "--out", tmp_path / "new" / "out")
    as_json = run(*arguments(tmp_path), "--out", tmp_path / "new" / "out", "--json")
    assert (plain.exit_code, as_json.exit_code) == (exit_code, exit_code)
    assert plain.out == ""
    assert plain.err == as_json.err
    assert plain.err.startswith("firstlight: error: ")
    assert plain.err.count("\n") == 1
    assert message in plain.err
    error = json.loads(as_json.out)["error"]
    assert error == {"type": kind, "message": plain.err.removeprefix("firstlight: error: ")[:-1]}
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_command_existing_outputs_fail(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    for out, message in (
        (tmp_path / "full", "already exists and is not overwritten: choose another --out"),
        (trained, "is the source or is inside it"),
        (trained / "gguf", "is the source or is inside it"),
    ):
        answer = run(trained, "--out", out)
        assert answer.exit_code == 1
        assert message in answer.err
        assert answer.err.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["letter.txt"]
    assert not (trained / "gguf").exists()


def test_convert_command_missing_package_names_install_command(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    answer = run(trained, "--to", "gguf", "--out", tmp_path / "out", "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.out)["error"]["type"] == "MissingDependencyError"
    assert "pip install 'firstlight[interop]'" in answer.err
    assert not (tmp_path / "out").exists()


def test_convert_command_requires_out_folder(run: Run, tmp_path: Path) -> None:
    answer = run(tmp_path)
    assert answer.exit_code == 2
    assert "Missing option '--out'" in answer.err
