"""Continue a single prompt: choose tokens from logits, decode them, and detect the end of the
text."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.generation.config import SamplingConfig
from firstlight.generation.sampling import sample_rows, shifted, uniform_numbers
from firstlight.generation.structured import Constraint
from firstlight.hardware.device import upload
from firstlight.tokenizer import TextStream, Tokenizer

_NOT_FINITE = (
    "the model's outputs are not finite: its weights are damaged or it has diverged, so use "
    "another checkpoint"
)


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt: text of the prompt.
        text: the new text, without the stop string.
        token_ids: ids of the new tokens, without the end token. If generation ended at a stop
            string, the last id is that of the token that completed the string.
        prompt_tokens: number of tokens in the prompt, including the beginning-of-text token.
        finish_reason: "stop" if generation ended at an end token or a stop string, "length" if it
            ended at a limit.
        seed: seed that reproduces the text.
        logprobs: log-probability of each token in `token_ids`, or None if the config does not
            request them.
        choices: most likely tokens at the position of each token in `token_ids`, or None if the
            config does not request them.
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
    """Chooses the tokens of a single continuation from the model's logits, and decodes them to
    text.

    Args:
        prompt_ids: token ids of the prompt.
        config: sampling settings. If they do not include a seed, one is drawn.
        context: length of the model's context, in tokens.
        eos_token_ids: ids of the end-of-text tokens.
        tokenizer: tokenizer that decodes the tokens. Without a tokenizer, the returned text is
            empty and stop strings have no effect.
        constraint: constraint on the tokens, such as a schema. Generation ends when the constraint
            is satisfied. None allows all tokens.
        shown: special tokens that are included in the text (see `TextStream`).

    Attributes:
        config: sampling settings, always including a seed.
        prompt_ids: token ids of the prompt.
        token_ids: tokens chosen so far, without the end token.
        finish_reason: reason for the end of the continuation (see `Generation`); None while the
            continuation is being generated.
        logprobs: log-probabilities of the chosen tokens (see `Generation`).
        prompt_logprobs: log-probabilities of all prompt tokens except the first, or None if the
            config does not request them.
        choices: most likely tokens at each position (see `Generation`).
        is_plain: True if the next token depends only on the logits and the random generator,
            because there are no penalties, biases or constraints.
        settings: settings that must be equal in all continuations whose tokens are chosen together.
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
        shown: Collection[str] = (),
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
        self._numbers = uniform_numbers(seed)
        self._seen = set(prompt_ids)
        self._counts: Counter[int] = Counter()
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt_ids, shown)
        self._stops = StopTexts(config.stop)
        self._constraint = constraint
        penalties = (
            config.frequency_penalty,
            config.presence_penalty,
            config.repetition_penalty - 1,
        )
        self.is_plain = constraint is None and not any(penalties) and not config.logit_bias
        draw = (config.temperature, config.min_p, config.top_k, config.top_p)
        self.settings = (*draw, config.logprobs, config.choices)

    @property
    def score_prompt(self) -> Callable[[Tensor], None] | None:
        """Callback for `BatchDecoder.add(on_logits=...)` that records the log-probabilities of the
        prompt's tokens from the logits [T, V]; None if the config does not request them.
        """
        return None if self.prompt_logprobs is None else self._score_prompt

    def _score_prompt(self, logits_TV: Tensor) -> None:
        assert self.prompt_logprobs is not None
        assert self.config.prompt_logprobs is not None
        first = len(self.prompt_logprobs) + 1
        ids = self.prompt_ids[first : first + len(logits_TV)]
        if ids:
            scored = logits_TV[: len(ids)]
            self.prompt_logprobs += logprobs_of(scored, ids, self.config.prompt_logprobs)

    def draw_number(self) -> float:
        """Return the random number for the next token, or 0 if the temperature is 0 and no random
        number is needed.
        """
        return next(self._numbers) if self.config.temperature else 0.0

    def shifted(self, logits_V: Tensor) -> Tensor:
        """Return the logits [V] of the next token after penalties, biases and the constraint.

        Raises:
            ConfigError: see `sampling.shifted`.
            SchemaError: the constraint takes too long to follow.
        """
        allowed_V = None if self._constraint is None else self._constraint.allowed(len(logits_V))
        return shifted(logits_V, self.config, self._seen, self._counts, allowed_V=allowed_V)

    def push(self, chosen: Chosen | Exception) -> str:
        """Append the next token, or end the continuation. Return the piece of text that has become
        final, which is often empty.

        If `finish_reason` is still None, the caller must compute the logits after the last token in
        `token_ids`, and then call `choose_tokens` and `push` again.

        Args:
            chosen: result of `choose_tokens` for this continuation. If it is an exception, it is
                raised here.

        Raises:
            Exception: `chosen` is an exception.
            SchemaError: the constraint takes too long to follow.
        """
        assert self.finish_reason is None
        # This can be true at the first call, if no new tokens were requested or if the prompt fills
        # the context.
        if len(self.token_ids) >= self._most:
            return self._end("length")
        if isinstance(chosen, Exception):
            raise chosen
        token_id = chosen.token_id
        if token_id in self._eos_token_ids:
            return self._end("stop")
        if self.choices is not None:
            self.choices.append(list(chosen.choices))
        self.token_ids.append(token_id)
        self._seen.add(token_id)
        self._counts[token_id] += 1
        if self.logprobs is not None:
            assert chosen.logprob is not None
            self.logprobs.append(chosen.logprob)
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


