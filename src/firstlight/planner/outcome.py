"""What one way to train comes to: memory and speed, or why it can't be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.planner.machine import Machine
from firstlight.planner.pace import speed_of
from firstlight.planner.prediction import MemoryPrediction
from firstlight.planner.ranks import engine_of, of_one_rank
from firstlight.planner.recipes import predict_evaluation, trace_memory
from firstlight.planner.roofline import Range
from firstlight.planner.settling import with_changes
from firstlight.planner.throughput import SpeedPrediction
from firstlight.training.combinations import require_combination
from firstlight.training.config import Recipe


@dataclass(frozen=True)
class Outcome:
    """One way to train.

    Attributes:
        name: for people.
        changes: keys of the recipe that it sets.
        recipe: with them; None where they can't be.
        training, evaluation: the memory of each, of one device.
        speed: None where the device's rates are not known.
        usable_bytes: that there are.
        problem: why it can't be; "" where it can.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    training: MemoryPrediction | None = None
    evaluation: MemoryPrediction | None = None
    speed: SpeedPrediction | None = None
    usable_bytes: int = 0
    problem: str = ""

    @property
    def needed_bytes(self) -> int:
        """Of the device, for training and for evaluating."""
        return max((p.total_bytes for p in (self.training, self.evaluation) if p), default=0)

    @property
    def fits(self) -> bool:
        """Whether it can be, in the memory that there is."""
        return not self.problem and self.needed_bytes <= self.usable_bytes

    @property
    def tokens_per_second(self) -> Range | None:
        """Of all devices together."""
        return None if self.speed is None else self.speed.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, without the recipe."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "fits": self.fits,
            "problem": self.problem,
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            "training": None if self.training is None else self.training.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "speed": None if self.speed is None else self.speed.to_json(),
        }


def outcome_of(
    recipe: Recipe,
    machine: Machine,
    name: str = "",
    changes: Mapping[str, Any] | None = None,
    *,
    evaluates: bool = True,
    measures: bool = True,
) -> Outcome:
    """Predict what a recipe takes with some keys changed.

    Args:
        recipe: settled.
        machine: to run on.
        name, changes: see `Outcome`.
        evaluates: whether evaluation's memory is looked at too.
        measures: see `speed_of`.
    """
    changes = changes or {}
    try:
        recipe = with_changes(recipe, changes)
        cut = recipe.distributed
        engine = engine_of(recipe, machine.count)
        require_combination(recipe, machine.hardware, engine, cut.tensor_parallel, cut.pipeline)
        traced = trace_memory(recipe, machine.target)
        training = of_one_rank(traced, recipe, machine.count)
        evaluation: MemoryPrediction | None = None
        if evaluates:
            evaluation = predict_evaluation(recipe, machine.target)
            evaluation = of_one_rank(evaluation, recipe, machine.count)
        speed = speed_of(traced, recipe, machine, measures=measures)
    except FirstlightError as error:
        return Outcome(name, changes, usable_bytes=machine.usable_bytes, problem=str(error))
    return Outcome(name, changes, recipe, training, evaluation, speed, machine.usable_bytes)
