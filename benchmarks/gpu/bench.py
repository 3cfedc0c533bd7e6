"""`python -m benchmarks gpu`: every figure of firstlight on one GPU, in calls of some minutes.

Each part of `PARTS` is a set of rows to measure, and a page with their results.
"""

from __future__ import annotations

import datetime
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import CEILINGS
from benchmarks.gpu.generation import GENERATION
from benchmarks.gpu.ladder import LADDER
from benchmarks.gpu.parts import (
    BenchMachine,
    Call,
    Findings,
    Measure,
    Page,
    Part,
    Results,
    Row,
    run_rows,
)
from benchmarks.gpu.planner import PLANNER
from benchmarks.gpu.run import RUN
from benchmarks.gpu.training import TRAINING
from benchmarks.options import GPUBench
from benchmarks.rows import chosen_rows
from firstlight.bench.runner import RowOutcome
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import write_file
from firstlight.hardware.fresh_process import ask, plain_environment, training_environment

#: The parts in the order of their sections in gpu.md.
PARTS: tuple[Part, ...] = (CEILINGS, TRAINING, LADDER, PLANNER, GENERATION, RUN)

_MACHINE_MODULE = "benchmarks.gpu.parts"
#: Time limit in seconds for reading the machine's facts. Without a limit, a driver that hangs would
#: take up the whole call.
_MACHINE_SECONDS = 120.0


def bench_gpu(bench: GPUBench, measure: Measure | None = None) -> dict[str, Any]:
    """Measure rows for some minutes.

    Args:
        bench: the options.
        measure: function that runs a row's measurement; None starts a fresh process.

    Returns:
        - "results": path of results.json
        - "machine": `BenchMachine.to_json`
        - "rows": number of rows; "measured": number of rows with a result
        - "failed", "skipped": the reason by row
        - "left": names of the rows that are left for the next call
        - "left_seconds": expected duration of these rows

    Raises:
        ConfigError: an option is invalid, there is no GPU, or the folder has another machine's
            results.
        InputError: the folder's results.json is not a file of this benchmark.
        StorageError: a file system error.
    """
    if bench.minutes <= 0:
        raise ConfigError(f"--minutes {bench.minutes:g}: more than 0 are needed")
    parts = chosen_rows("part", PARTS, bench.parts)
    results = Results.read(bench.folder)
    with tempfile.TemporaryDirectory(
        prefix="firstlight-bench-", ignore_cleanup_errors=True
    ) as work:
        # The call's minutes include the time of reading the machine's facts.
        call = Call(bench.minutes, Path(work), measure or _fresh_process, begun=time.monotonic())
        machine = _machine(bench, results)
        rows = {part.name: list(part.rows(machine)) for part in parts}
        if bench.retry:
            for name, these in rows.items():
                for row in these:
                    results.outcome(name, row, retry=True)
        results.machine = machine.to_json()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        results.calls.append({"date": today, "seconds": 0.0, "turns": 0})
        # Creates the folder, into which measurements may write files.
        results.write()
        left = run_rows(rows, results, call)
    results.write()
    return _summary(bench, rows, results, left)


