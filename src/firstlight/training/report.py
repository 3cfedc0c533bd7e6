"""report.png: what a run did, at a glance."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.files import write_file
from firstlight.training.logs import EVENTS_NAME
from firstlight.training.metrics import METRICS_NAME, SAMPLES_NAME, read_json_lines

REPORT_NAME = "report.png"
_MIB = 2**20


def draw_report(run_folder: Path) -> Path:
    """Draw the metrics and the last samples of a run into its report.png; return its path.

    Args:
        run_folder: where `train` wrote metrics.jsonl.

    Raises:
        StorageError: the picture can't be written.
        CheckpointError: metrics.jsonl is damaged.
    """
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_json_lines(run_folder / METRICS_NAME)
    samples = read_json_lines(run_folder / SAMPLES_NAME)
    figure = Figure(figsize=(13, 8), layout="constrained")
    grid: dict[str, Any] = figure.subplot_mosaic(
        [["loss", "loss", "rate"], ["loss", "loss", "speed"], ["text"] * 3],
        height_ratios=[1, 1, 0.7],
    )
    _draw_loss(grid["loss"], records)
    _draw_events(grid["loss"], read_json_lines(run_folder / EVENTS_NAME))
    _draw_rate(grid["rate"], records)
    _draw_speed(grid["speed"], records)
    _draw_samples(grid["text"], samples)
    figure.suptitle(f"firstlight · {_shown(run_folder.resolve().name)}")
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A sample may be in a script that the font lacks; its boxes are warning enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        FigureCanvasAgg(figure).print_png(picture)
    path = run_folder / REPORT_NAME
    write_file(path, picture.getvalue())
    return path


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average that starts unbiased (Kingma and Ba 2015, section 3)."""
    decay = 0.5 ** (1 / half_life)
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(average / weight)
    return result


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _draw_loss(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = _series(records, "train/loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses, max(len(losses) / 50, 1)), color="tab:blue", label="train/loss")
    val_steps, val_losses = _series(records, "val/loss")
    label = "val/loss"
    if val_losses:
        _, bits = _series(records, "bits_per_byte")
        label += f": {val_losses[-1]:.3f} nats a token, {bits[-1]:.3f} bits a byte"
    axes.plot(val_steps, val_losses, "o-", color="tab:orange", label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


def _draw_events(axes: Any, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        axes.axvline(event["step"], color="tab:red", linestyle=":", linewidth=0.8)
        axes.annotate(
            f" {event['event']}",
            (event["step"], 0.01),
            xycoords=("data", "axes fraction"),
            color="tab:red",
            fontsize=7,
            rotation=90,
        )


def _draw_rate(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    axes.plot(*_series(records, "learning_rate"), color="tab:green", label="learning rate")
    axes.set(xlabel="step", ylabel="learning rate")
    norms = axes.twinx()
    steps, values = _series(records, "grad_norm")
    norms.plot(steps, values, color="tab:red", alpha=0.4, linewidth=0.8)
    norms.set_ylabel("gradient norm", color="tab:red")
    if values and max(values) > 0:
        norms.set_yscale("log")
    axes.grid(alpha=0.3)


def _draw_speed(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    steps, rates = _series(records, "tokens_per_second")
    axes.plot(steps, rates, color="tab:purple", linewidth=0.8)
    axes.set(xlabel="step", ylabel="tokens/s")
    if rates:
        axes.set_ylim(0, 1.2 * max(rates))
    _, shares = _series(records, "mfu")
    _, memory = _series(records, "memory_bytes")
    if rates and shares and memory:
        middle = sorted(rates)[len(rates) // 2]
        axes.set_title(
            f"median {middle:,.0f} tokens/s, MFU {sorted(shares)[len(shares) // 2]:.1%}, "
            f"peak {math.ceil(max(memory) / _MIB):,} MiB",
            fontsize="medium",
        )
    axes.grid(alpha=0.3)


def _draw_samples(axes: Any, samples: Sequence[Mapping[str, Any]]) -> None:
    axes.axis("off")
    if not samples:
        return
    last = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    lines: list[str] = []
    for sample in last:
        text = (sample["prompt"] + sample["text"]).expandtabs(4)
        for line in text.splitlines():
            lines += textwrap.wrap(line, 150, drop_whitespace=False) or [""]
        lines.append("")
    shown = "\n".join(lines[:18])
    axes.set_title(f"sample at step {samples[-1]['step']}", loc="left", fontsize="medium")
    text = _shown(shown)
    axes.text(0, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes)


def _shown(text: str) -> str:
    """Text as matplotlib draws it: no control characters, and no formulas, which a dollar sign
    would start."""
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return printable.replace("$", r"\$")
