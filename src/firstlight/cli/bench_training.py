"""`firstlight bench training`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import show, show_table, with_json


@click.command("training")
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or the model, optimizer "
    "and efficiency sections of a recipe. [gpt2-124m; small with --quick]",
)
@click.option(
    "--seq-len", type=int, help="Tokens a row. [1024, 256 with --quick; at most the context]"
)
@click.option("--micro-batch-size", type=int, help="Rows a step. [4 on a CPU, 16 on a GPU]")
@click.option("--steps", type=int, help="Timed steps a run. [4 on a CPU, 20 on a GPU]")
@click.option("--repeats", type=int, help="Turns of all rows. [3; 1 with --quick]")
@click.option(
    "--programs",
    metavar="NAME,...",
    help="Compare with: reference (a bare loop: bf16 autocast, compiled), reference-fp32, "
    "pure-bf16 (no master weights, no clipping), trainer (transformers, bf16, compiled). "
    "[reference; reference-fp32 too where bf16 is no faster]",
)
@click.option(
    "--set",
    "variants",
    metavar="SECTION.KEY=VALUE,...",
    multiple=True,
    help="One more row of firstlight with these keys of its recipe; may be given several times.",
)
@click.option(
    "--same-environment",
    is_flag=True,
    help="Run the other programs in the environment of `firstlight train` (spinning threads), too.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--quick", is_flag=True, help="A small model, one turn.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write training.json and training.png into this folder.",
)
@with_json
def training_command(
    model: str | None,
    seq_len: int | None,
    micro_batch_size: int | None,
    steps: int | None,
    repeats: int | None,
    programs: str | None,
    variants: tuple[str, ...],
    same_environment: bool,
    device: str,
    quick: bool,
    out: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Training with what a recipe sets by default, beside bare loops and other programs.

    Each row is trained for a few steps by a fresh process, on the source of Python's standard
    library; the rows take turns. training.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.training import TrainingBench, bench_training, make_plan
    from firstlight.bench.training_report import draw
    from firstlight.files.atomic import write_file, write_json

    names = None
    if programs is not None:
        names = [name.strip() for name in programs.split(",") if name.strip()]
    plan = make_plan(
        TrainingBench(
            model=model,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            steps=steps,
            repeats=repeats,
            programs=names,
            variants=variants,
            same_environment=same_environment,
            device=device,
            quick=quick,
        )
    )
    result: dict[str, Any] = {}

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        if out is not None:
            write_json(out / "training.json", so_far)

    try:
        bench_training(plan, keep)
    finally:
        # Also when it was interrupted.
        if result:
            _show_result(result)
        if result and out is not None:
            write_file(out / "training.png", draw(result))
            show(f"written: {out / 'training.json'}, {out / 'training.png'}")
    return result


_HEADER = (
    *("program", "tokens/s", "(min-max)", "of ceiling", "/ reference", "(min-max)"),
    *("CPU s/step", "peak memory", "/ reference", "final loss", "first step"),
)


def _show_result(result: dict[str, Any]) -> None:
    machine = result["machine"]
    rates = ", ".join(
        f"{flops / 1e12:,.2f} TFLOP/s in {dtype}" for dtype, flops in machine["ceilings"].items()
    )
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['micro_batch_size']} x "
        f"{result['seq_len']} tokens a step; {machine['name']}, {machine['threads']} threads; "
        f"medians of {result['repeats']} x {result['steps']} steps"
    )
    show(f"large matrix products: {rates}; the higher is the ceiling")
    if machine["load"] is not None and machine["load"] > machine["cpus"] and _waits(result):
        show(
            f"other work keeps this machine busy (load {machine['load']:.1f} on {machine['cpus']} "
            "CPUs): threads that wait by spinning, as outside of firstlight's environment, wait "
            "longer for it; --same-environment takes that difference away"
        )
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    if measured:
        show_table([_HEADER, *(_cells(row) for row in measured)])
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['name']}: {row['status']}: {row['reason']}")
        elif row["chosen"]:
            chosen = (f"{key} {value}" for key, value in row["chosen"].items())
            show(f"{row['name']}: {', '.join(chosen)}")


def _waits(result: dict[str, Any]) -> bool:
    """Whether there are rows in another environment than firstlight's."""
    programs = {row["program"] for row in result["rows"]}
    return not result["same_environment"] and programs != {"firstlight"}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        f"({row['tokens_per_second_min']:,.0f}-{row['tokens_per_second_max']:,.0f})",
        f"{row['share_of_ceiling']:.1%}",
        _ratio(row["speed_ratio"]),
        ""
        if row["speed_ratio"] is None
        else f"({row['speed_ratio_min']:.2f}-{row['speed_ratio_max']:.2f})",
        f"{row['cpu_seconds']:,.2f}",
        f"{row['total_peak_bytes'] / 2**30:,.2f} GiB",
        _ratio(row["memory_ratio"]),
        f"{row['final_loss']:.4f}",
        f"{row['first_step_seconds']:.1f} s",
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
