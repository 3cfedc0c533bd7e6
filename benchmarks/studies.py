"""The commands of benchmarks that take an hour or more, and their tables.

All of them except `planner` continue where an earlier call stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.options import BudgetBench, GPUBench, LearningBench
from firstlight.bench.options import Keep, Result
from firstlight.bench.tables import cells
from firstlight.cli.bench_options import bench_options, publish
from firstlight.cli.options import field_option, path_option
from firstlight.cli.output import show, show_table, with_json
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.files.atomic import write_file

#: Option --out of benchmarks that continue where an earlier call stopped; it is required.
folder_option = path_option(
    *("--out", "folder"),
    required=True,
    help="Folder of texts and results; go on with what it holds already.",
)
#: Option --page, the file of a page in Markdown.
page_option = path_option(
    *("--page", "page_file"),
    metavar="FILE",
    help="Write a page of all results here, its picture into ../images.",
)


def write_page(
    file: Path | None,
    result: Result,
    draw: Callable[[Result], bytes],
    page: Callable[[Result, str], str],
) -> None:
    """Write a page and its picture, if `file` is given.

    Args:
        file: file of the page, in Markdown; None writes none.
        result: result of the benchmark.
        draw: function that draws a result as PNG.
        page: function from a result and the picture's relative path to the text of the page.
    """
    if file is None:
        return
    picture = file.parent.parent / "images" / f"{file.stem}.png"
    write_file(picture, draw(result))
    write_file(file, page(result, f"../images/{picture.name}"))
    show(f"written: {file}, {picture}")


@click.command("planner")
@click.option(
    "--only", type=click.Choice(["memory", "speed"]), help="One half; else both, memory first."
)
@click.option("--quick", is_flag=True, help="Every eighth configuration of memory, fewer of speed.")
@path_option("--out", help="Write planner.json and pictures here.")
@with_json
def planner_command(only: str | None, quick: bool, out: Path | None, as_json: bool) -> Result:
    """Compare the planner's predictions with real training steps on this machine's CPU: peak memory
    of some 80 configurations, and speed of ten.

    Takes most of an hour. Each measurement is printed and written to planner.json at once.
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

    return publish("planner", out, measure, _show_planner, pictures)


@click.command("learning")
@folder_option
@field_option(LearningBench, "corpora", "--corpus", "stdlib|FILE|bytes:FILE")
@bench_options(LearningBench, "sizes", "rows")
@field_option(LearningBench, "variants", "--set", "ROW:SECTION.KEY=VALUE,...")
@bench_options(LearningBench, "seeds", "tokens", "minutes", "held_out_tokens")
@page_option
@with_json
def learning_command(folder: Path, page_file: Path | None, as_json: bool, **options: Any) -> Result:
    """Held-out bits per byte of recipes after the same tokens or the same time.

    Each run trains one recipe with one of several seeds; the recipes take turns for each seed.
    results.jsonl in --out has each finished run; the same command continues where the last one
    stopped. Seconds count training steps alone.
    """
    from benchmarks.learning import bench_learning
    from benchmarks.learning_page import draw, page

    measure = partial(bench_learning, LearningBench(folder, **options))
    result = publish("learning", folder, measure, _show_learning, draw)
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
    """The settings that `train TEXTS --budget` chooses, beside random settings.

    Each run is the whole command in a process of its own, within the budget of wall-clock time.
    results.jsonl in --out has each finished run; the same command goes on where the last one
    stopped.
    """
    from benchmarks.budget import bench_budget
    from benchmarks.budget_page import draw, page

    measure = partial(bench_budget, BudgetBench(folder, **options))
    result = publish("budget", folder, measure, _show_budget, draw)
    write_page(page_file, result, draw, page)
    return result


@click.command("gpu")
@path_option(
    "--out",
    help="Measure, and write results.json into this folder; go on with what it holds already.",
)
@bench_options(GPUBench, "minutes", "parts", "dry", "retry")
@path_option(
    "--report",
    "report_of",
    metavar="DIR",
    help="Measure nothing: write the pages of the results in this folder.",
)
@path_option(
    "--pages",
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
    from benchmarks.gpu import bench_gpu, report

    def written(folder: Path, place: Path | None) -> list[str]:
        names = [str(path) for path in report(folder, place)]
        show(f"written: {', '.join(names)}")
        return names

    if (out is None) == (report_of is None):
        raise ConfigError(
            "benchmarks gpu takes --out DIR to measure, or --report DIR to write the pages"
        )
    if report_of is not None:
        return {"written": written(report_of, pages)}
    assert out is not None
    result = bench_gpu(GPUBench(out, dry=dry, **options))
    _show_gpu(result)
    if dry:
        result["written"] = written(out, pages or out / "pages")
    return result


def _memory_cells(one: Result) -> list[str]:
    """The cells of a configuration in the table of memory of `benchmarks planner`."""
    measured = "{name} | {predicted_bytes:mebi} MiB | {peak_bytes:mebi} MiB | {error:+.2%}"
    return cells("{name} | failed: {reason}" if one["reason"] else measured, one)


def _speed_cells(row: Result) -> list[str]:
    """The cells of a configuration in the table of speed of `benchmarks planner`."""
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
            f"half within {found['median']['error']:.1%} (of the steps' own work {p95_worked:.1%} "
            f"and {found['median']['error_worked']:.1%}; by the first prediction alone "
            f"{found['p95']['error_first']:.1%}); the machine kept steps waiting for "
            f"{found['waited']:.0%} of the time"
        )


def _show_learning(result: Result) -> None:
    """Show the result of `benchmarks learning`."""
    from benchmarks.learning_page import HEADER, learning_groups, row_cells, verdicts

    groups = learning_groups(result["runs"])
    for group in groups:
        show_table([(group.title, *HEADER[1:]), *map(row_cells, group.rows)])
    for name, verdict in verdicts(groups).items():
        show(f"{name}: {verdict}")
    for title, problem in result["problems"].items():
        show(f"{title}: failed: {problem}")


def _show_budget(result: Result) -> None:
    """Show the result of `benchmarks budget`."""
    from benchmarks.budget_page import HEADER, budget_groups, group_cells

    groups = budget_groups(result["runs"])
    show_table([HEADER, *(group_cells(*group) for group in groups.items())])
    for title, problem in result["problems"].items():
        show(f"{title}: failed: {problem}")


def _show_gpu(result: Result) -> None:
    """Show the result of `benchmarks gpu`."""
    machine = result["machine"]
    show(
        f"{machine['name']}, torch {machine['torch']}: {result['measured']} of {result['rows']} "
        f"rows measured; {result['results']}"
    )
    for kind in ("failed", "skipped"):
        for name, reason in result[kind].items():
            show(f"{kind}: {name}: {reason}")
    if result["left"]:
        minutes = result["left_seconds"] / 60
        show(f"left for the next call: {len(result['left'])} turns, about {minutes:.0f} minutes")
