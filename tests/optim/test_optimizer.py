from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from firstlight.errors import CheckpointError
from firstlight.models import ModelConfig
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from optimizer_models import (
    GPT2,
    LLAMA,
    make,
    moved,
    new_model,
    same,
    set_gradients,
    steps,
    weights,
)

both = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
each = pytest.mark.parametrize("name", ["adamw", "muon"])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Rules by parameter


@both
def test_weight_decay_applies_to_matrices_only(config: ModelConfig) -> None:
    """Without a gradient, AdamW only applies the decay."""
    found = moved(new_model(config), make("adamw", weight_decay=0.5), gradient=0.0)
    shapes = {name: p.dim() for name, p in new_model(config).named_parameters()}
    assert set(shapes.values()) == {1, 2}
    for name, movement in found.items():
        expected = 0.01 * 0.5 if shapes[name] == 2 else 0.0
        torch.testing.assert_close(movement, torch.full_like(movement, expected), atol=1e-7, rtol=0)


@both
def test_muon_receives_exactly_the_matrices_inside_layers(config: ModelConfig) -> None:
    model = new_model(config)
    optimizer = Optimizer(model, make("muon"))
    set_gradients(model, 0)
    optimizer.step()
    state = optimizer.state_tensors()
    of_muon = {name.removesuffix(".momentum_buffer") for name in state if "momentum" in name}
    of_adamw = {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")}
    expected = {
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith(("model.layers.", "transformer.h."))
    }
    assert of_muon == expected
    assert of_adamw == dict(model.named_parameters()).keys() - expected
    assert any("embed" in name or "wte" in name for name in of_adamw)
    assert "lm_head.weight" in of_adamw
    assert len(expected) == 2 * (7 if config is LLAMA else 4)


def test_muon_own_learning_rate_applies_to_matrices_only() -> None:
    """With a learning rate of almost 0, only the matrices move, with their separate learning
    rate.
    """
    tiny = 1e-30
    config = make("muon", learning_rate=tiny, muon_learning_rate=0.01, weight_decay=0.0)
    found = moved(new_model(), config, gradient=1.0)
    assert not found["model.embed_tokens.weight"].any()
    assert not found["model.norm.weight"].any()
    assert found["model.layers.0.mlp.up_proj.weight"].all()

    config = make("muon", learning_rate=0.01, muon_learning_rate=tiny, weight_decay=0.0)
    found = moved(new_model(), config, gradient=1.0)
    assert found["model.embed_tokens.weight"].all()
    assert not found["model.layers.0.mlp.up_proj.weight"].any()


def test_muon_steps_have_size_of_adamw_steps() -> None:
    """The orthogonal update is scaled by 0.2 sqrt(larger side), so its entries are about 0.2.

    The matrices are large, so that any other scale gives a different result.
    """
    model = new_model(LLAMA.model_copy(update={"hidden_size": 128, "head_dim": 32}))
    before = weights(model)
    optimizer = Optimizer(model, make("muon", weight_decay=0.0, learning_rate=1e-2))
    set_gradients(model, 3)
    optimizer.step()
    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            movement = (parameter.detach() - before[name]).square().mean().sqrt().item()
            assert 0.13e-2 < movement < 0.27e-2, name


# The update rules


@both
def test_adamw_matches_torch(config: ModelConfig) -> None:
    own, theirs = new_model(config), new_model(config)
    optimizer = Optimizer(own, make("adamw", betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3))
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=False,
        foreach=False,
    )
    for seed in range(5):
        set_gradients(own, seed)
        set_gradients(theirs, seed)
        share = 1 / (1 + seed)
        optimizer.set_learning_rate(share)
        for group in reference.param_groups:
            group["lr"] = 0.01 * share
        optimizer.clip_gradients()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        reference.step()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            dict(own.named_parameters())[name], parameter, atol=1e-6, rtol=1e-5
        )


def test_adamw_single_value_matches_hand_calculation() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer = Optimizer(model, make("adamw", betas=[0.9, 0.99], weight_decay=0.1))
    weight, average, square = 2.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -0.25, 0.125), start=1):
        model.weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        update = (average / (1 - 0.9**step)) / ((square / (1 - 0.99**step)) ** 0.5 + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
        assert model.weight.item() == pytest.approx(weight, rel=1e-6)


# Learning rate and clipping


@each
def test_set_learning_rate_scales_peak_of_each_group(name: str) -> None:
    optimizer = Optimizer(new_model(), make(name, muon_learning_rate=0.5))
    for share in (0.25, 1.0, 0.125):
        assert optimizer.set_learning_rate(share) == pytest.approx(0.01 * share)
        rates = {g["lr"] for o in optimizer._torch_optimizers for g in o.param_groups}
        assert rates == ({0.01 * share, 0.5 * share} if name == "muon" else {0.01 * share})


def test_clip_gradients_scales_to_limit_and_returns_norm_before() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.5))
    set_gradients(model, 0)
    before = gradients(model)
    norm = sum(float(g.double().square().sum()) for g in before.values()) ** 0.5
    assert norm > 1
    assert float(optimizer.clip_gradients()) == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, before[name] * 0.5 / norm, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clip_gradients_is_bitwise_equal_to_torch_also_when_scaled(
    limit: float, scale: float
) -> None:
    own, theirs = new_model(), new_model()
    set_gradients(own, 0)
    set_gradients(theirs, 0)
    for parameter in own.parameters():
        assert parameter.grad is not None
        parameter.grad *= scale
    norm = Optimizer(own, make("adamw", max_grad_norm=limit)).clip_gradients(scale)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert torch.equal(norm, expected)
    assert (float(expected) > limit) == (limit == 0.5)
    assert same(gradients(own), gradients(theirs))


