"""Estimates of deep compiled models from shallow models and graphs, and compilation without
kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.memory import measured_memory
from firstlight.planner.memory import recipe as recipes
from firstlight.planner.memory.kernels import cuda_target, this_cpu
from firstlight.planner.memory.prediction import (
    LATE_BACKWARD,
    MIDDLE_BACKWARD,
    MemoryPrediction,
    PhasePeak,
)
from firstlight.planner.memory.program import (
    equivalent,
    fake_tensors,
    graphs_kept,
    stubbed_compiler,
)
from firstlight.planner.memory.recipe import (
    few_compiled_layers,
    from_graphs,
    merged,
    padded_logits_bytes,
    trace_memory,
    with_temporary,
)
from firstlight.planner.memory.trace import Tracer
from planner_recipes import GPT2, LLAMA, real_steps, recipe


@pytest.mark.parametrize(
    ("efficiency", "few"),
    [
        ({}, 1),
        ({"activation_checkpointing": "selective"}, 2),
        ({"activation_checkpointing": "budget"}, 2),
        ({"activation_checkpointing": "full"}, 3),
        ({"attention": "blockwise"}, 2),
        ({"attention": "blockwise", "activation_checkpointing": "full"}, 3),
    ],
)
def test_compiled_plan_is_extrapolated_from_minimum_number_of_layers(
    efficiency: dict[str, Any], few: int
) -> None:
    def depths(layers: int) -> tuple[int, int, int] | None:
        model = GPT2 | {"num_hidden_layers": layers}
        found = few_compiled_layers(recipe(model=model, efficiency={"compile": True} | efficiency))
        if found is None:
            return None
        shallow, more, steps = found
        assert shallow.model is not None
        assert more.model is not None
        return shallow.model.num_hidden_layers, more.model.num_hidden_layers, steps

    assert depths(12) == (few, few + 1, 12 - few)
    # For a model this shallow, nothing would be saved.
    assert depths(few + 1) is None


def _compiled_made_up(layers: int, *, fused: bool, each: int = 15) -> MemoryPrediction:
    """Return a made-up prediction: each layer saves 10 bytes and has gradients of `each`. Without
    fusion, 400 more bytes exist temporarily.
    """
    extra = 0 if fused else 400
    saved, gradients = 10 * layers, each * layers
    # The middle is at the layer with either all activations or all gradients of the others.
    middle = 82 + max(saved, gradients)
    phases = {
        "setup": PhasePeak(5 * layers, {"weights": 5 * layers}),
        "forward": PhasePeak(70 + extra + saved, {"activations": saved, "temporaries": 70 + extra}),
        "backward": PhasePeak(
            100 + extra + saved, {"activations": saved, "temporaries": 100 + extra}
        ),
        MIDDLE_BACKWARD: PhasePeak(middle + extra, {"temporaries": middle + extra}),
        # With few layers, the peak may be at any position.
        LATE_BACKWARD: PhasePeak(80 + 2 * extra + saved, {"temporaries": 80 + 2 * extra + saved}),
        "clipping": PhasePeak(20 + gradients, {"gradients": gradients, "temporaries": 20}),
        "optimizer": PhasePeak(70 + gradients + layers, {"gradients": 70 + gradients + layers}),
    }
    phase = max(phases, key=lambda name: phases[name].bytes)
    peak = phases[phase]
    return MemoryPrediction(peak.bytes, phase, peak.parts, phases, peak.bytes + 7, 0, layers, ())


def _with(found: MemoryPrediction, phase: str, **parts: int) -> MemoryPrediction:
    """Replace parts of a phase."""
    return replace(found, phases=found.phases | {phase: PhasePeak(sum(parts.values()), parts)})


@pytest.mark.parametrize(
    ("depth", "phase", "parts"),
    [
        (20, "optimizer", {"gradients": 70 + 16 * 20}),
        (2, "backward", {"activations": 20, "temporaries": 100}),
    ],
)
def test_compiled_plan_line_has_slope_of_graphs(
    depth: int, phase: str, parts: dict[str, int]
) -> None:
    # Of the shallow model's graphs, only one step, the third, is traced.
    graphs = _with(_compiled_made_up(1, fused=False), "optimizer", gradients=1)
    del graphs.phases["setup"]
    found = from_graphs(
        _compiled_made_up(1, fused=True), graphs, _compiled_made_up(2, fused=False), depth - 1
    )
    whole = _compiled_made_up(depth, fused=True)
    assert (found.phase, found.parts) == (phase, parts)
    assert found.peak_bytes == whole.peak_bytes
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.host_bytes == depth
    assert not {MIDDLE_BACKWARD, LATE_BACKWARD} & {*found.phases}
    for name in ("setup", "forward", "clipping", "optimizer"):
        assert found.phases[name] == whole.phases[name]
    assert found.phases["backward"].bytes == max(100 + 10 * depth, 82 + 15 * depth)


@pytest.mark.parametrize(
    ("at_one", "at_twenty"),
    [
        # Early in the backward pass all activations are in memory, late in it all gradients, and in
        # the middle the larger of the two.
        ({}, 110 + 10 * 19),
        ({"backward": 10}, 92 + 10 * 19),
        ({"backward": 10, MIDDLE_BACKWARD: 10, LATE_BACKWARD: 500}, 500 + 4 * 19),
    ],
)
def test_compiled_plan_each_backward_stretch_has_own_slope(
    at_one: dict[str, int], at_twenty: int
) -> None:
    fused = _compiled_made_up(1, fused=True, each=4)
    for name, size in at_one.items():
        fused.phases[name] = PhasePeak(size, {"temporaries": size})
    graphs, more = (_compiled_made_up(n, fused=False, each=4) for n in (1, 2))
    assert from_graphs(fused, graphs, more, 19).phases["backward"].bytes == at_twenty


def test_compiled_plan_peak_inside_a_layer_is_found_in_two_layer_graph() -> None:
    fused, graphs, more = (
        _compiled_made_up(n, fused=fused, each=4)
        for n, fused in ((1, True), (1, False), (2, False))
    )
    # 50 bytes more than in the middle of a layer, and 90 more than early in it.
    graphs.phases[MIDDLE_BACKWARD] = PhasePeak(550, {"temporaries": 550})
    more.phases["backward"] = PhasePeak(600, {"temporaries": 600})
    assert from_graphs(fused, graphs, more, 19).phases["backward"].bytes == 110 + 50 * 19


@pytest.mark.parametrize(("weights", "more"), [(15, 15), (8, 8), (100, 15)])
def test_compiled_plan_accumulated_gradients_are_added_to_new_ones(weights: int, more: int) -> None:
    one, graphs, two = (
        _with(_compiled_made_up(n, fused=fused), "optimizer", weights=weights * n, gradients=15 * n)
        for n, fused in ((1, True), (1, False), (2, False))
    )
    one.phases[LATE_BACKWARD] = PhasePeak(2000, {"gradients": 2000})
    # Frozen weights do not have gradients; low-precision weights have low-precision gradients.
    plain = from_graphs(one, graphs, two, 10).phases["backward"].bytes
    accumulated = from_graphs(one, graphs, two, 10, accumulates=True).phases["backward"].bytes
    assert accumulated == plain + more * 10


def test_compiled_plan_optimizer_in_backward_holds_gradients_before_update() -> None:
    one, graphs, two = (
        _with(_compiled_made_up(n, fused=fused), "clipping", weights=2 * n)
        for n, fused in ((1, True), (1, False), (2, False))
    )
    one.phases[LATE_BACKWARD] = PhasePeak(2000, {"gradients": 2000})
    assert from_graphs(one, graphs, two, 10).phases["backward"].bytes == 2000 + 16 * 10


@pytest.mark.parametrize(
    ("first", "each", "found"),
    [
        (
            {"activations": 900, "gradients": 3},
            {"activations": 10, "gradients": -2},
            {"activations": 935},
        ),
        # The missing bytes may exceed the largest part.
        (
            {"activations": 9, "gradients": 8, "temporaries": 1},
            {"activations": 0, "gradients": 0, "temporaries": -3},
            {"gradients": 6},
        ),
    ],
)
def test_compiled_plan_line_parts_are_non_negative_and_sum_to_bytes(
    first: dict[str, int], each: dict[str, int], found: dict[str, int]
) -> None:
    fused = _with(_compiled_made_up(1, fused=True), "forward", **first)
    parts = dict.fromkeys(first, 100)
    graphs = _with(_compiled_made_up(1, fused=False), "forward", **parts)
    parts = {name: 100 + each[name] for name in first}
    more = _with(_compiled_made_up(2, fused=False), "forward", **parts)
    peak = from_graphs(fused, graphs, more, 4).phases["forward"]
    assert peak.bytes == sum(first.values()) + 4 * sum(each.values())
    assert peak.parts == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"efficiency": {"precision": "bf16"}},
        {"efficiency": {"precision": "bf16", "activation_checkpointing": "full"}},
    ],
)
def test_compiled_plan_matches_measured_steps(settings: dict[str, Any]) -> None:
    efficiency = {"compile": True} | settings.get("efficiency", {})
    deep = recipe(
        model=GPT2 | {"num_hidden_layers": 5, "hidden_size": 128},
        efficiency=efficiency,
    )
    predicted = trace_memory(deep).peak_bytes
    with measured_memory() as measured:
        real_steps(deep)
    assert measured.peak_bytes * 0.98 <= predicted <= measured.peak_bytes * 1.05


@pytest.mark.filterwarnings("ignore")
def test_compiled_plan_gpu_attention_causes_no_graph_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_with = torch.compile

    def with_dynamo_alone(function: Any, **options: Any) -> Any:
        return compile_with(function, **options | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", with_dynamo_alone)
    target = cuda_target("H100", (9, 0))
    efficiency = {"compile": True, "precision": "bf16", "attention": "sdpa"}
    planned = equivalent(recipe(model=LLAMA, efficiency=efficiency), target)
    torch._dynamo.reset()
    counters.clear()
    with recipes._traced(planned, target) as (tracer, program, batch), tracer.paused():
        recipes._compile(program, batch)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("efficiency", "copies"),
    [
        ({"precision": "bf16"}, 1),
        ({"precision": "bf16", "vocab_multiple": 8}, 0),
        ({"precision": "bf16", "loss_chunk_tokens": 64}, 0),
        ({"precision": "fp32"}, 0),
    ],
)
def test_compiled_plan_gpu_copies_unaligned_logit_gradients(
    efficiency: dict[str, Any], copies: int
) -> None:
    planned = recipe(model=GPT2 | {"vocab_size": 1001}, efficiency=efficiency | {"compile": True})
    tokens = planned.batch.micro_batch_size * planned.data.seq_len
    found = padded_logits_bytes(planned, cuda_target("H100", (9, 0)))
    assert found == copies * 2 * 1008 * tokens
    assert padded_logits_bytes(planned, this_cpu()) == 0
    before = merged(_compiled_made_up(2, fused=True))
    after = with_temporary(before, "backward", found)
    assert after.phases["backward"].bytes == before.phases["backward"].bytes + found
    assert after.reserved_bytes - after.peak_bytes == before.reserved_bytes - before.peak_bytes
    assert {**after.phases, "backward": None} == {**before.phases, "backward": None}


@pytest.mark.parametrize("layers", [1, 5])
def test_compiled_plan_includes_copy_at_any_depth(layers: int) -> None:
    planned = recipe(
        model=GPT2 | {"vocab_size": 1001, "num_hidden_layers": layers},
        efficiency={"precision": "bf16", "compile": True},
    )
    fused, graphs = (_compiled_made_up(1, fused=way) for way in (True, False))
    traced: list[Any] = [fused]
    if layers > 1:
        traced = [(fused, graphs), _compiled_made_up(2, fused=False)]
    with_copy, without = (
        recipes.training_job(planned, target).join(traced).phases["backward"].bytes
        for target in (cuda_target("H100", (9, 0)), this_cpu())
    )
    tokens = planned.batch.micro_batch_size * planned.data.seq_len
    assert with_copy - without == 2 * 1008 * tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("sections", "off_by"),
    [
        ({}, 0.0),
        ({"efficiency": {"activation_checkpointing": "selective"}}, 0.0),
        ({"efficiency": {"activation_checkpointing": "full"}}, 0.005),
        ({"efficiency": {"activation_checkpointing": "full", "loss_chunk_tokens": 64}}, 0.005),
        ({"lora": {"rank": 4}}, 0.005),
        # Few tokens: the gradients are larger than the activations.
        (
            {
                "data": {"seq_len": 32},
                "batch": {"gradient_accumulation_steps": 2, "micro_batch_size": 1},
                "efficiency": {"activation_checkpointing": "full"},
            },
            0.0,
        ),
    ],
)
def test_compiled_plan_from_few_layers_equals_plan_from_all(
    sections: dict[str, Any], off_by: float
) -> None:
    efficiency = {"compile": True, "precision": "bf16"} | sections.get("efficiency", {})
    deep = recipe(model=GPT2 | {"num_hidden_layers": 7}, **sections | {"efficiency": efficiency})
    whole = merged(recipes._train(equivalent(deep, this_cpu()), this_cpu()))
    found = trace_memory(deep)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=off_by, abs=0)
    assert found.phase == whole.phase
    for name in ("forward", "backward"):
        assert found.phases[name].bytes == pytest.approx(whole.phases[name].bytes, rel=0.01)
    for name in ("setup", "clipping", "optimizer"):
        assert found.phases[name] == whole.phases[name]


@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_run_on_request() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        # Inductor fuses product and sum into one operator in its input graph.
        return (x @ y + y[0]).relu().exp()

    def steps(fuses: bool, *chosen: bool) -> list[list[str]]:
        found = []
        with stubbed_compiler(), graphs_kept(fuses=fuses) as graphs, fake_tensors():
            compiled = torch.compile(function)
            x, y = torch.empty(8, 8, requires_grad=True), torch.empty(8, 8)
            loss: Any = compiled(x, y).sum()
            loss.backward()
            for graphs.runs in chosen:
                tracer = Tracer()
                with tracer, tracer.forward_pass():
                    out = compiled(x, y)
                found.append([tracer.trace.operators[i].name for i in tracer.trace.calls])
                # The backward pass runs, too.
                loss = out.sum()
                loss.backward()
        return found

    names = ("mm.default", "select.int", "add.Tensor", "relu.default")
    operators = [f"aten.{name}" for name in names]
    fused, plain = steps(True, False, True)
    assert not {*operators} & {*fused}
    assert plain[:4] == operators
    assert steps(False, True) == [plain]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_without_kernels_is_discarded() -> None:
    def double(x: Tensor) -> Tensor:
        return torch.sin(x) * 2

    with stubbed_compiler(), fake_tensors():
        assert torch.compile(double)(torch.empty(8)).shape == (8,)
    x = torch.linspace(0, 1, 8)
    assert torch.allclose(torch.compile(double)(x), torch.sin(x) * 2)
