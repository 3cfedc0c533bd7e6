"""What is learned of a conversation is what transformers' mask of the assistant's tokens says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_labels import ChatEncoder
from firstlight.tokenizer.chat_template import required_tokens

_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
"""
_WORDS = ("hello", "the star", " two", "é", "日本", "🙂", "<b>", "x\ny", "dawn.", "\t1")


def test_masks_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tokenizer.extended(required_tokens("chatml"), _TEMPLATE)
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    encoder, generator = ChatEncoder(ours), random.Random(0)
    for _ in range(100):
        messages = [
            {
                "role": ("user", "assistant")[i % 2],
                # A letter first: where an answer's first character melts into the prompt's last
                # token, transformers learns that token and we don't.
                "content": "a" + "".join(generator.choices(_WORDS, k=generator.randint(0, 6))),
            }
            for i in range(2 * generator.randint(1, 4))
        ]
        found = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        chat = encoder.encode(messages)
        assert chat.ids == found["input_ids"]
        assert chat.loss_mask == [bool(own) for own in found["assistant_masks"]]
