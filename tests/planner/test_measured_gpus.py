"""Plans for GPU models that have been measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plain_recipe import plain_recipe

from benchmarks.planner_constants import save_measured
from firstlight.cli.plan import plan_command
from firstlight.hardware.gpus import find_gpu
from firstlight.planner.memory.kernels import (
    cuda_target,
)
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.plan.machine import find_machine
from firstlight.planner.speed.gpu import (
    DEFAULT_SHARES,
    MeasuredGpu,
    assumed_shares,
    measured_gpu,
    read_measured,
    shares_for,
)
from firstlight.planner.speed.throughput import (
    predict_speed,
    workload_of,
)
from planner_recipes import CONSTANTS, H200

MEASURED = MeasuredGpu(CONSTANTS, 0.08, 11, 20, "2.11.0", 640 * 2**20)

#: Layers, hidden_size, heads and sequence length of GPT-2 models by their number of parameters.
_SIZES = {
    "1M": (4, 128, 4, 256),
    "124M": (12, 768, 12, 1024),
    "1.5B": (48, 1600, 25, 1024),
}

_RECIPE = """
data: {dir: /nowhere, seq_len: 64}
model: {model_type: gpt2, vocab_size: 500, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 2}
batch: {micro_batch_size: 2}
efficiency: {compile: false}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with this machine's measured GPUs, in a cache folder of this test."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path))
    return tmp_path / "calibration" / "gpus.json"


def _plan(folder: Path, gpu: str) -> tuple[str, dict[str, Any]]:
    path = folder / "recipe.yaml"
    path.write_text(_RECIPE)
    found = CliRunner().invoke(plan_command, [str(path), "--gpu", gpu, "--no-search", "--json"])
    assert found.exit_code == 0, found.output
    return found.stderr, json.loads(found.stdout)


def test_plan_reports_whether_gpu_kind_was_measured(cache: Path, tmp_path: Path) -> None:
    said, before = _plan(tmp_path, "H200")
    assumed = "derived from the data sheet and measurements of an H100, not measured"
    assert f"speed of H200: {assumed}" in said
    assert before["as_it_stands"]["speed"]["source"] == assumed
    # An H200 uses the same kernels as an H100.
    h100 = measured_gpu(find_gpu("H100"))
    assert h100 is not None
    assert before["as_it_stands"]["training"]["overhead_bytes"] == h100.context_bytes
    save_measured(cache, "H200", MEASURED)
    said, after = _plan(tmp_path, "H200")
    assert (
        "speed of H200: measured on this GPU type: 11 configurations fitted, 20 others within 8% "
        "(torch 2.11.0)" in said
    )
    training = after["as_it_stands"]["training"]
    assert training["overhead_bytes"] == 640 * 2**20
    step = after["as_it_stands"]["speed"]["step_seconds"]
    assert step["high"] / step["expected"] == pytest.approx(1.08, abs=0.01)
    said, other = _plan(tmp_path, "A100 40GB")
    assert f"speed of A100 40GB: {assumed}" in said
    assert other["as_it_stands"]["training"]["overhead_bytes"] == 500 * 2**20


