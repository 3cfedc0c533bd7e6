"""Gradients of one global batch, split over processes and micro-batches in many ways, each compared
with the gradient of one process. Prints one JSON line per case: the largest relative difference.

RANKS_DEVICE is the device of all processes: cpu, or cuda for a single GPU shared by all of them.
NCCL does not support this, so gloo sends the tensors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from plain_recipe import plain_recipe
from torch import Tensor
from torch.profiler import ProfilerActivity

from firstlight.data.loader import IGNORE_INDEX, Batch
from firstlight.hardware.device import find_hardware
from firstlight.models import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Model,
    MoEConfig,
    NanoChatConfig,
    empty_model,
)
from firstlight.optim.dtensors import full_tensor
from firstlight.parallel import World, find_world, process_group
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.parallel.group import gather_to_main
from firstlight.recipe import ResolvedRecipe
from firstlight.training.program import TrainingProgram

T, V = 12, 61
DEVICE = torch.device(os.environ.get("RANKS_DEVICE", "cpu"))

#: Llamas with four heads, most of them with two key-value heads.
_GROUPED: dict[str, dict[str, Any]] = {
    "grouped": {},
    "grouped-tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "ministral3": {
        "model_type": "ministral3",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4,
        },
        "llama_4_scaling_beta": 0.5,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.7,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "phi3": {"model_type": "phi3", "sliding_window": 5, "head_dim": 6},
    "olmo3": {"model_type": "olmo3", "sliding_window": 5},
    "arcee": {"model_type": "arcee"},
    "glm4": {"model_type": "glm4", "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "rope_local_base_freq": 50.0,
    },
    "stablelm": {"model_type": "stablelm", "attention_bias": True, "partial_rotary_factor": 0.5},
    "stablelm-parallel": {
        "model_type": "stablelm",
        "partial_rotary_factor": 1.0,
        "use_parallel_residual": True,
    },
    "llama-4": {"num_key_value_heads": 4},
    "deep": {"num_hidden_layers": 6},
}


def model_of(family: str, dtype: torch.dtype, vocab_multiple: int) -> Model:
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": T,
    }
    families: dict[str, Any] = {
        "gpt2": lambda: GPT2Config(**sizes, tie_word_embeddings=True),
        "llama": lambda: LlamaConfig(**sizes, intermediate_size=40),
        "tied": lambda: LlamaConfig(**sizes, intermediate_size=40, tie_word_embeddings=True),
        **{
            name: functools.partial(
                LlamaConfig,
                **{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **more},
                intermediate_size=40,
            )
            for name, more in _GROUPED.items()
        },
        "gpt_neox": lambda: GPTNeoXConfig(**{**sizes, "num_attention_heads": 2}),
        "nanochat": lambda: NanoChatConfig(
            **{**sizes, "num_attention_heads": 4}, num_key_value_heads=2, attention_bias=True
        ),
        "moe": lambda: MoEConfig(
            **sizes,
            model_type="mixtral",
            intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,
        ),
    }
    model = empty_model(families[family](), vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.dim() < 2):
            vector.add_(0.1 * torch.randn(vector.shape, generator=draw))
    return model.to(dtype)


def recipe_of(case: dict[str, Any]) -> ResolvedRecipe:
    return plain_recipe(
        {
            "data": {"dir": "none", "seq_len": T},
            "batch": {"micro_batch_size": 1},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 1.0,
                "sgd_momentum": 0.0,
                "weight_decay": 0.0,
                "max_grad_norm": 0.0,
            },
            "efficiency": {"precision": "fp32", "compile": False, **case.get("efficiency", {})},
            "model": {"model_type": "llama"},
        }
    )


def global_batch(rows: int, masks: str) -> tuple[Tensor, Tensor]:
    """Return rows with different numbers of labels. With "partial", the last rows have none."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(V, (rows, T + 1), generator=generator)
    labels = ids[:, 1:].clone()
    hidden = torch.rand(rows, T, generator=generator) < torch.linspace(0, 0.9, rows)[:, None]
    labels[hidden] = IGNORE_INDEX
    if masks == "partial":
        labels[-max(rows // 4, 1) :] = IGNORE_INDEX
    return ids[:, :-1], labels


def cut(ids: Tensor, labels: Tensor, micro: int, rank: int, size: int) -> list[Batch]:
    """Return one rank's micro-batches, as the loader yields them."""
    starts = range(rank * micro, len(ids), micro * size)
    parts = [(ids[s : s + micro], labels[s : s + micro]) for s in starts]
    batches = (Batch(i, target, int((target != IGNORE_INDEX).sum())) for i, target in parts)
    return [batch.to(DEVICE) for batch in batches]


def gradients(
    case: dict[str, Any], batches: list[Batch], engine: Engine | None
) -> tuple[dict[str, Tensor], float, float]:
    """Return the full gradients of one step, its loss and its gradient norm.

    Processes other than the main one may have only some of the gradients.
    """
    recipe = recipe_of(case)
    multiple, dtype = recipe.efficiency.vocab_multiple, getattr(torch, case["dtype"])
    model = model_of(case["family"], dtype, multiple)
    if engine is not None and engine.config.pipeline > 1:
        values = model.state_dict()
        model = engine.new_model(model.config, multiple).to(dtype)
        model.load_state_dict({name: values[name] for name in model.state_dict()})
    recipe = recipe.model_copy(update={"model": model.config})
    program = TrainingProgram(recipe, model, find_hardware(str(DEVICE)), engine)
    found: dict[str, Tensor] = {}
    update = program.optimizer.step

    def keep_and_update(found_inf: Tensor | None = None) -> None:
        for name, parameter in program.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name] = full_tensor(parameter.grad).clone()
        update(found_inf)

    program.optimizer.step = keep_and_update  # type: ignore[method-assign]
    result = program.step(batches, 1.0)
    if engine is not None and engine.config.pipeline > 1:
        found = gather_to_main(found)
    return found, result.loss, result.grad_norm


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter's gradients, relative to its largest entry.

    Args:
        other: gradients of the same parameters, or of some of them.
    """
    assert one.keys() >= other.keys()
    return max(
        float((one[n] - other[n]).abs().max() / one[n].abs().max().clamp(min=1e-30)) for n in other
    )


@contextlib.contextmanager
def _group(world: World) -> Iterator[None]:
    if DEVICE.type == "cpu":
        with process_group(world, DEVICE, 60):
            yield
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def main(cases: list[dict[str, Any]]) -> None:
    world = find_world()
    with _group(world):
        for case in cases:
            engine = make_engine(DistributedConfig(**case["distributed"]), world, DEVICE)
            rows = case["micro"] * case["accumulation"] * engine.size
            ids, labels = global_batch(rows, case["masks"])
            expected = gradients(case, cut(ids, labels, rows, 0, 1), None)
            own = cut(ids, labels, case["micro"], engine.rank, engine.size)
            assert len(own) == case["accumulation"]
            # Creating torch's list of events takes ten times as long as the steps.
            watched = torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True)
            with watched if case.get("count") else contextlib.nullcontext() as profile:
                found = gradients(case, own, engine)
            assert world.rank > 0 or len(found[0]) == len(expected[0])
            events = profile.events() if profile is not None else []
            sent = sum("gloo" in event.name and "reduce" in event.name for event in events)
            sys.stdout.write(
                json.dumps(
                    {
                        **case,
                        "difference": difference(expected[0], found[0]),
                        "loss": abs(found[1] - expected[1]) / expected[1],
                        "norm": abs(found[2] - expected[2]) / expected[2],
                        "sent": sent,
                    }
                )
                + "\n"
            )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
