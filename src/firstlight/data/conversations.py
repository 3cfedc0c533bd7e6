"""Validate records of conversations and of preference pairs, and convert them to messages.

The format of each record is detected from its fields, whose names are defined in `kinds`. These
formats are supported:

    alpaca      a question and its answer, as strings or messages: {"instruction", "output"},
                {"prompt", "completion"}, {"question", "answer"} and the like, optionally with
                "input" or "context", "system" and "history" (earlier turns: [[question, answer],
                ...])
    messages    {"messages": [{"role", "content"}, ...]}, as for OpenAI's fine-tuning; content may
                be a list of {"type": "text", "text"}; an answer with "weight": 0 is masked
    sharegpt    {"conversations": [{"from", "value"}, ...]}
    written     {"text": "<|im_start|>user\\n..."}: a conversation as one string, with the control
                tokens of a chat template (see `_MARKUP`) or the names of the speakers, as in
                "### Human: ... ### Assistant: ..." (see `transcript_of`)

A conversation has at least one answer. Its messages may be in any order that the chat template
accepts. A blank system message is ignored. If a record has both a "system" field and a list of
messages, the text of this field is added as the first message, unless the list already contains it
as a system message.

Records of preference data contain a preferred and a rejected answer to the same prompt, as strings
or messages. The prompt is a question, with the same optional fields as in the alpaca format, or a
list of messages. If the record has no prompt, or both answers repeat the prompt, each answer must
be a full conversation: a list of messages, or a string with "Human:" and "Assistant:" before the
turns. The common beginning of the two conversations is then the prompt. Only the messages after the
prompt are used as labels.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from firstlight.data.kinds import (
    ANSWER_FIELDS,
    CONTEXT_FIELDS,
    MESSAGE_FIELDS,
    PAIR_FIELDS,
    QUESTION_FIELDS,
    REASONING_FIELDS,
    SYSTEM_FIELDS,
    TREE_FIELDS,
    conversation_kind,
    field_name,
)
from firstlight.errors import FirstlightError
from firstlight.tokenizer.messages import (
    CALLING_ROLES,
    CALLS,
    LOST,
    RESULT_ROLES,
    THOUGHTS,
    parsed_json,
)

ChatForm = Literal["auto", "alpaca", "messages", "sharegpt"]

PAIRS_ARE_SELF_DESCRIBING = (
    "train_on and format do not apply to preference pairs: training always uses the answers, and "
    "the format is detected from the keys. Omit train_on and format"
)

#: Maximum total number of characters in the messages of a conversation. A conversation of this
#: length does not fit into the context of any model, but a chat template can still render it.
MAX_CONVERSATION_CHARS = 4_000_000

REASONS = {
    "bad_utf8": "not valid UTF-8",
    "bad_utf16": "not valid UTF-16 or UTF-32",
    "binary": "not a text file",
    "broken_json": "not valid JSON",
    "broken_row": "not a valid row of a table",
    "too_long": "more text than fits into any model's context",
    "unknown_form": "an unknown format",
    "wrong_type": "an entry of the wrong type",
    "unknown_role": "an unknown role",
    "empty": "an empty conversation or message",
    "no_assistant": "no answer",
    "template": "rejected by the chat template",
    "not_learned": "nothing to train on",
    "no_pair": "not two answers to one prompt",
    "held_out": "a question that is also in the validation data",
    **{key: f"{text} that the chat template omits" for key, text in LOST.items()},
}

#: Mapping from lower-case role names in records to the roles used here. The names of tool roles are
#: not changed.
_ROLE_NAMES = {
    "system": "system developer",
    "user": "user human prompter customer question",
    "assistant": (
        "assistant gpt chatgpt bing bard model bot chatbot ai agent llm claude answer response"
    ),
}
_TOOL_NAMES = (*CALLING_ROLES, *RESULT_ROLES)
_ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}
_ROLES |= {name: name for name in _TOOL_NAMES}
#: Roles whose messages are trained on (`_ANSWERING`), and keys that a message can have instead of
#: content (`_BESIDE_CONTENT`).
_ANSWERING = ("assistant", *CALLING_ROLES)
_BESIDE_CONTENT = (*CALLS, *THOUGHTS)
_TEXT_PARTS = ("text", "input_text", "output_text")
#: Possible keys for the role and for the content of a message. The first existing key is used.
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text", "parts")
#: Fields that may contain a conversation as a list of strings (`_TURN_FIELDS`), and fields that may
#: contain it as one string with speaker names (`_TRANSCRIPT_FIELDS`).
_TURN_FIELDS = ("data", "dialog", "dialogue", "turns")
_TRANSCRIPT_FIELDS = ("chat", "text", "input")


class BadRecordError(FirstlightError):
    """Raised if a record is not a valid conversation, preference pair or text document.

    Args:
        reason: short name of the reason why the record is invalid. It is a key of `REASONS` or, for
            a text document, of `records.REASONS`.
        detail: description of the problem, used as the message.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """A conversation to train on.

    Attributes:
        messages: objects with `role`, `content` and additional keys that the chat template may use.
        masked: indices of the assistant messages that are excluded from the loss.
        options: additional variables that are passed to the chat template, such as `tools`.
    """

    messages: list[dict[str, Any]]
    masked: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """Text of all messages before the first answer to a user message, without system messages.
        Letter case and whitespace are normalised to recognise equal questions.
        """
        is_asked = False
        words: list[str] = []
        for message in self.messages:
            role = message["role"]
            if is_asked and role in _ANSWERING:
                break
            is_asked |= role == "user"
            words += message["content"].split() if role != "system" else []
        return " ".join(words).casefold()


