"""Parse model output: split an answer into reasoning, text and tool calls.

A model marks the parts of an answer in the format of its chat template:

    reasoning   <think>...</think> or [THINK]...[/THINK] at the beginning of the answer
    tool calls  Hermes, Qwen     <tool_call>{"name": ..., "arguments": ...}</tool_call>, or, inside
                                 the same tags,
                                 <function=NAME><parameter=KEY>VALUE</parameter></function>
                Llama 3          {"name": ..., "parameters": ...} as the whole answer
                Mistral          [TOOL_CALLS][{"name": ..., "arguments": ...}] or
                                 [TOOL_CALLS]NAME[ARGS]{...}
                DeepSeek         <｜tool▁calls▁begin｜>...<｜tool▁calls▁end｜>
    both        gpt-oss          <|channel|>CHANNEL to=functions.NAME<|message|>...<|end|>
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.generation.continuation import overlap
from firstlight.tokenizer import Tokenizer

#: Mapping from the markers that begin tool calls to the markers that end them. "" means that the
#: tool calls extend to the end of the answer.
_CALLS = {
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": "",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<|python_tag|>": "",
}
#: Tokens that occur inside tool calls.
_INSIDE_CALLS = (
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}

#: Modes of the gpt-oss format. A header ends with <|message|> and determines the mode of the text
#: that follows it.
_END_OF_CHANNEL = dict.fromkeys(("<|end|>", "<|call|>", "<|return|>", "<|start|>"), "header")
_HARMONY = {
    "header": {"<|message|>": ""},
    **dict.fromkeys(("reasoning", "content", "call"), _END_OF_CHANNEL),
}
#: Special tokens that gpt-oss and Llama 3 write at the end of an answer with a tool call.
_CALL_ENDS = ("<|call|>", "<|eom_id|>")

_CALL_NAME = re.compile(
    r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|<｜tool▁sep｜>)?(?:\s*```json)?\s*(?=\{)"
)
_BETWEEN_CALLS = re.compile(
    r"(?:[\s;,]|```|<｜tool▁call▁(?:begin|end)｜>|function<｜tool▁sep｜>|\[TOOL_CALLS\])*"
)
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)</function>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.S)


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by the model.

    Attributes:
        name: the tool's name.
        arguments: arguments of the call, serialized as a JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer. Exactly one of the fields is non-empty.

    Attributes:
        content: text of the answer.
        reasoning: text of the reasoning before the answer.
        calls: tool calls in the answer.
    """

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


class AnswerFormat:
    """The format of a model's answers in one conversation.

    Args:
        tokenizer: a tokenizer with a chat template.
        prompt_ids: token ids of the conversation up to the beginning of the answer.
        tools: JSON schemas of the tools' parameters, keyed by tool name. If there are none, tool
            calls are recognised only in the gpt-oss format.
        forced: mode imposed on the answer by a grammar, either "call" (a tool call as JSON) or
            "content" (any text); None without a grammar.

    Attributes:
        start: the parser's mode at the beginning of an answer: "content", "reasoning", "call",
            "header" (gpt-oss), or "start" if the first marker determines the mode.
        modes: for each mode, a mapping from the markers that end the mode to the modes that follow.
        shown: special tokens that serve as markers and are therefore decoded to text.
        tools: JSON schemas of the tools' parameters, keyed by tool name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]],
        *,
        forced: str | None = None,
    ) -> None:
        template = tokenizer.chat_template or ""
        self.tools = tools
        self.modes: dict[str, dict[str, str]]
        if "<|channel|>" in template:
            self.start, self.modes = "header", _HARMONY
        else:
            calls = {begin: end for begin, end in _CALLS.items() if tools and begin in template}
            starts = dict.fromkeys(_THOUGHTS, "reasoning")
            if tools and '"parameters"' in template and set(calls) <= {"<|python_tag|>"}:
                starts["{"] = "call"
            self.modes = {
                "start": starts,
                "reasoning": dict.fromkeys(_THOUGHTS.values(), "content"),
                "content": dict.fromkeys(calls, "call"),
                "call": {end: "content" for end in calls.values() if end},
            }
            tail = tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False).rstrip()
            self.start = "reasoning" if tail.endswith(tuple(_THOUGHTS)) else "start"
        markers = {marker for marked in self.modes.values() for marker in marked}
        inside = ("<|channel|>",) if self.modes is _HARMONY else _INSIDE_CALLS if tools else ()
        self.shown = frozenset({*markers, *inside} & set(tokenizer.special_tokens))
        if forced:
            self.start, self.modes = forced, {forced: {}}


def call_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer containing a tool call. Most formats do not
    have such tokens.
    """
    special = tokenizer.special_tokens
    return tuple(special[name] for name in _CALL_ENDS if name in special)


