"""`firstlight bench ...`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from firstlight.bench.options import (
    BudgetBench,
    GemmBench,
    GenerationBench,
    GPUBench,
    LearningBench,
    LoadingBench,
    MethodsBench,
    ScalingBench,
    TrainingBench,
)
from firstlight.cli import bench_tables as tables
from firstlight.cli.bench_options import (
    Keep,
    Result,
    bench_options,
    folder_option,
    out_option,
    page_option,
    publish,
    write_page,
)
from firstlight.cli.output import show, with_json
from firstlight.console import say
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
    help="About so many parameters (K, M, B).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Number format of the file.",
)
@bench_options(LoadingBench, "repeats", "ways", "no_transformers")
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
    from firstlight.bench.loading import bench_loading, draw, parse_count

    bench = LoadingBench(parameters=parse_count(parameters), **options)
    return publish(
        "loading",
        out,
        lambda keep: bench_loading(bench, keep),
        tables.show_loading,
        draw,
    )


@bench_group.command("methods")
@bench_options(MethodsBench, *_STEPS, "rows", "device", "quick", model="NAME|RECIPE.yaml")
@out_option("methods", "methods-bench")
@with_json
def methods_command(out: Path, as_json: bool, **options: Any) -> Result:
    """Speed and memory of each efficiency method on this machine.

    Two tables: each method alone beside a plain fp32 run, and the ladder, each method added to
    those before it. Every row is trained for a few steps by a fresh process, on the source of
    Python's standard library. methods.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.methods import bench_methods
    from firstlight.bench.methods_rows import draw

    return publish(
        "methods",
        out,
        lambda keep: bench_methods(MethodsBench(**options), keep),
        tables.show_methods,
        draw,
    )


@bench_group.command("training")
@bench_options(TrainingBench, *_STEPS, "programs", model="NAME|RECIPE.yaml")
@click.option(
    "--set",
    "variants",
    metavar="SECTION.KEY=VALUE,...",
    multiple=True,
    help="One more row of firstlight with these keys of its recipe; may be given several times.",
)
@bench_options(TrainingBench, "same_environment", "device", "quick")
@out_option("training")
@with_json
def training_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Training with what a recipe sets by default, beside bare loops and other programs.

    Each row is trained for a few steps by a fresh process, on the source of Python's standard
    library; the rows take turns. training.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.training import bench_training, draw

    return publish(
        "training",
        out,
        lambda keep: bench_training(TrainingBench(**options), keep),
        tables.show_training,
        draw,
    )


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
    time that reading the weights once would take, at the rate measured for copying memory, in the
    time that a step took.
    """
    from firstlight.bench.generation import bench_generation, draw

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': give numbers such as 1,8") from None
    return publish(
        "generation",
        out,
        lambda keep: bench_generation(GenerationBench(batch_sizes=sizes, **options), keep),
        tables.show_generation,
        draw,
    )


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

    Every process has the same micro-batch. On a CPU the processes share its cores: what is
    gained there is little, and what an engine costs is what is to be seen.
    """
    from firstlight.bench.scaling import bench_scaling, draw

    return publish(
        "scaling",
        out,
        lambda keep: bench_scaling(ScalingBench(**options), keep),
        tables.show_scaling,
        draw,
    )


