"""Records of conversations and of preference pairs, checked and converted to messages.

The form of each record is detected from its fields, whose names are in `kinds`:

    alpaca      a question and its answer, as texts or messages: {"instruction", "output"},
                {"prompt", "completion"}, {"question", "answer"} and the like, optionally with
                "input" or "context", "system" and "history" (earlier turns: [[question, answer],
                ...])
    messages    {"messages": [{"role", "content"}, ...]}, as for OpenAI's fine-tuning; content may
                be a list of {"type": "text", "text"}; an answer with "weight": 0 is not learned
    sharegpt    {"conversations": [{"from", "value"}, ...]}
    written     {"text": "<|im_start|>user\\n..."}: a conversation that is already written out with
                the control tokens of a chat template (see `_MARKUP`)

A conversation has one answer or more. Its messages are in any order: the chat template decides
which orders it renders. A blank system message is ignored; "system" beside a list of messages is
put before them, unless they have the same system message.

Records of preference data hold two answers to one prompt, the preferred and the rejected one, as
texts or messages. The prompt is a question with its optional fields as above, or a list of
messages. Without a prompt, or with one that both answers repeat, the answers are whole
conversations (messages, or a text with "Human:" and "Assistant:" before its turns), whose common
beginning is the prompt. Only the messages after the prompt are learned.
"""

from __future__ import annotations

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
    SYSTEM_FIELDS,
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
    "broken_row": "not a valid row of a table",
    "too_long": "more text than any model reads at once",
    "unknown_form": "of no known form",
    "wrong_type": "an entry of the wrong type",
    "unknown_role": "a role that is not known",
    "empty": "nothing said",
    "no_assistant": "no answer",
    "template": "the chat template does not take it",
    "not_learned": "nothing to learn",
    "no_pair": "not two answers to one prompt",
    "held_out": "a question of the validation data",
    **{key: f"{text} that the chat template leaves out" for key, text in LOST.items()},
}

#: Names of the roles in records, in lower case. Tools keep the name that a record gives them.
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
#: Roles of messages that are learned, and keys of a message that may stand in place of its content.
_ANSWERING = ("assistant", *CALLING_ROLES)
_BESIDE_CONTENT = (*CALLS, *THOUGHTS)
_TEXT_PARTS = ("text", "input_text", "output_text")
#: Keys of a message that hold its role and its content; the first that it has is taken.
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text", "parts")


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

    @property
    def question(self) -> str:
        """The text up to the first answer to a user, without system messages, by which questions
        are compared: letter case and white space do not matter."""
        is_asked = False
        words: list[str] = []
        for message in self.messages:
            role = message["role"]
            if is_asked and role in _ANSWERING:
                break
            is_asked |= role == "user"
            words += message["content"].split() if role != "system" else []
        return " ".join(words).casefold()


def to_conversation(record: object, form: ChatForm = "auto") -> Conversation:
    """Convert a record to a conversation.

    Args:
        record: the record's JSON value.
        form: form of the record; "auto" detects it from the keys.

    Raises:
        BadRecordError: the record is not a valid conversation.
    """
    fields = _learned_fields(record)
    names = {"messages": MESSAGE_FIELDS[:1], "sharegpt": MESSAGE_FIELDS[1:]}.get(form, ())
    if form == "auto":
        names = tuple(name for name in MESSAGE_FIELDS if name in fields)
    if names:
        name = _first(fields, names)
        messages = _with_system(fields, _messages(_listed(fields.get(name)), f"`{name}`"))
        last = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
        if last >= 0 and not any(messages[last].get(key) for key in THOUGHTS):
            messages[last] |= _thoughts(fields)
    elif form == "auto" and is_written(fields.get("text")):
        messages = _side(fields, "text", "user")
    elif form != "auto" or conversation_kind(fields, "") == "chat" or "instruction" in fields:
        messages = _from_columns(fields)
    else:
        raise _unknown(fields)
    return _checked(messages)


