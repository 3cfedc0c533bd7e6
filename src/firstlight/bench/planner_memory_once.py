"""One configuration of `bench planner`: predicted, and then run and measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from firstlight.bench.planner_measure import MeasuredMemory, measured_memory
from firstlight.data.loader import Batch
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.engine import DTYPES
from firstlight.generation.few_rows import use_few_rows
from firstlight.generation.int8 import quantize_int8
from firstlight.hardware.device import find_hardware
from firstlight.models import empty_model
from firstlight.planner.memory.recipe import predict_evaluation, predict_generation, trace_memory
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Of a row of preference pairs.
_ANSWERS = 6


def memory_once(request: Mapping[str, Any]) -> dict[str, Any]:
    """Predict and measure.

    Args:
        request: "kind", "recipe", "generation": see `planner_memory.Case`.

    Returns:
        "predicted_bytes", "phase", "seconds"; "peak_bytes", "resident_bytes" as measured.
    """
    recipe = parse_resolved_recipe(request["recipe"])
    kind = request["kind"]
    start = time.perf_counter()
    if kind == "generation":
        predicted = predict_generation(recipe.model, **request["generation"])
    elif kind == "evaluation":
        predicted = predict_evaluation(recipe)
    else:
        predicted = trace_memory(recipe)
    seconds = time.perf_counter() - start
    torch._dynamo.reset()
    found = measure_on_cpu(recipe, kind, request.get("generation"))
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
    """What a recipe's steps take on this machine's CPU.

    Args:
        recipe: with its model.
        kind: "training", "evaluation" or "generation".
        generation: see `planner_memory.Case`.
    """
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
    prompt, new = options["prompt_tokens"], options["max_new_tokens"]
    with measured_memory() as found:
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
        decoder = BatchDecoder(model, options["sequences"], prompt + new)
        for _ in range(options["sequences"]):
            decoder.add([0] * prompt)
        for _ in range(new - 1):
            decoder.step([0] * options["sequences"])
    return MeasuredMemory(found.peak_bytes + held, found.resident_bytes + held)