@bench_group.command("gemm")
@bench_options(GemmBench, "device", "dtype", "model", "quick")
@out_option("gemm")
@with_json
def gemm_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """This machine's matrix-product rate by shape, and what aligned sizes buy.

    Square products from small to large; the products of a GPT-2 training step; sizes padded to
    multiples of 8, 64 and 128 beside sizes that are not; steps around a tile's edge. Ctrl-C
    leaves what has been measured so far.
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

        def said(so_far: Result, total: int, cells: Callable[[Result], tuple[str, ...]]) -> None:
            keep(result)
            if not so_far["complete"]:
                rows = so_far["rows"]
                say(f"{len(rows)}/{total}  {'  '.join(cells(rows[-1]))}")

        def on_memory(found: Result) -> None:
            result.update(memory=found["rows"], memory_summary=found["summary"])
            said(found, len(cases), tables.memory_cells)

        def on_speed(found: Result) -> None:
            result.update(speed=found)
            said(found, len(grid), tables.speed_cells)

        cases = planner_memory.memory_grid(quick=quick)
        grid = planner_speed.speed_grid()[:: 5 if quick else 1]
        if only != "speed":
            planner_memory.bench_memory(cases, on_memory)
        if only != "memory":
            planner_speed.bench_speed(grid, on_speed, calibrate_seconds=15.0 if quick else 60.0)

    def pictures(result: Result) -> dict[str, bytes]:
        drawn = {}
        if any(not one["reason"] for one in result.get("memory", ())):
            drawn["planner-memory.png"] = planner_memory.draw_memory(result["memory"])
        if result.get("speed"):
            drawn["planner-speed.png"] = planner_speed.draw_speed(result["speed"])
        return drawn

    return publish("planner", out, measure, tables.show_planner, pictures)


@bench_group.command("learning")
@folder_option
@click.option(
    "--corpus",
    "corpora",
    metavar="stdlib|FILE|bytes:FILE",
    multiple=True,
    default=("stdlib",),
    show_default=True,
    help="The source of Python's standard library; a text; or a text whose tokens are bytes. "
    "May be given several times.",
)
@bench_options(LearningBench, "sizes", "rows")
@click.option(
    "--set",
    "variants",
    metavar="ROW:SECTION.KEY=VALUE,...",
    multiple=True,
    help="One more row: a row with these keys of its recipe; may be given several times.",
)
@bench_options(LearningBench, "seeds", "tokens", "minutes")
@page_option
@with_json
def learning_command(folder: Path, page_file: Path | None, as_json: bool, **options: Any) -> Result:
    """What recipes learn from the same tokens or in the same time, in held-out bits per byte.

    Each run is a training run of its own with one of some seeds; rows take turns over the seeds.
    results.jsonl in --out has each finished run; the same command goes on where the last one
    stopped. Seconds count training steps alone.
    """
    from firstlight.bench.learning import bench_learning
    from firstlight.bench.learning_page import draw, page

    bench = LearningBench(folder, **options)
    result = publish(
        "learning", folder, lambda keep: bench_learning(bench, keep), tables.show_learning, draw
    )
    write_page(page_file, result, draw, page)
    return result


@bench_group.command("budget")
@folder_option
@click.option(
    "--corpus",
    "corpora",
    metavar="stdlib|FILE|FOLDER",
    multiple=True,
    default=("stdlib",),
    show_default=True,
    help="The source of Python's standard library, or texts. May be given several times.",
)
@click.option(
    "--budget",
    "budgets",
    metavar="TIME",
    multiple=True,
    default=("3m",),
    show_default=True,
    help="Wall-clock time of each run: 3m, 1h. May be given several times.",
)
@bench_options(BudgetBench, "trials")
@page_option
@with_json
def budget_command(folder: Path, page_file: Path | None, as_json: bool, **options: Any) -> Result:
    """The settings that `train TEXTS --budget` chooses, beside random settings.

    Each run is the whole command in a process of its own, within the budget of wall-clock time.
    results.jsonl in --out has each finished run; the same command goes on where the last one
    stopped.
    """
    from firstlight.bench.budget import bench_budget, draw, page

    bench = BudgetBench(folder, **options)
    result = publish(
        "budget", folder, lambda keep: bench_budget(bench, keep), tables.show_budget, draw
    )
    write_page(page_file, result, draw, page)
    return result


@bench_group.command("gpu")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Measure, and write results.json into this folder; go on with what it holds already.",
)
@bench_options(GPUBench, "minutes", "parts", "dry", "retry")
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
    from firstlight.bench.gpu import bench_gpu, report

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
