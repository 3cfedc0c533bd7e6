"""A plan of a fine-tuning: the data, the model that is started from, the method, every setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from firstlight.pipeline.chosen import Choice, Choices
from firstlight.pipeline.facts import Length, MachineFacts
from firstlight.pipeline.plan import Request, memory_line, run_lines, table_lines
from firstlight.pipeline.tuning_choices import Method, StartingModel, TuningData, choose_tuning

if TYPE_CHECKING:
    from firstlight.planner.plan.machine import Machine


@dataclass(frozen=True)
class TuningPlan:
    """A plan of a fine-tuning.

    Attributes:
        request: inputs, length and overrides of the run.
        machine: the machine to train on.
        speed: its speed for this model and method.
        data: the data.
        model: the model that is started from.
        method: adapters or all weights.
        epoch_tokens, val_tokens: tokens of a pass over the training and the validation split.
        row: tokens of a training row.
        template: name of the chat template and reason for it; None for texts.
        choices: every setting.
    """

    request: Request
    machine: Machine
    speed: MachineFacts
    data: TuningData
    model: StartingModel
    method: Method
    epoch_tokens: float
    val_tokens: float
    row: Choice
    template: tuple[str, str] | None
    choices: Choices
    memory_bytes: float

    def choose_again(self, length: Length) -> TuningPlan:
        """The plan of another length."""
        choices = choose_tuning(
            self.data,
            self.model,
            self.method,
            self.speed,
            self.epoch_tokens,
            self.val_tokens,
            self.row,
            length,
            self.request.fixed,
        )
        return replace(self, choices=choices)

    def with_memory(self) -> TuningPlan:
        """The plan itself: the method was chosen by its memory."""
        return self

    def lines(self) -> Iterator[str]:
        """The plan for people: what is trained, what to expect, and a table of all choices."""
        yield from run_lines(self.choices, self.speed, self.data.name)
        yield memory_line(self.memory_bytes, self.speed)
        yield ""
        rows = [("method", self.method.name, self.method.reason)]
        if self.template is not None:
            rows.append(("template", *self.template))
        yield from table_lines(self.choices, *rows)

    def record(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "machine": self.speed.name,
            "data": asdict(self.data),
            "method": asdict(self.method),
            "memory_bytes": self.memory_bytes,
            **asdict(self.choices),
        }
