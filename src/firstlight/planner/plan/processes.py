"""Plans traced in two processes at a time.

Tracing is Python alone, so one process uses one core. The workers are forks of a process that has
imported torch while this one did.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import multiprocessing.reduction
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from firstlight.errors import TrainingError

if TYPE_CHECKING:
    from firstlight.hardware.device import Hardware
    from firstlight.recipe import Recipe
    from firstlight.training.forecast import Forecast

T = TypeVar("T")

#: More gain little: the search needs one answer to ask the next candidate.
_COUNT = 2

#: Python takes some tenths of a second to end.
_ENDING_SECONDS = 1.0

#: Modules that the process imports which workers are forked from.
PRELOADED = ["firstlight.planner.plan.preloaded"]

_KILLED = (
    "a process that traced the model was killed, most likely for want of memory: end other "
    "programs, or plan a smaller model"
)


class WorkerProcesses:
    """Runs functions in worker processes, or in this process.

    Args:
        start: starts the processes, when they are first needed, and returns them by the ends of the
            pipes to them; none is here, one after the other.
    """

    def __init__(self, start: Callable[[], Mapping[Connection, BaseProcess]] = dict) -> None:
        self._start = start
        #: The task of each busy worker, by the number of the call.
        self._busy: dict[Connection, int] = {}
        self._calls = 0

    @functools.cached_property
    def _ends(self) -> Mapping[Connection, BaseProcess]:
        return self._start()

    def map(self, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """A function's results, in the order of its arguments, as they come.

        Args:
            function: a function of a module.
            arguments: the arguments of each call; they have to be picklable.

        Raises:
            TrainingError: a process was killed or crashed. An exception of the function is raised
                here.
        """
        # A single call goes there, too: a crash must not end this process.
        if not self._ends:
            yield from (function(*one) for one in arguments)
            return
        first = self._calls
        self._calls += len(arguments)
        waiting = list(enumerate(arguments, first))[::-1]
        found: dict[int, tuple[bool, Any]] = {}
        for number in range(first, self._calls):
            while number not in found:
                for end in self._ends:
                    if waiting and end not in self._busy:
                        self._busy[end], one = waiting.pop()
                        try:
                            end.send((function, one))
                        except (BrokenPipeError, ConnectionResetError):
                            raise self._gone(end) from None
                # Among them may be results of a call that nobody waits for any more.
                found.update(self._results())
            good, result = found.pop(number)
            if not good:
                raise result
            yield result

    def _results(self) -> Iterator[tuple[int, tuple[bool, Any]]]:
        for end in wait(list(self._busy)):
            assert isinstance(end, Connection)
            try:
                yield self._busy.pop(end), end.recv()
            except (EOFError, ConnectionResetError):
                raise self._gone(end) from None

    def _gone(self, end: Connection) -> TrainingError:
        """The error for a process that has ended."""
        process = self._ends[end]
        process.join(_ENDING_SECONDS)
        code = process.exitcode
        if code is None or code == -signal.SIGKILL:
            return TrainingError(_KILLED)
        return TrainingError(
            f"a process that traced the model {_ending(code)}: a library that the recipe's methods "
            "use has crashed; nothing can be predicted for them (a run starts without a prediction)"
        )


@contextlib.contextmanager
def started() -> Iterator[WorkerProcesses]:
    """Workers, which import while this process does. Ended when the block is left, however."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # To start a process would be to wait until that has imported.
    forkserver.ensure_running()
    processes: dict[Connection, BaseProcess] = {}

    def start() -> Mapping[Connection, BaseProcess]:
        for _ in range(_COUNT):
            here, there = context.Pipe()
            processes[here] = process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            # So that the pipe ends when the process does.
            there.close()
        return processes

    try:
        yield WorkerProcesses(start)
    finally:
        for end in processes:
            end.close()
        # An idle worker ends by itself, and cleans up; one that still works is ended.
        end_by = time.monotonic() + _ENDING_SECONDS
        try:
            for process in processes.values():
                process.join(max(end_by - time.monotonic(), 0.0))
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _work(end: Connection) -> None:
    """Answer calls until there is nobody who asks."""
    # Ctrl-C is for the process that asks, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch's warnings about code that is only traced are of no use to people.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    gc.disable()
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = end.recv()
            # The garbage of the last call: collecting it earlier would have delayed its answer.
            gc.collect(0)
            try:
                answer = (True, function(*arguments))
            except Exception as error:  # noqa: BLE001
                answer = (False, _sendable(error))
            end.send(answer)


def _sendable(error: Exception) -> Exception:
    """The error, or an error with its text if it can't be sent."""
    try:
        sent = multiprocessing.reduction.ForkingPickler.dumps(error)
        multiprocessing.reduction.ForkingPickler.loads(sent)
    except Exception:  # noqa: BLE001  (what an object that can't be sent raises is its own choice)
        return TrainingError(f"{type(error).__name__}: {error}")
    return error


_COMMAND = [sys.executable, "-P", "-m", "firstlight.planner.plan.automatic"]

#: The most that a run waits for a forecast.
_MOST_SECONDS = 90.0


class RunForecaster:
    """Predicts the runs of this machine; see `training.forecast.Forecaster`. A context that ends
    the process with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RunForecaster:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> None:
        """Start the process ahead of the first candidate."""
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        """See `Forecaster`.

        Raises:
            TrainingError: the process failed, or took too long.
        """
        from firstlight.training.forecast import Forecast

        found = self._ask("forecast", recipe, hardware, processes)
        if found is None:
            return None
        rates = found["tokens_per_second"]
        return Forecast(**{**found, "tokens_per_second": tuple(rates) if rates else None})

    def advise(self, recipe: Recipe, hardware: Hardware, processes: int) -> str | None:
        """See `Forecaster`.

        Raises:
            TrainingError: the process failed, or took too long.
        """
        found = self._ask("advice", recipe, hardware, processes)
        return None if found is None else str(found)

    def _ask(self, what: str, recipe: Recipe, hardware: Hardware, processes: int) -> Any:
        """The answer, as JSON values. The process ends with it."""
        request = {
            "what": what,
            "recipe": recipe.model_dump(mode="json"),
            "device": str(hardware.device),
            "processes": processes,
        }
        # Other processes wait for this one, and take it for gone after their timeout.
        patience = min(_MOST_SECONDS, recipe.distributed.timeout_seconds / 2)
        if self._process is None:
            self.start()
        assert self._process is not None
        try:
            said, _ = self._process.communicate(json.dumps(request), timeout=patience)
            code = self._process.returncode
        except subprocess.TimeoutExpired:
            raise TrainingError(
                f"the process that predicts took more than {patience:.0f} s"
            ) from None
        finally:
            self._end()
        if code != 0:
            raise TrainingError(f"the process that predicts {_ending(code)}")
        # Libraries may print as well: the answer is the last line.
        return json.loads(said.splitlines()[-1])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was to be written has no reader now
                    pipe.close()
        process.wait()


def _ending(code: int) -> str:
    if code > 0:
        return f"failed (exit code {code})"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
