"""Bytes of a model, its gradients and its moments in one of several processes. Prints one JSON line
per engine and model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from firstlight.models import LlamaConfig, empty_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.dtensors import full_parameters, is_sharded
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel import find_world, process_group
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine


def held(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of this process's shards of tensors, or of the full tensors if they are not
    sharded.
    """
    pieces = (t.to_local() if is_sharded(t) else t for t in tensors if t is not None)
    return sum(piece.numel() * piece.element_size() for piece in pieces)


def whole_gradients(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that FSDP2 keeps unsharded until they are reduced."""
    total = 0
    for part in model.modules():
        if isinstance(part, FSDPModule):
            group: Any = part._get_fsdp_state()._fsdp_param_group  # not available elsewhere
            total += held(one.unsharded_param.grad for one in group.fsdp_params)
    return total


def measured(config: LlamaConfig, engine: Engine) -> dict[str, int]:
    """Return the bytes in a step of two micro-batches, keyed by the fields of `RankMemory`."""
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    forward = engine.share(model, "fp32")
    optimizer = Optimizer(model, OptimizerConfig())
    ids = torch.arange(8).view(1, 8)
    found: dict[str, int] = {}
    for last in (False, True):
        with engine.backward_pass(last=last):
            forward(ids, ids).backward()  # type: ignore[no-untyped-call]
        if not last:
            found["accumulating"] = whole_gradients(model)
    optimizer.step()
    engine.reshard()
    found["weights"] = held(model.parameters())
    found["gradients"] = held(parameter.grad for parameter in model.parameters())
    states = optimizer._states().values()
    found["moments"] = held(t for state in states for key, t in state.items() if key != "step")
    # During a save, only the main process keeps gathered tensors.
    assert optimizer.state_tensors(keep=False) == {}
    with full_parameters(model, keep=False):
        assert held(model.parameters()) == found["weights"]
    with full_parameters(model):
        assert held(model.parameters()) == 4 * engine_parameters(config)
    return found


def engine_parameters(config: LlamaConfig) -> int:
    return sum(parameter.numel() for parameter in empty_model(config).parameters())


def main(request: list[tuple[Any, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    world = find_world()
    with process_group(world, torch.device("cpu"), 60):
        for name, model in request:
            engine = make_engine(DistributedConfig(engine=name), world, torch.device("cpu"))
            line = json.dumps(measured(LlamaConfig(**model), engine))
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
