"""Hold conversations with a model: store messages, render them as model input and generate
answers.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from firstlight.errors import ConfigError, InputError, nearest
from firstlight.generation.answers import AnswerFormat, AnswerParser, AnswerPart
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import pieces_of, tokenizer_of, with_model_settings
from firstlight.lora.loading import LoadedModel
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.messages import fit_messages

#: Default sampling settings for answers.
CHAT_SETTINGS = SamplingConfig(max_new_tokens=512)

#: Minimum cache size of a `ConversationDecoder`, in tokens. Larger sizes are powers of two.
_SMALLEST_DECODER = 1024

#: A chat message with the keys "role" ("system", "user" or "assistant"), "content" and, for an
#: answer with reasoning, "reasoning_content".
Message = dict[str, str]


class ReasoningText(str):
    """A piece of generated text that belongs to the model's reasoning."""

    __slots__ = ()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


#: Words in chat templates that can't be set as options, because they are not variables or because
#: the conversation determines their values.
_TEMPLATE_OWN = {"messages", "message", "role", "content", "add_generation_prompt", "for", "if"}


def template_words(tokenizer: Tokenizer) -> set[str]:
    """Return the words in a tokenizer's chat template, including the names of its variables. Return
    an empty set if there is no template.
    """
    return set(re.findall(r"\w+", tokenizer.chat_template or "")) - _TEMPLATE_OWN


def require_template_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Check that a tokenizer's chat template uses these variables.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not use one of the
            variables.
    """
    words = template_words(tokenizer)
    for name in options:
        if name not in words:
            hint = nearest(name, words) or ": omit it"
            raise ConfigError(f"the model's chat template has no variable '{name}'{hint}")


def most_that_fit(count: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to `count` for which `fits(n)` is true. `fits(0)` must be true,
    and if `fits(n)` is true, it must also be true for all smaller numbers.

    Because `fits` is more expensive for a larger n, the search doubles n and then bisects. It never
    calls `fits` with a number greater than twice the result (or greater than 1 if the result is 0).
    """
    known, beyond = 0, 1
    while beyond <= count and fits(beyond):
        known, beyond = beyond, 2 * beyond
    beyond = min(beyond, count + 1)
    while beyond - known > 1:
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


class ConversationDecoder:
    """Decoder for one sequence at a time. The key-value cache of the last sequence is kept. If the
    next sequence begins with the same tokens as the last one, only the tokens after the common
    prefix are processed. Several conversations can share one decoder.

    The cache grows as needed. Each time it grows, the whole sequence is processed again.

    Args:
        model: a model in evaluation mode.
        compile: True to decode with torch.compile (see `BatchDecoder`). The cache then has the size
            of the model's context from the start, and the first call to `with_room` compiles the
            decoding step.
    """

    def __init__(self, model: Model, *, compile: bool = False) -> None:
        self._model, self._compile = model, compile
        self._decoder: BatchDecoder | None = None

    def with_room(self, tokens: int) -> BatchDecoder:
        """Return an empty decoder with a capacity of at least `tokens` tokens, which must not
        exceed the model's context length.
        """
        if self._decoder is None or self._decoder.max_tokens < tokens:
            # The memory of the old cache is freed before the new cache is allocated.
            self._decoder = None
            size = max(_SMALLEST_DECODER, 1 << (tokens - 1).bit_length())
            if self._compile:  # A larger cache would require compiling again.
                size = self._model.config.max_position_embeddings
            self._decoder = BatchDecoder(
                self._model, 1, size, reuse_prefixes=True, compile=self._compile
            )
            self._decoder.warm_up()
        # An exception such as KeyboardInterrupt can leave sequences in the decoder.
        while len(self._decoder):
            self._decoder.remove(0)
        return self._decoder


