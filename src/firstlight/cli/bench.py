"""`firstlight bench`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from firstlight.bench.display import UNITS, cell, cells
from firstlight.bench.rows import GemmBench, Keep, MethodsBench, Result
from firstlight.cli.options import config_options, path_option
from firstlight.cli.output import show, show_table, with_json
from firstlight.console import counted
from firstlight.files.atomic import write_file, write_json

C = TypeVar("C", bound=Callable[..., Any])


#: Decorator that adds options for the fields of a class in `firstlight.bench.rows`. The arguments
#: are those of `config_options`.
bench_options = functools.partial(config_options, only_on=True)

#: Options of all benchmarks in which models are trained for a few steps. In --help, they are listed
#: before the options that are specific to a benchmark.
STEPS_OPTIONS = ("model", "seq_len", "micro_batch_size", "steps", "repeats")


def out_option(name: str, default: str | None = None) -> Callable[[C], C]:
    """Return a decorator that adds the option --out to a command. The option specifies the folder
    for the results.

    Args:
        name: name of the result files, without suffix.
        default: default folder. None to write no files by default.
    """
    return path_option(
        "--out",
        default=default,
        show_default=True,
        help=f"Write {name}.json and {name}.png to this folder.",
    )


def publish(
    name: str,
    out: Path | None,
    measure: Callable[[Keep], object],
    show_result: Callable[[Result], None],
    draw: Callable[[Result], bytes | dict[str, bytes]],
) -> Result:
    """Run a benchmark, print its tables and write its result files.

    If `measure` is interrupted, the results obtained so far are printed and written.

    Args:
        name: name of the result files in `out`, without suffix. The JSON file is rewritten after
            every measurement.
        out: folder for the result files. None to write no files.
        measure: function that runs the benchmark. Its argument is a function, which it must call
            with each intermediate result.
        show_result: function that prints a result as tables.
        draw: function that plots a result. It returns the bytes of a PNG file or, if there are
            several plots, a dict from file name to bytes.

    Returns:
        The last result that `measure` produced.
    """
    result: Result = {}

    def keep(so_far: Result) -> None:
        result.update(so_far)
        if out is not None:
            write_json(out / f"{name}.json", so_far)

    try:
        measure(keep)
    finally:
        if result:
            show_result(result)
        if result and out is not None:
            picture = draw(result)
            drawn = {f"{name}.png": picture} if isinstance(picture, bytes) else picture
            for file, content in drawn.items():
                write_file(out / file, content)
            show(f"written: {', '.join(str(out / file) for file in (f'{name}.json', *drawn))}")
    return result


#: Names of benchmarks that exist only in a source checkout.
_IN_CHECKOUT = (
    "loading",
    "training",
    "generation",
    "scaling",
    "planner",
    "learning",
    "budget",
    "gpu",
)


class _Benches(click.Group):
    """Command group for benchmarks. If a user runs a benchmark that exists only in a source
    checkout, the error message shows the command to run in the checkout.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _IN_CHECKOUT:
            raise click.UsageError(
                f"bench {args[0]} is not part of the package: run python -m benchmarks {args[0]} "
                "in a checkout of firstlight"
            )
        return super().resolve_command(ctx, args)


@click.group("bench", cls=_Benches)
def bench_group() -> None:
    """Measure the effect of settings on this machine."""


@bench_group.command("methods")
@bench_options(
    MethodsBench,
    *STEPS_OPTIONS,
    "rows",
    "device",
    "quick",
    model="NAME|RECIPE.yaml",
)
@out_option("methods", "methods-bench")
@with_json
def methods_command(out: Path, as_json: bool, **options: Any) -> Result:
    """Measure the speed and memory of each efficiency method on this machine.

    There are two tables. The first table compares each method on its own with a plain fp32 run. In
    the second table, each row adds one more method to the methods of the row before it. Each row is
    measured in a new process that trains a model for a few steps on the source code of Python's
    standard library. The file methods.json is rewritten after every run, so an interrupted
    benchmark keeps its measurements.
    """
    from firstlight.bench.methods import bench_methods, draw

    measure = partial(bench_methods, MethodsBench(**options))
    return publish("methods", out, measure, show_methods, draw=draw)


