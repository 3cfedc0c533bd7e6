"""Configurations measured by `benchmarks gpu`, and the fit of the planner's constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import items, planner, quick
from benchmarks.gpu.items import QLORA, Bench
from benchmarks.gpu.published import MEMORY_CASES, SPEED_CASES
from benchmarks.models import PlannerCase, dry_grid, gpu_grid
from benchmarks.planner_memory import predict_memory
from benchmarks.planner_steps import measure as planner_steps
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.hardware.gpus import find_gpu
from firstlight.planner.memory.kernels import cuda_target
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.speed.gpu import measured_gpu, read_measured
from firstlight.recipe import parse_resolved_recipe
from firstlight.recipe.conflicts import require_combination

#: Goal for the peak memory in GiB of the last rung of full fine-tuning: torchtune's published
#: figure.
_MEMORY_GOAL = 17.6


def test_planner_grid_has_forty_memory_and_twenty_speed_configurations() -> None:
    grid = [case for case in gpu_grid() if not case.needs]
    assert len(grid) >= 40
    assert len({case.name for case in gpu_grid()}) == len(gpu_grid())
    trained = [case for case in grid if case.kind == "training"]
    assert len(trained) >= 20
    assert 8 <= sum(case.fitted for case in trained) <= len(trained) / 2


def test_gpu_results_refer_to_existing_items_and_configurations() -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu-h100"
    lines = quick.known_lines(folder)
    assert {line["item"] for line in lines} <= {item.name for item in quick.ITEMS}
    measured = {
        row["row"] for line in lines if line["item"].startswith("L-") for row in line["rows"]
    }
    assert len(measured) == 20
    assert measured <= {case.name for case in gpu_grid()}


def test_planner_grid_assigns_each_configuration_to_one_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = Hardware(torch.device("cuda"), "H200", 2**37, True, (9, 0))

    def measured(request: dict[str, Any]) -> dict[str, Any]:
        return {"cases": [{**case, "reason": "not measured"} for case in request["cases"]]}

    monkeypatch.setattr(items, "measure_steps", measured)
    names = [
        row["row"]
        for item in quick.ITEMS
        if item.name.startswith("L-")
        for row in item.rows(Bench(hardware))
    ]
    assert sorted(names) == sorted(case.name for case in gpu_grid())


@pytest.mark.parametrize("cases", [gpu_grid(), SPEED_CASES, MEMORY_CASES])
def test_planner_grid_configurations_are_allowed_on_gpu(cases: tuple[PlannerCase, ...]) -> None:
    hardware = Hardware(torch.device("cuda"), "H200", 2**37, True, (9, 0))
    for case in cases:
        recipe = parse_resolved_recipe(case.recipe("cuda"), case.name)
        try:
            require_combination(recipe, hardware)
        except ConfigError as error:
            pytest.fail(f"{case.name}: {error}")


def _planned_gib(case: PlannerCase) -> float:
    target = cuda_target("H200", (9, 0))
    found = trace_memory(parse_resolved_recipe(case.recipe("cpu")), target)
    return found.peak_bytes / 2**30


def test_planner_full_fine_tuning_of_3b_is_within_memory_goal() -> None:
    assert 12 < _planned_gib(MEMORY_CASES[-1]) < _MEMORY_GOAL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_planner_4_bit_adapters_of_8b_are_within_7_4_gib() -> None:
    pytest.importorskip("bitsandbytes")
    # Regional compilation: in a fully compiled model, the backward pass would bring all activations
    # back to the GPU at once. The bound is torchtune's published figure.
    changes = {
        **QLORA,
        "efficiency.compile_regional": True,
        "efficiency.activation_offload": True,
    }
    assert 6 < _planned_gib(PlannerCase("llama-8b", 2, 2048, changes)) < 7.4


def test_gpu_item_measures_steps_and_records_refused_recipe() -> None:
    good = PlannerCase("tiny-gpt2", 2, 64, {"efficiency.loss_chunk_tokens": 32})
    wrong = PlannerCase("tiny-gpt2", 2, 64, {"efficiency.optimizer_in_backward": True})
    cases = [case.request("cpu") for case in (good, wrong)]
    request = {"cases": cases, "device": "cpu", "steps": 2, "seconds": 1.0}
    first, second = planner_steps(request)["cases"]
    assert first["reason"] == ""
    predicted = predict_memory(parse_resolved_recipe(good.recipe("cpu")), "training", None)
    assert predicted.peak_bytes == pytest.approx(first["peak_bytes"], rel=0.01)
    assert first["tokens_a_step"] == 128
    assert 1 <= len(first["step_seconds"]) <= 2
    assert "max_grad_norm" in second["reason"]
    assert "peak_bytes" not in second


def _lines(device: str, *, dry: bool) -> list[dict[str, Any]]:
    """Return lines of two devices; the steps of `device` take 20, 21, 22 and 23 ms."""
    compared = planner.compare(
        [{"item": "L-1", "dry": dry, "rows": [_row(case) for case in dry_grid()[:4]]}],
        find_gpu("H100"),
    )
    rows = [
        {**_row(one.case), "allocated_mib": one.predicted_mib / 1.01, "ms": 20.0 + number}
        for number, one in enumerate(compared)
    ]
    shared = {"date": "2026-11-28", "torch": "2.13", "dry": dry}
    beside = {"row": "expandable_segments:True", "context_mib": 599}
    return [
        {**shared, "item": "L-1", "device": "another", "rows": [_row(dry_grid()[4])]},
        {**shared, "item": "J", "device": device, "rows": [beside]},
        {**shared, "item": "L-1", "device": device, "rows": [*rows, {"row": "x", "error": "y"}]},
    ]


def _row(case: PlannerCase) -> dict[str, Any]:
    return {"row": case.name, "allocated_mib": 1.0}


def test_gpu_fit_writes_constants_and_shows_memory_and_speed_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    for line in _lines("a CPU", dry=True):
        quick.append_line(tmp_path / "lines.jsonl", line)
    assert main(["gpu", "--fit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Memory of 4 configurations: 95 of 100 within 1.0%, at most 0.0% too little." in said
    assert "2 configurations fitted, 2 others within" in said
    assert "| tiny-gpt2, 1 x 64, gradient_accumulation_steps 2 | 0.0230 |" in said
    (measured,) = read_measured(tmp_path / "measured_gpus.json").values()
    assert (measured.fitted, measured.held_out, measured.torch) == (2, 2, "2.13")
    assert measured.context_bytes == 599 * 2**20
    assert not (tmp_path / "cache" / "calibration").exists(), "a dry run is for no planner"


def test_gpu_fit_without_measured_contexts_keeps_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    known = measured_gpu(find_gpu("H100"))
    assert known is not None
    lines = [line for line in _lines("a CPU", dry=True) if line["item"] != "J"]
    planner.fit(lines, tmp_path)
    (measured,) = read_measured(tmp_path / "measured_gpus.json").values()
    assert measured.context_bytes == known.context_bytes


def test_gpu_fit_without_measured_configurations_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"item": "A", "dry": True, "device": "a CPU", "rows": []}
    quick.append_line(tmp_path / "lines.jsonl", line)
    assert main(["gpu", "--fit", str(tmp_path)]) == 1
    assert "lacks configurations of the planner: measure --items L first" in capsys.readouterr().err