#: Fields of a record whose contents belong to its messages, but are not text.
_PICTURES = ("image", "images", "video", "videos", "audio", "audios")

_TREE_MESSAGE = (
    "a single message of a tree: join the messages with jq -sc 'INDEX(.message_id) as $m | "
    'INDEX(.parent_id // "") as $p | .[] | select(.role == "assistant" and '
    '$p[.message_id] == null) | {messages: [recurse($m[.parent_id // ""] // empty) | '
    "{role, content: .text}] | reverse}' FILE > OUT.jsonl"
)


def to_conversation(record: object, form: ChatForm = "auto") -> Conversation:
    """Convert a record to a conversation.

    Args:
        record: the record's JSON value.
        form: format of the record; "auto" detects it from the keys.

    Raises:
        BadRecordError: the record is not a valid conversation.
    """
    fields = _learned_fields(record)
    if fields.keys() >= TREE_FIELDS:
        raise BadRecordError("unknown_form", _TREE_MESSAGE)
    names = {"messages": MESSAGE_FIELDS[:1], "sharegpt": MESSAGE_FIELDS[1:]}.get(form, ())
    if form == "auto":
        names = tuple(name for name in MESSAGE_FIELDS if name in fields)
    if names:
        name = _first(fields, names)
        entries = _listed(fields.get(name))
        if isinstance(entries, Mapping):
            entries = entries.get("messages", entries)
        if isinstance(entries, str) and (markup := _markup_of(entries) or transcript_of(entries)):
            messages = _with_system(fields, _from_written(entries, markup))
        else:
            messages = _with_system(fields, _turns(entries, f"`{name}`"))
        last = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
        if last >= 0 and not any(messages[last].get(key) for key in THOUGHTS):
            messages[last] |= _thoughts(fields)
    elif form == "auto" and is_written(fields.get("text")):
        messages = _side(fields, "text", "user")
    elif form != "auto" or conversation_kind(fields, "") == "chat" or "instruction" in fields:
        messages = _from_columns(fields)
    elif (found := message_field(fields)) is not None:
        messages = _with_system(fields, _turns(_listed(fields[found]), f"`{found}`"))
    elif (written := transcript_field(fields)) is not None:
        messages = _with_system(fields, _from_written(*written))
    else:
        raise _unknown(fields)
    return _checked(messages)


def _learned_fields(record: object) -> dict[str, Any]:
    """Return the fields of a record. If the record is a list, it is treated as a list of messages.

    Raises:
        BadRecordError: the record is not an object, or is marked as excluded from training.
    """
    if is_messages(record):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise BadRecordError("wrong_type", f"{_kind(record)}, not an object")
    fields = record_fields(record)
    for key in (*LEARNED, *(["label"] if "completion" in fields else [])):
        if str(fields.get(key)).lower() in _OFF:
            raise BadRecordError("not_learned", f"`{key}` is {str(fields[key]).lower()}")
    for key in _PICTURES:
        if fields.get(key):
            raise BadRecordError("wrong_type", f"`{key}` is not text, and only text is learned")
    if str(fields.get("weight", 1)).lower() not in _ON:
        raise BadRecordError("wrong_type", "the record has a weight other than 0 and 1")
    return fields


