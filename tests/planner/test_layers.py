"""Predictions for deep models from shallow ones, compared with the full trace and real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from firstlight.planner.memory import recipe as recipes
from firstlight.planner.memory.kernels import Operator, Target, cuda_target
from firstlight.planner.memory.prediction import (
    LATE_BACKWARD,
    MIDDLE_BACKWARD,
    MemoryPrediction,
    PhasePeak,
    predict,
)
from firstlight.planner.memory.program import Equivalent
from firstlight.planner.memory.recipe import (
    TraceJob,
    cut,
    in_fewer_layers,
    run_jobs,
    trace_memory,
)
from firstlight.planner.memory.trace import ALIVE, Storage, Trace
from firstlight.planner.speed.gpu import streamed_bytes
from firstlight.recipe import ResolvedRecipe
from planner_recipes import GPT2, LLAMA, predict_evaluation, recipe


def from_few(
    recipe: ResolvedRecipe, trace: Callable[[ResolvedRecipe], MemoryPrediction]
) -> MemoryPrediction:
    """Predict a recipe from recipes with fewer layers."""
    recipes, join = in_fewer_layers(recipe)
    return join([trace(one) for one in recipes])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"efficiency": {"activation_checkpointing": "full"}},
        {"batch": {"gradient_accumulation_steps": 2, "micro_batch_size": 1}},
    ],
)
def test_planned_identical_layers_each_add_same_memory(settings: dict[str, Any]) -> None:
    deep = recipe(model=GPT2 | {"num_hidden_layers": 7}, **settings)
    whole, found = trace_memory(deep), from_few(deep, trace_memory)
    assert found.peak_bytes == whole.peak_bytes
    assert found.parts == whole.parts
    assert found.phase == whole.phase
    flops = [sum(e.count * e.operator.flops for e in p.operators) for p in (whole, found)]
    assert flops[0] == flops[1]
    # Operators on lists of all parameters occur once, for any number of layers.
    listed = [
        sum(e.count * streamed_bytes(e.operator) for e in p.operators if not e.operator.outputs)
        for p in (whole, found)
    ]
    assert listed[0] == pytest.approx(listed[1], rel=1e-4)
    assert listed[0] > 0


def test_deep_model_evaluation_is_planned_from_few_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = recipe(model=GPT2 | {"num_hidden_layers": 7})
    whole = predict_evaluation(deep)
    monkeypatch.setattr("firstlight.planner.memory.recipe._FULLY_TRACED", 3)
    traced: list[int] = []
    full = recipes._evaluate

    def counted(planned: Equivalent, target: Target, samples: bool) -> MemoryPrediction:
        assert planned.recipe.model is not None
        traced.append(planned.recipe.model.num_hidden_layers)
        return full(planned, target, samples)

    monkeypatch.setattr(recipes, "_evaluate", counted)
    found = predict_evaluation(deep)
    assert traced == [3, 2]
    assert (found.peak_bytes, found.parts, found.phase) == (
        whole.peak_bytes,
        whole.parts,
        "evaluation",
    )
    # The memory of the earlier training step has been freed.
    assert found.total_bytes == whole.total_bytes == whole.peak_bytes


def test_large_vocabulary_loss_is_part_of_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The loss's gradient comes early in the backward pass and was counted as a separate pass: with
    # 8 rows, the late peaks of two and three layers were at different positions.
    deep = recipe(
        model=GPT2 | {"num_hidden_layers": 7, "vocab_size": 20_000},
        batch={"micro_batch_size": 8},
        efficiency={"loss_chunk_tokens": 32},
    )
    whole = trace_memory(deep)
    monkeypatch.setattr("firstlight.planner.memory.recipe._FULLY_TRACED", 3)
    found = trace_memory(deep)
    assert (found.peak_bytes, found.phase) == (whole.peak_bytes, whole.phase)


def test_recomputed_layers_do_not_hold_rounded_weights() -> None:
    found = trace_memory(
        recipe(
            model=GPT2 | {"num_hidden_layers": 8},
            batch={"micro_batch_size": 1},
            efficiency={
                "precision": "bf16",
                "activation_checkpointing": "full",
                "loss_chunk_tokens": 32,
            },
        )
    )
    # Half of the weights, if all were rounded.
    parts = found.phases["loss"].parts
    assert parts.get("temporaries", 0) < parts["weights"] / 4


def test_frozen_bf16_base_leaves_nothing_in_fp32() -> None:
    model = LLAMA | {"vocab_size": 8192, "tie_word_embeddings": False}
    efficiency = {"precision": "bf16_params"}
    found = trace_memory(recipe(model=model, lora={"rank": 1}, efficiency=efficiency))
    table = 8192 * 64
    # While the second of embedding and head is rounded, the first has already been rounded.
    assert found.phases["setup"].bytes < (4 + 4 + 2) * table + 2**18


def _made_up(layers: int) -> MemoryPrediction:
    """Return a made-up prediction: 100 + 10 per layer early in the backward pass, 80 + 12 late."""
    early, late = 100 + 10 * layers, 80 + 12 * layers
    phases = {
        "backward": PhasePeak(early, {"activations": early}),
        LATE_BACKWARD: PhasePeak(late, {"gradients": late}),
    }
    return MemoryPrediction(early, "backward", phases["backward"].parts, phases, early, 0, 0, ())


def test_deeper_model_may_peak_at_other_phase() -> None:
    deep = recipe(model=GPT2 | {"num_hidden_layers": 50})

    def shallow(part: Any) -> MemoryPrediction:
        return _made_up(part.model.num_hidden_layers)

    found = from_few(deep, shallow)
    assert (found.peak_bytes, found.phase) == (80 + 12 * 50, "backward")
    assert found.parts == {"gradients": 680}
    assert list(found.phases) == ["backward"]


def test_trace_slice_begins_with_live_storages() -> None:
    trace = Trace(phase_names=["forward", "backward"])
    trace.calls.extend([0, 1, 2, 3, 4, 5])
    trace.phases.extend([0, 0, 1, 1, 0, 1])
    trace.segments, trace.recomputations = [(0, 1), (4, 4)], [(3, 3), (2, 5)]
    trace.storages = [
        Storage(1, 0, "forward", death=1),
        Storage(2, 1, "forward", "weights", death=4),
        Storage(4, 3, "backward", death=3),
        Storage(8, 4, "forward"),
        Storage(16, 5, "backward"),
    ]
    found = cut(trace, 2, 4)
    assert list(found.calls) == [2, 3, 4]
    assert list(found.phases) == [1, 1, 0]
    assert found.segments == [(2, 2)]
    assert found.recomputations == [(1, 1)]
    assert found.storages == [
        Storage(2, 0, "forward", "weights", death=2),
        Storage(4, 1, "backward", death=1),
        Storage(8, 2, "forward"),
    ]
    assert cut(trace, 0, 2).storages[1].death == ALIVE
    assert trace.storages[1].death == 4


def test_predict_jobs_in_pieces_gives_each_its_peak() -> None:
    def job(*layers: int) -> TraceJob:
        return TraceJob(
            tuple((_made_up, count) for count in layers),
            lambda found: replace(_made_up(0), peak_bytes=sum(one.peak_bytes for one in found)),
        )

    found = run_jobs([job(1, 2), job(), job(3)])
    assert [one.peak_bytes for one in found] == [110 + 120, 0, 130]


def test_planned_different_layers_are_all_traced() -> None:
    model = LLAMA | {
        "model_type": "qwen2",
        "num_hidden_layers": 8,
        "sliding_window": 32,
        "max_window_layers": 4,
    }
    asked: list[int] = []

    def trace(part: Any) -> MemoryPrediction:
        asked.append(part.model.num_hidden_layers)
        return replace(_made_up(1))

    from_few(recipe(model=model), trace)
    assert asked == [8]


@pytest.mark.parametrize(
    ("stretches", "peaks"),
    [
        (1, {"backward": 9}),
        (2, {"backward": 5, LATE_BACKWARD: 9}),
        (3, {"backward": 5, MIDDLE_BACKWARD: 9, LATE_BACKWARD: 7}),
    ],
)
def test_trace_backward_pass_is_split_into_stretches(stretches: int, peaks: dict[str, int]) -> None:
    trace = Trace(phase_names=["forward", "backward"])
    trace.operators = [Operator("aten.relu.default", "backward", (), (), 0, 0)]
    # Two steps, each with a forward operator and six backward ones; the peak is at the fourth
    # backward operator of the second step.
    for _ in range(2):
        trace.phases.extend([0, 1, 1, 1, 1, 1, 1])
        trace.calls.extend([0] * 7)
    sizes = {2: 5, 11: 9, 13: 7}
    trace.storages = [Storage(size, at, "backward", death=at) for at, size in sizes.items()]
    found = predict(trace, Target(), len(trace.calls), stretches=stretches)
    assert {name: peak.bytes for name, peak in found.phases.items() if peak.bytes} == peaks


# Recipes for a GPU


def test_gpu_recipe_is_planned_without_gpu() -> None:
    target = cuda_target("A100", (8, 0))
    flash = recipe(efficiency={"attention": "flash", "precision": "bf16"})
    plain = recipe(efficiency={"attention": "math", "precision": "bf16"})
    found = trace_memory(flash, target)
    assert found.reserved_bytes >= found.peak_bytes
    assert found.overhead_bytes == target.context_bytes > 0
    assert found.parts["framework"] == target.library_bytes
    scores = 2 * 2 * 2 * 128 * 128
    assert trace_memory(plain, target).parts["activations"] > found.parts["activations"] + scores


def test_offloaded_activations_are_counted_in_host_memory() -> None:
    target = cuda_target("A100", (8, 0))
    stays = trace_memory(recipe(), target)
    goes = trace_memory(recipe(efficiency={"activation_offload": True}), target)
    assert stays.host_bytes == 0
    assert goes.host_bytes > 0
    assert goes.parts.get("activations", 0) < stays.parts["activations"] / 4
    assert goes.peak_bytes < stays.peak_bytes


def test_document_masking_with_flex_keeps_no_score_sized_mask() -> None:
    target = cuda_target("A100", (8, 0))
    documents = {"document_masking": True}
    flex = trace_memory(recipe(data=documents, efficiency={"attention": "flex"}), target)
    masked = trace_memory(recipe(data=documents, efficiency={"attention": "efficient"}), target)
    assert flex.peak_bytes < masked.peak_bytes


def test_trace_unsupported_gpu_features_are_noted() -> None:
    target = cuda_target("H100", (9, 0))
    fp8 = recipe(model=LLAMA, efficiency={"precision": "fp8"})
    assert any("fp8" in note for note in trace_memory(fp8, target).notes)
