"""Small checkpoints whose every value says of which step they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint, verify_checkpoint
from firstlight.checkpoint.manifest import saved_checkpoints
from firstlight.errors import CheckpointError


def content(step: int, val_loss: float | None = None, branch: int = 0) -> Checkpoint:
    """A checkpoint of a step of a run that has gone on otherwise `branch` times."""
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        files={"config.json": json.dumps({"model_type": "llama", "of_step": step})},
        model={"a.weight": torch.randn(4, 3, generator=generator)},
        optimizer={
            "a.weight.step": torch.tensor(float(step)),
            "a.weight.exp_avg": torch.randn(4, 3, generator=generator).bfloat16(),
        },
        trainer_state={"step": step, "val_loss": val_loss, "branch": branch},
    )


def same_tensors(a: Any, b: Any) -> bool:
    """Whether both have the same names, formats and values."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def holds(folder: Path, expected: Checkpoint) -> bool:
    """Whether a folder verifies and holds exactly this."""
    loaded = load_checkpoint(folder)
    return (
        same_tensors(loaded.model, expected.model)
        and same_tensors(loaded.optimizer, expected.optimizer)
        and loaded.trainer_state == expected.trainer_state
        and (folder / "config.json").read_text("utf-8") == expected.files["config.json"]
    )


def is_sound(folder: Path) -> bool:
    """Whether a checkpoint verifies."""
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def sound_steps(run: Path) -> list[int]:
    """The steps of the checkpoints that verify, in the order in which they were saved."""
    return [saved.step for saved in saved_checkpoints(run) if is_sound(saved.folder)]


def litter(folder: Path) -> list[Path]:
    """What is half-written, at any depth."""
    return sorted(folder.rglob(".tmp-*"))
