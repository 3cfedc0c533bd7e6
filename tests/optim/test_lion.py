from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from firstlight.optim.lion import Lion
from firstlight.optim.optimizer import Optimizer
from optimizer_models import (
    full_weights,
    make,
    moved,
    new_model,
    same,
    set_gradients,
    steps,
    weights,
)

_BETAS = [0.75, 0.5]


def test_lion_two_steps_match_hand_computed_values() -> None:
    """Exact binary fractions, calculated by hand: beta1 0.75, beta2 0.5."""
    x = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
    optimizer = Lion([{"params": [x], "weight_decay": 0.5}], 0.25, _BETAS, foreach=False)
    x.grad = torch.tensor([4.0, -8.0, 0.0])
    optimizer.step()
    # Weight decay by 1/8, then a step of a quarter against the gradient's sign, or none where it is
    # 0.
    assert x.tolist() == [0.625, -0.625, 1.75]
    assert optimizer.state[x]["exp_avg"].tolist() == [2.0, -4.0, 0.0]
    # c = 0.75 m + 0.25 g = [0.5, -4, 1]: in the first element, the moment outweighs the gradient.
    x.grad = torch.tensor([-4.0, -4.0, 4.0])
    optimizer.step()
    assert x.tolist() == [0.625 * 0.875 - 0.25, -0.625 * 0.875 + 0.25, 1.75 * 0.875 - 0.25]
    assert optimizer.state[x]["exp_avg"].tolist() == [-1.0, -4.0, 2.0]


@pytest.mark.parametrize("way", ["auto", "for-loop", "foreach"])
def test_lion_five_model_steps_match_formula(way: str) -> None:
    """Weight decay applies to matrices only, and the learning rate changes."""
    model, expected = new_model(), weights(new_model())
    config = make("lion", implementation=way, betas=[0.9, 0.99], weight_decay=0.3, max_grad_norm=0)
    optimizer = Optimizer(model, config)
    moments = {name: torch.zeros_like(value) for name, value in expected.items()}
    for seed in range(5):
        rate = optimizer.set_learning_rate(1 / (1 + seed))
        set_gradients(model, seed)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            x, m, g = expected[name], moments[name], parameter.grad
            decay = 0.3 if x.dim() > 1 else 0.0
            expected[name] = x - rate * ((0.9 * m + 0.1 * g).sign() + decay * x)
            moments[name] = 0.99 * m + 0.01 * g
        optimizer.step()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)


def test_lion_moves_every_value_by_learning_rate() -> None:
    for movement in moved(new_model(), make("lion", weight_decay=0.0), gradient=1e-6).values():
        torch.testing.assert_close(movement, torch.full_like(movement, 0.01))


def test_lion_fused_raises_and_suggests_supported_implementation() -> None:
    with pytest.raises(ValidationError, match=r"no implementation 'fused': set .* to foreach or"):
        make("lion", implementation="fused")


def test_lion_run_resumes_from_state() -> None:
    unbroken, resumed = new_model(), new_model()
    steps(unbroken, Optimizer(unbroken, make("lion")), range(4))
    before = Optimizer(resumed, make("lion"))
    steps(resumed, before, range(2))
    after = Optimizer(resumed, make("lion", implementation="foreach"))
    after.load_state_tensors(before.state_tensors())
    assert after.state_tensors().keys() == after.state_names
    steps(resumed, after, range(2, 4))
    assert same(weights(resumed), weights(unbroken))


def test_lion_bf16_masters_keep_small_updates() -> None:
    config = make("lion", learning_rate=1e-6, weight_decay=0.0)
    model = new_model(dtype=torch.bfloat16)
    optimizer = Optimizer(model, config)
    start = full_weights(model, optimizer)
    steps(model, optimizer, range(1))
    for name, value in full_weights(model, optimizer).items():
        torch.testing.assert_close(
            (value - start[name]).abs().max(), torch.tensor(1e-6), rtol=0.2, atol=0
        )


@pytest.fixture
def two_processes() -> Iterator[None]:
    """Make this process the first of two; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("foreach", [False, True])
def test_lion_sharded_update_equals_part_of_full_update(foreach: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def on_both(whole: Tensor, placement: Any) -> DTensor:
        return distribute_tensor(whole, mesh, [placement], src_data_rank=None)

    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 3, generator=draw)
    whole, shard = nn.Parameter(start.clone()), nn.Parameter(on_both(start.clone(), Shard(0)))
    vector = nn.Parameter(torch.ones(3))  # replicated on each process
    groups = ([whole], [shard, vector])
    one, other = (
        Lion([{"params": p, "weight_decay": 0.1}], 0.1, _BETAS, foreach=foreach) for p in groups
    )
    # Tensor parallelism also yields unsharded gradients of sharded parameters.
    for gradient, placement in zip(gradients, (Shard(0), Replicate(), Shard(0)), strict=True):
        whole.grad, vector.grad = gradient, gradient[0]
        shard.grad = on_both(gradient, placement)
        one.step()
        other.step()
    assert isinstance(shard, DTensor)
    assert isinstance(other.state[shard]["exp_avg"], DTensor)
    assert torch.equal(shard.to_local(), whole[:3])
    assert torch.equal(other.state[shard]["exp_avg"].to_local(), one.state[whole]["exp_avg"][:3])
    assert not torch.equal(vector, torch.ones(3))