def test_measured_gpus_file_holds_several_kinds(cache: Path) -> None:
    save_measured(cache, "H200", MEASURED)
    save_measured(cache, "RTX 4090", MeasuredGpu({**CONSTANTS, "products": 0.6}, 0.0, 1, 1, "2.13"))
    assert read_measured(cache).keys() == {"H200", "RTX 4090"}
    assert measured_gpu(H200) == MEASURED
    assert shares_for(find_gpu("RTX 4090")).products.expected == 0.6
    assert find_machine("H200").target.context_bytes == 640 * 2**20


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 99, "gpus": {}}',
        '{"format": 1, "gpus": {"H200": {}}}',
        '{"format": 1, "gpus": {"H200": {"constants": {"products": 7}, "error": 0.1}}}',
    ],
)
def test_measured_gpus_damaged_file_is_ignored(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert read_measured(cache) == {}
    assert shares_for(H200) == assumed_shares(H200)
    save_measured(cache, "H200", MEASURED)
    assert measured_gpu(H200) == MEASURED


@pytest.mark.parametrize(
    ("name", "reaches"), [("H200", 0.81), ("A100 80GB", 0.85), ("T4", 24 / 65)]
)
def test_unmeasured_gpu_shares_are_scaled_from_h100(name: str, reaches: float) -> None:
    gpu = find_gpu(name)
    h100, found = shares_for(find_gpu("H100")), assumed_shares(gpu)
    expected = h100.products.expected * reaches / 0.81
    assert found.products.expected == pytest.approx(expected)
    assert found.launch_seconds.expected == pytest.approx(h100.launch_seconds.expected)
    assert found.compiled_launch_seconds.expected == pytest.approx(
        h100.compiled_launch_seconds.expected
    )
    assert found.bandwidth.expected == pytest.approx(h100.bandwidth.expected)
    same = h100 if name == "H200" else DEFAULT_SHARES
    assert found.attention.expected == pytest.approx(same.attention.expected)
    assert found.attention_backward.expected == pytest.approx(same.attention_backward.expected)
    # The relative width equals that without a measurement.
    for one in ("products", "launch_seconds"):
        default, scaled = getattr(DEFAULT_SHARES, one), getattr(found, one)
        assert scaled.slow / scaled.fast == pytest.approx(default.slow / default.fast)


#: Pairs of which the first GPU is at least as fast as the second in 16 bits, by their data sheets:
#: TFLOP/s with accumulation in fp32, GB/s, multiprocessors x clock (GHz).
#:
#: B200 2250, 8000, 148 x 1.9; H200 989, 4800, 132 x 1.8; H100 989, 3350, 132 x 1.8; H100 PCIe 756,
#: 2000, 114 x 1.8; A100 80GB 312, 2039, and 40GB 312, 1555, both 108 x 1.4; L40S 362, 864, 142 x
#: 2.5; RTX 5090 210, 1792, 170 x 2.4; RTX 4090 165, 1008, 128 x 2.5; V100 125, 900, 80 x 1.5;
#: RTX 3090 71, 936, 82 x 1.7; RTX 4070 58, 504, 46 x 2.5; RTX 3060 26, 360, 28 x 1.8; T4 65, 320,
#: 40 x 1.6, but 24 TFLOP/s for longer than an instant.
#:
#: The L40S is not compared with an A100, nor an RTX 4070 with an RTX 3090: each has the higher
#: value of one figure.
_ORDER = (
    *(("B200", "H200"), ("H200", "H100"), ("H100", "H100 PCIe"), ("H100 PCIe", "A100 40GB")),
    *(("H100", "A100 80GB"), ("A100 80GB", "A100 40GB"), ("A100 40GB", "V100 16GB")),
    *(("H100", "L40S"), ("H100", "RTX 5090"), ("A100 40GB", "RTX 4090")),
    *(("RTX 5090", "RTX 4090"), ("RTX 4090", "RTX 3090"), ("RTX 4090", "RTX 4070")),
    *(("RTX 3090", "RTX 3060 12GB"), ("RTX 4070", "RTX 3060 12GB"), ("V100 16GB", "T4")),
)


@pytest.mark.parametrize(("size", "rows"), [("1M", 1), ("124M", 16), ("1.5B", 8)])
def test_predicted_gpu_order_follows_data_sheets(size: str, rows: int) -> None:
    layers, width, heads, seq_len = _SIZES[size]
    recipe = plain_recipe(
        {
            "data": {"dir": "-", "seq_len": seq_len},
            "model": {
                "model_type": "gpt2",
                "vocab_size": 2000 if size == "1M" else 50304,
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
            },
            "batch": {"micro_batch_size": rows},
            "efficiency": {"precision": "bf16", "compile": False},
        }
    )
    # V100 and T4 do not support bf16; fp16 has the same products and bytes.
    counted = trace_memory(recipe, cuda_target("any", (8, 0)))
    for compiled in (False, True):
        work = replace(workload_of(recipe), compiled=compiled)
        rate = {
            name: predict_speed(
                counted, work, replace(find_gpu(name), bf16=find_gpu(name).fp16)
            ).tokens_per_second.expected
            for name in {name for pair in _ORDER for name in pair}
        }
        for faster, slower in _ORDER:
            # If kernel launches by the host take all the time, all are equal.
            assert rate[faster] >= rate[slower] * (1 - 1e-9), (faster, slower, compiled, rate)
        # Almost equal: 24 and 26 TFLOP/s, 320 and 360 GB/s.
        assert 0.7 < rate["T4"] / rate["RTX 3060 12GB"] < 1.1, rate


def test_measured_gpus_constants_out_of_range_are_ignored(cache: Path) -> None:
    save_measured(cache, "H200", MeasuredGpu({**CONSTANTS, "products": 1.5}, 0.1, 1, 1, "2.13"))
    assert read_measured(cache) == {}
