"""The command `firstlight watch`, which shows the progress of a run in another process."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.console import say
from firstlight.errors import ConfigError, nearest

if TYPE_CHECKING:
    from firstlight.training.progress import RunProgress, TrainingProgress
    from firstlight.training.trackers import Step

#: Time in seconds between two reads of the run folder.
_SECONDS_BETWEEN = 0.5
#: Keys that every record of a training step has in metrics.jsonl. Records without these keys, such
#: as the evaluation before the first step, are not shown.
_SHOWN = {"train/loss", "learning_rate", "tokens_per_second", "memory_bytes"}


class _Shown:
    """The state of a run that is currently displayed.

    Attributes:
        step: number of the last step read. 0 before the first step.
        steps: total number of steps of the run. None if unknown.
        limit: step at which a run with a time budget ends even if there is time left. None if
            unknown.
        seconds: total duration of all steps up to `step`, as recorded in the metrics of the run.
    """

    def __init__(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.steps: int | None = None
        self.limit: int | None = None
        self._read_at = time.monotonic()

    def clock(self) -> float:
        """Return the total duration of all steps plus the time since the last step was read, in
        seconds.
        """
        return self.seconds + time.monotonic() - self._read_at

    def add(self, record: Mapping[str, Any]) -> None:
        """Update the displayed state with one training step.

        Args:
            record: parsed line of metrics.jsonl.
        """
        self.step = record["step"]
        self.seconds += (record.get("seconds") or 0.0) + (record.get("save_stall_seconds") or 0.0)
        self._read_at = time.monotonic()


@click.command("watch")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
def watch_command(run: Path) -> None:
    """Show the progress of a run in the terminal.

    The view contains the progress, the metrics, the loss curve and the latest sample text.

    RUN is a run folder that another process is writing or will create. For a finished run, its last
    state is shown. The command exits when the run ends. Ctrl-C ends this command without stopping
    the run.
    """
    with contextlib.suppress(KeyboardInterrupt):
        _watch(run.expanduser())


@click.command(
    "dashboard",
    hidden=True,
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def dashboard_command(arguments: tuple[str, ...]) -> None:
    """Raise an error for a command that has been removed. The message names the commands that
    replace it.
    """
    raise ConfigError(
        "firstlight dashboard was removed: train with --run.trackers '[tensorboard]' and run "
        "`tensorboard --logdir RUNS`, or use trackio (`trackio show`); `firstlight "
        "report RUN RUN` still writes the page that compares runs"
    )


def _watch(folder: Path) -> None:
    """Display a run until it ends.

    Raises:
        InputError: the path is a file, or a folder that is not a run.
        CheckpointError: a file of the run is damaged.
    """
    from firstlight.checkpoint.run_folder import is_held
    from firstlight.run_log.names import METRICS_NAME, SAMPLES_NAME
    from firstlight.run_log.reader import StepFollower, planned_length
    from firstlight.training.progress import RunProgress, TrainingProgress

    _wait_for_run(folder)
    shown = _Shown()
    shown.steps, minutes, shown.limit = planned_length(folder)
    progress = RunProgress(
        lambda: max(shown.steps or 0, shown.step),
        0,
        minutes,
        shown.clock,
        step_limit=lambda: shown.limit,
        # The number of steps in a run with a time budget can change until the last step.
        is_settled=lambda: minutes is None or shown.step >= (shown.limit or math.inf),
    )
    follower = StepFollower(folder / METRICS_NAME, folder / SAMPLES_NAME)
    with (
        contextlib.closing(follower),
        TrainingProgress(progress, shown=True, is_large=True) as view,
    ):
        goes_on = True
        while goes_on:
            # Check whether the run has ended before reading its files. If it has, the files are
            # complete.
            goes_on = is_held(folder)
            _show(follower.new(), shown, progress, view)
            if goes_on:
                shown.steps, _, shown.limit = planned_length(folder)
                _pause()
    of = f"/{shown.steps:,}" if shown.steps else ""
    is_whole = shown.steps is not None and shown.step >= shown.steps
    say(f"the run {'is complete' if is_whole else 'has ended'}: step {shown.step:,}{of}")


def _show(
    found: Sequence[Step], shown: _Shown, progress: RunProgress, view: TrainingProgress
) -> None:
    """Display new steps and the newest sample texts.

    Args:
        found: new steps, each with its record in metrics.jsonl and its sample texts.
        shown: state of the run that is displayed, updated in place.
        progress: timer for the progress of the run. It is restarted if the run has been resumed.
        view: terminal view in which the run is displayed.
    """
    for record, _ in found:
        if record["step"] <= shown.step and shown.step:
            # The run has been resumed from a checkpoint, so its log is read again from the
            # beginning.
            progress.restart()
            shown.seconds = 0.0
        shown.add(record)
        if record.keys() >= _SHOWN:
            view.step(record)
    texts = next((texts for _, texts in reversed(found) if texts), [])
    for text in texts:
        view.sample(text["step"], str(text.get("prompt")), str(text.get("text")))


def _wait_for_run(folder: Path) -> None:
    from firstlight.checkpoint.run_folder import is_held
    from firstlight.from_texts.run_folder import LOCK_NAME
    from firstlight.run_log.reader import require_run

    said = False
    while not is_held(folder):
        # `firstlight train TEXTS` prepares the data in this folder before training starts.
        is_preparing = is_held(folder, LOCK_NAME)
        if not is_preparing and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            require_run(folder)
            return
        if not said:
            parent = folder.resolve().parent
            names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
            say(f"waiting for a run in {folder}{nearest(folder.name, names)}")
            said = True
        _pause()


def _pause() -> None:
    time.sleep(_SECONDS_BETWEEN)
