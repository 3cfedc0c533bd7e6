"""What to train with a budget: laws, batches, and the model that comes out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from firstlight.errors import ConfigError
from firstlight.models import FAMILIES, LlamaConfig, ModelConfig
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.planner.plan.compute_optimal import (
    LAWS,
    MOST_EPOCHS,
    batch_tokens,
    expected_loss,
    model_ladder,
    suggest,
    useful_tokens,
    worth_of_tokens,
)

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


@functools.cache
def counts_of(config: ModelConfig) -> tuple[int, float]:
    """Parameters, and FLOPs of a token."""
    model = meta_model(config)
    return sum(p.numel() for p in model.parameters()), train_flops_per_token(model, _ROW)


def rate_of(flops: float, memory: float = math.inf) -> Callable[[ModelConfig], float | None]:
    """Of hardware that only multiplies, and holds 16 bytes for each parameter."""

    def rate(config: ModelConfig) -> float | None:
        parameters, each = counts_of(config)
        return flops / each if 16 * parameters <= memory else None

    return rate


def test_the_laws_give_their_papers_loss_of_chinchilla() -> None:
    # 70B parameters, 1.4T tokens; Hoffmann et al., table A4 and the text give 1.94 and 2.0.
    assert LAWS[0].loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.001)
    assert LAWS[1].loss(70e9, 1.4e12) == pytest.approx(1.974, abs=0.001)
    low, high = expected_loss(70e9, 1.4e12, _VOCAB)
    assert (low, high) == (LAWS[0].loss(70e9, 1.4e12), LAWS[1].loss(70e9, 1.4e12))


def test_no_loss_is_more_than_that_of_guessing() -> None:
    assert expected_loss(1e5, 1e4, 256) == (math.log(256), math.log(256))


def test_text_read_again_is_worth_less_and_in_the_end_nothing() -> None:
    assert worth_of_tokens(100, None) == worth_of_tokens(100, 100) == 100
    # Muennighoff et al.: up to four epochs are nearly as good as new text.
    assert 0.9 * 400 < worth_of_tokens(400, 100) < 400
    most = 100 * (1 + 15.39)
    assert worth_of_tokens(1e9, 100) == pytest.approx(most)
    # Of what can be had by reading it ever again, there is nine tenths by then.
    assert worth_of_tokens(useful_tokens(1e9, 100), 100) > 0.9 * most
    assert useful_tokens(300, 100) == useful_tokens(300, None) == 300


def test_batches_grow_with_compute() -> None:
    # DeepSeek LLM: 0.2920 x (1e20)^0.3271 = 1.02 million tokens, rounded to a power of two of rows.
    assert batch_tokens(1e20, 1024) == 1024 * 1024
    assert batch_tokens(1.0, 1024) == 1024


def test_the_ladder_rises_and_each_rung_is_a_model() -> None:
    sizes = [counts_of(config)[0] for config in _MODELS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 6e6
    assert 50e9 < sizes[-1] < 80e9
    assert max(b / a for a, b in itertools.pairwise(sizes)) < 2.6


@pytest.mark.parametrize("exponent", [18, 19, 20, 21, 22])
def test_a_budget_of_compute_is_balanced_as_the_papers_balance_it(exponent: int) -> None:
    rate = rate_of(1e15)
    found = suggest(rate, _MODELS, seq_len=_ROW, seconds=10**exponent / 1e15)
    # Some 20 tokens a parameter; a rung off is a factor of two, and small models' embeddings weigh.
    assert 8 < found.tokens / found.parameters < 50
    assert found.seconds == pytest.approx(10**exponent / 1e15, rel=0.01)
    assert found.tokens == found.max_steps * found.global_batch_tokens
    # No other rung is better.
    for config in _MODELS:
        parameters, each = counts_of(config)
        tokens = 10**exponent / each
        loss = LAWS[1].loss(found.parameters, found.tokens)
        assert loss <= LAWS[1].loss(parameters, tokens) + 0.01


def test_a_model_that_does_not_fit_is_not_suggested() -> None:
    small = suggest(rate_of(1e15, memory=2e9), _MODELS, seq_len=_ROW, seconds=1e6)
    assert 16 * small.parameters <= 2e9
    large = suggest(rate_of(1e15), _MODELS, seq_len=_ROW, seconds=1e6)
    assert large.parameters > small.parameters
    with pytest.raises(ConfigError, match="no model of the ladder fits"):
        suggest(rate_of(1e15, memory=1e6), _MODELS, seq_len=_ROW, seconds=1e6)


def test_a_budget_of_tokens_gets_a_model_of_a_twentieth() -> None:
    found = suggest(rate_of(1e15), _MODELS, seq_len=_ROW, tokens=10e9)
    assert 250e6 < found.parameters <= 500e6
    assert found.tokens == pytest.approx(10e9, rel=0.01)
    tiny = suggest(rate_of(1e15), _MODELS, seq_len=_ROW, tokens=1e6)
    assert tiny.config.hidden_size == 128
    assert tiny.max_steps >= 200


def test_little_text_makes_the_model_smaller_and_the_loss_worse() -> None:
    much = suggest(rate_of(1e14), _MODELS, seq_len=_ROW, seconds=1e5)
    assert much.epochs is None
    for unique in (20e6, 1e6, 1e5):
        little = suggest(rate_of(1e14), _MODELS, seq_len=_ROW, seconds=1e5, unique_tokens=unique)
        assert little.parameters < much.parameters
        smallest = little.config.hidden_size == 128
        assert smallest or little.parameters <= worth_of_tokens(little.tokens, unique) / 20
        assert little.epochs is not None
        assert little.epochs == pytest.approx(little.tokens / unique)
        # More would be worth nothing: there is time left.
        assert little.epochs <= MOST_EPOCHS
        assert little.seconds < 1e5
        assert little.loss[1] > much.loss[1]
    enough = suggest(rate_of(1e14), _MODELS, seq_len=_ROW, seconds=1e5, unique_tokens=1e12)
    assert enough.config == much.config


def test_a_budget_is_time_or_tokens() -> None:
    for budget in ({}, {"seconds": 1.0, "tokens": 1.0}):
        with pytest.raises(ConfigError, match="either a time or a number of tokens"):
            suggest(rate_of(1e12), _MODELS, seq_len=_ROW, **budget)


def test_models_that_are_cut_have_key_value_heads_for_all() -> None:
    grouped = _LLAMA.model_copy(update={"num_attention_heads": 8, "num_key_value_heads": 2})
    cut: list[Any] = list(model_ladder(grouped, cuts=8))
    assert [one.hidden_size for one in cut] == [one.hidden_size for one in _MODELS]
    shared = {one.hidden_size: one.num_key_value_heads for one in cut}
    # A quarter of the heads is 8 of 32, and 12 of 48: as near to that as can be shared by 8.
    assert {width: shared[width] for width in (1024, 2048, 3072)} == {1024: 8, 2048: 8, 3072: 8}
    # 12 heads can't be shared by 8: nothing is gained by others than the usual 3.
    assert shared[768] == 3
    assert all(one.num_attention_heads % one.num_key_value_heads == 0 for one in cut)


def test_the_ladder_keeps_family_layout_and_proportions() -> None:
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
def test_every_family_has_a_ladder_of_its_own(name: str) -> None:
    model = of_family(name)
    first, *_ = ladder = list(model_ladder(model))
    assert (len(ladder), first.hidden_size, first.num_hidden_layers) == (27, 128, 4)
    changed = {key for key, value in model.model_dump().items() if value != first.model_dump()[key]}
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    sizes |= {"linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"}
    sizes |= {"intermediate_size", "moe_intermediate_size", "kv_lora_rank"}
    assert changed <= sizes


def test_layers_that_differ_keep_their_pattern_at_another_depth() -> None:
    model = of_family("qwen3").model_copy(
        update={
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
    )
    first, second, *_ = model_ladder(model)
    windows = [second.attention_spec(i).window for i in range(second.num_hidden_layers)]
    assert windows == [16, 16, None, 16, 16]
    assert [first.attention_spec(i).window for i in range(4)] == [16, 16, None, 16]


def test_experts_that_a_token_does_not_use_are_not_counted_by_the_laws() -> None:
    routed = suggest(lambda _: 1e6, model_ladder(of_family("qwen3_moe")), seq_len=64, tokens=1e9)
    assert routed.active_parameters < routed.parameters
    # The parameters of a dense model of the same loss.
    assert 15 < routed.tokens / routed.active_parameters < 60


def test_a_layout_that_is_valid_in_no_other_size_is_refused() -> None:
    model = of_family("qwen3_moe").model_copy(
        update={"num_hidden_layers": 100, "decoder_sparse_step": 100}
    )
    with pytest.raises(ConfigError, match=r"in its own size only.*leave no layer with experts"):
        list(model_ladder(model))
