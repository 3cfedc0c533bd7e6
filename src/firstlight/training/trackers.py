"""The trackers of a run: each has a process that follows the run's logs (`tracker_process.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from firstlight.errors import MissingDependencyError, StorageError
from firstlight.files import disk as seam
from firstlight.files.atomic import make_folder, remove_file, storage_errors
from firstlight.report.records import METRICS_NAME, SAMPLES_NAME
from firstlight.report.report import HTML_NAME, REPORT_NAME
from firstlight.training.tensorboard_log import require_tensorboard
from firstlight.training.tracker_process import Ending, Order, read_progress

TRACKERS_NAME = "trackers"

#: Seconds after a run's end in which a tracker's process has to end, without and with a checkpoint
#: to store.
_SECONDS, _SECONDS_WITH_CHECKPOINT = 60.0, 900.0
#: Seconds of waiting for a tracker after which a message says so.
_SECONDS_UNSAID = 3.0

_COMMAND = [sys.executable, "-P", "-m", "firstlight.training.tracker_process"]


def require_trackers(names: Sequence[str]) -> None:
    """Require that the packages of all trackers in `run.trackers` are installed.

    Raises:
        MissingDependencyError: a tracker's package is not installed.
    """
    for name in names:
        if name == "tensorboard":
            require_tensorboard()
        elif importlib.util.find_spec(name) is None:
            raise MissingDependencyError(name, name, f"run.trackers: {name}")


def destination(name: str, folder: Path) -> str:
    """The place to which a tracker writes, and how to see it, as text for messages."""
    env = os.environ.get
    if name == "wandb":
        place = env("WANDB_DIR", str(folder))
        if env("WANDB_MODE", "offline") != "offline":
            return f"mode {env('WANDB_MODE')} of WANDB_MODE"
        return f"offline in {place}/wandb (wandb sync {place}/wandb/offline-run-*)"
    if name == "mlflow":
        return env("MLFLOW_TRACKING_URI") or "MLflow's store in the current folder (mlflow ui)"
    return (
        env("TRACKIO_SPACE_ID")
        or env("TRACKIO_SERVER_URL")
        or "trackio's store on this machine (trackio show)"
    )


class _TrackerProcess:
    """The process of one tracker.

    Args:
        name: name of the tracker, as in `run.trackers`.
        folder: the run folder.
        config: the resolved recipe.
        is_new: True to begin a new run in the tracker; False to resume the recorded one.

    Raises:
        StorageError: the tracker's log or state can't be written.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], *, is_new: bool) -> None:
        self.name, self._folder = name, folder / TRACKERS_NAME
        self.state = self._folder / f"{name}.jsonl"
        if is_new:
            remove_file(self.state)
        self._log = self._folder / f"{name}.log"
        # Remove the log of an earlier process: its last line would be taken for this one's error.
        remove_file(self._log)
        order = Order(
            name,
            str(folder.resolve()),
            str(self.state.resolve()),
            str((folder / METRICS_NAME).resolve()),
            str((folder / SAMPLES_NAME).resolve()),
            config,
        )
        with storage_errors(self._log), seam.disk.append(self._log) as log:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # So that Ctrl-C does not end it: the run's last steps are still to be written.
                start_new_session=True,
            )
        self._send(dataclasses.asdict(order))
        self.is_over = False

    def failure(self) -> str | None:
        """The error that has ended the process; None without one, or if it was returned before."""
        if self.is_over or self._process.poll() is None:
            return None
        self.is_over = True
        return self._said() if self._process.returncode else None

    def end(self, ending: Ending) -> None:
        """Send the run's end to the process."""
        self._send(dataclasses.asdict(ending))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; True if it ends within this number of seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process, and those that its library has started."""
        with contextlib.suppress(ProcessLookupError):
            # The process group: processes of the library would otherwise go on, with the log open.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, values: object) -> None:
        assert self._process.stdin is not None
        # A process that has failed reads nothing more; `failure` reports it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()

    def _said(self) -> str:
        """The last line that the process wrote into its log; "" without one."""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""


class Trackers:
    """The trackers of a run that need a library of their own. A context manager: at its end it
    waits until each tracker has all steps, or gives it up after a time.

    Args:
        names: names of the trackers, as in `run.trackers`; none except in the main process.
        folder: the run folder, with its logs.
        config: the resolved recipe.
        tell: called with each message for people.
        is_new: True to begin new runs in the trackers, for a run that starts with its first step.
        with_checkpoint: True to store the run's last checkpoint in the trackers.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        config: Mapping[str, Any],
        tell: Callable[[str], None],
        *,
        is_new: bool,
        with_checkpoint: bool,
    ) -> None:
        # TensorBoard's file is written with the run's own logs, in this process.
        self._names = [name for name in names if name != "tensorboard"]
        self._folder, self._config, self._tell = folder, config, tell
        self._is_new, self._with_checkpoint = is_new, with_checkpoint
        self._checkpoint: Path | None = None
        self._processes: list[_TrackerProcess] = []

    def __enter__(self) -> Trackers:
        for name in self._names:
            try:
                make_folder(self._folder / TRACKERS_NAME)
                process = _TrackerProcess(name, self._folder, self._config, is_new=self._is_new)
            except StorageError as error:
                # A tracker must not end the run, whose own logs have all metrics.
                self._tell(f"warning: {name} gets nothing of this run: {error} (the run goes on)")
                continue
            self._processes.append(process)
            self._tell(f"{name}: {destination(name, self._folder)}")
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        reports = [str((self._folder / name).resolve()) for name in (HTML_NAME, REPORT_NAME)]
        checkpoint = None if self._checkpoint is None else str(self._checkpoint.resolve())
        for process in self._processes:
            # Before the first one is waited for, so that all finish at the same time.
            process.end(Ending(error is not None, reports, checkpoint))
        for process in self._processes:
            self._finish(process)

    def give_checkpoint(self, checkpoint: Path) -> None:
        """Set the checkpoint that the trackers store, if the recipe asks them to store one."""
        if self._with_checkpoint:
            self._checkpoint = checkpoint

    def check(self) -> None:
        """Give a message for each tracker that has failed, once for each."""
        for process in self._processes:
            if (said := process.failure()) is not None:
                self._tell(f"warning: {process.name} has failed: {said} ({_has(process)})")

    def _finish(self, process: _TrackerProcess) -> None:
        """Wait for the end of a tracker's process, and kill it after a time."""
        limit = _SECONDS if self._checkpoint is None else _SECONDS_WITH_CHECKPOINT
        if not process.wait(min(limit, _SECONDS_UNSAID)):
            self._tell(f"waiting for {process.name}, {limit:.0f} s at most")
            if not process.wait(limit - _SECONDS_UNSAID):
                process.kill()
                process.is_over = True
                self._tell(
                    f"warning: {process.name} has not ended after {limit:.0f} s and is given up "
                    f"({_has(process)})"
                )
        self.check()


def _has(process: _TrackerProcess) -> str:
    """The steps that a tracker has, as text for messages."""
    done = read_progress(process.state).done
    return f"it has {'no step' if done < 0 else f'the steps to {done:,}'}; --resume adds the others"
