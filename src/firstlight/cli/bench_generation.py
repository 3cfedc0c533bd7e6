"""`firstlight bench generation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import human_bytes, show, show_table, with_json


@click.command("generation")
@click.option(
    "--model",
    metavar="NAME|CHECKPOINT",
    help="gpt2-124m, gpt2-350m, gpt2-774m, llama-110m, llama-1b or small, with random weights; or "
    "a model's folder. [gpt2-124m; small with --quick]",
)
@click.option(
    "--batch-sizes", metavar="N,...", default="1,8", show_default=True, help="Texts at a time."
)
@click.option("--prompt-tokens", type=int, help="Of each text. [128; 32 with --quick]")
@click.option("--new-tokens", type=int, help="Of each text. [64; 16 with --quick]")
@click.option("--repeats", type=int, help="Turns of all rows. [3; 1 with --quick]")
@click.option(
    "--rows",
    metavar="NAME,...",
    default="",
    help="Only these: transformers-fp32, transformers-bf16, fp32, bf16, int8, fp32-compiled, "
    "bf16-compiled, int8-compiled.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--quick", is_flag=True, help="A small model, one turn, nothing compiled.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write generation.json and generation.png into this folder.",
)
@with_json
def generation_command(
    model: str | None,
    batch_sizes: str,
    prompt_tokens: int | None,
    new_tokens: int | None,
    repeats: int | None,
    rows: str,
    device: str,
    quick: bool,
    out: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Tokens per second and time to the first token, beside transformers' generate.

    Each row loads the same weights in a fresh process; the rows take turns. "of the limit" is the
    time that reading the weights once would take, at the rate measured for copying memory, in the
    time that a step took.
    """
    from firstlight.bench.generation import GenerationBench, bench_generation, draw
    from firstlight.errors import ConfigError
    from firstlight.files.atomic import write_file, write_json

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes is '{batch_sizes}': give numbers such as 1,8") from None
    bench = GenerationBench(
        model=model,
        batch_sizes=sizes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        rows=[name.strip() for name in rows.split(",") if name.strip()],
        device=device,
        quick=quick,
    )
    result: dict[str, Any] = {}

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        if out is not None:
            write_json(out / "generation.json", so_far)

    try:
        bench_generation(bench, keep)
    finally:
        # Also when it was interrupted.
        if result:
            _show_result(result)
        if result and out is not None:
            write_file(out / "generation.png", draw(result))
            show(f"written: {out / 'generation.json'}, {out / 'generation.png'}")
    return result


_HEADER = (
    *("row", "texts", "tokens/s", "(min-max)", "/ transformers bf16", "of the limit"),
    *("first token", "first call", "peak memory"),
)


def _show_result(result: dict[str, Any]) -> None:
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['prompt_tokens']} tokens "
        f"of prompt, {result['new_tokens']} new ones; {machine['name']}, {machine['threads']} "
        f"threads; memory copied at {machine['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    cells = [_cells(row, batch) for row in result["rows"] for batch in row["batches"]]
    if cells:
        show_table([_HEADER, *cells])
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['name']}: failed: {row['reason']}")


def _cells(row: dict[str, Any], batch: dict[str, Any]) -> tuple[str, ...]:
    ratio, share = batch["speed_ratio"], batch["share_of_limit"]
    return (
        row["name"],
        str(batch["batch_size"]),
        f"{batch['tokens_per_second']:,.1f}",
        f"({batch['tokens_per_second_min']:,.1f}-{batch['tokens_per_second_max']:,.1f})",
        "" if ratio is None else f"{ratio:.2f}x",
        "" if share is None else f"{share:.0%}",
        f"{batch['first_token_seconds']:.3f} s",
        f"{batch['warm_up_seconds']:.1f} s",
        human_bytes(row["peak_bytes"]),
    )
