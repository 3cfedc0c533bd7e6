"""`firstlight bench ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli import bench_tables as tables
from firstlight.cli.bench_options import (
    Keep,
    Result,
    device_option,
    names_option,
    number_option,
    out_option,
    publish,
    steps_options,
)
from firstlight.cli.output import show, with_json
from firstlight.errors import ConfigError


@click.group("bench")
def bench_group() -> None:
    """What a choice buys on this very machine, measured."""


@bench_group.command("loading")
@click.option(
    "--parameters",
    metavar="COUNT",
    default="0.5B",
    show_default=True,
    help="About so many parameters (K, M, B).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Number format of the file.",
)
@number_option("--repeats", "Turns of all ways.", 3)
@names_option(
    "--ways",
    "Only these rows: auto, sequential, mmap, straight, sharded, cast, "
    "transformers, transformers-huge-pages, transformers-cast.",
)
@click.option("--no-transformers", is_flag=True, help="Leave transformers' rows out.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Make the checkpoint here, keep it and use it again. [a temporary folder]",
)
@out_option("loading")
@with_json
def loading_command(parameters: str, out: Path | None, as_json: bool, **options: Any) -> Result:
    """Memory and time of each way to load a model, beside transformers' from_pretrained.

    A checkpoint with random weights is made and loaded by a fresh process a time, on the CPU,
    from the page cache. Peak memory is what the process takes above its level after the
    imports, until the first logits.
    """
    from firstlight.bench.loading import LoadingBench, bench_loading, draw, parse_count

    bench = LoadingBench(parameters=parse_count(parameters), **options)
    return publish(
        "loading",
        out,
        lambda keep: bench_loading(bench, keep),
        tables.show_loading,
        lambda result: {"loading.png": draw(result)},
    )


@bench_group.command("methods")
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or the model of a recipe. "
    "[gpt2-124m; small with --quick]",
)
@steps_options
@names_option(
    "--rows",
    "Only these rows, as the tables name them (a rung of the ladder brings those below it), "
    "or `alone` or `ladder` for a whole table.",
)
@device_option()
@click.option(
    "--quick",
    is_flag=True,
    help="A small model, one turn, fewer rows, and an end after five minutes at most.",
)
@out_option("methods", "methods-bench")
@with_json
def methods_command(out: Path, as_json: bool, **options: Any) -> Result:
    """What each efficiency method buys on this machine, in speed and memory.

    Two tables: each method alone beside a plain fp32 run, and the ladder, each method added to
    those before it. Every row is trained for a few steps by a fresh process, on the source of
    Python's standard library. methods.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.methods import MethodsBench, bench_methods
    from firstlight.bench.methods_rows import draw

    return publish(
        "methods",
        out,
        lambda keep: bench_methods(MethodsBench(**options), keep),
        tables.show_methods,
        lambda result: {"methods.png": draw(result)},
    )


@bench_group.command("training")
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or the model, optimizer "
    "and efficiency sections of a recipe. [gpt2-124m; small with --quick]",
)
@steps_options
@names_option(
    "--programs",
    "Compare with: reference (a bare loop: bf16 autocast, compiled), reference-fp32, "
    "pure-bf16 (no master weights, no clipping), trainer (transformers, bf16, compiled). "
    "[reference; reference-fp32 too where bf16 is no faster]",
    default=None,
)
@click.option(
    "--set",
    "variants",
    metavar="SECTION.KEY=VALUE,...",
    multiple=True,
    help="One more row of firstlight with these keys of its recipe; may be given several times.",
)
@click.option(
    "--same-environment",
    is_flag=True,
    help="Run the other programs in the environment of `firstlight train` (spinning threads), too.",
)
@device_option()
@click.option("--quick", is_flag=True, help="A small model, one turn.")
@out_option("training")
@with_json
def training_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Training with what a recipe sets by default, beside bare loops and other programs.

    Each row is trained for a few steps by a fresh process, on the source of Python's standard
    library; the rows take turns. training.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.training import TrainingBench, bench_training, draw

    return publish(
        "training",
        out,
        lambda keep: bench_training(TrainingBench(**options), keep),
        tables.show_training,
        lambda result: {"training.png": draw(result)},
    )


