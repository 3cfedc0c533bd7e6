"""Conversations as tokens with a loss mask: the assistant's tokens are the labels of fine-tuning.

A conversation is encoded as at inference: each special token of the template by its id, and each
text between two special tokens in one call. Which characters of the rendered text are labels is
determined first:

    with {% generation %} blocks       The content of the blocks.
    without blocks, for each answer    The text from `start` to `end`:
                                       - `start`: the end of the prompt that the model would get at
                                         inference (the messages before, with the generation prompt)
                                       - `end`: the end of the conversation up to this answer,
                                         without the white space after its end token

Without blocks, the prompt, and the conversation up to the answer, are rendered on their own; each
must be a prefix of the whole text. Some templates render an answer differently if further messages
follow it. Then the answer's content is located in the whole text instead, by rendering it with
marks around it.

A token is a label if its first character is a label. A token that begins in the prompt and ends in
the answer (because the template's last and the answer's first characters are one token) is not a
label: at inference the prompt ends before this token, so the model can't write it.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import tokenizers

from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer.chat_template import (
    find_template,
    flagged_pieces,
    free_characters,
    plain_messages,
    protected,
    render,
    render_with_beginnings,
)
from firstlight.tokenizer.tokenizer import Tokenizer

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_ADVICE = (
    "put {% generation %} and {% endgeneration %} around what the assistant says in the template, "
    "or learn all tokens (train_on: all)"
)


@dataclass(frozen=True)
class LabelledChat:
    """A conversation as tokens.

    Attributes:
        ids: token ids, the same as from `Tokenizer.encode_chat`.
        loss_mask: True for each id that is a label.
        text_bytes: UTF-8 bytes of the labels' text, without special tokens.
        torn: number of answers that begin inside a token which begins in the prompt.
    """

    ids: list[int]
    loss_mask: list[bool]
    text_bytes: int
    torn: int


class ChatEncoder:
    """Turns conversations into ids with a loss mask.

    Args:
        tokenizer: a tokenizer with a chat template.

    Raises:
        TokenizerError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise TokenizerError("the tokenizer has no chat template")
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template
        self._variables = tokenizer.named_tokens
        self._special = tokenizer.special_tokens
        # Without post-processor, because it trims offsets: those of " a" would be those of "a".
        state = json.loads(tokenizer.backend.to_str())
        self._plain = Tokenizer(
            tokenizers.Tokenizer.from_str(json.dumps({**state, "post_processor": None}))
        )
        self._has_blocks = _GENERATION_BLOCK.search(self._template) is not None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        masked: frozenset[int] = frozenset(),
        everything: bool = False,
    ) -> LabelledChat:
        """A conversation as tokens.

        Args:
            messages: objects with `role` and `content`, both texts.
            masked: indices of the assistant's messages that are outside the loss.
            everything: all tokens are labels, except those of the masked messages.

        Raises:
            InputError: the messages are not such objects, or the template refuses them.
            TokenizerError: the template fails, or the assistant's text can't be located in the
                rendered text.
        """
        plain = plain_messages(messages)
        marked, pattern = protected(plain, list(self._special), self._template)
        answers = [i for i, message in enumerate(plain) if message["role"] == "assistant"]
        is_partly_learned = not everything or bool(masked)
        # The prompt of each answer, and the conversation up to it, are rendered in one call with
        # the whole conversation, which saves most of the time for a template in a child process.
        beginnings: list[tuple[int, bool]] = []
        if is_partly_learned and not self._has_blocks:
            beginnings = [(i, True) for i in answers] + [(i + 1, False) for i in answers]
        text, lengths = render_with_beginnings(self._template, marked, self._variables, beginnings)
        flags = bytearray([everything]) * len(text)
        if is_partly_learned:
            spans = self._spans(marked, pattern, text, answers, lengths=lengths)
            for index, (start, end) in zip(answers, spans, strict=True):
                flags[start:end] = bytes([index not in masked]) * (end - start)
        return self._encoded(text, flags, pattern)

    # The labels, as characters of the rendered text

    def _spans(
        self,
        messages: list[dict[str, Any]],
        pattern: re.Pattern[str],
        text: str,
        answers: list[int],
        lengths: list[int | None],
    ) -> list[tuple[int, int]]:
        """The characters of each answer that are labels, as (start, end) in `text`, in order.

        Args:
            messages: the marked messages (see `chat_template.protected`).
            pattern: the pattern for marks and special tokens.
            text: the rendered text of `messages`.
            answers: indices of the assistant's messages.
            lengths: for a template without blocks, the number of characters at the beginning of
                `text` that are the prompt of each answer, and then of those that are the
                conversation up to it; None where `text` does not begin with it.
        """
        free = free_characters(messages, self._template)
        marks = next(free), next(free)
        if self._has_blocks:
            spans = self._blocks(messages, text, marks)
            if len(spans) != len(answers):
                raise TokenizerError(
                    f"the chat template makes {len(spans)} {{% generation %}} blocks of "
                    f"{len(answers)} answers: it must make one of each"
                )
            return spans
        count = len(answers)
        spans = [
            self._span(messages, pattern, text, i, marks=marks, prompt=prompt, whole=whole)
            for i, prompt, whole in zip(answers, lengths[:count], lengths[count:], strict=True)
        ]
        before = [0, *(end for _, end in spans[:-1])]
        if any(
            start < earlier or start >= end
            for earlier, (start, end) in zip(before, spans, strict=True)
        ):
            raise TokenizerError(f"the chat template leaves answers out or mixes them: {_ADVICE}")
        return spans

    def _blocks(
        self, messages: list[dict[str, Any]], text: str, marks: tuple[str, str]
    ) -> list[tuple[int, int]]:
        """The spans in `text` of the template's `{% generation %}` blocks, located by `marks`
        before and after each block."""
        marked = render(self._template, messages, self._variables, generation_marks=marks)
        parts = re.split(f"([{''.join(marks)}])", marked)
        plain, signs = "".join(parts[::2]), parts[1::2]
        if plain != text or signs != [*marks] * (len(signs) // 2):
            raise TokenizerError("the chat template changes what its {% generation %} blocks hold")
        positions, position = [], 0
        for part in parts[:-1:2]:
            position += len(part)
            positions.append(position)
        return list(zip(positions[::2], positions[1::2], strict=True))

    def _span(
        self,
        messages: list[dict[str, Any]],
        pattern: re.Pattern[str],
        text: str,
        index: int,
        marks: tuple[str, str],
        *,
        prompt: int | None,
        whole: int | None,
    ) -> tuple[int, int]:
        """The span in `text` of the answer `messages[index]` with its end token, for a template
        without blocks. For `prompt` and `whole`, see `lengths` of `_spans`."""
        if prompt is None or whole is None:
            # The part is not a prefix of the whole text: for example, some templates leave out the
            # thoughts of earlier answers.
            marks = ("" if prompt is not None else marks[0], marks[1])
            start, end = self._marked_content(messages, text, index, marks)
            end = self._with_end_token(text, end, pattern)
            return (start if prompt is None else prompt), end
        end = whole
        specials = [m for m in pattern.finditer(text, prompt, whole) if m["special"]]
        if specials and not text[specials[-1].end() : whole].strip():
            end = specials[-1].end()
        elif (eos := self._tokenizer.eos_token) and text.startswith(eos, whole):
            end += len(eos)  # the template ends a turn only where the next one begins
        return prompt, end

    def _marked_content(
        self, messages: list[dict[str, Any]], text: str, index: int, marks: tuple[str, str]
    ) -> tuple[int, int]:
        """The span in `text` of a message's content, without white space at its ends.

        Args:
            messages: the marked messages.
            text: the rendered text of `messages`.
            index: index of the message.
            marks: characters to put before and after the content. If the first is "", the start of
                the span is not located, and is 0.
        """
        before, after = marks
        content = messages[index]["content"]
        core = content.strip()
        changed = content.replace(core, f"{before}{core}{after}", 1) if core else ""
        others = [
            *messages[:index],
            {**messages[index], "content": changed},
            *messages[index + 1 :],
        ]
        found = render(self._template, others, self._variables)
        unmarked = found.replace(before, "").replace(after, "")
        if unmarked != text or any(mark and found.count(mark) != 1 for mark in marks):
            raise TokenizerError(
                "what the assistant says can't be found in what the chat template makes of the "
                f"conversation: {_ADVICE}"
            )
        return found.index(before), found.index(after) - len(before)

    def _with_end_token(self, text: str, end: int, pattern: re.Pattern[str]) -> int:
        """The end of the special token that follows `end`, after white space at most; `end` if
        there is none."""
        match = pattern.search(text, end)
        if match is None or not match["special"] or text[end : match.start()].strip():
            return end
        return match.end()

    # As tokens

    def _encoded(self, text: str, flags: bytearray, pattern: re.Pattern[str]) -> LabelledChat:
        ids: list[int] = []
        loss_mask: list[bool] = []
        text_bytes = torn = 0
        for piece, own, is_special in flagged_pieces(text, flags, pattern):
            if is_special:
                ids.append(self._special[piece])
                loss_mask.append(bool(own[0]))
                continue
            encoding = self._plain.encoding(piece)
            ids += encoding.ids
            for start, end in encoding.offsets:
                first = bool(own[min(start, len(own) - 1)])
                loss_mask.append(first)
                torn += not first and own.find(1, start, end) >= 0
            text_bytes += len("".join(compress(piece, own)).encode("utf-8"))
        return LabelledChat(ids, loss_mask, text_bytes, torn)


#: Form of special tokens in all known templates. It is searched only in the output of a template
#: that the user names: some models were trained on such a text as plain characters, and their
#: tokenizers come with their template.
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]{1,64}\|>|<(?:start|end)_of_\w{1,32}>")

