"""`firstlight bench ...`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from firstlight.bench.options import (
    GemmBench,
    GenerationBench,
    Keep,
    LoadingBench,
    MethodsBench,
    Result,
    ScalingBench,
    TrainingBench,
)
from firstlight.cli import bench_tables as tables
from firstlight.cli.bench_options import bench_options, out_option, publish
from firstlight.cli.bench_studies import (
    budget_command,
    gpu_command,
    learning_command,
    planner_command,
)
from firstlight.cli.options import field_option
from firstlight.cli.output import with_json
from firstlight.errors import ConfigError

_STEPS = ("model", "seq_len", "micro_batch_size", "steps", "repeats")


@click.group("bench")
def bench_group() -> None:
    """Measure the effect of choices on this machine."""


@bench_group.command("loading")
@click.option(
    "--parameters",
    metavar="COUNT",
    default="0.5B",
    show_default=True,
    help="Approximate number of parameters (K, M, B).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Number format of the file.",
)
@bench_options(LoadingBench, "repeats", "ways", "no_transformers", "device")
@field_option(LoadingBench, "folder", "--dir")
@out_option("loading")
@with_json
def loading_command(parameters: str, out: Path | None, as_json: bool, **options: Any) -> Result:
    """Memory and time of each loading mode, beside transformers' from_pretrained.

    A checkpoint with random weights is made as one file, in shards and with one file per tensor.
    Each row loads it in a fresh process, from the page cache. Peak host memory is counted from the
    process's level after the imports until the first logits; peak GPU memory is that of torch's
    allocator.
    """
    from firstlight.bench.loading import bench_loading, draw, parse_count

    measure = partial(bench_loading, LoadingBench(parameters=parse_count(parameters), **options))
    return publish("loading", out, measure, tables.show_loading, draw)


@bench_group.command("methods")
@bench_options(MethodsBench, *_STEPS, "rows", "device", "quick", model="NAME|RECIPE.yaml")
@out_option("methods", "methods-bench")
@with_json
def methods_command(out: Path, as_json: bool, **options: Any) -> Result:
    """Speed and memory of each efficiency method on this machine.

    There are two tables: each method alone beside a plain fp32 run, and the ladder, in which each
    row adds a method to those before it. A fresh process trains each row for a few steps, on the
    source of Python's standard library. methods.json is rewritten after every run, so an
    interrupted benchmark keeps its measurements.
    """
    from firstlight.bench.methods import bench_methods
    from firstlight.bench.methods_rows import draw

    measure = partial(bench_methods, MethodsBench(**options))
    return publish("methods", out, measure, tables.show_methods, draw)


@bench_group.command("training")
@bench_options(TrainingBench, *_STEPS, "programs", model="NAME|RECIPE.yaml")
@field_option(TrainingBench, "variants", "--set", "SECTION.KEY=VALUE,...")
@bench_options(TrainingBench, "same_environment", "profile", "device", "quick")
@out_option("training")
@with_json
def training_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Training with a recipe's default settings, beside bare loops and other programs.

    A fresh process trains each row for a few steps, on the source of Python's standard library; the
    rows take turns. training.json is rewritten after every run, so an interrupted benchmark keeps
    its measurements. Two further steps of each run show the shares of forward, backward and update.
    """
    from firstlight.bench.step_parts import draw_operators
    from firstlight.bench.training import bench_training, draw, steps_title

    def pictures(result: Result) -> dict[str, bytes]:
        drawn = {"training.png": draw(result)}
        if options["profile"]:
            operators = draw_operators(steps_title(result), result["rows"])
            drawn["training-operators.png"] = operators
        return drawn

    measure = partial(bench_training, TrainingBench(**options))
    return publish("training", out, measure, tables.show_training, pictures)


@bench_group.command("generation")
@bench_options(GenerationBench, "model", model="NAME|CHECKPOINT")
@click.option(
    "--batch-sizes", metavar="N,...", default="1,8", show_default=True, help="Texts at a time."
)
@bench_options(GenerationBench, "prompt_tokens", "new_tokens", "repeats", "rows", "device", "quick")
@out_option("generation")
@with_json
def generation_command(batch_sizes: str, out: Path | None, as_json: bool, **options: Any) -> Result:
    """Tokens per second and time to the first token, beside transformers' generate.

    Each row loads the same weights in a fresh process; the rows take turns. "of the limit" is the
    share of a step's time that reading the weights once would take, at the rate measured for
    copying memory.
    """
    from firstlight.bench.generation import bench_generation, draw

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': give numbers such as 1,8") from None
    measure = partial(bench_generation, GenerationBench(batch_sizes=sizes, **options))
    return publish("generation", out, measure, tables.show_generation, draw)


@bench_group.command("scaling")
@bench_options(
    ScalingBench,
    *("nproc", "model", "engines", "seq_len", "micro_batch_size", "accumulation"),
    *("precision", "steps", "repeats", "device"),
    model="NAME|RECIPE.yaml",
)
@out_option("scaling")
@with_json
def scaling_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Tokens per second, the share of a step that is not computing, and memory by rank, for each
    engine and number of processes.

    Every process has the same micro-batch. On a CPU the processes share its cores: the gain is
    small there, and the table shows the overhead of each engine.
    """
    from firstlight.bench.scaling import bench_scaling, draw

    measure = partial(bench_scaling, ScalingBench(**options))
    return publish("scaling", out, measure, tables.show_scaling, draw)


@bench_group.command("gemm")
@bench_options(GemmBench, "device", "dtype", "model", "quick")
@out_option("gemm")
@with_json
def gemm_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """This machine's matrix-product rate by shape, and the gain from aligned sizes.

    Square products from small to large; the products of a GPT-2 training step; sizes padded to
    multiples of 8, 64 and 128 beside sizes that are not; steps around a tile's edge; on a CPU,
    passes over arrays from L1 to memory and products cut into blocks. Ctrl-C keeps the measurements
    made so far.
    """
    from firstlight.bench.gemm import GemmRun, draw

    run = GemmRun(GemmBench(**options))

    def measure(keep: Keep) -> None:
        try:
            run.measure()
        finally:
            if run.result()["rows"]:
                keep(run.result())

    return publish("gemm", out, measure, tables.show_gemm, draw)


for command in (planner_command, learning_command, budget_command, gpu_command):
    bench_group.add_command(command)
