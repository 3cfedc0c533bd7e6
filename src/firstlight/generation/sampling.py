"""From logits to a token: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.errors import ConfigError, ModelError


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen and how many.

    Attributes:
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token; higher spreads the choice.
        top_k: only the k likeliest tokens, and any as likely as the last of them; 0 is all.
        top_p: only the fewest likeliest tokens whose probabilities sum to p; 1 is all
            (Holtzman et al. 2020). Applied after temperature and top_k.
        seed: the same seed gives the same text; None draws one.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        limits = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2^63"),
        )
        for name, fine, allowed in limits:
            if not fine:
                raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)}")


def sample(logits_V: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """Choose one token id from the logits [V] of one position.

    Raises:
        ModelError: the logits are not finite numbers.
    """
    if not logits_V.max().isfinite():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    if config.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = filter_probabilities(logits_V, config)
    # Drawn on the CPU, so that a seed means the same text on every device.
    return int(torch.multinomial(probabilities_V.cpu(), 1, generator=generator))


def filter_probabilities(logits_V: Tensor, config: SamplingConfig) -> Tensor:
    """The probabilities [V] to draw from (fp32): temperature, then top-k, then top-p."""
    logits_V = logits_V.float()
    # From the largest down, so that no temperature, however small, overflows.
    logits_V = (logits_V - logits_V.max()) / max(config.temperature, 1e-30)
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
