"""Models used by the benchmarks, and configurations of the planner's benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.bench.models import LLAMA_3, LLAMA_110M, MODELS, ROPE, gpt2, llama
from firstlight.models import Model, ModelConfig, allocate, build_model
from firstlight.recipe.load import changed_recipe

_UNTIED: dict[str, Any] = {
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}

#: The `model` sections of further models, each for one benchmark.
_MORE_MODELS: dict[str, dict[str, Any]] = {
    # Two layers, for dry runs.
    "tiny-gpt2": gpt2(96, 2, 4, 2000),
    "tiny-llama": llama(
        96, 256, 2, 4, num_key_value_heads=2, vocab_size=2000, max_position_embeddings=512
    ),
    # Models for the memory part of `benchmarks planner`.
    "gpt2 small": gpt2(128, 3, 4, 4000),
    "gpt2 medium": gpt2(256, 6, 8, 4000),
    "gpt2 large": gpt2(512, 4, 8, 4000),
    "llama small": llama(128, 384, 3, 4, num_key_value_heads=2, **_UNTIED),
    "llama medium": llama(256, 704, 6, 8, num_key_value_heads=4, **_UNTIED),
    "llama large": llama(512, 1408, 4, 8, num_key_value_heads=8, **_UNTIED),
    "gpt2-384": {**gpt2(384, 6, 6, 8192), "max_position_embeddings": 2048},
    "llama-384": llama(384, 1024, 6, 6, num_key_value_heads=2, vocab_size=8192),
    "llama-512": llama(
        512, 1536, 8, 8, num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=False
    ),
    "llama-400m": llama(
        1024, 3584, 24, 16, num_key_value_heads=8, **ROPE, max_position_embeddings=8192
    ),
    "llama-narrow": llama(384, 1024, 12, 6, num_key_value_heads=2, **ROPE),
    "mistral-110m": {**LLAMA_110M, "model_type": "mistral", "sliding_window": 1024},
    "qwen2-110m": {**LLAMA_110M, "model_type": "qwen2"},
    "qwen3-110m": {**LLAMA_110M, "model_type": "qwen3", "head_dim": 128},
    "mixtral-small": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    # The model that `firstlight train stdlib --budget 3m` chose on an H100.
    "stdlib-44m": {
        **llama(576, 1536, 10, 9, num_key_value_heads=9, vocab_size=4096),
        "model_type": "qwen3",
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    # The shapes of Llama 3.2 3B and Llama 3.1 8B.
    "llama-3b": llama(3072, 8192, 28, 24, num_key_value_heads=8, **LLAMA_3),
    "llama-8b": llama(
        4096, 14336, 32, 32, num_key_value_heads=8, **LLAMA_3, tie_word_embeddings=False
    ),
}


def model_values(name: str) -> dict[str, Any]:
    """Return the `model` section of a model of the benchmarks, by its name in one of the tables
    above."""
    return dict(MODELS.get(name) or _MORE_MODELS[name])


def random_model(config: ModelConfig, device: torch.device, vocab_multiple: int = 1) -> Model:
    """Return a model with random fp32 weights, made on the device.

    On a GPU, this takes a second for 8 billion parameters, and none of the host's memory.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, device)
    model.init_weights(torch.Generator(device).manual_seed(0))
    return model