def record_fields(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields of a record that are neither null nor NaN. Each field is included under its
    original name and its lower-case name. If the messages are in a nested object, the other fields
    of that object are included.
    """
    inner = [one for one in record.values() if isinstance(one, Mapping) and "messages" in one]
    beside = {key: one[key] for one in inner for key in one if key != "messages"}
    items = (beside | dict(record)).items()
    present = {key: value for key, value in items if value is not None and value == value}
    return {field_name(key): value for key, value in present.items()} | present


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of the names that exists in the record, or `names[0]` if none of them
    exists.
    """
    return next((name for name in names if name in fields), names[0])


def _unknown(record: Mapping[Any, Any]) -> BadRecordError:
    """Return the error for a record with an unknown format or the wrong kind of data."""
    # `record_fields` returns most fields under two names. List each field only once.
    known = {field_name(name): str(name) for name in record}
    names = ", ".join(list(known.values())[:8]) or "none"
    problem = (
        "neither `messages` nor `conversations`, nor a question and its answer, such as "
        "`instruction` and `output` or `prompt` and `completion`, nor a pair of answers, `chosen` "
        "and `rejected`: rename the fields that contain them"
    )
    if (kind := conversation_kind(record, "")) is not None:
        what = "a preference pair" if kind == "preference" else "a conversation"
        problem = f"{what}: set the kind (--kind, data.kind) {kind}"
    return BadRecordError("unknown_form", f"{problem} (fields: {names})")


def _with_system(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prepend the record's system message to the messages, unless they already contain it."""
    name = _first(fields, SYSTEM_FIELDS)
    value = fields.get(name, "")
    if isinstance(value, Mapping):
        value = value.get(_first(value, _CONTENT_KEYS))
    text = _content(value, f"`{name}`")
    has_it = any(one["role"] == "system" and one["content"] == text for one in messages)
    return messages if has_it or not text.strip() else [_message("system", text), *messages]


def _from_columns(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages for a question and its answer."""
    answer = _side(fields, _first(fields, ANSWER_FIELDS), "assistant")
    return [*_question(fields), *answer[:-1], answer[-1] | _thoughts(fields)]


def _thoughts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reasoning that a record stores in a separate field from its answer."""
    found = {key: _content(fields[key], f"`{key}`") for key in THOUGHTS if fields.get(key)}
    # In some records, this field contains only "on" or "off", which specifies whether the answer
    # includes reasoning.
    found = {key: text for key, text in found.items() if text.lower() not in ("on", "off")}
    if not found and (key := next(filter(fields.get, REASONING_FIELDS), None)) is not None:
        found = {THOUGHTS[0]: _content(fields[key], f"`{key}`")}
    return found


def _question(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that precede the answer in a record."""
    name = _first(fields, QUESTION_FIELDS)
    messages: list[dict[str, Any]] = []
    history = parsed_json(fields.get("history")) or ()
    if not isinstance(history, list | tuple):
        raise _wrong_type("`history`", history, "a list")
    for number, turn in enumerate(history):
        if isinstance(turn, Mapping):
            messages += _messages([turn], "`history`", number)
            continue
        texts_only = isinstance(turn, list | tuple) and all(isinstance(text, str) for text in turn)
        if not texts_only or len(turn) != 2:
            raise BadRecordError("wrong_type", f"`history[{number}]` must be two texts")
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    question = _side(fields, name, "user")
    for further in CONTEXT_FIELDS:
        if further != name and (text := _content(fields.get(further, ""), f"`{further}`")).strip():
            last = question[-1]["content"]
            question[-1]["content"] = f"{last}\n\n{text}" if last.strip() else text
    return _with_system(fields, [*messages, *question])


def _side(fields: Mapping[str, Any], name: str, role: str) -> list[dict[str, Any]]:
    """Convert a field of a record to messages. The field contains a list of messages, a single
    message, or a string that becomes a message with the given role.
    """
    value = _listed(fields.get(name))
    if role == "assistant" and "tools" in fields and _are_calls(calls := parsed_json(value)):
        return [_message(role, "") | {CALLS[0]: calls}]
    if isinstance(value, int) and "choices" in fields:
        raise BadRecordError(
            "wrong_type",
            f"`{name}` is the index of an entry in `choices`: write the text of that entry "
            "instead, for example with "
            f"jq -c '{{prompt: .question, completion: .choices[.{name}]}}' FILE > OUT.jsonl",
        )
    if isinstance(value, str):
        if (markup := _markup_of(value) or _hh_transcript(value)) is not None:
            return _from_written(value, markup)
        if role == "assistant":  # A completion may begin with the space after its prompt.
            value = re.sub(r"\A (?=\S)", "", _without_end(value))
        return [_message(role, value)]
    if isinstance(value, Mapping):
        if isinstance(texts := value.get("text"), list):  # Alternative answers, as in SQuAD
            return [_message(role, _content(texts[:1], f"`{name}`"))]
        value = value.get("messages", [value])
    if not isinstance(value, list | tuple) or not value:
        raise _wrong_type(f"`{name}`", value, "a text or a list of messages")
    return _messages(value, f"`{name}`")


def _are_calls(value: object) -> bool:
    """Return True for a list of tool calls."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and {"name", "arguments"} <= one.keys() for one in value)
    )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _listed(value: Any) -> Any:
    """Parse a list of messages that is stored in a table cell as JSON or as a Python literal.
    Return any other value unchanged.
    """
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{\s*['\"]\w+['\"]\s*:", value):
        return value
    found = parsed_json(value)
    return found if is_messages(found) else value


def is_messages(value: object) -> bool:
    """Return True if the value is a list of objects with roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(entry, dict) and any(key in entry for key in _ROLE_KEYS) for entry in value
        )
    )


def _turns(entries: object, name: str) -> list[dict[str, Any]]:
    """Convert a list to messages. The entries are either objects (see `_messages`) or strings. The
    strings are taken as alternating turns of the user and the assistant.
    """
    if not isinstance(entries, list) or len(entries) < 2 or not isinstance(entries[0], str):
        return _messages(entries, name)
    roles = itertools.cycle(("user", "assistant"))
    return [
        _message(role, _content(text, f"{name[:-1]}[{number}]`"))
        for number, (role, text) in enumerate(zip(roles, entries, strict=False))
    ]


def unused_fields(record: object, conversation: Conversation) -> list[str]:
    """Return the non-empty fields of a record, except those whose content occurs in its
    conversation.
    """
    if not isinstance(record, Mapping):
        return []
    is_transcript = conversation_kind(record_fields(record), "") is None
    texts = [one["content"] for one in conversation.messages]

    def is_used(name: str, value: object) -> bool:
        if name in _USED_FIELDS or message_field({name: value}) is not None:
            return True
        if not isinstance(value, str) or (is_transcript and name in _TRANSCRIPT_FIELDS):
            return isinstance(value, str) or name in _VALUE_FIELDS
        if name in _VALUE_FIELDS and (_markup_of(value) or _hh_transcript(value)):
            return True
        if name in ANSWER_FIELDS and value.startswith("[") and _are_calls(parsed_json(value)):
            return True
        # A short string in any other field may occur in a message by chance.
        is_long = len(value) > _CHANCE_CHARACTERS or name in _VALUE_FIELDS
        return is_long and any(_without_end(value).strip() in text for text in texts)

    # The index of a table written by pandas is a column named "".
    present = {key: value for key, value in record.items() if key and value == value}
    return [
        str(key)
        for key, value in present.items()
        if value not in (None, "", [], {}) and not is_used(field_name(key), value)
    ]


def message_field(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that contains the conversation. Return None if no field contains
    a conversation, or if several fields do. A field with any name can contain a list of messages;
    only a field in `_TURN_FIELDS` can contain a list of strings.
    """
    values = {field_name(key): value for key, value in fields.items()}
    found = [
        key
        for key, value in values.items()
        if is_messages(listed := _listed(value))
        or (key in _TURN_FIELDS and isinstance(listed, list) and len(listed) > 1)
    ]
    if len(found) != 1:
        return None
    return next(key for key in fields if field_name(key) == found[0])


def _messages(entries: object, name: str, start: int = 0) -> list[dict[str, Any]]:
    """Convert a list of objects to messages. Each object is either a message or a question with its
    answer.

    Args:
        entries: the list.
        name: name of the list in error messages, including backticks.
        start: number of the first entry, so that error messages can specify the number of an
            invalid entry.

    Raises:
        BadRecordError: the list or a message is not valid.
    """
    if not isinstance(entries, list | tuple):
        raise _wrong_type(name, entries, "a list")
    messages = []
    for number, entry in enumerate(entries, start):
        where = f"{name[:-1]}[{number}]`"
        if not isinstance(entry, Mapping):
            raise BadRecordError("wrong_type", f"{where} is {_kind(entry)}, not an object")
        role_key, content_key = _first(entry, _ROLE_KEYS), _first(entry, _CONTENT_KEYS)
        role = entry.get(role_key)
        if role is None and conversation_kind(entry, "") == "chat":
            messages += _from_columns(record_fields(entry))
            continue
        if not isinstance(role, str):
            raise BadRecordError("wrong_type", f"{where} has no text in `{role_key}`")
        content = entry.get(content_key)
        if content is None and any(entry.get(key) for key in _BESIDE_CONTENT):
            content = ""
        role = _role(role, where)
        if role in RESULT_ROLES and isinstance(content, Mapping | int | float):
            content = json.dumps(content, ensure_ascii=False)
        content = _content(content, f"{where}.{content_key}")
        used = (role_key, content_key)
        rest = {k: value for k, value in entry.items() if k not in used and value is not None}
        rest |= {key: _content(rest[key], f"{where}.{key}") for key in THOUGHTS if rest.get(key)}
        messages.append({**rest, "role": role, "content": content})
    return messages


def _role(name: str, where: str) -> str:
    """Return the role that corresponds to a role name in a record."""
    if (role := _ROLES.get(field_name(name))) is None:
        known = ", ".join(_ROLES)
        raise BadRecordError("unknown_role", f"{where} has the role '{name[:40]}' (known: {known})")
    return role


def _content(value: object, where: str) -> str:
    if isinstance(value, list | tuple):
        texts: list[Any] = [
            part.get("text")
            if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS
            else part
            for part in value
        ]
        if not all(isinstance(text, str) for text in texts):
            other = next(text for text in texts if not isinstance(text, str))
            kind = other.get("type") if isinstance(other, Mapping) else _kind(other)
            raise BadRecordError("wrong_type", f"{where} has parts that are not text ({kind})")
        return "".join(texts)
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a text")
    return value


def _wrong_type(where: str, value: object, wanted: str) -> BadRecordError:
    found = "missing or null" if value is None else f"{_kind(value)}, not {wanted}"
    return BadRecordError("wrong_type", f"{where} is {found}")


def _kind(value: object) -> str:
    """Return the name of a value's JSON type, including the article, for error messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    if value is None:
        return "null"
    number = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), number)


def _checked(messages: list[dict[str, Any]]) -> Conversation:
    """Validate messages and return them as a conversation, without blank system messages.

    Raises:
        BadRecordError: the answer is missing, a message is blank, too long or not plain JSON, or
            there is nothing to train on.
    """
    messages = [one for one in messages if one["role"] != "system" or one["content"].strip()]
    if not messages:
        raise BadRecordError("empty", "there is no message")
    if (count := sum(len(message["content"]) for message in messages)) > MAX_CONVERSATION_CHARS:
        raise BadRecordError(
            "too_long",
            f"its messages have {count:,} characters, more than {MAX_CONVERSATION_CHARS:,}",
        )
    try:
        json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError("bad_utf8", "a message contains half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecordError("wrong_type", f"a message is not JSON: {error}") from None
    if not any(message["role"] in _ANSWERING for message in messages):
        raise BadRecordError("no_assistant", "there is no assistant message to train on")
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        is_said = message["content"].strip() or any(message.get(key) for key in _BESIDE_CONTENT)
        if not is_said and role not in _TOOL_NAMES:
            raise BadRecordError("empty", f"message {number} (role {role}) is blank")
    return _with_weights(messages)


#: Keys that specify whether a message or record is trained on, as used in datasets for OpenAI,
#: axolotl and ms-swift.
LEARNED = ("weight", "train", "training", "loss")
#: Values of these keys for messages that are excluded (`_OFF`) and included (`_ON`), in lower case.
#: All of them are strings, because tables store these values as strings.
_OFF, _ON = ("0", "0.0", "false"), ("1", "1.0", "true")
#: A field in `_USED_FIELDS` is always considered used. A field in `_VALUE_FIELDS` is considered
#: used if its value is not a string. Any other string is considered used if it occurs in a message
#: and has more than `_CHANCE_CHARACTERS` characters, which is too long for a coincidence.
_USED_FIELDS = {"history", "tools", "functions", "chat_template_kwargs", "label"}.union(
    MESSAGE_FIELDS, SYSTEM_FIELDS, THOUGHTS, REASONING_FIELDS, LEARNED, *PAIR_FIELDS
)
_VALUE_FIELDS = {*QUESTION_FIELDS, *ANSWER_FIELDS, *CONTEXT_FIELDS, *_TURN_FIELDS}
_CHANCE_CHARACTERS = 40


def _with_weights(messages: list[dict[str, Any]]) -> Conversation:
    """Return the messages as a conversation, without their `LEARNED` keys. If one of these keys is
    0 or false in an answer, the answer is excluded from the loss.
    """
    masked = set()
    for index, message in enumerate(messages):
        for key in LEARNED:
            value = str(message.get(key, 1)).lower()
            if value not in (*_OFF, *_ON):
                raise BadRecordError(
                    "wrong_type", f"message {index + 1} has a {key} other than 0 and 1"
                )
            if value in _OFF and message["role"] in _ANSWERING:
                masked.add(index)
    if all(i in masked for i, one in enumerate(messages) if one["role"] in _ANSWERING):
        raise BadRecordError("not_learned", "all of its answers have weight 0 or `train: false`")
    return Conversation(
        [{k: v for k, v in message.items() if k not in LEARNED} for message in messages],
        frozenset(masked),
    )


# Conversations written as plain text.


class _Markup(NamedTuple):
    """Control tokens of a family of chat templates.

    Attributes:
        head: pattern for the beginning of a turn. The pattern's group matches the name of the turn,
            usually a role.
        end: pattern for the end of a turn.
        roles: mapping from upper-case turn name to role, for all turn names that are not role
            names.
        name: description of how turns begin, used in messages to the user; "" if turns begin with
            control tokens.
        after: restrictions on the order of turns. Each upper-case turn name is mapped to the
            upper-case name of the turn that must precede it, or to "" if it must be the first turn.
            If the beginning of a turn occurs in any other position, it is treated as ordinary text.
    """

    head: str
    end: str
    roles: Mapping[str, str] = {}
    name: str = ""
    after: Mapping[str, str] = {}


_MISTRAL = _Markup(
    r"\s?(\[INST\]|\[/INST\]|<<SYS>>|<</SYS>>|\[SYSTEM_PROMPT\])[ \n]{0,2}",
    r"\s?</s>|\[/SYSTEM_PROMPT\]",
    {
        "[INST]": "user",
        "[/INST]": "assistant",
        "<<SYS>>": "system",
        "<</SYS>>": "user",
        "[SYSTEM_PROMPT]": "system",
    },
)
_ZEPHYR = _Markup(r"<\|(system|user|assistant)\|>\n?", r"<\|end\|>|</s>|<\|endoftext\|>")
#: Control tokens of chat templates, keyed by the token with which a conversation begins.
_MARKUP = {
    "<|im_start|>": _Markup(r"<\|im_start\|>[ \t]*(\w+)[ \t]*(?:\n|\Z)", r"<\|im_end\|>"),
    "<|start_header_id|>": _Markup(
        r"<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>\n{0,2}", r"<\|(?:eot_id|eom_id)\|>"
    ),
    "<start_of_turn>": _Markup(r"<start_of_turn>[ \t]*(\w+)[ \t]*(?:\n|\Z)", "<end_of_turn>"),
    "[INST]": _MISTRAL,
    "[SYSTEM_PROMPT]": _MISTRAL,
    "<|START_OF_TURN_TOKEN|>": _Markup(
        r"<\|START_OF_TURN_TOKEN\|><\|(\w+)_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"
    ),
    "<|system|>": _ZEPHYR,
    "<|user|>": _ZEPHYR,
    "<|start_of_role|>": _Markup(
        r"<\|start_of_role\|>(\w+)<\|end_of_role\|>", r"<\|end_of_text\|>"
    ),
    "<\uff5cUser\uff5c>": _Markup(
        "<\uff5c(User|Assistant)\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
    ),
}
_TRANSCRIPT = _Markup(r"(?:\A\s*|\n\n)(Human|Assistant):", r"(?!)")
#: Tokens that a tokenizer itself adds at the beginning and end of a sequence.
_EDGES = re.compile(
    r"<s>|</s>|<bos>|<eos>|<(?:BOS|EOS)_TOKEN>|\[gMASK\]|<sop>"
    r"|<\|(?:begin_of_text|end_of_text|startoftext|endoftext)\|>"
    "|<\uff5c(?:begin|end)\u2581of\u2581sentence\uff5c>"
)
#: Pattern for the control tokens of all known chat templates, and substrings for a fast check:
#: every control token contains at least one of them.
_CONTROL_TOKEN = re.compile(
    r"<\|[A-Za-z]\w{2,}\|>|<\uff5c\w+\uff5c>|<(?:start|end)_of_turn>|"
    r"\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
_CONTROL_PARTS = ("<|", "_of_turn>", "<\uff5c", "INST]", "TOOL_", "_TOOLS]", "_PROMPT]")
#: Tokens that a chat template itself adds at the end of an answer.
_END = re.compile(
    rf"(?:\s*(?:{_EDGES.pattern}|<end_of_turn>|"
    r"<\|(?:im_end|eot_id|eom_id|end|END_OF_TURN_TOKEN)\|>))+\s*\Z"
)


def control_tokens(text: str) -> list[str]:
    """Return the control tokens of chat templates that a string contains as plain text."""
    # Search for the substrings first, because this is faster than the pattern. There are only a few
    # substrings, because each search reads the entire string.
    if not any(part in text for part in _CONTROL_PARTS):
        return []
    found = dict.fromkeys(_CONTROL_TOKEN.findall(text))
    return [token for token in found if not _EDGES.fullmatch(token)]


def is_written(text: object) -> bool:
    """Return True if a string begins like a conversation rendered with a chat template."""
    return isinstance(text, str) and _markup_of(text) is not None


def transcript_field(fields: Mapping[str, Any]) -> tuple[str, _Markup] | None:
    """Find the field of a record that contains a conversation as a string with speaker names.
    Return this string and its markup.
    """
    texts = (fields[name] for name in _TRANSCRIPT_FIELDS if isinstance(fields.get(name), str))
    found = ((text, transcript_of(text)) for text in texts)
    return next(((text, markup) for text, markup in found if markup is not None), None)


def _markup_of(text: str) -> _Markup | None:
    """Return the control tokens at the beginning of a string."""
    begin = text[:200].lstrip()
    while edge := _EDGES.match(begin):
        begin = begin[edge.end() :].lstrip()
    return next((markup for mark, markup in _MARKUP.items() if begin.startswith(mark)), None)


def _without_end(text: str) -> str:
    """Remove end-of-text and end-of-turn tokens from the end of a string."""
    # Search only the last part of the string, because the search time can be quadratic in the
    # string's length.
    return text[:-200] + _END.sub("", text[-200:])


#: Patterns for a turn beginning with the name of a speaker; {} is replaced with the possible names.
_SPEAKERS = (
    r"###[ \t]*({})(?:[ \t]*:|[ \t]*(?=\n))",
    r"<((?ai:{}))>:?",
    r"\[\|({})\|\]",
    r"(?m:^)[ \t]*\**({})\**:\**",
    r"(?:(?<=\s)|(?<=</s>)|\A)(?=[A-Z]{{2}})({}):",
)
#: Speaker names that are used together: names of the user, names of the assistant, and additional
#: names.
_SPEAKER_NAMES = (
    ("Human|User|Prompter|Customer", "Assistant|AI|Bot|Chatbot|GPT|Agent|Model", ""),
    ("HUMAN|USER", "ASSISTANT|AI|BOT", "|FUNCTION RESPONSE"),
    ("Instruction", "Response|Output|Answer", "|Input"),
    ("Question", "Answer|Response", ""),
    ("Q", "A", ""),
)
_SYSTEM_NAMES = "System|SYSTEM"
#: Maximum number of characters that are searched for turns, from the beginning of a string.
_EXAMINED_CHARACTERS = 1 << 18
#: Introduction before the first turn, which becomes the system message.
_PREAMBLE = re.compile(
    r"\s*(?:(?:Below is|(?:A|The) (?:chat|conversation) between|The following is|You are)\b"
    r"[^\n]{0,600}?(?:\n|(?=[ \t]{1,4}(?:USER|HUMAN):)))?\s*"
)


def transcript_of(text: str) -> _Markup | None:
    """Return the markup of a string that consists of alternating turns of a user and an assistant,
    each beginning with the speaker's name. Return None for any other string.
    """
    before = _PREAMBLE.match(text)
    begin = 0 if before is None else before.end()
    rest = text[begin : begin + _EXAMINED_CHARACTERS]
    for speaker, (asking, replying, further) in itertools.product(_SPEAKERS, _SPEAKER_NAMES):
        first = re.match(speaker.format(asking), rest)
        if first is None and (system := re.match(speaker.format(_SYSTEM_NAMES), rest)):
            first = re.compile(speaker.format(asking)).search(rest, system.end())
        if first is None:
            continue
        if (second := re.compile(speaker.format(replying)).search(rest, first.end())) is None:
            continue
        asked, replied = first[1].upper(), second[1].upper()
        roles = {asked: "user", replied: "assistant", "INPUT": "user"}
        after = {"SYSTEM": "", "INPUT": asked, "FUNCTION RESPONSE": replied}
        marks = f"{first[0].strip()} and {second[0].strip()}"
        head = speaker.format(f"{first[1]}|{second[1]}|{_SYSTEM_NAMES}{further}")
        markup = _Markup(head, r"(?!)", roles, marks, after)
        said = [one["role"] for one in _from_written(rest, markup)]
        said = [role for role in said if role != "system"]
        if len(said) > 1 and all(one != other for one, other in itertools.pairwise(said)):
            return markup
    return None


def _hh_transcript(text: str) -> _Markup | None:
    """Return the markup of a string whose turns begin with "Human:" and "Assistant:", or None for
    any other string.
    """
    is_transcript = re.match(r"\s*Human:", text) and "\n\nAssistant:" in text
    return _TRANSCRIPT if is_transcript else None


def _from_written(text: str, markup: _Markup) -> list[dict[str, Any]]:
    """Parse a conversation written as one string into messages.

    Raises:
        BadRecordError: part of the string is outside of all turns, or a role is unknown.
    """
    heads: list[re.Match[str]] = []
    names = [""]
    for head in re.finditer(markup.head, text):
        name = head[1].upper()
        if markup.after.get(name, names[-1]) == names[-1]:
            heads.append(head)
            names.append(name)
    ends = [head.start() for head in heads] + [len(text)]
    before = text[: ends[0]]
    messages: list[dict[str, Any]] = []
    if markup.name and before.strip():
        messages.append(_message("system", before.strip()))
        before = ""
    outside = [before]
    for name, head, end in zip(names[1:], heads, ends[1:], strict=True):
        content, *rest = re.split(markup.end, text[head.end() : end], maxsplit=1)
        outside += rest
        # The text of a turn without an end token extends to the next turn or to the end of the
        # string.
        if not rest:
            content = _without_end(content).strip().removesuffix(f"</{head[1]}>").rstrip()
        if name == "INPUT" and content and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{content}"
        elif content or rest:
            role = markup.roles.get(name) or _role(head[1], "a turn of the text")
            messages.append(_message(role, content))
    for text in outside:
        if left := _EDGES.sub("", text).strip():
            raise BadRecordError("unknown_form", f"the text has '{left[:40]}' outside of its turns")
    return messages


# Preference pairs


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt. Only the messages after the prompt are labels."""

    chosen: Conversation
    rejected: Conversation


def to_pair(record: object) -> Pair:
    """Convert a record of preference data to a pair of conversations.

    Raises:
        BadRecordError: the record is not a valid pair.
    """
    fields = _learned_fields(record)
    names = next((pair for pair in PAIR_FIELDS if set(pair) & set(fields)), PAIR_FIELDS[0])
    if not set(names) & set(fields) and conversation_kind(fields, "") == "chat":
        raise _unknown(fields)
    answers = [_side(fields, name, "assistant") for name in names]
    prompt = _pair_prompt(fields)
    if not prompt and any(one[0]["role"] == "assistant" for one in answers):
        raise BadRecordError(
            "wrong_type", f"`prompt` is missing, and `{names[0]}` contains only an answer"
        )
    both = []
    for name, answer in zip(names, answers, strict=True):
        # If the answers are full conversations, they already contain the prompt.
        said = (
            {one["content"].strip() for one in answer} if answer[0]["role"] != "assistant" else ()
        )
        before = [one for one in prompt if one["content"].strip() not in said]
        try:
            both.append(_checked([*before, *answer]).messages)
        except BadRecordError as error:
            raise BadRecordError(error.reason, f"`{name}` with its prompt: {error}") from error
    if both[0] == both[1]:
        raise BadRecordError("no_pair", f"`{names[0]}` and `{names[1]}` are the same")
    pairs = enumerate(zip(*both, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), min(map(len, both)))
    if start in (0, *map(len, both)) or any(one[start]["role"] not in _ANSWERING for one in both):
        raise BadRecordError(
            "no_pair",
            f"`{names[0]}` and `{names[1]}` must each continue the same prompt with an answer",
        )
    prompt_answers = (i for i in range(start) if both[0][i]["role"] in _ANSWERING)
    masked = frozenset(prompt_answers)
    return Pair(Conversation(both[0], masked), Conversation(both[1], masked))


def _pair_prompt(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of the prompt that both answers share. If the record has no prompt,
    return its system message, or an empty list if it has none.
    """
    name = _first(fields, [name for name in QUESTION_FIELDS if name in fields] or MESSAGE_FIELDS)
    if name not in fields:
        return _with_system(fields, [])
    if name in MESSAGE_FIELDS:
        return _with_system(fields, _messages(_listed(fields[name]), f"`{name}`"))
    return _question(fields)
