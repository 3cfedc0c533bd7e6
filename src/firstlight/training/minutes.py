"""Runs whose length is given in minutes: the number of steps is predicted at the start, decided
when the learning rate begins to depend on it, and corrected if the speed changes after that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.checkpoint.checkpoint import checkpoint_bytes, load_trainer_state
from firstlight.data.corpus import Corpus
from firstlight.hardware.device import peak_flops
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import PredictedLength, most_steps
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.resolve import USUAL_MFU
from firstlight.training.processes import on_main
from firstlight.training.program import TrainingProgram
from firstlight.training.run import Run
from firstlight.training.time_budget import (
    LoopTimes,
    Periodic,
    TimeBudget,
    length_of,
    predicted_steps,
    recorded_length,
)

#: Guesses for times that have not been measured yet: seconds of a sequence in an evaluation as a
#: share of those in a step, seconds of a generated token, written bytes of a checkpoint a second.
_FORWARD_SHARE = 0.35
_SAMPLED_TOKEN_SECONDS = 0.01
_WRITTEN_PER_SECOND = 150e6


def budget_of(
    recipe: ResolvedRecipe,
    program: TrainingProgram,
    folder: Path,
    newest: Path | None,
    rows_per_epoch: int,
    *,
    resumed: bool,
) -> TimeBudget | None:
    """The time budget of a run in minutes, with its recorded number of steps if it is resumed; None
    for other runs.

    Args:
        recipe: recipe of the run.
        program: program of the run.
        folder: the run folder.
        newest: checkpoint that the run is resumed from or branches off; None without one.
        rows_per_epoch: rows of the training split.
        resumed: False for a new run, whose record in the folder is ignored.

    Raises:
        CheckpointError: the run's record of its length is damaged.
    """
    minutes = recipe.schedule.max_minutes
    if minutes is None:
        return None
    engine = program.engine
    batch = recipe.batch.schedule(recipe.data.seq_len, engine.size)
    most = most_steps(recipe.schedule, rows_per_epoch, batch)

    def find() -> dict[str, Any]:
        record: dict[str, Any] = {"seconds_used": 0.0}
        if resumed and (newest is None or newest.parent.parent.resolve() == folder.resolve()):
            record = recorded_length(folder, {} if newest is None else load_trainer_state(newest))
        # A recorded number of steps is valid only for the same minutes and upper limit.
        if (record.get("max_minutes"), record.get("most_steps")) == (minutes, most):
            return record
        # A new run; or a resumed run with other minutes, whose used seconds are kept.
        rate = _usual_tokens_per_second(recipe, program)
        steps = predicted_steps(minutes, rate, batch, recipe.data.seq_len)
        return {"seconds_used": record["seconds_used"], "predicted_steps": steps, "is_new": True}

    record: Mapping[str, Any] = on_main(engine, find)
    return TimeBudget(
        recipe.schedule,
        length_of(record),
        record["seconds_used"],
        LoopTimes(),
        most_steps=most,
        is_new=record.get("is_new", False),
    )


def _usual_tokens_per_second(recipe: ResolvedRecipe, program: TrainingProgram) -> float:
    """A rough prediction of the speed from the usual MFU, for runs without a forecast."""
    peak = peak_flops(program.hardware.device, program.dtype) * program.engine.world.size
    model = meta_model(program.model.config)
    flops = train_flops_per_token(model, recipe.data.seq_len, frozen=recipe.lora is not None)
    return USUAL_MFU * peak / flops


def predict_length(run: Run, tokens_per_second: float | None) -> None:
    """Set the number of steps of a new run in minutes to a prediction.

    Args:
        run: the run; nothing is changed if it is not a new run in minutes.
        tokens_per_second: predicted speed of all processes together; None keeps the rough
            prediction.
    """
    budget = run.budget
    if budget is None or not budget.is_new:
        return
    # All processes take the main process' speed: with different lengths, some would end while
    # others wait for them.
    rate = on_main(run.engine, lambda: tokens_per_second)
    if rate is not None:
        steps = predicted_steps(budget.seconds / 60, rate, run.batch, run.seq_len)
        budget.length = PredictedLength(steps)
        run.take_length()


def decide_length(run: Run) -> None:
    """Decide the number of steps of a run in minutes before its next step, or correct it, if that
    is due.

    All processes take the main process's number, which is on the disk before any of them continues.

    Raises:
        StorageError: the decision can't be written.
    """
    budget, step = run.budget, run.state.step
    if budget is None or run.state.pending is not None or not budget.is_due(step):
        return
    is_open, before = run.schedule.is_open, run.max_steps

    def decide() -> int | None:
        def periodic(seconds: float) -> list[Periodic]:
            return _periodic(run, seconds)

        if is_open:
            return budget.decided_steps(step, run.schedule.warmup_steps, run.batch, periodic)
        return budget.corrected_steps(step, run.batch, periodic)

    steps = on_main(run.engine, decide)
    if steps is None:
        return
    budget.take(steps, step)
    if not is_open and steps == before:
        return
    run.take_length()
    words = run.schedule.in_words(run.recipe.optimizer.learning_rate)
    if not is_open:
        words = f"{before:,} would end too {'late' if steps < before else 'early'}"
    run.bar.message(
        f"step {step}: {budget.seconds_used:.0f} of {budget.seconds:.0f} s are used, and the run "
        f"has {steps:,} steps: {words}"
    )


def _periodic(run: Run, sequence_seconds: float) -> list[Periodic]:
    """Evaluations and saves of the run, each with the time of its last occurrence, or with a guess
    before the first.

    Args:
        run: the run.
        sequence_seconds: seconds of a sequence in a step, from which the first evaluation is
            guessed.
    """
    evaluation = run.recipe.evaluation
    checkpoint = run.recipe.checkpoint
    found = run.times.seconds
    tokens = len(evaluation.sample_prompts) * evaluation.sample_tokens
    samples = found.get("samples", _SAMPLED_TOKEN_SECONDS * tokens)
    seconds = found.get("evaluation")
    if seconds is None:
        seconds = _FORWARD_SHARE * sequence_seconds * _evaluated_sequences(run)
        seconds += 0.0 if evaluation.samples_at == "epoch" else samples
    optimizer = run.program.optimizer
    size = checkpoint_bytes(optimizer.num_parameters, optimizer.state_bytes)
    writing = size / _WRITTEN_PER_SECOND
    # A thread writes checkpoints while training goes on; only the last one is waited for.
    save = last_save = 0.0 if checkpoint.asynchronous is not False else writing
    if "save" in found:
        save, last_save = found["save"], found["save"] + run.times.write_seconds
    elif not save:
        last_save = writing
    # With the best checkpoint kept, an evaluation may be followed by a save.
    keeps_best = run.validation is not None and checkpoint.keep_best and checkpoint.every_steps
    # The last evaluation and save have times of their own, since the run has to end in time: no
    # save for the best checkpoint follows this evaluation, and this save is waited for.
    periodic = [
        Periodic(evaluation.every_steps, seconds + (save if keeps_best else 0.0), seconds),
        Periodic(checkpoint.every_steps, save, last_save),
    ]
    if evaluation.samples_at == "epoch":
        epoch_steps = run.dataset.num_rows(run.seq_len) // run.batch.at(run.state.step)
        periodic.append(Periodic(max(epoch_steps, 1), samples, samples))
    if run.tasks:
        every, tasks = evaluation.tasks_every_steps, found.get("tasks", 0.0)
        periodic.append(Periodic(every or evaluation.every_steps, tasks, tasks))
    return periodic


def _evaluated_sequences(run: Run) -> int:
    """The number of sequences of an evaluation."""
    config = run.recipe.evaluation

    def taken(split: Corpus | None, most: int) -> int:
        return 0 if split is None else min(split.num_rows(run.seq_len), most)

    most = config.max_rows or run.dataset.num_rows(run.seq_len)
    return taken(run.validation, most) + taken(run.dataset, config.train_rows)
