"""The numbers and the picture of `firstlight bench training`."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.recipe import Recipe

FIRSTLIGHT, REFERENCE = "firstlight", "reference"


@dataclass(frozen=True)
class Row:
    """One program, with the recipe that it follows."""

    name: str
    program: str
    recipe: Recipe


def summarize(
    rows: Sequence[Row], replies: Mapping[str, Sequence[Mapping[str, Any]]], head: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The medians of each row and their ratios to the reference.

    Args:
        rows: all.
        replies: by their names, what `training_once` said, a turn each.
        head: "seq_len", "micro_batch_size", "flops_per_token" and "machine" of the result.

    Returns:
        For each row its "name", "program", "status" ("measured", "failed", "waiting"), the
        "reason" for that, and where it is measured: "tokens_per_second", the median over all
        timed steps, with "_min" and "_max"; "share_of_ceiling"; "cpu_seconds" a step;
        "total_peak_bytes" and "peak_bytes"; to the row "reference" (None without it)
        "speed_ratio", with the "_min" and "_max" of the turns' own, and "memory_ratio", of the
        total peaks; "final_loss", the last step's; "first_step_seconds" of the first turn;
        "chosen"; "runs".
    """
    runs = {
        row.name: [reply for reply in replies[row.name] if "error" not in reply] for row in rows
    }
    result = [_summary(row, replies[row.name], runs[row.name], head) for row in rows]
    base = next(
        (entry for entry in result if (entry["name"], entry["status"]) == (REFERENCE, "measured")),
        None,
    )
    for entry in result:
        if base is not None and entry["status"] == "measured":
            ratios = turn_ratios(runs[entry["name"]], runs[REFERENCE])
            entry["speed_ratio"] = entry["tokens_per_second"] / base["tokens_per_second"]
            entry["speed_ratio_min"], entry["speed_ratio_max"] = min(ratios), max(ratios)
            entry["memory_ratio"] = entry["total_peak_bytes"] / base["total_peak_bytes"]
    return result


def turn_ratios(
    runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> list[float]:
    """By how much the median step of each turn was faster than that of the base."""
    return [
        statistics.median(theirs["step_seconds"]) / statistics.median(ours["step_seconds"])
        for ours, theirs in zip(runs, base, strict=False)
    ]


def _summary(
    row: Row,
    replies: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    head: Mapping[str, Any],
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name, "program": row.program}
    problem = next((reply["error"]["message"] for reply in replies if "error" in reply), "")
    if not runs:
        status = "failed" if problem else "waiting"
        return {**entry, "status": status, "reason": problem or "not measured yet"}
    tokens = head["seq_len"] * head["micro_batch_size"]
    rates = [tokens / seconds for run in runs for seconds in run["step_seconds"]]
    rate = statistics.median(rates)
    best = max(head["machine"]["ceilings"].values())
    return {
        **entry,
        "status": "measured",
        "reason": problem,
        "tokens_per_second": rate,
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "share_of_ceiling": rate * head["flops_per_token"] / best,
        "cpu_seconds": statistics.median(s for run in runs for s in run["step_cpu_seconds"]),
        "total_peak_bytes": statistics.median(run["total_peak_bytes"] for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "speed_ratio": None,
        "speed_ratio_min": None,
        "speed_ratio_max": None,
        "memory_ratio": None,
        "final_loss": statistics.median(run["losses"][-1] for run in runs),
        "first_step_seconds": runs[0]["first_step_seconds"],
        "chosen": runs[0]["chosen"],
        "runs": [dict(run) for run in runs],
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of `bench_training`'s result: tokens/s and peak memory of each row."""
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["status"] == "measured"]
    figure = Figure(figsize=(12, 0.5 * len(rows) + 1.6), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [row["name"].replace(",", ",\n") for row in rows]
    colors = ["tab:blue" if row["program"] == FIRSTLIGHT else "tab:orange" for row in rows]
    rates = [row["tokens_per_second"] for row in rows]
    spread = [
        [row["tokens_per_second"] - row["tokens_per_second_min"] for row in rows],
        [row["tokens_per_second_max"] - row["tokens_per_second"] for row in rows],
    ]
    bars = speed.barh(range(len(rows)), rates, color=colors, xerr=spread, capsize=3)
    speed.bar_label(
        bars,
        ["" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}x" for row in rows],
        label_type="center",
    )
    speed.set_yticks(range(len(rows)), names)
    speed.set(xlabel="tokens/s (median; line: slowest to fastest step)")
    peaks = [row["total_peak_bytes"] / 2**30 for row in rows]
    memory.barh(range(len(rows)), peaks, color=colors)
    memory.set(xlabel="peak memory (GiB)")
    speed.invert_yaxis()
    figure.suptitle(
        f"{result['model']}, {result['micro_batch_size']} x {result['seq_len']} tokens a step; "
        f"{result['machine']['name']}" + ("" if result["complete"] else " (not complete)")
    )
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()
