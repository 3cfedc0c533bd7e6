"""Run the training loop. `train` is the entry point of this module.

Pretraining, continued training and fine-tuning differ only in their data and initial weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.console import notebook_display, time_text
from firstlight.errors import (
    CheckpointError,
    DataError,
    RunReplacedError,
    first_line,
    lacks_memory,
)
from firstlight.evaluation.perplexity import Evaluation
from firstlight.hardware.environment import cores_are_busy, sharing_cores
from firstlight.methods.compilation import compile_time_recorder
from firstlight.models import Model
from firstlight.parallel import find_world
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.recipe.load import with_deepspeed_file
from firstlight.report.report import draw_report
from firstlight.report.summary import Finding, best_checkpoint, final_numbers, findings_of
from firstlight.run_log.names import REPORT_NAME
from firstlight.run_log.reader import read_run
from firstlight.training.checkpoints import RunCheckpoints, write_average
from firstlight.training.forecast import ForecastComparison, Forecaster
from firstlight.training.guard import DivergedError
from firstlight.training.out_of_memory import repeated_step, uncompiled_after_failure
from firstlight.training.processes import (
    Stopping,
    StopRequestedError,
    first_reason,
    on_main,
    run_processes,
    wait_for_main,
)
from firstlight.training.progress import show_picture
from firstlight.training.run import Run
from firstlight.training.start import begin_run, open_run, set_up
from firstlight.training.step import Passes, run_passes, train_step
from firstlight.training.validation import evaluate, evaluations_due

T = TypeVar("T")


@dataclass(frozen=True)
class RunSummary:
    """Duration and speed of a run. The medians cover all steps, including those before the run was
    resumed.

    Attributes:
        seconds: duration of this call's training loop in seconds, including evaluations and saves.
        step_seconds: median duration of a step in seconds. All medians are None if there are no
            steps.
        samples_per_second: median number of samples per second. A sample is a sequence of `seq_len`
            tokens.
        tokens_per_second: median number of tokens per second.
        tokens: number of tokens in all sequences that this call to `train` has used.
        is_resumed: True if some of the run's steps were trained by an earlier call to `train`.
    """

    seconds: float
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    tokens: int = 0
    is_resumed: bool = False

    def __str__(self) -> str:
        session = " in this session" if self.is_resumed else ""
        tokens = f" for {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"training{session} took {time_text(self.seconds)}{tokens}, including evaluations and "
            "saves"
        )


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        run_folder: run folder, which contains metrics.jsonl, report.html, report.png, recipe.yaml
            and checkpoints/.
        checkpoint: folder of the last checkpoint, a Hugging Face model folder.
        step: number of completed steps, including those before the run was resumed.
        tokens_seen: number of tokens on which the model was trained in these steps.
        train_loss: loss of the last step; None if no steps remained, or if the last step was
            skipped because its loss was not finite.
        evaluation: last evaluation of this call; None without a validation split.
        stopped_by: reason why the run ended before its last step: a signal's name, such as
            "SIGTERM", or "max_minutes"; None if the run is complete.
        findings: problems of the run, such as overfitting. A finding of kind "diverged" means that
            the loss never fell or ended above the loss of guessing.
        best_checkpoint: folder of the kept checkpoint with the lowest validation loss; None if no
            kept checkpoint has a validation loss.
        summary: duration and speed of the run.
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
    summary: RunSummary = field(default=RunSummary(0.0), compare=False)

    @property
    def diverged(self) -> bool:
        """True if the run has diverged."""
        return any(one.kind == "diverged" for one in self.findings)


@sharing_cores()
def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    new_rows: str = "mean",
    branch_from: str | Path | None = None,
    on_step: Callable[[Mapping[str, Any]], None] | None = None,
    progress: bool | None = None,
    forecaster: Forecaster | None = None,
    began: float | None = None,
    is_announced: bool = False,
    chose_compiling: bool = False,
) -> TrainResult:
    """Train a model according to a recipe.

    Processes that were started together (`firstlight train --nproc`, torchrun, srun) train one
    model together, and each of them returns the same result. After the first step, SIGTERM, SIGINT
    (Ctrl-C), SIGUSR1 and SIGHUP end the run after saving a checkpoint. A second signal ends the run
    immediately.

    Args:
        recipe: a recipe, a mapping of its values, or the path of its file.
        resume: True to continue from the newest checkpoint in the run folder, if there is one, as
            if the run had not been interrupted.
        init_from: model folder, run folder or hub id of the model to start from, which replaces the
            recipe's `model` section.
        new_rows: how to initialise the rows of the embedding and the head for tokens that
            `init_from` lacks. "mean" uses the mean of the existing rows, and "copy:TOKEN" copies
            the rows of an existing token.
        branch_from: checkpoint of another run, whose full state this run continues. It is ignored
            if `resume` finds a checkpoint in this run's folder. See `cooldown_recipe`.
        on_step: called in the main process with each step's metrics. It may use the global random
            generators of Python, numpy and torch. Their states are seeded, saved and restored.
        progress: True to show the progress of the run on stderr or in a notebook; None to show it
            only in a notebook.
        forecaster: object that predicts memory and speed, such as
            `planner.plan.processes.RunForecaster`.
        began: time from which this call uses up `schedule.max_minutes`, as a value of
            `time.time()`. If None, the time is counted from the first step of this call.
        is_announced: True if the data, memory, speed and schedule have already been shown to the
            user; they are not shown again.
        chose_compiling: True if the user did not set the recipe's `efficiency.compile` explicitly,
            which is always assumed if it is "auto". If torch.compile fails, the run then continues
            without it.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the recipe, data, model and checkpoint
            do not match. The error is then raised before any file is written. These errors are also
            raised during training in two cases. If data can't be read, a checkpoint is saved before
            the error is raised. If the run folder was moved, nothing is written to the old path.
        RankError: another process failed.
        DivergedError: the run diverged and can't be rolled back to a checkpoint.
        TrainingError: a micro-batch of a single row or the optimizer update does not fit in memory,
            or a batch has no labels.
        StorageError: a file system error. Existing checkpoints are kept.
    """
    recipe = _read_recipe(recipe)
    if progress is None:
        progress = notebook_display() is not None
    with (
        Stopping(recipe.run.max_minutes, shown=progress) as stopping,
        run_processes(recipe) as (hardware, engine),
        ForecastComparison(hardware) as comparison,  # Created before the run allocates memory.
        set_up(
            recipe,
            resume,
            init_from,
            new_rows,
            branch_from=branch_from,
            hardware=hardware,
            engine=engine,
            shown=progress,
            is_announced=is_announced,
        ) as run,
        open_run(run, shown=progress),
        RunCheckpoints(run) as checkpoints,
        _reported_if_diverged(run),
    ):
        run.chose_compiling = chose_compiling or recipe.efficiency.compile == "auto"
        begin_run(run, forecaster, comparison, is_announced=is_announced)
        if run.budget is not None and began is not None:
            run.budget.add_used(time.time() - began)
        rows_before = run.state.rows_seen
        with _frozen_objects() as freeze, uncompiled_after_failure(run):
            show = _watched(run, comparison, on_step, freeze)
            training_loop(run, checkpoints, stopping, show)
        checkpoints.finish()
        wait_for_main(engine, run.write_budget)
        write_average(run)
        result = _result(run, stopping, comparison, rows_before)
    if progress and engine.is_main:
        show_picture(result.run_folder / REPORT_NAME)
    return result


def training_loop(
    run: Run,
    checkpoints: RunCheckpoints,
    stopping: Stopping,
    show: Callable[[Mapping[str, Any]], None],
) -> None:
    """Train until the last step, or until there is a reason to stop (`run.stopped_by`).

    Args:
        run: the run to train.
        checkpoints: object that saves checkpoints and rolls the run back to a checkpoint after a
            divergence.
        stopping: receives requests to stop.
        show: called with each step's metrics after they are written to the logs.

    Raises:
        DivergedError, TrainingError, CheckpointError, StorageError: see `train`.
    """
    program, engine = run.program, run.engine
    # If one of several processes stopped during an evaluation, the other processes would wait for
    # it forever.
    check = stopping.check if engine.world.size == 1 else lambda: None
    ahead = RunAhead(run, checkpoints, stopping)
    while run.goes_on:
        run.times.begin_step()
        run.decide_length()  # This has an effect only with a time budget.
        batches = run.read_batches()
        run.stopped_by = first_reason(stopping.reason or run.unreadable)
        if run.stopped_by is not None:
            ahead.drop()
            break
        try:
            if run.state.pending is None:  # Otherwise, the last step must still be evaluated.
                checkpoints.require_written()
                lr_scale = run.begin_step()  # the learning-rate schedule
                result = None
                while result is None:  # If an attempt fails, repeat it with changed settings.
                    with repeated_step(run), program.stepping(lr_scale):
                        result = train_step(
                            program.loss_sum,
                            program.optimizer,
                            run.micro_batches(batches),
                            program.scaler,
                            accepts=run.guard.accepts,
                            engine=engine,
                            skips_only_infinite=run.guard.refuses_only_infinite,
                            passes=ahead.take(),
                            run_ahead=ahead.begin,
                        )
                run.end_step(result, lr_scale)
                stopping.watch()
            evaluate(run, check)
        except DivergedError as error:
            ahead.drop()
            checkpoints.go_back(error)
            continue
        except StopRequestedError:
            break  # A resumed run repeats the unfinished evaluation.
        except DataError as error:
            # The validation split is damaged. With several processes, only the process that read
            # the damaged part raises this error, so the processes can't save a checkpoint.
            if engine.world.size > 1:
                raise
            run.unreadable = run.stopped_by = str(error)
            break
        # Write the logs before the checkpoint, so that they include the step of the checkpoint.
        record = run.write_record()
        try:
            show(record)
        except RunReplacedError:
            if stopping.signal is None:
                raise
        if checkpoints.are_due:
            checkpoints.save()


class RunAhead:
    """Runs the forward and backward passes of the next step on a GPU while the host reads the
    current step's loss and writes its metrics. Otherwise, the GPU would wait for the host in every
    step.

    Nothing is computed ahead if the current step may be followed by an evaluation, a checkpoint or
    the end of the run, or if the next passes depend on the current loss. Running ahead does not
    change the results of a step; they are bitwise identical.

    Args:
        run: the run.
        checkpoints: object that saves the run's checkpoints.
        stopping: receives requests to stop.
    """

    def __init__(self, run: Run, checkpoints: RunCheckpoints, stopping: Stopping) -> None:
        self._run = run
        self._checkpoints, self._stopping = checkpoints, stopping
        self._passes: Passes | None = None
        program = run.program
        # Do not run ahead if the loss scale depends on the current gradients or if statistics are
        # collected per step. With dropout, the next step would draw its random numbers before
        # `on_step` can draw its own. With offloaded activations, the activations of two steps would
        # need memory at the same time.
        self._is_possible = (
            run.engine.world.size == 1
            and program.scaler is None
            and program.preference is None
            and program.model.router_statistics is None
            and not _has_dropout(program.model)
            and not run.recipe.efficiency.activation_offload
        )

    def begin(self) -> bool:
        """Run the forward and backward passes of the next step if this is possible. Return True if
        they were run.
        """
        run, program = self._run, self._run.program
        if not self._is_possible or self._is_followed():
            return False
        batches = run.read_early()
        if run.unreadable is not None:
            return False
        try:
            self._passes = run_passes(
                program.loss_sum, program.optimizer, run.micro_batches(batches), None, run.engine
            )
        except Exception as error:  # noqa: BLE001  (the next step raises the error again)
            # Otherwise, the traceback would keep the tensors of the failed passes in memory.
            traceback.clear_frames(error.__traceback__)
            program.optimizer.zero_grad()
            run.put_back()
            return False
        program.is_ahead = True
        return True

    def _is_followed(self) -> bool:
        """Return True if the current step may be followed by an evaluation, a checkpoint or the end
        of the run instead of the next step.
        """
        run, checkpoints = self._run, self._checkpoints
        return (
            self._stopping.reason is not None
            or not run.has_steps_left
            or any(evaluations_due(run))
            or checkpoints.is_regular
            or checkpoints.is_asked
        )

    def take(self) -> Passes | None:
        """Return the result of the current step's passes if they were run ahead, or None. The
        result is returned only once.
        """
        passes, self._passes = self._passes, None
        self._run.program.is_ahead = False
        return passes

    def drop(self) -> None:
        """Discard the passes that were run ahead, and put their batches back."""
        if self.take() is not None:
            self._run.program.optimizer.zero_grad()
        self._run.put_back()


def _has_dropout(model: Model) -> bool:
    """Return True if the model has dropout, for which training draws random numbers."""
    # Attention layers and adapters store the dropout probability as an attribute.
    modules = list(model.modules())
    found = [module.p for module in modules if isinstance(module, nn.Dropout)]
    found += [getattr(module, "dropout", 0.0) for module in modules]
    return any(isinstance(p, float) and p > 0 for p in found)


def _read_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
    if recipe.distributed.deepspeed_config is not None:
        recipe = with_deepspeed_file(recipe, find_world().size)
    return recipe


@contextlib.contextmanager
def _frozen_objects() -> Iterator[Callable[[], None]]:
    """Yield a function that makes Python's garbage collector ignore all objects that exist at its
    first call. On exit, make the collector track these objects again.

    After the first step, hundreds of thousands of objects (modules, the model, compiled code) exist
    until the end of the run. Each full collection would scan all of them while a GPU waits. If the
    caller has already frozen objects, nothing is changed.
    """
    is_callers = gc.get_freeze_count() > 0
    is_frozen = False

    def freeze() -> None:
        nonlocal is_frozen
        if not is_callers and not is_frozen:
            gc.collect()  # Collect garbage first, because frozen garbage would never be freed.
            gc.freeze()
            is_frozen = True

    try:
        yield freeze
    finally:
        if is_frozen:
            gc.unfreeze()


def _watched(
    run: Run,
    comparison: ForecastComparison,
    on_step: Callable[[Mapping[str, Any]], None] | None,
    freeze: Callable[[], None],
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that passes each step's metrics to the progress view, to the comparison
    with the forecast, and to `on_step`. After each step, it calls `freeze` (see `_frozen_objects`).
    The first steps of a process are slower than later ones. After the first step at full speed, the
    function records the compile time, unless other programs kept the cores busy when the run began.
    """
    efficiency, model = run.recipe.efficiency, run.recipe.model
    record_compiling = compile_time_recorder(efficiency, run.program.hardware, model)
    # Check this before the run's own threads keep the cores busy.
    is_busy = cores_are_busy()

    def watch(record: Mapping[str, Any]) -> None:
        if not record["step"]:
            return  # The evaluation before the first step is not a step.
        run.bar.step(record)
        comparison.add(record)
        if run.times.settled_steps == 1 and run.engine.is_main and not is_busy:
            record_compiling(run.times.compile_seconds)
        if on_step is not None and run.engine.is_main:
            on_step(record)
        freeze()

    return watch


