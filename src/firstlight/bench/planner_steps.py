"""Memory and speed of recipes' steps on a device, several recipes in one process.

    python -m firstlight.bench.planner_steps REQUEST

REQUEST is a JSON object:

    cases    list of `PlannerCase.request`
    device   "cuda", or "cpu" of a dry run
    steps    steps that are timed, at most
    seconds  of timing a recipe, after which no step begins
    target   the device that is predicted for, see `planner_predictions.target_request`; absent
             predicts nothing

Random weights are made on the device, and the tokens are random. On a GPU, what is measured of a
recipe, in this order:

1. Everything of the recipe before is given up: Python's garbage, the allocator's cache, cuBLAS's
   workspaces. What is still allocated is `left_bytes`, which doesn't count below.
2. The weights are made (and frozen, and put into 4 bits); the allocator's peak is set back.
3. Optimizer and loss function are made as `firstlight train` makes them, and three steps are
   trained. Of a recipe that compiles the peak is set back once more after the first: what
   compiling itself takes is not the step's.
4. `peak_bytes` and `reserved_bytes` are the allocator's peaks, `driver_bytes` what the driver
   says that the GPU holds more than before this process began to use it.
5. `step_seconds` of each timed step, from the batch on the device to the updated parameters.

Evaluations and generations are no steps: they have 1 to 4 alone. On a CPU the peak is that of
torch's allocator (`measure_on_cpu`), and nothing is known of a driver.

The one line on stdout is a JSON object with "cases", a list of such figures with the recipe's
"name" and the "reason" why it could not be measured ("" where it was); and "line", them as text.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from firstlight.bench.memory import MeasuredMemory, driver_used_bytes, measured_memory
from firstlight.bench.models import random_model
from firstlight.bench.planner_predictions import predict_case, predict_memory, predicting
from firstlight.bench.process import answer
from firstlight.data.loader import Batch
from firstlight.errors import FirstlightError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.engine import DTYPES
from firstlight.generation.few_rows import quantize_int8, use_few_rows
from firstlight.hardware.device import find_hardware, is_out_of_memory, synchronize
from firstlight.models import Model, empty_model
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Answers in a sequence of preference pairs.
_ANSWERS = 6


def memory_once(request: Mapping[str, Any]) -> dict[str, Any]:
    """Predict and measure the memory of one configuration on this machine's CPU.

    Returns:
        "predicted_bytes", "phase", "seconds"; "peak_bytes", "resident_bytes" as measured.
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
    """The memory of a recipe's steps on this machine's CPU."""
    if kind == "generation":
        assert generation is not None
        return _generation(recipe, generation)
    return _training(recipe, evaluates=kind == "evaluation")


def _training(recipe: ResolvedRecipe, *, evaluates: bool) -> MeasuredMemory:
    """Three steps from nothing on; or one, and then an evaluation, which alone is measured."""
    hardware = find_hardware("cpu")
    compiles = recipe.efficiency.compile is True
    with measured_memory() as whole:
        model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
        model.init_weights(torch.Generator().manual_seed(0))
        if recipe.lora is not None:
            attach(model, recipe, hardware)
        program = TrainingProgram(recipe, model, hardware)
        batch = random_batch(recipe)
        batches = [batch] * recipe.batch.accumulation(recipe.data.seq_len)
        for _ in range(1 if evaluates or compiles else 3):
            program.step(batches, lr_scale=1.0)
        held = sum(t.nbytes for t in _held(program))
    if not evaluates and not compiles:
        return whole
    program.optimizer.zero_grad()
    # What compiling itself takes is not the step's.
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
    """Weights and the optimizer's state; no gradients."""
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
    """One micro-batch of random tokens [rows, seq_len] on the CPU; with document masking of several
    documents a row, and of preference pairs with references."""
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
    return Batch(ids, ids.clone(), ids.numel(), documents, references)


def _generation(recipe: ResolvedRecipe, options: Mapping[str, Any]) -> MeasuredMemory:
    model = empty_model(recipe.model)
    model.init_weights(torch.Generator().manual_seed(0))
    dtype = DTYPES[options["dtype"]]
    assert dtype is not None
    model = model.to(dtype).eval()
    if options["dtype"] == "int8":
        quantize_int8(model)
    use_few_rows(model)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with measured_memory() as found, torch.inference_mode():
        _decode(model, options)
    return MeasuredMemory(found.peak_bytes + held, found.resident_bytes + held)


def _decode(model: Model, options: Mapping[str, Any]) -> None:
    """Continue prompts of zeros."""
    prompt, new, count = (options[key] for key in ("prompt_tokens", "max_new_tokens", "sequences"))
    decoder = BatchDecoder(model, count, prompt + new)
    for _ in range(count):
        decoder.add([0] * prompt)
    for _ in range(new - 1):
        decoder.step([0] * count)


#: Bytes that may be left of the recipe before: cuBLAS's handles, tables of libraries.
_MOST_LEFT = 16 * 2**20

#: Steps before any is timed.
_WARMUP_STEPS = 3


