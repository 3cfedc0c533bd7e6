"""Tests of `firstlight bench gemm` with products of a few thousand numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from firstlight.bench import gemm, models
from firstlight.bench.gemm import (
    COMPARED,
    DTYPES,
    FP8,
    MODELS,
    GemmPlan,
    GemmProduct,
    GemmRun,
    GPT2Shape,
    all_products,
    cache_sizes,
    compare,
    draw,
    draw_loops,
    hardware_dtypes,
    layer_products,
    make_multiply,
    make_operands,
    measure_loops,
    measure_waves,
    model_products,
    multiply_rows,
    multiply_squares,
    paddings,
    plan_for,
    step_times,
    sum_passes,
    summarize,
    wave_products,
)
from firstlight.bench.models import find_model
from firstlight.bench.rows import GemmBench
from firstlight.cli.bench import gemm_command
from firstlight.cli.main import main
from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.models.gpt2 import GPT2Config

_CPU = torch.device("cpu")
_TINY = GemmPlan(
    (8, 32),
    32,
    16,
    (255, 256, 257),
    1e-6,
    0.0,
    min_rounds=2,
    max_rounds=2,
    turns=1,
    pass_bytes=(1 << 12, 1 << 23),
    blocked_edge=64,
)
_SMALL = GPT2Shape(32, 2, vocab_size=65)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the sizes so that the command measures products of a few thousand numbers."""
    monkeypatch.setattr(gemm, "plan_for", lambda device_type, quick: _TINY)
    monkeypatch.setattr(gemm, "MODELS", dict.fromkeys(MODELS, _SMALL))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": ["int8"]}, "dtype 'int8' is unknown: use fp32, tf32, bf16, fp16"),
        ({"dtype": ["bf61"]}, r"dtype 'bf61' is unknown \(did you mean 'bf16'\?\)"),
        ({"dtype": ["tf32"], "device": "cpu"}, "no hardware support for tf32 products, .*: use fp"),
        ({"model": "gpt2-125m"}, r"model 'gpt2-125m' is unknown \(did you mean 'gpt2-"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_gemm_run_invalid_settings_raises_config_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GemmRun(GemmBench(**options))


@pytest.mark.parametrize("name", ["gpt2-355m", "gpt2-350m"])
def test_gemm_model_355m_under_old_name_resolves_to_current_name(name: str) -> None:
    run = GemmRun(GemmBench(model=name, quick=True))
    assert (run.bench.model, run.shape.num_hidden_layers) == ("gpt2-355m", 24)
    assert find_model(name).num_hidden_layers == 24
    assert MODELS.keys() & models.MODELS.keys() == {"gpt2-124m", "gpt2-355m", "gpt2-774m"}


def test_gemm_dtype_emulated_by_cpu_is_not_default_and_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = replace(find_hardware("cpu"), name="Old CPU", bf16=False)
    monkeypatch.setattr(gemm, "find_hardware", lambda device: hardware)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    for name in ("fp16", "bf16"):
        message = f"Old CPU has no hardware support for {name} products, .*: use fp32"
        with pytest.raises(ConfigError, match=message):
            GemmRun(GemmBench(dtype=[name]))
    assert GemmRun(GemmBench()).dtypes == ["fp32"]


@pytest.mark.parametrize("name", ["avx512_fp16", "amx_fp16", "fp16_arith"])
def test_hardware_dtypes_cpu_returns_every_native_dtype(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(find_hardware("cpu"), bf16=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True})
    assert hardware_dtypes(hardware) == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize(
    "capability, names",
    [((6, 1), ["fp32"]), ((7, 5), ["fp32", "fp16"]), ((8, 0), ["fp32", "tf32", "bf16", "fp16"])],
)
def test_hardware_dtypes_gpu_matches_its_generation(
    capability: tuple[int, int], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(
        find_hardware("cpu"), device=torch.device("cuda", 0), bf16=capability >= (8, 0)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert hardware_dtypes(hardware) == names


def test_paddings_of_gpt2_vocabulary_match_usual_multiples() -> None:
    assert paddings(50257) == {8: 50264, 64: 50304, 128: 50304}
    assert paddings(1025) == {8: 1032, 64: 1088, 128: 1152}


@pytest.mark.parametrize("conv1d", [False, True])
def test_layer_products_match_autograd(conv1d: bool) -> None:
    tokens, inputs, outputs = 5, 3, 7
    x = torch.randn(tokens, inputs, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    weight = (weight.t().contiguous() if conv1d else weight).requires_grad_()
    y = x @ weight if conv1d else x @ weight.t()
    g = torch.randn_like(y)
    y.backward(g)  # type: ignore[no-untyped-call]
    stored = {"forward": (x, weight), "grad input": (g, weight)}
    stored["grad weight"] = (x, g) if conv1d else (g, x)
    expected = {"forward": y, "grad input": x.grad, "grad weight": weight.grad}
    for name, m, n, k, layout in layer_products("", tokens, inputs, outputs, conv1d=conv1d):
        product = GemmProduct("model", "", 0, name, m, n, k, layout)
        a, b = stored[name.strip()]
        c = torch.zeros(m * n, dtype=torch.float64)
        # The buffers are used as stored; only the layout determines which operand is transposed.
        make_multiply(product, (a.detach().flatten(), b.detach().flatten(), c))()
        want = expected[name.strip()]
        assert want is not None
        assert (m, n) == want.shape
        torch.testing.assert_close(c.view(m, n), want.detach())


def test_gemm_model_flops_match_accounting() -> None:
    shape, tokens = MODELS["gpt2-124m"], 64
    config = GPT2Config(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size)
    # Without the products inside attention, which grow with the sequence length.
    counted = train_flops_per_token(meta_model(config), 0)
    products = model_products(shape, tokens)
    for weights in ("conv1d", "linear"):
        these = [one for one in products if (one.group, one.value) == (weights, 0)]
        these += [one for one in products if one.value == 50257]
        assert sum(one.count * one.flops for one in these) == tokens * counted


def test_gemm_models_parameter_counts_match_their_names() -> None:
    for name, shape in MODELS.items():
        weights = 12 * shape.num_hidden_layers * shape.hidden_size**2
        embeddings = (shape.vocab_size + 1024) * shape.hidden_size
        millions = int(name.removeprefix("gpt2-").removesuffix("m"))
        assert (weights + embeddings) / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_gemm_plan_has_edge_sizes_and_no_duplicate_product(device: str, quick: bool) -> None:
    plan = plan_for(device, quick)
    assert {255, 256, 257} <= set(plan.tile_sizes)
    products = all_products(MODELS["gpt2-124m"], plan, 132 if device == "cuda" else 0)
    assert len(set(products)) == len(products)
    sizes = {(one.group, one.value) for one in products}
    for group in ("M", "N", "K"):
        assert {(group, plan.base), (group, plan.base + 1), (group, plan.base + 8)} <= sizes
    assert {("hidden", size) for size in (768, 769, 776, 832, 896)} <= sizes
    assert {("vocabulary", size) for size in (50257, 50264, 50304)} <= sizes
    assert ("tiles" in {one.group for one in products}) == (device == "cuda")


def test_wave_products_have_one_tile_per_multiprocessor() -> None:
    products = wave_products(132)
    assert [one.m // 128 * (one.n // 256) for one in products] == [132, 131, 133, 264, 265]


def test_ratios_are_computed_per_round_and_combine_several_products() -> None:
    a, b, c = (GemmProduct("size", "", size, "", size, 1, 1) for size in (1, 2, 3))
    times = {a: [1.0, 2.0, 4.0], b: [2.0, 3.0, 20.0], c: [2.0, 3.0]}
    # 2/1, 3/2, 20/4: the median round, not the ratio of medians.
    ratio = compare(times, [b], [a])
    assert ratio == {
        "time_ratio": 2.0,
        "lowest": 1.5,
        "highest": 5.0,
        "work_ratio": 2.0,
        "rate_ratio": 1.0,
    }
    # (2 + 2)/1 and (3 + 3)/2; the third round is incomplete.
    both = compare(times, [b, c], [a])
    assert (both["time_ratio"], both["work_ratio"], both["rate_ratio"]) == (3.5, 5.0, 5 / 3.5)


def test_step_times_sum_products_scaled_to_tokens() -> None:
    products = model_products(_SMALL, tokens=16)
    times = {one: [1.0, 5.0, 3.0] for one in products}
    found = step_times(products, times, tokens=16, ceiling=1e6)
    assert [(one["weights"], one["vocabulary"]) for one in found] == [
        (weights, vocabulary) for weights in ("conv1d", "linear") for vocabulary in (65, 72, 128)
    ]
    # 4 layer products x 3 passes x 2 layers, and 3 products of the head, each with a median of 3 s;
    # scaled from 16 to 4096 tokens.
    assert {one["seconds"] for one in found} == {256 * (4 * 3 * 2 + 3) * 3.0}
    for one in found:
        weights = 2 * 12 * 32 * 32 + 32 * one["vocabulary"]
        assert one["flops"] == 6 * 4096 * weights
        assert one["share_of_ceiling"] == pytest.approx(one["flops"] / one["seconds"] / 1e6)
    del times[products[-1]]
    assert step_times(products, times, tokens=16, ceiling=1e6) == []


def test_ceiling_is_best_rate_of_large_products() -> None:
    small, large = (
        GemmProduct("size", "", size, str(size), size, size, size) for size in (10, 1000)
    )
    times = [[1e-9], [2.0, 1.0, 4.0]]
    result = summarize([small, large], {"fp32": times, "bf16": [[], []]}, _SMALL, _TINY)
    assert result["ceilings"] == {"fp32": 2e9}
    assert [row["share_of_ceiling"] for row in result["rows"]] == pytest.approx([1000.0, 0.5])
    row = result["rows"][1]
    assert (row["lowest"], row["flops_per_second"], row["highest"]) == (0.5e9, 1e9, 2e9)
    result = summarize([small, large], {"fp32": [[1e-6], []]}, _SMALL, _TINY)
    assert result["ceilings"] == {"fp32": 2e9}
    assert result["step"] == result["padding"] == result["tile"] == result["wave"] == []


def test_padding_result_compares_padded_with_unpadded_size() -> None:
    products = all_products(_SMALL, _TINY, multiprocessors=3)
    # One second per unit of the size that varies.
    seconds = {"fp32": [[float(one.value or 1)] * 2 for one in products]}
    result = summarize(products, seconds, _SMALL, _TINY)
    rows = {(row["group"], row["to"]): row for row in result["padding"]}
    assert {key: row["multiples"] for key, row in rows.items()} == {
        **{(group, 32): [] for group in ("M", "N", "K", "hidden")},
        **{(group, 40): [8] for group in ("M", "N", "K", "hidden")},
        **{(group, 64): [64] for group in ("M", "N", "K", "hidden")},
        **{(group, 128): [128] for group in ("M", "N", "K", "hidden")},
        ("vocabulary", 72): [8],
        ("vocabulary", 128): [64, 128],
    }
    assert {row["from"] for row in result["padding"]} == {33, 65}
    assert rows["N", 40]["time_ratio"] == rows["N", 40]["work_ratio"] == 40 / 33
    assert rows["hidden", 40]["work_ratio"] == pytest.approx((40 / 33) ** 2)
    assert rows["hidden", 40]["time_ratio"] == pytest.approx(40 / 33)
    assert [row["time_ratio"] for row in result["tile"]] == [255 / 256, 1.0, 257 / 256]
    assert [row["to"] for row in result["wave"]] == [3, 2, 4, 6, 7]
    assert [row["work_ratio"] for row in result["wave"]] == [1.0, 2 / 3, 4 / 3, 2.0, 7 / 3]


def test_operands_are_random_and_cover_largest_product() -> None:
    products = all_products(_SMALL, _TINY)
    a, b, c = make_operands(products, torch.float32, _CPU)
    assert len(a) == max(one.m * one.k for one in products)
    assert len(b) == max(one.k * one.n for one in products)
    assert len(c) == max(one.m * one.n for one in products)
    assert len(set(a.tolist())) > len(a) // 2
    assert not torch.equal(a[:100], b[:100])


def test_fp32_products_ignore_matmul_precision_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured(*_: object) -> float:
        seen.append(torch.get_float32_matmul_precision())
        return 1.0

    monkeypatch.setattr(gemm, "measure_product", measured)
    monkeypatch.setattr(gemm, "warm_up", lambda multiply, device: 1.0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        run = GemmRun(GemmBench(device="cpu", dtype=["fp32"]), _TINY)
        run.measure()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_measured_products_alternate_in_rounds(monkeypatch: pytest.MonkeyPatch, tiny: None) -> None:
    order: list[tuple[str, torch.dtype]] = []

    def measured(product: GemmProduct, operands: gemm.Operands, *_: object) -> float:
        order.append((product.name, operands[0].dtype))
        return 1.0

    monkeypatch.setattr(gemm, "measure_product", measured)
    # Two formats, regardless of this machine's hardware.
    monkeypatch.setattr(gemm, "hardware_dtypes", lambda hardware: ["fp32", "bf16"])
    run = GemmRun(GemmBench(device="cpu"), replace(_TINY, turns=2))
    run.measure()
    one_round = [
        (product.name, DTYPES[name])
        for products in (run.products, [one for one in run.products if one.part in COMPARED])
        for product in products
        for name in ("fp32", "bf16")
    ]
    assert order == 2 * one_round


@pytest.mark.parametrize("budget, rounds", [(0.0, 2), (3.5, 3), (1000.0, 5)])
def test_measured_rounds_fill_available_time(
    budget: float, rounds: int, monkeypatch: pytest.MonkeyPatch, tiny: None
) -> None:
    plan = replace(_TINY, budget_seconds=budget, min_rounds=2, max_rounds=5, pass_bytes=())
    run = GemmRun(GemmBench(device="cpu", dtype=["fp32"]), plan)
    # All products of a round together take a second, and none is repeated.
    once = 1 / len(run.products)
    monkeypatch.setattr(gemm, "warm_up", lambda multiply, device: once)
    monkeypatch.setattr(gemm, "measure_product", lambda *_: once)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    run.measure()
    assert run.rounds == rounds
    result = run.result()
    assert result["rounds"] == rounds
    assert result["complete"] is True


def test_gemm_command_prints_tables_and_writes_one_json_object(
    tiny: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--dtype", "fp32", "--quick", "--out", str(out), "--json"]
    gemm_command.main(arguments, standalone_mode=False)
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((out / "gemm.json").read_text(encoding="utf-8"))
    assert (out / "gemm.png").read_bytes().startswith(b"\x89PNG")
    assert (result["complete"], result["rounds"], result["quick"]) == (True, 2, True)
    assert {row["part"] for row in result["rows"]} == {"size", "model", "alignment", "tile"}
    assert all(len(row["seconds"]) == 2 for row in result["rows"])
    assert len(result["step"]) == 6
    lines = captured.err.splitlines()
    assert any(line.startswith("ceiling") for line in lines)
    assert any(line.startswith("qkv forward 16 x 96 x 32 nn ") for line in lines)
    assert any(line.startswith("vocabulary 65 -> 128 (to 64, 128), work ") for line in lines)
    assert any(line.startswith("257, work 1.004") for line in lines)
    assert [row["bytes"] for row in result["loops"]["passes"]] == [1 << 12, 1 << 23]
    assert any(line.startswith("array read by one thread") for line in lines)
    assert any(line.startswith("4 KiB ") for line in lines)
    assert any(line.startswith("8 MiB ") for line in lines)
    assert any(line.startswith("row blocks of 1 ") for line in lines)
    assert any(line.startswith("concurrent products of 32 x 32") for line in lines)
    assert not any("interrupted" in line for line in lines)


def test_gemm_interrupted_keeps_finished_measurements(
    monkeypatch: pytest.MonkeyPatch, tiny: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    really = gemm.measure_product
    count = 0

    def measured(*arguments: Any) -> float:
        nonlocal count
        count += 1
        if count == 10:
            raise KeyboardInterrupt
        return really(*arguments)

    monkeypatch.setattr(gemm, "measure_product", measured)
    arguments = ["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path), "--json"]
    with pytest.raises((KeyboardInterrupt, click.Abort)):
        gemm_command.main(arguments, standalone_mode=False)
    captured = capfd.readouterr()
    # The only object on stdout is the error, which the entry point prints.
    assert captured.out == ""
    assert "interrupted: some measurements are missing" in captured.err
    result = json.loads((tmp_path / "gemm.json").read_text(encoding="utf-8"))
    assert result["complete"] is False
    names = [row["name"] for row in result["rows"]]
    assert (names[:3], len(names)) == (["8", "32", "qkv forward"], 9)
    assert (result["step"], result["padding"]) == ([], [])
    assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")


def test_gemm_interrupted_before_first_measurement_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm, "warm_up", interrupted)
    with pytest.raises((KeyboardInterrupt, click.Abort)):
        gemm_command.main(
            ["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path)], standalone_mode=False
        )
    assert list(tmp_path.iterdir()) == []
    assert "ceiling" not in capfd.readouterr().err


def test_draw_result_with_several_dtypes_and_waves_returns_png() -> None:
    products = all_products(_SMALL, _TINY, multiprocessors=3)
    seconds = {name: [[1.0, 2.0] for _ in products] for name in DTYPES}
    result = summarize(products, seconds, _SMALL, _TINY)
    result["machine"] = {"name": "GPU", "threads": 1}
    assert draw(result).startswith(b"\x89PNG")
    assert len(result["wave"]) == 4 * 5


def test_draw_passes_caches_blocks_and_waves_use_separate_axes() -> None:
    passes, blocks, waves = Figure().subplots(1, 3)
    rates = {"lowest": 1e9, "highest": 4e9}
    ratios = [{"products": n, "time_ratio": 1.1 * (n - 1), **rates} for n in (2, 3)]
    loops = {
        "caches": {"L1": 32768},
        "passes": [
            {"bytes": 4096 << n, "bytes_per_second": (3 - n) * 1e9, **rates} for n in (0, 1)
        ],
        "blocks": [
            {"cut": "row blocks", "block": 1, "flops_per_second": 1e9, **rates},
            {"cut": "row blocks", "block": 64, "flops_per_second": 4e9, **rates},
            {"cut": "square blocks", "block": 64, "flops_per_second": 3.5e9, **rates},
        ],
        "edge": 64,
        "waves": {"threads": 2, "edge": 32, "rows": ratios},
    }
    draw_loops(loops, passes, blocks, waves)

    def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
        return {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.lines}

    rate, cache = points(passes).values()
    assert rate == [(4096, 3), (8192, 2)]
    assert {x for x, _ in cache} == {32768}
    assert points(blocks) == {"row blocks": [(1, 1), (64, 4)], "square blocks": [(64, 3.5)]}
    assert [text.get_text() for text in passes.texts] == ["L1"]
    assert "per block (64 is the full product)" in blocks.get_xlabel()
    times, steps = points(waves).values()
    assert times == [(2, 1.1), (3, 2.2)]
    assert steps == [(2, 1), (3, 2)]


def test_gemm_help_lists_every_dtype_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    gemm_command.main(["--help"], standalone_mode=False)
    text = "".join(capsys.readouterr().out.split())
    assert f"Numberformats:{','.join(DTYPES)}." in text
    assert f"Modelthatdefinestheshapes:{','.join(MODELS)}." in text


def test_gemm_command_line_starts_without_importing_torch() -> None:
    program = "import sys, firstlight.cli.bench; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_fp8_product_uses_layout_of_tensor_cores() -> None:
    product = GemmProduct("size", "", 32, "32", 16, 32, 48, "nt")
    operands = make_operands([product], FP8, torch.device("cpu"))
    result = make_multiply(product, operands)()
    left, right = operands[0].view(16, 48).float(), operands[1].view(32, 48).float()
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.bfloat16
    assert left.abs().max() > 0
    torch.testing.assert_close(result.float(), left @ right.t(), rtol=0.02, atol=0.02)


def test_passes_cover_whole_array_and_repeat_small_arrays() -> None:
    for size, passes in ((1 << 12, 1 << 10), (1 << 23, 1)):
        data = torch.rand(size // 4, dtype=torch.float32)
        call, count = sum_passes(data)
        assert count == passes
        torch.testing.assert_close(call(), data.sum().expand(passes))


@pytest.mark.parametrize("multiply", [multiply_rows, multiply_squares])
@pytest.mark.parametrize("block", [4, 16])
def test_blockwise_product_equals_plain_product(multiply: Any, block: int) -> None:
    a, b = torch.rand(16, 16), torch.rand(16, 16)
    out = torch.full((16, 16), 7.0)
    multiply(a, b, out, block)
    torch.testing.assert_close(out, a @ b)


def test_loops_run_on_one_thread_up_to_whole_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def rates(*_: object) -> list[float]:
        threads.append(torch.get_num_threads())
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(gemm, "_rates", rates)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measure_loops(replace(_TINY, pass_bytes=(4096,)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}
    assert found["passes"] == [
        {"bytes": 4096, "bytes_per_second": 2.0, "lowest": 1.0, "highest": 3.0}
    ]
    blocks = [(row["cut"], row["block"]) for row in found["blocks"]]
    assert blocks == [
        *(("row blocks", 2**power) for power in range(7)),
        ("square blocks", 32),
        ("square blocks", 64),
    ]


def test_waves_count_all_products_beyond_full_waves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, really = [], torch.mm

    def multiply(*arguments: Any, **options: Any) -> Tensor:
        done.append(torch.get_num_threads())
        return really(*arguments, **options)

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(gemm, "time", SimpleNamespace(perf_counter=lambda: len(done)))
    waves = measure_waves(8, threads=3)
    # With this clock, a product takes one second, and no two products run concurrently.
    assert waves["rows"] == [
        {"products": count, "time_ratio": count, "lowest": count, "highest": count}
        for count in (1, 3, 4, 6, 7, 9, 10, 12, 13)
    ]
    assert set(done) == {1}


def test_cache_sizes_exclude_instruction_caches(tmp_path: Path) -> None:
    caches = [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1024K")]
    (tmp_path / "index9").mkdir()
    (tmp_path / "index9" / "level").write_text("3\n", encoding="ascii")  # The size is missing.
    for number, cache in enumerate(caches):
        (tmp_path / f"index{number}").mkdir()
        for name, text in zip(("level", "type", "size"), cache, strict=True):
            (tmp_path / f"index{number}" / name).write_text(text + "\n", encoding="ascii")
    assert cache_sizes(tmp_path) == {"L1": 32 << 10, "L2": 1 << 20}
    assert cache_sizes(tmp_path / "none") == {}


@pytest.mark.parametrize("name", ["training", "gpu", "planner", "loading"])
def test_bench_script_outside_package_names_successor(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--help"]) == 2
    assert capsys.readouterr().err == (
        f"firstlight: error: bench {name} is not part of the package: run python "
        f"-m benchmarks {name} in a checkout of firstlight\n"
    )