@bench_group.command("gemm")
@bench_options(GemmBench, "device", "dtype", "model", "quick")
@out_option("gemm")
@with_json
def gemm_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """Measure the speed of matrix products on this machine.

    The benchmark measures how the speed depends on the shapes of the matrices, and how much aligned
    sizes improve it. It multiplies square matrices of increasing size, matrices of the shapes in a
    GPT-2 training step, and matrices whose sizes are just below or above a multiple of the tile
    size. It compares unpadded sizes with sizes padded to multiples of 8, 64 and 128. On a CPU, it
    also measures passes over arrays that fit in the L1 cache, in larger caches or only in main
    memory, and matrix products computed in blocks. If it is stopped with Ctrl-C, the measurements
    made so far are kept.
    """
    from firstlight.bench.gemm import GemmRun, draw

    run = GemmRun(GemmBench(**options))

    def measure(keep: Keep) -> None:
        try:
            run.measure()
        finally:
            if run.result()["rows"]:
                keep(run.result())

    return publish("gemm", out, measure, show_gemm, draw=draw)


# The tables.


def show_line(template: str, result: Result) -> None:
    """Fill in a template with the values of a result, and print it as one line."""
    show(cell(template, result))


def show_cells(header: str, templates: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table. A table without rows is not printed.

    Args:
        header: header cells, separated by " | ".
        templates: templates of the cells in a row, separated by " | ". `bench.display` describes
            their syntax.
        rows: values to fill in, with one entry per row.
    """
    if rows:
        show_table([header.split(" | "), *(cells(templates, row) for row in rows)])


def show_reasons(rows: Sequence[Result]) -> None:
    """Print why some rows of a table were not measured."""
    for row in rows:
        if row["reason"]:
            show(f"{row['name']}: {row.get('status', 'failed')}: {row['reason']}")


def show_steps_head(result: Result) -> None:
    """Print the line above the tables of a benchmark in which models train for a few steps."""
    show_line(
        "{model}, {parameters:,} parameters, {micro_batch_size} x {seq_len} tokens per step; "
        "{machine[name]}, {machine[threads]} threads; medians of {repeats} x {steps} steps",
        result,
    )


def show_methods(result: Result) -> None:
    """Print the result of `bench methods`."""
    machine = result["machine"]
    show_steps_head(result)
    show(
        f"MFU is relative to {machine['matmul_flops'] / 1e12:,.2f} TFLOP/s, this machine's rate of "
        f"{machine['matmul_dtype']} matrix products. Speed and memory are relative to the first "
        "row. On a CPU, memory excludes the memory in use after the imports. The final loss is the "
        f"loss of step {result['warmup_steps'] + result['steps']}; all methods except the larger "
        "batch train on the same rows. The first step includes compilation."
    )
    header = (
        "samples/s | (min-max) | tokens/s | MFU | peak memory | speed | memory | final loss"
        " | first step"
    )
    templates = (
        "{name} ({micro_batch_size}x{gradient_accumulation_steps}{more})"
        " | {samples_per_second:,.2f}"
        " | ({samples_per_second_min:,.2f}-{samples_per_second_max:,.2f})"
        " | {tokens_per_second:,.0f} | {mfu:.1%} | {peak_bytes:bytes} | {speed_ratio:.2f}x"
        " | {memory_ratio:.2f}x | {final_loss:.4f} | {first_step_seconds:.1f} s"
    )
    for table, title in (
        ("alone", "each method alone"),
        ("ladder", "ladder: each method added to those above"),
    ):
        if table == "ladder":
            header += " | vs previous row"
            templates += " | {ratio_to_previous:.2f}x"
        measured = [
            {**row, "more": f", {row['processes']} processes" if row["processes"] > 1 else ""}
            for row in result[table]
            if row["status"] == "measured"
        ]
        if measured:
            show()
            show_cells(f"{title} | {header}", templates, measured)
        show_reasons(result[table])


def show_gemm(result: Result) -> None:
    """Print the result of `bench gemm`."""
    machine = result["machine"]
    load = machine["load_at_start"]
    show(
        f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}; medians of "
        f"{counted(result['rounds'], 'round')} (lowest to highest)"
        + ("" if result["complete"] else "; interrupted: some measurements are missing")
    )
    # The load is an average over one minute. Do not report a load below half of the number of
    # threads, because it may have been caused by a command that has just ended.
    if machine["device"] == "cpu" and load is not None and load > 0.5 * machine["threads"]:
        show(f"the load average was {load:.1f} at the start: other processes lower these rates")
    dtypes = list(result["ceilings"])
    ceilings = [UNITS["tera"](rate) for rate in result["ceilings"].values()]
    show_table([("TFLOP/s", *dtypes), ("ceiling (best of a large product)", *ceilings)])
    model = f"{result['model']}, {result['tokens']:,} tokens: share of the ceiling"
    step = f"time of all products in a step of {result['step_tokens']:,} tokens, at these rates"
    rate = "{flops_per_second:tera} ({lowest:tera}-{highest:tera})"
    ratio = "{time_ratio:.2f} ({rate_ratio:.2f}) [{lowest:.2f}-{highest:.2f}]"
    parts = (
        ("size", "square", "{name}", rate),
        ("model", model, "{name} {m} x {n} x {k} {layout}", rate + " {share_of_ceiling:4.0%}"),
        (
            "step",
            step,
            "weights as {weights}, vocabulary {vocabulary}",
            "{seconds:.3g} s, {share_of_ceiling:.0%} of the ceiling",
        ),
    )
    for key, title, *templates in parts:
        found = result["rows"] if key in ("size", "model") else result[key]
        found = [row for row in found if row.get("part", key) == key]
        _show_by_dtype(title, found, dtypes, templates)
    padded = "{group} {from} -> {to}{all}, work {work_ratio:.3f}"
    paddings = [
        {**row, "all": f" (to {', '.join(map(str, row['multiples']))})" if row["multiples"] else ""}
        for row in result["padding"]
    ]
    _show_by_dtype("padded: time (rate) relative to unpadded", paddings, dtypes, (padded, ratio))
    for key, title in (
        ("tile", "N around a tile: time (rate) relative to 256"),
        ("wave", "tiles: time (rate) relative to one tile per multiprocessor"),
    ):
        _show_by_dtype(title, result[key], dtypes, ("{to}, work {work_ratio:.3f}", ratio))
    if result["loops"]:
        _show_loops(result["loops"])


def _show_loops(loops: Result) -> None:
    """Print the speed of passes over arrays, the speed of matrix products computed in blocks, and
    the duration of concurrent matrix products.
    """
    binary = UNITS["binary"]
    caches = ", ".join(f"{name} {binary(size)}" for name, size in loops["caches"].items())
    title = "array read by one thread" + (f" (caches: {caches})" if caches else "")
    waves, spread = loops["waves"], "({lowest:giga}-{highest:giga})"
    show()
    show_cells(
        f"{title} | GB/s", "{bytes:binary} | {bytes_per_second:giga} " + spread, loops["passes"]
    )
    show()
    show_cells(
        f"fp32 product of {loops['edge']} x {loops['edge']} by one thread | GFLOP/s",
        "{cut} of {block} | {flops_per_second:giga} " + spread,
        loops["blocks"],
    )
    show()
    show_cells(
        f"concurrent products of {waves['edge']} x {waves['edge']}, {waves['threads']} threads"
        " | time / time of a single product",
        "{products} | {time_ratio:.2f} ({lowest:.2f}-{highest:.2f})",
        waves["rows"],
    )


def _show_by_dtype(
    title: str, found: Sequence[Result], dtypes: Sequence[str], templates: Sequence[str]
) -> None:
    """Print a table with one column per number format.

    Args:
        title: header of the first column.
        found: results. The key "dtype" of each result is its number format.
        dtypes: number formats, in the order of the columns.
        templates: a template for the name of a row, and a template for its cells.
    """
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        name, rate = (cell(template, one) for template in templates)
        rows.setdefault(name, {})[one["dtype"]] = rate
    if rows:
        show()
        show_table(
            [(title, *dtypes)]
            + [(name, *(row.get(dtype, "") for dtype in dtypes)) for name, row in rows.items()]
        )
