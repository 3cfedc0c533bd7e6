"""Tests of continuing a text: stop texts, end tokens, log-probabilities and streamed text."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firstlight.errors import ConfigError, ModelError
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import (
    Chosen,
    Continuation,
    StopTexts,
    TokenLogprob,
    choose_tokens,
    logprobs_of,
)
from firstlight.generation.sampling import penalize, shift
from firstlight.tokenizer import TextStream, Tokenizer
from generated import push, sample

GREEDY = SamplingConfig(max_new_tokens=100, temperature=0)


def certain(token_id: int, size: int) -> Tensor:
    """Return logits for which only one token can be chosen."""
    return torch.zeros(size).index_fill_(0, torch.tensor([token_id]), 9.0)


def follow(
    tokenizer: Tokenizer, ids: Sequence[int], config: SamplingConfig, eos: Sequence[int] = ()
) -> tuple[Continuation, list[str]]:
    """Continue "the" with these ids until the text ends."""
    prompt_ids = tokenizer.encode_prompt("the")
    text = Continuation(prompt_ids, config, context=10_000, eos_token_ids=eos, tokenizer=tokenizer)
    pieces = []
    for token_id in ids:
        pieces.append(push(text, certain(token_id, tokenizer.vocab_size)))
        if text.finish_reason is not None:
            break
    return text, pieces


# Stop texts


@given(
    text=st.text("ab", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_filter_passes_text_before_first_stop_text(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stops, passed = StopTexts(stop), ""
    found_at: int | None = None
    for start, end in itertools.pairwise(places):
        passed += stops.push(text[start:end])
        if stops.found:
            found_at = end
            break
        # Only text that may belong to a stop text is held back.
        held = text[len(passed) : end]
        assert all(one not in passed for one in stop)
        assert held == "" or any(one.startswith(held) for one in stop)
    if found_at is None:
        passed += stops.finish()
        assert passed == text
        assert all(one not in text for one in stop)
    else:
        seen = text[:found_at]
        assert passed == seen[: min(seen.find(one) for one in stop if one in seen)]


def test_continue_text_stop_text_ends_text_and_is_excluded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" bird sings. And the river runs")
    config = SamplingConfig(max_new_tokens=100, temperature=0, stop=("xyz", ". And"))
    text, pieces = follow(tokenizer, ids, config)
    assert "".join(pieces) == " bird sings"
    assert text.finish_reason == "stop"
    assert tokenizer.decode(text.token_ids).startswith(" bird sings. And")
    assert len(text.token_ids) < len(ids)


def test_continue_text_possible_start_of_stop_text_is_held_back(tokenizer: Tokenizer) -> None:
    ids = [token for part in ("a.", "\n", "b") for token in tokenizer.encode(part)]
    config = SamplingConfig(max_new_tokens=len(ids), temperature=0, stop=("\n\n",))
    _, pieces = follow(tokenizer, ids, config)
    assert pieces[-1].startswith("\n")
    assert "".join(pieces) == "a.\nb"


def test_continue_text_held_back_piece_is_emitted_at_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.\n")
    config = SamplingConfig(max_new_tokens=len(ids), temperature=0, stop=("\n\n",))
    text, pieces = follow(tokenizer, ids, config)
    assert ("".join(pieces), text.finish_reason) == ("a.\n", "length")


def test_continue_text_any_of_several_end_tokens_ends_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" bird sings")
    for end in (0, 319):
        text, pieces = follow(tokenizer, [*ids, end, *ids], GREEDY, eos=(0, 319))
        assert ("".join(pieces), text.finish_reason) == (" bird sings", "stop")
        assert text.token_ids == ids


def test_text_stream_pieces_of_random_ids_join_to_whole_text(tokenizer: Tokenizer) -> None:
    """Test 10,000 sequences of random ids, which include partial characters and control tokens."""
    generator = random.Random(0)
    prompt_ids = tokenizer.encode_prompt("the")
    for number in range(10_000):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randint(1, 12))]
        stream = TextStream(tokenizer, prompt_ids)
        pieces = [*(stream.push(token_id) for token_id in ids), stream.finish()]
        whole = tokenizer.decode([*prompt_ids, *ids])
        assert tokenizer.decode(prompt_ids) + "".join(pieces) == whole, (number, ids)


# Choosing


def test_continue_text_penalty_applies_to_prompt_and_text(tokenizer: Tokenizer) -> None:
    prompt_ids = tokenizer.encode_prompt("the")
    first, second, third = [n for n in range(200, 210) if n not in prompt_ids][:3]
    logits = torch.zeros(tokenizer.vocab_size)
    logits[prompt_ids[-1]], logits[first], logits[second], logits[third] = 4.0, 3.0, 2.5, 2.0
    config = SamplingConfig(max_new_tokens=9, temperature=0, repetition_penalty=2.0)
    text = Continuation(prompt_ids, config, context=999, tokenizer=tokenizer)
    for _ in range(3):
        push(text, logits)
    assert text.token_ids == [first, second, prompt_ids[-1]]


def test_penalize_lowers_every_seen_logit() -> None:
    logits = torch.tensor([3.0, -3.0, 1.0, -1.0])
    assert penalize(logits, 2.0, [0, 1]).tolist() == [1.5, -6.0, 1.0, -1.0]
    assert logits.tolist() == [3.0, -3.0, 1.0, -1.0]


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=6, max_size=6),
    chosen=st.lists(st.integers(0, 5), max_size=30),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, 5), st.floats(-100, 100)),
)
def test_penalties_and_biases_follow_openai_definition(
    logits: list[float],
    chosen: list[int],
    frequency: float,
    presence: float,
    bias: dict[int, float],
) -> None:
    config = SamplingConfig(frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias)
    counts = Counter(chosen)
    expected = [
        logit - counts[i] * frequency - (counts[i] > 0) * presence + bias.get(i, 0.0)
        for i, logit in enumerate(logits)
    ]
    found = shift(torch.tensor(logits), config, counts)
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_penalties_count_new_tokens_not_prompt(tokenizer: Tokenizer) -> None:
    """With exact values: 9 is chosen until its penalties exceed its lead."""
    logits = torch.zeros(tokenizer.vocab_size)
    logits[9], logits[8], logits[7] = 4.0, 2.0, 1.75
    config = SamplingConfig(
        max_new_tokens=7, temperature=0, frequency_penalty=0.5, presence_penalty=0.25
    )
    text = Continuation([9] * 20, config, context=999)
    for _ in range(7):
        push(text, logits)
    # Logits of 9: 4, 3.25, 2.75, 2.25, 1.75; of 8: 2, 1.25; of 7: 1.75. Among equal logits, the
    # first is chosen.
    assert text.token_ids == [9, 9, 9, 9, 8, 7, 9]
    assert SamplingConfig().logit_bias == {}


def test_logit_bias_bans_and_forces_tokens(tokenizer: Tokenizer) -> None:
    logits = torch.zeros(tokenizer.vocab_size)
    logits[4] = 30.0
    for bias, expected in (({}, 4), ({4: -100}, 0), ({11: 100}, 11), ({4: -29.5, 5: 0.75}, 5)):
        config = SamplingConfig(max_new_tokens=1, temperature=0, logit_bias=bias)
        text = Continuation([1], config, context=999)
        push(text, logits)
        assert text.token_ids == [expected]
    beyond = SamplingConfig(logit_bias={tokenizer.vocab_size: 1.0})
    with pytest.raises(ConfigError, match="logit_bias contains token id 320"):
        push(Continuation([1], beyond, context=999), logits)


class Even:
    """A constraint that allows only even ids."""

    def allowed(self, vocab_size: int) -> Tensor:
        """Return a mask that is True for even ids."""
        return torch.arange(vocab_size) % 2 == 0

    def push(self, token_id: int) -> bool:
        """Return False, because the text is never complete."""
        return False


def test_choose_tokens_together_equals_each_alone() -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 2},
        {"temperature": 1.5, "min_p": 0.5},
        {"temperature": 1.5},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.9, "logprobs": 2},
        {"presence_penalty": -0.1, "temperature": 0, "choices": 2},
        {"logit_bias": {3: 9.0}, "choices": 40},
        {"temperature": 0, "logprobs": 0},
        {"temperature": 1.5, "logprobs": 3, "choices": 1},
    ]
    even: Any = Even()
    configs = [SamplingConfig(**one, seed=n) for n, one in enumerate([*settings, {}])]
    texts = [Continuation([1], config, context=99) for config in configs[:-1]]
    texts.append(Continuation([1], configs[-1], context=99, constraint=even))
    alone: list[list[int]] = [[] for _ in texts]
    generators = [torch.Generator().manual_seed(n) for n in range(len(texts))]
    for step in range(6):
        logits = 3 * torch.randn(len(alone), 40, generator=torch.Generator().manual_seed(step))
        kept: list[Any] = []
        chosen = choose_tokens(texts, logits, lambda *both, kept=kept: kept.extend(both))
        for text, one in zip(texts, chosen, strict=True):
            text.push(one)
        for ids, config, row, generator in zip(alone, configs, logits, generators, strict=True):
            allowed_V = even.allowed(40) if config is configs[-1] else None
            seen, counts = {1, *ids}, Counter(ids)
            ids.append(sample(row, config, generator, seen, counts, allowed_V))
        assert kept[0].tolist() == kept[1] == [ids[-1] for ids in alone]
        for text, row in zip(texts, logits, strict=True):
            _as_the_logits_say(text, row, step)
    assert [text.token_ids for text in texts] == alone
    assert len({tuple(ids) for ids in alone}) > 9


def _as_the_logits_say(text: Continuation, logits_V: Tensor, step: int) -> None:
    """Assert that the last log-probability and choices of a text match its logits."""
    token_id, config = text.token_ids[-1], text.config
    if text.logprobs is not None:
        expected_V = logits_V.log_softmax(-1)
        best = expected_V.topk(config.logprobs or 0)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        assert text.logprobs[step:] == [TokenLogprob(token_id, float(expected_V[token_id]), top)]
    if text.choices is not None:
        (choices,) = text.choices[step:]
        model_V = logits_V.softmax(-1)
        best_ids = model_V.topk(config.choices or 0).indices.tolist()
        ids = [choice.token_id for choice in choices]
        assert ids == (best_ids if token_id in best_ids else [*best_ids, token_id])
        assert [choice.model for choice in choices] == model_V[ids].tolist()
        assert [i for i, choice in zip(ids, choices, strict=True) if choice.is_chosen] == [token_id]
        total = sum(choice.sampled for choice in choices)
        assert total <= 1.0 + 1e-6
        if len(ids) == 40 or config.temperature == 0:
            assert total == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_choose_tokens_error_fails_only_its_text(temperature: float, bad: float) -> None:
    logits = torch.zeros(4, 9)
    logits[1] = bad
    settings: list[dict[str, Any]] = [{}, {"choices": 2, "logprobs": 1}, {"logit_bias": {9: 1}}, {}]
    texts = [
        Continuation([1], SamplingConfig(temperature=temperature, **one), context=99)
        for one in settings
    ]
    chosen = choose_tokens(texts, logits)
    assert [type(one) for one in chosen] == [Chosen, ModelError, ConfigError, Chosen]
    with pytest.raises(ModelError, match="outputs are not finite"):
        texts[1].push(chosen[1])


def test_continue_text_log_probabilities_match_model(tokenizer: Tokenizer) -> None:
    logits = torch.randn(tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    config = SamplingConfig(
        max_new_tokens=3, temperature=0.1, top_k=2, repetition_penalty=3.0, seed=0, logprobs=3
    )
    text = Continuation([1, 2], config, context=999, tokenizer=tokenizer)
    for _ in range(3):
        push(text, logits)
    assert text.logprobs is not None
    expected = logits.log_softmax(-1)
    for token_id, found in zip(text.token_ids, text.logprobs, strict=True):
        assert found.token_id == token_id
        assert found.logprob == float(expected[token_id])
        assert [one for one, _ in found.top] == expected.topk(3).indices.tolist()
        assert [p for _, p in found.top] == expected.topk(3).values.tolist()


def test_logprobs_of_more_than_vocabulary_returns_all() -> None:
    assert len(logprobs_of(torch.zeros(1, 4), [1], 20)[0].top) == 4
    assert logprobs_of(torch.zeros(1, 4), [1], 0)[0].top == ()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"min_p": -0.1}, "min_p must be between 0"),
        ({"min_p": 1.1}, "min_p must be between 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be above 0"),
        ({"stop": ("a", "")}, "stop must be strings of at least one character"),
        ({"logprobs": -1}, "logprobs must be 0 or above"),
        ({"frequency_penalty": 2.01}, "frequency_penalty must be between -2 and 2, not 2.01"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between -2 and 2"),
        ({"logit_bias": {3: -100.5}}, "logit_bias must be a mapping of token ids to numbers from"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be a mapping of token ids to numbers from"),
    ],
)
def test_continue_text_settings_out_of_range_raise_config_error(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**values)  # type: ignore[arg-type]
