"""Room for new tokens in a model that is there already."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.models import Model, padded_vocab_size
from firstlight.weights import embedding_name


@torch.no_grad()
def grow_vocabulary(
    model: Model,
    tokens_before: int,
    tokens_now: int,
    *,
    copied_from: int | None = None,
    vocab_multiple: int = 1,
) -> None:
    """Give the tokens from `tokens_before` up to `tokens_now` rows in the embedding and the head.

    A new token's rows are the mean of the old tokens' (Hewitt 2021: the new token is then as
    likely as the average one, and takes little from the others), or those of one old token. The
    old rows stay as they are to the last bit; their logits, too, but for the rounding of a matrix
    product of another size (none at most sizes, 2e-8 seen). A tied head stays tied.

    Args:
        model: changed in place, its `config` too. Where it has rows beyond `tokens_before`
            already, as padded vocabularies do, those of new tokens are overwritten.
        tokens_before: ids that the old tokenizer had.
        tokens_now: ids that the new one has.
        copied_from: the old token whose rows are copied; None takes the mean.
        vocab_multiple: the rows are padded to a multiple of this.
    """
    assert tokens_before <= model.config.vocab_size
    assert copied_from is None or copied_from < tokens_before
    vocab_size = max(tokens_now, model.config.vocab_size)
    rows = padded_vocab_size(vocab_size, vocab_multiple)
    tied = model.config.tie_word_embeddings
    for name in (embedding_name(model), *(() if tied else ("lm_head.weight",))):
        module = model.get_submodule(name.removesuffix(".weight"))
        old = module.weight
        assert isinstance(old, Tensor)
        grown = old.new_zeros(rows, old.shape[1])
        grown[: len(old)] = old[:rows]
        known = old[:tokens_before]
        source = known.double().mean(0) if copied_from is None else old[copied_from]
        grown[tokens_before:tokens_now] = source.to(old.dtype)
        module.weight = nn.Parameter(grown)
    model.config = model.config.model_copy(update={"vocab_size": vocab_size})
    model.finish_loading()
