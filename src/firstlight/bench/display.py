"""Display benchmark results as tables and pictures.

A row of a table is rendered from a string of cell templates separated by " | ". Each template is a
Python format string. In addition to Python's format specifications, it can use the names in
`UNITS`.

Pictures are PNG files that contain panels of horizontal bars. This module also contains helper
functions for other figures.
"""

from __future__ import annotations

import io
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.console import human_bytes


def _binary(size: int) -> str:  # The unit in which processor data sheets specify cache sizes.
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size >> 10} KiB"


#: Additional format specifications for numbers with units, as in "{peak_bytes:GiB}".
UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": human_bytes,
    "MB": lambda size: f"{size / 1e6:,.0f} MB",
    "GiB": lambda size: f"{size / 2**30:,.2f} GiB",
    "mebi": lambda size: f"{size / 2**20:,.0f}",
    "GB/s": lambda rate: f"{rate / 1e9:.1f} GB/s",
    "binary": _binary,
    "giga": lambda rate: f"{rate / 1e9:.3g}",
    "tera": lambda rate: f"{rate / 1e12:.3g}",
}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        unit = UNITS.get(format_spec)
        formatted: str = super().format_field(value, format_spec) if unit is None else unit(value)
        return formatted


def cell(template: str, row: Mapping[str, Any]) -> str:
    """Render one cell of a table row. Return "" if a value that the template uses is missing or
    None."""
    try:
        return _Formatter().vformat(template, (), row)
    except (KeyError, TypeError):  # Formatting or indexing None raises one of these errors.
        return ""


def cells(templates: str, row: Mapping[str, Any]) -> list[str]:
    """Render the cells of a table row from a string of templates separated by " | "."""
    return [cell(template, row) for template in templates.split(" | ")]


@dataclass(frozen=True)
class Panel:
    """A panel of horizontal bars.

    Attributes:
        xlabel: quantity and unit shown on the x axis.
        names: names of the bars, from top to bottom.
        values: lengths of the bars.
        labels: labels next to the bars; None to show the values.
        colors: colors of the bars, or one color for all bars.
        spread: lowest and highest value for each bar, which are shown as error bars; None to omit
            error bars.
        inner: lengths of the thin black bars drawn inside the bars; an empty sequence to omit them.
        line: name and position of a dashed vertical line, such as a target or an upper limit; None
            to omit the line.
        title: heading of the panel.
    """

    xlabel: str
    names: Sequence[str]
    values: Sequence[float]
    labels: Sequence[str] | None = None
    colors: Sequence[str] | str = "tab:blue"
    spread: Sequence[tuple[float, float]] | None = None
    inner: Sequence[float] = ()
    line: tuple[str, float] | None = None
    title: str = ""


def draw_panels(title: str, grid: Sequence[Sequence[Panel]]) -> bytes:
    """Draw panels of bars as a PNG.

    Args:
        title: heading of the picture.
        grid: rows of panels; all rows have the same number of panels.
    """
    # If there are no panels, an empty panel is drawn, because matplotlib requires at least one row.
    grid = grid or [[Panel("", [], [])]]
    heights = [len(panels[0].names) + 3.5 for panels in grid]
    figure = new_figure(13 if len(grid[0]) > 1 else 10, 0.4 * sum(heights) + 0.5)
    ratios = {"height_ratios": heights}
    axes = figure.subplots(len(grid), len(grid[0]), squeeze=False, gridspec_kw=ratios)
    for row, panels in zip(axes, grid, strict=True):
        for number, (place, panel) in enumerate(zip(row, panels, strict=True)):
            _draw(place, panel)
            # If all panels of a row have the same bar names, the names are shown only in the first
            # panel.
            if number and panel.names == panels[0].names:
                place.set_yticklabels([])
    # The title is not parsed as math, because a model path or GPU name can contain dollar signs.
    figure.suptitle(title, parse_math=False)
    return png_of(figure)


def _draw(axes: Any, panel: Panel) -> None:
    places = range(len(panel.names))
    bars = axes.barh(places, panel.values, color=panel.colors)
    if panel.inner:
        axes.barh(places, panel.inner, color="black", height=0.15)
    most = max([*panel.values, 1e-12])
    if panel.spread is not None:
        pairs = list(zip(panel.values, panel.spread, strict=True))
        # The lengths of error bars must not be negative, but rounding errors can put a median
        # outside its spread.
        low = [max(value - least, 0.0) for value, (least, _) in pairs]
        high = [max(greatest - value, 0.0) for value, (_, greatest) in pairs]
        style: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(panel.values, places, xerr=(low, high), **style)
        most = max(most, *(greatest for _, greatest in panel.spread))
    labels = panel.labels
    if labels is None:
        labels = [f"{value:,.0f}" if most >= 10 else f"{value:.2f}" for value in panel.values]
    # Labels at the ends of the bars would overlap the error bars.
    place = "center" if panel.spread is not None else "edge"
    axes.bar_label(bars, labels, label_type=place, padding=0 if place == "center" else 3)
    axes.set_yticks(places, panel.names, parse_math=False)
    axes.invert_yaxis()
    if panel.line is not None:
        name, value = panel.line
        axes.axvline(value, color="black", linestyle="--", linewidth=0.8, label=name)
        axes.legend(loc="lower right", fontsize="small")
        most = max(most, value)
    axes.set(xlabel=panel.xlabel, xlim=(0, 1.15 * most))
    axes.set_title(panel.title, loc="left", fontsize="medium")


def new_figure(width: float, height: float) -> Any:
    """Create an empty matplotlib figure with a size in inches.

    pyplot is not used, because it would look for a window system and keep global state.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png_of(figure: Any) -> bytes:
    """Return a matplotlib figure as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()
