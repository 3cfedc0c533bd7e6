"""Results of tasks, and means over rows of unequal length with their standard errors.

Sums are `math.fsum`'s, which rounds once: rows that several processes evaluated give, in any
split and any order, the same bits as if one process had evaluated them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from firstlight.data.packing import shuffled_index
from firstlight.weights.huggingface import LoadedModel

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
    """`count` different rows of `total`, drawn at random, ascending; all, where there are no more.

    Those of a smaller sample are among those of a larger one with the same seed.
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
        total_rows: N, how many rows there are to draw from.
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
