"""The loss on a mix of corpora, from the losses on each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from firstlight.evaluation.perplexity import Evaluation


def mixed_evaluation(
    parts: Sequence[int], found: Sequence[Evaluation], bits_a_nat: Sequence[float]
) -> Evaluation:
    """What evaluations of the corpora of a mix come to together.

    The loss is the mean of the corpora's losses by their weights, whatever the sizes of their
    splits: what a token of the mix costs, as training draws it. Bits per byte are those of
    such a token over the bytes of text that it stands for.

    Args:
        parts: the weight of each corpus.
        found: its evaluation: all with the same split, seq_len and document_masking.
        bits_a_nat: its `perplexity.bits_a_nat`.
    """
    total = sum(parts)
    loss = math.fsum(p * one.loss for p, one in zip(parts, found, strict=True)) / total
    bytes_a_bit = math.fsum(p / bits for p, bits in zip(parts, bits_a_nat, strict=True)) / total
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / bytes_a_bit,
        gzip_bits_per_byte=None,
        tokens=sum(one.tokens for one in found),
        rows=sum(one.rows for one in found),
        total_rows=sum(one.total_rows for one in found),
        split=found[0].split,
        seq_len=found[0].seq_len,
        document_masking=found[0].document_masking,
    )
