"""The trackers of a run. Each has a thread that follows the run's logs and passes the new steps on
to the client of the tracker's library (`tracker_libraries.py`).

The logs are the queue between the training loop and the trackers: the loop never waits for a
tracker, and a slow tracker loses no step. A tracker that fails is reported once and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from firstlight.errors import MissingDependencyError
from firstlight.run_log.names import HTML_NAME, METRICS_NAME, REPORT_NAME, SAMPLES_NAME
from firstlight.run_log.reader import LineFollower, StepFollower
from firstlight.training.tracker_libraries import LIBRARIES, Step, Tracker

TRACKERS_NAME = "trackers"

#: Seconds after a run's end in which a tracker has to end, without and with a checkpoint to store.
_SECONDS, _SECONDS_WITH_CHECKPOINT = 60.0, 900.0
#: Seconds of waiting for a tracker after which a message says so.
_SECONDS_UNSAID = 3.0
#: Seconds between two readings of the run's logs.
_SECONDS_BETWEEN = 1.0
#: Most steps in one call of `Tracker.write`.
_STEPS_AT_ONCE = 50
#: Most characters of an error in a message.
_MAX_ERROR = 500

#: Names of the trackers that were still running when their run ended. Exit hooks and threads of
#: their libraries may hang, too: the command line ends this process without waiting for them.
GIVEN_UP: set[str] = set()


def require_trackers(names: Sequence[str]) -> None:
    """Require that the packages of all trackers in `run.trackers` are installed.

    Raises:
        MissingDependencyError: a tracker's package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            extra = "dash" if name == "tensorboard" else name
            raise MissingDependencyError(name, extra, f"run.trackers: {name}")


def destination(name: str, folder: Path) -> str:
    """The place to which a tracker writes, and how to see it, as text for messages."""
    env = os.environ.get
    if name == "tensorboard":
        return f"{folder / 'tensorboard'} (tensorboard --logdir {folder})"
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


@dataclass(frozen=True)
class TrackerProgress:
    """The progress of a tracker with a run.

    Attributes:
        run_id: the tracker's id of the run; None before the run is opened.
        begun: last step that was about to be written to the tracker; -1 without any.
        done: last step that was written to the tracker; -1 without any.
    """

    run_id: str | None = None
    begun: int = -1
    done: int = -1


def read_progress(path: Path) -> TrackerProgress:
    """The progress in a tracker's state file, which has an object with fields of `TrackerProgress`
    on each line."""
    follower, found = LineFollower(path), TrackerProgress()
    for line in follower.new()[0]:
        found = dataclasses.replace(found, **{k: v for k, v in line.items() if k in _KEYS})
    follower.close()
    return found


_KEYS = {one.name for one in dataclasses.fields(TrackerProgress)}


class _TrackerThread(threading.Thread):
    """Follows the logs of a run for one tracker. A daemon, so that Python does not wait for this
    thread if the tracker hangs; for exit hooks and threads of its library, see `GIVEN_UP`.

    Args:
        name: name of the tracker, as in `run.trackers`.
        folder: the run folder.
        config: the resolved recipe.
        is_new: True to begin a new run in the tracker; False to resume the recorded one.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], *, is_new: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.state = folder / TRACKERS_NAME / f"{name}.jsonl"
        self.error: str | None = None
        self.checkpoint: Path | None = None
        self.has_failed_run = False
        self.run_is_over = threading.Event()
        self._folder = folder
        self._config = config
        self._is_new = is_new

    def run(self) -> None:
        """Pass on the run's steps until `run_is_over`; set `error` if the tracker fails."""
        try:
            self._follow(LIBRARIES[self.name]())
        except BaseException as error:  # noqa: BLE001 -- a tracker must not end the run
            text = " ".join(str(error).split())[:_MAX_ERROR]
            self.error = f"{type(error).__name__}: {text}" if text else type(error).__name__

    def _follow(self, tracker: Tracker) -> None:
        folder = self._folder.resolve()
        follower = StepFollower(folder / METRICS_NAME, folder / SAMPLES_NAME)
        self.state.parent.mkdir(exist_ok=True)
        if self._is_new:
            self.state.unlink(missing_ok=True)
        with contextlib.closing(follower), open(self.state, "ab", buffering=0) as state:
            progress = read_progress(self.state)
            run_id = tracker.open(progress.run_id, folder, self._config)
            _note(state, run_id=run_id)
            begun = -1 if tracker.is_mirror else progress.begun
            is_over = False
            while not is_over:
                is_over = self.run_is_over.wait(_SECONDS_BETWEEN)
                steps = follower.new()
                if tracker.is_mirror and steps and steps[0][0]["step"] <= begun:
                    # The logs were rewritten, because the run went back to a checkpoint.
                    tracker.open(run_id, folder, self._config)
                    begun = -1
                for part in _parts(steps, begun):
                    begun = part[-1][0]["step"]
                    # Noted before the steps are written: if this process is killed in between,
                    # these steps are missing in the tracker, but none is in it twice.
                    _note(state, begun=begun)
                    tracker.write(part)
                    _note(state, done=begun)
            files = [path for name in (HTML_NAME, REPORT_NAME) if (path := folder / name).is_file()]
            tracker.close(files, self.checkpoint, failed=self.has_failed_run)


