"""Connect the processes of a run. This rendezvous precedes all other communication between the
processes.

The processes connect to torch's key-value store (TCPStore). The store is hosted by torch elastic's
agent or, without an agent, by rank 0. Each process writes its own `RankInfo` to the store and reads
the `RankInfo` of every other process. World sizes and recipes must be equal, and ranks must differ.
These conditions are checked before `init_process_group` is called, because ranks of different
worlds would wait for each other there until the timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from firstlight.errors import ConfigError, FirstlightError, TrainingError
from firstlight.parallel.world import World

T = TypeVar("T")

#: Environment variable set by `firstlight train --nproc`. Its value identifies one start of the
#: run: it is the same in all processes, and changes with every restart (`--max-restarts`).
ROUND = "FIRSTLIGHT_ROUND"

#: Key in the store that contains the message of the first failure.
FAILED = "failed"

#: Time limit in seconds for calls to a store that may have stopped answering.
TALK_SECONDS = 2.0

#: Time in seconds between two checks for ranks that have not connected yet.
_LOOK_SECONDS = 0.05


class RankError(TrainingError):
    """Raised if another process of the run has failed, has stopped answering or never connected."""


@dataclass(frozen=True)
class RankInfo:
    """Description of a process that the other processes read.

    Attributes:
        rank, size: the process's rank and the world size, from its launcher.
        host: name of the process's machine.
        pid: process id.
        fingerprint: hash of the process's recipe.
        gpu: UUID of the process's GPU; "" without a GPU.
    """

    rank: int
    size: int
    host: str
    pid: int
    fingerprint: str
    gpu: str

    @property
    def name(self) -> str:
        """Name of the rank, for use in messages."""
        return f"rank {self.rank} on {self.host}"


def own_info(world: World, device: torch.device, fingerprint: str) -> RankInfo:
    """Return the `RankInfo` of this process."""
    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return RankInfo(world.rank, world.size, socket.gethostname(), os.getpid(), fingerprint, gpu)


def hosted_by_agent() -> bool:
    """Return True if torch elastic's agent hosts the store, and False if rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(world: World, timeout_seconds: float) -> PrefixStore:
    """Connect to the store. If no agent hosts the store, rank 0 opens it.

    Raises:
        RankError: the store can't be reached within `timeout_seconds`.
        ConfigError: this process must host the store, but can't open the port.
    """
    hosting = world.rank == 0 and not hosted_by_agent()
    try:
        # Connect in a thread, because torch does not handle signals while it waits for rank 0.
        store = in_thread(
            timeout_seconds + TALK_SECONDS,
            lambda: tcp_store(world.host, world.port, timeout_seconds, hosting=hosting),
        )
    except (RuntimeError, TimeoutError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        if hosting:
            raise ConfigError(
                f"rank 0 can't open port {world.port} for the other ranks ({problem}): set "
                "MASTER_PORT to a free port"
            ) from error
        raise RankError(
            f"rank {world.rank} on {socket.gethostname()} could not reach the rendezvous at "
            f"{world.host}:{world.port} within {timeout_seconds:.0f} s ({problem}): check that "
            "rank 0 is running there"
        ) from error
    # Each start of the run uses different keys, because the agent's store outlives a restart.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(os.environ.get(ROUND) or f"start-{restarts}", store)


def rendezvous(store: Store, own: RankInfo, timeout_seconds: float) -> list[RankInfo]:
    """Write this process's `RankInfo`, read the `RankInfo` of every rank, and compare them.

    Returns:
        The `RankInfo` of each rank, ordered by rank.

    Raises:
        RankError: some ranks did not connect within `timeout_seconds`, or a rank failed before
            then.
        ConfigError: two processes have the same rank, or ranks have different world sizes or
            recipes, or share a GPU.
    """
    try:
        if store.add(f"came/{own.rank}", 1) > 1:
            raise ConfigError(
                f"{own.name} (pid {own.pid}): another process also has rank {own.rank}: give each "
                "process a different RANK"
            )
        # Set this key early, because the heartbeat reads the keys of all ranks in one call, which
        # would wait for a missing key.
        store.set(f"beat/{own.rank}", "0")
        store.set(f"info/{own.rank}", json.dumps(asdict(own)))
        keys = [f"info/{rank}" for rank in range(own.size)]
        deadline = time.monotonic() + timeout_seconds
        # Poll the store. A blocking call would delay the reaction to signals and failed ranks.
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            if (failure := failure_of(store)) is not None:
                raise RankError(failure)
            if time.monotonic() >= deadline:
                names = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
                raise RankError(
                    f"{names} did not connect within {timeout_seconds:.0f} s: see their messages, "
                    "and check that all were started"
                )
            time.sleep(_LOOK_SECONDS)
        infos = [RankInfo(**json.loads(text)) for text in store.multi_get(keys)]
        compare(infos)
    except RuntimeError as error:
        raise RankError(
            f"{own.name} lost its connection to the rendezvous: see the messages of rank 0"
        ) from error
    except BaseException as error:
        is_known = isinstance(error, FirstlightError)
        tell_failure(store, str(error) if is_known else f"{own.name} was stopped")
        raise
    return infos


def compare(infos: Sequence[RankInfo]) -> None:
    """Check that all processes have the same world size and recipe, and that no two share a GPU.

    Raises:
        ConfigError: a rank differs from rank 0, or two ranks share a GPU; the message names them.
    """
    first = infos[0]
    for info in infos:
        if info.size != first.size:
            raise ConfigError(
                f"{info.name} was started as one of {info.size} processes, but {first.name} as "
                f"one of {first.size}: start all with the same world size"
            )
    others = [info.name for info in infos if info.fingerprint != first.fingerprint]
    if others:
        raise ConfigError(
            f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} a different recipe than "
            f"{first.name}: start all with the same recipe, options and firstlight version"
        )
    owners: dict[str, RankInfo] = {}
    for info in infos:
        if info.gpu and owners.setdefault(info.gpu, info) is not info:
            raise ConfigError(
                f"ranks {owners[info.gpu].rank} and {info.rank} on {info.host} share one GPU: "
                "start at most as many processes as there are GPUs"
            )


def tell_failure(store: Store, text: str) -> None:
    """Write to the store why the run is ending, so that all ranks can read the reason. Do nothing
    if another process has already written a reason, or if the store does not answer.

    Args:
        store: the store of the ranks.
        text: a message of one line that names the failed rank.
    """
    with contextlib.suppress(RuntimeError, TimeoutError):
        # Keep only the first failure, because later failures are consequences of it.
        in_thread(TALK_SECONDS, lambda: store.compare_set(FAILED, "", text))


def failure_of(store: Store) -> str | None:
    """Return the message that `tell_failure` has written, or None if no rank has failed."""
    return store.get(FAILED).decode() if store.check([FAILED]) else None


def tcp_store(host: str, port: int, seconds: float, *, hosting: bool = False) -> TCPStore:
    """Connect to the store at `host` and `port`. If `hosting` is True, open this store first."""
    return TCPStore(
        host,
        port,
        is_master=hosting,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def in_thread(seconds: float, talk: Callable[[], T]) -> T:
    """Call a function in a daemon thread and return its result. Use this function for calls to a
    store whose host may have stopped. A direct call might then never return, regardless of its
    timeout, and signals would not be handled in the meantime.

    Raises:
        TimeoutError: the function takes longer than `seconds`.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(talk())
        # Pass any error to the caller; otherwise, the caller would wait for a thread that has
        # already ended.
        except BaseException as error:  # noqa: BLE001
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result.result(seconds)
