"""`firstlight train --nproc`: the command that is started, the number of processes, and errors."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from firstlight.cli.main import main
from firstlight.parallel import elastic
from firstlight.parallel.elastic import Launch
from firstlight.parallel.rendezvous import RankError

Call = tuple[list[str], Launch, list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record the processes that would be started, in a process without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    made: list[Call] = []

    def launch(command: Sequence[str], options: Launch, on_restart: Sequence[str] = ()) -> int:
        made.append((list(command), options, list(on_restart)))
        return 75

    monkeypatch.setattr(elastic, "launch", launch)
    return made


def test_launch_passes_same_command_without_launch_options(
    calls: list[Call],
) -> None:
    options = ["--nproc", "2", "--max-restarts=3"]
    own = ["recipe.yaml", "--optimizer.learning_rate", "3e-4", "--data.packing=true"]
    assert main(["train", *options, *own, "--init-from", "base", "--json"]) == 75
    start = [sys.executable, "-P", "-m", "firstlight", "train"]
    expected = [*start, *own, "--init-from", "base", "--json"]
    assert calls == [(expected, Launch(2, max_restarts=3), ["--resume"])]


def test_launch_passes_on_machines_and_does_not_repeat_resume(calls: list[Call]) -> None:
    machines = ["--nnodes", "4", "--node-rank", "3", "--rdzv-endpoint", "node0:29500"]
    assert main(["train", "r.yaml", "--resume", "--nproc", "8", *machines]) == 75
    ((command, options, on_restart),) = calls
    assert command[4:] == ["train", "r.yaml", "--resume"]
    assert options == Launch(8, 4, 3, "node0:29500", 0)
    assert on_restart == []


def test_launch_single_process_runs_in_place(
    calls: list[Call], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for count in ("1", "auto"):
        assert main(["train", "missing.yaml", "--nproc", count]) != 75
        assert "missing.yaml" in capfd.readouterr().err
    assert calls == []
    # Restarts require torchrun.
    assert main(["train", "missing.yaml", "--nproc", "1", "--max-restarts", "1"]) == 75
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert main(["train", "missing.yaml", "--nproc", "auto"]) == 75
    assert calls[-1][1] == Launch(8)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-restarts", "1"], "--max-restarts needs --nproc"),
        (["--nnodes", "2"], "--nnodes needs --nproc"),
        (["--nproc", "0"], "--nproc is '0': it must be auto or a number of at least 1"),
        (["--nproc", "all"], "--nproc is 'all'"),
        (["--nproc", "2", "--nnodes", "0"], "--nnodes"),
        (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts"),
        (["--nproc", "2", "--nnodes", "2", "--node-rank", "0"], "needs --rdzv-endpoint HOST:PORT"),
        (["--nproc", "2", "--nnodes", "2"], "--nnodes needs --node-rank"),
        (["--npoc", "2"], "unknown option --npoc (did you mean '--nproc'?)"),
    ],
)
def test_launch_invalid_options_fail_before_start(
    calls: list[Call], capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["train", "r.yaml", *options, "--json"]) == 2
    assert message in json.loads(capfd.readouterr().out)["error"]["message"]
    assert calls == []


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n", "MASTER_PORT": "1"},
    ],
)
def test_launch_inside_launched_process_fails(
    calls: list[Call],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "r.yaml", "--nproc", "2"]) == 2
    assert "a launcher started this process" in capfd.readouterr().err
    assert calls == []


def test_launch_signal_before_rank_start_returns_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: Any) -> None:
        raise SignalException("terminated", signal.SIGTERM)

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    assert elastic.launch(["true"], Launch(2)) == 128 + signal.SIGTERM


def test_launch_rendezvous_closed_by_other_machine_raises_rank_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalElasticAgent, "run", lambda _: None)
    with pytest.raises(RankError, match="the rendezvous of the processes was closed by another"):
        elastic.launch(["true"], Launch(2))