def _note(state: FileIO, **values: object) -> None:
    state.write(json.dumps(values).encode() + b"\n")


def _parts(steps: Sequence[Step], begun: int) -> Iterator[list[Step]]:
    """The steps after `begun`, without any that do not rise, in lists of at most 50. A resumed run
    does the steps after its checkpoint again: they are left out, so that no step is in a tracker
    twice."""
    rising: list[Step] = []
    for step in steps:
        if step[0]["step"] > begun:
            rising.append(step)
            begun = step[0]["step"]
    for start in range(0, len(rising), _STEPS_AT_ONCE):
        yield rising[start : start + _STEPS_AT_ONCE]


class _OwnStdout:
    """sys.stdout for the thread that makes this object. Other threads, in which the trackers'
    libraries print messages, write to stderr, so that these do not mix with results on stdout."""

    def __init__(self) -> None:
        self._stdout, self._owner = sys.stdout, threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        is_owner = threading.current_thread() is self._owner
        return getattr(self._stdout if is_owner else sys.stderr, name)


class Trackers:
    """The trackers of a run. A context manager: at its end it waits until each tracker has all
    steps, or gives it up after a time.

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
        self._folder = folder
        self._tell = tell
        self._with_checkpoint = with_checkpoint
        self._threads = [_TrackerThread(name, folder, config, is_new=is_new) for name in names]
        self._reported: set[str] = set()
        self._redirected = contextlib.ExitStack()

    def __enter__(self) -> Trackers:
        if self._threads:
            stdout: Any = _OwnStdout()
            self._redirected.enter_context(contextlib.redirect_stdout(stdout))
        for thread in self._threads:
            thread.start()
            self._tell(f"{thread.name}: {destination(thread.name, self._folder)}")
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.has_failed_run = error is not None
            # Before the first one is waited for, so that all finish at the same time.
            thread.run_is_over.set()
        with self._redirected:
            try:
                self._wait()
            finally:  # also if Ctrl-C ends the waiting
                GIVEN_UP.update(thread.name for thread in self._threads if thread.is_alive())

    def give_checkpoint(self, checkpoint: Path) -> None:
        """Set the checkpoint that the trackers store, if the recipe asks them to store one."""
        if self._with_checkpoint:
            for thread in self._threads:
                thread.checkpoint = checkpoint.resolve()

    def check(self) -> None:
        """Give a message for each tracker that has failed, once for each."""
        for thread in self._threads:
            if thread.error is not None and thread.name not in self._reported:
                self._reported.add(thread.name)
                self._tell(f"warning: {thread.name} has failed: {thread.error} ({_has(thread)})")

    def _wait(self) -> None:
        """Wait for the end of the trackers, and give up those that take too long."""
        with_checkpoint = any(thread.checkpoint is not None for thread in self._threads)
        limit = _SECONDS_WITH_CHECKPOINT if with_checkpoint else _SECONDS
        began = time.monotonic()
        if running := self._running_at(began + min(limit, _SECONDS_UNSAID)):
            names = ", ".join(thread.name for thread in running)
            self._tell(f"waiting for {names}, {limit:.0f} s at most")
        for thread in self._running_at(began + limit):
            self._reported.add(thread.name)
            self._tell(
                f"warning: {thread.name} has not ended after {limit:.0f} s and is given up "
                f"({_has(thread)})"
            )
        self.check()

    def _running_at(self, end: float) -> list[_TrackerThread]:
        """The trackers that are still running at a time; returns earlier if there is none."""
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return [thread for thread in self._threads if thread.is_alive()]


def _has(thread: _TrackerThread) -> str:
    """The steps that a tracker has, as text for messages."""
    done = read_progress(thread.state).done
    return f"it has {'no step' if done < 0 else f'the steps to {done:,}'}; --resume adds the others"
