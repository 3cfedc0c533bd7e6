"""`python -m benchmarks NAME`: commands of the benchmarks, and the tables that they print.

All commands that take an hour or more, except `planner`, resume where an earlier call stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.options import (
    BudgetBench,
    DocumentsBench,
    GenerationBench,
    GPUBench,
    KeepingBench,
    LearningBench,
    LoadingBench,
    ScalingBench,
    TrainingBench,
)
from firstlight.bench.display import cell, cells
from firstlight.bench.rows import Keep, Result
from firstlight.cli import main as cli
from firstlight.cli.bench import (
    STEPS_OPTIONS,
    bench_options,
    out_option,
    publish,
    show_cells,
    show_line,
    show_reasons,
    show_steps_head,
)
from firstlight.cli.options import field_option, path_option
from firstlight.cli.output import show, show_table, with_json
from firstlight.console import human_bytes, say
from firstlight.errors import ConfigError
from firstlight.files.atomic import write_file

#: Required option --out of benchmarks that resume where an earlier call stopped.
folder_option = path_option(
    "--out",
    "folder",
    required=True,
    help="Folder for texts and results; existing results are reused.",
)
#: Option --page, the file of a page in Markdown.
page_option = path_option(
    "--page",
    "page_file",
    metavar="FILE",
    help="Write a page of all results here, its picture into ../images.",
)


def write_page(
    file: Path | None,
    result: Result,
    draw: Callable[[Result], bytes],
    page: Callable[[Result, str], str],
) -> None:
    """Write a page and its picture, unless `file` is None.

    Args:
        file: file of the page, in Markdown; None writes none.
        result: result of the benchmark.
        draw: function that draws a result as PNG.
        page: function that returns the text of the page for a result and the picture's relative
            path.
    """
    if file is None:
        return
    picture = file.parent.parent / "images" / f"{file.stem}.png"
    write_file(picture, draw(result))
    write_file(file, page(result, f"../images/{picture.name}"))
    show(f"written: {file}, {picture}")


@click.command("planner")
@click.option(
    "--only",
    type=click.Choice(["memory", "speed"]),
    help=("Only one half; by default both, memory first."),
)
@click.option("--quick", is_flag=True, help="Every eighth configuration of memory, fewer of speed.")
@path_option("--out", help="Write planner.json and pictures here.")
@with_json
def planner_command(only: str | None, quick: bool, out: Path | None, as_json: bool) -> Result:
    """Compare the planner's predictions with real training steps on this machine's CPU: peak memory
    of some 80 configurations, and speed of ten.

    Takes most of an hour. Each measurement is printed and written to planner.json immediately.
    """
    from benchmarks import planner_memory, planner_speed

    def measure(keep: Keep) -> None:
        result: Result = {}

        def said(so_far: Result, total: int, cells_of: Callable[[Result], list[str]]) -> None:
            keep(result)
            if not so_far["complete"]:
                rows = so_far["rows"]
                say(f"{len(rows)}/{total}  {'  '.join(cells_of(rows[-1]))}")

        def on_memory(found: Result) -> None:
            result.update(memory=found["rows"], memory_summary=found["summary"])
            said(found, len(cases), _memory_cells)

        def on_speed(found: Result) -> None:
            result.update(speed=found)
            said(found, len(grid), _speed_cells)

        cases = planner_memory.memory_grid(quick=quick)
        grid = planner_speed.speed_grid()[:: 5 if quick else 1]
        if only != "speed":
            planner_memory.bench_memory(cases, on_memory)
        if only != "memory":
            planner_speed.bench_speed(grid, on_speed)

    def pictures(result: Result) -> dict[str, bytes]:
        drawn = {}
        if any(not one["reason"] for one in result.get("memory", ())):
            drawn["planner-memory.png"] = planner_memory.draw_memory(result["memory"])
        if result.get("speed"):
            drawn["planner-speed.png"] = planner_speed.draw_speed(result["speed"])
        return drawn

    return publish("planner", out, measure, _show_planner, draw=pictures)


@click.command("learning")
@folder_option
@field_option(LearningBench, "corpora", "--corpus", "stdlib|FILE|bytes:FILE")
@bench_options(LearningBench, "sizes", "rows")
@field_option(LearningBench, "variants", "--set", "ROW:SECTION.KEY=VALUE,...")
@bench_options(LearningBench, "seeds", "tokens", "minutes", "held_out_tokens")
@page_option
@with_json
def learning_command(folder: Path, page_file: Path | None, as_json: bool, **options: Any) -> Result:
    """Compare the held-out bits per byte of recipes after the same tokens or the same time.

    Each run trains one recipe with one of several seeds; the recipes take turns for each seed.
    results.jsonl in --out contains all finished runs; the same command resumes where the last one
    stopped. Seconds include only training steps.
    """
    from benchmarks.learning import bench_learning, draw, page

    measure = partial(bench_learning, LearningBench(folder, **options))
    result = publish("learning", folder, measure, _show_learning, draw=draw)
    write_page(page_file, result, draw, page)
    return result


@click.command("budget")
@folder_option
@field_option(BudgetBench, "corpora", "--corpus", "stdlib|FILE|FOLDER")
@field_option(BudgetBench, "budgets", "--budget", "TIME")
@bench_options(BudgetBench, "trials")
@page_option
@with_json
def budget_command(folder: Path, page_file: Path | None, as_json: bool, **options: Any) -> Result:
    """Compare the settings that `train TEXTS --budget` chooses with random settings.

    Each run is the complete command in a separate process, within the budget of wall-clock time.
    results.jsonl in --out contains all finished runs; the same command resumes where the last one
    stopped.
    """
    from benchmarks.budget import bench_budget, draw, page

    measure = partial(bench_budget, BudgetBench(folder, **options))
    result = publish("budget", folder, measure, _show_budget, draw=draw)
    write_page(page_file, result, draw, page)
    return result


@click.command("keeping")
@click.argument("model")
@click.argument("text")
@folder_option
@bench_options(KeepingBench, "keep", "steps", "batch_tokens", "seeds")
@field_option(KeepingBench, "replays", "--replay", "SHARE")
@field_option(KeepingBench, "rates", "--rate", "MULTIPLE")
@field_option(KeepingBench, "methods", "--method", "NAME")
@bench_options(KeepingBench, "kilobytes", "rows", "evaluations")
@with_json
def keeping_command(folder: Path, as_json: bool, **options: Any) -> Result:
    """Fine-tune MODEL on TEXT with several shares of kept text, learning rates, methods and sizes
    of the text, and compare what is gained and lost.
    """
    from benchmarks.keeping import HEADER, bench_keeping, draw, groups, row_cells

    result = bench_keeping(KeepingBench(folder, **options))
    show_table([HEADER, *(row_cells(runs) for runs in groups(result["runs"]))])
    write_file(folder / "keeping.png", draw(result))
    show(f"picture: {folder / 'keeping.png'}")
    return result


@click.command("documents")
@click.argument("sources")
@folder_option
@bench_options(DocumentsBench, "characters", "turns", "reads")
@with_json
def documents_command(folder: Path, as_json: bool, **options: Any) -> Result:
    """Make documents of each format from the manuals in SOURCES, and compare how firstlight and
    other programs read them.
    """
    from benchmarks.documents import bench_documents, document_table, draw

    result = bench_documents(DocumentsBench(folder, **options))
    show_table(document_table(result["runs"]))
    write_file(folder / "documents.png", draw(result))
    return result


@click.command("gpu")
@path_option(
    "--out", help="Measure, and append to lines.jsonl in this folder; existing results are reused."
)
@bench_options(GPUBench, "seconds", "items", "device", "commit")
@path_option(
    "--report",
    "reported",
    metavar="DIR",
    multiple=True,
    help="Measure nothing: print the tables of this folder. May be given several times.",
)
@path_option(
    "--fit",
    "fitted",
    metavar="DIR",
    help="Measure nothing: compare the planner with this folder's items L, and fit its constants.",
)
@with_json
def gpu_command(
    out: Path | None,
    reported: Sequence[Path],
    fitted: Path | None,
    as_json: bool,
    **options: Any,
) -> Result:
    """Measure firstlight on this machine's GPU, in calls of less than ten minutes.

    One process measures item after item, the most useful first, and appends a line to lines.jsonl
    in --out after each; the same command resumes where the last one stopped.
    """
    if (out is not None) + bool(reported) + (fitted is not None) != 1:
        raise ConfigError(
            "benchmarks gpu needs --out DIR to measure, --report DIR to print the tables, or "
            "--fit DIR to compare the planner"
        )
    from benchmarks.gpu import planner, quick

    if out is not None:
        return quick.bench_gpu(GPUBench(out, **options))
    if fitted is not None:
        show(planner.fit(quick.known_lines(fitted), fitted))
        return {}
    show(quick.report(reported).rstrip())
    return {"lines": [line for folder in reported for line in quick.known_lines(folder)]}


def _memory_cells(one: Result) -> list[str]:
    """Return the cells of a configuration in the memory table of `benchmarks planner`."""
    measured = "{name} | {predicted_bytes:mebi} MiB | {peak_bytes:mebi} MiB | {error:+.2%}"
    return cells("{name} | failed: {reason}" if one["reason"] else measured, one)


def _speed_cells(row: Result) -> list[str]:
    """Return the cells of a configuration in the speed table of `benchmarks planner`."""
    measured = "{name} | {predicted:.3f} | {measured:.3f} | {error:+.1%}"
    return cells("{name} | failed: {problem}" if row["problem"] else measured, row)


def _show_planner(result: Result) -> None:
    """Show the result of `benchmarks planner`."""
    if result.get("memory"):
        _show_memory(result)
    if result.get("speed"):
        _show_speed(result["speed"])


def _show_memory(result: Result) -> None:
    good = [one for one in result["memory"] if not one["reason"]]
    worst = sorted(good, key=lambda one: abs(one["error"]), reverse=True)[:5]
    header = ("worst in memory", "predicted", "measured", "error")
    show_table([header, *map(_memory_cells, worst)])
    for one in result["memory"]:
        if one["reason"]:
            show(": ".join(_memory_cells(one)))
    found = result["memory_summary"]
    if found["count"]:
        show(
            f"memory, {found['count']} configurations: 95 of 100 within {found['error_95']:.2%}, "
            f"half within {found['median_error']:.2%}; at most {found['worst_shortage']:.2%} too "
            f"little; a prediction takes {found['prediction_seconds_95']:.1f} s"
        )


def _show_speed(found: Result) -> None:
    rows = [row for row in found["rows"] if not row["problem"]]
    ordered = sorted(rows, key=lambda row: -abs(row["error"]))
    show_table([("speed", "predicted s", "measured s", "error"), *map(_speed_cells, ordered)])
    for row in found["rows"]:
        if row["problem"]:
            show(": ".join(_speed_cells(row)))
    if rows:
        p95_worked = found["p95"]["error_worked"]
        show(
            f"speed, {len(rows)} configurations: 95 of 100 within {found['p95']['error']:.1%}, "
            f"half within {found['median']['error']:.1%} (of the steps' own processor time "
            f"{p95_worked:.1%} "
            f"and {found['median']['error_worked']:.1%}; with the first prediction alone "
            f"{found['p95']['error_first']:.1%}); the machine kept steps waiting for "
            f"{found['waited']:.0%} of the time"
        )


def _show_learning(result: Result) -> None:
    """Show the result of `benchmarks learning`."""
    from benchmarks.learning import HEADER, learning_groups, row_cells, verdicts

    groups = learning_groups(result["runs"])
    for group in groups:
        show_table([(group.title, *HEADER[1:]), *map(row_cells, group.rows)])
    for name, verdict in verdicts(groups).items():
        show(f"{name}: {verdict}")
    for title, problem in result["problems"].items():
        show(f"{title}: failed: {problem}")


def _show_budget(result: Result) -> None:
    """Show the result of `benchmarks budget`."""
    from benchmarks.budget import HEADER, budget_groups, group_cells

    groups = budget_groups(result["runs"])
    show_table([HEADER, *(group_cells(*group) for group in groups.items())])
    for title, problem in result["problems"].items():
        show(f"{title}: failed: {problem}")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def benchmarks() -> None:
    """Compare firstlight with other programs, and measure what its defaults and predictions are
    based on."""


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
    """Compare memory and time of each loading mode with transformers' from_pretrained.

    A checkpoint with random weights is made as one file, in shards and with one file per tensor.
    Each row loads it in a fresh process, from the page cache. Peak host memory is measured relative
    to the process's level after the imports, until the first logits; peak GPU memory is that of
    torch's allocator.
    """
    from benchmarks.loading import bench_loading, draw, parse_count

    measure = partial(bench_loading, LoadingBench(parameters=parse_count(parameters), **options))
    return publish("loading", out, measure, show_loading, draw=draw)


@benchmarks.command("training")
@bench_options(TrainingBench, *STEPS_OPTIONS, "programs", model="NAME|RECIPE.yaml")
@field_option(TrainingBench, "variants", "--set", "SECTION.KEY=VALUE,...")
@bench_options(TrainingBench, "same_environment", "profile", "device", "quick")
@out_option("training")
@with_json
def training_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Compare training with a recipe's default settings to bare loops and other programs.

    A fresh process trains each row for a few steps, on the source of Python's standard library; the
    rows take turns. training.json is rewritten after every run, so an interrupted benchmark keeps
    its measurements. Two additional steps of each run show the shares of forward, backward and
    update.
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
    return publish("training", out, measure, show_training, draw=pictures)


@benchmarks.command("generation")
@bench_options(GenerationBench, "model", model="NAME|CHECKPOINT")
@click.option(
    "--batch-sizes", metavar="N,...", default="1,8", show_default=True, help="Batch sizes."
)
@bench_options(GenerationBench, "prompt_tokens", "new_tokens", "repeats", "rows", "device", "quick")
@out_option("generation")
@with_json
def generation_command(batch_sizes: str, out: Path | None, as_json: bool, **options: Any) -> Result:
    """Compare tokens per second and time to the first token with transformers' generate.

    Each row loads the same weights in a fresh process; the rows take turns. "of the limit" is the
    share of a step's time that reading the weights once would take, at the rate measured for
    copying memory.
    """
    from benchmarks.generation import bench_generation, draw

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': use numbers such as 1,8") from None
    measure = partial(bench_generation, GenerationBench(batch_sizes=sizes, **options))
    return publish("generation", out, measure, show_generation, draw=draw)


@benchmarks.command("scaling")
@bench_options(ScalingBench, model="NAME|RECIPE.yaml")
@out_option("scaling")
@with_json
def scaling_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Measure tokens per second, the share of a step that is not computation, and memory by rank,
    for each engine and number of processes.

    Every process has the same micro-batch size. On a CPU, the processes share the cores, so the
    gain is small and the table shows the overhead of each engine.
    """
    from benchmarks.scaling import bench_scaling, draw

    measure = partial(bench_scaling, ScalingBench(**options))
    return publish("scaling", out, measure, show_scaling, draw=draw)


