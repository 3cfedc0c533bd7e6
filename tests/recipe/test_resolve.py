"""How `resolve` decides the keys that a recipe leaves open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ConfigError
from firstlight.hardware.compiling import Compiler
from firstlight.hardware.device import Hardware
from firstlight.methods import precision
from firstlight.optim.schedule import BatchSchedule, resolve_schedule
from firstlight.planner.plan import machine as machines
from firstlight.planner.plan.machine import resolve_for
from firstlight.recipe import (
    BatchConfig,
    PreferenceConfig,
    Recipe,
    ResolvedRecipe,
    parse_recipe,
    parse_resolved_recipe,
)
from firstlight.recipe import resolve as resolving
from firstlight.recipe.resolve import (
    Facts,
    facts_here,
    for_new_model,
    require_fitting_data,
    resolve,
)


def recipe_of(**sections: Any) -> Recipe:
    model = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 30,
        "max_position_embeddings": 16,
    }
    return parse_recipe(
        {
            "data": {"dir": "data", "seq_len": 16},
            **sections,
            "model": model | sections.get("model", {}),
        }
    )


@dataclass
class Place:
    """A machine and its data, which a test can change."""

    rate: float = 1e12
    precision: Any = "bf16"
    compiles: bool = True
    cores: int = 16
    device: str = "cpu"
    rows: int = 4
    tokens: int | None = 10**6
    tries: int = 0
    processes: int = 1
    new_model: bool = False
    kind: Any = None
    told: list[str] = field(default_factory=list)

    def resolve(self, recipe: Recipe, earlier: Mapping[str, Any] | None = None) -> ResolvedRecipe:
        def largest(_: Recipe) -> int:
            self.tries += 1
            return self.rows

        facts = Facts(
            self.device,
            self.precision,
            Compiler(self.device, device="", cores=self.cores) if self.compiles else None,
            lambda _: self.rate,
            processes=self.processes,
            epoch_tokens=self.tokens,
            new_model=self.new_model,
            kind=self.kind,
            earlier=earlier or {},
            largest_micro_batch=largest,
        )
        return resolve(recipe, facts, self.told.append)


def test_resolve_sets_every_open_key() -> None:
    recipe = recipe_of(batch={"micro_batch_size": "auto", "global_batch_tokens": 128})
    place = Place()
    found = place.resolve(recipe)
    assert found.efficiency.precision == "bf16"
    assert found.efficiency.attention == "sdpa"
    assert found.efficiency.compile is False
    assert found.efficiency.loss_chunk_tokens == 0
    assert found.batch.micro_batch_size == 4
    # And no other key.
    keys = {"precision", "attention", "compile", "loss_chunk_tokens"}
    assert found.efficiency.model_dump(exclude=keys) == recipe.efficiency.model_dump(exclude=keys)
    sections = {"efficiency", "batch"}
    assert found.model_dump(exclude=sections) == recipe.model_dump(exclude=sections)
    assert place.told == ["chosen for this machine: bf16, attention sdpa, not compiled"]


def test_resolve_row_length_is_at_most_model_context() -> None:
    data = {"dir": "data"}
    assert Place().resolve(recipe_of(data=data)).data.seq_len == 16
    with pytest.raises(ConfigError, match=r"data.seq_len 17 is more than .* 16: lower"):
        Place().resolve(recipe_of(data={**data, "seq_len": 17}))


def test_resolve_large_heads_in_bf16_on_cpu_use_blockwise_attention() -> None:
    recipe = recipe_of(model={"hidden_size": 128, "head_dim": 64})
    assert Place().resolve(recipe).efficiency.attention == "blockwise"
    assert Place(precision="fp32").resolve(recipe).efficiency.attention == "sdpa"


def test_resolve_document_masking_on_gpu_uses_flex_if_compilable() -> None:
    recipe = recipe_of(data={"dir": "data", "document_masking": True})
    assert Place(device="cuda").resolve(recipe).efficiency.attention == "flex"
    assert Place(device="cuda", compiles=False).resolve(recipe).efficiency.attention == "sdpa"


def test_resolve_keeps_given_values() -> None:
    efficiency = {"precision": "fp32", "attention": "math", "compile": True, "loss_chunk_tokens": 7}
    recipe = recipe_of(efficiency=efficiency, batch={"micro_batch_size": 2})
    place = Place()
    assert place.resolve(recipe).model_dump() == recipe.model_dump()
    assert place.told == []
    assert place.tries == 0


def test_resolve_resumed_run_keeps_earlier_choices() -> None:
    recipe = recipe_of(
        model={"hidden_size": 128, "head_dim": 64},
        batch={"micro_batch_size": "auto", "global_batch_tokens": 128},
    )
    first = Place().resolve(recipe)
    assert first.efficiency.attention == "blockwise"
    place = Place(precision="fp32", rate=1.0, rows=8)
    # A new run would be resolved differently today.
    assert place.resolve(recipe) != first
    assert place.tries == 1
    assert place.resolve(recipe, first.model_dump()) == first
    assert place.tries == 1


def test_resolve_cpu_attention_is_not_kept_on_gpu() -> None:
    before = Place().resolve(recipe_of(efficiency={"attention": "blockwise"})).model_dump()
    assert Place(device="cuda").resolve(recipe_of(), before).efficiency.attention == "sdpa"
    assert Place().resolve(recipe_of(), before).efficiency.attention == "blockwise"


def test_resolve_resumed_run_uses_keys_now_in_recipe() -> None:
    first = Place().resolve(recipe_of()).model_dump()
    given = {"precision": "fp32", "attention": "plain", "compile": True, "loss_chunk_tokens": 7}
    recipe = recipe_of(efficiency=given)
    found = Place().resolve(recipe, first).efficiency
    assert found.model_dump() == recipe.efficiency.model_dump()


def test_resolve_long_run_is_compiled_if_possible() -> None:
    assert Place(rate=1e3).resolve(recipe_of()).efficiency.compile is True
    assert Place(rate=1e3, compiles=False).resolve(recipe_of()).efficiency.compile is False
    # The length is unknown: most runs are long.
    assert Place(tokens=None).resolve(recipe_of()).efficiency.compile is True


@pytest.mark.parametrize(
    ("device", "cores", "chosen"),
    [
        ("cuda", 16, {40: None, 60: True, 200: True, 400: False}),  # like an H100
        ("cuda", 2, {40: None, 60: None, 200: True, 1200: False}),  # like a T4
        ("cpu", 2, {40: None, 60: None, 200: None, 600: True}),
    ],
)
def test_resolve_compile_auto_compiles_if_run_is_long_enough(
    device: str, cores: int, chosen: dict[int, bool | None]
) -> None:
    """`chosen` is the resolved `compile_regional` by seconds of the run; None is not compiled."""
    wide = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    place = Place(device=device, cores=cores, tokens=None)
    for seconds, regional in chosen.items():
        recipe = recipe_of(model=wide, schedule={"max_minutes": seconds / 60})
        found = place.resolve(recipe).efficiency
        assert (found.compile, found.compile_regional) == (regional is not None, regional is True)


def test_resolve_compile_auto_keeps_given_compile_regional() -> None:
    for regional in (True, False):
        recipe = recipe_of(efficiency={"compile_regional": regional})
        found = Place(device="cuda", tokens=None).resolve(recipe).efficiency
        assert (found.compile, found.compile_regional) == (True, regional)


def test_resolve_resumed_run_keeps_its_compile_mode() -> None:
    deep = {"num_hidden_layers": 8}
    recipe, short = recipe_of(model=deep), recipe_of(model=deep, schedule={"max_minutes": 1.0})
    first = Place(device="cuda", tokens=None).resolve(short)
    assert first.efficiency.compile_regional is True
    again = Place(device="cuda", tokens=None).resolve(recipe, first.model_dump())
    assert (again.efficiency.compile, again.efficiency.compile_regional) == (True, True)
    off = first.with_keys("efficiency", compile=False, compile_regional=False).model_dump()
    assert Place(device="cuda", tokens=None).resolve(recipe, off).efficiency.compile is False


def test_resolve_launch_bound_steps_count_for_compiling() -> None:
    """At the peak rate, 20,000 steps of this tiny model would take almost no time."""
    recipe = recipe_of(schedule={"max_steps": 20_000}, model={"num_hidden_layers": 8})
    assert Place(device="cuda", rate=1e15).resolve(recipe).efficiency.compile is True
    assert Place(device="cpu", rate=1e15).resolve(recipe).efficiency.compile is False


@pytest.mark.parametrize(
    "how", [{"compile_regional": True}, {"activation_checkpointing": "budget"}], ids=str
)
def test_resolve_compile_only_keys_enable_compile(how: dict[str, Any]) -> None:
    assert Place().resolve(recipe_of(efficiency=how)).efficiency.compile is True


def test_resolve_fp8_compiles_run_of_any_length_unless_disabled() -> None:
    def compiled(**efficiency: Any) -> Any:
        keys = {"precision": "fp8", **efficiency}
        recipe = recipe_of(efficiency=keys, schedule={"max_steps": 10})
        return Place(device="cuda").resolve(recipe).efficiency.compile

    assert compiled() is True
    assert compiled(compile=False) is False
    assert compiled(precision="bf16") is False


@pytest.mark.parametrize(
    ("distributed", "compiles"),
    [
        ({"pipeline": 2}, False),
        ({"tensor_parallel": 2}, False),
        ({"engine": "deepspeed"}, False),
        ({"engine": "fsdp"}, True),
    ],
    ids=str,
)
def test_resolve_compiles_only_with_supporting_engines(
    distributed: dict[str, Any], compiles: bool
) -> None:
    recipe = recipe_of(
        distributed=distributed, model={"vocab_size": 20_000}, efficiency={"precision": "fp32"}
    )
    found = Place(rate=1e3).resolve(recipe).efficiency
    assert found.compile is compiles
    parts = {"pipeline", "tensor_parallel"} & set(distributed)
    assert found.loss_chunk_tokens == (0 if parts else 512)


@pytest.mark.parametrize("key", ["pipeline", "tensor_parallel"])
def test_resolve_auto_micro_batch_with_model_parallelism_raises_config_error(key: str) -> None:
    batch = {"micro_batch_size": "auto", "global_batch_tokens": 64}
    with pytest.raises(ConfigError, match=f"distributed.{key} .* set a number"):
        Place().resolve(recipe_of(batch=batch, distributed={key: 2}))


def test_resolve_run_length_follows_steps() -> None:
    def compiles(steps: int | None, **batch: Any) -> Any:
        recipe = recipe_of(schedule={"max_steps": steps}, batch=batch)
        return Place(rate=1e9, tokens=10**9).resolve(recipe).efficiency.compile

    assert compiles(None) is True
    assert compiles(1) is False
    assert compiles(10**7) is True
    assert compiles(1, global_batch_tokens=16 * 10**8) is True


def test_resolve_chunks_loss_where_it_costs_nothing() -> None:
    large = {"vocab_size": 50257}
    in_fp32 = Place(precision="fp32")
    assert in_fp32.resolve(recipe_of(model=large)).efficiency.loss_chunk_tokens == 512
    assert in_fp32.resolve(recipe_of()).efficiency.loss_chunk_tokens == 0
    assert Place().resolve(recipe_of(model=large)).efficiency.loss_chunk_tokens == 0


def test_resolve_splits_cpu_step_into_micro_batches_that_fill_threads() -> None:
    def rows(device: str = "cpu", **batch: Any) -> Any:
        recipe = recipe_of(
            batch={"micro_batch_size": None, **batch},
            data={"dir": "data", "seq_len": 512},
            model={"max_position_embeddings": 512},
        )
        return Place(device=device).resolve(recipe).batch.micro_batch_size

    assert rows(global_batch_tokens=16 * 512) == 2
    assert rows("cuda", global_batch_tokens=16 * 512) == 8
    assert rows(global_batch_tokens=15 * 512) == 1
    assert rows(global_batch_tokens=16 * 512, gradient_accumulation_steps=4) == 4
    # Accumulation applies to whole steps; without it, the first steps must divide evenly.
    ramp = {"global_batch_tokens": 16 * 512, "ramp_start_tokens": 4 * 512, "ramp_steps": 3}
    assert rows("cuda", gradient_accumulation_steps=4, **ramp) == 4
    assert rows("cuda", **ramp) == 4
    assert rows() == 8


@pytest.mark.parametrize(
    "processes, batch, expected",
    [
        (2, {}, 6),
        (3, {}, 4),
        (4, {}, 3),
        (1, {}, 12),
        (2, {"gradient_accumulation_steps": 3}, 2),
        (2, {"ramp_start_tokens": 64, "ramp_steps": 3}, 2),
    ],
)
def test_resolve_chosen_micro_batch_is_divided_among_processes(
    processes: int, batch: dict[str, int], expected: int
) -> None:
    whole = {"global_batch_tokens": 192, **batch}
    place = Place(processes=processes)
    # In the recipe that a run has saved, and in the checkpoint of a run that left the key open.
    written = recipe_of(batch={"micro_batch_size": 12, "divide_micro_batch": True, **whole})
    found = place.resolve(written).batch
    assert found.micro_batch_size == expected
    assert found.global_batch_tokens == 192
    share = batch.get("gradient_accumulation_steps", 12 // (processes * expected))
    assert found.accumulation(16, processes) == share
    earlier = {"batch": {"micro_batch_size": 12}}
    again = place.resolve(recipe_of(batch={"micro_batch_size": None, **whole}), earlier)
    assert again.batch == found
    told = [one for one in place.told if "instead of the chosen 12" in one]
    assert len(told) == (0 if expected == 12 else 2)


def test_resolve_indivisible_batch_across_processes_raises_with_alternatives() -> None:
    def refused(processes: int, **batch: Any) -> str:
        config = parse_recipe({"data": {"dir": "data"}, "batch": batch}).batch
        with pytest.raises(ConfigError) as caught:
            config.accumulation(16, processes)
        return str(caught.value).rpartition(": ")[2]

    given: Any = {"micro_batch_size": 8, "global_batch_tokens": 128}
    assert refused(2, **given) == "set batch.micro_batch_size to 4, or use 256"
    assert BatchConfig(**given | {"micro_batch_size": 4}).accumulation(16, 2) == 1
    assert refused(3, **given) == "start 2 or 4 processes, or use 384"
    assert refused(12, **given) == "start 8 processes, or use 1536"
    assert refused(1, **given | {"micro_batch_size": 3}) == (
        "set batch.micro_batch_size to 2, or use 96 or 144"
    )
    # The chosen micro-batch size follows the tokens per step.
    chosen = {"divide_micro_batch": True, **given}
    assert refused(3, **chosen) == "start 2 or 4 processes, or use 96 or 144"


def test_resolve_micro_batch_option_replaces_chosen_one() -> None:
    values = {"data": {"dir": "data"}, "batch": {"divide_micro_batch": True}}
    batch = parse_recipe(values, "recipe", [("batch.micro_batch_size", "8")]).batch
    assert (batch.micro_batch_size, batch.divide_micro_batch) == (8, False)


def test_resolve_run_begun_with_torch_adafactor_keeps_it() -> None:
    """Such a checkpoint was saved before the key existed."""
    recipe = recipe_of(optimizer={"name": "adafactor"}, batch={"micro_batch_size": 2})
    first = Place().resolve(recipe)
    assert first.optimizer.adafactor_variant == "paper"
    assert Place().resolve(recipe, first.model_dump()).optimizer.adafactor_variant == "paper"
    saved = first.model_dump()
    del saved["optimizer"]["adafactor_variant"]
    place = Place()
    assert place.resolve(recipe, saved).optimizer.adafactor_variant == "torch"
    assert any("continues with it" in line for line in place.told)
    asked = recipe_of(
        optimizer={"name": "adafactor", "adafactor_variant": "paper"}, batch={"micro_batch_size": 2}
    )
    assert Place().resolve(asked, saved).optimizer.adafactor_variant == "paper"


def test_resolve_run_begun_with_8_bit_embeddings_keeps_them() -> None:
    """If the key was not set, older versions saved False, and even older ones saved nothing."""
    recipe = recipe_of(optimizer={"name": "adamw8bit"}, batch={"micro_batch_size": 2})
    first = Place().resolve(recipe)
    assert first.optimizer.embeddings_in_32_bits is True
    again = Place().resolve(recipe, first.model_dump())
    assert again.optimizer.embeddings_in_32_bits is True
    saved = first.model_dump()
    saved["optimizer"]["embeddings_in_32_bits"] = False
    assert Place().resolve(recipe, saved).optimizer.embeddings_in_32_bits is False
    del saved["optimizer"]["embeddings_in_32_bits"]
    assert Place().resolve(recipe, saved).optimizer.embeddings_in_32_bits is False


def test_resolve_open_key_where_none_allowed_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="precision and attention must not be auto"):
        parse_resolved_recipe(
            {
                **Place().resolve(recipe_of()).model_dump(),
                "efficiency": {"compile": False, "loss_chunk_tokens": 0},
            }
        )


_RECIPES = st.fixed_dictionaries(
    {
        "vocab_size": st.sampled_from([30, 16384, 50257]),
        "head_dim": st.sampled_from([16, 64]),
        "precision": st.sampled_from(["auto", "fp32", "bf16", "bf16_params", "fp16", "tf32"]),
        "compile": st.sampled_from(["auto", True, False]),
        "compile_regional": st.sampled_from([None, True, False]),
        "attention": st.sampled_from(["auto", "sdpa", "plain"]),
        "loss_chunk_tokens": st.sampled_from([None, 0, 128]),
        "micro_batch_size": st.sampled_from([None, 2]),
        "global_batch_tokens": st.sampled_from([None, 24 * 64, 2**16]),
        "seq_len": st.sampled_from([None, 64]),
        "document_masking": st.booleans(),
        "max_steps": st.sampled_from([None, 1, 10**6]),
        "engine": st.sampled_from(["auto", "fsdp", "deepspeed"]),
        "lora": st.sampled_from([None, None, {"rank": 4}]),
        "model_type": st.sampled_from(["llama", "qwen3"]),
        "tie_word_embeddings": st.booleans(),
        "optimizer": st.sampled_from([None, None, "adamw", "muon", "adafactor"]),
        "kind": st.sampled_from([None, None, "cosine"]),
    }
)


def named(key: str, value: Any) -> dict[str, Any]:
    """Return a section with a key, or without it."""
    return {} if value is None else {key: value}


@settings(max_examples=200, deadline=None)
@given(
    drawn=_RECIPES,
    bf16=st.booleans(),
    compiler=st.booleans(),
    rate=st.sampled_from([1e9, 1e12]),
    tokens=st.sampled_from([10**4, 10**9]),
)
def test_resolve_gives_same_recipe_for_train_and_plan(
    drawn: dict[str, Any],
    bf16: bool,
    compiler: bool,
    rate: float,
    tokens: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    manifest = {"vocab_size": drawn["vocab_size"], "splits": {"train": {"tokens": tokens}}}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    recipe = parse_recipe(
        {
            "model": {
                "hidden_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 128,
                **{
                    key: drawn[key]
                    for key in ("model_type", "head_dim", "vocab_size", "tie_word_embeddings")
                },
            },
            "data": {
                "dir": str(folder),
                "seq_len": drawn["seq_len"],
                "document_masking": drawn["document_masking"],
            },
            "efficiency": {
                key: drawn[key]
                for key in ("precision", "compile", "attention", "loss_chunk_tokens")
            }
            | named("compile_regional", drawn["compile_regional"]),
            "batch": {key: drawn[key] for key in ("micro_batch_size", "global_batch_tokens")},
            "schedule": {"max_steps": drawn["max_steps"], **named("kind", drawn["kind"])},
            "distributed": {"engine": drawn["engine"]},
            "lora": drawn["lora"],
            "optimizer": named("name", drawn["optimizer"]),
        }
    )
    cpu = Hardware(torch.device("cpu"), "the CPU of a test", 2**33, bf16=bf16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machines, "find_hardware", lambda _: cpu)
        for module in (machines, precision):
            patched.setattr(module, "bf16_is_faster", lambda _: True)
        patched.setattr(resolving, "peak_flops", lambda *_: rate)
        known = Compiler("cpu", device="", cores=2) if compiler else None
        patched.setattr(resolving, "find_compiler", lambda _: known)
        planned = resolve_for(recipe, machines.find_machine())
        trained = resolve(recipe, facts_here(cpu, epoch_tokens=tokens, new_model=True))
        # As before settings for new models existed.
        before = resolve(recipe, facts_here(cpu, epoch_tokens=tokens))
    assert planned == trained
    has_layout = drawn["model_type"] == "qwen3" and not drawn["tie_word_embeddings"]
    names_none = (drawn["optimizer"], drawn["kind"], drawn["lora"]) == (None, None, None)
    takes_new = has_layout and names_none and drawn["engine"] != "deepspeed"
    assert (trained.schedule.kind == "wsd") is takes_new
    if not takes_new:
        assert trained == before


_NEW = {"model_type": "qwen3", "tie_word_embeddings": False, "hidden_size": 48}


def test_for_new_model_recipe_without_settings_gets_new_model_defaults() -> None:
    recipe = recipe_of(model=_NEW, schedule={"max_steps": 300})
    place = Place(new_model=True)
    found = place.resolve(recipe)
    assert place.told[0] == (
        "the recipe sets no optimizer, schedule or initial weights: using the settings for new "
        "models"
    )
    rates = found.optimizer
    # The keys that a model of width 192 gets, at a quarter of that width.
    assert (rates.name, rates.muon_learning_rate) == ("muon", 0.024)
    assert (rates.learning_rate, rates.head_lr_multiple) == (0.3, 0.08)
    assert (rates.muon_beta2, rates.embedding_weight_decay, rates.max_grad_norm) == (0.95, 0, 0)
    assert found.init.residual_projections == "zero"
    schedule = found.schedule
    assert (schedule.kind, schedule.max_steps, schedule.decay_fraction) == ("wsd", 300, 0.65)
    assert (schedule.min_lr_ratio, schedule.warmup_ratio) == (0, 0.02)
    # Resolved recipes are complete, so they do not change when resolved again.
    assert for_new_model(found, {}) is found


def last_scale(steps: int = 100, earlier: Any = None, **keys: Any) -> float:
    """Return the learning rate of a run's last step as a fraction of the peak."""
    recipe = recipe_of(schedule={"max_steps": steps, **keys})
    found = Place().resolve(recipe, earlier).schedule
    batch = BatchSchedule(4, 4)
    return resolve_schedule(found, 1.0, 1000, batch, seq_len=32).lr_scale(steps - 1)


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "wsd"},
        {"kind": "wsd", "decay_shape": "1-sqrt"},
        {"kind": "linear", "min_lr_ratio": 0},
        {"kind": "cosine", "min_learning_rate": 0},
    ],
)
def test_schedule_that_ends_at_zero_does_so_after_last_step(
    steps: int, keys: dict[str, Any]
) -> None:
    assert last_scale(steps, **keys) > 0
    assert last_scale(steps, **keys, decay_starts_at_peak=False) == pytest.approx(0)


