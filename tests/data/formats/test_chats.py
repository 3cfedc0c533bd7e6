"""Tests of `data.formats.chats` with exports in the formats of each program."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.chats import conversations, is_chats, read
from firstlight.data.kinds import exported_chats


def _read(path: Path, content: Any) -> list[tuple[str, str]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return list(read(path))


@pytest.mark.parametrize(
    ("start", "day"),
    [
        ("12/31/20, 9:15 PM - ", "12/31/20"),
        ("12/31/20, 9:15\u202fPM - ", "12/31/20"),
        ("31/12/2020, 21:15 - ", "31/12/2020"),
        ("31/12/2020 21:15 - ", "31/12/2020"),
        ("31.12.20, 21:15 - ", "31.12.20"),
        ("31-12-20 21:15 - ", "31-12-20"),
        ("2020-12-31, 21:15 - ", "2020-12-31"),
        ("31/12/20, 9:15 p. m. - ", "31/12/20"),
        ("31/12/20 à 21:15 - ", "31/12/20"),
        ("2020/12/31 下午9:15 - ", "2020/12/31"),
        ("2020. 12. 31. 오후 9:15 - ", "2020. 12. 31"),
        ("[31.12.20, 21:15:03] ", "31.12.20"),
        ("[12/31/20, 9:15:03 PM] ", "12/31/20"),
        ("\u200e[31/12/2020, 21:15:03] ", "31/12/2020"),
    ],
)
def test_read_whatsapp_recognises_dates_of_every_locale(
    tmp_path: Path, start: str, day: str
) -> None:
    lines = [f"{start}Ann: Hello: you", f"{start}Bob Smith: One\ntwo\n\nthree", f"{start}Ann: OK"]
    content = "\n".join(lines)
    assert is_chats(content.encode(), ".txt")
    text = "Ann: Hello: you\nBob Smith: One\ntwo\n\nthree\nAnn: OK"
    assert _read(tmp_path / "a.txt", content) == [(day, text)]


def test_read_whatsapp_leaves_out_what_the_program_wrote_and_splits_days(tmp_path: Path) -> None:
    content = """\
31.12.20, 21:15 - Messages and calls are end-to-end encrypted. No one outside can read them.
31.12.20, 21:15 - Ann created group "Trip"
31.12.20, 21:16 - Ann: <Media omitted>
31.12.20, 21:16 - Bob: <Medien ausgeschlossen>
31.12.20, 21:16 - Ann: IMG-20201231-WA0001.jpg (file attached)
31.12.20, 21:17 - Ann: This message was deleted
31.12.20, 21:17 - Bob: Diese Nachricht wurde gelöscht
31.12.20, 21:17 - Bob: null
31.12.20, 21:18 - Ann: Who comes? <This message was edited>
01.01.21, 00:01 - Bob: \u200eimage omitted
01.01.21, 00:02 - +49 171 1234567: I do
"""
    assert _read(tmp_path / "a.txt", content) == [
        ("31.12.20", "Ann: Who comes?"),
        ("01.01.21", "+49 171 1234567: I do"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "This message is important.",
        "<html>",
        "I said <this>",
        "bild.jpg (of yesterday)",
    ],
)
def test_read_whatsapp_keeps_what_only_looks_like_the_words_of_the_program(
    tmp_path: Path, text: str
) -> None:
    content = f"31.12.20, 21:15 - Ann: {text}\n31.12.20, 21:16 - Ann: Yes\n"
    assert _read(tmp_path / "a.txt", content) == [("31.12.20", f"Ann: {text}\nAnn: Yes")]


def test_read_whatsapp_keeps_captions_of_files(tmp_path: Path) -> None:
    content = """\
