"""Runs with `lora`: what is trained stands beside a frozen base, which checkpoints only name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from firstlight.checkpoint.checkpoint import load_checkpoint, resolve_model_folder
from firstlight.errors import CheckpointError, ConfigError, ModelError
from firstlight.hardware.device import Hardware
from firstlight.lora.files import base_name
from firstlight.lora.layers import add_lora
from firstlight.lora.quantized import require_nf4
from firstlight.models import Model
from firstlight.recipe import Recipe
from firstlight.weights.huggingface import base_identity, load_model

_BASE_KEYS = ("name", "sha256")


@dataclass(frozen=True)
class AdapterBase:
    """The model that a run's adapter belongs to.

    Attributes:
        name: its folder, or its hub id.
        sha256: see `base_identity`.
    """

    name: str
    sha256: str


def starting_base(init_from: str | Path | None) -> AdapterBase:
    """The base of a run that begins.

    Raises:
        ConfigError: none is given.
    """
    if init_from is None:
        raise ConfigError(
            "lora trains a small change of given weights: name them with --init-from, or leave "
            "the lora section out to train all weights from scratch"
        )
    folder = resolve_model_folder(init_from)
    return AdapterBase(base_name(init_from, folder), base_identity(folder))


def resumed_base(recipe: Recipe, newest: Path) -> tuple[Model, AdapterBase]:
    """The base of a run that goes on, with its weights.

    Raises:
        CheckpointError: the run was one without `lora`, or the base is gone or another by now.
    """
    saved = load_checkpoint(newest).trainer_state.get("lora_base")
    if saved is None:
        raise CheckpointError(
            f"{newest} is of a run without lora: leave the lora section out, or start a new run "
            f"in another run.dir with --init-from {newest}"
        )
    if not isinstance(saved, dict) or not all(isinstance(saved.get(k), str) for k in _BASE_KEYS):
        raise CheckpointError(f"{newest}: trainer_state.json does not say what its base is")
    base = AdapterBase(saved["name"], saved["sha256"])
    try:
        folder = resolve_model_folder(base.name)
        found = base_identity(folder)
        model = load_model(
            folder,
            dtype=torch.float32,
            way="sequential",
            vocab_multiple=recipe.efficiency.vocab_multiple,
        ).model
    except ModelError as error:
        raise CheckpointError(
            f"{newest} can't be resumed without its base {base.name}: {error}"
        ) from error
    if found != base.sha256:
        raise CheckpointError(
            f"{newest} can't be resumed: its base {base.name} is not the model that it was (the "
            "weights' sha256 differs); put the old one back"
        )
    return model, base


def attach(model: Model, recipe: Recipe, hardware: Hardware) -> None:
    """Put the adapters of the recipe's `lora` section into the model, its other weights frozen.

    Frozen matrices are kept in the dtype that they are multiplied in.

    Args:
        recipe: with its precision decided.
        hardware: that the model will be moved to.

    Raises:
        ConfigError: a target is no linear layer, or 4 bits don't work here.
        MissingDependencyError: 4 bits need bitsandbytes.
    """
    assert recipe.lora is not None
    if recipe.lora.quantize == "nf4":
        require_nf4(hardware.device)
    frozen = {
        "bf16": torch.bfloat16,
        "bf16_params": torch.bfloat16,
        "fp8": torch.bfloat16,
        "fp16": torch.float16,
    }.get(recipe.efficiency.precision)
    generator = torch.Generator().manual_seed(recipe.run.seed)
    add_lora(model, recipe.lora, generator, frozen_dtype=frozen)
