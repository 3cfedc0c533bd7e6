"""Predicted and measured memory of steps: a part of `python -m benchmarks planner`.

Each configuration is predicted and then run on this machine's CPU, in a separate process. On a CPU,
torch's profiler records every allocation to the byte, including those of compiled code.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.memory import MeasuredMemory, measured_memory
from benchmarks.models import PlannerCase
from benchmarks.planner_speed import percentile
from benchmarks.rows import run_bench
from firstlight.bench.display import new_figure, png_of
from firstlight.bench.rows import Keep, Result, RowOutcome
from firstlight.data.loader import Batch
from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.engine import DTYPES
from firstlight.generation.few_rows import lay_out, quantize_int8, use_few_rows
from firstlight.hardware.device import find_hardware
from firstlight.hardware.fresh_process import ForkServer
from firstlight.models import Model, ModelConfig, build_model, empty_model
from firstlight.planner.memory.kernels import Target, this_cpu
from firstlight.planner.memory.prediction import MemoryPrediction, predict
from firstlight.planner.memory.program import fake_tensors, kernels_of, mark_weights, replaced
from firstlight.planner.memory.recipe import evaluation_job, run_jobs, trace_memory
from firstlight.planner.memory.trace import Tracer
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Goals for predictions: 95 % of them have at most this relative error; and none is lower than the
#: measured peak by more than this fraction.
ALLOWED_ERROR, ALLOWED_SHORTAGE = 0.05, 0.02

#: Time limit of a configuration in seconds.
_SECONDS = 300.0

#: (tokens of a sequence, sequences of a micro-batch), from 256 to 8,192 tokens.
_SHAPES = ((256, 1), (256, 8), (256, 32), (512, 4), (1024, 2), (1024, 8), (2048, 2), (4096, 1))
_LONGEST = (8192, 1)

#: Values of the recipe by key, for each method.
_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"efficiency.precision": "bf16"},
    "bf16 weights": {"efficiency.precision": "bf16_params"},
    "fp16": {"efficiency.precision": "fp16"},
    "checkpointing": {"efficiency.activation_checkpointing": "full"},
    "selective": {"efficiency.activation_checkpointing": "selective"},
    "chunked loss": {"efficiency.loss_chunk_tokens": 256},
    "plain attention": {"efficiency.attention": "plain"},
    **{name: {"optimizer.name": name} for name in ("adamw8bit", "adafactor", "muon", "sgd")},
    "accumulation": {"batch.gradient_accumulation_steps": 3},
    "in backward": {"efficiency.optimizer_in_backward": True, "optimizer.max_grad_norm": 0.0},
    "documents": {"data.document_masking": True},
    "pairs": {"data.kind": "preference", "preference": {"beta": 0.1}},
    "lora": {"lora": {"rank": 8}},
    "compile": {"efficiency.compile": True},
    "compile bf16": {"efficiency.compile": True, "efficiency.precision": "bf16"},
    "compile checkpointing": {
        "efficiency.compile": True,
        "efficiency.activation_checkpointing": "full",
    },
}

#: (model, shape, methods) of configurations with blockwise attention, which "auto" chooses on CPUs
#: for large heads.
_BLOCKWISE: tuple[tuple[str, tuple[int, int], dict[str, dict[str, Any]]], ...] = (
    ("llama large", (512, 4), {"bf16": {}}),
    ("gpt2 large", (1024, 2), {"compile bf16": {}}),
    ("gpt2 medium", (256, 8), {"dropout": {"model.attn_pdrop": 0.1}}),
    ("llama medium", (1024, 2), {"bf16": {}, "documents": {}, "checkpointing": {}}),
)

#: Methods that are combined at random: one of each line.
_TOGETHER = (
    ("plain", "bf16", "bf16 weights", "fp16"),
    ("plain", "checkpointing", "selective"),
    ("plain", "chunked loss"),
    ("plain", "adamw8bit", "adafactor", "muon"),
    ("plain", "accumulation"),
)


def memory_grid(*, quick: bool = False) -> list[PlannerCase]:
    """Return the configurations, or every eighth of them if `quick`.

    The grid consists of each method alone for GPT-2 and Llama, each shape, random combinations of
    methods, compiled steps of several lengths, blockwise attention, evaluations and generations.
    """
    cases = list(_cases())
    return cases[::8] if quick else cases


def _cases() -> Iterator[PlannerCase]:
    for number, (name, changes) in enumerate(_METHODS.items()):
        # Configurations without a method are covered by the shapes below.
        for family in ("gpt2", "llama") if changes else ():
            size = ("small", "medium")[number % 2]
            yield _case(f"{family} {size}", _SHAPES[number % 6], [name], changes)
    for family in ("gpt2", "llama"):
        for shape in (*_SHAPES, _LONGEST):
            yield _case(f"{family} small", shape, ["plain"], {})
        yield _case(f"{family} large", (512, 4), ["plain"], {})
    generator = random.Random("planner")
    for number in range(12):
        names = [generator.choice(names) for names in _TOGETHER]
        changes = {key: value for name in names for key, value in _METHODS[name].items()}
        family, shape = ("gpt2", "llama")[number % 2], _SHAPES[generator.randrange(7)]
        model = f"{family} {('small', 'medium', 'large')[number % 3]}"
        yield _case(model, shape, [n for n in names if n != "plain"] or ["plain"], changes)
    for shape in ((256, 8), (2048, 2), (4096, 1)):
        yield _case("llama small", shape, ["compile"], _METHODS["compile"])
    for model, shape, more in _BLOCKWISE:
        changes = {"efficiency.attention": "blockwise"}
        for name, keys in more.items():
            changes |= _METHODS.get(name, {}) | keys
        yield _case(model, shape, ["blockwise attention", *more], changes)
    for family, shape in (("gpt2", (1024, 8)), ("llama", (256, 32)), ("llama", (4096, 1))):
        yield _case(f"{family} medium", shape, ["evaluation"], {}, kind="evaluation")
    for family, dtype, count in (
        ("gpt2", "float32", 1),
        ("llama", "bfloat16", 8),
        ("llama", "int8", 1),
    ):
        options = {"prompt_tokens": 256, "max_new_tokens": 256, "sequences": count, "dtype": dtype}
        texts = "1 text" if count == 1 else f"{count} texts"
        title = f"{family} medium, generation, {dtype}, {texts}"
        model = f"{family} medium"
        yield PlannerCase(model, 1, 1024, kind="generation", generation=options, title=title)


def _case(
    model: str,
    shape: tuple[int, int],
    names: list[str],
    changes: Mapping[str, Any],
    kind: str = "training",
) -> PlannerCase:
    tokens, rows = shape
    title = f"{model}, {rows} x {tokens}, {', '.join(names)}"
    return PlannerCase(model, rows, tokens, changes, kind=kind, title=title)


def bench_memory(cases: Sequence[PlannerCase], on_run: Keep) -> Result:
    """Predict and run every case.

    Args:
        cases: the configurations.
        on_run: see `run_bench`.

    Returns:
        "summary", see `summary`, and "rows": "name", "kind", "reason" (the error message, or ""),
        the result of `measure`, and "error" = predicted / measured peak - 1, which is negative if
        the prediction is too low.
    """
    by_name = {case.name: case for case in cases}
    # Kineto, the profiler's library, logs its start and end at level 5, its highest.
    environment = {"KINETO_LOG_LEVEL": "6"} | os.environ

    def result(outcomes: Mapping[str, RowOutcome]) -> dict[str, Any]:
        rows = [_row(by_name[name], one) for name, one in outcomes.items() if one.is_done]
        return {"rows": rows, "summary": summary(rows)}

    # Use a separate process for each configuration, so that none measures memory left by another.
    with ForkServer(environment, "benchmarks.planner_memory") as server:
        return run_bench(
            "memory",
            list(by_name),
            1,
            lambda name: server.ask(by_name[name].request(), _SECONDS),
            summarize=result,
            on_run=on_run,
        )


def _row(case: PlannerCase, outcome: RowOutcome) -> dict[str, Any]:
    row = {"name": case.name, "kind": case.kind, "reason": outcome.problem}
    for found in outcome.runs:
        row |= found | {"error": found["predicted_bytes"] / found["peak_bytes"] - 1}
    return row


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of all results together.

    Returns:
        - "count": number of results with an error; "failed": number of the others
        - "error_95", "median_error": 95th percentile and median of the absolute relative errors
        - "worst_shortage": largest fraction of a measured peak that was not predicted
        - "prediction_seconds_95": 95th percentile of the predictions' durations

        Without results, only "count" and "failed".
    """
    good = [one for one in results if not one["reason"]]
    if not good:
        return {"count": 0, "failed": len(results)}
    return {
        "count": len(good),
        "failed": len(results) - len(good),
        "error_95": percentile(sorted(abs(one["error"]) for one in good), 0.95),
        "median_error": statistics.median(abs(one["error"]) for one in good),
        "worst_shortage": max(0.0, *(-one["error"] for one in good)),
        "prediction_seconds_95": percentile(sorted(one["seconds"] for one in good), 0.95),
    }


