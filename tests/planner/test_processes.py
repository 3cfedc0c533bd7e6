"""Calling functions in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from firstlight.errors import ConfigError, MissingDependencyError, TrainingError
from firstlight.planner.plan import processes as workers
from firstlight.planner.plan.processes import WorkerProcesses
from worker_functions import cycles_alive, end_by, lacking, refused, squared, stubborn


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerProcesses]:
    with workers.started() as found:
        yield found


def test_worker_processes_return_results_in_argument_order(processes: WorkerProcesses) -> None:
    found = list(processes.map(squared, [(number,) for number in range(20)]))
    assert [square for square, _ in found] == [number * number for number in range(20)]
    ids = {process for _, process in found}
    assert len(ids) == 2
    assert os.getpid() not in ids


@pytest.mark.slow
def test_worker_processes_preload_imports_and_skip_exit_collection() -> None:
    script = """
import gc
from firstlight.planner.plan import processes as workers

with workers.started() as found:
    print(*found.map(gc.isenabled, [(), ()]))
    print(*(count > 100_000 for count in found.map(gc.get_freeze_count, [(), ()])))
"""
    # In a new process, because another test may have started the fork server of this one.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\nTrue True\n", 0)


def test_worker_processes_collect_garbage_before_next_call(processes: WorkerProcesses) -> None:
    assert list(processes.map(cycles_alive, [(number,) for number in range(9)])) == [1] * 9


def test_worker_processes_run_one_call_elsewhere_or_inline_without_processes(
    processes: WorkerProcesses,
) -> None:
    # A single call runs in a separate process, too: its crash must not affect this process.
    ((square, process),) = processes.map(squared, [(3,)])
    assert square == 9
    assert process != os.getpid()
    assert [process for _, process in WorkerProcesses().map(squared, [(1,), (2,)])] == [
        os.getpid()
    ] * 2


def test_worker_processes_raise_error_of_call_and_continue(
    processes: WorkerProcesses,
) -> None:
    results = processes.map(refused, [(0,), (1,), (0,)])
    assert next(results) == 0
    with pytest.raises(ConfigError, match="1 can't be"):
        next(results)
    # The result of the third call is still in the queue, although nobody reads it.
    found = list(processes.map(squared, [(number,) for number in range(4)]))
    assert [square for square, _ in found] == [0, 1, 4, 9]


def test_worker_processes_raise_unpicklable_errors(processes: WorkerProcesses) -> None:
    with pytest.raises(TrainingError, match="StubbornError: 1 and 2"):
        list(processes.map(stubborn, [(1,), (1,)]))
    with pytest.raises(TrainingError, match="ForgetfulError: 3 or 2"):
        list(processes.map(stubborn, [(3,), (3,)]))
    with pytest.raises(MissingDependencyError, match=r"number 3 needs .* 'firstlight\[y\]'"):
        list(processes.map(lacking, [(3,), (3,)]))


def test_worker_processes_start_on_first_use() -> None:
    before = set(multiprocessing.active_children())
    with workers.started() as some:
        # Before the first call: starting a process would include importing torch.
        assert set(multiprocessing.active_children()) == before
        list(some.map(squared, [(1,), (2,)]))
        assert len(set(multiprocessing.active_children()) - before) == 2
    assert set(multiprocessing.active_children()) == before


def test_worker_processes_interrupted_start_raises_keyboard_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(process: BaseProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), workers.started() as some:
        list(some.map(squared, [(1,)]))


@pytest.mark.parametrize(
    "number, message",
    [
        (signal.SIGKILL, "was killed, most likely because memory ran out"),
        (signal.SIGSEGV, "was ended by SIGSEGV: a library .* crashed"),
    ],
)
def test_worker_processes_ended_process_raises_without_hanging(number: int, message: str) -> None:
    with workers.started() as some:
        with pytest.raises(TrainingError, match=message):
            list(some.map(end_by, [(number,), (number,)]))
        # Later calls are not sent to it, either.
        with pytest.raises(TrainingError, match=message):
            list(some.map(squared, [(number,) for number in range(9)]))
