from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.errors import CheckpointError, ConfigError, TrainingError
from firstlight.models import GPT2, GPT2Config
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.training.guard import LossScaler
from firstlight.training.step import train_step


def model_and_optimizer(**settings: Any) -> tuple[GPT2, Optimizer]:
    model = GPT2(
        GPT2Config(
            vocab_size=23,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
    )
    model.init_weights(torch.Generator().manual_seed(1))
    return model, Optimizer(model, OptimizerConfig(**settings))


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(23, (2, 8), generator=generator) for _ in range(4)]
    return [Batch(ids[0], ids[1], 16), Batch(ids[2], ids[3], 16)]


def everything(model: GPT2, optimizer: Optimizer) -> dict[str, bytes]:
    tensors = {**model.state_dict(), **optimizer.state_tensors()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def overflowing(model: GPT2, limit: float) -> Callable[..., Tensor]:
    """A loss whose gradient overflows where it is scaled above a limit, as fp16's would."""

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        loss: Tensor = model(input_ids, labels)
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda scaled: torch.full_like(scaled, math.inf) if scaled > limit / 32 else scaled
        )
        return loss

    return loss_sum


# --- the scale -------------------------------------------------------------------------------


def test_loss_scale_starts_at_2_to_the_16() -> None:
    assert LossScaler().state_dict() == {"scale": 65536.0, "good_steps": 0, "skipped_steps": 0}


def test_loss_scale_doubles_after_2000_good_steps() -> None:
    scaler = LossScaler(8.0)
    for _ in range(1999):
        scaler.update(finite=True)
    assert (scaler.scale, scaler.good_steps) == (8.0, 1999)
    scaler.update(finite=True)
    assert (scaler.scale, scaler.good_steps) == (16.0, 0)


def test_loss_scale_overflow_halves_scale_and_resets_count() -> None:
    scaler = LossScaler(8.0)
    for _ in range(1999):
        scaler.update(finite=True)
    scaler.update(finite=False)
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 0, "skipped_steps": 1}
    scaler.update(finite=True)
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 1, "skipped_steps": 1}


def test_loss_scale_exhausted_raises_training_error() -> None:
    scaler = LossScaler()
    # From 2^16 to 2^-14, fp16's smallest normal number, are 30 halvings.
    for _ in range(30):
        scaler.update(finite=False)
    assert scaler.scale == 2.0**-14
    with pytest.raises(TrainingError, match=r"not finite at any loss scale \(31 steps skipped\)"):
        scaler.update(finite=False)


@given(st.lists(st.booleans(), max_size=30))
def test_loss_scale_stays_power_of_two_and_counts_skipped_steps(
    steps: list[bool],
) -> None:
    scaler = LossScaler()
    for finite in steps:
        scaler.update(finite)
    assert scaler.skipped_steps == steps.count(False)
    assert math.frexp(scaler.scale)[0] == 0.5
    again = LossScaler(1.0)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 1.0, "good_steps": 2},
        {"scale": "much", "good_steps": 0, "skipped_steps": 0},
        {"scale": None, "good_steps": 0, "skipped_steps": 0},
        {"scale": 0.0, "good_steps": 0, "skipped_steps": 0},
        {"scale": math.nan, "good_steps": 0, "skipped_steps": 0},
        {"scale": math.inf, "good_steps": 0, "skipped_steps": 0},
        {"scale": -2.0, "good_steps": 0, "skipped_steps": 0},
    ],
)
def test_loss_scale_damaged_state_raises_and_changes_nothing(state: dict[str, Any]) -> None:
    scaler = LossScaler(4.0)
    with pytest.raises(CheckpointError, match="loss scale is damaged"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 0, "skipped_steps": 0}


# --- a step with a scale -----------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_loss_scale_changes_neither_step_nor_reported_values(max_grad_norm: float) -> None:
    outcomes = []
    for scaler in (None, LossScaler(1024.0), LossScaler(2.0**-10)):
        model, optimizer = model_and_optimizer(max_grad_norm=max_grad_norm)
        result = train_step(model, optimizer, batches(), scaler)
        outcomes.append((result, everything(model, optimizer)))
    # Powers of two change no digit.
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_loss_scale_overflow_skips_step_and_changes_no_bit() -> None:
    model, optimizer = model_and_optimizer()
    scaler = LossScaler(1024.0)
    train_step(model, optimizer, batches(), scaler)
    before = everything(model, optimizer)
    result = train_step(overflowing(model, 512.0), optimizer, batches(), scaler)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert result.tokens == 32
    assert everything(model, optimizer) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert scaler.state_dict() == {"scale": 512.0, "good_steps": 0, "skipped_steps": 1}


def test_loss_scale_steps_continue_once_scale_fits() -> None:
    model, optimizer = model_and_optimizer()
    scaler = LossScaler(1024.0)
    loss_sum = overflowing(model, 128.0)
    results = [train_step(loss_sum, optimizer, batches(), scaler) for _ in range(5)]
    assert [result.skipped for result in results] == [True, True, True, False, False]
    assert (scaler.scale, scaler.skipped_steps) == (128.0, 3)
    # As if the skipped steps had not been.
    plain, other = model_and_optimizer()
    for _ in range(2):
        train_step(plain, other, batches())
    assert everything(model, optimizer) == everything(plain, other)


def test_loss_scale_nan_loss_is_skipped_until_scale_is_exhausted() -> None:
    model, optimizer = model_and_optimizer()

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        loss: Tensor = model(input_ids, labels)
        return loss * math.nan

    scaler = LossScaler(2.0**-13)
    before = everything(model, optimizer)
    assert train_step(loss_sum, optimizer, batches(), scaler).skipped
    with pytest.raises(TrainingError, match="at any loss scale"):
        train_step(loss_sum, optimizer, batches(), scaler)
    assert everything(model, optimizer) == before


def test_loss_scale_with_optimizer_in_backward_raises_config_error() -> None:
    model = model_and_optimizer()[0]
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=0.0), in_backward=True)
    with pytest.raises(ConfigError, match="does not support scaled gradients"):
        train_step(model, optimizer, batches()[:1], LossScaler(2.0))
