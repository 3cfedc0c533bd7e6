"""Losses of rows, and log-likelihoods of continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.data.loader import IGNORE_INDEX
from firstlight.efficiency import LossFunction
from firstlight.errors import ModelError
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer


def row_losses(model: Model) -> LossFunction:
    """A loss function that gives the summed loss of each row, fp64 [B], instead of one sum.

    The logits of all rows of a batch are in memory at once.
    """

    def losses(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        logits_BTV = model(input_ids, document_ids=document_ids)
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        losses_BT = F.cross_entropy(
            logits_BTV.to(wide).flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        ).view_as(labels)
        return losses_BT.double().sum(1)

    return losses


@dataclass(frozen=True)
class TokenPair:
    """The ids of a text and of what comes after it.

    Attributes:
        context: ids of the text, at least one.
        continuation: ids that come after it: at least one, at most the model's context.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation.

    Attributes:
        logprob: natural logarithm of its probability.
        is_greedy: True where each of its tokens was the likeliest.
    """

    logprob: float
    is_greedy: bool


def encode_choices(
    tokenizer: Tokenizer, context: str, continuations: Sequence[str]
) -> list[TokenPair]:
    """A context with each of several continuations, as lm-evaluation-harness encodes them
    (`TemplateLM._encode_pair`): white space at the context's end goes over to the continuation,
    the two are encoded as one text, and the continuation is what comes after as many tokens as the
    context has alone.

    Args:
        context: not empty.
        continuations: texts with their leading space.
    """
    stripped = context.rstrip()
    moved = context[len(stripped) :]
    start = [tokenizer.separator_id] if tokenizer.add_bos or not stripped else []
    alone, *whole = tokenizer.encode_batch(
        [stripped, *(stripped + moved + continuation for continuation in continuations)]
    )
    return [TokenPair((*start, *alone), tuple(ids[len(alone) :])) for ids in whole]


@torch.inference_mode()
def likelihoods(
    model: Model,
    pairs: Sequence[TokenPair],
    *,
    batch_size: int,
    on_pairs: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:
    """The log-likelihood of each continuation: the sum of the log-softmax at its tokens.

    What doesn't fit into the model's context is cut from the left. A context that several
    continuations share is computed once, up to its last token, and contexts of one length together:
    all of which rounds otherwise than one pass over each pair, by the last digits of fp32.

    Args:
        model: a model in evaluation mode.
        pairs: contexts and continuations.
        batch_size: continuations at a time, but all those of a context; changes the speed only.
        on_pairs: called after each batch with the pairs done and to do; may raise.

    Raises:
        ModelError: a log-likelihood is not a finite number.
    """
    results: dict[int, Likelihood] = {}
    for batch in _batches(pairs, model.config.max_position_embeddings, batch_size):
        results |= _score(model, pairs, batch)
        if on_pairs is not None:
            on_pairs(len(results), len(pairs))
    return [results[number] for number in range(len(pairs))]


#: Contexts of one length, each with the numbers of its pairs.
_Batch = list[tuple[tuple[int, ...], list[int]]]


def _batches(pairs: Sequence[TokenPair], limit: int, batch_size: int) -> Iterator[_Batch]:
    """The longest contexts first: what doesn't fit into memory is known at once."""
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        assert pair.context
        assert 0 < len(pair.continuation) <= limit
        # The last token is only predicted.
        room = limit + 1 - len(pair.continuation)
        by_context.setdefault(pair.context[-room:], []).append(number)
    batch: _Batch = []
    for context, numbers in sorted(by_context.items(), key=lambda item: -len(item[0])):
        size = sum(len(others) for _, others in batch) + len(numbers)
        if batch and (len(batch[0][0]) != len(context) or size > batch_size):
            yield batch
            batch = []
        batch.append((context, numbers))
    if batch:
        yield batch


def _score(model: Model, pairs: Sequence[TokenPair], batch: _Batch) -> dict[int, Likelihood]:
    """The likelihoods of a batch's pairs by number."""
    parameter = next(model.parameters())
    device = parameter.device
    numbers = [number for _, others in batch for number in others]
    context_of = [row for row, (_, others) in enumerate(batch) for _ in others]
    contexts = torch.tensor([context for context, _ in batch], device=device)
    targets, valid = _padded([pairs[number].continuation for number in numbers], device)
    before, last = contexts[:, :-1], contexts[context_of, -1:]
    shared, longest = before.shape[1], targets.shape[1]
    cache = model.make_cache(len(numbers), shared + longest, parameter.dtype)
    if shared:
        once = model.make_cache(len(batch), shared, parameter.dtype)
        model(before, cache=once, logits_to_keep=1)
        pairs_of_layers = zip((*cache.keys, *cache.values), (*once.keys, *once.values), strict=True)
        for layer, computed in pairs_of_layers:
            layer[:, :, :shared] = computed[context_of]
        cache.length = shared
    logits_BTV = model(torch.cat((last, targets[:, :-1]), 1), cache=cache)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    logprobs_BT = logits_BTV.log_softmax(-1, dtype=wide).gather(-1, targets[..., None])[..., 0]
    sums = logprobs_BT.double().where(valid, 0.0).sum(1)
    if not sums.isfinite().all():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    greedy = ((logits_BTV.argmax(-1) == targets) | ~valid).all(1)
    return dict(zip(numbers, map(Likelihood, sums.tolist(), greedy.tolist()), strict=True))


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as int64 [B, T], and where they are no padding, bool [B, T]."""
    longest = max(map(len, rows))
    ids = [[*row, *[0] * (longest - len(row))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return torch.tensor(ids, device=device), torch.arange(longest, device=device) < lengths[:, None]
