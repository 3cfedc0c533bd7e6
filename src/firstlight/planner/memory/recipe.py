"""The memory of a recipe's training step and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.generation.batch import BatchDecoder
from firstlight.methods import autocast, same_bits
from firstlight.methods.attention import varying_lengths
from firstlight.models import build_model
from firstlight.models.ops import MaskFunction
from firstlight.optim import optimizer, spec
from firstlight.optim.eight_bit import compiles_update
from firstlight.planner.memory.kernels import Target, this_cpu
from firstlight.planner.memory.layers import (
    Join,
    few_compiled_layers,
    from_graphs,
    in_fewer_layers,
    merged,
    padded_logits_bytes,
    with_temporary,
)
from firstlight.planner.memory.prediction import MemoryPrediction, predict
from firstlight.planner.memory.program import (
    PLANNED,
    Equivalent,
    equivalent,
    fake_tensors,
    graphs_kept,
    host_activations,
    kernels_of,
    mark_weights,
    marked_log_probs,
    marked_loss,
    optimizer_phases,
    replaced,
    stubbed_compiler,
    uncompiled,
    watch_program,
    without_garbage_collection,
)
from firstlight.planner.memory.trace import ALIVE, Trace, Tracer
from firstlight.planner.plan.processes import WorkerProcesses
from firstlight.recipe import ResolvedRecipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Assumed number of preference pairs in a row. It has little effect on memory: a mask of the row's
#: tokens for each answer.
_PAIRS_A_ROW = 4

#: Maximum number of layers of a model that is traced completely, unless it is compiled.
_FULLY_TRACED = 8


@dataclass(frozen=True)
class TraceJob:
    """A prediction to be made.

    Attributes:
        calls: tuples of a function that traces and its arguments; they are independent of each
            other.
        join: function that maps the results of all calls to the prediction.
    """

    calls: tuple[tuple[Any, ...], ...]
    join: Callable[[Sequence[Any]], MemoryPrediction]


def run_jobs(
    jobs: Sequence[TraceJob], workers: WorkerProcesses | None = None
) -> list[MemoryPrediction]:
    """Run jobs and return their predictions in the same order.

    Args:
        jobs: the jobs; those that take longest come first.
        workers: processes that trace; None traces in this process.
    """
    calls = [call for job in jobs for call in job.calls]
    found = iter(list((workers or WorkerProcesses()).map(_call, calls)))
    return [job.join([next(found) for _ in job.calls]) for job in jobs]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    with without_garbage_collection():
        return function(*arguments)


def training_job(recipe: ResolvedRecipe, target: Target | None = None) -> TraceJob:
    """Create a job that predicts the memory of a recipe's training step.

    Two optimizer steps are traced: the first creates the optimizer's state, which the second has
    from its start. The second step has up to two micro-batches, so that gradients of an earlier
    micro-batch are in memory.

    A deep model is predicted from the same model with few layers: see `layers.py`. If it is
    compiled, the graphs as they are before inductor fuses operators are traced as well.

    Args:
        recipe: the resolved recipe.
        target: the device to predict for; None is this machine's CPU.

    Raises:
        ConfigError: a key is not resolved, or the recipe's methods can't be combined.
        MissingDependencyError: a library that the recipe needs is not installed; raised when the
            job runs.
    """
    target = target or this_cpu()
    planned = equivalent(recipe, target)
    config = planned.recipe.efficiency
    if config.compile and not config.compile_regional:
        return _compiled_job(planned, target)
    # Compiling takes seconds per layer: a compiled model is never traced with all of its layers.
    recipes, join = _in_parts(planned.recipe, 0 if config.compile else _FULLY_TRACED)
    return TraceJob(tuple((_train, planned.with_(one), target) for one in recipes), join)


def _compiled_job(planned: Equivalent, target: Target) -> TraceJob:
    shallow = few_compiled_layers(planned.recipe)
    copied = padded_logits_bytes(planned.recipe, target)
    if shallow is None:
        return TraceJob(
            ((_train, planned, target),),
            lambda found: with_temporary(merged(found[0]), "backward", copied),
        )
    few, more, steps = shallow
    accumulates = few.batch.accumulation(few.data.seq_len) > 1
    return TraceJob(
        ((_train_both, planned.with_(few), target), (_train_graphs, planned.with_(more), target)),
        lambda found: with_temporary(
            from_graphs(found[0][0], found[0][1], found[1], steps, accumulates=accumulates),
            "backward",
            copied,
        ),
    )


def evaluation_job(
    recipe: ResolvedRecipe, target: Target | None = None, *, samples: bool = False
) -> TraceJob:
    """Create a job that predicts the memory of evaluating one batch of the recipe's micro-batch
    size and row length between training steps, with the optimizer's state in memory.

    Args:
        recipe, target: see `training_job`.
        samples: True adds the recipe's sample texts, which a run generates with an evaluation, as a
            second phase.

    Raises:
        ConfigError, MissingDependencyError: see `training_job`.
    """
    target = target or this_cpu()
    planned = equivalent(uncompiled(recipe), target)
    recipes, join = _in_parts(planned.recipe, _FULLY_TRACED)
    samples = samples and bool(recipe.evaluation.sample_prompts)
    calls = tuple((_evaluate, planned.with_(one), target, samples) for one in recipes)
    return TraceJob(calls, join)


def _in_parts(recipe: ResolvedRecipe, limit: int) -> tuple[list[ResolvedRecipe], Join]:
    """Return the recipes to trace, and the function that joins their predictions; only the recipe
    itself if its model has at most `limit` layers."""
    if recipe.model.num_hidden_layers <= limit:
        return [recipe], lambda found: merged(found[0])
    return in_fewer_layers(recipe)


def trace_memory(recipe: ResolvedRecipe, target: Target | None = None) -> MemoryPrediction:
    """Run a `training_job` in this process."""
    return run_jobs([training_job(recipe, target)])[0]


def _evaluate(planned: Equivalent, target: Target, samples: bool) -> MemoryPrediction:
    with (
        _compiled_without_kernels(planned.recipe),
        _traced(planned, target) as (tracer, program, batch),
    ):
        watch_program(program, tracer)
        program.step([batch], lr_scale=1.0)
        first = tracer.tick + 1
        program.model.eval()
        with torch.inference_mode(), tracer.phase("evaluation"):
            program.evaluation_loss(*batch.inputs)
        if samples:
            with tracer.phase("samples"), autocast(torch.device("cpu"), program.dtype):
                _sample(program, tracer)
        trace = _finished(tracer, planned)
    phases = ("evaluation", "samples") if samples else ("evaluation",)
    return predict(trace, target, first, phases=phases)


def _sample(program: TrainingProgram, tracer: Tracer) -> None:
    """Trace the key-value cache at its full length, the longest prompt, and the last token."""
    config, context = program.recipe.evaluation, program.model.config.max_position_embeddings
    # A prompt has at most as many tokens as characters; an empty prompt starts with one end token.
    prompt = min(max(map(len, (*config.sample_prompts, "x"))), context // 2 or 1)
    longest = min(prompt + config.sample_tokens, context)
    decoder = BatchDecoder(program.model, 1, longest)
    tracer.mark(decoder.cache.tensors, "activations")
    decoder.add([0] * prompt)
    # Only the step at full length runs, because it takes the most memory.
    decoder.lengths = [longest - 1]
    decoder.step([0])


def _train(planned: Equivalent, target: Target, stretches: int = 2) -> MemoryPrediction:
    with (
        _compiled_without_kernels(planned.recipe),
        _traced(planned, target) as (tracer, program, batch),
    ):
        second = _two_steps(tracer, program, batch)
        trace = _finished(tracer, planned)
    return predict(trace, target, second, stretches=stretches)


def _compiled_without_kernels(recipe: ResolvedRecipe) -> contextlib.AbstractContextManager[object]:
    """Context for the compiled parts of a step: the model, or the update, which torchao's optimizer
    compiles itself. Real kernels would read addresses that fake tensors do not have, and crash."""
    compiles = recipe.efficiency.compile or compiles_update(recipe.optimizer)
    return stubbed_compiler() if compiles else contextlib.nullcontext()


def _train_both(planned: Equivalent, target: Target) -> tuple[MemoryPrediction, MemoryPrediction]:
    """Return predictions for the compiled training step, and for its graphs before fusion."""
    with (
        stubbed_compiler(),
        graphs_kept(fuses=True) as graphs,
        _traced(planned, target) as (tracer, program, batch),
    ):
        _two_steps(tracer, program, batch)
        last, graphs.runs = tracer.tick, True
        program.step(_micro_batches(program, batch), lr_scale=1.0)
        trace = _finished(tracer, planned)
    parts = cut(trace, 0, last), cut(trace, last + 1, len(trace.calls) - 1)
    return predict(parts[0], target, stretches=3), predict(parts[1], target, stretches=3)


def cut(trace: Trace, first: int, last: int) -> Trace:
    """Return a part of a trace, as a separate trace.

    Args:
        trace: a finished trace.
        first, last: first and last tick of the part. Storages that are alive at `first` are born
            at tick 0 of the part.
    """
    storages = [
        replace(
            storage,
            birth=max(storage.birth - first, 0),
            death=storage.death - first if storage.death <= last else ALIVE,
        )
        for storage in trace.storages
        if storage.birth <= last and storage.death >= first
    ]

    def inside(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(a - first, b - first) for a, b in stretches if first <= a and b <= last]

    return replace(
        trace,
        storages=storages,
        calls=trace.calls[first : last + 1],
        phases=trace.phases[first : last + 1],
        segments=inside(trace.segments),
        recomputations=inside(trace.recomputations),
    )


def _train_graphs(planned: Equivalent, target: Target) -> MemoryPrediction:
    """Return the prediction for the graphs of a compiled training step, without compiling them."""
    with graphs_kept(fuses=False):
        return _train(planned, target, stretches=3)


def _two_steps(tracer: Tracer, program: TrainingProgram, batch: Batch) -> int:
    """Trace two optimizer steps; return the first tick of the second."""
    if program.recipe.efficiency.compile:
        with tracer.paused():
            _compile(program, batch)
    watch_program(program, tracer)
    program.step([batch], lr_scale=1.0)
    # The first step has created the optimizer's state, which the second has from its start.
    second = tracer.tick + 1
    program.step(_micro_batches(program, batch), lr_scale=1.0)
    return second


def _micro_batches(program: TrainingProgram, batch: Batch) -> list[Batch]:
    # During a second micro-batch, the gradients of the first are in memory; a third adds nothing.
    return [batch] * min(2, program.recipe.batch.accumulation(batch.input_ids.shape[1]))


@contextlib.contextmanager
def _traced(planned: Equivalent, target: Target) -> Iterator[tuple[Tracer, TrainingProgram, Batch]]:
    """Context in which everything is traced: the tracer, the recipe's program, and a batch."""
    recipe, tracer = planned.recipe, Tracer()
    lists = (lambda _: spec.LIST_VALUES) if target.kind == "cuda" else spec.list_values
    with (
        fake_tensors(),
        tracer,
        optimizer_phases(tracer),
        # Deterministic runs do not use cuDNN attention either.
        varying_lengths() if recipe.run.deterministic else contextlib.nullcontext(),
        # The tensors here are CPU tensors.
        replaced(spec, "list_values", lists),
        replaced(optimizer, "list_values", lists),
        kernels_of(target, planned.kernel),
    ):
        model = build_model(recipe.model, recipe.efficiency.vocab_multiple)
        mark_weights(model, tracer)
        attach(model, recipe, PLANNED)
        if target.kind == "cuda" and recipe.preference is None:
            # The weights are created on the CPU and then moved, so this takes no GPU memory. For
            # preference pairs, the model is already on the GPU, to compute the references.
            tracer.start_again()
            mark_weights(model, tracer)
        if recipe.preference is not None and not recipe.data.document_masking:
            # The preference loss needs document ids, but attention must not derive a mask from
            # them.
            model.make_mask = _without_documents(model.make_mask)
        program = TrainingProgram(recipe, model, PLANNED)
        if program.preference is not None:
            program.preference.log_probs = marked_log_probs(tracer)
        mark_weights(program.model, tracer)
        batch = _batch(recipe)
        tracer.mark((batch.input_ids, batch.labels, batch.document_ids), "activations")
        if not recipe.efficiency.compile:
            # In a compiled model the loss is part of the compiled code, and can't be marked.
            model.head_loss = marked_loss(model.head_loss, tracer)
        if planned.offloads:
            program.loss_sum = host_activations(program.loss_sum, model, tracer, target)
        yield tracer, program, batch


