"""Measure the training speed of new models on this machine, or predict the speed for a different
machine."""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from typing import Any

import torch

from firstlight.errors import ConfigError
from firstlight.hardware.device import free_memory_bytes, is_out_of_memory
from firstlight.hardware.environment import cores_are_busy
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import MachineFacts, ModelSize
from firstlight.planner.plan.estimate import Candidate, Estimator
from firstlight.planner.plan.machine import Machine, resolve_for
from firstlight.planner.speed.throughput import time_step
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe

#: Both dictionaries contain the (hidden_size, num_hidden_layers) of models by kind of device. The
#: speed of the models in _TIMED_SHAPES is measured, and the speed of the models in
#: _PREDICTED_SHAPES is predicted. _VOCABULARY is the vocabulary size of all these models.
_TIMED_SHAPES = {"cpu": ((128, 4), (320, 6)), "cuda": ((192, 4), (768, 12))}
_PREDICTED_SHAPES = ((192, 4), (512, 8), (1024, 16))
_VOCABULARY = 4096
#: Tokens per measured step on a CPU. With half as many tokens, the time per token is up to 1.4
#: times as long, because the optimizer's update takes a larger share of the step.
_TIMED_TOKENS = defaults.BATCH_TOKENS
#: Pairs (minimum free memory of a GPU in bytes, tokens in a measured step). In bf16, a step of
#: 32,768 tokens with the larger of the two models takes 22 GiB, and a step of 8,192 tokens takes 7
#: GiB. Other precisions take up to twice as much memory.
_TOKENS_OF_MEMORY = ((48 << 30, 32_768), (16 << 30, 8192), (6 << 30, 2048))
#: Descriptions of where a speed estimate comes from, as shown to the user.
MEASURED, PREDICTED = "measured here", "predicted by the planner"


def new_model_speed(machine: Machine) -> MachineFacts:
    """Return the training speed of new models, either measured on this machine or predicted for a
    different machine.

    Raises:
        ConfigError: the speed of the GPU is unknown.
    """
    kind = machine.target.kind
    timed_tokens = _timed_tokens(machine)
    is_busy = kind == "cpu" and cores_are_busy()
    try:
        known = _speeds(machine, timed_tokens) if timed_tokens else _predicted_speeds(machine)
    except RuntimeError as error:
        # Another program has allocated GPU memory since the free memory was checked.
        if kind != "cuda" or not is_out_of_memory(error):
            raise
        if machine.gpu is None:
            problem = "has too little free memory to measure its speed"
            raise ConfigError(f"{machine.name} {problem}: end the programs that use it") from None
        timed_tokens = 0
        known = _predicted_speeds(machine)
    if kind == "cuda" and machine.is_here:
        # Free the memory of the measured models, some of which are in reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # Because of kernel launches or noise, the measured rate of a small model can be lower than the
    # rate of a larger model. The small model then gets the rate of the larger model, because
    # `MachineFacts` requires rates that do not increase with the size of the model.
    rates, steps = known
    rates = [
        (flops, max(rate, *(r for _, r in rates[i:]))) for i, (flops, rate) in enumerate(rates)
    ]
    return MachineFacts(
        machine.name,
        kind,
        rates,
        machine.usable_bytes,
        origin=MEASURED if timed_tokens else PREDICTED,
        compiler=machine.compiler,
        steps=steps,
        is_busy=is_busy,
    )


@functools.cache
def _predicted_speeds(
    machine: Machine,
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return _speeds(machine, 0)


def _speeds(
    machine: Machine, timed_tokens: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the training speed of several models on a machine, either measured or predicted.

    Args:
        timed_tokens: tokens per measured step; 0 to predict the speed.

    Returns:
        Two lists with one pair per model: (FLOPs per token, tokens per second) and, for a GPU,
        (FLOPs per token, seconds of a step with few tokens).
    """
    kind = machine.target.kind
    seq_len = 256 if kind == "cpu" else 512
    many = timed_tokens or defaults.MICRO_BATCH_TOKENS[kind]
    # On a GPU, a step with few tokens takes as long as launching its kernels.
    step_tokens = (many,) if kind == "cpu" else (many, seq_len)
    rates, steps = [], []
    for shape in _TIMED_SHAPES[kind] if timed_tokens else _PREDICTED_SHAPES:
        size = ModelSize(*shape, _VOCABULARY, seq_len)
        recipes = [resolve_for(_speed_recipe(size, tokens), machine) for tokens in step_tokens]
        find = timed_rate if timed_tokens else predicted_rate
        rate, *few = (find(recipe, machine) for recipe in recipes)
        rates.append((size.flops_per_token, rate))
        steps += [(size.flops_per_token, seq_len / one) for one in few]
    return rates, steps


def _timed_tokens(machine: Machine) -> int:
    """Return the number of tokens for measured steps with many tokens. Return 0 if the speed can't
    be measured. This is the case if the plan is for a different machine, if the device is an Apple
    GPU, or if the GPU has too little free memory."""
    kind = machine.target.kind
    if not machine.is_here or kind not in _TIMED_SHAPES:
        return 0
    if kind == "cpu":
        return _TIMED_TOKENS
    free = free_memory_bytes(machine.hardware.device)
    return next((tokens for size, tokens in _TOKENS_OF_MEMORY if free >= size), 0)


def _speed_recipe(shape: ModelSize, tokens: int) -> Recipe:
    """Return a recipe for measuring the speed of a new model with the usual layout. Each step has
    one micro-batch with `tokens` tokens."""
    values: dict[str, Any] = {
        "data": {"dir": "unused", "seq_len": shape.seq_len},
        "batch": {"micro_batch_size": tokens // shape.seq_len},
        "efficiency": {"compile": False},
        "schedule": {"max_steps": 1000},
        "evaluation": {"sample_prompts": []},
    }
    given = {
        **defaults.LAYOUT,
        "model.vocab_size": shape.vocab_size,
        "model.hidden_size": shape.hidden_size,
        "model.num_hidden_layers": shape.num_hidden_layers,
        "model.num_attention_heads": shape.hidden_size // defaults.HEAD_DIM,
        "model.intermediate_size": shape.intermediate_size,
        "model.max_position_embeddings": shape.seq_len,
    }
    return parse_recipe(nested(values, given), "the recipe of a speed")


def nested(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the recipe sections (section -> key -> value), with the values in `more`
    added. The keys of `more` have the form `section.key`."""
    found = {section: dict(keys) for section, keys in values.items()}
    for name, value in more.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def timed_rate(recipe: ResolvedRecipe, machine: Machine) -> float:
    """Time a recipe with one micro-batch per step on this machine, and return its tokens per
    second."""
    seconds = time_step(recipe, machine.hardware).seconds(1)
    return recipe.batch.rows * recipe.data.seq_len / seconds


def predicted_rate(recipe: ResolvedRecipe, machine: Machine) -> float:
    """Return the tokens per second of a recipe on a GPU.

    Raises:
        ConfigError: the GPU's speed is unknown.
    """
    found = Estimator().estimate(Candidate(recipe, machine, evaluates=False))
    if found.tokens_per_second is None:
        raise ConfigError(f"the speed of {machine.name} is unknown: choose another --gpu")
    return found.tokens_per_second.expected
