"""Models trained with Hugging Face's Accelerate and Trainer learn the same as with `firstlight
train`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.data.prepare import prepare
from firstlight.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("trainers_driver.py")
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: One thread, because several would sum in a different order. No version checks on the network.
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "prepared"
    prepare([corpus], tokenizer, folder, workers=1)
    return folder


def _write_recipe(folder: Path, shards: Path, **batch: Any) -> Path:
    recipe = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "data": {"dir": str(shards), "seq_len": 32},
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        },
        "batch": batch,
        "schedule": {"max_steps": 15, "warmup_steps": 3},
        "optimizer": {"learning_rate": 0.01, "max_grad_norm": 0.5},
        "efficiency": {"precision": "fp32", "compile": False},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_prompts": []},
        "checkpoint": {"every_steps": 0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def _run(*command: str | Path, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        input=given,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _losses(stdout: str) -> list[float]:
    words = [line.split() for line in stdout.splitlines() if line.startswith("step ")]
    assert [int(line[1]) for line in words] == list(range(1, len(words) + 1))
    return [float(line[3]) for line in words]


def _own_losses(recipe: Path, *options: str) -> list[float]:
    run = recipe.parent / f"run{len(options)}"
    _run("-m", "firstlight", "train", recipe, "--run.dir", run, *options)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]
    assert len(losses) == 15
    assert losses[-1] < losses[0] - 0.5
    return losses


_METHODS = {
    "--efficiency.activation_checkpointing": "full",
    "--efficiency.precision": "bf16",
    "--optimizer.name": "adamw8bit",
    "--optimizer.eight_bit_library": "bitsandbytes",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    return _write_recipe(folder, shards, micro_batch_size=2, gradient_accumulation_steps=3)


@pytest.fixture(scope="module")
def expected(recipe: Path) -> list[float]:
    """Return the losses of `firstlight train`."""
    return _own_losses(recipe)


@pytest.fixture(scope="module")
def printed(recipe: Path) -> list[str]:
    """Return the output of accelerate and the Trainer: plain, with `_METHODS`, and with these and
    8-bit embeddings.
    """
    for library in ("accelerate", "transformers", "bitsandbytes"):
        pytest.importorskip(library)
    methods = [word for pair in _METHODS.items() for word in pair]
    narrow = [*methods, "--optimizer.embeddings_in_32_bits", "false"]
    jobs = [
        [str(_EXAMPLES / example), str(recipe), *options]
        for options in ([], methods, narrow)
        for example in ("accelerate_loop.py", "transformers_trainer.py")
    ]
    found: list[str] = json.loads(_run(_DRIVER, given=json.dumps(jobs)))
    return found


@pytest.mark.slow
def test_other_trainers_match_losses_of_firstlight_train(
    expected: list[float], printed: list[str]
) -> None:
    plain = printed[:2]
    assert all(said.endswith("\ncheckpoints 0 optimizers AdamW\n") for said in plain)
    assert _losses(plain[0]) == expected
    # The Trainer adds quotients, while the others divide a sum.
    assert _losses(plain[1]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, jobs, optimizers",
    [
        ((), slice(2, 4), "AdamW AdamW8bit OptimizerGroup"),
        (("--optimizer.embeddings_in_32_bits", "false"), slice(4, 6), "AdamW8bit"),
    ],
    ids=["embeddings in 32 bits", "embeddings in 8 bits"],
)
def test_other_trainers_with_methods_match_losses_of_firstlight_train(
    options: tuple[str, ...], jobs: slice, optimizers: str, recipe: Path, printed: list[str]
) -> None:
    """fp16 instead of bf16 needs a GPU in both: tests/gpu/test_other_loops.py."""
    methods = [word for pair in _METHODS.items() for word in pair]
    expected = _own_losses(recipe, *methods, *options)
    for said in printed[jobs]:
        # 15 steps of 3 micro-batches through 2 layers.
        assert said.endswith(f"\ncheckpoints 90 optimizers {optimizers}\n")
        assert _losses(said) == pytest.approx(expected, rel=1e-6)


def test_example_loop_errors_print_one_line(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_EXAMPLES)
    parts = importlib.import_module("parts")
    arguments = ["loop.py", str(recipe), "--efficiency.precision", "fp16"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"loop.py: error: .*fp16 needs a GPU.*; take bf16\Z"):
        parts.run(parts.parts_of)
    monkeypatch.setattr(sys, "argv", [*arguments[:2], "--schedule.max_steps", "0"])
    with pytest.raises(SystemExit, match=r"loop.py: error: .*need a step: .*max_steps"):
        parts.run(parts.parts_of)
    monkeypatch.setattr(sys, "argv", arguments[:1])
    with pytest.raises(SystemExit, match=r"\Aloop.py: error: use: loop.py RECIPE.yaml "):
        parts.run(parts.parts_of)


@pytest.mark.slow
def test_accelerate_two_processes_match_losses_of_one(tmp_path: Path, shards: Path) -> None:
    pytest.importorskip("accelerate")
    recipe = _write_recipe(tmp_path, shards, micro_batch_size=2, global_batch_tokens=256)
    expected = _own_losses(recipe)
    # `accelerate launch --cpu --num_processes 2` starts one.
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = _run(*launch, _EXAMPLES / "accelerate_loop.py", recipe)
    assert said.startswith("processes 2 on cpu\n")
    assert _losses(said) == pytest.approx(expected, rel=1e-6)
