"""A model trained by others: stories260K, with the sample text published by its author."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import generate, load
from firstlight.lora.loading import LoadedModel
from generated import generate_ids

_PROMPTS = ("Once upon a time", "The little dog  ran\nto", "日本 🙂", "Lily's 3 cats")


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "models" / "stories260K"


@pytest.fixture(scope="module")
def stories(folder: Path) -> LoadedModel:
    return load(folder)


def test_real_model_greedy_text_matches_published_one(folder: Path, stories: LoadedModel) -> None:
    result = generate(stories, "", max_new_tokens=256, temperature=0)
    assert result.text == (folder / "greedy.txt").read_text(encoding="utf-8")
    assert result.prompt_tokens == 1


def test_real_model_logits_match_transformers_over_whole_context(
    folder: Path, stories: LoadedModel
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    limit = stories.model.config.max_position_embeddings
    ids = torch.randint(3, 512, (1, limit), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = stories.model(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_real_model_prompt_ids_match_transformers(folder: Path, stories: LoadedModel) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert stories.tokenizer is not None
    for text in _PROMPTS:
        assert stories.tokenizer.encode_prompt(text) == theirs(text)["input_ids"]


def test_real_model_greedy_ids_match_transformers(folder: Path, stories: LoadedModel) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert stories.tokenizer is not None
    for text in _PROMPTS:
        prompt_ids = stories.tokenizer.encode_prompt(text)
        config = SamplingConfig(max_new_tokens=40, temperature=0)
        own = list(generate_ids(stories.model, prompt_ids, config, stories.eos_token_ids))
        expected = theirs.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
        )
        assert own == expected[0, len(prompt_ids) :].tolist()
