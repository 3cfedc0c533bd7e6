"""`firstlight bench gpu`: every figure of firstlight on one GPU, in calls of some minutes.

`PARTS` is what is measured; `calls` measures, `gpu_pages` writes the pages.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.bench.calls import Call, Measure, Results, Row, Turn, run_rows, waiting_seconds
from firstlight.bench.gpu_ceilings import CEILINGS
from firstlight.bench.gpu_generation import GENERATION
from firstlight.bench.gpu_guide import GUIDE_PART
from firstlight.bench.gpu_ladder import LADDER
from firstlight.bench.gpu_machine import BenchMachine
from firstlight.bench.gpu_pages import Part, write_pages
from firstlight.bench.gpu_planner import PLANNER
from firstlight.bench.gpu_run import RUN
from firstlight.bench.gpu_training import TRAINING
from firstlight.bench.options import GPUBench, require_known
from firstlight.bench.process import ask, plain_environment, training_environment
from firstlight.console import say
from firstlight.errors import ConfigError, InputError

#: The parts in the order of the page.
PARTS: tuple[Part, ...] = (CEILINGS, TRAINING, LADDER, PLANNER, GENERATION, GUIDE_PART, RUN)

_MACHINE_MODULE = "firstlight.bench.gpu_machine"
#: After which looking at the machine is ended: a driver that hangs would take the whole call.
_MACHINE_SECONDS = 120.0


def choose_parts(names: Sequence[str]) -> list[Part]:
    """The parts that are named; all where none is.

    Raises:
        ConfigError: a name is unknown.
    """
    require_known("part", names, [part.name for part in PARTS])
    return [part for part in PARTS if not names or part.name in names]


def bench_gpu(bench: GPUBench, measure: Measure | None = None) -> dict[str, Any]:
    """Measure rows for some minutes.

    Args:
        bench: the options.
        measure: function that runs a row's measurement; None starts a fresh process.

    Returns:
        "results", the file; "machine"; "measured", how many of "rows" have all their turns;
        "failed" and "skipped", row -> reason; "left", the turns that were left for the next call;
        "left_seconds", how long these take.

    Raises:
        ConfigError: a name is unknown, there is no GPU, or the folder is another machine's.
        InputError: the folder's file is not one of these.
        StorageError: the disk refused.
    """
    if bench.minutes <= 0:
        raise ConfigError(f"--minutes {bench.minutes:g}: more than 0 are needed")
    parts = choose_parts(bench.parts)
    results = Results.read(bench.folder)
    with tempfile.TemporaryDirectory(
        prefix="firstlight-bench-", ignore_cleanup_errors=True
    ) as work:
        # The time that looking at the machine takes is of the call's minutes, too.
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
        # The folder is there before a measurement leaves a file in it.
        results.write()
        left = run_rows(rows, results, call)
    results.write()
    _say_end(bench, results, left)
    return _summary(bench, rows, results, left)


def _fresh_process(row: Row, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    environment = plain_environment() if row.plain else training_environment()
    # One GPU is measured, where there are several: other programs would use them all.
    environment = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1"} | environment
    return ask(row.module, request, environment, seconds)


def _machine(bench: GPUBench, results: Results) -> BenchMachine:
    """This machine, which must be the one of the results so far.

    Raises:
        ConfigError: it is another one, or has no GPU.
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


def _say_end(bench: GPUBench, results: Results, left: Sequence[Turn]) -> None:
    for turn in left:
        expected = results.outcome(turn.part, turn.row).expected_seconds(turn.row.seconds)
        if expected + 10 > 60 * bench.minutes:
            say(f"{turn.title} needs --minutes {expected / 60 + 1:.0f}")
    if left:
        minutes = waiting_seconds(left, results) / 60
        say(f"left for the next call: {len(left)} turns, about {minutes:.0f} minutes")
    else:
        say("all is measured")


def _summary(
    bench: GPUBench, rows: Mapping[str, Sequence[Row]], results: Results, left: Sequence[Turn]
) -> dict[str, Any]:
    outcomes = [
        (f"{part}: {row.name}", row, results.outcome(part, row))
        for part, these in rows.items()
        for row in these
    ]
    return {
        "results": str(bench.folder / "results.json"),
        "machine": results.machine,
        "measured": sum(len(outcome.runs) >= row.turns for _, row, outcome in outcomes),
        "rows": len(outcomes),
        "failed": {name: outcome.problem for name, _, outcome in outcomes if outcome.problem},
        "skipped": {name: row.skip for name, row, _ in outcomes if row.skip},
        "left": [turn.title for turn in left],
        "left_seconds": waiting_seconds(left, results),
    }


def report(folder: Path, pages: Path | None) -> list[Path]:
    """Write the pages of a folder of results.

    Args:
        folder: folder of results; the pages of one without say that nothing is measured.
        pages: parent of gpu.md, benchmarks/ and images/; None is the checkout's docs.

    Returns:
        The files written.

    Raises:
        ConfigError: there is no checkout, or the results are of a dry run and would go into it.
        InputError: the folder is missing, or its file is not one of these.
        StorageError: the disk refused.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name the --out of an earlier call")
    results = Results.read(folder)
    if pages is None and results.machine.get("dry"):
        raise ConfigError(f"{folder} holds figures of a dry run: name another place with --pages")
    if pages is None:
        checkout = Path(__file__).resolve().parents[3]
        if not (checkout / "pyproject.toml").is_file():
            raise ConfigError(
                "firstlight runs from no checkout: say where pages go with --pages DIR"
            )
        pages = checkout / "docs"
    return write_pages(PARTS, results, pages)
