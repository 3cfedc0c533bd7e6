"""`firstlight bench planner`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import show, show_table, with_json
from firstlight.console import say
from firstlight.files.atomic import write_file, write_json

_WORST = 5

_JSON = "planner.json"


@click.command("planner")
@click.option(
    "--only", type=click.Choice(["memory", "speed"]), help="One half; else both, memory first."
)
@click.option("--quick", is_flag=True, help="Every eighth configuration of memory, fewer of speed.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write planner.json and pictures here."
)
@with_json
def planner_command(
    only: str | None, quick: bool, out: Path | None, as_json: bool
) -> dict[str, Any]:
    """Set what the planner predicts beside what real training steps take, on this machine's CPU:
    peak memory over some 80 configurations, and speed over 20.

    Takes most of an hour. What is measured is said, and written to planner.json, at once.
    """
    result: dict[str, Any] = {}

    def keep() -> None:
        if out is not None:
            write_json(out / _JSON, result)

    try:
        if only != "speed":
            _memory(result, quick, keep)
        if only != "memory":
            _speed(result, quick, keep)
    finally:
        # Also when it was interrupted.
        if result.get("memory"):
            _show_memory(result)
        if result.get("speed"):
            _show_speed(result["speed"])
        if out is not None and result:
            _write(out, result)
    return result


def _memory(result: dict[str, Any], quick: bool, written: Callable[[], None]) -> None:
    from firstlight.bench.planner_memory import bench_memory, memory_grid, summary
    from firstlight.console import progress_bar

    cases = memory_grid(quick=quick)
    found: list[dict[str, Any]] = result.setdefault("memory", [])
    with progress_bar() as bar:
        task = bar.add_task("memory", total=len(cases))

        def keep(one: dict[str, Any]) -> None:
            found.append(one)
            result["memory_summary"] = summary(found)
            written()
            bar.advance(task)
            say(f"{len(found)}/{len(cases)}  {'  '.join(_memory_row(one))}")

        bench_memory(cases, keep, lambda name: bar.update(task, description=f"memory: {name}"))


def _memory_row(one: dict[str, Any]) -> tuple[str, ...]:
    if one["reason"]:
        return one["name"], f"failed: {one['reason']}"
    sizes = (f"{one[key] / 2**20:,.0f} MiB" for key in ("predicted_bytes", "peak_bytes"))
    return one["name"], *sizes, f"{one['error']:+.2%}"


def _speed(result: dict[str, Any], quick: bool, written: Callable[[], None]) -> None:
    from firstlight.bench.planner_speed import bench_speed, speed_grid

    grid = speed_grid()[:: 5 if quick else 1]

    def keep(so_far: dict[str, Any]) -> None:
        result.update(speed=so_far)
        written()
        count, last = len(so_far["rows"]), so_far["rows"][-1]
        say(f"{count}/{len(grid)}  {'  '.join(_speed_row(last))}")

    bench_speed(grid, calibrate_seconds=15.0 if quick else 60.0, on_row=keep)


def _speed_row(row: dict[str, Any]) -> tuple[str, ...]:
    if row["problem"]:
        return row["name"], f"failed: {row['problem']}"
    seconds = (f"{row[key]:.3f}" for key in ("predicted", "measured"))
    return row["name"], *seconds, f"{row['error']:+.1%}"


def _show_memory(result: dict[str, Any]) -> None:
    good = [one for one in result["memory"] if not one["reason"]]
    worst = sorted(good, key=lambda one: abs(one["error"]), reverse=True)[:_WORST]
    show_table(
        [
            ("worst in memory", "predicted", "measured", "error"),
            *map(_memory_row, worst),
        ]
    )
    for one in result["memory"]:
        if one["reason"]:
            show(": ".join(_memory_row(one)))
    found = result["memory_summary"]
    if found["count"]:
        show(
            f"memory, {found['count']} configurations: 95 of 100 within {found['error_95']:.2%}, "
            f"half within {found['median_error']:.2%}; at most {found['worst_shortage']:.2%} too "
            f"little; a prediction takes {found['prediction_seconds_95']:.1f} s"
        )


def _show_speed(found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if not row["problem"]]
    show_table(
        [
            ("speed", "predicted s", "measured s", "error"),
            *map(_speed_row, sorted(rows, key=lambda row: -abs(row["error"]))),
        ]
    )
    for row in found["rows"]:
        if row["problem"]:
            show(": ".join(_speed_row(row)))
    if rows:
        p95_worked = found["p95"]["error_worked"]
        show(
            f"speed, {len(rows)} configurations: 95 of 100 within {found['p95']['error']:.1%}, "
            f"half within {found['median']['error']:.1%} (of the steps' own work {p95_worked:.1%} "
            f"and {found['median']['error_worked']:.1%}; by the first prediction alone "
            f"{found['p95']['error_first']:.1%}); the machine kept steps waiting for "
            f"{found['waited']:.0%} of the time"
        )


def _write(out: Path, result: dict[str, Any]) -> None:
    from firstlight.bench.planner_memory import draw_memory

    write_json(out / _JSON, result)
    names = [_JSON]
    if any(not one["reason"] for one in result.get("memory", ())):
        write_file(out / "planner-memory.png", draw_memory(result["memory"]))
        names.append("planner-memory.png")
    if result.get("speed"):
        from firstlight.bench.planner_speed import draw_speed

        write_file(out / "planner-speed.png", draw_speed(result["speed"]))
        names.append("planner-speed.png")
    show(f"written: {', '.join(str(out / name) for name in names)}")
