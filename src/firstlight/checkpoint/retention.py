"""Checkpoints that are kept, and those that are deleted once a newer one is in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from firstlight.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST_NAME,
    Saved,
    best_first,
    names_run,
    own_past,
    run_id_of,
    saved_checkpoints,
    step_folders,
)
from firstlight.files.atomic import remove_folder, remove_leftovers, storage_errors
from firstlight.section import Section


class CheckpointConfig(Section):
    """The `checkpoint` section. One is always written at the end."""

    every_steps: int = Field(200, ge=0)
    """number of steps between checkpoints; 0 writes one at the end only."""
    keep_last: int = Field(2, ge=1)
    """number of newest checkpoints that are kept."""
    keep_every: int = Field(0, ge=0)
    """period in steps: checkpoints of multiples of it are never deleted; 0 is off."""
    keep_best: int = Field(1, ge=0)
    """number of checkpoints with the lowest val/loss at their step that are kept, too; each new
    lowest val/loss is saved, unless every_steps is 0. 0 is none. Without validation there are
    none."""
    average_last: int = Field(0, ge=0)
    """number of newest checkpoints whose weights are averaged when the run is done, of the last one
    and of steps that every_steps divides: into the model folder averaged/ of the run folder, with
    its validation loss beside that of the last weights; 0 is none. Weights averaged over the last
    tenth of a run are often better than the last ones where the learning rate is still high."""
    asynchronous: bool | None = None
    """copy the state and write the copy while training goes on; null decides at the first save:
    true if memory for the copy is free."""
    sharded: bool = False
    """each process of distributed.engine fsdp writes its shards, and none gathers the whole model,
    which may be too large for one. Any engine resumes from it, with any number of
    processes. The last checkpoint of a run is a Hugging Face model folder too; `firstlight convert`
    makes one of an earlier one."""

    @model_validator(mode="after")
    def _keeps_enough(self) -> Self:
        if self.average_last == 1 or self.average_last > self.keep_last:
            raise ValueError(
                f"average_last is {self.average_last}, and keep_last keeps {self.keep_last} "
                f"checkpoints: set keep_last to {max(self.average_last, 2)}, and average_last to 2 "
                "at least, or to 0"
            )
        if self.average_last and not self.every_steps:
            raise ValueError(
                "average_last averages several checkpoints, and every_steps 0 writes only one: set "
                "every_steps, or average_last to 0"
            )
        return self


def averaged_checkpoints(past: Sequence[Saved], config: CheckpointConfig) -> Sequence[Saved]:
    """The checkpoints of a run's own past (oldest first) to average if the newest is the last.

    The others are of regular steps: a stop, or a request, saves one more, and the average of a run
    that was stopped and resumed is to be that of a run that was not.
    """
    every, count = config.every_steps, config.average_last
    regular = [one for one in past[:-1] if every and one.step % every == 0]
    return [*regular, *past[-1:]][-count:] if count else ()


def prune_checkpoints(
    run_folder: Path,
    newest: Path,
    config: CheckpointConfig,
    require_folder: Callable[[], None] = lambda: None,
) -> None:
    """Delete the checkpoints that the keys do not keep, and unfinished folders of killed runs.

    Checkpoints of a dead branch and checkpoints with a damaged manifest never count, and go.
    Checkpoints of another run stay, and so does a checkpoint whose damaged manifest does not name
    this run.

    Args:
        newest: the checkpoint saved last, which has been verified since.
        config: the recipe's `checkpoint` section, which decides the ones that stay.
        require_folder: called before each deletion; raises an error if the folder is no longer
            this run's.

    Raises:
        StorageError: the disk refuses; `newest` is untouched.
    """
    saved = saved_checkpoints(run_folder)
    past = own_past(saved)
    stay = kept_checkpoints(past, config.keep_last, config.keep_every, config.keep_best)
    stay |= set(averaged_checkpoints(past, config))
    kept = {one.folder for one in stay}
    kept.add(newest)
    run_id = run_id_of(run_folder)
    kept |= {one.folder for one in saved if not one.sequence and not names_run(one, run_id)}
    # The oldest first: what tells that one is of a dead branch was saved after it.
    for one in saved:
        if one.folder not in kept:
            require_folder()
            remove_folder(one.folder)
    with storage_errors(run_folder):
        for folder in step_folders(run_folder):
            if not (folder / MANIFEST_NAME).is_file():
                require_folder()
                remove_folder(folder)
        require_folder()
        remove_leftovers(run_folder / CHECKPOINTS)


def kept_checkpoints(
    past: Sequence[Saved], keep_last: int, keep_every: int, keep_best: int
) -> set[Saved]:
    """The checkpoints of a run's own past (oldest first) that stay. See `prune_checkpoints`."""
    kept = set(past[-keep_last:])
    if keep_every:
        kept |= {one for one in past if one.step % keep_every == 0}
    return kept | set(best_first(past)[:keep_best])
