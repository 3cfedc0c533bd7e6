"""`firstlight bench ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.bench_gemm import gemm_command
from firstlight.cli.bench_generation import generation_command
from firstlight.cli.bench_gpu import gpu_command
from firstlight.cli.bench_methods import methods_command
from firstlight.cli.bench_planner import planner_command
from firstlight.cli.bench_scaling import scaling_command
from firstlight.cli.bench_training import training_command
from firstlight.cli.output import human_bytes, show, show_table, with_json


@click.group("bench")
def bench_group() -> None:
    """What a choice buys on this very machine, measured."""


@bench_group.command("loading")
@click.option(
    "--parameters",
    metavar="COUNT",
    default="0.5B",
    show_default=True,
    help="About so many parameters (K, M, B).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Number format of the file.",
)
@click.option("--repeats", type=int, default=3, show_default=True, help="Turns of all ways.")
@click.option(
    "--ways",
    metavar="NAME,...",
    default="",
    help="Only these rows: auto, sequential, mmap, straight, sharded, cast, "
    "transformers, transformers-huge-pages, transformers-cast.",
)
@click.option("--no-transformers", is_flag=True, help="Leave transformers' rows out.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Make the checkpoint here, keep it and use it again. [a temporary folder]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write loading.json and loading.png into this folder.",
)
@with_json
def loading_command(
    parameters: str,
    dtype: str,
    repeats: int,
    ways: str,
    no_transformers: bool,
    folder: Path | None,
    out: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Memory and time of each way to load a model, beside transformers' from_pretrained.

    A checkpoint with random weights is made and loaded by a fresh process a time, on the CPU,
    from the page cache. Peak memory is what the process takes above its level after the
    imports, until the first logits.
    """
    from firstlight.bench.checkpoint import parse_count
    from firstlight.bench.loading import LoadingBench, bench_loading, draw
    from firstlight.files.atomic import write_file, write_json

    bench = LoadingBench(
        parameters=parse_count(parameters),
        dtype=dtype,
        repeats=repeats,
        ways=[name.strip() for name in ways.split(",") if name.strip()],
        transformers=not no_transformers,
        folder=folder,
    )
    result = bench_loading(bench)
    _show_result(result)
    if out is not None:
        write_json(out / "loading.json", result)
        write_file(out / "loading.png", draw(result))
        show(f"written: {out / 'loading.json'}, {out / 'loading.png'}")
    return result


for command in (
    methods_command,
    training_command,
    generation_command,
    scaling_command,
    gemm_command,
    planner_command,
    gpu_command,
):
    bench_group.add_command(command)

_HEADER = ("way", "peak", "/ file", "/ model", "import", "load", "first logits", "/ transformers")


def _show_result(result: dict[str, Any]) -> None:
    checkpoint, machine = result["checkpoint"], result["machine"]
    show(
        f"{checkpoint['parameters']:,} parameters in {checkpoint['dtype']}, "
        f"{human_bytes(checkpoint['file_bytes'])}; {machine['name']}, {machine['threads']} "
        f"threads; medians of {result['repeats']}"
    )
    show_table([_HEADER, *(_cells(row) for row in result["rows"])])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["time_to_transformers"]
    return (
        row["name"] + (" (default)" if row["default"] else ""),
        f"{row['peak_bytes'] / 1e6:,.0f} MB",
        f"{row['peak_to_file']:.2f}",
        f"{row['peak_to_model']:.2f}",
        f"{row['import_seconds']:.2f} s",
        f"{row['load_seconds']:.2f} s",
        f"{row['first_logits_seconds']:.2f} s",
        "" if ratio is None else f"{ratio:.2f}",
    )
