"""`python -m benchmarks training`: speed and memory of training relative to other programs.

All programs train the same model for a few steps on the same tokens, each in a fresh process
(`training_once` describes the measurements). They take turns (A B C, A B C), with the same number
of threads. Rates are medians over the timed steps of all turns. Ratios are relative to the bare
loop "reference"; the range of a ratio is that of the ratios of single turns.

Before each turn, the machine's rate of large matrix products is measured in fp32 and bf16. The
highest rate of all is the ceiling for the share of every row, whatever its number format.

firstlight's rows run with the environment variables of `firstlight train`, the others with the
user's.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import TrainingBench
from benchmarks.rows import ProgramRow, has_package
from firstlight.bench.gemm_products import ceiling
from firstlight.bench.models import find_model
from firstlight.bench.options import Keep, Result, require_known
from firstlight.bench.pictures import Panel, draw_panels
from firstlight.bench.runner import Found, RowOutcome, run_bench
from firstlight.bench.step_parts import operator_shares, phase_shares
from firstlight.bench.steps import StepsPlan, plan_steps, steps_title
from firstlight.bench.training_once import EPOCH_TOKENS, write_tokens
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.files.atomic import write_json
from firstlight.hardware.device import Hardware, bf16_is_faster
from firstlight.hardware.fresh_process import ask, plain_environment, training_environment
from firstlight.models import GPT2Config
from firstlight.recipe import Recipe, ResolvedRecipe, load_recipe
from firstlight.recipe.conflicts import require_combination
from firstlight.recipe.resolve import facts_here, resolve

FIRSTLIGHT, REFERENCE = "firstlight", "reference"

#: Programs that firstlight can be compared with.
PROGRAMS = (REFERENCE, "reference-fp32", "pure-bf16", "trainer")

#: Number of steps that are not timed.
WARMUP_STEPS = 2

#: Number of further steps of each run that are divided into phases, and that --profile profiles.
PHASE_STEPS, PROFILED_STEPS = 2, 2

#: Sections of a recipe file that firstlight's rows use; the benchmark sets the other sections.
_SECTIONS = ("model", "optimizer", "efficiency")

#: Sections that a variant may change: the model and the data stay the same for all rows.
_VARIABLE = ("batch", "data", "efficiency", "optimizer")


@dataclass(frozen=True)
class TrainingRow(ProgramRow):
    """One program, with the recipe that it follows."""

    recipe: Recipe


def training_rows(bench: TrainingBench, plan: StepsPlan) -> list[TrainingRow]:
    """The rows: firstlight first, then its variants and the other programs.

    Raises:
        ConfigError: a name is unknown, or a variant is invalid here.
    """
    hardware = plan.hardware
    values = _recipe_values(plan.name, hardware, plan.seq_len, plan.micro_batch_size)
    recipe = make_recipe(values, "", hardware)
    rows = [TrainingRow(FIRSTLIGHT, FIRSTLIGHT, recipe)]
    rows += [
        TrainingRow(f"{FIRSTLIGHT} {variant}", FIRSTLIGHT, make_recipe(values, variant, hardware))
        for variant in dict.fromkeys(bench.variants)
    ]
    is_gpt2 = isinstance(plan.model, GPT2Config)
    programs = choose_programs(bench.programs, hardware, is_gpt2, plan.name)
    return rows + [TrainingRow(program, program, recipe) for program in programs]


def _recipe_values(
    model: str, hardware: Hardware, seq_len: int, micro_batch_size: int
) -> dict[str, Any]:
    """The first row's recipe: its keys are open unless the recipe file sets them."""
    given: dict[str, Any] = {}
    if model.endswith((".yaml", ".yml")):
        given = load_recipe(model).model_dump(include=set(_SECTIONS), exclude_unset=True)
    return {
        **given,
        "run": {"device": str(hardware.device)},
        "model": find_model(model).model_dump(),
        "data": {"dir": "-", "seq_len": seq_len},
        # Only the tokens of a step are fixed: the micro-batch size is open, too.
        "batch": {"global_batch_tokens": micro_batch_size * seq_len},
    }


