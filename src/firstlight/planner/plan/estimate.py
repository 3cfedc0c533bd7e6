"""Estimate the memory use and speed of candidate settings and of individual methods, search for the
best candidate, and explain the settings of a plan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import FirstlightError, TrainingError
from firstlight.hardware.device import is_out_of_memory
from firstlight.methods.compilation import is_compile_failure
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.optim.config import OPTIMIZERS
from firstlight.parallel.engine_choice import named_engine
from firstlight.planner.memory.prediction import MemoryPrediction, PhasePeak
from firstlight.planner.memory.program import uncompiled, without_compile
from firstlight.planner.memory.ranks import (
    STATE,
    copies_of,
    engine_of,
    of_one_rank,
    own_part,
    with_peaks,
)
from firstlight.planner.memory.recipe import evaluation_job, run_jobs, training_job
from firstlight.planner.plan.machine import Machine, facts_of, with_changes
from firstlight.planner.plan.processes import WorkerProcesses
from firstlight.planner.speed.gpu import Range
from firstlight.planner.speed.throughput import (
    BUSY_TOKENS,
    SpeedPrediction,
    StepTime,
    estimate_speed,
    time_step,
    timed_speed,
)
from firstlight.recipe import Recipe, ResolvedRecipe
from firstlight.recipe.conflicts import require_combination
from firstlight.recipe.resolve import attention_backend, open_compile_modes

#: An `Estimator` stops timing candidates once it has timed steps for _TIMING_SECONDS in total. It
#: stops timing the methods in the plan's table of methods once it has timed steps for
#: _METHODS_SECONDS in total.
_TIMING_SECONDS, _METHODS_SECONDS = 60.0, 30.0

#: For runs that are longer than this number of minutes, the ten seconds for tracing the compiled
#: step are negligible.
_TRACED_MINUTES = 10.0

_GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A candidate for the settings of a run.

    Attributes:
        recipe: the resolved recipe.
        machine: the machine to run on.
        name: short description, as shown to the user.
        changes: values of the recipe keys that this candidate changes, keyed by `section.key`.
        evaluates: True to include the memory of evaluations.
        compiles: True to predict the memory use of the compiled step if the recipe enables
            torch.compile; this prediction takes at least ten seconds. False to predict the memory
            use without torch.compile.
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
        name, changes: attributes of the candidate; see `Candidate`.
        recipe: the recipe with `changes` applied; without them if they are invalid.
        training, evaluation: predicted memory use per device, first during training and then during
            an evaluation including sample texts; see `in_a_run`.
        speed: training speed, predicted for a GPU in the table or timed on this machine; None if
            unknown.
        usable_bytes: memory per device that a run can use, in bytes.
        problem: the reason why the candidate is invalid; "" if it is valid.
        is_bound: True if the recipe enables torch.compile but `training` is the memory use without
            it, which is usually an upper bound.
        compile_gain: predicted speed-up from torch.compile if the recipe enables it; 1 if unknown.
        traced: prediction for the step of a single process, including the operators from which
            `speed` is computed. It is None once `speed` has been computed.
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
    compile_gain: float = 1.0
    traced: MemoryPrediction | None = field(default=None, repr=False)

    @property
    def phases(self) -> dict[str, PhasePeak]:
        """Peak memory of the tensors in each phase of the run, keyed by the phase's name."""
        found = [prediction.phases for prediction in (self.training, self.evaluation) if prediction]
        return {name: peak for phases in found for name, peak in phases.items()}

    @property
    def peak(self) -> tuple[str, PhasePeak]:
        """Name of the phase with the highest peak, and the memory in use at that peak."""
        return max(self.phases.items(), key=lambda phase: phase[1].bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory in bytes that each device needs for training, evaluations and saving
        checkpoints."""
        return max((p.total_bytes for p in (self.training, self.evaluation) if p), default=0)

    @property
    def fits(self) -> bool:
        """True if the candidate is valid and fits in memory."""
        return not self.problem and self.needed_bytes <= self.usable_bytes

    @property
    def may_fit_compiled(self) -> bool:
        """True if the candidate could fit in memory with torch.compile. Only memory that does not
        depend on compilation is considered. This is the memory use of evaluations, and the memory
        of weights, gradients and optimizer states during the update."""
        if not self.is_bound or self.training is None:
            return False
        peak = self.training.phases.get("optimizer")
        kept = (*STATE, "checkpoint_copy")
        state = 0 if peak is None else sum(peak.parts.get(name, 0) for name in kept)
        evaluation = 0 if self.evaluation is None else self.evaluation.total_bytes
        return max(state + self.training.overhead_bytes, evaluation) <= self.usable_bytes

    @property
    def tokens_per_second(self) -> Range | None:
        """Total training speed of all devices; None if unknown."""
        return None if self.speed is None else self.speed.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values, without the recipe. The speed is omitted if the
        candidate does not fit in memory."""
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
    """Estimates the memory and speed of candidates.

    Args:
        workers: processes that trace the candidates; None to trace in this process.
        tell: function that is called with a message about each estimate.
    """

    def __init__(
        self,
        workers: WorkerProcesses | None = None,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._workers, self.tell = workers or WorkerProcesses(), tell
        self._times: dict[str, StepTime] = {}
        self._timing_seconds = 0.0

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate for one candidate. For a CPU, the speed is missing and must be added
        with `timed`."""
        return self._with_speed(_memory_estimate(candidate, self._workers), candidate)

    def estimate_all(self, candidates: Sequence[Candidate]) -> Iterator[Estimate]:
        """Yield the estimates for several candidates in the given order, as soon as they become
        available. For each estimate, call `tell` with the name of the candidate."""
        traced = self._workers.map(_memory_estimate, [(candidate,) for candidate in candidates])
        for estimate, candidate in zip(traced, candidates, strict=True):
            found = self._with_speed(estimate, candidate)
            self.tell(found.name)
            yield found

    def _with_speed(self, estimate: Estimate, candidate: Candidate) -> Estimate:
        if estimate.traced is None:
            return estimate
        recipe = estimate.recipe
        machine = candidate.machine
        size = recipe.model.hidden_size, recipe.model.num_hidden_layers
        modes = open_compile_modes(recipe.efficiency, recipe.distributed, machine.compiler, size)
        gain = modes[0].gain
        try:
            speed = estimate_speed(estimate.traced, recipe, machine)
            if speed is not None and recipe.efficiency.compile and _is_timed(machine):
                plain = estimate_speed(estimate.traced, uncompiled(recipe), machine)
                assert plain is not None
                gain = plain.step_seconds.expected / speed.step_seconds.expected
        except FirstlightError as error:
            return dataclasses.replace(estimate, problem=str(error))
        # Estimates are kept until the plan is shown, so their thousands of operators are discarded
        # here to save memory.
        return dataclasses.replace(estimate, speed=speed, compile_gain=gain, traced=None)

    def timed(
        self, estimate: Estimate, machine: Machine, most_seconds: float = _TIMING_SECONDS
    ) -> Estimate:
        """Return the estimate with its speed measured by timing steps.

        The estimate is returned unchanged if the candidate does not fit in memory, if it is not for
        a single device of this machine, or if timing has already taken more than `most_seconds`.
        The worker processes must be idle during this call.
        """
        if not (_is_timed(machine) and estimate.fits) or _is_offloaded(estimate.recipe):
            return estimate
        key = estimate.recipe.model_dump_json()
        if key not in self._times and self._timing_seconds > most_seconds:
            return estimate
        begun = time.monotonic()
        try:
            if key not in self._times:
                self._times[key] = time_step(estimate.recipe, machine.hardware)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return estimate
        finally:
            self._timing_seconds += time.monotonic() - begun
        speed = timed_speed(estimate.recipe, self._times[key], estimate.compile_gain)
        return dataclasses.replace(estimate, speed=speed)


def _is_timed(machine: Machine) -> bool:
    return machine.is_here and machine.count == 1


def _is_offloaded(recipe: ResolvedRecipe) -> bool:
    """Return True if a single-process run does not keep its weights and optimizer state on the
    device. The steps of such a run can't be timed, because timing keeps both on the device."""
    engine = named_engine(recipe.distributed)
    return engine.updates_itself or recipe.distributed.offload != "none"


def estimate(recipe: ResolvedRecipe, machine: Machine, *, evaluates: bool = True) -> Estimate:
    """Estimate an unchanged recipe in this process, without timing steps. For a short run with
    torch.compile, predict the memory use without torch.compile, which is usually an upper bound.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        evaluates: True to include the memory of evaluations.
    """
    minutes = recipe.schedule.max_minutes
    is_short = minutes is not None and minutes < _TRACED_MINUTES
    traces = not (is_short or recipe.efficiency.compile_regional)
    return Estimator().estimate(Candidate(recipe, machine, evaluates=evaluates, compiles=traces))


def _memory_estimate(candidate: Candidate, workers: WorkerProcesses | None = None) -> Estimate:
    """Return the estimate for a candidate, without its speed."""
    machine, recipe = candidate.machine, candidate.recipe
    known = (candidate.name, candidate.changes)
    try:
        recipe = with_changes(recipe, candidate.changes)
        cut = recipe.distributed
        engine = engine_of(recipe, machine.count)
        require_combination(
            recipe, machine.hardware, engine.name, cut.tensor_parallel, pipeline=cut.pipeline
        )
        part = own_part(recipe, machine.count)
        compiles = recipe.efficiency.compile
        # A trace of a compiled step does not contain the compiled kernels, so the speed is
        # predicted from a step without torch.compile.
        plain = uncompiled(part) if compiles else part
        jobs = [training_job(plain, machine.target)]
        if compiles and candidate.compiles:
            jobs.insert(0, training_job(part, machine.target))
        if candidate.evaluates:
            jobs.append(evaluation_job(part, machine.target, samples=True))
        found = run_jobs(jobs, workers)
        traced = found[1] if compiles and candidate.compiles else found[0]
        on_cpu = machine.target.kind == "cpu"
        training = of_one_rank(found[0], recipe, machine.count, on_cpu=on_cpu)
        evaluation = None
        if candidate.evaluates:
            evaluation = of_one_rank(found[-1], recipe, machine.count, on_cpu=on_cpu)
        training, evaluation = in_a_run(training, evaluation, recipe, machine)
    except TrainingError:
        # If a worker process fails, the candidate is not necessarily invalid.
        raise
    except FirstlightError as error:
        return Estimate(*known, recipe, usable_bytes=machine.usable_bytes, problem=str(error))
    except RuntimeError as error:
        # The step can't be compiled. The run itself will report the error, so the step is estimated
        # without torch.compile.
        if not (candidate.compiles and is_compile_failure(error)):
            raise
        return _memory_estimate(dataclasses.replace(candidate, compiles=False), workers)
    return Estimate(
        *known,
        recipe,
        training,
        evaluation,
        usable_bytes=machine.usable_bytes,
        is_bound=compiles and not candidate.compiles,
        traced=traced,
    )


def in_a_run(
    training: MemoryPrediction,
    evaluation: MemoryPrediction | None,
    recipe: ResolvedRecipe,
    machine: Machine,
) -> tuple[MemoryPrediction, MemoryPrediction | None]:
    """Return the predictions for training and evaluation after adding the memory that a run needs
    outside of steps and evaluations. The prediction for evaluation also gets a "save" phase and, if
    checkpoints are averaged, an "averaging" phase.

    A checkpoint that is written in the background needs a copy of the state. On a CPU, the memory
    of this copy stays allocated after the first save. On a GPU, the copy is in host memory.

    Args:
        training, evaluation: predictions for one process; `evaluation` may be None.
        recipe: the resolved recipe.
        machine: the machine to run on.
    """
    engine = engine_of(recipe, machine.count)
    if evaluation is not None and engine.keeps_buckets:
        # DDP's buckets stay allocated between steps. Together, they are as large as the gradients.
        buckets = max(peak.parts.get("gradients", 0) for peak in training.phases.values())
        evaluation = with_peaks(evaluation, lambda _, peak: _with(peak, gradients=buckets))
    if machine.target.kind != "cpu":
        return training, evaluation
    between = training.phases["forward"] if evaluation is None else evaluation.phases["evaluation"]
    kept = (*STATE, "communication")
    state = {name: size for name, size in between.parts.items() if name in kept}
    copied, gathered = _copied_bytes(state, recipe), 0
    if engine.updates_itself:
        # DeepSpeed keeps more state in memory than it saves. Before saving, the main process
        # gathers the moments and, in stage 3, the weights.
        weights = 4 * count_parameters(meta_model(recipe.model)).total
        gathered = state.get("optimizer_states", 0) * machine.count
        copied = weights + gathered
        if recipe.distributed.zero_stage == 3:
            gathered += weights
    elif engine.shards_state:
        # The main process writes the shards of all processes.
        copied *= copies_of(recipe, machine.count)
    # This is the same condition as in `CheckpointSaver`. Checkpoints are written in the background
    # if a copy of the state fits in half of the memory that is free at the first save.
    asynchronous = recipe.checkpoint.asynchronous
    if asynchronous is None:
        asynchronous = 2 * copied <= machine.usable_bytes - sum(state.values())
    if not asynchronous or recipe.checkpoint.sharded:
        copied = 0
    every, steps = recipe.checkpoint.every_steps, recipe.schedule.max_steps
    # A run with a time budget also saves checkpoints between these steps.
    saves_between = every and (recipe.schedule.max_minutes or steps is None or every < steps)
    copy = copied if saves_between else 0
    training = with_peaks(training, lambda _, peak: _with(peak, checkpoint_copy=copy))
    if evaluation is None:
        return training, None
    phases = {
        name: _with(peak, checkpoint_copy=copy) for name, peak in evaluation.phases.items()
    } | {"save": _with(PhasePeak(0, state), checkpoint_copy=copied + gathered)}
    if recipe.checkpoint.average_last:
        # The averaged weights are evaluated before they are written. By then, the copies that were
        # made for checkpoints have been freed.
        averaged = 4 * count_parameters(meta_model(recipe.model)).total
        phases["averaging"] = _with(between, averaged_weights=averaged)
    return training, with_peaks(dataclasses.replace(evaluation, phases=phases), lambda _, p: p)


def _copied_bytes(state: Mapping[str, int], recipe: ResolvedRecipe) -> int:
    """Return the size in bytes of the state that a checkpoint contains, which consists of fp32
    weights and the optimizer's moments."""
    weights, states = state.get("weights", 0), state.get("optimizer_states", 0)
    if recipe.lora is not None:
        # With LoRA, only the adapters are saved. Their weights are half as large as their two
        # moments together.
        return states + states // 2
    # The optimizer states include the master weights. The bf16 weights are not saved.
    return states if recipe.efficiency.precision == "bf16_params" else weights + states


def _with(peak: PhasePeak, **more: int) -> PhasePeak:
    """Return a copy of the peak in which some parts have new sizes. New sizes of 0 are ignored."""
    parts = peak.parts | {name: size for name, size in more.items() if size}
    return PhasePeak(sum(parts.values()), parts)


def sequences_per_step(recipe: ResolvedRecipe, machine: Machine) -> int:
    """Return the number of sequences per optimizer step for each copy of the model."""
    tokens = recipe.batch.global_batch_tokens
    if tokens is not None:
        return max(tokens // recipe.data.seq_len // copies_of(recipe, machine.count), 1)
    return recipe.batch.micro_batch_size * (recipe.batch.gradient_accumulation_steps or 1)


# Estimating each method alone, and explaining the chosen settings


def method_table(recipe: ResolvedRecipe, machine: Machine, estimator: Estimator) -> list[Estimate]:
    """For each method that the recipe does not use, return an estimate for the recipe with this
    method added.

    The memory use is estimated without torch.compile, except for the method torch.compile itself.
    If the plan is for this machine, the methods are timed until a time limit is reached.
    torch.compile is never timed.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use.
    """
    candidates = [
        Candidate(
            recipe,
            machine,
            name,
            changes,
            evaluates=False,
            compiles="efficiency.compile" in changes,
        )
        for name, changes in methods(recipe, machine)
    ]
    return [
        estimator.timed(one, machine, _METHODS_SECONDS)
        if machine.gpu is not None or "efficiency.compile" not in one.changes
        else one
        for one in list(estimator.estimate_all(candidates))
    ]


def methods(  # noqa: C901 - a flat list: one independent case per method
    recipe: ResolvedRecipe, machine: Machine
) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each method that would change the recipe, yield its name and the changes as a mapping
    from recipe keys to values."""
    config, micro_batch_size = recipe.efficiency, recipe.batch.micro_batch_size
    if micro_batch_size > 1:
        changes: dict[str, Any] = {"batch.micro_batch_size": 1}
        if recipe.batch.global_batch_tokens is None:
            changes["batch.gradient_accumulation_steps"] = sequences_per_step(recipe, machine)
        yield f"gradient accumulation, 1 x {sequences_per_step(recipe, machine)}", changes
    for kind in ("selective", "full"):
        if config.activation_checkpointing != kind:
            yield (
                f"activation checkpointing, {kind}",
                {"efficiency.activation_checkpointing": kind},
            )
    if not config.loss_chunk_tokens:
        yield "chunked loss", {"efficiency.loss_chunk_tokens": 1024}
    if config.precision != machine.precision:
        yield f"precision {machine.precision}", _with_precision(recipe, machine, machine.precision)
    if config.precision != "fp32":
        yield "precision fp32", _with_precision(recipe, machine, "fp32")
    if config.precision == "bf16":
        yield "bf16 weights, fp32 masters", {"efficiency.precision": "bf16_params"}
    if not config.compile:
        yield "torch.compile", {"efficiency.compile": True}
    else:
        plain = without_compile(config)
        yield "no torch.compile", {f"efficiency.{key}": value for key, value in plain.items()}
    if config.attention != "plain":
        yield "attention without a fused kernel", {"efficiency.attention": "plain"}
    for name, title in (("adamw8bit", "8-bit AdamW"), ("adafactor", "Adafactor"), ("muon", "Muon")):
        if recipe.optimizer.name != name:
            yield title, other_optimizer(recipe, name)
    if machine.target.kind == "cuda" and not config.activation_offload:
        yield "activations in the CPU's memory", {"efficiency.activation_offload": True}
    if recipe.lora is None:
        yield "LoRA, rank 16", {"lora": {"rank": 16, "alpha": 32.0}, **without_average(recipe)}


def other_optimizer(recipe: ResolvedRecipe, name: str) -> dict[str, Any]:
    """Return the changes that select a different optimizer and turn off options that this optimizer
    does not support."""
    off = {"embeddings_in_32_bits": None, "cautious_weight_decay": False, "tuned_width": None}
    own, has = recipe.optimizer, OPTIMIZERS[name].options
    refused = [key for key, value in off.items() if getattr(own, key) != value and key not in has]
    return {"optimizer.name": name, **{f"optimizer.{key}": off[key] for key in refused}}


def without_average(recipe: ResolvedRecipe) -> dict[str, Any]:
    """Return the change that turns off checkpoint averaging, because LoRA does not support it."""
    return {"checkpoint.average_last": 0} if recipe.checkpoint.average_last else {}


def _with_precision(recipe: ResolvedRecipe, machine: Machine, precision: str) -> dict[str, Any]:
    """Return the changes that set a different precision. If the attention backend depends on the
    precision, the changes also set the backend."""
    config = recipe.efficiency
    seq_len = recipe.data.seq_len
    facts = facts_of(recipe, machine)
    changes: dict[str, Any] = {"efficiency.precision": precision}
    if config.attention == attention_backend(
        recipe, recipe.model, seq_len, facts, precision=config.precision
    ):
        attention = attention_backend(recipe, recipe.model, seq_len, facts, precision=precision)
        if attention != config.attention:
            changes["efficiency.attention"] = attention
    return changes


def reasons_for(
    recipe: Recipe, best: Estimate, first: Estimate, machine: Machine
) -> dict[str, str]:
    """Return the reasons for the chosen values of all keys that the recipe does not set or that the
    best candidate changes.

    Args:
        recipe: the recipe as written.
        best: the chosen estimate.
        first: estimate for the unchanged recipe.
        machine: machine for which the plan was made.
    """
    reasons: dict[str, str] = {}
    config, written = best.recipe.efficiency, recipe.efficiency
    if written.precision == "auto":
        reasons["efficiency.precision"] = _precision(config.precision, machine)
    if written.attention == "auto":
        reasons["efficiency.attention"] = _ATTENTION[config.attention]
    if written.compile == "auto":
        reasons["efficiency.compile"] = (
            "fewer memory accesses and less memory, at the cost of a minute at the start"
            if config.compile
            else "not useful for this run's length, engine or device"
        )
    needed, usable = best.needed_bytes / _GIB, best.usable_bytes / _GIB
    micro_batch_size = best.recipe.batch.micro_batch_size
    if micro_batch_size == sequences_per_step(best.recipe, machine):
        why = "the whole step in one pass"
    else:
        more = "more may not fit" if config.compile else "more does not fit"
        why = "more would not be faster" if needed < 0.6 * usable else more
    reasons["batch.micro_batch_size"] = f"{needed:.1f} of {usable:.1f} GiB; {why}"
    saves = "" if first.fits else " (as it stands, the recipe does not fit)"
    if "efficiency.activation_checkpointing" in best.changes:
        reasons["efficiency.activation_checkpointing"] = (
            f"activations would take most of the memory{saves}: recomputed instead"
        )
    if "efficiency.loss_chunk_tokens" in best.changes:
        reasons["efficiency.loss_chunk_tokens"] = (
            f"a micro-batch's logits would take {_logits_bytes(best.recipe) / _GIB:.1f} GiB in fp32"
            f"{saves}: computed in chunks instead"
        )
    if "optimizer.name" in best.changes:
        reasons["optimizer.name"] = f"moments in 8 bits take a quarter of the memory{saves}"
    return reasons


_ATTENTION = {
    "sdpa": "torch's fused kernels do not store attention scores",
    "blockwise": "does not store attention scores, and is faster than the fused kernel here",
    "flex": "document masks take no memory",
}


def _logits_bytes(recipe: ResolvedRecipe) -> int:
    """Return the size in bytes of the fp32 logits of a micro-batch. The size is not read from the
    trace, because a trace of a compiled step does not show which tensors are logits."""
    return 4 * recipe.batch.micro_batch_size * recipe.data.seq_len * recipe.model.vocab_size


def _precision(precision: str, machine: Machine) -> str:
    gpu = machine.gpu
    if precision == "fp32":
        if machine.precision == "fp16":
            return "fp16 is faster, but does not work with efficiency.optimizer_in_backward"
        return "no lower precision is faster here"
    if gpu is None:
        return f"{precision} matrix products are faster here"
    factor = gpu.peak_flops(precision) / gpu.fp32
    share = f"{factor:.0f} times the fp32 rate of matrix products on this GPU"
    return f"{share}, which does not support bf16" if precision == "fp16" else share


# Searching for the fastest candidate that fits in memory or, if no candidate fits, for changed
# settings that would fit

#: Changes that reduce the memory use of a step, so that it fits in memory or allows larger
#: micro-batches. The changes that reduce the speed the least come first.
_SAVINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it stands", {}),
    ("chunked loss", {"efficiency.loss_chunk_tokens": 1024}),
    (
        "selective checkpointing",
        {
            "efficiency.activation_checkpointing": "selective",
            "efficiency.loss_chunk_tokens": 1024,
        },
    ),
    (
        "full checkpointing",
        {"efficiency.activation_checkpointing": "full", "efficiency.loss_chunk_tokens": 1024},
    ),
    (
        "full checkpointing, 8-bit AdamW",
        {
            "efficiency.activation_checkpointing": "full",
            "efficiency.loss_chunk_tokens": 1024,
            "optimizer.name": "adamw8bit",
        },
    ),
)

#: LoRA settings that are tried if no candidate fits in memory, and changes that are applied to all
#: of these fallback settings.
_LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0}
_LEAST: dict[str, Any] = {
    "batch.micro_batch_size": 1,
    "efficiency.activation_checkpointing": "full",
}


def best_estimate(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator | None = None,
    known: Estimate | None = None,
) -> Estimate | None:
    """Return the settings with the highest training speed that fit in memory, or None if no
    settings fit.

    The recipe's precision and global batch size are kept, but its micro-batch size may change.
    AdamW is replaced by 8-bit AdamW only if nothing else fits. Methods that save memory are added
    until the micro-batch is large enough to keep the device busy. Methods that reduce the speed the
    least are added first.

    If the recipe enables torch.compile, the search still predicts the memory use without
    torch.compile. This prediction is quicker, and the memory use is usually higher than with
    torch.compile. The selected candidate and the unchanged recipe are then estimated with
    torch.compile. If neither of them fits, the search is repeated with torch.compile for all
    candidates that could fit.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use; None creates one.
        known: the estimate for the unchanged recipe, if it is already available.
    """
    estimator = estimator or Estimator()
    without: dict[str, Estimate] = {}
    found = _fastest(recipe, machine, estimator, without)
    if not recipe.efficiency.compile:
        return found
    estimates: list[Estimate] = []
    # The unchanged recipe comes first, because `max` returns the first candidate if several are
    # equally fast.
    if found is None or found.changes:
        estimates.append(known or estimator.estimate(Candidate(recipe, machine, "as it stands")))
    if found is not None:
        estimator.tell(f"{found.name}, compiled")
        estimates.append(estimator.estimate(Candidate(recipe, machine, found.name, found.changes)))
    fitting = [estimator.timed(one, machine) for one in estimates if one.fits]
    if not fitting:
        hopeless = {name for name, one in without.items() if not one.may_fit_compiled}
        return _fastest(recipe, machine, estimator, {}, compiles=True, hopeless=hopeless)
    return max(fitting, key=_rate)


def _fastest(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator,
    looked_at: dict[str, Estimate],
    *,
    compiles: bool = False,
    hopeless: Container[str] = (),
) -> Estimate | None:
    """Return the fastest candidate of `_SAVINGS` that fits, or None if no candidate fits.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use.
        looked_at: dictionary to which the estimates of all candidates are added, keyed by name.
            Each estimate has the largest micro-batch that fits.
        compiles: True to predict the memory use of compiled steps; see `Candidate`.
        hopeless: names of candidates to skip.
    """
    found: list[Estimate] = []
    tried: list[dict[str, Any]] = []
    for name, changes in _SAVINGS:
        wanted = {key: value for key, value in changes.items() if not _has(recipe, key, value)}
        # Changes that the recipe already contains are dropped. The remaining changes can then be
        # the same as for an earlier candidate.
        if wanted in tried:
            continue
        tried.append(wanted)
        if name in hopeless:
            continue
        if "optimizer.name" in wanted and (found or recipe.optimizer.name != "adamw"):
            # A different optimizer changes the result of training, so it replaces AdamW only if
            # nothing else fits.
            continue
        if "optimizer.name" in wanted:
            wanted |= other_optimizer(recipe, wanted["optimizer.name"])
        estimator.tell(name)
        one = largest_that_fits(
            recipe, machine, name, wanted, estimator=estimator, compiles=compiles
        )
        looked_at[name] = one
        if not one.fits:
            continue
        found.append(estimator.timed(one, machine))
        if _is_busy(one, machine):
            break
    return max(found, key=_rate, default=None)


def largest_that_fits(
    recipe: ResolvedRecipe,
    machine: Machine,
    name: str,
    changes: dict[str, Any],
    estimator: Estimator,
    *,
    compiles: bool,
) -> Estimate:
    """Return the estimate with the largest micro-batch that fits in memory and divides the step
    evenly. If no micro-batch fits, return the estimate with the smallest micro-batch.

    The memory use is approximately a linear function of the micro-batch size. This function is
    determined by the estimates for the two smallest sizes. The sizes that should fit according to
    this function are then estimated, largest first.
    """
    sizes = list(micro_batches(recipe, machine))

    def asked(size: int) -> Candidate:
        candidate = _with_micro_batch_size(recipe, machine, name, changes, size=size)
        return dataclasses.replace(candidate, compiles=compiles)

    if compiles:
        # The two sizes are estimated one after the other, because tracing a compiled step already
        # keeps both workers busy.
        first = estimator.estimate(asked(sizes[-1]))
        more = [estimator.estimate(asked(size)) for size in sizes[-2:-1] if first.fits]
    else:
        # The two smallest sizes are estimated at the same time in the worker processes.
        first, *more = estimator.estimate_all([asked(size) for size in sizes[:-3:-1]])
    if not (first.fits and more and more[0].fits):
        return first
    (second,) = more
    slope = (second.needed_bytes - first.needed_bytes) / (sizes[-2] - sizes[-1])
    busy = BUSY_TOKENS[machine.target.kind]
    seq_len = recipe.data.seq_len
    for size in sizes[:-2]:
        expected = first.needed_bytes + slope * (size - sizes[-1])
        # A micro-batch with more than twice as many tokens as are needed to keep the device busy
        # would not be faster.
        if expected > machine.usable_bytes or size * seq_len > 2 * busy:
            continue
        one = estimator.estimate(asked(size))
        if one.fits:
            return one
    return second


def open_micro_batch(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe without a fixed number of micro-batches but with the same global batch
    size.

    If the recipe does not set `global_batch_tokens`, its micro-batches determine the global batch
    size, so it is returned unchanged.
    """
    if resolved.batch.global_batch_tokens is None:
        return resolved
    return resolved.with_keys("batch", gradient_accumulation_steps=None)


def micro_batches(recipe: ResolvedRecipe, machine: Machine) -> Iterator[int]:
    """Yield micro-batch sizes in decreasing order. Each size divides a device's share of the global
    batch evenly and is at most half of the previous size."""
    total = sequences_per_step(recipe, machine)
    if recipe.batch.ramp_start_tokens is not None:
        # If the batch size is ramped up, the first step must also be divided evenly.
        share = recipe.data.seq_len * copies_of(recipe, machine.count)
        total = math.gcd(total, recipe.batch.ramp_start_tokens // share)
    before = 2 * total
    for size in range(total, 0, -1):
        if total % size == 0 and 2 * size <= before:
            # Sizes between half of the previous size and the previous size are skipped, because
            # their speed hardly differs.
            before = size
            yield size


def _with_micro_batch_size(
    recipe: ResolvedRecipe,
    machine: Machine,
    name: str,
    changes: dict[str, Any],
    *,
    size: int,
) -> Candidate:
    total = sequences_per_step(recipe, machine)
    more: dict[str, Any] = dict(changes)
    if size != recipe.batch.micro_batch_size:
        more["batch.micro_batch_size"] = size
        if recipe.batch.global_batch_tokens is None:
            more["batch.gradient_accumulation_steps"] = total // size
    return Candidate(recipe, machine, name, more)


def _has(recipe: ResolvedRecipe, key: str, value: object) -> bool:
    section, _, name = key.partition(".")
    found = getattr(getattr(recipe, section), name)
    # Any nonzero number of tokens means that the loss is computed in chunks.
    return bool(found == value or (name == "loss_chunk_tokens" and found))


def _is_busy(one: Estimate, machine: Machine) -> bool:
    whole = one.recipe.batch.micro_batch_size == sequences_per_step(one.recipe, machine)
    tokens = one.recipe.batch.micro_batch_size * one.recipe.data.seq_len
    return whole or tokens >= BUSY_TOKENS[machine.target.kind]


def _rate(one: Estimate) -> float:
    """Return the value by which candidates are ranked. It is the expected speed in tokens/s or, if
    the speed is unknown, the micro-batch size."""
    if one.tokens_per_second is not None:
        return one.tokens_per_second.expected
    return float(one.recipe.batch.micro_batch_size)


def nearest_estimates(
    recipe: ResolvedRecipe, machine: Machine, estimator: Estimator | None = None
) -> list[Estimate]:
    """If no candidate for a recipe fits in memory, return alternatives that would fit. The
    alternatives are LoRA, LoRA with 4-bit weights, offloading to the CPU, and more devices. All of
    them use a micro-batch of one sequence and full activation checkpointing.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use; None creates one.
    """
    estimator, candidates = estimator or Estimator(), []
    sequences = sequences_per_step(recipe, machine) * copies_of(recipe, machine.count)
    for name, changes, where in _fallbacks(recipe, machine):
        least = dict(_LEAST)
        if recipe.batch.global_batch_tokens is None:
            # The global batch stays the same, even on more devices.
            cut = with_changes(recipe, {k: v for k, v in changes.items() if "distributed" in k})
            copies = copies_of(cut, where.count)
            least["batch.gradient_accumulation_steps"] = max(sequences // copies, 1)
        candidates.append(Candidate(recipe, where, name, {**least, **changes}, compiles=False))
    found = list(estimator.estimate_all(candidates))
    fitting = [
        estimator.timed(one, candidate.machine)
        for candidate, one in zip(candidates, found, strict=True)
        if one.fits
    ]
    if fitting or not recipe.efficiency.compile:
        return fitting
    compiled = [
        dataclasses.replace(candidate, compiles=True)
        for candidate, one in zip(candidates, found, strict=True)
        if one.may_fit_compiled
    ]
    return [one for one in estimator.estimate_all(compiled) if one.fits]


def _fallbacks(
    recipe: ResolvedRecipe, machine: Machine
) -> Iterator[tuple[str, dict[str, Any], Machine]]:
    if recipe.lora is None:
        alone = without_average(recipe)
        if machine.count == 1:
            alone["distributed.engine"] = "auto"
        yield "LoRA, rank 16", {"lora": _LORA, **alone}, machine
        yield (
            "LoRA, rank 16, base in 4 bits",
            {"lora": {**_LORA, "quantize": "nf4"}, **alone},
            machine,
        )
    if machine.target.kind == "cuda" and recipe.lora is None:
        offload: dict[str, Any] = {
            "distributed.engine": "deepspeed",
            "distributed.offload": "cpu",
            # DeepSpeed does not support compilation.
            "efficiency.compile": False,
        }
        yield "offloading moments to the CPU (DeepSpeed)", offload, machine
        several = dataclasses.replace(machine, count=max(machine.count, 2))
        yield (
            f"{several.count} devices with fsdp, offloading to the CPU",
            {"distributed": {"engine": "fsdp", "offload": "cpu"}},
            several,
        )
        for count in (2, 4, 8, 16, 32, 64):
            if count > machine.count:
                more = dataclasses.replace(machine, count=count)
                yield f"{count} devices with fsdp", {"distributed": {"engine": "fsdp"}}, more
