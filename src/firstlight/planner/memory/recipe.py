"""Predict the memory use of a recipe's training step and evaluation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.generation.batch import BatchDecoder
from firstlight.methods import autocast, same_bits
from firstlight.methods.attention import varying_lengths
from firstlight.models import ModelConfig, build_model, padded_vocab_size
from firstlight.models.ops import MaskFunction
from firstlight.optim import optimizer, spec
from firstlight.optim.eight_bit import compiles_update
from firstlight.planner.memory.kernels import (
    LISTS,
    Layout,
    OperatorCount,
    Target,
    this_cpu,
    total_bytes,
)
from firstlight.planner.memory.prediction import (
    LATE_BACKWARD,
    MIDDLE_BACKWARD,
    MemoryPrediction,
    PhasePeak,
    predict,
)
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

#: Assumed number of preference pairs per row. It hardly affects the memory use, because each
#: additional response only adds a mask over the tokens of the row.
_PAIRS_A_ROW = 4

#: Models with at most this many layers are traced with all of their layers, unless they are
#: compiled.
_FULLY_TRACED = 8


@dataclass(frozen=True)
class TraceJob:
    """The calls from which a memory prediction is computed.

    Attributes:
        calls: tuples (tracing function, arguments). The calls are independent of each other.
        join: function that receives the results of all calls and returns the prediction.
    """

    calls: tuple[tuple[Any, ...], ...]
    join: Callable[[Sequence[Any]], MemoryPrediction]


def run_jobs(
    jobs: Sequence[TraceJob], workers: WorkerProcesses | None = None
) -> list[MemoryPrediction]:
    """Run jobs and return their predictions in the same order.

    Args:
        jobs: jobs to run, longest first.
        workers: processes that trace the jobs; None to trace in this process.
    """
    calls = [call for job in jobs for call in job.calls]
    found = iter(list((workers or WorkerProcesses()).map(_call, calls)))
    return [job.join([next(found) for _ in job.calls]) for job in jobs]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    with without_garbage_collection():
        return function(*arguments)


def training_job(recipe: ResolvedRecipe, target: Target | None = None) -> TraceJob:
    """Create a job that predicts the memory use of a recipe's training step.

    Two optimizer steps are traced. The first step creates the optimizer's state, which is in memory
    during the entire second step. The second step has up to two micro-batches, so that the
    gradients of an earlier micro-batch are also in memory.

    The prediction for a deep model is extrapolated from the same model with only a few layers; see
    `in_fewer_layers`. For a compiled model, the graphs are also traced as they are before operator
    fusion.

    Args:
        recipe: the resolved recipe.
        target: device for which to predict; None for this machine's CPU.

    Raises:
        ConfigError: a key is not resolved, or the recipe's methods can't be combined.
        MissingDependencyError: a library that the recipe requires is not installed. This error is
            raised when the job runs.
    """
    target = target or this_cpu()
    planned = equivalent(recipe, target)
    config = planned.recipe.efficiency
    if config.compile and not config.compile_regional:
        return _compiled_job(planned, target)
    # A compiled model is never traced with all of its layers, because compiling takes several
    # seconds per layer.
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
    """Create a job that predicts the memory use of evaluating one batch between training steps,
    while the optimizer's state is in memory. The batch has the micro-batch size and the sequence
    length of the recipe.

    Args:
        recipe, target: the resolved recipe and the device for which to predict; see `training_job`.
        samples: True to add a second phase for generating the recipe's sample texts, which is part
            of an evaluation during training.

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
    """Return the recipes to trace, and a function that combines their predictions. If the model has
    at most `limit` layers, only the recipe itself is traced."""
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
    """Trace the generation of a sample text. The trace contains the forward pass over the longest
    prompt, and the generation of the last token with a full key-value cache."""
    config, context = program.recipe.evaluation, program.model.config.max_position_embeddings
    # A prompt is assumed to have as many tokens as characters. An empty prompt is replaced by a
    # single end-of-text token.
    prompt = min(max(map(len, (*config.sample_prompts, "x"))), context // 2 or 1)
    longest = min(prompt + config.sample_tokens, context)
    decoder = BatchDecoder(program.model, 1, longest)
    tracer.mark(decoder.cache.tensors, "activations")
    decoder.add([0] * prompt)
    # Only the last decoding step runs, because it takes the most memory.
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
    """Return a context for running a step whose model or optimizer update is compiled. In the
    context, compiled kernels do nothing, because real kernels would crash when they access the
    memory of fake tensors. The optimizer of torchao compiles its update itself."""
    compiles = recipe.efficiency.compile or compiles_update(recipe.optimizer)
    return stubbed_compiler() if compiles else contextlib.nullcontext()


def _train_both(planned: Equivalent, target: Target) -> tuple[MemoryPrediction, MemoryPrediction]:
    """Return two predictions, for the compiled training step and for its graphs before operator
    fusion."""
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
    """Return a part of a trace as a separate trace.

    Args:
        trace: a finished trace.
        first, last: first and last tick of the part. Storages that are already alive at `first`
            begin at tick 0 of the new trace.
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
    """Return the prediction for the graphs of a compiled training step. The graphs run operator by
    operator and are not compiled."""
    with graphs_kept(fuses=False):
        return _train(planned, target, stretches=3)


def _two_steps(tracer: Tracer, program: TrainingProgram, batch: Batch) -> int:
    """Trace two optimizer steps, and return the first tick of the second step."""
    if program.recipe.efficiency.compile:
        with tracer.paused():
            _compile(program, batch)
    watch_program(program, tracer)
    program.step([batch], lr_scale=1.0)
    # The optimizer's state was created in the first step, so it is in memory during the entire
    # second step.
    second = tracer.tick + 1
    program.step(_micro_batches(program, batch), lr_scale=1.0)
    return second


def _micro_batches(program: TrainingProgram, batch: Batch) -> list[Batch]:
    # During the second micro-batch, the gradients of the first micro-batch are in memory. A third
    # micro-batch would not need any additional memory.
    return [batch] * min(2, program.recipe.batch.accumulation(batch.input_ids.shape[1]))


@contextlib.contextmanager
def _traced(planned: Equivalent, target: Target) -> Iterator[tuple[Tracer, TrainingProgram, Batch]]:
    """Trace all code that runs in the context. Yield the tracer, the recipe's program, and a
    batch."""
    recipe, tracer = planned.recipe, Tracer()
    lists = (lambda _: spec.LIST_VALUES) if target.kind == "cuda" else spec.list_values
    with (
        fake_tensors(),
        tracer,
        optimizer_phases(tracer),
        # In deterministic runs, cuDNN attention is disabled, as in `varying_lengths`.
        varying_lengths() if recipe.run.deterministic else contextlib.nullcontext(),
        # The traced tensors are on the CPU, so the original `list_values` would return the values
        # for a CPU even if the target is a GPU.
        replaced(spec, "list_values", lists),
        replaced(optimizer, "list_values", lists),
        kernels_of(target, planned.kernel),
    ):
        model = build_model(recipe.model, recipe.efficiency.vocab_multiple)
        mark_weights(model, tracer)
        attach(model, recipe, PLANNED)
        if target.kind == "cuda" and recipe.preference is None:
            # The weights are created on the CPU and then moved to the GPU, so creating them does
            # not take any GPU memory. For preference pairs, the model is already on the GPU,
            # because it has computed the reference log-probabilities.
            tracer.start_again()
            mark_weights(model, tracer)
        if recipe.preference is not None and not recipe.data.document_masking:
            # The document ids are only used by the preference loss. Attention must not derive a
            # mask from them.
            model.make_mask = _without_documents(model.make_mask)
        program = TrainingProgram(recipe, model, PLANNED)
        if program.preference is not None:
            program.preference.log_probs = marked_log_probs(tracer)
        mark_weights(program.model, tracer)
        batch = _batch(recipe)
        tracer.mark((batch.input_ids, batch.labels, batch.document_ids), "activations")
        if not recipe.efficiency.compile:
            # In a compiled model, the loss is part of the compiled code and can't be marked as a
            # phase.
            model.head_loss = marked_loss(model.head_loss, tracer)
        if planned.offloads:
            program.loss_sum = host_activations(program.loss_sum, model, tracer, target)
        yield tracer, program, batch


def _finished(tracer: Tracer, planned: Equivalent) -> Trace:
    trace = tracer.finish()
    trace.notes += planned.notes
    return trace


def _compile(program: TrainingProgram, batch: Batch) -> None:
    """Compile the forward and backward pass before the traced steps, so that the memory used for
    compiling is not counted as memory of a step."""
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
    """A batch whose number of preference pairs is computed from the shape of a tensor, because fake
    tensors do not contain values."""

    @property
    def num_terms(self) -> int:
        assert self.references is not None
        return self.references.numel() // 2


# Predicting the memory of a deep model from the memory of the same model with few layers
#
# If all layers are alike, each layer adds the same amount of memory. The bytes in memory at a given
# point of a step are therefore a linear function of the number of layers. With more layers,
# however, the peak may move to a different point. It can occur early in the backward pass, when all
# activations are in memory, or late in the backward pass, when all gradients are in memory. Each
# section of the step is therefore extrapolated separately, and the largest result is used.
#
# Compiling a model with one more layer takes several seconds. However, a layer only adds its
# gradients and the tensors that it saves for the backward pass, and both are known from the graphs
# before inductor fuses operators. The linear function for a compiled model therefore starts at the
# memory of a shallow model that is fully compiled, and its slope is computed from the graphs.

#: Number of layers of the shallower traced model. The second traced model has one more layer.
_FEW = 2

#: Number of layers of a fully compiled model that are traced through inductor, by activation
#: checkpointing mode. With "full", the peak is often at a layer that is neither the first nor the
#: last, and a prediction with two layers was up to 4% too low. With "selective" and "budget", a
#: layer that is both the first and the last saves additional tensors, and a prediction with one
#: layer was up to 7% too high.
_FEW_COMPILED = {"none": 1, "selective": 2, "budget": 2, "full": 3}

#: Minimum number of layers of a fully compiled model with blockwise attention, which allocates a
#: lot of memory internally. Inductor does not take this memory into account. In a layer that is
#: both first and last, it also orders the surrounding operators differently. A prediction with one
#: layer was 3% too low.
_FEW_BLOCKWISE = 2

#: Phases that do not run compiled code.
_EAGER = ("setup", "clipping", "optimizer")

Join = Callable[[Sequence[MemoryPrediction]], MemoryPrediction]


def in_fewer_layers(recipe: ResolvedRecipe) -> tuple[list[ResolvedRecipe], Join]:
    """Return recipes for shallow models to trace, and a function that extrapolates their
    predictions to the full model.

    Args:
        recipe: the resolved recipe. If the layers of its model are not alike, or if there are only
            a few layers, the recipe itself is traced.

    Returns:
        The recipes, deepest first, and the function. The function takes the predictions for these
        recipes in the same order. In each prediction, the backward pass must be split into two
        sections (see `stretches` in `prediction.predict`).
    """
    depth = recipe.model.num_hidden_layers
    if depth <= _FEW + 1 or not are_alike(recipe.model):
        return [recipe], lambda found: merged(found[0])
    # Memory grows linearly with the number of layers. The memory added per layer is the difference
    # between two shallow models.
    steps = depth - _FEW - 1
    return (
        [with_layers(recipe, count) for count in (_FEW + 1, _FEW)],
        lambda found: _deeper(found[1], found[0], steps),
    )


def few_compiled_layers(
    recipe: ResolvedRecipe,
) -> tuple[ResolvedRecipe, ResolvedRecipe, int] | None:
    """Return recipes for shallow models, from which `from_graphs` predicts the memory use of a
    fully compiled model.

    Args:
        recipe: the resolved recipe.

    Returns:
        A recipe with few layers, the same recipe with one more layer, and the difference between
        the number of layers in the original recipe and in the first of these recipes. None if the
        layers are not alike, or if the original recipe does not have more layers than the second
        recipe.
    """
    depth = recipe.model.num_hidden_layers
    few = _FEW_COMPILED[recipe.efficiency.activation_checkpointing]
    if recipe.efficiency.attention == "blockwise":
        few = max(few, _FEW_BLOCKWISE)
    if depth <= few + 1 or not are_alike(recipe.model):
        return None
    return with_layers(recipe, few), with_layers(recipe, few + 1), depth - few


def from_graphs(
    fused: MemoryPrediction,
    graphs: MemoryPrediction,
    more: MemoryPrediction,
    steps: int,
    *,
    accumulates: bool = False,
) -> MemoryPrediction:
    """Predict the memory use of a compiled model from a shallow compiled model and from the graphs
    of two shallow models.

    In each prediction, the backward pass must be split into three sections (see `stretches` in
    `prediction.predict`).

    Args:
        fused: prediction for the shallow model, as inductor compiles it.
        graphs: prediction for the same model, with its graphs run operator by operator.
        more: prediction for the graphs of a model with one more layer.
        steps: number of layers to add to the shallow model.
        accumulates: True if the gradients of an earlier micro-batch are in memory.

    Returns:
        The prediction. Its operators are those of the graphs.
    """
    accumulated = _new_gradients(fused, more) if accumulates else 0
    # Late in the backward pass and after it, all gradients are in memory. If parameters are updated
    # during the backward pass, no gradients remain afterwards.
    eager = [name for name in ("clipping", "optimizer") if "gradients" in more.phases[name].parts]
    ending = min(eager, key=lambda name: more.phases[name].bytes, default="optimizer")

    def slope(place: str) -> tuple[PhasePeak, PhasePeak]:
        before = fused if place in _EAGER or place not in graphs.phases else graphs
        return before.phases[place], more.phases[place]

    places = {name: slope(name) for name in fused.phases if name in more.phases}
    if LATE_BACKWARD in places:
        before, after = slope(ending)
        places[LATE_BACKWARD] = before, _with_more(after, accumulated)
    if MIDDLE_BACKWARD in places:
        early, middle = places["backward"], places[MIDDLE_BACKWARD]
        # In the graphs with few layers, the peak is in the middle of the backward pass. With one
        # more layer, it is early in the backward pass.
        if early[0].bytes < middle[0].bytes <= early[1].bytes > middle[1].bytes:
            places["backward"] = middle[0], early[1]
        # The additional layers may come before or after the layer at which the peak occurs. Use the
        # case that adds more memory.
        ends = (places["backward"], places[LATE_BACKWARD])
        places[MIDDLE_BACKWARD] = max(ends, key=lambda pair: pair[1].bytes - pair[0].bytes)
    phases = {name: _continued(fused.phases[name], *pair, steps) for name, pair in places.items()}
    found = replace(
        fused,
        host_bytes=fused.host_bytes + (more.host_bytes - graphs.host_bytes) * steps,
        operators=tuple(at_depth(graphs.operators, more.operators, steps - 1)),
    )
    return _with_phases(found, phases, fused.reserved_bytes - fused.peak_bytes)


def _new_gradients(few: MemoryPrediction, more: MemoryPrediction) -> int:
    """Return the size in bytes of the gradients of one layer. The backward pass creates gradients
    in the dtype of the parameters, and only for trained parameters."""
    ends = [found.phases["optimizer"].parts for found in (few, more)]
    return min(ends[1].get(part, 0) - ends[0].get(part, 0) for part in ("weights", "gradients"))


def _with_more(peak: PhasePeak, gradients: int) -> PhasePeak:
    parts = peak.parts | {"gradients": peak.parts.get("gradients", 0) + gradients}
    return PhasePeak(peak.bytes + gradients, parts)


def _continued(peak: PhasePeak, few: PhasePeak, more: PhasePeak, steps: int) -> PhasePeak:
    """Return the peak plus `steps` times the difference between the peaks `more` and `few`."""
    total = peak.bytes + (more.bytes - few.bytes) * steps
    parts = {}
    for name in dict.fromkeys((*peak.parts, *few.parts, *more.parts)):
        each = more.parts.get(name, 0) - few.parts.get(name, 0)
        parts[name] = max(peak.parts.get(name, 0) + each * steps, 0)
    # The peaks of the graphs may have different parts than `peak`, so the sum can be negative for
    # some parts. Negative parts are set to 0, and the excess is subtracted from the largest parts.
    excess = sum(parts.values()) - total
    for name in sorted(parts, key=parts.__getitem__, reverse=True):
        taken = min(excess, parts[name])
        parts[name] -= taken
        excess -= taken
    return PhasePeak(total, {name: size for name, size in parts.items() if size})


def _deeper(few: MemoryPrediction, more: MemoryPrediction, steps: int) -> MemoryPrediction:
    """Return the prediction for a model that has `steps` layers more than the model of `more`. The
    model of `more` has one layer more than the model of `few`."""
    phases = {name: _line(few.phases[name], more.phases[name], steps) for name in more.phases}
    gaps = [found.reserved_bytes - found.peak_bytes for found in (few, more)]
    found = replace(
        more,
        host_bytes=more.host_bytes + (more.host_bytes - few.host_bytes) * steps,
        operators=tuple(at_depth(few.operators, more.operators, steps)),
    )
    return _with_phases(found, phases, max(gaps))


def _with_phases(
    prediction: MemoryPrediction, phases: dict[str, PhasePeak], gap: int
) -> MemoryPrediction:
    """Return the prediction for a deep model from the peaks of its phases. The allocator is assumed
    to reserve `gap` bytes more than the peak."""
    phase = max(phases, key=lambda name: phases[name].bytes)
    peak = phases[phase]
    found = replace(
        prediction,
        peak_bytes=peak.bytes,
        phase=phase,
        parts=peak.parts,
        phases=phases,
        # The gap between reserved and allocated memory does not grow with the number of layers,
        # because each layer reuses memory that the previous layer freed.
        reserved_bytes=peak.bytes + gap,
    )
    return merged(found)


def padded_logits_bytes(recipe: ResolvedRecipe, target: Target) -> int:
    """Return the size in bytes of the padded copy of the logits' gradient that is made in a fully
    compiled step on a GPU. If the size of a row of logits is a multiple of 16 bytes, no copy is
    made, and the result is 0.

    Inductor pads an operand of a matrix product (`pad_mm`) if the size of its rows is not a
    multiple of 16 bytes. On an H100, a step of GPT-2 with 50,257 logits per token needed exactly
    this many bytes more than was predicted without the copy.
    """
    config = recipe.efficiency
    is_short = config.precision in ("bf16", "fp16")
    if target.kind != "cuda" or config.loss_chunk_tokens or not is_short:
        return 0
    rows = padded_vocab_size(recipe.model.vocab_size, config.vocab_multiple)
    padded = padded_vocab_size(rows, 8)
    tokens = recipe.batch.micro_batch_size * recipe.data.seq_len
    return 2 * padded * tokens if padded > rows else 0


def with_temporary(prediction: MemoryPrediction, phase: str, size: int) -> MemoryPrediction:
    """Return the prediction with a temporary tensor of `size` bytes added at the peak of a
    phase."""
    if not size or phase not in prediction.phases:
        return prediction
    peak = prediction.phases[phase]
    parts = peak.parts | {"temporaries": peak.parts.get("temporaries", 0) + size}
    phases = prediction.phases | {phase: PhasePeak(peak.bytes + size, parts)}
    return _with_phases(prediction, phases, prediction.reserved_bytes - prediction.peak_bytes)


def merged(prediction: MemoryPrediction) -> MemoryPrediction:
    """Return the prediction with all sections of the backward pass merged into one phase."""
    # The sections are only needed for extrapolation. A plan shows a single backward phase.
    phases = dict(prediction.phases)
    later = [phases.pop(name) for name in (MIDDLE_BACKWARD, LATE_BACKWARD) if name in phases]
    if later:
        early = phases.get("backward", later[0])
        phases["backward"] = max(early, *later, key=lambda peak: peak.bytes)
    is_later = prediction.phase in (MIDDLE_BACKWARD, LATE_BACKWARD)
    return replace(prediction, phases=phases, phase="backward" if is_later else prediction.phase)


def are_alike(config: ModelConfig) -> bool:
    """Return True if all layers attend to the same number of tokens, and if either all layers or no
    layers have experts."""
    # GPT-2 can scale the attention scores of each layer by a different factor. This does not affect
    # the memory use.
    kinds = {
        (replace(config.attention_spec(i), scale=None), config.has_experts(i))
        for i in range(config.num_hidden_layers)
    }
    return len(kinds) == 1


def _line(few: PhasePeak, more: PhasePeak, steps: int) -> PhasePeak:
    parts = {}
    for name in dict.fromkeys((*more.parts, *few.parts)):
        at_more = more.parts.get(name, 0)
        parts[name] = max(at_more + (at_more - few.parts.get(name, 0)) * steps, 0)
    return PhasePeak(sum(parts.values()), {name: size for name, size in parts.items() if size})


def with_layers(recipe: ResolvedRecipe, count: int) -> ResolvedRecipe:
    """Return the recipe with a different number of layers in its model."""
    return recipe.with_keys("model", num_hidden_layers=count)


def at_depth(
    few: Sequence[OperatorCount], more: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """Return the operators of a deep model, extrapolated from the operators of two shallow models.

    Args:
        few: operators of the model with fewer layers, with their numbers of calls.
        more: operators of the model with one more layer, with their numbers of calls.
        steps: number of layers that the deep model has beyond `more`.
    """
    before = {entry.operator: entry.count for entry in few}
    found = []
    for entry in more:
        each = entry.count - before.get(entry.operator, 0)
        # An operator that is called on lists of all parameters is called once in any model. In
        # deeper models, the lists are longer.
        is_list = not entry.operator.outputs and entry.operator not in before
        # The calls that belong to one layer are repeated for each additional layer. All other calls
        # occur as often as in the shallow models.
        count = entry.count if is_list else entry.count + max(each, 0) * steps
        found.append(OperatorCount(entry.operator, count))
        if is_list:
            found += _longer_lists(entry, few, steps)
    return found


def _longer_lists(
    entry: OperatorCount, few: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """Return the calls that a deeper model adds for an operator on tensor lists. There is one call
    per additional layer, on the tensors of that layer."""
    one = entry.operator
    like = [e.operator for e in few if (e.operator.name, e.operator.phase) == (one.name, one.phase)]
    lists = LISTS.get(one.base_name, 1)
    for other in like:
        pairs = zip(_equal_parts(one.inputs, lists), _equal_parts(other.inputs, lists), strict=True)
        # The lists are subtracted separately and in the same order, so that the tensors that belong
        # to one parameter stay at the same index.
        added = [tuple((Counter(more) - Counter(less)).elements()) for more, less in pairs]
        inputs = tuple(layout for part in added for layout in part)
        if inputs and len(inputs) == len(one.inputs) - len(other.inputs):
            layer = replace(one, inputs=inputs, moved_bytes=total_bytes(inputs))
            return [OperatorCount(layer, entry.count * steps)]
    return []


def _equal_parts(layouts: Sequence[Layout], lists: int) -> list[Sequence[Layout]]:
    size = len(layouts) // lists
    return [layouts[i * size : (i + 1) * size] for i in range(lists)]
