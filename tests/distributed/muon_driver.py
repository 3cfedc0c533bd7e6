"""Muon steps in several processes and in one. Prints one JSON line per case: the largest
differences of the final weights and state, the smallest change of a weight, and the number of
matrices that the main process orthogonalizes with others and alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from gradient_driver import DEVICE, T, cut, global_batch, model_of
from plain_recipe import plain_recipe
from torch import Tensor

from firstlight.hardware.device import find_hardware
from firstlight.optim import muon
from firstlight.optim.dtensors import full_tensor
from firstlight.parallel import find_world, process_group
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.parallel.group import gather_to_main
from firstlight.training.program import TrainingProgram


def trained(
    case: dict[str, Any], engine: Engine | None, rows: int, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the optimizer's state after some steps of this many rows. Without an
    engine, use one process.
    """
    model = model_of(case["family"], torch.float64, 1)
    recipe = plain_recipe(
        {
            "data": {"dir": "none", "seq_len": T},
            "batch": {"micro_batch_size": 1},
            "optimizer": {"name": "muon", "learning_rate": 2e-3, **case["optimizer"]},
            "efficiency": {"precision": "fp32", "compile": False},
            "model": {"model_type": "llama"},
        }
    ).model_copy(update={"model": model.config})
    if engine is not None and engine.config.pipeline > 1:
        values = model.state_dict()
        model = engine.new_model(model.config, 1).to(torch.float64)
        model.load_state_dict({name: values[name] for name in model.state_dict()})
    program = TrainingProgram(recipe, model, find_hardware(str(DEVICE)), engine)
    ids, labels = global_batch(rows, "unequal")
    rank, size = (0, 1) if engine is None else (engine.rank, engine.size)
    for step in range(steps):
        turned = (ids + step) % 61
        program.step(cut(turned, labels, 1, rank, size), 1 / (1 + step / 10))
    weights = {n: full_tensor(p.detach()) for n, p in program.model.named_parameters()}
    state = program.optimizer.state_tensors()
    if engine is not None and engine.config.pipeline > 1:
        weights, state = gather_to_main(weights), gather_to_main(state)
    return weights, state


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets an entry for each matrix, or stack of matrices, that is
    orthogonalized.
    """
    calls: list[int] = []
    original = muon.orthogonalised

    def orthogonalised(matrices: Tensor, coefficients: str = "jordan") -> Tensor:
        calls.append(1)
        return original(matrices, coefficients)

    with mock.patch.object(muon, "orthogonalised", orthogonalised):
        yield calls


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two elements at the same position."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def main() -> None:
    world = find_world()
    # Two per process, so all processes have the same number of micro-batches.
    rows = 2 * world.size
    cases, steps = json.loads(sys.argv[1]), int(sys.argv[2])
    #: The weights, state and number of orthogonalized matrices of one process, for each family and
    #: settings.
    references: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], int]] = {}
    with process_group(world, DEVICE, 120):
        for case in cases:
            config = DistributedConfig(**case["distributed"])
            engine = make_engine(config, world, DEVICE)
            with engine.session(), counted() as own:
                weights, state = trained(case, engine, rows, steps)
            if not world.is_main:
                continue
            key = json.dumps([case["family"], case["optimizer"]])
            if key not in references:
                with counted() as alone:
                    references[key] = (*trained(case, None, rows, steps), len(alone))
            expected, expected_state, alone_count = references[key]
            start = dict(model_of(case["family"], torch.float64, 1).named_parameters())
            moved = min(float((w - start[n]).abs().max()) for n, w in expected.items())
            found = {
                "weights": largest_difference(weights, expected),
                "state": largest_difference(state, expected_state),
                "moved": moved,
                "orthogonalised": [len(own), alone_count],
            }
            sys.stdout.write(json.dumps(found) + "\n")


main()
