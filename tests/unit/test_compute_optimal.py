"""What to train with a budget: laws, batches, and the model that comes out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest

from firstlight.errors import ConfigError
from firstlight.models import LlamaConfig
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.planner.plan.compute_optimal import (
    LAWS,
    MOST_EPOCHS,
    batch_tokens,
    expected_loss,
    model_ladder,
    peak_learning_rate,
    suggest,
    useful_tokens,
    worth_of_tokens,
)

_VOCAB, _ROW = 32000, 1024
_MODELS = list(model_ladder(_VOCAB, _ROW))


@functools.cache
def counts_of(config: LlamaConfig) -> tuple[int, float]:
    """Parameters, and FLOPs of a token."""
    model = meta_model(config)
    return sum(p.numel() for p in model.parameters()), train_flops_per_token(model, _ROW)


def rate_of(flops: float, memory: float = math.inf) -> Callable[[LlamaConfig], float | None]:
    """Of hardware that only multiplies, and holds 16 bytes for each parameter."""

    def rate(config: LlamaConfig) -> float | None:
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


def test_batches_grow_with_compute_and_learning_rates_shrink() -> None:
    # DeepSeek LLM: 0.2920 x (1e20)^0.3271 = 1.02 million tokens, rounded to a power of two of rows.
    assert batch_tokens(1e20, 1024) == 1024 * 1024
    assert batch_tokens(1.0, 1024) == 1024
    assert peak_learning_rate(1e20) == 0.00099
    assert peak_learning_rate(1e17) == 0.0023


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
    cut = list(model_ladder(_VOCAB, _ROW, cuts=8))
    assert [one.hidden_size for one in cut] == [one.hidden_size for one in _MODELS]
    shared = {one.hidden_size: one.num_key_value_heads for one in cut}
    # Of 16 heads a quarter is 4, of 40 it is 10: as near to that as can be shared by 8.
    assert {width: shared[width] for width in (1024, 2048, 4096, 5120)} == {
        1024: 16,
        2048: 8,
        4096: 8,
        5120: 8,
    }
    # Where the heads themselves can't be shared, nothing is gained by others.
    assert shared[768] == 12
    assert all(one.num_attention_heads % one.num_key_value_heads == 0 for one in cut)
