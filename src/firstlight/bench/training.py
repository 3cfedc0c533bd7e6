"""`firstlight bench training`: GPT-2 as a recipe trains it, beside bare loops and other programs.

All train the same model for a few steps on the same tokens, each in a fresh process
(`training_once` says what is measured); they take turns (A B C, A B C), with the same number of
threads. Rates are medians over the timed steps of all turns, ratios are to the bare loop
"reference", and the spread of a ratio is that of the turns' own ratios.

Before each turn the machine's rate of large matrix products is measured, in fp32 and bf16; the
highest of all is the ceiling that every row's share is of, whatever it computes in.

firstlight's rows run in the environment of `firstlight train`, the others in the person's own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.fresh_process import ask, plain_environment, training_environment
from firstlight.bench.gemm import ceiling
from firstlight.bench.methods_data import write_tokens
from firstlight.bench.methods_rows import SMALL, find_model
from firstlight.bench.training_once import EPOCH_TOKENS
from firstlight.bench.training_report import FIRSTLIGHT, REFERENCE, Row, summarize
from firstlight.console import progress_bar, say
from firstlight.errors import ConfigError, nearest
from firstlight.files.atomic import write_json
from firstlight.hardware.device import Hardware, bf16_is_faster, find_hardware
from firstlight.models import GPT2Config
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.recipe import Recipe, ResolvedRecipe, load_recipe
from firstlight.recipe.conflicts import require_combination
from firstlight.recipe.resolve import facts_here, resolve

#: What firstlight can be compared with.
PROGRAMS = (REFERENCE, "reference-fp32", "pure-bf16", "trainer")

#: Steps that are not timed.
WARMUP_STEPS = 2

#: Sections of a recipe file that firstlight's rows take over; the rest is the benchmark's.
_SECTIONS = ("model", "optimizer", "efficiency")

#: Sections that a variant may change: the model and the data stay the same for all rows.
_VARIABLE = ("batch", "data", "efficiency", "optimizer")


@dataclass(frozen=True)
class TrainingBench:
    """What is to be measured.

    Attributes:
        model: a name or recipe, see `find_model`; None is gpt2-124m, or with `quick` the small
            one. A recipe brings its optimizer and efficiency sections too.
        seq_len: tokens a row; None is 1024, with `quick` 256, or the model's context where that
            is less.
        micro_batch_size: rows a step, which the other programs compute at once; None is 4 on a
            CPU, 16 on a GPU.
        steps: timed steps a run; None is 4 on a CPU, 20 on a GPU.
        repeats: turns of all rows; None is 3, with `quick` 1.
        programs: of `PROGRAMS`; None is "reference", and "reference-fp32" where bf16 products
            are no faster.
        variants: each is another row of firstlight: "section.key=value,section.key=value".
        same_environment: the other programs get the environment of `firstlight train`, too.
        device: as in a recipe's `run.device`.
        quick: a small model, one turn.
    """

    model: str | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    steps: int | None = None
    repeats: int | None = None
    programs: Sequence[str] | None = None
    variants: Sequence[str] = ()
    same_environment: bool = False
    device: str = "auto"
    quick: bool = False


@dataclass(frozen=True)
class Plan:
    """A `TrainingBench` with everything worked out; see there."""

    name: str
    hardware: Hardware
    seq_len: int
    micro_batch_size: int
    steps: int
    repeats: int
    same_environment: bool
    rows: Sequence[Row]


def make_plan(bench: TrainingBench) -> Plan:
    """Work out what is left open.

    Raises:
        ConfigError: a value is out of range, a name unknown, a variant no recipe, or methods in
            it can't work together.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"bench training runs on cpu and cuda, not on {hardware.device.type}")
    name = bench.model or (SMALL if bench.quick else "gpt2-124m")
    model = find_model(name)
    on_gpu = hardware.device.type == "cuda"
    limit = model.max_position_embeddings
    numbers = {
        "seq_len": (bench.seq_len, min(256 if bench.quick else 1024, limit)),
        "micro_batch_size": (bench.micro_batch_size, 16 if on_gpu else 4),
        "steps": (bench.steps, 20 if on_gpu else 4),
        "repeats": (bench.repeats, 1 if bench.quick else 3),
    }
    chosen = {key: usual if given is None else given for key, (given, usual) in numbers.items()}
    for key, value in chosen.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}: at least 1 is needed")
    if chosen["seq_len"] > limit:
        raise ConfigError(f"seq_len {chosen['seq_len']} is more than {name}'s context of {limit}")
    values = _recipe_values(name, hardware, chosen["seq_len"], chosen["micro_batch_size"])
    rows = [Row(FIRSTLIGHT, FIRSTLIGHT, make_recipe(values, "", hardware))]
    rows += [
        Row(f"{FIRSTLIGHT} {variant}", FIRSTLIGHT, make_recipe(values, variant, hardware))
        for variant in dict.fromkeys(bench.variants)
    ]
    programs = choose_programs(bench.programs, hardware, isinstance(model, GPT2Config), name)
    rows += [Row(program, program, rows[0].recipe) for program in programs]
    return Plan(name, hardware, rows=rows, same_environment=bench.same_environment, **chosen)