for command in (
    planner_command,
    learning_command,
    budget_command,
    keeping_command,
    documents_command,
    gpu_command,
):
    benchmarks.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `firstlight.cli.main.main`."""
    find_benchmarks_in_processes()
    return cli.main(arguments, benchmarks, "python -m benchmarks")


def find_benchmarks_in_processes() -> None:
    """Add this package to PYTHONPATH for child processes, whose import path does not include the
    current folder."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))


# Tables of the benchmarks that take minutes.


def show_loading(result: Result) -> None:
    """Show the result of `benchmarks loading`."""
    show_line(
        "{checkpoint[parameters]:,} parameters in {checkpoint[dtype]}, "
        "{checkpoint[file_bytes]:bytes}; {machine[name]}, {machine[threads]} threads; medians of "
        "{repeats}",
        result,
    )
    rows = [
        {
            **row,
            "name": row["name"] + (" (default)" if row["default"] else ""),
            # On a CPU, only the host's memory is used.
            "on_device": cell("{device_peak_bytes:MB}", row) or "no GPU used",
        }
        for row in result["rows"]
    ]
    show_cells(
        "way | peak host memory | / file | / model | peak GPU memory | import | load | first logits"
        " | / transformers",
        "{name} | {peak_bytes:MB} | {peak_to_file:.2f} | {peak_to_model:.2f} | {on_device}"
        " | {import_seconds:.2f} s | {load_seconds:.2f} s | {first_logits_seconds:.2f} s"
        " | {time_to_transformers:.2f}",
        rows,
    )


