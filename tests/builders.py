"""Small texts, conversations and templates for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firstlight.models import empty_model
from firstlight.models.language_model import InitConfig
from firstlight.models.llama_config import LlamaConfig
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

# Parameters


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which `make test` runs the quick ones and `make test-slow` the others."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


# Texts

ENGLISH = (
    "the cat sat on a mat and saw one red bird that sang in the old tree by a small lake".split()
)

_MANY_SCRIPTS = (
    "the a light first dawn star river stone bird green small old sings falls runs over under "
    "through and but while every never 1 22 333 ä ö ü é 日本 🙂 def return class x_1 == ( ) : ."
).split()


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Deterministic documents of a few hundred characters, several scripts, many lines."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        lines = (
            " " * generator.choice((0, 0, 4, 8)) + " ".join(generator.choices(_MANY_SCRIPTS, k=9))
            for _ in range(generator.randint(3, 12))
        )
        texts.append("\n".join(lines) + "\n")
    return texts


def write_texts(folder: Path, count: int = 30, words: int = 150) -> Path:
    """A new folder of so many English-like texts of so many words."""
    folder.mkdir()
    draw = random.Random(0)
    for number in range(count):
        text = " ".join(draw.choices(ENGLISH, k=words))
        (folder / f"{number:02}.txt").write_text(text + "\n")
    return folder


# Conversations

_CHAT_WORDS = (
    "the light dawn star river stone bird green small old sings runs over 1 22 é 日本".split()
)

#: As Qwen 3's: only the last answer has the empty thought, and thoughts of others are left out.
THINKING = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' and loop.last -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
    {%- set content = message.content -%}
    {%- if message.role == 'assistant' and not loop.last -%}
        {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- content | trim ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

#: With blocks around what is learned: the answer and its end.
BLOCKS = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def with_template(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """The tokenizer with a built-in template and its tokens."""
    return tokenizer.extended(required_tokens(name), CHAT_TEMPLATES[name])


def with_chatml_like(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with a template that writes ChatML's tokens."""
    return tokenizer.extended(required_tokens("chatml"), template)


def draw_weights(model: nn.Module, seed: int, scale: float) -> None:
    """Draw all parameters of a model from a normal distribution with a standard deviation of
    `scale`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, scale, generator=generator)


def write_model(folder: Path, tokenizer: Tokenizer, **shape: Any) -> Path:
    """Write the folder of a tiny Llama with random weights."""
    own = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 320, **shape}
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, num_attention_heads=2, **own)
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0), InitConfig())
    folder.mkdir()
    for name, content in model_files(config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    save_weights(weights_to_save(model), folder)
    return folder


def say(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def draw_text(generator: random.Random, most: int = 8) -> str:
    return " ".join(generator.choices(_CHAT_WORDS, k=generator.randint(1, most)))


def draw_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of all forms, of one to three turns."""
    generator = random.Random(seed)
    records: list[dict[str, Any]] = []
    for number in range(count):
        texts = [draw_text(generator) for _ in range(2 * generator.randint(1, 3))]
        match number % 3:
            case 0:
                instruction, output = texts[:2]
                records.append({"instruction": instruction, "input": "", "output": output})
            case 1:
                records.append({"messages": say(*texts)})
            case _:
                turns = [
                    {"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)
                ]
                records.append({"conversations": turns})
    return records


def write_lines(path: Path, records: Sequence[object]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
