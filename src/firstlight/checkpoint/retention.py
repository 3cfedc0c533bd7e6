"""Decide which checkpoints of a run to keep. Checkpoints that are not kept are deleted after a new
checkpoint has been saved.
"""

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
    """The `checkpoint` section. A checkpoint is always written at the end of a run."""

    every_steps: int = Field(200, ge=0)
    """number of steps between checkpoints; 0 writes a checkpoint only at the end. If the number is
    above 0, a run with `schedule.max_minutes` also saves a checkpoint when a sixth of its time or
    ten minutes have passed since the last checkpoint. It saves less often if saving would otherwise
    take more than 5% of the time.
    """
    keep_last: int = Field(2, ge=1)
    """number of checkpoints to keep, starting with the newest one."""
    keep_every: int = Field(0, ge=0)
    """number of steps. Checkpoints whose step is a multiple of this number are never deleted. 0
    disables this rule.
    """
    keep_best: int = Field(1, ge=0)
    """number of checkpoints with the lowest val/loss to keep in addition to the newest ones. A
    checkpoint is saved at each new lowest val/loss, unless every_steps is 0. This key has no effect
    without validation.
    """
    average_last: int = Field(0, ge=0)
    """number of checkpoints whose weights are averaged at the end of the run. They are the last
    checkpoint and the latest earlier checkpoints whose step is a multiple of every_steps. The
    average is written to the model folder averaged/ in the run folder, and its validation loss is
    shown next to the validation loss of the last weights. 0 disables averaging. Weights averaged
    over the last tenth of a run are often better than the last weights if the learning rate is
    still high at the end.
    """
    asynchronous: bool | None = None
    """true copies the state and writes the copy to the disk while training continues. null is
    decided at the first save, and means true if there is enough free memory for the copy.
    """
    sharded: bool = False
    """true makes each process write its own shards with distributed.engine fsdp, so that no process
    needs to gather the full model. A run with any engine and any number of processes can resume
    from such a checkpoint. The last checkpoint of a run is also a Hugging Face model folder.
    `firstlight convert` creates such a folder from an earlier checkpoint.
    """

    @model_validator(mode="after")
    def _keeps_enough(self) -> Self:
        if self.average_last == 1 or self.average_last > self.keep_last:
            raise ValueError(
                f"average_last is {self.average_last}, but must be 0, or at least 2 and at most "
                f"keep_last ({self.keep_last}): change average_last, or set keep_last to "
                f"{max(self.average_last, 2)}"
            )
        if self.average_last and not self.every_steps:
            raise ValueError(
                "average_last averages several checkpoints, but every_steps 0 writes only one: "
                "set every_steps, or set average_last to 0"
            )
        return self


def averaged_checkpoints(past: Sequence[Saved], config: CheckpointConfig) -> Sequence[Saved]:
    """Return the checkpoints to average at the end of a run: the newest checkpoint in `past`, and
    the latest earlier ones whose step is a multiple of `every_steps`.

    A run that is stopped saves an additional checkpoint at a different step. This additional
    checkpoint is not averaged, so that stopping and resuming a run does not change the average.

    Args:
        past: result of `own_past`, oldest first.
        config: the recipe's `checkpoint` section.
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
    """Delete all checkpoints that the `checkpoint` section does not require to be kept, and
    incomplete folders left behind by killed runs.

    Checkpoints on a dead branch and checkpoints with a damaged manifest are also deleted.
    Checkpoints of other runs are kept. If a damaged manifest does not contain the id of this run,
    its checkpoint is also kept.

    Args:
        run_folder: the run's folder.
        newest: the checkpoint saved last. It must already have been verified, and it is always
            kept.
        config: the recipe's `checkpoint` section.
        require_folder: function that is called before each deletion and raises an error if the
            folder no longer belongs to this run.

    Raises:
        StorageError: a file system error occurred. `newest` is not affected.
    """
    saved = saved_checkpoints(run_folder)
    past = own_past(saved)
    stay = kept_checkpoints(past, config.keep_last, config.keep_every, config.keep_best)
    stay |= set(averaged_checkpoints(past, config))
    kept = {one.folder for one in stay}
    kept.add(newest)
    run_id = run_id_of(run_folder)
    kept |= {one.folder for one in saved if not one.sequence and not names_run(one, run_id)}
    # Delete the oldest checkpoints first, because the later ones are needed to identify checkpoints
    # of a dead branch and must remain if the process is killed.
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
    """Return the checkpoints to keep according to `keep_last`, `keep_every` and `keep_best`. `past`
    is the result of `own_past`, oldest first.
    """
    kept = set(past[-keep_last:])
    if keep_every:
        kept |= {one for one in past if one.step % keep_every == 0}
    return kept | set(best_first(past)[:keep_best])
