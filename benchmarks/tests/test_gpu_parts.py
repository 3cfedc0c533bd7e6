"""Parts of `python -m benchmarks gpu`: ladder, planner, generation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.generation import GENERATION
from benchmarks.gpu.generation import measure as measure_generation
from benchmarks.gpu.items import QLORA
from benchmarks.gpu.ladder import LADDER, MEMORY_GOAL, Ladder, Rung, ladders
from benchmarks.gpu.parts import BenchMachine, Findings, Part
from benchmarks.gpu.planner import FIRST, PLANNER, fit_speed, memory_results
from benchmarks.models import PlannerCase, gpu_grid, model_values
from benchmarks.planner_steps import measure as planner_steps
from benchmarks.planner_steps import (
    packed,
    predict_case,
    steps_request,
    unpacked,
)
from firstlight.bench.runner import RowOutcome
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.planner.memory.kernels import cuda_target
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.speed.gpu import read_measured
from firstlight.recipe import parse_resolved_recipe
from firstlight.recipe.conflicts import require_combination

_PACKAGES = {"transformers": "5.17", "accelerate": "1.0", "bitsandbytes": "0.50"}
H200 = BenchMachine(
    "cuda", False, "NVIDIA H200", 143771 * 2**20, True, (9, 0), torch="2.11.0", packages=_PACKAGES
)
DRY = BenchMachine("cpu", True, "a processor", 2**34, True, packages=_PACKAGES)
BARE = dataclasses.replace(H200, packages={})

PARTS = (LADDER, PLANNER, GENERATION)


def _findings(part: Part, machine: BenchMachine, runs: dict[str, Any], folder: Path) -> Findings:
    """Results of some of a part's rows, one run each."""
    outcomes = {part.name: {name: RowOutcome(runs=[run]) for name, run in runs.items()}}
    return Findings(machine, outcomes, {part.name: part.rows(machine)}, folder)


@pytest.mark.parametrize("machine", [H200, DRY, BARE])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_rows_have_names_of_their_own_and_fit_into_a_call(
    part: Part, machine: BenchMachine
) -> None:
    rows = part.rows(machine)
    assert len({row.name for row in rows}) == len(rows) > 0
    assert all(row.seconds < 200 for row in rows)
    # The page can't do without none of these: the ceilings and the comparison come first.
    assert all(row.value >= 2 for row in rows)
    if machine is DRY:
        assert sum(row.seconds for row in rows if not row.skip) < 60
    if machine is BARE:
        assert all(row.skip for row in rows if "8-bit" in row.name)


def test_the_grid_has_forty_configurations_of_memory_and_twenty_of_speed() -> None:
    grid = [case for case in gpu_grid() if not case.needs]
    assert len(grid) >= 40
    assert len({case.name for case in gpu_grid()}) == len(gpu_grid())
    trained = [case for case in grid if case.kind == "training"]
    assert len(trained) >= 20
    assert 8 <= sum(case.fitted for case in trained) <= len(trained) / 2
    rows = PLANNER.rows(H200)
    first = [case["name"] for row in rows if row.value == 2 for case in row.request["cases"]]
    assert first == [case.name for case in gpu_grid()[:FIRST]]
    compiled = {case.name for case in gpu_grid() if case.slow}
    last = [case["name"] for row in rows if row.value == 4 for case in row.request["cases"]]
    assert set(last) == compiled
    asked = {case["name"] for row in rows for case in row.request["cases"]}
    assert asked == {case.name for case in gpu_grid()}


def _gpu_cases() -> list[PlannerCase]:
    rungs = [case for ladder, _ in ladders(H200) for _, case, _ in ladder.cases(H200)]
    return [*gpu_grid(), *rungs]


def test_no_configuration_is_refused_on_a_gpu() -> None:
    hardware = Hardware(torch.device("cuda"), "H200", 2**37, True, (9, 0))
    for case in _gpu_cases():
        recipe = parse_resolved_recipe(case.recipe("cuda"), case.name)
        try:
            require_combination(recipe, hardware)
        except ConfigError as error:
            pytest.fail(f"{case.name}: {error}")


