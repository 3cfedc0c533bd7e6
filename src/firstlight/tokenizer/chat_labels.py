"""Encode conversations as tokens with a loss mask, which selects the assistant's tokens as labels
for fine-tuning.

A conversation is encoded in the same way as during inference: special tokens written by the
template are converted to their ids, and each string between two special tokens is encoded in one
call. Before encoding, each character of the rendered text is classified as a label or not. The
following characters are labels:

    with {% generation %} blocks       The content of the blocks.
    without blocks, for each answer    The characters from `start` to `end`:
                                       - `start`: the end of the prompt that the model would get
                                         during inference (the earlier messages and the generation
                                         prompt)
                                       - `end`: the end of the conversation up to this answer,
                                         without the whitespace after its end token

Without blocks, the prompt and the conversation up to the answer are rendered separately, and both
results should be prefixes of the full text. However, some templates render an answer differently if
more messages follow it. In that case, the answer is located in the full text by the positions of
its strings (content, reasoning, names and arguments of calls). The answer starts after the
generation prompt, which is found by searching the text before the first of these strings. To find
where the answer ends, the conversation up to the answer is rendered, and the part after the last of
these strings is compared with the full text.

The positions of all strings are found by rendering the conversation again with marks around each
string. If the marks of a string are missing from the result, the template has omitted this string.
Such a string is called lost.

Some templates end the generation prompt with `<think>`, but do not render the reasoning of the
answers. The model must nevertheless learn to continue after this tag, so `<think>`, the reasoning
and `</think>` are inserted before the answer.

A token is a label if its first character is a label. If the last characters of the prompt and the
first characters of the answer form a single token, this token is not a label: during inference, its
first characters are already part of the prompt, so the model can't generate it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any, Literal

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
from firstlight.tokenizer.messages import LOST, THOUGHTS, fit_messages, split_thoughts
from firstlight.tokenizer.tokenizer import Tokenizer

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_ADVICE = (
    "put {% generation %} and {% endgeneration %} around the assistant's messages in the "
    "template, or train on all tokens (train_on: all)"
)
_MIXED = f"the chat template omits or reorders answers: {_ADVICE}"
_NOT_FOUND = (
    f"the assistant's messages can't be found in the text that the chat template renders: {_ADVICE}"
)


#: Tokens to use as labels: "assistant" for all messages of the assistant, "last" for only the
#: assistant's last message, "answers" for all messages of the assistant without the reasoning, and
#: "all" for all tokens.
TrainOn = Literal["assistant", "last", "answers", "all"]


@dataclass(frozen=True)
class LabelledChat:
    """A conversation encoded as tokens, with a loss mask.

    Attributes:
        ids: token ids, identical to the result of `Tokenizer.encode_chat` except for any inserted
            reasoning.
        loss_mask: True for each id that is a label.
        text_bytes: size of the text of all labels in UTF-8 bytes, without special tokens.
        torn: number of answers that begin in the middle of a token. The first characters of such a
            token belong to the prompt.
        lost: strings that the template omits. Each entry consists of a key of `LOST` and a message.
    """

    ids: list[int]
    loss_mask: list[bool]
    text_bytes: int
    torn: int
    lost: tuple[tuple[str, str], ...] = ()


_REASONS = {"system": "lost_system", "developer": "lost_system", "tool": "lost_results"}

#: Tag that opens the reasoning in a generation prompt.
_OPENED = re.compile(r"<([\w:]*think[\w:]*)>")
#: End of the reasoning: whitespace and a tag or special token.
_CLOSED = re.compile(r"\s*(?:</[^<>\s]+>|<\|[^<>|\s]+\|>|\[/\w+\])?\s*")
_NO_THOUGHTS = re.compile(r"\s*<([\w:]*think[\w:]*)>\s*</\1>\s*")


@dataclass
class _Text:
    """A string in a conversation.

    Attributes:
        message: index of the message that contains the string; -1 for the tools.
        reason: key of `LOST` that is reported if the template omits the string.
        text: the string without surrounding whitespace.
        marks: the two characters that surround the string in the marked messages.
        place: (start, end) of the string in the rendered text, or None if the template omits it.
    """

    message: int
    reason: str
    text: str
    marks: tuple[str, str]
    place: tuple[int, int] | None = None


@dataclass
class _Marker:
    """Adds marks around the strings of a conversation.

    Attributes:
        free: characters that can still be used as marks.
        texts: the strings to which marks have been added so far.
    """

    free: Iterator[str]
    texts: list[_Text] = field(default_factory=list)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a copy of the messages with marks around their strings."""
        marked = []
        for number, message in enumerate(messages):
            copy = dict(message)
            content, reason = message["content"], _REASONS.get(message["role"], "lost_text")
            thoughts, answer = "", content
            if message["role"] == "assistant":
                thoughts, answer = split_thoughts(message)
            if thoughts.strip():
                changed = self._marked(thoughts, number, "lost_thoughts")
                own = {key for key in THOUGHTS if message.get(key) == thoughts}
                copy |= dict.fromkeys(own, changed)
                if not own:
                    content = content.replace(thoughts, changed, 1)
            if answer and answer.strip():
                end = content.rindex(answer)
                content = content[:end] + self._marked(answer, number, reason)
            copy["content"] = content
            if "tool_calls" in message:
                copy["tool_calls"] = [
                    {**call, "function": self._values(call["function"], number, "lost_calls")}
                    for call in message["tool_calls"]
                ]
            marked.append(copy)
        return marked

    def tools(self, tools: Any) -> Any:
        """Return a copy of the tools with marks around their names and descriptions."""
        marked = []
        for tool in tools:
            own = {k: v for k, v in tool["function"].items() if k in ("name", "description")}
            function = {**tool["function"], **self._values(own, -1, "lost_tools")}
            marked.append({**tool, "function": function})
        return marked

    def _values(self, value: Any, message: int, reason: str) -> Any:
        """Return a copy of JSON data with marks around its strings."""
        if isinstance(value, str):
            return self._marked(value, message, reason)
        if isinstance(value, list):
            return [self._values(item, message, reason) for item in value]
        if isinstance(value, dict):
            return {key: self._values(item, message, reason) for key, item in value.items()}
        return value

    def _marked(self, text: str, message: int, reason: str) -> str:
        core = text.strip()
        if not core:
            return text
        before, after = next(self.free), next(self.free)
        self.texts.append(_Text(message, reason, core, (before, after)))
        return text.replace(core, f"{before}{core}{after}", 1)

    def locate(self, text: str, marked: str | None) -> None:
        """Set the positions of all strings in the rendered text.

        Args:
            text: the rendered text.
            marked: the text rendered from the marked messages, or None if the template rejects
                them. If it differs from `text` in more than the marks, `text` is searched for the
                strings in order.
        """
        marks = {mark for one in self.texts for mark in one.marks}
        places: dict[str, int] = {}
        if marked is not None and marks:
            parts = re.split(f"([{re.escape(''.join(marks))}])", marked)
            if "".join(parts[::2]) == text:
                position = 0
                for part, mark in zip(parts[::2], parts[1::2], strict=False):
                    position += len(part)
                    places.setdefault(mark, position)
                for one in self.texts:
                    start, end = (places.get(mark) for mark in one.marks)
                    one.place = None if start is None or end is None else (start, end)
                return
        position = 0
        for one in self.texts:
            spellings = (one.text, json.dumps(one.text, ensure_ascii=False)[1:-1])
            found = [(text.find(s, begin), len(s)) for begin in (position, 0) for s in spellings]
            start, length = next(((at, n) for at, n in found if at >= 0), (-1, 0))
            if start >= 0:
                one.place = (start, start + length)
                position = max(position, start + length) if one.message >= 0 else position


