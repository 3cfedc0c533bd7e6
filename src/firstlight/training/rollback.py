"""Which checkpoint a run that has diverged goes back to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.errors import CheckpointError
from firstlight.history import own_past, saved_checkpoints


def checkpoint_before(
    run_folder: Path, step: int, saved_step: int, every_steps: int
) -> Path | None:
    """The folder of the newest checkpoint of an earlier step that verifies, or None.

    Those that stand where they were due, from before the trouble began, come first, so that a
    run that was stopped and resumed in between (which leaves a checkpoint more) goes back to
    where it would have gone without.

    Args:
        run_folder: of the run.
        step: the one that failed, or that the last rollback was to, in vain.
        saved_step: of the last checkpoint of what the run has done; later ones are of a dead
            branch.
        every_steps: `checkpoint.every_steps`.
    """
    found = []
    for one in own_past(saved_checkpoints(run_folder)):
        if one.step < step and one.step <= saved_step:
            with contextlib.suppress(CheckpointError):
                state = load_trainer_state(one.folder)
                # One without any update is what the run began with.
                if state.get("skipped_steps", 0) < one.step:
                    found.append((*_merits(state, one.step, every_steps), one.sequence, one.folder))
    for *_, folder in sorted(found, reverse=True):
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(folder)
            return folder
    return None


def _merits(state: Mapping[str, Any], step: int, every_steps: int) -> tuple[bool, bool]:
    """(whether the last step was not skipped, whether it was due)."""
    is_calm = not state.get("skipped")
    was_due = every_steps > 0 and step % every_steps == 0 and state.get("pending") is None
    return is_calm, was_due
