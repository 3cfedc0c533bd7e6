"""Master weights, and parameter updates in the backward pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from firstlight.errors import ConfigError
from firstlight.models import empty_model
from firstlight.optim.optimizer import Optimizer
from optimizer_models import (
    TIED,
    backward,
    full_weights,
    make,
    new_model,
    one_thread,
    same,
    steps,
    weights,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

BF16 = torch.bfloat16
each = pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, BF16])
switched = pytest.mark.parametrize("in_backward", [False, True])


# Master weights


@each
@switched
def test_master_weights_bf16_parameters_are_rounded_masters_after_every_step(
    name: str, in_backward: bool
) -> None:
    model = new_model(dtype=BF16)
    optimizer = Optimizer(model, make(name, max_grad_norm=0.0), in_backward=in_backward)
    for seed in range(3):
        steps(model, optimizer, range(seed, seed + 1))
        # Before reading the master weights, which rounds them again.
        found = weights(model)
        masters = full_weights(model, optimizer)
        assert {value.dtype for value in masters.values()} == {torch.float32}
        assert any((value != value.bfloat16()).any() for value in masters.values())
        rounded = {key: value.bfloat16() for key, value in masters.items()}
        assert same(found, rounded)


@switched
def test_master_weights_model_is_freed_after_steps(in_backward: bool) -> None:
    """This includes its weights, which autograd keeps alive through their hooks."""
    model = new_model(dtype=BF16)
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=in_backward)
    steps(model, optimizer, range(1))
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


def test_master_weights_equal_fp32_model_with_same_gradients() -> None:
    low, full = new_model(dtype=BF16), new_model(dtype=BF16).float()
    one, other = Optimizer(low, make("adamw")), Optimizer(full, make("adamw"))
    for seed in range(4):
        backward(low, seed)
        for parameter, of_low in zip(full.parameters(), low.parameters(), strict=True):
            assert of_low.grad is not None
            parameter.grad = of_low.grad.float()
        for optimizer in (one, other):
            optimizer.clip_gradients()
            optimizer.step()
            optimizer.zero_grad()
    assert same(full_weights(low, one), weights(full))


def test_master_weights_accumulate_updates_too_small_for_bf16() -> None:
    model = nn.Linear(1, 1, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    optimizer = Optimizer(model, make("sgd", sgd_momentum=0.0, weight_decay=0.0))
    for _ in range(100):
        model.weight.grad = torch.full_like(model.weight, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert full_weights(model, optimizer)["weight"].item() == pytest.approx(0.99, rel=1e-4)
    assert model.weight.item() == pytest.approx(0.99, rel=1 / 256)


def test_master_weights_accumulate_micro_batch_gradients_in_fp32() -> None:
    """Compared with the fp64 sum: at most fp32's rounding error, while bf16's sum is far less
    accurate.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, 64, generator=generator).to(BF16) for _ in range(8)]
    exact = sum((part.double() for part in parts), torch.zeros(64, 64, dtype=torch.float64))
    model = nn.Linear(64, 64, bias=False).to(BF16)
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0))
    for part in parts:
        model.weight.backward(part)  # type: ignore[no-untyped-call]
        optimizer.accumulate()
        assert model.weight.grad is None
    master = optimizer._masters.updated["weight"]
    assert master.grad is not None
    off = (master.grad - exact).abs().max().item()
    in_bf16 = (sum(parts[1:], parts[0]) - exact).abs().max().item()
    assert off < 2e-6
    assert in_bf16 > 1000 * off


def test_master_weights_clipping_and_update_accept_unaccumulated_gradients() -> None:
    first, second = new_model(dtype=BF16), new_model(dtype=BF16)
    for model in (first, second):
        optimizer = Optimizer(model, make("adamw", weight_decay=0.0))
        backward(model, 0)
        if model is first:
            optimizer.clip_gradients()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert not same(weights(first), weights(new_model(dtype=BF16)))
    assert not same(weights(second), weights(new_model(dtype=BF16)))


