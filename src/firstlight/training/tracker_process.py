"""The process that passes a run's metrics on to one tracker: `python -m` this module.

The training process sends one line of JSON (`Order`) at the start and one (`Ending`) at the end;
all else is read from the run's own logs. So a tracker takes no time, memory or lock of the
interpreter from training, and one that hangs is killed.
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

from firstlight.report.follow import LineFollower, StepFollower
from firstlight.training.tracker_libraries import LIBRARIES, Step, Tracker

#: Seconds between two looks at the run's logs.
_SECONDS_BETWEEN = 1.0
#: The processor is for training first.
_NICENESS = 10
#: Most steps that are handed over at once.
_STEPS_AT_ONCE = 50


@dataclass(frozen=True)
class Order:
    """The order to a tracker's process.

    Attributes:
        name: name of the tracker, as in `run.trackers`.
        folder: the run folder.
        state: the file with the tracker's run id and the steps that it has, one JSON object a line.
        metrics, samples: logs of the run.
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
    """End of a run: its outcome and files.

    Attributes:
        failed: True if it ended in an error.
        files: reports of the run.
        checkpoint: folder of the checkpoint that the tracker is to store.
    """

    failed: bool = False
    files: list[str] = field(default_factory=list)
    checkpoint: str | None = None


@dataclass(frozen=True)
class TrackerProgress:
    """The state of a run in a tracker.

    Attributes:
        run_id: id of the tracker's run; None before there is one.
        begun: the last step that was handed over or was about to be; -1 without any.
        done: the last step that the tracker has taken; -1 without any.
    """

    run_id: str | None = None
    begun: int = -1
    done: int = -1


def read_progress(path: Path) -> TrackerProgress:
    """The progress that a tracker's file of state tells."""
    follower, found = LineFollower(path), TrackerProgress()
    for line in follower.new()[0]:
        found = dataclasses.replace(found, **{k: v for k, v in line.items() if k in _KEYS})
    follower.close()
    return found


_KEYS = {one.name for one in dataclasses.fields(TrackerProgress)}


def pass_on(order: Order, tracker: Tracker, ending: Callable[[], Ending | None]) -> None:
    """Hand a run's steps to a tracker until the run ends.

    Steps that the tracker already has are left out: a resumed run makes the steps after its
    checkpoint again, and a step is never in a tracker twice.

    Args:
        order: the run to follow, and the tracker to give it to.
        tracker: the tracker, not open yet.
        ending: waits a moment and returns the run's end; None while the run is active.

    Raises:
        Exception: whatever the tracker raises.
    """
    follower = StepFollower(Path(order.metrics), Path(order.samples))
    with contextlib.closing(follower), open(order.state, "ab", buffering=0) as state:
        # The process of a run that was killed may still be handing its last steps over.
        fcntl.flock(state, fcntl.LOCK_EX)
        progress = read_progress(Path(order.state))
        run_id = tracker.open(progress.run_id, Path(order.folder), order.config)
        _note(state, run_id=run_id)
        begun, end = progress.begun, None
        while end is None:
            end = ending()
            for steps in _parts(follower.new(), begun):
                begun = steps[-1][0]["step"]
                # Before: who is killed in between loses these steps, and doubles none.
                _note(state, begun=begun)
                tracker.write(steps)
                _note(state, done=begun)
        files = [Path(path) for path in end.files if Path(path).is_file()]
        checkpoint = None if end.checkpoint is None else Path(end.checkpoint)
        tracker.close(files, checkpoint, failed=end.failed)


def _note(state: FileIO, **values: object) -> None:
    state.write(json.dumps(values).encode() + b"\n")


def _parts(steps: Sequence[Step], begun: int) -> Iterator[list[Step]]:
    """The steps after `begun`, some at a time."""
    rising: list[Step] = []
    for step in steps:
        if step[0]["step"] > begun:
            rising.append(step)
            begun = step[0]["step"]
    for start in range(0, len(rising), _STEPS_AT_ONCE):
        yield rising[start : start + _STEPS_AT_ONCE]


def ending_of(stream: FileIO) -> Ending | None:
    """Wait a moment for the line that ends a run; None without one. A stream that ends without
    it is that of a run that was killed."""
    ready, _, _ = select.select([stream], [], [], _SECONDS_BETWEEN)
    if not ready:
        return None
    line = stream.readline()
    return Ending(**json.loads(line)) if line.endswith(b"\n") else Ending(failed=True)


def main() -> None:
    """Do as the first line of stdin orders."""
    os.nice(_NICENESS)
    stream = FileIO(0, "rb")
    order = Order(**json.loads(stream.readline()))
    pass_on(order, LIBRARIES[order.name](), lambda: ending_of(stream))


if __name__ == "__main__":
    main()
