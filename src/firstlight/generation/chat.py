"""Conversations with a model: the messages, the part of them that is the model's input, and the
next answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from firstlight.errors import ConfigError, InputError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import pieces_of, tokenizer_of
from firstlight.models import Model
from firstlight.tokenizer.chat_labels import turn_end_ids
from firstlight.weights.huggingface import LoadedModel

__all__ = [
    "CHAT_SETTINGS",
    "AnswerStats",
    "ChatSession",
    "ConversationDecoder",
    "Message",
    "most_that_fit",
    "turn_end_ids",
]

#: Default settings of answers.
CHAT_SETTINGS = SamplingConfig(max_new_tokens=512)

#: Memory for keys and values is taken in powers of two from here on.
_SMALLEST_DECODER = 1024

Message = dict[str, str]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def most_that_fit(count: int, fits: Callable[[int], bool]) -> int:
    """The greatest n up to `count` for which `fits(n)`, where `fits(0)` holds and what fits with
    more turns fits with fewer. Never asks for much more than the answer."""
    known, beyond = 0, 1
    while beyond <= count and fits(beyond):
        known, beyond = beyond, 2 * beyond
    beyond = min(beyond, count + 1)
    while beyond - known > 1:
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


class ConversationDecoder:
    """The key-value cache of the last conversation: of the next text, only the tokens after the
    common beginning are computed. It takes more memory as the texts become longer, and then
    computes them again.

    May serve several conversations in turn, one text at a time.

    Args:
        model: a model in evaluation mode.
        compile: see `BatchDecoder`; the memory of the whole context is taken at once then, and
            `with_room` compiles when it is called first.
    """

    def __init__(self, model: Model, *, compile: bool = False) -> None:
        self._model, self._compile = model, compile
        self._decoder: BatchDecoder | None = None

    def with_room(self, tokens: int) -> BatchDecoder:
        """A decoder without sequences with room for a text of this number of tokens, at most the
        context's."""
        if self._decoder is None or self._decoder.max_tokens < tokens:
            self._decoder = None  # its memory is free before more is taken
            size = max(_SMALLEST_DECODER, 1 << (tokens - 1).bit_length())
            if self._compile:  # a larger one would be compiled anew
                size = self._model.config.max_position_embeddings
            self._decoder = BatchDecoder(
                self._model, 1, size, reuse_prefixes=True, compile=self._compile
            )
            self._decoder.warm_up()
        while len(self._decoder):  # an exception between two lines, as Ctrl-C is, left it there
            self._decoder.remove(0)
        return self._decoder


@dataclass(frozen=True)
class AnswerStats:
    """Token counts, times and seed of an answer.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        new_tokens: number of tokens in the answer, without the end token.
        dropped: turns that no longer fit; of a model without a chat template, tokens.
        first_token_seconds: seconds until the first token.
        seconds: seconds of the whole answer.
        finish_reason: "stop" at the end of the turn, "length" at a limit, "interrupted".
        seed: gives the same answer to the same prompt.
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
        """After the first token; 0 where there was no other."""
        seconds = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True)
class _Prompt:
    """Input of the model: `ids` are the tokens of the messages in `history` without the first
    `dropped` turns (or tokens), and of `text`, the user's message."""

    ids: list[int]
    history: list[Message]
    text: str
    dropped: int


