"""`firstlight plan`: the target machine, open keys of a recipe, the search, and the output."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import slow_but
from firstlight.cli.main import main
from firstlight.console import parse_count, parse_time
from firstlight.data.corpus import TokenDataset
from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware
from firstlight.lora.files import ADAPTER_WEIGHTS_NAME, adapter_files
from firstlight.lora.layers import LoraConfig, adapter_tensors, add_lora
from firstlight.methods.config import EfficiencyConfig
from firstlight.methods.precision import packet_note
from firstlight.models import LlamaConfig, empty_model
from firstlight.models.accounting import matrix_shapes
from firstlight.optim.schedule import Schedule
from firstlight.planner.advise import defaults
from firstlight.planner.advise.defaults import new_model_rates
from firstlight.planner.memory.prediction import MemoryPrediction, PhasePeak
from firstlight.planner.memory.ranks import engine_of
from firstlight.planner.plan import estimate as estimating
from firstlight.planner.plan import plan as planning
from firstlight.planner.plan.estimate import (
    Candidate,
    Estimate,
    Estimator,
    _fallbacks,
    best_estimate,
    methods,
    micro_batches,
    nearest_estimates,
    open_micro_batch,
    reasons_for,
)
from firstlight.planner.plan.machine import (
    find_machine,
    parse_bytes,
    planned_run,
    resolve_for,
    with_changes,
)
from firstlight.planner.plan.plan import Budget, Plan, alignment_warnings, make_plan
from firstlight.planner.plan.text import (
    blocks,
    changed_options,
    count_text,
    hours,
    memory_table,
    method_rows,
)
from firstlight.recipe import Recipe, ResolvedRecipe, load_recipe, parse_recipe
from firstlight.recipe.conflicts import require_combination
from firstlight.weights.loading import grow_vocabulary, weights_to_save
from firstlight.weights.stored import save_tensors, save_weights
from planner_recipes import FixedEstimator, speed_of_h100

_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def recipe(**sections: Any) -> Recipe:
    return parse_recipe({"data": {"dir": "/nowhere"}, "model": _MODEL, **sections})


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the speed of new models, which takes seconds to predict, by that of an H100."""
    monkeypatch.setattr(planning, "new_model_speed", speed_of_h100)


@pytest.mark.parametrize(
    "text, size",
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("512 mib", 2**29), ("1.5TiB", 3 * 2**39)],
)
def test_parse_bytes_accepts_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "24 apples", "GiB", "-3GiB", "1e3"])
def test_memory_size_invalid_text_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a memory size: use, for example, 24GiB"):
        parse_bytes(text)


def test_parse_time_and_counts_accept_units() -> None:
    assert [parse_time(t) for t in ("24h", "90min", "3d", "1.5 h")] == [86400, 5400, 259200, 5400]
    assert [parse_time(t) for t in ("1h30m", "1 H 30 min", "2h15m30s")] == [5400, 5400, 8130]
    assert [parse_count(t) for t in ("10B", "300M", "2e9", "12")] == [1e10, 3e8, 2e9, 12]
    for wrong in ("24", "h", "1.2.3h", "3 years", "1h30", "30m1h", "1h1h", ""):
        with pytest.raises(ConfigError, match="is not a duration"):
            parse_time(wrong)
    for wrong in ("ten", "1e400"):
        with pytest.raises(ConfigError, match="is not a number of tokens"):
            parse_count(wrong)


def test_find_machine_accepts_gpu_name_or_memory_only() -> None:
    known = find_machine("rtx 4090", count=2)
    assert (known.name, known.count, known.precision) == ("RTX 4090", 2, "bf16")
    assert known.memory_bytes == 24564 * 2**20
    assert known.usable_bytes == int(0.98 * known.memory_bytes)
    assert find_machine("T4").precision == "fp16"
    assert find_machine("P100").precision == "fp32"
    unknown = find_machine(memory_bytes=12 * 2**30)
    assert unknown.gpu is None
    assert unknown.memory_bytes == 12 * 2**30
    assert find_machine("RTX 3090", 20 * 2**30).memory_bytes == 20 * 2**30


def test_find_machine_invalid_machines_raise_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="nearest are 'RTX 4090'"):
        find_machine("RTX 4091")
    with pytest.raises(ConfigError, match="--gpus is 0"):
        find_machine("RTX 4090", count=0)
    with pytest.raises(ConfigError, match="--gpus 2 requires the GPU model"):
        find_machine(count=2)
    with pytest.raises(ConfigError, match="--gpu-memory is 24 bytes"):
        find_machine(memory_bytes=24)


def test_resolve_for_decides_open_keys_and_keeps_others() -> None:
    gpu = find_machine("RTX 4090")
    settled = resolve_for(recipe(), gpu)
    assert settled.data.seq_len == 64
    assert settled.efficiency.precision == "bf16"
    assert settled.efficiency.compile is True
    assert settled.efficiency.attention == "sdpa"
    assert settled.batch.rows == 8
    fixed = recipe(
        data={"dir": "/nowhere", "seq_len": 32, "document_masking": True},
        batch={"micro_batch_size": 3},
        efficiency={"precision": "fp32", "compile": False},
    )
    settled = resolve_for(fixed, gpu)
    assert settled.efficiency.precision == "fp32"
    assert settled.efficiency.compile is False
    assert settled.efficiency.attention == "flex"
    assert (settled.batch.rows, settled.data.seq_len) == (3, 32)
    # As in a run, fp16 is only used on request.
    v100 = find_machine("V100 16GB")
    # The V100's tensor cores only support fp16.
    narrow = resolve_for(recipe(), v100)
    assert narrow.efficiency.precision == "fp16"
    assert "precision fp32" in dict(methods(narrow, v100))
    fused = recipe(
        efficiency={"optimizer_in_backward": True}, optimizer={"name": "adamw", "max_grad_norm": 0}
    )
    assert resolve_for(fused, v100).efficiency.precision == "fp32"
    assert resolve_for(recipe(), find_machine("P100 16GB")).efficiency.precision == "fp32"
    both = {"global_batch_tokens": 1024, "gradient_accumulation_steps": 4}
    assert resolve_for(recipe(batch=both), gpu).batch.rows == 4
    dropout = {**_MODEL, "model_type": "gpt2", "attn_pdrop": 0.1}
    del dropout["intermediate_size"]
    masked = recipe(model=dropout, data={"dir": "/nowhere", "document_masking": True})
    assert resolve_for(masked, gpu).efficiency.attention == "sdpa"


