"""The training loop: pretraining, continued training and fine-tuning differ in data and
initial weights only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from firstlight.checkpoint.checkpoint import checkpoint_folder
from firstlight.console import say
from firstlight.errors import DataError, FirstlightError
from firstlight.evaluation.perplexity import Evaluation
from firstlight.optim.table import compiles_update
from firstlight.parallel import find_world
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.recipe.deepspeed_recipe import with_deepspeed_file
from firstlight.report.report import draw_report
from firstlight.report.run import read_run
from firstlight.training.findings import Finding, best_checkpoint, findings_of
from firstlight.training.forecast import Comparison, Forecaster
from firstlight.training.guard import DivergedError
from firstlight.training.job import Job
from firstlight.training.processes import first_reason, on_main, run_processes, wait_for_main
from firstlight.training.progress import TrainingProgress
from firstlight.training.setup import set_up
from firstlight.training.starts import record_start
from firstlight.training.stopping import Stopping, StopRequestedError

T = TypeVar("T")


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        run_folder: metrics.jsonl, report.html, report.png, recipe.yaml, checkpoints/.
        checkpoint: the last one: a Hugging Face model folder.
        step, tokens_seen: since the first step, resumed parts included.
        train_loss: of the last step; None when there was no step left to do, or it was skipped
            for having none.
        evaluation: the last one of this call; None without a validation split.
        stopped_by: what ended the run before its last step: a signal's name, such as "SIGTERM",
            or "max_minutes"; None for a run that is complete.
        findings: what went wrong, such as overfitting; of kind "diverged" for a run whose loss
            ended above that of guessing, or never fell.
        best_checkpoint: the kept one with the lowest validation loss; None where no checkpoint has
            one.
    """

    run_folder: Path
    checkpoint: Path
    step: int
    tokens_seen: int
    train_loss: float | None
    evaluation: Evaluation | None
    stopped_by: str | None = None
    findings: Sequence[Finding] = ()
    best_checkpoint: Path | None = None

    @property
    def diverged(self) -> bool:
        """Whether the model is of no use."""
        return any(one.kind == "diverged" for one in self.findings)


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    new_rows: str = "mean",
    on_step: Callable[[Mapping[str, Any]], None] | None = None,
    progress: bool = False,
    forecaster: Forecaster | None = None,
) -> TrainResult:
    """Train a model as a recipe says.

    Started as one of several processes (`firstlight train --nproc`, torchrun, srun, ...), it trains
    together with the others, as the recipe's `distributed` section says; all get the same result.

    From the first step on, SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP end the run when the
    step at hand is done, with a checkpoint to go on from; a second signal ends it at once.

    Args:
        recipe: a recipe, its values, or its file.
        resume: go on from the run folder's newest complete checkpoint, exactly as if the run
            had not stopped; from the start if there is none yet.
        init_from: start from the weights of this model folder, run or hub id; its config
            replaces the recipe's `model`.
        new_rows: what the tokens that the data's tokenizer has beyond that of `init_from` start
            from: "mean" of the old tokens' rows, or "copy:TOKEN", the rows of an old one.
        on_step: called with each step's metrics, in the main process. It may draw from the global
            generators of Python, numpy and torch: their states are seeded, saved and resumed.
        progress: show a progress bar and messages on stderr.
        forecaster: predicts what the run takes, which is set beside what it takes; such as
            `planner.forecasting.RunForecaster`.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: something does not fit; said
            before the first step, and nothing is written.
        DataError: a shard was changed or cut short while the run read it; a checkpoint is saved.
        CheckpointError: the run folder was moved or removed; nothing is written in its place.
        RankError: another process of the run failed, or is gone.
        DivergedError: loss or gradients are not finite, and the `guard` section knows no way back.
            The last checkpoint is untouched.
        TrainingError: not even one row fits into memory. The last checkpoint is untouched.
        StorageError: the disk refused. The last checkpoint is untouched.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
    if recipe.distributed.deepspeed_config is not None:
        recipe = with_deepspeed_file(recipe, find_world().size)
    last: dict[str, Any] = {}
    stopped: str | None = None
    with (
        Stopping(recipe.run.max_minutes, shown=progress) as stopping,
        run_processes(recipe) as (hardware, engine),
        contextlib.nullcontext(Comparison(hardware)) as comparison,
        set_up(
            recipe,
            resume,
            init_from,
            new_rows,
            tell := say if progress and engine.is_main else _ignore,
            hardware,
            engine,
        ) as job,
        job.open(),
        TrainingProgress(job.max_steps, job.state.step, shown=progress and engine.is_main) as bar,
    ):
        # One that stopped in the middle of an evaluation would leave the others waiting.
        check = stopping.check if engine.world.size == 1 else _go_on
        if job.goes_on:
            wait_for_main(engine, lambda: record_start(job))
            if forecaster is not None:
                wait_for_main(engine, lambda: _predict(job, forecaster, comparison, tell))
        while job.goes_on:
            job.read_batches()
            stopped = first_reason(engine, stopping.reason or job.unreadable)
            if stopped is not None:
                break
            try:
                if job.state.pending is None:  # else a run was stopped before its evaluation
                    job.step()
                    stopping.watch()
                if job.evaluation_is_due or job.tasks_are_due:
                    job.evaluate(bar, check)
            except DivergedError as error:
                with _concluded_if_it_ends(job, str(error)):
                    job.go_back(error, bar)
                continue
            except StopRequestedError:
                break
            except DataError as error:
                # Of one process alone, as the validation split is read: see `check`.
                if engine.world.size > 1:
                    raise
                job.unreadable = stopped = str(error)
                break
            last = job.write_record()
            bar.step(last)
            comparison.add(last)
            if on_step is not None and engine.is_main:
                on_step(last)
            if job.must_save:
                job.save()
        job.finish_saving()
        if stopped is not None and (problem := first_reason(engine, job.unreadable)) is not None:
            raise DataError(f"{problem} (saved at step {job.state.step})")
        # Before the report is drawn, which loads libraries of its own.
        if engine.is_main and (text := comparison.write(job.run_folder)) is not None:
            tell(text)
        ended = on_main(engine, lambda: _concluded(job.run_folder))
        return TrainResult(
            job.run_folder,
            checkpoint_folder(job.run_folder, job.saved_step),
            job.state.step,
            job.state.tokens_seen,
            last.get("train/loss"),
            job.evaluation,
            stopped or stopping.reason if job.goes_on else None,
            tuple(Finding(**one) for one in ended["findings"]),
            None if ended["best_checkpoint"] is None else Path(ended["best_checkpoint"]),
        )


def _predict(
    job: Job, forecaster: Forecaster, comparison: Comparison, tell: Callable[[str], None]
) -> None:
    """Ask what the run is expected to take, and who to ask when memory runs out."""
    recipe, hardware, size = job.recipe, job.hardware, job.engine.world.size
    comparison.learned_share = job.dataset.label_share(job.seq_len)
    comparison.seq_len = job.seq_len
    comparison.forecast = _asked(lambda: forecaster.forecast(recipe, hardware, size), tell)
    comparison.predict_process(job.held_bytes, compiles=_loads_compiler(recipe))
    if comparison.forecast is not None:
        tell(f"predicted: {comparison.forecast.in_words}")
    job.advise = lambda: _asked(lambda: forecaster.advise(job.recipe_now, hardware, size), tell)
    job.tell = tell


def _loads_compiler(recipe: Recipe) -> bool:
    return recipe.efficiency.compile is True or compiles_update(recipe.optimizer)


def _asked(question: Callable[[], T], tell: Callable[[str], None]) -> T | None:
    """An answer; None where there is an error in its place, since no run is to end for what was
    only asked beside it."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, FirstlightError) else f"{type(error).__name__}: "
        tell(f"memory and speed can't be predicted: {kind}{error}")
        return None


def _ignore(_: str) -> None:
    """Says nothing."""


@contextlib.contextmanager
def _concluded_if_it_ends(job: Job, reason: str) -> Iterator[None]:
    """Draw the report of a run that has no way back, too, with the reason."""
    try:
        yield
    except DivergedError:
        job.add_event("diverged", job.state.step, reason=reason)
        on_main(job.engine, lambda: _concluded(job.run_folder))
        raise


def _concluded(run_folder: Path) -> dict[str, Any]:
    """Draw the report; return what it says went wrong, and the best checkpoint, as JSON values."""
    draw_report(run_folder)
    best = best_checkpoint(run_folder)
    return {
        "findings": [dataclasses.asdict(one) for one in findings_of(read_run(run_folder))],
        "best_checkpoint": None if best is None else str(best.folder),
    }


def _go_on() -> None:
    """Has no reason to stop."""
