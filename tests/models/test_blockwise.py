"""Attention in blocks of queries: values, gradients, and saved tensors."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight.models import blockwise
from firstlight.models.blockwise import at_a_time, blocks_of, blockwise_attention
from firstlight.models.ops import AttentionOptions, attention, dense_mask, plain_attention

FP64 = torch.float64


def drawn(*shape: int, dtype: torch.dtype = FP64, seed: int = 0) -> Tensor:
    """Draw [B, T, H, D] values and return them as [B, H, T, D], in the memory layout of
    projections.
    """
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(shape, dtype=FP64, generator=generator).to(dtype).transpose(1, 2)


def with_gradients(function: Any, tensors: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*leaves, AttentionOptions(**options))
    gradient = drawn(*result.transpose(1, 2).shape, dtype=result.dtype, seed=7)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def with_sinks(function: Any) -> Any:
    """Return the function with its sinks, if any, after the values."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        *sinks, options = others
        return function(q, k, v, options._replace(sinks=sinks[0] if sinks else None))

    return attend


@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    new=st.integers(1, 20),
    before=st.integers(0, 5),
    queries=st.integers(1, 8),
    scores=st.sampled_from([1, 200, 10_000]),
    least=st.integers(1, 3),
    kind=st.sampled_from(["causal", "window", "documents"]),
    size=st.sampled_from([2, 4, 7]),
    has_sinks=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_blockwise_attention_matches_reference_forward_and_backward(
    rows: int,
    groups: int,
    heads: int,
    new: int,
    before: int,
    queries: int,
    scores: int,
    least: int,
    kind: str,
    size: int,
    has_sinks: bool,
) -> None:
    before = 0 if kind == "documents" else before
    total = new + before
    q = drawn(rows, new, heads * groups, 4)
    k, v = drawn(rows, total, heads, 4, seed=1), drawn(rows, total, heads, size, seed=2)
    sinks = (drawn(1, 1, 1, heads * groups, seed=3).flatten(),) if has_sinks else ()
    documents = torch.arange(new).div(3, rounding_mode="floor") + torch.arange(rows)[:, None]
    mask = dense_mask(
        torch.arange(before, total),
        total,
        3 if kind == "window" else None,
        documents if kind == "documents" else None,
    )
    expected = with_gradients(with_sinks(plain_attention), (q, k, v, *sinks), mask=mask)
    with mock.patch.multiple(blockwise, QUERIES=queries, SCORES=scores, _LEAST_HEADS=least):
        found = with_gradients(with_sinks(blockwise_attention), (q, k, v, *sinks), mask=mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", ["small", "large", "of one sign"])
def test_blockwise_attention_half_precision_is_as_accurate_as_torch(
    dtype: torch.dtype, scores: str
) -> None:
    q, k, v = drawn(2, 300, 4, 32), drawn(2, 300, 2, 32, seed=1), drawn(2, 300, 2, 32, seed=2)
    if scores == "large":
        q = 10 * q
    if scores == "of one sign":
        # Biases of key projections lead to such keys.
        k = k + 30 * torch.randn(32, dtype=FP64, generator=torch.Generator().manual_seed(3))
    tensors = q.to(dtype).double(), k.to(dtype).double(), v.to(dtype).double()
    exact = with_gradients(attention, tensors)

    def errors(function: Any) -> list[float]:
        found = with_gradients(function, tuple(tensor.to(dtype) for tensor in tensors))
        return [
            float((one.double() - other).norm() / other.norm())
            for one, other in zip(found, exact, strict=True)
        ]

    for ours, theirs in zip(errors(blockwise_attention), errors(attention), strict=True):
        assert ours < 2 * theirs


# In torch 2.14, opcheck itself reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_blockwise_attention_passes_torch_operator_check(masked: bool, dropped: bool) -> None:
    tensors = (
        drawn(2, 9, 4, 4).requires_grad_(),
        drawn(2, 9, 2, 4, seed=1).requires_grad_(),
        drawn(2, 9, 2, 4, seed=2).requires_grad_(),
    )
    mask = dense_mask(torch.arange(9), 9, 3, None) if masked else None
    kept = torch.arange(2 * 4 * 9 * 9).view(2, 4, 9, 9) % 3 > 0 if dropped else None
    sinks = torch.linspace(-1, 1, 4, dtype=FP64, requires_grad=True) if masked else None
    arguments = (*tensors, mask, kept, 1.5, 0.0, sinks)
    torch.library.opcheck(torch.ops.firstlight.blockwise_attention.default, arguments)


def test_blockwise_attention_saves_only_its_inputs() -> None:
    q, k, v = drawn(2, 64, 4, 8), drawn(2, 64, 2, 8, seed=1), drawn(2, 64, 2, 8, seed=2)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blockwise_attention(leaves[0], leaves[1], leaves[2])
    assert sorted(kept) == sorted(leaf.data_ptr() for leaf in leaves)


def test_blockwise_attention_compiled_is_one_operator_per_direction() -> None:
    names: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            names.append([name for name in targets if name.startswith(("firstlight", "aten.bmm"))])
            return boxed_nop(graph, inputs)

        return aot_autograd(fw_compiler=keep)(graph, inputs)

    q, k, v = drawn(2, 33, 4, 8), drawn(2, 33, 2, 8, seed=1), drawn(2, 33, 2, 8, seed=2)
    compiled = torch.compile(blockwise_attention, backend=backend, fullgraph=True)
    found = with_gradients(compiled, (q, k, v))
    assert names == [
        ["firstlight.blockwise_attention.default"],
        ["firstlight.blockwise_attention_backward.default"],
    ]
    expected = with_gradients(blockwise_attention, (q, k, v))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_blockwise_attention_under_autocast_computes_in_autocast_dtype() -> None:
    tensors = tuple(drawn(1, 20, 2, 8, seed=seed).float() for seed in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(blockwise_attention, tensors)
    halves = tuple(tensor.bfloat16() for tensor in tensors)
    expected = with_gradients(blockwise_attention, halves)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], expected[0])
    assert [one.dtype for one in found[1:]] == [torch.float32] * 3
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one, other.float())


