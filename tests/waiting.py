"""Waiting for an event of another process or thread, which a test can't be told of."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

T = TypeVar("T")

#: Seconds: on busy cores a process may take minutes to start.
PATIENCE_SECONDS = 300.0


def wait_until(event: str, look: Callable[[], T], is_it: Callable[[T], bool] = bool) -> T:
    """Look until what is seen is what is waited for; return that.

    Args:
        event: the event, for the error.
        look: what can be seen now. It raises if the event can't come any more.
        is_it: whether that is it.

    Raises:
        AssertionError: it did not come; says what was waited for and what was seen last.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_it(seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {PATIENCE_SECONDS:.0f} s for {event}; seen last: {seen!r}"
            )
        threading.Event().wait(0.02)
    return seen


def processes_waited_for(error: BaseException) -> Iterator[str]:
    """Describe the processes that a test knew when its time was over.

    Args:
        error: the error, with the frames of the wait in its traceback.

    Yields:
        The command, whether it runs, and the end of its output so far, of each
        `subprocess.Popen` in a local variable of a frame or in an attribute of one.
    """
    seen: dict[int, subprocess.Popen[Any]] = {}
    trace = error.__traceback__
    while trace is not None:
        for value in _values_in(trace.tb_frame):
            if isinstance(value, subprocess.Popen) and hasattr(value, "returncode"):
                seen.setdefault(id(value), value)
        trace = trace.tb_next
    for process in seen.values():
        state = "it runs" if process.poll() is None else f"it ended with {process.returncode}"
        # Bytes that an unfinished `communicate` has read lie in an attribute of no public name.
        read = getattr(process, "_fileobj2output", {})
        said = {
            name: b"".join(read.get(pipe, ())) + _unread(pipe)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
            if pipe is not None
        }
        yield f"waited for {process.args!r}: {state}; seen last:" + "".join(
            f"\n{name}: {text[-4000:].decode(errors='replace')}" for name, text in said.items()
        )


def _values_in(frame: types.FrameType) -> Iterator[Any]:
    """Local variables, and the attributes of each."""
    for value in list(frame.f_locals.values()):
        yield value
        if not isinstance(value, type | types.ModuleType):
            yield from list(getattr(value, "__dict__", {}).values())


def _unread(pipe: IO[Any]) -> bytes:
    """Bytes that a pipe holds now."""
    found = b""
    if not pipe.closed:
        # A process that writes faster than it is read must not keep the test from ending.
        while len(found) < 2**20 and select.select([pipe], [], [], 0)[0]:
            if not (piece := os.read(pipe.fileno(), 65536)):
                break
            found += piece
    return found
