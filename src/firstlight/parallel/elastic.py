"""Start the processes of a run with torch elastic, and restart them when one fails.

torch's agent assigns ranks over several machines, restarts failed ranks, and hosts a key-value
store that outlives a restart. The agent in this module differs from torch's agent as follows:

- The failure of a rank is immediately announced to the other ranks, which then exit on their own.
- A run that saves a checkpoint after being stopped by a signal does not count as a failure and is
  not restarted.
- The ranks are killed if the launcher is killed.
- The terminal shows the messages of rank 0. Messages of another rank are shown only if it fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from firstlight.console import say
from firstlight.errors import DIVERGED_EXIT_CODE, STOPPED_EXIT_CODE, ConfigError
from firstlight.hardware.environment import usable_cpus
from firstlight.parallel import rank_start
from firstlight.parallel.rendezvous import ROUND, RankError, tcp_store, tell_failure

#: Time limit in seconds for the other ranks to exit on their own after one rank has failed.
_GRACE_SECONDS = 8.0

#: Time in seconds during which ranks on other machines can still read the failure from the store.
_LINGER_SECONDS = 4.0

#: Time limit in seconds for ranks to save and exit after a signal. A second signal makes them exit
#: sooner.
_SAVING_SECONDS = 3600

#: Time limit in seconds for all machines to connect to the rendezvous.
_RENDEZVOUS_SECONDS = 900

#: Exit codes of ranks that are not treated as failed. In this order, they mean that the run is
#: complete, that it was stopped after saving a checkpoint, and that it diverged. torch's agent
#: treats every code except 0 as a failure.
_ENDS = (0, STOPPED_EXIT_CODE, DIVERGED_EXIT_CODE)

#: Exit codes for errors that would recur after a restart, namely an invalid recipe or option and a
#: run that diverged.
_FINAL_EXIT_CODES = (ConfigError.exit_code, DIVERGED_EXIT_CODE)

#: Signals passed on to the ranks, unless they are ignored (nohup).
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

#: Maximum number of lines shown from the end of a failed rank's output.
_MAX_LINES = 60

#: Time limit in seconds for the launcher to connect to the store and report a failure to the ranks.
_ANNOUNCING_SECONDS = 2.0

_ERROR_START = "firstlight: error: "
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Launch:
    """Options that determine how many processes are started, and on how many machines.

    Attributes:
        nproc: number of processes on this machine.
        nnodes: number of machines in the run.
        node_rank: number of this machine; machine 0 hosts the rendezvous.
        endpoint: HOST or HOST:PORT of machine 0; "" with one machine.
        max_restarts: maximum number of times that all ranks are started again after a failure.

    Raises:
        ConfigError: a number is out of range.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank} with --nnodes {self.nnodes}: the machines are "
                f"numbered 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and not self.endpoint:
            raise ConfigError(
                "--nnodes needs --rdzv-endpoint HOST:PORT, a free port of machine 0: add it on "
                "all machines"
            )


def launch(command: Sequence[str], options: Launch, on_restart: Sequence[str] = ()) -> int:
    """Run a command once per rank of this machine, and wait until all ranks have ended.

    Args:
        command: the program's full path and its arguments.
        options: number of processes and machines to start.
        on_restart: additional arguments of the command when it is restarted, such as `--resume`.

    Returns:
        The exit code for the launcher:

        - the largest exit code of the ranks if none of them failed: 0, 75 for a run that was
          stopped and saved a checkpoint, or 76 for a run that diverged;
        - if rank 0 failed and has printed its error: 2 for an invalid recipe or option, 76 for a
          run that diverged, otherwise 1;
        - if a signal stopped the launcher and a rank ended with a code other than 0, 75 or 76: 128
          plus the number of the signal.

    Raises:
        RankError: a rank other than 0 failed, a rank was killed, or the machines did not connect.
    """
    # Limit the number of threads. By default, each rank would start as many threads as there are
    # cores, and the ranks would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // options.nproc)))
    # Make a rank that crashes inside a library's native code print its Python traceback.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(
        number.name for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    )
    with _quiet(), tempfile.TemporaryDirectory(prefix="firstlight-ranks-") as temporary:
        agent = _Agent(command, options, tuple(on_restart), Path(temporary))
        result = None  # torch also returns None if the rendezvous is closed.
        problem = (
            "was closed by another machine before this one joined, because the run ended on that "
            "machine: restart the run on all machines"
        )
        try:
            result = agent.run()
        except SignalException as caught:
            # Leave the rendezvous open, because a different machine may replace this one.
            return agent.code_after_signal(caught.sigval)
        except RendezvousError as error:
            problem = (
                f"could not be reached, or not all {options.nnodes} machines connected "
                f"({error or type(error).__name__}): check --rdzv-endpoint, and start all machines"
            )
            if not agent.failed:
                # Do not close the rendezvous here, because other machines may still be waiting for
                # each other.
                raise RankError(f"the rendezvous {options.endpoint} {problem}") from error
        if agent.failed and options.nnodes > 1:
            # Wait before exiting, because this process may host the store, and ranks on other
            # machines still have to read the failure from it.
            time.sleep(_LINGER_SECONDS)
        agent.close()
        if agent.failed:
            return agent.code_after_failure()
        if result is None:
            where = options.endpoint or "of the processes"
            raise RankError(f"the rendezvous {where} {problem}")
        return max(code or 0 for code in agent.codes())


