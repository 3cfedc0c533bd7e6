from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from firstlight.hardware.device import find_hardware
from firstlight.lora.layers import LoraConfig, add_lora
from firstlight.models import GptOssConfig, ModelConfig
from firstlight.optim.config import (
    OptimizerConfig,
    Role,
    decay_counts,
    describe_groups,
    parameter_kinds,
)
from firstlight.optim.muon import MUON
from firstlight.optim.optimizer import Optimizer
from firstlight.recipe import parse_recipe
from firstlight.recipe.resolve import facts_here, resolve
from optimizer_models import (
    GPT2,
    LLAMA,
    TIED,
    make,
    new_model,
    one_thread,
    same,
    set_gradients,
    steps,
    weights,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

OWN: dict[str, Any] = {
    "weight_decay": 0.3,
    "embedding_weight_decay": 0.0,
    "head_weight_decay": 0.2,
    "vector_weight_decay": 0.05,
    "embedding_lr_multiple": 4.0,
    "head_lr_multiple": 0.5,
    "vector_lr_multiple": 2.0,
    "embedding_betas": [0.8, 0.9],
    "head_betas": [0.7, 0.95],
    "vector_betas": [0.6, 0.99],
}
#: Learning rate, betas and decay by role, derived from OWN and a learning rate of 0.01.
EXPECTED: dict[str, tuple[float, tuple[float, float], float]] = {
    "embedding": (0.04, (0.8, 0.9), 0.0),
    "head": (0.005, (0.7, 0.95), 0.2),
    "matrix": (0.01, (0.9, 0.95), 0.3),
    "vector": (0.02, (0.6, 0.99), 0.05),
}


def roles(model: nn.Module) -> dict[str, str]:
    return {name: kind.role for name, kind in parameter_kinds(model).items()}


@pytest.mark.parametrize("config, tables", [(LLAMA, 1), (GPT2, 2)], ids=["llama", "gpt2"])
def test_parameter_roles_follow_names_and_shapes(config: ModelConfig, tables: int) -> None:
    model = new_model(config)
    found = roles(model)
    assert [name for name, role in found.items() if role == "head"] == ["lm_head.weight"]
    assert list(found.values()).count("embedding") == tables
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert found[name] == "vector"
        elif "layers." in name or ".h." in name:
            assert found[name] == "matrix"


def test_parameter_roles_stacked_expert_biases_are_vectors() -> None:
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1}
    model = new_model(GptOssConfig(**sizes, num_experts=3))
    found, gate = roles(model), "model.layers.0.mlp.experts.gate_up_proj"
    assert (found[gate], found[f"{gate}_bias"]) == ("matrix", "vector")
    # Biases and sinks start at zero.
    zero = {name for name, parameter in model.named_parameters() if not parameter.any()}
    assert zero == {name for name in found if name.endswith(("bias", "sinks"))}
    assert not MUON.takes(f"{gate}_bias", model.get_parameter(f"{gate}_bias"))
    assert MUON.takes(gate, model.get_parameter(gate))


def test_parameter_roles_count_tied_head_as_embedding() -> None:
    assert "head" not in roles(new_model(TIED)).values()


def test_parameter_kinds_only_gpt2_projections_are_transposed() -> None:
    kinds = parameter_kinds(new_model(GPT2))
    assert {name for name, kind in kinds.items() if kind.transposed} == {
        f"transformer.h.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert not any(kind.transposed for kind in parameter_kinds(new_model(LLAMA)).values())


def test_parameter_groups_without_own_keys_are_decayed_and_undecayed() -> None:
    optimizer = Optimizer(new_model(), make("adamw", weight_decay=0.3))
    (torchs,) = optimizer._torch_optimizers
    found = [(g["lr"], g["betas"], g["weight_decay"]) for g in torchs.param_groups]
    assert found == [(0.01, (0.9, 0.95), 0.3), (0.01, (0.9, 0.95), 0.0)]


@pytest.mark.parametrize("way", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_adamw_with_own_settings_matches_formula_of_each_role(way: str, in_backward: bool) -> None:
    """In fp64, over 6 steps with a changing learning rate, with and without updates in the backward
    pass.
    """
    model = new_model()
    expected = {name: value.double() for name, value in weights(model).items()}
    config = make("adamw", implementation=way, max_grad_norm=0.0, **OWN)
    optimizer = Optimizer(model, config, in_backward=in_backward)
    moments = {name: [torch.zeros_like(x), torch.zeros_like(x)] for name, x in expected.items()}
    found = roles(model)
    for step in range(6):
        set_gradients(model, step)
        gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        steps(model, optimizer, range(step, step + 1))
        for name, g in gradients.items():
            rate, (beta1, beta2), decay = EXPECTED[found[name]]
            rate /= 1 + step
            m, v = moments[name]
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).add_(g * g, alpha=1 - beta2)
            hat_m, hat_v = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
            expected[name] = expected[name] * (1 - rate * decay) - rate * hat_m / (
                hat_v.sqrt() + 1e-8
            )
    for name, value in weights(model).items():
        torch.testing.assert_close(value.double(), expected[name], atol=2e-6, rtol=1e-5)


def movements(config: OptimizerConfig) -> dict[str, Tensor]:
    """Return how far two steps move the parameters of each role."""
    model = new_model()
    before = weights(model)
    steps(model, Optimizer(model, config), range(2))
    found = roles(model)
    moved: dict[str, Tensor] = {}
    for name, value in weights(model).items():
        moved[found[name]] = (value - before[name]).abs().mean()
    return moved


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor", "muon", "adamw8bit"])
def test_parameter_groups_every_optimizer_applies_own_learning_rate_of_role(name: str) -> None:
    plain = movements(make(name, weight_decay=0.0, max_grad_norm=0.0))
    multiples = {"embedding_lr_multiple": 3.0, "head_lr_multiple": 0.5, "vector_lr_multiple": 2.0}
    own = movements(make(name, weight_decay=0.0, max_grad_norm=0.0, **multiples))
    for role, multiple in (("embedding", 3), ("head", 0.5), ("vector", 2), ("matrix", 1)):
        torch.testing.assert_close(own[role] / plain[role], torch.tensor(float(multiple)),
                                   atol=0.2, rtol=0)  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "adamw8bit"])
