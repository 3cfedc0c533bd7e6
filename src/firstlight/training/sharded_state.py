"""Weights and moments of a run between its processes and a checkpoint in pieces."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from firstlight.checkpoint.sharded import (
    MOMENTS,
    WEIGHTS,
    fitting_model,
    read_pieces,
    read_wholes,
    stored_wholes,
)
from firstlight.errors import CheckpointError
from firstlight.training.program import TrainingProgram


def restore_pieces(
    folder: Path, program: TrainingProgram, other_prefix: str, has_moments: bool
) -> dict[str, Tensor]:
    """Put a checkpoint's weights and moments back where they belong: each process reads its own.

    Args:
        folder: of a checkpoint in pieces.
        other_prefix: what the names of the tensors begin with that are not moments.
        has_moments: whether there have to be moments.

    Returns:
        The tensors that are not moments, on the CPU.

    Raises:
        CheckpointError: it is damaged, or not of this model and optimizer.
    """
    if program.recipe.lora is not None:
        raise CheckpointError(
            f"{folder} holds all weights in pieces, and the recipe has a lora section: take that "
            "out, or start a new run from what `firstlight convert` makes of it"
        )
    config, multiple = program.model.config, program.recipe.efficiency.vocab_multiple
    fitting_model(config, folder, multiple)
    with program.optimizer.master_weights(changed=True):
        read_pieces(folder, WEIGHTS, dict(program.model.named_parameters()))
    names = stored_wholes(folder, MOMENTS).keys()
    others = {name for name in names if name.startswith(other_prefix)}
    if moments := names - others:
        for name in sorted(moments ^ program.optimizer.state_names):
            raise CheckpointError(
                "the saved optimizer state is not that of this model and optimizer: "
                f"'{name}' is in only one of them"
            )
        program.optimizer.fill_state(lambda tensors: read_pieces(folder, MOMENTS, tensors))
    elif has_moments and program.optimizer.state_names:
        raise CheckpointError(f"{folder} holds no optimizer state")
    return read_wholes(folder, MOMENTS, others)