def show_training(result: Result) -> None:
    """Show the result of `benchmarks training`."""
    machine = result["machine"]
    rates = ", ".join(
        f"{flops / 1e12:,.2f} TFLOP/s in {dtype}" for dtype, flops in machine["ceilings"].items()
    )
    show_steps_head(result)
    show(f"large matrix products: {rates}; the higher is the ceiling")
    # In the user's environment, OpenMP threads wait by spinning, unlike in firstlight's
    # environment.
    programs = {row["program"] for row in result["rows"]}
    spins = not result["same_environment"] and programs != {"firstlight"}
    if machine["load"] is not None and machine["load"] > machine["cpus"] and spins:
        show(
            f"other programs keep this machine busy (load {machine['load']:.1f} on "
            f"{machine['cpus']} CPUs): threads that wait by spinning, as outside of firstlight's "
            "environment, then wait longer; --same-environment removes that difference"
        )
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    show_cells(
        "program | tokens/s | (min-max) | of ceiling | / reference | (min-max) | CPU s/step"
        " | peak memory | / reference | final loss | first step | forward | backward | update",
        "{name} | {tokens_per_second:,.0f}"
        " | ({tokens_per_second_min:,.0f}-{tokens_per_second_max:,.0f}) | {share_of_ceiling:.1%}"
        " | {speed_ratio:.2f}x | ({speed_ratio_min:.2f}-{speed_ratio_max:.2f})"
        " | {cpu_seconds:,.2f} | {total_peak_bytes:GiB} | {memory_ratio:.2f}x | {final_loss:.4f}"
        " | {first_step_seconds:.1f} s | {phases[forward]:.0%} | {phases[backward]:.0%}"
        " | {phases[update]:.0%}",
        measured,
    )
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['name']}: {row['status']}: {row['reason']}")
        elif row["chosen"]:
            chosen = (f"{key} {value}" for key, value in row["chosen"].items())
            show(f"{row['name']}: {', '.join(chosen)}")
    for row in measured:
        if row["operators"]:
            show()
            show_cells(
                f"{row['name']}: operators | share | s/step | calls/step",
                "{operator} | {share:.0%} | {seconds:.3f} | {calls:g}",
                row["operators"],
            )


