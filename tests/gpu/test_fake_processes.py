"""The GPU of each process, the library that sends its tensors, and the calls to the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.memory import measured_memory
from firstlight.errors import ConfigError
from firstlight.hardware.device import (
    find_hardware,
    free_memory_bytes,
    peak_memory_bytes,
    synchronize,
)
from firstlight.parallel import World, own_device
from firstlight.parallel.engine import DistributedConfig
from firstlight.parallel.group import _open_group
from firstlight.parallel.rendezvous import own_info
from firstlight.parallel.sharding import FSDPEngine
from firstlight.training import processes
from firstlight.training.state import restore_torch_random_states, torch_random_states

from .no_gpu import H100, needs_no_gpu, torch_cuda
from .test_fake_steps import recipe_of

pytestmark = [pytest.mark.gpu, needs_no_gpu]

GPU = torch.device("cuda", 1)


def test_find_hardware_returns_gpu_and_rejects_missing_one() -> None:
    with torch_cuda(devices=2):
        for name, device in (("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")):
            found = find_hardware(name)
            assert found.device == torch.device(device)
            assert (found.name, found.memory_bytes) == (H100.name, 80 * 2**30)
            assert (found.bf16, found.capability) == (True, (9, 0))
        with pytest.raises(ConfigError, match="'cuda:2' is not present"):
            find_hardware("cuda:2")


def test_memory_and_time_are_measured_on_requested_device() -> None:
    with torch_cuda(devices=2) as asked:
        synchronize(GPU)
        assert free_memory_bytes(GPU) == 70 * 2**30
        assert peak_memory_bytes(GPU) == 5000
        assert asked.calls == [
            ("synchronize", (GPU,)),
            ("mem_get_info", (GPU,)),
            ("max_memory_allocated", (GPU,)),
        ]


def test_peak_memory_is_measured_from_its_start() -> None:
    with torch_cuda(devices=2) as asked:
        with measured_memory(GPU) as found:
            assert asked.calls == [
                ("reset_peak_memory_stats", (GPU,)),
                ("memory_allocated", (GPU,)),
            ]
        assert asked.calls[2:] == [("max_memory_allocated", (GPU,))]
    assert found.peak_bytes == 5000 - 1000


@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_each_process_takes_gpu_of_its_local_rank(
    local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(4 + local_rank, 8, local_rank, 4, "localhost", 12345)
    opened: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *a, **k: opened.append((a, k))
    )
    store = HashStore()

    def group(world: World, device: torch.device, *_: Any, **__: Any) -> Any:
        # The current device, on which NCCL creates its communicators, is set first.
        assert asked.current == local_rank
        _open_group(world, device, store, 60.0)
        return torch.no_grad()

    monkeypatch.setattr(processes, "process_group", group)
    monkeypatch.setattr(processes, "find_world", lambda: world)
    with (
        torch_cuda(devices=4) as asked,
        processes.run_processes(recipe_of(run__device="auto")) as (hardware, engine),
    ):
        assert hardware.device == engine.device == torch.device("cuda", local_rank)
        assert engine.name == "ddp"
    (((backend,), options),) = opened
    # Objects and flags are sent through the CPU, gradients with NCCL.
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["device_id"] == torch.device("cuda", local_rank)
    assert (options["rank"], options["world_size"]) == (4 + local_rank, 8)


def test_single_process_on_numbered_gpu_makes_it_current() -> None:
    with (
        torch_cuda(devices=4) as asked,
        processes.run_processes(recipe_of(run__device="cuda:3")) as (hardware, _),
    ):
        assert hardware.device == torch.device("cuda", 3)
        assert asked.current == 3
    assert asked.current == 0


def test_own_device_single_visible_gpu_is_used_by_every_process() -> None:
    with torch_cuda(devices=1):
        assert own_device(World(2, 4, 2, 4), "cuda") == torch.device("cuda", 0)
    with torch_cuda(devices=2), pytest.raises(ConfigError, match="local rank 2 has no GPU"):
        own_device(World(2, 4, 2, 4), "cuda")
    with torch_cuda(devices=2), pytest.raises(ConfigError, match="each process uses a separate"):
        own_device(World(0, 2, 0, 2), "cuda:1")


def test_own_info_contains_gpu_uuid() -> None:
    with torch_cuda(devices=2):
        assert own_info(World(1, 2, 1, 2), GPU, "f").gpu == H100.uuid
        assert own_info(World(1, 2, 1, 2), torch.device("cpu"), "f").gpu == ""


def test_fsdp_uses_nccl_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def mesh(kind: str, shape: Any, mesh_dim_names: Any) -> None:
        made.append((kind, shape, mesh_dim_names))

    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", mesh)
    config = DistributedConfig(engine="fsdp", shard=4)
    FSDPEngine(config, World(0, 8, 0, 8), torch.device("cuda", 0))._mesh()
    assert made == [("cuda", (2, 4), ("replicate", "shard"))]


def test_random_states_of_every_gpu_are_saved_and_restored() -> None:
    before = torch.get_rng_state()
    with torch_cuda(devices=2) as asked:
        saved = torch_random_states()
        assert saved.keys() == {"rng.cpu", "rng.cuda.0", "rng.cuda.1"}
        expected = [state.clone() for state in asked.states]
        for state in asked.states:
            state.fill_(99)
        torch.rand(3)
        restore_torch_random_states(saved)
        assert all(map(torch.equal, asked.states, expected))
        assert torch.equal(torch.get_rng_state(), before)
    with torch_cuda(devices=1) as asked:
        # On a machine with fewer GPUs, tests without a GPU are omitted.
        restore_torch_random_states(saved)
        assert torch.equal(asked.states[0], expected[0])
