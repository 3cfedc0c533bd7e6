"""Compute the losses of rows, the log-likelihoods of continuations, and task results with standard
errors.

Sums are computed with `math.fsum`, which rounds only the final result. A sum over rows is therefore
bitwise identical regardless of the order of the rows and how they are divided among processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.data.corpus import shuffled_index
from firstlight.data.loader import IGNORE_INDEX
from firstlight.errors import ModelError
from firstlight.lora.loading import LoadedModel
from firstlight.methods import LossFunction
from firstlight.methods.attention import varying_lengths
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer


def perplexity_of(loss: float) -> float:
    """Return exp(loss). If exp would overflow, as it does for a model that has diverged, return a
    large finite number.
    """
    return math.exp(min(loss, 700.0))


def row_losses(model: Model) -> LossFunction:
    """Return a loss function that computes one summed loss per row, fp64 [B] in nats, instead of a
    single sum for the batch. The loss function materialises the logits of the entire batch, [B, T,
    V].
    """

    def losses(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return token_losses(model, input_ids, labels, document_ids).double().sum(1)

    return losses


def token_losses(
    model: Model, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None
) -> Tensor:
    """Return the loss of each token in nats, [B, T], in fp32 or higher precision. The loss is 0
    where the label is -100.

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
    """Token ids of a context and its continuation.

    Attributes:
        context: token ids of the context, at least one.
        continuation: token ids of the continuation, at least one and at most the model's context
            length.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation.

    Attributes:
        logprob: natural logarithm of the continuation's probability.
        is_greedy: True if every token of the continuation is the most probable one, which means
            that greedy decoding would generate the continuation.
    """

    logprob: float
    is_greedy: bool


def encode_choices(
    tokenizer: Tokenizer, context: str, continuations: Sequence[str]
) -> list[TokenPair]:
    """Encode a context with each of several continuations, in the same way as lm-evaluation-harness
    (`TemplateLM._encode_pair`).

    Whitespace at the end of the context is moved to the continuation. Context and continuation are
    encoded as one string. If the context is n tokens long when it is encoded on its own, all tokens
    after the first n belong to the continuation.

    Args:
        tokenizer: the model's tokenizer.
        context: non-empty string.
        continuations: strings, including their leading spaces.
    """
    stripped = context.rstrip()
    moved = context[len(stripped) :]
    start = [tokenizer.separator_id] if tokenizer.add_bos or not stripped else []
    alone, *whole = tokenizer.encode_batch(
        [stripped, *(stripped + moved + continuation for continuation in continuations)]
    )
    return [TokenPair((*start, *alone), tuple(ids[len(alone) :])) for ids in whole]


