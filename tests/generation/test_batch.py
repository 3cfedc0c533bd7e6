"""Tests of sequences with different lengths in one batch: each gets the same results as alone."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import draw_weights
from firstlight.errors import ConfigError, ModelError
from firstlight.generation import batch
from firstlight.generation.batch import BatchDecoder, RaggedSteps, RecordedSteps
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import generate, generate_batch
from firstlight.generation.few_rows import has_kernels, use_few_rows
from firstlight.lora.loading import LoadedModel
from firstlight.models import (
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    Qwen3NextConfig,
    Qwen35Config,
    empty_model,
)
from firstlight.models.rope import LongRope
from firstlight.tokenizer import Tokenizer

CONTEXT = 96
#: Token ids of some prompts.
SIZES = (5, 6, 4, 40, 2, 2)
GPT2 = GPT2Config(
    vocab_size=352,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=CONTEXT,
)
LLAMA = LlamaConfig(
    vocab_size=352,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)
MISTRAL = LLAMA.model_copy(update={"model_type": "mistral", "sliding_window": 5})
QWEN3_NEXT = Qwen3NextConfig(
    vocab_size=352,
    hidden_size=16,
    num_hidden_layers=2,
    head_dim=8,
    num_experts=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    max_position_embeddings=CONTEXT,
)
QWEN35 = Qwen35Config(
    **QWEN3_NEXT.model_dump(include=set(Qwen35Config.model_fields) - {"model_type"})
)
LFM2 = Lfm2Config(
    **LLAMA.model_dump(include=set(Lfm2Config.model_fields) - {"model_type", "layer_types"})
)
#: At 31 tokens or more, all tokens of a text get different rotary frequencies.
LONGROPE = LLAMA.model_copy(
    update={
        "rope_scaling": LongRope(
            rope_type="longrope",
            short_factor=[1.0, 1.5],
            long_factor=[2.0, 9.0],
            original_max_position_embeddings=30,
        )
    }
)
FAMILIES: dict[str, ModelConfig] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "longrope": LONGROPE,
    "mistral": MISTRAL,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN35,
    "lfm2": LFM2,
}


def new_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """Return a model with weights large enough that continuations are not constant."""
    model = empty_model(config, vocab_multiple).eval()
    draw_weights(model, 1, 0.4)
    return model


MODELS = {name: new_model(config) for name, config in FAMILIES.items()}


def full(model: Model, ids: list[int]) -> Tensor:
    """Reference implementation: compute the logits after the whole text, without a cache."""
    with torch.no_grad():
        logits_V: Tensor = model(torch.tensor([ids]))[0, -1]
        return logits_V


# Logits


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_ragged_cache_gives_each_row_logits_of_its_own_text(name: str) -> None:
    model, lengths = MODELS[name], [1, 7, 12]
    texts = [[(7 * i + row) % 350 for i in range(20)] for row in range(3)]
    cache = model.make_cache(4, 32, torch.float32)
    for layer in cache.keys:  # Positions beyond a row's length are never read.
        layer.fill_(9.0)
    for layer in (*cache.values, *(one for state in cache.states for one in state)):
        layer.fill_(-9.0)
    for row, length in enumerate(lengths):
        model(torch.tensor([texts[row][:length]]), cache=cache.sequence(row))
    ragged = cache.ragged(torch.tensor(lengths), reach=32)
    found: list[Tensor] = []
    for done, size in ((0, 1), (1, 3), (4, 1)):  # Also with several tokens at a time.
        places = [length + done for length in lengths]
        ids = torch.tensor([t[p : p + size] for t, p in zip(texts, places, strict=True)])
        found.append(model(ids, cache=ragged))
    assert ragged.lengths.tolist() == [6, 12, 17]
    together = torch.cat(found, dim=1)
    for row, length in enumerate(lengths):
        expected = model(torch.tensor([texts[row][: length + 5]]))[0, length:]
        torch.testing.assert_close(together[row], expected, atol=1e-4, rtol=1e-4)


def _recorded(steps: RecordedSteps, rows: int, reach: int) -> tuple[Any, Tensor]:
    """Replacement for `RecordedSteps._record`: return a graph that computes the step when it is
    replayed.
    """
    logits = torch.full((rows, 352), torch.nan)
    replay = functools.partial(RaggedSteps._run, steps, rows, reach)
    return SimpleNamespace(replay=lambda: logits.copy_(replay())), logits


@pytest.mark.parametrize("way", ["plain", "reuse_prefixes", "recorded"])
@given(data=st.data(), name=st.sampled_from(sorted(FAMILIES)))
@settings(max_examples=25)
def test_batch_decoder_joining_and_leaving_texts_keep_their_own_logits(
    way: str, data: st.DataObject, name: str
) -> None:
    model, reuse_prefixes = MODELS[name], way == "reuse_prefixes"
    with pytest.MonkeyPatch.context() as patch:
        if way == "recorded" and not model.make_cache(1, 1, torch.float32).has_states:
            patch.setattr(batch, "_can_record", lambda *_: True)
            patch.setattr(RecordedSteps, "_record", _recorded)
        decoder = BatchDecoder(model, 3, CONTEXT, reuse_prefixes=reuse_prefixes)
        _join_and_leave(model, decoder, reuse_prefixes, data)


def _join_and_leave(
    model: Model, decoder: BatchDecoder, reuse_prefixes: bool, data: st.DataObject
) -> None:
    known = [[1, 2, 3]]
    texts: list[list[int]] = []
    kept: list[int] = []
    token = st.integers(0, 351)
    for _ in range(data.draw(st.integers(1, 12))):
        kinds = ["add"] * (len(texts) < 3) + ["step", "step", "remove"] * bool(texts)
        kind = data.draw(st.sampled_from(kinds))
        if kind == "add":
            joining = []
            for _ in range(data.draw(st.integers(1, 3 - len(texts)))):
                beginning = data.draw(st.sampled_from(known))[: data.draw(st.integers(0, 60))]
                joining.append([*beginning, *data.draw(st.lists(token, min_size=1, max_size=20))])
                known.append(joining[-1])
            if reuse_prefixes:
                found = torch.stack([decoder.add(text) for text in joining])
            else:
                found = decoder.add_many(joining)
            texts += joining
            expected = torch.stack([full(model, text) for text in joining])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        elif kind == "remove":
            number = data.draw(st.integers(0, len(texts) - 1))
            decoder.remove(number)
            texts[number] = texts[-1]
            texts.pop()
        else:
            new = [data.draw(token) for _ in texts]
            # If no text joined or left, sometimes reuse the tokens that are already on the device.
            new = kept if len(kept) == len(texts) and data.draw(st.booleans()) else new
            logits = decoder.step(new)
            kept = [data.draw(token) for _ in texts]
            decoder.keep(torch.tensor(kept), kept)
            texts = [[*text, one] for text, one in zip(texts, new, strict=True)]
            known += texts
            for row, text in enumerate(texts):
                torch.testing.assert_close(logits[row], full(model, text), atol=1e-4, rtol=1e-4)
        assert len(decoder) == len(texts)
        assert [decoder.room(n) for n in range(len(texts))] == [CONTEXT - len(t) for t in texts]


@pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
def test_batch_decoder_spare_rows_keep_logits_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(LLAMA)
    use_few_rows(model)
    plain = BatchDecoder(model, 8, CONTEXT)
    monkeypatch.setattr(batch, "_can_record", lambda *_: True)
    monkeypatch.setattr(RecordedSteps, "_record", _recorded)
    padded = BatchDecoder(model, 8, CONTEXT)
    shapes = _computed(model, monkeypatch)
    for size, rows in ((3, 4), (5, 8)):
        for decoder in (plain, padded):
            decoder.add_many([[size, 2, 3 + n][n % 2 :] for n in range(size - len(decoder))])
        for step in range(3):
            ids = [7 * step + n for n in range(size)]
            assert torch.equal(plain.step(ids), padded.step(ids))
            assert shapes[-2:] == [(size, 1), (rows, 1)]


def test_batch_decoder_shared_prefix_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = new_model(LLAMA)
    shapes = _computed(model, monkeypatch)
    decoder = BatchDecoder(model, 2, CONTEXT, reuse_prefixes=True)
    decoder.add([1, 2, 3, 4])
    decoder.step([5])
    decoder.add([1, 2, 3, 4, 5, 6, 7])  # From a row that is in use.
    decoder.remove(0)
    decoder.remove(0)
    decoder.add([1, 2, 3, 4, 5, 6, 7])  # All tokens except the last are cached.
    decoder.add([1, 9])
    assert shapes == [(1, 4), (1, 1), (1, 2), (1, 1), (1, 1)]
    without = BatchDecoder(model, 1, CONTEXT)
    without.add([1, 2, 3])
    without.remove(0)
    without.add([1, 2, 3])
    assert shapes[5:] == [(1, 3), (1, 3)]


def _computed(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that collects the token shapes [B, T] of all later forward passes."""
    shapes: list[tuple[int, ...]] = []
    plain = model.forward

    def counted(input_ids: Tensor, **others: Any) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        result: Tensor = plain(input_ids, **others)
        return result

    monkeypatch.setattr(model, "forward", counted)
    return shapes


