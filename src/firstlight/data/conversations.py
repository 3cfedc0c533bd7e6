"""Records of conversations and of preference pairs, checked and converted to messages.

Three forms of conversations are supported. The form of each record is detected from its keys:

    alpaca      {"instruction", "output"}, optionally with "input", "system" and "history" (earlier
                turns: [[question, answer], ...])
    messages    {"messages": [{"role", "content"}, ...]}, as for OpenAI's fine-tuning; content may
                be a list of {"type": "text", "text"}; an answer with "weight": 0 is not learned
    sharegpt    {"conversations": [{"from", "value"}, ...]}; `from` is human, gpt or system, or
                one of the other names in `_SHAREGPT_ROLES`

A conversation is an optional system message, then questions and answers in turn, ending with an
answer. A blank system message is ignored.

Records of preference data hold two answers to one prompt: the preferred and the rejected one. Three
forms are supported:

    texts       {"prompt": text, "chosen": text, "rejected": text}, optionally with "system"
    messages    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    whole       {"chosen": [messages], "rejected": [messages]}: two conversations, whose common
                beginning is the prompt

The prompt with either answer must be a valid conversation as above. The prompt ends with a
question. Only the messages after the prompt are learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from firstlight.errors import FirstlightError

ChatForm = Literal["auto", "alpaca", "messages", "sharegpt"]

PAIRS_ARE_SELF_DESCRIBING = (
    "of preference pairs the answers are learned, and each record's form is told by its keys: "
    "leave train_on and format out"
)

#: Most characters of a conversation, all its messages together: more than the longest context
#: holds, fewer than a chat template may render.
MAX_CONVERSATION_CHARS = 4_000_000

REASONS = {
    "bad_utf8": "not valid UTF-8",
    "bad_utf16": "not valid UTF-16 or UTF-32",
    "binary": "no text but another kind of file",
    "broken_json": "not valid JSON",
    "too_long": "more text than any model reads at once",
    "unknown_form": "of no known form",
    "wrong_type": "an entry of the wrong type",
    "unknown_role": "a role that is not known",
    "empty": "nothing said",
    "no_assistant": "no answer",
    "order": "question and answer don't take turns",
    "template": "the chat template does not take it",
    "lost_system": "a system message that the chat template leaves out",
    "lost_tools": "tools that the chat template leaves out",
    "lost_calls": "tool calls that the chat template leaves out",
    "lost_results": "results of tools that the chat template leaves out",
    "lost_thoughts": "reasoning that the chat template leaves out",
    "lost_text": "a message that the chat template leaves out",
    "not_learned": "nothing to learn",
    "no_pair": "not two answers to one prompt",
}

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    **{name: name for name in ("tool", "function_call", "observation")},
}
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}


class BadRecordError(FirstlightError):
    """A record is not a valid conversation, preference pair or text.

    Args:
        reason: a key of `REASONS`, or of `records.REASONS` for a text.
        detail: the message: what is wrong with the record.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from.

    Attributes:
        messages: objects with `role`, `content` and further keys that the chat template may use.
        masked: indices of the assistant's messages that are outside the loss.
        options: further variables of the chat template, such as `tools`.
    """

    messages: list[dict[str, Any]]
    masked: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


def to_conversation(record: object, form: ChatForm = "auto") -> Conversation:
    """Convert a record to a conversation.

    Args:
        record: the record's JSON value.
        form: form of the record; "auto" detects it from the keys.

    Raises:
        BadRecordError: the record is not a valid conversation.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError("wrong_type", f"{_kind(record)}, not an object")
    match _form_of(record) if form == "auto" else form:
        case "alpaca":
            messages = _from_alpaca(record)
        case "messages":
            messages = _from_list(record, "messages", ("role", "content"), _ROLES)
        case _:
            name = "conversation" if "conversation" in record else "conversations"
            messages = _from_list(record, name, ("from", "value"), _SHAREGPT_ROLES)
    if messages and messages[0]["role"] == "system" and not messages[0]["content"].strip():
        messages = messages[1:]
    _require_turns(messages)
    return _with_weights(messages)


