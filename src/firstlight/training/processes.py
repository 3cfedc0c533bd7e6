"""The processes of a run: how each finds its place, and what only one of them does."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

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
from firstlight.parallel.selection import make_engine
from firstlight.recipe import Recipe

T = TypeVar("T")


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
            hardware = stack.enter_context(_join_others(recipe, world))
        if recipe.run.deterministic:
            require_same_bits(hardware)
        engine = make_engine(recipe.distributed, world, hardware.device)
        stack.enter_context(engine.session())
        yield hardware, engine


@contextlib.contextmanager
def _join_others(recipe: Recipe, world: World) -> Iterator[Hardware]:
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
