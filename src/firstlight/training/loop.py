"""The training loop: pretraining, continued training and fine-tuning differ in data and
initial weights only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.checkpoint import checkpoint_folder
from firstlight.console import say
from firstlight.evaluation.perplexity import Evaluation
from firstlight.training.config import Recipe, load_recipe, parse_recipe
from firstlight.training.progress import TrainingProgress
from firstlight.training.report import draw_report
from firstlight.training.setup import set_up


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        run_folder: metrics.jsonl, report.png, recipe.yaml, checkpoints/.
        checkpoint: the last one: a Hugging Face model folder.
        step, tokens_seen: since the first step, resumed parts included.
        train_loss: of the last step; None when there was no step left to do.
        evaluation: the last one of this call; None without a validation split.
    """

    run_folder: Path
    checkpoint: Path
    step: int
    tokens_seen: int
    train_loss: float | None
    evaluation: Evaluation | None


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    new_rows: str = "mean",
    on_step: Callable[[Mapping[str, Any]], None] | None = None,
    progress: bool = False,
) -> TrainResult:
    """Train a model as a recipe says.

    Args:
        recipe: a recipe, its values, or its file.
        resume: go on from the run folder's newest complete checkpoint, exactly as if the run
            had not stopped; from the start if there is none yet.
        init_from: start from the weights of this model folder, run or hub id; its config
            replaces the recipe's `model`.
        new_rows: what the tokens that the data's tokenizer has beyond that of `init_from` start
            from: "mean" of the old tokens' rows, or "copy:TOKEN", the rows of an old one.
        on_step: called with each step's metrics.
        progress: show a progress bar and messages on stderr.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: something does not fit; said
            before the first step, and nothing is written.
        TrainingError: the loss stopped being a number. The last checkpoint is untouched.
        StorageError: the disk refused. The last checkpoint is untouched.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
    job = set_up(recipe, resume, init_from, new_rows, say if progress else _ignore)
    state, config = job.state, job.recipe
    last: dict[str, Any] = {}
    with job.open(), TrainingProgress(job.max_steps, state.step, shown=progress) as bar:
        while state.step < job.max_steps:
            record = job.step()
            evaluate_now = job.is_due(config.evaluation.every_steps)
            if evaluate_now:
                record |= job.evaluate(bar)
            last |= record
            job.metrics.write(record)
            bar.step(record)
            if on_step is not None:
                on_step(record)
            if job.is_due(config.checkpoint.every_steps):
                job.save()
        if job.saved_step != state.step:
            job.save()
        draw_report(job.run_folder)
    return TrainResult(
        job.run_folder,
        checkpoint_folder(job.run_folder, job.saved_step),
        state.step,
        state.tokens_seen,
        last.get("train/loss"),
        job.evaluation,
    )


def _ignore(_: str) -> None:
    """Says nothing."""
