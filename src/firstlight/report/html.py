"""Draws report.html, the page of one run."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from firstlight.console import loss_text, own_version, plain, rounded
from firstlight.report.axes import second_axis
from firstlight.report.charts import COLOURS, Chart, Line, Mark
from firstlight.report.findings import Finding, findings_of
from firstlight.report.numbers import accuracies, final_numbers
from firstlight.report.page import (
    chosen_samples,
    duration,
    legend,
    loss_unit,
    memory_unit,
    page,
    plots,
    shortened,
)
from firstlight.report.records import MOSTLY_LEARNED, RunRecord
from firstlight.report.series import Metrics, Series, smoothed

#: Buckets of thinned curves (see `thin`) in a wide chart.
_BUCKETS = 700
#: Largest number of events in the list, the last ones.
_MAX_EVENTS = 500

#: Keys that get no chart in the section of further metrics: they are shown elsewhere on the page,
#: or follow from another key.
_SHOWN = {
    "train/loss",
    "val/loss",
    "train_eval/loss",
    "learning_rate",
    "global_batch_tokens",
    "grad_norm",
    "tokens_per_second",
    "learned_tokens_per_second",
    "samples_per_second",
    "memory_bytes",
    "reserved_bytes",
    "device_used_bytes",
    "gpu_utilization",
    "tokens_seen",
    "epoch",
    "seconds",
    "perplexity",
    "skipped",
    "skipped_steps",
}
#: Largest number of charts of further metrics.
_MAX_FURTHER = 40


@dataclass(frozen=True)
class Figure:
    """A chart on a page.

    Attributes:
        id: id of the element, unique on the page.
        chart: the chart.
        charts: its drawings; see `plots`.
        legend: CSS class and name of each entry of the legend.
        log: True shows the logarithmic axis first.
        switch: True lets the reader switch between linear and logarithmic axis.
        wide: True for a chart over the whole width of the page.
    """

    id: str
    chart: Chart
    charts: Markup
    legend: Sequence[tuple[str, str]]
    log: bool = False
    switch: bool = False
    wide: bool = False


def run_page(run: RunRecord) -> str:
    """The HTML page of a run."""
    numbers, findings = final_numbers(run), findings_of(run)
    samples, samples_note = chosen_samples(run.samples)
    events, events_note = _events(run)
    further, found = _further(run.metrics)
    return page(
        "run.html",
        {
            "title": run.name or "run",
            "version": own_version(),
            **_progress(run, findings),
            "findings": findings,
            "facts": _facts(run, numbers),
            "cards": _cards(numbers),
            "figures": _figures(run, findings),
            "further": further,
            "further_note": f"{len(further)}"
            if len(further) == found
            else f"{len(further)} of {found}",
            "evaluations": _evaluations(run.metrics),
            "evaluation_figure": _evaluation_figure(run.metrics),
            "samples": samples,
            "samples_note": samples_note,
            "events": events,
            "events_note": events_note,
            "numbers": _number_rows(numbers),
            "machine": _machine(run.start),
            "recipe": run.recipe_text,
        },
    )


def _progress(run: RunRecord, findings: Sequence[Finding]) -> dict[str, str]:
    """The template's variables `state` (a CSS class) and `progress` (a text)."""
    step, most = run.last_step, run.max_steps
    kinds = [one.kind for one in findings]
    if "diverged" in kinds:
        of = "" if most is None or step >= most else f" of {most:,}"
        return {"state": "diverged", "progress": f"diverged: {step:,}{of} steps"}
    if most is None:
        return {"state": "", "progress": f"{step:,} steps"}
    if step >= most:
        # "complete" is shown in green, only for runs without findings.
        state = "" if findings else "complete"
        return {"state": state, "progress": ", ".join([f"complete: {step:,} steps", *kinds])}
    return {"state": "", "progress": f"step {step:,} of {most:,}"}


def _facts(run: RunRecord, numbers: Mapping[str, Any]) -> list[str]:
    """The facts in the line below the run's name."""
    model = run.recipe.get("model")
    family = model.get("model_type") if isinstance(model, dict) else None
    facts = []
    if numbers["parameters"]:
        facts.append(f"{family or 'a model'} of {rounded(numbers['parameters'])} parameters")
    machine = run.start.get("machine")
    if isinstance(machine, dict) and isinstance(machine.get("name"), str):
        facts.append(machine["name"])
    began = run.starts[0].get("time") if run.starts else None
    if isinstance(began, str):
        facts.append(f"started {_when(began)}")
    if run.length:
        facts.append(_minutes(run.length))
    return facts


def _minutes(length: Mapping[str, Any]) -> str:
    """A text with the used and the planned minutes of a run whose length is given in minutes."""
    used = length.get("seconds_used", 0.0) / 60
    return f"{used:.2f} of {length.get('max_minutes', math.nan):g} minutes"


def _when(text: str) -> str:
    try:
        return f"{datetime.datetime.fromisoformat(text):%d %B %Y, %H:%M %Z}"
    except ValueError:
        return text


