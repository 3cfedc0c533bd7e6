"""Coordinate the processes of a run. This module connects the processes, calls functions only in
the main process, and ends a run early, but in an orderly way, on a signal or at a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from firstlight.console import silence
from firstlight.errors import RunReplacedError
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.methods import require_same_bits
from firstlight.parallel import (
    World,
    agree,
    barrier,
    broadcast_object,
    find_world,
    gather_objects,
    own_device,
    process_group,
)
from firstlight.parallel.engine import Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe import Recipe

T = TypeVar("T")


@contextlib.contextmanager
def run_processes(recipe: Recipe) -> Iterator[tuple[Hardware, Engine]]:
    """Create the process group of the run if there are several processes, and destroy it on exit.

    Args:
        recipe: recipe of the run, which must be the same in all processes.

    Yields: The hardware of this process, and the engine that connects the processes.

    Raises:
        ConfigError: the processes have different recipes, or the engine does not support their
            number or device.
        RankError: a rank did not connect, failed or disappeared.
    """
    world = find_world()
    with contextlib.ExitStack() as stack:
        if world.size == 1:
            hardware = find_hardware(recipe.run.device)
            if hardware.device.type == "cuda":
                # Without this call, code that does not select a GPU would also use memory on the
                # first GPU.
                stack.enter_context(torch.cuda.device(hardware.device))
        else:
            hardware = stack.enter_context(_join_others(recipe, world))
        if recipe.run.deterministic:
            require_same_bits(hardware)
        engine = make_engine(recipe.distributed, world, hardware.device)
        stack.enter_context(engine.session())
        yield hardware, engine


@contextlib.contextmanager
def _join_others(recipe: Recipe, world: World) -> Iterator[Hardware]:
    """Create the process group of several processes, and yield the hardware of this process."""
    name = recipe.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_device(world, name)
    if device.type == "cuda":
        # Set the device before creating the process group, because NCCL uses the current device,
        # which is the first GPU by default.
        torch.cuda.set_device(device)
    # Check that all processes have the same recipe. Otherwise, they would wait for each other in
    # different collective operations.
    text = json.dumps(recipe.model_dump(), sort_keys=True)
    with process_group(
        world,
        device,
        recipe.distributed.timeout_seconds,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    ):
        yield find_hardware(str(device))


def on_main(engine: Engine, compute: Callable[[], T]) -> T:
    """Call a function only in the main process and return its result in all processes. The result
    must be a JSON value. This is a collective operation.
    """
    result: T = broadcast_object(compute() if engine.is_main else None)
    return result


def wait_for_main(engine: Engine, act: Callable[[], None]) -> None:
    """Call a function only in the main process. All processes return after the function has
    finished. This is a collective operation.
    """
    if engine.is_main:
        act()
    barrier()


def first_reason(reason: str | None) -> str | None:
    """Return the stop reason of the first process that has one, or None. All processes get the same
    result. This is a collective operation.
    """
    # Exchange a flag first. This function is called in every step, but the text of the reason is
    # needed only in the last step.
    if not agree(reason is not None):
        return None
    return next((one for one in gather_objects(reason) if one is not None), None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

#: A file with this name in the run folder requests a checkpoint. It is deleted when the checkpoint
#: is written.
SAVE_NOW_NAME = "save-now"


class StopRequestedError(Exception):
    """Raised to end an unfinished evaluation when the run must stop."""


class Stopping:
    """Handles requests to end a run early, which come from a signal or a time limit. Used as a
    context manager, it restores the previous signal handlers on exit.

    Until `watch` is called, signals are handled as they were before this object was created, and
    the time limit is ignored.

    Args:
        max_minutes: time limit in minutes from the creation of this object; None means no limit.
        shown: True to print a message to stderr when a signal is received.

    Attributes:
        signal: name of the received signal, or None.
    """

    def __init__(self, max_minutes: float | None, *, shown: bool = False) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._shown = shown
        self.signal: str | None = None
        self._before: dict[int, Any] = {}
        self._watching = False
        self._early: str | None = None

    def __enter__(self) -> Stopping:
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # The value is None if the handler was not set from Python. Python can't restore
                # such a handler.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        is_handled = bool(self._before)
        self._put_back()
        # If a signal arrived after the training loop last checked for one, raise it again. It then
        # ends the program, which might otherwise start another run.
        if isinstance(error, RunReplacedError) and is_handled and self.signal:
            signal.raise_signal(signal.Signals[self.signal])

    def watch(self) -> None:
        """Start treating SIGTERM, SIGINT, SIGUSR1 and SIGHUP as requests to stop, and start
        applying the time limit. A second signal is handled as it was before this object was
        created. A signal that was ignored (nohup) remains ignored. Outside Python's main thread,
        only the time limit applies.

        Call this after the first complete step. A run that ends earlier has nothing to save, and
        every run completes at least one step even with a time limit.
        """
        if self._watching:
            return
        self._watching, self._early = True, self.signal

    @property
    def reason(self) -> str | None:
        """Reason to stop, which is the name of a signal or "max_minutes", or None if there is no
        reason.
        """
        if self.signal is not None:
            return self.signal
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return "max_minutes" if self._watching and late else None

    def check(self) -> None:
        """Raise an error if there is a reason to stop.

        Raises:
            StopRequestedError: there is a reason to stop.
        """
        if self.reason is not None:
            raise StopRequestedError

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handle one of the signals listed in `watch`."""
        name = signal.Signals(number).name
        if not self._watching:
            # Record the signal, because an exception raised by the previous handler may be
            # swallowed, for example in a destructor.
            self.signal = name
            self._do(self._before[number], number, frame)
            return
        if name == self._early:
            # A signal that was recorded before `watch` was called is delivered again. Do not treat
            # it as a second signal.
            self._early = None
            return
        if self.signal is None:
            self.signal = name
            if self._shown:
                # Do not use print, because Python's streams do not allow re-entrant writes.
                try:
                    os.write(2, b"\nfinishing the step and saving; once more to stop at once\n")
                except OSError:  # The terminal was closed.
                    silence()
            return
        # Handle the second signal as it was handled before this object was created, which may end
        # the process immediately.
        before = self._before[number]
        self._put_back()
        self._do(before, number, frame)

    def _do(self, before: Any, number: int, frame: FrameType | None) -> None:
        """Handle a signal as it was handled before this object replaced its handler."""
        if callable(before):
            before(number, frame)
        else:
            self._put_back()
            os.kill(os.getpid(), number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
