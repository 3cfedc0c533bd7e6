"""Chats that other programs export: WhatsApp, Telegram, Slack, Discord, ChatGPT and Claude.

A chat between people is read as one document per day, with a line "Name: message" for each message.
A conversation with ChatGPT or Claude is one document, or one record to train on.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import html
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from firstlight.data.formats import UnreadableDocument
from firstlight.data.kinds import HEAD_BYTES, TELEGRAM_SIGN


class Message(NamedTuple):
    """A message of a chat.

    Attributes:
        day: date of the message, as the program writes it; "" if it is unknown.
        name: name of the sender; "" if it is unknown.
        text: text of the message.
    """

    day: str
    name: str
    text: str


_ASSISTANT_SIGNS = rb'"mapping":\s*\{|"chat_messages":\s*\['
#: Patterns that occur in the first bytes of a JSON file: of Telegram, Discord (DiscordChatExporter
#: and a data package), Slack, ChatGPT and Claude. Discord's data package was a table before.
_JSON_SIGNS = (
    TELEGRAM_SIGN + rb'|^\W*"guild":\s*\{|"Timestamp":\s*"[^"]*",\s*"Contents":'
    rb'|"type":\s*"message"[^}]*"ts":\s*"\d|"ts":\s*"\d[^}]*"type":\s*"message"|' + _ASSISTANT_SIGNS
)
_CSV_SIGN = rb"^(?:\xef\xbb\xbf)?ID,Timestamp,Contents,Attachments"
#: First line of a WhatsApp message. Its date and time depend on the language and on the phone:
#: "31.12.20, 21:15 - Name: text", "[12/31/20, 9:15:03 PM] Name: text", "2020/12/31 下午9:15 - ...".
#: Only a time in brackets has seconds.
_WHATSAPP = re.compile(
    r"[\u200e\u200f\ufeff]*\[?(\d{1,4}[./-] ?\d{1,2}[./-] ?\d{1,4})\.?,?\s+(?:\w{1,3}\s?)?"
    r"\d{1,2}[:.]\d{2}(?:[:.]\d{2}(?=[^-]{0,8}\]))?(?:\s?[^\W\d_]\.?\s?[^\W\d_]{1,2}\.?)?"
    r"(?:\]| -) (.*)",
)
#: What logs contain where a chat has a name.
_LEVEL = re.compile(r"(?i)(?:trace|debug|info|notice|warn(?:ing)?|error|critical|fatal)")
#: What WhatsApp writes instead of a file or a deleted message, and after a file's caption or an
#: edited message. It often marks its own words by an invisible character (U+200E).
_NO_MESSAGE = re.compile(
    r"\A(?:\u200e.*|null|<[^<>]{0,40}(?i:m[eéií]d[iy]|медиа|媒|メディア|미디어)[^<>]{0,40}>"
    r"|(?:IMG|VID|AUD|PTT|STK|DOC)-\d+-WA\d+\.\w+ \([^()\n]+\)"
    r"|.+\.\w{2,4} \((?:file attached|Datei angehängt|archivo adjunto|fichier joint|"
    r"file allegato|arquivo anexado|bestand bijgevoegd)\)"
    r"|(?:You deleted this message|This message was deleted(?: by .+)?"
    r"|(?:Du hast diese|Diese) Nachricht (?:wurde )?gelöscht|(?:Se eliminó|Eliminaste) este mensaje"
    r"|Ce message a été supprimé|Vous avez supprimé ce message|Questo messaggio è stato eliminato"
    r"|(?:Mensagem|Essa mensagem foi) apagada|Dit bericht is verwijderd)\.?)(?:\n|\Z)"
)
_EDITED = re.compile(
    r"(?:\u200e<[^<>]+>|<\w+ [^<>]{0,40}(?i:edit|bearbeit|modifi|bewerkt)[^<>]{0,40}>)\s*\Z"
)
#: References in Slack's messages: <@U123>, <#C123|general>, <!here>, <https://a.org|label>.
_SLACK_REFERENCE = re.compile(r"<([@#!]?)([^<>|]+)(?:\|([^<>]*))?>")
#: Slack's messages that are not written by a person have another subtype.
_SLACK_SUBTYPES = (None, "thread_broadcast", "file_share", "me_message", "bot_message")
#: References to sources, which ChatGPT encloses in private characters or in lenticular brackets.
_CITATION = re.compile("\ue200[^\ue201]*\ue201|【\\d+(?::\\d+)?†[^】]*】")
#: What Claude's export contains in place of the blocks that are not text.
_UNSUPPORTED = re.compile(r"```\nThis block is not supported on your current device yet\.\n```\s*")
#: Characters of an export that are read at a time.
_CHUNK_CHARACTERS = 1 << 18
_ROLES = {"human": "user", "user": "user", "assistant": "assistant"}


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in an exported file: a day of a chat between
    people, or a conversation.

    Raises:
        UnreadableDocument: the file is not a known export.
    """
    if path.suffix.lower() == ".json":
        for place, messages in _exported(path):
            yield from _days(place, messages)
    elif path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _days("", _discord_package(list(csv.DictReader(file))))
    else:
        yield from _days("", _whatsapp(path.read_text("utf-8-sig", "replace").splitlines()))


