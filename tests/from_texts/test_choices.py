"""Tests of the settings that are chosen from facts. The functions are pure, so general properties
can be tested.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError
from firstlight.from_texts.choices import candidate_shapes, choose, choose_vocabulary
from firstlight.from_texts.plan import (
    STATE_BYTES,
    Choices,
    PartFacts,
    expected_range,
    length_lines,
)
from firstlight.from_texts.request import request_of
from firstlight.from_texts.run_folder import commented_yaml
from firstlight.from_texts.scan import CorpusFacts, estimated_text
from firstlight.hardware.compiling import NOT_COMPILED, Compiler
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import (
    Hardness,
    Length,
    MachineFacts,
    ModelSize,
    TextFacts,
    expected_bits,
    longer_text,
    worth_of_bytes,
)
from firstlight.recipe import parse_recipe
from firstlight.recipe.load import parse_yaml

MACHINE = MachineFacts("two cores", "cpu", [(9e6, 20_000.0), (56e6, 4_500.0)], 8 << 30)
TEXT = TextFacts(4096, 3.4e6, 3.3, Hardness(1.72, 2.24, 1.0), 3e5)


def with_hardness(**changes: float) -> TextFacts:
    return dataclasses.replace(TEXT, hardness=dataclasses.replace(TEXT.hardness, **changes))


def corpus(**changes: Any) -> CorpusFacts:
    facts = CorpusFacts(
        documents=100,
        text_bytes=12_000_000,
        characters=12_000_000,
        total_bytes=12_000_000,
        common_characters=90,
        scripts={},
        duplicates=0,
        near_duplicates=0,
        compared=100,
        rejected={},
        first_rejected={},
        gzip_bits_per_byte=1.87,
        hardness=Hardness(1.72, 2.77, 1.0),
        content_key="key",
    )
    return dataclasses.replace(facts, **changes)


def recipe_of(choices: Choices) -> Any:
    return parse_recipe(choices.values | {"data": {**choices.values["data"], "dir": "d"}})


@pytest.mark.parametrize(
    "size, tokens",
    [(1e4, 512), (1.1e6, 512), (2e6, 1024), (5e6, 2048), (12e6, 4096), (2e9, 16384), (2e10, 32768)],
)
def test_choose_vocabulary_grows_with_text(size: float, tokens: int) -> None:
    assert choose_vocabulary(corpus(total_bytes=int(size)), {}).value == tokens


def test_choose_vocabulary_large_script_gets_tokens_for_its_characters() -> None:
    korean = corpus(total_bytes=1_000_000, common_characters=1500)
    assert choose_vocabulary(korean, {}).value == 4096
    assert choose_vocabulary(korean, {"model.vocab_size": 1000}).value == 1000


def test_estimated_text_three_byte_script_has_more_bytes_per_token() -> None:
    latin, han = corpus(), corpus(characters=4_000_000)
    assert (
        estimated_text(han, 4096, 1e6).bytes_per_token
        > estimated_text(latin, 4096, 1e6).bytes_per_token
    )


def test_tokens_per_second_is_interpolated_between_known_speeds() -> None:
    assert MACHINE.tokens_per_second(9e6) == pytest.approx(20_000)
    assert MACHINE.tokens_per_second(56e6) == pytest.approx(4_500)
    assert MACHINE.tokens_per_second(103e6) == pytest.approx(1 / (2 / 4_500 - 1 / 20_000))
    # However small the model, a token costs at least half as much as with the smallest known model.
    assert MACHINE.tokens_per_second(0.0) <= 40_000


def test_tokens_per_second_small_step_is_limited_by_kernel_launches() -> None:
    steps = [(9e6, 0.02), (56e6, 0.05)]
    gpu = dataclasses.replace(MACHINE, kind="cuda", rates=[(9e6, 2e6), (56e6, 5e5)], steps=steps)
    assert gpu.tokens_per_second(9e6) == gpu.tokens_per_second(9e6, 1e9) == pytest.approx(2e6)
    assert gpu.tokens_per_second(9e6, 4096) == pytest.approx(4096 / 0.02)
    assert gpu.tokens_per_second(32.5e6, 4096) == pytest.approx(4096 / 0.035)
    assert gpu.tokens_per_second(103e6, 4096) == pytest.approx(4096 / 0.08)
    steep = dataclasses.replace(gpu, steps=[(9e6, 0.02), (10e6, 0.05)])
    assert steep.tokens_per_second(0.0, 4096) == pytest.approx(4096 / 0.01)
    one = dataclasses.replace(gpu, rates=gpu.rates[:1], steps=steps[:1])
    assert one.tokens_per_second(9e6, 4096) == pytest.approx(4096 / 0.02)
    assert MACHINE.tokens_per_second(9e6, 1) == MACHINE.tokens_per_second(9e6)


def test_choose_model_accounts_for_minimum_step_time() -> None:
    """In three minutes, a GPU whose steps take 50 ms can do at most 3,600 steps."""
    steps = [(9e6, 0.05), (56e6, 0.05)]
    gpu = dataclasses.replace(MACHINE, kind="cuda", rates=[(9e6, 1e7), (56e6, 1e6)], steps=steps)
    text = dataclasses.replace(TEXT, train_tokens=1e9)
    found = choose(text, gpu, Length(180.0))
    assert 2000 < found.steps <= 3600
    assert found.tokens_per_second == pytest.approx(found["batch.global_batch_tokens"] / 0.05)


@pytest.mark.parametrize(
    ("seconds", "given", "way"),
    [
        (30.0, {}, (False, False)),
        (130.0, {}, (True, True)),
        (110.0, {"efficiency.compile": False}, (False, False)),
        (150.0, {"efficiency.compile_regional": False}, (True, False)),
        (30.0, {"efficiency.compile": True}, (True, False)),
        (30.0, {"efficiency.precision": "fp8"}, (True, True)),
        (110.0, {"distributed.engine": "deepspeed"}, (False, False)),
    ],
    ids=str,
)
def test_choose_compile_mode_fits_time_and_speed_includes_gain(
    seconds: float, given: dict[str, Any], way: tuple[bool, bool]
) -> None:
    compiler = Compiler("cpu", device="", cores=2)
    machine = dataclasses.replace(MACHINE, compiler=compiler)
    found = choose(TEXT, machine, Length(seconds), given, "tiny")
    plain = choose(TEXT, MACHINE, Length(seconds), None, "tiny")
    compiles, regional = way
    assert (found["efficiency.compile"], found["efficiency.compile_regional"]) == way
    width, layers = found["model.hidden_size"], found["model.num_hidden_layers"]
    modes = {one.regional: one for one in compiler.modes((width, layers))}
    chosen = modes[regional] if compiles else NOT_COMPILED
    # The time for compiling is not available for steps.
    rate = chosen.gain * plain.tokens_per_second
    assert found.tokens_per_second == pytest.approx(rate)
    left = seconds - chosen.seconds
    assert found.tokens == pytest.approx(rate * left * (1 - defaults.EVALUATION_SHARE), rel=0.02)
    # In 30 s, the parts other than steps need more than their usual share.
    assert found.seconds == pytest.approx(seconds, rel=0.08)
    line = next(length_lines(found, machine, "the text"))
    assert (f"speed-up of {chosen.gain:.2f} from compiling" in line) is compiles


@pytest.mark.parametrize(
    ("parameters", "held_out", "seq_len", "rate", "seconds", "counts"),
    [
        # (evaluations after steps, rows, sample texts, their tokens, checkpoints)
        (2e6, 1e6, 256, 15_000, 170, (4, 189, 3, 64, 6)),
        (20e6, 1e6, 512, 1000, 600, (4, 24, 3, 64, 6)),
        (20e6, 1e6, 512, 180, 170, (1, 5, 1, 32, 5)),
        (135e6, 1e6, 256, 180, 230, (1, 9, 1, 32, 1)),
        (135e6, 1e6, 1024, 100, 170, (1, 2, 1, 32, 1)),
        (135e6, 1e6, 1024, 100, 3600, (2, 22, 3, 64, 6)),
        (135e6, 0.0, 256, 180, 230, (1, 0, 1, 64, 1)),
        (300e6, 1e6, 1024, 100, 170, (1, 2, 1, 32, 1)),
    ],
)
def test_run_parts_of_slow_model_are_few(
    parameters: float,
    held_out: float,
    seq_len: int,
    rate: float,
    seconds: float,
    counts: tuple[int, ...],
) -> None:
    facts = PartFacts(seq_len, held_out, STATE_BYTES * parameters, {})
    found = facts.parts(rate, seconds, seconds)
    assert dataclasses.astuple(found)[:5] == counts


@given(
    st.floats(1, 1e6),
    st.floats(1e5, 1e9),
    st.sampled_from([64, 256, 1024]),
    st.floats(0, 1e6),
    st.floats(1, 1e5),
    st.floats(1e3, 1e9),
)
def test_run_parts_and_steps_fit_each_accepted_time(
    rate: float, parameters: float, seq_len: int, held: float, seconds: float, most: float
) -> None:
    facts = PartFacts(seq_len, held, STATE_BYTES * parameters, {})
    least = facts.least_seconds(rate, most, seq_len)
    loop = max(seconds, least)
    found = facts.parts(rate, loop, loop)
    steps = 1 - found.share
    assert found.seconds <= found.share * found.loop_seconds * (1 + 1e-9)
    assert steps >= 0.5 * (1 - 1e-9)
    wanted = min(defaults.LEAST_STEPS * seq_len, most)
    assert rate * steps * found.loop_seconds >= wanted * 0.9


@pytest.mark.parametrize(
    ("tokens", "length", "saves", "reason"),
    [
        # Time alone causes the checkpoints; the limit of epochs ends the run early; no time limit.
        (1e9, Length(60.0), 1, "also every 10 s: 6 checkpoints, "),
        (1e5, Length(600.0), 6, "also every 1 min 40 s: 6 checkpoints, "),
        (1e9, Length(None, steps=600), 6, "6 checkpoints, "),
    ],
)
def test_choose_run_loses_at_most_a_sixth_if_killed(
    tokens: float, length: Length, saves: int, reason: str
) -> None:
    found = choose(dataclasses.replace(TEXT, train_tokens=tokens), MACHINE, length, {}, "tiny")
    assert found["checkpoint.every_steps"] == -(-found.steps // saves)
    (why,) = (one.reason for one in found.choices if one.key == "checkpoint.every_steps")
    assert why.startswith(reason)


def test_choose_model_without_time_to_compile_is_not_largest() -> None:
    machine = dataclasses.replace(MACHINE, compiler=Compiler("cpu", device="", cores=2))
    found = choose(TEXT, machine, Length(5.0), {"efficiency.compile": True})
    assert found.parameters <= choose(TEXT, MACHINE, Length(5.0)).parameters


def test_choose_long_run_gets_longer_sequences() -> None:
    lengths = {
        tokens: choose(TEXT, MACHINE, Length(None, tokens=tokens), size="tiny")["data.seq_len"]
        for tokens in (2e6, 4.9e6, 5.1e6, 2e7)
    }
    assert lengths == {2e6: 256, 4.9e6: 256, 5.1e6: 512, 2e7: 512}
    wide = choose(TEXT, MACHINE, Length(None, tokens=2e6), size="medium")
    assert wide["data.seq_len"] == 512
    given = choose(TEXT, MACHINE, Length(None, tokens=2e7), {"data.seq_len": 128}, "tiny")
    assert given["data.seq_len"] == 128
    # 16 sequences of 512 tokens would exceed the given batch.
    batch = {"batch.micro_batch_size": 16, "batch.global_batch_tokens": 4096}
    short = choose(TEXT, MACHINE, Length(None, tokens=2e7), batch, "tiny")
    assert short["data.seq_len"] == 256


@given(st.floats(60, 1e6), st.floats(2, 100))
def test_choose_more_time_never_expects_more_bits(seconds: float, factor: float) -> None:
    first = choose(TEXT, MACHINE, Length(seconds))
    longer = choose(TEXT, MACHINE, Length(seconds * factor))
    assert first.bits_per_byte is not None
    assert longer.bits_per_byte is not None
    assert longer.bits_per_byte[0] <= first.bits_per_byte[0] + 1e-9
    assert longer.parameters >= first.parameters


@given(
    st.floats(20, 1e5),
    st.floats(1e3, 1e9),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([None, "tiny", "medium", "5M"]),
)
def test_choose_every_result_is_valid_recipe(
    seconds: float, tokens: float, kind: str, size: str | None
) -> None:
    text = dataclasses.replace(TEXT, train_tokens=tokens)
    machine = dataclasses.replace(MACHINE, kind=kind)
    choices = choose(text, machine, Length(seconds), {}, size)
    recipe = recipe_of(choices)
    batch = recipe.batch
    assert batch.accumulation(recipe.data.seq_len) * batch.rows * recipe.data.seq_len == (
        batch.global_batch_tokens
    )
    assert recipe.schedule.max_minutes == pytest.approx(seconds / 60, abs=1e-3)
    # Only if the run could reach the limit of epochs before the time limit.
    most = 4.0 if choices.seconds < 0.8 * seconds else 5.0
    assert recipe.schedule.epochs == (most if choices.epochs > 0.25 else None)
    assert len({choice.key for choice in choices.choices}) == len(choices.choices)


def test_choose_given_key_is_kept_and_others_follow() -> None:
    chosen = choose(TEXT, MACHINE, Length(600.0))
    given_width = choose(TEXT, MACHINE, Length(600.0), {"model.hidden_size": 512})
    assert given_width["model.hidden_size"] == 512
    assert given_width["model.num_attention_heads"] == 8
    assert given_width.steps < chosen.steps
    short = choose(TEXT, MACHINE, Length(600.0), {"data.seq_len": 64})
    assert (short["data.seq_len"], short["model.max_position_embeddings"]) == (64, 64)
    rate = choose(TEXT, MACHINE, Length(600.0), {"optimizer.learning_rate": 0.1})
    assert next(c for c in rate.choices if c.key == "optimizer.learning_rate").reason == "given"


@pytest.mark.parametrize(
    "fixed, batch, micro",
    [
        ({"batch.micro_batch_size": 12}, 3072 * 2, 12),
        ({"data.seq_len": 300}, 4200, 2),
        ({"batch.gradient_accumulation_steps": 4}, 4096, 4),
        ({"batch.gradient_accumulation_steps": 3}, 4608, 6),
        ({"batch.gradient_accumulation_steps": 3, "batch.micro_batch_size": 2}, 1536, 2),
        ({"data.seq_len": None, "model.vocab_size": 9999}, 4096, 8),
    ],
)
def test_choose_batch_is_multiple_of_micro_batches(
    fixed: dict[str, Any], batch: int, micro: int
) -> None:
    found = choose(TEXT, MACHINE, Length(None, tokens=4_900_000), fixed)
    values = found.values
    passes = fixed.get("batch.gradient_accumulation_steps")
    values["batch"]["gradient_accumulation_steps"] = passes
    recipe: Any = parse_recipe({**values, "data": {**values["data"], "dir": "d"}})
    assert recipe.batch.accumulation(recipe.data.seq_len) == passes or not passes
    assert recipe.batch.accumulation(recipe.data.seq_len) * micro * recipe.data.seq_len == batch
    assert (recipe.batch.global_batch_tokens, recipe.batch.micro_batch_size) == (batch, micro)
    assert found["model.vocab_size"] == TEXT.vocab_size


def test_choose_batch_of_partial_sequences_raises_config_error() -> None:
    with pytest.raises(
        ConfigError, match="does not match the 256 tokens of a sequence: set it to 256"
    ):
        choose(TEXT, MACHINE, Length(600), {"batch.global_batch_tokens": 128, "data.seq_len": 256})
    pair = {"batch.micro_batch_size": 2, "batch.gradient_accumulation_steps": 3}
    pair |= {"data.seq_len": 256, "batch.global_batch_tokens": 4096}
    with pytest.raises(ConfigError, match="4096 does not match the 1536 tokens of the given mic"):
        choose(TEXT, MACHINE, Length(600), pair)
    wide = choose(TEXT, MACHINE, Length(3600), {"batch.global_batch_tokens": 2048 + 256})
    assert wide["data.seq_len"] == 256, "only the models with sequences of 256 tokens are left"
    with pytest.raises(ConfigError, match="--size 0M is unknown"):
        choose(TEXT, MACHINE, Length(600), size="0M")


def test_choose_width_without_whole_heads_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the head dimension 64: set it to 128"):
        choose(TEXT, MACHINE, Length(60.0), {"model.hidden_size": 100})


def test_choose_size_accepts_names_and_numbers() -> None:
    assert choose(TEXT, MACHINE, Length(60.0), {}, "medium")["model.hidden_size"] == 512
    assert choose(TEXT, MACHINE, Length(60.0), {}, "3M")["model.hidden_size"] == 192
    table = {one.key: one.reason for one in choose(TEXT, MACHINE, Length(60.0), {}, "3M").choices}
    assert table["model.hidden_size"] == "the size nearest to 3M"
    for size in ("900B", "1k", "5"):
        with pytest.raises(
            ConfigError, match=f"--size {size}: with this text's vocabulary, models have"
        ):
            choose(TEXT, MACHINE, Length(60.0), {}, size)
    with pytest.raises(ConfigError, match=r"--size smal is unknown \(did you mean 'small'"):
        choose(TEXT, MACHINE, Length(60.0), {}, "smal")
    # The error is raised before the texts are read.
    with pytest.raises(ConfigError, match="--size 3Q is unknown"):
        request_of(["not-read.txt"], None, None, None, "3Q", {}, "text")


def test_choose_token_count_gets_model_for_its_training_time() -> None:
    few = choose(TEXT, MACHINE, Length(tokens=1e6))
    assert few.tokens == pytest.approx(1e6, rel=0.01)
    in_time = choose(TEXT, MACHINE, Length(few.seconds))
    assert in_time.parameters >= few.parameters
    assert choose(TEXT, MACHINE, Length(steps=20)).steps == 20


@pytest.mark.parametrize("fixed", [{}, {"model.vocab_size": 512}, {"schedule.epochs": 12.0}])
def test_choose_gain_of_more_text_uses_plan_for_more_text(fixed: dict[str, Any]) -> None:
    """The gain is computed for the model, the vocabulary and the number of passes of the longer
    text.
    """
    text, day = TextFacts(512, 4.2e5, 1.9, TEXT.hardness, 5e4), Length(86_400.0)
    choices = choose(text, MACHINE, day, fixed)
    longer = longer_text(text, 10.0, keeps_vocabulary="model.vocab_size" in fixed)
    assert longer.vocab_size == (512 if "model.vocab_size" in fixed else 2048)
    more = choose(longer, MACHINE, day, fixed)
    assert choices.bits_per_byte is not None
    assert more.bits_per_byte is not None
    gain = 1 - more.bits_per_byte[0] / choices.bits_per_byte[0]
    assert gain > 0.1
    assert choices.advice.endswith(
        "8.93M bytes of similar text instead of 893k would lower the bits per byte by about "
        f"{100 * gain:.0f}% within the same budget"
    )


def test_choose_advice_suggests_no_more_text_than_run_reads() -> None:
    tokens = 2.2 * TEXT.train_tokens
    choices = choose(TEXT, MACHINE, Length(tokens=tokens), {"model.vocab_size": 4096})
    assert choices.advice == (
        "26.86M bytes of similar text instead of 12.21M would lower the bits per byte by less than "
        "1% with the same number of tokens"
    )


def test_choose_little_text_limits_epochs() -> None:
    little = dataclasses.replace(TEXT, train_tokens=30_000.0)
    choices = choose(little, MACHINE, Length(3600.0))
    assert choices.epochs <= defaults.MOST_EPOCHS * 1.05
    assert choices.seconds < 3600
    reasons = {choice.key: choice.reason for choice in choices.choices}
    assert "the epoch limit ends the run earlier" in reasons["schedule.max_minutes"]
    assert choices["optimizer.weight_decay"] == defaults.REPEATED_WEIGHT_DECAY
    assert "of similar text" in choices.advice
    layers = choices.parameters - 2 * TEXT.vocab_size * choices["model.hidden_size"]
    assert layers <= defaults.MOST_PARAMETERS_A_TOKEN * 30_000
    adamw = choose(little, MACHINE, Length(3600.0), {"optimizer.name": "adamw"})
    assert adamw["optimizer.weight_decay"] == defaults.REPEATED_ADAMW_DECAY
    more = choose(little, MACHINE, Length(3600.0), {"schedule.epochs": 10.0})
    assert more.epochs == pytest.approx(10, rel=0.05)
    assert more["schedule.epochs"] == 10.0
    tiny = choose(dataclasses.replace(TEXT, train_tokens=400.0), MACHINE, Length(180.0))
    assert tiny.advice.startswith("1,320 bytes are too few to learn a language")
    warmup = next(one for one in tiny.choices if one.key == "schedule.warmup_steps")
    assert (tiny.steps, warmup.value) == (6, 0)
    assert warmup.reason == "10% of a short run"
    once = choose(TEXT, MACHINE, Length(60.0))
    assert once.advice == ""
    reasons = {choice.key: choice.reason for choice in once.choices}
    assert "training time within the budget" in reasons["schedule.max_minutes"]


@pytest.mark.parametrize(
    ("train_tokens", "optimizer", "decay"),
    [
        # The layers have 1.77 million parameters: 0.05, 1.5 and 9 per token.
        (36e6, "muon", defaults.WEIGHT_DECAY),
        (1.1796e6, "muon", 1.0),
        (0.19e6, "muon", defaults.REPEATED_WEIGHT_DECAY),
        (36e6, "adamw", defaults.WEIGHT_DECAY),
        (1.1796e6, "adamw", 0.15),
    ],
)
def test_choose_weight_decay_of_repeated_text_follows_parameters_per_token(
    train_tokens: float, optimizer: str, decay: float
) -> None:
    text = dataclasses.replace(TEXT, train_tokens=train_tokens)
    fixed = {"model.hidden_size": 192, "model.num_hidden_layers": 4, "optimizer.name": optimizer}
    repeated = choose(text, MACHINE, Length(tokens=4 * train_tokens), fixed)
    assert repeated["optimizer.weight_decay"] == pytest.approx(decay)
    once = choose(text, MACHINE, Length(tokens=train_tokens), fixed)
    assert once["optimizer.weight_decay"] == defaults.WEIGHT_DECAY


@pytest.mark.parametrize(("tokens", "batch"), [(1e6, 2048), (6.3e6, 4096), (64e6, 16384)])
def test_choose_batch_grows_with_square_root_of_tokens(tokens: float, batch: int) -> None:
    assert choose(TEXT, MACHINE, Length(tokens=tokens))["batch.global_batch_tokens"] == batch


def test_choose_model_too_large_for_memory_is_not_selected() -> None:
    tight = dataclasses.replace(MACHINE, usable_bytes=16 * 2_000_000)
    assert choose(TEXT, tight, Length(1e6)).parameters <= 2_000_000
    with pytest.raises(ConfigError, match="smaller --size"):
        choose(TEXT, tight, Length(60.0), {}, "large")


@given(st.floats(1, 1e9), st.floats(1, 1e12))
def test_repeated_text_is_worth_less_than_new_text(unique: float, read: float) -> None:
    worth = worth_of_bytes(read, unique)
    assert min(read, unique) <= worth * (1 + 1e-9)
    assert worth <= min(read, 17 * unique) * (1 + 1e-9)


def test_choose_parameter_count_equals_that_of_model() -> None:
    from firstlight.models.accounting import count_parameters, meta_model

    choices = choose(TEXT, MACHINE, Length(60.0), {}, "tiny")
    model = recipe_of(choices).model
    shape = ModelSize(model.hidden_size, model.num_hidden_layers, model.vocab_size, 256)
    assert shape.parameters == pytest.approx(count_parameters(meta_model(model)).total, rel=0.01)


def test_choose_recipe_text_has_reason_above_each_key() -> None:
    recipe = recipe_of(choose(TEXT, MACHINE, Length(60.0)))
    text = commented_yaml(
        recipe, {"model.hidden_size": "why", "data.seq_len": "long " * 40}, ["a\nb"]
    )
    assert text.startswith("# a b\n")
    assert "  # why\n  hidden_size:" in text
    assert max(map(len, text.splitlines())) <= 100
    assert parse_recipe(parse_yaml(text)) == recipe


def test_choose_given_learning_rate_replaces_chosen_rates() -> None:
    given = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01}
    own = choose(TEXT, MACHINE, Length(60.0), given)
    assert own["optimizer.learning_rate"] == 0.01
    assert own["optimizer.tuned_width"] == own["model.hidden_size"]
    assert not {"optimizer.embedding_lr_multiple", "optimizer.muon_learning_rate"} & own.keys


@pytest.mark.parametrize(
    ("name", "rate", "keys"),
    [
        ("lion", 3e-4, {"optimizer.betas", "optimizer.tuned_width"}),
        ("adafactor", 1e-2, set[str]()),
        ("adamw", 1.5e-3, {"optimizer.tuned_width"}),
    ],
)
def test_choose_learning_rate_matches_optimizer(name: str, rate: float, keys: set[str]) -> None:
    # The learning rates 2e-3 (AdamW) and 4e-4 (Lion) are for a hidden size of 192.
    fixed = {"optimizer.name": name, "model.hidden_size": 256}
    chosen = choose(TEXT, MACHINE, Length(60.0), fixed)
    assert chosen["optimizer.learning_rate"] == rate
    if "optimizer.tuned_width" in keys:
        assert chosen["optimizer.embedding_lr_multiple"] == pytest.approx(256 / 192, rel=0.01)
    others = {"optimizer.betas", "optimizer.tuned_width", "optimizer.muon_learning_rate"}
    assert chosen.keys & others == keys


def test_choose_optimizer_without_known_learning_rate_requires_one() -> None:
    fixed: dict[str, Any] = {"optimizer.name": "sgd"}
    with pytest.raises(ConfigError, match=r"optimizer.name sgd: set --optimizer.learning_rate"):
        choose(TEXT, MACHINE, Length(60.0), fixed)
    fixed["optimizer.learning_rate"] = 0.1
    assert choose(TEXT, MACHINE, Length(60.0), fixed)["optimizer.learning_rate"] == 0.1


@pytest.mark.parametrize(
    ("key", "value", "displaced"),
    [
        ("schedule.warmup_ratio", 0.05, "schedule.warmup_steps"),
        ("schedule.warmup_tokens", 5000, "schedule.warmup_steps"),
        ("schedule.cooldown_steps", 100, "schedule.decay_fraction"),
        ("schedule.min_learning_rate", 1e-4, "schedule.min_lr_ratio"),
    ],
)
def test_choose_given_key_replaces_equivalent_key(key: str, value: float, displaced: str) -> None:
    assert displaced in choose(TEXT, MACHINE, Length(None, tokens=1e6)).keys
    chosen = choose(TEXT, MACHINE, Length(None, tokens=1e6), {key: value})
    assert displaced not in chosen.keys
    section, _, name = key.partition(".")
    values = chosen.values
    values[section][name] = value
    assert getattr(parse_recipe({**values, "data": {**values["data"], "dir": "d"}}).schedule, name)


@pytest.mark.parametrize(
    ("fixed", "width", "heads"),
    [
        ({"model.num_attention_heads": 6}, {192, 384, 576, 768, 1152, 1536, 2304}, 6),
        ({"model.num_attention_heads": 7}, {448, 896, 1792}, 7),
        ({"model.num_key_value_heads": 2, "model.num_attention_heads": 4}, None, 4),
    ],
)
def test_choose_width_matches_given_heads(
    fixed: dict[str, Any], width: set[int] | None, heads: int
) -> None:
    chosen = choose(TEXT, MACHINE, Length(600.0), fixed)
    assert width is None or chosen["model.hidden_size"] in width
    assert chosen["model.num_attention_heads"] == heads
    reason = next(one.reason for one in chosen.choices if one.key == "model.hidden_size")
    assert f"among the sizes that fit --model.num_attention_heads {heads}" in reason
    found = candidate_shapes(512, {"model.num_key_value_heads": 2})
    assert all(one.hidden_size % 128 == 0 for one in found)
    assert len(found) > 10


def test_choose_heads_matching_no_width_raise_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"none of the hidden sizes 256 fits .*_heads 6: set .* multiple of 12"
    ):
        choose(TEXT, MACHINE, Length(600.0), {"model.num_attention_heads": 6}, "small")
    near = choose(TEXT, MACHINE, Length(600.0), {"model.num_attention_heads": 6}, "10M")
    assert near["model.hidden_size"] == 384


def test_choose_other_architecture_uses_its_mlp_width() -> None:
    chosen = choose(TEXT, MACHINE, Length(600.0), {"model.model_type": "gpt2"})
    assert "model.intermediate_size" not in chosen.keys
    model = recipe_of(chosen).model
    assert model.intermediate_size == 4 * model.hidden_size


def test_choose_sequence_fits_given_context() -> None:
    for length in (60.0, 36_000.0):
        chosen = choose(TEXT, MACHINE, Length(length), {"model.max_position_embeddings": 128})
        assert (chosen["data.seq_len"], chosen["model.max_position_embeddings"]) == (128, 128)
    longer = choose(TEXT, MACHINE, Length(60.0), {"model.max_position_embeddings": 4096})
    assert (longer["data.seq_len"], longer["model.max_position_embeddings"]) == (256, 4096)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "inverse_sqrt", "wsd"])
def test_choose_accepts_every_schedule_kind(kind: str) -> None:
    assert (
        recipe_of(choose(TEXT, MACHINE, Length(60.0), {"schedule.kind": kind})).schedule.kind
        == kind
    )


def test_choose_accepts_automatic_micro_batch() -> None:
    chosen = choose(TEXT, MACHINE, Length(60.0), {"batch.micro_batch_size": "auto"})
    assert chosen["batch.micro_batch_size"] == "auto"


def test_expected_bits_of_highly_compressible_text_are_few() -> None:
    easy = with_hardness(xz_bits_per_byte=0.15)
    assert expected_bits(1e6, 1e6, easy) < expected_bits(1e6, 1e6, TEXT)


def test_choose_sequence_length_in_characters_grows_with_token_length() -> None:
    for text, characters in (
        (TEXT, 845),
        (dataclasses.replace(TEXT, bytes_per_character=2.0), 422),
    ):
        choices = choose(text, MACHINE, Length(60.0))
        reason = next(one.reason for one in choices.choices if one.key == "data.seq_len")
        assert reason.startswith(f"about {characters} characters")


def test_expected_bits_of_wider_characters_are_fewer_per_byte() -> None:
    # The same text with two bytes per character.
    wide = dataclasses.replace(
        TEXT,
        bytes_per_token=2 * TEXT.bytes_per_token,
        hardness=dataclasses.replace(TEXT.hardness, xz_bits_per_byte=1.72 / 2),
        bytes_per_character=2.0,
    )
    narrow_bits = expected_bits(1e6, 5e6, TEXT)
    assert expected_bits(1e6, 1e7, wide) == pytest.approx(narrow_bits / 2)


def test_expected_range_is_capped_at_bits_of_guessing() -> None:
    assert expected_range(2.0, TEXT, {}) == (2 * 0.84, 2 * 1.18)
    assert expected_range(7.5, TEXT, {}) == (7.5 * 0.84, 8.0)


def test_expected_range_of_highly_compressible_text_starts_at_xz() -> None:
    text = with_hardness(held_out_xz_bits_per_byte=0.4)
    assert expected_range(2.0, text, {}) == (0.4, 2 * 1.18)
    assert expected_range(0.1, text, {}) == (0.1 * 0.84, 0.1 * 1.18)


@pytest.mark.parametrize("ratio, unusual", [(0.7, True), (0.8, False), (1.1, False), (1.3, True)])
def test_expected_range_of_unusual_text_is_wider(ratio: float, unusual: bool) -> None:
    text = with_hardness(long_ngram_ratio=ratio)
    low, high = expected_range(2.0, text, {}) or (0.0, 0.0)
    assert (low, high) == ((2 * 0.6, 2 * 1.3) if unusual else (2 * 0.84, 2 * 1.18))
    assert text.is_unusual is unusual
    assert choose(text, MACHINE, Length(60.0)).values == choose(TEXT, MACHINE, Length(60.0)).values


def test_estimated_text_keeps_hardness_of_corpus() -> None:
    hard = Hardness(2.0, 4.0, 1.5)
    assert estimated_text(corpus(hardness=hard), 512, 1e6).hardness == hard


@pytest.mark.parametrize("dense", [False, True])
def test_expected_bits_grow_with_hardness_of_text(dense: bool) -> None:
    xz = 4.5 if dense else 1.72
    text, harder = (with_hardness(xz_bits_per_byte=xz, ngram_bits_per_character=n) for n in (2, 4))
    bits = expected_bits(1e6, 5e6, text)
    assert expected_bits(1e6, 5e6, harder) == pytest.approx(min(2**0.95 * bits, 8.0))


def test_choose_harder_text_gets_same_model() -> None:
    harder = with_hardness(ngram_bits_per_character=4.0)
    easy, hard = (choose(text, MACHINE, Length(600.0)) for text in (TEXT, harder))
    assert easy.values == hard.values


def test_choose_other_optimizer_has_no_expected_loss() -> None:
    lion = choose(TEXT, MACHINE, Length(60.0), {"optimizer.name": "lion"})
    assert lion.bits_per_byte is None
    muon = choose(TEXT, MACHINE, Length(60.0), {"optimizer.name": "muon"})
    assert muon.bits_per_byte == choose(TEXT, MACHINE, Length(60.0)).bits_per_byte is not None


@pytest.mark.parametrize(
    "hardness, bytes_per_token, train_tokens, bytes_per_character, parameters, tokens, bits",
    [
        # The standard library, Shakespeare and WikiText-2.
        ((1.722, 2.16, 1.07), 3.486, 3.17e6, 1.0, 851_968, 149_504, 2.034),
        ((1.722, 2.16, 1.07), 3.486, 3.17e6, 1.0, 851_968, 3_141_632, 1.279),
        ((1.722, 2.16, 1.07), 3.486, 3.17e6, 1.0, 106_496, 499_712, 1.730),
        ((2.641, 2.56, 1.11), 1.942, 516_818, 1.0, 7_618_560, 2_080_580, 2.006),
        ((2.212, 2.34, 1.06), 2.116, 477_077, 1.0, 3_211_264, 2_100_816, 1.894),
        ((1.722, 2.16, 1.07), 3.486, 3_173_794, 1.0, 1_769_472, 1_499_136, 1.406),
        # Runs of ten minutes and of half an hour on two cores.
        ((1.722, 2.16, 1.07), 3.486, 3_173_794, 1.0, 851_968, 11_923_076, 1.044),
        ((1.722, 2.16, 1.07), 3.486, 3_173_794, 1.0, 3_211_264, 12_697_220, 0.992),
        # Tcl, XML, manuals, a Japanese dictionary, Chinese manuals, the Quran in Arabic.
        ((1.656, 3.38, 1.05), 1.863, 462_983, 1.000, 638_976, 299_008, 3.029),
        ((0.991, 1.64, 1.00), 2.883, 618_555, 1.034, 1_769_472, 299_008, 1.153),
        ((1.108, 1.86, 0.92), 2.700, 1_001_039, 1.000, 212_992, 299_008, 1.463),
        ((1.391, 1.63, 1.04), 2.908, 774_175, 1.246, 212_992, 299_008, 1.119),
        ((2.184, 4.96, 1.07), 4.168, 567_721, 2.408, 851_968, 299_008, 1.873),
        ((1.089, 1.98, 0.82), 2.388, 501_800, 1.890, 638_976, 299_008, 0.964),
        # A large text whose beginning xz compresses far better than the rest; a table; and
        # repetitive data.
        ((1.382, 2.86, 1.09), 2.905, 1_071_042, 1.000, 1_769_472, 1_499_136, 1.723),
        ((0.759, 2.52, 1.23), 2.280, 755_306, 1.000, 4_816_896, 1_499_136, 0.811),
        ((0.303, 0.62, 0.73), 2.789, 1_049_975, 1.000, 3_211_264, 1_499_136, 0.190),
    ],
)
def test_expected_range_contains_measured_runs(
    hardness: tuple[float, float, float],
    bytes_per_token: float,
    train_tokens: float,
    bytes_per_character: float,
    parameters: int,
    tokens: int,
    bits: float,
) -> None:
    text = (bytes_per_token, Hardness(*hardness), 1e4, bytes_per_character)
    facts = TextFacts(2048, train_tokens, *text)
    expected = expected_bits(parameters, tokens * bytes_per_token, facts)
    low, high = expected_range(expected, facts, {}) or (0.0, 0.0)
    assert low <= bits <= high
