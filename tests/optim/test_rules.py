from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from firstlight.errors import CheckpointError, ConfigError
from firstlight.models import GPT2Config, MoEConfig
from firstlight.models.accounting import meta_model
from firstlight.optim.config import OPTIMIZERS, OptimizerConfig, decay_counts, parameter_kinds
from firstlight.optim.optimizer import Optimizer
from optimizer_models import (
    LLAMA,
    make,
    moved,
    new_model,
    one_thread,
    same,
    set_gradients,
    steps,
    weights,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

NAMES = ["adamw", "adafactor", "muon", "sgd", "lion"]
WAYS = ["for-loop", "foreach", "fused"]
MOE = MoEConfig(
    model_type="qwen3_moe",
    vocab_size=29,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


def after_steps(config: OptimizerConfig) -> dict[str, Tensor]:
    model = new_model()
    steps(model, Optimizer(model, config), range(5))
    return weights(model)


# Implementations


@pytest.mark.parametrize(
    "name, way",
    [(n, w) for n in NAMES for w in WAYS if w in OPTIMIZERS[n].implementations],
)
def test_optimizer_implementations_agree_up_to_rounding(name: str, way: str) -> None:
    expected = after_steps(make(name, implementation="for-loop"))
    found = after_steps(make(name, implementation=way))
    start = weights(new_model())
    for key, value in expected.items():
        assert not torch.equal(value, start[key])
        torch.testing.assert_close(found[key], value, atol=_atol(name), rtol=1e-5)


def _atol(name: str) -> float:
    """Return the absolute tolerance: Muon orthogonalizes in bf16 and rounds a stack's products in a
    different order.
    """
    return 5e-5 if name == "muon" else 1e-6


def switches(name: str, way: str, device: str = "cpu") -> set[tuple[Any, Any]]:
    with torch.device(device):
        model = nn.ModuleDict({"embedding": nn.Linear(3, 5), "layers": nn.ModuleList([])})
    optimizer = Optimizer(model, make(name, implementation=way))
    return {
        (group.get("foreach"), group.get("fused"))
        for torchs in optimizer._torch_optimizers
        for group in torchs.param_groups
    }


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_optimizer_uses_requested_implementation(name: str) -> None:
    assert switches(name, "for-loop") == {(False, False)}
    assert switches(name, "foreach") == {(True, False)}
    assert switches(name, "fused") == {(False, True)}


def test_optimizer_auto_implementation_is_fused_if_available() -> None:
    assert switches("adamw", "auto") == {(False, True)}
    assert switches("adamw", "auto", device="meta") == {(True, False)}
    assert switches("adafactor", "auto") == {(False, None)}
    assert switches("adafactor", "foreach") == {(True, None)}


def test_optimizer_fused_kernel_missing_on_device_raises_with_alternative() -> None:
    with pytest.raises(ConfigError, match=r"no fused adamw for meta.* to foreach"):
        switches("adamw", "fused", device="meta")


@pytest.mark.parametrize(
    "values, says",
    [
        ({"name": "adamw8bit", "implementation": "foreach"}, "implementation to auto"),
        ({"name": "paged_adamw8bit", "implementation": "fused"}, "implementation to auto"),
        ({"name": "adafactor", "implementation": "fused"}, "implementation to foreach"),
        ({"name": "paged_adamw8bit", "eight_bit_library": "torchao"}, "or name to adamw8bit"),
        ({"adafactor_threshold": 0.5}, "adafactor_threshold"),
        ({"adafactor_beta2_decay": 0.5}, "adafactor_beta2_decay"),
        ({"sgd_momentum": 1.0}, "sgd_momentum"),
    ],
)
def test_optimizer_unsupported_combinations_raise_with_alternative(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        OptimizerConfig.model_validate(values)


# The update rules


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_of_every_optimizer_applies_to_matrices_only(name: str) -> None:
    """Without a gradient, only the decay changes parameters."""
    model = new_model(MOE)
    config = make(name, weight_decay=0.5, learning_rate=0.01)
    for key, movement in moved(model, config, gradient=0.0).items():
        expected = 0.005 if dict(model.named_parameters())[key].dim() > 1 else 0.0
        torch.testing.assert_close(movement, torch.full_like(movement, expected), atol=1e-7, rtol=0)


def test_decay_counts_of_gpt2_match_known_values() -> None:
    """GPT-2 small: embeddings and 48 matrices, 98 norms and biases, as in nanoGPT."""
    model = meta_model(GPT2Config(vocab_size=50257))
    counts = decay_counts(dict(model.named_parameters()), parameter_kinds(model), make("adamw"))
    assert counts == {
        "decayed_parameters": 124_318_464,
        "decayed_tensors": 50,
        "undecayed_parameters": 121_344,
        "undecayed_tensors": 98,
    }


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def after_torchs_steps(model: nn.Module, reference: torch.optim.Optimizer) -> dict[str, Tensor]:
    peak = [group["lr"] for group in reference.param_groups]
    for seed in range(5):
        set_gradients(model, seed)
        for group, rate in zip(reference.param_groups, peak, strict=True):
            group["lr"] = rate / (1 + seed)
        reference.step()
    return weights(model)


@pytest.mark.parametrize("way", ["for-loop", "foreach"])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_adafactor_matches_transformers_over_50_steps(way: str, size: float) -> None:
    """With weight decay, with squared gradients below torch's minimum, and with zero rows, as for
    tokens that a batch does not contain.
    """
    from transformers.optimization import Adafactor as Reference

    model, expected = new_model(MOE), new_model(MOE)
    config = make("adafactor", implementation=way, adafactor_threshold=1.5, weight_decay=0.3)
    optimizer = Optimizer(model, config)
    reference = Reference(
        groups_of(expected, 0.3),
        lr=0.01,
        clip_threshold=1.5,
        decay_rate=-0.8,
        scale_parameter=True,
        relative_step=False,
    )
    start = weights(model)
    for seed in range(50):
        optimizer.set_learning_rate(1 / (1 + seed / 10))
        for group in reference.param_groups:
            group["lr"] = 0.01 / (1 + seed / 10)
        for one in (model, expected):
            set_gradients(one, seed)
            for parameter in one.parameters():
                assert parameter.grad is not None
                parameter.grad *= size
                if parameter.dim() > 1:
                    parameter.grad[len(parameter) - 1 - seed % 2 :] = 0
        optimizer.step()
        reference.step()
    for name, value in weights(expected).items():
        off = (weights(model)[name] - value).norm() / (value - start[name]).norm()
        assert off < 2e-5, name


def test_adafactor_weight_decay_is_relative_to_parameter() -> None:
    model = new_model()
    matrix = model.get_parameter("lm_head.weight")
    optimizer = Optimizer(model, make("adafactor", weight_decay=0.1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.02)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # 0.02 of 0.01 of 0.1 of it; torch's Adafactor uses a thousandth.
    expected = torch.full_like(matrix, 0.02 * (1 - 2e-5))
    torch.testing.assert_close(matrix, expected, atol=0, rtol=1e-6)


def test_adafactor_learning_rate_does_not_decay_by_itself() -> None:
    """In torch's Adafactor it is at most 1/sqrt(step)."""
    model = new_model()
    optimizer = Optimizer(model, make("adafactor", learning_rate=0.9, weight_decay=0.0))
    for _ in range(2):
        for parameter in model.parameters():
            nn.init.ones_(parameter)
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    matrix = model.get_parameter("lm_head.weight")
    torch.testing.assert_close(matrix, torch.full_like(matrix, 0.1))


def test_adafactor_torch_variant_matches_torch() -> None:
    model = new_model()
    reference = torch.optim.Adafactor(groups_of(model, 0.3), lr=0.05, beta2_decay=-0.5, d=2.0)
    expected = after_torchs_steps(model, reference)
    settings = {"adafactor_beta2_decay": -0.5, "adafactor_threshold": 2.0, "weight_decay": 0.3}
    config = make(
        "adafactor", adafactor_variant="torch", learning_rate=0.05, max_grad_norm=0.0, **settings
    )
    assert same(after_steps(config), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_sgd_matches_torch(momentum: float) -> None:
    model = new_model()
    reference = torch.optim.SGD(groups_of(model, 0.3), lr=0.01, momentum=momentum, fused=True)
    expected = after_torchs_steps(model, reference)
    config = make("sgd", sgd_momentum=momentum, max_grad_norm=0.0, weight_decay=0.3)
    assert same(after_steps(config), expected)


def test_muon_updates_stacked_experts() -> None:
    model = new_model(MOE)
    optimizer = Optimizer(model, make("muon"))
    steps(model, optimizer, range(1))
    kinds = {key.rpartition(".")[2] for key in optimizer.state_tensors() if ".experts." in key}
    assert kinds == {"momentum_buffer"}


def test_optimizer_skips_parameters_without_gradient() -> None:
    model = new_model()
    frozen = "model.embed_tokens.weight"
    dict(model.named_parameters())[frozen].requires_grad_(False)
    optimizer = Optimizer(model, make("adamw", weight_decay=0.5))
    before = weights(model)
    set_gradients(model, 0)
    optimizer.step()
    assert torch.equal(weights(model)[frozen], before[frozen])
    assert not torch.equal(weights(model)["lm_head.weight"], before["lm_head.weight"])
    assert not any(key.startswith(frozen) for key in optimizer.state_tensors())


# State


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_size_is_known_before_first_step(name: str) -> None:
    model = new_model(MOE)
    optimizer = Optimizer(model, make(name))
    expected = optimizer.state_bytes
    steps(model, optimizer, range(1))
    assert sum(tensor.nbytes for tensor in optimizer.state_tensors().values()) == expected


@pytest.mark.parametrize(
    "name, bytes_a_parameter",
    [("adamw", 8), ("sgd", 4), ("adafactor", 1), ("muon", 6), ("lion", 4)],
)
def test_optimizer_state_bytes_per_parameter_match_documentation(
    name: str, bytes_a_parameter: int
) -> None:
    """As documented: almost 0 for Adafactor, between 4 and 8 for Muon."""
    model = new_model(LLAMA.model_copy(update={"hidden_size": 64, "vocab_size": 700}))
    found = Optimizer(model, make(name)).state_bytes / sum(p.numel() for p in model.parameters())
    assert abs(found - bytes_a_parameter) < (1 if name in ("adafactor", "muon") else 0.05)


def test_sgd_without_momentum_has_no_state() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("sgd", sgd_momentum=0.0))
    steps(model, optimizer, range(1))
    assert optimizer.state_tensors() == {}
    assert optimizer.state_bytes == 0
    optimizer.load_state_tensors({})


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_optimizer_run_resumes_with_other_implementation(name: str) -> None:
    expected = after_steps(make(name))
    model = new_model()
    first = Optimizer(model, make(name, implementation="fused"))
    steps(model, first, range(2))
    then = Optimizer(model, make(name, implementation="for-loop"))
    then.load_state_tensors(first.state_tensors())
    steps(model, then, range(2, 5))
    for key, value in weights(model).items():
        torch.testing.assert_close(value, expected[key], atol=_atol(name), rtol=1e-5)


def test_optimizer_step_counter_read_by_python_stays_on_cpu() -> None:
    """Reading the counter from a GPU at every update would wait for the GPU."""
    model = new_model()
    first = Optimizer(model, make("adamw"))
    steps(model, first, range(1))
    elsewhere = new_model().to("meta")
    optimizer = Optimizer(elsewhere, make("adamw", implementation="foreach"))
    optimizer.load_state_tensors(first.state_tensors())
    state = optimizer._torch_optimizers[0].state[elsewhere.get_parameter("lm_head.weight")]
    assert state["step"].device.type == "cpu"
    assert state["exp_avg"].device.type == "meta"


def test_optimizer_state_of_other_dtype_raises_checkpoint_error() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("adamw"))
    steps(model, optimizer, range(1))
    state = dict(optimizer.state_tensors())
    state["lm_head.weight.exp_avg"] = state["lm_head.weight.exp_avg"].bfloat16()
    with pytest.raises(CheckpointError, match=r"lm_head.weight.exp_avg' is .* torch.bfloat16"):
        optimizer.load_state_tensors(state)
