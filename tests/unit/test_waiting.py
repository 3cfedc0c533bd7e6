"""A test whose time is over says what the processes that it waited for have said."""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

from waiting import processes_waited_for

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_a_process_that_was_waited_for_is_described_with_its_output() -> None:
    command = [sys.executable, "-c", "print('first', flush=True); input(); print('last')"]
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