def test_alignment_warnings_name_sizes_slow_on_matrix_units() -> None:
    t4 = find_machine("T4")
    odd = recipe(model={**_MODEL, "intermediate_size": 67, "vocab_size": 101})
    resolved = resolve_for(odd, t4)
    width, layers = resolved.model.hidden_size, resolved.model.num_hidden_layers
    shapes = matrix_shapes(resolved.model)
    total = sum(a * b for a, b in shapes)
    mlp, head = 3 * layers * width * 67 / total, width * 101 / total
    found = list(alignment_warnings(resolved, None))
    assert found == [
        f"model.intermediate_size 67 is not a multiple of 8, and {mlp:.0%} of the matrix "
        f"products use it: set it to 72 (up to {1 / (1 - mlp * 3 / 4):.2f} times the speed of a "
        "step)",
        f"model.vocab_size 101 is not a multiple of 8, and {head:.0%} of the matrix products use "
        "it: efficiency.vocab_multiple 64 pads it to 128 (up to "
        f"{1 / (1 - head * 3 / 4):.2f} times the speed of a step)",
    ]
    padded = recipe(
        model={**_MODEL, "intermediate_size": 72, "vocab_size": 101},
        efficiency={"vocab_multiple": 64},
    )
    assert not list(alignment_warnings(resolve_for(padded, t4), None))
    heads = {"vocab_size": 320, "num_attention_heads": 6, "num_key_value_heads": 1}
    wide = resolve_for(
        recipe(model={**_MODEL, **heads, "hidden_size": 60, "intermediate_size": 67}), t4
    )
    # without a warning about the width of the keys, 10
    hidden, layer = alignment_warnings(wide, None)
    assert ": set it to 72 (up to" in layer
    # 64 is not divisible by 6 heads.
    assert "model.hidden_size 60 is not a multiple of 8" in hidden
    assert ": set it to 72 (up to" in hidden
    assert hidden.endswith("times the speed of a step if the other sizes are aligned too)")
    wide = resolve_for(recipe(model={**_MODEL, **heads, "hidden_size": 72}), t4)
    (keys,) = alignment_warnings(wide, None)
    assert keys.startswith("a width of 12 inside the model is not a multiple of 8")
    assert ": use head sizes that are multiples of 8 (up to" in keys
    # Tensor cores do not compute fp32.
    slow = recipe(model={**_MODEL, "intermediate_size": 67}, efficiency={"precision": "fp32"})
    assert not list(alignment_warnings(resolve_for(slow, t4), None))


