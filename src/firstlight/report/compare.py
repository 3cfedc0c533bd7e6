"""Several runs side by side: curves in the same axes, final numbers, what their recipes differ in,
the last samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from firstlight.console import loss_text, own_version, plain, rounded
from firstlight.errors import ConfigError
from firstlight.report.charts import Chart, Line
from firstlight.report.findings import Finding, findings_of
from firstlight.report.page import chosen_samples, duration, legend, memory_unit, page, plots
from firstlight.report.records import RunRecord
from firstlight.report.series import Axis, Metrics, Series, smoothed

AXES: Mapping[Axis, str] = {"step": "step", "tokens": "tokens seen", "hours": "hours"}
_BUCKETS = 350
#: Where they are kept, and nothing of what they are.
_NOT_COMPARED = {"run.dir"}


@dataclass(frozen=True)
class RunComparison:
    """Runs to be laid side by side.

    Attributes:
        runs: the runs in the order that they were named.
        labels: a name for each run; no two are alike.
        numbers: `final_numbers` of each.
        findings: the faults of each run.
        smoothed: each run's training loss by step.
        differences: the runs' values of each recipe key ("section.key") that differs between them.
    """

    runs: Sequence[RunRecord]
    labels: Sequence[str]
    numbers: Sequence[Mapping[str, Any]]
    findings: Sequence[Sequence[Finding]]
    smoothed: Sequence[Series]
    differences: Mapping[str, Sequence[Any]]


class _Absent:
    """Stands for a key that a recipe does not have."""

    def __repr__(self) -> str:
        return "—"


_ABSENT = _Absent()


def compare(runs: Sequence[RunRecord]) -> RunComparison:
    """Lay runs side by side.

    Raises:
        ConfigError: a folder is named twice.
    """
    labels = distinct_labels([run.folder for run in runs])
    differences = recipe_differences([run.recipe for run in runs])
    curves = [smoothed(run.metrics.series("train/loss")) for run in runs]
    numbers, findings = [final_numbers(r) for r in runs], [findings_of(r) for r in runs]
    return RunComparison(runs, labels, numbers, findings, curves, differences)


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; those that are alike with as many of the folders above as it takes.

    Raises:
        ConfigError: two are the same folder.
    """
    parts = [folder.resolve().parts[1:] for folder in folders]
    for number, folder in enumerate(folders):
        if parts[number] in parts[:number]:
            raise ConfigError(f"run folder {folder} is named twice: name each run once")
    lengths = [1] * len(parts)
    while True:
        labels = ["/".join(p[-n:]) for p, n in zip(parts, lengths, strict=True)]
        alike = [labels.count(label) > 1 for label in labels]
        if not any(alike):
            return labels
        # Where one path is the end of another, only the longer can grow.
        lengths = [n + is_alike for n, is_alike in zip(lengths, alike, strict=True)]


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{"section.key": the value in each} of the keys whose values differ; what a recipe does not
    have is written as "—"."""
    flat = [_flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = {key: [values.get(key, _ABSENT) for values in flat] for key in keys}
    return {
        key: values
        for key, values in found.items()
        # 1 and True are equal, and not the same.
        if key not in _NOT_COMPARED and len({(type(v), repr(v)) for v in values}) > 1
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


# The page


def comparison_page(found: RunComparison) -> str:
    """The page of several runs."""
    figures = _figures(found)
    return page(
        "comparison.html",
        {
            "log": any(figure.chart.needs_log for figure in figures),
            "title": f"{len(found.runs)} runs",
            "version": own_version(),
            "labels": [
                (label, f"key {line.style}")
                for label, line in zip(
                    found.labels, compared_lines(found, "train/loss", "step"), strict=True
                )
            ],
            "axes": list(AXES.items()),
            "figures": figures,
            "numbers": _number_rows(found),
            "differences": [
                (key, [str(v) if v is _ABSENT else plain(v) for v in values])
                for key, values in found.differences.items()
            ],
            "recipes": sum(bool(run.recipe) for run in found.runs),
            "samples": [(label, *_last_samples(run)) for label, run in _named(found)],
            "warnings": warnings_of(found),
        },
    )


def warnings_of(found: RunComparison) -> list[str]:
    """What the page and the picture warn of: figures that can't be compared, and what went wrong in
    each run."""
    tokenizers = (
        "The runs have different tokenizers: losses, which count nats a token, can't be compared. "
        "Bits per byte can."
    )
    named = zip(found.labels, found.findings, strict=True)
    return [
        *([tokenizers] if has_different_tokenizers(found) else []),
        *(f"{label}: {finding.text}" for label, findings in named for finding in findings),
    ]


def _named(found: RunComparison) -> list[tuple[str, RunRecord]]:
    return list(zip(found.labels, found.runs, strict=True))


def has_different_tokenizers(found: RunComparison) -> bool:
    """Whether two of the runs are known to have different ones."""
    kinds = (run.start.get("tokenizer_sha256") for run in found.runs)
    return len({kind for kind in kinds if isinstance(kind, str)}) > 1


def compared_lines(found: RunComparison, key: str, axis: Axis) -> list[Line]:
    """Each run's curve of a metric; that of the training loss smoothed."""
    lines = []
    for number, (label, run) in enumerate(_named(found)):
        series = run.metrics.series(key, axis)
        if key == "train/loss":
            # The same values over each axis; steps without a place on this one are left out.
            values = found.smoothed[number].y[-len(series) :] if len(series) else series.y
            series = Series(series.x, values)
        lines.append(Line(label, series, number))
    return lines


