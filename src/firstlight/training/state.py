"""Everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.checkpoint import Checkpoint
from firstlight.errors import CheckpointError
from firstlight.huggingface import model_files
from firstlight.models import Model
from firstlight.optim.optimizer import Optimizer
from firstlight.tokenizer import Tokenizer
from firstlight.training.scaling import LossScaler
from firstlight.weights import file_tensors, weights_to_save

_RNG_PREFIX = "rng."


@dataclass
class TrainState:
    """The state of a run between two steps.

    Attributes:
        step: optimizer steps done.
        tokens_seen: valid tokens trained on.
        rows_seen: rows the loader has handed out.
    """

    step: int = 0
    tokens_seen: int = 0
    rows_seen: int = 0


def capture(
    state: TrainState,
    model: Model,
    optimizer: Optimizer,
    scaler: LossScaler | None,
    tokenizer: Tokenizer,
    origin: dict[str, Any],
) -> Checkpoint:
    """The checkpoint of a run as it is now.

    Args:
        origin: what the run is made of, as JSON values: recipe, data, init_from.
    """
    with optimizer.master_weights():
        weights = weights_to_save(model)
    return Checkpoint(
        files=model_files(model.config, tokenizer),
        model=weights,
        optimizer={**optimizer.state_tensors(), **_random_states()},
        trainer_state={
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "loader": {"rows_seen": state.rows_seen},
            "loss_scale": None if scaler is None else scaler.state_dict(),
            **origin,
        },
    )


def restore(
    checkpoint: Checkpoint, model: Model, optimizer: Optimizer, scaler: LossScaler | None
) -> TrainState:
    """Put a checkpoint's weights, moments, loss scale and random-number states back.

    Raises:
        CheckpointError: it does not fit the model or optimizer, or lacks something.
    """
    with optimizer.master_weights():
        _restore_weights(checkpoint, model)
    randoms = {n: t for n, t in checkpoint.optimizer.items() if n.startswith(_RNG_PREFIX)}
    moments = {n: t for n, t in checkpoint.optimizer.items() if n not in randoms}
    optimizer.load_state_tensors(moments)
    _restore_random_states(randoms)
    saved = checkpoint.trainer_state
    # A run that went on from another precision has no scale yet.
    if scaler is not None and saved.get("loss_scale") is not None:
        scaler.load_state_dict(saved["loss_scale"])
    try:
        return TrainState(saved["step"], saved["tokens_seen"], saved["loader"]["rows_seen"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"trainer_state.json lacks {error}") from error


@torch.no_grad()
def _restore_weights(checkpoint: Checkpoint, model: Model) -> None:
    places = file_tensors(model)
    for name in sorted(places.keys() ^ checkpoint.model.keys()):
        raise CheckpointError(
            f"the checkpoint's weights don't fit the model: '{name}' is in only one"
        )
    for name, tensor in checkpoint.model.items():
        if tensor.shape != places[name].shape:
            raise CheckpointError(
                f"the checkpoint's tensor '{name}' is {list(tensor.shape)}, "
                f"the model's {list(places[name].shape)}"
            )
        places[name].copy_(tensor)


def _random_states() -> dict[str, Tensor]:
    """The states of torch's generators: dropout draws from them. Nothing else here draws."""
    states = {f"{_RNG_PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {
            f"{_RNG_PREFIX}cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())
        }
    return states


def _restore_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states[f"{_RNG_PREFIX}cpu"])
    for name, tensor in states.items():
        _, kind, *index = name.split(".")
        if (
            kind == "cuda"
            and torch.cuda.is_available()
            and int(index[0]) < torch.cuda.device_count()
        ):
            torch.cuda.set_rng_state(tensor, int(index[0]))