@pytest.mark.parametrize(
    "gpu, precision, multiple, named",
    [
        ("H100", "bf16", 64, "hidden_size 72 (next: 128), intermediate_size 200 (next: 256)"),
        ("A100 40GB", "bf16", 64, "hidden_size 72 (next: 128), intermediate_size 200 (next: 256)"),
        ("H100", "tf32", 32, "hidden_size 72 (next: 96), intermediate_size 200 (next: 224)"),
        ("RTX 4090", "bf16", None, ""),
        ("T4", "fp16", None, ""),
        ("H100", "fp32", None, ""),
        ("H100", "fp8", 128, "hidden_size 72 (next: 128), intermediate_size 200 (next: 256)"),
    ],
)
def test_packet_note_names_unaligned_widths_and_their_cost(
    gpu: str, precision: str, multiple: int | None, named: str
) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 640}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    efficiency = {"precision": precision, "compile": False}
    planned = recipe(model={**_MODEL, **sizes, **heads}, efficiency=efficiency)
    machine = find_machine(gpu)
    resolved = resolve_for(planned, machine)
    found = list(alignment_warnings(resolved, None, machine.hardware.capability))
    if multiple is None:
        assert found == []
        return
    shapes = matrix_shapes(resolved.model)
    padded = [[-(-size // multiple) * multiple for size in shape] for shape in shapes]
    more = sum(a * b for a, b in padded) / sum(a * b for a, b in shapes) - 1
    assert found == [
        f"this GPU's tensor cores read only multiples of {multiple} at full speed, but the model "
        f"has {named}. Rounded up to the next multiples, these sizes would need {more:.1%} "
        "more arithmetic, but no more time"
    ]


def test_packet_note_on_v100_requires_multiples_of_8() -> None:
    config = resolve_for(recipe(model={**_MODEL, "intermediate_size": 68}), find_machine("T4"))
    note = packet_note(config.model, EfficiencyConfig(precision="fp16"), (7, 0))
    assert note is not None
    assert "only multiples of 8 at full speed" in note
    assert "intermediate_size 68 (next: 72)" in note
    assert packet_note(config.model, EfficiencyConfig(precision="fp16"), None) is None
    assert packet_note(config.model, EfficiencyConfig(precision="fp16"), (6, 0)) is None


def test_alignment_warning_gain_is_measured_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {67: 0.3, 72: 0.1}
    monkeypatch.setattr(planning, "_product_seconds", lambda *_, size: seconds[size])
    sizes = {"intermediate_size": 67, "vocab_size": 320}
    odd = resolve_for(recipe(model={**_MODEL, **sizes}), find_machine("T4"))
    (found,) = alignment_warnings(odd, torch.device("cpu"))
    assert "measured here, about" in found
    seconds[72] = 0.3
    assert not list(alignment_warnings(odd, torch.device("cpu")))


def test_plan_vocabulary_comes_from_recipe_weights_or_prepared_data(
    tmp_path: Path,
) -> None:
    gpu = find_machine("RTX 4090")
    without = {**_MODEL, "vocab_size": 0}
    with pytest.raises(
        ConfigError, match=r"is not on this machine: .* --planning.vocab_size 50257"
    ):
        resolve_for(recipe(model=without), gpu)
    manifest = {"vocab_size": 999, "splits": {"train": {"tokens": 12345}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = resolve_for(recipe(model=without, data={"dir": str(tmp_path)}), gpu)
    assert found.model is not None
    assert found.model.vocab_size == 999
    with pytest.raises(ConfigError, match="the recipe has no model"):
        resolve_for(parse_recipe({"data": {"dir": "/nowhere"}}), gpu)


def fake_outcomes(
    monkeypatch: pytest.MonkeyPatch, bytes_a_row: dict[str, int], fixed: int
) -> list[dict[str, Any]]:
    """Replace the estimate by a fixed number of bytes per row for each kind of activation
    checkpointing, and list the candidates.
    """
    asked: list[dict[str, Any]] = []

    def estimate(_: Estimator, candidate: Candidate) -> Estimate:
        machine, changes = candidate.machine, candidate.changes
        changed = with_changes(candidate.recipe, changes)
        asked.append({**changes, "rows": changed.batch.rows, "count": machine.count})
        kept = bytes_a_row[changed.efficiency.activation_checkpointing]
        state = fixed // (8 if changed.lora else machine.count)
        size = state + changed.batch.rows * kept
        memory = MemoryPrediction(size, "backward", {}, {}, size, 0, 0, ())
        return Estimate(candidate.name, changes, changed, memory, usable_bytes=machine.usable_bytes)

    def estimate_all(estimator: Estimator, candidates: Sequence[Candidate]) -> Iterator[Estimate]:
        return (estimate(estimator, candidate) for candidate in candidates)

    monkeypatch.setattr(Estimator, "estimate", estimate)
    monkeypatch.setattr(Estimator, "estimate_all", estimate_all)
    return asked


_GIB = 2**30


def test_best_estimate_uses_largest_micro_batch_that_divides_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_outcomes(monkeypatch, {"none": 3 * _GIB, "selective": 2 * _GIB, "full": _GIB}, 4 * _GIB)
    machine = find_machine(memory_bytes=24 * _GIB)
    plain = resolve_for(recipe(batch={"global_batch_tokens": 12 * 64}), machine)
    assert list(micro_batches(plain, machine)) == [12, 6, 3, 1]
    ramp = {"ramp_start_tokens": 4 * plain.data.seq_len, "ramp_steps": 5}
    ramped = with_changes(plain, {"batch": {**dict(plain.batch), **ramp}})
    assert list(micro_batches(ramped, machine)) == [4, 2, 1]
    # 4 + 3 x 6 = 22 GiB fit without saving memory; full checkpointing fits all 12 rows.
    best = best_estimate(plain, machine)
    assert best is not None
    assert best.recipe.batch.rows == 12
    assert best.recipe.efficiency.activation_checkpointing == "full"
    assert best.fits
    # A global batch that fits without changes is kept.
    small = resolve_for(recipe(batch={"global_batch_tokens": 6 * 64}), machine)
    best = best_estimate(small, machine)
    assert best is not None
    assert dict(best.changes) == {}
    assert small.batch.rows == 6


@pytest.mark.parametrize("compiled_bytes, fits", [(_GIB, True), (99 * _GIB, False)])
def test_best_estimate_searches_uncompiled_and_checks_compiled_once(
    monkeypatch: pytest.MonkeyPatch, compiled_bytes: int, fits: bool
) -> None:
    asked: list[bool] = []

    def estimate(_: Estimator, candidate: Candidate) -> Estimate:
        asked.append(candidate.compiles)
        changed = with_changes(candidate.recipe, candidate.changes)
        size = compiled_bytes if candidate.compiles else 2 * _GIB
        memory = MemoryPrediction(size, "backward", {}, {}, size, 0, 0, ())
        return Estimate(
            candidate.name,
            candidate.changes,
            changed,
            memory,
            usable_bytes=candidate.machine.usable_bytes,
            is_bound=not candidate.compiles,
        )

    monkeypatch.setattr(Estimator, "estimate", estimate)
    monkeypatch.setattr(
        Estimator,
        "estimate_all",
        lambda estimator, candidates, *_: (estimate(estimator, one) for one in candidates),
    )
    machine = find_machine(memory_bytes=24 * _GIB)
    compiled = resolve_for(recipe(efficiency={"compile": True}), machine)
    best = best_estimate(compiled, machine)
    first = asked.index(True)
    assert first > 0
    assert all(asked[first:])
    # Without a candidate that fits as written, there is no plan.
    assert (best is not None) is fits
    if best is not None:
        assert best.fits
        assert not best.is_bound
        assert len(asked) == first + 1


def test_best_estimate_searches_compiled_if_nothing_fits_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimate(_: Estimator, candidate: Candidate) -> Estimate:
        changed = with_changes(candidate.recipe, candidate.changes)
        # Only smaller micro-batches fit, and only if compiled.
        size = changed.batch.rows * _GIB + (0 if candidate.compiles else 99 * _GIB)
        memory = MemoryPrediction(size, "backward", {}, {}, size, 0, 0, ())
        made = (candidate.name, candidate.changes, changed, memory)
        usable = 3 * _GIB // 2
        return Estimate(*made, usable_bytes=usable, is_bound=not candidate.compiles)

    monkeypatch.setattr(Estimator, "estimate", estimate)
    monkeypatch.setattr(
        Estimator,
        "estimate_all",
        lambda estimator, candidates, *_: (estimate(estimator, one) for one in candidates),
    )
    machine = find_machine("RTX 4090")
    written = recipe(efficiency={"compile": True}, batch={"micro_batch_size": 4})
    best = best_estimate(open_micro_batch(resolve_for(written, machine)), machine)
    assert best is not None
    assert (best.fits, best.is_bound) == (True, False)
    assert best.recipe.batch.rows == 1
    # The same holds for suggestions if nothing fits.
    assert all(
        not one.is_bound for one in nearest_estimates(resolve_for(written, machine), machine)
    )
    assert nearest_estimates(resolve_for(written, machine), machine)


@pytest.mark.parametrize(
    "state, evaluation, hopeless",
    [(30, 1, True), (1, 30, True), (1, 1, False)],
    ids=["state", "evaluation", "activations"],
)
def test_best_estimate_skips_compiled_check_if_it_cannot_fit(
    monkeypatch: pytest.MonkeyPatch, state: int, evaluation: int, hopeless: bool
) -> None:
    asked: list[Candidate] = []

    def memory(phase: str, size: int, total: int) -> MemoryPrediction:
        peak = PhasePeak(size, {"weights": size // 2, "optimizer_states": size // 2})
        return MemoryPrediction(total, phase, {}, {phase: peak}, total, 0, 0, ())

    def estimate(_: Estimator, candidate: Candidate) -> Estimate:
        asked.append(candidate)
        changed = with_changes(candidate.recipe, candidate.changes)
        step = memory("optimizer", state * _GIB, 99 * _GIB)
        evaluating = memory("evaluation", _GIB, evaluation * _GIB)
        bound = not candidate.compiles and changed.efficiency.compile is True
        found = Estimate("", candidate.changes, changed, step, evaluating, is_bound=bound)
        return dataclasses.replace(found, usable_bytes=24 * _GIB)

    monkeypatch.setattr(Estimator, "estimate", estimate)
    monkeypatch.setattr(
        Estimator,
        "estimate_all",
        lambda estimator, candidates, *_: (estimate(estimator, one) for one in candidates),
    )
    machine = find_machine("RTX 4090")
    # With chunks, the second option is identical to the first.
    efficiency = {"compile": True, "loss_chunk_tokens": 64}
    written = recipe(efficiency=efficiency, batch={"micro_batch_size": 4})
    compiled = open_micro_batch(resolve_for(written, machine))
    assert best_estimate(compiled, machine) is None
    assert nearest_estimates(compiled, machine) == []
    # The recipe as written was estimated.
    rows = [
        with_changes(compiled, one.changes).batch.rows for one in asked if one.compiles and one.name
    ]
    assert (len(rows) == 1) is hopeless
    # If the smallest micro-batch does not fit, no larger one is compiled.
    assert set(rows[1:]) <= {1}
    # A candidate without torch.compile needs no second estimate.
    offloading = [one for one in asked if one.changes.get("efficiency.compile") is False]
    assert [one.compiles for one in offloading] == [False]


def test_best_estimate_keeps_recipe_that_fits_only_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fake_outcomes(monkeypatch, {"none": 4 * _GIB, "selective": _GIB, "full": _GIB}, _GIB)
    machine = find_machine(memory_bytes=24 * _GIB)
    sections = {"efficiency": {"compile": True}, "batch": {"micro_batch_size": 8}}
    compiled = open_micro_batch(resolve_for(recipe(**sections), machine))
    small = MemoryPrediction(_GIB, "backward", {}, {}, _GIB, 0, 0, ())
    known = Estimate("as it stands", {}, compiled, small, usable_bytes=24 * _GIB)
    assert best_estimate(compiled, machine, known=known) is known
    assert any("efficiency.activation_checkpointing" in one for one in asked)


@pytest.mark.parametrize(
    "how",
    [{"compile_regional": True}, {"compile_mode": "max-autotune"}],
    ids=["regional", "mode"],
)
def test_torch_compile_change_removes_its_compile_options(how: dict[str, Any]) -> None:
    machine = find_machine("RTX 4090")
    compiled = resolve_for(recipe(efficiency={"compile": True, **how}), machine)
    changes = dict(methods(compiled, machine))["no torch.compile"]
    assert changes == {
        "efficiency.compile": False,
        **{
            f"efficiency.{key}": False if value is True else "default" for key, value in how.items()
        },
    }
    for candidate in (
        Candidate(compiled, machine, compiles=False),
        Candidate(compiled, machine, changes=changes, evaluates=False),
    ):
        found = Estimator().estimate(candidate)
        assert found.fits, found.problem


def test_method_table_compares_uncompiled_steps_with_uncompiled_baseline() -> None:
    resolved = resolve_for(recipe(), find_machine("H100"))

    def outcome(
        name: str, size: int, changes: dict[str, Any], is_bound: bool, overhead: int = 0
    ) -> Estimate:
        memory = MemoryPrediction(size, "backward", {}, {}, size, overhead, 0, ())
        return Estimate(name, changes, resolved, memory, usable_bytes=9, is_bound=is_bound)

    methods_found = [
        outcome("no torch.compile", 4 * _GIB, {"efficiency.compile": False}, False),
        outcome("chunked loss", 3 * _GIB, {"efficiency.loss_chunk_tokens": 8}, True),
        outcome("Adafactor", 3 * _GIB, {"optimizer.name": "adafactor"}, True, overhead=10),
    ]
    machine = find_machine("RTX 4090")
    first = outcome("as it stands", 2 * _GIB, {}, False)
    plan = Plan(machine, resolve_for(recipe(), machine), first, methods=methods_found)
    rows = {row[0]: row[1:4] for row in method_rows(plan)}
    assert rows["no torch.compile"] == ("4.00 GiB", "-100%", "does not fit")
    # A bound above the limit does not imply that the compiled step exceeds it.
    assert rows["chunked loss"] == ("< 3.00 GiB", "25%", "may not fit")
    # Compiling does not change memory outside of the allocator.
    assert rows["Adafactor"][2] == "does not fit"
    assert any("<: without torch.compile" in line for line in blocks(plan) if type(line) is str)


@pytest.mark.parametrize(
    ("minutes", "regional", "traces"),
    [(None, False, True), (60.0, False, True), (3.0, False, False), (None, True, False)],
)
def test_compiled_step_of_short_run_is_not_traced_for_forecast(
    monkeypatch: pytest.MonkeyPatch, minutes: float | None, regional: bool, traces: bool
) -> None:
    asked: list[Candidate] = []

    def noted(_: Estimator, candidate: Candidate) -> Estimate:
        asked.append(candidate)
        return Estimate("", {}, candidate.recipe)

    monkeypatch.setattr(Estimator, "estimate", noted)
    machine = find_machine("RTX 4090")
    efficiency = {"compile": True, "compile_regional": regional}
    written = recipe(efficiency=efficiency, schedule={"max_minutes": minutes})
    estimating.estimate(resolve_for(written, machine), machine)
    assert [one.compiles for one in asked] == [traces]


def test_loss_chunk_reason_is_given_for_compiled_steps_too() -> None:
    # In a compiled step, it is unknown how many bytes are logits.
    machine = find_machine("H100")
    chunked = resolve_for(
        recipe(
            data={"dir": "/nowhere", "seq_len": 64},
            batch={"micro_batch_size": 2**20},
            efficiency={"compile": True, "precision": "bf16", "loss_chunk_tokens": 1024},
        ),
        machine,
    )
    best = Estimate("", {"efficiency.loss_chunk_tokens": 1024}, chunked)
    reasons = reasons_for(chunked, best, Estimate("", {}, chunked), machine)
    assert "75.0 GiB in fp32" in reasons["efficiency.loss_chunk_tokens"]


def test_plan_without_fitting_candidate_names_nearest_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = fake_outcomes(monkeypatch, {"none": _GIB, "selective": _GIB, "full": _GIB}, 80 * _GIB)
    machine = find_machine("RTX 4090")
    plain = resolve_for(recipe(), machine)
    assert best_estimate(plain, machine) is None
    names = [one.name for one in nearest_estimates(plain, machine)]
    assert names[:2] == ["LoRA, rank 16", "LoRA, rank 16, base in 4 bits"]
    # 80 / 4 + 1 = 21 of 23.5 GiB.
    assert "4 devices with fsdp" in names
    assert "2 devices with fsdp" not in names
    assert all(one["rows"] == 1 for one in asked[-5:])
    # They divide the same step of 8 rows.
    assert [one["batch.gradient_accumulation_steps"] for one in asked[-5:]] == [2, 1, 1, 1, 1]
    asked.clear()
    tensor = {"tensor_parallel": 2}
    cut = resolve_for(recipe(distributed=tensor), dataclasses.replace(machine, count=2))
    nearest_estimates(cut, dataclasses.replace(machine, count=2))
    steps = {
        one["count"]: one["batch.gradient_accumulation_steps"]
        for one in asked
        if "distributed" in one
    }
    # Two devices that compute the same rows process all 8 rows of a step; with fsdp, each has
    # different rows.
    assert steps[2] == 4
    ways = {name: (changes, where) for name, changes, where in _fallbacks(plain, machine)}
    changes, where = ways["2 devices with fsdp, offloading to the CPU"]
    assert changes == {"distributed": {"engine": "fsdp", "offload": "cpu"}}
    assert where.count == 2


def test_best_estimate_tries_other_optimizers_only_for_adamw_as_last_resort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"none": 3 * _GIB, "selective": 2 * _GIB, "full": 2 * _GIB}
    asked = fake_outcomes(monkeypatch, rows, 4 * _GIB)
    machine = find_machine(memory_bytes=24 * _GIB)
    best_estimate(resolve_for(recipe(batch={"global_batch_tokens": 64 * 64}), machine), machine)
    assert not any("optimizer.name" in one for one in asked)
    asked = fake_outcomes(monkeypatch, rows, 40 * _GIB)
    for name, is_asked in (("adamw", True), ("muon", False)):
        asked.clear()
        best_estimate(resolve_for(recipe(optimizer={"name": name}), machine), machine)
        assert any("optimizer.name" in one for one in asked) is is_asked


def test_best_estimate_never_repeats_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_outcomes(monkeypatch, {"none": 9, "selective": 3 * _GIB, "full": 3 * _GIB}, _GIB)
    machine = find_machine(memory_bytes=24 * _GIB)
    # With accumulation and full checkpointing already set, two options would be identical.
    efficiency = {"activation_checkpointing": "full", "compile": False}
    batch = {"global_batch_tokens": 64 * 64}
    best_estimate(resolve_for(recipe(efficiency=efficiency, batch=batch), machine), machine)
    ways = [tuple(sorted(one.items())) for one in asked]
    assert len(ways) > 3
    assert len(set(ways)) == len(ways)


def test_offloading_candidate_excludes_incompatible_settings() -> None:
    machine = find_machine("V100 16GB")
    plain = resolve_for(recipe(efficiency={"precision": "fp16"}), machine)
    ways = {name: changes for name, changes, _ in _fallbacks(plain, machine)}
    changed = with_changes(plain, ways["offloading moments to the CPU (DeepSpeed)"])
    assert changed.efficiency.compile is False
    assert changed.efficiency.precision == "fp16"
    require_combination(changed, find_hardware("cpu"), "deepspeed")


def test_durations_and_counts_are_formatted_in_suitable_units() -> None:
    assert [hours(s) for s in (45.4, 600, 7200, 3e5)] == ["45 s", "10 min", "2.0 h", "3.5 days"]
    assert [count_text(count) for count in (999_424, 15.5e6, 1.36e9, 1.2e12)] == [
        "0.999M",
        "15.5M",
        "1.36B",
        "1,200B",
    ]


def test_memory_table_includes_cpu_memory() -> None:
    training = MemoryPrediction(_GIB, "forward", {"weights": _GIB}, {}, _GIB, 0, 2 * _GIB, ())
    resolved = resolve_for(recipe(), find_machine("H100"))
    table = memory_table(Estimate("", {}, resolved, training))
    assert list(table[-1]) == ["in addition, CPU memory", "2.00 GiB"]
    training = dataclasses.replace(training, host_bytes=0)
    assert table[-2] == memory_table(Estimate("", {}, resolved, training))[-1]


def test_method_table_lists_only_methods_not_in_recipe() -> None:
    machine = find_machine("RTX 4090")
    plain = resolve_for(recipe(batch={"micro_batch_size": 8}), machine)
    names = dict(methods(plain, machine))
    assert names["gradient accumulation, 1 x 8"] == {
        "batch.micro_batch_size": 1,
        "batch.gradient_accumulation_steps": 8,
    }
    assert "no torch.compile" in names
    assert "precision fp32" in names
    assert "precision bf16" not in names
    changed = {
        "efficiency.activation_checkpointing": "full",
        "optimizer.name": "muon",
        "batch.micro_batch_size": 1,
        "lora": {"rank": 4},
    }
    names = dict(methods(with_changes(plain, changed), machine))
    assert not set(names) & {"activation checkpointing, full", "Muon", "LoRA, rank 16"}
    assert not any(name.startswith("gradient accumulation") for name in names)
    # Each option is valid together with the recipe.
    for changes in dict(methods(plain, machine)).values():
        with_changes(plain, changes)


def test_candidate_change_removes_incompatible_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of the table, and of the suggestions if nothing fits, is valid with these
    options, too.
    """
    machine = find_machine("RTX 4090")
    plain = resolve_for(
        recipe(
            optimizer={"cautious_weight_decay": True, "tuned_width": 64},
            checkpoint={"average_last": 2},
        ),
        machine,
    )
    names = dict(methods(plain, machine))
    fallbacks = {name: changes for name, changes, _ in _fallbacks(plain, machine)}
    ways = [names[name] for name in ("8-bit AdamW", "Adafactor", "Muon", "LoRA, rank 16")]
    ways += [fallbacks["LoRA, rank 16"], fallbacks["LoRA, rank 16, base in 4 bits"]]
    for changes in ways:
        require_combination(with_changes(plain, changes), machine.hardware, "ddp")
    assert names["Muon"] == {"optimizer.name": "muon"}
    rows = {"none": 3 * _GIB, "selective": 2 * _GIB, "full": 2 * _GIB}
    asked = fake_outcomes(monkeypatch, rows, 40 * _GIB)
    best_estimate(plain, machine)
    (tried, *_) = [one for one in asked if "optimizer.name" in one]
    assert tried["optimizer.cautious_weight_decay"] is False


def test_resolve_for_attention_follows_precision_if_open() -> None:
    cpu = replace(find_machine(), precision="bf16")
    model = {**_MODEL, "hidden_size": 256, "num_attention_heads": 4}
    half, full = ({"precision": precision, "compile": False} for precision in ("bf16", "fp32"))

    def changes(efficiency: dict[str, Any], name: str) -> dict[str, Any]:
        return dict(methods(resolve_for(recipe(model=model, efficiency=efficiency), cpu), cpu))[
            name
        ]

    assert (
        resolve_for(recipe(model=model, efficiency=half), cpu).efficiency.attention == "blockwise"
    )
    assert changes(half, "precision fp32")["efficiency.attention"] == "sdpa"
    assert changes(full, "precision bf16")["efficiency.attention"] == "blockwise"
    named = {**half, "attention": "math"}
    assert changes(named, "precision fp32") == {"efficiency.precision": "fp32"}


@pytest.mark.parametrize("budget", [{"seconds": -1.0}, {"tokens": 0.0}, {"price_per_hour": -2.0}])
def test_budget_not_positive_raises_config_error(budget: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0"):
        Budget(**budget)


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize(
    "cut", slow_but([{"pipeline": 2}], [{"tensor_parallel": 2}, {"pipeline": 2}])
)
def test_budget_suggestion_is_divisible_for_tensor_parallelism(cut: dict[str, int]) -> None:
    machine = find_machine("RTX 4090", count=2)
    written = recipe(distributed=cut, efficiency={"compile": False, "loss_chunk_tokens": 0})
    plan = make_plan(written, machine, budget=Budget(tokens=1e6), searches=False)
    assert plan.suggestion is not None
    assert plan.suggested is not None
    assert plan.suggested.fits
    config: Any = plan.suggestion.config
    assert config.tie_word_embeddings is False
    assert config.num_key_value_heads % cut.get("tensor_parallel", 1) == 0


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("written, expected", [("auto", True), (False, False)])
def test_budget_of_one_hour_on_gpu_decides_compiling_for_suggested_run(
    written: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own run of two steps is too short to be worth compiling."""
    found: list[ResolvedRecipe] = []

    def noted(one: ResolvedRecipe, *_: Any) -> None:
        found.append(one)
        raise KeyboardInterrupt

    monkeypatch.setattr("firstlight.planner.plan.plan.best_estimate", noted)
    short = recipe(schedule={"max_steps": 2}, efficiency={"compile": written})
    machine = find_machine("H100")
    assert resolve_for(short, machine).efficiency.compile is False
    with pytest.raises(KeyboardInterrupt):
        make_plan(short, machine, budget=Budget(seconds=3600.0), searches=False)
    assert found[0].efficiency.compile is expected


@pytest.mark.slow
def test_budget_of_time_is_used_regardless_of_recipe_model_size() -> None:
    """A model of width 32 can't use a GPU fully; the suggested one can."""
    schedule = {
        "epochs": 2,
        "min_learning_rate": 1e-5,
        "warmup_steps": 9,
        "initial_learning_rate": 1e-3,
    }
    plan = make_plan(
        recipe(efficiency={"compile": False}, schedule=schedule),
        find_machine("RTX 4090"),
        budget=Budget(seconds=1200.0),
        searches=False,
    )
    found, way = plan.suggestion, plan.suggested
    assert found is not None
    assert way is not None
    assert way.tokens_per_second is not None
    # Evaluations get the remaining time, as in `train TEXTS --budget`.
    steps = 1200 * (1 - defaults.EVALUATION_SHARE)
    assert 0.99 * steps < found.seconds <= steps
    assert found.seconds == pytest.approx(found.tokens / way.tokens_per_second.expected)
    assert way.recipe.schedule.max_steps == found.max_steps
    assert way.recipe.schedule.min_lr_ratio == 1e-5 / 1e-3
    # Without data, the share for 9 steps is unknown, so the default of 5 % applies.
    assert way.recipe.schedule.warmup_steps is way.recipe.schedule.warmup_ratio is None
    rates = new_model_rates("adamw", found.config.hidden_size)
    assert way.recipe.optimizer.learning_rate == rates["learning_rate"]
    # The warm-up starts at the same fraction of the suggested peak, which here is the peak itself.
    assert way.recipe.schedule.initial_learning_rate == way.recipe.optimizer.learning_rate
    assert 4 < found.tokens / found.parameters < 60


@pytest.mark.usefixtures("known_speed")
def test_budget_plan_lists_every_key_that_differs_from_recipe(data: Path) -> None:
    written = parse_recipe(
        {
            "data": {"dir": str(data), "seq_len": 32},
            "model": {**_MODEL, "model_type": "qwen3", "vocab_size": 320, "num_key_value_heads": 2},
            "batch": {
                "global_batch_tokens": 4096,
                "ramp_start_tokens": 1024,
                "ramp_steps": 10,
            },
            "optimizer": {"name": "muon", "muon_learning_rate": 0.01, "learning_rate": 0.3},
            "schedule": {"kind": "wsd", "max_steps": 100, "warmup_steps": 7, "cooldown_steps": 30},
        }
    )
    plan = make_plan(
        written,
        find_machine("RTX 4090"),
        budget=Budget(tokens=100_000),
        searches=False,
        estimator=FixedEstimator(),
    )
    assert plan.chosen is not None
    before, after = written.model_dump(mode="json"), plan.chosen.model_dump(mode="json")
    named = plan.to_json()["replacements"]
    changed = {
        f"{section}.{key}": (before[section].get(key), new)
        for section, keys in after.items()
        for key, new in (keys or {}).items()
        if before[section].get(key) != new
    }
    assert named.keys() == changed.keys()
    assert {key: new for key, (_, new) in named.items()} == {k: v for k, (_, v) in changed.items()}
    assert named["model.hidden_size"] == (32, 64)
    assert named["optimizer.muon_learning_rate"] == (0.01, pytest.approx(0.01 * 0.5**0.5))
    assert named["schedule.warmup_steps"] == (7, None)
    assert named["schedule.warmup_ratio"] == (None, 0.07)
    assert named["schedule.decay_fraction"] == (None, 0.3)
    assert "optimizer.learning_rate" not in named
    said = [line.split(maxsplit=1) for line in blocks(plan) if isinstance(line, str)]
    lines = {key: rest for key, *rest in said if " ".join(rest)}
    assert lines["model.hidden_size"] == ["32 -> 64"]
    assert lines["schedule.warmup_ratio"] == ["not set -> 0.07"]
    assert lines["schedule.cooldown_steps"] == ["30 -> null"]
    assert lines["batch.ramp_steps"] == ["10 -> null"]
    assert lines["optimizer.muon_learning_rate"] == ["0.01 -> 0.007071"]
    assert named.keys() <= lines.keys()


@pytest.mark.usefixtures("known_speed")
def test_budget_of_time_uses_at_most_epochs_of_recipe(
    data: Path,
) -> None:
    values = {"data": {"dir": str(data), "seq_len": 32}, "schedule": {"epochs": 3}}
    written = recipe(
        **values,
        model={**_MODEL, "vocab_size": 320},
        efficiency={"compile": False},
        optimizer={"name": "adafactor", "learning_rate": 0.02},
    )
    plan = make_plan(
        written,
        find_machine("RTX 4090"),
        budget=Budget(seconds=60.0),
        searches=False,
        estimator=FixedEstimator(),
    )
    assert plan.suggestion is not None
    assert plan.suggestion.epochs is not None
    assert 2.5 < plan.suggestion.epochs <= 3
    said = "\n".join(block for block in blocks(plan) if isinstance(block, str))
    assert " epochs of the prepared text, the limit of schedule.epochs" in said
    assert "optimizer.learning_rate" not in plan.replacements
    assert "no known rule to scale the learning rates of adafactor" in said


@pytest.mark.parametrize("section", ["lora", "preference"])
def test_budget_for_recipe_with_given_weights_raises_config_error(section: str) -> None:
    written = recipe(**{section: {}})
    for budget in (Budget(seconds=60.0), Budget(tokens=1e6)):
        with pytest.raises(ConfigError, match=f"a recipe with a {section} section starts from"):
            make_plan(written, find_machine("RTX 4090"), budget=budget, searches=False)
    with pytest.raises(ConfigError, match="--init-from names the weights"):
        make_plan(recipe(), find_machine("RTX 4090"), init_from="gpt2", budget=Budget(tokens=1e6))


def test_plan_recipe_without_model_uses_that_of_starting_weights(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
    written = parse_recipe(
        {"data": {"dir": "nowhere", "seq_len": 64}, "schedule": {"max_steps": 9}}
    )
    machine = find_machine("RTX 4090")
    options: dict[str, Any] = {"searches": False, "estimator": FixedEstimator()}
    plan = make_plan(written, machine, init_from=str(tmp_path), **options)
    assert plan.recipe.model.hidden_size == _MODEL["hidden_size"]
    with pytest.raises(ConfigError, match="the recipe has no model"):
        make_plan(written, machine, **options)


def test_plan_of_an_adapter_uses_its_settings_and_new_tokens(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    for one in (base, folder):
        one.mkdir()
    model = empty_model(LlamaConfig(**_MODEL))
    (base / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
    save_weights(weights_to_save(model), base)
    grow_vocabulary(model, 300, 302)
    config = LoraConfig(rank=5, modules_to_save=["embed_tokens", "lm_head"])
    add_lora(model, config, None)
    for name, text in adapter_files(model, config, str(base)).items():
        (folder / name).write_text(text, encoding="utf-8")
    save_tensors(adapter_tensors(model), folder / ADAPTER_WEIGHTS_NAME)

    written = {"data": {"dir": "nowhere", "seq_len": 64}, "schedule": {"max_steps": 9}}
    machine = find_machine("RTX 4090")
    further = parse_recipe({**written, "lora": {"rank": 2, "dropout": 0.5}})
    planned = resolve_for(further, machine, str(folder))
    assert planned.lora is not None
    assert (planned.lora.rank, planned.lora.dropout) == (5, 0.5)
    assert {*planned.lora.modules_to_save} == {"embed_tokens", "lm_head"}
    assert planned.model.vocab_size == 302
    merged = resolve_for(parse_recipe(written), machine, str(folder))
    assert (merged.lora, merged.model.vocab_size) == (None, 302)


@pytest.mark.usefixtures("known_speed")
def test_budget_for_models_that_cannot_be_sharded_raises_config_error() -> None:
    # No other model with head dimension 32 has a multiple of 133 heads.
    machine = find_machine("RTX 4090", count=133)
    model = {**_MODEL, "num_attention_heads": 133, "hidden_size": 4256, "intermediate_size": 8512}
    written = recipe(
        model=model, distributed={"tensor_parallel": 133}, efficiency={"compile": False}
    )
    with pytest.raises(ConfigError, match="none of the candidate models can be sharded"):
        make_plan(written, machine, budget=Budget(seconds=60.0), searches=False)


def test_plan_untrainable_recipe_raises_config_error() -> None:
    wrong = recipe(
        efficiency={"optimizer_in_backward": True, "compile": False},
        batch={"micro_batch_size": 1, "gradient_accumulation_steps": 4},
        optimizer={"max_grad_norm": 0.0},
    )
    with pytest.raises(ConfigError, match="optimizer_in_backward"):
        make_plan(wrong, find_machine("RTX 4090"), searches=False)


def write(path: Path, values: dict[str, Any]) -> str:
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


_GPU_VALUES: dict[str, Any] = {
    "data": {"dir": "/nowhere"},
    "model": _MODEL,
    "batch": {"global_batch_tokens": 1024},
    "efficiency": {"compile": False},
}


def planned(
    capfd: pytest.CaptureFixture[str], path: str, *options: str
) -> tuple[dict[str, Any], str]:
    """Return the output of --json and stderr."""
    code = main(["plan", path, "--gpu", "RTX 4090", "--json", *options])
    said = capfd.readouterr()
    assert code == 0, said.err
    return json.loads(said.out), said.err


def test_plan_command_plans_for_absent_gpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "tiny.yaml", _GPU_VALUES), tmp_path / "found.yaml"
    found, said = planned(capfd, path, "--no-search", "--write", str(out))
    assert found["machine"]["name"] == "RTX 4090"
    first = found["as_it_stands"]
    assert first["fits"]
    parts = first["training"]["parts"]
    # CUDA's allocator rounds the size of each tensor up to a multiple of 512 bytes.
    assert 0 <= parts["weights"] - 4 * found["parameters"] < 512 * 30
    assert first["training"]["peak_bytes"] == sum(parts.values())
    speed = first["speed"]["tokens_per_second"]
    assert 0 < speed["low"] <= speed["expected"] <= speed["high"]
    assert "as it stands: " in said
    # The written recipe contains the plan's decisions.
    written = load_recipe(out)
    assert written.efficiency.precision == "bf16"
    assert written.batch.rows == 8
    assert main(["plan", path, "--gpu", "RTX 4090", "--write", str(out)]) == 2
    assert "already exists: choose another file for --write" in capfd.readouterr().err


def test_plan_tensor_parallel_gpus_hold_their_part() -> None:
    batch, efficiency = {"global_batch_tokens": 1024}, {"compile": False, "precision": "fp32"}
    found = {}
    for name, count, distributed in (
        ("alone", 1, {}),
        ("two", 2, {"tensor_parallel": 2}),
        ("four", 4, {"tensor_parallel": 2, "engine": "fsdp"}),
    ):
        machine = find_machine("H100", count=count)
        settled = resolve_for(
            recipe(batch=batch, efficiency=efficiency, distributed=distributed), machine
        )
        # 16 rows per step, half of them for each of two groups.
        assert settled.batch.rows == 8
        found[name] = Estimator().estimate(Candidate(settled, machine))
        assert found[name].fits, found[name].problem
    weights = {
        name: one.training.phases["optimizer"].parts["weights"]
        for name, one in found.items()
        if one.training is not None
    }
    # Norms are replicated on both; blocks are rounded up.
    assert 0.5 < weights["two"] / weights["alone"] < 0.6
    assert 0.5 < weights["four"] / weights["two"] < 0.6
    training = found["four"].training
    assert training is not None
    assert "fsdp on 2 devices, tensor_parallel 2: " in training.notes[-1]
    speed = found["four"].speed
    assert speed is not None
    assert speed.kinds["communication"] > 0
    with pytest.raises(ConfigError, match="can't be divided into groups"):
        resolve_for(recipe(batch=batch, distributed={"tensor_parallel": 2}), find_machine("H100"))


@pytest.mark.parametrize(
    "count, sections",
    [
        (2, {"distributed": {"pipeline": 2}, "batch": {"gradient_accumulation_steps": 4}}),
        (1, {"data": {"files": "pairs.jsonl", "kind": "preference"}}),
        (1, {"distributed": {"engine": "fsdp"}}),
        (2, {"distributed": {"engine": "fsdp"}, "checkpoint": {"sharded": True}}),
    ],
    ids=["stages", "pairs", "one", "pieces"],
)
def test_plan_other_engines_on_gpus_fit(count: int, sections: dict[str, Any]) -> None:
    machine = find_machine("H100", count=count)
    settled = resolve_for(recipe(**{"efficiency": {"compile": False}, **sections}), machine)
    found = Estimator().estimate(Candidate(settled, machine))
    assert found.fits, found.problem
    assert found.evaluation is not None


def test_plan_run_length_equals_that_of_training(data: Path) -> None:
    """From epochs of prepared data on several devices, or from max_steps without data; otherwise
    unknown.
    """
    machine = find_machine("RTX 4090", None, 2)
    values: dict[str, Any] = {
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
    }
    given = recipe(**values, schedule={"epochs": 3, "warmup_ratio": 0.1})
    rows = TokenDataset(data, "train").num_rows(32)
    run = planned_run(resolve_for(given, machine), machine)
    assert run is not None
    steps = math.ceil(3 * rows / 8)
    assert run.schedule == Schedule(steps, math.ceil(steps / 10), steps, 0.1)
    assert (run.batch.size, run.tokens) == (8, steps * 8 * 32)
    assert run.epochs == steps * 8 / rows
    ramp = {"global_batch_tokens": 512, "ramp_start_tokens": 256, "ramp_steps": 10}
    ramped = recipe(**{**values, "batch": {"micro_batch_size": 4, **ramp}}, schedule={"epochs": 3})
    run = planned_run(resolve_for(ramped, machine), machine)
    assert run is not None
    steps = 10 + math.ceil((3 * rows - 80) / 16)
    assert (run.schedule.max_steps, run.tokens) == (steps, (80 + (steps - 10) * 16) * 32)
    elsewhere = planned_run(resolve_for(recipe(schedule={"max_steps": 9}), machine), machine)
    assert elsewhere is not None
    assert (elsewhere.schedule.max_steps, elsewhere.epochs) == (9, None)
    assert planned_run(resolve_for(recipe(schedule={"epochs": 9}), machine), machine) is None
    wrong = resolve_for(recipe(**values, schedule={"decay_steps": 2, "warmup_steps": 2}), machine)
    with pytest.raises(ConfigError, match="decay_steps 2 is not after the warm-up"):
        planned_run(wrong, machine)


def test_plan_engine_for_more_gpus_raises_and_suggests_gpus_option() -> None:
    with pytest.raises(ConfigError, match="--gpus 2"):
        engine_of(recipe(distributed={"tensor_parallel": 2}), 1)


@pytest.mark.slow
def test_plan_command_suggests_model_and_methods(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "tiny.yaml", _GPU_VALUES), tmp_path / "found.yaml"
    budget = ("--budget", "1h", "--price-per-hour", "0.5")
    found, said = planned(capfd, path, *budget, "--write", str(out))
    assert {one["name"] for one in found["methods"]} >= {"chunked loss", "8-bit AdamW"}
    assert not [one for one in found["methods"] if one["problem"]]
    suggestion = found["suggestion"]
    assert suggestion["cost"] == pytest.approx(0.5 * suggestion["seconds"] / 3600)
    assert found["suggested"]["fits"]
    for words in ("effect of each method alone", "best: ", "to train with this"):
        assert words in said
    written = load_recipe(out)
    assert written.model is not None
    assert written.model.hidden_size == suggestion["config"]["hidden_size"]
    assert written.schedule.max_steps == suggestion["max_steps"]


def test_plan_command_price_gives_cost_of_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {**_GPU_VALUES, "schedule": {"max_steps": 100_000}}
    path = write(tmp_path / "tiny.yaml", values)
    found, said = planned(capfd, path, "--no-search", "--gpus", "2", "--price-per-hour", "0.5")
    run = found["run"]
    assert run["cost"] == pytest.approx(2 * 0.5 * run["seconds"] / 3600)
    assert f"as it stands, costs {run['cost']:,.2f}\n" in said


def test_plan_command_plans_for_this_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    values = {
        "data": {"dir": "/nowhere"},
        "model": _MODEL,
        "efficiency": {"precision": "fp32", "compile": False},
    }
    path = write(tmp_path / "tiny.yaml", values)
    assert main(["plan", path, "--no-search", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["best"] is None
    assert found["as_it_stands"]["fits"]
    assert found["as_it_stands"]["speed"]["tokens_per_second"]["expected"] > 0


def test_plan_command_prints_precision_and_next_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {**_GPU_VALUES, "data": {"dir": str(tmp_path / "data set")}}
    path = write(tmp_path / "tiny.yaml", values)
    options = ["--gpu", "RTX 4090", "--no-search"]
    assert main(["plan", path, *options, "--optimizer.learning_rate", "3e-4"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    first, *_, prepare, train = said.out.splitlines()
    assert "; bf16 with fp32 weights, sequences of " in first
    assert prepare.endswith(f"--out '{tmp_path / 'data set'}'")
    assert train == f"next: firstlight train {path} --optimizer.learning_rate 3e-4"
    assert " tokens/s" in said.out
    # The same recipe on a GPU with too little memory.
    small = [*options, "--gpu-memory", "200MiB", "--data.dir", "hf://datasets/x/y", "--json"]
    assert main(["plan", path, *small, "--batch.micro_batch_size", "4"]) == 3
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert (found["as_it_stands"]["fits"], found["as_it_stands"]["speed"]) == (False, None)
    assert (found["precision"], found["vocab_size"]) == ("bf16", _MODEL["vocab_size"])
    assert "DOES NOT FIT" in said.err
    assert "tokens/s" not in said.err
    last = said.err.splitlines()[-1]
    assert last == f"next: {found['next']}"
    assert last.endswith(" 4 --gpu 'RTX 4090' --gpu-memory 200MiB")


def test_changed_options_include_changes_of_best_candidate() -> None:
    changes = {"efficiency.compile": True, "lora": {"rank": 16, "target_modules": ["q_proj"]}}
    compiled = resolve_for(recipe(efficiency={"compile": True}), find_machine("H100"))
    way = Estimate("w", changes, compiled)
    assert changed_options(way) == {
        "efficiency.compile": "true",
        "lora.rank": "16",
        "lora.target_modules": '["q_proj"]',
    }


_FLASH_ON_T4 = [
    *("--gpu", "T4", "--efficiency.precision", "fp16", "--efficiency.attention", "flash")
]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--gpu", "RTX 4091"], "nearest are 'RTX 4090'"),
        (["--gpu-memory", "lots"], "is not a memory size"),
        (["--gpu", "T4", "--budget", "soon"], "is not a duration"),
        (["--gpu-memory", "24GiB", "--budget", "1h", "--no-search"], "requires a known GPU"),
        (["--gpu", "T4", "--model.num_attention_heads", "5"], "num_attention_heads"),
        (["--gpu", "T4", "--price-per-hour", "2"], "set schedule.max_steps, --budget"),
        (["--gpu", "A100 80GB", "--efficiency.precision", "fp8"], "this is A100 80GB: use bf16"),
        (_FLASH_ON_T4, "8.0 or higher (Ampere and later), but this is T4"),
    ],
)
def test_plan_command_impossible_request_prints_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    values = {"data": {"dir": "/nowhere"}, "model": _MODEL, "efficiency": {"compile": False}}
    assert main(["plan", write(tmp_path / "tiny.yaml", values), *options]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert said.count("firstlight: error: ") == 1