def _fresh_process(row: Row, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    environment = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1"} | training_environment()
    return ask(row.module, request, environment, seconds)


def _machine(bench: GPUBench, results: Results) -> BenchMachine:
    """This machine's facts.

    Raises:
        ConfigError: the machine has no GPU, or another GPU than the results so far.
    """
    found = ask(_MACHINE_MODULE, {"dry": bench.dry}, plain_environment(), _MACHINE_SECONDS)
    if "error" in found:
        raise ConfigError(found["error"]["message"])
    machine = BenchMachine.from_json(found)
    before = results.machine
    if before and (before["name"], before["dry"]) != (machine.name, machine.dry):
        theirs = "a dry run" if before["dry"] else f"a {before['name']}"
        ours = "a dry run" if machine.dry else f"a {machine.name}"
        raise ConfigError(
            f"{bench.folder} holds figures of {theirs}, and this is {ours}: choose another --out"
        )
    return machine


def _summary(
    bench: GPUBench,
    rows: Mapping[str, Sequence[Row]],
    results: Results,
    left: Sequence[tuple[str, Row]],
) -> dict[str, Any]:
    outcomes = {
        f"{part}: {row.name}": (row, results.outcome(part, row))
        for part, these in rows.items()
        for row in these
    }
    return {
        "results": str(bench.folder / "results.json"),
        "machine": results.machine,
        "measured": sum(bool(outcome.runs) for _, outcome in outcomes.values()),
        "rows": len(outcomes),
        "failed": {name: one.problem for name, (_, one) in outcomes.items() if one.problem},
        "skipped": {name: row.skip for name, (row, _) in outcomes.items() if row.skip},
        "left": [f"{part}: {row.name}" for part, row in left],
        "left_seconds": sum(
            results.outcome(part, row).expected_seconds(row.seconds) for part, row in left
        ),
    }


def report(folder: Path, pages: Path | None) -> list[Path]:
    """Write the pages of a folder of results.

    Args:
        folder: folder of results; if it has none, the pages say that nothing is measured.
        pages: parent of gpu.md, benchmarks/ and images/; None is the checkout's docs.

    Returns:
        The files written.

    Raises:
        ConfigError: there is no checkout, or the results are of a dry run and would go into it.
        InputError: the folder is missing, or its results.json is not a file of this benchmark.
        StorageError: a file system error.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name the --out of an earlier call")
    results = Results.read(folder)
    if pages is None and results.machine.get("dry"):
        raise ConfigError(f"{folder} holds figures of a dry run: name another place with --pages")
    if pages is None:
        checkout = Path(__file__).resolve().parents[2]
        if not (checkout / "pyproject.toml").is_file():
            raise ConfigError(
                "firstlight runs from no checkout: say where pages go with --pages DIR"
            )
        pages = checkout / "docs"
    return write_pages(PARTS, results, pages)


def write_pages(parts: Sequence[Part], results: Results, folder: Path) -> list[Path]:
    """Write gpu.md, a page for each part that has results, and the pictures.

    Returns:
        The files written.

    Raises:
        StorageError: a file system error.
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
    make test-gpu                                    # correctness
    python -m benchmarks gpu --out DIR --minutes 9   # figures, the most important first
    python -m benchmarks gpu --out DIR --minutes 9   # continues where the last call stopped
    python -m benchmarks gpu --report DIR            # writes this page and those of the parts
    python -m benchmarks gpu --out DIR --dry         # every part on tiny models on the CPU
    python -m benchmarks.gpu.quick --out DIR         # what speed work needs, in nine minutes
"""


def _overview(sections: Sequence[str], found: Findings | None, results: Results) -> str:
    """The text of gpu.md: the state of the measurements, the commands, a section for each part."""
    if found is None:
        state = "**Not measured yet: no GPU has run these commands.**"
    else:
        state = f"Measured on {_facts(found.machine, results)}"
    head = f"""\
# firstlight on a GPU

{_wrapped(state)}

All published benchmark figures of firstlight on GPUs are on this page and those of its parts; other
pages are measured on CPUs unless they say otherwise.
Speeds that `firstlight plan` predicts for GPUs which were not measured here are
[assumed](planning.md#how-speed-is-predicted).

{_COMMANDS}
A call measures for at most `--minutes`, and leaves rows that would not end in time for the next
call. DIR holds `results.json`, and `run-*` of the real run: a few MB, and all that a next call and
`--report` need. To continue on another machine with the same kind of GPU, copy DIR there. A row
that fails (out of memory, a missing package, its time limit) is recorded with the reason and ends
no other; `--retry` measures such rows again. For a GPU without a package registry, or for figures
of a change in fifteen minutes: [contributing](contributing.md#fifteen-minutes-on-a-gpu).
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

    python -m benchmarks gpu --out DIR --parts {part.name}

{_wrapped(part.about)}

{_wrapped("Machine: " + _facts(found.machine, results))}

{page.text.strip()}
{rest}"""


def _wrapped(text: str) -> str:
    """A paragraph in lines of up to 105 characters, as in the other pages."""
    return textwrap.fill(text, 105, break_long_words=False, break_on_hyphens=False)


def _reason(row: Row, outcome: RowOutcome) -> str:
    """The reason why a row has no result; "" if there is none."""
    if row.skip:
        return f"skipped: {row.skip}"
    if outcome.problem:
        return f"failed: {outcome.problem}"
    if not outcome.runs:
        return "not measured yet"
    return ""


def _facts(machine: BenchMachine, results: Results) -> str:
    """A sentence about the machine: hardware, versions of software, dates of measurement."""
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
    hardware = f"{machine.name}, {machine.memory_bytes / 2**30:.0f} GiB"
    return (
        f"{dry}{', '.join(part for part in (hardware, cores) if part)}; {', '.join(software)}; "
        f"{when}."
    )
