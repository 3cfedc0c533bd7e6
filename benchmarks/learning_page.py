"""The results of `benchmarks learning`: figures, pictures and the page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.learning_rows import LearningRow, find_row
from firstlight.bench.pictures import new_figure, png_of
from firstlight.bench.tables import cell, markdown_table

#: Minimum of seeds for a verdict; minimum of a gain that counts, in standard deviations.
_SEEDS, _LEAST_GAIN = 3, 2.0

#: Number of the best rows in a panel of the picture.
_BEST = 4


@dataclass(frozen=True)
class RowFigures:
    """The runs of a row in a group, which differ in their seeds.

    Attributes:
        name: name of the row.
        row: the recipe.
        runs: the row's lines of results.jsonl.
        over: name of the row with which this one is compared: the one that it changes, or that it
            replaced as the default; the baseline for other complete recipes.
        compared: the runs of that row; empty for the baseline itself, and if there are none.
        goal: mean bits per byte at the end of the baseline's curve.
    """

    name: str
    row: LearningRow
    runs: Sequence[Mapping[str, Any]]
    over: str
    compared: Sequence[Mapping[str, Any]]
    goal: float

    @property
    def bits_per_byte(self) -> float:
        """Final bits per byte of the held-out text, the mean over the seeds."""
        return statistics.mean(_final(self.runs))

    @property
    def spread(self) -> float | None:
        """Standard deviation of the final bits per byte over the seeds; None with one seed."""
        return statistics.stdev(_final(self.runs)) if len(self.runs) > 1 else None

    @property
    def gains(self) -> list[float]:
        """Reduction of bits per byte relative to the compared row, for each seed that both have.

        Runs with the same seed read the same text in the same order, so the difference between two
        of them varies less than that of runs with different seeds.
        """
        other = {run["seed"]: run["bits_per_byte"] for run in self.compared}
        return [
            other[run["seed"]] - run["bits_per_byte"] for run in self.runs if run["seed"] in other
        ]

    @property
    def gain_in_spreads(self) -> float | None:
        """The mean gain divided by its standard deviation over the seeds; None with fewer than
        three seeds."""
        if len(self.gains) < _SEEDS:
            return None
        return statistics.mean(self.gains) / max(statistics.stdev(self.gains), 1e-6)

    @property
    def seconds(self) -> float:
        """Mean seconds of training of a run."""
        seconds: list[float] = [run["seconds"] for run in self.runs]
        return statistics.mean(seconds)

    def curve(self) -> list[tuple[float, float, list[float]]]:
        """(tokens, mean seconds, bits per byte of each seed) at each point."""
        return [
            (points[0][0], statistics.mean(p[1] for p in points), [p[2] for p in points])
            for points in zip(*(run["curve"] for run in self.runs), strict=False)
        ]

    def to_goal(self) -> tuple[float, float] | None:
        """(tokens, seconds) at which the mean curve reaches the goal, interpolated linearly between
        points; None if it never does."""
        points = [(t, s, statistics.mean(bits)) for t, s, bits in self.curve()]
        before = None
        for tokens, seconds, bits in points:
            if bits <= self.goal:
                if before is None:
                    return tokens, seconds
                part = (before[2] - self.goal) / (before[2] - bits)
                return (
                    before[0] + part * (tokens - before[0]),
                    before[1] + part * (seconds - before[1]),
                )
            before = tokens, seconds, bits
        return None


def _final(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["bits_per_byte"] for run in runs]


@dataclass(frozen=True)
class LearningGroup:
    """The rows on one corpus at one size with one budget; the first row is the baseline."""

    corpus: str
    size: str
    budget: str
    rows: Sequence[RowFigures]

    @property
    def title(self) -> str:
        """Heading of the group."""
        return f"{self.corpus}, {self.size}, {self.budget}"


def learning_groups(runs: Sequence[Mapping[str, Any]]) -> list[LearningGroup]:
    """The runs by group and row, both in the order of their first runs."""
    groups: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for run in runs:
        key = (run["corpus"], run["size"], run["budget"])
        groups.setdefault(key, {}).setdefault(run["row"], []).append(run)
    found = []
    for (corpus, size, budget), rows in groups.items():
        baseline = next(iter(rows))
        goal = statistics.mean(run["curve"][-1][2] for run in rows[baseline])
        figures = []
        for name, own in rows.items():
            row = find_row(name)
            over = row.of or (row.successor_of if row.successor_of in rows else baseline)
            compared = [] if over == name else rows.get(over, [])
            figures.append(RowFigures(name, row, own, over, compared, goal))
        found.append(LearningGroup(corpus, size, budget, figures))
    return found


def verdicts(groups: Sequence[LearningGroup]) -> dict[str, str]:
    """The verdict on each single change, and on each recipe that replaced another as the default,
    by name of the row.

    A change is kept if its gain exceeds two standard deviations on two corpora and at two sizes,
    and no group has a loss of that size.
    """
    found: dict[str, list[tuple[LearningGroup, RowFigures]]] = {}
    for group in groups:
        for row in group.rows:
            decided = row.over in (row.row.of, row.row.successor_of)
            if decided and row.gain_in_spreads is not None:
                found.setdefault(row.name, []).append((group, row))
    return {name: _verdict(cases) for name, cases in found.items()}


def _verdict(cases: Sequence[tuple[LearningGroup, RowFigures]]) -> str:
    gains = [(group, row.gain_in_spreads or 0.0) for group, row in cases]
    worse = [f"{group.corpus} {group.size}" for group, gain in gains if gain < -_LEAST_GAIN]
    better = [group for group, gain in gains if gain > _LEAST_GAIN]
    corpora, sizes = {one.corpus for one in better}, {one.size for one in better}
    if worse:
        return f"not kept: worse on {', '.join(worse)}"
    if not better:
        return "not kept: no gain above twice its spread"
    gained = f"gains on {', '.join(sorted(corpora))}, at {', '.join(sorted(sizes))}"
    return f"{'kept' if len(corpora) > 1 and len(sizes) > 1 else 'open'}: {gained}"


HEADER = (
    *("recipe", "bits per byte", "tokens to the baseline", "seconds to the baseline"),
    *("seconds", "gain over", "gain", "in spreads"),
)


def row_cells(row: RowFigures) -> tuple[str, ...]:
    """A row of a group's table; see HEADER."""
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    goal = row.to_goal()
    return (
        row.name,
        f"{row.bits_per_byte:.4f}{spread}",
        "never" if goal is None else f"{goal[0]:,.0f}",
        "never" if goal is None else f"{goal[1]:,.0f}",
        f"{row.seconds:,.0f}",
        row.over if row.compared else "",
        _gain_cell(row.gains),
        cell("{row.gain_in_spreads:+.1f}", {"row": row}),
    )


