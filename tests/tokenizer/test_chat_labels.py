"""The tokens of a conversation that are learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import BLOCKS, THINKING, say, with_chatml_like, with_template
from chat_templates import SPECIAL_TOKENS, WITH_BLOCKS, WITHOUT_BLOCKS
from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.tokenizer.chat_labels import ChatEncoder, turn_end_ids, with_chat_template
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES

_NAMES = pytest.mark.parametrize("name", CHAT_TEMPLATES)

_TEXTS = st.lists(
    st.sampled_from(
        ["the", "a b", "<|im_end|>", "<|endoftext|>", "é日", "\n", " ", "🙂", "[INST]"]
    ),
    min_size=1,
    max_size=5,
).map("".join)


def learned_text(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Return the runs of learned tokens, each as text including its special tokens."""
    chat = ChatEncoder(tokenizer).encode(messages, **options)
    runs: list[list[int]] = []
    for before, own, token in zip([False, *chat.loss_mask], chat.loss_mask, chat.ids, strict=False):
        if own and not before:
            runs.append([])
        if own:
            runs[-1].append(token)
    return [tokenizer.backend.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("chatml", ["one<|im_end|>", "two\n<|im_end|>"]),
        ("llama3", ["one<|eot_id|>", "two<|eot_id|>"]),
        ("llama2", [" one <|endoftext|>", " two <|endoftext|>"]),
        ("alpaca", ["one<|endoftext|>", "two\n<|endoftext|>"]),
    ],
)
def test_chat_labels_cover_answers_and_end_tokens_only(
    tokenizer: Tokenizer, name: str, expected: list[str]
) -> None:
    ours = with_template(tokenizer, name)
    assert learned_text(ours, say("a", "one", "b", "two\n", system="s")) == expected


def test_chat_labels_with_blocks_cover_blocks_exactly(tokenizer: Tokenizer) -> None:
    ours = with_chatml_like(tokenizer, BLOCKS)
    assert learned_text(ours, say("a", "one", "b", "two\n")) == ["one<|im_end|>", "two\n<|im_end|>"]
    # If the block ends earlier, so do the learned tokens.
    shorter = BLOCKS.replace(
        "message.content ~ '<|im_end|>' -}}{%- endgeneration -%}",
        "message.content -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
    )
    ours = with_chatml_like(tokenizer, shorter)
    assert learned_text(ours, say("a", "one", "b", "two\n")) == ["one", "two\n"]


@given(contents=st.lists(_TEXTS.filter(str.strip), min_size=1, max_size=3), system=st.booleans())
def test_chat_labels_of_blocks_and_prefixes_agree_with_inference_ids(
    tokenizer: Tokenizer, contents: list[str], system: bool
) -> None:
    texts = [text for content in contents for text in (f"q {content}", content)]
    messages = say(*texts, system="be <|im_start|> kind" if system else None)
    blocks = ChatEncoder(with_chatml_like(tokenizer, BLOCKS))
    plain = with_template(tokenizer, "chatml")
    assert blocks.encode(messages) == ChatEncoder(plain).encode(messages)
    for name in CHAT_TEMPLATES:
        ours = with_template(tokenizer, name)
        chat = ChatEncoder(ours).encode(messages)
        assert chat.ids == ours.encode_chat(messages)
        assert len(chat.ids) == len(chat.loss_mask)


@_NAMES
def test_chat_labels_prompt_equals_inference_prompt(tokenizer: Tokenizer, name: str) -> None:
    """The tokens before the last run of learned tokens are the prompt of the last answer."""
    ours = with_template(tokenizer, name)
    messages = say("a question", "an answer", "another", "the light")
    chat = ChatEncoder(ours).encode(messages)
    prompt = ours.encode_chat(messages[:-1], add_generation_prompt=True)
    assert chat.ids[: len(prompt)] == prompt
    assert chat.loss_mask[len(prompt) - 1 :][:2] == [False, True]
    [end] = turn_end_ids(ours)
    last = max(i for i, own in enumerate(chat.loss_mask) if own)
    assert chat.ids[last] == end


