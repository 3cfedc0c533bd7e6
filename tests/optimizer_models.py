"""Small models, and gradients made up for them, for the tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer

LLAMA = LlamaConfig(
    vocab_size=29,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
)
GPT2 = GPT2Config(
    vocab_size=29,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    tie_word_embeddings=False,
)
TIED = GPT2.model_copy(update={"tie_word_embeddings": True})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch: these tensors are too small for more, which only wait on each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_model(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32) -> Model:
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(dtype)


def make(name: str, **values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, "learning_rate": 0.01, **values})


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def backward(model: nn.Module, seed: int) -> None:
    """A backward pass with the gradients of `set_gradients`."""
    generator = torch.Generator().manual_seed(seed)
    terms = [(p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum().float()
             for p in model.parameters()]  # fmt: skip
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def steps(model: nn.Module, optimizer: Optimizer, seeds: range) -> list[Tensor]:
    """Some updates with made-up gradients, each at another learning rate; their norms."""
    norms = []
    for seed in seeds:
        optimizer.set_learning_rate(1 / (1 + seed))
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.accumulate()
        norms.append(optimizer.clip_gradients())
        optimizer.step()
    optimizer.zero_grad()
    return norms


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def full_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The weights as a checkpoint has them."""
    with optimizer.master_weights():
        return weights(model)


def moved(model: nn.Module, config: OptimizerConfig, gradient: float) -> dict[str, Tensor]:
    """How far one update with a constant gradient moves each parameter from one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.full_like(parameter, gradient)
    Optimizer(model, config).step()
    return {name: 1 - p.detach() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both hold the same bits under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
