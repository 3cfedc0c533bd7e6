"""Tests of conversation records: supported formats, and rejected records with their position."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from builders import draw_records, say, with_template, write_lines
from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.cleaning import ChangeCounts, change_lines
from firstlight.data.conversations import (
    MAX_CONVERSATION_CHARS,
    REASONS,
    BadRecordError,
    is_written,
    to_conversation,
    transcript_of,
)
from firstlight.data.packing import ExampleDataset, chat_notes
from firstlight.data.records import (
    find_records,
    find_splits,
    kind_of_records,
    read_documents,
    read_records,
)
from firstlight.data.sources import find_sources
from firstlight.errors import DataError, InputError
from firstlight.tokenizer import Tokenizer

GOOD = {"messages": say("a", "b")}


@pytest.fixture(scope="module")
def chatml(tokenizer: Tokenizer) -> Tokenizer:
    return with_template(tokenizer, "chatml")


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"instruction": "a", "output": "b"}, say("a", "b")),
        ({"instruction": "a", "input": "x", "output": "b"}, say("a\n\nx", "b")),
        ({"instruction": "", "input": "x", "output": "b", "n": 1}, say("x", "b")),
        (
            {"instruction": "a", "input": None, "output": "b", "system": "s"},
            say("a", "b", system="s"),
        ),
        (
            {"instruction": "c", "output": "d", "history": [["a", "b"]]},
            say("a", "b", "c", "d"),
        ),
        (GOOD, say("a", "b")),
        ({"messages": say("a", "b", system=" ")}, say("a", "b")),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None},
                    {"role": "assistant", "content": "b", "weight": 1},
                ]
            },
            say("a", "b", system="s"),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            say("a", "b", system="s"),
        ),
        ({"conversations": say("a", "b")}, say("a", "b")),
        ({"prompt": "a", "completion": " b</s>", "label": True}, say("a", "b")),
        ({"prompt": say("a"), "completion": say("a", "b")[1:]}, say("a", "b")),
        ({"Question": "a", "Answer": "b", "Context": " "}, say("a", "b")),
        ({"instruction": "a", "context": "x", "response": "b"}, say("a\n\nx", "b")),
        ({"system_prompt": "s", "question": "a", "response": "b"}, say("a", "b", system="s")),
        (
            {"question": "a", "answer": "b", "reasoning_content": "hm"},
            [*say("a"), {"role": "assistant", "content": "b", "reasoning_content": "hm"}],
        ),
        (
            {"messages": say("a", "b"), "Thinking": "hm"},
            [*say("a"), {"role": "assistant", "content": "b", "thinking": "hm"}],
        ),
        (say("a", "b"), say("a", "b")),
        ({"instruction": "a", "output": "b", "input": float("nan"), "weight": 1}, say("a", "b")),
        ({"input": "a", "output": "b", "history": say("c", "d")}, say("c", "d", "a", "b")),
        ({"input": "a", "output": "b", "history": '[["c", "d"]]'}, say("c", "d", "a", "b")),
        ({"conversation": [{"input": "a", "output": "b"}] * 2}, say("a", "b", "a", "b")),
        ({"messages": json.dumps(say("a", "b"))}, say("a", "b")),
        ({"messages": str(say("a", "b")), "system": ""}, say("a", "b")),
        ({"messages": say("a", "b"), "system": "s"}, say("a", "b", system="s")),
        ({"messages": say("a", "b", system="s"), "system": "s"}, say("a", "b", system="s")),
        (
            {"messages": say("a", "b", system="t"), "system": "s"},
            [{"role": "system", "content": "s"}, *say("a", "b", system="t")],
        ),
        (
            {"conversations": [{"from": "Human", "value": "a"}, {"from": " BOT", "value": "b"}]},
            say("a", "b"),
        ),
        ({"inputs": "a", "targets": "b"}, say("a", "b")),
        ({"conversations": ["a", "b", "c", "d"], "source": "x"}, say("a", "b", "c", "d")),
        ({"id": 1, "data": ["a", "b"]}, say("a", "b")),
        ({"id": 1, "items": [{"from": "human", "value": "a"}, *say("a", "b")[1:]]}, say("a", "b")),
        ({"conversation": {"messages": say("a", "b")}}, say("a", "b")),
        (
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "a"}]},
                    {"role": "model", "parts": [{"text": "b"}]},
                ],
                "systemInstruction": {"role": "system", "parts": [{"text": "s"}]},
            },
            say("a", "b", system="s"),
        ),
        (
            {"question": "a", "context": "x", "answers": {"text": ["b", "c"], "answer_start": [0]}},
            say("a\n\nx", "b"),
        ),
        (
            {"query": "a", "answers": '[{"name": "f", "arguments": {}}]', "tools": "[]"},
            [
                *say("a"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "f", "arguments": {}}],
                },
            ],
        ),
        ({"input": say("a"), "output": "b", "reasoning": "off"}, say("a", "b")),
        (
            {"Question": "a", "Complex_CoT": "hm", "Response": "b"},
            [*say("a"), {"role": "assistant", "content": "b", "reasoning_content": "hm"}],
        ),
        ({"chat": "USER: a\n\nASSISTANT: b", "system": "s"}, say("a", "b", system="s")),
    ],
)
def test_to_conversation_every_format_becomes_messages(
    record: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert to_conversation(record).messages == expected


def test_to_conversation_keeps_additional_message_fields() -> None:
    message = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    record = {"messages": [{"role": "user", "content": "a"}, message]}
    assert to_conversation(record).messages[1] == message


@pytest.mark.parametrize("value", [0, 0.0, False, "0", "false", "False"])
@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_to_conversation_answer_that_is_off_is_masked(key: str, value: object) -> None:
    messages = say("a", "b", "c", "d")
    marked = [messages[0], messages[1] | {key: value}, messages[2], messages[3] | {key: "true"}]
    found = to_conversation({"messages": marked})
    assert found.messages == messages
    assert found.masked == {1}


def test_to_conversation_weight_0_masks_answer() -> None:
    messages = say("a", "b", "c", "d")
    messages[1]["weight"] = 0
    conversation = to_conversation({"messages": messages})
    assert conversation.masked == {1}
    assert conversation.messages == say("a", "b", "c", "d")


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n a\n<|im_end|>\n"
            "<|im_start|>assistant\nb<|im_end|>\n<|endoftext|>",
            say(" a\n", "b", system="s"),
        ),
        (
            "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST] d </s>",
            say("a", "b", "c", "d", system="s"),
        ),
        ("[INST]a[/INST] b", say("a", "b")),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>",
            say("a", "b"),
        ),
        (
            "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
            say("a", "b"),
        ),
        ("<|user|>\na</s>\n<|assistant|>\nb</s>", say("a", "b")),
        ("<\uff5cUser\uff5c>a<\uff5cAssistant\uff5c>b", say("a", "b")),
        (
            "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]a[/INST]b</s>",
            say("a", "b", system="s"),
        ),
        (
            "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>a<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>b<|END_OF_TURN_TOKEN|>",
            say("a", "b"),
        ),
        ("[gMASK]<sop><|user|>\na<|assistant|>\nb", say("a", "b")),
    ],
)
def test_to_conversation_parses_text_with_control_tokens(
    text: str, expected: list[dict[str, Any]]
) -> None:
    assert is_written(text)
    assert to_conversation({"text": text}).messages == expected
    prompt, completion = text[: text.rindex("b")], text[text.rindex("b") :]
    if expected[-1]["content"] == "b":
        record = {"prompt": prompt, "completion": completion}
        assert to_conversation(record).messages == expected


@pytest.mark.parametrize("text_key", ["messages", "log"])
@pytest.mark.parametrize("written", [True, False])
def test_messages_in_text_field_are_conversation(
    tmp_path: Path, text_key: str, written: bool
) -> None:
    messages = say("a", "b")
    record = {text_key: json.dumps(messages) if written else messages, "system": "s"}
    [source] = find_sources([write_lines(tmp_path / "a.jsonl", [record])])
    assert kind_of_records(source, text_key) == "chat"
    assert to_conversation(record).messages == say("a", "b", system="s")
    [document] = read_documents([source], text_key)
    assert document.error is not None
    assert document.error.reason == "conversation"


def test_written_conversation_with_text_outside_turns_raises() -> None:
    text = "<|im_start|>user\na<|im_end|>and more<|im_start|>assistant\nb<|im_end|>"
    with pytest.raises(BadRecordError, match="'and more' outside of its turns"):
        to_conversation({"text": text})
    assert not is_written("a text about <|im_start|>")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("### Human: a?### Assistant: b.### Human: c", say("a?", "b.", "c")),
        ("### Human\na\n### Assistant\nb", say("a", "b")),
        ("### System:\ns\n\n### User:\na\n\n### Assistant:\nb\n", say("a", "b", system="s")),
        (
            "Below is a task.\n\n### Instruction:\na\n\n### Input:\nx\n\n### Response:\nb",
            say("a\n\nx", "b", system="Below is a task."),
        ),
        ("<human>: a\n<bot>: b", say("a", "b")),
        (
            "The conversation between them.\n[|Human|] a\n[|AI|] b\n[|Human|] ",
            say("a", "b", system="The conversation between them."),
        ),
        ("User: a\nUser A: x\n\nAssistant: b: c\nA: d", say("a\nUser A: x", "b: c\nA: d")),
        ("**User:** a\n\n**Assistant**: b", say("a", "b")),
        (
            "USER: a\n\nASSISTANT: b\n\nFUNCTION RESPONSE: c\n\nASSISTANT: d",
            [
                *say("a", "b"),
                {"role": "function_response", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
        ),
        # Names of further turns are text where such a turn can't be.
        ("Human: a\nAssistant: b:\nInput: 5\nOutput: 25", say("a", "b:\nInput: 5\nOutput: 25")),
        ("User: a\nAssistant: b:\nSystem: Linux\nOS: x", say("a", "b:\nSystem: Linux\nOS: x")),
        ("User: a\nSystem: x\nAssistant: b", say("a\nSystem: x", "b")),
        ("Q: a\nInput: 5\nA: b\nInput: 6", say("a\nInput: 5", "b\nInput: 6")),
        ("Q: a\nA: b\nFUNCTION RESPONSE: c", say("a", "b\nFUNCTION RESPONSE: c")),
        (
            "Instruction: a\nResponse: b\nInput: x\nInstruction: c\nInput: y\nResponse: d",
            say("a", "b\nInput: x", "c\n\ny", "d"),
        ),
        ("### Instruction:\n### Input:\nx\n### Response:\nb", say("x", "b")),
        ("### Instruction:\na\n### Input:\n\n### Response:\nb", say("a", "b")),
        ("<q>a<A>b<Q>c<a>d", say("a", "b", "c", "d")),
        (
            "<user> types; the <bot> tag and the <input> tag",
            say("types; the", "tag and the <input> tag"),
        ),
        ("<user>a<bot>b<\u017fystem>c", say("a", "b<\u017fystem>c")),
        ("<question>a</question>\n<answer>\nb\n</answer>", say("a", "b")),
        ("Q: a\nA: b\n\nQ: c\nA: d", say("a", "b", "c", "d")),
        (
            "A chat between two. USER: a ASSISTANT: b</s>USER: c ASSISTANT: d</s>",
            say("a", "b", "c", "d", system="A chat between two."),
        ),
        ("User: a", None),
        ("User:\nAssistant:", None),
        ("User: a\nUser: b\nAssistant: c", None),
        ("ROMEO: a\n\nJULIET: b", None),
        ("Once, she asked. Q: why? A: because.", None),
        ("Frequent questions\n\nQ: a\nA: b", None),
        ("user: bob\nassistant: x", None),
    ],
)
def test_transcript_of_text_with_speakers_gives_alternating_messages(
    text: str, expected: list[dict[str, Any]] | None
) -> None:
    found = transcript_of(text)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert to_conversation({"text": text}).messages == expected


@pytest.mark.parametrize(
    "roles", ["assistant user assistant", "user user assistant", "user assistant system user"]
)
def test_to_conversation_keeps_messages_in_any_order(roles: str) -> None:
    messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles.split())]
    assert to_conversation({"messages": messages}).messages == messages


def test_to_conversation_passes_on_tools_and_results() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    messages = [*say("a"), call, {"role": "tool", "tool_call_id": "1", "content": ""}]
    record = {"messages": [*say("a"), {**call, "content": None}, messages[-1]]}
    assert to_conversation(record).messages == messages


BAD: list[tuple[object, str, str]] = [
    (3, "wrong_type", "a number, not an object"),
    ([GOOD], "wrong_type", "a list, not an object"),
    ({"text": "a"}, "unknown_form", r"neither `messages` nor .* \(fields: text\)"),
    ({}, "unknown_form", "fields: none"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "unknown_form", "a preference pair"),
    ({"prompt": "a", "completion": "b", "label": False}, "not_learned", "`label` is false"),
    ({"messages": say("a", "b"), "train": "False"}, "not_learned", "`train` is false"),
    ({"messages": say("a", "b"), "loss": 0}, "not_learned", "`loss` is 0"),
    ({"messages": say("a", "b"), "weight": 0.5}, "wrong_type", "a weight other than 0 and 1"),
    ({"instruction": "a"}, "wrong_type", "`output` is missing"),
    ({"instruction": "a", "output": 3}, "wrong_type", "`output` is a number, not a text or a list"),
    ({"instruction": "a", "output": "b", "input": 3}, "wrong_type", "`input` is a number"),
    ({"instruction": " ", "output": "b"}, "empty", r"message 1 \(role user\) is blank"),
    ({"instruction": "a", "output": ""}, "empty", r"message 2 \(role assistant\) is blank"),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, "wrong_type", "must be two texts"),
    ({"messages": []}, "empty", "there is no message"),
    ({"messages": "a"}, "wrong_type", "`messages` is a text, not a list"),
    ({"messages": ["a"]}, "wrong_type", r"`messages\[0\]` is a text, not an object"),
    ({"messages": [{"content": "a"}]}, "wrong_type", "has no text in `role`"),
    ({"messages": [{"role": "user"}]}, "wrong_type", r"`messages\[0\]`.content is missing"),
    ({"messages": [{"role": "user", "content": 1}]}, "wrong_type", "is a number, not a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "wrong_type",
        r"parts that are not text \(image_url\)",
    ),
    (
        {"messages": say("<image> a", "b"), "images": ["cat.png"]},
        "wrong_type",
        "`images` is not text, and only text is learned",
    ),
    (
        {"messages": [*say("a"), {"role": "assistant", "content": "b", "thinking": {"a": 1}}]},
        "wrong_type",
        r"`messages\[1\]`.thinking is an object, not a text",
    ),
    ({"question": "a", "answer": "b", "reasoning": 5}, "wrong_type", "`reasoning` is a number"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown_role", "the role 'wizard'"),
    ({"messages": say("a")}, "no_assistant", "no assistant message"),
    ({"messages": say("a", "b\ud800")}, "bad_utf8", "half of a surrogate pair"),
    ({"messages": say("a", "x" * (10 << 20))}, "too_long", "have 10,485,761 characters"),
    (
        {"messages": [*say("a"), {"role": "assistant", "content": "b", "weight": 0.5}]},
        "wrong_type",
        "a weight other than 0 and 1",
    ),
    (
        {"messages": [*say("a"), {"role": "assistant", "content": "b", "weight": 0}]},
        "not_learned",
        "weight 0",
    ),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown_role", "the role 'alien'"),
    (
        {"Question": "a"},
        "unknown_form",
        r"rename the fields that contain them \(fields: Question\)",
    ),
    ({"question": "a", "choices": ["b"], "answer": 0}, "wrong_type", r"completion: .choices\[.ans"),
    (
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "a"},
        *("unknown_form", "a single message of a tree: join the messages with jq "),
    ),
    ({"messages": [{"role": "user", "content": None}]}, "wrong_type", "is missing or null"),
    ({"conversations": ["a", 1]}, "wrong_type", r"`conversations\[1\]` is a number, not a text"),
]


@pytest.mark.parametrize("record, reason, message", BAD)
def test_to_conversation_invalid_record_raises_with_reason(
    record: object, reason: str, message: str
) -> None:
    with pytest.raises(BadRecordError, match=message) as caught:
        to_conversation(record)
    assert caught.value.reason == reason
    assert reason in REASONS


def test_to_conversation_given_format_is_not_guessed() -> None:
    both = {"instruction": "a", "output": "b", "messages": say("c", "d")}
    assert to_conversation(both).messages == say("c", "d")
    assert to_conversation(both, "alpaca").messages == say("a", "b")
    with pytest.raises(BadRecordError, match="`conversations` is missing"):
        to_conversation(both, "sharegpt")


# Files


def test_prepare_chat_bad_record_raises_with_file_and_line(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [GOOD, GOOD, {"messages": say("a")}])
    with pytest.raises(DataError, match=r"a\.jsonl:3: there is no assistant message") as caught:
        prepare_chat([lines], chatml, tmp_path / "out")
    assert "(--data.on_bad skip, or --on-bad skip of prepare, drops such records)" in str(
        caught.value
    )
    assert not (tmp_path / "out").exists()
    whole = tmp_path / "b.json"
    whole.write_text(json.dumps([GOOD, {"messages": say("a", " ")}]))
    with pytest.raises(DataError, match=r"b\.json record 2: message 2 \(role assistant\) is blank"):
        prepare_chat([whole], chatml, tmp_path / "out")


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"a": "b" "c"}', "not JSON: Expecting ',' delimiter at column 11 ("),
        (b"\xff", "byte 0xff is not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"NaN", "a number, not an object"),
        (json.dumps({"messages": say("a", "x" * (10 << 20))}).encode(), "10,485,761 characters"),
        (b'{"messages": "' + b"x" * (65 << 20) + b'"}', "the line has more than 67,108,864 bytes"),
    ],
)
def test_prepare_chat_unreadable_line_is_named(
    tmp_path: Path, chatml: Tokenizer, line: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n" + line + b"\n" + good)
    with pytest.raises(DataError) as caught:
        prepare_chat([path], chatml, tmp_path / "out")
    assert f"{path}:3: " in str(caught.value)
    assert message in str(caught.value)
    manifest = prepare_chat(
        [path], chatml, tmp_path / "out", options=ChatOptions(on_bad="skip", val_fraction=0)
    )
    assert manifest["documents"]["written"] == 2


@pytest.mark.parametrize(
    "content, message",
    [
        ('"messages"', r"must contain a record, a list of records, or JSONL"),
        ("[1,\n2", r"a\.json:2: not JSON: Expecting ',' delimiter at column 2"),
        (" \n", r"a\.json is empty: replace it"),
        ('{"a":' * 900 + "1" + "}" * 900, "can't be read as records: maximum recursion"),
        ('{"a":\n1}\n{"a": 2}', r"a\.json:3: not JSON: Extra data"),
        ('{"a": [{}], "b": [{}]}', r"several lists of objects \(a, b\): write each of them"),
        (
            json.dumps({"data": {"a": [GOOD], "b": [GOOD]}, "info": [{"name": "x"}]}),
            r"several lists of objects \(a, b\)",
        ),
    ],
)
def test_prepare_chat_json_file_without_records_raises(
    tmp_path: Path, chatml: Tokenizer, content: str, message: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(on_bad="skip"))


@pytest.mark.parametrize("size", [2, 40_000])
@pytest.mark.parametrize("begin, between, end", [('{"data": [', ",", "]}"), ("", "\n", "\n")])
def test_read_records_json_file_with_lines_or_one_list_in_an_object(
    tmp_path: Path, begin: str, between: str, end: str, size: int
) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        begin + between.join([json.dumps({"question": "a", "answer": "b"})] * size) + end
    )
    [source] = find_records([path])
    assert kind_of_records(source) == "chat"
    assert len([record for record in read_records([source]) if record.error is None]) == size


@pytest.mark.parametrize(
    "content, count",
    [
        ({"conversations": [GOOD] * 3}, 3),
        ({"messages": [GOOD["messages"]] * 3}, 3),
        ({"version": 1, "data": {"conversations": [GOOD] * 3, "info": [{"name": "x"}]}}, 3),
        ({"id-1": GOOD, "id-2": GOOD}, 2),
        ({f"id-{number}": {"title": "x" * 600, **GOOD} for number in range(2000)}, 2000),
        ({"id-1": GOOD["messages"], "id-2": GOOD["messages"]}, 2),
        ({"info": [{"name": "x"}], "examples": [{"prompt": "a", "completion": "b"}] * 3}, 3),
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, 2),
        ({"question": {"0": "a", "1": "b"}, "answer": {"0": "c", "1": "d"}}, 2),
        ({"prompt": say("a"), "completion": say("a", "b")[1:]}, 1),
        (GOOD, 1),
        ({"conversation": [{"input": "a", "output": "b"}] * 2}, 1),
        ({"conversation_id": 1, "conversation": [{"human": "a", "assistant": "b"}] * 2}, 1),
        ({"conversations": [{"user": "a", "assistant": "b", "time": 3}] * 2}, 1),
        ({"id": 1, "conversations": [{"question": "a", "answer": "b"}] * 2}, 1),
        ({"version": 1, "conversations": [{"question": "a", "answer": "b"}] * 2}, 2),
        ({"metadata": {"a": [{"x": 1}], "b": [{"y": 1}]}, "data": [GOOD] * 3}, 3),
        ({"info": [{"name": "x"}], "data": [{"chat_log": say("a", "b")}] * 3}, 3),
        ({"data": {"chat_log": say("a", "b")}}, 1),
    ],
)
def test_read_records_json_file_yields_nested_records(
    tmp_path: Path, content: object, count: int
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    [source] = find_records([tmp_path / "a.json"])
    assert kind_of_records(source) == "chat"
    records = [record.value for record in read_records([source])]
    assert len(records) == count
    assert all(to_conversation(record).messages for record in records)


def test_read_records_json_file_with_one_record_keeps_its_other_fields(tmp_path: Path) -> None:
    content = {"system": "s", "chat_log": say("a", "b")}
    (tmp_path / "a.json").write_text(json.dumps(content))
    [record] = read_records(find_records([tmp_path / "a.json"]))
    assert to_conversation(record.value).messages == say("a", "b", system="s")


@pytest.mark.parametrize(
    "content",
    [
        {"messages": [say("a", "b")] * 2, "system": ["s", "s"]},
        {"version": 1, "conversations": [say("a", "b")] * 2, "system_prompt": ["s", "s"]},
        {"messages": {"0": say("a", "b"), "1": say("a", "b")}, "system": {"0": "s", "1": "s"}},
        {"system": "s", "messages": [say("a", "b")] * 2},
        {"system": "s", "data": [say("a", "b")] * 2},
        {"system": "s", "data": [{"messages": say("a", "b")}] * 2},
        {"system": "s", "conversations": [{"prompt": "a", "completion": "b"}] * 2},
        {"system": "x", "data": [{"messages": say("a", "b"), "system": "s"}] * 2},
        {"system": "x", "data": [{"messages": say("a", "b"), "system_prompt": "s"}] * 2},
        {"system": "s", "data": [{"messages": say("a", "b"), "system": None}] * 2},
    ],
)
def test_read_records_json_file_with_system_beside_records_keeps_it(
    tmp_path: Path, content: object
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    records = list(read_records(find_records([tmp_path / "a.json"])))
    found = [to_conversation(record.value).messages for record in records]
    assert found == [say("a", "b", system="s")] * 2


@pytest.mark.parametrize(
    "tools, first, second",
    [
        ([[{"name": "t"}], [{"name": "u"}]], ["t"], ["u"]),
        ([{"name": "t"}], ["t"], ["t"]),
        ([{"name": "t"}, {"name": "u"}], ["t", "u"], ["t", "u"]),
    ],
)
def test_read_records_json_file_with_tools_beside_records_keeps_them(
    tmp_path: Path, tools: object, first: list[str], second: list[str]
) -> None:
    content = {"messages": [say("a", "b")] * 2, "tools": tools}
    (tmp_path / "a.json").write_text(json.dumps(content))
    records = list(read_records(find_records([tmp_path / "a.json"])))
    assert [[tool["name"] for tool in record.value["tools"]] for record in records] == [
        first,
        second,
    ]


def test_read_records_json_file_with_train_false_beside_records_excludes_them(
    tmp_path: Path,
) -> None:
    content = {"messages": [say("a", "b")] * 2, "train": False}
    (tmp_path / "a.json").write_text(json.dumps(content))
    for record in read_records(find_records([tmp_path / "a.json"])):
        with pytest.raises(BadRecordError, match="`train` is false"):
            to_conversation(record.value)


def test_read_records_json_file_with_too_few_system_messages_raises_input_error(
    tmp_path: Path,
) -> None:
    content = {"messages": [say("a", "b")] * 3, "system": ["x", "y"]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="2 values of `system` for 3 records: give one per record"):
        list(read_records(find_records([tmp_path / "a.json"])))


def test_read_records_json_file_of_columns_with_nulls_in_first_row_yields_rows(
    tmp_path: Path,
) -> None:
    content = {"prompt": [None, "a"], "completion": [None, "b"]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    _, record = read_records(find_records([tmp_path / "a.json"]))
    assert to_conversation(record.value).messages == say("a", "b")


@pytest.mark.parametrize(
    "record",
    [{"instruction": "a", "output": "b", "role": "Gandalf"}, {"text": "a", "from": "wiki"}],
)
def test_read_records_list_with_role_field_yields_each_record(
    tmp_path: Path, record: dict[str, str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([record] * 3))
    assert len(list(read_records(find_records([tmp_path / "a.json"])))) == 3


def test_prepare_chat_json_file_may_hold_one_record(tmp_path: Path, chatml: Tokenizer) -> None:
    for number in range(3):
        (tmp_path / f"{number}.json").write_text(json.dumps(GOOD, indent=2))
    options = ChatOptions(val_fraction=0)
    # The last record is a bare list of messages.
    (tmp_path / "3.json").write_text(json.dumps(GOOD["messages"]))
    manifest = prepare_chat([tmp_path], chatml, tmp_path / "out", options=options)
    assert manifest["documents"]["written"] == 4


@pytest.mark.parametrize(
    "begin, kind",
    [
        ('[1, null, {"id": "a]", "messages": []}, "', "chat"),
        ('\ufeff[\n {"prompt": "a", "chosen": "b", "rejected": "c"},"', "preference"),
        ('[{"id": 1, "text": "', None),
        ('[{"from": "wiki", "text": "', None),
        ('[{"messages": [{"role": "user", "content": "', "chat"),
        ('[{"body": {"messages": []}}, "', None),
        ('{"messages": [], "list": ["', "chat"),
        ('\n{"id": 1, "messages": [{"role": "user", "content": "', "chat"),
        ('"messages", {"messages": []}', None),
    ],
)
def test_kind_of_records_long_json_file_is_detected_from_its_start(
    tmp_path: Path, begin: str, kind: str | None
) -> None:
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        # The string does not end within the first bytes that are read.
        file.write(begin + "é" * (1 << 20))
    assert kind_of_records(find_records([path])[0]) == kind


def test_kind_of_records_short_json_file_uses_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"messages": []}]')
    tracemalloc.start()
    try:
        assert kind_of_records(find_records([path])[0]) == "chat"
        assert len(list(read_records(find_records([path])))) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_prepare_chat_bad_records_are_skipped_counted_and_listed(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    bad = [record for record, _, _ in BAD[1:-5]]
    path = write_lines(tmp_path / "a.jsonl", [GOOD, *bad, GOOD])
    out = tmp_path / "out"
    options = ChatOptions(on_bad="skip", val_fraction=0)
    manifest = prepare_chat([path], chatml, out, options=options)
    documents = manifest["documents"]
    assert (documents["read"], documents["written"]) == (len(bad) + 2, 2)
    assert sum(documents["rejected"].values()) == len(bad)
    entries = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == list(range(2, len(bad) + 2))
    assert [entry["reason"] for entry in entries] == [reason for _, reason, _ in BAD[1:-5]]
    assert (out / "train-examples.txt").read_text() == f"{path}:1\n{path}:{len(bad) + 2}\n"


def test_prepare_chat_only_bad_records_raises_input_error(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": say("a")}, 3])
    with pytest.raises(InputError, match=r"no conversation to train on: 1 no answer, 1 an entry"):
        prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(on_bad="skip"))
    empty = write_lines(tmp_path / "b.jsonl", [])
    with pytest.raises(InputError, match="the inputs contain no records"):
        prepare_chat([empty], chatml, tmp_path / "out")


def test_prepare_chat_template_error_names_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = (
        "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}"
    )
    template += "{%- for m in messages -%}{{- m.content ~ eos_token -}}{%- endfor -%}"
    ours = tokenizer.extended([], template)
    path = write_lines(tmp_path / "a.jsonl", [GOOD, {"messages": say("a", "b", system="s")}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: the chat template refuses .*no system"):
        prepare_chat([path], ours, tmp_path / "out")


def test_prepare_chat_same_records_in_every_file_type_give_same_conversations(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [record for record in draw_records(30) if "messages" in record]
    lines = write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    found = [
        prepare_chat([tmp_path / name], chatml, tmp_path / f"out-{name}")["splits"]
        for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet")
    ]
    assert all(splits == found[0] for splits in found)
    places = (tmp_path / "out-d.parquet" / "train-examples.txt").read_text()
    assert places.startswith(f"{tmp_path / 'd.parquet'} record 1\n")


def test_prepare_chat_tables_and_saved_datasets_give_same_conversations(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    records = [{"Question": f"a\n{i}", "context": "", "Answer": f"b;{i}"} for i in range(20)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(records)
    # As written by `save_to_disk` of the datasets package.
    (tmp_path / "b").mkdir()
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / "b" / name).write_text("{}")
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_stream(tmp_path / "b" / "data-00000-of-00001.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=7)
    lines = write_lines(tmp_path / "c.jsonl", records)
    found = [
        prepare_chat([path], chatml, tmp_path / f"out-{path.name}")["splits"]
        for path in (tmp_path / "a.csv", tmp_path / "b", lines)
    ]
    assert all(splits == found[0] for splits in found)
    damaged = next((tmp_path / "b").glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(InputError, match="is not a readable Arrow file"):
        prepare_chat([tmp_path / "b"], chatml, tmp_path / "out")


def test_prepare_chat_table_with_unnamed_index_is_read(tmp_path: Path, chatml: Tokenizer) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",prompt,completion,systemPrompt\n0,a,b,s\n1,c,d,s\n")
    [source] = find_records([path])
    assert kind_of_records(source) == "chat"
    records = [to_conversation(record.value).messages for record in read_records([source])]
    assert records == [say("a", "b", system="s"), say("c", "d", system="s")]
    manifest = prepare_chat([path], chatml, tmp_path / "out")
    assert list(chat_notes(tmp_path / "out", manifest)) == []


def test_prepare_chat_broken_table_row_is_skipped_and_its_line_reported(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    (tmp_path / "a.csv").write_text("prompt;response;a, b, c, d\na;b;\n\nc\nd;e;\n")
    options = ChatOptions(on_bad="skip", val_fraction=0)
    manifest = prepare_chat([tmp_path], chatml, tmp_path / "out", options=options)
    assert manifest["documents"] == {"read": 3, "written": 2, "rejected": {"broken_row": 1}}
    [line] = chat_notes(tmp_path / "out", manifest)
    assert line.startswith(
        "1 of 3 records rejected: not a valid row of a table; first: "
        f"{tmp_path / 'a.csv'}:4: 1 fields, but the header has 3; listed in "
    )


def test_prepare_chat_rejected_records_are_counted_by_reason_and_file(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    bad = {"messages": [{"role": "wizard", "content": "a"}]}
    first = write_lines(tmp_path / "a.jsonl", [GOOD, bad, bad])
    second = write_lines(tmp_path / "b.jsonl", [{"q": "a"}, bad])
    options = ChatOptions(on_bad="skip", val_fraction=0)
    manifest = prepare_chat([first, second], chatml, tmp_path / "out", options=options)
    form, role = chat_notes(tmp_path / "out", manifest)
    assert f"1 of 5 records rejected: an unknown format; first: {second}:1: " in form
    start = f"3 of 5 records rejected: an unknown role (2 of {first}, 1 of {second}); "
    assert role.startswith(f"{start}first: {first}:2: `messages[0]` has the role 'wizard'")


# Splits


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "valid.jsonl", "test.jsonl"),
        ("a.train.jsonl", "a.evaluation.jsonl", "a.test.jsonl"),
        ("b.jsonl", "valid.jsonl", "test.jsonl"),
        ("data/chats_train.jsonl", "data/chats_dev.jsonl", "data/chats_test.jsonl"),
        ("training/0.jsonl", "validation/0.jsonl", "test/train.jsonl"),
        *[("train_sft-00000-of-00001.jsonl", "VAL-00000-of-00001.jsonl", "testing.jsonl")],
    ],
)
def test_find_splits_uses_split_files_of_folder(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in (*names, "more.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, [GOOD])
    splits = find_splits([tmp_path])
    found = [[source.name for source in one] for one in (splits.train, splits.val, splits.test)]
    train, val, test = (str(tmp_path / name) for name in names)
    assert [sorted(found[0]), *found[1:]] == [
        sorted([train, str(tmp_path / "more.jsonl")]),
        [val],
        [test],
    ]
    assert splits.note == f"{val} validated on; {test} excluded as test data"
    own = find_splits([tmp_path], [tmp_path / "more.jsonl"])
    assert [source.name for source in own.val] == [str(tmp_path / "more.jsonl")]
    assert f"{val} excluded, because other validation data was specified" in own.note


def test_find_splits_input_without_records_is_passed_over(tmp_path: Path) -> None:
    for name in ("chats", "letters"):
        (tmp_path / name).mkdir()
    write_lines(tmp_path / "chats/train.jsonl", [GOOD])
    write_lines(tmp_path / "chats/valid.jsonl", [GOOD])
    (tmp_path / "letters/a.docx").write_bytes(b"PK")
    sources = find_records([tmp_path / "chats"])
    splits = find_splits([tmp_path / "chats", tmp_path / "letters"], found=sources)
    assert [len(splits.train), len(splits.val)] == [1, 1]


def test_find_splits_validation_and_test_files_alone_are_training_data(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / name, [GOOD]) for name in ("test.jsonl", "valid.jsonl")]
    assert len(find_splits([tmp_path]).train) == 2
    write_lines(tmp_path / "train.jsonl", [GOOD])
    assert len(find_splits(paths).train) == 2
    glob = find_splits([str(tmp_path / "*.jsonl")])
    assert [len(glob.train), len(glob.val), len(glob.test)] == [1, 1, 1]


def test_prepare_chat_questions_of_validation_data_are_not_trained_on(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    asked = [say(f"What is {i}?", f"It is {i}.") for i in range(10)]
    write_lines(tmp_path / "train.jsonl", [{"messages": one} for one in asked])
    again = [say(" what is  3?", "No idea."), say("What is 4?", "x", "y", "z", system="s")]
    write_lines(tmp_path / "dev.jsonl", [{"messages": one} for one in again])
    manifest = prepare_chat([tmp_path], chatml, tmp_path / "out")
    assert manifest["documents"]["rejected"] == {"held_out": 2}
    assert manifest["splits"]["train"]["documents"] == 8
    assert manifest["splits"]["val"]["documents"] == 2
    origins = (tmp_path / "out" / "train-examples.txt").read_text()
    assert not {f"{tmp_path}/train.jsonl:{line}" for line in (4, 5)} & set(origins.splitlines())


def test_prepare_chat_answers_to_same_question_share_one_split(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    records = [{"messages": say(f"q {i % 8}", f"answer {i}")} for i in range(40)]
    path = write_lines(tmp_path / "a.jsonl", [*records, *records[:2]])
    manifest = prepare_chat([path], chatml, tmp_path / "out")
    assert manifest["chat"]["duplicates"] == 2
    lines = {
        split: {
            int(line.rpartition(":")[2]) % 8
            for line in (tmp_path / "out" / f"{split}-examples.txt").read_text().splitlines()
            if int(line.rpartition(":")[2]) <= 40
        }
        for split in ("train", "val")
    }
    assert lines["val"]
    assert not lines["train"] & lines["val"]


def test_prepare_chat_control_tokens_in_messages_are_counted(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    records = [GOOD, {"messages": say("a <|python_tag|>", "b")}]
    path = write_lines(tmp_path / "a.jsonl", records)
    options = ChatOptions(val_fraction=0)
    prepare_chat([path], chatml, tmp_path / "out", options=options)
    shown = list(ExampleDataset(tmp_path / "out", "train").describe(64))
    assert "warning: 1 of 2 records contain control tokens such as <|im_start|>" in shown[-1]
    texts = write_lines(
        tmp_path / "b.jsonl", [{"text": "<|start|>user [INST]"}, {"text": "<|x|> see"}]
    )
    found = [record.changes for record in read_documents(find_sources([texts]))]
    assert found == [("chat <|start|>", "chat [INST]"), ()]
    counts = ChangeCounts()
    counts.add("b", found[0])
    _, line = change_lines(counts.record(), counts.names())
    assert line.startswith(
        "warning: b: [INST] is treated as plain text; write chats as records with `messages`, "
    )


def test_prepare_chat_fields_without_use_are_named_with_their_number(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    records = [
        {"messages": say(f"a {i}", "b"), "prompt": f"a {i}", "id": i, "answer": "c" * i, "tag": "a"}
        for i in range(3)
    ]
    records.append({"text": "User: a\nAssistant: b", "id": 4})
    records.append({"question": "[INST] a [/INST]", "answer": " b</s>", "answers": "x"})
    path = write_lines(tmp_path / "a.jsonl", records)
    manifest = prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(val_fraction=0))
    assert manifest["chat"]["unused_fields"] == {"id": 4, "tag": 3, "answer": 2, "answers": 1}
    *_, line = chat_notes(tmp_path / "out", manifest)
    assert line == (
        "fields not used for training: id (4 records), tag (3 records), answer (2 records), "
        "answers (1 record)"
    )


def test_change_lines_name_conversations_written_as_text_if_most_documents_are(
    tmp_path: Path,
) -> None:
    texts = [{"text": "Human: a\n\nAI: b"}] * 3 + [{"text": "Human: a"}] * 2
    path = write_lines(tmp_path / "a.jsonl", texts)
    counts = ChangeCounts()
    for record in read_documents(find_sources([path])):
        counts.add("a", record.changes)
    [line] = change_lines(counts.record(), counts.names(), total=5)
    assert line.startswith("warning: a: 3 documents with turns of Human: and AI:, treated as plain")
    assert list(change_lines(counts.record(), counts.names(), total=7)) == []


def test_read_table_without_header_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("What is it?,It is a cat.\nAnd this?,A dog.\n")
    for records in (read_records(find_records([path])), read_documents(find_sources([path]))):
        [record] = records
        assert record.line == 1
        assert "begins with 'What is it?': add a line such as question,answer" in str(record.error)


def test_prepare_chat_bad_parquet_record_is_named_by_number(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet record 2: `output` is missing"):
        prepare_chat([tmp_path / "d.parquet"], chatml, tmp_path / "out")


def test_prepare_chat_accepts_only_record_files(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"the supported types are \.jsonl, \.ndjson, \.json"):
        find_records([tmp_path / "a.md"])
    with pytest.raises(InputError, match="stdlib does not exist"):
        find_records(["stdlib"])
    write_lines(tmp_path / "b.jsonl", [GOOD])
    [source] = find_records([tmp_path])
    [record] = read_records([source])
    assert record.value == GOOD


def test_prepare_chat_longest_allowed_conversation_is_accepted(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    text = "star " * (MAX_CONVERSATION_CHARS // 5 - 1)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": say("a", text)}])
    prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(val_fraction=0))
    assert ExampleDataset(tmp_path / "out", "train").num_documents == 1


def test_prepare_chat_reads_records_sharing_instructions(
    shared: Path, tmp_path: Path, chatml: Tokenizer
) -> None:
    manifest = prepare_chat([shared / "data" / "instruction-data.json"], chatml, tmp_path / "out")
    assert manifest["documents"] == {"read": 1100, "written": 1100, "rejected": {}}
    assert manifest["splits"]["val"]["documents"] == 110


def test_damaged_utf16_record_is_rejected_with_own_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    # A line, and then half of a surrogate pair.
    path.write_bytes('{"messages": []}\n'.encode("utf-16") + b"\x00\xd8a\x00")
    good, bad = read_records(find_records([path]))
    assert (good.line, good.value, good.error) == (1, {"messages": []}, None)
    assert bad.error is not None
    assert (bad.line, bad.error.reason) == (2, "bad_utf16")
    assert bad.error.reason in REASONS
