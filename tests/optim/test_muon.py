from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from firstlight.models import MoEConfig
from firstlight.optim.muon import (
    COEFFICIENTS,
    Muon,
    neuron_factors,
    neuron_squares,
    orthogonalised,
)
from firstlight.optim.optimizer import Optimizer
from firstlight.optim.spec import decay_cautiously
from optimizer_models import GPT2, LLAMA, make, new_model, one_thread, same, steps, weights

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

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


def group(parameter: nn.Parameter, decay: float = 0.2, **values: Any) -> list[dict[str, Any]]:
    return [{"params": [parameter], "weight_decay": decay, **values}]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Plain Muon


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16), (130, 70)])
def test_muon_matrix_update_is_bitwise_equal_to_torch(shape: tuple[int, ...]) -> None:
    mine, theirs = (nn.Parameter(random(*shape)) for _ in range(2))
    own = Muon(group(mine), 0.1, 0.9)
    reference = torch.optim.Muon(
        [theirs], lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(20):
        for optimizer in (own, reference):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        mine.grad = random(*shape, seed=1 + step)
        theirs.grad = mine.grad.clone()
        own.step()
        reference.step()  # type: ignore[no-untyped-call]
        assert torch.equal(mine, theirs)
    assert torch.equal(
        own.state[mine]["momentum_buffer"], reference.state[theirs]["momentum_buffer"]
    )
    assert list(own.state[mine]) == list(reference.state[theirs])


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8)])
def test_muon_stack_is_updated_like_its_matrices(shape: tuple[int, ...]) -> None:
    """Up to bf16 rounding. One expert's gradients are a thousand times larger than the others'."""
    start = random(*shape)
    stack = nn.Parameter(start.clone())
    single = [nn.Parameter(matrix.clone()) for matrix in start]
    own = Muon(group(stack), 0.1, 0.9)
    theirs = torch.optim.Muon(
        single, lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        stack.grad = random(*shape, seed=1 + step)
        stack.grad[1] *= 1000
        for parameter, gradient in zip(single, stack.grad, strict=True):
            parameter.grad = gradient.clone()
        own.step()
        theirs.step()  # type: ignore[no-untyped-call]
    for matrix, parameter, before in zip(stack, single, start, strict=True):
        off = (matrix - parameter).norm() / (parameter - before).norm()
        assert off < 0.01


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("most, calls", [(1 << 20, 34), (330, 40), (200, 52)])
def test_muon_matrices_updated_together_move_like_each_alone(
    monkeypatch: pytest.MonkeyPatch, normalized: bool, most: int, calls: int
) -> None:
    """Up to bf16 rounding: two sizes, two groups, and one matrix without a gradient in the first
    step. The first three matrices, which are batched, are split into two stacks if two have more
    than `most` values.
    """
    monkeypatch.setattr("firstlight.optim.muon.LIST_VALUES", most)
    counted = Mock(side_effect=orthogonalised)
    monkeypatch.setattr("firstlight.optim.muon.orthogonalised", counted)
    shapes = [*[(8, 20), (20, 8), (8, 20)] * 2, (16, 16), (8, 20), (3, 8, 20)]
    options: dict[str, Any] = {"warmup_steps": 4}
    if normalized:
        options |= {"beta2": 0.95, "coefficients": "polar_express", "cautious": True}

    def trained(stacked: bool) -> tuple[list[Tensor], Muon]:
        matrices = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)]
        groups = [
            {"params": matrices[:6], "weight_decay": 0.2, "transposed": False},
            {"params": matrices[6:], "weight_decay": 0.1, "transposed": True},
        ]
        optimizer = Muon(groups, 0.1, 0.9, stacked=stacked, **options)
        for step in range(6):
            for i, matrix in enumerate(matrices):
                late = i == 2 and step < 2
                matrix.grad = None if late else random(*shapes[i], seed=100 * step + i)
            optimizer.step()
        return [matrix.detach() for matrix in matrices], optimizer

    alone, one_by_one = trained(False)
    assert counted.call_count == 52
    together, stacked = trained(True)
    assert counted.call_count == 52 + calls
    for i, (mine, theirs) in enumerate(zip(together, alone, strict=True)):
        off = (mine - theirs).norm() / (theirs - random(*shapes[i], seed=i)).norm()
        assert off < 0.01
    states = [
        [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (one_by_one, stacked)
    ]
    assert len(stacked.state) == len(shapes)
    for mine_state, their_state in zip(*states, strict=True):
        assert list(mine_state) == list(their_state)
        assert torch.equal(mine_state["momentum_buffer"], their_state["momentum_buffer"])
        assert torch.equal(mine_state["step"], their_state["step"])
    assert [float(state["step"]) for state in states[1]] == [6, 6, 4, 6, 6, 6, 6, 6, 6]


def test_muon_step_keeps_gradient_unchanged() -> None:
    parameter = nn.Parameter(random(6, 4))
    parameter.grad = random(6, 4, seed=1)
    Muon(group(parameter), 0.1, 0.9).step()
    assert torch.equal(parameter.grad, random(6, 4, seed=1))


# Coefficients


@pytest.mark.parametrize("shape", [(30, 12), (2, 12, 30)])
def test_orthogonalise_tiny_gradients_in_fp16_is_more_accurate_than_bf16(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    # Less than the smallest fp16 value, 6e-8.
    gradients = 1e-8 * random(*shape)
    exact = gradients.double() / gradients.double().norm(dim=(-2, -1), keepdim=True)
    for a, b, c in COEFFICIENTS["jordan"][1]:
        gram = exact @ exact.mT
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    off = {}
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setattr("firstlight.optim.muon._product_dtype", lambda _, dtype=dtype: dtype)
        found = orthogonalised(gradients)
        assert found.dtype == torch.bfloat16
        off[dtype] = ((found - exact).norm() / exact.norm()).item()
    # The only remaining error is the rounding of the result to bf16.
    assert off[torch.float16] < 0.004 < off[torch.bfloat16]


@pytest.mark.parametrize(
    "name, least, greatest", [("jordan", 0.6, 1.3), ("polar_express", 0.85, 1.15)]
)
def test_orthogonalised_matrices_have_singular_values_near_one(
    name: str, least: float, greatest: float
) -> None:
    values = torch.linalg.svdvals(orthogonalised(random(2, 30, 12), name).float())
    assert float(values.min()) > least
    assert float(values.max()) < greatest


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Return the odd polynomial a x + b x^3 + c x^5 closest to 1 on [low, high] (Remez
    exchange).
    """
    inner = [0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high]
    for _ in range(100):
        nodes = np.array([low, *inner, high])
        matrix = np.stack([nodes, nodes**3, nodes**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, _ = np.linalg.solve(matrix, np.ones(4))
        # Interior extremes lie where the derivative vanishes.
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return float(a), float(b), float(c)


def test_polar_express_coefficients_are_successive_optimal_polynomials() -> None:
    """Amsel et al. 2025, algorithm 1: singular values from 0.001, a cushion of 0.02 and a safety
    factor of 1.02.
    """
    low, high, cushion, safety = 1e-3, 1.0, 0.02, 1.02
    divisor, found = COEFFICIENTS["polar_express"]
    assert divisor == safety
    for step, ours in enumerate(found):
        a, b, c = best_quintic(max(low, cushion * high), high)
        if cushion * high > low:
            # Rescaled so that the ends of the true interval lie symmetrically around one.
            factor = 2 / sum(a * x + b * x**3 + c * x**5 for x in (low, high))
            a, b, c = factor * a, factor * b, factor * c
        if step < len(found) - 1:
            a, b, c = a / safety, b / safety**3, c / safety**5
        assert np.allclose(ours, (a, b, c), rtol=1e-11), (step, ours, (a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low


# NorMuon


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10)])
@pytest.mark.parametrize("transposed", [False, True])
def test_normuon_divides_rows_by_averaged_size(shape: tuple[int, ...], transposed: bool) -> None:
    """NorMuon's algorithm 1 in fp64: v, then o / sqrt(v), then scaling to a root mean square of
    one.
    """
    along = -2 if transposed else -1
    rows = list(shape)
    rows[along] = 1
    state = torch.zeros(rows)
    v = torch.zeros(rows, dtype=torch.float64)
    for seed in range(4):
        o = random(*shape, seed=seed)
        found = o * neuron_factors(neuron_squares(o, transposed), state, 0.9)
        o = o.double()
        v = 0.9 * v + 0.1 * o.square().mean(along, keepdim=True)
        expected = o / v.sqrt()
        count = shape[-1] * shape[-2]
        expected *= math.sqrt(count) / expected.norm(dim=(-2, -1), keepdim=True)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(state.double(), v, atol=1e-6, rtol=1e-6)


def test_normuon_update_size_is_two_tenths_of_rate() -> None:
    parameter = nn.Parameter(random(12, 30))
    before = parameter.detach().clone()
    parameter.grad = random(12, 30, seed=1) * torch.logspace(-2, 2, 12)[:, None]
    Muon(group(parameter, decay=0.0), 0.1, 0.9, beta2=0.95).step()
    moved = parameter.detach() - before
    torch.testing.assert_close(moved.square().mean().sqrt(), torch.tensor(0.02), rtol=1e-4, atol=0)
    # In the first step, all neurons have the same size.
    sizes = moved.square().mean(1).sqrt()
    torch.testing.assert_close(sizes, torch.full_like(sizes, 0.02), rtol=1e-4, atol=0)


def test_normuon_neurons_are_outputs_of_either_layout() -> None:
    """Columns of GPT-2's [inputs, outputs] and rows of Llama's [outputs, inputs], for experts
    too.
    """
    for config in (GPT2, LLAMA, MOE):
        model = new_model(config)
        optimizer = Optimizer(model, make("muon", muon_beta2=0.95))
        steps(model, optimizer, range(1))
        state = optimizer.state_tensors()
        if config is GPT2:
            assert state["transformer.h.0.mlp.c_fc.weight.second_moment"].shape == (1, 48)
            assert state["transformer.h.1.attn.c_proj.weight.second_moment"].shape == (1, 12)
        else:
            assert state["model.layers.0.self_attn.k_proj.weight.second_moment"].shape == (8, 1)
        if config is MOE:
            name = "model.layers.0.mlp.experts.gate_up_proj.second_moment"
            assert state[name].shape == (3, 48, 1)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Make this process the only one of a mesh."""
    # torch's fake group is not used: in torch 2.11, its all_to_all_single leaves the received
    # tensor uninitialized.
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Matrix(nn.Module):
    """A single matrix, with the name of a layer's matrix."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(start)])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (6, 4), (1, 1)])
def test_muon_sharded_single_column_matrix_has_whole_second_moments(
    shape: tuple[int, int],
) -> None:
    """For LoRA's B of rank 1, the neurons' averages have the shape of B itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def cut(whole: Tensor) -> DTensor:
        return distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)

    start, config = random(*shape), make("muon", muon_beta2=0.9)
    whole, sharded = Matrix(start.clone()), Matrix(cut(start))
    one, other = Optimizer(whole, config), Optimizer(sharded, config)
    for step in range(4):
        if step == 2:
            saved = other.state_tensors()
            other = Optimizer(sharded, config)
            other.load_state_tensors(saved)
        elif step == 3:
            # Like reading a sharded checkpoint, which loads into existing state.
            kept = {name: value.clone() for name, value in other.state_shards().items()}
            other = Optimizer(sharded, config)
            other.fill_state(lambda _: None)
            for name, value in other.state_shards().items():
                value.copy_(kept[name])
        gradient = random(*shape, seed=1 + step)
        whole.layers[0].grad, sharded.layers[0].grad = gradient, cut(gradient)
        one.step()
        other.step()
        assert not isinstance(other.state_shards()["layers.0.second_moment"], DTensor)
        assert isinstance(other.state_shards()["layers.0.momentum_buffer"], DTensor)
    assert same(other.state_tensors(), one.state_tensors())
    assert torch.equal(sharded.layers[0].detach().full_tensor(), whole.layers[0])


# Momentum warm-up, and all together


def test_muon_momentum_rises_from_first_to_last_value() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = Muon(group(parameter), 0.1, 0.95, first_momentum=0.85, warmup_steps=4)
    average = torch.zeros(2, 2)
    for momentum in (0.85, 0.875, 0.9, 0.925, 0.95, 0.95):
        parameter.grad = torch.ones(2, 2)
        optimizer.step()
        average = momentum * average + (1 - momentum)
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], average)