def conversations(values: Any) -> list[dict[str, Any]] | None:
    """Return the conversations in an export of ChatGPT or Claude as records with `messages`.
    Messages of the same role that follow each other are joined, and the messages after the last
    answer are left out. Return None for any other value.

    Args:
        values: the JSON value of the export.
    """
    if (find := _assistant_reader(values)) is None:
        return None
    records = []
    for conversation in values:
        turns = itertools.groupby(find(conversation)[1], key=lambda message: message.name)
        joined = [
            {"role": role, "content": "\n\n".join(message.text for message in messages)}
            for role, messages in turns
        ]
        while joined and joined[-1]["role"] != "assistant":
            del joined[-1]
        records += [{"messages": joined}] if joined else []
    return records


def is_with_assistant(head: bytes) -> bool:
    """Return True if the first bytes of a JSON file begin an export of ChatGPT or Claude."""
    return re.search(_ASSISTANT_SIGNS, head) is not None


def is_chats(head: bytes, suffix: str) -> bool:
    """Return True if the first bytes of a file begin an export of chats.

    Args:
        head: the first bytes.
        suffix: suffix of the file: ".json", ".csv" or ".txt".
    """
    if suffix != ".txt":
        return re.search(_JSON_SIGNS if suffix == ".json" else _CSV_SIGN, head) is not None
    lines = head.decode("utf-8", "replace").splitlines()
    if not lines or not _WHATSAPP.match(lines[0]):
        return False
    # Logs and diaries look similar. In a chat, most messages have a sender, and some the same one.
    dated = [first[2] for line in lines if (first := _WHATSAPP.match(line))]
    names = [_named(text)[0] for text in dated if _named(text)[0]]
    is_log = any(map(_LEVEL.fullmatch, names))
    return not is_log and 2 * len(names) >= len(dated) and len(set(names)) < len(names)


def _days(place: str, messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    for day, group in itertools.groupby(messages, key=lambda message: message.day):
        lines = (f"{one.name}: {one.text}" if one.name else one.text for one in group)
        yield ", ".join(part for part in (place, day) if part), "\n".join(lines)


def _exported(path: Path) -> Iterator[tuple[str, Iterable[Message]]]:
    """Yield the name and the messages of each chat in a JSON file."""
    with path.open("rb") as file:
        is_assistant = is_with_assistant(file.read(HEAD_BYTES))
    try:
        if is_assistant:
            for conversation in _conversations_in(path):
                if (find := _assistant_reader([conversation])) is not None:
                    yield find(conversation)
            return
        value = json.loads(path.read_bytes())
        if isinstance(value, dict) and "messages" in value and "guild" in value:
            yield value["channel"]["name"], _discord(value["messages"])
        elif isinstance(value, dict) and ("messages" in value or "chats" in value):
            lists = [value.get(key, {}).get("list", []) for key in ("chats", "left_chats")]
            for chat in [value] if "messages" in value else itertools.chain(*lists):
                yield chat.get("name") or "Saved Messages", _telegram(chat["messages"])
        elif isinstance(value, list) and value and "Contents" in value[0]:
            yield "", _discord_package(value)
        elif isinstance(value, list) and value and "ts" in value[0]:
            yield path.parent.name, _slack(value, _slack_names(path))
        else:
            raise UnreadableDocument("it is not a known export of chats: exclude it")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, UnreadableDocument):
            raise
        detail = f"{type(error).__name__} {error}"
        raise UnreadableDocument(f"its chats have an unknown format ({detail})") from error