def show_generation(result: Result) -> None:
    """Show the result of `benchmarks generation`."""
    show_line(
        "{model}, {parameters:,} parameters, {prompt_tokens} tokens of prompt, {new_tokens} new "
        "ones; {machine[name]}, {machine[threads]} threads; memory copied at "
        "{machine[copy_bytes_per_second]:GB/s}",
        result,
    )
    show_cells(
        "row | texts | tokens/s | (min-max) | / transformers bf16 | of the limit"
        " | the cache's gain | first token | first call | peak memory",
        "{name} | {batch_size} | {tokens_per_second:,.1f}"
        " | ({tokens_per_second_min:,.1f}-{tokens_per_second_max:,.1f}) | {speed_ratio:.2f}x"
        " | {share_of_limit:.0%} | {cache_speedup:.2f}x | {first_token_seconds:.3f} s"
        " | {warm_up_seconds:.1f} s | {peak_bytes:bytes}",
        [{**row, **batch} for row in result["rows"] for batch in row["batches"]],
    )
    show_reasons(result["rows"])


def show_scaling(result: Result) -> None:
    """Show the result of `benchmarks scaling`."""
    show_line(
        "{model}, {parameters:,} parameters, {precision}, {micro_batch_size} rows of {seq_len} "
        "tokens per process; {machine[name]}, {machine[cores]} cores",
        result,
    )
    rows = [
        {**row, "peaks": ", ".join(map(human_bytes, row["peak_bytes"]))}
        for row in result["rows"]
        if "tokens_per_second" in row
    ]
    show_cells(
        "engine | processes | tokens/s | / one | not computing | memory by rank",
        "{engine} | {processes} | {tokens_per_second:,.0f} | {speedup:.2f}x | {sharing_share:.0%}"
        " | {peaks}",
        rows,
    )
    show_reasons(
        [{**row, "name": f"{row['engine']}, {row['processes']}"} for row in result["rows"]]
    )


if __name__ == "__main__":
    sys.exit(main())
