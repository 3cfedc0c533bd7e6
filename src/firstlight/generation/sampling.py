"""The choice of one token from a model's logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from firstlight.errors import ConfigError, ModelError
from firstlight.generation.config import SamplingConfig


def sample(
    logits_V: Tensor,
    config: SamplingConfig,
    generator: torch.Generator,
    seen: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed_V: Tensor | None = None,
) -> int:
    """Choose one token id from the logits [V] of one position; for the other arguments and the
    errors see `shifted`."""
    shifted_V = shifted(logits_V, config, seen, counts, allowed_V)
    if config.temperature == 0:
        return int(shifted_V.argmax())
    return draw(filter_probabilities(shifted_V, config), generator)


def shifted(
    logits_V: Tensor,
    config: SamplingConfig,
    seen: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Logits [V] with penalties and biases, and without the tokens that are not allowed.

    Args:
        seen: ids that the repetition penalty is for.
        counts: occurrences of each id among the new tokens, for the frequency and the presence
            penalty.
        allowed_V: True for each token that may be chosen, bool [V]; None allows all.

    Raises:
        ConfigError: `logit_bias` names a token that the model doesn't have.
        ModelError: the logits are not finite numbers.
    """
    if not logits_V.max().isfinite():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    if config.repetition_penalty != 1 and seen:
        logits_V = penalize(logits_V, config.repetition_penalty, seen)
    logits_V = shift(logits_V, config, counts or {})
    if allowed_V is not None:
        logits_V = logits_V.masked_fill(~allowed_V.to(logits_V.device), float("-inf"))
    return logits_V


def draw(probabilities_V: Tensor, generator: torch.Generator) -> int:
    """An index, drawn with probabilities [V] that need not sum to 1; never one of 0.

    Sampling by the inverse of the cumulative distribution, because torch.multinomial draws a number
    for every index, which takes twenty times as long with a vocabulary of 50,000. The generator is
    the CPU's, so that a seed means the same text on every device.
    """
    cumulative_V = probabilities_V.cpu().cumsum(0, dtype=torch.float64)
    total = float(cumulative_V[-1])
    drawn = float(torch.rand((), dtype=torch.float64, generator=generator)) * total
    # Below the total also where the product was rounded up to it.
    below = min(drawn, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative_V, below, right=True))


def penalize(logits_V: Tensor, penalty: float, seen: Collection[int]) -> Tensor:
    """Logits [V] (fp32) with those of the tokens seen divided by the penalty where they are
    positive, else multiplied (Keskar et al. 2019, CTRL)."""
    ids = torch.tensor(sorted(set(seen)), device=logits_V.device)
    logits_V = logits_V.float()
    values = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(values > 0, values / penalty, values * penalty))


def shift(logits_V: Tensor, config: SamplingConfig, counts: Mapping[int, int]) -> Tensor:
    """Logits [V] (fp32 where any is changed) less the frequency and the presence penalty, plus the
    bias, as OpenAI's interface defines them: logit - count * frequency_penalty - (count > 0) *
    presence_penalty + bias.

    Args:
        counts: occurrences of each id among the new tokens.

    Raises:
        ConfigError: `logit_bias` names a token that the model doesn't have.
    """
    require_biased_tokens(config, len(logits_V))
    frequency, presence = config.frequency_penalty, config.presence_penalty
    shifts = dict(config.logit_bias)
    for token_id, count in counts.items() if frequency or presence else ():
        shifts[token_id] = shifts.get(token_id, 0.0) - count * frequency - presence
    if not shifts:
        return logits_V
    ids = torch.tensor(list(shifts), device=logits_V.device)
    values = torch.tensor(list(shifts.values()), dtype=torch.float32, device=logits_V.device)
    return logits_V.float().index_add(0, ids, values)


def require_biased_tokens(config: SamplingConfig, vocab_size: int) -> None:
    """Refuse a bias for a token beyond the vocabulary.

    Raises:
        ConfigError: there is one.
    """
    highest = max(config.logit_bias, default=-1)
    if highest >= vocab_size:
        raise ConfigError(
            f"logit_bias names the token id {highest}, and the model has {vocab_size} tokens: "
            f"ids go from 0 to {vocab_size - 1}"
        )


def filter_probabilities(logits_V: Tensor, config: SamplingConfig) -> Tensor:
    """The probabilities [V] to draw from (fp32): temperature, min-p, then top-k, then top-p."""
    logits_V = logits_V.float()
    # From the largest down, so that no temperature, however small, overflows.
    logits_V = (logits_V - logits_V.max()) / max(config.temperature, 1e-30)
    if config.min_p > 0:
        # The likeliest is at 0: p / p_max >= min_p, without a softmax.
        logits_V = logits_V.masked_fill(logits_V < math.log(config.min_p), float("-inf"))
    if 0 < config.top_k < len(logits_V):
        smallest_kept = logits_V.topk(config.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest_kept, float("-inf"))
    probabilities_V = logits_V.softmax(-1)
    if config.top_p < 1:
        ordered, order = probabilities_V.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        # The likeliest has 0 before it, and stays also where top_p rounds to 0 in fp32.
        dropped = (before >= config.top_p) & (before > 0)
        probabilities_V = probabilities_V.index_fill(0, order[dropped], 0.0)
        probabilities_V = probabilities_V / probabilities_V.sum()
    return probabilities_V