def _conversations_in(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON list one after another, because a whole export of ChatGPT may need
    more memory than a reader has."""
    decoder = json.JSONDecoder()
    between = re.compile(r"[\s,\[]*")
    text = more = " "
    position = 0
    with path.open(encoding="utf-8-sig") as file:
        while more:
            text = text[position:]
            # If a value is longer than the text, twice the text is tried.
            more = file.read(max(_CHUNK_CHARACTERS, len(text)))
            text += more
            position = 0
            with contextlib.suppress(ValueError):
                while start := between.match(text, position):
                    position = start.end()
                    value, position = decoder.raw_decode(text, position)
                    yield value
    if text[position:].strip() not in ("", "]"):
        raise ValueError("the file is incomplete")


def _assistant_reader(values: Any) -> Callable[[Any], tuple[str, list[Message]]] | None:
    first = values[0] if isinstance(values, list) and values else None
    if not isinstance(first, dict):
        return None
    return _chatgpt if "mapping" in first else _claude if "chat_messages" in first else None


def _chatgpt(conversation: dict[str, Any]) -> tuple[str, list[Message]]:
    """Return the name and the messages of a conversation, which is stored as a tree. Only the
    branch that the program shows is read: that of `current_node` or, without it, the newest."""
    nodes = conversation["mapping"]
    made = {key: (node.get("message") or {}).get("create_time") or 0 for key, node in nodes.items()}
    key = conversation.get("current_node") or max(nodes, key=lambda one: made[one], default=None)
    messages = []
    passed = set()
    while key in nodes and key not in passed:
        passed.add(key)
        message = nodes[key].get("message") or {}
        content = message.get("content") or {}
        is_shown = message.get("recipient", "all") == "all" and not (
            message.get("metadata") or {}
        ).get("is_visually_hidden_from_conversation")
        if is_shown and content.get("content_type") in ("text", "multimodal_text"):
            # The transcription of speech is an object with a text. The other objects are files.
            parts = content.get("parts") or []
            texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
            text = _CITATION.sub("", "\n".join(filter(None, texts))).strip()
            role = _ROLES.get(message["author"]["role"])
            messages += [Message("", role, text)] if role and text else []
        key = nodes[key].get("parent")
    return _titled(conversation.get("title"), conversation.get("create_time")), messages[::-1]


def _claude(conversation: dict[str, Any]) -> tuple[str, list[Message]]:
    messages = []
    for message in conversation["chat_messages"]:
        blocks = message.get("content") or []
        texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
        texts = [text for text in texts if text.strip()] or [message.get("text") or ""]
        pasted = [one.get("extracted_content") or "" for one in message.get("attachments") or []]
        text = "\n\n".join(text for text in (*texts, *pasted) if text)
        if text := _UNSUPPORTED.sub("", text).strip():
            messages.append(Message("", _ROLES[message["sender"]], text))
    return _titled(conversation.get("name"), conversation.get("created_at")), messages


def _titled(title: str | None, made: str | float | None) -> str:
    """Return the name of a conversation and the day when it began, as its place."""
    if isinstance(made, int | float):
        made = datetime.datetime.fromtimestamp(made, datetime.UTC).isoformat()
    return ", ".join(part for part in (title, (made or "")[:10]) if part)


def _telegram(messages: Sequence[dict[str, Any]]) -> Iterator[Message]:
    for message in messages:
        poll = message.get("poll") or {"question": "", "answers": []}
        answers = [f"- {_telegram_text(answer['text'])}" for answer in poll["answers"]]
        parts = (_telegram_text(message.get("text") or ""), _telegram_text(poll["question"]))
        text = "\n".join(part for part in (*parts, *answers) if part)
        if message["type"] == "message" and text:
            yield Message(message["date"][:10], message.get("from") or "Deleted Account", text)


def _telegram_text(text: str | list[Any]) -> str:
    """Return a text, which is a list of strings and objects if it has links or bold words."""
    parts = [text] if isinstance(text, str) else text
    return "".join(part if isinstance(part, str) else part["text"] for part in parts).strip()


def _discord(messages: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Yield the messages that DiscordChatExporter wrote."""
    for message in messages:
        if message["type"] in ("Default", "Reply") and (text := message["content"].strip()):
            author = message["author"]
            yield Message(message["timestamp"][:10], author.get("nickname") or author["name"], text)


def _discord_package(rows: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Yield the messages in a person's own data package from Discord, which contains the messages
    of this person only."""
    for row in sorted(rows, key=lambda one: str(one["Timestamp"])):
        if text := row["Contents"].strip():
            yield Message(row["Timestamp"][:10], "", text)


def _slack_names(path: Path) -> dict[str, str]:
    """Return the names of the users in a Slack export, keyed by id. The file with the names is in
    the folder that contains the folders of the channels."""
    try:
        users = json.loads((path.parent.parent / "users.json").read_bytes())
        profiles = {user["id"]: {**user, **(user.get("profile") or {})} for user in users}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    keys = ("display_name", "real_name", "name")
    return {key: next((one[k] for k in keys if one.get(k)), key) for key, one in profiles.items()}


def _slack(messages: Sequence[dict[str, Any]], names: dict[str, str]) -> Iterator[Message]:
    def shown(match: re.Match[str]) -> str:
        mark, target, label = match.groups()
        if mark == "@":
            return f"@{label or names.get(target, target)}"
        return f"{mark.replace('!', '@')}{label or target}"

    # A reply belongs below the message that began its thread.
    for message in sorted(messages, key=lambda one: (one.get("thread_ts") or one["ts"], one["ts"])):
        text = html.unescape(_SLACK_REFERENCE.sub(shown, message.get("text") or "")).strip()
        if text and message.get("subtype") in _SLACK_SUBTYPES:
            profile = message.get("user_profile") or {}
            sender = names.get(message.get("user", "")) or profile.get("real_name")
            sender = sender or message.get("username") or message.get("user") or "unknown"
            day = datetime.datetime.fromtimestamp(float(message["ts"]), datetime.UTC)
            yield Message(f"{day:%Y-%m-%d}", sender, text)


def _whatsapp(lines: Sequence[str]) -> Iterator[Message]:
    found: list[list[str]] = []
    for line in lines:
        if (first := _WHATSAPP.match(line)) is not None:
            found.append([first[1], first[2]])
        elif found:
            found[-1][1] += f"\n{line}"  # The message has several lines.
    if not found:
        raise UnreadableDocument("it is not a chat exported by WhatsApp: exclude it")
    for day, message in found:
        # Lines without a name are written by WhatsApp itself.
        name, text = _named(message)
        if name and (text := _EDITED.sub("", _NO_MESSAGE.sub("", text)).strip()):
            yield Message(day, name, text)


def _named(message: str) -> tuple[str, str]:
    """Return the name and the text of a message on WhatsApp. The name is "" if there is none."""
    name, colon, text = message.partition(": ")
    is_name = colon and len(name) <= 60 and "\n" not in name
    return (name.strip("\u200e\u202a\u202c~\u202f "), text) if is_name else ("", message)
