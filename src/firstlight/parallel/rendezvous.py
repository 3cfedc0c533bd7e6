"""The rendezvous of a run's processes, before they do anything else.

The processes connect to a key-value store (torch's TCPStore), which torch elastic's agent hosts, or
rank 0 without an agent. Each writes a `RankInfo` there and reads those of the others: the sizes
must be the same, the ranks different, and the recipes equal. Waiting is polling, so that a signal
gets through.
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

#: Variable that `firstlight train --nproc` sets: the same in all processes of one start, and
#: another after a restart (--max-restarts).
ROUND = "FIRSTLIGHT_ROUND"

#: Key of the store for the message of the first failure.
FAILED = "failed"

#: Seconds for the last calls on a store that may not answer.
TALK_SECONDS = 2.0

#: Seconds between two looks at the store, and seconds of one attempt to reach it.
_LOOK_SECONDS = 0.05
_ATTEMPT_SECONDS = 2.0


class RankError(TrainingError):
    """Another process of the run failed, vanished or never came."""


@dataclass(frozen=True)
class RankInfo:
    """A process, as it introduces itself to the others.

    Attributes:
        rank, size: its rank and the world's size, from its launcher.
        host: its machine's name.
        pid: its process id.
        fingerprint: a hash of its recipe.
        gpu: the UUID of its GPU; "" without one.
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
    """True if torch elastic's agent hosts the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_hosting(world: World) -> bool:
    """True if this process hosts the store."""
    return world.rank == 0 and not hosted_by_agent()


def start_prefix() -> str:
    """The prefix of this start's keys in the store: the agent's store outlives a restart."""
    return os.environ.get(ROUND) or f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def open_store(world: World, timeout_seconds: float) -> PrefixStore:
    """Connect to the store, or host it.

    Raises:
        RankError: the store can't be reached in time.
        ConfigError: the port is taken.
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
        All ranks, in their order.

    Raises:
        RankError: ranks did not connect within the time, or a rank failed before that.
        ConfigError: ranks have different world sizes, or different recipes.
    """
    if store.add(f"came/{own.rank}", 1) > 1:
        problem = (
            f"{own.name} (pid {own.pid}): another process is rank {own.rank}, too: give each "
            "process another RANK"
        )
        tell_failure(store, problem)
        raise ConfigError(problem)
    # The heartbeat reads the keys of all ranks in one call, which would wait for a missing one.
    store.set(f"beat/{own.rank}", "0")
    store.set(f"info/{own.rank}", json.dumps(asdict(own)))
    deadline = time.monotonic() + timeout_seconds
    _wait_for(store, range(1), deadline, timeout_seconds)
    infos = [_info(store, 0)]
    # With another size than rank 0's, some may wait for ranks that don't exist.
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
    """Check that processes are of one world, have one recipe, and a GPU each.

    Raises:
        ConfigError: a rank differs from rank 0 (named).
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
    """Tell all ranks why the run ends, unless another process has already.

    Args:
        store: the store of the ranks.
        text: the message, one line that names a rank.
    """
    # Only the first failure is the cause; later ones follow from it.
    at_most(TALK_SECONDS, lambda: store.compare_set(FAILED, "", text))


def announce(host: str, port: int, prefix: str, text: str) -> None:
    """`tell_failure` for the launcher, which is not a rank."""
    with contextlib.suppress(RuntimeError):
        tell_failure(PrefixStore(prefix, _tcp_store(host, port, _ATTEMPT_SECONDS)), text)


def at_most(seconds: float, talk: Callable[[], object]) -> None:
    """Call a store that may have gone, or whose host may have stopped: no call on it is sure to
    return then, whatever its timeout.

    Args:
        seconds: limit of the wait; calls that take longer go on in their thread, unobserved.
        talk: the calls on the store.
    """

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            talk()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def failure_of(store: Store) -> str | None:
    """The message of `tell_failure`; None without one."""
    return store.get(FAILED).decode() if store.check([FAILED]) else None


def _wait_for_port(world: World, timeout_seconds: float) -> None:
    """Wait until the port answers. torch's own waiting ignores signals, and logs every attempt."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with socket.create_connection((world.host, world.port), _ATTEMPT_SECONDS) as found:
                # A connection to an ephemeral port may be connected to itself.
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
