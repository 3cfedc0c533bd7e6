"""The processes of a run: how they meet, the work of the main one, and how they stop early and in
order: by a signal, or when the time is over."""

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
from firstlight.efficiency import require_same_bits
from firstlight.hardware.device import Hardware, find_hardware
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
from firstlight.parallel.selection import make_engine
from firstlight.recipe import Recipe

T = TypeVar("T")


@contextlib.contextmanager
def run_processes(recipe: Recipe) -> Iterator[tuple[Hardware, Engine]]:
    """Meet the other processes of the run that this one was started for, if there are any.

    Args:
        recipe: recipe of the run, the same in all processes.

    Yields:
        (hardware of this process, engine by which the processes share the model).

    Raises:
        ConfigError: the processes are not those of one run, or the engine is not for them.
        RankError: a rank did not connect, failed, or is gone.
    """
    world = find_world()
    with contextlib.ExitStack() as stack:
        if world.size == 1:
            hardware = find_hardware(recipe.run.device)
            if hardware.device.type == "cuda":
                # Else what asks for no device by number would begin on the first GPU, too.
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
    """The hardware of this process, once all processes of the run have met."""
    name = recipe.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_device(world, name)
    if device.type == "cuda":
        # Before the process group: NCCL takes the current device, and all would take the first one.
        torch.cuda.set_device(device)
    # Processes with different recipes would wait for each other in different operations.
    text = json.dumps(recipe.model_dump(), sort_keys=True)
    with process_group(
        world,
        device,
        recipe.distributed.timeout_seconds,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    ):
        yield find_hardware(str(device))


def on_main(engine: Engine, compute: Callable[[], T]) -> T:
    """The main process' result, a JSON value, on all processes."""
    result: T = broadcast_object(compute() if engine.is_main else None)
    return result


def wait_for_main(engine: Engine, act: Callable[[], None]) -> None:
    """Have the main process do something, and all go on once it is done."""
    if engine.is_main:
        act()
    barrier()


def first_reason(reason: str | None) -> str | None:
    """The reason to stop of the first process that has one, on all."""
    # A flag first: texts are gathered only in the step that ends the run, and steps are many.
    if not agree(reason is not None):
        return None
    return next((one for one in gather_objects(reason) if one is not None), None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

#: A file of this name in the run folder asks for a checkpoint; it is deleted once that is there.
SAVE_NOW_NAME = "save-now"


class StopRequestedError(Exception):
    """Ends an evaluation that is not done when the run is to stop."""


class Stopping:
    """The reasons to end a run early. A context: the signals' handlers are put back at its end.

    Until `watch` is called, signals have their former effect, and time does not count.

    Args:
        max_minutes: minutes since this object was made; None is no limit.
        shown: tell a person, on stderr, that a signal has been heard.
    """

    def __init__(self, max_minutes: float | None, *, shown: bool = False) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._shown = shown
        self._signal: str | None = None
        self._before: dict[int, Any] = {}
        self._watching = False
        self._early: str | None = None

    def __enter__(self) -> Stopping:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # None: a handler that Python did not set and could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._put_back()

    def watch(self) -> None:
        """From here on SIGTERM, SIGINT, SIGUSR1 and SIGHUP only ask to stop; a second one has its
        former effect. A signal that is ignored (nohup) stays ignored. Signals are Python's main
        thread's: in another, only time counts.

        To be called when a step is done: what ends before that has lost nothing, and with a
        limit of time every run gets on by one step at least.
        """
        if self._watching:
            return
        self._watching, self._early = True, self._signal

    @property
    def reason(self) -> str | None:
        """Reason to stop: a signal's name or "max_minutes"; None without a reason."""
        if self._signal is not None:
            return self._signal
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return "max_minutes" if self._watching and late else None

    def check(self) -> None:
        """Raise if there is a reason to stop.

        Raises:
            StopRequestedError: there is.
        """
        if self.reason is not None:
            raise StopRequestedError

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._watching:
            # Noted, because an exception raised now may be swallowed, for example by a destructor.
            self._signal = name
            self._do(self._before[number], number, frame)
            return
        if name == self._early:
            # The one that came before, once more.
            self._early = None
            return
        if self._signal is None:
            self._signal = name
            if self._shown:
                # Python's own streams can't be written to while they are being written to.
                try:
                    os.write(2, b"\nfinishing the step and saving; once more to stop at once\n")
                except OSError:  # the terminal has gone
                    silence()
            return
        # The second signal has its former effect, which may be to end the process at once.
        before = self._before[number]
        self._put_back()
        self._do(before, number, frame)

    def _do(self, before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        else:
            self._put_back()
            os.kill(os.getpid(), number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