EVERYTHING = {
    "muon_beta2": 0.9,
    "muon_coefficients": "polar_express",
    "muon_momentum_warmup_steps": 3,
    "cautious_weight_decay": True,
}


@pytest.mark.parametrize("config", [LLAMA, GPT2, MOE], ids=["llama", "gpt2", "moe"])
def test_muon_run_with_every_key_resumes_from_state(config: Any) -> None:
    settings = make("muon", **EVERYTHING)
    unbroken, resumed = new_model(config), new_model(config)
    steps(unbroken, Optimizer(unbroken, settings), range(5))
    first = Optimizer(resumed, settings)
    expected = first.state_bytes
    steps(resumed, first, range(2))
    assert sum(tensor.nbytes for tensor in first.state_tensors().values()) == expected
    then = Optimizer(resumed, settings)
    then.load_state_tensors(first.state_tensors())
    steps(resumed, then, range(2, 5))
    assert same(weights(resumed), weights(unbroken))


def test_muon_run_with_every_key_is_unchanged_in_backward_pass() -> None:
    settings = make("muon", max_grad_norm=0.0, **EVERYTHING)
    plain, inside = new_model(), new_model()
    steps(plain, Optimizer(plain, settings), range(4))
    steps(inside, Optimizer(inside, settings, in_backward=True), range(4))
    assert same(weights(plain), weights(inside))


