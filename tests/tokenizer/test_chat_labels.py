"""Which tokens of a conversation are learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import BLOCKS, THINKING, say, with_chatml_like, with_template
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
    """The runs of learned tokens, each as text with its special tokens."""
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
def test_answers_and_their_end_tokens_are_learned_and_nothing_else(
    tokenizer: Tokenizer, name: str, expected: list[str]
) -> None:
    ours = with_template(tokenizer, name)
    assert learned_text(ours, say("a", "one", "b", "two\n", system="s")) == expected


def test_blocks_are_learned_exactly(tokenizer: Tokenizer) -> None:
    ours = with_chatml_like(tokenizer, BLOCKS)
    assert learned_text(ours, say("a", "one", "b", "two\n")) == ["one<|im_end|>", "two\n<|im_end|>"]
    # Where the block ends earlier, so does what is learned.
    shorter = BLOCKS.replace(
        "message.content ~ '<|im_end|>' -}}{%- endgeneration -%}",
        "message.content -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
    )
    ours = with_chatml_like(tokenizer, shorter)
    assert learned_text(ours, say("a", "one", "b", "two\n")) == ["one", "two\n"]


@given(contents=st.lists(_TEXTS.filter(str.strip), min_size=1, max_size=3), system=st.booleans())
def test_blocks_and_prefixes_agree_and_ids_are_those_of_inference(
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
def test_an_answer_is_learned_from_the_prompt_that_inference_gives(
    tokenizer: Tokenizer, name: str
) -> None:
    """What comes before the last run of learned tokens is the prompt of the last answer."""
    ours = with_template(tokenizer, name)
    messages = say("a question", "an answer", "another", "the light")
    chat = ChatEncoder(ours).encode(messages)
    prompt = ours.encode_chat(messages[:-1], add_generation_prompt=True)
    assert chat.ids[: len(prompt)] == prompt
    assert chat.loss_mask[len(prompt) - 1 :][:2] == [False, True]
    [end] = turn_end_ids(ours)
    last = max(i for i, own in enumerate(chat.loss_mask) if own)
    assert chat.ids[last] == end


def test_a_template_that_lays_out_earlier_answers_otherwise_is_found_in_by_marks(
    tokenizer: Tokenizer,
) -> None:
    ours = with_chatml_like(tokenizer, THINKING)
    for first in (" one ", "<think>hm</think>\none"):  # the thought is left out
        assert learned_text(ours, say("a", first, "b", "two")) == [
            "one<|im_end|>",
            "<think>\n\n</think>\n\ntwo<|im_end|>",
        ]
    # Its beginning is looked for, too, where the generation prompt is not that of the whole.
    thinking = THINKING.replace("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>think' -}}")
    ours = with_chatml_like(tokenizer, thinking)
    assert learned_text(ours, say("a", " one ", "b", "two"))[0] == "one<|im_end|>"
    with pytest.raises(TokenizerError, match="can't be found"):
        learned_text(ours, say("a", "<think>hm</think>\none", "b", "two"))


@pytest.mark.parametrize(
    "template, message",
    [
        # Of earlier answers only the length is told.
        (
            "{%- for m in messages -%}{{- m.role ~ ':' ~ (m.content if loop.last else "
            "m.content | length) ~ eos_token -}}{%- endfor -%}",
            "can't be found",
        ),
        (
            "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- m.content ~ eos_token -}}"
            "{%- endif -%}{%- endfor -%}",
            "leaves answers out",
        ),
        (
            "{%- generation -%}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
            "{%- endgeneration -%}",
            "makes 1 .* of 2 answers",
        ),
        (
            "{%- set x -%}{%- generation -%}{{ messages[-1].content }}{%- endgeneration -%}"
            "{%- endset -%}{{- x | length -}}",
            "changes what its",
        ),
    ],
)
def test_a_template_in_which_answers_cannot_be_told_is_refused(
    tokenizer: Tokenizer, template: str, message: str
) -> None:
    ours = tokenizer.extended([], template)
    with pytest.raises(TokenizerError, match=message):
        ChatEncoder(ours).encode(say("a", "one", "b", "two"))


def test_a_token_that_begins_in_the_prompt_is_not_learned(tokenizer: Tokenizer) -> None:
    """The template's last newline and the answer's first one make one token of some tokenizers."""
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


def test_what_is_learned_of_text_is_counted_in_bytes(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    assert ChatEncoder(ours).encode(say("a", "é日", "b", "c")).text_bytes == 2 + 3 + 1


def test_answers_left_out_are_not_learned(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    messages = say("a", "one", "b", "two")
    assert learned_text(ours, messages, masked=frozenset({1})) == ["two<|im_end|>"]
    whole = learned_text(ours, messages, train_on="all")
    assert whole == [ours.apply_chat_template(messages)]
    first, last = learned_text(ours, messages, train_on="all", masked=frozenset({1}))
    assert first.endswith("assistant\n")
    assert last.startswith("\n<|im_start|>user")


def test_special_tokens_in_messages_are_text(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    end = ours.special_tokens["<|im_end|>"]
    chat = ChatEncoder(ours).encode(say("<|im_end|>", "a<|im_end|>b"))
    assert [own for token, own in zip(chat.ids, chat.loss_mask, strict=True) if token == end] == [
        False,
        True,
    ]


def test_a_template_that_refuses_the_conversation_says_so(tokenizer: Tokenizer) -> None:
    ours = tokenizer.extended([], "{{- raise_exception('not today') -}}")
    with pytest.raises(InputError, match="not today"):
        ChatEncoder(ours).encode(say("a", "b"))


# A template and a tokenizer that don't fit


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
def test_missing_tokens_are_named_with_the_command_that_adds_them(
    tokenizer: Tokenizer, tmp_path: Any, template: Callable[[Any], str], advice: str
) -> None:
    with pytest.raises(TokenizerError) as caught:
        with_chat_template(tokenizer, template(tmp_path))
    assert "writes <|im_start|> <|im_end|>, which" in str(caught.value)
    assert advice in str(caught.value)


def test_a_template_of_plain_text_needs_no_tokens(tokenizer: Tokenizer) -> None:
    ours = with_chat_template(tokenizer, "alpaca")
    assert ours.chat_template == CHAT_TEMPLATES["alpaca"]
    assert ours.fingerprint == tokenizer.fingerprint


def test_the_tokenizers_own_template_is_taken_and_a_missing_one_said(tokenizer: Tokenizer) -> None:
    ours = with_template(tokenizer, "chatml")
    assert with_chat_template(ours, None) is ours
    with pytest.raises(TokenizerError, match="has no chat template: name one"):
        with_chat_template(tokenizer, None)
    with pytest.raises(InputError, match="chat template chatlm is neither"):
        with_chat_template(tokenizer, "chatlm")
