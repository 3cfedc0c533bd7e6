"""Tiny recipes to plan, and their real steps; a GPU to plan for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from plain_recipe import plain_recipe

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware
from firstlight.hardware.gpus import find_gpu
from firstlight.models import empty_model
from firstlight.planner.advise.law import MachineFacts
from firstlight.planner.memory.kernels import Target
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.recipe import evaluation_job, run_jobs
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator
from firstlight.planner.plan.machine import Machine, with_changes
from firstlight.planner.speed.gpu import Range
from firstlight.planner.speed.throughput import SpeedPrediction
from firstlight.recipe import ResolvedRecipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

H200 = find_gpu("H200")
#: A GPU's constants as they might be measured.
CONSTANTS = {
    "products": 0.72,
    "attention": 0.44,
    "bandwidth": 0.88,
    "launch_seconds": 5e-6,
    "fused_traffic": 2.2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


def recipe(model: dict[str, Any] = GPT2, **sections: Any) -> ResolvedRecipe:
    """A tiny recipe; sections change its own."""
    return plain_recipe(
        {
            "model": model,
            "data": {"dir": "nowhere", "seq_len": 128} | sections.pop("data", {}),
            "batch": {"micro_batch_size": 2} | sections.pop("batch", {}),
            **sections,
        }
    )


def real_steps(recipe: ResolvedRecipe) -> None:
    """What `trace_memory` traces, on real tensors."""
    hardware = Hardware(torch.device("cpu"), "CPU", 2**40, bf16=True)
    model = empty_model(recipe.model)
    model.init_weights(torch.Generator().manual_seed(0))
    attach(model, recipe, hardware)
    program = TrainingProgram(recipe, model, hardware)
    shape = (recipe.batch.rows, recipe.data.seq_len)
    ids = torch.randint(512, shape)
    documents = torch.zeros(shape, dtype=torch.int32) if recipe.data.document_masking else None
    batch = Batch(ids, ids.clone(), ids.numel(), documents)
    for _ in range(2):
        program.step([batch] * recipe.batch.accumulation(shape[1]), lr_scale=1.0)


def speed_of_h100(machine: Machine) -> MachineFacts:
    """The speed of a machine for new models, without predicting it: about that of an H100."""
    rates = [(1.8e7, 1.9e6), (1.8e8, 5e5), (1.3e9, 1e5)]
    steps = [(1.8e7, 0.015), (1.8e8, 0.027), (1.3e9, 0.079)]
    known = machine.name, "cuda", rates, machine.usable_bytes
    return MachineFacts(*known, compiler=machine.compiler, steps=steps)


class FixedEstimator(Estimator):
    """Estimates without tracing: every candidate fits, and trains at the same speed."""

    def estimate(self, candidate: Candidate) -> Estimate:
        recipe = with_changes(candidate.recipe, candidate.changes)
        rate = Range(1e6, 1e6, 1e6)
        speed = SpeedPrediction(rate, rate, rate, {})
        return Estimate(candidate.name, candidate.changes, recipe, speed=speed)

    def timed(self, estimate: Estimate, machine: Machine, most_seconds: float = 0.0) -> Estimate:
        return estimate

    def estimate_all(self, candidates: Sequence[Candidate]) -> Iterator[Estimate]:
        return map(self.estimate, candidates)


def predict_evaluation(recipe: ResolvedRecipe, target: Target | None = None) -> MemoryPrediction:
    """The predicted memory of one evaluation of a recipe."""
    return run_jobs([evaluation_job(recipe, target)])[0]