def test_chat_labels_template_reformatting_earlier_answers_uses_markers(
    tokenizer: Tokenizer,
) -> None:
    ours = with_chatml_like(tokenizer, THINKING)
    for first in (" one ", "<think>hm</think>\none"):  # the reasoning is omitted
        assert learned_text(ours, say("a", first, "b", "two")) == [
            "one<|im_end|>",
            "<think>\n\n</think>\n\ntwo<|im_end|>",
        ]
    # The start of the answer is found even if the generation prompt does not match the rendered
    # conversation.
    thinking = THINKING.replace("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>think' -}}")
    ours = with_chatml_like(tokenizer, thinking)
    assert learned_text(ours, say("a", " one ", "b", "two"))[0] == "one<|im_end|>"
    cut = say("a", "<think>hm</think>\none", "b", "two")
    assert learned_text(ours, cut)[0] == "one<|im_end|>"
    assert [reason for reason, _ in ChatEncoder(ours).encode(cut).lost] == ["lost_thoughts"]


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{%- generation -%}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
            "{%- endgeneration -%}",
            "renders 1 .* for 2 answers",
        ),
        (
            "{%- set x -%}{%- generation -%}{{ messages[-1].content }}{%- endgeneration -%}"
            "{%- endset -%}{{- x | length -}}",
            "modifies the content of its",
        ),
    ],
)
def test_chat_labels_template_hiding_answers_raises_tokenizer_error(
    tokenizer: Tokenizer, template: str, message: str
) -> None:
    ours = tokenizer.extended([], template)
    with pytest.raises(TokenizerError, match=message):
        ChatEncoder(ours).encode(say("a", "one", "b", "two"))


@pytest.mark.parametrize(
    "template, lost",
    [
        # The template only writes the length of earlier answers.
        (
            "{%- for m in messages -%}{{- m.role ~ ':' ~ (m.content if loop.last else "
            "m.content | length) ~ eos_token -}}{%- endfor -%}",
            ["message 1", "message 2", "message 3"],
        ),
        (
            "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- m.content ~ eos_token -}}"
            "{%- endif -%}{%- endfor -%}",
            ["message 2", "message 4"],
        ),
    ],
)
def test_chat_labels_answers_omitted_by_template_are_reported_lost(
    tokenizer: Tokenizer, template: str, lost: list[str]
) -> None:
    ours = tokenizer.extended([], template)
    chat = ChatEncoder(ours).encode(say("alpha", "one", "beta", "two"))
    assert [detail.split("(")[1].split(")")[0] for _, detail in chat.lost] == lost
    learned = "".join(learned_text(ours, say("alpha", "one", "beta", "two")))
    assert learned == ("" if len(lost) == 2 else "two<|endoftext|>")


def test_chat_labels_token_starting_in_prompt_is_not_learned(tokenizer: Tokenizer) -> None:
    """Some tokenizers merge the template's last newline and the answer's first one into one
    token.
    """
    texts = [f"assistant\n\n\n{word}\n\n" for word in ("the", "dawn", "star") for _ in range(9)]
    ours = with_template(train_tokenizer(texts, 300), "chatml")
    pair = ours.encode("\n\n")
    assert len(pair) == 1
    chat = ChatEncoder(ours).encode(say("a", "\n\nthe"))
    place = chat.ids.index(pair[0])
    assert not chat.loss_mask[place]
    assert chat.loss_mask[place + 1]
    assert chat.torn == 1
    assert ChatEncoder(ours).encode(say("a", "the")).torn == 0