_CONVERSATION = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def with_chat_template(
    tokenizer: Tokenizer, template: str | None, folder: str = "DIR"
) -> Tokenizer:
    """The tokenizer with the given chat template, or the tokenizer itself if none is given.

    Args:
        tokenizer: the tokenizer.
        template: name of a built-in template, or path of a .jinja file; None is the tokenizer's
            own template.
        folder: the tokenizer's folder, for messages.

    Raises:
        InputError: there is no such template.
        TokenizerError: the template does not compile, or writes special tokens that the tokenizer
            lacks; or no template is given and the tokenizer has none.
    """
    if template is None:
        if tokenizer.chat_template is None:
            raise TokenizerError(
                f"the tokenizer of {folder} has no chat template: name one with data.template "
                "(prepare: --template): chatml, llama3, alpaca or a .jinja file; alpaca needs no "
                "tokens of its own"
            )
        _try_out(tokenizer)
        return tokenizer
    text, required = find_template(template)
    fitted = tokenizer.extended([], text)
    written = _try_out(fitted)
    missing = [
        token
        for token in dict.fromkeys([*required, *_CONTROL_TOKEN.findall(written)])
        if token not in tokenizer.special_tokens
    ]
    if missing:
        source = shlex.quote(folder)
        # `tokenizer extend` adds the special tokens of a built-in template by itself.
        named = "" if required else f" --add {' '.join(map(shlex.quote, missing))}"
        raise TokenizerError(
            f"the chat template {template} writes {' '.join(missing)}, which the tokenizer of "
            f"{folder} does not have as special tokens: add them with `firstlight tokenizer extend "
            f"{source}{named} --chat-template {shlex.quote(template)} --out NEW`, and take "
            "data.tokenizer NEW (prepare: --tokenizer NEW); the model's embedding grows by itself"
        )
    if "eos_token" in text and tokenizer.eos_token is None:
        raise TokenizerError(
            f"the chat template {template} ends turns with eos_token, which the tokenizer of "
            f"{folder} does not name: set it in tokenizer_config.json"
        )
    return fitted


