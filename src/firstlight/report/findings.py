"""Findings about a run: overfitting and divergence, judged from its metrics.

The terminal, `--json` and the report show the same findings.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from firstlight.checkpoint.manifest import Saved, best_saved
from firstlight.console import loss_text
from firstlight.errors import DIVERGED_REMEDY, CheckpointError
from firstlight.report.records import RunRecord
from firstlight.report.series import Floats, Series

#: The validation loss has risen where it is above its lowest by more than this share of it, and by
#: more than so many nats. The rows of every evaluation are the same, so that noise is smaller.
_RISE, _LEAST_RISE = 0.01, 0.01
#: The training loss has fallen where a median is below the first loss by more than this share.
_FALL = 0.003
#: Losses of a median: one batch says little.
_WINDOW = 10
#: Steps after the warm-up before a run is judged, and before it is said that the loss never fell.
_FEWEST, _FEWEST_TO_FALL = 10, 15
#: Multiple of the bound from which on a loss is judged with fewer steps after the warm-up.
_FAR_ABOVE, _FEWEST_FAR_ABOVE = 2.0, 5


@dataclass(frozen=True)
class Finding:
    """Something that went wrong in a run.

    Attributes:
        kind: "diverged" or "overfitting".
        since_step: first step at which the finding holds.
        text: the finding as one sentence without a full stop.
        advice: the remedy, as one sentence without a full stop.
        figures: the numbers that the sentence names, as JSON values.
    """

    kind: Literal["diverged", "overfitting"]
    since_step: int
    text: str
    advice: str
    figures: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {
            "kind": self.kind,
            "since_step": self.since_step,
            "text": self.text,
            "advice": self.advice,
            **self.figures,
        }


def findings_of(run: RunRecord) -> list[Finding]:
    """Findings of a run, finished or not; a run that has diverged does not overfit."""
    diverged = _ended_by_guard(run) or _divergence(run)
    found = diverged or _overfitting(run)
    return [] if found is None else [found]


# Overfitting


def _overfitting(run: RunRecord) -> Finding | None:
    """The validation loss has risen since its lowest, and the training loss has not."""
    validation = run.metrics.series("val/loss")
    # A model that is worse after training than before it has not overfitted.
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
        {"best_val/loss": lowest, "val/loss": last},
    )


def _training_rose(run: RunRecord, step: int) -> bool:
    """True if the training loss is higher at the end than it was at a step."""
    losses = run.metrics.series("train/loss")
    before = losses.y[losses.x <= step][-_WINDOW:]
    after = losses.y[losses.x > step][-_WINDOW:]
    if not len(before) or not len(after):
        return False
    return bool(np.median(after) > (1 + _RISE) * np.median(before))


def _advice_on_overfitting(run: RunRecord, step: int) -> str:
    epochs = run.metrics.last("epoch")
    read = "" if epochs is None or epochs < 1.5 else f" (the run read its own {epochs:.1f} times)"
    smaller = "lower the learning rate" if starts_from_model(run) else "take a smaller model"
    return (
        f"use more text{read}, end the run at step {step:,} (schedule.max_steps), or {smaller}; "
        f"{_kept(run, step)}"
    )


def _kept(run: RunRecord, step: int) -> str:
    """A sentence on the checkpoint with the lowest validation loss, and on its use."""
    best = best_checkpoint(run.folder)
    if best is None or best.val_loss is None:
        return (
            "no checkpoint with a validation loss was kept (checkpoint.keep_best and "
            "checkpoint.every_steps above 0 keep one)"
        )
    which = "of that step" if best.step == step else f"of step {best.step:,}, the best one kept,"
    folder = shlex.quote(str(run.folder))
    return f"the checkpoint {which} is used with --best: firstlight eval {folder} --best"


def best_checkpoint(run_folder: Path) -> Saved | None:
    """A run's kept checkpoint with the lowest validation loss, by its manifest; None without."""
    try:
        found = best_saved(run_folder)
    except (CheckpointError, OSError):
        return None
    return found[0] if found else None


# Divergence


def _ended_by_guard(run: RunRecord) -> Finding | None:
    """The run was ended since its loss or gradients were not finite, and is not resumed yet."""
    event = run.events[-1] if run.events else None
    if event is None or event["event"] != "diverged" or event["step"] < run.last_step:
        return None
    reason = str(event.get("reason")).replace(f"; {DIVERGED_REMEDY}", "")
    text = f"the run diverged at step {event['step']:,}: {reason}"
    return Finding("diverged", int(event["step"]), text, _ADVICE, {})


_ADVICE = f"{DIVERGED_REMEDY}, and begin anew"


def _divergence(run: RunRecord) -> Finding | None:
    """The loss after the warm-up is above that of guessing, or has never fallen."""
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
        # Weights that began above the bound and come down have not diverged.
        and last > (1 + _RISE) * lowest
    ):
        return _above(losses, last, bound, is_preference)
    never_fell = lowest > (1 - _FALL) * first
    is_long = trained >= _FEWEST_TO_FALL and len(losses) >= 2 * _FEWEST_TO_FALL
    # The loss of a good model that is trained further on text of its own kind hardly changes.
    if not never_fell or not is_long or is_preference or starts_from_model(run):
        return None
    text = (
        f"training loss never fell: {loss_text(last)} after {run.last_step:,} steps, "
        f"{loss_text(first)} at the first"
    )
    advice = (
        "the learning rate is far too high or too low for this model (optimizer.learning_rate), "
        "or its text has nothing to learn"
    )
    return Finding("diverged", 1, text, advice, {"train/loss": last, "first_train/loss": first})


def _above(losses: Series, last: float, bound: float, is_preference: bool) -> Finding:
    below = np.flatnonzero(losses.y <= bound)
    since = int(losses.x[min(below[-1] + 1, len(losses) - 1) if len(below) else 0])
    guess = "which answer is preferred" if is_preference else "every token with the same chance"
    text = (
        f"training loss is {loss_text(last)}, above the {loss_text(bound)} of guessing {guess}, "
        f"since step {since:,}: the run diverged"
    )
    return Finding("diverged", since, text, _ADVICE, {"train/loss": last, "guessing": bound})


def _medians(values: Floats) -> Floats:
    """The medians of values in groups of ten, counted from the end; those left over at the
    beginning are a group if there are no others."""
    whole = len(values) // _WINDOW
    if not whole:
        return np.array([np.median(values)])
    found: Floats = np.median(values[-whole * _WINDOW :].reshape(whole, _WINDOW), axis=1)
    return found


def loss_of_guessing(run: RunRecord) -> float | None:
    """The loss of giving every token the same probability: ln of the vocabulary (nats); of
    preference pairs ln 2. None where the vocabulary is not known."""
    if run.recipe.get("preference") is not None:
        return math.log(2)
    model = run.recipe.get("model")
    size = model.get("vocab_size") if isinstance(model, Mapping) else None
    return math.log(size) if type(size) is int and size > 1 else None


def starts_from_model(run: RunRecord) -> bool:
    """True if the run began with weights of another run or model."""
    is_branch = any(start.get("branched_from") is not None for start in run.starts)
    has_weights = run.start.get("init_from") is not None or is_branch
    return has_weights or run.recipe.get("lora") is not None


def _warmup_steps(run: RunRecord) -> int:
    """Steps of the learning rate's rise: as the run's start says, else as its recipe does."""
    schedule = run.recipe.get("schedule")
    in_recipe = schedule.get("warmup_steps") if isinstance(schedule, Mapping) else None
    found = run.start.get("warmup_steps", in_recipe)
    return found if type(found) is int else (run.max_steps or run.last_step) // 20
