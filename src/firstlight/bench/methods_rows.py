"""The rows of `firstlight bench methods`: each a few keys of a recipe."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import ConfigError, nearest
from firstlight.hardware.device import Hardware
from firstlight.models import ModelConfig
from firstlight.recipe import Recipe, load_recipe, parse_recipe

#: The name of the small model of `--quick`.
SMALL = "small"

#: The `model` section of the models that can be named.
MODELS: dict[str, dict[str, Any]] = {
    # A vocabulary that no power of two divides, as GPT-2's.
    SMALL: {
        "model_type": "gpt2",
        "vocab_size": 16001,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "gpt2-124m": {"model_type": "gpt2", "vocab_size": 50257},
    "gpt2-350m": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "gpt2-774m": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1280,
        "num_hidden_layers": 36,
        "num_attention_heads": 20,
    },
    "llama-110m": {
        "model_type": "llama",
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    # The shape of Llama 3.2 1B.
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}

#: For a recipe's model that leaves its vocabulary to the tokenizer: GPT-2's.
_VOCAB_SIZE = 50257


def find_model(name: str) -> ModelConfig:
    """The model of a name in `MODELS`, or of a recipe file's `model` section.

    Raises:
        ConfigError: there is no such model, or the recipe is wrong or has none.
    """
    if name in MODELS:
        config = parse_recipe({"data": {"dir": "-"}, "model": MODELS[name]}, f"model {name}").model
    elif name.endswith((".yaml", ".yml")):
        config = load_recipe(name).model
    else:
        hint = nearest(name, MODELS) or f": use {', '.join(MODELS)}, or a RECIPE.yaml"
        raise ConfigError(f"model '{name}' is unknown{hint}")
    if config is None:
        raise ConfigError(f"recipe {Path(name)} has no model: add a `model:` section")
    if not config.vocab_size:
        config = config.model_copy(update={"vocab_size": _VOCAB_SIZE})
    return config


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        name: for people and for `--rows`.
        changes: keys of the recipe (`section.key`) that it sets; a rung of the ladder has only
            its own.
        needs_gpu: why it is skipped on a CPU; "" is where it isn't.
        in_quick: whether `--quick` has it; not what takes minutes to start, or is much like
            another row.
        huge_pages: whether torch takes huge pages for large tensors; `firstlight train` does not.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: str = ""
    in_quick: bool = True
    huge_pages: bool = False


PLAIN = Row("plain")


def plain_recipe(
    model: ModelConfig, device: str, seq_len: int, micro_batch_size: int
) -> dict[str, Any]:
    """The values of the recipe that every row changes: no method at all.

    Gradients are not clipped, since the optimizer inside backward can't.
    """
    return {
        "run": {"device": device},
        "model": model.model_dump(),
        "data": {"dir": "-", "seq_len": seq_len},
        "batch": {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 1},
        "optimizer": {
            "name": "adamw",
            "implementation": "for-loop",
            "learning_rate": 6e-4,
            "max_grad_norm": 0.0,
        },
        "efficiency": {"precision": "fp32", "attention": "plain", "compile": False},
    }


def recipe_of(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
    """The plain recipe with a row's keys set.

    Raises:
        ConfigError: they can't be meant together.
    """
    values: dict[str, Any] = json.loads(json.dumps(plain))
    for name, value in changes.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return parse_recipe(values, "this method")


def accumulation(micro_batch_size: int) -> dict[str, Any]:
    """The same rows a step in four micro-batches, or one by one where they can't be quartered."""
    micro = micro_batch_size // 4 if micro_batch_size % 4 == 0 else 1
    return {
        "batch.micro_batch_size": micro,
        "batch.gradient_accumulation_steps": micro_batch_size // micro,
    }


def larger_batch(micro_batch_size: int) -> dict[str, Any]:
    """Twice the plain run's rows, at once."""
    return {
        "batch.micro_batch_size": 2 * micro_batch_size,
        "batch.gradient_accumulation_steps": 1,
    }