class ChatSession:
    """A conversation with a model, through the chat template of its tokenizer. Without one, a
    text that the user and the model write in turn.

    The messages are rendered again for each answer, their text never becomes a control token, and
    only tokens that are not in the cache are computed. Turns that don't fit into the context
    without `answer_room` are left out, the oldest (a question with its answer) first; the system
    message stays. `messages` keeps all. Only `stop` may be called from another thread.

    Args:
        loaded: a model from `firstlight.load`.
        system: the system message, if any.
        settings: sampling settings; may be replaced between answers. With a seed, the n-th
            answer is drawn with seed + n, from 0 on.
        decoder: shared with other conversations on the same model, to save memory.

    Attributes:
        messages: the conversation: objects with `role` and `content`, the system message first. A
            user's message always has its answer after it.
        stats: figures of the last answer.

    Raises:
        ModelError: the model has no tokenizer.
        ConfigError: a system message for a model without a chat template.
        InputError, TokenizerError: the template can't be used, or takes no system message.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        system: str | None = None,
        settings: SamplingConfig = CHAT_SETTINGS,
        decoder: ConversationDecoder | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.stats: AnswerStats | None = None
        self._loaded, self._tokenizer = loaded, tokenizer_of(loaded)
        self._decoder = decoder or ConversationDecoder(loaded.model)
        self._settings, self._answers, self._stopping = settings, 0, False
        ends = (*loaded.eos_token_ids, *turn_end_ids(self._tokenizer))
        self._end_ids = tuple(dict.fromkeys(ends))
        if self.has_template:
            self._encoded([_message("user", "1")])  # a broken template is said now
        if system:
            self.set_system(system)

    @property
    def has_template(self) -> bool:
        """True if the conversation has turns; False if it is one text that the model continues."""
        return self._tokenizer.chat_template is not None

    @property
    def context(self) -> int:
        """The model's limit of tokens."""
        return self._loaded.model.config.max_position_embeddings

    @property
    def answer_room(self) -> int:
        """Tokens of the context that the history leaves free: `max_new_tokens`, but at most a
        quarter of the context. An answer may take more room if there is more."""
        return min(self.settings.max_new_tokens, max(self.context // 4, 1))

    @property
    def settings(self) -> SamplingConfig:
        """Sampling settings of the next answers."""
        return self._settings

    @settings.setter
    def settings(self, settings: SamplingConfig) -> None:
        if settings.seed != self._settings.seed:
            self._answers = 0
        self._settings = settings

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None or "" removes it. The turns stay.

        Raises:
            ConfigError: the model has no chat template.
            InputError: the template refuses system messages, or leaves them out in silence.
        """
        turns = self.messages[self.system is not None :]
        if not text:
            self.messages[:] = turns
            return
        if not self.has_template:
            raise ConfigError(
                "the model has no chat template, so that it knows no system message: "
                "begin your first message with that text"
            )
        system, user = _message("system", text), _message("user", "1")
        if self._encoded([system, user]) == self._encoded([user]):
            raise InputError(
                "the model's chat template leaves system messages out: "
                "put that text into your first message"
            )
        self.messages[:] = [system, *turns]

    def reset(self) -> None:
        """Forget the conversation, except the system message."""
        del self.messages[self.system is not None :]
        self._answers = 0
        self.stats = None

    def undo(self) -> str | None:
        """Take back the last message and its answer; return the message, None if there is none."""
        if not self._has_turns:
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return text

    @property
    def _has_turns(self) -> bool:
        return len(self.messages) > (self.system is not None)

    def stop(self) -> None:
        """End the answer that is being made, if any, after the token at hand. From any thread."""
        self._stopping = True

    def answer(self, text: str) -> Iterator[str]:
        """Answer a message, piece by piece. Message and answer are among `messages` from the
        first piece on; an answer that is not taken to its end stays as far as it came, and one
        that fails is as if it had not been asked for.

        Args:
            text: the user's message; without a chat template it may be empty, and the model
                continues the text.

        Raises:
            InputError: the message is blank, or the template refuses the conversation.
            ConfigError: message and system message alone don't fit.
            ModelError: the model can't be used.
        """
        self._stopping = False
        return self._answered(self._prompt(self.messages, text))

    def retry(self) -> Iterator[str]:
        """Answer the last message again, in place of its answer.

        Raises:
            ConfigError: there is none, or see `answer`.
            InputError, ModelError: see `answer`.
        """
        if not self._has_turns:
            raise ConfigError("there is no message to answer again yet")
        self._stopping = False
        return self._answered(self._prompt(self.messages[:-2], self.messages[-2]["content"]))

    def _answered(self, prompt: _Prompt) -> Iterator[str]:
        text, before = self._continuation(prompt), list(self.messages)
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
                    answer["content"] += piece
                    if piece:
                        yield piece
                    if self._stopping:
                        break
        except Exception:
            self.messages[:] = before
            raise
        finally:
            seconds = time.perf_counter() - started
            self.stats = _stats(text, prompt.dropped, first, seconds)

    def _continuation(self, prompt: _Prompt) -> Continuation:
        config = self.settings
        if config.seed is not None:
            config = replace(config, seed=(config.seed + self._answers) % 2**63)
        return Continuation(
            prompt.ids,
            config,
            context=self.context,
            eos_token_ids=self._end_ids,
            tokenizer=self._tokenizer,
        )

    # The model's input

    def _prompt(self, history: Sequence[Message], text: str) -> _Prompt:
        make = self._chat_ids if self.has_template else self._text_ids
        ids, dropped = make(list(history), text)
        return _Prompt(ids, list(history), text, dropped)

    def _encoded(self, messages: list[Message]) -> list[int]:
        return self._tokenizer.encode_chat(messages, add_generation_prompt=True)

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
        """The tokens that there are for a prompt; refuse a message that takes more."""
        limit = self.context - self.answer_room
        if tokens > limit:
            raise ConfigError(
                f"the message{what_else} has {tokens:,} tokens, and the model's context of "
                f"{self.context:,} has room for {limit:,}, with {self.answer_room:,} left for the "
                "answer: shorten it"
            )
        return limit


def _stats(text: Continuation, dropped: int, first: float, seconds: float) -> AnswerStats:
    assert text.config.seed is not None
    return AnswerStats(
        len(text.prompt_ids),
        len(text.token_ids),
        dropped,
        first,
        seconds,
        text.finish_reason or "interrupted",
        text.config.seed,
    )