CHARTS = (
    ("train/loss", "Training loss", "smoothed, nats a token"),
    ("val/loss", "Validation loss", "nats a token"),
    ("train_eval/loss", "Loss on the same training rows", "nats a token"),
    ("bits_per_byte", "Bits per byte", "of the validation text"),
)


@dataclass(frozen=True)
class _Figure:
    chart: Chart
    legend: Sequence[tuple[str, str]]
    charts: Sequence[tuple[str, Markup]]
    wide: bool


def _figures(found: RunComparison) -> list[_Figure]:
    figures = []
    keys = [row for row in CHARTS if any(row[0] in r.metrics.columns for r in found.runs)]
    for key, title, unit in keys or CHARTS[:1]:
        wide = len(keys) % 2 == 1 and key == "train/loss"
        charts = [
            Chart(
                title,
                unit,
                compared_lines(found, key, axis),
                name,
                width=1060 if wide else 520,
                height=340 if wide else 280,
            )
            for axis, name in AXES.items()
        ]
        drawn = [
            (axis, plots(chart, _BUCKETS, both=True))
            for axis, chart in zip(AXES, charts, strict=True)
        ]
        figures.append(_Figure(charts[0], legend(charts[0]), drawn, wide))
    return figures


def _last_samples(run: RunRecord) -> tuple[str, list[tuple[str, str]]]:
    last = [s for s in run.samples if s["step"] == run.samples[-1]["step"]] if run.samples else []
    shown_steps, _ = chosen_samples(last)
    return shown_steps[0] if shown_steps else ("", [])


Form = Callable[[Any], str]


def _memory(value: float) -> str:
    size, unit = memory_unit(value)
    return f"{value / size:,.3g} {unit}"


#: (key, name, form, whether more is better; None: neither).
_ROWS: Sequence[tuple[str, str, Form, bool | None]] = (
    ("val/loss", "validation loss", loss_text, False),
    ("best_val/loss", "best validation loss", loss_text, False),
    ("best_val/loss_step", "at step", "{:,}".format, None),
    ("perplexity", "perplexity", "{:.2f}".format, False),
    ("bits_per_byte", "bits per byte", "{:.4f}".format, False),
    ("gzip_bits_per_byte", "gzip -9, bits per byte", "{:.4f}".format, None),
    ("train_eval/loss", "loss on the same training rows", loss_text, False),
    ("train/loss", "training loss, last step", loss_text, False),
    ("step", "steps", "{:,}".format, None),
    ("max_steps", "of", "{:,}".format, None),
    ("tokens_seen", "tokens seen", "{:,}".format, None),
    ("epoch", "epochs", "{:.4g}".format, None),
    ("parameters", "parameters", rounded, None),
    ("tokens_per_second", "tokens/s, median", "{:,.0f}".format, True),
    ("learned_tokens_per_second", "learned tokens/s, median", "{:,.0f}".format, True),
    ("samples_per_second", "samples/s, median", rounded, True),
    ("step_seconds", "seconds a step, median", "{:.3g}".format, False),
    ("mfu", "MFU, median", "{:.1%}".format, True),
    ("memory_bytes", "peak memory", _memory, False),
    ("hours", "training time", lambda hours: " ".join(duration(hours)), None),
    ("skipped_steps", "steps skipped", "{:,}".format, None),
    ("rollbacks", "rollbacks", "{:,}".format, None),
    ("resumed", "resumed", "{:,}".format, None),
)


#: Left out where no run has any.
_SELDOM = {"skipped_steps", "rollbacks", "resumed"}
#: What can't be compared between tokenizers.
_BY_TOKEN = {"val/loss", "best_val/loss", "perplexity", "train/loss", "train_eval/loss"}


