from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from firstlight.errors import RunReplacedError
from firstlight.training.processes import Stopping, StopRequestedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class HeardError(BaseException):
    """Raised by the previous handler when it gets a signal."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise HeardError(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Install handlers, which must be restored after the test."""
    before = {number: signal.signal(number, _raise) for number in _SIGNALS}
    yield
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert set(left.values()) <= {_raise, signal.SIG_IGN}


def reason(stopping: Stopping) -> str | None:
    """Return the reason. As a function, mypy does not assume that the property keeps its value."""
    return stopping.reason


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", _SIGNALS)
def test_stopping_first_signal_is_reason_and_second_acts_as_before(
    number: signal.Signals,
) -> None:
    with Stopping(None) as stopping:
        stopping.watch()
        assert reason(stopping) is None
        stopping.check()
        send(number)
        assert reason(stopping) == number.name
        with pytest.raises(StopRequestedError):
            stopping.check()
        with pytest.raises(HeardError):
            send(signal.SIGTERM)
        # Afterwards, all handlers are the previous ones.
        assert signal.getsignal(signal.SIGUSR1) is _raise


def test_stopping_before_first_step_signals_act_as_before() -> None:
    with Stopping(None), pytest.raises(HeardError):
        send(signal.SIGTERM)


def test_stopping_signal_with_swallowed_exception_is_remembered() -> None:
    """For example, an exception in a destructor. If it is raised again afterwards, it is not a
    second signal.
    """
    with Stopping(None) as stopping:
        with pytest.raises(HeardError):
            send(signal.SIGTERM)
        assert reason(stopping) == "SIGTERM"
        stopping.watch()
        send(signal.SIGTERM)
        assert reason(stopping) == "SIGTERM"
        with pytest.raises(HeardError):
            send(signal.SIGTERM)


def test_stopping_after_run_signals_act_as_before() -> None:
    with Stopping(None) as stopping:
        stopping.watch()
        stopping.watch()
    with pytest.raises(HeardError):
        send(signal.SIGINT)


def test_stopping_signal_before_handlers_are_replaced_acts_as_before() -> None:
    def run() -> None:
        with Stopping(None) as stopping:
            stopping.watch()
            send(signal.SIGTERM)
            raise RunReplacedError

    with pytest.raises(HeardError):
        run()


def test_stopping_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Stopping(None) as stopping:
        stopping.watch()
        send(signal.SIGTERM)
        assert reason(stopping) is None
        send(signal.SIGUSR1)
        assert reason(stopping) == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_stopping_in_other_thread_observes_time_limit_only() -> None:
    found = []

    def run() -> None:
        with Stopping(1e-9) as stopping:
            stopping.watch()
            found.append(stopping.reason)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["max_minutes"]


def test_stopping_time_limit_counts_from_start_but_applies_after_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Stopping(2.0) as stopping:
        now = 1000.0
        assert reason(stopping) is None
        stopping.watch()
        assert reason(stopping) == "max_minutes"
        now = 219.9
        assert reason(stopping) is None
        now = 220.0
        assert reason(stopping) == "max_minutes"
        send(signal.SIGTERM)
        assert reason(stopping) == "SIGTERM"


_DEFAULTS = """
import os, signal, sys
from firstlight.errors import RunReplacedError
from firstlight.training.processes import Stopping
with Stopping(None, shown=True) as stopping:
    stopping.watch()
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print(stopping.reason, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("not reached", flush=True)
"""


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("name, code", [("SIGTERM", -15), ("SIGUSR1", -10), ("SIGINT", -2)])
def test_stopping_without_handlers_second_signal_ends_process(name: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DEFAULTS, name], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout == f"{name}\n"
    assert done.stderr.startswith("\nfinishing the step and saving; once more to stop at once\n")
