"""A run folder, read for its report: at any moment of the run, whatever ended it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.errors import CheckpointError, InputError, nearest
from firstlight.files.atomic import read_file
from firstlight.recipe.yaml_text import MAX_RECIPE_BYTES, parse_yaml
from firstlight.report.series import Metrics, read_metrics
from firstlight.training.metrics import (
    EVENTS_NAME,
    METRICS_NAME,
    SAMPLES_NAME,
    STARTS_NAME,
    read_json_lines,
)

_RECIPE_NAME = "recipe.yaml"
#: A resolved recipe is longer than the one that it was made of.
_RESOLVED = 8
_MAX_STEP = 2**53

_ACCURACY = re.compile(r"(.+)/(acc|acc_norm)")


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run.

    Attributes:
        folder: the run folder.
        metrics: of its steps.
        samples: the lines of samples.jsonl.
        events: those of events.jsonl.
        starts: those of starts.jsonl.
        recipe: the resolved recipe; empty where there is none.
        recipe_text: its file; "" where there is none.
    """

    folder: Path
    metrics: Metrics
    samples: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]
    recipe: Mapping[str, Any]
    recipe_text: str

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def start(self) -> Mapping[str, Any]:
        """The last line of starts.jsonl, or nothing."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        """The last step that is logged; 0 before the first."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run, where known."""
        schedule = self.recipe.get("schedule")
        found = schedule.get("max_steps") if isinstance(schedule, dict) else None
        found = self.start.get("max_steps", found)
        return found if type(found) is int and found > 0 else None

    @property
    def what_happened(self) -> list[Mapping[str, Any]]:
        """Events and resumptions, by step."""
        resumed = [{**s, "event": "resumed"} for s in self.starts if s["step"] > 0]
        return sorted([*self.events, *resumed], key=lambda event: event["step"])


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. What is not there (a run that has not come so far) is empty.

    Raises:
        CheckpointError: a file of it is damaged.
    """
    recipe, text = _read_recipe(folder / _RECIPE_NAME)
    return RunRecord(
        folder,
        read_metrics(folder / METRICS_NAME),
        _read_lines(folder / SAMPLES_NAME, "prompt", "text"),
        _read_lines(folder / EVENTS_NAME, "event"),
        _read_lines(folder / STARTS_NAME),
        recipe,
        text,
    )


def _read_lines(path: Path, *texts: str) -> list[dict[str, Any]]:
    lines = read_json_lines(path)
    for line in lines:
        if not all(isinstance(line.get(key), str) for key in texts):
            raise CheckpointError(f"{path} is damaged: a line has no {' and '.join(texts)}")
        if abs(line["step"]) > _MAX_STEP:
            raise CheckpointError(f"{path} is damaged: a step is above {_MAX_STEP:,}")
    return lines


def require_run(folder: Path) -> None:
    """Refuse what is no run folder.

    Raises:
        InputError: it is missing, a file, or a folder of another kind.
    """
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise InputError(f"run folder {folder} does not exist{nearest(folder.name, siblings)}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: name the run folder that it is in")
    if any((folder / name).exists() for name in (METRICS_NAME, _RECIPE_NAME)):
        return
    run = folder.resolve().parent.parent
    if (run / METRICS_NAME).exists():
        raise InputError(f"{folder} is a checkpoint: name its run folder, {run}")
    raise InputError(
        f"{folder} is no run folder: it has no {METRICS_NAME} (name one that `firstlight train` "
        "wrote)"
    )


def _read_recipe(path: Path) -> tuple[Mapping[str, Any], str]:
    if not path.exists():
        return {}, ""
    try:
        content = read_file(path, _RESOLVED * MAX_RECIPE_BYTES)
        values = parse_yaml(content)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it has no sections")
    return values, content.decode("utf-8")


def is_accuracy(key: str) -> bool:
    """Whether a key is NAME/acc or NAME/acc_norm."""
    return _ACCURACY.fullmatch(key) is not None


def accuracies(metrics: Metrics) -> list[str]:
    """The keys NAME/acc and NAME/acc_norm that have numbers, in alphabetical order."""
    return sorted(key for key in metrics.columns if is_accuracy(key))


def final_numbers(run: RunRecord) -> dict[str, Any]:
    """What a run came to, as JSON values; None where it is not known.

    Keys: `run_folder`; `step`, `max_steps`; `tokens_seen`, `epoch`; `train/loss`, `val/loss`,
    `perplexity`, `bits_per_byte`: the last; `best_val/loss` and its `best_val/loss_step`,
    `best_bits_per_byte`; `gzip_bits_per_byte`; `tokens_per_second`,
    `learned_tokens_per_second`, `samples_per_second` and `mfu`: medians;
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
        "mfu": _median(metrics.values("mfu")),
        "memory_bytes": _peak(metrics.values("memory_bytes")),
        "hours": float(hours[-1]) if len(hours) else None,
        "parameters": _positive(run.start.get("parameters")),
        "rollbacks": sum(event["event"] == "rollback" for event in run.events),
        "resumed": sum(start["step"] > 0 for start in run.starts),
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
