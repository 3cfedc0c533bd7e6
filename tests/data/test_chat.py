"""Tests of preparing conversations with tools and reasoning, and records from which a template
omits something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders import say, with_template, write_lines
from chat_templates import SPECIAL_TOKENS, WITH_BLOCKS, WITHOUT_BLOCKS
from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.packing import ExampleDataset, chat_notes
from firstlight.errors import DataError, InputError
from firstlight.tokenizer import Tokenizer

_CALL = {"name": "find", "arguments": {"city": "Rome"}}
#: The same conversation with tools in the formats of OpenAI, mlx-lm, ShareGPT and Hermes.
_SPELLINGS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "where"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
            },
            {"role": "tool", "content": "here", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Here."},
        ],
        "tools": [{"type": "function", "function": {"name": "find", "description": "finds"}}],
    },
    {
        "messages": [
            {"role": "user", "content": "where"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"function": {"name": "find", "arguments": json.dumps(_CALL["arguments"])}}
                ],
            },
            {"role": "tool", "name": "find", "content": "here"},
            {"role": "assistant", "content": "Here."},
        ],
        "tools": [{"type": "function", "function": {"name": "find", "description": "finds"}}],
    },
    {
        "conversations": [
            {"from": "human", "value": "where"},
            {"from": "function_call", "value": json.dumps(_CALL)},
            {"from": "observation", "value": "here"},
            {"from": "gpt", "value": "Here."},
        ],
        "tools": json.dumps([{"name": "find", "description": "finds"}]),
    },
    {
        "conversations": [
            {"from": "human", "value": "where"},
            {"from": "gpt", "value": f"<tool_call>\n{json.dumps(_CALL)}\n</tool_call>"},
            {"from": "tool", "value": "<tool_response>\nhere\n</tool_response>"},
            {"from": "gpt", "value": "Here."},
        ],
        "tools": json.dumps([{"name": "find", "description": "finds"}]),
    },
]


@pytest.fixture(scope="module")
def qwen(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer.extended(SPECIAL_TOKENS, WITHOUT_BLOCKS["qwen3"])


def examples(folder: Path, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return (text, text of the labels) for each training example in a folder."""
    split = ExampleDataset(folder, "train")
    texts = []
    for index in range(split.num_documents):
        tokens, loss_mask = split.example(index)
        text, labels = (
            tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            for ids in (tokens, tokens[loss_mask])
        )
        texts.append((text, labels))
    return texts