def number_table(found: RunComparison) -> list[tuple[str, list[str], set[int]]]:
    """(name, each run's figure, which of these are the best) of what any run has."""
    own = [k for k in dict.fromkeys(key for n in found.numbers for key in n) if is_accuracy(k)]
    table = []
    for key, name, form, more in (*_ROWS, *((key, key, "{:.4f}".format, True) for key in own)):
        values = [numbers.get(key) for numbers in found.numbers]
        known = [value for value in values if value is not None]
        if not known or (not any(known) and key in _SELDOM):
            continue
        best: set[int] = set()
        compared = key not in _BY_TOKEN or not has_different_tokenizers(found)
        if more is not None and compared and len(set(known)) > 1:
            target = max(known) if more else min(known)
            best = {number for number, value in enumerate(values) if value == target}
        texts = ["—" if value is None else form(value) for value in values]
        errors = [numbers.get(f"{key}_stderr") for numbers in found.numbers]
        for number, error in enumerate(errors):
            if error is not None and is_accuracy(key):
                texts[number] += f" ± {error:.4f}"
        table.append((name, texts, best))
    return table


def _number_rows(found: RunComparison) -> list[tuple[str, list[tuple[str, bool]]]]:
    return [
        (name, [(text, number in best) for number, text in enumerate(texts)])
        for name, texts, best in number_table(found)
    ]


_ACCURACY = re.compile(r"(.+)/(acc|acc_norm)")


def is_accuracy(key: str) -> bool:
    """Whether a key is NAME/acc or NAME/acc_norm."""
    return _ACCURACY.fullmatch(key) is not None


def accuracies(metrics: Metrics) -> list[str]:
    """The keys NAME/acc and NAME/acc_norm that have numbers, in alphabetical order."""
    return sorted(key for key in metrics.columns if is_accuracy(key))


def final_numbers(run: RunRecord) -> dict[str, Any]:
    """The final numbers of a run, as JSON values; None where one is not known.

    Keys: `run_folder`; `step`, `max_steps`; `tokens_seen`, `epoch`; `train/loss`, `val/loss`,
    `perplexity`, `bits_per_byte`: the last; `best_val/loss` and its `best_val/loss_step`,
    `best_bits_per_byte`; `gzip_bits_per_byte`; `tokens_per_second`,
    `learned_tokens_per_second`, `samples_per_second`, `step_seconds` and `mfu`: medians;
    `memory_bytes`: the peak; `hours`: of steps and of saves that held them up; `parameters`;
    `skipped_steps`, `rollbacks`, `resumed`: counts; `train_eval/loss`, `NAME/acc...`: the last,
    where there are any.
    """
    metrics = run.metrics
    bits = metrics.values("bits_per_byte")
    validation = metrics.series("val/loss")
    best = int(validation.y.argmin()) if len(validation) else None
    hours = metrics.hours
    last = {key: metrics.last(key) for key in _LAST}
    return {
        "run_folder": str(run.folder),
        "step": run.last_step,
        "max_steps": run.max_steps,
        **{k: int(v) if k in _WHOLE and v is not None else v for k, v in last.items()},
        "best_val/loss": None if best is None else float(validation.y[best]),
        "best_val/loss_step": None if best is None else int(validation.x[best]),
        "best_bits_per_byte": float(bits.min()) if len(bits) else None,
        "gzip_bits_per_byte": _positive(run.start.get("gzip_bits_per_byte")),
        **{key: _median(metrics.values(key)) for key in _RATES},
        "step_seconds": _median(metrics.values("seconds")),
        "mfu": _median(metrics.values("mfu")),
        "memory_bytes": _peak(metrics.values("memory_bytes")),
        "hours": float(hours[-1]) if len(hours) else None,
        "parameters": _positive(run.start.get("parameters")),
        "rollbacks": sum(event["event"] == "rollback" for event in run.events),
        "resumed": sum(start["step"] > 0 and "branched_from" not in start for start in run.starts),
        **{
            key: metrics.last(key)
            for name in (*accuracies(metrics), "train_eval/loss")
            for key in (name, f"{name}_stderr")
            if key in metrics.columns
        },
    }


_RATES = ("tokens_per_second", "learned_tokens_per_second", "samples_per_second")


_LAST = (
    "tokens_seen",
    "epoch",
    "train/loss",
    "val/loss",
    "perplexity",
    "bits_per_byte",
    "skipped_steps",
)


_WHOLE = {"tokens_seen", "skipped_steps"}


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def _peak(values: Any) -> int | None:
    return int(values.max()) if len(values) else None


def _positive(value: object) -> Any:
    """A number above 0 as it is; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) and value > 0 else None  # type: ignore[arg-type, operator]
