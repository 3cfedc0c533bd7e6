"""Several runs side by side: curves in the same axes, final numbers, what their recipes differ in,
the last samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from firstlight.console import loss_text, own_version, plain, rounded
from firstlight.errors import ConfigError
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.recipe import parse_resolved_recipe
from firstlight.recipe.load import parse_yaml
from firstlight.report.charts import Chart, Line
from firstlight.report.findings import Finding, findings_of
from firstlight.report.numbers import final_numbers, is_accuracy
from firstlight.report.page import chosen_samples, duration, legend, memory_unit, page, plots
from firstlight.report.records import RunRecord
from firstlight.report.series import Axis, Series, smoothed

AXES: Mapping[Axis, str] = {"step": "step", "tokens": "tokens seen", "hours": "hours"}
#: Axes of the dashboard.
_LIVE_AXES: Mapping[Axis, str] = {**AXES, "flops": "FLOPs"}
_BUCKETS = 350
#: Keys that don't change a run, only the place of its files.
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
        # If one path is the end of another, only the longer label can grow.
        lengths = [n + is_alike for n, is_alike in zip(lengths, alike, strict=True)]


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{"section.key": the value in each} of the keys whose values differ; a key that a recipe does
    not have is written as "—"."""
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
    return page("comparison.html", _page_values(found, AXES, CHARTS))


def dashboard_page(found: RunComparison, query: str) -> str:
    """The page of active runs, which reloads itself.

    Args:
        query: text by which the runs were chosen.
    """
    values = _page_values(found, _LIVE_AXES, (*CHARTS, *_LIVE_CHARTS))
    return page("dashboard.html", {**values, "query": query}, ("readout.js", "dashboard.js"))


def _page_values(
    found: RunComparison, axes: Mapping[Axis, str], charts: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    figures = _figures(found, axes, charts)
    return {
        "log": any(figure.chart.needs_log for figure in figures),
        "title": f"{len(found.runs)} runs",
        "version": own_version(),
        "labels": [
            (label, f"key {line.style}")
            for label, line in zip(
                found.labels, compared_lines(found, "train/loss", "step"), strict=True
            )
        ],
        "axes": list(axes.items()),
        "figures": figures,
        "numbers": _number_rows(found),
        "differences": [
            (key, [str(v) if v is _ABSENT else plain(v) for v in values])
            for key, values in found.differences.items()
        ],
        "recipes": sum(bool(run.recipe) for run in found.runs),
        "samples": [(label, *_last_samples(run)) for label, run in _named(found)],
        "warnings": warnings_of(found),
    }


def warnings_of(found: RunComparison) -> list[str]:
    """Warnings of the page and the picture: figures that can't be compared, and what went wrong in
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
    """True if two of the runs are known to have different tokenizers."""
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
        if axis == "flops":
            flops = _flops_per_token(run.recipe_text)
            series = Series(series.x * flops, series.y) if flops else Series(*2 * [np.empty(0)])
        lines.append(Line(label, series, number))
    return lines


@lru_cache(maxsize=256)
def _flops_per_token(recipe_text: str) -> float | None:
    """FLOPs of a token by a resolved recipe, as the logged MFU counts them; None where the recipe
    is not known."""
    try:
        recipe = parse_resolved_recipe(parse_yaml(recipe_text.encode()) or {})
    except (ConfigError, ValueError):
        return None
    model = meta_model(recipe.model)
    return train_flops_per_token(model, recipe.data.seq_len, frozen=recipe.lora is not None)


CHARTS = (
    ("train/loss", "Training loss", "smoothed, nats a token"),
    ("val/loss", "Validation loss", "nats a token"),
    ("train_eval/loss", "Loss on the same training rows", "nats a token"),
    ("bits_per_byte", "Bits per byte", "of the validation text"),
)


_LIVE_CHARTS = (
    ("tokens_per_second", "Speed", "tokens/s"),
    ("memory_bytes", "Peak memory", "bytes"),
)


@dataclass(frozen=True)
class _Figure:
    chart: Chart
    legend: Sequence[tuple[str, str]]
    charts: Sequence[tuple[str, Markup]]
    wide: bool


def _figures(
    found: RunComparison, axes: Mapping[Axis, str], known: Sequence[tuple[str, str, str]]
) -> list[_Figure]:
    figures = []
    keys = [row for row in known if any(row[0] in r.metrics.columns for r in found.runs)]
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
            for axis, name in axes.items()
        ]
        drawn = [
            (axis, plots(chart, _BUCKETS, both=True))
            for axis, chart in zip(axes, charts, strict=True)
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
#: Metrics that can't be compared between tokenizers.
_BY_TOKEN = {"val/loss", "best_val/loss", "perplexity", "train/loss", "train_eval/loss"}


def number_table(found: RunComparison) -> list[tuple[str, list[str], set[int]]]:
    """(name, each run's figure, True for the best of these) for each figure that any run has."""
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