@dataclass(frozen=True)
class PlannerCase:
    """One configuration of which memory or speed is predicted and measured.

    Attributes:
        model: name of a model; see `model_values`.
        rows: sequences of a micro-batch.
        tokens: tokens of a sequence.
        changes: values of the recipe by key: `section.key`, or a whole section.
        kind: "training", "evaluation" or "generation".
        generation: arguments of `predict_generation` ("prompt_tokens", "max_new_tokens",
            "sequences", "dtype"); None for the other kinds.
        needs: packages that must be installed.
        fitted: True if the speed model is fitted on this configuration; False if it is held out to
            measure the error.
        slow: True if the configuration takes far longer than others, because it compiles.
        title: name of the configuration; "" makes a name from the other values.
    """

    model: str
    rows: int
    tokens: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "training"
    generation: Mapping[str, Any] | None = None
    needs: Sequence[str] = ()
    fitted: bool = False
    slow: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        """The name in tables, unique in a grid."""
        said = [self.model, f"{self.rows} x {self.tokens}"]
        if self.kind != "training":
            said.append(self.kind)
        said += [f"{k.rpartition('.')[2]} {_value_text(v)}" for k, v in self.changes.items()]
        if self.generation is not None:
            said.append(str(self.generation["dtype"]))
        return self.title or ", ".join(said)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        found: int = self.changes.get("batch.gradient_accumulation_steps", 1)
        return found

    def recipe(self, device: str = "cpu") -> dict[str, Any]:
        """Return the values of the recipe, without open keys."""
        model = model_values(self.model)
        longest = max(self.tokens, model.get("max_position_embeddings", 1024))
        values: dict[str, Any] = {
            "run": {"device": device},
            "data": {"dir": "-", "seq_len": self.tokens},
            "model": {**model, "max_position_embeddings": longest},
            "batch": {"micro_batch_size": self.rows, "gradient_accumulation_steps": 1},
            "optimizer": {"name": "adamw"},
            "efficiency": {
                "precision": "fp32",
                "attention": "sdpa",
                "compile": False,
                "loss_chunk_tokens": 0,
            },
        }
        return changed_recipe(values, self.changes)

    def request(self, device: str = "cpu") -> dict[str, Any]:
        """Return the configuration as JSON object, for requests of `planner_steps`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "recipe": self.recipe(device),
            "generation": self.generation,
        }


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {one}" for key, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


_BF16 = {"efficiency.precision": "bf16"}
_FULL = {"efficiency.activation_checkpointing": "full"}
_COMPILED = {**_BF16, "efficiency.compile": True}
_CHUNKED = {"efficiency.loss_chunk_tokens": 1024}
_IN_BACKWARD = {"efficiency.optimizer_in_backward": True, "optimizer.max_grad_norm": 0.0}
_DOCUMENTS = {"data.document_masking": True}


def _optimizer(name: str, **more: Any) -> dict[str, Any]:
    return {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in more.items()}}


def _generation(dtype: str, sequences: int) -> dict[str, Any]:
    return {"prompt_tokens": 512, "max_new_tokens": 64, "sequences": sequences, "dtype": dtype}


def _first() -> Iterator[PlannerCase]:
    """Yield twenty configurations that are as different from each other as possible."""
    yield PlannerCase("gpt2-124m", 8, 1024, fitted=True)
    yield PlannerCase("gpt2-124m", 16, 1024, _BF16)
    yield PlannerCase("llama-110m", 16, 1024, _BF16, fitted=True)
    yield PlannerCase("llama-1b", 2, 2048, {**_BF16, **_FULL}, fitted=True)
    yield PlannerCase("gpt2-355m", 4, 1024, {**_BF16, "batch.gradient_accumulation_steps": 4})
    yield PlannerCase("llama-400m", 4, 2048, {**_BF16, **_CHUNKED}, fitted=True)
    yield PlannerCase("gpt2-124m", 4, 1024, {"efficiency.attention": "plain"})
    yield PlannerCase("llama-110m", 8, 2048, {"efficiency.precision": "bf16_params"})
    yield PlannerCase("gpt2-124m", 16, 1024, {"efficiency.precision": "fp16"})
    yield PlannerCase("mixtral-small", 8, 1024, _BF16)
    yield PlannerCase("llama-1b", 4, 1024, {**_BF16, "lora": {"rank": 16}}, fitted=True)
    yield PlannerCase(
        "llama-400m", 4, 1024, {**_BF16, **_optimizer("adafactor", learning_rate=0.01)}
    )
    yield PlannerCase("llama-400m", 8, 1024, {**_BF16, **_FULL, **_CHUNKED, **_IN_BACKWARD})
    yield PlannerCase(
        "qwen3-110m", 8, 1024, {**_BF16, "efficiency.activation_checkpointing": "selective"}
    )
    yield PlannerCase("gpt2-124m", 8, 1024, {"efficiency.precision": "tf32"}, fitted=True)
    yield PlannerCase("llama-110m", 8, 1024, {**_BF16, **_optimizer("muon")})
    yield PlannerCase("llama-400m", 1, 8192, {**_BF16, **_FULL}, fitted=True)
    yield PlannerCase("llama-narrow", 4, 512, _BF16, fitted=True)
    yield PlannerCase("llama-400m", 8, 2048, _BF16, kind="evaluation")
    yield PlannerCase("llama-1b", 8, 512, kind="generation", generation=_generation("bfloat16", 8))


def _compiled() -> Iterator[PlannerCase]:
    yield PlannerCase("gpt2-124m", 16, 1024, _COMPILED, fitted=True, slow=True)
    yield PlannerCase("llama-110m", 8, 2048, {**_COMPILED, **_CHUNKED}, slow=True)
    yield PlannerCase("llama-110m", 16, 1024, {**_COMPILED, **_FULL}, fitted=True, slow=True)
    yield PlannerCase("llama-400m", 4, 2048, _COMPILED, slow=True)
    yield PlannerCase(
        "gpt2-124m", 32, 1024, {**_COMPILED, "efficiency.vocab_multiple": 64}, slow=True
    )
    regional = {"efficiency.compile_regional": True}
    yield PlannerCase("llama-1b", 2, 2048, {**_COMPILED, **regional}, fitted=True, slow=True)


def _second() -> Iterator[PlannerCase]:
    yield PlannerCase("gpt2-355m", 2, 1024)
    yield PlannerCase("llama-1b", 1, 2048, {**_BF16, "efficiency.activation_offload": True})
    yield PlannerCase("llama-1b", 2, 1024, {"efficiency.precision": "bf16_params", **_FULL})
    yield PlannerCase("mistral-110m", 4, 2048, {**_BF16, **_CHUNKED})
    yield PlannerCase("qwen2-110m", 32, 256, _BF16)
    yield PlannerCase(
        "gpt2-124m", 8, 1024, {**_BF16, **_optimizer("adamw", implementation="foreach")}
    )
    yield PlannerCase(
        "gpt2-124m", 8, 1024, {**_BF16, **_optimizer("adamw", implementation="for-loop")}
    )
    yield PlannerCase("llama-110m", 8, 1024, {**_BF16, **_optimizer("sgd", learning_rate=0.1)})
    yield PlannerCase("llama-110m", 8, 1024, {**_BF16, "efficiency.attention": "efficient"})
    yield PlannerCase("llama-110m", 8, 1024, {**_BF16, "efficiency.attention": "cudnn"})
    yield PlannerCase("gpt2-124m", 4, 1024, {**_BF16, "efficiency.attention": "math"})
    yield PlannerCase("llama-110m", 1, 1024, _BF16)
    accumulated = {"batch.gradient_accumulation_steps": 3, "efficiency.precision": "bf16_params"}
    yield PlannerCase("llama-110m", 4, 1024, accumulated)
    pairs = {"data.kind": "preference", "preference": {"beta": 0.1}, **_DOCUMENTS}
    yield PlannerCase(
        "llama-110m", 4, 1024, {**_BF16, **pairs, "efficiency.attention": "efficient"}
    )
    yield PlannerCase("gpt2-124m", 8, 1024, {**_BF16, "efficiency.vocab_multiple": 128, **_FULL})
    yield PlannerCase("llama-1b", 2, 1024, {**_BF16, "lora": {"rank": 8, "dora": True}})
    yield PlannerCase("gpt2-124m", 16, 1024, kind="evaluation")
    yield PlannerCase("gpt2-124m", 1, 512, kind="generation", generation=_generation("float32", 1))
    flex = {**_BF16, **_DOCUMENTS, "efficiency.attention": "flex"}
    yield PlannerCase("llama-110m", 8, 1024, flex, slow=True)
    eight_bit = _optimizer("adamw8bit")
    yield PlannerCase("llama-400m", 4, 1024, {**_BF16, **eight_bit}, needs=("bitsandbytes",))
    nf4 = {"lora": {"rank": 8, "quantize": "nf4"}}
    yield PlannerCase("llama-1b", 2, 1024, {**_BF16, **nf4}, needs=("bitsandbytes",))


def gpu_grid() -> tuple[PlannerCase, ...]:
    """Return all configurations: twenty very different ones, then those that compile, then the
    rest."""
    return (*_first(), *_compiled(), *_second())


def dry_grid() -> tuple[PlannerCase, ...]:
    """Return the configurations of a dry run: tiny ones, each of which a CPU runs in a second."""
    return (
        PlannerCase("tiny-gpt2", 2, 128, fitted=True),
        PlannerCase("tiny-llama", 4, 256, _FULL, fitted=True),
        PlannerCase("tiny-llama", 2, 128, {"efficiency.loss_chunk_tokens": 64}),
        PlannerCase("tiny-gpt2", 1, 64, {"batch.gradient_accumulation_steps": 2}),
        PlannerCase("tiny-llama", 2, 128, kind="evaluation"),
        PlannerCase("tiny-gpt2", 1, 64, needs=("no-such-package",)),
    )
