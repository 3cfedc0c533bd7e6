"""Token ids that a plain model goes on with, and texts that continue by given logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.generation.batch import BatchDecoder, require_prompt
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation, choose_tokens
from firstlight.generation.engine import pieces_of
from firstlight.generation.sampling import filter_probabilities, shifted
from firstlight.models import Model


def generate_ids(
    model: Model,
    prompt_ids: Sequence[int],
    config: SamplingConfig,
    eos_token_ids: Sequence[int] = (),
) -> Iterator[int]:
    """New token ids after `prompt_ids`, until an end token (not yielded), `max_new_tokens` or the
    model's context limit."""
    require_prompt(model, prompt_ids)
    limit = model.config.max_position_embeddings
    text = Continuation(prompt_ids, config, context=limit, eos_token_ids=eos_token_ids)
    decoder = BatchDecoder(model, 1, len(prompt_ids) + config.max_new_tokens)
    for count, _ in enumerate(pieces_of(text, decoder), start=1):
        yield from text.token_ids[count - 1 : count]


def push(text: Continuation, logits_V: Tensor) -> str:
    """Choose the next token of a text from logits, and append it."""
    (chosen,) = choose_tokens([text], logits_V[None])
    return text.push(chosen)


def sample(
    logits_V: Tensor,
    config: SamplingConfig,
    generator: torch.Generator,
    seen: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed_V: Tensor | None = None,
) -> int:
    """The next token of one text alone, by the inverse of the cumulative distribution."""
    logits_V = shifted(logits_V, config, seen, counts, allowed_V=allowed_V)
    if config.temperature == 0:
        return int(logits_V.argmax())
    cumulative = filter_probabilities(logits_V, config).cumsum(-1, dtype=torch.float64)
    below = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    below = min(below, cumulative[-1].nextafter(torch.zeros_like(cumulative[-1])))
    return int(torch.searchsorted(cumulative, below, right=True))
