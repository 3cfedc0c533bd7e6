"""The suggested model for a budget: scaling laws, batch sizes, and the resulting model."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from firstlight.errors import ConfigError
from firstlight.from_texts.choices import choose
from firstlight.hardware.compiling import Compiler, Compiling
from firstlight.methods import EfficiencyConfig
from firstlight.models import FAMILIES, LlamaConfig, ModelConfig
from firstlight.parallel.engine import DistributedConfig
from firstlight.planner.advise import defaults
from firstlight.planner.advise import model as model_module
from firstlight.planner.advise.defaults import new_model_rates
from firstlight.planner.advise.law import (
    Length,
    MachineFacts,
    ModelSize,
    expected_bits,
    least_bits,
    worth_of_bytes,
)
from firstlight.planner.advise.model import (
    Rate,
    Suggestion,
    _without_run,
    batch_tokens,
    model_ladder,
    suggest,
    tokens_in_time,
    usual_text,
)
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.planner.plan.plan import optimizer_of_width
from firstlight.recipe import parse_recipe
from firstlight.recipe.resolve import open_compile_modes

_VOCAB, _ROW = 32000, 1024
_LLAMA = LlamaConfig(
    vocab_size=_VOCAB,
    hidden_size=512,
    intermediate_size=1408,
    num_attention_heads=8,
    max_position_embeddings=_ROW,
    tie_word_embeddings=True,
)
_MODELS = list(model_ladder(_LLAMA))
_MUCH = usual_text(_VOCAB, None)


def rate_of(flops: float, memory: float = math.inf) -> Rate:
    """Return the rate of hardware limited only by its FLOPs and by 16 bytes of memory per
    parameter.
    """

    def rate(model: Suggestion, _: float, way: Compiling) -> float | None:
        return way.gain * flops / model.flops if 16 * model.parameters <= memory else None

    return rate


@pytest.fixture(autouse=True)
def _built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_without_run", _kept)


_KEPT: dict[tuple[str, int], Suggestion] = {}


def _kept(config: ModelConfig, seq_len: int) -> Suggestion:
    key = config.model_dump_json(), seq_len
    if key not in _KEPT:
        _KEPT[key] = _without_run(config, seq_len)
    return _KEPT[key]


def test_expected_bits_lie_between_law_and_guessing() -> None:
    assert expected_bits(1.0, 1.0, _MUCH) == 8
    assert expected_bits(1e30, 1e60, _MUCH) == pytest.approx(least_bits(_MUCH), rel=1e-6)
    assert least_bits(_MUCH) == pytest.approx(defaults.FLOOR)


def test_worth_of_bytes_repeated_text_adds_less_up_to_a_limit() -> None:
    assert worth_of_bytes(100, math.inf) == worth_of_bytes(100, 100) == 100
    # Muennighoff et al.: up to four epochs are almost as good as new text.
    assert 0.9 * 400 < worth_of_bytes(400, 100) < 400
    assert worth_of_bytes(1e9, 100) == pytest.approx(100 * (1 + 15.39))


def test_tokens_in_time_reserve_evaluation_time_and_respect_epochs() -> None:
    assert tokens_in_time(100.0, 50.0, _MUCH) == pytest.approx(5000 * 0.94)
    assert tokens_in_time(100.0, 50.0, usual_text(_VOCAB, 300)) == 1200
    assert tokens_in_time(100.0, 50.0, usual_text(_VOCAB, 300), 2.0) == 600


def test_batch_tokens_grow_with_square_root_of_tokens_and_leave_a_hundred_steps() -> None:
    assert batch_tokens(1.6e6, 256) == 2048
    assert batch_tokens(1.6e6 * 16, 256) == 8192
    assert batch_tokens(1e15, 256) == 524_288
    assert batch_tokens(100_000, 256) == 512
    assert batch_tokens(1.0, 1024) == 1024


def test_suggestions_on_100_machines_match_model_and_rates_of_train_texts() -> None:
    draws = random.Random(0)
    chosen: set[tuple[int, int]] = set()
    ways: set[tuple[bool, bool]] = set()
    compilers = (None, Compiler("cpu", device="", cores=2), Compiler("cuda", device="", cores=16))
    target = find_machine("H100")
    for _ in range(100):
        vocab_size = draws.choice((512, 8192))
        seconds = 10 ** draws.uniform(1.5, 5.5)
        tokens = 10 ** draws.uniform(5, 9)
        flops = 10 ** draws.uniform(10, 14)
        # Small models reach a smaller share of the peak rate.
        rates = [(1e7, draws.uniform(0.2, 1) * flops / 1e7), (5e8, flops / 5e8)]
        memory = int(10 ** draws.uniform(8.5, 10.2))
        compiler = draws.choice(compilers)
        machine = MachineFacts("a machine", "cpu", rates, memory, compiler=compiler)
        text = usual_text(vocab_size, tokens)

        def open_to(config: ModelConfig, compiler: Compiler | None = compiler) -> list[Compiling]:
            size = config.hidden_size, config.num_hidden_layers
            return open_compile_modes(EfficiencyConfig(), DistributedConfig(), compiler, size)

        def rate(
            model: Suggestion, step: float, way: Compiling, machine: MachineFacts = machine
        ) -> float | None:
            config: Any = model.config
            size = ModelSize(config.hidden_size, config.num_hidden_layers, config.vocab_size, 512)
            if size.state_bytes > machine.usable_bytes:
                return None
            return machine.tokens_per_second(model.flops, step, way)

        model = LlamaConfig(
            model_type="qwen3",
            vocab_size=vocab_size,
            hidden_size=512,
            intermediate_size=1408,
            num_attention_heads=8,
            num_hidden_layers=8,
            max_position_embeddings=512,
        )
        name = draws.choice(("muon", "adamw", "adamw8bit", "lion", "adafactor"))
        own_optimizer = {} if name == "muon" else {"optimizer.name": name}
        written = parse_recipe(
            {
                "model": model.model_dump() | {"tie_word_embeddings": False},
                "data": {"dir": "none", "seq_len": 512},
                **({"optimizer": {"name": name}} if own_optimizer else {}),
            }
        )
        resolved = resolve_for(written, target)
        fixed = {"data.seq_len": 512, **own_optimizer}
        for length in (Length(seconds), Length(tokens=round(tokens / 65536 + 1) * 65536)):
            texts = choose(text, machine, length, fixed)
            plan: Any = suggest(
                rate,
                model_ladder(model),
                text,
                seq_len=512,
                seconds=length.seconds,
                tokens=length.tokens,
                modes=open_to,
            )
            own = (texts["model.hidden_size"], texts["model.num_hidden_layers"])
            assert own == (plan.config.hidden_size, plan.config.num_hidden_layers)
            assert texts["batch.global_batch_tokens"] == plan.global_batch_tokens
            assert texts.tokens == plan.tokens
            way = texts["efficiency.compile"], texts["efficiency.compile_regional"]
            assert way == (plan.mode.compiles, plan.mode.regional)
            ways.add(way)
            optimizer = optimizer_of_width(resolved, written, plan.config.hidden_size)
            expected = new_model_rates(name, plan.config.hidden_size)
            assert {key: texts[f"optimizer.{key}"] for key in expected} == expected
            assert {key: getattr(optimizer, key) for key in expected} == expected
            chosen.add(own)
    assert len(chosen) > 10
    assert ways == {(False, False), (True, True), (True, False)}


def test_model_ladder_grows_in_valid_steps() -> None:
    sizes = [_kept(config, _ROW).parameters for config in _MODELS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 3e6
    assert 50e9 < sizes[-1] < 80e9
    assert max(b / a for a, b in itertools.pairwise(sizes)) < 2.6


@pytest.mark.parametrize("exponent", [18, 19, 20, 21, 22])
def test_suggest_compute_budget_balances_tokens_and_parameters(exponent: int) -> None:
    rate, seconds = rate_of(1e15), 10**exponent / 1e15
    found = suggest(rate, _MODELS, _MUCH, seq_len=_ROW, seconds=seconds)
    # About 20 tokens per parameter. The next size is a factor of two away, and small models consist
    # mostly of embeddings.
    assert 8 < found.tokens / found.parameters < 50
    assert found.seconds == pytest.approx(0.94 * seconds, rel=0.01)
    assert found.tokens == found.max_steps * found.global_batch_tokens


def test_suggest_model_that_does_not_fit_is_rejected() -> None:
    small = suggest(rate_of(1e15, memory=2e9), _MODELS, _MUCH, seq_len=_ROW, seconds=1e6)
    assert 16 * small.parameters <= 2e9
    large = suggest(rate_of(1e15), _MODELS, _MUCH, seq_len=_ROW, seconds=1e6)
    assert large.parameters > small.parameters
    with pytest.raises(ConfigError, match="none of the candidate models fits"):
        suggest(rate_of(1e15, memory=1e6), _MODELS, _MUCH, seq_len=_ROW, seconds=1e6)


def test_suggest_token_budget_gives_model_of_about_a_twentieth() -> None:
    found = suggest(rate_of(1e15), _MODELS, _MUCH, seq_len=_ROW, tokens=10e9)
    assert 250e6 < found.parameters <= 500e6
    assert found.tokens == pytest.approx(10e9, rel=0.01)
    tiny = suggest(rate_of(1e15), _MODELS, _MUCH, seq_len=_ROW, tokens=1e6)
    assert tiny.config.hidden_size < 128
    assert tiny.max_steps >= 100


def test_suggest_little_text_uses_four_epochs_and_model_that_does_not_memorize() -> None:
    much = suggest(rate_of(1e14), _MODELS, _MUCH, seq_len=_ROW, seconds=1e5)
    assert much.epochs is None
    for unique in (20e6, 1e6, 1e5):
        text = usual_text(_VOCAB, unique)
        little = suggest(rate_of(1e14), _MODELS, text, seq_len=_ROW, seconds=1e5)
        assert little.layer_parameters <= 16 * unique
        assert little.epochs is not None
        assert little.epochs == pytest.approx(little.tokens / unique)
        # More epochs would be harmful, although there is time left.
        assert little.epochs <= 1.05 * defaults.MOST_EPOCHS
        assert little.seconds < 1e5
        assert little.bits > much.bits
    enough = usual_text(_VOCAB, 1e12)
    assert suggest(rate_of(1e14), _MODELS, enough, seq_len=_ROW, seconds=1e5).config == much.config


def test_suggest_compile_time_is_considered_when_choosing_model() -> None:
    slow = [Compiling(True, seconds=600.0)]
    found = suggest(rate_of(1e12), _MODELS, _MUCH, seq_len=_ROW, seconds=60.0, modes=lambda _: slow)
    plain = suggest(rate_of(1e12), _MODELS, _MUCH, seq_len=_ROW, seconds=60.0)
    assert found.parameters <= plain.parameters < 1e9


def test_suggest_budget_of_time_and_tokens_together_raises_config_error() -> None:
    budgets: list[dict[str, Any]] = [{}, {"seconds": 1.0, "tokens": 1.0}]
    for budget in budgets:
        with pytest.raises(ConfigError, match="either a time or a number of tokens"):
            suggest(rate_of(1e12), _MODELS, _MUCH, seq_len=_ROW, **budget)


def test_model_ladder_for_sharding_has_divisible_key_value_heads() -> None:
    grouped = _LLAMA.model_copy(update={"num_attention_heads": 8, "num_key_value_heads": 2})
    cut: list[Any] = list(model_ladder(grouped, cuts=8))
    assert [one.hidden_size for one in cut] == [one.hidden_size for one in _MODELS]
    shared = {one.hidden_size: one.num_key_value_heads for one in cut}
    # A quarter of the heads is 8 of 32, and 12 of 48: the nearest number of key-value heads that 8
    # devices can share.
    assert {width: shared[width] for width in (1024, 2048, 3072)} == {1024: 8, 2048: 8, 3072: 8}
    # 8 devices can't share 12 heads, so the usual 3 are kept.
    assert shared[768] == 3
    assert all(one.num_attention_heads % one.num_key_value_heads == 0 for one in cut)


def test_model_ladder_keeps_family_layout_and_proportions() -> None:
    wide_heads = _LLAMA.model_copy(update={"model_type": "qwen3", "num_attention_heads": 4})
    ladder: list[Any] = list(model_ladder(wide_heads.model_copy(update={"head_dim": 128})))
    assert {one.model_type for one in ladder} == {"qwen3"}
    assert {one.head_dim for one in ladder} == {128}
    assert all(one.hidden_size == 128 * one.num_attention_heads for one in ladder)
    assert all(one.tie_word_embeddings for one in ladder)
    at_own_width = next(one for one in ladder if one.hidden_size == 512)
    assert at_own_width.intermediate_size == 1408


def of_family(name: str) -> Any:
    sizes = {"vocab_size": 300, "hidden_size": 256, "num_attention_heads": 4}
    return FAMILIES[name].config.model_validate({"model_type": name, **sizes})


@pytest.mark.parametrize("name", FAMILIES)
def test_model_ladder_exists_for_every_family(name: str) -> None:
    model = of_family(name)
    first, *_ = ladder = list(model_ladder(model))
    assert (len(ladder), first.hidden_size, first.num_hidden_layers) == (32, 64, 2)
    changed = {key for key, value in model.model_dump().items() if value != first.model_dump()[key]}
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    sizes |= {"linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"}
    sizes |= {"intermediate_size", "moe_intermediate_size", "kv_lora_rank"}
    assert changed <= sizes


def test_model_ladder_keeps_layer_pattern_at_other_depth() -> None:
    model = of_family("qwen3").model_copy(
        update={
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
    )
    first, second, *_ = model_ladder(model)
    windows = [second.attention_spec(i).window for i in range(second.num_hidden_layers)]
    assert windows == [16, 16, None, 16]
    assert [first.attention_spec(i).window for i in range(2)] == [16, 16]


def test_scaling_laws_count_only_active_experts() -> None:
    models = list(model_ladder(of_family("qwen3_moe")))[:12]
    rate = rate_of(1e15)
    routed = suggest(rate, models, usual_text(300, None), seq_len=64, tokens=1e8)
    assert routed.layer_parameters < routed.active_parameters < routed.parameters


def test_model_ladder_layout_valid_in_one_size_only_raises_config_error() -> None:
    model = of_family("qwen3_moe").model_copy(
        update={"num_hidden_layers": 100, "decoder_sparse_step": 100}
    )
    with pytest.raises(ConfigError, match=r"only at its current size.*leave no layer with experts"):
        list(model_ladder(model))