def _try_out(tokenizer: Tokenizer) -> str:
    """The text of a short conversation; "" if the template refuses it, because it is for other
    conversations.

    Raises:
        TokenizerError: the template fails.
    """
    try:
        return tokenizer.apply_chat_template(_CONVERSATION)
    except InputError:
        return ""


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id of the special token that ends an assistant's turn: the first special token that the
    tokenizer's chat template writes after the assistant's text. Empty if there is no template, or
    if turns end in plain text.

    Generation must stop at this token, even if it is not among the model's eos tokens. For example,
    `<|im_end|>` of a template that was added later is not, and the model would write further turns.
    """
    if tokenizer.chat_template is None:
        return ()
    question, again = {"role": "user", "content": "1"}, {"role": "user", "content": "2"}
    for more in ([], [again]):  # some templates end a turn only where another one begins
        try:
            # Two answers without a common character: the common end of both is after the answer.
            one, other = (
                tokenizer.encode_chat([question, {"role": "assistant", "content": text}, *more])
                for text in ("3", "4")
            )
        except (InputError, TokenizerError):
            continue
        if one == other:  # the template leaves out the last answer
            continue
        pairs = zip(reversed(one), reversed(other), strict=False)
        same = [token_id for token_id, _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)]
        after = same[::-1]
        for place, token_id in enumerate(after):
            if token_id in tokenizer.special_token_ids:
                # If text such as "USER:" comes first, it is the text that ends the turn.
                return () if tokenizer.decode(after[:place]).strip() else (token_id,)
    return ()


def require_end(ids: list[int], loss_mask: list[bool], tokenizer: Tokenizer) -> str | None:
    """A warning if the last label of an example is not a special token; otherwise None.

    Args:
        ids: the example's token ids.
        loss_mask: True for each id that is a label.
        tokenizer: the tokenizer.
    """
    last = next((i for i, own in zip(ids[::-1], loss_mask[::-1], strict=True) if own), None)
    if last is None or last in tokenizer.special_token_ids:
        return None
    return (
        "the chat template writes no special token after what the assistant says: the model does "
        "not learn to end its answers with one"
    )
