"""Every model family on a device, compared with transformers on the same device."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.lora.loading import load_model
from firstlight.models import Model, ModelConfig

from .usual import TOKENS, usual_config

pytest.importorskip("transformers", reason="not installed: transformers")

from drawn import NAMES, draw, hf_model, some_ids

ROWS = 2


def both(config: ModelConfig, seed: int, device: torch.device) -> tuple[Model, Any]:
    """Return our model, loaded from a file onto the device, and transformers' model with the same
    fp32 weights.
    """
    theirs = hf_model(config, seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        own = load_model(folder, device).model
    # torch's fp32 kernel on GPUs fails if values start between multiples of 16 bytes, as DeepSeek's
    # may.
    theirs.set_attn_implementation("eager")
    assert {p.device.type for p in own.parameters()} == {device.type}
    return own, theirs.to(device)


def scaled_down(config: ModelConfig, seed: int, device: torch.device) -> tuple[Model, Any]:
    """Like `both`, with weights as small as those of wide layers."""
    own, theirs = both(config, seed, device)
    with torch.no_grad():
        for model in (own, theirs):
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.2)
    return own, theirs


def ids_of(config: ModelConfig, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (ROWS, TOKENS), generator=generator).to(device)


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `other`."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def gradients(loss: Tensor, model: Any) -> Tensor:
    """Return all gradients as one vector, in the order of the names."""
    loss.backward()  # type: ignore[no-untyped-call]
    named = sorted((name, p) for name, p in model.named_parameters())
    found = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
    return torch.cat([gradient.flatten().double() for gradient in found])


def own_outcome(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return our logits, and the gradient of the mean next-token loss."""
    with torch.no_grad():
        logits = model(ids)
    loss = model.train()(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
    return logits, gradients(loss, model)


def their_outcome(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same for transformers' model, without the experts' balancing loss."""
    with torch.no_grad():
        logits = model(ids).logits
    return logits, gradients(model(input_ids=ids, labels=ids).loss, model)


def without_balancing(config: ModelConfig) -> ModelConfig:
    if "router_aux_loss_coef" in type(config).model_fields:
        return config.model_copy(update={"router_aux_loss_coef": 0.0})
    return config


@pytest.mark.parametrize("family", NAMES)
def test_fp32_logits_of_odd_shapes_match_transformers(family: str, device: torch.device) -> None:
    assert torch.get_float32_matmul_precision() == "highest", "tf32 would be compared"
    for seed in range(4):
        own, theirs = both(draw(family, seed), seed, device)
        ids = some_ids(seed).to(device)
        with torch.no_grad():
            logits, expected = own(ids), theirs(ids).logits
        assert logits.device.type == device.type
        bound = 5e-5 * max(float(expected.abs().max()), 0.2)
        torch.testing.assert_close(logits, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("family", NAMES)
def test_fp32_logits_and_gradients_of_usual_shapes_match_transformers(
    family: str, device: torch.device
) -> None:
    config = without_balancing(usual_config(family))
    own, theirs = scaled_down(config, 1, device)
    ids = ids_of(config, device)
    (logits, found), (expected_logits, expected) = own_outcome(own, ids), their_outcome(theirs, ids)
    # tf32 differs by 1e-3, a mask with one token too many by more.
    assert relative_difference(logits, expected_logits) <= 2e-5
    assert relative_difference(found, expected) <= 1e-4


@pytest.mark.parametrize("family", NAMES)
def test_bf16_is_as_accurate_as_transformers(family: str, device: torch.device) -> None:
    config = without_balancing(usual_config(family))
    own, theirs = scaled_down(config, 2, device)
    exact = copy.deepcopy(theirs)
    # Both round the same weights; the reference has the rounded ones.
    own, theirs = own.bfloat16(), theirs.bfloat16()
    exact = exact.bfloat16().float()
    ids = ids_of(config, device)
    logits, found = own_outcome(own, ids)
    their_logits, their_gradients = their_outcome(theirs, ids)
    exact_logits, expected = their_outcome(exact, ids)
    assert logits.dtype == torch.bfloat16
    their_error = relative_difference(their_logits, exact_logits)
    assert relative_difference(logits, exact_logits) <= 1.5 * their_error + 2**-9
    their_error = relative_difference(their_gradients, expected)
    assert relative_difference(found, expected) <= 1.5 * their_error + 2**-8


@pytest.mark.parametrize("family", NAMES)
def test_cached_logits_match_those_of_whole_text(family: str, device: torch.device) -> None:
    """A prompt, then a few tokens, then one at a time, beyond mistral's window."""
    config = usual_config(family)
    own, _ = scaled_down(config, 3, device)
    ids = ids_of(config, device)
    cache = own.make_cache(ROWS, TOKENS, torch.float32)
    with torch.inference_mode():
        steps = torch.split(ids, [41, 4, *[1] * (TOKENS - 45)], dim=1)
        found = torch.cat([own(step, cache=cache) for step in steps], dim=1)
        expected = own(ids)
    assert relative_difference(found, expected) <= 2e-5
