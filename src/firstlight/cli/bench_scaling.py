"""`firstlight bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import human_bytes, show, show_table, with_json


@click.command("scaling")
@click.option(
    "--nproc", type=int, default=2, show_default=True, help="Up to so many processes: 1, 2, 4, ..."
)
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    default="small",
    show_default=True,
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or a recipe's.",
)
@click.option(
    "--engines",
    metavar="NAME,...",
    default="",
    help="Only these: ddp, fsdp, fsdp-kept, fsdp-offload, hybrid, tensor, pipeline, zero-1, "
    "zero-2, zero-3.",
)
@click.option("--seq-len", type=int, default=256, show_default=True, help="Tokens a row.")
@click.option(
    "--micro-batch-size", type=int, default=2, show_default=True, help="Rows of each process."
)
@click.option("--accumulation", type=int, default=1, show_default=True, help="Passes a step.")
@click.option(
    "--precision", default="fp32", show_default=True, help="As in a recipe's efficiency section."
)
@click.option("--steps", type=int, default=5, show_default=True, help="Timed in each turn.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Turns of all rows.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write scaling.json and scaling.png into this folder.",
)
@with_json
def scaling_command(
    nproc: int,
    model: str,
    engines: str,
    seq_len: int,
    micro_batch_size: int,
    accumulation: int,
    precision: str,
    steps: int,
    repeats: int,
    device: str,
    out: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Tokens per second, the share of a step that is not computing, and memory by rank, for each
    engine and number of processes.

    Every process has the same micro-batch. On a CPU the processes share its cores: what is
    gained there is little, and what an engine costs is what is to be seen.
    """
    from firstlight.bench.scaling import ScalingBench, bench_scaling, draw
    from firstlight.files.atomic import write_file, write_json

    bench = ScalingBench(
        processes=nproc,
        model=model,
        engines=[name.strip() for name in engines.split(",") if name.strip()],
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        steps=steps,
        repeats=repeats,
        precision=precision,
        device=device,
    )
    result: dict[str, Any] = {}

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        if out is not None:
            write_json(out / "scaling.json", so_far)

    try:
        bench_scaling(bench, keep)
    finally:
        # Also when it was interrupted.
        if result:
            _show_result(result)
        if result and out is not None:
            write_file(out / "scaling.png", draw(result))
            show(f"written: {out / 'scaling.json'}, {out / 'scaling.png'}")
    return result


_HEADER = ("engine", "processes", "tokens/s", "/ one", "not computing", "memory by rank")


def _show_result(result: dict[str, Any]) -> None:
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['precision']}, "
        f"{result['micro_batch_size']} rows of {result['seq_len']} tokens a process; "
        f"{machine['name']}, {machine['cores']} cores"
    )
    rows = [row for row in result["rows"] if "tokens_per_second" in row]
    if rows:
        show_table([_HEADER, *map(_cells, rows)])
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['engine']}, {row['processes']}: failed: {row['reason']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    share, speedup = row["sharing_share"], row["speedup"]
    return (
        row["engine"],
        str(row["processes"]),
        f"{row['tokens_per_second']:,.0f}",
        "" if speedup is None else f"{speedup:.2f}x",
        "" if share is None else f"{share:.0%}",
        ", ".join(human_bytes(peak) for peak in row["peak_bytes"]),
    )
