"""Parts of `firstlight bench gpu`, and the pages that are made of their results.

How a part is declared: a module `bench/gpu_NAME.py` with one `Part`, listed in `bench/gpu.py`.

    _MODULE = "firstlight.bench.gpu_NAME"          # or a module that measures already

    def _rows(machine: BenchMachine) -> list[Row]:
        if machine.dry:
            return [Row("tiny", _MODULE, {"device": "cpu", ...}, seconds=8)]
        return [Row("bert-large, batch 4", _MODULE, {"device": "cuda", ...}, seconds=40, value=2)]

    def _measure(request: dict[str, Any]) -> dict[str, Any]:
        ...
        return {"tokens_per_second": 1e5, "line": "100,000 tokens/s"}

    def _page(found: Findings) -> Page:
        names = [row.name for row in found.measured("NAME")]
        rows = [(name, f"{found.median('NAME', name, 'x'):.0f}") for name in names]
        table = markdown_table(("row", "x"), rows)
        return Page(summary="- x is ...", text=table, pictures={"gpu-NAME.png": draw_bars(...)})

    PART = Part("NAME", "Title of the page", "Subject of the figures.", _rows, _page)

    if __name__ == "__main__":
        answer(_measure, sys.argv[1])

Rows (`calls.Row`): `seconds` counts the start of the process (about 10 s with torch and CUDA).
`value` is their place in the order across all parts: 1 the few figures without which the page says
nothing (all rows of 1 together in at most 4 minutes), 2 the main figures, 3 to 5 the rest of them,
6 and more what could be missing. Rows that compare with each other have the same value and turns:
then they take turns. What a machine can't run gets `skip=reason` (`BenchMachine.lacks`,
`.capability`); a refusal (FirstlightError) or a crash of a measurement is recorded as the row's.
`_rows` depends on the machine's facts alone: it is called again to make the pages, on another
machine. A dry row takes at most 10 s on two cores, and goes through the same code.

Measurements: the last key "line" of a result is said while the benchmark runs. Results are kept
in one JSON file of a few MB for all rows: no long lists. request["work"] is a folder for what
further rows of the same call can use (a corpus, a model): a row makes what is missing itself.

`_page` is only called when at least one row of the part has a result, and must live with any
subset of its rows. The frame adds the title, the machine, the command, and the rows that have no
figure with their reasons. Pictures are referred to as `../images/gpu-NAME.png`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.bench.calls import Outcomes, Results, Row
from firstlight.bench.gpu_machine import BenchMachine
from firstlight.bench.pictures import Panel, draw_panels
from firstlight.bench.runner import RowOutcome
from firstlight.files.atomic import write_file

_GIB = 2**30


@dataclass(frozen=True)
class Page:
    """The page of a part's results.

    Attributes:
        summary: Markdown for the part's section in docs/gpu.md: the main figures beside their
            goals, in a few lines.
        text: Markdown of the part's own page, below its head.
        pictures: PNG files by name.
    """

    summary: str
    text: str
    pictures: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Results of all parts.

    Attributes:
        machine: the machine that measured.
        outcomes: outcomes of each part's rows, by name; rows that were never tried have none.
        rows: each part's rows, in the order of their declaration.
        folder: the folder of the results; None writes nothing there.
    """

    machine: BenchMachine
    outcomes: Outcomes
    rows: Mapping[str, Sequence[Row]]
    folder: Path | None = None

    def outcome(self, part: str, row: str) -> RowOutcome:
        """The outcome of a row; an empty one where there is none."""
        return self.outcomes.get(part, {}).get(row, RowOutcome())

    def measured(self, part: str) -> list[Row]:
        """The part's rows with at least one result."""
        return [row for row in self.rows.get(part, ()) if self.outcome(part, row.name).runs]

    def median(self, part: str, row: str, key: str) -> float | None:
        """The median of a number over a row's turns; None where it has no result."""
        return self.outcome(part, row).median(key)


@dataclass(frozen=True)
class Part:
    """One part of the benchmark; see the module's head.

    Attributes:
        name: name for `--parts`, and in the page's file name.
        title: heading of the page.
        about: subject of the figures, in Markdown: a sentence or two.
        rows: the rows for a machine.
        page: the page of results.
    """

    name: str
    title: str
    about: str
    rows: Callable[[BenchMachine], Sequence[Row]]
    page: Callable[[Findings], Page]


def write_pages(parts: Sequence[Part], results: Results, folder: Path) -> list[Path]:
    """Write gpu.md, a page for each part that has results, and the pictures.

    Returns:
        The files written.

    Raises:
        StorageError: the disk refused.
    """
    found = None
    if results.machine:
        machine = BenchMachine.from_json(results.machine)
        rows = {part.name: part.rows(machine) for part in parts}
        found = Findings(machine, results.outcomes, rows, results.folder)
    files: dict[str, bytes | str] = {}
    sections = []
    for part in parts:
        page = None
        if found is not None and found.measured(part.name):
            page = part.page(found)
            files[f"benchmarks/gpu-{part.name}.md"] = _part_page(part, page, found, results)
            files |= {f"images/{name}": picture for name, picture in page.pictures.items()}
        sections.append(_section(part, page))
    files["gpu.md"] = _overview(sections, found, results)
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