class AnswerParser:
    """Splits one answer into its parts as it is generated.

    Text that could be the beginning of a marker is held back until the following text shows whether
    it is a marker. A tool call is held back until it is complete. Whitespace around reasoning and
    tool calls is dropped.

    Args:
        format: format of the answer.
    """

    def __init__(self, format: AnswerFormat) -> None:
        self._format, self._mode = format, format.start
        self._held = ""
        self._marker = ""  # The marker that precedes the text that is held back.
        self._name: str | None = None  # Name of the called tool in the gpt-oss format.
        self._trimmed = format.start == "reasoning"

    def push(self, piece: str, *, ended: bool = False) -> list[AnswerPart]:
        """Add newly generated text. Return the parts of the answer that have become final.

        Args:
            piece: the new text.
            ended: True if the answer ends after this text.
        """
        self._held += piece
        return [part for part in self._parts(ended) if part != AnswerPart()]

    def _parts(self, ended: bool) -> Iterator[AnswerPart]:
        while True:
            markers = self._format.modes[self._mode]
            if self._mode == "start":
                text = self._held.lstrip()
                if not ended and any(marker.startswith(text) for marker in markers):
                    return
                found = [marker for marker in markers if text.startswith(marker)]
                self._mode = markers[found[0]] if found else "content"
                if found and found[0] != "{":
                    self._enter(self._mode, found[0], text.removeprefix(found[0]))
                continue
            places = {at: m for m in markers if (at := self._held.find(m)) >= 0}
            if not places:
                break
            place = min(places)
            marker = places[place]
            text, rest = self._held[:place], self._held[place + len(marker) :]
            if self._mode == "header":
                self._enter(self._mode_after(text), marker, rest)
            else:
                yield self._part(text.rstrip(), marker)
                self._enter(markers[marker], marker, rest)
        if ended:
            yield self._part(self._held, "")
            self._held = ""
        elif self._mode in ("content", "reasoning"):
            end = len(self._held) - max([overlap(self._held, m) for m in markers], default=0)
            if markers:  # Whitespace is also held back, because it is dropped if a marker follows.
                end = len(self._held[:end].rstrip())
            text, self._held = self._held[:end], self._held[end:]
            yield self._part(text, "")

    def _enter(self, mode: str, marker: str, rest: str) -> None:
        self._mode, self._marker = mode, marker
        self._held, self._trimmed = rest, True

    def _mode_after(self, header: str) -> str:
        """Return the mode that follows a header in the gpt-oss format."""
        tool = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
        self._name = tool[1] if tool else None
        return "call" if tool else "reasoning" if "analysis" in header else "content"

    def _part(self, text: str, marker: str) -> AnswerPart:
        """Return the part of the answer that ends before `marker` or, if `marker` is "", at the end
        of the answer."""
        if self._mode == "call":
            try:
                return AnswerPart(calls=self._calls(text))
            # An invalid call is kept as text, exactly as the model wrote it.
            except (ValueError, RecursionError):
                shown = "" if self._name else self._marker
                return AnswerPart(f"{shown}{text}{'' if self._name else marker}")
        if self._mode == "header":
            # An incomplete header is dropped. However, the text is kept if the model does not write
            # headers.
            is_header = "<|channel|>" in text or "<|start|>" in text
            return AnswerPart("" if is_header else text)
        if self._trimmed:
            text = text.lstrip()
            self._trimmed = not text
        if self._mode == "reasoning":
            return AnswerPart(reasoning=text)
        return AnswerPart(text)

    def _calls(self, text: str) -> list[ToolCall]:
        """Parse the text of one or more tool calls.

        Raises:
            ValueError: the text is not in the expected format.
        """
        if self._name is not None:
            return [ToolCall(self._name, _as_json(json.loads(text or "{}")))]
        if functions := _FUNCTION.findall(text):
            return [ToolCall(name, self._parameters(name, inside)) for name, inside in functions]
        found: list[ToolCall] = []
        at = 0
        while (at := _BETWEEN_CALLS.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            name = _CALL_NAME.match(text, at)
            value, at = json.JSONDecoder().raw_decode(text, name.end() if name else at)
            if name:
                found.append(ToolCall(name[1], _as_json(value)))
            else:
                found += [_call(one) for one in (value if isinstance(value, list) else [value])]
        # If there is no marker, JSON without the name of a known tool is an ordinary answer.
        is_known = all(call.name in self._format.tools for call in found)
        if not found or not (self._marker or is_known):
            raise ValueError("no call")
        return found

    def _parameters(self, name: str, text: str) -> str:
        """Return the arguments of a tool call in the <parameter=KEY> format as JSON. In this
        format, strings are written as plain text, and all other values as JSON.
        """
        schemas = self._format.tools.get(name, {}).get("properties")
        values: dict[str, Any] = dict(_PARAMETER.findall(text))
        for key, value in values.items():
            schema = schemas.get(key) if isinstance(schemas, dict) else None
            if not (isinstance(schema, dict) and schema.get("type") == "string"):
                with contextlib.suppress(ValueError):
                    values[key] = json.loads(value)
        return _as_json(values)


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    return ToolCall(value["name"], _as_json(value.get("arguments", value.get("parameters", {}))))


def _as_json(arguments: Any) -> str:
    if isinstance(arguments, str):  # Some models write the arguments as a JSON string.
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
