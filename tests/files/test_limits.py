"""Tests of `LimitedProcess`: results, limits, and the end of the child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from firstlight.errors import DataError, FirstlightError
from firstlight.files import limits
from firstlight.files.limits import LimitedProcess, LimitExceededError
from waiting import PATIENCE_SECONDS

_MEGABYTE = 1 << 20
#: Expression for the process ids of the child and its parent.
_IDS = "lambda _: [__import__('os').getpid(), __import__('os').getppid()]"


@pytest.fixture
def limited() -> Iterator[Callable[[str], LimitedProcess]]:
    """Return a function that creates a `LimitedProcess` for the function given by a Python
    expression.
    """
    made: list[LimitedProcess] = []

    def make(function: str) -> LimitedProcess:
        made.append(LimitedProcess("builtins:eval", (function,), memory=50 * _MEGABYTE))
        return made[-1]

    yield make
    for process in made:
        process.close()


Make = Callable[[str], LimitedProcess]


def test_child_call_returns_result_from_one_process(limited: Make) -> None:
    process = limited("lambda x: [x, __import__('os').getpid()]")
    data = {"é": [1, None, "\ud800", 0.5], "long": "a" * _MEGABYTE}
    result, child = process.call(data, seconds=1)
    assert result == data
    assert child != os.getpid()
    assert process.call(0, seconds=1) == [0, child]
    assert process.start() == 1


def test_child_call_raises_same_error_as_function(limited: Make) -> None:
    data = limited("lambda x: exec('from firstlight.errors import DataError; raise DataError(x)')")
    unknown = limited("lambda _: {}[1]")
    for process, kind, message in (
        (data, DataError, "^what$"),
        (unknown, RuntimeError, "builtins:eval failed: KeyError: 1"),
    ):
        with pytest.raises(kind, match=message):
            process.call("what", seconds=1)
        with pytest.raises(kind):  # The same child continues.
            process.call("what", seconds=1)
        assert process.start() == 1


@pytest.mark.parametrize(
    "function, returncodes",
    [
        ("lambda x: any(iter(int, 1)) if x else 0", {-signal.SIGPROF}),  # In Python code.
        # Inside a single call into C code.
        ("lambda x: 9 ** 9 ** 9 if x else 0", {-signal.SIGPROF}),
        ("lambda x: bytearray(60 << 20) and 0 if x else 0", {1, -signal.SIGKILL}),
        # RLIMIT_DATA does not count shared memory, so the parent detects it.
        (
            "lambda x: [([m.write(b'1' * 2**20) for _ in range(60)], __import__('time').sleep(9)) "
            "for m in [__import__('mmap').mmap(-1, 60 << 20)]] if x else 0",
            {-signal.SIGKILL},
        ),
        ("lambda x: __import__('os').abort() if x else 0", {-signal.SIGABRT}),
    ],
)
def test_child_call_exceeding_limit_is_stopped_and_next_call_succeeds(
    limited: Make, function: str, returncodes: set[int]
) -> None:
    process = limited(function)
    process.start()
    child = process._process
    assert child is not None
    with pytest.raises(
        LimitExceededError, match=r"^more than 0\.2 s of CPU time or 50 MiB of memory$"
    ):
        process.call(1, seconds=0.2)
    assert child.returncode in returncodes
    assert process.call(0, seconds=0.2) == 0
    assert process.start() == 2


def test_child_call_waiting_without_working_is_ended(
    limited: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = limited("lambda _: __import__('time').sleep(999)")
    process.start()
    monkeypatch.setattr(limits, "_PATIENCE", 0.01)
    with pytest.raises(LimitExceededError):
        process.call(0, seconds=1)


def test_child_calls_have_separate_time_limits(limited: Make) -> None:
    process = limited("lambda _: sum(range(300_000))")
    for _ in range(20):
        process.call(0, seconds=0.2)
    assert process.start() == 1


def test_child_that_makes_progress_is_allowed_more_time(limited: Make) -> None:
    work = "sum(range(300_000)) for _ in range(100)"
    allow = "__import__('firstlight.files.limits', fromlist=['']).allow_more(0.1)"
    assert (
        limited(f"lambda _: len([({allow}, {work[:20]}) {work[20:]}])").call(0, seconds=0.2) == 100
    )
    with pytest.raises(LimitExceededError):
        limited(f"lambda _: len([{work}])").call(0, seconds=0.2)


def test_child_call_interrupted_leaves_no_answer_for_next(
    limited: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = limited("lambda x: x or __import__('time').sleep(999)")
    process.start()

    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_resident", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.call(0, seconds=1)
    monkeypatch.undo()
    assert process.call(5, seconds=1) == 5


def test_child_that_fails_to_start_raises_and_is_ended(limited: Make) -> None:
    process = limited("1 / 0")
    before = len(psutil.Process().children())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="builtins:eval failed: ZeroDivisionError"):
            process.call(0, seconds=1)
    assert len(psutil.Process().children()) == before


@pytest.mark.parametrize(
    "python, reason",
    [("false", "exit code 1"), ("nowhere", "No such file or directory.*")],
)
def test_child_process_start_failure_is_distinguished_from_limit_error(
    python: str, reason: str, limited: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "false"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    process = limited("lambda x: x")
    with monkeypatch.context() as context:
        context.setattr(sys, "executable", str(tmp_path / python))
        with pytest.raises(FirstlightError, match=rf"can't start \({reason}\): free") as caught:
            process.call(1, seconds=1)
    assert not isinstance(caught.value, LimitExceededError)
    assert process.call(1, seconds=1) == 1


def test_child_calls_of_several_threads_get_their_own_answers(limited: Make) -> None:
    process = limited("lambda x: x")
    answers: dict[int, int] = {}

    def call(number: int) -> None:
        for _ in range(50):
            answers[number] = process.call(number, seconds=1)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: number for number in range(4)}
    assert process.start() == 1


def test_child_process_has_own_session(limited: Make) -> None:
    """Ctrl-C in a terminal reaches only the processes of the terminal's session."""
    child, _ = limited(_IDS).call(0, seconds=1)
    assert os.getsid(child) == child


_FORKS = f"""
import os, signal, sys, time
from firstlight.files.limits import LimitedProcess
process = LimitedProcess("builtins:eval", ({_IDS!r},), memory=50 << 20)
first = process.call(0, seconds=1)
"""


def test_call_in_forked_process_starts_new_child() -> None:
    program = (
        _FORKS
        + """
readable, writable = os.pipe()
if os.fork() == 0:
    os.write(writable, repr([process.call(0, seconds=1)[1] == os.getpid()]).encode())
    sys.exit()  # what is registered with atexit is run
os.wait()
print(os.read(readable, 99).decode(), process.call(0, seconds=1) == first)
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[True] True\n", done.stderr


def test_child_ends_with_killed_parent_despite_living_fork() -> None:
    program = (
        _FORKS
        + """
forked = os.fork()
if forked == 0:
    time.sleep(999)
print(first[0], forked, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    child, forked = map(int, done.stdout.readline().split())
    try:
        watched = [psutil.Process(child)] if psutil.pid_exists(child) else []
        assert psutil.wait_procs(watched, PATIENCE_SECONDS)[1] == []
        assert psutil.Process(forked).is_running()
    finally:
        os.kill(forked, signal.SIGKILL)
        done.wait()
        done.stdout.close()
