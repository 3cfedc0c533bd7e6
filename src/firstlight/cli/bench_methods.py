"""`firstlight bench methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import human_bytes, show, show_table, with_json


@click.command("methods")
@click.option(
    "--model",
    metavar="NAME|RECIPE.yaml",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b, small, or the model of a recipe. "
    "[gpt2-124m; small with --quick]",
)
@click.option(
    "--seq-len", type=int, help="Tokens a row. [1024, 256 with --quick; at most the context]"
)
@click.option(
    "--micro-batch-size", type=int, help="Rows a step of the plain run. [4 on a CPU, 16 on a GPU]"
)
@click.option("--steps", type=int, help="Timed steps a run. [4 on a CPU, 20 on a GPU]")
@click.option("--repeats", type=int, help="Turns of all rows. [3; 1 with --quick]")
@click.option(
    "--rows",
    metavar="NAME,...",
    default="",
    help="Only these rows, as the tables name them (a rung of the ladder brings those below it), "
    "or `alone` or `ladder` for a whole table.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option(
    "--quick",
    is_flag=True,
    help="A small model, one turn, fewer rows, and an end after five minutes at most.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="methods-bench",
    show_default=True,
    help="Write methods.json and methods.png into this folder.",
)
@with_json
def methods_command(
    model: str | None,
    seq_len: int | None,
    micro_batch_size: int | None,
    steps: int | None,
    repeats: int | None,
    rows: str,
    device: str,
    quick: bool,
    out: Path,
    as_json: bool,
) -> dict[str, Any]:
    """What each efficiency method buys on this machine, in speed and memory.

    Two tables: each method alone beside a plain fp32 run, and the ladder, each method added to
    those before it. Every row is trained for a few steps by a fresh process, on the source of
    Python's standard library. methods.json is written anew after every run, so that an
    interrupted benchmark leaves what it has measured.
    """
    from firstlight.bench.methods import MethodsBench, bench_methods, make_plan
    from firstlight.bench.methods_draw import draw
    from firstlight.files.atomic import write_file, write_json

    plan = make_plan(
        MethodsBench(
            model=model,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            steps=steps,
            repeats=repeats,
            rows=[name.strip() for name in rows.split(",") if name.strip()],
            device=device,
            quick=quick,
        )
    )
    result: dict[str, Any] = {}

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        write_json(out / "methods.json", so_far)

    try:
        bench_methods(plan, keep)
    finally:
        # Also when it was interrupted.
        if result:
            _show_result(result)
            write_file(out / "methods.png", draw(result))
            show(f"written: {out / 'methods.json'}, {out / 'methods.png'}")
    return result


_HEADER = (
    *("samples/s", "(min-max)", "tokens/s", "MFU", "peak memory", "speed", "memory"),
    *("final loss", "first step"),
)
_TITLES = {"alone": "each method alone", "ladder": "the ladder: each added to those above"}


def _show_result(result: dict[str, Any]) -> None:
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['micro_batch_size']} x "
        f"{result['seq_len']} tokens a step; {machine['name']}, {machine['threads']} threads; "
        f"medians of {result['repeats']} x {result['steps']} steps"
    )
    show(
        f"MFU is of {machine['matmul_flops'] / 1e12:,.2f} TFLOP/s, this machine's "
        f"{machine['matmul_dtype']} matrix products; speed and memory are to the first row, on "
        "the CPU above the memory after the imports; the final loss is that of step "
        f"{result['warmup_steps'] + result['steps']}, on the same rows but for the larger batch; "
        "the first step is the compiler's"
    )
    for table, title in _TITLES.items():
        measured = [row for row in result[table] if row["status"] == "measured"]
        if measured:
            show()
            show_table([(title, *_HEADER), *(_cells(row) for row in measured)])
        for row in result[table]:
            if row["reason"]:
                show(f"{row['name']}: {row['status']}: {row['reason']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['name']} ({row['micro_batch_size']}x{row['gradient_accumulation_steps']})",
        f"{row['samples_per_second']:,.2f}",
        f"({row['samples_per_second_min']:,.2f}-{row['samples_per_second_max']:,.2f})",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
        human_bytes(row["peak_bytes"]),
        _ratio(row["speed_ratio"]),
        _ratio(row["memory_ratio"]),
        f"{row['final_loss']:.4f}",
        f"{row['first_step_seconds']:.1f} s",
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
