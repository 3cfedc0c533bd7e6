"""The history of a run by its checkpoints: its own past, dead branches, and which are kept.

A run that goes on from an older checkpoint, because newer ones are damaged or at a rollback, leaves
those in between behind as a dead branch. Steps don't tell dead branches: the first checkpoint of
the new branch may be of an earlier step than all of the dead one. Manifests do, by `sequence` and
`parent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from firstlight.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST_NAME,
    Saved,
    saved_checkpoints,
    step_folders,
)
from firstlight.files.atomic import (
    remove_folder,
    remove_leftovers,
    storage_errors,
)
from firstlight.section import Section


class CheckpointConfig(Section):
    """The `checkpoint` section. One is always written at the end."""

    every_steps: int = Field(200, ge=0)
    """a checkpoint after every so many steps; 0 is at the end only."""
    keep_last: int = Field(2, ge=1)
    """how many of the newest are kept."""
    keep_every: int = Field(0, ge=0)
    """those of steps that are multiples of it are kept for good; 0 is none."""
    keep_best: int = Field(1, ge=0)
    """how many with the lowest val/loss at their step are kept beside, and each new lowest val/loss
    is saved, unless every_steps is 0; 0 is none. Without validation there are none."""
    asynchronous: bool | None = None
    """copy the state and write the copy while training goes on; null is where memory for the copy
    is free at the first save."""
    sharded: bool = False
    """with distributed.engine fsdp, each process writes the shards that it holds, and nothing is
    put together: for models that are too large for that. Any engine goes on from it, with any
    number of processes. The last checkpoint of a run is a Hugging Face model folder too;
    `firstlight convert` makes one of an earlier one."""


def own_past(found: Sequence[Saved]) -> list[Saved]:
    """Those with a sound manifest that are not of a dead branch, in the order in which they come.

    A checkpoint of a later step than one saved after it is of a dead branch as well.
    """
    saved = _line(found)
    return [
        one for one in found if one.sequence and not any(two.leaves_behind(one) for two in saved)
    ]


def best_first(past: Sequence[Saved]) -> list[Saved]:
    """Those whose validation loss was measured at their step, the lowest first; of equal ones the
    one saved last."""
    measured = [(one.val_loss, -one.sequence, one) for one in past if one.val_loss is not None]
    return [one for _, _, one in sorted(measured, key=lambda entry: entry[:2])]


def best_saved(run_folder: Path) -> list[Saved]:
    """`best_first` of what a run has been through, by the manifests alone."""
    return best_first(own_past(saved_checkpoints(run_folder)))


def _line(found: Sequence[Saved]) -> list[Saved]:
    """What the newest one's run went through, from the newest back: dead branches don't tell
    what is dead, but a checkpoint that was replaced by one of the same step still does."""
    line: list[Saved] = []
    for one in sorted(found, key=lambda one: one.sequence, reverse=True):
        if one.sequence and (not line or one.sequence <= line[-1].parent):
            line.append(one)
    return line


def prune_checkpoints(
    run_folder: Path, newest: Path, *, keep_last: int, keep_every: int = 0, keep_best: int = 0
) -> None:
    """Delete the checkpoints that are not to be kept, and what killed runs left behind.

    Those of a dead branch (see history.py) and those with a damaged manifest never count, and go.

    Args:
        newest: the checkpoint saved last, which has been verified since.
        keep_last: so many of the newest stay,
        keep_every: those whose step is a multiple of it (0: none),
        keep_best: and so many with the lowest validation loss at their step.

    Raises:
        StorageError: the disk refuses; `newest` is untouched.
    """
    saved = saved_checkpoints(run_folder)
    past = kept_checkpoints(own_past(saved), keep_last, keep_every, keep_best)
    kept = {one.folder for one in past}
    kept.add(newest)
    # The oldest first: what tells that one is of a dead branch was saved after it.
    for one in saved:
        if one.folder not in kept:
            remove_folder(one.folder)
    with storage_errors(run_folder):
        for folder in step_folders(run_folder):
            if not (folder / MANIFEST_NAME).is_file():
                remove_folder(folder)
        remove_leftovers(run_folder / CHECKPOINTS)


def kept_checkpoints(
    past: Sequence[Saved], keep_last: int, keep_every: int, keep_best: int
) -> set[Saved]:
    """Those of a run's own past, oldest first, that stay. See `prune_checkpoints`."""
    kept = set(past[-keep_last:])
    if keep_every:
        kept |= {one for one in past if one.step % keep_every == 0}
    return kept | set(best_first(past)[:keep_best])
