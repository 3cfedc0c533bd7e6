"""The continuation of one text: chooses its tokens from logits, decodes them to text, and finds
its end."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.generation.config import SamplingConfig
from firstlight.generation.sampling import filter_probabilities, sample, sample_rows, shifted
from firstlight.generation.structured import Constraint
from firstlight.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt: text of the prompt.
        text: the new text, before any stop text.
        token_ids: ids of the new tokens, without the end token; if a stop text occurred, up to the
            token that completed it.
        prompt_tokens: number of tokens of the prompt, including the beginning-of-text token.
        finish_reason: "stop" at an end token or stop text, "length" at a limit.
        seed: seed that gives the same text again.
        logprobs: log-probability of each of `token_ids`; None if the config does not ask for them.
        choices: likeliest tokens at each of `token_ids`; None if the config does not ask for them.
    """

    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    seed: int
    logprobs: list[TokenLogprob] | None = None
    choices: list[list[TokenChoice]] | None = None


class Continuation:
    """Chooses the tokens of one text from the model's logits, and decodes them to text.

    Args:
        prompt_ids: token ids of the prompt.
        config: sampling settings; without a seed, one is drawn.
        context: the model's context, in tokens.
        eos_token_ids: tokens that end the text.
        tokenizer: tokenizer that decodes the tokens; with None, pieces of text are empty and stop
            texts have no effect.
        constraint: constraint on the tokens; the text ends when the constraint is complete. None
            allows all tokens.

    Attributes:
        config: sampling settings, always with a seed.
        prompt_ids: token ids of the prompt.
        token_ids: tokens chosen so far, without the end token.
        finish_reason: None while the text is being generated; see `Generation`.
        logprobs: see `Generation`.
        prompt_logprobs: log-probabilities of all prompt tokens but the first; None if the config
            does not ask for them.
        choices: see `Generation`.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        config: SamplingConfig,
        *,
        context: int,
        eos_token_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        seed = secrets.randbits(62) if config.seed is None else config.seed
        self.config = replace(config, seed=seed)
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if config.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        if config.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.finish_reason: str | None = None
        self._eos_token_ids = frozenset(eos_token_ids)
        self.choices: list[list[TokenChoice]] | None = None if config.choices is None else []
        self._most = config.max_new_tokens
        if not config.slide:
            self._most = min(self._most, context - len(self.prompt_ids))
        self._generator = torch.Generator().manual_seed(seed)
        self._seen = set(prompt_ids)
        self._counts: Counter[int] = Counter()
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt_ids)
        self._stops = StopTexts(config.stop)
        self._constraint = constraint

    @property
    def score_prompt(self) -> Callable[[Tensor], None] | None:
        """Argument `on_logits` of `BatchDecoder.add`, which gets the prompt's logits [T, V]; None
        if the config does not ask for log-probabilities of the prompt."""
        return None if self.prompt_logprobs is None else self._score_prompt

    def _score_prompt(self, logits_TV: Tensor) -> None:
        assert self.prompt_logprobs is not None
        assert self.config.prompt_logprobs is not None
        first = len(self.prompt_logprobs) + 1
        ids = self.prompt_ids[first : first + len(logits_TV)]
        if ids:
            scored = logits_TV[: len(ids)]
            self.prompt_logprobs += logprobs_of(scored, ids, self.config.prompt_logprobs)

    @property
    def is_plain(self) -> bool:
        """True if the next token depends on the logits and the generator alone: without penalties,
        biases and a constraint."""
        config = self.config
        penalties = config.frequency_penalty, config.presence_penalty, config.repetition_penalty - 1
        return self._constraint is None and not any(penalties) and not config.logit_bias

    def push(self, logits_V: Tensor, token_id: int | None = None) -> str:
        """Choose the next token, or end the text; return the text that is final with it, which is
        often empty.

        If `finish_reason` is None afterwards, the caller computes the logits after the last of
        `token_ids` and calls `push` again.

        Args:
            logits_V: logits of the next token, on any device.
            token_id: the next token, if `choose_tokens` has chosen it from these logits.

        Raises:
            ModelError: the logits are not finite numbers.
            SchemaError: the constraint takes too long to follow.
        """
        assert self.finish_reason is None
        if len(self.token_ids) >= self._most:  # no new token was asked for, or has room
            return self._end("length")
        allowed_V = None if self._constraint is None else self._constraint.allowed(len(logits_V))
        if token_id is None:
            token_id = sample(
                logits_V,
                self.config,
                self._generator,
                self._seen,
                counts=self._counts,
                allowed_V=allowed_V,
            )
        if token_id in self._eos_token_ids:
            return self._end("stop")
        if self.choices is not None:
            assert self.config.choices is not None
            shifted_V = shifted(
                logits_V, self.config, self._seen, self._counts, allowed_V=allowed_V
            )
            self.choices.append(choices_of(logits_V, shifted_V, token_id, self.config))
        self.token_ids.append(token_id)
        self._seen.add(token_id)
        self._counts[token_id] += 1
        if self.logprobs is not None:
            assert self.config.logprobs is not None
            self.logprobs += logprobs_of(logits_V[None], [token_id], self.config.logprobs)
        piece = "" if self._stream is None else self._stops.push(self._stream.push(token_id))
        complete = self._constraint is not None and self._constraint.push(token_id)
        if self._stops.found:
            self.finish_reason = "stop"
        elif complete:
            piece += self._end("stop")
        elif len(self.token_ids) == self._most:
            piece += self._end("length")
        return piece

    def _end(self, reason: str) -> str:
        rest = "" if self._stream is None else self._stops.push(self._stream.finish())
        if self._stops.found:
            reason = "stop"
        else:
            rest += self._stops.finish()
        self.finish_reason = reason
        return rest


def choose_tokens(texts: Sequence[Continuation], logits_BV: Tensor) -> list[int | None]:
    """Choose the next token of several texts, reading each kind of settings from the device once.

    Args:
        texts: texts that go on, without a finish reason.
        logits_BV: logits of their next tokens.

    Returns:
        For each text, the argument `token_id` of `Continuation.push`; None if `push` has to choose.
    """
    chosen: list[int | None] = [None] * len(texts)
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, text in enumerate(texts):
        if text.is_plain:
            config = text.config
            key = config.temperature, config.min_p, config.top_k, config.top_p
            groups.setdefault(key, []).append(row)
    for rows in groups.values():
        logits_GV = logits_BV if len(rows) == len(texts) else logits_BV[rows]
        generators = [texts[row]._generator for row in rows]
        found = sample_rows(logits_GV, texts[rows[0]].config, generators)
        for row, token_id in zip(rows, found, strict=True):
            chosen[row] = token_id
    return chosen


class StopTexts:
    """Passes on the pieces of a text until a stop text occurs. Text that may be the beginning of a
    stop text is held back until this is decided.

    Args:
        texts: the stop texts, none of them empty.

    Attributes:
        found: True after a stop text has occurred.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.found = False
        self._texts = tuple(texts)
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece; return the text that is now certain not to be part of a stop text."""
        if not self._texts:
            return piece
        text = self._held + piece
        found = [start for stop in self._texts if (start := text.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)]
        kept = max(self._overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Greatest number of characters at the end of the text that are a proper prefix of
        `stop`."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TokenChoice:
    """A candidate for one position.

    Attributes:
        token_id: id of the token.
        model: its probability by the model.
        sampled: its probability in the choice, after penalties, biases, temperature, min_p, top_k
            and top_p; with temperature 0, 1 for the chosen token and 0 for others.
        is_chosen: True for the token that was chosen.
    """

    token_id: int
    model: float
    sampled: float
    is_chosen: bool


def choices_of(
    logits_V: Tensor, shifted_V: Tensor, token_id: int, config: SamplingConfig
) -> list[TokenChoice]:
    """The likeliest tokens of a position, likeliest first. If the chosen token is not among them,
    it is appended.

    Args:
        logits_V: the model's logits of the position.
        shifted_V: the logits after penalties and biases, see `sampling.shifted`.
        token_id: the chosen token.
        config: sampling settings, with `choices`.
    """
    assert config.choices is not None
    model_V = logits_V.float().softmax(-1)
    if config.temperature == 0:
        sampled_V = torch.zeros_like(model_V)
        sampled_V[token_id] = 1.0
    else:
        sampled_V = filter_probabilities(shifted_V, config)
    best: list[int] = model_V.topk(min(config.choices, len(model_V))).indices.tolist()
    ids = best if token_id in best else [*best, token_id]
    return [TokenChoice(i, float(model_V[i]), float(sampled_V[i]), i == token_id) for i in ids]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token by the model, before temperature and all other sampling settings.

    Attributes:
        token_id: id of the token.
        logprob: natural logarithm of its probability.
        top: (id, log-probability) of the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits_TV: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """For each of T positions, the log-probabilities of its token and of the `top` likeliest.

    Args:
        logits_TV: logits of the positions.
        token_ids: T token ids.
        top: number of likeliest tokens.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    logprobs_TV = logits_TV.float().log_softmax(-1)
    if logprobs_TV.isnan().any():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    ids_T1 = torch.tensor(token_ids, device=logits_TV.device)[:, None]
    best = logprobs_TV.topk(min(top, logprobs_TV.shape[1]))
    found = zip(
        token_ids,
        logprobs_TV.gather(1, ids_T1)[:, 0].tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in found
    ]
