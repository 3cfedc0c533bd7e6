"""A recipe for a target, as one that can be traced on fake CPU tensors and keeps the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from firstlight.efficiency import resolve_precision
from firstlight.errors import ConfigError
from firstlight.hardware import Hardware, find_hardware
from firstlight.planner.kernels import Target
from firstlight.training.config import Recipe

#: What the traced program is told that it runs on.
PLANNED = Hardware(torch.device("cpu"), "a planned device", 2**50, bf16=True)

#: Kernels of attention that only GPUs have, and what they are traced as.
_GPU_KERNELS = {"flash": "flash", "efficient": "efficient", "cudnn": "cudnn", "math": "math"}


@dataclass(frozen=True)
class Equivalent:
    """What is traced.

    Attributes:
        recipe: to trace.
        kernel: of attention on a GPU, see `CudaKernels`; None is torch's choice.
        offloads: whether activations go to the host's memory.
        notes: what is taken for granted.
    """

    recipe: Recipe
    kernel: str | None
    offloads: bool
    notes: tuple[str, ...]

    def with_(self, recipe: Recipe) -> Equivalent:
        """The same for another recipe."""
        return replace(self, recipe=recipe)


def equivalent(recipe: Recipe, target: Target) -> Equivalent:
    """What to trace for a recipe on a target.

    Raises:
        ConfigError: the model or the row length is undecided.
    """
    if recipe.model is None or recipe.model.vocab_size == 0 or recipe.data.seq_len is None:
        raise ConfigError(
            "a plan needs the model's shape: give model.vocab_size and data.seq_len, or the folder "
            "of the prepared data"
        )
    config, notes = recipe.efficiency, []
    chosen: dict[str, Any] = {"activation_offload": False}
    kernel = None
    if config.precision == "auto":
        chosen["precision"] = _precision(recipe, target)
    if config.compile == "auto":
        chosen["compile"] = False
    if config.loss_chunk_tokens is None:
        chosen["loss_chunk_tokens"] = 0
    if target.kind == "cuda":
        kernel = _GPU_KERNELS.get(config.attention)
        # What is automatic on the CPU that is traced on is not what a GPU takes.
        if kernel is not None or config.attention in ("auto", "flex"):
            chosen["attention"] = "sdpa"
        if config.precision == "fp8":
            chosen["precision"] = "bf16"
            notes.append("fp8 is planned as bf16: the scaled copies of factors are left out")
        if config.precision == "tf32":
            chosen["precision"] = "fp32"
        if config.compile is True:
            notes.append("compiled code is planned as inductor makes it for CPUs")
    recipe = recipe.model_copy(update={"efficiency": config.model_copy(update=chosen)})
    recipe = _without_masks(recipe, config.attention, target)
    if recipe.optimizer.name == "paged_adamw8bit":
        notes.append("paged states are counted on the device, where they lie while they fit")
        optimizer = recipe.optimizer.model_copy(update={"name": "adamw8bit"})
        recipe = recipe.model_copy(update={"optimizer": optimizer})
    if recipe.data.pin_memory:
        data = recipe.data.model_copy(update={"pin_memory": None})
        recipe = recipe.model_copy(update={"data": data})
    return Equivalent(recipe, kernel, config.activation_offload, tuple(notes))


def _precision(recipe: Recipe, target: Target) -> str:
    if target.kind == "cuda":
        return "bf16" if target.capability >= (8, 0) else "fp32"
    half = resolve_precision(recipe.efficiency, find_hardware("cpu")) == torch.bfloat16
    return "bf16" if half else "fp32"


def _without_masks(recipe: Recipe, attention: str, target: Target) -> Recipe:
    """flex attention, which documents take on a GPU, keeps no mask of its scores' size."""
    masked = recipe.data.document_masking and attention in ("auto", "flex")
    if target.kind == "cpu" or not masked:
        return recipe
    data = recipe.data.model_copy(update={"document_masking": False})
    return recipe.model_copy(update={"data": data})