def _finished(tracer: Tracer, planned: Equivalent) -> Trace:
    trace = tracer.finish()
    trace.notes += planned.notes
    return trace


def _compile(program: TrainingProgram, batch: Batch) -> None:
    """Compile the forward and backward pass before the traced steps, because the memory of
    compiling is not part of a step's."""
    program.model.train()
    with same_bits(program.recipe.efficiency, program.hardware):
        loss = program.loss_sum(*batch.inputs)
        (loss / 1.0).backward()  # type: ignore[no-untyped-call]
    for parameter in program.model.parameters():
        parameter.grad = None


def _batch(recipe: ResolvedRecipe) -> Batch:
    shape = (recipe.batch.micro_batch_size, recipe.data.seq_len)
    ids = torch.empty(shape, dtype=torch.int64)
    masked = recipe.data.document_masking or recipe.preference is not None
    documents = torch.empty(shape, dtype=torch.int32) if masked else None
    if recipe.preference is None:
        return Batch(ids, torch.empty_like(ids), ids.numel(), documents)
    references = torch.empty((recipe.batch.micro_batch_size, 2 * _PAIRS_A_ROW), dtype=torch.float64)
    return _Pairs(ids, torch.empty_like(ids), ids.numel(), documents, references=references)


def _without_documents(make_mask: MaskFunction) -> MaskFunction:
    def made(
        positions: Tensor, total: int, window: int | None, document_ids_BT: Tensor | None
    ) -> Any:
        return make_mask(positions, total, window, None)

    return made


class _Pairs(Batch):
    """A batch of preference pairs whose number comes from a shape: fake tensors have no values."""

    @property
    def num_terms(self) -> int:
        assert self.references is not None
        return self.references.numel() // 2
