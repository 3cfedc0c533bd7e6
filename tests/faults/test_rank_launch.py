"""The launcher: one error, the right exit code, restarts that go on, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_scenarios import free_port
from torch.distributed.elastic.multiprocessing.api import SignalException

from firstlight.parallel import elastic
from waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

_HERE = Path(__file__).parent


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[str]
    folder: Path

    def ranks(self) -> list[psutil.Process]:
        """Its processes, once they exchange."""
        self.wait_for(*(self.folder / f"ready-{rank}" for rank in (0, 1)))
        pids = [int((self.folder / f"pid-{rank}").read_text()) for rank in (0, 1)]
        return [psutil.Process(pid) for pid in pids]

    def known_ranks(self) -> list[psutil.Process]:
        """Those of its processes that have come far enough to say so, and are there."""
        processes = []
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # ValueError: not yet
                process = psutil.Process(int(path.read_text()))
                if "rank_driver.py" in " ".join(process.cmdline()):
                    processes.append(process)
        return processes

    def wait_for(self, *paths: Path) -> None:
        def missing() -> list[str]:
            assert self.process.poll() is None, self.end()
            return [path.name for path in paths if not path.exists()]

        wait_until("files of the ranks, of which none is missing", missing, operator.not_)

    def end(self) -> tuple[int, list[str]]:
        """Exit code and what was said."""
        said = self.process.communicate(timeout=PATIENCE_SECONDS)[1]
        return self.process.returncode, said.splitlines()

    def wait_until_nothing_is_left(self) -> None:
        processes = self.known_ranks()
        wait_until(
            "the end of all ranks; those that run",
            lambda: [process.pid for process in processes if is_running(process)],
            operator.not_,
        )


def is_running(process: psutil.Process) -> bool:
    """Whether it is there, and not only its exit code that nobody has asked for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def launched(
    folder: Path, options: dict[str, Any], python: tuple[str, ...] = (), **plan: Any
) -> Iterator[Launched]:
    """A launcher of ranks that do what a plan says."""
    folder.mkdir(exist_ok=True)
    # Unless it is what is waited for, longer than a rank that has to wait for a core is silent.
    whole = {"folder": str(folder), "steps": 4, "timeout": 60.0} | plan
    command = [sys.executable, str(_HERE / "rank_driver.py"), json.dumps(whole)]
    process = subprocess.Popen(
        [
            *python,
            sys.executable,
            str(_HERE / "launch_driver.py"),
            json.dumps({"nproc": 2} | options),
            json.dumps(command),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        start_new_session=True,
    )
    run = Launched(process, folder)
    try:
        yield run
    finally:
        process.kill()
        for rank in run.known_ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        process.communicate()


def once(kind: str, rank: int, step: int) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "once": True}


def test_launch_killed_rank_restarts_from_checkpoint(tmp_path: Path) -> None:
    with launched(tmp_path, {"max_restarts": 1}, faults=[once("kill", 1, 2)]) as run:
        code, said = run.end()
        assert code == 0, said
        assert said[0] == "progress: from step 0"
        # By rank 0, whose messages are shown, and by nobody else.
        assert said[1].startswith("firstlight: error: rank 1 on "), said
        assert said[1].endswith(" failed: killed by SIGKILL: most likely out of memory")
        assert said[2] == "starting all ranks again (1 of 1)"
        assert said[3] in ("progress: from step 1", "progress: from step 2")
        assert len(said) == 4
        assert (tmp_path / "done-0").exists()
        assert (tmp_path / "done-1").exists()


def test_launch_unexpected_error_is_shown_completely_once(tmp_path: Path) -> None:
    fault = {"kind": "unexpected", "rank": 1, "step": 2}
    with launched(tmp_path, {}, faults=[fault]) as run:
        code, said = run.end()
    assert code == 1, said
    told = " failed: KeyError: 'nobody thought of this'"
    assert [line.endswith(told) for line in said if "firstlight: error" in line] == [True]
    assert sum("Traceback (most recent call last)" in line for line in said) == 1
    assert said[-1] == "[rank1]: KeyError: 'nobody thought of this'"
    assert not any("torchelastic" in line or "ChildFailed" in line for line in said)


def test_launch_signal_reaches_ranks_and_returns_stop_exit_code(tmp_path: Path) -> None:
    with launched(tmp_path, {"max_restarts": 3}, endless=True) as run:
        run.ranks()
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
        assert (code, said) == (75, ["progress: from step 0"])
        run.wait_until_nothing_is_left()


def test_launch_allows_an_hour_for_saving_and_half_a_minute_before_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[tuple[signal.Signals, int]] = []

    class Ranks:
        """Ranks that only note how they are ended: the signal, and the seconds until SIGKILL."""

        def close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            closed.append((death_sig, timeout))

    def interrupted(role: str) -> None:
        raise SignalException("", signal.SIGUSR1)

    agent = elastic._Agent(["true"], elastic.Launch(1), (), tmp_path)
    monkeypatch.setattr(agent, "_pcontext", Ranks())
    monkeypatch.setattr(agent, "_invoke_run", interrupted)
    with pytest.raises(SignalException):
        agent.run()
    assert closed[0] == (signal.SIGUSR1, 3600)
    closed.clear()
    agent._stop_workers(agent._worker_group)
    assert closed == [(signal.SIGTERM, 30)]
    agent.close()