def planner_steps(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the cases of a request, see the module's head."""
    on_gpu, cases = request["device"] == "cuda", request["cases"]
    idle = driver_used_bytes() if on_gpu else None
    calls = [(predict_case, (case, request["target"])) for case in cases if "target" in request]
    with predicting(calls, beside=on_gpu) as predictions:
        found = [_case(case, request, idle) for case in cases]
        for result, prediction in zip(found, predictions(), strict=False):
            result.update(prediction)
    return {"cases": found, "line": "; ".join(map(_in_words, found))}


def _case(case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case["name"], "kind": case["kind"], "reason": ""}
    try:
        return result | _measure(case, request, idle)
    except FirstlightError as error:
        return result | {"reason": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a recipe ran into is its result)
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        return result | {"reason": f"{kind}: {' '.join(str(error).split())[:300]}"}


def _in_words(result: Mapping[str, Any]) -> str:
    if result["reason"]:
        return f"{result['name']}: {result['reason'][:80]}"
    speed = ""
    if result.get("predicted_bytes"):
        speed = f" ({result['predicted_bytes'] / result['peak_bytes'] - 1:+.1%} predicted)"
    if result.get("step_seconds"):
        speed += f", {result['tokens_a_step'] / min(result['step_seconds']):,.0f} tokens/s"
    return f"{result['name']}: {result['peak_bytes'] / 2**20:,.0f} MiB{speed}"


def _measure(
    case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None
) -> dict[str, Any]:
    recipe, kind = parse_resolved_recipe(case["recipe"]), case["kind"]
    if request["device"] == "cpu":
        peak = measure_on_cpu(recipe, kind, case["generation"])
        found: dict[str, Any] = {"peak_bytes": peak.peak_bytes}
        if kind == "training":
            found |= _train(recipe, request, contextlib.nullcontext)
        return found
    peaks = _Peaks(idle)
    if kind == "generation":
        _generate(recipe, case["generation"], peaks)
        return peaks.found
    timed = _train(recipe, request, peaks.measured, evaluates=kind == "evaluation")
    return peaks.found | timed


class _Peaks:
    """The memory of one recipe on a GPU.

    Args:
        idle: bytes in use before this process, by the driver; None if unknown.

    Attributes:
        found: the figures of the module's head.
    """

    def __init__(self, idle: int | None) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch._dynamo.reset()
        # The workspaces that cuBLAS keeps for each stream come from torch's allocator.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        _give_back()
        left = torch.cuda.memory_allocated()
        self.found: dict[str, Any] = {"left_bytes": left}
        self._idle = idle
        if left > _MOST_LEFT:
            raise RuntimeError(f"{left:,} bytes of the recipe before are still allocated")

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Note the peaks of what runs inside, with all that was allocated before; the last time
        counts."""
        _give_back()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self.found["left_bytes"]
        self.found |= {"peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved()}
        used = driver_used_bytes()
        if used is not None and self._idle is not None:
            self.found["driver_bytes"] = used - self._idle


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _train(
    recipe: ResolvedRecipe,
    request: Mapping[str, Any],
    measured: Callable[[], contextlib.AbstractContextManager[object]],
    *,
    evaluates: bool = False,
) -> dict[str, Any]:
    """The seconds of steps and the tokens of one, {} of an evaluation."""
    hardware = find_hardware(request["device"])
    device = hardware.device
    model = random_model(recipe.model, device, recipe.efficiency.vocab_multiple)
    if recipe.lora is not None:
        attach(model, recipe, hardware)
    batch = random_batch(recipe).to(device)
    batches = [batch] * recipe.batch.accumulation(recipe.data.seq_len)
    with measured():
        begun = time.perf_counter()
        program = TrainingProgram(recipe, model, hardware)
        program.step(batches, lr_scale=1.0)
        first = time.perf_counter() - begun
        if recipe.efficiency.compile is not True and not evaluates:
            _steps(program, batches)
    if evaluates:
        program.optimizer.zero_grad()
        program.model.eval()
        with measured(), torch.inference_mode():
            program.evaluation_loss(*batch.inputs)
        return {}
    if recipe.efficiency.compile is True:
        with measured():
            _steps(program, batches)
    seconds: list[float] = []
    while len(seconds) < request["steps"] and sum(seconds) < request["seconds"]:
        synchronize(device)
        start = time.perf_counter()
        program.step(batches, lr_scale=1.0)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    tokens = len(batches) * batch.input_ids.numel()
    return {"step_seconds": seconds, "tokens_a_step": tokens, "first_step_seconds": first}


def _steps(program: TrainingProgram, batches: list[Any]) -> None:
    for _ in range(_WARMUP_STEPS - 1):
        program.step(batches, lr_scale=1.0)


def _generate(recipe: ResolvedRecipe, options: Mapping[str, Any], peaks: _Peaks) -> None:
    model = random_model(recipe.model, torch.device("cuda"))
    dtype = DTYPES[options["dtype"]]
    assert dtype is not None
    model = model.to(dtype).eval()
    with peaks.measured(), torch.inference_mode():
        _decode(model, options)


if __name__ == "__main__":
    answer(planner_steps, sys.argv[1])
