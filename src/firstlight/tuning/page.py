"""The results of `firstlight tune`: a picture of the loss against each key, and a table."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.console import compact
from firstlight.tuning.space import SearchKey, show_value

#: Number of panels in a row of the picture.
_COLUMNS = 3

#: Maximum number of ticks on the x axis of a panel.
_TICKS = 5

#: The y axis ends at the best loss plus this multiple of the median's distance from it; higher
#: losses are drawn at this edge.
_SPAN = 2.5

Line = Mapping[str, Any]


def in_order(lines: Sequence[Line]) -> list[Line]:
    """The trials, the best first: complete trials by their loss, then pruned trials by the fraction
    of their steps, then failed trials."""
    ranks = {"complete": 0, "pruned": 1, "failed": 2}

    def place(line: Line) -> tuple[Any, ...]:
        share = line["step"] / line["steps"] if line["state"] == "pruned" else 0.0
        return (ranks[line["state"]], -share, line["objective"] or 0.0, line["trial"])

    return sorted(lines, key=place)


def table(keys: Sequence[SearchKey], objective: str, lines: Sequence[Line]) -> list[list[str]]:
    """The table of the trials, the best first: rows of cells, of which the first is the header."""
    names = [one.key.partition(".")[2] for one in keys]
    rows = [["trial", objective, *names, "steps", ""]]
    for line in in_order(lines):
        values = [
            show_value(line["values"][one.key]) if one.key in line["values"] else "" for one in keys
        ]
        loss = "" if line["objective"] is None else f"{line['objective']:.4f}"
        notes = [line["state"]] if line["state"] != "complete" else []
        if line["trial"] == 1:
            notes.insert(0, "the recipe's own values")
        rows.append([str(line["trial"]), loss, *values, f"{line['step']:,}", ", ".join(notes)])
    return rows


def draw(keys: Sequence[SearchKey], objective: str, lines: Sequence[Line]) -> bytes:
    """A PNG of the loss against each key, and of the loss curves of all trials.

    Args:
        keys: the searched keys.
        objective: name of the loss.
        lines: lines of the trials, of which at least one is complete.
    """
    from matplotlib.figure import Figure

    lines = [line for line in lines if line["objective"] is not None]
    best = in_order(lines)[0]
    ends = [line["objective"] for line in lines if line["state"] == "complete"]
    lowest = best["objective"]
    top = lowest + max(_SPAN * (statistics.median(ends) - lowest), 0.01 * lowest)
    columns = min(len(keys) + 1, _COLUMNS)
    rows = -(-(len(keys) + 1) // columns)
    # Without pyplot, which would look for a window system and keep global state.
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, key in zip(axes, keys, strict=False):
        _draw_key(place, key, lines, best, top=top)
    _draw_curves(axes[len(keys)], lines, best)
    for place in axes[len(keys) + 1 :]:
        place.set_axis_off()
    figure.supylabel(objective, fontsize="medium")
    figure.suptitle(
        "star: best trial; dotted: the recipe's own value; cross: ended early; triangle: above the "
        "edge; pale: an early trial",
        fontsize="small",
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_key(place: Any, key: SearchKey, lines: Sequence[Line], best: Line, *, top: float) -> None:
    numbers = {text: number for number, text in enumerate(key.choices)}
    if key.choices:
        place.set_xticks(range(len(key.choices)), key.choices, parse_math=False)
        place.set_xlim(-0.5, len(key.choices) - 0.5)
    elif key.log:
        place.set_xscale("log")
        ticks = [n * 10.0**power for power in range(-12, 7) for n in (1, 2, 5)]
        ticks = [tick for tick in ticks if key.low <= tick <= key.high]
        # Matplotlib's own tick labels overlap on an axis of one or two decades.
        place.set_xticks(ticks[:: -(-len(ticks) // _TICKS) or 1])
        place.minorticks_off()
        place.xaxis.set_major_formatter(lambda tick, _: compact(tick))
    for line in lines:
        if key.key not in line["values"]:
            continue
        value, loss = line["values"][key.key], line["objective"]
        x = numbers[value] if key.choices else value
        if line["trial"] == 1:
            place.axvline(x, color="black", linestyle=":", linewidth=0.9)
        if line is best:
            place.scatter(x, loss, marker="*", color="tab:red", s=160, zorder=3)
        elif line["state"] == "pruned":
            place.scatter(x, min(loss, top), marker="x", color="tab:gray", s=28)
        else:
            # Later trials are darker, which shows where the sampler narrowed the search.
            shade = 0.35 + 0.65 * line["trial"] / max(one["trial"] for one in lines)
            marker = "^" if loss > top else "o"
            place.scatter(x, min(loss, top), marker=marker, color="tab:blue", s=28, alpha=shade)
    place.set_title(key.key, loc="left", fontsize="medium", parse_math=False)
    place.margins(y=0.08)


def _draw_curves(place: Any, lines: Sequence[Line], best: Line) -> None:
    for line in sorted(lines, key=lambda line: line is best):
        x = [100 * step / line["steps"] for _, step, _, _ in line["curve"]]
        is_best = line is best
        color = "tab:gray" if line["state"] == "pruned" else "tab:blue"
        place.plot(
            x,
            [loss for *_, loss in line["curve"]],
            color="tab:red" if is_best else color,
            alpha=1.0 if is_best else 0.45,
            linewidth=1.2,
        )
    # The axis ends at the curves' second points: their first points are far above all others.
    second = [line["curve"][1][3] for line in lines if len(line["curve"]) > 1]
    if second:
        lowest, highest = best["objective"], statistics.median(second)
        margin = 0.05 * abs(highest - lowest)
        place.set_ylim(lowest - margin, max(highest, lowest) + 3 * margin)
    place.set_title("by the share of a trial, in per cent", loc="left", fontsize="medium")
