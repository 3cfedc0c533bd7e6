"""Tests of splitting answers into reasoning, text and tool calls, in the formats of known
models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from firstlight.generation.answers import AnswerFormat, AnswerParser, AnswerPart
from firstlight.tokenizer import TextStream, Tokenizer

TOOLS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "clock": {},
}
#: Texts that identify the formats in the models' chat templates.
HERMES = "{{ tools }}<tool_call>"
LLAMA = '{{ tools }}{"name": ..., "parameters": ...}<|python_tag|>'
MISTRAL = "{{ tools }}[TOOL_CALLS]"
DEEPSEEK = "{{ tools }}<｜tool▁calls▁begin｜>"
HARMONY = "{{ tools }}<|start|>assistant<|channel|>final<|message|>"

#: (template, answer, reasoning, content, calls)
CASES: dict[str, tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "plain": (HERMES, " Hi <b>you</b>\n", "", " Hi <b>you</b>\n", []),
    "thoughts": (HERMES, "<think>\na\n\nb\n</think>\n\nHi", "a\n\nb", "Hi", []),
    "mistral thoughts": (MISTRAL, "[THINK]a[/THINK]b", "a", "b", []),
    "thoughts that are cut": (HERMES, "<think>\nso", "so", "", []),
    "a tag later on": (HERMES, "Use <think> so", "", "Use <think> so", []),
    "hermes": (
        HERMES,
        '<think>x</think>Let me see.\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Köln"}}\n</tool_call>\n<tool_call>{"name": "clock", "arguments": {}}'
        "</tool_call>\n",
        "x",
        "Let me see.",
        [("weather", {"city": "Köln"}), ("clock", {})],
    ),
    "hermes without its end": (
        HERMES, '<tool_call>{"name": "clock", "arguments": "{}"}', "", "", [("clock", {})]
    ),
    "hermes that is cut": (
        HERMES, 'a <tool_call>{"name": "clo', "", 'a<tool_call>{"name": "clo', []
    ),
    "qwen coder": (
        HERMES,
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("weather", {"city": "12", "days": 3})],
    ),
    "llama": (
        LLAMA, '{"name": "clock", "parameters": {"a": [1]}}', "", "", [("clock", {"a": [1]})]
    ),
    "llama, two calls": (
        LLAMA,
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "x", "parameters": {}}',
        "",
        "",
        [("clock", {}), ("x", {})],
    ),
    "llama, other json": (LLAMA, '{"name": "Bob"}', "", '{"name": "Bob"}', []),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": '
        '{"city": "B"}}]',
        "",
        "",
        [("clock", {}), ("weather", {"city": "B"})],
    ),
    "mistral of 2025": (
        MISTRAL,
        'Wait[TOOL_CALLS]clock[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]clock[ARGS]{}',
        "",
        "Wait",
        [("clock", {"a": 1}), ("clock", {})],
    ),
    "deepseek r1": (
        DEEPSEEK,
        "<think>y</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "y",
        "",
        [("clock", {"a": 1})],
    ),
    "deepseek v3.1": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>x<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [("clock", {}), ("x", {})],
    ),
    "gpt-oss": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "Hm.",
        "Hi",
        [],
    ),
    "gpt-oss call": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "B"}',
        "Hm.",
        "Wait.",
        [("weather", {"city": "B"})],
    ),
    "gpt-oss recipient first": (
        HARMONY, ' to=functions.clock<|channel|>commentary json<|message|>{}', "", "",
        [("clock", {})],
    ),
    "gpt-oss that writes no channels": (HARMONY, "Hello <|x", "", "Hello <|x", []),
}  # fmt: skip


def parsed(answer_format: AnswerFormat, pieces: Iterable[str]) -> Any:
    """Return (reasoning, content, calls) for an answer that arrives in pieces."""
    parser = AnswerParser(answer_format)
    found = [part for piece in pieces for part in parser.push(piece)]
    found += parser.push("", ended=True)
    assert all(part != AnswerPart() for part in found)
    calls = [(call.name, json.loads(call.arguments)) for part in found for call in part.calls]
    texts = ("".join(getattr(part, name) for part in found) for name in ("reasoning", "content"))
    return (*texts, calls)


@pytest.mark.parametrize("name", CASES)
def test_answer_parser_any_pieces_give_reasoning_text_and_calls(
    tokenizer: Tokenizer, name: str
) -> None:
    template, answer, *expected = CASES[name]
    answer_format = AnswerFormat(tokenizer.extended([], template), [], TOOLS)
    for size in (len(answer), 1, 2, 3, 7):
        pieces = (answer[i : i + size] for i in range(0, len(answer), size))
        assert parsed(answer_format, pieces) == tuple(expected), size


def test_answer_parser_prompt_opening_reasoning_starts_in_reasoning(tokenizer: Tokenizer) -> None:
    ours = tokenizer.extended(["<think>"], HERMES)
    for prompt, reasoning, content in (
        ("<think>\n", "a", "b"),
        ("<think>\n\n</think>\n\n", "", "\na</think>b"),
    ):
        ids = ours.encode(f"user: hi {prompt}", special_tokens=True)
        found = parsed(AnswerFormat(ours, ids, {}), "\na</think>b")
        assert found == (reasoning, content, [])
        # A grammar does not allow reasoning.
        assert parsed(AnswerFormat(ours, ids, {}, forced="content"), '{"a":1}')[1] == '{"a":1}'


def test_answer_parser_without_tools_streams_at_once_and_keeps_calls_as_text(
    tokenizer: Tokenizer,
) -> None:
    parser = AnswerParser(AnswerFormat(tokenizer.extended([], HERMES), [], {}))
    for piece in ("Hi ", "<", "tool_call> "):
        assert parser.push(piece) == [AnswerPart(piece)]


def test_text_stream_shows_special_tokens_that_are_markers(tokenizer: Tokenizer) -> None:
    ours = tokenizer.extended(["<tool_call>", "</tool_call>", "<other>"], HERMES)
    text = 'é<tool_call>{"name": "clock"}<other></tool_call>'
    ids = ours.encode(text, special_tokens=True)
    answer_format = AnswerFormat(ours, [], TOOLS)
    stream = TextStream(ours, shown=answer_format.shown)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == text.replace("<other>", "")
    assert parsed(answer_format, pieces) == ("", "é", [("clock", {})])
    assert AnswerFormat(ours, [], {}).shown == frozenset()
