"""Processes of a run: their rendezvous, work that only the main process does, and an early, orderly
stop on a signal or at a time limit.
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
        recipe: recipe of the run, the same in all processes.

    Yields:
        (hardware of this process, engine that connects the processes).

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
                # Otherwise code that does not select a GPU would also use memory on the first one.
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
    """Create the process group of several processes; yield the hardware of this process."""
    name = recipe.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_device(world, name)
    if device.type == "cuda":
        # Before the process group is created: NCCL uses the current device, by default the first
        # GPU.
        torch.cuda.set_device(device)
    # Processes with different recipes would wait for each other in different collective operations.
    text = json.dumps(recipe.model_dump(), sort_keys=True)
    with process_group(
        world,
        device,
        recipe.distributed.timeout_seconds,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    ):
        yield find_hardware(str(device))


def on_main(engine: Engine, compute: Callable[[], T]) -> T:
    """Call a function only in the main process, and return its result, a JSON value, in all
    processes. This is a collective operation.
    """
    result: T = broadcast_object(compute() if engine.is_main else None)
    return result


def wait_for_main(engine: Engine, act: Callable[[], None]) -> None:
    """Call a function only in the main process; return in all processes once it has finished. This
    is a collective operation.
    """
    if engine.is_main:
        act()
    barrier()


def first_reason(reason: str | None) -> str | None:
    """Return, in all processes, the stop reason of the first process that has one, or None. This is
    a collective operation.
    """
    # Exchange a flag first, because this runs in every step, and only the last step needs the text.
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
    """Reasons to end a run early: signals and a time limit. As a context manager, it restores the
    signal handlers.

    Until `watch` is called, signals have their previous effect, and the time limit is ignored.

    Args:
        max_minutes: time limit in minutes from the creation of this object; None means no limit.
        shown: True to report received signals on stderr.

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
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # None marks a handler that was not set from Python, which Python can't restore.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        is_handled = bool(self._before)
        self._put_back()
        # A signal that came too late for the training loop also ends the program that would start
        # the next run.
        if isinstance(error, RunReplacedError) and is_handled and self.signal:
            signal.raise_signal(signal.Signals[self.signal])

    def watch(self) -> None:
        """Start treating SIGTERM, SIGINT, SIGUSR1 and SIGHUP as requests to stop, and start
        applying the time limit. A second signal has its previous effect. An ignored signal (nohup)
        stays ignored. Outside Python's main thread, only the time limit applies.

        Call this once a step is complete: a run that ends earlier has nothing to save, and even
        with a time limit, every run completes at least one step.
        """
        if self._watching:
            return
        self._watching, self._early = True, self.signal

    @property
    def reason(self) -> str | None:
        """Reason to stop: a signal's name or "max_minutes", or None."""
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
        """Handle one of the four signals."""
        name = signal.Signals(number).name
        if not self._watching:
            # Recorded, because an exception raised by the previous handler may be swallowed, for
            # example in a destructor.
            self.signal = name
            self._do(self._before[number], number, frame)
            return
        if name == self._early:
            # The signal recorded before `watch` is delivered again and must not be treated as a
            # second one.
            self._early = None
            return
        if self.signal is None:
            self.signal = name
            if self._shown:
                # Not print, because Python's streams do not allow re-entrant writes.
                try:
                    os.write(2, b"\nfinishing the step and saving; once more to stop at once\n")
                except OSError:  # the terminal was closed
                    silence()
            return
        # The second signal has its previous effect, which may end the process at once.
        before = self._before[number]
        self._put_back()
        self._do(before, number, frame)

    def _do(self, before: Any, number: int, frame: FrameType | None) -> None:
        """Apply the previous effect of a signal."""
        if callable(before):
            before(number, frame)
        else:
            self._put_back()
            os.kill(os.getpid(), number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