@pytest.mark.parametrize("limit", [0.0, 1e6])
def test_clip_gradients_below_limit_changes_nothing(limit: float) -> None:
    model = new_model()
    set_gradients(model, 0)
    before = gradients(model)
    Optimizer(model, make("adamw", max_grad_norm=limit)).clip_gradients()
    assert all(torch.equal(before[name], g) for name, g in gradients(model).items())


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_clip_gradients_non_finite_gradient_shows_in_norm(limit: float, value: float) -> None:
    model = new_model()
    set_gradients(model, 0)
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[0, 0] = value
    norm = Optimizer(model, make("adamw", max_grad_norm=limit)).clip_gradients()
    assert not torch.isfinite(norm)


@each
def test_zero_grad_clears_every_gradient(name: str) -> None:
    model = new_model()
    set_gradients(model, 0)
    Optimizer(model, make(name)).zero_grad()
    assert all(p.grad is None for p in model.parameters())


# State


@both
@each
def test_optimizer_run_resumes_bit_for_bit_from_saved_state(name: str, config: ModelConfig) -> None:
    model = new_model(config)
    optimizer = Optimizer(model, make(name))
    steps(model, optimizer, range(3))
    saved = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    other = copy.deepcopy(model)
    resumed = Optimizer(other, make(name))
    resumed.load_state_tensors(saved)
    again = resumed.state_tensors()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], saved[key]) for key in saved)

    steps(model, optimizer, range(3, 6))
    steps(other, resumed, range(3, 6))
    expected, found = weights(model), weights(other)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@each
def test_optimizer_loaded_state_is_not_modified_later(name: str) -> None:
    model = new_model()
    optimizer = Optimizer(model, make(name))
    steps(model, optimizer, range(2))
    saved = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    given = {n: t.clone() for n, t in saved.items()}
    resumed = Optimizer(model, make(name))
    resumed.load_state_tensors(given)
    steps(model, resumed, range(2))
    assert all(torch.equal(given[key], saved[key]) for key in saved)


@each
def test_optimizer_state_excludes_learning_rate(name: str) -> None:
    """Otherwise a resumed run would continue with the old learning rate and ignore its recipe."""
    model = new_model()
    optimizer = Optimizer(model, make(name, learning_rate=0.5))
    steps(model, optimizer, range(1))
    state = optimizer.state_tensors()
    kinds = {key.rpartition(".")[2] for key in state}
    assert kinds <= {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    resumed = Optimizer(model, make(name, learning_rate=0.125))
    resumed.load_state_tensors(state)
    rates = {group["lr"] for o in resumed._torch_optimizers for group in o.param_groups}
    assert rates == {0.125}


def test_optimizer_state_tensors_are_named_by_parameter() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("adamw"))
    assert optimizer.state_tensors() == {}
    steps(model, optimizer, range(4))
    state = optimizer.state_tensors()
    assert len(state) == 3 * len(list(model.parameters()))
    assert state["model.norm.weight.step"].item() == 4
    assert state["model.norm.weight.exp_avg"].shape == (16,)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in state.values())


def saved_state(name: str, config: ModelConfig = LLAMA) -> dict[str, Tensor]:
    model = new_model(config)
    optimizer = Optimizer(model, make(name))
    steps(model, optimizer, range(1))
    return optimizer.state_tensors()


@each
def test_optimizer_state_lacking_a_tensor_raises_and_names_it(name: str) -> None:
    complete = saved_state(name)
    for key in ("model.norm.weight.exp_avg_sq", "lm_head.weight.step", "lm_head.weight.exp_avg"):
        state = {n: t for n, t in complete.items() if n != key}
        with pytest.raises(CheckpointError, match=key):
            Optimizer(new_model(), make(name)).load_state_tensors(state)


@each
def test_optimizer_state_with_unknown_tensor_raises_and_names_it(name: str) -> None:
    for key in ("model.norm.weight.momentum", "model.layers.9.x.exp_avg", "loose"):
        state = {**saved_state(name), key: torch.zeros(16)}
        with pytest.raises(CheckpointError, match=key):
            Optimizer(new_model(), make(name)).load_state_tensors(state)


@each
def test_optimizer_state_of_other_model_raises_checkpoint_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="is in only one of them"):
        Optimizer(new_model(GPT2), make(name)).load_state_tensors(saved_state(name))


@pytest.mark.parametrize("saved, now", [("adamw", "muon"), ("muon", "adamw")])
def test_optimizer_state_of_other_optimizer_raises_checkpoint_error(saved: str, now: str) -> None:
    with pytest.raises(CheckpointError, match="is in only one of them"):
        Optimizer(new_model(), make(now)).load_state_tensors(saved_state(saved))


@each
@pytest.mark.parametrize("shape", [(), (15,), (16, 1)])
def test_optimizer_state_with_wrong_shape_raises_with_both_shapes(
    name: str, shape: tuple[int, ...]
) -> None:
    state = {**saved_state(name), "model.norm.weight.exp_avg": torch.zeros(shape)}
    optimizer = Optimizer(new_model(), make(name))
    with pytest.raises(CheckpointError, match=r"norm\.weight\.exp_avg' is .*expected \[16\]"):
        optimizer.load_state_tensors(state)
    assert optimizer.state_tensors() == {}, "refused, and yet half taken"


# Config


@pytest.mark.parametrize(
    "values",
    [
        {"name": "lars"},
        {"learning_rate": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"betas": [-0.1, 0.9]},
        {"weight_decay": -0.1},
        {"max_grad_norm": -1.0},
        {"muon_momentum": 1.0},
        {"lr": 0.1},
    ],
)
def test_optimizer_impossible_settings_raise_validation_error(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig.model_validate(values)
