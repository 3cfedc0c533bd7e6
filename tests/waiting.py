"""Waiting for an event of another process or thread, which a test can't be told of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

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