[31.12.20, 21:15:03] Ann: The sea \u200e<attached: 0001-PHOTO.jpg>
[31.12.20, 21:15:04] Bob: \u200eIMG-20201231-WA0001.jpg (file attached)
The hill
"""
    assert _read(tmp_path / "a.txt", content) == [("31.12.20", "Ann: The sea\nBob: The hill")]


def test_read_whatsapp_of_many_blanks_takes_linear_time(tmp_path: Path) -> None:
    content = f"31.12.20, 21:15 - Ann: Hi{' ' * 1_000_000}x"
    assert _read(tmp_path / "a.txt", content) == [("31.12.20", content[18:])]


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-02 10:15:03 - INFO - Start: now\n2024-01-02 10:15:04 - INFO - Start: now\n",
        "[2024-01-02 10:15:03] error: a failed\n[2024-01-02 10:15:04] error: b failed\n",
        "12.3.19, 10:00 - I met Carl.\n13.3.19, 11:00 - Rain.\n14.3.19, 12:00 - Notes: a book.\n",
        "12.3.19, 10:00 - Morning: rain.\n13.3.19, 11:00 - Evening: snow.\n",
    ],
)
def test_log_or_diary_is_not_whatsapp(text: str) -> None:
    assert not is_chats(text.encode(), ".txt")


@pytest.mark.parametrize("text", ["", "A text.\n", "31.12.20, 21:15 is a date\n", "[1] A note\n"])
def test_read_text_is_not_whatsapp(tmp_path: Path, text: str) -> None:
    assert not is_chats(text.encode(), ".txt")
    with pytest.raises(UnreadableDocument, match="it is not a chat exported by WhatsApp"):
        _read(tmp_path / "a.txt", text)


_TELEGRAM = {
    "name": "Trip",
    "type": "private_group",
    "id": 1,
    "messages": [
        {"id": 1, "type": "service", "date": "2021-03-04T10:00:00", "action": "create_group"},
        {"id": 2, "type": "message", "date": "2021-03-04T10:00:01", "from": "Ann", "text": "Hi"},
        {
            "id": 3,
            "type": "message",
            "date": "2021-03-04T10:00:02",
            "from": "Bob",
            "text": [
                "See ",
                {"type": "link", "text": "https://a.org"},
                " ",
                {"type": "bold", "text": "now"},
            ],
        },
        {
            "id": 4,
            "type": "message",
            "date": "2021-03-05T09:00:00",
            "from": "Ann",
            "text": "",
            "photo": "a.jpg",
        },
        {"id": 5, "type": "message", "date": "2021-03-05T09:00:00", "from": None, "text": "Bye"},
    ],
}


@pytest.mark.parametrize("is_whole", [False, True])
def test_read_telegram_joins_entities_and_splits_days(tmp_path: Path, is_whole: bool) -> None:
    content = {"about": "Here is", "chats": {"list": [_TELEGRAM]}} if is_whole else _TELEGRAM
    assert _read(tmp_path / "result.json", content) == [
        ("Trip, 2021-03-04", "Ann: Hi\nBob: See https://a.org now"),
        ("Trip, 2021-03-05", "Deleted Account: Bye"),
    ]


def test_read_telegram_reads_chats_that_were_left_and_polls(tmp_path: Path) -> None:
    poll = {"question": "Which day?", "answers": [{"text": "Monday"}, {"text": "Friday"}]}
    message = {"type": "message", "date": "2021-03-06T10:00:00", "from": "Ann"}
    left = {"name": "Old", "messages": [{**message, "text": "", "poll": poll}]}
    now = {"name": "New", "messages": [{**message, "text": "Hi"}]}
    content = {"about": "Here is", "chats": {"list": [now]}, "left_chats": {"list": [left]}}
    assert _read(tmp_path / "result.json", content) == [
        ("New, 2021-03-06", "Ann: Hi"),
        ("Old, 2021-03-06", "Ann: Which day?\n- Monday\n- Friday"),
    ]
    assert _read(tmp_path / "result.json", {"about": "Here is", "chats": {"list": []}}) == []


@pytest.mark.parametrize(("kind", "expected"), [("public_supergroup", True), ("public_key", False)])
def test_type_of_a_key_is_not_telegram(kind: str, expected: bool) -> None:
    head = json.dumps({"keys": [{"type": kind}]}).encode()
    assert is_chats(head, ".json") is expected
    assert (exported_chats(head) is not None) is expected


def test_read_slack_with_incomplete_names_shows_ids(tmp_path: Path) -> None:
    (tmp_path / "users.json").write_text('[{"name": "ann"}]')
    messages = [{"type": "message", "user": "U1", "ts": "1614852000.1", "text": "Hi"}]
    assert _read(tmp_path / "general/a.json", messages) == [("general, 2021-03-04", "U1: Hi")]


def test_read_slack_day_replaces_mentions_and_puts_replies_below_their_thread(
    tmp_path: Path,
) -> None:
    users = [
        {"id": "U1", "name": "ann", "profile": {"display_name": "", "real_name": "Ann A"}},
        {"id": "U2", "name": "bob", "profile": {"display_name": "Bobby"}},
    ]
    (tmp_path / "users.json").write_text(json.dumps(users))
    messages = [
        {"type": "message", "user": "U1", "ts": "1614852000.1", "text": "<@U2>: a &lt; b, <!here>"},
        {
            "type": "message",
            "user": "U2",
            "ts": "1614852000.2",
            "text": "has joined",
            "subtype": "channel_join",
        },
        {
            "type": "message",
            "user": "U2",
            "ts": "1614852010.0",
            "text": "In <#C1|general> <https://a.org|there>",
        },
        {
            "type": "message",
            "user": "U2",
            "ts": "1614852020.0",
            "thread_ts": "1614852000.1",
            "text": "<https://b.org>",
        },
        {
            "type": "message",
            "username": "CI",
            "subtype": "bot_message",
            "ts": "1614852030.0",
            "text": "Done",
        },
        {"type": "message", "user": "U9", "ts": "1614852040.0", "text": "", "files": []},
    ]
    assert _read(tmp_path / "general" / "2021-03-04.json", messages) == [
        (
            "general, 2021-03-04",
            "Ann A: @Bobby: a < b, @here\nBobby: https://b.org\nBobby: In #general there\nCI: Done",
        )
    ]


def test_read_discord_exporter_names_senders(tmp_path: Path) -> None:
    def message(kind: str, text: str, **author: str) -> dict[str, Any]:
        return {
            "type": kind,
            "timestamp": "2021-03-04T10:00:00+01:00",
            "content": text,
            "author": author,
        }

    messages = [
        message("GuildMemberJoin", "Joined the server.", name="bob", nickname="Bobby"),
        message("Default", "Hi @Bobby", name="ann"),
        message("Reply", "Hello\nyou", name="bob", nickname="Bobby"),
        message("Default", "", name="ann"),
    ]
    content = {"guild": {"name": "G"}, "channel": {"name": "general"}, "messages": messages}
    assert _read(tmp_path / "a.json", content) == [
        ("general, 2021-03-04", "ann: Hi @Bobby\nBobby: Hello\nyou")
    ]


def test_read_discord_package_sorts_messages_by_time(tmp_path: Path) -> None:
    expected = [("2021-03-04", 'One\nTwo, "too"'), ("2021-03-05", "Three")]
    table = """\
