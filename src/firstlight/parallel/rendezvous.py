"""The rendezvous of a run's processes, before they do anything else.

The processes connect to a key-value store (torch's TCPStore). torch elastic's agent hosts the
store; without an agent, rank 0 does. Each process writes a `RankInfo` there and reads those of the
others: world sizes and recipes must be equal, and ranks must differ. Processes wait by polling,
because a blocking call on the store would delay the handling of signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from firstlight.errors import ConfigError, TrainingError
from firstlight.parallel.world import World

#: Environment variable that `firstlight train --nproc` sets: the same in all processes of one
#: start, and different after a restart (--max-restarts).
ROUND = "FIRSTLIGHT_ROUND"

#: Key in the store with the message of the first failure.
FAILED = "failed"

#: Limit in seconds of calls on a store that may no longer answer.
TALK_SECONDS = 2.0

#: Seconds between two polls of the store, and limit in seconds of one attempt to connect to it.
_LOOK_SECONDS = 0.05
_ATTEMPT_SECONDS = 2.0


class RankError(TrainingError):
    """Another process of the run failed, stopped answering, or never connected."""


@dataclass(frozen=True)
class RankInfo:
    """The description of a process that the other processes read.

    Attributes:
        rank, size: the process' rank and the world size, from its launcher.
        host: name of its machine.
        pid: its process id.
        fingerprint: a hash of its recipe.
        gpu: the UUID of its GPU; "" without a GPU.
    """

    rank: int
    size: int
    host: str
    pid: int
    fingerprint: str
    gpu: str

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank} on {self.host}"


def own_info(world: World, device: torch.device, fingerprint: str) -> RankInfo:
    """The `RankInfo` of this process."""
    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return RankInfo(world.rank, world.size, socket.gethostname(), os.getpid(), fingerprint, gpu)


def hosted_by_agent() -> bool:
    """True if torch elastic's agent hosts the store; False if rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_hosting(world: World) -> bool:
    """True if this process hosts the store."""
    return world.rank == 0 and not hosted_by_agent()


def start_prefix() -> str:
    """The prefix of this start's keys in the store. Each start needs its own, because the agent's
    store outlives a restart."""
    return os.environ.get(ROUND) or f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def open_store(world: World, timeout_seconds: float) -> PrefixStore:
    """Connect to the store; rank 0 opens it if no agent hosts it.

    Raises:
        RankError: the store can't be reached within `timeout_seconds`.
        ConfigError: this process has to host the store and can't open the port.
    """
    if is_hosting(world):
        try:
            store = _tcp_store(world.host, world.port, timeout_seconds, hosted=True)
        except (dist.DistError, RuntimeError) as error:
            raise ConfigError(
                f"rank 0 can't open port {world.port} for the other ranks: set MASTER_PORT to a "
                f"free one ({_first_line(error)})"
            ) from error
        return PrefixStore(start_prefix(), store)
    _wait_for_port(world, timeout_seconds)
    try:
        store = _tcp_store(world.host, world.port, timeout_seconds)
    except (dist.DistError, RuntimeError) as error:
        raise RankError(_unreachable(world, timeout_seconds, _first_line(error))) from error
    return PrefixStore(start_prefix(), store)


def rendezvous(store: Store, own: RankInfo, timeout_seconds: float) -> list[RankInfo]:
    """Write this process' `RankInfo`, read those of all ranks, and compare them.

    Returns:
        The `RankInfo` of all ranks, in their order.

    Raises:
        RankError: ranks did not connect within `timeout_seconds`, or a rank failed before that.
        ConfigError: two processes have the same rank, or ranks have different world sizes or
            recipes, or share a GPU.
    """
    if store.add(f"came/{own.rank}", 1) > 1:
        problem = (
            f"{own.name} (pid {own.pid}): another process is rank {own.rank}, too: give each "
            "process another RANK"
        )
        tell_failure(store, problem)
        raise ConfigError(problem)
    # The heartbeat reads the keys of all ranks in one call, which would wait for a missing key.
    store.set(f"beat/{own.rank}", "0")
    store.set(f"info/{own.rank}", json.dumps(asdict(own)))
    deadline = time.monotonic() + timeout_seconds
    _wait_for(store, range(1), deadline, timeout_seconds)
    infos = [_info(store, 0)]
    # If this world size differs from rank 0's, waiting for all ranks could wait for ranks that
    # don't exist: the comparison with rank 0 alone fails already.
    if infos[0].size == own.size:
        _wait_for(store, range(own.size), deadline, timeout_seconds)
        infos = [_info(store, rank) for rank in range(own.size)]
    else:
        infos.append(own)
    try:
        compare(infos)
    except ConfigError as error:
        tell_failure(store, str(error))
        raise
    return infos


