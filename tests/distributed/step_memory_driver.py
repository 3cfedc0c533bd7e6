"""Peak memory of the steps of one of several processes, in bytes. Prints one JSON line per
recipe.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from plain_recipe import plain_recipe
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.hardware.device import find_hardware
from firstlight.optim.dtensors import is_sharded
from firstlight.parallel import find_world, process_group
from firstlight.parallel.deepspeed import import_deepspeed
from firstlight.parallel.engine import Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe import ResolvedRecipe
from firstlight.training.forecast import ForecastComparison
from firstlight.training.program import TrainingProgram

# In a process started by torchrun or a test, the benchmarks package can only be imported from this
# path.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.memory import measured_memory


def held(program: TrainingProgram) -> int:
    """Return the bytes of this process's shards of the weights and the optimizer state."""
    found: dict[int, Tensor] = {}
    tensors: list[Tensor] = [*program.model.parameters(), *program.model.buffers()]
    for optimizer in program.optimizer._torch_optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        local: Any = tensor.to_local() if is_sharded(tensor) else tensor
        found[local.untyped_storage().data_ptr()] = local
    return sum(local.untyped_storage().nbytes() for local in found.values())


def measured(recipe: ResolvedRecipe, engine: Engine) -> list[int]:
    """Return the peaks of some steps after a first step has created the optimizer state."""
    # DeepSpeed's buffers are not in any list of tensors.
    counts_all = engine.updates_itself
    generator = torch.Generator().manual_seed(0)
    model = engine.new_model(recipe.model, 1, generator=generator)
    program = TrainingProgram(recipe, model, find_hardware("cpu"), engine)
    shape = (recipe.batch.rows, recipe.data.seq_len)
    ids = torch.randint(recipe.model.vocab_size, shape, generator=generator)
    batch = Batch(ids, ids.clone(), ids.numel())
    batches = [batch] * recipe.batch.accumulation(recipe.data.seq_len)
    program.step(batches, lr_scale=1.0)
    comparison = ForecastComparison(program.hardware)
    peaks = []
    for _ in range(2 if counts_all else 5):
        # Tensors waiting for the garbage collector do not count.
        gc.collect()
        level = comparison.tensor_bytes() if counts_all else held(program) + 2 * ids.nbytes
        with measured_memory() as found:
            program.step(batches, lr_scale=1.0)
        peaks.append(found.peak_bytes + level)
    return peaks


def measure_one(values: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world = find_world()
    with process_group(world, torch.device("cpu"), 120):
        recipe = plain_recipe(values)
        engine = make_engine(recipe.distributed, world, torch.device("cpu"))
        with engine.session():
            peaks = measured(recipe, engine)
    sys.stdout.write(json.dumps({"peaks": peaks}) + "\n")
    sys.stdout.flush()


def main(request: list[dict[str, Any]]) -> None:
    if any(values["distributed"].get("engine") == "deepspeed" for values in request):
        import_deepspeed(torch.device("cpu"))
        # DeepSpeed imports it in the first step, which takes seconds.
        importlib.import_module("torch._inductor.compile_fx")
    for values in request:
        # DeepSpeed and gloo keep a few tensors of one run until the next.
        child = os.fork()
        if child == 0:
            try:
                measure_one(values)
            except BaseException:  # noqa: BLE001  (the child must not go on as the parent)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
