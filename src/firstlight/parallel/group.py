"""Manage the process group of a run. The module also contains the collective operations between the
processes of a run, which it calls exchanges.

`process_group` opens torch's group after a rendezvous, watches the ranks by heartbeats, and closes
the group. All ranks must call the exchanges in the same order. In a world of one process, an
exchange returns its argument. Objects are sent with torch's object collectives.

Heartbeats detect ranks that have stopped answering. If a process is killed, stopped or stuck, the
other processes remain in the middle of an exchange, which ends only after the timeout, or never.
Each rank therefore has two background threads. The beating thread writes this rank's heartbeats to
torch's key-value store and reads the heartbeats of other ranks. The deciding thread decides whether
a rank has failed and, if necessary, ends this process. It never waits for the store, because the
store's host may have stopped. Rank 0 watches all ranks, and all ranks watch rank 0, so the traffic
grows linearly with the number of ranks.

The time since the last heartbeat is added up from short intervals during which this process was
running. A process that was itself stopped (SIGSTOP), or whose GIL was held for a minute, therefore
does not blame other processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from firstlight.errors import ConfigError, FirstlightError
from firstlight.parallel.rendezvous import (
    TALK_SECONDS,
    RankError,
    RankInfo,
    failure_of,
    hosted_by_agent,
    in_thread,
    open_store,
    own_info,
    rendezvous,
    tell_failure,
)
from firstlight.parallel.world import World

# The heartbeat

#: Time in seconds between two heartbeats, and between two decisions.
_BEAT_SECONDS = 1.0
_DECIDE_SECONDS = 0.25

#: Number of seconds without a heartbeat after which a rank is considered failed, once a collective
#: operation has failed.
_SUSPICIOUS_SECONDS = 5.0

#: Time limit in seconds for the main thread to notice a known failure and exit. A thread that waits
#: in a collective operation can't do this, because no Python exception reaches it there.
_GRACE_SECONDS = 3.0


class Heartbeat:
    """Watches the ranks of a world for failures, in two threads that the constructor starts.

    Args:
        store: the store of the ranks.
        own: the `RankInfo` of this process.
        infos: the `RankInfo` of every rank, ordered by rank.
        timeout_seconds: time in seconds without a heartbeat after which a rank is considered
            failed.

    Attributes:
        failure: message that reports the failure and names the failed rank; None if no rank has
            failed.
    """

    def __init__(
        self, store: PrefixStore, own: RankInfo, infos: Sequence[RankInfo], timeout_seconds: float
    ) -> None:
        self.failure: str | None = None
        # Use a separate connection to the store, because calls on the same connection wait for each
        # other.
        self._beat_store: PrefixStore = store.clone()  # type: ignore[attr-defined]
        self._store = store
        self._own = own
        self._infos = infos
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._beats: dict[int, bytes] = {}
        self._silent = dict.fromkeys(range(len(infos)), 0.0)
        self._store_silent = 0.0
        self._store_error = ""
        self._suspicious = False
        self._decided = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"firstlight-{work.__name__}", daemon=True)
            for work in (self._beat, self._decide_repeatedly)
        ]
        for thread in self._threads:
            thread.start()

    def blame(self) -> str | None:
        """After a collective operation has failed, wait until it is known which rank has failed.

        Returns:
            The message that reports the failure and names the failed rank; None if all ranks still
            answer.
        """
        # Watch all ranks with a shorter time limit, because any of them may have failed.
        self._suspicious = True
        # The time limit of a rank starts at its last heartbeat, which may have arrived just now.
        self._decided.wait(_SUSPICIOUS_SECONDS + 3 * _BEAT_SECONDS)
        return self.failure

    def report(self, message: str) -> None:
        """Tell the other ranks that this rank has failed."""
        tell_failure(self._store, f"{self._own.name} failed: {message}")

    def stop(self) -> None:
        """Stop the two background threads when the main thread leaves the group, with or without an
        error.
        """
        self._stopped.set()
        for thread in self._threads:
            # A thread that waits for a stopped store can't be joined, so it keeps running as a
            # daemon.
            thread.join(_BEAT_SECONDS)

    def _beat(self) -> None:
        """Run the beating thread. It writes this rank's heartbeats and reads the heartbeats of the
        watched ranks.
        """
        count = 0
        keys = [f"beat/{rank}" for rank in range(len(self._infos))]
        try:
            while True:
                count += 1
                self._beat_store.set(keys[self._own.rank], str(count))
                watched = self._watched()
                values = self._beat_store.multi_get([keys[rank] for rank in watched])
                failure = failure_of(self._beat_store)
                with self._lock:
                    self._store_silent = 0.0
                    for rank, value in zip(watched, values, strict=True):
                        if self._beats.get(rank) != value:
                            self._beats[rank] = value
                            self._silent[rank] = 0.0
                if failure is not None:
                    self._decide(failure)
                    return
                if self._stopped.wait(_BEAT_SECONDS):
                    return
        except RuntimeError as error:
            self._store_error = (str(error).splitlines() or [type(error).__name__])[0]

    def _watched(self) -> list[int]:
        others = [rank for rank in range(len(self._infos)) if rank != self._own.rank]
        return others if self._own.rank == 0 or self._suspicious else [0]

    def _decide_repeatedly(self) -> None:
        """Run the deciding thread. It finds failed ranks, and ends the process if the main thread
        does not end it in time.
        """
        before = time.monotonic()
        while not self._stopped.wait(_DECIDE_SECONDS):
            now = time.monotonic()
            # If much more time than `_DECIDE_SECONDS` has passed, this process itself was stopped.
            # Do not count the additional time against other ranks.
            passed, before = min(now - before, 2 * _DECIDE_SECONDS), now
            if self.failure is None:
                self._count(passed)
                continue
            if not self._stopped.wait(_GRACE_SECONDS):
                _end_process(self.failure)

    def _count(self, passed: float) -> None:
        """Add `passed` seconds to the time since each watched rank's last heartbeat, and to the
        time since the store last answered. Then decide whether any of these times exceeds the
        limit.
        """
        limit = min(self._timeout, _SUSPICIOUS_SECONDS) if self._suspicious else self._timeout
        with self._lock:
            self._store_silent += passed
            watched = self._watched()
            for rank in watched:
                self._silent[rank] += passed
            silent = max(watched, key=lambda rank: self._silent[rank])
            seconds, store_seconds = self._silent[silent], self._store_silent
        if self._store_error:
            self._decide(f"{self._store_owner()} is gone: {self._store_error}")
        elif store_seconds >= limit:
            self._decide(f"{self._store_owner()} has not answered for {store_seconds:.0f} s")
        elif seconds >= limit:
            info = self._infos[silent]
            self._decide(f"{info.name} (pid {info.pid}) has not answered for {seconds:.0f} s")
            tell_failure(self._store, str(self.failure))

    def _store_owner(self) -> str:
        if hosted_by_agent():
            return "the launcher (torch elastic's store, through which the ranks communicate)"
        return f"{self._infos[0].name} (pid {self._infos[0].pid})"

    def _decide(self, failure: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = failure
        self._decided.set()


def _end_process(failure: str) -> None:
    """Write the failure to stderr and end the process immediately, because no exception can reach
    the waiting main thread.

    The message is written directly to the file descriptor, because the main thread may hold the
    lock of Python's stderr object.
    """
    # Show the terminal's cursor again, because the live view of a run has hidden it.
    start = "\n\033[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{start}firstlight: error: {failure}\n".encode(errors="replace"))
    os._exit(1)


# The group

#: Default time limit in seconds for the rendezvous and for a collective operation, the same as
#: torch's default for NCCL.
DEFAULT_TIMEOUT_SECONDS = 600.0

#: Words that identify the error messages of collective operations. They are needed because gloo
#: raises plain RuntimeErrors.
_EXCHANGE_WORDS = ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup")

#: Time limit in seconds for closing a group after a failure.
_CLOSE_SECONDS = 1.5


def own_device(world: World, device: str) -> torch.device:
    """Return the device of this process. For "cuda", it is the GPU whose index is the local rank,
    or the only GPU that is visible.

    Args:
        world: this process's position in the run.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the device is not present, or `device` specifies a single GPU ("cuda:0") in a
            world of several processes.
    """
    if device != "cuda":
        if device.startswith("cuda:") and world.size > 1:
            raise ConfigError(
                f"device '{device}' can't be used by all {world.size} processes: set it to cuda, "
                "so that each process uses a separate GPU"
            )
        return torch.device(device)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("device 'cuda' is not present on this machine: set it to cpu")
    # If only one GPU is visible, assume that the launcher has assigned a separate GPU to each
    # process. If processes nevertheless share a GPU, `rendezvous.compare` rejects the run.
    index = 0 if count == 1 else world.local_rank
    if index >= count:
        raise ConfigError(
            f"there is no GPU for local rank {index}, because this machine has only {count}: start "
            "at most one process per GPU"
        )
    return torch.device("cuda", index)


@contextlib.contextmanager
def process_group(
    world: World,
    device: torch.device,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    *,
    fingerprint: str = "",
) -> Iterator[None]:
    """Open torch.distributed's default group within the context. In a world of one process, do
    nothing.

    All ranks must enter and leave the context. If one rank fails within the context, the context
    ends on all ranks with an error that names the failed rank (see `Heartbeat`). If the main thread
    is waiting in a collective operation, no exception can reach it. In this case, the process
    writes the failure to stderr and ends with exit code 1.

    Args:
        world: this process's position in the run.
        device: the device of this process's tensors. Tensors on the CPU are exchanged by gloo,
            tensors on GPUs by NCCL.
        timeout_seconds: time limit in seconds for the rendezvous and for a collective operation,
            and maximum time without a heartbeat from a rank.
        fingerprint: a hash of the recipe, which must be the same on all ranks.

    Raises:
        ConfigError: the timeout is not positive, or the ranks have different world sizes or
            recipes, or share a GPU.
        RankError: a rank did not connect, failed, or has stopped answering.
    """
    if world.size == 1:
        yield
        return
    if not timeout_seconds > 0:
        raise ConfigError(f"the timeout is {timeout_seconds} s: it must be greater than 0")
    own = own_info(world, device, fingerprint)
    store = open_store(world, timeout_seconds)
    heartbeat = None
    try:
        infos = rendezvous(store, own, timeout_seconds)
        heartbeat = Heartbeat(store, own, infos, timeout_seconds)
        _open_group(world, device, store, timeout_seconds)
        yield
        # A rank must not exit while another rank still needs it for a collective operation.
        barrier()
    except BaseException as error:
        failure = None
        if heartbeat is not None:
            failure = _failure_elsewhere(error, own, heartbeat)
            heartbeat.stop()
        # As soon as the group is closed, ranks that wait for this rank in a collective operation
        # get an error.
        _close_broken_group()
        if own.rank == 0 and not hosted_by_agent():
            # This process hosts the store, so the store ends together with it. Give the other ranks
            # some time to read the failure first.
            time.sleep(TALK_SECONDS)
        if failure is None:
            raise
        raise RankError(failure) from error
    heartbeat.stop()
    dist.destroy_process_group()


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Open a default process group that contains only this process, for libraries such as DeepSpeed
    that require a group.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _open_group(world: World, device: torch.device, store: Store, timeout_seconds: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _failure_elsewhere(error: BaseException, own: RankInfo, heartbeat: Heartbeat) -> str | None:
    """If the failure of another rank caused `error`, return the message that reports this failure.
    If this rank itself failed, inform the other ranks and return None.
    """
    broken = is_exchange_error(error)
    if broken:
        failure = heartbeat.blame()
        if failure is None:
            failure = (
                f"communication between the ranks failed, although all of them respond: "
                f"{_one_line(error)}"
            )
            heartbeat.report(failure)
            failure = f"{own.name}: {failure}"
    elif isinstance(error, Exception) and not isinstance(error, FirstlightError):
        # An unexpected error that occurs after another rank has failed is most likely a consequence
        # of that failure.
        failure = heartbeat.failure
    else:
        failure = None
    if failure is None:
        heartbeat.report(_one_line(error))
    return failure


def is_exchange_error(error: BaseException | None) -> bool:
    """Return True if an error, or any error in its chain of causes, was raised by a collective
    operation.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if not isinstance(error, FirstlightError) and any(w in str(error) for w in _EXCHANGE_WORDS):
            return True
        error = error.__cause__
    return False