@bench_group.command("generation")
@click.option(
    "--model",
    metavar="NAME|CHECKPOINT",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b or small, with random weights; or "
    "a model's folder. [gpt2-124m; small with --quick]",
)
@click.option(
    "--batch-sizes", metavar="N,...", default="1,8", show_default=True, help="Texts at a time."
)
@number_option("--prompt-tokens", "Of each text. [128; 32 with --quick]")
@number_option("--new-tokens", "Of each text. [64; 16 with --quick]")
@number_option("--repeats", "Turns of all rows. [3; 1 with --quick]")
@names_option(
    "--rows",
    "Only these: transformers-fp32, transformers-bf16, fp32, bf16, int8, fp32-compiled, "
    "bf16-compiled, int8-compiled.",
)
@device_option()
@click.option("--quick", is_flag=True, help="A small model, one turn, nothing compiled.")
@out_option("generation")
@with_json
def generation_command(batch_sizes: str, out: Path | None, as_json: bool, **options: Any) -> Result:
    """Tokens per second and time to the first token, beside transformers' generate.

    Each row loads the same weights in a fresh process; the rows take turns. "of the limit" is the
    time that reading the weights once would take, at the rate measured for copying memory, in the
    time that a step took.
    """
    from firstlight.bench.generation import GenerationBench, bench_generation, draw

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': give numbers such as 1,8") from None
    return publish(
        "generation",
        out,
        lambda keep: bench_generation(GenerationBench(batch_sizes=sizes, **options), keep),
        tables.show_generation,
        lambda result: {"generation.png": draw(result)},
    )


