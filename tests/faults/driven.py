"""Tiny runs for run_driver.py, and what must be the same in two of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from firstlight.checkpoint.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.run_log.reader import read_json_lines

#: [recipe, faults], one after the other; see run_driver.py.
Chain = Sequence[tuple[Path, Mapping[str, Any]]]

#: Metrics that are no outcome of the computation.
MEASURED = {
    "tokens_per_second",
    "learned_tokens_per_second",
    "samples_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_wait_seconds",
    "save_stall_seconds",
}

_DRIVER = Path(__file__).with_name("run_driver.py")

_MODEL = {
    "model_type": "gpt2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread: for models of a few numbers more are slower, and beside other
    programs much slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drive(plan: Sequence[Chain]) -> list[list[dict[str, Any]]]:
    """Do the plan in one process and its children; each run's result."""
    done = subprocess.run(
        [sys.executable, str(_DRIVER)],
        input=json.dumps([[(str(recipe), faults) for recipe, faults in chain] for chain in plan]),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return result


def write_recipe(folder: Path, name: str, data: Path, **sections: Mapping[str, Any]) -> Path:
    """NAME.yaml, of a run in the folder NAME, both in `folder`: with dropout and accumulation.
    What `sections` hold is set in the sections."""
    recipe: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / name), "device": "cpu"},
        "model": {**_MODEL},
        "data": {"dir": str(data), "seq_len": 32, "verify": False},
        "batch": {"micro_batch_size": 8, "gradient_accumulation_steps": 2},
        "schedule": {"max_steps": 40, "warmup_steps": 3},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 5, "max_rows": 12, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 8, "keep_last": 2},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
    }
    for section, values in sections.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def run_of(recipe: Path) -> Path:
    return recipe.with_suffix("")


def newest(run: Path) -> Path:
    """The last checkpoint saved, which verifies."""
    folder = list_checkpoints(run)[-1]
    verify_checkpoint(folder)
    return folder


def outcome(run: Path) -> dict[str, Any]:
    """All that a run's end must have in common with that of another that did the same."""
    folder = newest(run)
    state = load_trainer_state(folder)
    del state["recipe"]["run"]["dir"]
    draws = (run / "draws.txt").read_text(encoding="utf-8").splitlines()
    result: dict[str, Any] = {
        name: (folder / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors")
    }
    return result | {
        "step": folder.name,
        "state": state,
        "metrics": [
            {key: value for key, value in record.items() if key not in MEASURED}
            for record in read_json_lines(run / "metrics.jsonl")
        ],
        "samples": (run / "samples.jsonl").read_bytes(),
        # Of a step that a kill undid the same numbers are drawn again.
        "draws": list(dict.fromkeys(draws)),
        "drawn again": len(draws) - len(set(draws)),
        "litter": sorted(run.rglob(".tmp-*")),
    }


def differences(run: Path, whole: Path) -> list[str]:
    """In what the run's outcome is not the other's."""
    found, expected = outcome(run), outcome(whole)
    return [key for key in expected if found[key] != expected[key]]
