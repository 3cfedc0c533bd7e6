"""The process that passes a run's metrics on to one tracker: `python -m` this module.

The training process sends one line of JSON (`Order`) at the start and one (`Ending`) at the end.
The metrics are read from the run's logs. So a tracker takes no time, memory or interpreter lock of
the training process, and a tracker that hangs can be killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from firstlight.report.records import LineFollower, StepFollower
from firstlight.training.tracker_libraries import LIBRARIES, Step, Tracker

#: Seconds between two readings of the run's logs.
_SECONDS_BETWEEN = 1.0
#: Increase of the process' niceness, so that training has priority on the processors.
_NICENESS = 10
#: Most steps in one call of `Tracker.write`.
_STEPS_AT_ONCE = 50


@dataclass(frozen=True)
class Order:
    """The settings of a tracker's process.

    Attributes:
        name: name of the tracker, as in `run.trackers`.
        folder: the run folder.
        state: file in which the process records its progress, one JSON object a line with fields of
            `TrackerProgress`.
        metrics, samples: files of the run's logs.
        config: the resolved recipe.
    """

    name: str
    folder: str
    state: str
    metrics: str
    samples: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Ending:
    """The end of a run: its outcome and files.

    Attributes:
        failed: True if the run ended with an error.
        files: reports of the run.
        checkpoint: folder of the checkpoint that the tracker is to store; None for none.
    """

    failed: bool = False
    files: list[str] = field(default_factory=list)
    checkpoint: str | None = None


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
    """The progress in a tracker's state file."""
    follower, found = LineFollower(path), TrackerProgress()
    for line in follower.new()[0]:
        found = dataclasses.replace(found, **{k: v for k, v in line.items() if k in _KEYS})
    follower.close()
    return found


_KEYS = {one.name for one in dataclasses.fields(TrackerProgress)}


def pass_on(order: Order, tracker: Tracker, ending: Callable[[], Ending | None]) -> None:
    """Write a run's steps to a tracker until the run ends.

    Steps that the tracker has already are left out, since a resumed run does the steps after its
    checkpoint again. So no step is in a tracker twice.

    Args:
        order: the run and its files.
        tracker: the tracker, not open yet.
        ending: function that waits a moment and returns the run's end; None while the run goes on.

    Raises:
        Exception: whatever the tracker raises.
    """
    follower = StepFollower(Path(order.metrics), Path(order.samples))
    with contextlib.closing(follower), open(order.state, "ab", buffering=0) as state:
        # The process of a run that was killed may still be writing its last steps.
        fcntl.flock(state, fcntl.LOCK_EX)
        progress = read_progress(Path(order.state))
        run_id = tracker.open(progress.run_id, Path(order.folder), order.config)
        _note(state, run_id=run_id)
        begun, end = progress.begun, None
        while end is None:
            end = ending()
            for steps in _parts(follower.new(), begun):
                begun = steps[-1][0]["step"]
                # Noted before the steps are written: if this process is killed in between, these
                # steps are missing in the tracker, but none is in it twice.
                _note(state, begun=begun)
                tracker.write(steps)
                _note(state, done=begun)
        files = [Path(path) for path in end.files if Path(path).is_file()]
        checkpoint = None if end.checkpoint is None else Path(end.checkpoint)
        tracker.close(files, checkpoint, failed=end.failed)


def _note(state: FileIO, **values: object) -> None:
    state.write(json.dumps(values).encode() + b"\n")


def _parts(steps: Sequence[Step], begun: int) -> Iterator[list[Step]]:
    """The steps after `begun`, without any that do not rise, in lists of at most 50."""
    rising: list[Step] = []
    for step in steps:
        if step[0]["step"] > begun:
            rising.append(step)
            begun = step[0]["step"]
    for start in range(0, len(rising), _STEPS_AT_ONCE):
        yield rising[start : start + _STEPS_AT_ONCE]


def ending_of(stream: FileIO) -> Ending | None:
    """Wait a moment for the line of the run's `Ending`; None if none has come. If the stream ends
    without it, the run was killed, which counts as failed."""
    ready, _, _ = select.select([stream], [], [], _SECONDS_BETWEEN)
    if not ready:
        return None
    line = stream.readline()
    return Ending(**json.loads(line)) if line.endswith(b"\n") else Ending(failed=True)


def main() -> None:
    """Follow the run of the `Order` in the first line of stdin."""
    os.nice(_NICENESS)
    stream = FileIO(0, "rb")
    order = Order(**json.loads(stream.readline()))
    pass_on(order, LIBRARIES[order.name](), lambda: ending_of(stream))


if __name__ == "__main__":
    main()
