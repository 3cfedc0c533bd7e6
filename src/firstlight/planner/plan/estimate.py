"""What one way to train comes to: memory and speed, or why it can't be."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import FirstlightError, TrainingError
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.ranks import STATE, engine_of, of_one_rank, own_part
from firstlight.planner.memory.recipe import evaluation_job, run_jobs, training_job
from firstlight.planner.plan.machine import Machine, with_changes
from firstlight.planner.plan.processes import Workers
from firstlight.planner.speed.gpu import Range
from firstlight.planner.speed.recipe import estimate_speed
from firstlight.planner.speed.throughput import SpeedPrediction
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.conflicts import require_combination

#: For timing operators that were never timed on this machine: at least and at most, and what is
#: left until a plan should be there.
_LEAST_MEASURING_SECONDS, _MOST_MEASURING_SECONDS = 0.2, 3.0
_PLANNING_SECONDS = 5.0


@dataclass(frozen=True)
class Estimate:
    """One way to train.

    Attributes:
        name: short description, for people.
        changes: keys of the recipe that it sets.
        recipe: the recipe with `changes` applied; None if the changes are invalid.
        training, evaluation: the memory of each, of one device; evaluation's with sample texts.
        speed: None where the device's rates are not known.
        usable_bytes: bytes of a device that a run may take.
        problem: the reason why the candidate is invalid; "" if it is valid.
        is_bound: True if training's memory is that of the step without torch.compile, mostly an
            upper bound.
        traced: training in one process, for its speed, until that is known.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    recipe: ResolvedRecipe | None = None
    training: MemoryPrediction | None = None
    evaluation: MemoryPrediction | None = None
    speed: SpeedPrediction | None = None
    usable_bytes: int = 0
    problem: str = ""
    is_bound: bool = False
    traced: MemoryPrediction | None = field(default=None, repr=False)

    @property
    def needed_bytes(self) -> int:
        """Of the device, for training and for evaluating."""
        return max((p.total_bytes for p in (self.training, self.evaluation) if p), default=0)

    @property
    def fits(self) -> bool:
        """Whether it can be, in the memory that there is."""
        return not self.problem and self.needed_bytes <= self.usable_bytes

    @property
    def may_fit_compiled(self) -> bool:
        """Whether it could fit with torch.compile, of an outcome that is without: evaluations are
        not compiled, and what an update works with is there then too."""
        if not self.is_bound or self.training is None:
            return False
        peak = self.training.phases.get("optimizer")
        state = 0 if peak is None else sum(peak.parts.get(name, 0) for name in STATE)
        evaluation = 0 if self.evaluation is None else self.evaluation.total_bytes
        return max(state + self.training.overhead_bytes, evaluation) <= self.usable_bytes

    @property
    def tokens_per_second(self) -> Range | None:
        """Of all devices together."""
        return None if self.speed is None else self.speed.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, without the recipe. What does not fit has no speed."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "fits": self.fits,
            "problem": self.problem,
            "is_bound": self.is_bound,
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            "training": None if self.training is None else self.training.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "speed": self.speed.to_json() if self.speed is not None and self.fits else None,
        }


@dataclass(frozen=True)
class Candidate:
    """What an `Estimate` is an answer to.

    Attributes:
        recipe: the resolved recipe.
        machine: the machine to run on.
        name, changes: see `Estimate`.
        evaluates: True includes the memory of evaluations.
        compiles: True traces the step as torch.compile makes it, which takes ten seconds and more;
            False takes the memory of the step without it.
    """

    recipe: ResolvedRecipe
    machine: Machine
    name: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = True
    compiles: bool = True


class Estimator:
    """Answers candidates.

    Args:
        workers: processes that trace; None traces in this process.
        measures: True times operators that were never timed on this machine's CPU, for some
            seconds, fewer the longer tracing took. The next plan continues with them.
    """

    def __init__(self, workers: Workers | None = None, *, measures: bool = True) -> None:
        self._workers, self._measures = workers or Workers(), measures
        self._until = time.monotonic() + _PLANNING_SECONDS

    def estimate(self, candidate: Candidate) -> Estimate:
        """What one way to train comes to."""
        return self._timed(_memory_of(candidate, self._workers), candidate)

    def estimate_all(self, candidates: Sequence[Candidate]) -> Iterator[Estimate]:
        """Those of several candidates, as they come, in their order."""
        found = self._workers.map(_memory_of, [(candidate,) for candidate in candidates])
        # Speed is worked out here: on this machine's CPU it is measured, one at a time.
        for outcome, candidate in zip(found, candidates, strict=True):
            yield self._timed(outcome, candidate)

    def _timed(self, outcome: Estimate, candidate: Candidate) -> Estimate:
        if outcome.traced is None or outcome.recipe is None:
            return outcome
        try:
            speed = estimate_speed(
                outcome.traced,
                outcome.recipe,
                candidate.machine,
                measuring_seconds=self._measuring_seconds() if self._measures else 0.0,
            )
        except FirstlightError as error:
            return dataclasses.replace(outcome, problem=str(error))
        return dataclasses.replace(outcome, speed=speed, traced=None)

    def _measuring_seconds(self) -> float:
        left = self._until - time.monotonic()
        return min(max(left, _LEAST_MEASURING_SECONDS), _MOST_MEASURING_SECONDS)


def _memory_of(candidate: Candidate, workers: Workers | None = None) -> Estimate:
    """An `Estimate` without its speed.

    Args:
        candidate: the candidate settings.
        workers: processes that trace parts of a step; None traces in this process.
    """
    machine, name, changes = candidate.machine, candidate.name, candidate.changes
    try:
        recipe = with_changes(candidate.recipe, changes)
        cut = recipe.distributed
        engine = engine_of(recipe, machine.count)
        require_combination(recipe, machine.hardware, engine, cut.tensor_parallel, cut.pipeline)
        part = own_part(recipe, machine.count)
        compiles = recipe.efficiency.compile
        # Speed is worked out from what is compiled.
        plain = uncompiled(part) if compiles else part
        jobs = [training_job(plain, machine.target)]
        if compiles and candidate.compiles:
            jobs.insert(0, training_job(part, machine.target))
        if candidate.evaluates:
            jobs.append(evaluation_job(part, machine.target, samples=True))
        found = run_jobs(jobs, workers)
        traced = found[1] if compiles and candidate.compiles else found[0]
        training = of_one_rank(found[0], recipe, machine.count)
        evaluation: MemoryPrediction | None = None
        if candidate.evaluates:
            evaluation = of_one_rank(found[-1], recipe, machine.count)
    except TrainingError:
        # Not about this way to train.
        raise
    except FirstlightError as error:
        return Estimate(name, changes, usable_bytes=machine.usable_bytes, problem=str(error))
    return Estimate(
        name,
        changes,
        recipe,
        training,
        evaluation,
        usable_bytes=machine.usable_bytes,
        is_bound=compiles and not candidate.compiles,
        traced=traced,
    )