def test_a_3b_is_planned_to_be_fine_tuned_within_the_goal() -> None:
    ladder = next(ladder for ladder, _ in ladders(BARE) if ladder.model == "llama-3b")
    *_, (_, last, missing) = ladder.cases(BARE)
    assert not missing
    found = trace_memory(
        parse_resolved_recipe(last.recipe("cpu")), cuda_target("H200", (9, 0))
    ).peak_bytes
    assert 12 < found / 2**30 < MEMORY_GOAL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_adapters_of_an_8b_in_4_bits_are_planned_to_be_trained_within_7_4_gib() -> None:
    pytest.importorskip("bitsandbytes")
    # By layers: in a model compiled as a whole, the backward pass would bring all activations back
    # to the GPU at once. The bound is what torchtune publishes.
    changes = {
        **QLORA,
        "efficiency.compile_regional": True,
        "efficiency.activation_offload": True,
    }
    case = PlannerCase("llama-8b", 2, 2048, changes)
    request = steps_request(H200, [case], 1.0)
    found = predict_case(request["cases"][0], request["target"])
    assert 6 < found["predicted_bytes"] / 2**30 < 7.4
    assert found["predicted_phase"] == "backward"


def test_a_rung_without_its_package_is_not_part_of_the_next_ones() -> None:
    rungs = (
        Rung("first", {"optimizer.name": "adamw"}),
        Rung("8 bits", {"optimizer.name": "adamw8bit"}, needs=("bitsandbytes",)),
        Rung("chunks", {"efficiency.loss_chunk_tokens": 64}),
    )
    ladder = Ladder("a ladder", "tiny-gpt2", 1, 64, rungs, 1.0)
    for machine, name, missing in ((H200, "adamw8bit", ""), (BARE, "adamw", "bitsandbytes")):
        found = [(case.changes, why) for _, case, why in ladder.cases(machine)]
        assert [missing in why for _, why in found] == [missing == "", True, missing == ""]
        assert found[1][0] == {"optimizer.name": "adamw8bit"}
        assert found[2][0] == {"optimizer.name": name, "efficiency.loss_chunk_tokens": 64}


def test_steps_are_measured_and_predicted_and_what_fails_is_a_result() -> None:
    good = PlannerCase("tiny-gpt2", 2, 64, {"efficiency.loss_chunk_tokens": 32})
    wrong = PlannerCase("tiny-gpt2", 2, 64, {"efficiency.optimizer_in_backward": True})
    cases = [case.request("cpu") for case in (good, wrong)]
    request = {"cases": cases, "device": "cpu", "steps": 2, "seconds": 1.0, "target": None}
    first, second = planner_steps(request)["cases"]
    assert first["reason"] == ""
    assert first["predicted_bytes"] == pytest.approx(first["peak_bytes"], rel=0.01)
    assert first["tokens_a_step"] == 128
    assert 1 <= len(first["step_seconds"]) <= 2
    assert "max_grad_norm" in second["reason"]
    assert "peak_bytes" not in second
    counted = trace_memory(parse_resolved_recipe(good.recipe("cpu"))).operators
    assert unpacked(first["operators"]).operators == counted
    assert packed(counted) == first["operators"]


def _case_result(case: PlannerCase, peak: int, predicted: int, **more: Any) -> dict[str, Any]:
    return {
        "name": case.name,
        "kind": case.kind,
        "reason": "",
        "peak_bytes": peak,
        "reserved_bytes": peak + 2**20,
        "driver_bytes": peak + 600 * 2**20,
        "predicted_bytes": predicted,
        "predicted_reserved_bytes": predicted,
        "predicted_phase": "backward",
        "prediction_seconds": 1.0,
        "host_bytes": 0,
        **more,
    }


def _planner_runs(machine: BenchMachine) -> dict[str, Any]:
    """Peaks as predicted, and steps as slow as a GPU with other shares has them."""
    tiny = PlannerCase("tiny-gpt2", 1, 32).request("cpu")
    operators = predict_case(tiny, None)["operators"]
    runs: dict[str, Any] = {}
    known = {case.name: case for case in gpu_grid()}
    for number, row in enumerate(PLANNER.rows(machine)):
        cases = [
            _case_result(
                known[case["name"]],
                2**30,
                int(1.01 * 2**30),
                step_seconds=[0.02, 0.02 + 0.001 * number],
                global_batch_tokens=1024,
                **({"operators": operators} if number < 2 else {}),
            )
            for case in row.request["cases"]
        ]
        cases[0] |= {"reason": "out of memory: no room"}
        runs[row.name] = {"cases": cases}
    return runs


