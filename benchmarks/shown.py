"""The tables that the benchmarks print; see `firstlight.bench.tables`."""

from __future__ import annotations

from firstlight.bench.options import Result
from firstlight.bench.tables import cell
from firstlight.cli.bench_tables import show_cells, show_line, show_reasons, show_steps_head
from firstlight.cli.output import show
from firstlight.console import human_bytes


def show_loading(result: Result) -> None:
    """Show the result of `benchmarks loading`."""
    show_line(
        "{checkpoint[parameters]:,} parameters in {checkpoint[dtype]}, "
        "{checkpoint[file_bytes]:bytes}; {machine[name]}, {machine[threads]} threads; medians of "
        "{repeats}",
        result,
    )
    rows = [
        {
            **row,
            "name": row["name"] + (" (default)" if row["default"] else ""),
            # On a CPU, only the host's memory is used.
            "on_device": cell("{device_peak_bytes:MB}", row) or "no GPU used",
        }
        for row in result["rows"]
    ]
    show_cells(
        "way | peak host memory | / file | / model | peak GPU memory | import | load | first logits"
        " | / transformers",
        "{name} | {peak_bytes:MB} | {peak_to_file:.2f} | {peak_to_model:.2f} | {on_device}"
        " | {import_seconds:.2f} s | {load_seconds:.2f} s | {first_logits_seconds:.2f} s"
        " | {time_to_transformers:.2f}",
        rows,
    )


def show_training(result: Result) -> None:
    """Show the result of `benchmarks training`."""
    machine = result["machine"]
    rates = ", ".join(
        f"{flops / 1e12:,.2f} TFLOP/s in {dtype}" for dtype, flops in machine["ceilings"].items()
    )
    show_steps_head(result)
    show(f"large matrix products: {rates}; the higher is the ceiling")
    # In the user's own environment, OpenMP threads wait by spinning, unlike in firstlight's.
    programs = {row["program"] for row in result["rows"]}
    spins = not result["same_environment"] and programs != {"firstlight"}
    if machine["load"] is not None and machine["load"] > machine["cpus"] and spins:
        show(
            f"other work keeps this machine busy (load {machine['load']:.1f} on {machine['cpus']} "
            "CPUs): threads that wait by spinning, as outside of firstlight's environment, wait "
            "longer for it; --same-environment takes that difference away"
        )
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    show_cells(
        "program | tokens/s | (min-max) | of ceiling | / reference | (min-max) | CPU s/step"
        " | peak memory | / reference | final loss | first step | forward | backward | update",
        "{name} | {tokens_per_second:,.0f}"
        " | ({tokens_per_second_min:,.0f}-{tokens_per_second_max:,.0f}) | {share_of_ceiling:.1%}"
        " | {speed_ratio:.2f}x | ({speed_ratio_min:.2f}-{speed_ratio_max:.2f})"
        " | {cpu_seconds:,.2f} | {total_peak_bytes:GiB} | {memory_ratio:.2f}x | {final_loss:.4f}"
        " | {first_step_seconds:.1f} s | {phases[forward]:.0%} | {phases[backward]:.0%}"
        " | {phases[update]:.0%}",
        measured,
    )
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['name']}: {row['status']}: {row['reason']}")
        elif row["chosen"]:
            chosen = (f"{key} {value}" for key, value in row["chosen"].items())
            show(f"{row['name']}: {', '.join(chosen)}")
    for row in measured:
        if row["operators"]:
            show()
            show_cells(
                f"{row['name']}: operators | share | s/step | calls/step",
                "{class} | {share:.0%} | {seconds:.3f} | {calls:g}",
                row["operators"],
            )


def show_generation(result: Result) -> None:
    """Show the result of `benchmarks generation`."""
    show_line(
        "{model}, {parameters:,} parameters, {prompt_tokens} tokens of prompt, {new_tokens} new "
        "ones; {machine[name]}, {machine[threads]} threads; memory copied at "
        "{machine[copy_bytes_per_second]:GB/s}",
        result,
    )
    show_cells(
        "row | texts | tokens/s | (min-max) | / transformers bf16 | of the limit"
        " | the cache's gain | first token | first call | peak memory",
        "{name} | {batch_size} | {tokens_per_second:,.1f}"
        " | ({tokens_per_second_min:,.1f}-{tokens_per_second_max:,.1f}) | {speed_ratio:.2f}x"
        " | {share_of_limit:.0%} | {cache_speedup:.2f}x | {first_token_seconds:.3f} s"
        " | {warm_up_seconds:.1f} s | {peak_bytes:bytes}",
        [{**row, **batch} for row in result["rows"] for batch in row["batches"]],
    )
    show_reasons(result["rows"])


def show_scaling(result: Result) -> None:
    """Show the result of `benchmarks scaling`."""
    show_line(
        "{model}, {parameters:,} parameters, {precision}, {micro_batch_size} rows of {seq_len} "
        "tokens a process; {machine[name]}, {machine[cores]} cores",
        result,
    )
    rows = [
        {**row, "peaks": ", ".join(map(human_bytes, row["peak_bytes"]))}
        for row in result["rows"]
        if "tokens_per_second" in row
    ]
    show_cells(
        "engine | processes | tokens/s | / one | not computing | memory by rank",
        "{engine} | {processes} | {tokens_per_second:,.0f} | {speedup:.2f}x | {sharing_share:.0%}"
        " | {peaks}",
        rows,
    )
    show_reasons(
        [{**row, "name": f"{row['engine']}, {row['processes']}"} for row in result["rows"]]
    )
