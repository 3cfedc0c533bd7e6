"""Compute the final numbers of a run and detect overfitting and divergence.

The terminal, `--json` and the report all show the same numbers and findings.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from firstlight.checkpoint.manifest import Saved, best_saved
from firstlight.console import counted, loss_text
from firstlight.errors import DIVERGED_REMEDY, CheckpointError
from firstlight.evaluation.scores import change_text
from firstlight.run_log.names import METRICS_NAME
from firstlight.run_log.reader import Floats, Metrics, RunRecord, Series, sound_json_lines

#: The rate of learned tokens (tokens that contribute to the loss) is also shown if it is below this
#: fraction of the overall token rate. In plain text, all tokens are learned, except for padding in
#: the last row of an epoch.
MOSTLY_LEARNED = 0.9
#: Overfitting is reported if the validation loss has risen above its lowest value by more than both
#: of these thresholds. The first is a fraction of the lowest value, and the second is a difference
#: in nats. Every evaluation uses the same rows, so the validation loss is less noisy than the
#: training loss.
_RISE, _LEAST_RISE = 0.01, 0.01
#: The training loss is considered to have fallen if a median (see `_medians`) is below the first
#: loss by at least this fraction of the first loss.
_FALL = 0.003
#: Number of losses from which a median is computed. Medians are used because the loss of a single
#: batch is noisy.
_WINDOW = 10
#: Minimum number of steps after the warm-up before a problem is reported. _FEWEST applies to a loss
#: above the loss of guessing, and _FEWEST_TO_FALL to a loss that has never fallen.
_FEWEST, _FEWEST_TO_FALL = 10, 15
#: A loss is reported early if it exceeds both the loss of guessing and the first loss by the factor
#: _FAR_ABOVE, and if at least _FEWEST_FAR_ABOVE losses have been logged.
_FAR_ABOVE, _FEWEST_FAR_ABOVE = 2.0, 5


@dataclass(frozen=True)
class Finding:
    """A problem found in a run.

    Attributes:
        kind: "diverged" or "overfitting".
        since_step: first step at which the problem occurred.
        text: description of the problem as a sentence without a full stop.
        advice: recommended action as a sentence without a full stop.
        figures: numbers in `text` as JSON values, keyed by name.
    """

    kind: Literal["diverged", "overfitting"]
    since_step: int
    text: str
    advice: str
    figures: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        fields = {"kind": self.kind, "since_step": self.since_step, "text": self.text}
        return {**fields, "advice": self.advice, **self.figures}


def findings_of(run: RunRecord) -> list[Finding]:
    """Return the findings about a run, which may still be in progress. The list contains at most
    one finding, because a run that has diverged is not checked for overfitting.
    """
    diverged = _ended_by_guard(run) or _divergence(run)
    found = diverged or _overfitting(run)
    return [] if found is None else [found]


# Overfitting


def _overfitting(run: RunRecord) -> Finding | None:
    """Return a finding if the validation loss has risen above its lowest value while the training
    loss has not risen. Otherwise, return None.
    """
    validation = run.metrics.series("val/loss")
    # The evaluation before the first step is ignored. If the loss was lowest before training, the
    # model has not overfitted.
    trained = validation.x > 0
    validation = Series(validation.x[trained], validation.y[trained])
    if len(validation) < 2:
        return None
    best = int(validation.y.argmin())
    lowest, last = float(validation.y[best]), float(validation.y[-1])
    if last - lowest <= max(_RISE * abs(lowest), _LEAST_RISE) or _training_rose(
        run, int(validation.x[best])
    ):
        return None
    step = int(validation.x[best])
    return Finding(
        "overfitting",
        step,
        f"validation loss rose since step {step:,} (from {loss_text(lowest)} to "
        f"{loss_text(last)}): overfitting",
        _advice_on_overfitting(run, step),
        figures={"best_val/loss": lowest, "val/loss": last},
    )


def _training_rose(run: RunRecord, step: int) -> bool:
    """Return True if the training loss is higher at the end of the run than at a given step.
    Medians over 10 steps are compared.
    """
    losses = run.metrics.series("train/loss")
    before = losses.y[losses.x <= step][-_WINDOW:]
    after = losses.y[losses.x > step][-_WINDOW:]
    if not len(before) or not len(after):
        return False
    return bool(np.median(after) > (1 + _RISE) * np.median(before))


def _advice_on_overfitting(run: RunRecord, step: int) -> str:
    epochs = run.metrics.last("epoch")
    read = "" if epochs is None or epochs < 1.5 else f" (the run took {epochs:.1f} epochs)"
    smaller = "lower the learning rate" if starts_from_model(run) else "use a smaller model"
    return (
        f"use more text{read}, end the run at step {step:,} (schedule.max_steps), or {smaller}; "
        f"{_kept(run, step)}"
    )


def _kept(run: RunRecord, step: int) -> str:
    """Return a sentence that describes the available checkpoint with the lowest validation loss and
    how to use it."""
    best = best_checkpoint(run.folder)
    if best is None or best.val_loss is None:
        return (
            "no checkpoint with a validation loss was kept (set checkpoint.keep_best and "
            "checkpoint.every_steps above 0 to keep one)"
        )
    which = "that step" if best.step == step else f"step {best.step:,}, the best one kept"
    folder = shlex.quote(str(run.folder))
    return f"--best uses the checkpoint of {which}: firstlight eval {folder} --best"


def best_checkpoint(run_folder: Path) -> Saved | None:
    """Return the available checkpoint of a run that has the lowest validation loss according to the
    manifests. Return None if there is no such checkpoint. The files of the checkpoint are not
    verified.
    """
    try:
        found = best_saved(run_folder)
    except (CheckpointError, OSError):
        return None
    return found[0] if found else None


@dataclass(frozen=True)
class KeptResult:
    """Change of the held-out new and kept text of a run, from the start of the run to its best
    checkpoint. If the new text has no validation split, no checkpoint is the best, and the change
    to the last evaluation is given.

    The best checkpoint is the one with the lowest sum of the bits per byte of both texts. For
    preference pairs, it is the lowest sum of their loss and the kept text's bits per byte.

    Attributes:
        new: bits per byte of the new text before and after training. For preference pairs, bits per
            chosen answer. None without a validation split.
        kept: bits per byte of the kept text before and after training.
        step: step of the best checkpoint, or of the last evaluation.
        is_last: True if this is the last evaluated step.
        is_better: True if the sum is lower than that of the initial model.
        of_pairs: True for preference pairs.
    """

    new: tuple[float, float] | None
    kept: tuple[float, float]
    step: int
    is_last: bool
    is_better: bool = True
    of_pairs: bool = False

    def __str__(self) -> str:
        kept = f"kept text: {change_text(*self.kept)}"
        if self.new is None:
            return f"{kept} (step {self.step:,}; the new text has no validation split)"
        new, rule = "new text", "bits per byte of both"
        if self.of_pairs:
            new, rule = "chosen answers", "loss and kept text's bits per byte"
        where = f"step {self.step:,} has the lowest sum of {rule}"
        if not self.is_better:
            where = f"step {self.step:,}; the initial model has a lower sum of {rule}"
        return f"{new}: {change_text(*self.new)}; {kept} ({where})"


def kept_result(run_folder: Path) -> KeptResult | None:
    """Return the changes of the new and the kept text in a run. Return None if the run has no kept
    text, or no checkpoint after an evaluation of both.
    """
    key, chosen = "kept/bits_per_byte", "val/log_prob_chosen"
    lines = {line["step"]: line for line in sound_json_lines(run_folder / METRICS_NAME)[0]}
    lines = {step: line for step, line in lines.items() if line.get(key) is not None}
    if 0 in lines and "val/loss" not in lines[0] and (last := max(lines)):
        return KeptResult(None, (lines[0][key], lines[last][key]), last, is_last=True)
    best = best_checkpoint(run_folder)
    if best is None or 0 not in lines or best.step not in lines:
        return None
    ends = lines[0], lines[best.step]
    of_pairs = chosen in ends[0]
    if of_pairs:
        before, after = (-x[chosen] / math.log(2) for x in ends)
    else:
        before, after = (x["bits_per_byte"] for x in ends)
    sums = [x[key] + x["val/loss" if of_pairs else "bits_per_byte"] for x in ends]
    return KeptResult(
        (before, after),
        (ends[0][key], ends[1][key]),
        best.step,
        is_last=best.step == max(lines),
        is_better=sums[1] <= sums[0],
        of_pairs=of_pairs,
    )


# Divergence


def _ended_by_guard(run: RunRecord) -> Finding | None:
    """Return a finding if the divergence guard has ended the run and the run has not been resumed
    since then. Otherwise, return None.
    """
    event = run.events[-1] if run.events else None
    if event is None or event["event"] != "diverged" or event["step"] < run.last_step:
        return None
    text = f"the run diverged at step {event['step']:,}"
    if isinstance(event.get("reason"), str):
        text += f": {event['reason'].replace(f'; {DIVERGED_REMEDY}', '')}"
    return Finding("diverged", int(event["step"]), text, _ADVICE, figures={})


_ADVICE = f"{DIVERGED_REMEDY}, and start again"


def _divergence(run: RunRecord) -> Finding | None:
    """Return a finding if the training loss is above the loss of guessing or has never fallen.
    Otherwise, return None.
    """
    losses = run.metrics.series("train/loss")
    bound = loss_of_guessing(run)
    if bound is None or len(losses) < _FEWEST_FAR_ABOVE:
        return None
    trained = int((losses.x > _warmup_steps(run)).sum())
    medians = _medians(losses.y)
    last, first = float(medians[-1]), float(losses.y[0])
    lowest = min(first, float(medians.min()))
    is_preference = run.recipe.get("preference") is not None
    if last > _FAR_ABOVE * max(bound, first) or (
        not is_preference
        and trained >= _FEWEST
        and last > bound
        # A run whose loss began above the loss of guessing and is still falling has not diverged.
        and last > (1 + _RISE) * lowest
    ):
        return _above(losses, last, bound, is_preference)
    never_fell = lowest > (1 - _FALL) * first
    is_long = trained >= _FEWEST_TO_FALL and len(losses) >= 2 * _FEWEST_TO_FALL
    # The loss of a good model hardly changes if the model is trained further on similar text.
    if not never_fell or not is_long or is_preference or starts_from_model(run):
        return None
    text = (
        f"training loss never fell: {loss_text(first)} at the first step, {loss_text(last)} after "
        f"{counted(run.last_step, 'step')}"
    )
    advice = (
        "the learning rate is far too high or too low for this model (optimizer.learning_rate), "
        "or the text contains nothing to learn"
    )
    return Finding(
        "diverged", 1, text, advice, figures={"train/loss": last, "first_train/loss": first}
    )


def _above(losses: Series, last: float, bound: float, is_preference: bool) -> Finding:
    below = np.flatnonzero(losses.y <= bound)
    since = int(losses.x[min(below[-1] + 1, len(losses) - 1) if len(below) else 0])
    guess = "guessing the preferred answer" if is_preference else "guessing tokens at random"
    text = (
        f"the run diverged: since step {since:,}, the training loss ({loss_text(last)}) is above "
        f"that of {guess} ({loss_text(bound)})"
    )
    return Finding(
        "diverged", since, text, _ADVICE, figures={"train/loss": last, "guessing": bound}
    )


def _medians(values: Floats) -> Floats:
    """Return the medians of consecutive groups of ten values. The last group ends with the last
    value, so up to nine values at the beginning are omitted. If there are fewer than ten values,
    they form a single group.
    """
    whole = len(values) // _WINDOW
    if not whole:
        return np.array([np.median(values)])
    found: Floats = np.median(values[-whole * _WINDOW :].reshape(whole, _WINDOW), axis=1)
    return found


def loss_of_guessing(run: RunRecord) -> float | None:
    """Return the loss of guessing in nats, which is the loss of a model that assigns the same
    probability to all tokens. It is the natural logarithm of the vocabulary size, or ln 2 for
    preference pairs. Return None if the vocabulary size is unknown.
    """
    if run.recipe.get("preference") is not None:
        return math.log(2)
    model = run.recipe.get("model")
    size = model.get("vocab_size") if isinstance(model, Mapping) else None
    return math.log(size) if type(size) is int and size > 1 else None


def starts_from_model(run: RunRecord) -> bool:
    """Return True if the run started from the weights of another run or model."""
    is_branch = any(start.get("branched_from") is not None for start in run.starts)
    has_weights = run.start.get("init_from") is not None or is_branch
    return has_weights or run.recipe.get("lora") is not None


def _warmup_steps(run: RunRecord) -> int:
    """Return the number of warm-up steps from the event that was logged at the start of the run, or
    from the recipe. If neither contains the number, return a twentieth of the run's steps.
    """
    schedule = run.recipe.get("schedule")
    in_recipe = schedule.get("warmup_steps") if isinstance(schedule, Mapping) else None
    found = run.start.get("warmup_steps", in_recipe)
    return found if type(found) is int else (run.max_steps or run.last_step) // 20


# Final numbers

_ACCURACY = re.compile(r"(.+)/(acc|acc_norm)")


def is_accuracy(key: str) -> bool:
    """Return True if a key has the form NAME/acc or NAME/acc_norm."""
    return _ACCURACY.fullmatch(key) is not None


def accuracies(metrics: Metrics) -> list[str]:
    """Return the keys of the form NAME/acc and NAME/acc_norm that have values, in alphabetical
    order.
    """
    return sorted(key for key in metrics.columns if is_accuracy(key))


def final_numbers(run: RunRecord) -> dict[str, Any]:
    """Return the final numbers of a run as a JSON object. Unknown numbers are None.

    Returns:
        An object with these keys:

        - `run_folder`, `parameters`, `gzip_bits_per_byte`
        - progress: `step` (the last one), `max_steps`, `tokens_seen`, `epoch`
        - last values: `train/loss`, `val/loss`, `perplexity`, `bits_per_byte`, and, if available,
          `train_eval/loss`, `NAME/acc`, `NAME/acc_norm` and their `..._stderr`
        - lowest values: `best_val/loss`, its step `best_val/loss_step`, `best_bits_per_byte`
        - medians: `tokens_per_second`, `learned_tokens_per_second`, `samples_per_second`,
          `step_seconds`, `mfu`, `gpu_utilization`
        - peaks: `memory_bytes` and, on a GPU, `reserved_bytes` and `device_used_bytes`
        - time: `hours`, the total duration of the steps, including the time spent waiting for saves
        - counts: `skipped_steps`, `rollbacks`, `resumed`
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


def memory_kind(numbers: Mapping[str, Any]) -> str:
    """Return what `memory_bytes` measures in the metrics of a step or in `final_numbers`. This is
    "tensors" on a GPU and "process" on a CPU.
    """
    return "process" if numbers.get("reserved_bytes") is None else "tensors"


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
    """Return `value` if it is a finite positive number. Otherwise, return None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) and value > 0 else None  # type: ignore[arg-type, operator]


def duration(hours: float) -> tuple[str, str]:
    """Format a duration as a number and a unit, such as ("12.3", "min")."""
    unit, value = "h", hours
    if value < 1:
        unit, value = "min", 60 * hours
    if value < 1:
        unit, value = "s", 3600 * hours
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}", unit
