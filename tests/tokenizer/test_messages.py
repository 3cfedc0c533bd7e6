"""Formats of tools, tool calls and results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firstlight.tokenizer.messages import (
    fit_messages,
    normalize_message,
    normalize_tools,
    template_options,
)

_FUNCTION = {"name": "find", "description": "d", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    "value",
    [
        [_TOOL],
        json.dumps([_TOOL]),
        [json.dumps(_TOOL)],
        [_FUNCTION],
        _FUNCTION,
        [{"name": "find", "description": "d", "input_schema": {"type": "object"}}],
    ],
    ids=["openai", "sharegpt text", "texts", "bare", "one", "anthropic"],
)
def test_normalize_tools_any_format_gives_openai_format(value: Any) -> None:
    assert normalize_tools(value) == [_TOOL]


@pytest.mark.parametrize("value", ["find", [1], [{"function": "find"}], [{"type": "function"}]])
def test_normalize_tools_without_names_raises(value: Any) -> None:
    with pytest.raises(ValueError, match="`tools` is not a list of functions with names"):
        normalize_tools(value)


_TEXT = '{"name": "find", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "find", "arguments": '{"city": "Rome"}'}}],
        },
        {"role": "assistant", "content": "", "tool_calls": json.dumps([_CALL])},
        {"role": "assistant", "content": "", "function_call": json.loads(_TEXT)},
        {"role": "function_call", "content": _TEXT},
        {"role": "assistant", "content": f"<tool_call>\n{_TEXT}\n</tool_call>"},
        {
            "role": "assistant",
            "content": "<tool_call>{'arguments': {'city': 'Rome'}, 'name': 'find'}</tool_call>",
        },
        {"role": "tool_call", "content": '[{"name": "find", "parameters": {"city": "Rome"}}]'},
    ],
    ids=["objects", "texts", "text", "function_call", "sharegpt", "hermes", "python", "xlam"],
)
def test_normalize_message_call_in_any_format_gives_openai_format(
    message: dict[str, Any],
) -> None:
    assert normalize_message(message, writes_calls=True) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [_CALL],
    }


def test_normalize_message_template_without_calls_keeps_written_calls_as_text() -> None:
    message = {"role": "assistant", "content": f"<tool_call>{_TEXT}</tool_call>"}
    assert normalize_message(message, writes_calls=False) == message


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_normalize_message_with_result_has_role_tool(role: str) -> None:
    message = {"role": role, "content": "42", "name": "find"}
    assert normalize_message(message, writes_calls=True) == {**message, "role": "tool"}


def test_normalize_message_call_without_name_raises() -> None:
    with pytest.raises(ValueError, match="a tool call has no name"):
        normalize_message({"role": "function_call", "content": "find it"}, writes_calls=True)


def test_template_options_of_record_are_tools_and_variables() -> None:
    variables = {"enable_thinking": False, "add_generation_prompt": True}
    record = {"functions": [_FUNCTION], "chat_template_kwargs": variables}
    assert template_options(record, []) == {"enable_thinking": False, "tools": [_TOOL]}
    # Hermes records also list the tools in their system message.
    system = f"You may call <tools>{json.dumps(_TOOL)}</tools>"
    assert template_options({"tools": [_TOOL]}, [{"role": "system", "content": system}]) == {}


def test_fit_messages_assigns_call_ids_to_results_in_order() -> None:
    calls = [{**_CALL, "id": name} for name in ("call_0123", "abcdefghi")]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "2"},
    ]
    first, *results = fit_messages(messages, "{% if id | length != 9 %}")
    assert [call["id"] for call in first["tool_calls"]] == ["000000000", "abcdefghi"]
    assert [result["tool_call_id"] for result in results] == ["abcdefghi", "000000000"]


def test_fit_messages_unwraps_result_that_template_wraps() -> None:
    result = {"role": "tool", "content": "<tool_response>\n42\n</tool_response>"}
    assert fit_messages([result], "<tool_response>")[0]["content"] == "42"
    assert fit_messages([result], "")[0] == result


def test_fit_messages_writes_calls_as_text_for_template_that_requests_it() -> None:
    message = {"role": "assistant", "content": "So:", "tool_calls": [_CALL]}
    [fitted] = fit_messages([message], "Answer with <tool_call></tool_call>")
    text = json.dumps(_CALL["function"])
    assert fitted == {
        "role": "assistant",
        "content": f"So:\n<tool_call>\n{text}\n</tool_call>",
    }