ID,Timestamp,Contents,Attachments
3,2021-03-05 08:00:00.000000+00:00,Three,
2,2021-03-04 11:00:00.000000+00:00,"Two, ""too""\",
9,2021-03-04 10:30:00.000000+00:00,,https://cdn.org/a.png
1,2021-03-04 10:00:00.000000+00:00,One,
"""
    assert _read(tmp_path / "messages.csv", table) == expected
    rows = [
        {"ID": 3, "Timestamp": "2021-03-05 08:00:00", "Contents": "Three", "Attachments": ""},
        {"ID": 2, "Timestamp": "2021-03-04 11:00:00", "Contents": 'Two, "too"', "Attachments": ""},
        {"ID": 1, "Timestamp": "2021-03-04 10:00:00", "Contents": "One", "Attachments": ""},
    ]
    assert _read(tmp_path / "messages.json", rows) == expected


def _node(parent: str | None, role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    content = {"content_type": more.pop("content_type", "text"), "parts": list(parts)}
    message = {"author": {"role": role}, "content": content, "recipient": "all", **more}
    return {"parent": parent, "message": message}


_CHATGPT = {
    "title": "Tea",
    "create_time": 1614852000.5,
    "current_node": "h",
    "mapping": {
        "a": {"parent": None, "message": None},
        "b": _node("a", "system", "", metadata={"is_visually_hidden_from_conversation": True}),
        "c": _node("b", "user", "How hot?", create_time=1.0),
        "d": _node("c", "assistant", "A rejected answer.", create_time=9.0),
        "e": _node("c", "assistant", "search()", recipient="browser"),
        "f": _node("e", "tool", "result"),
        "g": _node("f", "assistant", "80 °C.\ue200cite\ue202turn0\ue201", create_time=3.0),
        "h": _node(
            "g",
            "user",
            {"content_type": "image_asset_pointer"},
            "And this?",
            content_type="multimodal_text",
        ),
    },
}


def test_read_chatgpt_follows_the_branch_of_the_current_node(tmp_path: Path) -> None:
    assert _read(tmp_path / "conversations.json", [_CHATGPT]) == [
        ("Tea, 2021-03-04", "user: How hot?\nassistant: 80 °C.\nuser: And this?")
    ]


def test_read_chatgpt_reads_speech_and_keeps_numbers_in_brackets(tmp_path: Path) -> None:
    spoken = {"content_type": "audio_transcription", "text": "How hot?", "direction": "in"}
    nodes = {
        "a": _node(None, "user", spoken, {"asset": 1}, content_type="multimodal_text"),
        "b": _node("a", "assistant", "【1】 At 80 °C【4:2†source】."),
    }
    content = [{"title": "", "mapping": nodes, "current_node": "b"}]
    assert _read(tmp_path / "a.json", content) == [
        ("", "user: How hot?\nassistant: 【1】 At 80 °C.")
    ]


def test_read_chatgpt_export_needs_less_memory_than_the_file(tmp_path: Path) -> None:
    chat = {"title": "Tea", "mapping": {"a": _node(None, "user", "☕ 😀" * 10_000)}}
    (tmp_path / "a.json").write_text(json.dumps([chat] * 200, ensure_ascii=False), "utf-8")
    tracemalloc.start()
    found = [len(text) for _, text in read(tmp_path / "a.json")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [len("user: ") + 30_000] * 200
    assert (tmp_path / "a.json").stat().st_size > 16_000_000 > peak


def test_read_truncated_chatgpt_export_yields_what_is_complete(tmp_path: Path) -> None:
    content = json.dumps([_CHATGPT, _CHATGPT])[:-10]
    found: list[tuple[str, str]] = []
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UnreadableDocument, match="the file is incomplete"):
        found.extend(read(tmp_path / "a.json"))
    assert [place for place, _ in found] == ["Tea, 2021-03-04"]


def test_read_chatgpt_without_current_node_follows_the_newest_message(tmp_path: Path) -> None:
    older = {key: value for key, value in _CHATGPT.items() if key != "current_node"}
    assert _read(tmp_path / "conversations.json", [older]) == [
        ("Tea, 2021-03-04", "user: How hot?\nassistant: A rejected answer.")
    ]


_CLAUDE = {
    "uuid": "1",
    "name": "Tea",
    "created_at": "2024-03-04T10:00:00.000000Z",
    "chat_messages": [
        {
            "sender": "human",
            "text": "How hot?",
            "content": [{"type": "text", "text": "How hot?"}],
            "attachments": [{"file_name": "a.txt", "extracted_content": "Green tea."}],
        },
        {
            "sender": "assistant",
            "text": "```\nThis block is not supported on your current device yet.\n```\n\n80 °C.",
            "content": [
                {"type": "thinking", "thinking": "Green."},
                {"type": "tool_use", "name": "search"},
                {"type": "text", "text": "80 °C."},
                {"type": "text", "text": "Not more."},
            ],
        },
        {"sender": "human", "text": "Thanks"},
    ],
}


def test_read_claude_joins_the_blocks_of_text(tmp_path: Path) -> None:
    assert _read(tmp_path / "conversations.json", [_CLAUDE]) == [
        (
            "Tea, 2024-03-04",
            "user: How hot?\n\nGreen tea.\nassistant: 80 °C.\n\nNot more.\nuser: Thanks",
        )
    ]


def test_read_claude_without_blocks_reads_the_text(tmp_path: Path) -> None:
    messages = [
        {"sender": "human", "text": "Hi"},
        {"sender": "assistant", "text": _CLAUDE["chat_messages"][1]["text"]},  # type: ignore[index]
    ]
    content = [{"name": "", "created_at": "2023-01-02T00:00:00Z", "chat_messages": messages}]
    assert _read(tmp_path / "a.json", content) == [("2023-01-02", "user: Hi\nassistant: 80 °C.")]


def test_conversations_end_with_an_answer_and_alternate() -> None:
    twice = {
        "title": "Two",
        "current_node": "c",
        "mapping": {
            "a": _node(None, "user", "One"),
            "b": _node("a", "user", "Two"),
            "c": _node("b", "assistant", "Three"),
        },
    }
    assert conversations([_CHATGPT, twice]) == [
        {
            "messages": [
                {"role": "user", "content": "How hot?"},
                {"role": "assistant", "content": "80 °C."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "One\n\nTwo"},
                {"role": "assistant", "content": "Three"},
            ]
        },
    ]
    assert conversations([_CLAUDE]) == [
        {
            "messages": [
                {"role": "user", "content": "How hot?\n\nGreen tea."},
                {"role": "assistant", "content": "80 °C.\n\nNot more."},
            ]
        },
    ]
    assert conversations(_TELEGRAM) is None
    assert conversations([{"messages": []}]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"a": 1}], "it is not a known export of chats: exclude it"),
        ([{"mapping": {"a": 1}}], "its chats have an unknown format"),
        ("[" * 100_000, "its chats have an unknown format"),
        ({"guild": {}, "messages": []}, r"its chats have an unknown format \(KeyError 'channel'\)"),
    ],
)
def test_read_unknown_json_is_rejected(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UnreadableDocument, match=message):
        _read(tmp_path / "a.json", content)
