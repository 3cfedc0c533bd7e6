"""Each known difference between a target's kernels and a trace on fake CPU tensors."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.memory import measured_memory
from firstlight.methods.attention import varying_lengths
from firstlight.models.moe import _grouped_linear, _grouped_linear_backward
from firstlight.planner.memory.kernels import (
    Operator,
    Target,
    cuda_target,
    flops_of,
    this_cpu,
    workspace_bytes,
)
from firstlight.planner.memory.prediction import CachingAllocator, predict, reserved_bytes, rounded
from firstlight.planner.memory.program import CudaKernels, fake_tensors
from firstlight.planner.memory.trace import Trace, Tracer
from gpu import fake_cuda

_MIB = 2**20
_TILES = Target(threads=2, tile_dtypes=frozenset({torch.bfloat16}))
_A100, _V100 = cuda_target("A100", (8, 0)), cuda_target("V100", (7, 0))


def workspace_of(function: Any, *tensors: Tensor) -> tuple[int, int]:
    """Return the (predicted, measured) bytes that a function's kernels allocate in addition to its
    results.
    """
    tracer = Tracer()
    with fake_tensors(), tracer:
        function(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors))
        trace = tracer.finish()
    predicted = max(workspace_bytes(operator, this_cpu()) for operator in trace.operators)
    function(*tensors)
    with measured_memory() as measured:
        results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    own = {t.untyped_storage().data_ptr() for t in tensors}
    made = {
        r.untyped_storage().data_ptr(): r.untyped_storage().nbytes()
        for r in results
        if isinstance(r, Tensor) and r.untyped_storage().data_ptr() not in own
    }
    return predicted, measured.peak_bytes - sum(made.values())


@contextlib.contextmanager
def threads_of(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def heads(length: int, dtype: torch.dtype, size: int = 32) -> Tensor:
    """Return [2, 4, T, D] with a memory layout like [2, T, 4, D], as models create heads."""
    return torch.randn(1, length, 2, size).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("length, size", [(63, 32), (64, 32), (101, 31), (256, 32), (1024, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [True, False])
def test_workspace_of_attention_has_blocks_per_thread(
    length: int, size: int, dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = heads(length, dtype, size)
    # Without oneDNN, a CPU with tiles (AMX) computes like a CPU without them.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", tiles)
    predicted, measured = workspace_of(lambda q: function(q, q, q, 0.0, True), q)
    assert predicted == measured


@pytest.mark.parametrize(
    "shape, plain, packed",
    [
        ((1, 2, 16, 64), 11520, 11520),
        ((1, 2, 64, 32), 33280, 57856),
        ((1, 2, 64, 31), 33024, 61184),
        ((1, 2, 101, 32), 47488, 86528),
        ((1, 2, 601, 64), 427008, 866048),
        ((4, 12, 1024, 64), 1708032, 14422016),
    ],
)
def test_workspace_of_tiled_attention_packs_keys_and_values(
    shape: tuple[int, ...], plain: int, packed: int
) -> None:
    # Measured on two threads of a CPU that has AMX for bf16, but not for fp16.
    for dtype, target, expected in (
        (torch.bfloat16, _TILES, packed),
        (torch.bfloat16, Target(threads=2), plain),
        (torch.float16, _TILES, plain),
    ):
        name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        operator = Operator(name, "forward", ((shape, dtype),) * 3, (), 0, 0)
        assert workspace_bytes(operator, target) == expected


@pytest.mark.parametrize("length", [64, 1024])
def test_workspace_of_attention_backward_has_blocks_per_thread(length: int) -> None:
    aten = torch.ops.aten
    q = heads(length, torch.float32)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradient = torch.randn(1, length, 2, 32).transpose(1, 2)
    for given_gradient in (gradient, gradient.contiguous()):
        predicted, measured = workspace_of(
            lambda g, q, o, s: backward(g, q, q, q, o, s, 0.0, True),
            given_gradient,
            q,
            out,
            sums,
        )
        assert predicted == measured


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length, size", [(1024, 32), (1024, 128), (256, 128), (512, 64)])
def test_workspace_of_half_precision_attention_backward_is_at_least_measured(
    length: int, size: int, threads: int
) -> None:
    if length < 1024 and torch.bfloat16 not in this_cpu().tile_dtypes:
        pytest.skip("without tiles, what oneDNN lays out was measured for long rows only")
    aten = torch.ops.aten
    q = heads(length, torch.bfloat16, size)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    with threads_of(threads):
        predicted, measured = workspace_of(
            lambda g, q, o, s: backward(g, q, q, q, o, s, 0.0, True),
            torch.randn_like(q),
            q,
            out,
            sums,
        )
    assert measured * 0.99 <= predicted <= measured * 1.2


# Covers every pair of values.
@pytest.mark.parametrize(
    "kept, masked, length, drops, dtype",
    [
        (2, 0, 64, False, torch.float32),
        (2, 0, 300, True, torch.bfloat16),
        (4, 0, 64, False, torch.bfloat16),
        (4, 0, 300, True, torch.float32),
        (4, 2, 64, True, torch.float32),
        (4, 2, 300, False, torch.bfloat16),
        (4, 4, 64, True, torch.bfloat16),
        (4, 4, 300, False, torch.float32),
    ],
)
def test_workspace_of_blockwise_attention_is_reordered_rows_and_score_block(
    length: int, kept: int, masked: int, drops: bool, dtype: torch.dtype
) -> None:
    def heads(count: int) -> Tensor:
        return torch.randn(9, length, count, 64).to(dtype).transpose(1, 2)

    q, k, v, gradient = heads(4), heads(kept), heads(kept), heads(4)
    stays = torch.ones(9, 4, length, length, dtype=torch.bool)
    mask = stays[:, :1].tril() if masked == 4 else stays[0, 0].tril()
    more = [*([mask] if masked else []), *([stays] if drops else [])]
    ops = torch.ops.firstlight

    def arguments(more: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return more[0] if masked else None, more[-1] if drops else None, 1.5

    def forward(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        return ops.blockwise_attention(q, k, v, *arguments(more))

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        return ops.blockwise_attention_backward(g, q, k, v, *arguments(more))

    # With few rows, bf16 products copy them into another layout.
    scratch = torch.get_num_threads() * _MIB // 10 if (dtype, length) == (torch.bfloat16, 64) else 0
    for function, tensors in ((forward, (q, k, v)), (backward, (gradient, q, k, v))):
        predicted, measured = workspace_of(function, *tensors, *more)
        # The profiler's own objects take a few bytes.
        assert predicted <= measured + 64
        assert measured <= predicted + 64 + scratch


def test_workspace_of_blockwise_attention_is_equal_on_gpu() -> None:
    layout = ((1, 4, 256, 64), torch.bfloat16)
    name = "firstlight.blockwise_attention.default"
    operator = Operator(name, "forward", (layout,) * 3, (layout,), 0, 0)
    size = 4 * (4 * 256 * 64 * 3 + 2 * 4 * 128 * 256)
    assert workspace_bytes(operator, _A100) == workspace_bytes(operator, Target()) == size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, inner, columns", [(64, 64, 64), (512, 256, 1024), (1024, 512, 64)])
def test_workspace_of_half_precision_products_is_at_most_predicted(
    rows: int, inner: int, columns: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    gradient = torch.randn(rows, columns).to(dtype)
    for function, tensors in (
        (lambda x, w: x @ w.T, (x, weight)),
        (lambda g, w: g @ w, (gradient, weight)),
        (lambda g, x: g.T @ x, (gradient, x)),
    ):
        predicted, measured = workspace_of(function, *tensors)
        assert measured <= predicted <= 4 * _MIB


@pytest.mark.parametrize(
    "rows, inner, columns, transposed, measured",
    [
        (64, 64, 64, "", 18_048),
        (512, 256, 1024, "", 534_144),
        (2048, 768, 3072, "", 2_369_152),
        (8192, 3072, 768, "", 27_535_104),
        (3072, 3072, 3072, "", 21_243_648),
        (1024, 3072, 96, "", 1_386_240),
        (1024, 512, 64, "transposed", 542_464),
        (768, 4096, 16, "transposed", 2_156_416),
        (3072, 8192, 768, "transposed", 1_809_024),
    ],
)
def test_workspace_of_tiled_products_is_at_most_predicted(
    rows: int, inner: int, columns: int, transposed: str, measured: int
) -> None:
    # Measured on two threads of a CPU with AMX.
    factors = ((rows, inner), torch.bfloat16), ((inner, columns), torch.bfloat16)
    operator = Operator("aten.mm.default", "forward", factors, (), 0, 0, transposed)
    assert measured <= workspace_bytes(operator, _TILES) <= 2 * measured


def test_workspace_of_fp32_products_is_zero() -> None:
    predicted, measured = workspace_of(lambda a, b: a @ b, torch.randn(64, 64), torch.randn(64, 64))
    assert predicted == measured == 0


@pytest.mark.parametrize("backward", [False, True])
def test_workspace_of_uneven_experts_is_at_most_predicted(backward: bool) -> None:
    rows, width, size = 512, 96, 64
    x = torch.randn(rows, size, dtype=torch.bfloat16)
    weight = torch.randn(4, width, size, dtype=torch.bfloat16)
    ends = torch.tensor([64, 320, 448, 512], dtype=torch.int32)
    given = (torch.randn(rows, width, dtype=torch.bfloat16), x, weight, ends)
    function: Any = _grouped_linear_backward if backward else _grouped_linear
    predicted, measured = workspace_of(function, *(given if backward else given[1:]))
    assert 2 * 256 * width < measured <= predicted <= measured + 100_000


def test_workspace_of_mixed_dtype_operands_includes_conversion() -> None:
    wide, half = torch.randn(1000), torch.randn(1000).bfloat16()
    assert workspace_of(lambda a, b: a + b, wide, half) == (4000, 4000)
    assert workspace_of(lambda a, b: a.add_(b), wide, half) == (4000, 4000)
    assert workspace_of(lambda a, b: a + b, wide, wide.clone()) == (0, 0)
    # A scalar is not copied.
    assert workspace_of(lambda a, b: a * b, half, torch.tensor(2.0))[0] == 0


def test_workspace_of_boolean_sum_is_int64() -> None:
    assert workspace_of(lambda a: a.sum(0), torch.ones(1000, 2, dtype=torch.bool)) == (16000, 16000)


def test_workspace_of_8_bit_update_is_needed_on_cpu_only() -> None:
    layout = ((1000,), torch.float32)
    name = "bitsandbytes.optimizer_update_8bit_blockwise.default"
    operator = Operator(name, "optimizer", (layout,), (), 0, 0)
    assert workspace_bytes(operator, Target()) == 20_000
    assert workspace_bytes(operator, _A100) == 0


# Tensors saved on a GPU


def kept_by(
    function: Any, target: Target, dtype: torch.dtype = torch.float32, *, expands: bool = False
) -> int:
    """Return the bytes that autograd saves for a function of [2, 4, 128, 64], without its input."""
    tracer = Tracer()
    with fake_tensors(), tracer, CudaKernels(target, expands=expands):
        x = torch.empty(2, 4, 128, 64, dtype=dtype, requires_grad=True)
        tracer.mark([x], "weights")
        with tracer.forward_pass():
            result = function(x)
        trace = tracer.finish()
    predict(trace, target)
    del result
    return sum(s.size for s in trace.storages if s.part == "activations")


_NUMBERS = 2 * 4 * 128 * 64
_SCORES = 2 * 4 * 128 * 128


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_flash_attention_saves_output_and_one_sum_per_query() -> None:
    kept = kept_by(attention, _A100, torch.bfloat16)
    # Plus two numbers for the random generator.
    assert kept == 2 * _NUMBERS + 4 * 2 * 4 * 128 + 16 + 8


def test_fp32_attention_uses_memory_efficient_kernel() -> None:
    kept = kept_by(attention, _A100)
    assert 0 <= kept - (4 * _NUMBERS + 4 * 2 * 4 * 128) <= 64


def test_math_attention_saves_scores() -> None:
    tracer = Tracer()
    with fake_tensors(), tracer, CudaKernels(_A100, "math"):
        x = torch.empty(2, 4, 128, 64, requires_grad=True)
        with tracer.forward_pass():
            result = attention(x)
        trace = tracer.finish()
    predict(trace, _A100)
    sizes = [s.size for s in trace.storages if s.part == "activations"]
    assert 4 * _SCORES in sizes
    del result


def test_grouped_attention_without_flash_repeats_keys_or_holds_scores() -> None:
    def grouped(x: Tensor) -> Tensor:
        few = x[:, :2]
        return F.scaled_dot_product_attention(x, few, few, is_causal=True, enable_gqa=True)

    assert kept_by(grouped, _A100) > 4 * _SCORES
    assert kept_by(grouped, _A100, torch.bfloat16) < 4 * _SCORES
    # firstlight's models repeat the keys instead: saved are keys, values, output and sums.
    kept = kept_by(grouped, _A100, expands=True)
    assert 0 <= kept - (3 * 4 * _NUMBERS + 4 * 2 * 4 * 128) <= 64


@pytest.mark.parametrize(("capability", "version"), [((9, 0), (2, 11)), ((10, 0), (2, 13))])
def test_masked_grouped_attention_on_hopper_and_blackwell_uses_cudnn(
    capability: tuple[int, int], version: tuple[int, int]
) -> None:
    def grouped(x: Tensor) -> Tensor:
        few, mask = x[:, :2], torch.ones(128, 128, dtype=torch.bool)
        return F.scaled_dot_product_attention(x, few, few, attn_mask=mask, enable_gqa=True)

    target = cuda_target("H100", capability, torch_version=version)
    kept = kept_by(grouped, target, torch.bfloat16)
    # The output, one sum per query, the mask converted to numbers, and two numbers for the random
    # generator.
    assert 0 <= kept - (2 * _NUMBERS + 4 * 2 * 4 * 128 + 2 * 128 * 128) <= 64
    assert kept_by(grouped, _A100, torch.bfloat16) > 4 * _SCORES
    before = cuda_target("H100", capability, torch_version=(2, 10))
    assert kept_by(grouped, before, torch.bfloat16) > 4 * _SCORES


@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
)
@pytest.mark.parametrize("learns", [True, False])
def test_planned_attention_kernel_matches_that_of_fake_device(
    capability: tuple[int, int], learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use torch's order of preference. Evaluations do not need gradients and have no cuDNN
    attention.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fake_cuda, "TORCH_TAKES_GROUPS", False)
    planned = CudaKernels(cuda_target("a GPU", capability))
    found = set()
    mask = torch.ones(8, 8, dtype=torch.bool)
    choices = itertools.product(
        (torch.float16, torch.bfloat16, torch.float32),
        (60, 64, 128, 136, 208, 256, 264),
        (None, mask),
        (0.0, 0.1, 0.125),
        (1, 2),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(learns))
        if not learns:
            stack.enter_context(varying_lengths())
        for dtype, size, seen, dropout, groups in choices:
            query = torch.empty(1, 2, 8, size, dtype=dtype, requires_grad=learns)
            key = query[:, : 2 // groups]
            asked = (seen, dropout)
            expected = fake_cuda._kernel(query, key, *asked, is_causal=seen is None, learns=learns)
            assert planned._chosen(query, *asked, grouped=groups > 1) == expected, (dtype, size)
            found.add(expected)
    prefers = learns and capability[0] in (9, 10)
    assert found == {"efficient", "math"} | ({"flash"} if capability >= (8, 0) else set()) | (
        {"cudnn"} if prefers else set()
    )


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    "kernel", ["flash_attention_for_cpu", "flash_attention", "efficient_attention"]
)
def test_grouped_attention_flops_equal_those_of_repeated_keys(kernel: str, heads: int) -> None:
    # The values have another size than the keys.
    query, key, value = (
        torch.empty(2, 4, 10, 8),
        torch.empty(2, heads, 12, 8),
        torch.empty(2, heads, 12, 6),
    )
    grad = torch.empty(2, 4, 10, 6)
    whole = (query.shape, (2, 4, 12, 8), (2, 4, 12, 6))
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward").default
    found = flops_of(forward, (query, key, value), {}, None)
    assert found == sdpa_flop_count(*whole)  # type: ignore[no-untyped-call]
    found = flops_of(backward, (grad, query, key, value), {}, None)
    assert found == sdpa_backward_flop_count(grad.shape, *whole)  # type: ignore[no-untyped-call]


def test_gpu_dropout_saves_one_byte_per_value() -> None:
    assert kept_by(lambda x: F.dropout(x, 0.1), _A100) == _NUMBERS * 4 + _NUMBERS
    assert kept_by(lambda x: F.dropout(x, 0.1, training=False), _A100) == 0


def test_softmax_saved_its_input_before_torch_1_11() -> None:
    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1)

    old = cuda_target("V100", (7, 0), torch_version=(1, 10))
    assert kept_by(softmax, _V100) == 4 * _NUMBERS
    assert kept_by(softmax, old) == 2 * 4 * _NUMBERS


def test_gpu_autocast_computes_norms_and_softmax_in_fp32() -> None:
    with torch.autocast("cpu", torch.bfloat16), fake_tensors(), CudaKernels(_A100):
        half = torch.empty(8, 16, dtype=torch.bfloat16)
        assert F.softmax(half, -1).dtype == torch.float32
        assert half.softmax(-1).dtype == torch.float32
        assert F.layer_norm(half, [16]).dtype == torch.float32
        assert F.gelu(half).dtype == torch.bfloat16
        assert F.softmax(half, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
    with fake_tensors(), CudaKernels(_A100):
        assert F.softmax(torch.empty(8, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


def test_recomputed_backward_pass_uses_gpu_kernels() -> None:
    from torch.utils.checkpoint import checkpoint

    with fake_tensors(), CudaKernels(_A100):
        x = torch.empty(4, 8, requires_grad=True)
        y: Any = checkpoint(lambda x: F.dropout(x * 2, 0.5), x, use_reentrant=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y.sum().backward()
        assert x.grad is not None


# The caching allocator


def test_allocator_rounds_sizes_to_512_bytes() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    "size, reserved",
    [
        (1, 2 * _MIB),
        (_MIB, 2 * _MIB),
        (_MIB + 1, 20 * _MIB),
        (10 * _MIB - 512, 20 * _MIB),
        (10 * _MIB, 10 * _MIB),
        (11 * _MIB, 12 * _MIB),
    ],
)
def test_allocator_segment_matches_request_size(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved


def test_allocator_reuses_freed_block_and_merges_neighbours() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(6 * _MIB), allocator.allocate(6 * _MIB)
    assert allocator.reserved == 20 * _MIB
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(20 * _MIB)
    assert allocator.reserved == 20 * _MIB


def test_allocator_unusable_gap_counts_as_reserved() -> None:
    # 64 MiB are freed, 16 of which are reused for good: the next 64 need a new segment.
    lifetimes = [(64 * _MIB, 0, 0), (16 * _MIB, 1, 9), (64 * _MIB, 2, 9)]
    assert reserved_bytes(lifetimes) == 128 * _MIB


@given(st.lists(st.tuples(st.integers(0, 50 * _MIB), st.integers(0, 20), st.integers(0, 20))))
def test_allocator_reserved_bytes_cover_allocated_bytes(
    entries: list[tuple[int, int, int]],
) -> None:
    lifetimes = sorted(
        ((size, birth, birth + length) for size, birth, length in entries), key=lambda e: e[1]
    )
    most = max(
        (
            sum(rounded(size) for size, birth, death in lifetimes if birth <= tick <= death)
            for tick in range(41)
        ),
        default=0,
    )
    assert reserved_bytes(lifetimes) >= most


def test_gpu_prediction_rounds_each_storage() -> None:
    tracer = Tracer()
    with fake_tensors(), tracer:
        tracer.mark([torch.empty(1)], "weights")
        kept = torch.empty(1)
        trace = tracer.finish()
        del kept
    target = Target("cuda", "GPU", context_bytes=7)
    found = predict(trace, target)
    assert found.peak_bytes % 512 == 0
    assert found.reserved_bytes == 2 * _MIB
    assert found.total_bytes == 2 * _MIB + 7
    assert predict(Trace(), Target()).peak_bytes == 0
