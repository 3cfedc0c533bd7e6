"""`firstlight bench gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import show, with_json


@click.command("gpu")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Measure, and write results.json into this folder; go on with what it holds already.",
)
@click.option(
    "--minutes",
    type=float,
    default=9.0,
    show_default=True,
    help="Measure for at most so long; what would not end in time is left for the next call.",
)
@click.option(
    "--parts",
    metavar="NAME,...",
    default="",
    help="Only these parts: ceilings, training, ladder, planner, generation, guide, run.",
)
@click.option("--dry", is_flag=True, help="Every part on tiny models on the CPU, and its pages.")
@click.option("--retry", is_flag=True, help="Measure rows again that have failed.")
@click.option(
    "--report",
    "report_of",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure nothing: write the pages of the results in this folder.",
)
@click.option(
    "--pages",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where pages go. [the checkout's docs; of --dry the folder pages in --out]",
)
@with_json
def gpu_command(
    out: Path | None,
    minutes: float,
    parts: str,
    dry: bool,
    retry: bool,
    report_of: Path | None,
    pages: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Every figure of firstlight on this machine's GPU, in calls of some minutes.

    The most important rows come first, each in a fresh process. results.json in --out is written
    after each; the same command goes on where the last one stopped. --report writes docs/gpu.md and
    docs/benchmarks/gpu-*.md.
    """
    from firstlight.bench.gpu import GPUBench, bench_gpu, report
    from firstlight.errors import ConfigError

    if (out is None) == (report_of is None):
        raise ConfigError(
            "bench gpu takes --out DIR to measure, or --report DIR to write the pages"
        )
    if report_of is not None:
        return {"written": _written(report(report_of, pages))}
    assert out is not None
    names = [name.strip() for name in parts.split(",") if name.strip()]
    result = bench_gpu(GPUBench(out, minutes, names, dry, retry))
    _show(result)
    if dry:
        result["written"] = _written(report(out, pages or out / "pages"))
    return result


def _written(paths: list[Path]) -> list[str]:
    names = [str(path) for path in paths]
    show(f"written: {', '.join(names)}")
    return names


def _show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    show(
        f"{machine['name']}, torch {machine['torch']}: {result['measured']} of {result['rows']} "
        f"rows measured; {result['results']}"
    )
    for name, reason in result["failed"].items():
        show(f"failed: {name}: {reason}")
    for name, reason in result["skipped"].items():
        show(f"skipped: {name}: {reason}")
    if result["left"]:
        minutes = result["left_seconds"] / 60
        show(f"left for the next call: {len(result['left'])} turns, about {minutes:.0f} minutes")
