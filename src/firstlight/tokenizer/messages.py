"""Convert tool calls, tool results and reasoning in messages from the formats used in datasets to
the format that chat templates expect.

The tables below cover the formats of OpenAI, Hermes, ShareGPT (LLaMA-Factory), mlx-lm, xLAM,
Anthropic and axolotl. All of them are converted to the format described in transformers'
documentation:

    tools           [{"type": "function", "function": {"name", "description", "parameters"}}]
    tool_calls      [{"id", "type": "function", "function": {"name", "arguments": {...}}}]
    results         {"role": "tool", "tool_call_id", "content": text}
    reasoning       `reasoning_content` next to `content`

Chat templates differ in some details, which `fit_messages` handles: the key for the reasoning,
answers without text, and the format of ids.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Keys that contain the tools of a record, and keys that contain the tool calls of a message.
TOOLS = ("tools", "functions")
CALLS = ("tool_calls", "function_calls", "function_call")
#: Names that some datasets use for the keys of a tool and of a tool call.
_TOOL_KEYS = {"input_schema": "parameters", "schema": "parameters"}
_ARGUMENTS = ("arguments", "parameters", "input")
#: Lower-case names of the roles whose messages contain a tool call, and of the roles whose messages
#: contain a tool result.
CALLING_ROLES = ("function_call", "tool_call")
RESULT_ROLES = (
    "tool function observation ipython tool_response tool_result tool_results function_response"
).split()
#: Keys for the reasoning in an assistant's message.
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts")
#: Descriptions of the text that a chat template may omit, keyed by the reason for which the record
#: is rejected.
LOST = {
    "lost_system": "a system message",
    "lost_tools": "tools",
    "lost_calls": "a tool call",
    "lost_results": "the result of a tool",
    "lost_thoughts": "reasoning",
    "lost_text": "a text",
}

_WRITTEN_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_WRITTEN_RESULT = re.compile(r"\s*<tool_response>(.*)</tool_response>\s*", re.DOTALL)


def template_options(
    fields: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the variables that a record defines for the chat template: its tools, and the entries
    of `chat_template_kwargs`. The tools are in a field of either the record or its system message.

    Args:
        fields: fields of the record.
        messages: messages of the record. In Hermes records, the text of the system message already
            contains all tools, so the field with the tools is ignored.

    Raises:
        ValueError: the tools are not a list of named functions; the message names the key.
    """
    further = parsed_json(fields.get("chat_template_kwargs"))
    given = further if isinstance(further, Mapping) else {}
    left_out = (*TOOLS, "add_generation_prompt")
    options = {str(k): v for k, v in given.items() if v is not None and k not in left_out}
    systems = [one for one in messages if one["role"] == "system"]
    system = "\n".join(one["content"] for one in systems)
    for key in TOOLS:
        value: Any = next((one[key] for one in (fields, given, *systems) if one.get(key)), [])
        tools = normalize_tools(value, key)
        if tools and not (
            "<tools>" in system and all(t["function"]["name"] in system for t in tools)
        ):
            options["tools"] = tools
    return options


def normalize_tools(value: Any, key: str = "tools") -> list[dict[str, Any]]:
    """Convert tools to the format of OpenAI and transformers.

    Args:
        value: tools in any supported format, as JSON data or as a string that contains JSON.
        key: name of the value, for error messages.

    Raises:
        ValueError: the value is not a list of functions with names.
    """
    normalized = []
    for _, function in _functions(value, f"`{key}` is not a list of functions with names"):
        named = {_TOOL_KEYS.get(k, k): v for k, v in function.items() if k != "type"}
        normalized.append({"type": "function", "function": named})
    return normalized


