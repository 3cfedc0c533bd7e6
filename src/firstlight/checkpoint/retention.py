"""Which checkpoints of a run are kept, and how the others go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firstlight.checkpoint.history import (
    CHECKPOINTS,
    MANIFEST_NAME,
    Saved,
    best_first,
    own_past,
    saved_checkpoints,
    step_folders,
)
from firstlight.files.atomic import remove_folder, remove_leftovers, storage_errors


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