@dataclass(frozen=True)
class Chosen:
    """The next token of a continuation.

    Attributes:
        token_id: id of the token.
        logprob: log-probability of the token, or None if the config does not request it.
        choices: most likely tokens; empty if the config does not request them.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    choices: Sequence[TokenChoice] = ()


def choose_tokens(
    texts: Sequence[Continuation],
    logits_BV: Tensor,
    keep: Callable[[Tensor, list[int]], None] | None = None,
) -> list[Chosen | Exception]:
    """Choose the next token of each of B continuations. On a GPU, all results are copied to the
    host at once.

    Args:
        texts: the continuations, none of which has ended.
        logits_BV: logits of the next token of each continuation.
        keep: callback that receives two arguments: the token ids, int64 [B] on the device, and a
            list that will contain these ids after they have been copied to the host.

    Returns:
        For each continuation, the value to pass to `Continuation.push`. If no token could be
        chosen, this value is an exception. The other continuations are not affected.
    """
    if not logits_BV.is_cuda:  # Apple's GPUs do not support fp64.
        logits_BV = logits_BV.cpu()
    shifted_BV, errors = _shifted(texts, logits_BV)
    # The tokens of continuations with the same settings are chosen together.
    groups: dict[tuple[float | None, ...], list[int]] = {}
    for row, text in enumerate(texts):
        groups.setdefault(text.settings, []).append(row)
    order = [row for rows in groups.values() for row in rows]
    numbers = [texts[row].draw_number() for row in order]
    if len(groups) == 1:
        config = texts[0].config
        numbers_B = upload(numbers, logits_BV.device, torch.float64) if config.temperature else None
        columns = [_columns(logits_BV, shifted_BV, config, numbers_B)]
    else:
        # The indices are copied together with the other numbers, because fp64 represents them
        # exactly.
        both_2B = upload([order, numbers], logits_BV.device, torch.float64)
        order_B, numbers_B = both_2B[0].long(), both_2B[1]
        sizes = [len(rows) for rows in groups.values()]
        configs = [texts[rows[0]].config for rows in groups.values()]
        logits, shifted, drawn = (
            torch.split(one, sizes) for one in (logits_BV[order_B], shifted_BV[order_B], numbers_B)
        )
        columns = list(map(_columns, logits, shifted, configs, drawn))
    ids: list[int] = []
    if keep is not None:
        ids_B = torch.cat([one[0] for one in columns])[:, 0]
        if len(groups) > 1:  # Restore the order of the continuations.
            ids_B = torch.empty_like(ids_B).index_copy_(0, order_B, ids_B)
        keep(ids_B, ids)
    read = iter(_read([column for one in columns for column in one]))
    found = dict[int, Chosen | Exception]()
    for rows, one in zip(groups.values(), columns, strict=True):
        values = zip(*itertools.islice(read, len(one)), strict=True)
        for row, own in zip(rows, values, strict=True):
            found[row] = errors.get(row) or _chosen(texts[row].config, *own)
    chosen = [found[row] for row in range(len(texts))]
    ids += [-1 if isinstance(one, Exception) else one.token_id for one in chosen]
    return chosen


def _shifted(
    texts: Sequence[Continuation], logits_BV: Tensor
) -> tuple[Tensor, dict[int, Exception]]:
    """Return the logits [B, V] after penalties, biases and constraints. Also return a mapping from
    row to error for the continuations whose constraint or bias raised an error.
    """
    shifted, errors = dict[int, Tensor](), dict[int, Exception]()
    for row, text in enumerate(texts):
        if not text.is_plain:
            try:
                shifted[row] = text.shifted(logits_BV[row])
            except Exception as error:  # noqa: BLE001 - an error affects only its own text
                errors[row] = error
    if shifted:
        rows = [shifted[row] if row in shifted else logits_BV[row] for row in range(len(texts))]
        # Avoid a copy if there is only one continuation.
        logits_BV = rows[0][None] if len(rows) == 1 else torch.stack([row.float() for row in rows])
    return logits_BV, errors


def _columns(
    logits_GV: Tensor, shifted_GV: Tensor, config: SamplingConfig, numbers_G: Tensor | None
) -> list[Tensor]:
    """Return the tensors from which `_chosen` reads the results for G continuations with the same
    settings. Each tensor has shape [G, W], where W can differ between the tensors.
    """
    ids_G1, probabilities_GV = sample_rows(shifted_GV, config, numbers_G)
    columns = [ids_G1, logits_GV.amax(-1, keepdim=True)]
    if config.logprobs is not None:
        columns += _logprob_columns(logits_GV, ids_G1, config.logprobs)
    if config.choices is not None:
        model_GV = logits_GV.float().softmax(-1)
        if probabilities_GV is None:
            probabilities_GV = torch.zeros_like(model_GV).scatter(1, ids_G1, 1.0)
        best_GN = model_GV.topk(min(config.choices, model_GV.shape[1])).indices
        ids_GN = torch.cat((best_GN, ids_G1), dim=1)
        columns += ids_GN, model_GV.gather(1, ids_GN), probabilities_GV.gather(1, ids_GN)
    return columns


def _read(tensors: Sequence[Tensor]) -> list[list[list[float]]]:
    """Return the values of several two-dimensional tensors as lists. If the tensors are on a GPU,
    all values are copied at once.
    """
    if not tensors[0].is_cuda:
        return [tensor.tolist() for tensor in tensors]
    # fp64 represents ids and fp32 values exactly.
    values = iter(torch.cat([tensor.flatten().double() for tensor in tensors]).tolist())
    return [
        [list(itertools.islice(values, tensor.shape[1])) for _ in range(len(tensor))]
        for tensor in tensors
    ]


def _chosen(
    config: SamplingConfig, ids: list[float], largest: list[float], *further: list[float]
) -> Chosen | Exception:
    """Return the token that was chosen for a continuation. The arguments after `config` are the
    continuation's rows of the tensors from `_columns`. Return an error if the logits are not
    finite.
    """
    if not math.isfinite(largest[0]):
        return ModelError(_NOT_FINITE)
    token_id = int(ids[0])
    logprob = None
    choices: list[TokenChoice] = []
    if config.logprobs is not None:
        logprob, further = _token_logprob(token_id, *further[:3]), further[3:]
    for one, model, sampled in zip(*further, strict=True):
        choices.append(TokenChoice(int(one), model, sampled, int(one) == token_id))
    # The chosen token is in the last row. This row is dropped if the token is also among the most
    # likely tokens.
    if any(choice.is_chosen for choice in choices[:-1]):
        choices.pop()
    return Chosen(token_id, logprob, choices)


class StopTexts:
    """Passes text through until a stop string occurs. Text that could be the beginning of a stop
    string is held back until the following text shows whether it is a stop string.

    Args:
        texts: the stop strings, which must not be empty.

    Attributes:
        found: True after a stop string has occurred.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.found = False
        self._texts = tuple(texts)
        self._held = ""

    def push(self, piece: str) -> str:
        """Add text. Return the text so far that can't be part of a stop string."""
        if not self._texts:
            return piece
        text = self._held + piece
        found = [start for stop in self._texts if (start := text.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)]
        kept = max(overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """End the text. Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TokenChoice:
    """A candidate for the token at one position.

    Attributes:
        token_id: id of the token.
        model: probability of the token according to the model.
        sampled: sampling probability of the token, after penalties, biases, temperature, min_p,
            top_k and top_p. With temperature 0, the probability is 1 for the chosen token and 0 for
            all other tokens.
        is_chosen: True for the chosen token.
    """

    token_id: int
    model: float
    sampled: float
    is_chosen: bool


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token according to the model, before temperature and all other sampling
    settings are applied.

    Attributes:
        token_id: id of the token.
        logprob: natural logarithm of the token's probability.
        top: (id, log-probability) of each of the most likely tokens, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits_TV: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of the given token and of the most likely tokens at each
    position.

    Args:
        logits_TV: logits of T positions.
        token_ids: the token at each position.
        top: number of most likely tokens at each position.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    ids_T1 = upload(token_ids, logits_TV.device)[:, None]
    columns = _read(_logprob_columns(logits_TV, ids_T1, top))
    found = list(map(_token_logprob, token_ids, *columns))
    if any(math.isnan(one.logprob) for one in found):
        raise ModelError(_NOT_FINITE)
    return found


def _logprob_columns(logits_TV: Tensor, ids_T1: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of the given token at each position, [T, 1]. Also return the ids
    and the log-probabilities of the `top` most likely tokens, [T, N] each.
    """
    logprobs_TV = logits_TV.float().log_softmax(-1)
    best = logprobs_TV.topk(min(top, logprobs_TV.shape[1]))
    return logprobs_TV.gather(1, ids_T1), best.indices, best.values


def _token_logprob(
    token_id: int, logprob: list[float], ids: list[float], values: list[float]
) -> TokenLogprob:
    """Return the log-probability of a token. The last three arguments are the token's rows of the
    tensors from `_logprob_columns`.
    """
    return TokenLogprob(token_id, logprob[0], tuple(zip(map(int, ids), values, strict=True)))