def draw_memory(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG: predicted against measured peaks, and the cumulative distribution of the
    errors."""
    good = [one for one in results if not one["reason"]]
    figure = new_figure(11, 4.6)
    draw_peaks(figure.add_subplot(1, 2, 1), good)
    draw_memory_errors(figure.add_subplot(1, 2, 2), good, "error, % of the measured peak")
    figure.suptitle(f"memory: {len(good)} configurations; green: allowed range")
    return png_of(figure)


def draw_memory_errors(axes: Any, good: Sequence[Mapping[str, Any]], xlabel: str) -> None:
    """Draw the cumulative distribution of the errors, and the range of allowed errors in green.

    Args:
        axes: matplotlib axes.
        good: results with an "error".
        xlabel: label of the x axis.
    """
    draw_shares(axes, [100 * one["error"] for one in good], "tab:blue", "")
    axes.axvspan(-100 * ALLOWED_SHORTAGE, 100 * ALLOWED_ERROR, color="tab:green", alpha=0.12)
    axes.set(xlabel=xlabel, ylabel="share of configurations")


#: Number of answers in a sequence of preference pairs.
_ANSWERS = 6


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Predict and measure the memory of one configuration on this machine's CPU.

    Args:
        request: see `PlannerCase.request`.

    Returns:
        - "predicted_bytes", "phase", "parts": the predicted peak, its phase, and its parts
        - "seconds": duration of the prediction
        - "peak_bytes", "resident_bytes": see `MeasuredMemory`
    """
    recipe, kind = parse_resolved_recipe(request["recipe"]), request["kind"]
    start = time.perf_counter()
    predicted = predict_memory(recipe, kind, request["generation"])
    seconds = time.perf_counter() - start
    torch._dynamo.reset()
    found = measure_on_cpu(recipe, kind, request["generation"])
    return {
        "predicted_bytes": predicted.peak_bytes,
        "phase": predicted.phase,
        "parts": predicted.parts,
        "seconds": seconds,
        "peak_bytes": found.peak_bytes,
        "resident_bytes": found.resident_bytes,
    }


def measure_on_cpu(
    recipe: ResolvedRecipe, kind: str, generation: Mapping[str, Any] | None
) -> MeasuredMemory:
    """Run some steps, an evaluation or a generation on this machine's CPU, and measure its memory.

    Args:
        recipe: the recipe.
        kind: "training", "evaluation" or "generation".
        generation: see `PlannerCase`.
    """
    if kind == "generation":
        assert generation is not None
        return _generation(recipe, generation)
    return _training(recipe, evaluates=kind == "evaluation")


def _training(recipe: ResolvedRecipe, *, evaluates: bool) -> MeasuredMemory:
    """Return the peak of three steps, including the model; of an evaluation after one uncounted
    step; or, if the recipe compiles, of two steps after the uncounted step that compiles."""
    hardware = find_hardware("cpu")
    compiles = recipe.efficiency.compile is True
    with measured_memory() as whole:
        model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
        model.init_weights(torch.Generator().manual_seed(0))
        attach(model, recipe, hardware)
        program = TrainingProgram(recipe, model, hardware)
        batch = random_batch(recipe)
        batches = [batch] * recipe.batch.accumulation(recipe.data.seq_len)
        for _ in range(1 if evaluates or compiles else 3):
            program.step(batches, lr_scale=1.0)
        held = sum(t.nbytes for t in _held(program))
    if not evaluates and not compiles:
        return whole
    # The memory of compiling is not part of a step, so only later steps are measured.
    with measured_memory() as later:
        if evaluates:
            program.model.eval()
            with torch.inference_mode():
                program.evaluation_loss(*batch.inputs)
        else:
            for _ in range(2):
                program.step(batches, lr_scale=1.0)
    inputs = batch.input_ids.nbytes + batch.labels.nbytes
    level = held + inputs
    return MeasuredMemory(later.peak_bytes + level, later.resident_bytes + level)


def _held(program: TrainingProgram) -> list[torch.Tensor]:
    """Return parameters, buffers and optimizer states, each storage once, without gradients."""
    found: dict[int, torch.Tensor] = {}
    tensors = [*program.model.parameters(), *program.model.buffers()]
    for optimizer in program.optimizer._torch_optimizers:
        for group in optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        found[tensor.untyped_storage().data_ptr()] = tensor
    return list(found.values())


def random_batch(recipe: ResolvedRecipe) -> Batch:
    """Return one micro-batch of random tokens on the CPU, int64 [rows, seq_len].

    With document masking, each row has several documents; for preference pairs, they are answers
    with references.
    """
    shape = (recipe.batch.rows, recipe.data.seq_len)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(recipe.model.vocab_size, shape, generator=generator)
    if not recipe.data.document_masking:
        return Batch(ids, ids.clone(), ids.numel())
    length = 100 if recipe.preference is None else -(-shape[1] // _ANSWERS)
    documents = (torch.arange(shape[1]) // length).to(torch.int32).expand(shape).contiguous()
    references = None
    if recipe.preference is not None:
        references = torch.zeros((shape[0], _ANSWERS), dtype=torch.float64)
    return Batch(ids, ids.clone(), ids.numel(), documents, references=references)


def _generation(recipe: ResolvedRecipe, options: Mapping[str, Any]) -> MeasuredMemory:
    model = empty_model(recipe.model)
    model.init_weights(torch.Generator().manual_seed(0))
    dtype = DTYPES[options["dtype"]]
    assert dtype is not None
    model = model.to(dtype).eval()
    if options["dtype"] == "int8":
        quantize_int8(model)
    use_few_rows(model)
    # Otherwise the decoder would call it inside the measurement, and free weights counted in
    # `held`.
    lay_out(model)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with measured_memory() as found, torch.inference_mode():
        decode(model, options)
    return MeasuredMemory(found.peak_bytes + held, found.resident_bytes + held)


def decode(model: Model, options: Mapping[str, Any]) -> None:
    """Continue prompts of zeros, see `PlannerCase.generation`."""
    prompt, new, count = (options[key] for key in ("prompt_tokens", "max_new_tokens", "sequences"))
    decoder = BatchDecoder(model, count, prompt + new)
    decoder.add_many([[0] * prompt] * count)
    for _ in range(new - 1):
        decoder.step([0] * count)


def predict_memory(
    recipe: ResolvedRecipe,
    kind: str,
    generation: Mapping[str, Any] | None,
    target: Target | None = None,
) -> MemoryPrediction:
    """Return the predicted memory of a recipe.

    Args:
        recipe: recipe with its model.
        kind: "training", "evaluation" or "generation".
        generation: see `PlannerCase`.
        target: device for which memory is predicted; None is this CPU.
    """
    if kind == "generation":
        assert generation is not None
        return predict_generation(recipe.model, **generation, target=target)
    if kind == "evaluation":
        return run_jobs([evaluation_job(recipe, target)])[0]
    return trace_memory(recipe, target)


def predict_generation(
    config: ModelConfig,
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    sequences: int = 1,
    dtype: str = "float32",
    target: Target | None = None,
) -> MemoryPrediction:
    """Predict the memory of generation: the cache of keys and values, the prompts one after the
    other, and a step of all sequences at their full length.

    Args:
        config: config of the model.
        prompt_tokens, max_new_tokens: numbers of tokens of each sequence.
        sequences: number of sequences that are decoded together.
        dtype: a name of `firstlight.generation.engine.DTYPES`, except "auto".
        target: the device to predict for; None is this machine's CPU.

    Raises:
        ConfigError: the dtype is unknown, or the prompt fills the context.
    """
    weights = DTYPES.get(dtype)
    if weights is None:
        known = ", ".join(name for name in DTYPES if name != "auto")
        raise ConfigError(f"dtype '{dtype}' can't be planned (known: {known})")
    target = target or this_cpu()
    tracer = Tracer()
    longest = min(prompt_tokens + max_new_tokens, config.max_position_embeddings)
    with fake_tensors(), _few_rows(target), tracer, kernels_of(target):
        model = build_model(config)
        model.cast(weights)
        model.eval()
        if dtype == "int8":
            quantize_int8(model)
        few_rows.use_few_rows(model)
        mark_weights(model, tracer)
        decoder = BatchDecoder(model, sequences, longest)
        mark_weights(model, tracer)
        tracer.mark(decoder.cache.tensors, "activations")
        with tracer.phase("prefill"):
            decoder.add_many([[0] * prompt_tokens] * sequences)
        # Only the step at full length runs, because it takes the most memory.
        decoder.lengths = [longest - 1] * sequences
        first = tracer.tick + 1
        with tracer.phase("decode"):
            decoder.step([0] * sequences)
        trace = tracer.finish()
    return predict(trace, target, first, phases=("prefill", "decode"))


@contextlib.contextmanager
def _few_rows(target: Target) -> Iterator[None]:
    """Context manager that disables the package's CPU kernel for few rows, which would read
    addresses that fake tensors do not have."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(few_rows, "few_rows_linear", _few_rows_product))
        if target.kind == "cuda":
            stack.enter_context(replaced(few_rows, "has_kernels", lambda: False))
        yield


def _few_rows_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Replace `few_rows.few_rows_linear` with a function that allocates the same bytes."""
    rows = x.float().contiguous()
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    del rows
    return out


def draw_shares(axes: Any, errors: Sequence[float], color: str, label: str) -> None:
    """Draw the cumulative distribution of errors.

    Args:
        axes: matplotlib axes.
        errors: the errors in percent; without errors nothing is drawn.
        color: color of the line.
        label: label of the line.
    """
    ordered = sorted(errors)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    if ordered:
        axes.step(ordered, shares, where="post", color=color, label=label)


def draw_peaks(axes: Any, results: Sequence[Any]) -> None:
    """Draw "predicted_bytes" against "peak_bytes" of each result as points, and the diagonal."""
    from matplotlib.ticker import LogLocator

    measured = [one["peak_bytes"] / 2**30 for one in results]
    predicted = [one["predicted_bytes"] / 2**30 for one in results]
    ends = [min(measured, default=0.1) / 1.3, 1.3 * max(measured, default=1.0)]
    axes.plot(ends, ends, color="tab:gray", linewidth=0.8)
    axes.scatter(measured, predicted, s=14, color="tab:blue")
    axes.set(xscale="log", yscale="log", xlabel="measured peak, GiB", ylabel="predicted peak, GiB")
    for axis in (axes.xaxis, axes.yaxis):
        # With all labels of a logarithmic axis, some would overlap.
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