def test_the_planners_page_has_errors_a_fit_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    found = _findings(PLANNER, H200, _planner_runs(H200), tmp_path)
    results = memory_results(found)
    assert [one["name"] for one in results] == [case.name for case in gpu_grid()]
    assert results[0]["reason"] == "out of memory: no room"
    assert results[1]["error"] == pytest.approx(0.01, abs=1e-6)
    fit = fit_speed(found)
    assert fit is not None
    assert fit.measured is not None
    # What the driver counts beside the allocator.
    assert fit.measured.context_bytes == 599 * 2**20
    names = [case.name for case in gpu_grid() if case.fitted]
    assert not set(fit.held_out) & set(names)
    page = PLANNER.page(found)
    assert "95 of 100 within 1.0% (goal 5%), at most 0.0% too little (goal 2%)" in page.summary
    assert "out of memory: no room" in page.text
    assert page.pictures["gpu-planner.png"].startswith(b"\x89PNG")
    for path in (tmp_path / "measured_gpus.json", tmp_path / "cache/calibration/gpus.json"):
        assert read_measured(path)["H200"].error == fit.measured.error


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_page_lives_with_a_single_row(part: Part, tmp_path: Path) -> None:
    row = part.rows(BARE)[0]
    run: dict[str, Any]
    if part is GENERATION:
        run = {
            "copy_bytes_per_second": 4e12,
            "step_bytes": {"1": 2**28},
            "programs": {
                "firstlight": {
                    "reason": "",
                    "batches": [
                        {
                            "batch_size": 1,
                            "warm_up_seconds": 1.0,
                            "first_token_seconds": [0.01],
                            "tokens_per_second": [300.0],
                        }
                    ],
                },
                "decoder": {"reason": "it broke", "batches": []},
            },
        }
    else:
        run = {
            "cases": [
                {"name": case["name"], "kind": case["kind"], "reason": "out of memory: no room"}
                for case in row.request["cases"]
            ]
        }
    found = _findings(part, BARE, {row.name: run}, tmp_path)
    page = part.page(found)
    assert page.text
    if part is GENERATION:
        assert "it broke" in page.text
        # 300 of 4.8e12 / 2^28 tokens a second.
        assert "2%" in page.text


def test_the_ladder_says_what_each_method_brings(tmp_path: Path) -> None:
    runs = {}
    rows = LADDER.rows(H200)
    for number, row in enumerate(rows[:3]):
        (case,) = row.request["cases"]
        result = {
            "name": case["name"],
            "reason": "",
            "peak_bytes": 2**30,
            "predicted_bytes": 2**30,
            "tokens_a_step": 1000,
            "step_seconds": [0.1 / 2**number],
        }
        runs[row.name] = {"cases": [result]}
    page = LADDER.page(_findings(LADDER, H200, runs, tmp_path))
    assert "| + fused attention (SDPA) | 40,000 | 2.00x | 4.00x | 1.00 | +0.0% |" in page.text
    assert "| + fused AdamW |  |  |  |  |  | not measured yet |" in page.text
    assert "17.6" in page.text
    assert page.summary.startswith("- GPT-2 124M: speed, 3 of 8 rungs: up to 40,000 tokens/s (4.")
    alone = LADDER.page(_findings(LADDER, H200, dict([*runs.items()][:1]), tmp_path))
    assert (alone.summary, alone.pictures) == ("", {}), "one rung brings nothing"


def test_programs_continue_alike_on_the_same_weights() -> None:
    pytest.importorskip("transformers")
    request = dict(GENERATION.rows(DRY)[0].request) | {"batch_sizes": [2], "turns": 1}
    # With a tied head, random weights repeat the last token, whatever the layers hold.
    request["model"] = model_values("tiny-llama") | {"tie_word_embeddings": False}
    found = measure_generation(request)
    texts = {name: one["batches"][0]["token_ids"] for name, one in found["programs"].items()}
    assert len(texts) == 3
    assert len(set(texts["firstlight"])) > 1
    assert texts["firstlight"] == texts["decoder"] == texts["transformers"]
    assert found["step_bytes"]["2"] > 0
