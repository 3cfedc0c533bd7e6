"""`firstlight bench gemm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import counted, show, show_table, with_json

Result = dict[str, Any]


@click.command("gemm")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps.")
@click.option(
    "--dtype",
    "dtypes",
    metavar="NAME,...",
    default="",
    help="Number formats: fp32, tf32, bf16, fp16. [all that the hardware multiplies]",
)
@click.option(
    "--model",
    default="gpt2-124m",
    show_default=True,
    help="Whose shapes: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m.",
)
@click.option("--quick", is_flag=True, help="Smaller products, fewer rounds: under a minute.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write gemm.json and gemm.png into this folder.",
)
@with_json
def gemm_command(
    device: str, dtypes: str, model: str, quick: bool, out: Path | None, as_json: bool
) -> Result:
    """This machine's matrix-product rate by shape, and what aligned sizes buy.

    Square products from small to large; the products of a GPT-2 training step; sizes padded to
    multiples of 8, 64 and 128 beside sizes that are not; steps around a tile's edge. Ctrl-C
    leaves what has been measured so far.
    """
    from firstlight.bench.gemm import GemmBench, GemmRun

    bench = GemmBench(
        device=device,
        dtypes=[name.strip() for name in dtypes.split(",") if name.strip()],
        model=model,
        quick=quick,
    )
    run = GemmRun(bench)
    try:
        run.measure()
    finally:
        result = run.result()
        if result["rows"]:
            _publish(result, out)
    return result


def _publish(result: Result, out: Path | None) -> None:
    """Say the tables and write the files, also of a result that is not complete."""
    from firstlight.bench.gemm_report import draw
    from firstlight.files.atomic import write_file, write_json

    _show_result(result)
    if out is not None:
        write_json(out / "gemm.json", result)
        write_file(out / "gemm.png", draw(result))
        show(f"written: {out / 'gemm.json'}, {out / 'gemm.png'}")


def _show_result(result: Result) -> None:
    machine = result["machine"]
    load = machine["load_at_start"]
    show(
        f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}; medians of "
        f"{counted(result['rounds'], 'round')} (lowest to highest)"
        + ("" if result["complete"] else "; interrupted: not all was measured")
    )
    # A lower one may be that of a command that has just ended.
    if machine["device"] == "cpu" and load is not None and load > 0.5 * machine["threads"]:
        show(f"the load was {load:.1f} at the start: other work takes part of these rates")
    dtypes = list(result["ceilings"])
    ceilings = [_tera(rate) for rate in result["ceilings"].values()]
    show_table([("TFLOP/s", *dtypes), ("ceiling (best seen of a large one)", *ceilings)])
    for part, title in (
        ("size", "square"),
        ("model", f"{result['model']}, {result['tokens']:,} tokens: share of the ceiling"),
    ):
        _show_rates(result, part, title, dtypes)
    _show_step(result, dtypes)
    _show_ratios(result["padding"], "padded: time (rate) against unpadded", dtypes)
    _show_ratios(result["tile"], "N around a tile: time (rate) against 256", dtypes)
    _show_ratios(result["wave"], "tiles: time (rate) against one a multiprocessor", dtypes)


def _show_rates(result: Result, part: str, title: str, dtypes: list[str]) -> None:
    rows: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        if row["part"] == part:
            cell = f"{_tera(row['flops_per_second'])} ({_tera(row['lowest'])}-"
            cell += f"{_tera(row['highest'])})"
            if part == "model":
                cell += f" {row['share_of_ceiling']:4.0%}"
            name = row["name"]
            if part == "model":
                name += f" {row['m']} x {row['n']} x {row['k']} {row['layout']}"
            rows.setdefault(name, {})[row["dtype"]] = cell
    _show_cells(title, rows, dtypes)


def _show_step(result: Result, dtypes: list[str]) -> None:
    rows: dict[str, dict[str, str]] = {}
    for step in result["step"]:
        name = f"weights as {step['weights']}, vocabulary {step['vocabulary']}"
        cell = f"{step['seconds']:.3g} s, {step['share_of_ceiling']:.0%} of the ceiling"
        rows.setdefault(name, {})[step["dtype"]] = cell
    tokens = f"{result['step_tokens']:,}"
    _show_cells(f"all products of a step of {tokens} tokens take, at these rates", rows, dtypes)


def _show_ratios(found: list[Result], title: str, dtypes: list[str]) -> None:
    rows: dict[str, dict[str, str]] = {}
    for row in found:
        name = str(row["to"])
        if "group" in row:
            multiples = ", ".join(str(multiple) for multiple in row["multiples"])
            name = f"{row['group']} {row['from']} -> {row['to']}"
            name += f" (to {multiples})" if multiples else ""
        name += f", work {row['work_ratio']:.3f}"
        cell = f"{row['time_ratio']:.2f} ({row['rate_ratio']:.2f}) "
        cell += f"[{row['lowest']:.2f}-{row['highest']:.2f}]"
        rows.setdefault(name, {})[row["dtype"]] = cell
    _show_cells(title, rows, dtypes)


def _show_cells(title: str, rows: dict[str, dict[str, str]], dtypes: list[str]) -> None:
    if rows:
        show()
        cells = [(name, *(row.get(dtype, "") for dtype in dtypes)) for name, row in rows.items()]
        show_table([(title, *dtypes), *cells])


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"
