"""Sampling: the choice of tokens from a model's logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

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
    """Choose one token id from the logits [V] of one position.

    Args:
        logits_V: logits of the position.
        config: sampling settings.
        generator: CPU generator of the random numbers; not used with temperature 0.
        seen, counts, allowed_V: see `shifted`.

    Raises:
        ConfigError, ModelError: see `shifted`.
    """
    shifted_V = shifted(logits_V, config, seen, counts, allowed_V=allowed_V)
    if config.temperature == 0:
        return int(shifted_V.argmax())
    return int(draw(filter_probabilities(shifted_V, config).cpu()[None], [generator]))


def sample_rows(
    logits_GV: Tensor, config: SamplingConfig, generators: Sequence[torch.Generator]
) -> list[int | None]:
    """Choose a token id for each row as `sample` does without penalties, biases and `allowed_V`.

    All rows are read from the device at once: a GPU would have to be waited for in each row.

    Args:
        logits_GV: logits of one position of each of G texts.
        config: sampling settings of these texts.
        generators: each text's CPU generator; not used with temperature 0.

    Returns:
        The ids; None for a row whose logits are not finite numbers.
    """
    finite_G = logits_GV.amax(-1).isfinite()
    if config.temperature == 0:
        chosen_G = logits_GV.argmax(-1)
    else:
        probabilities_GV = filter_probabilities(logits_GV, config)
        if not logits_GV.is_cuda:  # Apple's GPUs have no fp64
            probabilities_GV = probabilities_GV.cpu()
        chosen_G = draw(probabilities_GV, generators)
    finite_G = finite_G.to(chosen_G)  # its device, too
    found, finite = torch.stack((chosen_G, finite_G)).tolist()
    return [
        token_id if is_finite else None for token_id, is_finite in zip(found, finite, strict=True)
    ]


def shifted(
    logits_V: Tensor,
    config: SamplingConfig,
    seen: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Logits [V] after penalties and biases, with -inf for tokens that are not allowed.

    Args:
        logits_V: the model's logits of one position.
        config: sampling settings.
        seen: ids to which the repetition penalty applies.
        counts: token id -> its occurrences among the new tokens, for the frequency and presence
            penalties.
        allowed_V: True for tokens that may be chosen, bool; None allows all.

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


def draw(probabilities_GV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw an index [G] by each row of probabilities [G, V], which need not sum to 1. An index
    with probability 0 is never drawn.

    It uses the inverse of the cumulative distribution. torch.multinomial draws a number for every
    index, which takes twenty times as long with a vocabulary of 50,000. The generators are on the
    CPU, so that a seed gives the same text on every device.
    """
    cumulative_GV = probabilities_GV.cumsum(-1, dtype=torch.float64)
    totals_G = cumulative_GV[:, -1]
    drawn = [torch.rand((), dtype=torch.float64, generator=one) for one in generators]
    below_G = torch.stack(drawn).to(totals_G.device) * totals_G
    # Rounding may have made a product equal to its total, which is beyond the last index.
    below_G = below_G.minimum(totals_G.nextafter(torch.zeros_like(totals_G)))
    return torch.searchsorted(cumulative_GV, below_G[:, None], right=True)[:, 0]


def penalize(logits_V: Tensor, penalty: float, seen: Collection[int]) -> Tensor:
    """Apply the repetition penalty (Keskar et al. 2019, CTRL, arXiv 1909.05858): logits of the seen
    tokens are divided by the penalty if they are positive, else multiplied. Returns fp32 [V]."""
    ids = torch.tensor(sorted(set(seen)), device=logits_V.device)
    logits_V = logits_V.float()
    values = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(values > 0, values / penalty, values * penalty))


def shift(logits_V: Tensor, config: SamplingConfig, counts: Mapping[int, int]) -> Tensor:
    """Apply frequency penalty, presence penalty and biases, as OpenAI's API defines them: logit -
    count * frequency_penalty - (count > 0) * presence_penalty + bias.

    Args:
        logits_V: logits of one position.
        config: sampling settings.
        counts: token id -> its occurrences among the new tokens.

    Returns:
        fp32 [V], or `logits_V` itself if nothing changes.

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
    """Refuse biases for ids beyond the vocabulary.

    Raises:
        ConfigError: `logit_bias` has such an id.
    """
    highest = max(config.logit_bias, default=-1)
    if highest >= vocab_size:
        raise ConfigError(
            f"logit_bias names the token id {highest}, and the model has {vocab_size} tokens: "
            f"ids go from 0 to {vocab_size - 1}"
        )


def filter_probabilities(logits_V: Tensor, config: SamplingConfig) -> Tensor:
    """Probabilities to draw from, fp32 [..., V], from logits [..., V]: temperature, min-p, top-k
    and top-p (Holtzman et al. 2020, arXiv 1904.09751) are applied in this order."""
    logits_V = logits_V.float()
    # The greatest logit becomes 0, so that a small temperature can't overflow.
    logits_V = (logits_V - logits_V.amax(-1, keepdim=True)) / max(config.temperature, 1e-30)
    if config.min_p > 0:
        # The likeliest token has logit 0, so that log(p / p_max) is the logit itself.
        logits_V = logits_V.masked_fill(logits_V < math.log(config.min_p), float("-inf"))
    if 0 < config.top_k < logits_V.shape[-1]:
        smallest_kept = logits_V.topk(config.top_k).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < smallest_kept, float("-inf"))
    probabilities_V = logits_V.softmax(-1)
    if config.top_p < 1:
        ordered, order = probabilities_V.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        # `before > 0` keeps the likeliest token also if top_p is rounded to 0 in fp32.
        dropped = (before >= config.top_p) & (before > 0)
        probabilities_V = probabilities_V.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        probabilities_V = probabilities_V / probabilities_V.sum(-1, keepdim=True)
    return probabilities_V
