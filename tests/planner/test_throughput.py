"""Predicted speed, compared with calculations by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_recipe import plain_recipe

from benchmarks.planner_speed import (
    draw_speed,
    row_of,
    speed_case,
    speed_grid,
    summarize_speed,
)
from firstlight.bench.rows import RowOutcome
from firstlight.hardware.gpus import GPU, GPUS, find_gpu
from firstlight.planner.memory.kernels import (
    Layout,
    Operator,
    OperatorCount,
    bytes_of,
    cuda_target,
    flops_of,
)
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.recipe import at_depth, trace_memory
from firstlight.planner.speed.gpu import (
    DEFAULT_SHARES,
    KINDS,
    MatrixProduct,
    Range,
    Shares,
    attention_flops,
    kernel_seconds,
    kind_of,
    multiprocessors,
    product_of,
    streamed_bytes,
    tile_share,
)
from firstlight.planner.speed.throughput import (
    Exchange,
    SpeedPrediction,
    Workload,
    all_micro_batches,
    exchange_seconds,
    fused_bytes,
    overlapping_bytes,
    predict_speed,
    waiting_bytes,
    workload_of,
)
from firstlight.recipe import parse_resolved_recipe

FP32, BF16 = torch.float32, torch.bfloat16

#: Figures that are easy to divide by, and full efficiency.
ROUND_GPU = GPU("Round", 2**34, 1e12, 1e13, 1e13, 1e14, 1e14, 1e11, (8, 0))
ALL = Range.exact(1.0)
FREE = Range.exact(0.0)
IDEAL = Shares(ALL, ALL, ALL, ALL, ALL, FREE, FREE, FREE, FREE, fp32_products=ALL)


def op(
    name: str,
    inputs: list[Layout],
    outputs: list[Layout],
    phase: str = "forward",
    library: str = "aten",
) -> Operator:
    moved = sum(map(bytes_of, (*inputs, *outputs)))
    return Operator(f"{library}.{name}", phase, tuple(inputs), tuple(outputs), 0, moved)


def mm(m: int, k: int, n: int, phase: str = "forward", dtype: torch.dtype = FP32) -> Operator:
    return op("mm.default", [((m, k), dtype), ((k, n), dtype)], [((m, n), dtype)], phase)


def step(*counts: tuple[Operator, int]) -> MemoryPrediction:
    operators = tuple(OperatorCount(one, count) for one, count in counts)
    return MemoryPrediction(1, "forward", {}, {}, 1, 0, 0, operators)


def test_streamed_kernel_takes_bytes_over_bandwidth() -> None:
    add = op("add.Tensor", [((1000, 250), FP32)] * 2, [((1000, 250), FP32)])
    assert streamed_bytes(add) == 3e6
    assert kernel_seconds(add, ROUND_GPU, "fp32", IDEAL).expected == pytest.approx(3e-6)


def test_large_product_takes_flops_over_peak() -> None:
    one = mm(8192, 8192, 8192, dtype=BF16)
    whole = tile_share(product_of(one), multiprocessors(ROUND_GPU))
    expected = 2 * 8192**3 / (1e14 * whole)
    assert kernel_seconds(one, ROUND_GPU, "bf16", IDEAL).expected == pytest.approx(expected)
    assert 0.9 < whole <= 1


@pytest.mark.parametrize("precision, dtype, packet", [("bf16", BF16, 8), ("tf32", FP32, 4)])
def test_unaligned_rows_are_read_slowly(precision: str, dtype: torch.dtype, packet: int) -> None:
    shares = replace(IDEAL, misaligned=Range.exact(0.25))

    def seconds(n: int) -> float:
        return kernel_seconds(mm(8192, 8192, n, dtype=dtype), ROUND_GPU, precision, shares).expected

    aligned = 8192 - packet
    assert seconds(aligned) == pytest.approx(seconds(8192), rel=1e-3)
    assert seconds(aligned + 1) == pytest.approx(4 * seconds(8192), rel=2e-3)
    in_fp32 = mm(8192, 8192, 8191), ROUND_GPU, "fp32"
    assert kernel_seconds(*in_fp32, shares) == kernel_seconds(*in_fp32, IDEAL)


def test_matrix_vector_product_is_bound_by_memory() -> None:
    one = mm(1, 4096, 4096)
    bytes_moved = 4 * (4096 + 4096 * 4096 + 4096)
    memory = kernel_seconds(one, replace(ROUND_GPU, fp32=1e18), "fp32", IDEAL).expected
    assert memory == pytest.approx(bytes_moved / 1e12)


def test_tile_share_accounts_for_edge_tiles_and_last_wave() -> None:
    k = 2**40  # large enough to neglect the partial tiles at the end
    assert tile_share(MatrixProduct(1, 1280, 1280, k, BF16), 100) == pytest.approx(1.0)
    # One more row requires one more row of tiles: 110 tiles in two rounds of 100.
    lost = tile_share(MatrixProduct(1, 1281, 1280, k, BF16), 100)
    assert lost == pytest.approx(1281 / 1408 * 110 / 200)


def test_tile_share_accounts_for_partial_tiles_of_inner_dimension() -> None:
    assert tile_share(MatrixProduct(1, 1280, 1280, 64, BF16), 100) == pytest.approx(0.5)


def test_causal_attention_flops_are_half_of_full_attention() -> None:
    x: Layout = ((2, 3, 10, 5), BF16)
    sums: Layout = ((2, 3, 10), FP32)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    mask: Layout = ((10, 10), FP32)
    forward = op(f"{name}.default", [x, x, x], [x, sums])
    whole = op(f"{name}.default", [x, x, x, mask], [x, sums])
    assert attention_flops(whole) == 2 * 2 * 2 * 3 * 10 * 10 * 5
    assert attention_flops(forward) == attention_flops(whole) / 2
    backward = op(f"{name}_backward.default", [x] * 5 + [sums], [x] * 3, "backward")
    assert attention_flops(backward) == 2.5 * attention_flops(forward)
    masked = op(f"{name}_backward.default", [x] * 5 + [sums, mask], [x] * 3, "backward")
    assert attention_flops(masked) == 2 * attention_flops(backward)


def test_blockwise_attention_flops_exclude_masked_blocks() -> None:
    x: Layout = ((2, 3, 300, 5), BF16)
    seen: Layout = ((300, 300), torch.bool)
    scores = 128 * 128 + 128 * 256 + 44 * 300
    name = "blockwise_attention"
    for inputs in ([x, x, x], [x, x, x, seen]):
        one = op(f"{name}.default", inputs, [x], library="firstlight")
        assert kind_of(one) == "attention"
        assert attention_flops(one) == 2 * 2 * 2 * 3 * 5 * scores
        backward = op(f"{name}_backward.default", [x, *inputs], [x] * 3, library="firstlight")
        assert attention_flops(backward) == 2.5 * attention_flops(one)
    ops = torch.ops.firstlight
    q, k = torch.empty(2, 3, 300, 5, device="meta"), torch.empty(2, 1, 300, 5, device="meta")
    arguments = (q, k, k, None, None, 1.0)
    found = flops_of(ops.blockwise_attention.default, arguments, {}, q)
    assert found == 2 * 2 * 2 * 3 * 5 * scores
    gradients = flops_of(ops.blockwise_attention_backward.default, (q, *arguments), {}, (q, k, k))
    assert gradients == 2.5 * found


def test_fused_adamw_reads_four_tensors_and_writes_three() -> None:
    tensors: list[Layout] = [((1000,), FP32)] * 4
    one = op("_fused_adamw_.default", tensors, [], "optimizer")
    assert streamed_bytes(one) == 7 * 4000
    assert kind_of(one) == "optimizer"


def test_embedding_lookup_reads_rows_not_table() -> None:
    ids: Layout = ((4, 8), torch.int64)
    one = op("embedding.default", [((50_000, 16), FP32), ids], [((4, 8, 16), FP32)])
    assert streamed_bytes(one) == 2 * 4 * 8 * 16 * 4 + 4 * 8 * 8


def test_throughput_prediction_phases_sum_to_step() -> None:
    one, add = mm(4096, 4096, 4096), op("add.Tensor", [((2**20,), FP32)], [((2**20,), FP32)])
    optimizer = op("_fused_adamw_.default", [((2**20,), FP32)] * 4, [], "optimizer")
    found = predict_speed(
        step((one, 3), (add, 7), (optimizer, 1)), Workload(512, 1e6, "fp32"), ROUND_GPU
    )
    assert sum(found.phases.values()) == pytest.approx(found.step_seconds.expected)
    assert sum(found.kinds.values()) == pytest.approx(found.step_seconds.expected)
    assert set(found.kinds) == set(KINDS)
    rate = 512 / found.step_seconds.expected
    assert found.tokens_per_second.expected == pytest.approx(rate)
    assert found.mfu.expected == pytest.approx(rate * 1e6 / 1e13)
    assert found.bound == "compute"


def test_many_small_operators_are_bound_by_launching() -> None:
    tiny = op("add.Tensor", [((8,), FP32)], [((8,), FP32)])
    work = Workload(8, 1.0, "fp32")
    found = predict_speed(step((tiny, 1000)), work, ROUND_GPU, DEFAULT_SHARES)
    assert found.bound == "launching"
    expected = 1000 * DEFAULT_SHARES.launch_seconds.expected
    assert found.phases["forward"] == pytest.approx(expected)
    graphs = predict_speed(step((tiny, 1000)), replace(work, cuda_graphs=True), ROUND_GPU)
    assert graphs.kinds["launching"] == 0


def test_selective_checkpointing_launches_each_operator_twice() -> None:
    """Once in the forward pass, and again when the backward pass recomputes it. Views are recorded,
    too.
    """
    tiny = op("add.Tensor", [((4,), FP32)] * 2, [((4,), FP32)])
    view = op("view.default", [((4,), FP32)], [((4,), FP32)])
    back = replace(tiny, phase="backward")
    work, traced = Workload(8, 1.0, "bf16"), step((tiny, 100), (view, 50), (back, 300))
    plain = predict_speed(traced, work, ROUND_GPU, DEFAULT_SHARES).phases
    seen = predict_speed(traced, replace(work, dispatches=True), ROUND_GPU, DEFAULT_SHARES).phases
    launch = DEFAULT_SHARES.launch_seconds.expected
    each = DEFAULT_SHARES.dispatch_launches * 150 * launch
    assert plain["forward"] == pytest.approx(100 * launch)
    assert seen == pytest.approx(
        plain | {name: plain[name] + each for name in ("forward", "backward")}
    )
    compiled = replace(work, compiled=True)
    assert predict_speed(traced, compiled, ROUND_GPU) == predict_speed(
        traced, replace(compiled, dispatches=True), ROUND_GPU
    )


def test_optimizer_calls_each_take_host_time() -> None:
    one = op("_fused_adamw_.default", [((4,), FP32)], [((4,), FP32)], phase="optimizer")
    work, launch = Workload(8, 1.0, "bf16"), DEFAULT_SHARES.launch_seconds.expected
    for calls in (1, 200):
        called = replace(work, updates=calls)
        found = predict_speed(step((one, 1)), called, ROUND_GPU, DEFAULT_SHARES).phases
        expected = (1 + DEFAULT_SHARES.update_launches * calls) * launch
        assert found["optimizer"] == pytest.approx(expected)


def test_views_launch_no_kernel() -> None:
    view = op("view.default", [((2**20,), FP32)], [((2**20,), FP32)])
    work = Workload(8, 1.0, "fp32")
    assert predict_speed(step((view, 1000)), work, ROUND_GPU).phases == pytest.approx(
        {"data": 16 * 8 / 32e9}
    )


def test_compiling_removes_only_bytes_between_products() -> None:
    one = mm(100, 200, 300)
    adds = op("add.Tensor", [((10_000, 1000), FP32)] * 2, [((10_000, 1000), FP32)])
    assert fused_bytes(step((one, 2), (adds, 50)).operators) == {
        "forward": 2 * 4 * (100 * 200 + 200 * 300 + 100 * 300)
    }
    work = Workload(100, 1.0, "fp32")
    eager = predict_speed(step((one, 2), (adds, 50)), work, ROUND_GPU)
    compiled = predict_speed(step((one, 2), (adds, 50)), replace(work, compiled=True), ROUND_GPU)
    assert compiled.step_seconds.expected < eager.step_seconds.expected / 10


def test_ring_exchange_sends_each_gradient_twice_except_own_share() -> None:
    ddp = Exchange(processes=4, gradient_bytes=100.0)
    assert overlapping_bytes(ddp) == 150
    fsdp = Exchange(True, 4, weight_bytes=50.0, gradient_bytes=100.0, micro_batches=3)
    # The weights in both passes of each micro-batch, and the gradients in the last one.
    assert overlapping_bytes(fsdp) == 0.75 * (3 * 2 * 50 + 100)
    sums = Exchange(tensor_parallel=2, hidden_bytes=10.0, layers=12)
    assert waiting_bytes(sums) == 4 * 12 * 10


def test_overlapped_exchange_is_not_waited_for() -> None:
    ddp = Exchange(processes=2, gradient_bytes=1e9)
    shares = replace(IDEAL, overlap=Range.exact(0.5))
    waited = exchange_seconds(ddp, 1e9, Range.exact(1.0), shares)
    assert waited == Range.exact(0.5)
    assert exchange_seconds(ddp, 1e9, Range.exact(4.0), shares) == FREE


def test_deep_model_adds_operators_of_each_layer() -> None:
    def shallow(layers: int) -> tuple[OperatorCount, ...]:
        tensors: list[Layout] = [((9,), FP32), *[((5,), FP32), ((6,), FP32)] * layers]
        lists = [*tensors * 4, *[((), FP32)] * len(tensors)]
        adam = op("_fused_adamw_.default", lists, [], "optimizer")
        return step((mm(8, 4, 4), 2 * layers), (mm(8, 4, 99), 1), (adam, 1)).operators

    found = at_depth(shallow(2), shallow(3), 7)
    counts = {entry.operator: entry.count for entry in found}
    assert counts[mm(8, 4, 4)] == 20
    assert counts[mm(8, 4, 99)] == 1
    adam = sum(
        e.count * bytes_of(x) for e in found for x in e.operator.inputs if not e.operator.outputs
    )
    assert adam == 4 * (4 * (9 + 10 * (5 + 6)) + 1 + 10 * 2)
    # The parameters, gradients and moments of each further layer appear in lists in the same order.
    (layer,) = [e.operator.inputs for e in found if e.count == 7 and not e.operator.outputs]
    assert layer == ((((5,), FP32), ((6,), FP32)) * 4) + (((), FP32),) * 2


def test_unmeasured_gpu_speed_range_is_noted() -> None:
    found = predict_speed(step((mm(64, 64, 64), 1)), Workload(64, 1.0), find_gpu("RTX 4090"))
    assert "measurements of an H100, not measured" in found.notes[0]
    values = found.to_json()
    assert values["tokens_per_second"]["low"] == found.tokens_per_second.slow
    assert values["step_seconds"]["low"] == found.step_seconds.fast


def _said(predicted: list[float], steps: list[float], worked: float) -> dict[str, Any]:
    return {
        "predictions": [
            {"step_seconds": {"low": 0.9 * one, "expected": one, "high": 1.1 * one}}
            for one in predicted
        ],
        "step_seconds": steps,
        "thread_seconds": [worked] * len(steps),
    }


def test_accuracy_errors_are_relative_to_median_step() -> None:
    case = speed_case("small", 256, 4, batch__gradient_accumulation_steps=2)
    row = row_of(case, RowOutcome(runs=[_said([3.0, 1.1, 0.9], [9.0, 2.0, 1.0], 1.0)]))
    assert row["tokens_a_step"] == 2048
    assert row["error"] == pytest.approx(-0.45)
    assert row["error_worked"] == pytest.approx(0.1)
    assert row["error_first"] == pytest.approx(0.5)
    assert row["in_range"]


def test_error_summary_has_95th_percentile_worst_and_failed_cases() -> None:
    cases = [speed_case("small", 256, rows) for rows in range(1, 21)]
    outcomes = [RowOutcome(runs=[_said([1 + i / 100], [1.0], 1.0)]) for i in range(20)]
    rows = [row_of(case, one) for case, one in zip(cases, outcomes, strict=True)]
    rows.append(row_of(cases[0], RowOutcome(problem="out of memory")))
    found = summarize_speed(rows)
    assert found["p95"]["error"] == pytest.approx(0.18)
    assert found["median"]["error"] == pytest.approx(0.095)
    assert found["worst"] == [c.name for c in cases[:-4:-1]]
    assert (found["failed"], rows[-1]["problem"]) == (1, "out of memory")
    picture = draw_speed({**found, "machine": {"name": "a processor"}})
    assert picture.startswith(b"\x89PNG")


def test_accuracy_grid_has_ten_recipes_with_distinct_names() -> None:
    cases = speed_grid()
    assert len({case.name for case in cases}) == len(cases) == 10
    for case in cases:
        assert parse_resolved_recipe(case.recipe()).data.seq_len == case.tokens


@pytest.mark.parametrize(
    ("gpu", "rows", "attention", "published"),
    [
        # nanoGPT's README of December 2022, before it used flash attention.
        pytest.param("A100 40GB", 12, "plain", 12 * 1024 / 0.135, marks=pytest.mark.slow),
        # karpathy/llm.c, pull request 323.
        ("A100 40GB PCIe", 32, "sdpa", 115_000.0),
    ],
)
def test_published_rates_lie_within_predicted_range(
    gpu: str, rows: int, attention: str, published: float
) -> None:
    recipe = plain_recipe(
        {
            "data": {"dir": "-", "seq_len": 1024},
            "model": {"model_type": "gpt2", "vocab_size": 50304},
            "batch": {"micro_batch_size": rows},
            "efficiency": {"precision": "bf16", "compile": True, "attention": attention},
        }
    )
    # As in a plan, where the trace of a compiled step does not contain kernels.
    counted = trace_memory(uncompiled(recipe), cuda_target(gpu, (8, 0)))
    rates = predict_speed(counted, workload_of(recipe), find_gpu(gpu)).tokens_per_second
    assert rates.slow < published < rates.fast
    assert rates.fast < 3 * rates.slow
    assert rates.expected == pytest.approx(published, rel=0.1)


def test_throughput_counts_all_micro_batches_of_step() -> None:
    traced = step(
        (mm(8, 8, 8), 4),
        (mm(8, 8, 8, "backward"), 8),
        (op("_fused_adamw_.default", [((8,), FP32)] * 5, [], "optimizer"), 1),
    )
    counts = [entry.count for entry in all_micro_batches(traced, 5).operators]
    assert counts == [10, 20, 1]
    assert all_micro_batches(traced, 2) is traced


def test_expert_products_are_matrix_products_compiled_or_not() -> None:
    """They were counted as streams, which compiling removes entirely."""
    model = {
        "model_type": "mixtral",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    values = {
        "data": {"dir": "-", "seq_len": 64},
        "model": model,
        "batch": {"micro_batch_size": 1},
        "efficiency": {"precision": "bf16", "compile": False},
    }
    recipe = plain_recipe(values)
    counted = trace_memory(recipe, cuda_target("x", (9, 0)))
    experts = [e for e in counted.operators if "grouped_linear" in e.operator.name]
    found = {}
    for entry in experts:
        one, product = entry.operator, product_of(entry.operator)
        assert kind_of(one) == "matrix_products"
        assert product.flops == one.flops
        found[product.batch, product.m, product.n, product.k] = entry.count
    rows = 2 * 64
    assert found == {
        (1, rows, 96, 32): 1,
        (1, rows, 32, 48): 1,
        (2, rows, 96, 32): 1,
        (2, rows, 32, 48): 1,
    }
    compiled = plain_recipe({**values, "efficiency": {"precision": "bf16", "compile": True}})
    gpu = find_gpu("H100")
    rest = replace(counted, operators=tuple(e for e in counted.operators if e not in experts))
    least = sum(kernel_seconds(e.operator, gpu, "bf16").expected * e.count for e in experts)
    for one_recipe in (recipe, compiled):
        both, other = (predict_speed(one, workload_of(one_recipe), gpu) for one in (counted, rest))
        added = both.kinds["matrix_products"] - other.kinds["matrix_products"]
        assert added == pytest.approx(least)


def test_fp8_products_of_large_layers_take_half_the_time() -> None:
    model = {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    values = {
        "data": {"dir": "-", "seq_len": 64},
        "model": model,
        "batch": {"micro_batch_size": 64},
        "efficiency": {"precision": "fp8", "compile": True},
    }
    work = workload_of(plain_recipe(values))
    # Queries, outputs and the MLP; keys and values have only 1M weights.
    assert work.fp8_products == {(2048, 2048, 4096), (2048, 4096, 4096)}
    in_bf16 = workload_of(plain_recipe({**values, "efficiency": {"precision": "bf16"}}))
    assert not in_bf16.fp8_products
    tokens = 4096
    products = {
        "up": mm(tokens, 2048, 4096, dtype=BF16),
        "gradient of the input": mm(tokens, 4096, 2048, "backward", BF16),
        "gradient of the weight": mm(4096, tokens, 2048, "backward", BF16),
        "key": mm(tokens, 2048, 512, dtype=BF16),
        "head": mm(tokens, 2048, 4096, "loss", BF16),
    }
    gpu = find_gpu("H100")
    for name, one in products.items():
        found, bf16 = (
            predict_speed(step((one, 1)), each, gpu, IDEAL).kinds["matrix_products"]
            for each in (work, in_bf16)
        )
        casts = 1.5 * sum(map(bytes_of, one.inputs)) / gpu.bandwidth
        is_fp8 = name not in ("key", "head")
        assert found == pytest.approx(bf16 / 2 + casts if is_fp8 else bf16), name


_SIZES = st.integers(1, 3000)
_FACTORS = st.floats(1, 16)


def _of(sizes: tuple[int, int, int], machine: GPU, compiled: bool) -> SpeedPrediction:
    m, k, n = sizes
    counts = step(
        (mm(m, k, n, dtype=BF16), 3),
        (op("add.Tensor", [((m, n), FP32)] * 2, [((m, n), FP32)]), 5),
        (mm(k, m, n, "backward"), 2),
    )
    exchange = Exchange(processes=4, gradient_bytes=4.0 * k * n)
    return predict_speed(counts, Workload(m, 1e3, "bf16", compiled, exchange=exchange), machine)


@given(st.tuples(_SIZES, _SIZES, _SIZES), st.sampled_from(sorted(GPUS)), st.booleans())
def test_predicted_ranges_are_ordered(
    sizes: tuple[int, int, int], name: str, compiled: bool
) -> None:
    found = _of(sizes, GPUS[name], compiled)
    assert found.step_seconds.slow >= found.step_seconds.expected >= found.step_seconds.fast > 0
    rates = found.tokens_per_second
    assert 0 < rates.slow <= rates.expected <= rates.fast


@given(
    st.tuples(_SIZES, _SIZES, _SIZES),
    st.sampled_from(sorted(GPUS)),
    _FACTORS,
    st.sampled_from(["bandwidth", "link", "bf16"]),
)
def test_better_gpu_is_never_slower(
    sizes: tuple[int, int, int], name: str, factor: float, what: str
) -> None:
    gpu = GPUS[name]
    better = replace(gpu, **{what: getattr(gpu, what) * factor})
    slow, fast = _of(sizes, gpu, False).step_seconds, _of(sizes, better, False).step_seconds
    for one in ("slow", "expected", "fast"):
        assert getattr(fast, one) <= getattr(slow, one) * (1 + 1e-9)


@given(st.tuples(_SIZES, _SIZES, _SIZES), st.integers(1, 400))
def test_tile_share_never_exceeds_one(sizes: tuple[int, int, int], units: int) -> None:
    m, n, k = sizes
    assert 0 < tile_share(MatrixProduct(1, m, n, k, BF16), units) <= 1