def _form_of(record: Mapping[Any, Any]) -> ChatForm:
    """The form of a record, detected from its keys whose value is not null."""
    present = {key for key, value in record.items() if value is not None}
    if "messages" in present:
        return "messages"
    if present & {"conversations", "conversation"}:
        return "sharegpt"
    if "instruction" in present:
        return "alpaca"
    fields = ", ".join(map(str, list(record)[:8])) or "none"
    raise BadRecordError(
        "unknown_form",
        f"neither `messages` nor `conversations` nor `instruction` and `output` (fields: {fields})",
    )


def _from_alpaca(record: Mapping[Any, Any]) -> list[dict[str, Any]]:
    texts = {name: _text(record, name) for name in ("instruction", "output")}
    further = {name: _text(record, name, missing="") for name in ("input", "system")}
    messages = [_message("system", further["system"])]
    history = record.get("history")
    if history is not None and not isinstance(history, list | tuple):
        raise _wrong_type("`history`", history, "a list")
    for number, turn in enumerate(history or ()):
        texts_only = isinstance(turn, list | tuple) and all(isinstance(text, str) for text in turn)
        if not texts_only or len(turn) != 2:
            raise BadRecordError("wrong_type", f"`history[{number}]` must be two texts")
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    question = texts["instruction"]
    if further["input"].strip():
        question = f"{question}\n\n{further['input']}" if question.strip() else further["input"]
    return [*messages, _message("user", question), _message("assistant", texts["output"])]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(record: Mapping[Any, Any], name: str, *, missing: str | None = None) -> str:
    value = record.get(name)
    if value is None and missing is not None:
        return missing
    if not isinstance(value, str):
        raise _wrong_type(f"`{name}`", value, "a text")
    return value


def _from_list(
    record: Mapping[Any, Any], name: str, keys: tuple[str, str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The messages in a record's list of objects.

    Args:
        record: the record.
        name: key of the list.
        keys: keys of role and content. An object without the first has `role` and `content`.
        roles: the roles by the names that the record may use.

    Raises:
        BadRecordError: the list or a message is not valid.
    """
    entries = record.get(name)
    if not isinstance(entries, list | tuple):
        raise _wrong_type(f"`{name}`", entries, "a list")
    messages = []
    for number, entry in enumerate(entries):
        where = f"`{name}[{number}]`"
        if not isinstance(entry, Mapping):
            raise BadRecordError("wrong_type", f"{where} is {_kind(entry)}, not an object")
        role_key, content_key = keys if keys[0] in entry else ("role", "content")
        role = entry.get(role_key)
        if not isinstance(role, str):
            raise BadRecordError("wrong_type", f"{where} has no text `{keys[0]}`")
        known = roles if role_key == keys[0] else _ROLES
        if role not in known:
            raise BadRecordError(
                "unknown_role", f"{where} has the role '{role[:40]}' (known: {', '.join(known)})"
            )
        text = entry.get(content_key)
        if text is None and (entry.get("tool_calls") or entry.get("reasoning_content")):
            text = ""
        content = _content(text, f"{where}.{content_key}")
        rest = {
            key: value
            for key, value in entry.items()
            if key not in (role_key, content_key) and value is not None
        }
        messages.append({**rest, "role": known[role], "content": content})
    return messages


def _content(value: object, where: str) -> str:
    if isinstance(value, list | tuple):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            for part in value
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(parts):
            raise BadRecordError("wrong_type", f"{where} has parts that are not text")
        return "".join(texts)
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a text")
    return value


def _wrong_type(where: str, value: object, wanted: str) -> BadRecordError:
    found = "missing" if value is None else f"{_kind(value)}, not {wanted}"
    return BadRecordError("wrong_type", f"{where} is {found}")


def _kind(value: object) -> str:
    """The JSON type of a value with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    if value is None:
        return "null"
    number = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), number)