def _gain_cell(gains: Sequence[float]) -> str:
    if len(gains) < 2:
        return "".join(f"{gain:+.4f}" for gain in gains)
    return f"{statistics.mean(gains):+.4f} ± {statistics.stdev(gains):.4f}"


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of the held-out bits per byte by tokens and by seconds, with bands over the seeds, for
    the baseline, the best rows and the rows with which they are compared."""
    groups = learning_groups(result["runs"])
    figure = new_figure(13, 3.6 * max(len(groups), 1))
    axes = figure.subplots(max(len(groups), 1), 2, squeeze=False)
    for places, group in zip(axes, groups, strict=False):
        # Only the best rows, and those that they are compared with: more could not be told apart.
        best = sorted(group.rows[1:], key=lambda row: row.bits_per_byte)[:_BEST]
        names = {group.rows[0].name, *(row.name for row in best), *(row.over for row in best)}
        shown = [row for row in group.rows if row.name in names]
        for row in shown:
            curve = row.curve()
            for place, axis in zip(places, (0, 1), strict=True):
                x = [point[axis] for point in curve]
                means = [statistics.mean(point[2]) for point in curve]
                (line,) = place.plot(x, means, label=row.name)
                low, high = ([f(point[2]) for point in curve] for f in (min, max))
                place.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
        ends = [bits for row in shown for _, _, seeds in row.curve()[-1:] for bits in seeds]
        middle = [bits for row in shown for _, _, seeds in row.curve()[:3][-1:] for bits in seeds]
        for place, label in zip(places, ("tokens", "seconds of training"), strict=True):
            place.set(xlabel=label, ylabel="held-out bits per byte")
            # The axis ends at the third points: the first two are far above all others.
            if middle and max(middle) > min(ends):
                place.set_ylim(min(ends) - 0.02, max(middle))
            place.set_title(group.title, loc="left", fontsize="medium", parse_math=False)
            place.legend(fontsize="small")
        places[0].xaxis.set_major_formatter("{x:,.0f}")
    return png_of(figure)


def page(result: Mapping[str, Any], picture: str) -> str:
    """The page of the results, in Markdown.

    Args:
        picture: address of the picture.
    """
    groups, machine = learning_groups(result["runs"]), result["machine"]
    known = {row.name: row.row for group in groups for row in group.rows}
    recipes = [
        f"- `{name}`: {row.of and f'{row.of}, changed: '}{row.about}" for name, row in known.items()
    ]
    decided = verdicts(groups)
    parts = [
        _HEAD.format(
            machine=f"{machine['name']}, torch {machine['torch']}, threads: {machine['threads']}"
        )
    ]
    parts.append("\n".join(recipes) + "\n")
    for group in groups:
        seeds = max(len(row.runs) for row in group.rows)
        parts.append(f"## {group.title}\n\nBaseline: {group.rows[0].name}; {seeds} seeds.\n")
        parts.append(markdown_table(HEADER, [row_cells(row) for row in group.rows]))
    if result["problems"]:
        failed = [f"- {title}: {problem}" for title, problem in result["problems"].items()]
        parts.append("\n".join(["## Runs that failed", "", *failed, ""]))
    if decided:
        parts.append("## Changes that are kept, and those that did not help\n")
        parts.append("\n".join(f"- `{name}`: {one}" for name, one in decided.items()) + "\n")
    parts.append(f"![held-out bits per byte by tokens and by seconds]({picture})\n")
    return "\n".join(parts)


_HEAD = """\
# Learning: recipes at equal tokens or equal time

    python -m benchmarks learning --out DIR --page docs/benchmarks/learning.md