def _chunk_tokens(micro_batch_size: int, seq_len: int) -> int:
    """Half the tokens of the smallest micro-batch that the tables have."""
    smallest: int = accumulation(micro_batch_size)["batch.micro_batch_size"]
    return max(1, smallest * seq_len // 2)


_IS_CPU = "needs a GPU: "


def alone_rows(micro_batch_size: int, seq_len: int, hardware: Hardware) -> list[Row]:
    """Each method alone, the plain run first."""
    compiled = {"efficiency.compile": True}
    return [
        PLAIN,
        Row("huge-pages", huge_pages=True),
        Row("accumulation", accumulation(micro_batch_size)),
        Row("checkpointing-full", {"efficiency.activation_checkpointing": "full"}),
        Row("checkpointing-selective", {"efficiency.activation_checkpointing": "selective"}),
        Row(
            "offload",
            {"efficiency.activation_offload": True},
            _IS_CPU + "a CPU's activations lie in its memory already",
        ),
        Row("tf32", {"efficiency.precision": "tf32"}, _IS_CPU + "CPUs have no TF32"),
        Row("bf16", {"efficiency.precision": "bf16"}),
        Row("bf16-params", {"efficiency.precision": "bf16_params"}),
        Row("fp16", {"efficiency.precision": "fp16"}),
        Row("fp8", {"efficiency.precision": "fp8"}, _IS_CPU + "CPUs have no fp8 matrix units"),
        *_optimizer_rows(),
        *_attention_rows(hardware),
        Row(
            "chunked-loss",
            {"efficiency.loss_chunk_tokens": _chunk_tokens(micro_batch_size, seq_len)},
        ),
        Row("vocab-64", {"efficiency.vocab_multiple": 64}),
        Row("larger-batch", larger_batch(micro_batch_size)),
        Row("document-masking", {"data.document_masking": True}),
        Row("lora", {"lora.rank": 8}),
        Row("qlora", {"lora.rank": 8, "lora.quantize": "nf4"}, in_quick=False),
        Row("compile", compiled),
        Row("compile-regional", {**compiled, "efficiency.compile_regional": True}, in_quick=False),
        Row(
            "compile-budget",
            {**compiled, "efficiency.activation_checkpointing": "budget"},
            in_quick=False,
        ),
        Row(
            "compile-cudagraphs",
            {**compiled, "efficiency.compile_mode": "reduce-overhead"},
            _IS_CPU + "CUDA graphs are CUDA's",
        ),
    ]


def _optimizer_rows() -> list[Row]:
    def other(name: str, **keys: Any) -> dict[str, Any]:
        # Each as it comes when only its name is set.
        chosen = {"name": name, "implementation": "auto", **keys}
        return {f"optimizer.{key}": value for key, value in chosen.items()}

    return [
        Row("foreach", {"optimizer.implementation": "foreach"}, in_quick=False),
        Row("fused", {"optimizer.implementation": "fused"}),
        Row("adamw8bit", other("adamw8bit", eight_bit_library="bitsandbytes")),
        Row(
            "adamw8bit-torchao",
            other("adamw8bit", eight_bit_library="torchao"),
            in_quick=False,
        ),
        Row(
            "paged-adamw8bit",
            other("paged_adamw8bit"),
            _IS_CPU + "its pages move between a GPU's memory and the CPU's",
        ),
        Row("adafactor", other("adafactor", learning_rate=1e-2)),
        Row("muon", other("muon")),
        Row("sgd", other("sgd", learning_rate=0.1)),
        Row("optimizer-in-backward", {"efficiency.optimizer_in_backward": True}),
    ]


def _attention_rows(hardware: Hardware) -> list[Row]:
    no_kernel = _IS_CPU + "CPUs have no such kernel"
    # On GPUs these two compute in 16 bits only.
    half = {"efficiency.precision": "bf16"} if hardware.device.type == "cuda" else {}
    prefix = "bf16+" if half else ""
    return [
        Row("sdpa", {"efficiency.attention": "sdpa"}),
        Row(prefix + "flash", {"efficiency.attention": "flash", **half}, in_quick=False),
        Row("math", {"efficiency.attention": "math"}, in_quick=False),
        Row("blockwise", {"efficiency.attention": "blockwise"}, in_quick=False),
        Row("efficient", {"efficiency.attention": "efficient"}, no_kernel),
        Row(prefix + "cudnn", {"efficiency.attention": "cudnn", **half}, no_kernel),
        Row("flex", {"efficiency.attention": "flex"}, no_kernel),
    ]


def ladder_rows(micro_batch_size: int, seq_len: int, hardware: Hardware) -> list[Row]:
    """Each method added to those before it, the plain run first.

    Mixed precision is bf16 where the hardware multiplies it, and fp16 on GPUs that don't.
    """
    low = "fp16" if hardware.device.type == "cuda" and not hardware.bf16 else "bf16"
    return [
        PLAIN,
        Row("+accumulation", accumulation(micro_batch_size)),
        Row("+checkpointing", {"efficiency.activation_checkpointing": "full"}),
        Row(f"+{low}", {"efficiency.precision": low}),
        Row("+fused-optimizer", {"optimizer.implementation": "fused"}),
        Row("+sdpa", {"efficiency.attention": "sdpa"}),
        Row("+compile", {"efficiency.compile": True}),
        Row(
            "+chunked-loss",
            {"efficiency.loss_chunk_tokens": _chunk_tokens(micro_batch_size, seq_len)},
        ),
        Row("+vocab-64", {"efficiency.vocab_multiple": 64}),
        Row("+larger-batch", larger_batch(micro_batch_size)),
    ]


def changes_up_to(ladder: Sequence[Row], rung: int, left_out: Collection[str]) -> dict[str, Any]:
    """The keys of a rung and of all before it, but for those that couldn't run.

    Args:
        ladder: the rungs.
        rung: which, from 0.
        left_out: names of rungs that stand no longer.
    """
    changes: dict[str, Any] = {}
    for row in ladder[: rung + 1]:
        if row.name not in left_out or row is ladder[rung]:
            changes |= row.changes
    return changes


def why_skipped(row: Row, hardware: Hardware, micro_batch_size: int, quick: bool) -> str:
    """Why a row is not even tried on this machine; "" is where it is."""
    if row.needs_gpu and hardware.device.type != "cuda":
        return row.needs_gpu
    if row.huge_pages and hardware.device.type != "cpu":
        return "is about the memory of CPUs"
    if row.name.endswith("accumulation") and micro_batch_size == 1:
        return "one row can't be cut: take a larger --micro-batch-size"
    if row.changes.get("efficiency.precision") == "fp16" and hardware.device.type == "cpu":
        operations: Any = torch.ops.mkldnn
        if not operations._is_mkldnn_fp16_supported():
            return "this CPU multiplies no fp16: a step would take minutes"
    if quick and not row.in_quick:
        return "left out by --quick"
    return ""
