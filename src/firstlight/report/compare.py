"""Compare several runs by their curves, their final numbers and the differences between their
recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.console import gib, loss_text, rounded
from firstlight.errors import ConfigError
from firstlight.report.charts import Chart, Line
from firstlight.report.summary import (
    Finding,
    duration,
    final_numbers,
    findings_of,
    is_accuracy,
)
from firstlight.run_log.reader import Axis, RunRecord, smoothed

#: X axes of a comparison, with their names.
AXES: Mapping[Axis, str] = {"step": "step", "tokens": "tokens seen", "hours": "hours"}
#: Recipe keys that are not compared, because they determine only where a run's files are stored.
_NOT_COMPARED = {"run.dir"}


@dataclass(frozen=True)
class RunComparison:
    """Several runs and the properties that are compared. Each list has one entry per run.

    Attributes:
        runs: the runs, in the order in which they were given.
        labels: a unique name for each run.
        numbers: result of `final_numbers` for each run.
        findings: result of `findings_of` for each run.
        differences: recipe keys ("section.key") whose values differ between runs, mapped to the
            value in each run.
    """

    runs: Sequence[RunRecord]
    labels: Sequence[str]
    numbers: Sequence[Mapping[str, Any]]
    findings: Sequence[Sequence[Finding]]
    differences: Mapping[str, Sequence[Any]]


class _Absent:
    """Placeholder for the value of a key that a recipe does not contain. It is shown as a dash."""

    def __repr__(self) -> str:
        return "—"


ABSENT = _Absent()


def compare(runs: Sequence[RunRecord]) -> RunComparison:
    """Compare runs.

    Raises:
        ConfigError: two runs have the same folder.
    """
    labels = distinct_labels([run.folder for run in runs])
    differences = recipe_differences([run.recipe for run in runs])
    return RunComparison(
        runs,
        labels,
        [final_numbers(run) for run in runs],
        [findings_of(run) for run in runs],
        differences=differences,
    )


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """Return a label for each folder. A label is the name of the folder. If several folders have
    the same name, their labels include as many parent folders as needed to make the labels unique.

    Raises:
        ConfigError: two of the folders are the same.
    """
    parts = [folder.resolve().parts[1:] for folder in folders]
    for number, folder in enumerate(folders):
        if parts[number] in parts[:number]:
            raise ConfigError(f"run folder {folder} is listed twice: list each run once")
    lengths = [1] * len(parts)
    while True:
        labels = ["/".join(p[-n:]) for p, n in zip(parts, lengths, strict=True)]
        alike = [labels.count(label) > 1 for label in labels]
        if not any(alike):
            return labels
        # If a path is a suffix of another path, only the label of the longer path can be extended.
        lengths = [n + is_alike for n, is_alike in zip(lengths, alike, strict=True)]


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys ("section.key") whose values differ between recipes. Each key is mapped to
    its values in the recipes, with `ABSENT` for recipes that lack the key.
    """
    flat = [_flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = {key: [values.get(key, ABSENT) for values in flat] for key in keys}
    return {
        key: values
        for key, values in found.items()
        # Types are compared in addition to values, because 1 == True in Python.
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


def warnings_of(found: RunComparison) -> list[str]:
    """Return the warnings that are shown on the page and in the picture. They name numbers that
    can't be compared and list the findings about each run.
    """
    tokenizers = (
        "The runs have different tokenizers: compare bits per byte, since losses are per token."
    )
    warnings = [tokenizers] if has_different_tokenizers(found) else []
    for label, findings in zip(found.labels, found.findings, strict=True):
        warnings += [f"{label}: {finding.text}" for finding in findings]
    return warnings


def has_different_tokenizers(found: RunComparison) -> bool:
    """Return True if two of the runs are known to have different tokenizers."""
    kinds = (run.start.get("tokenizer_sha256") for run in found.runs)
    return len({kind for kind in kinds if isinstance(kind, str)}) > 1


def compared_lines(found: RunComparison, key: str, axis: Axis) -> list[Line]:
    """Return the curves of a metric, one per run.

    Args:
        found: the compared runs.
        key: key of the metric. The curves of "train/loss" are smoothed.
        axis: the x axis.
    """
    lines = []
    for number, (label, run) in enumerate(zip(found.labels, found.runs, strict=True)):
        series = run.metrics.series(key, axis)
        lines.append(Line(label, smoothed(series) if key == "train/loss" else series, number))
    return lines


#: Charts of a comparison, as (key of the metric, title, unit).
_CHARTS = (
    ("train/loss", "Training loss", "nats per token, smoothed"),
    ("val/loss", "Validation loss", "nats per token"),
    ("train_eval/loss", "Loss on fixed training rows", "nats per token"),
    ("bits_per_byte", "Bits per byte", "of validation text"),
)


def compared_charts(found: RunComparison) -> list[Mapping[Axis, Chart]]:
    """Return the charts of a comparison for which at least one run has values. Each entry maps the
    axes in `AXES` to the chart with this x axis. If no run has any values, return only the chart of
    the training loss.
    """
    has = [row for row in _CHARTS if any(row[0] in run.metrics.columns for run in found.runs)]
    return [
        {
            axis: Chart(title, unit, compared_lines(found, key, axis), name)
            for axis, name in AXES.items()
        }
        for key, title, unit in has or _CHARTS[:1]
    ]


Form = Callable[[Any], str]


#: Rows of the table of numbers, as (key in `final_numbers`, name, format, preference). The
#: preference is True if higher values are better, False if lower values are better, and None
#: otherwise.
_ROWS: Sequence[tuple[str, str, Form, bool | None]] = (
    ("val/loss", "validation loss", loss_text, False),
    ("best_val/loss", "best validation loss", loss_text, False),
    ("best_val/loss_step", "at step", "{:,}".format, None),
    ("perplexity", "perplexity", "{:.2f}".format, False),
    ("bits_per_byte", "bits per byte", "{:.4f}".format, False),
    ("gzip_bits_per_byte", "bits per byte of gzip -9", "{:.4f}".format, None),
    ("train_eval/loss", "loss on fixed training rows", loss_text, False),
    ("train/loss", "training loss, last step", loss_text, False),
    ("step", "steps", "{:,}".format, None),
    ("max_steps", "of", "{:,}".format, None),
    ("tokens_seen", "tokens seen", "{:,}".format, None),
    ("epoch", "epochs", "{:.4g}".format, None),
    ("parameters", "parameters", rounded, None),
    ("tokens_per_second", "tokens/s, median", "{:,.0f}".format, True),
    ("learned_tokens_per_second", "learned tokens/s, median", "{:,.0f}".format, True),
    ("samples_per_second", "samples/s, median", rounded, True),
    ("step_seconds", "seconds per step, median", "{:.3g}".format, False),
    ("mfu", "MFU, median", "{:.1%}".format, True),
    ("memory_bytes", "peak memory", gib, False),
    ("reserved_bytes", "peak memory, reserved", gib, False),
    ("device_used_bytes", "memory used on the GPU", gib, False),
    ("gpu_utilization", "GPU utilization, median", "{:.0%}".format, True),
    ("hours", "training time", lambda hours: " ".join(duration(hours)), None),
    ("skipped_steps", "skipped steps", "{:,}".format, None),
    ("rollbacks", "rollbacks", "{:,}".format, None),
    ("resumed", "times resumed", "{:,}".format, None),
)


#: Keys of rows that are omitted if the value is 0 for all runs.
_SELDOM = {"skipped_steps", "rollbacks", "resumed"}
#: Metrics per token, which can't be compared if the runs have different tokenizers.
_BY_TOKEN = {"val/loss", "best_val/loss", "perplexity", "train/loss", "train_eval/loss"}


def number_table(found: RunComparison) -> list[tuple[str, list[str], set[int]]]:
    """Return the rows of the table of numbers, as (name, formatted number of each run, indices of
    the best runs). Rows without any numbers are omitted.
    """
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
        if form is gib:
            form = functools.partial(gib, beside=max(known))  # the same unit for all runs
        texts = ["—" if value is None else form(value) for value in values]
        errors = [numbers.get(f"{key}_stderr") for numbers in found.numbers]
        for number, error in enumerate(errors):
            if error is not None and is_accuracy(key):
                texts[number] += f" ± {error:.4f}"
        table.append((name, texts, best))
    return table
