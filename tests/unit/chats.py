"""Conversations and templates for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens

_WORDS = "the light dawn star river stone bird green small old sings runs over 1 22 é 日本".split()

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


def say(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def draw_text(generator: random.Random, most: int = 8) -> str:
    return " ".join(generator.choices(_WORDS, k=generator.randint(1, most)))


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
