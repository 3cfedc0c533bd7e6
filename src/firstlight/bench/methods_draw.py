"""The picture of `firstlight bench methods`: speed and memory of every row."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.bench.methods_run import ALONE, LADDER

_TITLES = {ALONE: "each method alone", LADDER: "each method added to those above it"}


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of `bench_methods`'s result: tokens/s and peak memory, a row of panels a table.

    Rows that failed stand there without a bar; skipped ones are left out.
    """
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = {
        table: shown
        for table in (ALONE, LADDER)
        if (shown := [row for row in result[table] if row["status"] in ("measured", "failed")])
    }
    heights = [len(rows) + 2 for rows in tables.values()]
    figure = Figure(figsize=(13, 0.33 * sum(heights) + 1), layout="constrained")
    if tables:
        grid: Any = figure.subplots(
            len(tables), 2, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for (speed, memory), (table, rows) in zip(grid, tables.items(), strict=True):
            _draw_speed(speed, rows)
            _draw_memory(memory, rows)
            speed.set_title(_TITLES[table], loc="left", fontsize="medium")
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, {result['micro_batch_size']} x {result['seq_len']} tokens; "
        f"{machine['name']}" + ("" if result["complete"] else " (not complete)"),
        parse_math=False,  # a path may have dollar signs
    )
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw_speed(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rates, spread = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
    for row in rows:
        rate = row.get("tokens_per_second", 0.0)
        scale = rate / row["samples_per_second"] if rate else 0.0
        rates.append(rate)
        spread[0].append(rate - scale * row.get("samples_per_second_min", 0.0))
        spread[1].append(scale * row.get("samples_per_second_max", 0.0) - rate)
    _draw_bars(axes, rows, rates, "speed_ratio")
    axes.errorbar(
        rates, range(len(rows)), xerr=spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2
    )
    axes.set(xlabel="tokens/s (median; line: slowest to fastest step)")


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _draw_bars(axes, rows, [row.get("peak_bytes", 0) / 1e9 for row in rows], "memory_ratio")
    axes.set(xlabel="peak memory (GB)")


def _draw_bars(
    axes: Any, rows: Sequence[Mapping[str, Any]], values: Sequence[float], ratio: str
) -> None:
    """Horizontal bars, the first row's in another colour, with the ratio to it at their base."""
    colors = ["tab:orange" if i == 0 else "tab:blue" for i in range(len(rows))]
    axes.barh(range(len(rows)), values, color=colors, height=0.75)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for place, row in enumerate(rows):
        label = "failed" if row["status"] == "failed" else ""
        if row.get(ratio) is not None:
            label = f"{row[ratio]:.2f}x"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
        axes.annotate(
            label,
            (0, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize="x-small",
            bbox=box,
        )
