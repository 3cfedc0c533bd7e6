"""Everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.checkpoint import Checkpoint
from firstlight.errors import CheckpointError, ModelError
from firstlight.huggingface import model_files
from firstlight.lora import adapter_files, adapter_tensors, fill_adapter
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer
from firstlight.training.adapters import AdapterBase
from firstlight.training.program import TrainingProgram
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
    program: TrainingProgram,
    tokenizer: Tokenizer,
    base: AdapterBase | None,
    origin: dict[str, Any],
) -> Checkpoint:
    """The checkpoint of a run as it is now.

    Args:
        base: of a run with `lora`.
        origin: what the run is made of, as JSON values: recipe, data, init_from.
    """
    model, scaler = program.model, program.scaler
    files = model_files(model.config, tokenizer)
    if base is None:
        with program.optimizer.master_weights():
            weights = weights_to_save(model)
    else:
        assert program.recipe.lora is not None
        files |= adapter_files(model, program.recipe.lora, base.name)
        weights = adapter_tensors(model)
    return Checkpoint(
        files=files,
        model=weights,
        optimizer={**program.optimizer.state_tensors(), **_random_states()},
        trainer_state={
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "loader": {"rows_seen": state.rows_seen},
            "loss_scale": None if scaler is None else scaler.state_dict(),
            "lora_base": None if base is None else asdict(base),
            **origin,
        },
    )


def restore(checkpoint: Checkpoint, program: TrainingProgram) -> TrainState:
    """Put a checkpoint's weights, moments, loss scale and random-number states back.

    Raises:
        CheckpointError: it does not fit the model or optimizer, or lacks something.
    """
    if program.recipe.lora is not None:
        try:
            fill_adapter(program.model, checkpoint.model, "the checkpoint's adapter")
        except ModelError as error:
            raise CheckpointError(str(error)) from error
    else:
        with program.optimizer.master_weights():
            _restore_weights(checkpoint, program.model)
    randoms = {n: t for n, t in checkpoint.optimizer.items() if n.startswith(_RNG_PREFIX)}
    moments = {n: t for n, t in checkpoint.optimizer.items() if n not in randoms}
    program.optimizer.load_state_tensors(moments)
    _restore_random_states(randoms)
    saved = checkpoint.trainer_state
    # A run that went on in another precision has no scale yet.
    if program.scaler is not None and saved.get("loss_scale") is not None:
        program.scaler.load_state_dict(saved["loss_scale"])
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
