"""Labels of a conversation equal transformers' mask of the assistant's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from chat_templates import SPECIAL_TOKENS, WITH_BLOCKS, WITHOUT_BLOCKS
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_labels import ChatEncoder

_WORDS = ("hello", "the star", " two", "é", "日本", "🙂", "<b>", "x\ny", "dawn.", "\t1")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_star",
            "description": "Find a star",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
]
#: Families whose templates render tools, calls and results.
_WITH_TOOLS = ("qwen3", "llama3.1", "mistral", "hermes", "gpt-oss")
#: Key of the reasoning, or "" if the reasoning is part of the content.
_THOUGHTS = {"qwen3": "reasoning_content", "gpt-oss": "thinking", "smollm3": "", "hermes": ""}


def conversation(generator: random.Random, family: str) -> tuple[list[dict[str, Any]], bool]:
    """Return a conversation that a family's template renders completely, and True if it includes
    tools.
    """

    def text() -> str:
        # Starts with a letter: if an answer's first character is merged into the prompt's last
        # token, transformers learns that token and firstlight does not.
        return "a" + "".join(generator.choices(_WORDS, k=generator.randint(0, 6)))

    messages: list[dict[str, Any]] = []
    if generator.random() < 0.5 and family != "hermes":
        messages.append({"role": "system", "content": text()})
    has_tools = family in _WITH_TOOLS and generator.random() < 0.5
    turns = generator.randint(1, 3)
    for turn in range(turns):
        messages.append({"role": "user", "content": text()})
        if has_tools and generator.random() < 0.7:
            call = {"name": "find_star", "arguments": {"name": text(), "n": turn}}
            entry = {"id": f"{turn:09}", "type": "function", "function": call}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [entry]},
                {"role": "tool", "content": text(), "tool_call_id": f"{turn:09}"},
            ]
        answer = {"role": "assistant", "content": text()}
        key = _THOUGHTS.get(family)
        if key is not None and turn == turns - 1 and generator.random() < 0.5:
            inline = f"<think>\n{text()}\n</think>\n\n{text()}"
            answer = {**answer, key: text()} if key else {**answer, "content": inline}
        messages.append(answer)
    return messages, has_tools


@pytest.mark.parametrize("family", WITH_BLOCKS)
def test_chat_labels_match_transformers_masks_and_blocks_match_prefixes(
    tokenizer: Tokenizer, tmp_path: Path, family: str
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tokenizer.extended(SPECIAL_TOKENS, WITH_BLOCKS[family])
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    with_blocks = ChatEncoder(ours)
    without_blocks = ChatEncoder(tokenizer.extended(SPECIAL_TOKENS, WITHOUT_BLOCKS[family]))
    generator = random.Random(0)
    for _ in range(30):
        messages, has_tools = conversation(generator, family)
        tools = _TOOLS if has_tools else None
        found = theirs.apply_chat_template(
            json.loads(json.dumps(messages)),
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        options = {"tools": tools} if tools else {}
        chat = with_blocks.encode(messages, options=options)
        assert chat.lost == ()
        assert chat.ids == found["input_ids"]
        assert chat.loss_mask == [bool(own) for own in found["assistant_masks"]]
        # SmolLM3's blocks include the header, and R1's prompt differs from its answers.
        if family not in ("smollm3", "deepseek-r1"):
            assert without_blocks.encode(messages, options=options) == chat