def test_launch_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    with launched(tmp_path, {}, endless=True) as run:
        ranks = run.ranks()
        assert all(is_running(rank) for rank in ranks)
        # One that can't notice anything itself.
        ranks[1].suspend()
        run.process.kill()
        assert run.end()[0] == -signal.SIGKILL
        run.wait_until_nothing_is_left()


def test_launch_stop_requested_by_one_rank_is_not_a_failure(tmp_path: Path) -> None:
    """As when a time limit is over on one of the machines first: nothing is started again."""
    with launched(tmp_path, {"max_restarts": 3}, endless=True) as run:
        run.ranks()[1].send_signal(signal.SIGTERM)
        assert run.end() == (75, ["progress: from step 0"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_launch_passes_on_each_signal(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, {}, endless=True) as run:
        run.ranks()
        run.process.send_signal(number)
        # The ranks of this test know SIGINT, and end by SIGHUP.
        assert run.end()[0] == {signal.SIGINT: 75, signal.SIGHUP: 129}[number]
        run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_launch_under_nohup_ignores_hangup(tmp_path: Path) -> None:
    with launched(tmp_path, {}, ("nohup",), endless=True) as run:
        run.ranks()
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 75


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_launch_stopped_rank_is_killed_and_restarted(tmp_path: Path, rank: int) -> None:
    options = {"max_restarts": 2}
    with launched(tmp_path, options, timeout=5.0, faults=[once("stop", rank, 2)]) as run:
        code, said = run.end()
        assert code == 0, said
        assert any("has not answered for 5 s" in line for line in said), said
        assert "starting all ranks again (1 of 2)" in said
        run.wait_until_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, code, message",
    [
        ({"kind": "raise", "rank": 0, "step": 2}, 1, "error: row 7 of shard 3 is damaged"),
        ({"kind": "raise", "rank": 1, "step": 2}, 1, "failed: row 7 of shard 3 is damaged"),
        # Before the ranks meet: the others do not wait for the timeout.
        ({"kind": "raise", "rank": 1, "step": -1}, 1, "failed: row 7 of shard 3 is damaged"),
        ({"kind": "exit", "rank": 1, "step": -1}, 1, "failed: exited with code 3"),
        ({"kind": "kill", "rank": 0, "step": 2}, 1, "failed: killed by SIGKILL: most"),
        ({"kind": "stop", "rank": 0, "step": 2}, 1, "has not answered for 5 s"),
    ],
)
def test_launch_failure_is_reported_once(
    tmp_path: Path, fault: dict[str, Any], code: int, message: str
) -> None:
    with launched(tmp_path, {}, timeout=5.0, faults=[fault]) as run:
        found, said = run.end()
        assert found == code, said
        errors = [line for line in said if line != "progress: from step 0"]
        assert len(errors) == 1, said
        assert message in errors[0]
        run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_launch_invalid_config_is_not_retried(tmp_path: Path) -> None:
    with launched(tmp_path, {"max_restarts": 3}, fingerprints={"1": "another"}) as run:
        code, said = run.end()
        assert code == 2, said
        assert sum("has a different recipe than rank 0" in line for line in said) == 1
        assert not any("again" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_launch_two_machines_restart_together(tmp_path: Path, rank: int) -> None:
    options = {"nproc": 1, "nnodes": 2, "endpoint": f"127.0.0.1:{free_port()}", "max_restarts": 1}
    plan: dict[str, Any] = {"faults": [once("kill", rank, 2)]}
    with (
        launched(tmp_path, options | {"node_rank": 0}, **plan) as first,
        launched(tmp_path, options | {"node_rank": 1}, **plan) as second,
    ):
        ends = [run.end() for run in (first, second)]
        assert [code for code, _ in ends] == [0, 0], ends
        # The other machine may have seen that it is waited for before its own rank had ended.
        assert any("starting all ranks again (1 of 1)" in said for _, said in ends), ends
        assert (tmp_path / "done-0").exists()
        assert (tmp_path / "done-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_launch_every_machine_reports_failure_of_one(tmp_path: Path, rank: int) -> None:
    options = {"nproc": 1, "nnodes": 2, "endpoint": f"127.0.0.1:{free_port()}"}
    plan: dict[str, Any] = {"faults": [{"kind": "raise", "rank": rank, "step": 2}]}
    with (
        launched(tmp_path, options | {"node_rank": 0}, **plan) as first,
        launched(tmp_path, options | {"node_rank": 1}, **plan) as second,
    ):
        for run in (first, second):
            code, said = run.end()
            assert code == 1, said
            assert "row 7 of shard 3 is damaged" in said[-1], said
