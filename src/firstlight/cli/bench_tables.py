"""The tables that `firstlight bench ...` prints.

A table is declared by its header and by the templates of a row's cells, both as one string that is
separated by " | "; see `firstlight.bench.tables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.bench.options import Result
from firstlight.bench.tables import UNITS, cell, cells
from firstlight.cli.output import counted, show, show_table


def show_line(template: str, result: Result) -> None:
    """Print a line from a template and a result."""
    show(cell(template, result))


def show_cells(header: str, templates: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table from its header and the templates of its cells, if it has rows."""
    if rows:
        show_table([header.split(" | "), *(cells(templates, row) for row in rows)])


def show_reasons(rows: Sequence[Result]) -> None:
    """Print the reasons of the rows that have no figures."""
    for row in rows:
        if row["reason"]:
            show(f"{row['name']}: {row.get('status', 'failed')}: {row['reason']}")


def show_steps_head(result: Result) -> None:
    """Print the line above the tables of a benchmark that trains for some steps."""
    show_line(
        "{model}, {parameters:,} parameters, {micro_batch_size} x {seq_len} tokens a step; "
        "{machine[name]}, {machine[threads]} threads; medians of {repeats} x {steps} steps",
        result,
    )


def show_methods(result: Result) -> None:
    """Show the result of `bench methods`."""
    machine = result["machine"]
    show_steps_head(result)
    show(
        f"MFU is of {machine['matmul_flops'] / 1e12:,.2f} TFLOP/s, this machine's "
        f"{machine['matmul_dtype']} matrix products; speed and memory are to the first row, on "
        "the CPU above the memory after the imports; the final loss is that of step "
        f"{result['warmup_steps'] + result['steps']}, on the same rows but for the larger batch; "
        "the first step is the compiler's"
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
        ("ladder", "the ladder: each added to those above"),
    ):
        if table == "ladder":
            header += " | to the rung before"
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
    """Show the result of `bench gemm`."""
    machine = result["machine"]
    load = machine["load_at_start"]
    show(
        f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}; medians of "
        f"{counted(result['rounds'], 'round')} (lowest to highest)"
        + ("" if result["complete"] else "; interrupted: not all was measured")
    )
    # The load is an average over a minute: a lower one may come from a command that has just ended.
    if machine["device"] == "cpu" and load is not None and load > 0.5 * machine["threads"]:
        show(f"the load was {load:.1f} at the start: other work takes part of these rates")
    dtypes = list(result["ceilings"])
    ceilings = [UNITS["tera"](rate) for rate in result["ceilings"].values()]
    show_table([("TFLOP/s", *dtypes), ("ceiling (best seen of a large one)", *ceilings)])
    model = f"{result['model']}, {result['tokens']:,} tokens: share of the ceiling"
    step = f"all products of a step of {result['step_tokens']:,} tokens take, at these rates"
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
    _show_by_dtype("padded: time (rate) against unpadded", paddings, dtypes, (padded, ratio))
    for key, title in (
        ("tile", "N around a tile: time (rate) against 256"),
        ("wave", "tiles: time (rate) against one a multiprocessor"),
    ):
        _show_by_dtype(title, result[key], dtypes, ("{to}, work {work_ratio:.3f}", ratio))
    if result["loops"]:
        _show_loops(result["loops"])


def _show_loops(loops: Result) -> None:
    """Print the rates of passes over arrays and of a product in blocks, and waves of products."""
    binary = UNITS["binary"]
    caches = ", ".join(f"{name} {binary(size)}" for name, size in loops["caches"].items())
    title = "one thread reads" + (f" (caches: {caches})" if caches else "")
    waves, spread = loops["waves"], "({lowest:giga}-{highest:giga})"
    show()
    show_cells(
        f"{title} | GB/s", "{bytes:binary} | {bytes_per_second:giga} " + spread, loops["passes"]
    )
    show()
    show_cells(
        f"one thread multiplies fp32, {loops['edge']} square | GFLOP/s",
        "{cut} of {block} | {flops_per_second:giga} " + spread,
        loops["blocks"],
    )
    show()
    show_cells(
        f"products of {waves['edge']} square at once, {waves['threads']} threads"
        " | time / time of one",
        "{products} | {time_ratio:.2f} ({lowest:.2f}-{highest:.2f})",
        waves["rows"],
    )


def _show_by_dtype(
    title: str, found: Sequence[Result], dtypes: Sequence[str], templates: Sequence[str]
) -> None:
    """Print a table with a column for each number format.

    Args:
        title: header of the first column.
        found: results, each of one number format ("dtype").
        dtypes: number formats.
        templates: template of a row's name, and template of its cells.
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