@dataclass
class _Span:
    """Position of the labels of an answer.

    Attributes:
        message: index of the message that contains the answer.
        start, end: range of characters in the rendered text that are labels.
        opened: text that the generation prompt contains before `start` but the rendered text does
            not, such as "<think>".
    """

    message: int
    start: int
    end: int
    opened: str = ""


@dataclass
class _Rendered:
    """A rendered conversation.

    Attributes:
        messages, variables: input to the template.
        probe: the same input with marks around all strings.
        texts: strings of the conversation, with their positions in `text`.
        pattern: pattern that matches special tokens and the marks around their names.
        text: the rendered text.
    """

    messages: list[dict[str, Any]]
    variables: Mapping[str, Any]
    probe: tuple[list[dict[str, Any]], Mapping[str, Any]]
    texts: list[_Text]
    pattern: re.Pattern[str]
    text: str

    def alone(self, template: str, index: int) -> str:
        """Render the marked conversation up to and including the message at `index`."""
        return render(template, self.probe[0][: index + 1], self.probe[1])

    def unmarked(self, text: str) -> str:
        """Remove the marks of `probe` from rendered text."""
        return text.translate({ord(mark): None for one in self.texts for mark in one.marks})


class ChatEncoder:
    """Encodes conversations as token ids with a loss mask.

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
        # Remove the post-processor, because it may trim whitespace from the offsets of tokens. For
        # example, the token " a" would get the offsets of the string "a".
        state = json.loads(tokenizer.backend.to_str())
        self._plain = Tokenizer(
            tokenizers.Tokenizer.from_str(json.dumps({**state, "post_processor": None}))
        )
        self._has_blocks = _GENERATION_BLOCK.search(self._template) is not None
        self._text_arguments = False
        self._prompts: dict[str, str] = {}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        masked: frozenset[int] = frozenset(),
        train_on: TrainOn = "assistant",
    ) -> LabelledChat:
        """Encode a conversation as tokens.

        Args:
            messages: objects whose `role` and `content` are strings; tool calls and reasoning are
                in the format returned by `messages.normalize_message`.
            options: additional variables for the template, such as `tools`, as plain JSON.
            masked: indices of assistant messages that are excluded from the loss.
            train_on: tokens to use as labels; "all" means all tokens except the tokens of masked
                messages.

        Raises:
            InputError: the messages are not such objects, or the template rejects them.
            TokenizerError: the template fails, or the assistant's text can't be located in the
                rendered text.
        """
        plain = plain_messages(messages)
        try:
            return self._labelled(plain, options, masked, train_on)
        except TokenizerError:
            if self._text_arguments or not any(one.get("tool_calls") for one in plain):
                raise
        # Some templates, such as DeepSeek's, expect the arguments of tool calls as a string, and
        # output this string unchanged.
        self._text_arguments = True
        try:
            return self._labelled(plain, options, masked, train_on)
        except (InputError, TokenizerError):
            self._text_arguments = False
            raise

    def prompt_warning(self) -> str | None:
        """Return a warning if the template's `{% generation %}` blocks do not begin where the
        generation prompt ends, otherwise None. This happens if the prompt ends with a tag that
        opens the reasoning, but the answers are rendered without reasoning.
        """
        prompt = self._generation_prompt(self._variables)
        if not self._has_blocks or not _OPENED.search(prompt):
            return None
        with contextlib.suppress(InputError, TokenizerError):
            if prompt in render(self._template, _CONVERSATION, self._variables):
                return None
        return (
            "the chat template's generation prompt opens the reasoning, but its "
            "{% generation %} blocks do not start where the prompt ends: remove the blocks from "
            "the template"
        )

    def _labelled(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        masked: frozenset[int],
        train_on: TrainOn,
    ) -> LabelledChat:
        fitted = fit_messages(messages, self._template, text_arguments=self._text_arguments)
        if "tools" in options and "xml_tools" in self._template:  # SmolLM3's variable for tools
            options = {**options, "xml_tools": options["tools"]}
        (*marked, own), pattern = protected(
            [*fitted, dict(options)], list(self._special), self._template
        )
        variables = {**own, **self._variables}
        marker = _Marker(free_characters([*marked, own], self._template))
        changed = marker.messages(marked)
        tools = marker.tools(own.get("tools", ()))
        names = own.keys() & {"tools", "xml_tools"} if "tools" in own else ()
        probe = changed, {**variables, **dict.fromkeys(names, tools)}
        answers = [i for i, message in enumerate(marked) if message["role"] == "assistant"]
        learned = set(answers[-1:] if train_on == "last" else answers) - masked
        is_partly_learned = train_on != "all" or bool(masked)
        # Render the prompt of each answer and the conversation up to each answer in the same call
        # as the full conversation. If the template runs in a child process, this is much faster
        # than separate calls.
        beginnings: list[tuple[int, bool]] = []
        if is_partly_learned and not self._has_blocks:
            beginnings = [(i, True) for i in answers] + [(i + 1, False) for i in answers]
        text, lengths, probed = render_with_beginnings(
            self._template, marked, variables, beginnings, probe
        )
        marker.locate(text, probed)
        chat = _Rendered(marked, variables, probe, marker.texts, pattern, text)
        flags = bytearray([train_on == "all"]) * len(text)
        spans: list[_Span] = []
        if is_partly_learned:
            spans = self._blocks(chat, answers) if self._has_blocks else []
            spans = spans or self._spans(chat, answers, lengths)
        for span in spans:
            start = _after_thoughts(chat, span) if train_on == "answers" else span.start
            flags[start : span.end] = bytes([span.message in learned]) * (span.end - start)
        for one in chat.texts:
            # Strings from other messages are not labels, even if they are inside the turn of an
            # answer. For example, Gemma 4's template writes the result of a tool call into the same
            # turn as the call.
            if one.place and one.message not in answers and not self._has_blocks:
                start, end = one.place
                flags[start:end] = bytes([train_on == "all"]) * (end - start)
        for span in reversed(spans):
            if span.opened and span.message in learned:
                _insert_thoughts(chat, flags, span, is_learned=train_on != "answers")
        lost: dict[tuple[int, str], _Text] = {}
        for one in chat.texts:
            if one.place is None:
                lost.setdefault((one.message, one.reason), one)
        return self._encoded(chat.text, flags, pattern, tuple(map(_described, lost.values())))

    # Find the characters of the rendered text that are labels

    def _spans(self, chat: _Rendered, answers: list[int], lengths: list[int | None]) -> list[_Span]:
        """Return the position of the labels of each answer, in text order, for a template without
        `{% generation %}` blocks.

        Args:
            chat: the rendered conversation.
            answers: indices of the assistant messages.
            lengths: lengths in characters: first that of each answer's prompt, then that of the
                conversation through each answer. A length is None if the rendered text does not
                begin with this prompt or conversation.
        """
        spans = []
        prompts, wholes = lengths[: len(answers)], lengths[len(answers) :]
        for index, prompt, whole in zip(answers, prompts, wholes, strict=True):
            own = [one for one in chat.texts if one.message == index and one.place]
            own.sort(key=lambda one: one.place or (0, 0))
            if not own:  # The template omits the answer, which is reported in `LabelledChat.lost`.
                continue
            span = self._start(chat, own[0]) if prompt is None else _Span(index, prompt, 0)
            if whole is None:
                span.end = self._end_as_alone(chat, own[-1])
            else:
                span.end = self._end(chat.pattern, chat.text, span.start, whole)
            spans.append(span)
        is_mixed = any(one.end > following.start for one, following in itertools.pairwise(spans))
        if is_mixed or any(span.start >= span.end for span in spans):
            raise TokenizerError(_MIXED)
        return spans

    def _start(self, chat: _Rendered, first: _Text) -> _Span:
        """Locate the start of an answer's labels if the rendered text does not begin with the
        answer's prompt.

        Args:
            chat: the rendered conversation.
            first: first string of the answer.
        """
        text, index = chat.text, first.message
        assert first.place is not None
        start = first.place[0]
        before = max(
            (one.place[1] for one in chat.texts if one.place and one.place[1] <= start), default=0
        )
        prompt = self._generation_prompt(chat.variables)
        opened = _OPENED.search(prompt)
        headers = [prompt, prompt[: opened.start()] if opened else ""]
        for header in filter(None, headers):
            if (at := text.rfind(header, before, start)) >= 0:
                return _Span(index, at + len(header), 0, opened=prompt[len(header) :])
        # Determine the text that the template writes between the prompt and the answer if the
        # answer is the last message.
        with contextlib.suppress(InputError, TokenizerError):
            history = chat.messages[:index]
            whole = render(self._template, history, chat.variables, add_generation_prompt=True)
            alone = chat.alone(self._template, index).partition(first.marks[0])[0]
            opening = chat.unmarked(alone).removeprefix(whole)
            if text.endswith(opening, before, start):
                return _Span(index, start - len(opening), 0)
        if first.reason == "lost_calls":
            raise TokenizerError(_NOT_FOUND)
        return _Span(index, start, 0)

    def _generation_prompt(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template adds after a question if `add_generation_prompt` is
        True.
        """
        own = {key: value for key, value in variables.items() if "tools" not in key}
        key = json.dumps(own, sort_keys=True)
        if key not in self._prompts:
            try:
                question, prompt = (
                    render(self._template, _CONVERSATION[:1], own, add_generation_prompt=prompted)
                    for prompted in (False, True)
                )
            except (InputError, TokenizerError):
                question = prompt = ""
            self._prompts[key] = prompt.removeprefix(question)
        return self._prompts[key]

    def _end(self, pattern: re.Pattern[str], text: str, start: int, whole: int) -> int:
        """Return the position at which an answer's turn ends in the rendered text. `whole` is the
        position at which the conversation up to the answer ends.
        """
        specials = [m for m in pattern.finditer(text, start, whole) if m["special"]]
        if specials and not text[specials[-1].end() : whole].strip():
            return specials[-1].end()
        if (eos := self._tokenizer.eos_token) and text.startswith(eos, whole):
            return whole + len(eos)  # The eos is written only if another turn follows.
        return whole

    def _end_as_alone(self, chat: _Rendered, last: _Text) -> int:
        """Locate the end of an answer's turn if the rendered text does not begin with the
        conversation up to the answer.

        Args:
            chat: the rendered conversation.
            last: last string of the answer.
        """
        assert last.place is not None
        text, end = chat.text, last.place[1]
        closing = ""
        with contextlib.suppress(InputError, TokenizerError):
            alone = chat.alone(self._template, last.message)
            closing = chat.unmarked(alone.rpartition(last.marks[1])[2])
        specials = [m for m in chat.pattern.finditer(closing) if m["special"]]
        if closing and not specials:
            return self._end(chat.pattern, text, end, end)
        # Do not compare the final token, because in gpt-oss's template the last answer of a
        # conversation ends with a different token than earlier answers.
        before = closing[: specials[-1].start()] if specials else ""
        if text.startswith(before, end):
            end += len(before)
        match = chat.pattern.search(text, end)
        if match is None or not match["special"] or text[end : match.start()].strip():
            return end
        return match.end()

    def _blocks(self, chat: _Rendered, answers: list[int]) -> list[_Span]:
        """Return the labels specified by the template's `{% generation %}` blocks."""
        free = free_characters([*chat.messages, dict(chat.variables)], self._template)
        before, after = next(free), next(free)
        marked = render(
            self._template, chat.messages, chat.variables, generation_marks=(before, after)
        )
        parts = re.split(f"{before}(\\d*){before}|({after})", marked)
        plain = "".join(parts[::3])
        numbers, ends = parts[1::3], parts[2::3]
        if plain != chat.text or any(end is None for end in ends[1::2]) or any(ends[::2]):
            raise TokenizerError(
                "the chat template modifies the content of its {% generation %} blocks"
            )
        positions = list(itertools.accumulate(map(len, parts[:-1:3])))
        owners = [int(number) if number else -1 for number in numbers[::2]]
        if set(owners) != set(answers):
            if len(owners) != len(answers) or set(owners) != {-1}:
                raise TokenizerError(
                    f"the chat template renders {len(owners)} {{% generation %}} blocks for "
                    f"{len(answers)} answers: every answer must have at least one block"
                )
            owners = answers
        places = zip(owners, positions[::2], positions[1::2], strict=True)
        return [_Span(owner, start, end) for owner, start, end in places]

    # Labels as tokens

    def _encoded(
        self,
        text: str,
        flags: bytearray,
        pattern: re.Pattern[str],
        lost: tuple[tuple[str, str], ...],
    ) -> LabelledChat:
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
        return LabelledChat(ids, loss_mask, text_bytes, torn, lost)