def test_chat_labels_text_is_counted_in_bytes(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    assert ChatEncoder(ours).encode(say("a", "é日", "b", "c")).text_bytes == 2 + 3 + 1


def test_chat_labels_masked_answers_are_not_learned(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    messages = say("a", "one", "b", "two")
    assert learned_text(ours, messages, masked=frozenset({1})) == ["two<|im_end|>"]
    whole = learned_text(ours, messages, train_on="all")
    assert whole == [ours.apply_chat_template(messages)]
    first, last = learned_text(ours, messages, train_on="all", masked=frozenset({1}))
    assert first.endswith("assistant\n")
    assert last.startswith("\n<|im_start|>user")


def test_chat_labels_special_tokens_in_messages_are_text(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    end = ours.special_tokens["<|im_end|>"]
    chat = ChatEncoder(ours).encode(say("<|im_end|>", "a<|im_end|>b"))
    assert [own for token, own in zip(chat.ids, chat.loss_mask, strict=True) if token == end] == [
        False,
        True,
    ]


def test_chat_labels_template_refusing_conversation_raises_input_error(
    tokenizer: Tokenizer,
) -> None:
    ours = tokenizer.extended([], "{{- raise_exception('not today') -}}")
    with pytest.raises(InputError, match="not today"):
        ChatEncoder(ours).encode(say("a", "b"))


# Tool calls and reasoning


def family(tokenizer: Tokenizer, name: str, *, blocks: bool = False) -> Tokenizer:
    """Return the tokenizer with the template of a model family."""
    template = (WITH_BLOCKS if blocks else WITHOUT_BLOCKS)[name]
    return tokenizer.extended(SPECIAL_TOKENS, template)


def with_call(city: str = "Rome", content: str = "", **entries: Any) -> list[dict[str, Any]]:
    """Return a conversation with a question, a call with its result, and the answer."""
    call = {"type": "function", "function": {"name": "find", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": content, "tool_calls": [call], **entries},
        {"role": "tool", "content": "here"},
        {"role": "assistant", "content": "Here."},
    ]


@pytest.mark.parametrize(
    "name, call, answer",
    [
        (
            "qwen3",
            '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nHere.<|im_end|>",
        ),
        (
            "llama3.1",
            '{"name": "find", "parameters": {"city": "Rome"}}<|eot_id|>',
            "Here.<|eot_id|>",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "find", "arguments": {"city": "Rome"}, "id": "000000000"}]'
            "<|endoftext|>",
            "Here.<|endoftext|>",
        ),
        (
            "gpt-oss",
            ' to=functions.find<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
            "<|channel|>final<|message|>Here.<|return|>",
        ),
        (
            "deepseek-r1-old",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
            '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><|endoftext|>',
            "Here.<|endoftext|>",
        ),
    ],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_chat_labels_of_tool_calls_cover_call_and_answer_without_result(
    tokenizer: Tokenizer, name: str, call: str, answer: str, blocks: bool
) -> None:
    ours = family(tokenizer, name, blocks=blocks)
    assert learned_text(ours, with_call()) == [call, answer]
    assert learned_text(ours, with_call(), train_on="last") == [answer]
    assert learned_text(ours, with_call(), masked=frozenset({3})) == [call]


def test_chat_labels_of_calls_written_as_text_cover_that_text(
    tokenizer: Tokenizer,
) -> None:
    ours = family(tokenizer, "smollm3")
    chat = ChatEncoder(ours).encode(with_call(), options={"tools": _TOOLS})
    assert chat.lost == ()
    assert learned_text(ours, with_call()) == [
        '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
        "Here.<|im_end|>",
    ]


@pytest.mark.parametrize(
    "name, key, expected",
    [
        ("qwen3", "reasoning_content", "two<|im_end|>"),
        ("qwen3", "thinking", "two<|im_end|>"),
        ("gpt-oss", "reasoning", "<|start|>assistant<|channel|>final<|message|>two<|return|>"),
        ("hermes", "reasoning_content", "two<|im_end|>"),
        ("deepseek-r1", "thinking", "two<|endoftext|>"),
    ],
)
def test_chat_labels_train_on_answers_excludes_reasoning_of_any_key(
    tokenizer: Tokenizer, name: str, key: str, expected: str
) -> None:
    ours = family(tokenizer, name)
    messages = say("a", "two")
    messages[1][key] = "I think so"
    chat = ChatEncoder(ours).encode(messages)
    assert chat.lost == ()
    [whole] = learned_text(ours, messages)
    assert "I think so" in whole
    assert whole.endswith(expected)
    assert learned_text(ours, messages, train_on="answers") == [expected]


def test_chat_labels_reasoning_is_lost_if_prompt_closes_it(tokenizer: Tokenizer) -> None:
    template = WITHOUT_BLOCKS["deepseek-r1"].replace("<think>\\n'", "<think>\\n\\n</think>\\n'")
    ours = tokenizer.extended(SPECIAL_TOKENS, template)
    messages = say("a", "<think>\nI think so\n</think>\n\ntwo")
    assert [reason for reason, _ in ChatEncoder(ours).encode(messages).lost] == ["lost_thoughts"]
    assert learned_text(ours, messages) == ["\n\ntwo<|endoftext|>"]


def test_chat_labels_results_within_assistant_turn_are_not_learned(tokenizer: Tokenizer) -> None:
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role if m.role != 'tool' else '' -}}"
        "{%- if m.tool_calls -%}{{- m.tool_calls[0].function.name ~ ' gave ' -}}"
        "{{- messages[loop.index].content ~ ', so ' -}}{%- endif -%}"
        "{{- m.content ~ '<|im_end|>' if m.role != 'tool' else '' -}}{%- endfor -%}"
        "{{- '<|im_start|>assistant' if add_generation_prompt else '' -}}"
    )
    ours = tokenizer.extended(SPECIAL_TOKENS, template)
    [call, answer] = with_call(content="yes")[1:3]
    learned = learned_text(ours, [*say("a"), call, {**answer, "content": "the result"}, *say("b")])
    assert "the result" not in "".join(learned)
    assert learned[0].startswith("find gave")


def test_chat_labels_train_on_answers_excludes_empty_reasoning_of_template(
    tokenizer: Tokenizer,
) -> None:
    found = learned_text(
        family(tokenizer, "qwen3"), say("a", "one", "b", "two"), train_on="answers"
    )
    assert found == ["one<|im_end|>", "two<|im_end|>"]


