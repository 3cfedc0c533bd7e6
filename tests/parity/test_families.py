"""Every family compared with transformers on the same random weights: logits, loss, router loss,
and the gradient of every parameter.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from drawn import NAMES, draw, draw_config, hf_model, some_ids, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import slow_but
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES, Llama, Model, ModelConfig

#: Number of models per family that `make test` and `make test-slow` compare.
DRAWS = [12, pytest.param(60, marks=pytest.mark.slow)]


@contextlib.contextmanager
def named(config: ModelConfig, seed: int) -> Iterator[None]:
    """Add the name of the model to an error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"seed {seed} of {config!r}")
        raise


@st.composite
def configs(draw: st.DrawFn, family: str) -> ModelConfig:
    def choose(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    return draw_config(family, choose)


def both(config: ModelConfig, seed: int, dtype: torch.dtype) -> tuple[Model, Any]:
    """Return firstlight's model, loaded from a file, and transformers' model with the same
    weights.
    """
    theirs = hf_model(config, seed)
    tables = {name: b.clone() for name, b in theirs.named_buffers() if "inv_freq" in name}
    theirs.to(dtype)
    # `to` rounds the rotary tables, which stay fp32 in a model loaded in bf16.
    for name, buffer in theirs.named_buffers():
        if name in tables:
            buffer.data = tables[name]
    with tempfile.TemporaryDirectory() as folder:
        # Experts are stored one by one, as in the family's files, or stacked.
        theirs.save_pretrained(folder, save_original_format=seed % 2 == 0)
        own = load_model(folder).model
    assert own.config == config
    assert {p.dtype for p in own.parameters()} == {dtype}
    return own, theirs


def some_labels(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, 5:9] = -100
    return labels


def own_losses(own: Model, seed: int) -> tuple[float, float | None]:
    """Return our loss after its backward pass, and the router loss if transformers has one."""
    ids = some_ids(seed)
    labels = some_labels(ids)
    # transformers shifts the labels itself; its router loss also sees the last token.
    shifted = torch.cat((labels[:, 1:], torch.full((len(ids), 1), -100)), dim=1)
    valid = int((shifted != -100).sum())
    loss = own.train()(ids, shifted) / valid
    loss.backward()
    own.eval()
    if not isinstance(own, Llama) or own.router_statistics is None:
        return loss.item(), None
    router_loss = own.router_statistics.take(valid)["moe/router_loss"]
    return loss.item(), None if own.config.model_type.startswith("deepseek") else router_loss


def their_output(theirs: Any, config: ModelConfig, seed: int, router_loss: float | None) -> Any:
    """Return transformers' output for the same batch after its backward pass, with our router
    loss.
    """
    ids = some_ids(seed)
    routers = {"output_router_logits": True} if config.expert_count else {}
    output = theirs(input_ids=ids, labels=some_labels(ids), **routers)
    output.loss.backward()
    if router_loss is not None:
        is_exact = next(theirs.parameters()).dtype == torch.float32
        assert router_loss == pytest.approx(output.aux_loss.item(), rel=1e-5 if is_exact else 2e-2)
    return output


def losses_with_gradients(own: Model, theirs: Any, seed: int) -> tuple[float, Any]:
    """Return our loss and transformers' output for the same batch, both after their backward
    passes.
    """
    loss, router_loss = own_losses(own, seed)
    return loss, their_output(theirs, own.config, seed, router_loss)


def relative_difference(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def largest_gradient_difference(own: Model, theirs: Any) -> float:
    """Return the maximum over all parameters, relative to each gradient's norm or to 1/10,000 of
    the largest: some gradients are zero except for rounding, such as a router's if each token
    visits one expert.
    """
    gradients = {name: p.grad for name, p in own.named_parameters()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    largest = max(float(grad.norm()) for grad in expected.values() if grad is not None)
    # A bias of unrotated keys does not affect the softmax: its gradient is only rounding.
    least = largest * (1e-3 if own.config.family.no_rope_every else 1e-4)
    differences = [0.0]
    for name, gradient in gradients.items():
        assert gradient is not None, name
        if expected[name] is None:
            assert gradient.norm() == 0, name
        else:
            norm = max(float(expected[name].norm()), least)
            differences.append(float((gradient - expected[name]).norm()) / norm)
    return max(differences)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("family", NAMES)
def test_logits_losses_and_gradients_match_transformers(family: str, draws: int) -> None:
    for seed, config in enumerate(spread(family, draws)):
        with named(config, seed):
            own, theirs = both(config, seed, torch.float32)
            loss, output = losses_with_gradients(own, theirs, seed)
            with torch.no_grad():
                logits = own(some_ids(seed))
            assert output.logits.abs().max() > 0.01, "the comparison would say nothing"
            torch.testing.assert_close(logits, output.logits.detach(), atol=1e-5, rtol=0)
            assert loss == pytest.approx(output.loss.item(), rel=1e-5)
            assert largest_gradient_difference(own, theirs) <= 1e-4


def all_gradients(model: Any) -> Tensor:
    """Return all gradients as one vector, in the order of the names."""
    named = sorted((name, p) for name, p in model.named_parameters())
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in named]
    return torch.cat([grad.flatten().double() for grad in grads])


#: One family for each kind of attention, norm and feed-forward layer; `make test-slow` runs all in
#: bf16.
_UNLIKE = ("gpt2", "mixtral", "qwen3_next")


@pytest.mark.parametrize("family", slow_but(_UNLIKE, NAMES))
def test_bf16_logits_are_as_accurate_as_transformers(family: str) -> None:
    """Two orders of the same sums round differently, so both are compared with fp64."""

    @settings(max_examples=10)
    @given(configs(family), st.integers(0, 2**31))
    def check(config: ModelConfig, seed: int) -> None:
        if config.expert_count:
            # All experts, because the expert that a token visits may depend on rounding.
            every = {"num_experts_per_tok": config.expert_count}
            every |= {"topk_group": config.n_group} if hasattr(config, "n_group") else {}
            config = config.model_copy(update=every)
        own, theirs = both(config, seed, torch.bfloat16)
        exact = copy.deepcopy(theirs).double()
        _, router_loss = own_losses(own, seed)
        output = their_output(theirs, config, seed, router_loss)
        reference = their_output(exact, config, seed, router_loss)
        with torch.no_grad():
            logits = own(some_ids(seed))
        assert logits.dtype == torch.bfloat16
        own_error = relative_difference(logits, reference.logits)
        assert own_error <= 2 * relative_difference(output.logits, reference.logits) + 2**-8
        gradients, expected = all_gradients(own), all_gradients(exact)
        own_error = relative_difference(gradients, expected)
        their_error = relative_difference(all_gradients(theirs), expected)
        assert own_error <= 2 * their_error + 2**-8

    check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", NAMES)
def test_cached_logits_match_transformers_over_whole_text(family: str, seed: int) -> None:
    """A prompt, then a few tokens, then one at a time, also beyond a sliding window."""
    config = draw(family, seed)
    if seed == 0 and "sliding_window" in FAMILIES[family].spec.own_keys:
        config = type(config)(**{**config.model_dump(), "sliding_window": 7})
    if seed == 0 and hasattr(config, "linear_num_key_heads"):
        # Two layers with linear attention before one with full attention.
        changes = {"num_hidden_layers": 3, "layer_types": None, "rms_norm_eps": 1e-3}
        config = type(config)(**{**config.model_dump(), **changes})
    own, theirs = both(config, seed, torch.float32)
    ids = some_ids(seed)
    cache = own.make_cache(len(ids), ids.shape[1], torch.float32)
    cache.least_length = ids.shape[1]
    with torch.inference_mode():
        steps = torch.split(ids, [11, 4, *[1] * (ids.shape[1] - 15)], dim=1)
        found = torch.cat([own(step, cache=cache) for step in steps], dim=1)
        expected = theirs(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