def make_recipe(values: Mapping[str, Any], variant: str, hardware: Hardware) -> Recipe:
    """The recipe of `values` with a variant's keys set.

    Args:
        values: values of a recipe.
        variant: "section.key=value,section.key=value"; "" changes nothing.
        hardware: hardware to run on.

    Raises:
        ConfigError: the variant has another form, or the recipe is invalid here.
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
            require_combination(_decided(recipe, values, hardware), hardware)
        except ConfigError as error:
            message = str(error).removeprefix(f"{path}: ")
            where = f"--set {variant}: " if variant else ""
            raise ConfigError(where + message) from None
    return recipe


def _decided(recipe: Recipe, values: Mapping[str, Any], hardware: Hardware) -> ResolvedRecipe:
    """The resolved recipe, with one sequence in a micro-batch if "auto" is to find the largest that
    fits: finding it takes time and other processes.

    Raises:
        ConfigError: the recipe changes the sequence length or the tokens of a step, or is invalid.
    """
    seq_len, tokens = values["data"]["seq_len"], values["batch"]["global_batch_tokens"]
    if (recipe.data.seq_len, recipe.batch.global_batch_tokens) != (seq_len, tokens):
        raise ConfigError(
            f"every row trains {tokens} tokens a step in rows of {seq_len}: use --seq-len and "
            "--micro-batch-size, and only batch.micro_batch_size to cut the step otherwise"
        )
    if recipe.batch.micro_batch_size == "auto":
        recipe = recipe.with_keys("batch", micro_batch_size=1)
    decided = resolve(recipe, facts_here(hardware, epoch_tokens=EPOCH_TOKENS))
    # Raises an error if the tokens of a step are not a multiple of the micro-batch's.
    decided.batch.accumulation(seq_len)
    return decided


def choose_programs(
    names: Sequence[str] | None, hardware: Hardware, is_gpt2: bool, model: str
) -> list[str]:
    """The programs to compare with. If the Trainer's packages are missing, a message is printed,
    and the Trainer is left out.

    Raises:
        ConfigError: a name is unknown, or a bare loop is named and the model is not a GPT-2.
    """
    if names is None and not is_gpt2:
        return []
    if names is None:
        bf16 = hardware.bf16 and bf16_is_faster(hardware.device)
        return [REFERENCE] if bf16 else [REFERENCE, "reference-fp32"]
    require_known("program", names, PROGRAMS)
    for name in names:
        if name != "trainer" and not is_gpt2:
            raise ConfigError(
                f"program '{name}' is a loop for GPT-2, and {model} is none: use --programs trainer"
            )
    missing = [name for name in ("transformers", "accelerate") if not has_package(name)]
    if "trainer" in names and missing:
        say(f"{' and '.join(missing)} not installed: the row 'trainer' is left out")
    return [name for name in dict.fromkeys(names) if name != "trainer" or not missing]


def bench_training(bench: TrainingBench, on_run: Keep) -> Result:
    """Measure all rows.

    Returns:
        The values of `StepsPlan.head`, "same_environment", "complete", and "rows" as `summarize`
        returns them. "machine" also has "ceilings", FLOP/s by number format.

    Raises:
        ConfigError: an option is invalid.
        InputError: this Python has no source of its standard library to train on.
        StorageError: a file system error.
    """
    plan = plan_steps(bench, "benchmarks training")
    rows = {row.name: row for row in training_rows(bench, plan)}
    head = {**plan.head(WARMUP_STEPS), "same_environment": bench.same_environment}
    dtypes = ["float32", "bfloat16"] if plan.hardware.bf16 else ["float32"]
    ceilings = head["machine"]["ceilings"] = dict.fromkeys(dtypes, 0.0)

    def raise_ceilings() -> None:
        for dtype, before in ceilings.items():
            ceilings[dtype] = max(before, ceiling(plan.hardware.device, getattr(torch, dtype)))

    with tempfile.TemporaryDirectory(
        prefix="firstlight-bench-", ignore_cleanup_errors=True
    ) as temporary:
        folder = Path(temporary)
        steps = WARMUP_STEPS + plan.steps + PHASE_STEPS + PROFILED_STEPS * bench.profile
        count = steps * plan.micro_batch_size * plan.seq_len + 1
        write_tokens(folder / "tokens", count, plan.model.vocab_size)
        return run_bench(
            "training",
            list(rows),
            plan.repeats,
            lambda name: _measure(rows[name], plan, folder, bench),
            lambda found: {**head, "rows": summarize(list(rows.values()), found, head)},
            on_run,
            raise_ceilings,
        )


def _measure(row: TrainingRow, plan: StepsPlan, folder: Path, bench: TrainingBench) -> Found:
    request = {
        "program": row.program,
        "recipe": row.recipe.model_dump(),
        "micro_batch_size": plan.micro_batch_size,
        "data": str(folder / "tokens"),
        "warmup_steps": WARMUP_STEPS,
        "steps": plan.steps,
        "phase_steps": PHASE_STEPS,
        "profiled_steps": PROFILED_STEPS * bench.profile,
        "threads": torch.get_num_threads(),
    }
    ours = row.program == FIRSTLIGHT or bench.same_environment
    environment = training_environment() if ours else plain_environment()
    # An empty cache: the first turn measures compilation, whatever ran before.
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"), "HF_HUB_OFFLINE": "1"}
    return ask("firstlight.bench.training_once", request, environment)


def summarize(
    rows: Sequence[TrainingRow], outcomes: Mapping[str, RowOutcome], head: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The medians of each row and their ratios to the reference.

    Returns:
        For each row "name", "program", "status" ("measured", "failed", "waiting") and "reason"; of
        a measured row also (medians are over the timed steps, or over the turns):

        - "tokens_per_second", median and extremes ("tokens_per_second_min", "_max")
        - "share_of_ceiling": fraction of the highest of `head["machine"]["ceilings"]`
        - "cpu_seconds" per step, "total_peak_bytes", "peak_bytes", "final_loss": medians
        - "speed_ratio" (with "_min", "_max" of the turns' ratios) and "memory_ratio" of the total
          peaks, to the row "reference"; None without it
        - "first_step_seconds" and "chosen" of the first turn; "phases", see `phase_shares`;
          "operators", see `operator_shares`; "runs"
    """
    result = [_summary(row, outcomes[row.name], head) for row in rows]
    bases = (entry for entry in result if entry["name"] == REFERENCE)
    base = next((entry for entry in bases if entry["status"] == "measured"), None)
    for entry in result:
        if base is not None and entry["status"] == "measured":
            ratios = turn_ratios(entry["runs"], base["runs"])
            entry["speed_ratio"] = entry["tokens_per_second"] / base["tokens_per_second"]
            entry["speed_ratio_min"], entry["speed_ratio_max"] = min(ratios), max(ratios)
            entry["memory_ratio"] = entry["total_peak_bytes"] / base["total_peak_bytes"]
    return result


