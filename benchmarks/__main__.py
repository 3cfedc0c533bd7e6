"""`python -m benchmarks NAME`: measure one benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks import shown
from benchmarks.options import GenerationBench, LoadingBench, ScalingBench, TrainingBench
from benchmarks.studies import budget_command, gpu_command, learning_command, planner_command
from firstlight.bench.options import Result
from firstlight.cli import main as cli
from firstlight.cli.bench_options import STEPS_OPTIONS, bench_options, out_option, publish
from firstlight.cli.options import field_option
from firstlight.cli.output import with_json
from firstlight.errors import ConfigError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def benchmarks() -> None:
    """Measure firstlight beside other programs, and what its choices and predictions rest on."""


@benchmarks.command("loading")
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
    from benchmarks.loading import bench_loading, draw, parse_count

    measure = partial(bench_loading, LoadingBench(parameters=parse_count(parameters), **options))
    return publish("loading", out, measure, shown.show_loading, draw)


@benchmarks.command("training")
@bench_options(TrainingBench, *STEPS_OPTIONS, "programs", model="NAME|RECIPE.yaml")
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
    from benchmarks.training import bench_training, draw, draw_operators
    from firstlight.bench.steps import steps_title

    def pictures(result: Result) -> dict[str, bytes]:
        drawn = {"training.png": draw(result)}
        if options["profile"]:
            operators = draw_operators(steps_title(result), result["rows"])
            drawn["training-operators.png"] = operators
        return drawn

    measure = partial(bench_training, TrainingBench(**options))
    return publish("training", out, measure, shown.show_training, pictures)


@benchmarks.command("generation")
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
    from benchmarks.generation import bench_generation, draw

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': give numbers such as 1,8") from None
    measure = partial(bench_generation, GenerationBench(batch_sizes=sizes, **options))
    return publish("generation", out, measure, shown.show_generation, draw)


@benchmarks.command("scaling")
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
    from benchmarks.scaling import bench_scaling, draw

    measure = partial(bench_scaling, ScalingBench(**options))
    return publish("scaling", out, measure, shown.show_scaling, draw)


for command in (planner_command, learning_command, budget_command, gpu_command):
    benchmarks.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `firstlight.cli.main.main`.

    The processes that it starts find this package by PYTHONPATH: their own import path has no
    current folder.
    """
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return cli.main(arguments, benchmarks, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main())