def test_parameter_groups_embeddings_can_be_undecayed(name: str) -> None:
    model = new_model()
    before = weights(model)
    optimizer = Optimizer(model, make(name, weight_decay=0.5, embedding_weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = roles(model)
    for key, value in weights(model).items():
        assert torch.equal(value, before[key]) == (found[key] in ("embedding", "vector")), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameter_groups_run_resumes_from_state(name: str) -> None:
    config = make(name, **OWN)
    unbroken, resumed = new_model(), new_model()
    steps(unbroken, Optimizer(unbroken, config), range(5))
    first = Optimizer(resumed, config)
    steps(resumed, first, range(2))
    then = Optimizer(resumed, config)
    then.load_state_tensors(first.state_tensors())
    steps(resumed, then, range(2, 5))
    assert same(weights(resumed), weights(unbroken))


def test_parameter_groups_accept_state_of_run_without_groups() -> None:
    model = new_model()
    plain = Optimizer(model, make("adamw"))
    steps(model, plain, range(2))
    Optimizer(model, make("adamw", **OWN)).load_state_tensors(plain.state_tensors())


def lines(model: nn.Module, config: OptimizerConfig) -> list[list[str]]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return [line.split() for line in describe_groups(trained, parameter_kinds(model), config)]


def test_parameter_groups_table_lists_rate_and_decay_of_each_role() -> None:
    found = lines(new_model(LLAMA), make("muon", muon_learning_rate=0.02, **OWN))
    assert found[0] == ["optimizer", "muon", "tensors", "parameters", "rate", "decay"]
    assert found[1] == ["embeddings", "1", "464", "0.04", "0"]
    assert found[2] == ["head", "1", "464", "0.005", "0.2"]
    assert found[3][:2] + found[3][3:] == ["matrices", "14", "0.02", "0.3"]
    assert found[4][:4] + found[4][5:] == ["norms", "and", "biases", "13", "0.02", "0.05"]


def test_parameter_roles_adapters_are_matrices() -> None:
    model = new_model(LLAMA)
    add_lora(model, LoraConfig(rank=2, targets=["q_proj"]), torch.Generator().manual_seed(0))
    assert [line[0] for line in lines(model, make("adamw"))] == ["optimizer", "matrices"]


def test_decay_counts_follow_decay_of_each_role() -> None:
    model = new_model(LLAMA)
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    config = make("adamw", embedding_weight_decay=0.0, vector_weight_decay=0.1)
    counts = decay_counts(parameters, parameter_kinds(model), config)
    assert counts["undecayed_tensors"] == 1
    assert counts["undecayed_parameters"] == 29 * 16


@pytest.mark.parametrize(
    "values, says",
    [
        ({"embedding_betas": [0.9, 1.0]}, r"embedding_betas \[0.9, 1.0\] must each be at least 0"),
        ({"head_lr_multiple": 0}, "head_lr_multiple"),
        ({"name": "sgd", "cautious_weight_decay": True}, "applies only to adamw, lion or muon"),
        (
            {"name": "adafactor", "tuned_width": 64},
            "tuned_width applies only to adamw, adamw8bit, lion",
        ),
    ],
)
def test_parameter_groups_invalid_settings_raise_validation_error(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        OptimizerConfig.model_validate(values)


@pytest.mark.parametrize(
    "name, rates",
    [
        # Four times as wide: the learning rates of matrices and head fall to a quarter, Muon's to a
        # half.
        ("adamw", {"embedding": 0.04, "head": 0.00125, "matrix": 0.0025, "vector": 0.02}),
        ("muon", {"embedding": 0.04, "head": 0.00125, "matrix": 0.005, "vector": 0.02}),
    ],
)
@pytest.mark.parametrize("muon_rate", [None, 0.03])
def test_learning_rates_scale_from_tuned_width(
    name: str, rates: dict[Role, float], muon_rate: float | None
) -> None:
    config = OptimizerConfig(
        name=name, learning_rate=0.01, muon_learning_rate=muon_rate, tuned_width=192, **OWN
    )
    if name == "muon" and muon_rate is not None:
        rates = {**rates, "matrix": 0.015}
    wide = config.for_width(768)
    assert {role: wide.peak_rate(role) for role in rates} == pytest.approx(rates)
    assert wide.for_width(768) == wide
    assert config.for_width(192) == config
    assert OptimizerConfig(**OWN).for_width(768) == OptimizerConfig(**OWN)


def test_resolved_recipe_scales_rates_with_width_once() -> None:
    text: dict[str, Any] = {"model": {"model_type": "llama", "hidden_size": 128, "vocab_size": 64}}
    text["data"] = {"dir": "unused"}
    recipe = parse_recipe(text | {"optimizer": {"tuned_width": 64, "learning_rate": 1e-2}}, "test")
    facts = facts_here(find_hardware("cpu"))
    resolved = resolve(recipe, facts)
    assert resolved.optimizer.learning_rate == 5e-3
    assert resolve(resolved, facts).optimizer == resolved.optimizer
