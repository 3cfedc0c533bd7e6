"""The plan of a fine-tuning run: data, starting model, method, and all settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from firstlight.finetuning.choices import Method, StartingModel, TuningData, choose_tuning
from firstlight.from_texts.chosen import Choice, Choices
from firstlight.from_texts.plan import memory_line, run_lines, table_lines, validation_rows
from firstlight.from_texts.request import Request
from firstlight.planner.advise.law import Length, MachineFacts

if TYPE_CHECKING:
    from firstlight.planner.plan.machine import Machine
    from firstlight.recipe import ResolvedRecipe


@dataclass(frozen=True)
class TuningPlan:
    """The plan of a fine-tuning run; implements `RunPlan`.

    Attributes:
        request: inputs, length and overrides of the run.
        machine: the machine to train on.
        speed: its speed for this model and method.
        data: facts about the data.
        model: facts about the starting model.
        method: the method.
        epoch_tokens, val_tokens: tokens of a pass over the training split, and over the validation
            split.
        row: the choice of a training row's tokens.
        template: name of the chat template and the reason for it; None for texts.
        choices: all settings.
        recipe: the recipe by which the method was chosen, with one sequence at a time.
        memory_bytes: expected memory of `recipe`, or of the run.
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
    recipe: ResolvedRecipe
    memory_bytes: float

    def choose_again(self, length: Length) -> TuningPlan:
        """See `RunPlan.choose_again`."""
        choices = choose_tuning(
            self.data,
            self.model,
            self.method,
            self.speed,
            epoch_tokens=self.epoch_tokens,
            val_tokens=self.val_tokens,
            row=self.row,
            length=length,
            fixed=self.request.fixed,
        )
        return replace(self, choices=choices)

    def with_memory(self) -> TuningPlan:
        """The plan with the expected memory of the chosen micro-batch, halved until it fits."""
        from firstlight.from_texts.machine import fitting_choices
        from firstlight.planner.plan.machine import with_changes

        def recipe_of(choices: Choices) -> ResolvedRecipe:
            keys = ("batch.micro_batch_size", "efficiency.compile")
            return with_changes(self.recipe, {key: choices[key] for key in keys})

        fixed = self.request.fixed
        choices, memory = fitting_choices(self.choices, recipe_of, fixed, self.machine)
        return replace(self, choices=choices, memory_bytes=memory or self.memory_bytes)

    def lines(self) -> Iterator[str]:
        """See `RunPlan.lines`."""
        yield from run_lines(self.choices, self.speed, self.data.name)
        yield memory_line(self.memory_bytes, self.speed)
        yield ""
        rows = [("method", self.method.name, self.method.reason)]
        if self.template is not None:
            rows.append(("template", *self.template))
        yield from table_lines(self, *rows, *validation_rows(self.request, self.val_tokens))

    def record(self) -> dict[str, Any]:
        """See `RunPlan.record`."""
        return {
            "machine": self.speed.name,
            "data": asdict(self.data),
            "method": asdict(self.method),
            "memory_bytes": self.memory_bytes,
            **asdict(self.choices),
        }
