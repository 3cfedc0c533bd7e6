"""What a task comes to, whoever scored it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from firstlight.evaluation.estimates import with_error
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
    """What a model came to in a task.

    Attributes:
        task: its name.
        metrics: by name, such as `acc`.
        items: how many were scored; None for a group of tasks.
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