@torch.inference_mode()
@varying_lengths()
def likelihoods(
    model: Model,
    pairs: Sequence[TokenPair],
    *,
    batch_size: int,
    on_pairs: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:
    """Return the log-likelihood of each continuation, which is the sum of the log-probabilities of
    its tokens.

    If context and continuation don't fit into the model's context length, the context is truncated
    from the left. The forward pass over a context is shared by all of its continuations, and
    contexts of the same length are processed together. The results may differ in the last fp32
    digits from those of a separate forward pass for each pair.

    Args:
        model: a model in evaluation mode.
        pairs: contexts and continuations.
        batch_size: maximum number of continuations per forward pass, which affects only the speed.
            Continuations of the same context are always processed in the same pass.
        on_pairs: function that is called after each batch with the number of completed pairs and
            the total number of pairs. It may raise an error.

    Raises:
        ModelError: a log-likelihood is not finite.
    """
    results: dict[int, Likelihood] = {}
    for batch in _batches(pairs, model.config.max_position_embeddings, batch_size):
        results |= _score(model, pairs, batch)
        if on_pairs is not None:
            on_pairs(len(results), len(pairs))
    return [results[number] for number in range(len(pairs))]


#: A batch of contexts with the same length. For each context, it contains the indices of the pairs
#: with that context.
_Batch = list[tuple[tuple[int, ...], list[int]]]


def _batches(pairs: Sequence[TokenPair], limit: int, batch_size: int) -> Iterator[_Batch]:
    """Group pairs of a context and a continuation into batches. The longest contexts come first, so
    that an out-of-memory error occurs early."""
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        assert pair.context
        assert 0 < len(pair.continuation) <= limit
        # The last token is predicted but is not an input, so it does not need a position.
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
    """Return the likelihoods of the continuations in a batch, keyed by the indices of the pairs."""
    parameter = next(model.parameters())
    device = parameter.device
    numbers = [number for _, others in batch for number in others]
    context_of = [row for row, (_, others) in enumerate(batch) for _ in others]
    contexts = torch.tensor([context for context, _ in batch], device=device)
    targets, valid = _padded([pairs[number].continuation for number in numbers], device)
    # First, fill the cache by processing each context without its last token. The last token
    # predicts the first token of each continuation, so it is processed together with the
    # continuations.
    before, last = contexts[:, :-1], contexts[context_of, -1:]
    shared, longest = before.shape[1], targets.shape[1]
    cache = model.make_cache(len(numbers), shared + longest, parameter.dtype)
    if shared:
        once = model.make_cache(len(batch), shared, parameter.dtype)
        # Some position embeddings depend on the length of the sequence. In both passes, use the
        # position embeddings of the full sequence.
        cache.least_length = once.least_length = shared + longest
        model(before, cache=once, logits_to_keep=1)
        cache.begin_with(once, torch.tensor(context_of, device=device))
    logits_BTV = model(torch.cat((last, targets[:, :-1]), 1), cache=cache)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    logprobs_BT = logits_BTV.log_softmax(-1, dtype=wide).gather(-1, targets[..., None])[..., 0]
    sums = logprobs_BT.double().where(valid, 0.0).sum(1)
    if not sums.isfinite().all():
        raise ModelError(
            "the model's outputs are not finite: the weights are damaged, or the training has "
            "diverged; use another checkpoint"
        )
    greedy = ((logits_BTV.argmax(-1) == targets) | ~valid).all(1)
    return dict(zip(numbers, map(Likelihood, sums.tolist(), greedy.tolist()), strict=True))


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad the token ids of several rows with 0. Return the padded ids, int64 [B, T], and a mask of
    the positions that are not padding, bool [B, T].
    """
    longest = max(map(len, rows))
    ids = [[*row, *[0] * (longest - len(row))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return torch.tensor(ids, device=device), torch.arange(longest, device=device) < lengths[:, None]


#: Function that is called with the number of scored sequences and the total number of sequences. It
#: may raise an error.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Metric:
    """The value of a metric, computed over the items of a task.

    Attributes:
        value: value of the metric.
        stderr: standard error of the value; None if it is not available.
    """

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """The results of a model on a task.

    Attributes:
        task: name of the task.
        metrics: metrics, keyed by name, such as `acc`.
        items: number of scored items; None for a group of tasks.
        chat_template: True if the items were rendered with the model's chat template.
        item_scores: scores of the individual items, keyed by the name of the metric. It contains
            only metrics that have one number per item.
    """

    task: str
    metrics: Mapping[str, Metric]
    items: int | None
    chat_template: bool = False
    item_scores: Mapping[str, Sequence[float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __str__(self) -> str:
        """Return the results as a string, such as `hellaswag: acc 0.27 ± 0.01, acc_norm 0.26 ±
        0.01`.
        """
        shown = (f"{n} {with_error(m.value, m.stderr)}" for n, m in self.metrics.items())
        return f"{self.task}: {', '.join(shown)}"

    def figures(self) -> dict[str, float | None]:
        """Return the values and standard errors of all metrics, such as `{"acc": ..., "acc_stderr":
        ...}`.
        """
        found: dict[str, float | None] = {}
        for name, metric in self.metrics.items():
            found |= {name: metric.value, f"{name}_stderr": metric.stderr}
        return found


class Task(Protocol):
    """A task that is ready to be scored. Its items have been loaded and checked for compatibility
    with the model.
    """

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """Score a model. Return one result for a task, and several for a task group.

        Args:
            loaded: a model with the tokenizer and context length for which the task was prepared.
            batch_size: number of sequences per forward pass, which affects only the speed.
            on_texts: called after each batch.

        Raises:
            ModelError: the model's outputs contain NaN or infinity.
        """


@dataclass(frozen=True)
class RowLoss:
    """Loss of a row or of a batch of rows.

    Attributes:
        row: index of the row in the split; for a batch, the index of its first row.
        loss: loss in nats, summed over the predicted tokens.
        tokens: number of predicted tokens.
    """

    row: int
    loss: float
    tokens: int


def sampled_rows(total: int, count: int, seed: int) -> list[int]:
    """Draw `count` of `total` rows at random without replacement, and return their indices in
    ascending order. If `count` is at least `total`, return the indices of all rows.

    With the same seed, a smaller sample is a subset of a larger sample.
    """
    return sorted(shuffled_index(i, total, seed, 0) for i in range(min(count, total)))


def mean_loss(rows: Sequence[RowLoss]) -> float:
    """Return the mean loss in nats per token. It is the sum of the losses of all rows, divided by
    the total number of tokens in the rows. There must be at least one token.
    """
    return math.fsum(row.loss for row in rows) / sum(row.tokens for row in rows)


def standard_error(rows: Sequence[RowLoss], total_rows: float) -> float:
    """Return the standard error of the `mean_loss` of a sample as an estimate of the mean loss of
    all rows.

    The mean loss is a ratio of two sums, because rows have different numbers of tokens. The
    standard error is the square root of the linearised variance of this ratio estimator for a
    simple random sample without replacement, with finite-population correction (Cochran, Sampling
    Techniques, 1977, section 2.11):

        (1 - n/N) / n * sum((loss_i - mean * tokens_i)^2) / (n - 1) / (tokens/n)^2

    Args:
        rows: the sample of n rows, at least two.
        total_rows: N, the number of rows from which the sample was drawn; infinity to estimate the
            error for an unlimited amount of similar text.
    """
    n = len(rows)
    assert 2 <= n <= total_rows
    mean = mean_loss(rows)
    squares = math.fsum((row.loss - mean * row.tokens) ** 2 for row in rows)
    tokens_a_row = sum(row.tokens for row in rows) / n
    return math.sqrt((1 - n / total_rows) / n * squares / (n - 1)) / tokens_a_row


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of equally weighted values, and its standard error. The standard error is the
    sample standard deviation divided by the square root of the number of values. For a single
    value, it is None.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (n - 1) / n)


def with_error(value: float, error: float | None) -> str:
    """Format a value and its standard error, as in `3.214 ± 0.012`. The error is shown with two
    significant digits, and the value with the same number of decimal places. Without an error, the
    value is shown with four decimal places.
    """
    if error is None:
        return f"{value:.4f}"
    if error == 0:
        return f"{value:.4f} ± 0"
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 9)
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def change_text(before: float, after: float) -> str:
    """Return the relative change of a number of bits in words, such as "18% fewer bits"."""
    change = 100 * (after / before - 1)
    size = f"{abs(change):.0f}" if abs(change) >= 10 else f"{abs(change):.1f}"
    if float(size) == 0:
        return "the same number of bits"
    return f"{size}% {'more' if change > 0 else 'fewer'} bits"