def _functions(value: Any, problem: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (entry, function) for each entry of a list of tools or tool calls. The value may also
    be a single entry.

    Raises:
        ValueError: an entry has no name; the error message is `problem`.
    """
    entries = parsed_json(value)
    for entry in map(parsed_json, entries if isinstance(entries, list) else [entries]):
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(problem)
        yield entry, function


def normalize_message(message: Mapping[str, Any], *, writes_calls: bool) -> dict[str, Any]:
    """Convert the tool calls or the tool result in a message to the format of transformers.

    Args:
        message: an object with `role` and `content`.
        writes_calls: True if the template formats tool calls itself. In this case, calls in the
            content, written as `<tool_call>{...}</tool_call>`, are converted to entries of
            `tool_calls`.

    Raises:
        ValueError: a tool call has no name.
    """
    role, content = message["role"].lower(), message["content"]
    found = next((message[key] for key in CALLS if message.get(key)), None)
    if role in CALLING_ROLES:
        found, content = content, ""
    elif found is None and role == "assistant" and writes_calls and "<tool_call>" in content:
        written = [parsed_json(call) for call in _WRITTEN_CALL.findall(content)]
        if written and all(isinstance(call, Mapping) and call.get("name") for call in written):
            found, content = written, _WRITTEN_CALL.sub("", content).strip()
    normalized = {key: value for key, value in message.items() if key not in CALLS}
    if found is not None:
        calls = _normalize_calls(found)
        return normalized | {"role": "assistant", "content": content or "", "tool_calls": calls}
    return normalized | {"role": "tool"} if role in RESULT_ROLES else normalized


def _normalize_calls(value: Any) -> list[dict[str, Any]]:
    normalized = []
    for call, function in _functions(value, "a tool call has no name"):
        arguments: Any = next((function[key] for key in _ARGUMENTS if function.get(key)), {})
        own = {"id": call["id"]} if call.get("id") else {}
        named = {"name": function["name"], "arguments": parsed_json(arguments)}
        normalized.append({**own, "type": "function", "function": named})
    return normalized


def parsed_json(value: Any) -> Any:
    """Parse a string that contains JSON or, as in Hermes records, a Python literal. Return any
    other value unchanged.
    """
    if not isinstance(value, str):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return parsed if isinstance(parsed, dict | list) else value
    return value


def split_thoughts(message: Mapping[str, Any]) -> tuple[str, str]:
    """Split an assistant message into (reasoning, answer). The reasoning is either a separate entry
    of the message or the part of the content before `</think>`. The content is split in the same
    way as in Qwen 3's template.
    """
    content = message.get("content") or ""
    for key in THOUGHTS:
        if isinstance(message.get(key), str) and message[key].strip():
            return message[key], content
    before, end, answer = content.rpartition("</think>")
    if not end:
        return "", content
    return before.rstrip("\n").rpartition("<think>")[2].lstrip("\n"), answer.lstrip("\n")


def fit_messages(
    messages: Sequence[Mapping[str, Any]], template: str, *, text_arguments: bool = False
) -> list[dict[str, Any]]:
    """Adapt messages with reasoning and tool calls to a chat template.

    Args:
        messages: messages in the format of this module, whose tool calls are modified in place.
        template: the chat template.
        text_arguments: True if the template expects the arguments of calls as strings of JSON
            instead of objects.
    """
    keys = [key for key in THOUGHTS if re.search(rf"[.'\"]{key}\b", template)]
    without_text = None if re.search(r"content\W{0,3}\s+is\s+(not\s+)?none", template) else ""
    # SmolLM3's template instructs the model to write calls in this format, but does not render the
    # tool calls of messages.
    is_written = "tool_calls" not in template and "<tool_call>" in template
    fitted = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "tool_calls" or value}
        thoughts, answer = split_thoughts(message) if message["role"] == "assistant" else ("", "")
        if thoughts and "</think>" not in (message.get("content") or ""):
            message = {key: value for key, value in message.items() if key not in THOUGHTS}
            inline = f"<think>\n{thoughts}\n</think>\n\n{answer}"
            message |= {"content": answer if keys else inline, **dict.fromkeys(keys, thoughts)}
        if "tool_calls" in message and is_written:
            calls = [
                json.dumps(one["function"], ensure_ascii=False) for one in message.pop("tool_calls")
            ]
            texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            message["content"] = "\n".join(filter(None, texts))
        elif "tool_calls" in message:
            message["content"] = message.get("content") or without_text
            functions = [call["function"] for call in message["tool_calls"]]
            for function in functions if text_arguments else ():
                if not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        result = _WRITTEN_RESULT.fullmatch(message["content"] or "")
        if message["role"] == "tool" and result and "<tool_response>" in template:
            message["content"] = result[1].strip("\n")
        fitted.append(message)
    if "!= 9" in template:  # Mistral's templates reject ids of any other length.
        _shorten_ids(fitted)
    return fitted


def _shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Replace the ids of tool calls, and the references to them in tool results, with ids of nine
    letters and digits. Ids that already have this form are kept.
    """
    ids: dict[str, str] = {}
    waiting: list[str] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = str(call.get("id") or f"call {len(ids)}")
            is_valid = re.fullmatch("[a-zA-Z0-9]{9}", name)
            call["id"] = ids.setdefault(name, name if is_valid else f"{len(ids):09}")
            waiting.append(call["id"])
        if message["role"] == "tool" and waiting:
            own = ids.get(str(message.get("tool_call_id")), waiting[0])
            message["tool_call_id"] = own
            waiting.remove(own) if own in waiting else None
