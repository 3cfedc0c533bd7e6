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
    """number of steps between checkpoints; 0 writes one at the end only."""
    keep_last: int = Field(2, ge=1)
    """number of newest checkpoints that are kept."""
    keep_every: int = Field(0, ge=0)
    """checkpoints of steps that are multiples of it are kept for good; 0 is none."""
    keep_best: int = Field(1, ge=0)
    """number of checkpoints with the lowest val/loss at their step that are kept, too; each new
    lowest val/loss is saved, unless every_steps is 0. 0 is none. Without validation there are
    none."""
    asynchronous: bool | None = None
    """copy the state and write the copy while training goes on; null decides at the first save:
    true if memory for the copy is free."""
    sharded: bool = False
    """with distributed.engine fsdp, each process writes its shards, and none gathers the whole
    model: for models that are too large for that. Any engine resumes from it, with any number of
    processes. The last checkpoint of a run is a Hugging Face model folder too; `firstlight convert`
    makes one of an earlier one."""


def own_past(found: Sequence[Saved]) -> list[Saved]:
    """The checkpoints with a sound manifest that are not of a dead branch, in the given order.

    A checkpoint of a later step than one saved after it is of a dead branch as well.
    """
    saved = _line(found)
    return [
        one for one in found if one.sequence and not any(two.leaves_behind(one) for two in saved)
    ]


def best_first(past: Sequence[Saved]) -> list[Saved]:
    """The checkpoints whose validation loss was measured at their step, the lowest loss first; of
    equal losses the last save first."""
    measured = [(one.val_loss, -one.sequence, one) for one in past if one.val_loss is not None]
    return [one for _, _, one in sorted(measured, key=lambda entry: entry[:2])]


def best_saved(run_folder: Path) -> list[Saved]:
    """`best_first` of a run's own past, by the manifests alone."""
    return best_first(own_past(saved_checkpoints(run_folder)))


def _line(found: Sequence[Saved]) -> list[Saved]:
    """The checkpoints that led to the newest one, newest first. Only these tell what is dead: a
    checkpoint of a dead branch doesn't, one that was replaced at the same step still does."""
    line: list[Saved] = []
    for one in sorted(found, key=lambda one: one.sequence, reverse=True):
        if one.sequence and (not line or one.sequence <= line[-1].parent):
            line.append(one)
    return line


def prune_checkpoints(
    run_folder: Path, newest: Path, *, keep_last: int, keep_every: int = 0, keep_best: int = 0
) -> None:
    """Delete the checkpoints that are not to be kept, and unfinished folders of killed runs.

    Checkpoints of a dead branch and checkpoints with a damaged manifest never count, and go.

    Args:
        newest: the checkpoint saved last, which has been verified since.
        keep_last: number of newest checkpoints that stay.
        keep_every: checkpoints whose step is a multiple of it stay; 0 is none.
        keep_best: number of checkpoints with the lowest validation loss at their step that stay.

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
    """The checkpoints of a run's own past (oldest first) that stay. See `prune_checkpoints`."""
    kept = set(past[-keep_last:])
    if keep_every:
        kept |= {one for one in past if one.step % keep_every == 0}
    return kept | set(best_first(past)[:keep_best])