def test_chat_labels_start_after_prompt_that_opens_reasoning(tokenizer: Tokenizer) -> None:
    ours = family(tokenizer, "deepseek-r1")
    messages = say("a", "one", "b", "<think>\nI think so\n</think>\n\ntwo")
    assert learned_text(ours, messages) == [
        "\n</think>\n\none<|endoftext|>",
        "I think so\n</think>\n\ntwo<|endoftext|>",
    ]
    chat = ChatEncoder(ours).encode(messages[2:])
    prompt = ours.encode_chat(messages[2:3], add_generation_prompt=True)
    assert chat.ids[: len(prompt)] == prompt
    assert chat.loss_mask[len(prompt) - 1 :][:2] == [False, True]
    assert chat.lost == ()


_TOOLS = [{"type": "function", "function": {"name": "find", "description": "Find it"}}]


@pytest.mark.parametrize(
    "name, messages, options, expected",
    [
        ("chatml", with_call(), {"tools": _TOOLS}, {"lost_calls", "lost_tools"}),
        ("llama3.1", with_call(content="Let me see"), {}, {"lost_text"}),
        ("deepseek-r1", with_call(), {"tools": _TOOLS}, {"lost_tools"}),
        ("deepseek-r1-old", say("a", "<think>hm</think>\n\none"), {}, {"lost_thoughts"}),
        ("qwen3", say("a", "<think>hm</think>\n\none", "b", "two"), {}, {"lost_thoughts"}),
        # The lost text also occurs elsewhere.
        ("dropping", say("be kind", "kind", system="kind"), {}, {"lost_system"}),
        ("qwen3", with_call(), {"tools": _TOOLS}, set()),
        ("gemma3", say("a", " one\n", system=" s"), {}, set()),
    ],
)
def test_chat_labels_texts_omitted_by_template_are_reported_lost(
    tokenizer: Tokenizer,
    name: str,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    expected: set[str],
) -> None:
    if name == "chatml":
        ours = with_template(tokenizer, name)
    elif name == "dropping":
        dropping = BLOCKS.replace("in messages -", "in messages if message.role != 'system' -")
        ours = with_chatml_like(tokenizer, dropping)
    else:
        ours = family(tokenizer, name)
    chat = ChatEncoder(ours).encode(messages, options=options)
    assert {reason for reason, _ in chat.lost} == expected


def test_chat_labels_lost_texts_are_found_despite_marker_layout_changes(
    tokenizer: Tokenizer,
) -> None:
    template = WITHOUT_BLOCKS["hermes"].replace(
        "{%- for message",
        "{%- for message in messages if message.content != 'skip' -%}{%- endfor -%}{%- for message",
        1,
    )
    ours = tokenizer.extended(
        SPECIAL_TOKENS,
        template.replace(
            "message.content ~ '<|im_end|>' -}}\n    {%- endif",
            "(message.content if message.content | length < 6 else 'long') ~ '<|im_end|>' -}}\n"
            "    {%- endif",
        ),
    )
    chat = ChatEncoder(ours).encode(say("short", "an answer"))
    assert chat.lost == ()
    chat = ChatEncoder(ours).encode(say("a long question", "an answer"))
    assert [reason for reason, _ in chat.lost] == ["lost_text"]


# Mismatched template and tokenizer


def _file(tmp_path: Any, text: str) -> str:
    path = tmp_path / "mine.jinja"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "template, advice",
    [
        (lambda _: "chatml", "extend DIR --chat-template chatml --out NEW"),
        (
            lambda folder: _file(folder, CHAT_TEMPLATES["chatml"]),
            "extend DIR --add '<|im_start|>' '<|im_end|>' --chat-template",
        ),
    ],
)
def test_chat_labels_missing_tokens_are_named_with_extend_command(
    tokenizer: Tokenizer, tmp_path: Any, template: Callable[[Any], str], advice: str
) -> None:
    with pytest.raises(TokenizerError) as caught:
        with_chat_template(tokenizer, template(tmp_path))
    assert "writes <|im_start|> <|im_end|>, which" in str(caught.value)
    assert advice in str(caught.value)


def test_with_chat_template_plain_text_template_needs_no_tokens(tokenizer: Tokenizer) -> None:
    ours = with_chat_template(tokenizer, "alpaca")
    assert ours.chat_template == CHAT_TEMPLATES["alpaca"]
    assert ours.fingerprint == tokenizer.fingerprint


def test_with_chat_template_defaults_to_own_and_names_missing_one(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    assert with_chat_template(ours, None) is ours
    with pytest.raises(TokenizerError, match="does not have a chat template: set"):
        with_chat_template(tokenizer, None)
    with pytest.raises(InputError, match="chat template chatlm is neither"):
        with_chat_template(tokenizer, "chatlm")