def _result(
    run: Run, stopping: Stopping, comparison: ForecastComparison, rows_before: int
) -> TrainResult:
    """Return the result of a run after its last checkpoint has been saved.

    Args:
        rows_before: number of sequences that earlier calls to `train` have used.

    Raises:
        DataError: the run stopped because data could not be read.
    """
    if run.stopped_by is not None:
        problem = first_reason(run.unreadable)
        if problem is not None:
            raise DataError(f"{problem} (saved at step {run.state.step})")
    wait_for_main(run.engine, run.require_folder)
    # Measure the memory before drawing the report, because the plotting libraries would increase
    # it.
    measured = comparison.write(run.folder) if run.engine.is_main else None
    run.trackers.give_checkpoint(checkpoint_folder(run.folder, run.saved_step))
    elapsed = run.times.elapsed
    ended = on_main(run.engine, lambda: _reported(run))
    if run.is_out_of_patience:
        run.tell(f"best checkpoint: {ended['best_checkpoint']}")
    step_seconds, samples, rate = ended["medians"]
    tokens = (run.state.rows_seen - rows_before) * run.seq_len
    summary = RunSummary(
        elapsed, step_seconds, samples, rate, tokens=tokens, is_resumed=rows_before > 0
    )
    run.tell(str(summary))
    if measured is None and rate is not None:
        measured = f"median step: {rate:,.0f} tokens/s"
    if measured is not None:
        run.tell(measured)
    return TrainResult(
        run.folder,
        checkpoint_folder(run.folder, run.saved_step),
        run.state.step,
        run.state.tokens_seen,
        train_loss=run.last_record.get("train/loss"),
        evaluation=run.evaluation,
        stopped_by=run.stopped_by or stopping.reason if run.goes_on else None,
        findings=tuple(Finding(**one) for one in ended["findings"]),
        best_checkpoint=None
        if ended["best_checkpoint"] is None
        else Path(ended["best_checkpoint"]),
        summary=summary,
    )


