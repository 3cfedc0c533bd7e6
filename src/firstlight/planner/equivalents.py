"""A recipe for a target, as one that can be traced on fake CPU tensors and keeps the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from firstlight.efficiency import EfficiencyConfig
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.planner.kernels import Target
from firstlight.recipe import ResolvedRecipe

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

    recipe: ResolvedRecipe
    kernel: str | None
    offloads: bool
    notes: tuple[str, ...]

    def with_(self, recipe: ResolvedRecipe) -> Equivalent:
        """The same for another recipe."""
        return replace(self, recipe=recipe)


def equivalent(recipe: ResolvedRecipe, target: Target) -> Equivalent:
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


def without_compile(config: EfficiencyConfig) -> dict[str, Any]:
    """The keys of a section that compiles that have another value without torch.compile: what says
    how to compile goes with it. What is computed again within a memory budget is the compiler's own
    choice; nothing is taken for that."""
    plain = {"compile": False, "compile_regional": False, "compile_mode": "default"}
    if config.activation_checkpointing == "budget":
        plain["activation_checkpointing"] = "none"
    return {key: value for key, value in plain.items() if getattr(config, key) != value}


def uncompiled(recipe: ResolvedRecipe) -> ResolvedRecipe:
    """The same step, operator by operator: what torch.compile starts from."""
    config = recipe.efficiency
    if config.compile is not True:
        return recipe
    changes = without_compile(config)
    return recipe.model_copy(update={"efficiency": config.model_copy(update=changes)})


def _without_masks(recipe: ResolvedRecipe, attention: str, target: Target) -> ResolvedRecipe:
    """flex attention, which documents take on a GPU, keeps no mask of its scores' size."""
    masked = recipe.data.document_masking and attention in ("auto", "flex")
    if target.kind == "cpu" or not masked:
        return recipe
    data = recipe.data.model_copy(update={"document_masking": False})
    return recipe.model_copy(update={"data": data})
