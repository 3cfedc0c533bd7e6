"""Estimated memory and speed of candidate settings."""

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
class Candidate:
    """Settings that a run could have.

    Attributes:
        recipe: the resolved recipe.
        machine: the machine to run on.
        name: short description, for people.
        changes: values of keys of the recipe (`section.key`) that the candidate sets.
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


@dataclass(frozen=True)
class Estimate:
    """Estimated memory and speed of one candidate, or the reason why it is invalid.

    Attributes:
        name, changes: see `Candidate`.
        recipe: the recipe with `changes` applied; without them if they are invalid.
        training, evaluation: memory of one device in each; evaluations include sample texts.
        speed: None if the device's rates are not known.
        usable_bytes: bytes of a device that a run may take.
        problem: the reason why the candidate is invalid; "" if it is valid.
        is_bound: True if training's memory is that of the step without torch.compile, mostly an
            upper bound.
        traced: the operators of training in one process, until `speed` is known.
    """

    name: str
    changes: Mapping[str, Any]
    recipe: ResolvedRecipe
    training: MemoryPrediction | None = None
    evaluation: MemoryPrediction | None = None
    speed: SpeedPrediction | None = None
    usable_bytes: int = 0
    problem: str = ""
    is_bound: bool = False
    traced: MemoryPrediction | None = field(default=None, repr=False)

    @property
    def needed_bytes(self) -> int:
        """Bytes of a device that training and evaluations need."""
        return max((p.total_bytes for p in (self.training, self.evaluation) if p), default=0)

    @property
    def fits(self) -> bool:
        """Whether the candidate is valid and fits into the memory."""
        return not self.problem and self.needed_bytes <= self.usable_bytes

    @property
    def may_fit_compiled(self) -> bool:
        """Whether the candidate could fit with torch.compile, judged from the step without it:
        evaluations are not compiled, and the state of an update stays as large."""
        if not self.is_bound or self.training is None:
            return False
        peak = self.training.phases.get("optimizer")
        state = 0 if peak is None else sum(peak.parts.get(name, 0) for name in STATE)
        evaluation = 0 if self.evaluation is None else self.evaluation.total_bytes
        return max(state + self.training.overhead_bytes, evaluation) <= self.usable_bytes

    @property
    def tokens_per_second(self) -> Range | None:
        """Rate of all devices together; None if the device's rates are not known."""
        return None if self.speed is None else self.speed.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON values, without the recipe; without a speed if it does not fit."""
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


class Estimator:
    """Makes estimates.

    Args:
        workers: processes that trace; None traces in this process.
        measures: True times operators that were never timed on this machine's CPU, for some
            seconds, fewer the longer tracing took. The next plan continues with them.
    """

    def __init__(self, workers: Workers | None = None, *, measures: bool = True) -> None:
        self._workers, self._measures = workers or Workers(), measures
        self._until = time.monotonic() + _PLANNING_SECONDS

    def estimate(self, candidate: Candidate) -> Estimate:
        """The estimate for one candidate."""
        return self._with_speed(_memory_of(candidate, self._workers), candidate)

    def estimate_all(self, candidates: Sequence[Candidate]) -> Iterator[Estimate]:
        """Estimates for several candidates, in their order, each as soon as it is made."""
        found = self._workers.map(_memory_of, [(candidate,) for candidate in candidates])
        # Not in the workers: operators that run beside each other on one CPU slow each other down.
        for estimate, candidate in zip(found, candidates, strict=True):
            yield self._with_speed(estimate, candidate)

    def _with_speed(self, estimate: Estimate, candidate: Candidate) -> Estimate:
        if estimate.traced is None:
            return estimate
        seconds = 0.0
        if self._measures:
            left = self._until - time.monotonic()
            seconds = min(max(left, _LEAST_MEASURING_SECONDS), _MOST_MEASURING_SECONDS)
        try:
            speed = estimate_speed(
                estimate.traced, estimate.recipe, candidate.machine, measuring_seconds=seconds
            )
        except FirstlightError as error:
            return dataclasses.replace(estimate, problem=str(error))
        # The thousands of operators have served; estimates are kept until a plan is shown.
        return dataclasses.replace(estimate, speed=speed, traced=None)


def estimate(recipe: ResolvedRecipe, machine: Machine, *, evaluates: bool = True) -> Estimate:
    """The estimate for a recipe as it stands, made in this process without timing operators.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        evaluates: True includes the memory of evaluations.
    """
    return Estimator(measures=False).estimate(Candidate(recipe, machine, evaluates=evaluates))


def _memory_of(candidate: Candidate, workers: Workers | None = None) -> Estimate:
    """The estimate for a candidate, without its speed."""
    machine, recipe = candidate.machine, candidate.recipe
    known = (candidate.name, candidate.changes)
    try:
        recipe = with_changes(recipe, candidate.changes)
        cut = recipe.distributed
        engine = engine_of(recipe, machine.count)
        require_combination(recipe, machine.hardware, engine, cut.tensor_parallel, cut.pipeline)
        part = own_part(recipe, machine.count)
        compiles = recipe.efficiency.compile
        # A compiled step's kernels are not in its trace: speed is predicted from the plain step.
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
        # A process that failed says nothing about the candidate.
        raise
    except FirstlightError as error:
        return Estimate(*known, recipe, usable_bytes=machine.usable_bytes, problem=str(error))
    return Estimate(
        *known,
        recipe,
        training,
        evaluation,
        usable_bytes=machine.usable_bytes,
        is_bound=compiles and not candidate.compiles,
        traced=traced,
    )
