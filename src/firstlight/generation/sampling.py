"""Sample tokens from a model's logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from firstlight.errors import ConfigError
from firstlight.generation.config import SamplingConfig
from firstlight.hardware.device import upload


def sample_rows(
    logits_GV: Tensor, config: SamplingConfig, numbers_G: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Choose a token id for each row of logits, without copying anything from the device to the
    host.

    Args:
        logits_GV: logits for one position in each of G sequences, after penalties and biases.
        config: sampling settings, which are the same for all sequences.
        numbers_G: one number from `uniform_numbers` for each sequence. It can be None only if the
            temperature is 0.

    Returns:
        The ids, int64 [G, 1], and the probabilities from which they were drawn, fp32 [G, V]. With
        temperature 0, the probabilities are None.
    """
    if config.temperature == 0:
        return logits_GV.argmax(-1, keepdim=True), None
    assert numbers_G is not None
    probabilities_GV = filter_probabilities(logits_GV, config)
    return draw(probabilities_GV, numbers_G), probabilities_GV


def shifted(
    logits_V: Tensor,
    config: SamplingConfig,
    seen: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Return logits [V] after penalties and biases, with -inf for tokens that are not allowed.

    Args:
        logits_V: the model's logits for one position.
        config: sampling settings.
        seen: ids to which the repetition penalty applies.
        counts: number of occurrences of each token id among the new tokens, for the frequency and
            presence penalties.
        allowed_V: bool mask of the tokens that can be chosen; None allows all tokens.

    Raises:
        ConfigError: `logit_bias` contains an id beyond the model's vocabulary.
    """
    if config.repetition_penalty != 1 and seen:
        logits_V = penalize(logits_V, config.repetition_penalty, seen)
    logits_V = shift(logits_V, config, counts or {})
    if allowed_V is not None:
        logits_V = logits_V.masked_fill(~upload(allowed_V, logits_V.device), float("-inf"))
    return logits_V


def uniform_numbers(seed: int) -> Iterator[float]:
    """Yield an endless sequence of random numbers in [0, 1) with full fp64 precision. The numbers
    are drawn on the CPU, so that a seed gives the same text on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        # Numbers are drawn in blocks, because one call per number would take as long as the rest of
        # a small model's decoding step.
        yield from torch.rand(64, dtype=torch.float64, generator=generator).tolist()


def draw(probabilities_GV: Tensor, numbers_G: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative distribution. An index with probability 0
    is never drawn.

    torch.multinomial draws a random number for every index, which takes twenty times as long with a
    vocabulary of 50,000 tokens.

    Args:
        probabilities_GV: probabilities of the indices in each row, which need not sum to 1.
        numbers_G: one number from `uniform_numbers` per row, fp64.

    Returns:
        The indices, int64 [G, 1].
    """
    cumulative_GV = probabilities_GV.cumsum(-1, dtype=torch.float64)
    totals_G = cumulative_GV[:, -1]
    # Stay below the total. The product can be rounded up to the total, and the index would then be
    # out of range.
    below_G = (numbers_G * totals_G).minimum(totals_G.nextafter(torch.zeros_like(totals_G)))
    found_G1 = torch.searchsorted(cumulative_GV, below_G[:, None], right=True)
    # Limit the index, which is out of range if the probabilities are NaN.
    return found_G1.clamp_(max=probabilities_GV.shape[-1] - 1)


def penalize(logits_V: Tensor, penalty: float, seen: Collection[int]) -> Tensor:
    """Return the logits, fp32 [V], after the repetition penalty (Keskar et al. 2019, CTRL, arXiv
    1909.05858). Positive logits of the tokens in `seen` are divided by the penalty. Negative logits
    are multiplied by the penalty.
    """
    ids = upload(sorted(set(seen)), logits_V.device)
    logits_V = logits_V.float()
    values = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(values > 0, values / penalty, values * penalty))


def shift(logits_V: Tensor, config: SamplingConfig, counts: Mapping[int, int]) -> Tensor:
    """Apply the frequency penalty, presence penalty and biases as defined by OpenAI's API:

        logit - count * frequency_penalty - (count > 0) * presence_penalty + bias

    Args:
        logits_V: logits for one position.
        config: sampling settings.
        counts: number of occurrences of each token id among the new tokens.

    Returns:
        fp32 [V], or `logits_V` itself if nothing changes.

    Raises:
        ConfigError: `logit_bias` contains an id beyond the model's vocabulary.
    """
    require_biased_tokens(config, len(logits_V))
    frequency, presence = config.frequency_penalty, config.presence_penalty
    shifts = dict(config.logit_bias)
    for token_id, count in counts.items() if frequency or presence else ():
        shifts[token_id] = shifts.get(token_id, 0.0) - count * frequency - presence
    if not shifts:
        return logits_V
    ids = upload(list(shifts), logits_V.device)
    values = upload(list(shifts.values()), logits_V.device, torch.float32)
    return logits_V.float().index_add(0, ids, values)


def require_biased_tokens(config: SamplingConfig, vocab_size: int) -> None:
    """Raise an error if a bias is set for an id beyond the vocabulary.

    Raises:
        ConfigError: `logit_bias` contains such an id.
    """
    highest = max(config.logit_bias, default=-1)
    if highest >= vocab_size:
        raise ConfigError(
            f"logit_bias contains token id {highest}, but the model has {vocab_size} tokens: use "
            f"ids from 0 to {vocab_size - 1}"
        )


def filter_probabilities(logits_V: Tensor, config: SamplingConfig) -> Tensor:
    """Return the probabilities to draw from, fp32 [..., V], for logits [..., V]. Temperature,
    min-p, top-k and top-p (Holtzman et al. 2020, arXiv 1904.09751) are applied in this order."""
    logits_V = logits_V.float()
    # The largest logit is shifted to 0, so that dividing by a small temperature can't overflow.
    logits_V = (logits_V - logits_V.amax(-1, keepdim=True)) / max(config.temperature, 1e-30)
    if config.min_p > 0:
        # The most likely token has logit 0, so the logit of any token is log(p / p_max).
        logits_V = logits_V.masked_fill(logits_V < math.log(config.min_p), float("-inf"))
    if 0 < config.top_k < logits_V.shape[-1]:
        smallest_kept = logits_V.topk(config.top_k).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < smallest_kept, float("-inf"))
    probabilities_V = logits_V.softmax(-1)
    if config.top_p < 1:
        ordered, order = probabilities_V.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        # `before > 0` keeps the most likely token even if top_p is rounded to 0 in fp32.
        dropped = (before >= config.top_p) & (before > 0)
        probabilities_V = probabilities_V.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        probabilities_V = probabilities_V / probabilities_V.sum(-1, keepdim=True)
    return probabilities_V
