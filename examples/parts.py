"""Code shared by both examples: a recipe's model, data, optimizer and schedule as plain torch
objects.

From a recipe's `efficiency` section, the examples use only `activation_checkpointing` and
`precision` (fp32, bf16, fp16).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.cli.options import split_paths
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import TokenLoader
from firstlight.errors import ConfigError, FirstlightError
from firstlight.hardware.device import find_hardware
from firstlight.models import Model, empty_model
from firstlight.optim.config import parameter_kinds
from firstlight.optim.optimizer import make_optimizers
from firstlight.optim.schedule import BatchSchedule, Schedule, resolve_schedule
from firstlight.recipe import Recipe, load_recipe

#: Precisions of a recipe, and their names in the other trainers.
MIXED_PRECISION = {"auto": "no", "fp32": "no", "bf16": "bf16", "fp16": "fp16"}


class OptimizerGroup(torch.optim.Optimizer):
    """Several optimizers for different parameters behind the interface of one, as trainers expect.

    Args:
        optimizers: the optimizers, which share their parameter groups with this object.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizers, in their order."""
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for one, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(state)
        # Loading replaces an optimizer's groups by copies.
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
        recipe: the recipe from which they are built.
        model: model initialised as in `firstlight train`; forward(input_ids, labels) returns the
            loss summed over the labels that are not -100.
        optimizer: AdamW for the model's parameters, with 32-bit moments or with 8-bit moments
            except for embeddings; weight decay applies to matrices only.
        dataset: the training split.
        seq_len: tokens per row.
        schedule: learning rate by step, and the number of steps.
    """

    recipe: Recipe
    model: Model
    optimizer: torch.optim.Optimizer
    dataset: TokenDataset
    seq_len: int
    schedule: Schedule

    def loader(self, rank: int = 0, processes: int = 1) -> TokenLoader:
        """Return the batches of one process, the same as in `firstlight train`."""
        rows, seed = self.recipe.batch.rows, self.recipe.run.seed
        return TokenLoader(self.dataset, self.seq_len, rows, seed, rank=rank, world_size=processes)


def run(train: Callable[[Recipe], list[float]]) -> list[float]:
    """Call `train` with the recipe named on the command line, and print errors as one line.

    example.py RECIPE.yaml [--section.key VALUE]...
    """
    program = Path(sys.argv[0]).name
    try:
        paths, overrides = split_paths(sys.argv[1:])
        if len(paths) != 1:
            raise ConfigError(f"use: {program} RECIPE.yaml [--section.key VALUE]...")
        return train(load_recipe(paths[0], overrides))
    except FirstlightError as error:
        sys.exit(f"{program}: error: {error}")


def parts_of(recipe: Recipe) -> Parts:
    """Build the parts of a recipe.

    Raises:
        ConfigError: the recipe needs something that these examples do not support.
        DataError: its data is missing or damaged.
    """
    if recipe.model is None or recipe.data.dir is None or recipe.schedule.max_steps is None:
        raise ConfigError("the examples need model, data.dir and schedule.max_steps in the recipe")
    _require_supported(recipe)
    dataset = TokenDataset(recipe.data.dir, "train")
    config = recipe.model.model_copy(update={"vocab_size": dataset.vocab_size})
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(recipe.run.seed), recipe.init)
    parameters = dict(model.named_parameters())
    made = [one for _, one in make_optimizers(parameters, parameter_kinds(model), recipe.optimizer)]
    # Two for an 8-bit optimizer: embeddings keep 32 bits, unless embeddings_in_32_bits is false.
    optimizer = made[0] if len(made) == 1 else OptimizerGroup(made)
    seq_len = recipe.data.seq_len or config.max_position_embeddings
    # With max_steps and without warmup_tokens, the rows per epoch or step do not matter.
    batch = BatchSchedule(1, 1)
    schedule = resolve_schedule(recipe.schedule, recipe.optimizer.learning_rate, 1, batch, seq_len)
    return Parts(recipe, model, optimizer, dataset, seq_len, schedule)


def _require_supported(recipe: Recipe) -> None:
    """Reject keys of a recipe that these examples do not support."""
    if recipe.schedule.max_steps == 0:
        raise ConfigError("the examples need a step: give schedule.max_steps at least 1")
    for key, instead in (("warmup_tokens", "warmup_steps"), ("decay_tokens", "decay_steps")):
        if getattr(recipe.schedule, key) is not None:
            raise ConfigError(f"the examples know no schedule.{key}: give {instead}")
    if recipe.batch.ramp_steps is not None:
        raise ConfigError("the examples know no ramp: leave batch.ramp_start_tokens out")
    if type(recipe.batch.micro_batch_size) is not int:
        raise ConfigError("the examples need a number as batch.micro_batch_size in the recipe")
    known = recipe.optimizer.name in ("adamw", "adamw8bit")
    if not known or recipe.lora is not None or recipe.data.document_masking:
        raise ConfigError(
            "the examples know optimizer.name adamw and adamw8bit, no lora, no document_masking"
        )
    if recipe.efficiency.precision not in MIXED_PRECISION:
        raise ConfigError(f"the examples know efficiency.precision {', '.join(MIXED_PRECISION)}")
    on_gpu = find_hardware(recipe.run.device).device.type == "cuda"
    if recipe.efficiency.precision == "fp16" and not on_gpu:
        raise ConfigError(
            "efficiency.precision fp16 needs a GPU in the examples: on a CPU both libraries would "
            "train in fp32 without a word; take bf16"
        )
    if recipe.optimizer.clip_after_warmup:
        raise ConfigError("the examples clip in all steps: leave optimizer.clip_after_warmup out")
    if recipe.optimizer.cautious_weight_decay:
        raise ConfigError("the examples know no optimizer.cautious_weight_decay: leave it out")
    if recipe.loss.z_loss_coef:
        raise ConfigError("the examples know no loss.z_loss_coef: leave it out")