def _one_line(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return f"it was stopped ({type(error).__name__})"
    text = " ".join(str(error).split())
    if isinstance(error, FirstlightError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _close_broken_group() -> None:
    """Close torch's group after a failure, if there is one."""
    if dist.is_initialized():
        # Use a thread, because torch may wait forever for a missing rank.
        with contextlib.suppress(RuntimeError, TimeoutError):
            in_thread(_CLOSE_SECONDS, dist.destroy_process_group)


# Exchanges


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor elementwise over all ranks, in place, and return it.

    Args:
        tensor: a tensor of any shape. Its shape, dtype and device type must be the same on all
            ranks.
    """
    if not _is_alone():
        dist.all_reduce(tensor)
    return tensor


def agree(flag: bool) -> bool:
    """Return True on all ranks if `flag` is True on any rank."""
    if _is_alone():
        return flag
    flags = torch.tensor([int(flag)], dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def barrier() -> None:
    """Wait until all ranks have called this function."""
    # Use gloo on the CPU even if the model is on GPUs, so that a rank does not have to wait for its
    # GPU kernels first.
    agree(False)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on all ranks. The values of other ranks are ignored."""
    if _is_alone():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks as a list, ordered by rank. Every rank gets the whole list."""
    if _is_alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_main(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0, return the tensors of all ranks, keyed by name. On every other rank, return only
    that rank's own tensors.

    Args:
        tensors: tensors on the CPU by name; each name exists on only one rank.
    """
    own = [
        (name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    ]
    described = gather_objects(own)
    found = dict(tensors)
    # torch matches sends and receives by their order. Both sides use the order of the exchanged
    # descriptions.
    if dist.get_rank() != 0:
        for tensor in tensors.values():
            dist.send(tensor.contiguous(), 0)
        return found
    for rank, theirs in enumerate(described[1:], start=1):
        for name, shape, dtype in theirs:
            assert name not in found
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(found[name], rank)
    return found