@bench_group.command("scaling")
@number_option("--nproc", "Up to so many processes: 1, 2, 4, ...", 2)
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    default="small",
    show_default=True,
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or a recipe's.",
)
@names_option(
    "--engines",
    "Only these: ddp, fsdp, fsdp-kept, fsdp-offload, hybrid, tensor, pipeline, zero-1, "
    "zero-2, zero-3.",
)
@number_option("--seq-len", "Tokens a row.", 256)
@number_option("--micro-batch-size", "Rows of each process.", 2)
@number_option("--accumulation", "Passes a step.", 1)
@click.option(
    "--precision", default="fp32", show_default=True, help="As in a recipe's efficiency section."
)
@number_option("--steps", "Timed in each turn.", 5)
@number_option("--repeats", "Turns of all rows.", 3)
@device_option("auto, cpu or cuda.")
@out_option("scaling")
@with_json
def scaling_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Tokens per second, the share of a step that is not computing, and memory by rank, for each
    engine and number of processes.

    Every process has the same micro-batch. On a CPU the processes share its cores: what is
    gained there is little, and what an engine costs is what is to be seen.
    """
    from firstlight.bench.scaling import ScalingBench, bench_scaling, draw

    return publish(
        "scaling",
        out,
        lambda keep: bench_scaling(ScalingBench(**options), keep),
        tables.show_scaling,
        lambda result: {"scaling.png": draw(result)},
    )


@bench_group.command("gemm")
@device_option("auto, cpu, cuda, cuda:1, mps.")
@names_option(
    "--dtype",
    "Number formats: fp32, tf32, bf16, fp16. [all that the hardware multiplies]",
    name="dtypes",
)
@click.option(
    "--model",
    default="gpt2-124m",
    show_default=True,
    help="Whose shapes: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m.",
)
@click.option("--quick", is_flag=True, help="Smaller products, fewer rounds: under a minute.")
@out_option("gemm")
@with_json
def gemm_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """This machine's matrix-product rate by shape, and what aligned sizes buy.

    Square products from small to large; the products of a GPT-2 training step; sizes padded to
    multiples of 8, 64 and 128 beside sizes that are not; steps around a tile's edge. Ctrl-C
    leaves what has been measured so far.
    """
    from firstlight.bench.gemm import GemmBench, GemmRun
    from firstlight.bench.gemm_report import draw

    run = GemmRun(GemmBench(**options))

    def measure(keep: Keep) -> None:
        try:
            run.measure()
        finally:
            if run.result()["rows"]:
                keep(run.result())

    return publish(
        "gemm", out, measure, tables.show_gemm, lambda result: {"gemm.png": draw(result)}
    )


@bench_group.command("planner")
@click.option(
    "--only", type=click.Choice(["memory", "speed"]), help="One half; else both, memory first."
)
@click.option("--quick", is_flag=True, help="Every eighth configuration of memory, fewer of speed.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write planner.json and pictures here."
)
@with_json
def planner_command(only: str | None, quick: bool, out: Path | None, as_json: bool) -> Result:
    """Set what the planner predicts beside what real training steps take, on this machine's CPU:
    peak memory over some 80 configurations, and speed over 20.

    Takes most of an hour. What is measured is said, and written to planner.json, at once.
    """
    from firstlight.bench import planner_memory, planner_speed

    def measure(keep: Keep) -> None:
        result: Result = {}
        if only != "speed":
            tables.measure_memory(result, quick, keep)
        if only != "memory":
            tables.measure_speed(result, quick, keep)

    def pictures(result: Result) -> dict[str, bytes]:
        drawn = {}
        if any(not one["reason"] for one in result.get("memory", ())):
            drawn["planner-memory.png"] = planner_memory.draw_memory(result["memory"])
        if result.get("speed"):
            drawn["planner-speed.png"] = planner_speed.draw_speed(result["speed"])
        return drawn

    return publish("planner", out, measure, tables.show_planner, pictures)


@bench_group.command("gpu")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Measure, and write results.json into this folder; go on with what it holds already.",
)
@click.option(
    "--minutes",
    type=float,
    default=9.0,
    show_default=True,
    help="Measure for at most so long; what would not end in time is left for the next call.",
)
@names_option(
    "--parts",
    "Only these parts: ceilings, training, ladder, planner, generation, guide, run.",
)
@click.option("--dry", is_flag=True, help="Every part on tiny models on the CPU, and its pages.")
@click.option("--retry", is_flag=True, help="Measure rows again that have failed.")
@click.option(
    "--report",
    "report_of",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure nothing: write the pages of the results in this folder.",
)
@click.option(
    "--pages",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where pages go. [the checkout's docs; of --dry the folder pages in --out]",
)
@with_json
def gpu_command(
    out: Path | None,
    report_of: Path | None,
    pages: Path | None,
    dry: bool,
    as_json: bool,
    **options: Any,
) -> Result:
    """Every figure of firstlight on this machine's GPU, in calls of some minutes.

    The most important rows come first, each in a fresh process. results.json in --out is written
    after each; the same command goes on where the last one stopped. --report writes docs/gpu.md and
    docs/benchmarks/gpu-*.md.
    """
    from firstlight.bench.gpu import GPUBench, bench_gpu, report

    def written(folder: Path, place: Path | None) -> list[str]:
        names = [str(path) for path in report(folder, place)]
        show(f"written: {', '.join(names)}")
        return names

    if (out is None) == (report_of is None):
        raise ConfigError(
            "bench gpu takes --out DIR to measure, or --report DIR to write the pages"
        )
    if report_of is not None:
        return {"written": written(report_of, pages)}
    assert out is not None
    result = bench_gpu(GPUBench(out, dry=dry, **options))
    tables.show_gpu(result)
    if dry:
        result["written"] = written(out, pages or out / "pages")
    return result