def _after_thoughts(chat: _Rendered, span: _Span) -> int:
    """Return the position at which the labels of an answer start if its reasoning is excluded."""
    first = span.end
    for one in chat.texts:
        if one.message == span.message and one.place and span.start <= one.place[0] < span.end:
            if one.reason == "lost_thoughts":
                closed = _CLOSED.match(chat.text, one.place[1])
                return closed.end() if closed else one.place[1]
            first = min(first, one.place[0])
    if span.opened:
        return first - len(chat.text[span.start : first].lstrip())
    empty = _NO_THOUGHTS.search(chat.text, span.start, first)
    return empty.end() if empty else span.start


def _insert_thoughts(chat: _Rendered, flags: bytearray, span: _Span, *, is_learned: bool) -> None:
    """Insert an answer's reasoning after the tag with which the generation prompt opens the
    reasoning. Update the rendered text and the flags that specify which of its characters are
    labels.
    """
    tag = _OPENED.search(span.opened)
    assert tag is not None
    start, written = span.start, ""
    if f"</{tag[1]}>" not in span.opened:
        thoughts = split_thoughts(chat.messages[span.message])[0].strip("\n")
        line = "\n" if span.opened.endswith("\n") else ""
        gap = "" if chat.text[start : start + 1].isspace() else "\n\n"
        written = f"{thoughts}{line}</{tag[1]}>{gap}"
        kept = (span.message, "lost_thoughts")
        chat.texts = [one for one in chat.texts if (one.message, one.reason) != kept]
    flags[start:start] = bytes(len(span.opened)) + bytes([is_learned]) * len(written)
    chat.text = f"{chat.text[:start]}{span.opened}{written}{chat.text[start:]}"