def turn_ratios(runs: Sequence[Found], base: Sequence[Found]) -> list[float]:
    """Speed relative to the base for each turn: the base's median step time over the run's."""
    return [
        statistics.median(theirs["step_seconds"]) / statistics.median(ours["step_seconds"])
        for ours, theirs in zip(runs, base, strict=False)
    ]


def _summary(row: TrainingRow, outcome: RowOutcome, head: Mapping[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name, "program": row.program}
    runs, problem = outcome.runs, outcome.problem
    if not runs:
        status = "failed" if problem else "waiting"
        return {**entry, "status": status, "reason": problem or "not measured yet"}
    tokens = head["seq_len"] * head["micro_batch_size"]
    rates = [tokens / seconds for seconds in outcome.values("step_seconds")]
    rate = statistics.median(rates)
    best = max(head["machine"]["ceilings"].values())
    ratios = ("speed_ratio", "speed_ratio_min", "speed_ratio_max", "memory_ratio")
    return {
        **entry,
        "status": "measured",
        "reason": problem,
        "tokens_per_second": rate,
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "share_of_ceiling": rate * head["flops_per_token"] / best,
        "cpu_seconds": outcome.median("step_cpu_seconds"),
        "total_peak_bytes": outcome.median("total_peak_bytes"),
        "peak_bytes": outcome.median("peak_bytes"),
        **dict.fromkeys(ratios),
        "final_loss": statistics.median(run["losses"][-1] for run in runs),
        "first_step_seconds": runs[0]["first_step_seconds"],
        "phases": phase_shares(runs),
        "operators": operator_shares(runs),
        "chosen": runs[0]["chosen"],
        "runs": list(runs),
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of the result of `bench_training`: tokens/s and peak memory of each row."""
    rows = [row for row in result["rows"] if row["status"] == "measured"]
    names = [row["name"].replace(",", ",\n") for row in rows]
    colors = ["tab:blue" if row["program"] == FIRSTLIGHT else "tab:orange" for row in rows]
    speed = Panel(
        "tokens/s (median; line: slowest to fastest step)",
        names,
        [row["tokens_per_second"] for row in rows],
        ["" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}x" for row in rows],
        colors,
        [(row["tokens_per_second_min"], row["tokens_per_second_max"]) for row in rows],
    )
    peaks = [row["total_peak_bytes"] / 2**30 for row in rows]
    memory = Panel("peak memory (GiB)", names, peaks, colors=colors)
    return draw_panels(steps_title(result), [[speed, memory]])