def _learned_fields(record: object) -> dict[str, Any]:
    """Return the fields of a record; a list is one of messages.

    Raises:
        BadRecordError: the record is not an object, or marked as one that is not learned.
    """
    if is_messages(record):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise BadRecordError("wrong_type", f"{_kind(record)}, not an object")
    fields = record_fields(record)
    for key in (*_LEARNED, *(["label"] if "completion" in fields else [])):
        if str(fields.get(key)).lower() in ("0", "0.0", "false"):
            raise BadRecordError("not_learned", f"`{key}` is {str(fields[key]).lower()}")
    if str(fields.get("weight", 1)).lower() not in ("1", "1.0", "true"):
        raise BadRecordError("wrong_type", "the record has a weight other than 0 and 1")
    return fields


def record_fields(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields of a record that are neither null nor NaN, by their names and by their
    names in lower case. Those beside the messages within a field are the record's, too."""
    inner = [one for one in record.values() if isinstance(one, Mapping) and "messages" in one]
    beside = {key: one[key] for one in inner for key in one if key != "messages"}
    items = (beside | dict(record)).items()
    present = {key: value for key, value in items if value is not None and value == value}
    return {field_name(key): value for key, value in present.items()} | present


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of the names that a record has, or else the first name."""
    return next((name for name in names if name in fields), names[0])


def _unknown(record: Mapping[Any, Any]) -> BadRecordError:
    """Return the error about a record of no known form, or of another kind."""
    names = ", ".join(map(str, list(record)[:8])) or "none"
    problem = (
        "neither `messages` nor `conversations`, nor a question and its answer, such as "
        "`instruction` and `output` or `prompt` and `completion`"
    )
    if (kind := conversation_kind(record, "")) is not None:
        what = "a preference pair" if kind == "preference" else "a conversation"
        problem = f"{what}: set the kind (--kind, data.kind) {kind}"
    return BadRecordError("unknown_form", f"{problem} (fields: {names})")


def _with_system(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after the record's system message, if they don't have it themselves."""
    name = _first(fields, SYSTEM_FIELDS)
    text = _content(fields.get(name, ""), f"`{name}`")
    has_it = any(one["role"] == "system" and one["content"] == text for one in messages)
    return messages if has_it or not text.strip() else [_message("system", text), *messages]


def _from_columns(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a question and its answer."""
    answer = _side(fields, _first(fields, ANSWER_FIELDS), "assistant")
    return [*_question(fields), *answer[:-1], answer[-1] | _thoughts(fields)]


def _thoughts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reasoning that a record has beside its answer."""
    return {key: _content(fields[key], f"`{key}`") for key in THOUGHTS if fields.get(key)}


def _question(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record before its answer."""
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
    """Return the messages of a record's field: a list of messages, one message, or a text of a
    role."""
    value = _listed(fields.get(name))
    if isinstance(value, str):
        if (markup := _markup_of(value) or _transcript_of(value)) is not None:
            return _from_written(value, markup)
        if role == "assistant":  # completions begin with the space after their prompt
            value = re.sub(r"\A (?=\S)", "", _without_end(value))
        return [_message(role, value)]
    if isinstance(value, Mapping):
        value = value.get("messages", [value])
    if not isinstance(value, list | tuple) or not value:
        raise _wrong_type(f"`{name}`", value, "a text or a list of messages")
    return _messages(value, f"`{name}`")


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _listed(value: Any) -> Any:
    """Return the list of messages in a text, as tables have it: in JSON, or as Python writes it;
    any other value unchanged."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{\s*['\"]\w+['\"]\s*:", value):
        return value
    found = parsed_json(value)
    return found if is_messages(found) else value


def is_messages(value: object) -> bool:
    """Return True for a list of objects with roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(entry, dict) and any(key in entry for key in _ROLE_KEYS) for entry in value
        )
    )


def _messages(entries: object, name: str, start: int = 0) -> list[dict[str, Any]]:
    """Return the messages of a list of objects: each a message, or a question and its answer.

    Args:
        entries: the list.
        name: the list's name between backticks, for messages.
        start: number of the first entry, for messages.

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
            raise BadRecordError("wrong_type", f"{where} has no text `{role_key}`")
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
    """Return the role with a name that a record may use."""
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
            raise BadRecordError("wrong_type", f"{where} has parts that are not text")
        return "".join(texts)
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a text")
    return value


def _wrong_type(where: str, value: object, wanted: str) -> BadRecordError:
    found = "missing" if value is None else f"{_kind(value)}, not {wanted}"
    return BadRecordError("wrong_type", f"{where} is {found}")


def _kind(value: object) -> str:
    """Return the JSON type of a value with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    if value is None:
        return "null"
    number = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), number)


def _checked(messages: list[dict[str, Any]]) -> Conversation:
    """Return the conversation of messages, without blank system messages.

    Raises:
        BadRecordError: the answer is missing, a message is blank, too long or not plain JSON,
            or nothing is learned.
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
        raise BadRecordError("bad_utf8", "a message holds half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecordError("wrong_type", f"a message is not JSON: {error}") from None
    if not any(message["role"] in _ANSWERING for message in messages):
        raise BadRecordError("no_assistant", "there is no assistant's message to learn")
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        is_said = message["content"].strip() or any(message.get(key) for key in _BESIDE_CONTENT)
        if not is_said and role not in _TOOL_NAMES:
            raise BadRecordError("empty", f"message {number}, the {role}'s, is blank")
    return _with_weights(messages)


#: Keys of a message, or of a record, that say whether it is learned, in data of OpenAI, axolotl and
#: ms-swift.
_LEARNED = ("weight", "train", "training", "loss")


def _with_weights(messages: list[dict[str, Any]]) -> Conversation:
    """Return the conversation of messages without the keys `_LEARNED`: an answer is masked if one
    of them is 0 or false."""
    masked = set()
    for index, message in enumerate(messages):
        for key in _LEARNED:
            value = message.get(key, 1)
            if value not in (0, 1):
                raise BadRecordError(
                    "wrong_type", f"message {index + 1} has a {key} other than 0 and 1"
                )
            if value == 0 and message["role"] in _ANSWERING:
                masked.add(index)
    if all(i in masked for i, one in enumerate(messages) if one["role"] in _ANSWERING):
        raise BadRecordError("not_learned", "all its answers have weight 0 or `train: false`")
    return Conversation(
        [{k: v for k, v in message.items() if k not in _LEARNED} for message in messages],
        frozenset(masked),
    )


# Conversations that are written out as text


class _Markup(NamedTuple):
    """The control tokens of a family of chat templates.

    Attributes:
        head: pattern of the beginning of a turn, with its role as the group.
        end: pattern of the end of a turn.
        roles: the roles by heads that do not name them.
    """

    head: str
    end: str
    roles: Mapping[str, str] = _ROLES


_LLAMA2_ROLES = {"[INST]": "user", "[/INST]": "assistant", "<<SYS>>": "system", "<</SYS>>": "user"}
_ZEPHYR = _Markup(r"<\|(system|user|assistant)\|>\n?", r"<\|end\|>|</s>|<\|endoftext\|>")
#: The control tokens by the beginning of a conversation.
_MARKUP = {
    "<|im_start|>": _Markup(r"<\|im_start\|>[ \t]*(\w+)[ \t]*(?:\n|\Z)", r"<\|im_end\|>"),
    "<|start_header_id|>": _Markup(
        r"<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>\n{0,2}", r"<\|(?:eot_id|eom_id)\|>"
    ),
    "<start_of_turn>": _Markup(r"<start_of_turn>[ \t]*(\w+)[ \t]*(?:\n|\Z)", "<end_of_turn>"),
    "[INST]": _Markup(
        r"\s?(\[INST\]|\[/INST\]|<<SYS>>|<</SYS>>)[ \n]{0,2}", r"\s?</s>", _LLAMA2_ROLES
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
#: The tokens at the beginning and the end of a text, which the tokenizer writes by itself.
_EDGES = re.compile(
    "<s>|</s>|<bos>|<eos>|<\\|(?:begin_of_text|end_of_text|startoftext|endoftext)\\|>"
    "|<\uff5c(?:begin|end)\u2581of\u2581sentence\uff5c>"
)
#: Control tokens of all known chat templates, and parts of which each has one.
_CONTROL_TOKEN = re.compile(
    r"<\|[a-z]\w{2,}\|>|<\uff5c\w+\uff5c>|<(?:start|end)_of_turn>|"
    r"\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
_CONTROL_PARTS = ("<|", "_of_turn>", "<\uff5c", "INST]", "TOOL_", "_TOOLS]")
#: Tokens at the end of an answer that a chat template writes by itself.
_END = re.compile(
    rf"(?:\s*(?:{_EDGES.pattern}|<\|(?:im_end|eot_id|eom_id|end)\|>|<end_of_turn>))+\s*\Z"
)


def control_tokens(text: str) -> list[str]:
    """Return the control tokens of chat templates in a text, where they are only characters."""
    # Few parts are looked for in each text, because each search takes as long as reading it.
    if not any(part in text for part in _CONTROL_PARTS):
        return []
    found = dict.fromkeys(_CONTROL_TOKEN.findall(text))
    return [token for token in found if not _EDGES.fullmatch(token)]


def is_written(text: object) -> bool:
    """Return True if a text begins as a chat template begins a conversation."""
    return isinstance(text, str) and _markup_of(text) is not None


def _markup_of(text: str) -> _Markup | None:
    """Return the control tokens with which a text begins."""
    begin = text[:200].lstrip()
    while edge := _EDGES.match(begin):
        begin = begin[edge.end() :].lstrip()
    return next((markup for mark, markup in _MARKUP.items() if begin.startswith(mark)), None)


def _without_end(text: str) -> str:
    """Return a text without the end tokens at its end."""
    # Only the end is searched, since the search may take the square of its length.
    return text[:-200] + _END.sub("", text[-200:])


def _transcript_of(text: str) -> _Markup | None:
    """Return the marks of a text with "Human:" and "Assistant:" before its turns."""
    is_transcript = re.match(r"\s*Human:", text) and "\n\nAssistant:" in text
    return _TRANSCRIPT if is_transcript else None


def _from_written(text: str, markup: _Markup) -> list[dict[str, Any]]:
    """Return the messages of a conversation that is written out as one text.

    Raises:
        BadRecordError: a part of the text is in no turn, or a role is not known.
    """
    before, *turns = re.split(markup.head, text)
    messages: list[dict[str, Any]] = []
    outside = [before]
    for name, turn in zip(turns[::2], turns[1::2], strict=True):
        content, *rest = re.split(markup.end, turn, maxsplit=1)
        outside += rest
        # The text of a turn without an end token extends to the next turn or to the end.
        content = content if rest else _without_end(content).strip()
        if content or rest:
            role = markup.roles.get(name) or _role(name, "a turn of the text")
            messages.append(_message(role, content))
    for text in outside:
        if left := _EDGES.sub("", text).strip():
            raise BadRecordError("unknown_form", f"the text has '{left[:40]}' outside of its turns")
    return messages


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
    fields = _learned_fields(record)
    names = next((pair for pair in PAIR_FIELDS if set(pair) & set(fields)), PAIR_FIELDS[0])
    if not set(names) & set(fields) and conversation_kind(fields, "") == "chat":
        raise _unknown(fields)
    answers = [_side(fields, name, "assistant") for name in names]
    prompt = _pair_prompt(fields)
    if not prompt and any(one[0]["role"] == "assistant" for one in answers):
        raise BadRecordError(
            "wrong_type", f"`prompt` is missing, and `{names[0]}` is only an answer"
        )
    both = []
    for name, answer in zip(names, answers, strict=True):
        # Whole conversations repeat the prompt.
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
            f"`{names[0]}` and `{names[1]}` must continue one prompt, each with an answer",
        )
    prompt_answers = (i for i in range(start) if both[0][i]["role"] in _ANSWERING)
    masked = frozenset(prompt_answers)
    return Pair(Conversation(both[0], masked), Conversation(both[1], masked))


def _pair_prompt(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages before both answers; only a system message if the record has no
    prompt."""
    name = _first(fields, [name for name in QUESTION_FIELDS if name in fields] or MESSAGE_FIELDS)
    if name not in fields:
        return _with_system(fields, [])
    if name in MESSAGE_FIELDS:
        return _with_system(fields, _messages(_listed(fields[name]), f"`{name}`"))
    return _question(fields)
