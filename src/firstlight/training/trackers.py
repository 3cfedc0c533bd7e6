"""The trackers of a run: one process each, which follows the run's logs (`tracker_process.py`)."""

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

#: Seconds that a tracker has after a run's end, and those where it stores a checkpoint.
_SECONDS, _SECONDS_WITH_CHECKPOINT = 60.0, 900.0
#: Seconds after which a message names the awaited tracker.
_SECONDS_UNSAID = 3.0

_COMMAND = [sys.executable, "-P", "-m", "firstlight.training.tracker_process"]


def require_trackers(names: Sequence[str]) -> None:
    """Refuse `run.trackers` where the package of one is missing.

    Raises:
        MissingDependencyError: a tracker's package is not installed.
    """
    for name in names:
        if name == "tensorboard":
            require_tensorboard()
        elif importlib.util.find_spec(name) is None:
            raise MissingDependencyError(name, name, f"run.trackers: {name}")


def destination(name: str, folder: Path) -> str:
    """The place that a tracker writes to, for a person, and how to see it."""
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
    """The process of one tracker."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], *, is_new: bool) -> None:
        self.name, self._folder = name, folder / TRACKERS_NAME
        self.state = self._folder / f"{name}.jsonl"
        if is_new:
            remove_file(self.state)
        self._log = self._folder / f"{name}.log"
        # The log is an earlier process's: its last line would be taken for this one's error.
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
                # Ctrl-C is for the run: its last steps are still to be handed over.
                start_new_session=True,
            )
        self._send(dataclasses.asdict(order))
        self.is_over = False

    def failure(self) -> str | None:
        """The error that has ended the process, told once; None without one."""
        if self.is_over or self._process.poll() is None:
            return None
        self.is_over = True
        return self._said() if self._process.returncode else None

    def end(self, ending: Ending) -> None:
        """Tell the process that the run is over."""
        self._send(dataclasses.asdict(ending))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """True if the process ends within this number of seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process, and those that its library has started."""
        with contextlib.suppress(ProcessLookupError):
            # The group: a library's own processes would live on and hold the log open.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, values: object) -> None:
        assert self._process.stdin is not None
        # One that has failed reads nothing; `failure` says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()

    def _said(self) -> str:
        """The last line that the process wrote."""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""


class Trackers:
    """The trackers of a run that need their own library. A context; at its end each has taken all
    steps, or is given up after a time.

    Args:
        names: the trackers; none in all processes of a run but the main one.
        folder: the run folder, with its logs.
        config: the resolved recipe.
        tell: called with each message for people.
        is_new: the run starts with its first step: the trackers begin new runs.
        with_checkpoint: the trackers store the run's last checkpoint.
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
        # TensorBoard's file is written with the run's own logs.
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
                # A tracker never ends a run: the run's own logs have all that it shows.
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
            # All are told before one is waited for: they finish side by side.
            process.end(Ending(error is not None, reports, checkpoint))
        for process in self._processes:
            self._finish(process)

    def give_checkpoint(self, checkpoint: Path) -> None:
        """Have the trackers store the run's last checkpoint, where the recipe says so."""
        if self._with_checkpoint:
            self._checkpoint = checkpoint

    def check(self) -> None:
        """Say which trackers have failed, each once."""
        for process in self._processes:
            if (said := process.failure()) is not None:
                self._tell(f"warning: {process.name} has failed: {said} ({_has(process)})")

    def _finish(self, process: _TrackerProcess) -> None:
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
    """The steps that a tracker has, for people."""
    done = read_progress(process.state).done
    return f"it has {'no step' if done < 0 else f'the steps to {done:,}'}; --resume adds the others"