@pytest.mark.parametrize(
    ("name", "pass_tokens", "expected"),
    [
        ("llama", 512, [(3, 6), (1, 40), (2, 2)]),  # Up to a third of a pass may be padding.
        ("llama", 12, [(2, 6), (1, 4), (1, 40), (2, 2)]),
        ("llama", 1, [(1, 5), (1, 6), (1, 4), (1, 40), (1, 2), (1, 2)]),
        # Recurrent states and length-dependent frequencies do not allow padding.
        ("qwen3_next", 512, [(1, 5), (1, 6), (1, 4), (1, 40), (1, 2), (1, 2)]),
        ("longrope", 512, [(1, 5), (1, 6), (1, 4), (1, 40), (1, 2), (1, 2)]),
    ],
)
def test_batch_decoder_neighbouring_prompts_of_similar_length_share_one_pass(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    pass_tokens: int,
    expected: list[tuple[int, ...]],
) -> None:
    model = new_model(FAMILIES[name])
    decoder = BatchDecoder(model, 6, CONTEXT)
    decoder.pass_tokens = pass_tokens
    prompts = [[(7 * n + row) % 350 for n in range(size)] for row, size in enumerate(SIZES)]
    expected_logits = torch.stack([full(model, prompt) for prompt in prompts])
    shapes = _computed(model, monkeypatch)
    logits_BV = decoder.add_many(prompts)
    assert shapes == expected
    assert decoder.lengths == list(SIZES)
    torch.testing.assert_close(logits_BV, expected_logits, atol=1e-4, rtol=1e-4)