@contextlib.contextmanager
def _reported_if_diverged(run: Run) -> Iterator[None]:
    """Draw the report of the run if the block raises a DivergedError."""
    try:
        yield
    except DivergedError:
        on_main(run.engine, lambda: _reported(run))
        raise


def _reported(run: Run) -> dict[str, Any]:
    """Draw the report. Return a dict of JSON values with the keys "findings", "best_checkpoint" and
    "medians". The medians are those of `RunSummary`.
    """
    best = best_checkpoint(run.folder)
    ended: dict[str, Any] = {
        "findings": [],
        "medians": [None, None, None],
        "best_checkpoint": None if best is None else str(best.folder),
    }
    try:
        draw_report(run.folder)
        found = read_run(run.folder)
    except Exception as error:
        if isinstance(error, CheckpointError):
            why = f"{error}: it was damaged during the run"
            then = "--resume removes the damaged lines and draws the report"
        elif lacks_memory(error):
            why = f"out of memory ({first_line(error)})"
            then = "`firstlight report` draws it"
        else:
            raise
        run.tell(
            f"warning: {why}, so the report was not drawn; the checkpoint is saved, and {then}"
        )
        return ended
    numbers = final_numbers(found)
    medians = ("step_seconds", "samples_per_second", "tokens_per_second")
    return ended | {
        "findings": [dataclasses.asdict(one) for one in findings_of(found)],
        "medians": [numbers[key] for key in medians],
    }