def _described(one: _Text) -> tuple[str, str]:
    """Return (key of `LOST`, message) for a string that the template omits."""
    where = f" (message {one.message + 1})" if one.message >= 0 else ""
    excerpt = " ".join(one.text[:60].split())
    return one.reason, f"the chat template omits {LOST[one.reason]}{where}: '{excerpt}'"


#: Pattern for the special tokens of all known templates. It is only used to check a template that
#: the user specifies. A template that comes with a tokenizer is not checked, because some models
#: were trained on the names of special tokens as plain text.
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]{1,64}\|>|<(?:start|end)_of_\w{1,32}>")

_CONVERSATION = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def with_chat_template(
    tokenizer: Tokenizer, template: str | None, folder: str = "DIR"
) -> Tokenizer:
    """Return a copy of the tokenizer with a chat template, or the tokenizer itself if `template` is
    None.

    Args:
        tokenizer: the tokenizer.
        template: name of a built-in template or path of a .jinja file; None keeps the tokenizer's
            template.
        folder: the tokenizer's folder, for error messages.

    Raises:
        InputError: the template does not exist.
        TokenizerError: the template does not compile, or it writes special tokens that the
            tokenizer does not have. Also raised if `template` is None and the tokenizer has no
            template.
    """
    if template is None:
        if tokenizer.chat_template is None:
            raise TokenizerError(
                f"the tokenizer in {folder} does not have a chat template: set data.template "
                "(prepare: "
                "--template) to chatml, llama3, alpaca or a .jinja file; alpaca needs no "
                "additional tokens"
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
        # `tokenizer extend` adds the special tokens of built-in templates automatically.
        named = "" if required else f" --add {' '.join(map(shlex.quote, missing))}"
        raise TokenizerError(
            f"the chat template {template} writes {' '.join(missing)}, which are not special "
            f"tokens of the tokenizer in {folder}: add them with `firstlight tokenizer extend "
            f"{source}{named} --chat-template {shlex.quote(template)} --out NEW`, then set "
            "data.tokenizer to NEW (prepare: --tokenizer NEW); the model's embedding is "
            "extended automatically"
        )
    if "eos_token" in text and tokenizer.eos_token is None:
        raise TokenizerError(
            f"the chat template {template} ends turns with eos_token, which the tokenizer in "
            f"{folder} does not define: set it in tokenizer_config.json"
        )
    return fitted


def _try_out(tokenizer: Tokenizer) -> str:
    """Render a short conversation. Return "" if the template rejects it, because some templates do
    not support every kind of conversation.

    Raises:
        TokenizerError: the template fails.
    """
    try:
        return tokenizer.apply_chat_template(_CONVERSATION)
    except InputError:
        return ""


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the id of the special token that ends an assistant turn: the first special token that
    the tokenizer's chat template writes after the assistant's text. Return an empty tuple if there
    is no template, or if turns end with plain text.

    Generation must stop at this token even if it is not one of the model's eos tokens. For example,
    `<|im_end|>` is not an eos token if the template was added to the model later. The model would
    otherwise continue with more turns.
    """
    if tokenizer.chat_template is None:
        return ()
    question, again = {"role": "user", "content": "1"}, {"role": "user", "content": "2"}
    for more in ([], [again]):  # Some templates end a turn only if another follows.
        try:
            # The two answers have no characters in common, so the common ending of the two rendered
            # conversations is the end of the turn.
            one, other = (
                tokenizer.encode_chat([question, {"role": "assistant", "content": text}, *more])
                for text in ("3", "4")
            )
        except (InputError, TokenizerError):
            continue
        if one == other:  # The template omits the last answer.
            continue
        pairs = zip(reversed(one), reversed(other), strict=False)
        same = [token_id for token_id, _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)]
        after = same[::-1]
        for place, token_id in enumerate(after):
            if token_id in tokenizer.special_token_ids:
                # If ordinary text such as "USER:" comes first, the turn ends with this text.
                return () if tokenizer.decode(after[:place]).strip() else (token_id,)
    return ()


def require_end(ids: list[int], loss_mask: list[bool], tokenizer: Tokenizer) -> str | None:
    """Return a warning if the last label of an example is not a special token, otherwise None.

    Args:
        ids: the example's token ids.
        loss_mask: True for each id that is a label.
        tokenizer: the tokenizer.
    """
    last = next((i for i, own in zip(ids[::-1], loss_mask[::-1], strict=True) if own), None)
    if last is None or last in tokenizer.special_token_ids:
        return None
    return (
        "the chat template writes no special token after the assistant's messages, so the model "
        "does not learn to end its answers"
    )
