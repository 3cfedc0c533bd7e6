"""A test whose time is over says what the processes that it waited for have said."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spawned import run_ranks

import conftest
from waiting import processes_waited_for

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("forked_processes")


def test_waited_process_is_described_with_its_output() -> None:
    command = [
        sys.executable,
        "-c",
        "print('first\\n', end='', flush=True); input(); print('last')",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [])
        with pytest.raises(TimeoutError) as running:
            raise TimeoutError
        (words,) = processes_waited_for(running.value)
        assert words == f"waited for {command}: it runs; seen last:\nstdout: first\n"
        assert process.communicate("go\n")[0] == "last\n"
        with pytest.raises(TimeoutError) as ended:
            raise TimeoutError
    (words,) = processes_waited_for(ended.value)
    assert words == f"waited for {command}: it ended with 0; seen last:\nstdout: last\n"


def test_rank_of_test_is_forked_and_crash_shows_location(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, signal, sys\n"
        "print('torch' in sys.modules, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    (crashed,) = run_ranks(driver, [], 1)
    assert (crashed.returncode, crashed.stdout) == (-signal.SIGSEGV, "True\n")
    assert "Fatal Python error: Segmentation fault" in crashed.stderr
    assert f'File "{driver}", line 3' in crashed.stderr


#: Tests of processes that say a word and wait then, so that the time of each test is over.
_TESTS = """
import select, signal, subprocess, sys
import pytest

@pytest.fixture
def start():
    processes = []

    def start_one(word):
        # `communicate` closes the input, so that reading it would end the process.
        program = f"import signal; print({word!r}.upper(), flush=True); signal.pause()"
        command = [sys.executable, "-c", program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, text=True, **pipes))
        select.select([processes[-1].stdout], [], [])
        return processes[-1]

    yield start_one
    for process in processes:
        with process:
            process.kill()

def test_of_communicate(start):
    process = start("communicate")
    process.communicate(timeout=0.01)

@pytest.fixture
def process(start):
    return start("limit")

@pytest.mark.timeout(0.5, func_only=True)
def test_of_the_tests_limit(process):
    while True:
        signal.pause()

@pytest.fixture
def late(start):
    process = start("set-up")
    raise TimeoutError

def test_of_set_up(late): ...

def test_of_something_else(start):
    process = start("something else")
    pytest.fail("not for its time")
"""


def test_timed_out_tests_alone_show_process_output(
    pytester: pytest.Pytester,
) -> None:
    pytest.importorskip("pytest_timeout")
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_inprocess(plugins=[conftest])
    result.assert_outcomes(failed=3, errors=1)
    shown = result.stdout.str()
    said = re.findall(r"^E +waited for .*: it runs; seen last:\nE +stdout: (.*)$", shown, re.M)
    assert said == ["SET-UP", "COMMUNICATE", "LIMIT"]