def _recipe_values(
    model: str, hardware: Hardware, seq_len: int, micro_batch_size: int
) -> dict[str, Any]:
    """Of the first row: what a person who sets nothing gets, or what the recipe file sets."""
    given: dict[str, Any] = {}
    if model.endswith((".yaml", ".yml")):
        given = load_recipe(model).model_dump(include=set(_SECTIONS), exclude_unset=True)
    return {
        **given,
        "run": {"device": str(hardware.device)},
        "model": find_model(model).model_dump(),
        "data": {"dir": "-", "seq_len": seq_len},
        # How the step is cut is left open, too.
        "batch": {"global_batch_tokens": micro_batch_size * seq_len},
    }


def make_recipe(values: Mapping[str, Any], variant: str, hardware: Hardware) -> Recipe:
    """The recipe of `values` with a variant's keys set.

    Args:
        values: of a recipe.
        variant: "section.key=value,section.key=value"; "" changes nothing.
        hardware: to run on.

    Raises:
        ConfigError: the variant is not of that form, or no recipe that can run here.
    """
    overrides = []
    # A comma inside a value, as in betas=[0.9,0.95], is not followed by a key.
    for part in re.split(r",(?=\s*\w+\.\w+\s*=)", variant) if variant else []:
        key, equals, value = part.partition("=")
        if not equals or key.split(".")[0].strip() not in _VARIABLE:
            raise ConfigError(
                f"--set {variant}: '{part}' is not section.key=value, such as "
                f"efficiency.precision=fp32, of one of the sections {', '.join(_VARIABLE)}"
            )
        overrides.append((key.strip(), value.strip()))
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        path = Path(folder) / "recipe.yaml"
        write_json(path, values)
        try:
            recipe = load_recipe(path, overrides)
            _require_same_batch(recipe, values, hardware)
            require_combination(_decided(recipe, hardware), hardware)
        except ConfigError as error:
            message = str(error).removeprefix(f"{path}: ")
            where = f"--set {variant}: " if variant else ""
            raise ConfigError(where + message) from None
    return recipe


def _require_same_batch(recipe: Recipe, values: Mapping[str, Any], hardware: Hardware) -> None:
    seq_len, tokens = values["data"]["seq_len"], values["batch"]["global_batch_tokens"]
    if (recipe.data.seq_len, recipe.batch.global_batch_tokens) != (seq_len, tokens):
        raise ConfigError(
            f"every row trains {tokens} tokens a step in rows of {seq_len}: use --seq-len and "
            "--micro-batch-size, and only batch.micro_batch_size to cut the step otherwise"
        )
    _decided(recipe, hardware).batch.accumulation(seq_len)


def _decided(recipe: Recipe, hardware: Hardware) -> ResolvedRecipe:
    """As it will be run, but with one row a micro-batch where the largest that fits is yet to be
    found: that takes time, and other processes."""
    if recipe.batch.micro_batch_size == "auto":
        batch = recipe.batch.model_copy(update={"micro_batch_size": 1})
        recipe = recipe.model_copy(update={"batch": batch})
    return resolve(recipe, facts_here(hardware, epoch_tokens=EPOCH_TOKENS))


