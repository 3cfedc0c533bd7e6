"""The configurations whose memory and speed the planner's figures are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.bench.models import changed_recipe, model_values


@dataclass(frozen=True)
class PlannerCase:
    """One configuration.

    Attributes:
        model: name of a model; see `models.model_values`.
        rows, tokens: sequences of a micro-batch, and tokens of a sequence.
        changes: keys of the recipe, `section.key` or a whole section.
        kind: "training", "evaluation" or "generation".
        generation: prompt_tokens, max_new_tokens, sequences, dtype; None but for generation.
        needs: packages that must be installed.
        fitted: True if the speed model is fitted on it; else its error is measured on it.
        slow: True if it takes far longer than others, since it compiles.
        title: name of its own; "" makes one of the rest.
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
        """The name in tables; no two of a grid have the same."""
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
        """The recipe's values; no key is open."""
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
        """The case in a request of `planner_steps`."""
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
    """Twenty that are as unlike each other as they can be."""
    yield PlannerCase("gpt2-124m", 8, 1024, fitted=True)
    yield PlannerCase("gpt2-124m", 16, 1024, _BF16)
    yield PlannerCase("llama-110m", 16, 1024, _BF16, fitted=True)
    yield PlannerCase("llama-1b", 2, 2048, {**_BF16, **_FULL}, fitted=True)
    yield PlannerCase("gpt2-350m", 4, 1024, {**_BF16, "batch.gradient_accumulation_steps": 4})
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
    yield PlannerCase("llama-400m", 8, 2048, _BF16, "evaluation")
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
    yield PlannerCase("gpt2-350m", 2, 1024)
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
    """All configurations: twenty unlike ones, those that compile, the rest."""
    return (*_first(), *_compiled(), *_second())


def dry_grid() -> tuple[PlannerCase, ...]:
    """Some tiny ones that a CPU runs in a second each."""
    return (
        PlannerCase("tiny-gpt2", 2, 128, fitted=True),
        PlannerCase("tiny-llama", 4, 256, _FULL, fitted=True),
        PlannerCase("tiny-llama", 2, 128, {"efficiency.loss_chunk_tokens": 64}),
        PlannerCase("tiny-gpt2", 1, 64, {"batch.gradient_accumulation_steps": 2}),
        PlannerCase("tiny-llama", 2, 128, kind="evaluation"),
        PlannerCase("tiny-gpt2", 1, 64, needs=("no-such-package",)),
    )