def test_prepare_chat_tools_in_any_format_give_same_examples(
    tmp_path: Path, qwen: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", _SPELLINGS)
    prepare_chat([path], qwen, tmp_path / "out", options=ChatOptions(val_fraction=0))
    found = examples(tmp_path / "out", qwen)
    assert len(found) == 4
    [(text, labels)] = set(found)
    assert '"description": "finds"' in text
    assert "<tool_response>\nhere\n</tool_response>" in text
    assert labels == (
        '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
        "<think>\n\n</think>\n\nHere.<|im_end|>"
    )


@pytest.mark.parametrize(
    "place", ["Tools", "system", "chat_template_kwargs"], ids=["field", "message", "variable"]
)
def test_prepare_chat_finds_tools_in_every_supported_field(
    tmp_path: Path, qwen: Tokenizer, place: str
) -> None:
    tools = [{"name": "find", "description": "finds"}]
    messages = say("where", "Here.", system="s")
    record: dict[str, Any] = {"messages": messages}
    if place == "system":
        messages[0]["tools"] = tools
    else:
        record[place] = tools if place == "Tools" else {"tools": tools}
    pair = {"input": {**record, "messages": messages[:2]}, "chosen": "a", "rejected": "b"}
    for one, options in (
        (record, ChatOptions(val_fraction=0)),
        (pair, ChatOptions("preference", val_fraction=0)),
    ):
        path = write_lines(tmp_path / "a.jsonl", [one])
        prepare_chat([path], qwen, tmp_path / "out", options=options, overwrite=True)
        assert '"description": "finds"' in examples(tmp_path / "out", qwen)[0][0]


def test_prepare_chat_parquet_calls_have_only_their_own_arguments(
    tmp_path: Path, qwen: Tokenizer
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = []
    for key in ("city", "day"):
        call = {"function": {"name": "find", "arguments": {key: "x"}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        records.append({"messages": [*say("where"), answer], "tools": [{"name": "find"}]})
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    prepare_chat([path], qwen, tmp_path / "out", options=ChatOptions(val_fraction=0))
    (_, first), (_, second) = examples(tmp_path / "out", qwen)
    assert '"arguments": {"city": "x"}' in first
    assert '"arguments": {"day": "x"}' in second


def test_prepare_chat_preference_pairs_with_tools_learn_calls(
    tmp_path: Path, qwen: Tokenizer
) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": _CALL}]}
    record = {
        "prompt": [
            *say("where"),
            {"role": "function_call", "content": json.dumps(_CALL)},
            {"role": "tool", "content": "here"},
        ],
        "chosen": [call],
        "rejected": [{"role": "assistant", "content": "No idea.", "reasoning_content": "hm"}],
        "tools": [{"name": "find", "description": "finds"}],
    }
    options = ChatOptions("preference", val_fraction=0)
    path = write_lines(tmp_path / "a.jsonl", [record])
    prepare_chat([path], qwen, tmp_path / "out", options=options)
    chosen, rejected = examples(tmp_path / "out", qwen)
    assert "finds" in chosen[0]
    assert chosen[1].endswith('{"city": "Rome"}}\n</tool_call><|im_end|>')
    assert [text.count("<tool_call>") for text in chosen] == [2, 1]
    assert rejected[1] == "<think>\nhm\n</think>\n\nNo idea.<|im_end|>"


_LOSSY = [
    {"messages": say("a", "b")},
    {"messages": say("a", "<think>hm</think>\n\nb", "c", "d")},
    {"messages": say("c", "<think>so</think>\n\nb", "c", "d")},
]


def test_prepare_chat_lost_reasoning_raises_with_line(tmp_path: Path, qwen: Tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", _LOSSY)
    with pytest.raises(DataError) as caught:
        prepare_chat([path], qwen, tmp_path / "out")
    assert str(caught.value).startswith(
        f"{path}:2: the chat template omits reasoning (message 2): 'hm' (--data.on_bad skip,"
    )
    assert "keep trains on the rest" in str(caught.value)


def test_prepare_chat_lost_tools_names_template_with_tools_that_learns_calls(
    tmp_path: Path, qwen: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", _SPELLINGS[:1])
    with pytest.raises(DataError, match="the built-in template hermes includes tools"):
        prepare_chat([path], qwen, tmp_path / "out", template="chatml")
    options = ChatOptions(val_fraction=0)
    prepare_chat([path], qwen, tmp_path / "out", template="hermes", options=options)
    ((text, learned),) = examples(tmp_path / "out", qwen)
    assert "<tools>\n" in text
    assert "\n<tool_response>\nhere\n</tool_response><|im_end|>\n" in text
    assert learned.count("<|im_end|>") == 2
    assert '{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>' in learned
    assert learned.endswith("Here.<|im_end|>")
    prepare_chat(
        [write_lines(tmp_path / "b.jsonl", [{"messages": say("a", "b")}])],
        qwen,
        tmp_path / "plain",
        template="hermes",
        options=options,
    )
    ((text, _),) = examples(tmp_path / "plain", qwen)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


def test_prepare_chat_on_bad_counts_lost_reasoning_with_first_line(
    tmp_path: Path, qwen: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", _LOSSY)
    options = ChatOptions(on_bad="skip", val_fraction=0)
    manifest = prepare_chat([path], qwen, tmp_path / "skip", options=options)
    assert manifest["documents"]["rejected"] == {"lost_thoughts": 2}
    [line] = chat_notes(tmp_path / "skip", manifest)
    assert line.endswith("(on_bad keep trains on the rest of such records)")
    only = write_lines(tmp_path / "b.jsonl", _LOSSY[1:])
    with pytest.raises(InputError, match=r"data\.on_bad keep, .* trains on the rest"):
        prepare_chat([only], qwen, tmp_path / "none", options=options)
    options = ChatOptions(on_bad="keep", val_fraction=0)
    manifest = prepare_chat([path], qwen, tmp_path / "keep", options=options)
    assert manifest["documents"] == {"read": 3, "written": 3, "rejected": {}}
    detail = "the chat template omits reasoning (message 2): 'hm'"
    assert manifest["chat"]["lost"] == {
        "lost_thoughts": {"records": 2, "first": f"{path}:2: {detail}"}
    }
    lines = list(ExampleDataset(tmp_path / "keep", "train").describe(64))
    assert (
        f"2 of 3 records with reasoning that the chat template omits; first: {path}:2: {detail}"
    ) in lines


@pytest.mark.parametrize("key", ["train", "loss", "weight"])
def test_prepare_chat_answer_outside_loss_is_not_learned(
    tmp_path: Path, tokenizer: Tokenizer, key: str
) -> None:
    chatml = with_template(tokenizer, "chatml")
    messages = say("a", "WRONG", "b", "two")
    messages[1][key] = False
    messages[3][key] = True
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(val_fraction=0))
    [(text, labels)] = examples(tmp_path / "out", chatml)
    assert "WRONG" in text
    assert labels == "two<|im_end|>"


def test_prepare_chat_invalid_tools_raise_with_line(tmp_path: Path, qwen: Tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": say("a", "b"), "tools": "find"}])
    with pytest.raises(DataError, match=r"a.jsonl:1: `tools` is not a list of functions"):
        prepare_chat([path], qwen, tmp_path / "out")


def test_prepare_chat_warns_if_blocks_start_before_prompt_ends(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": say("a", "b")}])
    options = ChatOptions(val_fraction=0)
    warnings = []
    for templates in (WITH_BLOCKS, WITHOUT_BLOCKS):
        ours = tokenizer.extended(SPECIAL_TOKENS, templates["deepseek-r1"])
        manifest = prepare_chat([path], ours, tmp_path / "out", options=options, overwrite=True)
        warnings.append(manifest["chat"].get("warning", ""))
    assert warnings[0].startswith("the chat template's generation prompt opens the reasoning")
    assert warnings[1] == ""
