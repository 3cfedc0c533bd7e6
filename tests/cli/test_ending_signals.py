"""Tests of signals that end a command, and of readers that close the pipe."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firstlight.cli.main import Terminated, cleaning_up_when_terminated

_KINDS: dict[int, type[BaseException]] = {
    signal.SIGTERM: Terminated,
    signal.SIGHUP: Terminated,
    signal.SIGUSR1: Terminated,
    signal.SIGINT: KeyboardInterrupt,
}


@pytest.fixture
def no_alarm() -> None:
    """Disable the time limit of tests, which uses the same timer."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.parametrize("number", _KINDS)
def test_ending_signal_is_raised_in_running_code(number: int) -> None:
    handler = signal.getsignal(number)
    with pytest.raises(_KINDS[number]), cleaning_up_when_terminated():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == handler


def test_ending_signal_ignored_by_parent_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cleaning_up_when_terminated():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def _import_and_wait(name: str) -> None:
    importlib.import_module(name)
    for _ in range(10**9):
        pass


def test_signal_in_torch_internals_is_raised_afterwards(no_alarm: None) -> None:
    """C++ code calls these functions while a plan is traced, and aborts the process if they
    raise."""
    name = os.path.join("site-packages", "torch", "_library", "simple_registry.py")
    code = compile("os.kill(os.getpid(), signal.SIGINT); reached.append(1)", name, "exec")
    reached: list[int] = []

    def run() -> None:
        exec(code, {"os": os, "signal": signal, "reached": reached})  # noqa: S102
        for _ in range(10**9):
            pass

    with pytest.raises(KeyboardInterrupt), cleaning_up_when_terminated():
        run()
    assert reached


@pytest.mark.parametrize("number", _KINDS)
def test_ending_signal_during_import_is_raised_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_alarm: None, number: int
) -> None:
    """This also holds if the importing code swallows every exception, as C++ code does."""
    name = f"sender_{number}"
    source = f"import os\nos.kill(os.getpid(), {int(number)})\nwhole = True\n"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    (tmp_path / f"swallower_{number}.py").write_text(
        f"try:\n    import {name}\nexcept BaseException:\n    pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    handlers = [signal.getsignal(one) for one in (number, signal.SIGALRM)]
    with pytest.raises(_KINDS[number]), cleaning_up_when_terminated():
        _import_and_wait(f"swallower_{number}")
    assert sys.modules[name].whole is True
    assert [signal.getsignal(one) for one in (number, signal.SIGALRM)] == handlers


def test_ending_signal_during_last_import_does_not_affect_later_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_alarm: None
) -> None:
    source = f"import os\nos.kill(os.getpid(), {int(signal.SIGTERM)})\n"
    (tmp_path / "last_sender.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with cleaning_up_when_terminated():
        monkeypatch.setattr("firstlight.cli.main._SOON", 60.0)
        importlib.import_module("last_sender")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    "number, word", [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")]
)
def test_signal_in_endless_import_ends_process(tmp_path: Path, number: int, word: str) -> None:
    (tmp_path / "endless.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(number)})\nwhile True:\n    pass\n", encoding="utf-8"
    )
    program = (
        "from firstlight.cli import main\n"
        "main._LONGEST_WAIT = 0.01\n"
        "with main.cleaning_up_when_terminated(as_json=True):\n"
        "    import endless\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (128 + number, f"firstlight: error: {word}\n")
    assert json.loads(done.stdout) == {"error": {"type": word.capitalize(), "message": word}}


def test_signal_in_later_import_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_alarm: None
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("firstlight.cli.main._end_now", lambda *_: pytest.fail("ended"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("earlier_sender", "later_sender"):
        source = f"import os\nos.kill(os.getpid(), {int(signal.SIGTERM)})\n"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    with cleaning_up_when_terminated():
        with pytest.raises(Terminated):
            _import_and_wait("earlier_sender")
        now = 200.0
        with pytest.raises(Terminated):
            _import_and_wait("later_sender")


def test_work_continues_when_stderr_reader_is_gone() -> None:
    program = (
        "import sys\n"
        "from firstlight.console import say\n"
        "sys.stdin.readline()\n"
        "say('one')\n"
        "say('two')\n"
        "print('done')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        process.stderr.close()
        out, _ = process.communicate("go\n")
    assert (process.returncode, out) == (0, "done\n")