def compare(infos: Sequence[RankInfo]) -> None:
    """Check that all processes have the same world size and recipe, and GPUs of their own.

    Raises:
        ConfigError: a rank differs from rank 0, or two ranks share a GPU; the message names them.
    """
    first = infos[0]
    for info in infos:
        if info.size != first.size:
            raise ConfigError(
                f"{info.name} was started as one of {info.size} processes, and {first.name} as "
                f"one of {first.size}: start all with the same world size"
            )
    others = [info for info in infos if info.fingerprint != first.fingerprint]
    if others:
        raise ConfigError(
            f"{_names(others)} {'has' if len(others) == 1 else 'have'} another recipe than "
            f"{first.name}: start all with the same recipe, options and version of firstlight"
        )
    owners: dict[str, RankInfo] = {}
    for info in infos:
        if info.gpu and owners.setdefault(info.gpu, info) is not info:
            raise ConfigError(
                f"ranks {owners[info.gpu].rank} and {info.rank} on {info.host} share one GPU: "
                "start at most as many processes as there are GPUs"
            )


def tell_failure(store: Store, text: str) -> None:
    """Tell all ranks why the run ends, unless another process has told a reason already.

    Args:
        store: the store of the ranks.
        text: the message, one line that names the failed rank.
    """
    # Only the first failure is the cause; later ones follow from it.
    at_most(TALK_SECONDS, lambda: store.compare_set(FAILED, "", text))


def announce(host: str, port: int, prefix: str, text: str) -> None:
    """`tell_failure` for the launcher, which is not a rank: connects to the store at `host` and
    `port`, whose keys begin with `prefix`. An unreachable store is ignored."""
    with contextlib.suppress(RuntimeError):
        tell_failure(PrefixStore(prefix, _tcp_store(host, port, _ATTEMPT_SECONDS)), text)


def at_most(seconds: float, talk: Callable[[], object]) -> None:
    """Make calls on a store, and wait for them a limited time. If the store's host has stopped, a
    call may never return, whatever its own timeout. Errors of the calls are ignored.

    Args:
        seconds: limit of the wait; calls that take longer continue in a daemon thread.
        talk: the function that makes the calls.
    """

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            talk()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def failure_of(store: Store) -> str | None:
    """The message that `tell_failure` has written; None if no rank has failed."""
    return store.get(FAILED).decode() if store.check([FAILED]) else None


def _wait_for_port(world: World, timeout_seconds: float) -> None:
    """Wait until the store's port accepts connections, because torch's own waiting ignores signals
    and logs every attempt."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with socket.create_connection((world.host, world.port), _ATTEMPT_SECONDS) as found:
                # On Linux a connection to a free port on this machine may connect to itself.
                if found.getsockname() != found.getpeername():
                    return
                problem = "no process listens there"
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise RankError(_unreachable(world, timeout_seconds, problem))
        time.sleep(_LOOK_SECONDS)


def _unreachable(world: World, timeout_seconds: float, problem: str) -> str:
    return (
        f"rank {world.rank} on {socket.gethostname()} could not reach the rendezvous at "
        f"{world.host}:{world.port} within {timeout_seconds:.0f} s ({problem}): check that rank 0 "
        "runs there"
    )


def _tcp_store(host: str, port: int, seconds: float, *, hosted: bool = False) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=hosted,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for(store: Store, ranks: range, deadline: float, timeout_seconds: float) -> None:
    """Wait until ranks have written their `RankInfo`.

    Raises:
        RankError: a rank has failed, or ranks are missing at the deadline.
    """
    missing = list(ranks)
    while missing := [rank for rank in missing if not store.check([f"info/{rank}"])]:
        failure = failure_of(store)
        if failure is not None:
            raise RankError(failure)
        if time.monotonic() >= deadline:
            names = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            raise RankError(
                f"{names} did not connect within {timeout_seconds:.0f} s: see their messages, and "
                "check that all were started"
            )
        time.sleep(_LOOK_SECONDS)


def _info(store: Store, rank: int) -> RankInfo:
    return RankInfo(**json.loads(store.get(f"info/{rank}")))


def _names(infos: Sequence[RankInfo]) -> str:
    return ", ".join(info.name for info in infos)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
