"""The examples for Accelerate and transformers' Trainer on the device under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

pytestmark = [pytest.mark.needs("accelerate", "transformers")]

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_STEPS = 10


def _losses(example: str, recipe: Path, **options: str) -> list[float]:
    """Return the loss of each step printed by an example."""
    given = [word for key, value in options.items() for word in (f"--{key}", value)]
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / example), str(recipe), *given],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(words[1]) for words in steps] == list(range(1, _STEPS + 1)), done.stdout
    return [float(words[3]) for words in steps]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, rows: Path, device: object) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    sections = {
        "run": {"dir": str(folder / "run"), "device": str(device)},
        "data": {"dir": str(rows), "seq_len": 32},
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 3},
        "schedule": {"max_steps": _STEPS, "warmup_steps": 3},
        "optimizer": {"learning_rate": 0.01, "max_grad_norm": 0.5},
        "efficiency": {"precision": "fp32", "compile": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


_FP16 = pytest.mark.cuda_only("both libraries train in fp32 on a CPU when asked for fp16")
_CASES: list[ParameterSet] = [
    pytest.param("bf16", "adamw", id="bf16"),
    pytest.param("fp16", "adamw", id="fp16", marks=_FP16),
    pytest.param("fp16", "adamw8bit", id="8bit", marks=[_FP16, pytest.mark.needs("bitsandbytes")]),
]


@pytest.mark.parametrize(("precision", "optimizer"), _CASES)
def test_other_loops_train_in_half_precision_with_checkpointing_and_accumulation(
    recipe: Path, precision: str, optimizer: str
) -> None:
    methods = {
        "efficiency.precision": precision,
        "efficiency.activation_checkpointing": "full",
        "optimizer.name": optimizer,
    }
    plain = _losses("accelerate_loop.py", recipe)
    assert plain[-1] < plain[0] - 0.3
    for example in ("accelerate_loop.py", "transformers_trainer.py"):
        found = _losses(example, recipe, **methods)
        # Rounded differently from fp32, but the same run.
        assert found != plain
        assert found == pytest.approx(plain, rel=0.05)