def test_master_weights_context_swaps_in_masters_and_restores_model() -> None:
    model = new_model(TIED, dtype=BF16)
    optimizer = Optimizer(model, make("adamw"))
    steps(model, optimizer, range(2))
    before, places = weights(model), [p.data_ptr() for p in model.parameters()]
    seen = interrupted_inside(model, optimizer)
    assert seen.keys() == model.state_dict().keys()
    assert all(tensor.dtype == torch.float32 for tensor in seen.values())
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    assert seen[head].data_ptr() == seen[embedding].data_ptr()
    assert model.get_parameter(head) is model.get_parameter(embedding)
    assert same(weights(model), before)
    assert [p.data_ptr() for p in model.parameters()] == places


def interrupted_inside(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the model's tensors inside the context, which then ends with an error."""
    seen: dict[str, torch.Tensor] = {}

    def look() -> None:
        with optimizer.master_weights():
            seen.update(model.state_dict())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look()
    return seen


def test_master_weights_written_inside_context_are_trained_on() -> None:
    model = new_model(dtype=BF16)
    optimizer = Optimizer(model, make("adamw"))
    values = {name: torch.rand(p.shape) + 1 for name, p in model.named_parameters()}
    with optimizer.master_weights():
        model.load_state_dict(values)
    assert same(weights(model), {name: value.bfloat16() for name, value in values.items()})
    assert same(full_weights(model, optimizer), values)


def test_master_weights_context_keeps_compiled_model_usable() -> None:
    model = new_model(TIED, dtype=BF16)
    optimizer = Optimizer(model, make("adamw"))
    passes = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        passes.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, dynamic=False)
    ids = torch.arange(8).view(1, 8)
    compiled(ids, ids).backward()
    seen = len(passes)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.master_weights():
            model.state_dict()
        loss = compiled(ids, ids)
        loss.backward()
        torch.testing.assert_close(loss, model(ids, ids))
    assert len(passes) == seen, "compiled again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_master_weights_are_not_created_for_32_bit_parameters(dtype: torch.dtype) -> None:
    model = new_model(dtype=dtype)
    optimizer = Optimizer(model, make("adamw"))
    places = [p.data_ptr() for p in model.parameters()]
    with optimizer.master_weights():
        assert [p.data_ptr() for p in model.parameters()] == places
    backward(model, 0)
    optimizer.accumulate()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    optimizer.step()
    assert optimizer.state_tensors()["lm_head.weight.exp_avg"].dtype == dtype


def test_master_weights_start_from_given_values_without_copy() -> None:
    model = new_model()
    given = {name: p.data for name, p in model.named_parameters()}
    values = weights(model)
    model = model.to(BF16)
    optimizer = Optimizer(model, make("adamw"), initial=given)
    assert same(full_weights(model, optimizer), values)
    masters = optimizer._masters.updated
    assert all(masters[name].data_ptr() == given[name].data_ptr() for name in given)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(16, dtype=torch.float64)])
