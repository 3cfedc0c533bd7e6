"""Scores of texts: losses of rows, log-likelihoods of continuations, and the results of tasks, as
means with their standard errors.

Sums are `math.fsum`'s, which rounds once: rows that several processes evaluated give, in any
split and any order, the same bits as if one process had evaluated them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.data.corpus import shuffled_index
from firstlight.data.loader import IGNORE_INDEX
from firstlight.efficiency import LossFunction
from firstlight.errors import ModelError
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import LoadedModel


def perplexity_of(loss: float) -> float:
    """exp(loss); of a diverged model's loss, whose perplexity would overflow, a large number."""
    return math.exp(min(loss, 700.0))


def row_losses(model: Model) -> LossFunction:
    """A loss function that gives the summed loss of each row, fp64 [B], instead of one sum.

    The logits of all rows of a batch are in memory at once.
    """

    def losses(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return token_losses(model, input_ids, labels, document_ids).double().sum(1)

    return losses


def token_losses(
    model: Model, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None
) -> Tensor:
    """The loss of each token in nats [B, T], fp32 at least; 0 where a label is -100.

    Args:
        model: the model.
        input_ids, labels, document_ids: int64 [B, T]; see `LanguageModel.forward`.
    """
    logits_BTV = model(input_ids, document_ids=document_ids)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(
        logits_BTV.to(wide).flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view_as(labels)


@dataclass(frozen=True)
class TokenPair:
    """The ids of a text and of its continuation.

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

    A text that doesn't fit into the model's context is cut from the left. A context that several
    continuations share is computed once, up to its last token, and contexts of one length together;
    this rounds differently from one pass over each pair, in the last digits of fp32.

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
        # A text's beginning is computed as a part of the whole.
        cache.least_length = once.least_length = shared + longest
        model(before, cache=once, logits_to_keep=1)
        cache.begin_with(once, torch.tensor(context_of, device=device))
    logits_BTV = model(torch.cat((last, targets[:, :-1]), 1), cache=cache)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    logprobs_BT = logits_BTV.log_softmax(-1, dtype=wide).gather(-1, targets[..., None])[..., 0]
    sums = logprobs_BT.double().where(valid, 0.0).sum(1)
    if not sums.isfinite().all():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    greedy = ((logits_BTV.argmax(-1) == targets) | ~valid).all(1)
    return dict(zip(numbers, map(Likelihood, sums.tolist(), greedy.tolist()), strict=True))


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as int64 [B, T], and the mask of ids that are not padding, bool [B, T]."""
    longest = max(map(len, rows))
    ids = [[*row, *[0] * (longest - len(row))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return torch.tensor(ids, device=device), torch.arange(longest, device=device) < lengths[:, None]


#: Called with the texts scored and to be scored; may raise.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Metric:
    """A figure over a task's items.

    Attributes:
        value: the figure.
        stderr: its standard error, None where there is none.
    """

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """A model's results in a task.

    Attributes:
        task: its name.
        metrics: metrics by name, such as `acc`.
        items: number of scored items; None for a group of tasks.
    """

    task: str
    metrics: Mapping[str, Metric]
    items: int | None

    def __str__(self) -> str:
        """`hellaswag: acc 0.27 ± 0.01, acc_norm 0.26 ± 0.01`."""
        shown = (f"{n} {with_error(m.value, m.stderr)}" for n, m in self.metrics.items())
        return f"{self.task}: {', '.join(shown)}"

    def figures(self) -> dict[str, float | None]:
        """`{"acc": ..., "acc_stderr": ...}` and so on."""
        found: dict[str, float | None] = {}
        for name, metric in self.metrics.items():
            found |= {name: metric.value, f"{name}_stderr": metric.stderr}
        return found


class Task(Protocol):
    """A task that is ready to be scored: its items are read, and fit the model."""

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """Score a model; several results where the task is a group.

        Args:
            loaded: a model with the tokenizer and the context that the task was made ready for.
            batch_size: texts at a time; changes the speed only.
            on_texts: called after each batch.

        Raises:
            ModelError: the model's outputs are no numbers.
        """


@dataclass(frozen=True)
class RowLoss:
    """The loss of one row, or of several that were summed together.

    Attributes:
        row: its number in the split; that of the first.
        loss: nats, summed over the predicted tokens.
        tokens: number of those.
    """

    row: int
    loss: float
    tokens: int


def sampled_rows(total: int, count: int, seed: int) -> list[int]:
    """`count` different rows of `total`, drawn at random, ascending; all rows if there are no more.

    The rows of a smaller sample are among those of a larger one with the same seed.
    """
    return sorted(shuffled_index(i, total, seed, 0) for i in range(min(count, total)))


def merged(parts: Iterable[Iterable[RowLoss]]) -> list[RowLoss]:
    """The rows of all parts, such as the ranks of a job, in ascending order.

    Raises:
        ValueError: two parts have the same row.
    """
    rows = sorted((row for part in parts for row in part), key=lambda row: row.row)
    for one, other in itertools.pairwise(rows):
        if one.row == other.row:
            raise ValueError(f"row {one.row} was evaluated twice")
    return rows


def mean_loss(rows: Sequence[RowLoss]) -> float:
    """Nats a token: the rows' losses over their tokens, of which there is at least one."""
    return math.fsum(row.loss for row in rows) / sum(row.tokens for row in rows)


def standard_error(rows: Sequence[RowLoss], total_rows: int) -> float:
    """Standard error of `mean_loss` as an estimate of that of all rows.

    The mean is a ratio of two sums, since rows differ in their number of tokens: the linearised
    variance of the ratio estimator over a simple random sample without replacement, with the
    finite-population correction (Cochran, Sampling Techniques, 1977, section 2.11):

        (1 - n/N) / n * sum((loss_i - mean * tokens_i)^2) / (n - 1) / (tokens/n)^2

    Args:
        rows: the sample, n of them, at least two.
        total_rows: N, number of rows that the sample is drawn from.
    """
    n = len(rows)
    assert 2 <= n <= total_rows
    mean = mean_loss(rows)
    squares = math.fsum((row.loss - mean * row.tokens) ** 2 for row in rows)
    tokens_a_row = sum(row.tokens for row in rows) / n
    return math.sqrt((1 - n / total_rows) / n * squares / (n - 1)) / tokens_a_row


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of equally weighted values and its standard error, the sample's standard deviation
    over the root of their number; None for fewer than two values.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (n - 1) / n)


def with_error(value: float, error: float | None) -> str:
    """`3.214 ± 0.012`: two digits of the error, and as many decimals of the value; four decimals
    where there is no error."""
    if error is None:
        return f"{value:.4f}"
    if error == 0:
        return f"{value:.4f} ± 0"
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 9)
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"