@dataclass(frozen=True)
class _Ended:
    """A rank that has failed. The attribute `code` is its exit code or, if a signal killed it, the
    negated signal number. The attribute `said` is its output, or "" for rank 0, whose output is
    written to the terminal.
    """

    rank: int
    pid: int
    code: int
    said: str = field(repr=False)

    @property
    def error(self) -> str:
        """The error with which the rank failed, as one line."""
        name = f"rank {self.rank} on {socket.gethostname()} (pid {self.pid}) failed:"
        lines = self.said.rstrip().splitlines()
        for line in reversed(lines):
            if line.startswith(_ERROR_START):
                error = line.removeprefix(_ERROR_START)
                # An error that begins with "rank " reports the failure of another rank.
                return error if error.startswith("rank ") else f"{name} {error}"
        if _TRACEBACK in lines:
            return f"{name} {lines[-1]}"
        if self.code < 0:
            hint = ": most likely out of memory" if self.code == -signal.SIGKILL else ""
            return f"{name} killed by {signal.Signals(-self.code).name}{hint}"
        return f"{name} exited with code {self.code}"


class _Agent(LocalElasticAgent):
    """torch's agent with the changes listed in this module's docstring.

    Attributes:
        failed: ranks of this machine that have failed since the ranks were last started, in the
            order in which they failed.
    """

    def __init__(
        self, command: Sequence[str], options: Launch, on_restart: tuple[str, ...], folder: Path
    ) -> None:
        self.failed: dict[int, _Ended] = {}
        self._folder = folder
        self._on_restart = on_restart
        self._starts = 0
        self._grace_ends = 0.0
        spec = WorkerSpec(
            role="rank",
            local_world_size=options.nproc,
            entrypoint=sys.executable,
            args=("-I", "-S", rank_start.__file__, str(folder), str(os.getpid()), *command),
            rdzv_handler=get_rendezvous_handler(_rendezvous(options)),
            max_restarts=options.max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)))

    def close(self) -> None:
        """Leave the rendezvous of the machines."""
        self._rdzv_handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # All machines use the restart count of the first machine. Each agent counts only the starts
        # that it has made itself, so the agents' counts differ after a machine has been replaced.
        key = "firstlight/start"
        group = cast(Any, worker_group)  # torch's type hints allow only None.
        if group.group_rank == 0:
            group.store.set(key, f"{self._starts}-{uuid.uuid4().hex}")
        said = group.store.get(key).decode()
        number = int(said.split("-")[0])
        os.environ[ROUND] = said
        if number > 0:
            worker_group.spec.args += self._on_restart
            self._on_restart = ()
        self._starts = number + 1
        self.failed = {}
        return cast(dict[int, Any], super()._start_workers(worker_group))

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        # torch 2.11 has no option for this time limit. Set it only after a signal. Before a
        # restart, torch's limit of 30 s is sufficient, because ranks that wait for a lost machine
        # can't save.
        if death_sig is not None and self._pcontext is not None:
            self._pcontext.close(death_sig, _SAVING_SECONDS)
        super()._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_at_ranks(worker_group)
        codes = self.codes()
        if None in codes and any(codes):
            if not self.failed or time.monotonic() < self._grace_ends:
                # Do not let torch's agent handle the failure yet. It would kill the running ranks
                # before they can report the failure.
                return RunResult(state=WorkerState.HEALTHY)
            cast(PContext, self._pcontext).close(signal.SIGKILL)
        result = cast(RunResult, super()._monitor_workers(worker_group))
        if result.state == WorkerState.FAILED:
            self._look_at_ranks(worker_group)
            if not self.failed:
                values = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
                return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
            if self._final_code() is not None:
                self._remaining_restarts = 0
            if self._remaining_restarts > 0:
                if not self._rank_0_has_said():
                    say(f"{_ERROR_START}{self._first().error}")
                most = worker_group.spec.max_restarts
                number = most - self._remaining_restarts + 1
                say(f"starting all ranks again ({number} of {most})")
        return result

    def _look_at_ranks(self, worker_group: WorkerGroup) -> None:
        """Record the ranks that have failed, and report the first failure to the other ranks."""
        for worker, code in zip(worker_group.workers, self.codes(), strict=True):
            rank = worker.global_rank
            if code is None or code in _ENDS or rank in self.failed:
                continue
            log = self._folder / f"rank-{rank}.log"
            said = log.read_text(errors="replace") if log.exists() else ""
            # torch prefixes each line of a traceback with the rank.
            said = said.replace(f"[rank{rank}]: ", "")
            self.failed[rank] = _Ended(rank, worker.id, code, said)
            if len(self.failed) == 1:
                self._grace_ends = time.monotonic() + _GRACE_SECONDS
                with contextlib.suppress(RuntimeError):
                    group = cast(Any, worker_group)
                    store = tcp_store(group.master_addr, group.master_port, _ANNOUNCING_SECONDS)
                    tell_failure(PrefixStore(os.environ[ROUND], store), self.failed[rank].error)

    def codes(self) -> list[int | None]:
        """Return the exit codes of this machine's ranks, ordered by local rank. The code of a
        running rank is None. The list is empty before the ranks are started.
        """
        if self._pcontext is None:
            return []
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        return [handlers[local_rank].proc.poll() for local_rank in sorted(handlers)]

    def _first(self) -> _Ended:
        return next(iter(self.failed.values()))

    def _final_code(self) -> int | None:
        """If a rank has failed with an error that would recur after a restart, return its exit
        code. Otherwise, return None.
        """
        return next((code for code in self.codes() if code in _FINAL_EXIT_CODES), None)

    def _rank_0_has_said(self) -> bool:
        """Return True if rank 0 has failed and printed its error to this terminal. Return False if
        a signal killed rank 0.
        """
        return 0 in self.failed and self.failed[0].code > 0

    def code_after_failure(self) -> int:
        """Return the exit code after a failure, as described for `launch`. If the output of the
        first failed rank contains a traceback, print the end of that output.

        Raises:
            RankError: rank 0 has not printed an error.
        """
        first = self._first()
        lines = first.said.rstrip().splitlines()
        if _TRACEBACK in lines:
            for line in lines[-_MAX_LINES:]:
                say(f"[rank{first.rank}]: {line}")
        if not self._rank_0_has_said():
            raise RankError(first.error)
        return self._final_code() or 1

    def code_after_signal(self, number: signal.Signals) -> int:
        """Return the exit code for a launcher that received a signal, as described for `launch`."""
        codes = self.codes()
        if not codes or not set(codes) <= set(_ENDS):
            return 128 + number
        return max(code or 0 for code in codes)


def _rendezvous(options: Launch) -> RendezvousParameters:
    """Return the parameters for torch's rendezvous of the machines. With a single machine, the
    rendezvous uses a free port on localhost, so that no host name has to be resolved.
    """
    alone = options.nnodes == 1
    return RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0" if alone else options.endpoint,
        run_id=uuid.uuid4().hex if alone else "firstlight",
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr="localhost" if alone else None,
        timeout=_RENDEZVOUS_SECONDS,
        # Without this argument, torch compares host names, and a container may be unable to resolve
        # its own host name.
        is_host=alone or options.node_rank == 0,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable logging within the context, because torch elastic logs many lines of tables for each
    failure.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