def test_master_weights_invalid_values_raise_config_error(value: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*expected \[16\] torch.float32"):
        Optimizer(new_model(dtype=BF16), make("adamw"), initial={"model.norm.weight": value})


# Updates in the backward pass


@each
@dtypes
@pytest.mark.parametrize("most", [0, 600])
def test_optimizer_in_backward_equals_regular_step(
    name: str, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, and in lists as on a GPU."""
    plain, early = new_model(dtype=dtype), new_model(dtype=dtype)
    config = make(name, max_grad_norm=0.0)
    one = Optimizer(plain, config)
    norms = steps(plain, one, range(4))
    for module in ("optimizer", "spec"):
        monkeypatch.setattr(f"firstlight.optim.{module}.list_values", lambda _: most)
    other = Optimizer(early, config, in_backward=True)
    assert (len(set(other._list_of.values())) < len(other.parameters)) == (most > 0)
    found = steps(early, other, range(4))
    assert [float(norm) for norm in found] == [float(norm) for norm in norms]
    assert same(full_weights(early, other), full_weights(plain, one))
    assert same(other.state_tensors(), one.state_tensors())


def test_optimizer_in_backward_partial_gradients_are_updated_after_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("firstlight.optim.optimizer.list_values", lambda _: 1 << 20)
    plain, early = new_model(), new_model()
    one = Optimizer(plain, make("adamw", max_grad_norm=0.0))
    other = Optimizer(early, make("adamw", max_grad_norm=0.0), in_backward=True)
    for model, optimizer in ((plain, one), (early, other)):
        *others, last = model.parameters()
        torch.stack([p.square().sum() for p in others]).sum().backward()  # type: ignore[no-untyped-call]
        assert last.grad is None
        assert others[0].grad is not None
        optimizer.clip_gradients()
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(early), weights(plain))
    assert same(other.state_tensors(), one.state_tensors())
    assert len(other.state_tensors()) == 3 * (len(other.parameters) - 1)


@dtypes
def test_optimizer_in_backward_frees_gradients_after_pass(dtype: torch.dtype) -> None:
    model = new_model(dtype=dtype)
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=True)
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is None for p in optimizer._masters.updated.values())
    after = weights(model)
    optimizer.step()
    assert same(weights(model), after)


def test_optimizer_in_backward_tied_weight_is_updated_once_with_full_gradient() -> None:
    models = [new_model(TIED), new_model(TIED)]
    ids = torch.arange(8).view(1, 8)
    for model, in_backward in zip(models, (False, True), strict=True):
        optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=in_backward)
        model(ids, ids).backward()
        optimizer.step()
        assert optimizer.state_tensors()["transformer.wte.weight.step"].item() == 1
    assert same(weights(models[0]), weights(models[1]))


def test_optimizer_in_backward_clipping_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"set optimizer\.max_grad_norm to 0"):
        Optimizer(new_model(), make("adamw", max_grad_norm=1.0), in_backward=True)


def test_optimizer_in_backward_second_pass_before_step_raises_config_error() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=True)
    backward(model, 0)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps to 1"):
        backward(model, 1)
    optimizer.zero_grad()
    backward(model, 2)


def test_optimizer_in_backward_scaled_gradients_raise_config_error() -> None:
    model = new_model()
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=True)
    backward(model, 0)
    with pytest.raises(ConfigError, match="bf16 instead of fp16"):
        optimizer.clip_gradients(1024.0)


def test_optimizer_in_backward_non_finite_gradient_shows_in_norm() -> None:
    model = nn.Linear(3, 2)
    optimizer = Optimizer(model, make("adamw", max_grad_norm=0.0), in_backward=True)
    (model.weight.sum() * float("inf")).backward()  # type: ignore[no-untyped-call]
    assert not torch.isfinite(optimizer.clip_gradients())


# Resuming


@each
@dtypes
@switched
def test_optimizer_in_backward_run_resumes_bit_for_bit_with_switch_on_or_off(
    name: str, dtype: torch.dtype, in_backward: bool
) -> None:
    config = make(name, max_grad_norm=0.0)
    model = new_model(dtype=dtype)
    optimizer = Optimizer(model, config, in_backward=in_backward)
    steps(model, optimizer, range(3))
    saved, values = optimizer.state_tensors(), full_weights(model, optimizer)
    saved = {key: tensor.clone() for key, tensor in saved.items()}
    steps(model, optimizer, range(3, 6))

    for switch in (False, True):
        resumed = empty_model(model.config).to(dtype)
        again = Optimizer(resumed, config, in_backward=switch)
        with again.master_weights():
            resumed.load_state_dict(values)
        again.load_state_tensors(saved)
        steps(resumed, again, range(3, 6))
        assert same(full_weights(resumed, again), full_weights(model, optimizer))
        assert same(weights(resumed), weights(model))