# Cautious weight decay


def test_cautious_weight_decay_applies_only_to_values_moving_towards_zero() -> None:
    x = torch.tensor([2.0, -2.0, 2.0, -2.0])
    decay_cautiously(x, torch.tensor([1.0, -3.0, -1.0, 0.5]), 0.25)
    assert x.tolist() == [1.5, -1.5, 2.0, -2.0]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("way", ["for-loop", "foreach", "fused"])
def test_cautious_weight_decay_matches_paper_formula(name: str, way: str) -> None:
    """x - lr (u + decay x [u x >= 0]), where u is the update of the same optimizer without
    decay.
    """
    if (name, way) in {("lion", "fused"), ("muon", "foreach"), ("muon", "for-loop")}:
        pytest.skip("no such implementation of its own")
    model = new_model()
    settings = make(
        name,
        implementation=way,
        weight_decay=0.5,
        cautious_weight_decay=True,
        embedding_weight_decay=0.1,
    )
    optimizer = Optimizer(model, settings)
    plain = new_model()
    undecayed = Optimizer(plain, make(name, implementation=way, weight_decay=0.0))
    for step in range(4):
        before = weights(model)
        with torch.no_grad():
            for key, parameter in plain.named_parameters():
                parameter.copy_(before[key])
        steps(model, optimizer, range(step, step + 1))
        steps(plain, undecayed, range(step, step + 1))
        rate = 0.01 / (1 + step)
        for key, value in weights(model).items():
            x, u = before[key], before[key] - weights(plain)[key]
            decay = 0.0 if x.dim() < 2 else 0.1 if "embed" in key else 0.5
            decayed = x - u - rate * decay * x * (u * x >= 0)
            torch.testing.assert_close(value, decayed, atol=1e-6, rtol=1e-5)
