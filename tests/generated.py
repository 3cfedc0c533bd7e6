"""Token ids that a plain model goes on with, as its texts are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firstlight.generation.batch import BatchDecoder, require_prompt
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import pieces_of
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