@dataclass(frozen=True)
class AnswerStats:
    """Statistics of an answer: token counts, times and seed.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        new_tokens: number of tokens in the answer, without the end token.
        dropped: number of oldest turns that were dropped because they did not fit into the context.
            For a model without a chat template, this is the number of dropped tokens.
        first_token_seconds: seconds until the first token.
        seconds: seconds until the end of the answer.
        finish_reason: "stop" if the model ended its turn, "length" if a limit was reached,
            "interrupted" if the answer was stopped or failed.
        seed: seed that reproduces the answer to the same prompt.
    """

    prompt_tokens: int
    new_tokens: int
    dropped: int
    first_token_seconds: float
    seconds: float
    finish_reason: str
    seed: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second after the first token, or 0 if the answer has at most one token."""
        seconds = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True)
class _Prompt:
    """The model input from which an answer is generated.

    Attributes:
        ids: token ids of the retained history and the user's message.
        history: the messages before the user's message.
        text: the user's message.
        dropped: number of dropped turns or tokens (see `AnswerStats`).
    """

    ids: list[int]
    history: list[Message]
    text: str
    dropped: int


class ChatSession:
    """A conversation with a model, rendered with the tokenizer's chat template. If the tokenizer
    does not have a template, the conversation is plain text that the user and the model continue in
    turns.

    All messages are rendered again for each answer, but only tokens that are not cached are
    processed. Text in messages is never encoded as a control token. A prompt can use the whole
    context except for `answer_room` tokens. If the conversation is too long, its oldest turns (a
    user message and its answer) are omitted from the prompt. The system message is always included.
    `messages` keeps all messages.

    Only `stop` may be called from a different thread.

    Args:
        loaded: a model from `firstlight.load`.
        system: the system message, or None.
        settings: sampling settings. None means `CHAT_SETTINGS` combined with the settings in the
            model's generation_config.json. If a seed is set, the answers are sampled with the seeds
            `seed`, `seed + 1`, ...
        decoder: decoder that is shared by several conversations with the same model to save memory;
            None creates a new decoder.
        template_options: additional variables of the chat template, such as `enable_thinking`.

    Attributes:
        messages: messages of the conversation, starting with the system message if there is one.
            Each message is a dict with "role" and "content". A user message is always followed by
            its answer, which has "reasoning_content" if it contains reasoning.
        stats: statistics of the last answer, or None before the first answer.

    Raises:
        ModelError: the model has no tokenizer.
        ConfigError: a system message or a template option was passed, but the model does not have a
            chat template, or the template does not use the option.
        InputError, TokenizerError: the template is invalid, or does not support system messages.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        system: str | None = None,
        settings: SamplingConfig | None = None,
        decoder: ConversationDecoder | None = None,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.messages: list[Message] = []
        self._template_options = template_options
        self.stats: AnswerStats | None = None
        self._loaded, self._tokenizer = loaded, tokenizer_of(loaded)
        self._decoder = decoder or ConversationDecoder(loaded.model)
        self._settings = settings or with_model_settings(CHAT_SETTINGS, loaded, ())
        self._answers = 0
        self._stopping = False
        require_template_options(self._tokenizer, template_options)
        if self.has_template:
            # Raise the error for an invalid template here instead of when the first message is
            # sent.
            self._encoded([_message("user", "1")])
        if system:
            self.set_system(system)

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template. If it is False, the conversation is plain text
        that the model continues.
        """
        return self._tokenizer.chat_template is not None

    @property
    def context(self) -> int:
        """Length of the model's context, in tokens."""
        return self._loaded.model.config.max_position_embeddings

    @property
    def answer_room(self) -> int:
        """Number of context tokens reserved for the answer: `max_new_tokens`, but at most a quarter
        of the context. An answer can be longer if the prompt leaves more room.
        """
        return min(self.settings.max_new_tokens, max(self.context // 4, 1))

    @property
    def settings(self) -> SamplingConfig:
        """Sampling settings for all further answers. Setting a different seed restarts the
        numbering of answers.
        """
        return self._settings

    @settings.setter
    def settings(self, settings: SamplingConfig) -> None:
        if settings.seed != self._settings.seed:
            self._answers = 0
        self._settings = settings

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Replace the system message, or remove it if the argument is None or "". All other
        messages are kept.

        Raises:
            ConfigError: the model has no chat template.
            InputError: the template does not support system messages.
        """
        turns = self.messages[self.system is not None :]
        if not text:
            self.messages[:] = turns
            return
        if not self.has_template:
            raise ConfigError(
                "the model has no chat template and therefore no system message: begin your "
                "first message with that text"
            )
        system, user = _message("system", text), _message("user", "1")
        if self._encoded([system, user]) == self._encoded([user]):
            raise InputError(
                "the model's chat template ignores system messages: put that text into your "
                "first message"
            )
        self.messages[:] = [system, *turns]

    def reset(self) -> None:
        """Remove all messages except the system message."""
        del self.messages[self.system is not None :]
        self._answers = 0
        self.stats = None

    def undo(self) -> str | None:
        """Remove the last user message and its answer. Return the text of the user message, or None
        if the conversation has no user messages.
        """
        if not self._has_turns:
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return text

    @property
    def _has_turns(self) -> bool:
        return len(self.messages) > (self.system is not None)

    def stop(self) -> None:
        """Stop generating the current answer, if there is one, after its current token. This method
        may be called from any thread.
        """
        self._stopping = True

    def answer(self, text: str) -> Iterator[str]:
        """Answer a message. Return an iterator over the pieces of generated text. Pieces that
        belong to the model's reasoning have the type `ReasoningText`.

        Once the first piece has been generated, `messages` contains the message and the answer so
        far. If the iterator is closed early, the partial answer is kept. If generation fails, both
        the message and the answer are removed.

        Args:
            text: the user message. If the model does not have a chat template, the message can be
                empty, and the model then continues its previous text.

        Raises:
            InputError: the message is blank, or the template rejects the conversation.
            ConfigError: the message and the system message together do not fit into the context.
            ModelError: the model is unusable.
        """
        self._stopping = False
        return self._answered(self._prompt(self.messages, text))

    def retry(self) -> Iterator[str]:
        """Answer the last user message again, and replace its previous answer. The result is the
        same as that of `answer`.

        Raises:
            ConfigError: there is no message to answer.
            ConfigError, InputError, ModelError: see `answer`.
        """
        if not self._has_turns:
            raise ConfigError("there is no message to answer again yet")
        self._stopping = False
        return self._answered(self._prompt(self.messages[:-2], self.messages[-2]["content"]))

    def _answered(self, prompt: _Prompt) -> Iterator[str]:
        format = AnswerFormat(self._tokenizer, prompt.ids, {}) if self.has_template else None
        parser = format and AnswerParser(format)
        config, before = self.settings, list(self.messages)
        if config.seed is not None:
            config = replace(config, seed=(config.seed + self._answers) % 2**63)
        text = Continuation(
            prompt.ids,
            config,
            context=self.context,
            eos_token_ids=self._loaded.chat_end_ids,
            tokenizer=self._tokenizer,
            shown=format.shown if format else (),
        )
        self._loaded.require_unchanged()
        answer = _message("assistant", "")
        self.messages[:] = [*prompt.history, _message("user", prompt.text), answer]
        self._answers += 1
        started, first = time.perf_counter(), 0.0
        most = len(prompt.ids) + text.config.max_new_tokens
        try:
            pieces = pieces_of(text, self._decoder.with_room(min(most, self.context)))
            assert isinstance(pieces, Generator)
            with contextlib.closing(pieces):
                for piece in pieces:
                    first = first or time.perf_counter() - started
                    ended = text.finish_reason is not None
                    parts = parser.push(piece, ended=ended) if parser else [AnswerPart(piece)]
                    yield from _add_parts(answer, parts)
                    if self._stopping:
                        break
                if parser and text.finish_reason is None:  # Return the text that was held back.
                    yield from _add_parts(answer, parser.push("", ended=True))
        except Exception:
            self.messages[:] = before
            raise
        finally:
            assert text.config.seed is not None
            self.stats = AnswerStats(
                len(text.prompt_ids),
                len(text.token_ids),
                prompt.dropped,
                first,
                seconds=time.perf_counter() - started,
                finish_reason=text.finish_reason or "interrupted",
                seed=text.config.seed,
            )

    # The model's input

    def _prompt(self, history: Sequence[Message], text: str) -> _Prompt:
        make = self._chat_ids if self.has_template else self._text_ids
        ids, dropped = make(list(history), text)
        return _Prompt(ids, list(history), text, dropped)

    def _encoded(self, messages: list[Message]) -> list[int]:
        fitted = fit_messages(messages, self._tokenizer.chat_template or "")
        return self._tokenizer.encode_chat(
            fitted, add_generation_prompt=True, options=self._template_options
        )

    def _chat_ids(self, history: list[Message], text: str) -> tuple[list[int], int]:
        if not text.strip():
            raise InputError("the message is blank: write something")
        start = int(bool(history) and history[0]["role"] == "system")
        system, turns = history[:start], history[start:]

        def ids_with(count: int) -> list[int]:
            kept = turns[len(turns) - 2 * count :]
            return self._encoded([*system, *kept, _message("user", text)])

        limit = self._require_fit(len(ids_with(0)), " with the system message" if system else "")
        count = most_that_fit(len(turns) // 2, lambda count: len(ids_with(count)) <= limit)
        return ids_with(count), len(turns) // 2 - count

    def _text_ids(self, history: list[Message], text: str) -> tuple[list[int], int]:
        limit = self._require_fit(len(self._tokenizer.encode_prompt(text)), "")
        written = "".join(message["content"] for message in history)
        ids = self._tokenizer.encode_prompt(written + text)
        if len(ids) <= limit:
            return ids, 0
        lead = ids[: int(self._tokenizer.add_bos)]
        return [*lead, *ids[len(ids) - (limit - len(lead)) :]], len(ids) - limit

    def _require_fit(self, tokens: int, what_else: str) -> int:
        """Return the maximum number of tokens in a prompt.

        Args:
            tokens: number of tokens that must fit into the prompt.
            what_else: phrase that describes the tokens other than those of the user message, such
                as " with the system message". It is part of the error message.

        Raises:
            ConfigError: `tokens` exceeds the maximum.
        """
        limit = self.context - self.answer_room
        if tokens > limit:
            raise ConfigError(
                f"the message{what_else} has {tokens:,} tokens, but the model's context of "
                f"{self.context:,} tokens has room for only {limit:,}, because "
                f"{self.answer_room:,} are reserved for the answer: shorten the message"
            )
        return limit


def _add_parts(answer: Message, parts: Sequence[AnswerPart]) -> Iterator[str]:
    """Append parts of an answer to a message, and yield the text of each part."""
    for part in parts:
        # A chat session has no tools, so tool calls are shown as text.
        content = part.content + "".join(f"{call.name} {call.arguments}" for call in part.calls)
        if part.reasoning:
            answer["reasoning_content"] = answer.get("reasoning_content", "") + part.reasoning
            yield ReasoningText(part.reasoning)
        if content:
            answer["content"] += content
            yield content
