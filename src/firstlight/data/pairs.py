"""Records of preference data: two answers to one prompt, of which one was preferred.

Three forms are known, each by its own entries, and all but the last name their prompt:

    texts       {"prompt": text, "chosen": text, "rejected": text}, and "system" if there is one
    messages    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    whole       {"chosen": [messages], "rejected": [messages]}: two conversations, whose common
                beginning is the prompt

Either conversation has to be one that is fine for fine-tuning (see `conversations`). The prompt
ends with a question; what comes after it is the answer, and alone is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.data.conversations import BadRecordError, Conversation, to_conversation


@dataclass(frozen=True)
class Pair:
    """Two conversations with one beginning, of which only what follows it is learned."""

    chosen: Conversation
    rejected: Conversation


def to_pair(record: object) -> Pair:
    """A record as a pair of conversations.

    Raises:
        BadRecordError: it is none.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError("wrong_type", "not an object with `chosen` and `rejected`")
    prompt = _prompt(record)
    both, start = [], 0
    for name in ("chosen", "rejected"):
        answer = _messages(record, name, answers=True)
        try:
            whole = to_conversation({"messages": [*prompt, *answer]}, "messages").messages
        except BadRecordError as error:
            raise BadRecordError(error.reason, f"`{name}` with its prompt: {error}") from error
        start = len(whole) - len(answer)  # a blank system message is none
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


def _prompt(record: Mapping[Any, Any]) -> list[Any]:
    """The messages before both answers; [] where the record does not name them."""
    if record.get("prompt") is None:
        if any(isinstance(record.get(name), str) for name in ("chosen", "rejected")):
            raise BadRecordError("wrong_type", "`prompt` is missing, and the answers are texts")
        return []
    prompt = _messages(record, "prompt", answers=False)
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRecordError("wrong_type", "`system` is not a text")
    return [{"role": "system", "content": system}, *prompt] if system else prompt


def _messages(record: Mapping[Any, Any], name: str, *, answers: bool) -> list[Any]:
    """An entry as messages; a text is one of them."""
    value = record.get(name)
    if isinstance(value, str):
        return [{"role": "assistant" if answers else "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        what = "missing" if value is None else "no text, and no list of messages"
        raise BadRecordError("wrong_type", f"`{name}` is {what}")
    return list(value)


def _common(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> int:
    """How many messages both begin with."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def _answers(messages: list[dict[str, Any]]) -> frozenset[int]:
    return frozenset(i for i, one in enumerate(messages) if one["role"] == "assistant")
