"""The final numbers that summarise a run."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from firstlight.report.records import RunRecord
from firstlight.report.series import Metrics

_ACCURACY = re.compile(r"(.+)/(acc|acc_norm)")


def is_accuracy(key: str) -> bool:
    """True if a key is NAME/acc or NAME/acc_norm."""
    return _ACCURACY.fullmatch(key) is not None


def accuracies(metrics: Metrics) -> list[str]:
    """The keys NAME/acc and NAME/acc_norm that have numbers, in alphabetical order."""
    return sorted(key for key in metrics.columns if is_accuracy(key))


def final_numbers(run: RunRecord) -> dict[str, Any]:
    """The final numbers of a run as a JSON object; None for a number that is unknown.

    Returns:
        An object with these keys:

        - `run_folder`, `parameters`, `gzip_bits_per_byte`;
        - `step` (the last one), `max_steps`, `tokens_seen`, `epoch`;
        - last values: `train/loss`, `val/loss`, `perplexity`, `bits_per_byte`, and if there are
          any, `train_eval/loss`, `NAME/acc`, `NAME/acc_norm` and their `..._stderr`;
        - lowest values: `best_val/loss`, its step `best_val/loss_step`, `best_bits_per_byte`;
        - medians: `tokens_per_second`, `learned_tokens_per_second`, `samples_per_second`,
          `step_seconds`, `mfu`;
        - peaks: `memory_bytes`, and on a GPU `reserved_bytes` and `device_used_bytes`;
        - median: `gpu_utilization`; `hours`: time of the steps, and of saves for which they waited;
        - counts: `skipped_steps`, `rollbacks`, `resumed`.
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
        **{key: _peak(metrics.values(key)) for key in _MEMORY},
        "gpu_utilization": _median(metrics.values("gpu_utilization")),
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


_MEMORY = ("memory_bytes", "reserved_bytes", "device_used_bytes")
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
    """`value` if it is a finite number above 0, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) and value > 0 else None  # type: ignore[arg-type, operator]