_COMMANDS = """\
    make test-gpu                                # correctness
    firstlight bench gpu --out DIR --minutes 9   # figures: what matters most comes first
    firstlight bench gpu --out DIR --minutes 9   # goes on where the last call stopped
    firstlight bench gpu --report DIR            # writes this page and those of the parts
    firstlight bench gpu --out DIR --dry         # every part on tiny models on the CPU
"""


def _overview(sections: Sequence[str], found: Findings | None, results: Results) -> str:
    """gpu.md."""
    if found is None:
        state = "**Not measured yet: no GPU has run these commands.**"
    else:
        state = f"Measured on {_facts(found.machine, results)}"
    head = f"""\
# firstlight on a GPU

{_wrapped(state)}

All figures of firstlight on GPUs stand on this page and those of its parts; other pages are
measured on CPUs.

{_COMMANDS}
A call measures for at most `--minutes` and leaves what would not end in time for the next one.
DIR holds `results.json`, and `run-*` of the real run: a few MB, and all that a next call and
`--report` need. To go on on another machine with the same kind of GPU, copy DIR there. A row that
fails (out of memory, a missing package, its time limit) is recorded with the reason and ends no
other; `--retry` measures such rows again.
"""
    return head + "".join(f"\n{section}" for section in sections)


def _section(part: Part, page: Page | None) -> str:
    """A part's section of gpu.md."""
    head = f"## {part.title}\n\n{_wrapped(part.about)}\n\n"
    if page is None:
        return head + "Not measured yet.\n"
    link = f"[benchmarks/gpu-{part.name}.md](benchmarks/gpu-{part.name}.md)"
    return head + f"{page.summary.strip()}\n\nMore: {link}.\n"


def _part_page(part: Part, page: Page, found: Findings, results: Results) -> str:
    """A part's own page."""
    missing = [
        (row.name, reason)
        for row in found.rows[part.name]
        if (reason := _reason(row, found.outcome(part.name, row.name)))
    ]
    rest = ""
    if missing:
        lines = "".join(f"- {name}: {reason}\n" for name, reason in missing)
        rest = f"\n## Rows without a figure\n\n{lines}"
    return f"""\
# {part.title}

    firstlight bench gpu --out DIR --parts {part.name}

{_wrapped(part.about)}

{_wrapped("Machine: " + _facts(found.machine, results))}

{page.text.strip()}
{rest}"""


def _wrapped(text: str) -> str:
    """A paragraph in lines of the length that the other pages have."""
    return textwrap.fill(text, 105, break_long_words=False, break_on_hyphens=False)


def _reason(row: Row, outcome: RowOutcome) -> str:
    """The reason why a row, or one of its turns, has no result; "" where all have."""
    if row.skip:
        return f"skipped: {row.skip}"
    if outcome.problem:
        return f"failed: {outcome.problem}"
    if not outcome.runs:
        return "not measured yet"
    return ""


def _facts(machine: BenchMachine, results: Results) -> str:
    """The machine in a sentence."""
    dates = sorted({call["date"] for call in results.calls})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "an unknown day"
    software = [f"torch {machine.torch}", f"Python {machine.python}"]
    if machine.device == "cuda":
        software = [
            f"driver {machine.driver or 'unknown'}",
            f"CUDA {machine.cuda}",
            *software,
            *(f"{name} {version}" for name, version in sorted(machine.packages.items())),
        ]
    dry = "a dry run on the CPU, whose figures mean nothing: " if machine.dry else ""
    cores = f"{machine.cpus} cores of {machine.cpu}" if machine.device == "cuda" else ""
    hardware = f"{machine.name}, {machine.memory_bytes / _GIB:.0f} GiB"
    return (
        f"{dry}{', '.join(part for part in (hardware, cores) if part)}; {', '.join(software)}; "
        f"{when}."
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown: the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|---|" + "---:|" * (len(header) - 1))
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(template: str, value: float | None) -> str:
    """A number as text; "" for None."""
    return "" if value is None else template.format(value)


def draw_bars(
    title: str,
    xlabel: str,
    bars: Sequence[tuple[str, float]],
    line: tuple[str, float] | None = None,
) -> bytes:
    """A PNG of horizontal bars.

    Args:
        title: heading of the picture.
        xlabel: quantity and unit.
        bars: name and value of each bar, from the top.
        line: name and value of a vertical line, such as a goal or a ceiling.
    """
    names, values = [name for name, _ in bars], [value for _, value in bars]
    return draw_panels(title, [[Panel(xlabel, names, values, line=line)]])