def _require_turns(messages: list[dict[str, Any]]) -> None:
    """Raise a BadRecordError unless the messages are questions and answers in turn, not blank, and
    plain JSON."""
    if not messages:
        raise BadRecordError("empty", "there is no message")
    if sum(len(message["content"]) for message in messages) > MAX_CONVERSATION_CHARS:
        raise BadRecordError(
            "too_long",
            f"its messages have {sum(len(m['content']) for m in messages):,} characters, more than "
            f"{MAX_CONVERSATION_CHARS:,}",
        )
    try:
        json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError("bad_utf8", "a message holds half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecordError("wrong_type", f"a message is not JSON: {error}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecordError("no_assistant", "there is no assistant's message to learn")
    start = int(messages[0]["role"] == "system")
    own = [one for one in messages[start:] if not _is_of_tools(one)]
    for number, message in enumerate(own):
        wanted, role = ("user", "assistant")[number % 2], message["role"]
        place = f"message {number + start + 1}"
        if role != wanted:
            before = f" after the {own[number - 1]['role']}'s" if number else ""
            raise BadRecordError(
                "order", f"{place} is the {role}'s{before}: it must be the {wanted}'s"
            )
        if not message["content"].strip() and not message.get("reasoning_content"):
            raise BadRecordError("empty", f"{place}, the {role}'s, is blank")
    if own[-1:] and own[-1]["role"] != "assistant" and not _is_of_tools(messages[-1]):
        raise BadRecordError("no_assistant", "the last message is the user's and has no answer")


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    is_call = message["role"] == "assistant" and message.get("tool_calls")
    return bool(is_call) or message["role"] in ("tool", "function_call", "observation")


def _with_weights(messages: list[dict[str, Any]]) -> Conversation:
    """The conversation of messages without their `weight`: an answer with weight 0 is masked."""
    masked = set()
    for index, message in enumerate(messages):
        weight = message.get("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadRecordError(
                "wrong_type", f"message {index + 1} has a weight other than 0 and 1"
            )
        if weight == 0 and message["role"] == "assistant":
            masked.add(index)
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(masked) == answers:
        raise BadRecordError("not_learned", "all its answers have weight 0")
    return Conversation(
        [{k: v for k, v in message.items() if k != "weight"} for message in messages],
        frozenset(masked),
    )


# Preference pairs


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt; only the messages after the prompt are learned."""

    chosen: Conversation
    rejected: Conversation


def to_pair(record: object) -> Pair:
    """Convert a record of preference data to a pair of conversations.

    Raises:
        BadRecordError: the record is not a valid pair.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError("wrong_type", "not an object with `chosen` and `rejected`")
    prompt = _pair_prompt(record)
    both, start = [], 0
    for name in ("chosen", "rejected"):
        answer = _answer(record, name, answers=True)
        try:
            whole = to_conversation({"messages": [*prompt, *answer]}, "messages").messages
        except BadRecordError as error:
            raise BadRecordError(error.reason, f"`{name}` with its prompt: {error}") from error
        # From the end, because `to_conversation` drops a blank system message from the prompt.
        start = len(whole) - len(answer)
        both.append(whole)
    if both[0] == both[1]:
        raise BadRecordError("no_pair", "`chosen` and `rejected` are the same")
    if not prompt:
        start = _common(*both)
    if start == 0 or both[0][start - 1]["role"] != "user":
        raise BadRecordError(
            "no_pair",
            "`chosen` and `rejected` must go on from one prompt, which ends with a question",
        )
    return Pair(*(Conversation(one, _answers(one[:start])) for one in both))


def _pair_prompt(record: Mapping[Any, Any]) -> list[Any]:
    """The messages before both answers; [] if the record has no "prompt"."""
    if record.get("prompt") is None:
        if any(isinstance(record.get(name), str) for name in ("chosen", "rejected")):
            raise BadRecordError("wrong_type", "`prompt` is missing, and the answers are texts")
        return []
    prompt = _answer(record, "prompt", answers=False)
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRecordError("wrong_type", "`system` is not a text")
    return [{"role": "system", "content": system}, *prompt] if system else prompt


def _answer(record: Mapping[Any, Any], name: str, *, answers: bool) -> list[Any]:
    """The entry `name` of a record as messages; a text becomes one message, of the assistant if
    `answers`, otherwise of the user."""
    value = record.get(name)
    if isinstance(value, str):
        return [{"role": "assistant" if answers else "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        what = "missing" if value is None else "no text, and no list of messages"
        raise BadRecordError("wrong_type", f"`{name}` is {what}")
    return list(value)


def _common(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> int:
    """Number of equal messages at the beginning of both conversations."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def _answers(messages: list[dict[str, Any]]) -> frozenset[int]:
    return frozenset(i for i, one in enumerate(messages) if one["role"] == "assistant")
