"""The process group of a run: opened after a rendezvous, kept alive by heartbeats, and closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from firstlight.errors import ConfigError, FirstlightError
from firstlight.parallel.heartbeat import Heartbeat, linger
from firstlight.parallel.rendezvous import (
    RankError,
    RankInfo,
    is_hosting,
    open_store,
    own_info,
    rendezvous,
    tell_failure,
)
from firstlight.parallel.world import World

#: Limit of a collective operation: torch's own.
DEFAULT_TIMEOUT_SECONDS = 600.0

#: Words in the errors of an exchange between ranks; gloo's errors are plain RuntimeErrors.
_EXCHANGE_WORDS = ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup")

#: Seconds to close a group in which something is broken.
_CLOSE_SECONDS = 1.5


def own_device(world: World, device: str) -> torch.device:
    """The device of this process: for "cuda", the GPU of its local rank.

    Args:
        world: this process among the others.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the device is not there; or one GPU by number for several processes.
    """
    if device != "cuda":
        if device.startswith("cuda:") and world.size > 1:
            raise ConfigError(
                f"device '{device}' can't be that of all {world.size} processes: use cuda, and "
                "each takes its own"
            )
        return torch.device(device)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("device 'cuda' is not present on this machine")
    # With one visible, the launcher has given each process its own (or all the same one, which
    # the rendezvous finds out).
    index = 0 if count == 1 else world.local_rank
    if index >= count:
        raise ConfigError(f"local rank {index} has no GPU on this machine, which has {count}")
    return torch.device("cuda", index)


@contextlib.contextmanager
def process_group(
    world: World,
    device: torch.device,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    *,
    fingerprint: str = "",
) -> Iterator[None]:
    """torch.distributed's default group inside the block; nothing in a world of one.

    All ranks have to enter and to leave. While they are inside, a failure of one rank ends the
    block on all, with an error that names the rank (see heartbeat.py). Where the main thread can't
    be reached, in the middle of an exchange, the process says so on stderr and ends with exit code
    1.

    Args:
        world: this process among the others.
        device: the device of its tensors: exchanges go by gloo for the CPU, and NCCL for GPUs.
        timeout_seconds: limit of the rendezvous, of an exchange between ranks, and of the silence
            of a rank.
        fingerprint: a hash of the recipe; has to be the same on all ranks.

    Raises:
        ConfigError: the ranks are of different worlds, or are about to do different things.
        RankError: a rank did not come, failed, or is gone.
    """
    if world.size == 1:
        yield
        return
    if not timeout_seconds > 0:
        raise ConfigError(f"the timeout is {timeout_seconds} s: it has to be more than 0")
    own = own_info(world, device, fingerprint)
    store, infos = _join(world, own, timeout_seconds)
    heartbeat = Heartbeat(
        (_again(store), _again(store)), own, infos, timeout_seconds, hosting=is_hosting(world)
    )
    try:
        try:
            _open_group(world, device, store, timeout_seconds)
            yield
        except BaseException as error:
            failure = _failure_elsewhere(error, own, heartbeat)
            if failure is None:
                raise
            raise RankError(failure) from error
        heartbeat.leave()
    except BaseException:
        heartbeat.let_go()
        # A rank that waits for this one in an exchange gets its error at once.
        _close_group(broken=True)
        heartbeat.linger()
        heartbeat.stop()
        raise
    heartbeat.stop()
    _close_group(broken=False)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """torch's default group of this process alone, for libraries that need one."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _join(
    world: World, own: RankInfo, timeout_seconds: float
) -> tuple[PrefixStore, list[RankInfo]]:
    store = open_store(world, timeout_seconds)
    try:
        infos = rendezvous(store, own, timeout_seconds)
    except FirstlightError:
        linger(store, own, hosting=is_hosting(world))
        raise
    except RuntimeError as error:
        raise RankError(
            f"{own.name} lost {world.host}:{world.port}, where the ranks meet: look at what "
            "rank 0 said"
        ) from error
    except BaseException:
        tell_failure(store, f"{own.name} was stopped")
        raise
    return store, infos


def _again(store: PrefixStore) -> Store:
    """Another connection to the store: a call on the first one may be waiting."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]


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
    """The failure of another rank that ended the block; None if this rank failed, which the
    others are told."""
    broken = is_exchange_error(error)
    if broken:
        failure = heartbeat.blame()
        if failure is None:
            failure = f"an exchange between the ranks failed, and all answer: {_one_line(error)}"
            heartbeat.report(failure)
            failure = f"{own.name}: {failure}"
    elif isinstance(error, Exception) and not isinstance(error, FirstlightError):
        # An error after another rank's end is most likely a consequence of that.
        failure = heartbeat.failure
    else:
        failure = None
    if failure is None:
        heartbeat.report(_one_line(error))
    return failure


def is_exchange_error(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is an error of an exchange between ranks."""
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


def _close_group(*, broken: bool) -> None:
    """Close torch's group, if there is one."""
    if not dist.is_initialized():
        return
    if not broken:
        dist.destroy_process_group()
        return
    # torch may wait for a missing rank.
    thread = threading.Thread(target=_destroy, daemon=True)
    thread.start()
    thread.join(_CLOSE_SECONDS)


def _destroy() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
