"""`python -m benchmarks training`: speed and memory of training relative to other programs.

All programs train the same model for a few steps on the same tokens, each in a fresh process
(`firstlight.bench.steps` describes the measurements). They take turns (A B C, A B C), with the same
number of threads. Rates are medians over the timed steps of all turns. Ratios are relative to the
bare loop "reference"; the range of a ratio is that of the ratios of single turns.

Before each turn, the machine's rate of large matrix products is measured in fp32 and bf16. The
highest rate of all is the ceiling for the share of every row, whatever its number format.

firstlight's rows run with the environment variables of `firstlight train`, the others with the
user's.

REQUEST of a row's process has the keys of `firstlight.bench.steps` without "written_out", and:

    program           "firstlight", a name of `programs`, or "trainer"
    micro_batch_size  sequences of a step, as one batch; firstlight reads the recipe instead
    data              a file of `write_tokens`
    phase_steps       number of further steps, timed by forward, backward and update; default 0
    profiled_steps    number of steps after these, timed by operator; default 0
    compile           false, for dry runs, does not compile programs other than firstlight

A step of the Trainer is timed from its `on_step_begin` to its `on_step_end`. Phases and operators
("phases" and "operators" of the result) are measured in separate steps after the timed ones,
because waiting for the GPU between phases, and the profiler, would slow down the timed steps.
Memory and losses do not include these steps.

- The phase backward is the time in the call of `backward`. Forward is the time from the start of
  the step, or from the end of the previous micro-batch's backward, to this call. Update is the
  rest: clipping and the optimizer. Layers that are recomputed (activation checkpointing) and an
  optimizer that updates inside the backward pass count as backward. The program waits for the GPU
  before and after each backward pass.
- Operators are those of torch.profiler. An operator's time is its self time, without that of
  operators that it calls: processor time on a CPU, time of its kernels on a GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from benchmarks.options import TrainingBench
from benchmarks.programs import (
    LoopStep,
    autocast_loop,
    pure_bf16_loop,
    train_with_trainer,
)
from benchmarks.rows import ProgramRow, has_package, run_bench, variant_changes
from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.models import find_model
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_known
from firstlight.bench.steps import (
    EPOCH_TOKENS,
    StepClock,
    StepsPlan,
    Tokens,
    import_libraries,
    lr_scale,
    plan_steps,
    read_recipe,
    resolved,
    step_figures,
    steps_title,
    train_steps,
    use_threads,
    write_tokens,
)
from firstlight.console import say
from firstlight.data.loader import Batch
from firstlight.data.prepare import prepare
from firstlight.data.records import read_documents
from firstlight.data.sources import find_sources
from firstlight.errors import ConfigError
from firstlight.files.atomic import write_json
from firstlight.hardware.device import (
    Hardware,
    bf16_is_faster,
    measured_matmul_flops,
    synchronize,
)
from firstlight.hardware.fresh_process import ask, plain_environment, training_environment
from firstlight.hardware.process_memory import begin_peak, peaks
from firstlight.models import GPT2Config
from firstlight.recipe import Recipe, ResolvedRecipe, load_recipe
from firstlight.recipe.conflicts import require_combination
from firstlight.recipe.resolve import facts_here, resolve
from firstlight.tokenizer import train_tokenizer
from firstlight.training.processes import run_processes

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
    """Return the rows: firstlight first, then its variants and the other programs.

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
    """Return the first row's recipe: its keys are open unless the recipe file sets them."""
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
    """Return the recipe of `values` with a variant's keys set.

    Args:
        values: values of a recipe.
        variant: "section.key=value,section.key=value"; "" changes nothing.
        hardware: hardware to run on.

    Raises:
        ConfigError: the variant has another form, or the recipe is invalid here.
    """
    example = "efficiency.precision=fp32"
    changes = variant_changes(variant, variant, _VARIABLE, example) if variant else ()
    overrides = list(changes)
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
    """Return the resolved recipe, with one sequence in a micro-batch if "auto" is to find the
    largest that fits: finding it takes time and other processes.

    Raises:
        ConfigError: the recipe changes the sequence length or the tokens of a step, or is invalid.
    """
    seq_len, tokens = values["data"]["seq_len"], values["batch"]["global_batch_tokens"]
    if (recipe.data.seq_len, recipe.batch.global_batch_tokens) != (seq_len, tokens):
        raise ConfigError(
            f"every row trains {tokens} tokens per step in rows of {seq_len}: use --seq-len and "
            "--micro-batch-size, and only batch.micro_batch_size to split the step differently"
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
    """Return the programs to compare with. If the Trainer's packages are missing, a message is
    printed, and the Trainer is left out.

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
                f"program '{name}' is a loop for GPT-2, but {model} is another model: use "
                "--programs trainer"
            )
    missing = [name for name in ("transformers", "accelerate") if not has_package(name)]
    if "trainer" in names and missing:
        say(f"{' and '.join(missing)} not installed: the row 'trainer' is skipped")
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
            ceilings[dtype] = max(
                before, measured_matmul_flops(plan.hardware.device, getattr(torch, dtype))
            )

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
            summarize=lambda found: {**head, "rows": summarize(list(rows.values()), found, head)},
            on_run=on_run,
            before_turn=raise_ceilings,
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
    return ask("benchmarks.training", request, environment)


def summarize(
    rows: Sequence[TrainingRow], outcomes: Mapping[str, RowOutcome], head: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the medians of each row and their ratios to the reference.

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
    """Return the speed relative to the base for each turn: the base's median step time over the
    run's."""
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
    """Return a PNG of the result of `bench_training`: tokens/s and peak memory of each row."""
    rows = [row for row in result["rows"] if row["status"] == "measured"]
    names = [row["name"].replace(",", ",\n") for row in rows]
    colors = ["tab:blue" if row["program"] == FIRSTLIGHT else "tab:orange" for row in rows]
    speed = Panel(
        "tokens/s (median; line: slowest to fastest step)",
        names,
        [row["tokens_per_second"] for row in rows],
        ["" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}x" for row in rows],
        colors=colors,
        spread=[(row["tokens_per_second_min"], row["tokens_per_second_max"]) for row in rows],
    )
    peaks = [row["total_peak_bytes"] / 2**30 for row in rows]
    memory = Panel("peak memory (GiB)", names, peaks, colors=colors)
    return draw_panels(steps_title(result), [[speed, memory]])


# The measurement of one row.


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train some steps with one program and measure them; see the module's docstring.

    Raises:
        FirstlightError: the recipe is invalid, or the loss became NaN or infinite.
    """
    recipe = read_recipe(request)
    program = request["program"]
    if program == FIRSTLIGHT:
        import_libraries(recipe)
    else:
        trainer = ["transformers.trainer"] if program == "trainer" else []
        import_libraries(recipe, ["torch._inductor.compile_fx", *trainer])
    with run_processes(recipe) as (hardware, engine):
        use_threads(request, recipe, hardware, engine)
        if program == FIRSTLIGHT:
            recipe = resolved(recipe, hardware)
        assert recipe.data.seq_len is not None
        tokens = Tokens(Path(request["data"]), recipe.data.seq_len)
        level = begin_peak()
        timed = request["warmup_steps"] + request["steps"]
        phase_steps = request.get("phase_steps", 0)
        steps = timed + phase_steps + request.get("profiled_steps", 0)
        clock = PartsClock(hardware.device, level, timed, phase_steps)
        chosen: dict[str, Any] = {}
        if isinstance(recipe, ResolvedRecipe):
            losses, chosen = train_steps(
                recipe, tokens, steps, hardware, engine=engine, clock=clock
            )
        else:
            rows = request["micro_batch_size"]
            batches = (tokens.batch(step * rows, rows, documents=False) for step in range(steps))
            compiles = request.get("compile", True)
            if program == "trainer":
                losses = train_with_trainer(
                    recipe, batches, steps, rows, clock=clock, compile_model=compiles
                )
            else:
                loop = _loop(program, recipe, hardware, compile_model=compiles)
                losses = _run_loop(loop, recipe, batches, hardware, clock=clock)
        assert clock.peaks is not None
        parts = {"phases": clock.phases, "operators": clock.operators}
        return step_figures(request, clock, losses, chosen, peak_bytes=clock.peaks) | parts


def _loop(program: str, recipe: Recipe, hardware: Hardware, *, compile_model: bool) -> LoopStep:
    config = recipe.model
    assert isinstance(config, GPT2Config)
    if program == "pure-bf16":
        return pure_bf16_loop(config, hardware.device, compile_model=compile_model)
    bf16 = program == "reference"
    return autocast_loop(config, hardware.device, bf16=bf16, compile_model=compile_model)


def _run_loop(
    loop: LoopStep,
    recipe: Recipe,
    batches: Iterator[Batch],
    hardware: Hardware,
    *,
    clock: StepClock,
) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        rate = recipe.optimizer.learning_rate * lr_scale(step)
        clock.start()
        batch = batch.to(hardware.device)
        losses.append(loop(batch.input_ids, batch.labels, rate))
        clock.stop()
    return losses


def library_corpus(folder: Path, vocab_size: int, source: str | Path = "stdlib") -> Path:
    """Train a tokenizer on a text, and prepare the text as token shards, unless corpus/ exists.

    With the standard library and a vocabulary of 50,257 tokens, this takes about ten seconds.

    Args:
        folder: parent of tokenizer/ and corpus/.
        vocab_size: vocabulary size of the tokenizer.
        source: text, as `prepare` takes it; "stdlib" is the source of Python's standard library.

    Returns:
        Folder of the prepared corpus, with its splits "train" and "val".

    Raises:
        InputError: the text does not exist.
        StorageError: a file system error.
    """
    corpus = folder / "corpus"
    if not corpus.exists():
        found = read_documents(find_sources([source]), "text")
        texts = (record.value for record in found if record.error is None)
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        prepare([source], tokenizer, corpus, workers=1)
    return corpus


# The parts of a step.

PHASES = ("forward", "backward", "update")

#: Minimum share of the time for an operator to be listed by --profile.
_LEAST_SHARE = 0.005


class PartsClock(StepClock):
    """A clock that also breaks down the steps after the timed ones.

    Args:
        device: device of the steps.
        level: memory level of `begin_peak`.
        timed: number of steps at the start that are only timed.
        phase_steps: number of steps after the timed ones that are divided into phases; all later
            steps are profiled.

    Attributes:
        peaks: `memory.peaks` at the end of the timed steps; None before their end.
        phases: seconds by phase of each divided step.
        operators: "seconds" and "calls" by operator of each profiled step, as torch.profiler names
            them.
    """

    def __init__(self, device: torch.device, level: int, timed: int, phase_steps: int) -> None:
        super().__init__(device)
        self.peaks: tuple[int, int] | None = None
        self.phases: list[dict[str, float]] = []
        self.operators: list[dict[str, dict[str, float]]] = []
        self._level = level
        self._timed = timed
        self._phase_steps = phase_steps
        self._stack = contextlib.ExitStack()
        self._passes: list[tuple[float, float]] = []
        self._profiler: Any = None

    def start(self) -> None:
        """Begin a step."""
        number = len(self.seconds) - self._timed
        if 0 <= number < self._phase_steps:
            self._passes.clear()
            self._stack.enter_context(_noted_passes(self._passes, self._device))
        elif number >= self._phase_steps:
            self._profiler = self._stack.enter_context(torch.profiler.profile(acc_events=True))
        super().start()

    def stop(self) -> None:
        """End a step."""
        super().stop()
        self._stack.close()
        if len(self.seconds) == self._timed:
            self.peaks = peaks(self._device, self._level)
        if self._profiler is not None:
            where = "device" if self._device.type == "cuda" else "cpu"
            self.operators.append(
                {
                    one.key: {
                        "seconds": getattr(one, f"self_{where}_time_total") / 1e6,
                        "calls": one.count,
                    }
                    # Kernels are counted with the operator that started them.
                    for one in self._profiler.key_averages()
                    if one.device_type == DeviceType.CPU and not one.is_async
                }
            )
            self._profiler = None
        elif len(self.seconds) > self._timed:
            self.phases.append(self._divided())

    def _divided(self) -> dict[str, float]:
        """Return the seconds by phase of the last step."""
        seconds = dict.fromkeys(PHASES, 0.0)
        before, end = self._start[0], self._start[0] + self.seconds[-1]
        for begin, done in self._passes:
            seconds["forward"] += begin - before
            seconds["backward"] += done - begin
            before = done
        seconds["update"] = end - before
        return seconds


@contextlib.contextmanager
def _noted_passes(passes: list[tuple[float, float]], device: torch.device) -> Iterator[None]:
    """Record (start, end) of each backward pass inside the block in `passes`, in seconds.

    `torch.autograd.backward` is replaced for this, since `Tensor.backward` calls it in every
    program.
    """
    real, depth = torch.autograd.backward, 0

    def noted(*args: Any, **options: Any) -> None:
        nonlocal depth
        # Activation checkpointing may call `backward` inside a backward pass.
        if depth:
            real(*args, **options)
            return
        synchronize(device)
        begin, depth = time.perf_counter(), 1
        try:
            real(*args, **options)
        finally:
            depth = 0
        synchronize(device)
        passes.append((begin, time.perf_counter()))

    torch.autograd.backward = noted
    try:
        yield
    finally:
        torch.autograd.backward = real


def phase_shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the fraction of a step's time by phase, over the divided steps of all turns; None if
    there are no such steps."""
    steps = [step for run in runs for step in run.get("phases", ())]
    total = sum(sum(step.values()) for step in steps)
    return (
        {phase: sum(step[phase] for step in steps) / total for phase in PHASES} if steps else None
    )


def operator_shares(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators over the profiled steps of all turns, slowest first, without those below
    `_LEAST_SHARE`.

    Returns:
        For each operator "operator", its name; "share", its fraction of the time of all operators;
        "seconds" and "calls" per step.
    """
    steps = [step for run in runs for step in run.get("operators", ())]
    total = sum(entry["seconds"] for step in steps for entry in step.values())
    rows = []
    for name in {name for step in steps for name in step}:
        found = [step[name] for step in steps if name in step]
        seconds, calls = (
            sum(one[key] for one in found) / len(steps) for key in ("seconds", "calls")
        )
        share = seconds * len(steps) / total if total else 0.0
        if share >= _LEAST_SHARE:
            rows.append({"operator": name, "share": share, "seconds": seconds, "calls": calls})
    return sorted(rows, key=lambda row: -row["share"])


def draw_operators(title: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG of the seconds per step of each operator, a panel for each row."""
    panels = [
        Panel(
            "seconds a step",
            [one["operator"] for one in row["operators"]],
            [one["seconds"] for one in row["operators"]],
            [f"{one['share']:.0%}" for one in row["operators"]],
            title=row["name"],
        )
        for row in rows
        if row.get("operators")
    ]
    return draw_panels(title, [[panel] for panel in panels])
