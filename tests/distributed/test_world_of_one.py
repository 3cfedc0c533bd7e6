"""Communication between ranks costs a plain process nothing, and states of ranks are compared."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from firstlight.errors import ConfigError, DataError
from firstlight.parallel import (
    World,
    agree,
    all_reduce_sum,
    barrier,
    broadcast_object,
    gather_objects,
    own_device,
    process_group,
)
from firstlight.parallel.elastic import Launch
from firstlight.parallel.engine import DDPEngine, DistributedConfig
from firstlight.parallel.group import group_of_one, is_exchange_error
from firstlight.parallel.rendezvous import RankError, RankInfo, compare

pytestmark = pytest.mark.usefixtures("forked_processes")

PLAIN = World(0, 1, 0, 1)
TWO = World(0, 2, 0, 2, "127.0.0.1", 1)


def test_world_of_one_makes_no_group_and_returns_input() -> None:
    tensor = torch.tensor([1.5])
    value = {"a": (1, 2)}
    with process_group(PLAIN, torch.device("cpu")):
        assert not dist.is_initialized()
        assert all_reduce_sum(tensor) is tensor
        assert broadcast_object(value) is value
        assert gather_objects(value) == [value]
        assert agree(True) is True
        assert agree(False) is False
        barrier()
    assert tensor.item() == 1.5


def test_world_of_one_error_is_raised_unchanged() -> None:
    with pytest.raises(DataError, match="damaged"), process_group(PLAIN, torch.device("cpu")):
        raise DataError("damaged")


def test_world_timeout_must_be_positive() -> None:
    for seconds in (0.0, -1.0, float("nan")):
        with (
            pytest.raises(ConfigError, match="must be greater than 0"),
            process_group(TWO, torch.device("cpu"), seconds),
        ):
            pass


def test_own_device_gives_each_process_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    second = World(1, 2, 1, 2, "h", 1)
    assert own_device(second, "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(second, "cuda") == torch.device("cuda", 1)
    assert own_device(PLAIN, "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:1' can't be used by all 2 processes"):
        own_device(second, "cuda:1")
    with pytest.raises(
        ConfigError, match="no GPU for local rank 2, because this machine has only 2"
    ):
        own_device(World(2, 4, 2, 4, "h", 1), "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device(second, "cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="not present"):
        own_device(second, "cuda")


INFOS = [RankInfo(rank, 3, f"node{rank}", 100 + rank, "recipe", f"GPU-{rank}") for rank in range(3)]


def test_compare_ranks_of_same_world_raises_nothing() -> None:
    compare(INFOS)
    compare([dataclasses.replace(info, gpu="") for info in INFOS])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({1: {"size": 4}}, "rank 1 on node1 was started as one of 4 processes, but rank 0 on"),
        ({2: {"fingerprint": "x"}}, "rank 2 on node2 has a different recipe than rank 0 on node0"),
        (
            {1: {"fingerprint": "x"}, 2: {"fingerprint": "y"}},
            "rank 1 on node1, rank 2 on node2 have a different recipe than rank 0 on node0",
        ),
        ({2: {"gpu": "GPU-1"}}, "ranks 1 and 2 on node2 share one GPU"),
    ],
)
def test_find_world_gpus_of_different_worlds_raise(
    changes: dict[int, dict[str, int | str]], message: str
) -> None:
    infos = [
        dataclasses.replace(info, **changes.get(info.rank, {}))  # type: ignore[arg-type]
        for info in INFOS
    ]
    with pytest.raises(ConfigError) as caught:
        compare(infos)
    assert message in str(caught.value)


def test_is_exchange_error_recognises_error_by_cause() -> None:
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    wrapped = RuntimeError("a forward pass failed")
    wrapped.__cause__ = broken
    assert is_exchange_error(broken)
    assert is_exchange_error(wrapped)
    assert is_exchange_error(dist.DistNetworkError("Broken pipe"))
    assert not is_exchange_error(RuntimeError("out of memory"))
    assert not is_exchange_error(RankError("rank 1 failed: gloo"))
    assert not is_exchange_error(None)


@pytest.mark.parametrize(
    "numbers, message",
    [
        (
            {"nproc": 1, "nnodes": 2, "node_rank": 2, "endpoint": "h:1"},
            "machines are numbered 0 to 1",
        ),
        ({"nproc": 1, "nnodes": 2}, "--nnodes needs --rdzv-endpoint"),
    ],
)
def test_find_world_invalid_launches_raise_config_error(
    numbers: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Launch(**numbers)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_ddp_reducer_at_exit_is_freed_before_process_group() -> None:
    """As the last owner of a gloo group, the reducer would free it while holding the interpreter's
    lock, which gloo's threads may need to exit.
    """
    cpu = torch.device("cpu")
    engine = DDPEngine(DistributedConfig(engine="ddp"), PLAIN, cpu)
    with group_of_one(cpu):
        with engine.session():
            forward = engine.share(cast(Any, torch.nn.Linear(2, 2)), "fp32")
            owners = [weakref.ref(getattr(forward, name)) for name in ("reducer", "logger")]
            assert None not in [owner() for owner in owners]
        assert dist.is_initialized()
        assert [owner() for owner in owners] == [None, None]
