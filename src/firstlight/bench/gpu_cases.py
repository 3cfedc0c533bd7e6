"""The configurations whose memory and speed the planner's figures for a GPU are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.bench.methods_rows import MODELS

_LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
}

#: `model` sections beside those of `methods_rows.MODELS`.
GPU_MODELS: dict[str, dict[str, Any]] = {
    # Two layers of little: of a dry run.
    "tiny-gpt2": {
        "model_type": "gpt2",
        "vocab_size": 2000,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "tiny-llama": {
        "model_type": "llama",
        "vocab_size": 2000,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "llama-400m": {
        **MODELS["llama-110m"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "llama-narrow": {
        **MODELS["llama-110m"],
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "mistral-110m": {
        **MODELS["llama-110m"],
        "model_type": "mistral",
        "sliding_window": 1024,
    },
    "qwen2-110m": {**MODELS["llama-110m"], "model_type": "qwen2"},
    "qwen3-110m": {**MODELS["llama-110m"], "model_type": "qwen3", "head_dim": 128},
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
    # The shapes of Llama 3.2 3B and Llama 3.1 8B.
    "llama-3b": {
        **_LLAMA_3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def model_values(name: str) -> dict[str, Any]:
    """The `model` section of a name in `methods_rows.MODELS` or `GPU_MODELS`."""
    return dict(MODELS.get(name) or GPU_MODELS[name])


@dataclass(frozen=True)
class GPUCase:
    """One configuration.

    Attributes:
        model: a name in `methods_rows.MODELS` or `GPU_MODELS`.
        rows, tokens: size of a micro-batch, and its row length.
        changes: keys of the recipe, `section.key` or a whole section.
        kind: "training", "evaluation" or "generation".
        generation: see `planner_memory.Case`.
        needs: packages that it can't do without.
        fitted: whether the speed model is fitted on it; else its error is measured on it.
        slow: whether it takes far longer than others, since it compiles.
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

    @property
    def name(self) -> str:
        """The name for people; no two of a grid have the same."""
        said = [self.model, f"{self.rows} x {self.tokens}"]
        if self.kind != "training":
            said.append(self.kind)
        said += [f"{k.rpartition('.')[2]} {_value_text(v)}" for k, v in self.changes.items()]
        if self.generation is not None:
            said.append(str(self.generation["dtype"]))
        return ", ".join(said)

    def recipe(self, device: str) -> dict[str, Any]:
        """The recipe's values."""
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
        for key, value in self.changes.items():
            section, _, name = key.partition(".")
            if name:
                values[section] = {**values.get(section, {}), name: value}
            else:
                values[section] = value
        return values

    def request(self, device: str) -> dict[str, Any]:
        """Its entry in the request of `gpu_steps_once`."""
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


def _first() -> Iterator[GPUCase]:
    """Twenty that are as unlike each other as they can be."""
    yield GPUCase("gpt2-124m", 8, 1024, fitted=True)
    yield GPUCase("gpt2-124m", 16, 1024, _BF16)
    yield GPUCase("llama-110m", 16, 1024, _BF16, fitted=True)
    yield GPUCase("llama-1b", 2, 2048, {**_BF16, **_FULL}, fitted=True)
    yield GPUCase("gpt2-350m", 4, 1024, {**_BF16, "batch.gradient_accumulation_steps": 4})
    yield GPUCase("llama-400m", 4, 2048, {**_BF16, **_CHUNKED}, fitted=True)
    yield GPUCase("gpt2-124m", 4, 1024, {"efficiency.attention": "plain"})
    yield GPUCase("llama-110m", 8, 2048, {"efficiency.precision": "bf16_params"})
    yield GPUCase("gpt2-124m", 16, 1024, {"efficiency.precision": "fp16"})
    yield GPUCase("mixtral-small", 8, 1024, _BF16)
    yield GPUCase("llama-1b", 4, 1024, {**_BF16, "lora": {"rank": 16}}, fitted=True)
    yield GPUCase("llama-400m", 4, 1024, {**_BF16, **_optimizer("adafactor", learning_rate=0.01)})
    yield GPUCase("llama-400m", 8, 1024, {**_BF16, **_FULL, **_CHUNKED, **_IN_BACKWARD})
    yield GPUCase(
        "qwen3-110m", 8, 1024, {**_BF16, "efficiency.activation_checkpointing": "selective"}
    )
    yield GPUCase("gpt2-124m", 8, 1024, {"efficiency.precision": "tf32"}, fitted=True)
    yield GPUCase("llama-110m", 8, 1024, {**_BF16, **_optimizer("muon")})
    yield GPUCase("llama-400m", 1, 8192, {**_BF16, **_FULL}, fitted=True)
    yield GPUCase("llama-narrow", 4, 512, _BF16, fitted=True)
    yield GPUCase("llama-400m", 8, 2048, _BF16, "evaluation")
    yield GPUCase("llama-1b", 8, 512, kind="generation", generation=_generation("bfloat16", 8))


