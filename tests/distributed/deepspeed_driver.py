"""Steps of a model with DeepSpeed, compared with those of one process: gradients, clipped updates,
skipped steps, and state. Prints one JSON line per case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gradient_driver import T, V, cut, difference, global_batch, model_of
from plain_recipe import plain_recipe
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.hardware.device import find_hardware
from firstlight.models import LlamaConfig, Model, empty_model
from firstlight.parallel import World, find_world, process_group
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.parallel.group import group_of_one
from firstlight.training.program import TrainingProgram

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "learning_rate": 0.01, "max_grad_norm": 0.5},
    # One group for each role, and the decay before DeepSpeed's step.
    "groups": {
        "name": "adamw",
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "cautious_weight_decay": True,
        "embedding_lr_multiple": 3.0,
        "embedding_weight_decay": 0.0,
        "head_betas": [0.8, 0.9],
        "vector_weight_decay": 0.05,
    },
    "sgd": {
        "name": "sgd",
        "learning_rate": 0.1,
        "sgd_momentum": 0.9,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
    },
}


def _large() -> Model:
    """Return a model whose shards are large enough (a megabyte) for DeepSpeed to write them to
    files.
    """
    model = empty_model(
        LlamaConfig(
            vocab_size=V,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=T,
        )
    )
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def bytes_in_files(case: dict[str, Any]) -> int:
    folder = case["distributed"].get("nvme_path")
    paths = Path(folder).rglob("*") if folder else iter(())
    return sum(path.stat().st_size for path in paths if path.is_file())


def program_of(case: dict[str, Any], engine: Engine | None) -> TrainingProgram:
    family = case["family"]
    model = _large() if family == "large" else model_of(family, torch.float32, 1)
    recipe = plain_recipe(
        {
            "data": {"dir": "none", "seq_len": T},
            "batch": {"micro_batch_size": 1},
            "optimizer": _OPTIMIZERS[case["optimizer"]],
            "efficiency": {"precision": "fp32", "compile": False, **case.get("efficiency", {})},
            "model": {"model_type": "llama"},
        }
    )
    recipe = recipe.model_copy(update={"model": model.config})
    return TrainingProgram(recipe, model, find_hardware("cpu"), engine)


def weights_of(program: TrainingProgram) -> dict[str, Tensor]:
    with program.optimizer.master_weights():
        return {n: p.detach().clone() for n, p in program.model.named_parameters()}


def state_of(program: TrainingProgram) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in program.optimizer.state_tensors().items()}


def gradients_of(program: TrainingProgram) -> dict[str, Tensor]:
    if program.engine.name != "deepspeed":
        return {
            n: p.grad.clone() for n, p in program.optimizer.parameters.items() if p.grad is not None
        }
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).clone() for n, p in program.optimizer.parameters.items()}


class Trial:
    """A training program, and the records of its steps."""

    def __init__(self, case: dict[str, Any], engine: Engine | None, batches: list[Batch]) -> None:
        self.program = program_of(case, engine)
        self.batches = batches
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        clip: Callable[..., Tensor] = self.program.optimizer.clip_gradients

        def keep_and_clip(*arguments: Any) -> Tensor:
            self.gradients.append(gradients_of(self.program))
            return clip(*arguments)

        self.program.optimizer.clip_gradients = (  # type: ignore[method-assign]
            keep_and_clip  # type: ignore[assignment]
        )

    def step(self, *, accepted: bool = True) -> bool:
        """Take a step, and return True if it was skipped."""
        result = self.program.step(self.batches, 1.0, lambda *_: accepted)
        if accepted:
            self.losses.append(result.loss)
            self.norms.append(result.grad_norm)
        else:
            self.gradients.pop()
        return result.skipped

    def overflowing_step(self) -> bool:
        """With fp16, take a step whose gradients overflow, and return True if it was skipped."""
        scaler = self.program.scaler
        if scaler is None:
            return True
        before = scaler.state_dict()
        scaler.scale = 2.0**120
        skipped = self.step(accepted=False)
        halved = scaler.scale == 2.0**119
        scaler.load_state_dict(before)
        return skipped and halved


def far(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def beside(case: dict[str, Any], world: World) -> dict[str, Any]:
    """Compare three steps of one process with three of all processes, between which a further step
    is skipped.
    """
    config, device = DistributedConfig(**case["distributed"]), torch.device("cpu")
    engine = make_engine(config, world, device)
    micro, accumulation = case["micro"], case["accumulation"]
    ids, labels = global_batch(micro * accumulation * engine.size, case["masks"])
    one = Trial(case, None, cut(ids, labels, len(ids), 0, 1))
    own = cut(ids, labels, micro, engine.rank, engine.size)
    all_ = Trial(case, engine, own)
    for _ in range(3):
        one.step()
    all_.step()
    before = weights_of(all_.program), state_of(all_.program)
    overflows = all_.overflowing_step()
    refused = all_.step(accepted=False)
    after = weights_of(all_.program), state_of(all_.program)
    for _ in range(2):
        all_.step()
    expected, found = weights_of(one.program), weights_of(all_.program)
    state = [state_of(trial.program) for trial in (one, all_)]
    restored = Trial(case, make_engine(config, world, device), own)
    with restored.program.optimizer.master_weights(changed=True), torch.no_grad():
        for name, parameter in restored.program.model.named_parameters():
            parameter.copy_(found[name])
    restored.program.optimizer.load_state_tensors(state[1])
    kept = weights_of(restored.program), state_of(restored.program)
    again = [restored.step(), all_.step()] == [False, False]
    ends = [weights_of(trial.program) for trial in (restored, all_)]
    return {
        "gradients": difference(one.gradients[0], all_.gradients[0]),
        "losses": far(one.losses, all_.losses[:3]),
        "norms": far(one.norms, all_.norms[:3]),
        "weights": difference(expected, found),
        "state": difference(*state),
        "refused": refused
        and overflows
        and same(before[0], after[0])
        and same(before[1], after[1]),
        "restored": same(kept[0], found) and same(kept[1], state[1]),
        "goes_on": again and same(*ends),
        "bytes_in_files": bytes_in_files(case),
    }


def main(cases: list[dict[str, Any]]) -> None:
    world, device = find_world(), torch.device("cpu")
    group = group_of_one(device) if world.size == 1 else process_group(world, device, 500)
    with group:
        for case in cases:
            sys.stdout.write(json.dumps({**case, **beside(case, world)}) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