@dataclass(frozen=True)
class KeyFigure:
    """A number in large type, with its name, unit, and a note for comparison."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


def _cards(numbers: Mapping[str, Any]) -> list[KeyFigure]:
    """The key figures at the top of the page, from `final_numbers`; unknown ones are left out."""
    cards = []
    if numbers["val/loss"] is not None:
        best = (
            f"best {loss_text(numbers['best_val/loss'])} at step {numbers['best_val/loss_step']:,}"
        )
        cards.append(KeyFigure("validation loss", loss_text(numbers["val/loss"]), "nats", best))
    elif numbers["train/loss"] is not None:
        cards.append(KeyFigure("training loss", loss_text(numbers["train/loss"]), "nats"))
    if numbers["bits_per_byte"] is not None:
        gzip = numbers["gzip_bits_per_byte"]
        note = "" if gzip is None else f"gzip -9: {gzip:.3f} on all validation text"
        cards.append(KeyFigure("bits per byte", loss_text(numbers["bits_per_byte"], 3), "", note))
    if numbers["tokens_seen"] is not None:
        epochs = "" if numbers["epoch"] is None else f"{numbers['epoch']:.3g} epochs"
        cards.append(KeyFigure("tokens seen", rounded(numbers["tokens_seen"]), "", epochs))
    if numbers["tokens_per_second"] is not None:
        rate = rounded(numbers["tokens_per_second"])
        cards.append(KeyFigure("throughput", rate, "tokens/s", _beside_throughput(numbers)))
    if numbers["memory_bytes"] is not None:
        size, unit = memory_unit(numbers["memory_bytes"])
        cards.append(KeyFigure("peak memory", f"{numbers['memory_bytes'] / size:,.3g}", unit))
    if numbers["hours"]:
        cards.append(KeyFigure("training time", *duration(numbers["hours"]), "steps and saves"))
    return cards


def _beside_throughput(numbers: Mapping[str, Any]) -> str:
    found = []
    learned = numbers["learned_tokens_per_second"]
    if learned is not None and learned < MOSTLY_LEARNED * numbers["tokens_per_second"]:
        found.append(f"{rounded(learned)} learned tokens/s")
    if numbers["samples_per_second"] is not None:
        found.append(f"{rounded(numbers['samples_per_second'])} samples/s")
    if numbers["mfu"] is not None:
        found.append(f"MFU {numbers['mfu']:.1%}")
    return f"{', '.join(found)}; medians" if found else ""


def loss_lines(metrics: Metrics) -> list[Line]:
    """The curves of the loss: training loss of each step and smoothed, validation loss, and the
    loss on fixed rows of the training split."""
    raw = metrics.series("train/loss")
    return [
        Line("train/loss, each step", raw, 0, faint=True),
        Line("train/loss, smoothed", smoothed(raw), 0),
        Line("val/loss", metrics.series("val/loss"), 1),
        Line("train_eval/loss", metrics.series("train_eval/loss"), 6),
    ]


def _figures(run: RunRecord, findings: Sequence[Finding]) -> list[Figure]:
    """The charts of losses, learning rate, batch, gradient norm, throughput and memory."""
    metrics, figures = run.metrics, []
    marks = [Mark(e["step"], kind_of(e), happening(e)) for e in run.what_happened]
    marks += [
        Mark(one.since_step, "lowest-validation-loss", one.text)
        for one in findings
        if one.kind == "overfitting"
    ]
    loss = Chart(
        "Loss",
        loss_unit(run),
        [line for line in loss_lines(metrics) if len(line.series)],
        width=1060,
        height=400,
        marks=marks,
        below=second_axis("tokens seen", metrics.series("tokens_seen")),
        above=second_axis("epochs", metrics.series("epoch")),
    )
    figures.append(_figure("loss", loss, switch=True, wide=True, log=loss.needs_log))
    most = max((max(metrics.values(key), default=0) for key, *_ in _MEMORY), default=0)
    size, unit = memory_unit(most)
    busy = metrics.series("gpu_utilization")
    utilization = Series(busy.x, 100 * busy.y)
    for identity, title, unit_name, series, colour, zero in (
        ("rate", "Learning rate", "", metrics.series("learning_rate"), 2, True),
        ("batch", "Tokens a step", "", metrics.series("global_batch_tokens"), 6, True),
        ("norm", "Gradient norm", "before clipping", metrics.series("grad_norm"), 3, True),
        ("speed", "Throughput", "tokens/s", metrics.series("tokens_per_second"), 5, True),
        ("gpu", "GPU utilization", "%, by the driver", utilization, 1, True),
    ):
        if len(series):
            chart = Chart(title, unit_name, [Line(title.lower(), series, colour)], zero=zero)
            is_norm = identity == "norm"
            figures.append(_figure(identity, chart, switch=is_norm, log=is_norm))
    if lines := _memory_lines(metrics, size):
        memory = Chart("Memory", f"{unit}, peak so far", lines, zero=True)
        figures.append(_figure("memory", memory))
    return figures


#: Metric of memory, its name in the chart, and its colour.
_MEMORY = (
    ("memory_bytes", "memory", 4),
    ("reserved_bytes", "reserved by the allocator", 6),
    ("device_used_bytes", "used on the GPU, all processes", 7),
)


def _memory_lines(metrics: Metrics, size: int) -> list[Line]:
    """The curves of memory that a run recorded, in units of `size` bytes."""
    found = [(metrics.series(key), name, colour) for key, name, colour in _MEMORY]
    return [Line(n, Series(s.x, s.y / size), colour) for s, n, colour in found if len(s)]


def _figure(
    identity: str, chart: Chart, *, switch: bool = False, log: bool = False, wide: bool = False
) -> Figure:
    switch = switch and chart.has_log
    log = log and switch
    charts = plots(chart, _BUCKETS if wide else _BUCKETS // 2, both=switch)
    return Figure(identity, chart, charts, legend(chart), log, switch, wide)


def _further(metrics: Metrics) -> tuple[list[Figure], int]:
    """Charts of the keys that are not shown elsewhere on the page, up to `_MAX_FURTHER`, and the
    number of all these keys."""
    shown = {*_SHOWN, *accuracies(metrics)}
    keys = [key for key in metrics.columns if key not in shown and not key.endswith("_stderr")]
    figures = [
        _figure(f"more{number}", Chart(key, "", [Line(key, metrics.series(key), 7)]))
        for number, key in enumerate(keys[:_MAX_FURTHER])
    ]
    return figures, len(keys)


def _evaluation_figure(metrics: Metrics) -> Figure | None:
    """The chart of accuracies by step; None if there was at most one evaluation."""
    lines = []
    for number, key in enumerate(accuracies(metrics)):
        series = metrics.series(key)
        by_step = metrics.series(f"{key}_stderr")
        errors = dict(zip(by_step.x.tolist(), by_step.y.tolist(), strict=True))
        known = np.array([abs(errors.get(x, 0.0)) for x in series.x.tolist()])
        lines.append(Line(key, series, number, errors=known if known.any() else None))
    if max((len(line.series) for line in lines), default=0) < 2:
        return None
    shown = lines[: 2 * COLOURS]
    note = "± one standard error"
    if len(shown) < len(lines):
        note += f"; the first {len(shown)} of {len(lines)}"
    chart = Chart("Accuracy", note, shown, width=1060, height=300)
    return _figure("accuracy", chart, wide=True)


def _evaluations(metrics: Metrics) -> list[tuple[str, ...]]:
    """The rows of the table of accuracies, as texts: task, last value, its standard error, its
    step, best value, and its step."""
    rows: list[tuple[str, ...]] = []
    for key in accuracies(metrics):
        series, error = metrics.series(key), metrics.last(f"{key}_stderr")
        best = int(series.y.argmax())
        rows.append(
            (
                key,
                f"{series.y[-1]:.4f}",
                "" if error is None else f"± {error:.4f}",
                f"{series.x[-1]:,.0f}",
                f"{series.y[best]:.4f}",
                f"{series.x[best]:,.0f}",
            )
        )
    return rows


def kind_of(event: Mapping[str, Any]) -> str:
    """The CSS class of an event on a page."""
    known = {
        "rollback": "rollback",
        "out of memory": "out-of-memory",
        "resumed": "resumed",
        "branched": "resumed",
        "diverged": "diverged",
        "length": "decision",
        "correction": "decision",
    }
    return known.get(event["event"], "event")


def happening(event: Mapping[str, Any]) -> str:
    """The description of an event, for its tooltip and the list of events."""
    if event["event"] == "rollback":
        return f"back to step {event.get('to_step')}: {event.get('reason')}"
    if event["event"] == "out of memory":
        rows, before = event.get("micro_batch_rows"), event.get("before")
        return f"micro-batches of {rows} rows from here on (before: {before})"
    if event["event"] == "resumed":
        return f"from the checkpoint of step {event['step']}, {_when(str(event.get('time', '')))}"
    if event["event"] == "branched":
        return f"off {event['branched_from']}, {_when(str(event.get('time', '')))}"
    if event["event"] == "diverged":
        return str(event.get("reason"))
    if event["event"] == "length":
        return f"{event['max_steps']:,} steps fit into {event.get('max_minutes')} minutes"
    if event["event"] == "correction":
        return f"{event['max_steps']:,} steps instead of {event['before']:,}, as the speed changed"
    details = (f"{k} {v}" for k, v in event.items() if k not in ("step", "event"))
    return f"{event['event']} {', '.join(details)}"


def _events(run: RunRecord) -> tuple[list[tuple[str, str, str, str]], str]:
    found = run.what_happened
    rows = [
        (f"{event['step']:,}", kind_of(event), event["event"], shortened(happening(event)))
        for event in found[-_MAX_EVENTS:]
    ]
    return rows, f"the last {len(rows)} of {len(found)}" if len(rows) < len(found) else ""


def _number_rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of all final numbers, with integers exact and others with six digits."""
    return [
        (key, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        for key, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _machine(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = start.get("machine")
    rows = []
    for key, value in machine.items() if isinstance(machine, dict) else ():
        if key == "memory_bytes" and isinstance(value, int):
            key, value = "memory", f"{value / 2**30:.1f} GiB"
        rows.append((key, plain(value)))
    return rows
