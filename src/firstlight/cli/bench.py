"""`firstlight bench ...`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from firstlight.bench.options import GemmBench, Keep, MethodsBench, Result
from firstlight.cli import bench_tables as tables
from firstlight.cli.bench_options import STEPS_OPTIONS, bench_options, out_option, publish
from firstlight.cli.output import with_json

#: Benchmarks that are in a checkout only.
_IN_CHECKOUT = (
    "loading",
    "training",
    "generation",
    "scaling",
    "planner",
    "learning",
    "budget",
    "gpu",
)


class _Benches(click.Group):
    """The group of the benchmarks; names the command of those that are in a checkout only."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _IN_CHECKOUT:
            raise click.UsageError(
                f"bench {args[0]} is not part of the package: in a checkout of firstlight, use "
                f"python -m benchmarks {args[0]}"
            )
        return super().resolve_command(ctx, args)


@click.group("bench", cls=_Benches)
def bench_group() -> None:
    """Measure the effect of choices on this machine."""


@bench_group.command("methods")
@bench_options(
    MethodsBench,
    *STEPS_OPTIONS,
    "rows",
    "device",
    "quick",
    model="NAME|RECIPE.yaml",
)
@out_option("methods", "methods-bench")
@with_json
def methods_command(out: Path, as_json: bool, **options: Any) -> Result:
    """Speed and memory of each efficiency method on this machine.

    There are two tables: each method alone beside a plain fp32 run, and the ladder, in which each
    row adds a method to those before it. A fresh process trains each row for a few steps, on the
    source of Python's standard library. methods.json is rewritten after every run, so an
    interrupted benchmark keeps its measurements.
    """
    from firstlight.bench.methods import bench_methods
    from firstlight.bench.methods_rows import draw

    measure = partial(bench_methods, MethodsBench(**options))
    return publish("methods", out, measure, tables.show_methods, draw)


@bench_group.command("gemm")
@bench_options(GemmBench, "device", "dtype", "model", "quick")
@out_option("gemm")
@with_json
def gemm_command(out: Path | None, as_json: bool, **options: Any) -> Result:
    """This machine's matrix-product rate by shape, and the gain from aligned sizes.

    Square products from small to large; the products of a GPT-2 training step; sizes padded to
    multiples of 8, 64 and 128 beside sizes that are not; steps around a tile's edge; on a CPU,
    passes over arrays from L1 to memory and products cut into blocks. Ctrl-C keeps the measurements
    made so far.
    """
    from firstlight.bench.gemm import GemmRun, draw

    run = GemmRun(GemmBench(**options))

    def measure(keep: Keep) -> None:
        try:
            run.measure()
        finally:
            if run.result()["rows"]:
                keep(run.result())

    return publish("gemm", out, measure, tables.show_gemm, draw)