def test_schedule_with_minimum_or_own_end_keeps_its_curve() -> None:
    assert last_scale(kind="wsd", min_lr_ratio=0.1) == pytest.approx(0.1)
    assert last_scale(kind="wsd", decay_steps=100) == 0
    assert last_scale(kind="constant") == 1


def test_schedule_of_resumed_run_keeps_its_curve() -> None:
    older = {"schedule": {"kind": "wsd", "decay_starts_at_peak": None}}
    assert last_scale(kind="wsd", earlier=older) == 0
    trunk = {"schedule": {"kind": "constant", "decay_starts_at_peak": None}}
    assert last_scale(kind="wsd", earlier=trunk) > 0
    late = {"schedule": {"kind": "wsd", "decay_starts_at_peak": True}}
    assert last_scale(kind="wsd", min_lr_ratio=0.1, earlier=late) > 0.1


@pytest.mark.parametrize("keys", [{"min_lr_ratio": 0.1}, {"min_lr_ratio": 0, "decay_steps": 90}])
def test_schedule_changed_to_end_at_zero_does_so_after_last_step(keys: dict[str, Any]) -> None:
    trunk = {"schedule": {"kind": "wsd", "decay_starts_at_peak": None, **keys}}
    assert last_scale(kind="wsd", earlier=trunk) > 0


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"model_type": "llama"}},
        {"model": {**_NEW, "tie_word_embeddings": True}},
        {"optimizer": {"learning_rate": 1e-3}},
        {"optimizer": {"weight_decay": 0.05}},
        {"schedule": {"min_lr_ratio": 0.1}},
        {"schedule": {"warmup_steps": 10}},
        {"init": {"head_std": 0.02}},
        {"lora": {"rank": 2}},
        {"distributed": {"engine": "deepspeed"}},
        {"distributed": {"engine": "fsdp", "offload": "cpu"}},
    ],
    ids=str,
)
def test_for_new_model_recipe_with_settings_is_unchanged(given: dict[str, Any]) -> None:
    recipe = recipe_of(**{"model": _NEW, **given})
    assert for_new_model(recipe, {}) is recipe