def test_batch_decoder_invalid_prompt_adds_no_sequence() -> None:
    decoder = BatchDecoder(MODELS["llama"], 3, CONTEXT)
    with pytest.raises(ModelError, match="but the model's vocabulary"):
        decoder.add_many([[1, 2], [352], [3]])
    assert len(decoder) == 0


def test_batch_decoder_full_raises() -> None:
    decoder = BatchDecoder(MODELS["gpt2"], 1, 4)
    decoder.add([1, 2, 3])
    with pytest.raises(AssertionError, match="no room"):
        decoder.add([1])
    decoder.step([1])
    with pytest.raises(AssertionError, match="full"):
        decoder.step([1])


# Texts


@pytest.fixture(params=sorted(FAMILIES))
def loaded(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(MODELS[request.param], tokenizer, (0,), Path("a-model"))


PROMPTS = ["the star falls", "", "a stone under the river, and", "one", "日本 🙂", "the"]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SamplingConfig(max_new_tokens=12, temperature=0, seed=9), (1, 2, 4, 8)),
        (SamplingConfig(max_new_tokens=12, temperature=1.0, top_k=40, seed=5), (4,)),
        pytest.param(
            SamplingConfig(
                max_new_tokens=40, temperature=1.5, min_p=0.01, repetition_penalty=1.3, seed=1
            ),
            (1, 2, 4, 8),
            marks=pytest.mark.slow,
        ),
        (
            SamplingConfig(
                max_new_tokens=24, temperature=1.0, frequency_penalty=0.7, presence_penalty=-0.4,
                logit_bias={7: 2.0, 30: -100}, seed=2,
            ),
            (4, 8),
        ),
    ],
    ids=["greedy", "top-k", "min-p", "penalties"],
)  # fmt: skip
def test_generate_batch_text_equals_single_generation(
    loaded: LoadedModel, config: SamplingConfig, sizes: tuple[int, ...]
) -> None:
    found, *others = [generate_batch(loaded, PROMPTS, config, batch_size=size) for size in sizes]
    assert [one.prompt for one in found] == PROMPTS
    assert all(other == found for other in others)
    for one in found:
        alone = generate(
            loaded,
            one.prompt,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            frequency_penalty=config.frequency_penalty,
            presence_penalty=config.presence_penalty,
            logit_bias=config.logit_bias,
            seed=one.seed,
        )
        assert one == alone


def test_generate_batch_without_seed_gives_each_text_different_seed(loaded: LoadedModel) -> None:
    found = generate_batch(loaded, ["the"] * 4, SamplingConfig(20, temperature=1.0))
    assert len({one.seed for one in found}) == 4


def test_generate_batch_without_prompts_returns_empty_list(loaded: LoadedModel) -> None:
    assert generate_batch(loaded, [], SamplingConfig()) == []


def test_generate_batch_invalid_prompt_raises_before_computing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchDecoder, "add", None)
    with pytest.raises(ConfigError, match="context of 96"):
        generate_batch(loaded, ["the", "the " * 200], SamplingConfig())
    with pytest.raises(ConfigError, match="batch_size must be at least 1, not 0"):
        generate_batch(loaded, ["the"], SamplingConfig(), batch_size=0)
    bare = LoadedModel(loaded.model, None, (), Path("bare"))
    with pytest.raises(ModelError, match="bare has no tokenizer"):
        generate_batch(bare, ["the"], SamplingConfig())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_batch_decoder_never_draws_vocabulary_padding(config: ModelConfig) -> None:
    """This holds even if the padding rows would give the most likely tokens."""
    small = config.model_copy(update={"vocab_size": 67})
    model = new_model(small, vocab_multiple=64)
    head = model.lm_head.weight
    assert len(head) == 128
    with torch.no_grad():
        head[67:] = 50.0 * head[:61]
    decoder = BatchDecoder(model, 2, 90)
    generator = torch.Generator().manual_seed(0)
    logits = [decoder.add([1, 2]), decoder.add([3])]
    for _ in range(60):
        assert all(row.shape == (67,) for row in logits)
        drawn = [
            int(torch.multinomial((row / 50).softmax(-1), 1, generator=generator)) for row in logits
        ]
        logits = list(decoder.step(drawn))