def choose_programs(
    names: Sequence[str] | None, hardware: Hardware, is_gpt2: bool, model: str
) -> list[str]:
    """The programs to compare with, without those whose packages are missing (which is said).

    Raises:
        ConfigError: a name is unknown, or a bare loop is asked for that can't train this model.
    """
    if names is None and not is_gpt2:
        return []
    if names is None:
        bf16 = hardware.bf16 and bf16_is_faster(hardware.device)
        return [REFERENCE] if bf16 else [REFERENCE, "reference-fp32"]
    for name in names:
        if name not in PROGRAMS:
            hint = nearest(name, PROGRAMS) or f": use {', '.join(PROGRAMS)}"
            raise ConfigError(f"program '{name}' is unknown{hint}")
        if name != "trainer" and not is_gpt2:
            raise ConfigError(
                f"program '{name}' is a loop for GPT-2, and {model} is none: use --programs trainer"
            )
    missing = [
        name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if "trainer" in names and missing:
        say(f"{' and '.join(missing)} not installed: the row 'trainer' is left out")
    return [name for name in dict.fromkeys(names) if name != "trainer" or not missing]


def bench_training(plan: Plan, on_run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all rows.

    Args:
        plan: what.
        on_run: called with the result so far after every run, so that an interruption leaves it.

    Returns:
        "model" and its "parameters", "seq_len", "micro_batch_size", "steps", "warmup_steps",
        "repeats", "flops_per_token", "machine" with its "ceilings" (FLOP/s by number format),
        "complete", and "rows" as `summarize` gives them.

    Raises:
        InputError: there is nothing to train on.
        StorageError: the disk refused.
    """
    head = _head(plan)
    ceilings: dict[str, float] = head["machine"]["ceilings"]
    replies: dict[str, list[dict[str, Any]]] = {row.name: [] for row in plan.rows}

    def result(complete: bool) -> dict[str, Any]:
        return {**head, "complete": complete, "rows": summarize(plan.rows, replies, head)}

    with (
        tempfile.TemporaryDirectory(
            prefix="firstlight-bench-", ignore_cleanup_errors=True
        ) as temporary,
        progress_bar() as progress,
    ):
        folder = Path(temporary)
        count = (WARMUP_STEPS + plan.steps) * plan.micro_batch_size * plan.seq_len + 1
        assert plan.rows[0].recipe.model is not None
        write_tokens(folder / "tokens", count, plan.rows[0].recipe.model.vocab_size)
        task = progress.add_task("training", total=plan.repeats * (1 + len(plan.rows)))
        for _ in range(plan.repeats):
            progress.update(task, description="training: the machine's matrix products")
            for dtype, before in ceilings.items():
                found = ceiling(plan.hardware.device, getattr(torch, dtype))
                ceilings[dtype] = max(before, found)
            progress.advance(task)
            for row in plan.rows:
                progress.update(task, description=f"training: {row.name}")
                # What failed once fails again.
                if not any("error" in reply for reply in replies[row.name]):
                    replies[row.name].append(_measure(row, plan, folder))
                    on_run(result(False))
                progress.advance(task)
    done = result(True)
    on_run(done)
    return done


def _measure(row: Row, plan: Plan, folder: Path) -> dict[str, Any]:
    """Run a row once; what `training_once` says."""
    request = {
        "program": row.program,
        "recipe": row.recipe.model_dump(),
        "micro_batch_size": plan.micro_batch_size,
        "data": str(folder / "tokens"),
        "warmup_steps": WARMUP_STEPS,
        "steps": plan.steps,
        "threads": torch.get_num_threads(),
    }
    ours = row.program == FIRSTLIGHT or plan.same_environment
    environment = training_environment() if ours else plain_environment()
    # The first turn compiles, whatever was compiled before.
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"), "HF_HUB_OFFLINE": "1"}
    return ask("firstlight.bench.training_once", request, environment)


def _head(plan: Plan) -> dict[str, Any]:
    config, hardware = plan.rows[0].recipe.model, plan.hardware
    assert config is not None
    model = meta_model(config)
    dtypes = ["float32", "bfloat16"] if hardware.bf16 else ["float32"]
    return {
        "model": plan.name,
        "parameters": count_parameters(model).total,
        "seq_len": plan.seq_len,
        "micro_batch_size": plan.micro_batch_size,
        "steps": plan.steps,
        "warmup_steps": WARMUP_STEPS,
        "repeats": plan.repeats,
        "same_environment": plan.same_environment,
        "flops_per_token": train_flops_per_token(model, plan.seq_len),
        "machine": {
            "name": hardware.name,
            "device": str(hardware.device),
            "memory_bytes": hardware.memory_bytes,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "torch": str(torch.__version__),
            "ceilings": dict.fromkeys(dtypes, 0.0),
        },
    }