adds a page such as this one to the results in DIR; the page of the documentation is made by
`make benchmarks NAMES=learning`.

Each run is `firstlight train` in a separate process.

- **bits per byte**: on the whole held-out text at the end of a run, or on the number of its tokens
  that the heading names; mean and standard deviation over the seeds.
  All rows share a tokenizer that is trained on all of the text. That it has seen the held-out part
  lowers the bits of a small text: those of Shakespeare with 2,048 tokens by 2.6 %.
- **tokens and seconds to the baseline**: the point at which a row's curve of held-out bits per byte
  reaches the end of the baseline's curve. Curves are measured on 32,768 held-out tokens, or on an
  eighth of the tokens in the heading.
- **seconds**: time of the training steps, without evaluations, checkpoints and the start of the
  process.
- **gain**: bits per byte fewer than the compared row; mean and standard deviation over pairs of
  runs with one seed, which read the same text in the same order. **in spreads** is the gain divided
  by its standard deviation. A change is compared with the recipe that it changes, and `new` with
  `before`, whose place it took, where both were measured.

A change is kept if it gains more than two standard deviations on two corpora and at two sizes with
three seeds, and nowhere loses as much. If the tokens of a corpus are bytes, a nat is 1.4427 bits: a
loss of 1.88 nats is 2.7123 bits per byte.

Machine: {machine}.
"""
