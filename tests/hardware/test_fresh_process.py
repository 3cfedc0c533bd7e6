"""Measurements in separate processes: results, failures, termination and environments."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from firstlight.cli import main as cli_main
from firstlight.errors import ConfigError
from firstlight.hardware.environment import SHORT_SPIN, TRAINING
from firstlight.hardware.fresh_process import (
    answer,
    ask,
    plain_environment,
    training_environment,
)

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a module file that child processes import as `stub`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "stub.py"


@pytest.mark.parametrize(
    "code, kind, message",
    [
        ("raise ValueError('no  good')", "Failed", "ValueError: no  good"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "Killed",
            "killed by signal 9: most likely out of memory",
        ),
        ("import os; os.kill(os.getpid(), 11)", "Killed", "killed by signal 11"),
        ("raise SystemExit(3)", "Failed", "exit code 3"),
    ],
)
def test_ask_failed_process_reports_reason(
    module: Path, code: str, kind: str, message: str
) -> None:
    module.write_text(code, encoding="utf-8")
    assert ask("stub", {}, os.environ) == {"error": {"type": kind, "message": message}}


def test_ask_process_answers_despite_library_output(module: Path) -> None:
    module.write_text(
        "import sys\n"
        "print('a line of a library')\n"
        "def measure(request):\n"
        "    return {'got': request, 'x': sys.flags.safe_path}\n",
        encoding="utf-8",
    )
    assert ask("stub", {"a": [1]}, os.environ) == {"got": {"a": [1]}, "x": True}


def test_fresh_process_refusal_is_returned_as_result(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keep this process from becoming the out-of-memory killer's first choice.
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 0)

    def refuse(_: Mapping[str, Any]) -> dict[str, Any]:
        raise ConfigError("not here: use bf16")

    answer(refuse, "{}")
    assert json.loads(capfd.readouterr().out) == {
        "error": {"type": "ConfigError", "message": "not here: use bf16"}
    }


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux waits for orphans so")
def test_ask_interrupted_ends_process_and_its_children(module: Path, tmp_path: Path) -> None:
    module.write_text(
        "import os, pathlib, signal, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "child.wait()\n",
        encoding="utf-8",
    )
    with pytest.raises(KeyboardInterrupt):
        ask("stub", {}, os.environ)
    own, child = map(int, (tmp_path / "pids").read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(own, 0)
    # The system kills the orphan a little later. It may already be gone.
    with contextlib.suppress(ProcessLookupError):
        death = select.poll()
        death.register(os.pidfd_open(child), select.POLLIN)
        assert death.poll(60_000)


def test_training_environment_overrides_settings_of_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in TRAINING:
        monkeypatch.delenv(name, raising=False)
    assert training_environment() == {**os.environ, **TRAINING}
    assert plain_environment() == dict(os.environ)
    # As `firstlight` sets it for its own process.
    monkeypatch.setenv("GOMP_SPINCOUNT", TRAINING["GOMP_SPINCOUNT"])
    assert "GOMP_SPINCOUNT" not in plain_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert plain_environment()["GOMP_SPINCOUNT"] == "7"
    assert training_environment()["GOMP_SPINCOUNT"] == "7"


def test_cli_environment_depends_on_command_and_busy_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for running, spin, long_spin in ((0, 5000, 30000), (2, 5000, 30000), (3, 100, 100)):
        monkeypatch.setattr(
            "firstlight.hardware.environment._running", lambda running=running: running
        )
        for verb in ("train", "plan", "tune", "eval"):
            variables = TRAINING | {"GOMP_SPINCOUNT": str(spin)}
            assert cli_main._environment([verb]) == variables
        for verb in ("generate", "chat", "serve"):
            assert cli_main._environment([verb]) == {"GOMP_SPINCOUNT": str(long_spin)}
    assert cli_main._environment(["convert"]) == SHORT_SPIN
    monkeypatch.undo()
    assert cli_main._environment(["chat"])["GOMP_SPINCOUNT"] in ("100", "30000")
