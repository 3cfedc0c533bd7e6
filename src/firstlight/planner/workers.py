"""Plans traced in two processes at a time.

Tracing is Python alone, so one process uses one core. The workers are forks of a process that has
imported torch while this one did.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import Pool
from typing import Any, TypeVar

T = TypeVar("T")

#: More gain little: the search needs one answer to ask the next question.
_COUNT = 2

_PRELOADED = ["firstlight.planner.recipes", "torch._dynamo"]


class Workers:
    """Runs functions in processes of its own, or here.

    Args:
        pool: None is here, one after the other.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool

    def map(self, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """A function's results, in the order of its arguments, as they come.

        Args:
            function: of a module.
            arguments: for each call, what can be sent to another process.
        """
        if self._pool is None or len(arguments) < 2:
            yield from (function(*one) for one in arguments)
            return
        waiting = [self._pool.apply_async(function, one) for one in arguments]
        yield from (one.get() for one in waiting)


@contextlib.contextmanager
def started() -> Iterator[Workers]:
    """Workers; they import while this process does. Ended when the block is left, however."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pool = context.Pool(_COUNT, _be_quiet)
    try:
        yield Workers(pool)
    finally:
        pool.terminate()
        pool.join()


def _be_quiet() -> None:
    """What torch has to say of code that is only looked at is nobody's business."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
