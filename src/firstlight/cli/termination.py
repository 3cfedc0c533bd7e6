"""Signals that end a command, as exceptions: everything unwinds, and nothing half-written stays."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: How the names of importlib's own files begin.
_IMPORT_MACHINERY = "<frozen importlib"

#: Seconds after which a signal that came in the middle of an import is looked at again.
_SOON = 0.001


class Terminated(BaseException):
    """A signal to end has come.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def cleaning_up_when_terminated() -> Iterator[None]:
    """Inside the block SIGTERM, SIGHUP and SIGUSR1 raise `Terminated`, SIGINT KeyboardInterrupt;
    one that is ignored (nohup) stays so. In another thread than the main one, nothing changes.

    A signal that comes in the middle of an import is raised after it: C++ code that imports
    swallows exceptions, and half a module would stay.
    """
    waiting: list[int] = []
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        # A timer that somebody else has set is left alone.
        if signal.SIGALRM in before and _is_importing(frame):
            waiting.append(number)
            signal.setitimer(signal.ITIMER_REAL, _SOON)
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    def again(_: int, __: FrameType | None) -> None:
        if waiting:
            # By whatever takes that signal by now.
            signal.raise_signal(waiting.pop())

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGUSR1: end,
        signal.SIGINT: end,
        signal.SIGALRM: again,
    }
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.SIGALRM in before:
            # A timer still running would end the process once its handler is gone.
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in before.items():
            signal.signal(number, previous)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False
