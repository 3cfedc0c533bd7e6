"""The page and the picture of `python -m benchmarks budget`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.budget_once import FAR_ABOVE
from firstlight.bench.pictures import new_figure, png_of
from firstlight.bench.tables import markdown_table
from firstlight.console import rounded


def budget_groups(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs by text and budget ("TEXT, BUDGET"), each group in the order of its trials."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["trial"]):
        groups.setdefault(f"{run['text']}, {run['budget']}", []).append(run)
    # Without a run of the chosen settings, there is nothing to compare a random search with.
    return {title: own for title, own in groups.items() if own[0]["trial"] == 0}


HEADER = (
    *("text, budget", "chosen", "expected", "best of random", "ended early", "chosen over best"),
    *("gzip -9", "xz", "seconds", "parameters"),
)


def group_cells(title: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A row of the table (see HEADER): the run of the chosen settings, and the random draws."""
    chosen, ended = runs[0], [run for run in runs if run["bits_per_byte"] is None]
    draws = [run["bits_per_byte"] for run in runs[1:] if run not in ended]
    low, high = chosen["expected"]
    bits = chosen["bits_per_byte"]
    is_inside = "" if low <= bits <= high else ", missed"
    return (
        title,
        f"{bits:.4f}",
        f"{low:.2f} to {high:.2f}{is_inside}",
        f"{min(draws):.4f} of {len(runs) - 1}" if draws else "all ended early" if ended else "",
        f"{len(ended)}",
        f"{bits / min(draws) - 1:+.1%}" if draws else "",
        *("" if chosen[key] is None else f"{chosen[key]:.3f}" for key in ("gzip", "xz")),
        f"{chosen['seconds']:.0f}",
        rounded(chosen["parameters"]),
    )


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of every run's bits per byte: a dot for a random draw, a circle for one that was ended
    early, a line for chosen settings."""
    groups = budget_groups(result["runs"])
    figure = new_figure(10, 0.8 * len(groups) + 1.5)
    axes = figure.subplots()
    for place, (title, runs) in enumerate(groups.items()):
        chosen = runs[0]["bits_per_byte"]
        for run in runs[1:]:
            bits, fill = run["bits_per_byte"], "full"
            if bits is None:
                bits, fill = run["curve"][-1][1], "none"
            axes.plot(bits, place, "o", color="tab:gray", alpha=0.6, fillstyle=fill)
        axes.plot([chosen] * 2, [place - 0.35, place + 0.35], color="tab:red", linewidth=3)
        low, high = runs[0]["expected"]
        axes.fill_betweenx([place - 0.2, place + 0.2], low, high, color="tab:red", alpha=0.12)
        axes.annotate(title, (chosen, place - 0.38), fontsize="small", parse_math=False)
    axes.set_yticks([])
    # Downwards, with space for the first title.
    axes.set_ylim(len(groups) - 0.5, -0.75)
    axes.set_xlabel(
        "held-out bits per byte (red: chosen, with the expected range; gray: random settings, "
        "circles: ended early)"
    )
    return png_of(figure)


def page(result: Mapping[str, Any], picture: str) -> str:
    """The page of the results, in Markdown.

    Args:
        result: result of `bench_budget`.
        picture: address of the picture.
    """
    machine, groups = result["machine"], budget_groups(result["runs"])
    name = f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}"
    limits = ", ".join(f"{most:.0%} after {start:.0%}" for start, most in reversed(FAR_ABOVE))
    parts = [_HEAD.format(machine=name, limits=limits)]
    parts.append(markdown_table(HEADER, [group_cells(*group) for group in groups.items()]))
    parts.append(f"![bits per byte of chosen and of random settings]({picture})\n")
    return "\n".join(parts)


_HEAD = """\
# Budget: chosen settings beside a random search

    python -m benchmarks budget --out DIR --corpus stdlib --corpus FILE --page docs/benchmarks/budget.md

`make benchmarks NAMES=budget` calls it with three texts and budgets of 3, 10 and 30 minutes. Each
run is the whole command `firstlight train TEXT --budget TIME` in a process of its own. The random
search draws vocabulary, width, depth, sequence length, batch, learning rates, weight decay, the
decay's part of the schedule and the passes over the text; all else is as chosen. Bits per byte are
those of the whole held-out text after training. The best of the random search is the best of its
results on this same text. Seconds are those of the chosen run's whole command. Two budgets give the
same random run if its passes over the text end before both; it is measured once.

A random run is ended early if its bits per byte exceed those of the chosen settings at the same
share of their steps by more than {limits} of the steps. They are those
of an evaluation, but before the first one those of the training loss. The run's circle in the
picture shows the last of them. Evaluations in a run may be of a sample of the held-out text.

Machine: {machine}.
"""