def test_blockwise_attention_masked_overflow_gives_finite_output() -> None:
    q, k, v = (drawn(1, 4, 1, 8, dtype=torch.float16, seed=seed) for seed in range(3))
    q, k = q.abs(), k.clone()
    k[:, :, -1] = 6e4
    found = with_gradients(blockwise_attention, (q, k, v))
    # The last token's scores are infinite, but earlier tokens do not see it.
    assert found[0][:, :, :-1].isfinite().all()
    expected = with_gradients(attention, tuple(x[:, :, :-1] for x in (q, k, v)))
    torch.testing.assert_close(found[0][:, :, :-1], expected[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("groups", [1, 2])
def test_blockwise_attention_with_dropout_matches_formula_of_kept_weights(groups: int) -> None:
    tensors = drawn(3, 30, 2 * groups, 4), drawn(3, 33, 2, 4, seed=1), drawn(3, 33, 2, 4, seed=2)
    mask = dense_mask(torch.arange(3, 33), 33, 7, None)
    assert mask is not None
    torch.manual_seed(1)
    with mock.patch.multiple(blockwise, QUERIES=8, SCORES=400, _LEAST_HEADS=1):
        found = with_gradients(blockwise_attention, tensors, mask=mask, dropout=0.25)
    torch.manual_seed(1)
    kept = torch.empty(3, 2 * groups, 30, 33, dtype=torch.bool).bernoulli_(0.75)
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)

    def written_down(q: Tensor, k: Tensor, v: Tensor, _: AttentionOptions) -> Tensor:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~mask, -math.inf)
        return (scores.softmax(-1) * kept / 0.75) @ v

    for one, other in zip(found, with_gradients(written_down, tensors), strict=True):
        torch.testing.assert_close(one, other)


def test_blocks_of_end_with_queries_and_include_earlier_tokens() -> None:
    assert list(blocks_of(300, 310)) == [(0, 128, 138), (128, 256, 266), (256, 300, 310)]


def test_blockwise_attention_score_block_fits_cache() -> None:
    assert at_a_time(12, 12, 1024, 1024) == (1, 12)
    assert at_a_time(4, 4, 256, 256) == (16, 4)
    assert at_a_time(4, 2, 64, 64) == (128, 2)
    # For longer rows, the blocks contain only some of the heads and their groups.
    assert at_a_time(32, 8, 1024, 1024) == (1, 4)
    assert at_a_time(12, 12, 2048, 2048) == (1, 8)
    assert at_a_time(12, 12, 8192, 8192) == (1, 4)
    assert at_a_time(12, 2, 8192, 8192) == (1, 1)


def test_blockwise_attention_single_mask_applies_to_all_rows() -> None:
    tensors = drawn(3, 5, 2, 4), drawn(3, 5, 2, 4, seed=1), drawn(3, 5, 2, 4, seed=2)
    mask = dense_mask(torch.arange(5), 5, 2, None)
    assert mask is not None
    with mock.patch.multiple(blockwise, SCORES=1):
        found = blockwise_attention(*tensors, AttentionOptions(mask[None, None]))
    torch.testing.assert_close(found, blockwise_attention(*tensors, AttentionOptions(mask)))


def test_blockwise_attention_without_tokens_returns_empty_tensor() -> None:
    tensors = drawn(2, 0, 2, 4), drawn(2, 0, 2, 4), drawn(2, 0, 2, 4)
    assert blockwise_attention(*tensors).shape == (2, 2, 0, 4)