@pytest.mark.parametrize("named_before", [False, True])
def test_for_new_model_resumed_run_keeps_original_settings(named_before: bool) -> None:
    recipe = recipe_of(model=_NEW, schedule={"max_steps": 300})
    # A run from before settings for new models existed, or one whose recipe sets them itself.
    own = {"optimizer": {"learning_rate": 2e-3}, "schedule": {"kind": "linear", "max_steps": 200}}
    began = recipe_of(model=_NEW, **(own if named_before else {}))
    earlier = Place().resolve(began).model_dump(mode="json")
    found = Place().resolve(recipe, earlier)
    assert found.optimizer == began.optimizer
    assert found.schedule == began.schedule.model_copy(update={"max_steps": 300})
    assert found.init == began.init
    # A run that started with them continues with them.
    new = Place(new_model=True).resolve(recipe)
    again = Place().resolve(recipe, new.model_dump(mode="json"))
    assert again == new


@pytest.mark.parametrize("pairs", [False, True])
def test_plan_detects_conversations_or_pairs_in_prepared_folder(
    pairs: bool, tmp_path: Path
) -> None:
    manifest = {"version": 2, "pairs": pairs, "vocab_size": 30, "splits": {"train": {"tokens": 9}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    planned = resolve_for(recipe_of(data={"dir": str(tmp_path)}), machines.find_machine("H100"))
    assert planned.data.document_masking
    assert planned.efficiency.attention == "flex"
    assert (planned.preference is not None) is pairs


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_resolve_data_kind_decides_masking_and_preference_section(kind: str) -> None:
    found = Place(kind=kind).resolve(recipe_of())
    assert found.data.document_masking is (kind != "text")
    assert (found.data.kind, found.preference) == (
        ("preference", PreferenceConfig()) if kind == "preference" else (None, None)
    )


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        ("chat", {"data": {"dir": "data", "document_masking": False}}, "can't be disabled for"),
        (
            "text",
            {"preference": {"beta": 0.2}},
            "set data.kind to preference, or remove the section",
        ),
        ("preference", {}, "need a model that can already answer"),
    ],
)
def test_resolve_recipe_contradicting_its_data_raises_config_error(
    kind: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_fitting_data(recipe_of(**sections), kind, from_weights=False)


def test_resolve_facts_of_run_set_model_and_folder() -> None:
    recipe = recipe_of(data={"dir": "data"})
    assert recipe.model is not None
    model = recipe.model.model_copy(update={"vocab_size": 77, "max_position_embeddings": 48})
    cpu = Hardware(torch.device("cpu"), "the CPU of a test", 2**33, bf16=True)
    found = resolve(recipe, facts_here(cpu, model=model, run_folder=Path("runs/a")))
    assert (found.model, found.data.seq_len, found.run.dir) == (model, 48, "runs/a")


@pytest.mark.parametrize("size", [None, "auto", 0])
def test_resolved_recipe_without_micro_batch_size_raises_config_error(size: Any) -> None:
    values = Place().resolve(recipe_of()).model_dump()
    with pytest.raises(ConfigError, match=r"batch.micro_batch_size"):
        parse_resolved_recipe({**values, "batch": {"micro_batch_size": size}})


@pytest.mark.parametrize("given", [{"head_dim": "64"}, {"head_dim": 0, "hidden_size": "x"}])
def test_granite_non_numeric_sizes_raise_config_error(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.(head_dim|hidden_size)"):
        recipe_of(model={"model_type": "granite", **given})


def test_granite_zero_multiplier_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"attention_multiplier"):
        recipe_of(model={"model_type": "granite", "attention_multiplier": 0.0})
