"""The machine to train on: its speed for some models, timed on a CPU, predicted for a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from firstlight.data.loader import Batch
from firstlight.errors import ConfigError
from firstlight.models import empty_model
from firstlight.pipeline import settings
from firstlight.pipeline.facts import MachineFacts, Shape
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator
from firstlight.planner.plan.machine import Machine, find_machine, resolve_for
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.training.program import TrainingProgram

#: Shapes whose speed is found out, and the vocabulary they have.
_TIMED = ((128, 4), (320, 6))
_PREDICTED = ((192, 4), (512, 8), (1024, 16))
_VOCABULARY = 4096
#: Tokens of a timed step, and timed steps after the first one, which allocates.
_TIMED_TOKENS, _TIMED_STEPS = 1024, 2
#: Seconds after which a machine that is slow, or busy, has been timed enough.
_MOST_SECONDS = 1.0


def machine_facts(gpu: str | None = None) -> tuple[Machine, MachineFacts]:
    """A machine and its speed.

    Args:
        gpu: name of a GPU somewhere else; None is this machine.

    Raises:
        ConfigError: the GPU is unknown.
    """
    machine = find_machine(gpu)
    kind = machine.target.kind
    if kind == "cpu":
        rates = [_timed(machine, Shape(*shape, _VOCABULARY, 256)) for shape in _TIMED]
        origin = "measured here"
    else:
        rates = [_predicted(machine, Shape(*shape, _VOCABULARY, 512)) for shape in _PREDICTED]
        origin = "predicted by the planner"
    # A smaller model that is slower tells of launches, or of noise: it is as fast as the larger.
    rates = [
        (flops, max(rate, *(r for _, r in rates[i:]))) for i, (flops, rate) in enumerate(rates)
    ]
    return machine, MachineFacts(
        machine.name, kind, rates, machine.usable_bytes, origin, machine.compiles
    )


def _speed_recipe(shape: Shape, kind: str) -> Recipe:
    """A recipe of the layout of every new model, to find its speed."""
    values: dict[str, Any] = {
        "data": {"dir": "unused", "seq_len": shape.seq_len},
        "batch": {"micro_batch_size": settings.MICRO_BATCH_TOKENS[kind] // shape.seq_len},
        "efficiency": {"compile": False},
        "schedule": {"max_steps": 1000},
        "evaluation": {"sample_prompts": []},
    }
    given = {
        **settings.LAYOUT,
        "model.vocab_size": shape.vocab_size,
        "model.hidden_size": shape.hidden_size,
        "model.num_hidden_layers": shape.num_hidden_layers,
        "model.num_attention_heads": shape.hidden_size // settings.HEAD_DIM,
        "model.intermediate_size": shape.intermediate_size,
        "model.max_position_embeddings": shape.seq_len,
    }
    return parse_recipe(nested(values, given), "the recipe of a speed")


def nested(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with further values by `section.key`."""
    found = {section: dict(keys) for section, keys in values.items()}
    for name, value in more.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def _timed(machine: Machine, shape: Shape) -> tuple[float, float]:
    """(FLOPs of a token, tokens a second) of a model, by some steps on random tokens."""
    recipe = resolve_for(_speed_recipe(shape, "cpu"), machine)
    model = empty_model(recipe.model)
    model.init_weights(torch.Generator().manual_seed(0), recipe.init)
    program = TrainingProgram(recipe, model, machine.hardware)
    rows = _TIMED_TOKENS // shape.seq_len
    tokens = torch.randint(shape.vocab_size, (rows, shape.seq_len + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * shape.seq_len)
    program.step([batch], 0.1)
    seconds: list[float] = []
    while len(seconds) < _TIMED_STEPS and sum(seconds) < _MOST_SECONDS:
        begun = time.perf_counter()
        program.step([batch], 0.1)
        seconds.append(time.perf_counter() - begun)
    return shape.flops_per_token, batch.num_valid / min(seconds)


def _predicted(machine: Machine, shape: Shape) -> tuple[float, float]:
    """The same by the planner."""
    kind = machine.target.kind
    recipe = resolve_for(_speed_recipe(shape, kind), machine)
    found = Estimator(measures=False).estimate(Candidate(recipe, machine, evaluates=False))
    if found.tokens_per_second is None:
        raise ConfigError(f"the speed of {machine.name} is not known: name another --gpu")
    return shape.flops_per_token, found.tokens_per_second.expected


def estimate_run(recipe: ResolvedRecipe, machine: Machine) -> Estimate:
    """Expected memory of a run, evaluations included, and on a GPU its speed."""
    return Estimator(measures=False).estimate(Candidate(recipe, machine))