def _compiled() -> Iterator[GPUCase]:
    yield GPUCase("gpt2-124m", 16, 1024, _COMPILED, fitted=True, slow=True)
    yield GPUCase("llama-110m", 8, 2048, {**_COMPILED, **_CHUNKED}, slow=True)
    yield GPUCase("llama-110m", 16, 1024, {**_COMPILED, **_FULL}, fitted=True, slow=True)
    yield GPUCase("llama-400m", 4, 2048, _COMPILED, slow=True)
    yield GPUCase("gpt2-124m", 32, 1024, {**_COMPILED, "efficiency.vocab_multiple": 64}, slow=True)
    regional = {"efficiency.compile_regional": True}
    yield GPUCase("llama-1b", 2, 2048, {**_COMPILED, **regional}, fitted=True, slow=True)


def _second() -> Iterator[GPUCase]:
    yield GPUCase("gpt2-350m", 2, 1024)
    yield GPUCase("llama-1b", 1, 2048, {**_BF16, "efficiency.activation_offload": True})
    yield GPUCase("llama-1b", 2, 1024, {"efficiency.precision": "bf16_params", **_FULL})
    yield GPUCase("mistral-110m", 4, 2048, {**_BF16, **_CHUNKED})
    yield GPUCase("qwen2-110m", 32, 256, _BF16)
    yield GPUCase("gpt2-124m", 8, 1024, {**_BF16, **_optimizer("adamw", implementation="foreach")})
    yield GPUCase("gpt2-124m", 8, 1024, {**_BF16, **_optimizer("adamw", implementation="for-loop")})
    yield GPUCase("llama-110m", 8, 1024, {**_BF16, **_optimizer("sgd", learning_rate=0.1)})
    yield GPUCase("llama-110m", 8, 1024, {**_BF16, "efficiency.attention": "efficient"})
    yield GPUCase("llama-110m", 8, 1024, {**_BF16, "efficiency.attention": "cudnn"})
    yield GPUCase("gpt2-124m", 4, 1024, {**_BF16, "efficiency.attention": "math"})
    yield GPUCase("llama-110m", 1, 1024, _BF16)
    accumulated = {"batch.gradient_accumulation_steps": 3, "efficiency.precision": "bf16_params"}
    yield GPUCase("llama-110m", 4, 1024, accumulated)
    pairs = {"data.kind": "preference", "preference": {"beta": 0.1}, **_DOCUMENTS}
    yield GPUCase("llama-110m", 4, 1024, {**_BF16, **pairs, "efficiency.attention": "efficient"})
    yield GPUCase("gpt2-124m", 8, 1024, {**_BF16, "efficiency.vocab_multiple": 128, **_FULL})
    yield GPUCase("llama-1b", 2, 1024, {**_BF16, "lora": {"rank": 8, "dora": True}})
    yield GPUCase("gpt2-124m", 16, 1024, kind="evaluation")
    yield GPUCase("gpt2-124m", 1, 512, kind="generation", generation=_generation("float32", 1))
    flex = {**_BF16, **_DOCUMENTS, "efficiency.attention": "flex"}
    yield GPUCase("llama-110m", 8, 1024, flex, slow=True)
    eight_bit = _optimizer("adamw8bit")
    yield GPUCase("llama-400m", 4, 1024, {**_BF16, **eight_bit}, needs=("bitsandbytes",))
    nf4 = {"lora": {"rank": 8, "quantize": "nf4"}}
    yield GPUCase("llama-1b", 2, 1024, {**_BF16, **nf4}, needs=("bitsandbytes",))


def gpu_grid() -> tuple[GPUCase, ...]:
    """All configurations: twenty unlike ones, those that compile, the rest."""
    return (*_first(), *_compiled(), *_second())


def dry_grid() -> tuple[GPUCase, ...]:
    """Some tiny ones that a CPU runs in a second each."""
    return (
        GPUCase("tiny-gpt2", 2, 128, fitted=True),
        GPUCase("tiny-llama", 4, 256, _FULL, fitted=True),
        GPUCase("tiny-llama", 2, 128, {"efficiency.loss_chunk_tokens": 64}),
        GPUCase("tiny-gpt2", 1, 64, {"batch.gradient_accumulation_steps": 2}),
        GPUCase("tiny-llama", 2, 128, kind="evaluation"),
        GPUCase("tiny-gpt2", 1, 64, needs=("no-such-package",)),
    )
