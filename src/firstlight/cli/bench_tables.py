"""The tables that `firstlight bench ...` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from firstlight.cli.output import counted, human_bytes, show, show_table

Result = dict[str, Any]

#: Parts of a training step, as `firstlight.bench.step_parts` names them.
_PHASES = ("forward", "backward", "update")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _megabytes(value: float | None, missing: str = "") -> str:
    return missing if value is None else f"{value / 1e6:,.0f} MB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        show_table([header, *rows])


def _show_reasons(rows: Sequence[Result]) -> None:
    """Show why rows have no figures."""
    for row in rows:
        if row["reason"]:
            show(f"{row['name']}: {row.get('status', 'failed')}: {row['reason']}")


def show_loading(result: Result) -> None:
    """Show the result of `bench loading`."""
    checkpoint, machine = result["checkpoint"], result["machine"]
    show(
        f"{checkpoint['parameters']:,} parameters in {checkpoint['dtype']}, "
        f"{human_bytes(checkpoint['file_bytes'])}; {machine['name']}, {machine['threads']} "
        f"threads; medians of {result['repeats']}"
    )
    header = (
        *("way", "peak host memory", "/ file", "/ model", "peak GPU memory"),
        *("import", "load", "first logits", "/ transformers"),
    )
    rows = [
        (
            row["name"] + (" (default)" if row["default"] else ""),
            _megabytes(row["peak_bytes"]),
            f"{row['peak_to_file']:.2f}",
            f"{row['peak_to_model']:.2f}",
            # On a CPU the host's memory is all there is.
            _megabytes(row["device_peak_bytes"], "no GPU used"),
            *(f"{row[f'{key}_seconds']:.2f} s" for key in ("import", "load", "first_logits")),
            "" if row["time_to_transformers"] is None else f"{row['time_to_transformers']:.2f}",
        )
        for row in result["rows"]
    ]
    _table(header, rows)


def _show_steps_head(result: Result) -> None:
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['micro_batch_size']} x "
        f"{result['seq_len']} tokens a step; {machine['name']}, {machine['threads']} threads; "
        f"medians of {result['repeats']} x {result['steps']} steps"
    )


def show_methods(result: Result) -> None:
    """Show the result of `bench methods`."""
    machine = result["machine"]
    _show_steps_head(result)
    show(
        f"MFU is of {machine['matmul_flops'] / 1e12:,.2f} TFLOP/s, this machine's "
        f"{machine['matmul_dtype']} matrix products; speed and memory are to the first row, on "
        "the CPU above the memory after the imports; the final loss is that of step "
        f"{result['warmup_steps'] + result['steps']}, on the same rows but for the larger batch; "
        "the first step is the compiler's"
    )
    header = (
        *("samples/s", "(min-max)", "tokens/s", "MFU", "peak memory", "speed", "memory"),
        *("final loss", "first step"),
    )
    for table, title in (
        ("alone", "each method alone"),
        ("ladder", "the ladder: each added to those above"),
    ):
        measured = [row for row in result[table] if row["status"] == "measured"]
        if measured:
            # Each rung includes those before it.
            further = ("to the rung before",) if table == "ladder" else ()
            cells = [
                (*_method_cells(row), *(_ratio(row["ratio_to_previous"]) for _ in further))
                for row in measured
            ]
            show()
            show_table([(title, *header, *further), *cells])
        _show_reasons(result[table])


def _method_cells(row: Result) -> tuple[str, ...]:
    rows = f"{row['micro_batch_size']}x{row['gradient_accumulation_steps']}"
    processes = f", {row['processes']} processes" if row["processes"] > 1 else ""
    return (
        f"{row['name']} ({rows}{processes})",
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


def show_training(result: Result) -> None:
    """Show the result of `bench training`."""
    machine = result["machine"]
    rates = ", ".join(
        f"{flops / 1e12:,.2f} TFLOP/s in {dtype}" for dtype, flops in machine["ceilings"].items()
    )
    _show_steps_head(result)
    show(f"large matrix products: {rates}; the higher is the ceiling")
    # Rows in another environment than firstlight's wait by spinning.
    programs = {row["program"] for row in result["rows"]}
    spins = not result["same_environment"] and programs != {"firstlight"}
    if machine["load"] is not None and machine["load"] > machine["cpus"] and spins:
        show(
            f"other work keeps this machine busy (load {machine['load']:.1f} on {machine['cpus']} "
            "CPUs): threads that wait by spinning, as outside of firstlight's environment, wait "
            "longer for it; --same-environment takes that difference away"
        )
    header = (
        *("program", "tokens/s", "(min-max)", "of ceiling", "/ reference", "(min-max)"),
        *("CPU s/step", "peak memory", "/ reference", "final loss", "first step"),
        *_PHASES,
    )
    measured = [row for row in result["rows"] if row["status"] == "measured"]
    _table(header, [*map(_training_cells, measured)])
    for row in result["rows"]:
        if row["reason"]:
            show(f"{row['name']}: {row['status']}: {row['reason']}")
        elif row["chosen"]:
            chosen = (f"{key} {value}" for key, value in row["chosen"].items())
            show(f"{row['name']}: {', '.join(chosen)}")
    for row in measured:
        if row["operators"]:
            cells = [
                (
                    kind["class"],
                    _share(kind["share"]),
                    f"{kind['seconds']:.3f}",
                    f"{kind['calls']:g}",
                )
                for kind in row["operators"]
            ]
            show()
            show_table([(f"{row['name']}: operators", "share", "s/step", "calls/step"), *cells])


def _training_cells(row: Result) -> tuple[str, ...]:
    spread = ""
    if row["speed_ratio"] is not None:
        spread = f"({row['speed_ratio_min']:.2f}-{row['speed_ratio_max']:.2f})"
    return (
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        f"({row['tokens_per_second_min']:,.0f}-{row['tokens_per_second_max']:,.0f})",
        f"{row['share_of_ceiling']:.1%}",
        _ratio(row["speed_ratio"]),
        spread,
        f"{row['cpu_seconds']:,.2f}",
        f"{row['total_peak_bytes'] / 2**30:,.2f} GiB",
        _ratio(row["memory_ratio"]),
        f"{row['final_loss']:.4f}",
        f"{row['first_step_seconds']:.1f} s",
        *(_share(row["phases"] and row["phases"][phase]) for phase in _PHASES),
    )


def show_generation(result: Result) -> None:
    """Show the result of `bench generation`."""
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['prompt_tokens']} tokens "
        f"of prompt, {result['new_tokens']} new ones; {machine['name']}, {machine['threads']} "
        f"threads; memory copied at {machine['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    header = (
        *("row", "texts", "tokens/s", "(min-max)", "/ transformers bf16", "of the limit"),
        *("the cache's gain", "first token", "first call", "peak memory"),
    )
    rows = [
        (
            row["name"],
            str(batch["batch_size"]),
            f"{batch['tokens_per_second']:,.1f}",
            f"({batch['tokens_per_second_min']:,.1f}-{batch['tokens_per_second_max']:,.1f})",
            _ratio(batch["speed_ratio"]),
            _share(batch["share_of_limit"]),
            _ratio(batch["cache_speedup"]),
            f"{batch['first_token_seconds']:.3f} s",
            f"{batch['warm_up_seconds']:.1f} s",
            human_bytes(row["peak_bytes"]),
        )
        for row in result["rows"]
        for batch in row["batches"]
    ]
    _table(header, rows)
    _show_reasons(result["rows"])


def show_scaling(result: Result) -> None:
    """Show the result of `bench scaling`."""
    machine = result["machine"]
    show(
        f"{result['model']}, {result['parameters']:,} parameters, {result['precision']}, "
        f"{result['micro_batch_size']} rows of {result['seq_len']} tokens a process; "
        f"{machine['name']}, {machine['cores']} cores"
    )
    rows = [
        (
            row["engine"],
            str(row["processes"]),
            f"{row['tokens_per_second']:,.0f}",
            _ratio(row["speedup"]),
            _share(row["sharing_share"]),
            ", ".join(human_bytes(peak) for peak in row["peak_bytes"]),
        )
        for row in result["rows"]
        if "tokens_per_second" in row
    ]
    _table(("engine", "processes", "tokens/s", "/ one", "not computing", "memory by rank"), rows)
    _show_reasons(
        [{**row, "name": f"{row['engine']}, {row['processes']}"} for row in result["rows"]]
    )


def show_gemm(result: Result) -> None:
    """Show the result of `bench gemm`."""
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
    model = f"{result['model']}, {result['tokens']:,} tokens: share of the ceiling"
    tokens = f"{result['step_tokens']:,}"
    parts: tuple[tuple[str, str, Callable[[Result], tuple[str, str]]], ...] = (
        ("size", "square", _size_cell),
        ("model", model, _model_cell),
        (
            "step",
            f"all products of a step of {tokens} tokens take, at these rates",
            _step_cell,
        ),
        ("padding", "padded: time (rate) against unpadded", _ratio_cell),
        ("tile", "N around a tile: time (rate) against 256", _ratio_cell),
        ("wave", "tiles: time (rate) against one a multiprocessor", _ratio_cell),
    )
    for key, title, cell in parts:
        found = result["rows"] if key in ("size", "model") else result[key]
        found = [row for row in found if row.get("part", key) == key]
        _show_by_dtype(title, found, dtypes, cell)
    if result["loops"]:
        _show_loops(result["loops"])


def _show_loops(loops: Result) -> None:
    """Show the rates of passes over arrays and of a product in blocks, and waves of products."""

    def binary(size: int) -> str:  # as data sheets of processors name caches
        return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size >> 10} KiB"

    caches = ", ".join(f"{name} {binary(size)}" for name, size in loops["caches"].items())

    def rate(row: Result, name: str) -> str:
        return f"{row[name] / 1e9:.3g} ({row['lowest'] / 1e9:.3g}-{row['highest'] / 1e9:.3g})"

    title = "one thread reads" + (f" (caches: {caches})" if caches else "")
    passes = [(binary(row["bytes"]), rate(row, "bytes_per_second")) for row in loops["passes"]]
    show()
    show_table([(title, "GB/s"), *passes])
    blocks = [
        (f"{row['cut']} of {row['block']}", rate(row, "flops_per_second"))
        for row in loops["blocks"]
    ]
    show()
    show_table([(f"one thread multiplies fp32, {loops['edge']} square", "GFLOP/s"), *blocks])
    waves = loops["waves"]
    times = [
        (str(row["products"]), "{time_ratio:.2f} ({lowest:.2f}-{highest:.2f})".format_map(row))
        for row in waves["rows"]
    ]
    show()
    title = f"products of {waves['edge']} square at once, {waves['threads']} threads"
    show_table([(title, "time / time of one"), *times])


def _show_by_dtype(
    title: str,
    found: Sequence[Result],
    dtypes: Sequence[str],
    cell_of: Callable[[Result], tuple[str, str]],
) -> None:
    """Show a table with a column for each number format."""
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        name, cell = cell_of(one)
        rows.setdefault(name, {})[one["dtype"]] = cell
    if rows:
        show()
        cells = [(name, *(row.get(dtype, "") for dtype in dtypes)) for name, row in rows.items()]
        show_table([(title, *dtypes), *cells])


def _size_cell(row: Result) -> tuple[str, str]:
    spread = f"({_tera(row['lowest'])}-{_tera(row['highest'])})"
    return row["name"], f"{_tera(row['flops_per_second'])} {spread}"


def _model_cell(row: Result) -> tuple[str, str]:
    name, cell = _size_cell(row)
    shape = f"{row['m']} x {row['n']} x {row['k']} {row['layout']}"
    return f"{name} {shape}", f"{cell} {row['share_of_ceiling']:4.0%}"


def _step_cell(step: Result) -> tuple[str, str]:
    name = f"weights as {step['weights']}, vocabulary {step['vocabulary']}"
    return name, f"{step['seconds']:.3g} s, {step['share_of_ceiling']:.0%} of the ceiling"


def _ratio_cell(row: Result) -> tuple[str, str]:
    name = str(row["to"])
    if "group" in row:
        multiples = ", ".join(str(multiple) for multiple in row["multiples"])
        name = f"{row['group']} {row['from']} -> {row['to']}"
        name += f" (to {multiples})" if multiples else ""
    name += f", work {row['work_ratio']:.3f}"
    cell = f"{row['time_ratio']:.2f} ({row['rate_ratio']:.2f}) "
    return name, cell + f"[{row['lowest']:.2f}-{row['highest']:.2f}]"


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"
