"""The processes of a run: how each finds its place, and what only one of them does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from firstlight.efficiency import require_same_bits
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.parallel import (
    World,
    agree,
    barrier,
    broadcast_object,
    find_world,
    gather_objects,
    own_device,
    process_group,
)
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe

T = TypeVar("T")

_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


@contextlib.contextmanager
def run_processes(recipe: Recipe) -> Iterator[tuple[Hardware, Engine]]:
    """Meet the other processes of the run that this one was started for, if there are any.

    Args:
        recipe: has to be the same in all.

    Yields:
        (this process' hardware, what they share the model by).

    Raises:
        ConfigError: the processes are not those of one run, or the engine is not for them.
        RankError: one of them did not come, failed, or is gone.
    """
    world = find_world()
    with contextlib.ExitStack() as stack:
        if world.size == 1:
            hardware = find_hardware(recipe.run.device)
            if hardware.device.type == "cuda":
                # Else what asks for no device by number would begin on the first GPU, too.
                stack.enter_context(torch.cuda.device(hardware.device))
        else:
            hardware = stack.enter_context(_met(recipe, world))
        if recipe.run.deterministic:
            require_same_bits(hardware)
        engine = Engine(recipe.distributed, world, hardware.device)
        if engine.name == "deepspeed":
            if world.size == 1:
                stack.enter_context(group_of_one(hardware.device))
            stack.enter_context(deepspeed_session(world, hardware.device))
        yield hardware, engine


@contextlib.contextmanager
def _met(recipe: Recipe, world: World) -> Iterator[Hardware]:
    """The hardware of this process, once all processes of the run have met."""
    name = recipe.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_device(world, name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    text = json.dumps(recipe.model_dump(), sort_keys=True)
    with process_group(
        world,
        device,
        recipe.distributed.timeout_seconds,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    ):
        yield find_hardware(str(device))


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """torch's default group of this process alone, for libraries that need one."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def deepspeed_session(world: World, device: torch.device) -> Iterator[None]:
    """A context in which DeepSpeed works; what it changes for the whole process is undone after it.

    Inside, LOCAL_RANK is the index of this process's device, which DeepSpeed reads from there. Only
    torchrun's kind of launcher sets LOCAL_RANK; and where a launcher shows each process one GPU
    alone, its local rank is not that GPU's index. DeepSpeed refuses a LOCAL_RANK that differs from
    Open MPI's variable, so that one is set, too.

    Args:
        world: this process among the others.
        device: the device of this process.
    """
    index = (device.index or 0) if device.type == "cuda" else world.local_rank
    names = ["LOCAL_RANK"]
    if _OPEN_MPI_LOCAL_RANK in os.environ:
        names.append(_OPEN_MPI_LOCAL_RANK)
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(index)))
    # Stage 3 puts a function of its own in place of this one, which other models can't use.
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def on_main(engine: Engine, compute: Callable[[], T]) -> T:
    """What the main process computes, on all; it must be what JSON can hold."""
    result: T = broadcast_object(compute() if engine.is_main else None)
    return result


def wait_for_main(engine: Engine, act: Callable[[], None]) -> None:
    """Have the main process do something, and all go on once it is done."""
    if engine.is_main:
        act()
    barrier()


def first_reason(engine: Engine, reason: str | None) -> str | None:
    """The reason to stop of the first process that has one, on all."""
    if not agree(reason is not None):
        return None
    return next((one for one in gather_objects(reason) if one is not None), None)
