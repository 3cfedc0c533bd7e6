"""Tests of beam search, generation beyond the context, and the probabilities of candidate
tokens."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import draw_weights
from firstlight.errors import ConfigError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.beams import beam_search
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import generate, generate_batch
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, Model, build_model, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import config_from_hf
from generated import push

transformers = pytest.importorskip("transformers")


def random_model(seed: int, vocab_size: int, context: int = 32, scale: float = 0.5) -> Model:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
    )
    model = empty_model(config).eval()
    draw_weights(model, seed, scale)
    return model


def logprob(model: Model, prompt: list[int], new: tuple[int, ...]) -> float:
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, *new]]))[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + n, token]) for n, token in enumerate(new))


def test_beam_search_with_enough_beams_finds_most_likely_text() -> None:
    model, prompt = random_model(0, 4), [1, 3, 2]
    config = SamplingConfig(max_new_tokens=4, beams=4**3)
    found, reason = beam_search(model, prompt, config, ())
    texts = itertools.product(range(4), repeat=4)
    best = max(texts, key=lambda text: logprob(model, prompt, text))
    assert (found, reason) == (list(best), "length")


def test_beam_search_finds_likelier_texts_than_greedy() -> None:
    prompt = [3, 1]
    gains = []
    for seed in range(20):
        model = random_model(seed, 40)
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        found, _ = beam_search(model, prompt, SamplingConfig(max_new_tokens=6, beams=4), ())
        gains.append(logprob(model, prompt, tuple(found)) - logprob(model, prompt, tuple(ids[2:])))
    assert sum(gains) > 0.1
    assert sum(gain > 1e-9 for gain in gains) >= 5


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_matches_transformers(beams: int) -> None:
    """The model has an end token and ends some texts early."""
    ended = 0
    for seed in range(12):
        model = random_model(seed, 30, scale=0.4)
        config = transformers.LlamaConfig(**model.config.model_dump(mode="json"))
        other = transformers.LlamaForCausalLM(config).eval()
        other.load_state_dict(model.state_dict())
        prompt = [seed % 29 + 1, 7]
        search = SamplingConfig(max_new_tokens=12, beams=beams)
        found, reason = beam_search(model, prompt, search, (0,))
        expected = other.generate(
            torch.tensor([prompt]),
            num_beams=beams,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
            early_stopping=False,
        )[0, 2:].tolist()
        ended += reason == "stop"
        if 0 in expected:
            expected = expected[: expected.index(0)]
        assert found == expected, seed
    assert 0 < ended < 12


def test_longrope_text_beyond_original_context_matches_transformers() -> None:
    """Phi-3 in transformers recomputes the cache once a text needs the long factors."""
    config = transformers.Phi3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.0, 1.5, 2.0],
            "long_factor": [1.0, 4.0, 9.0, 20.0],
        },
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        sliding_window=None,
    )
    torch.manual_seed(0)
    other = transformers.Phi3ForCausalLM(config).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model = build_model(config_from_hf(config.to_dict(), "config.json")).eval()
    model.load_state_dict(other.state_dict())
    for length in (2, 7, 8, 9, 12):
        prompt = [(5 * i + length) % 39 + 1 for i in range(length)]
        for beams in (1, 2):
            expected = other.generate(
                torch.tensor([prompt]), num_beams=beams, max_new_tokens=10, do_sample=False
            )[0, length:].tolist()
            if beams > 1:
                search = SamplingConfig(max_new_tokens=10, beams=beams)
                found, _ = beam_search(model, prompt, search, ())
            else:
                # A cache with room for longer texts.
                decoder = BatchDecoder(model, 3, 32)
                found = [int(decoder.add(prompt).argmax())]
                while len(found) < 10:
                    found.append(int(decoder.step(found[-1:])[0].argmax()))
            assert found == expected, (length, beams)


def test_beam_search_unsupported_options_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="beam search does not support stop"):
        SamplingConfig(beams=2, stop=("x",))
    with pytest.raises(ConfigError, match="beam search does not support top_k"):
        SamplingConfig(beams=2, top_k=3)
    with pytest.raises(ConfigError, match="beam search does not support temperature"):
        SamplingConfig(beams=2, temperature=1.5)
    SamplingConfig(beams=2, temperature=0)
    with pytest.raises(ConfigError, match="beams must be between 1"):
        SamplingConfig(beams=0)
    with pytest.raises(ConfigError, match="slide drops old text"):
        SamplingConfig(slide=True, prompt_logprobs=0)


def test_generate_batch_single_text_options_raise_config_error(tokenizer: Tokenizer) -> None:
    loaded = LoadedModel(random_model(3, tokenizer.vocab_size), tokenizer, (), Path("a-model"))
    for config in (SamplingConfig(slide=True), SamplingConfig(beams=2)):
        with pytest.raises(ConfigError, match="one text at a time"):
            generate_batch(loaded, ["a", "b"], config)


def test_generate_slide_continues_beyond_context(tokenizer: Tokenizer) -> None:
    """When the context is full, its most recent half becomes the new prompt."""
    context = 16
    model = random_model(3, tokenizer.vocab_size, context)
    loaded = LoadedModel(model, tokenizer, (), Path("a-model"))
    found = generate(loaded, "a b", max_new_tokens=40, temperature=0, slide=True)
    assert len(found.token_ids) == 40
    ids = tokenizer.encode_prompt("a b")
    window = list(ids)
    expected: list[int] = []
    while len(expected) < 40:
        if len(window) == context:
            window = window[-context // 2 :]
        with torch.no_grad():
            token = int(model(torch.tensor([window]))[0, -1].argmax())
        expected.append(token)
        window.append(token)
    assert found.token_ids == expected
    short = generate(loaded, "a b", max_new_tokens=40, temperature=0)
    assert len(short.token_ids) == context - len(ids)
    assert short.token_ids == expected[: len(short.token_ids)]


def test_generate_slide_of_one_token_recomputes_whole_context(tokenizer: Tokenizer) -> None:
    """This is `generate` of LLMs-from-scratch: `idx[:, -context_size:]` for every token."""
    context = 16
    model = random_model(3, tokenizer.vocab_size, context)
    loaded = LoadedModel(model, tokenizer, (), Path("a-model"))
    for prompt in ("a b", "one two three four five six seven eight nine ten eleven twelve"):
        config: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5}
        found = generate(loaded, prompt, **config, slide=True, slide_tokens=1)
        text = Continuation(
            tokenizer.encode_prompt(prompt), SamplingConfig(**config, slide=True), context=context
        )
        while text.finish_reason is None:
            window = [*text.prompt_ids, *text.token_ids][-context:]
            with torch.no_grad():
                push(text, model(torch.tensor([window]))[0, -1])
        assert found.token_ids == text.token_ids
        assert len(found.token_ids) == 40
    with pytest.raises(ConfigError, match="slide_tokens requires slide: enable slide"):
        generate(loaded, "a b", slide_tokens=1)


def test_generate_slide_accepts_prompt_beyond_context(tokenizer: Tokenizer) -> None:
    model = random_model(3, tokenizer.vocab_size, 16)
    loaded = LoadedModel(model, tokenizer, (), Path("a-model"))
    prompt = "one two three four five six seven eight nine ten eleven twelve"
    assert len(tokenizer.encode_prompt(prompt)) > 16
    with pytest.raises(ConfigError, match="shorten the prompt"):
        generate(loaded, prompt, max_new_tokens=3)
    found = generate(loaded, prompt, max_new_tokens=3, temperature=0, slide=True)
    window = tokenizer.encode_prompt(prompt)[-8:]
    with torch.no_grad():
        assert found.token_ids[0] == int(model(torch.tensor([window]))[0, -1].argmax())


def test_choice_probabilities_match_model_and_sampling(tokenizer: Tokenizer) -> None:
    model = random_model(5, tokenizer.vocab_size)
    loaded = LoadedModel(model, tokenizer, (), Path("a-model"))
    options: dict[str, Any] = {"max_new_tokens": 3, "seed": 4, "top_k": 2, "temperature": 0.5}
    found = generate(loaded, "a b", choices=3, **options)
    assert found.token_ids == generate(loaded, "a b", **options).token_ids
    assert found.choices is not None
    ids = tokenizer.encode_prompt("a b")
    for token_id, own in zip(found.token_ids, found.choices, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, -1].double()
        expected, order = logits.softmax(-1).sort(descending=True)
        assert [one.token_id for one in own[:3]] == order[:3].tolist()
        assert [one.model for one in own[:3]] == pytest.approx(expected[:3].tolist(), rel=1e-5)
        # Temperature 0.5 squares the probabilities of the two most likely tokens, normalised to sum
        # to 1.
        squares = [p**2 / sum(expected[:2] ** 2) for p in expected[:2].tolist()]
        assert [one.sampled for one in own[:3]] == pytest.approx(
            [*map(float, squares), 0], rel=1e-4
        )
        assert [one.token_id for one in own if one.is_chosen] == [token_id]
        assert math.isclose(sum(one.sampled for one in own), 1, rel_tol=1e-5)
        ids.append(token_id)
    biased = generate(loaded, "a b", choices=1, **options, logit_bias={7: 100})
    assert biased.choices is not None
    assert [own[-1].token_id for own in biased.choices] == biased.token_ids == [7, 7, 7]
    assert all(own[-1].sampled > 0.999 > own[-1].model for own in biased.choices)
