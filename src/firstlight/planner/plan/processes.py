"""Manage the worker processes that trace models for plans, and the separate process that predicts a
run.

Tracing is pure Python, so each process uses one core. The workers are forked from a server process,
which imports torch while this process runs its own imports.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import multiprocessing
import multiprocessing.reduction
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from firstlight.errors import TrainingError
from firstlight.hardware import fresh_process

if TYPE_CHECKING:
    from firstlight.hardware.device import Hardware
    from firstlight.recipe import Recipe
    from firstlight.training.forecast import Forecast

T = TypeVar("T")

#: Number of workers. More workers would hardly be faster, because the search often requires one
#: result before it can choose the next candidate.
_COUNT = 2

#: Time in seconds that workers are given to exit on their own. Python takes a few tenths of a
#: second to exit.
_ENDING_SECONDS = 1.0

#: Modules that are imported in advance by the server process from which the workers are forked.
PRELOADED = ["torch._dynamo", "firstlight.planner.memory.recipe"]

_KILLED = (
    "a process that traced the model was killed, most likely because memory ran out: end other "
    "programs, or plan a smaller model"
)


class WorkerProcesses:
    """Runs functions in worker processes, or in this process.

    Args:
        start: function that starts the worker processes when they are first needed. It returns a
            mapping whose keys are this process's ends of the pipes and whose values are the worker
            processes. If the mapping is empty, all calls run in this process.
    """

    def __init__(self, start: Callable[[], Mapping[Connection, BaseProcess]] = dict) -> None:
        self._start = start
        #: For each busy worker, the number of the call that it is running.
        self._busy: dict[Connection, int] = {}
        self._calls = 0

    @functools.cached_property
    def _ends(self) -> Mapping[Connection, BaseProcess]:
        return self._start()

    def map(self, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """Call a function once for each entry in `arguments`, and yield the results in the same
        order as soon as they are available. An exception that the function raises in a worker is
        raised again in this process.

        Args:
            function: a function at the top level of a module.
            arguments: the arguments of each call, which must be picklable.

        Raises:
            TrainingError: a process was killed or crashed.
        """
        # Even a single call runs in a worker process, so that a crash does not end the main
        # process.
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
                # If the caller of an earlier `map` call stopped iterating, results of that call may
                # still arrive.
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
        """Return the error for a process that has ended."""
        process = self._ends[end]
        process.join(_ENDING_SECONDS)
        code = process.exitcode
        if code is None or code == -signal.SIGKILL:
            return TrainingError(_KILLED)
        return TrainingError(
            f"a process that traced the model {_ending(code)}: a library used by the recipe's "
            "methods crashed, so nothing can be predicted for them (training starts without a "
            "prediction)"
        )


@contextlib.contextmanager
def started() -> Iterator[WorkerProcesses]:
    """Start worker processes, which import modules in parallel with this process. They are stopped
    when the context exits, even after an exception."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Start only the fork server here, because starting a worker would wait for the server's imports
    # to finish.
    #
    # When a worker is killed, its semaphores are removed by the resource tracker, which shows a
    # warning that is useless to the user.
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = quiet if before is None else f"{before},{quiet}"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before
    processes: dict[Connection, BaseProcess] = {}

    def start() -> Mapping[Connection, BaseProcess]:
        for _ in range(_COUNT):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            # Add the process only after it has started, because a process whose start was
            # interrupted by a signal can't be joined. If such a process is running anyway, it exits
            # when this end of its pipe is closed.
            processes[here] = process
            # Close this process's copy of the worker's end of the pipe, so that the pipe is closed
            # when the worker exits.
            there.close()
        return processes

    try:
        yield WorkerProcesses(start)
    finally:
        for end in processes:
            end.close()
        # An idle worker cleans up and exits on its own. A worker that is still busy is killed.
        end_by = time.monotonic() + _ENDING_SECONDS
        try:
            for process in processes.values():
                process.join(max(end_by - time.monotonic(), 0.0))
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _work(end: Connection) -> None:
    """Run calls from the pipe and send their results, until the other end of the pipe is closed."""
    # Ctrl-C is handled by the parent process, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch's warnings about code that is only traced are useless to the user.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    gc.disable()
    # Exclude the imported objects from garbage collection. Otherwise, a collection would write to
    # their memory pages, which would then be copied.
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = end.recv()
            # Collect the garbage of the previous call only after its result has been sent, so that
            # sending is not delayed.
            gc.collect(0)
            try:
                answer = (True, function(*arguments))
            except Exception as error:  # noqa: BLE001
                answer = (False, _sendable(error))
            end.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return the error. If it can't be pickled, return a `TrainingError` with the same message."""
    try:
        sent = multiprocessing.reduction.ForkingPickler.dumps(error)
        multiprocessing.reduction.ForkingPickler.loads(sent)
    except Exception:  # noqa: BLE001  (an object that can't be sent may raise anything)
        return TrainingError(f"{type(error).__name__}: {error}")
    return error


#: Module that runs in the prediction process.
_PREDICTING = "firstlight.planner.plan.automatic"

#: Maximum time in seconds that a run waits for a forecast.
_MOST_SECONDS = 90.0


class RunForecaster:
    """Context manager that predicts the memory use and speed of runs on this machine in a separate
    process. It implements `training.forecast.Forecaster`. The process is stopped when the context
    exits."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RunForecaster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start the process in advance, so that it has already imported torch when it receives a
        request."""
        self._processes = self._stack.enter_context(
            fresh_process.started(_PREDICTING, [os.environ])
        )

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        """Return the forecast of a run; see `Forecaster.forecast`.

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
        """Return advice for a run that ran out of memory; see `Forecaster.advise`.

        Raises:
            TrainingError: the process failed, or took too long.
        """
        found = self._ask("advice", recipe, hardware, processes)
        return None if found is None else str(found)

    def _ask(self, what: str, recipe: Recipe, hardware: Hardware, processes: int) -> Any:
        """Send a request, stop the process once it has responded, and return the response as JSON
        values."""
        request = {
            "what": what,
            "recipe": recipe.model_dump(mode="json"),
            "device": str(hardware.device),
            "processes": processes,
        }
        # Limit the time, because the other processes of the run wait for this process and report a
        # failure after their timeout.
        patience = min(_MOST_SECONDS, recipe.distributed.timeout_seconds / 2)
        if not self._processes:
            self.start()
        try:
            (found,) = fresh_process.results_of(self._processes, request, patience)
        finally:
            self._processes = []
            self._stack.close()
        if "error" in found:
            raise TrainingError(f"the prediction process failed: {found['error']['message']}")
        return found["answer"]


def _ending(code: int) -> str:
    if code > 0:
        return f"failed (exit code {code})"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
