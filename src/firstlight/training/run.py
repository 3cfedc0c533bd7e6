"""Define the `Run` class, which contains the components of a run, its state and the metrics of its
steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.checkpoint.checkpoint import Checkpoint, checkpoint_bytes
from firstlight.checkpoint.run_folder import HeldFolder
from firstlight.console import counted
from firstlight.data.corpus import Corpus, ReplayedDataset
from firstlight.data.loader import Batch, TokenLoader
from firstlight.errors import DataError
from firstlight.evaluation.perplexity import Evaluation
from firstlight.evaluation.scores import Task
from firstlight.hardware.device import GpuMonitor, peak_flops, peak_memory_bytes
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import PredictedLength, Schedule, resolve_schedule
from firstlight.parallel.engine import Engine
from firstlight.recipe import ResolvedRecipe
from firstlight.run_log.writer import RunLogs, SilentLogs
from firstlight.tokenizer import Tokenizer
from firstlight.training.datasets import data_identity
from firstlight.training.guard import Guard
from firstlight.training.processes import on_main, wait_for_main
from firstlight.training.program import TrainingProgram
from firstlight.training.progress import TrainingProgress
from firstlight.training.starting_model import ModelIdentity
from firstlight.training.state import (
    TrainState,
    restore,
)
from firstlight.training.step import StepResult
from firstlight.training.time_budget import (
    FORWARD_SHARE,
    PROBE_BYTES,
    PROBE_TOKENS,
    WRITTEN_PER_SECOND,
    LoopTimes,
    Periodic,
    TimeBudget,
    predicted_steps,
    sampled_token_seconds,
    save_interval,
)
from firstlight.training.trackers import Trackers
from firstlight.weights.composite import Carried


@dataclass(frozen=True)
class _Read:
    """Data that has been read for a step.

    Attributes:
        batches: micro-batches of the step.
        began: time at which reading began, as a value of `time.perf_counter`.
        seconds: duration of reading in seconds.
        rows: number of rows read for all steps up to this one.
    """

    batches: list[Batch]
    began: float
    seconds: float
    rows: int


@dataclass
class Run:
    """A run that has been set up and checked. The training loop, the evaluations and the code that
    saves checkpoints operate on this object.

    Attributes:
        recipe: the resolved recipe of the run.
        program: model, optimizer, loss function and engine.
        folder: the run folder.
        tokenizer: tokenizer of the data.
        dataset: training split.
        validation: validation split, or None.
        kept: validation split of the text that the model should not forget, or None.
        tasks: the tasks of the recipe's `evaluation` section.
        init_from: model folder, run or hub id from which the run started; None for a new model.
        base: the frozen base model of a run with `lora`; None for other runs.
        tell: called with each message to the user.
        branch_from: checkpoint of another run from which this run branches off, keeping the data
            order and random states; None for other runs, including runs resumed from their own
            checkpoint.
        held: lock that the main process holds on the run folder; None in all other processes.
        advise: function that returns the reason why memory ran out and a remedy, or None. Without a
            forecaster, it always returns None.
        state: progress of the run, saved with each checkpoint.
        saved_step: step of this run's newest checkpoint, or -1 if there is none.
        unsaved: True if the state has changed since the newest checkpoint.
        evaluation: last evaluation during this call to `train`.
        last_record: metrics of the last step of this call to `train`.
        samples: sample texts of the current step, as lines of samples.jsonl.
        unreadable: message of the error that was raised while data was read, or None.
        stopped_by: reason why the run ends before its last step, or None.
        save_stall_seconds: seconds for which training waited for the last save.
        times: durations of the loop's steps, evaluations and saves.
        budget: the time budget, or None for runs without one.
        generation: contents of the file generation_config.json of the model from which the run
            started.
        carried: parts of the starting model's folder that each checkpoint contains; None if it
            contained only a text model, or if only adapters are saved.
        chose_compiling: True if the user did not choose whether the run compiles; see `loop.train`.
        loader, logs, trackers, bar: data loader, log files, trackers and progress view; set by
            `open_run`.
        schedule: learning-rate schedule of the whole run.
        batch: number of sequences per optimizer step, summed over all processes.
        data_identity: identity of the run's data; see `datasets.data_identity`.
    """

    recipe: ResolvedRecipe
    program: TrainingProgram
    folder: Path
    tokenizer: Tokenizer
    dataset: Corpus
    validation: Corpus | None
    init_from: str | None
    base: ModelIdentity | None
    tasks: Sequence[Task]
    tell: Callable[[str], None]
    kept: Corpus | None = None
    branch_from: Path | None = None
    held: HeldFolder | None = None
    advise: Callable[[], str | None] = lambda: None
    state: TrainState = field(default_factory=TrainState)
    saved_step: int = -1
    unsaved: bool = True
    evaluation: Evaluation | None = None
    last_record: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    unreadable: str | None = None
    stopped_by: str | None = None
    save_stall_seconds: float = 0.0
    times: LoopTimes = field(default_factory=LoopTimes)
    budget: TimeBudget | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    chose_compiling: bool = False
    carried: Carried | None = None

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.seq_len, self.guard = recipe.data.seq_len, Guard(recipe.guard)
        self.batch = recipe.batch.schedule(self.seq_len, self.engine.size)
        if self.budget is not None:
            self.times = self.budget.times
        self.schedule = self._resolved_schedule()
        self.data_identity = data_identity(recipe, self.dataset, self.tokenizer)
        # Compute this for the full model, because this process may hold only a shard or a pipeline
        # stage of it.
        self._flops_per_token = train_flops_per_token(
            meta_model(self.program.model.config), self.seq_len, frozen=recipe.lora is not None
        )
        self._gpu = GpuMonitor(self.program.hardware.device)
        #: Data read for the current step, and for the next step if it was read early.
        self._read: _Read | None = None
        self._read_early: _Read | None = None
        self._unused: list[Batch] = []
        self._step_ended = 0.0
        self.loader: TokenLoader
        self.logs: RunLogs | SilentLogs
        self.bar: TrainingProgress
        self.trackers: Trackers

    def _resolved_schedule(self) -> Schedule:
        return resolve_schedule(
            self.recipe.schedule,
            self.recipe.optimizer.learning_rate,
            self.dataset.num_rows(self.seq_len),
            self.batch,
            seq_len=self.seq_len,
            length=None if self.budget is None else self.budget.length,
        )

    @property
    def engine(self) -> Engine:
        """The engine that connects the processes."""
        return self.program.engine

    @property
    def max_steps(self) -> int:
        """Total number of steps of the run. For a run with a time budget, this is a prediction
        until the number is decided.
        """
        return self.schedule.max_steps

    @property
    def goes_on(self) -> bool:
        """True if the run has any steps or an evaluation left to run."""
        return self.state.pending is not None or self.has_steps_left

    @property
    def has_steps_left(self) -> bool:
        """True if the run has any steps left to run."""
        is_before_end = self.schedule.is_open or self.state.step < self.max_steps
        return is_before_end and not self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        """True if the run ends because its validation loss no longer falls."""
        patience = self.recipe.evaluation.patience
        return 0 < patience <= self.state.worse_evaluations

    def is_last(self, step: int) -> bool:
        """Return True if a step is the last one of the run."""
        if self.is_out_of_patience:
            return step == self.state.step
        return step == self.max_steps and not self.schedule.is_open

    def is_due(self, every_steps: int) -> bool:
        """Return True if an action that is repeated every `every_steps` steps is due after the
        current step.
        """
        # Every action is due after the last step, so that the final weights are evaluated and
        # saved.
        at_end = self.is_last(self.state.step)
        return at_end or (every_steps > 0 and self.state.step % every_steps == 0)

    @property
    def ends_epoch(self) -> bool:
        """True if the last step used the last row of an epoch of the training split."""
        if self.state.step == 0:
            return False
        rows, seen = self.dataset.num_rows(self.seq_len), self.rows_read
        return seen // rows > (seen - self.batch.at(self.state.step - 1)) // rows

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences per forward pass: the recipe's value, or a smaller one if memory has
        run out.
        """
        return self.state.micro_batch_rows or self.recipe.batch.rows

    @property
    def recipe_now(self) -> ResolvedRecipe:
        """The recipe with the current `micro_batch_size`."""
        return self.recipe.with_keys("batch", micro_batch_size=self.micro_batch_size)

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the model's parameters and, in a resumed run, of the optimizer's
        state.
        """
        # A new run has no optimizer state before its first update.
        state = self.program.optimizer.state_shards() if self.saved_step >= 0 else {}
        return sum(t.nbytes for t in (*self.program.model.parameters(), *state.values()))

    @property
    def logged_step(self) -> int:
        """Last step whose lines are kept in the logs, or -1 if there is none. Lines of later steps
        are dropped when the logs are opened.
        """
        # If this run has no checkpoint, existing lines in the logs belong to an earlier attempt.
        return -1 if self.saved_step < 0 else self.state.step - (self.state.pending is not None)

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Restore the run's weights, moments, random states and counters from a checkpoint.

        Raises:
            CheckpointError: the checkpoint does not fit the run.
        """
        self.state = restore(checkpoint, self.program)
        if self.state.replay is not None and self._is_replay_open:
            self._change_replay(*self.state.replay)
        # Restore the guard's losses and gradient norms, so that a resumed run detects spikes at the
        # same steps as an uninterrupted run.
        self.guard.load_state_dict(checkpoint.trainer_state.get("guard", {}))
        self.saved_step, self.unsaved = self.state.step, False

    @property
    def _is_replay_open(self) -> bool:
        return isinstance(self.dataset, ReplayedDataset) and self.dataset.is_open

    def _change_replay(self, position: int, share: float) -> None:
        assert isinstance(self.dataset, ReplayedDataset)
        self.dataset.change_share(position, share)

    @property
    def replay_steps(self) -> int:
        """Number of steps of the run from which the share of kept text is chosen. In a run with a
        time budget, this is the predicted number, because the decided number is only known after a
        third of a short run.
        """
        if self.budget is None:
            return self.max_steps
        predicted = self.budget.length.predicted_steps
        return min(predicted, self.budget.most_steps or predicted)

    @property
    def decides_replay(self) -> bool:
        """True if the share of kept text in the following rows must be chosen after the current
        step. This is the case once, after a tenth of the run and its warm-up.
        """
        if not self._is_replay_open:
            return False
        step = self.state.step
        return step > self.schedule.warmup_steps and 10 * step >= self.replay_steps

    def take_replay(self, share: float) -> None:
        """Use a share of kept text for all rows after the current step."""
        self._change_replay(self.rows_read, share)
        self.state.replay = self.rows_read, share
        # Batches that were read ahead have the old share, and a resumed run would not use them.
        self._unused = []
        self.loader.read_again(self.rows_read)
        self.add_event("replay", self.state.step, share=share)

    def require_folder(self) -> None:
        """Raise an error if the run folder no longer belongs to this run. Call this before writing
        to it.

        Raises:
            CheckpointError: the folder was moved, removed or taken over by another run.
        """
        if self.held is not None:
            self.held.require()

    def take_length(self) -> None:
        """Change the schedule to the number of steps in `budget`, and write that number to disk.
        This is a collective operation.
        """
        self.schedule = self._resolved_schedule()
        wait_for_main(self.engine, self.write_budget)

    def write_budget(self) -> None:
        """Write the length and the used time of a run with a time budget to disk. For other runs,
        do nothing.
        """
        if self.budget is not None:
            self.require_folder()
            self.budget.write(self.folder)

    def predict_length(self, tokens_per_second: float | None) -> None:
        """Predict the number of steps of a new run with a time budget. For other runs, do nothing.

        Args:
            tokens_per_second: predicted total speed of all processes; None keeps the rough
                prediction.
        """
        budget = self.budget
        if budget is None or not budget.is_new:
            return
        # All processes use the main process's speed. With different run lengths, some processes
        # would end while others are still waiting for them.
        rate = on_main(self.engine, lambda: tokens_per_second)
        if rate is not None:
            steps = predicted_steps(budget.seconds / 60, rate, self.batch, self.seq_len)
            budget.length = PredictedLength(steps)
            self.take_length()

    def decide_length(self) -> None:
        """Decide or correct the number of steps of a run with a time budget, if this is due before
        the next step.

        All processes use the main process's number, which is written to disk before any of them
        continues.

        Raises:
            StorageError: the number can't be written to disk.
        """
        budget, step = self.budget, self.state.step
        if budget is None or self.state.pending is not None or not budget.is_due(step):
            return
        is_open, before = self.schedule.is_open, self.max_steps

        def decide() -> int | None:
            if not is_open:
                return budget.corrected_steps(step, self.batch, self._periodic)
            warmup_steps = self.schedule.warmup_steps
            return budget.decided_steps(step, warmup_steps, self.batch, self._periodic)

        steps = on_main(self.engine, decide)
        if steps is None:
            return
        budget.take(steps, step)
        if not is_open and steps == before:
            return
        self.take_length()
        words = f" instead of {before:,}, to end in time"
        if is_open:
            words = f": {self.schedule.in_words(self.recipe.optimizer.learning_rate)}"
        elif steps > before:
            words = f" instead of {before:,}, to use the time"
        self.bar.message(f"step {step}: the run will have {counted(steps, 'step')}{words}")

    def _periodic(self, sequence_seconds: float) -> list[Periodic]:
        """Return the evaluations and saves of the run with their durations. The duration of an
        evaluation or save is that of its last occurrence, or an estimate if it has not occurred
        yet.

        Args:
            sequence_seconds: seconds per sequence in a training step, from which the duration of
                the first evaluation is estimated.
        """
        evaluation, checkpoint = self.recipe.evaluation, self.recipe.checkpoint
        found = self.times.seconds
        token = sampled_token_seconds(sequence_seconds / self.seq_len)
        text, (few, many) = 0.0, PROBE_TOKENS
        if "long text" in found:
            token = max(found["long text"] - found["short text"], 0.0) / (many - few)
            text = max(found["short text"] - few * token, 0.0)
        text += evaluation.sample_tokens * token
        samples = found.get("samples", len(evaluation.sample_prompts) * text)
        guess = FORWARD_SHARE * sequence_seconds * self._evaluated_sequences
        seconds = found.get("evaluation", guess)
        if evaluation.samples_at == "evaluation":
            seconds += samples
        save, last_save = self.save_seconds
        # If the best checkpoint is kept, an evaluation may be followed by a save.
        keeps_best = self.validation is not None and checkpoint.keep_best and checkpoint.every_steps
        # The last evaluation and save have separate durations: the last evaluation is not followed
        # by an extra save of the best checkpoint, and the run waits until the last save is on disk.
        periodic = [
            Periodic(evaluation.every_steps, seconds + (save if keeps_best else 0.0), seconds),
            Periodic(self._steps_between_saves(sequence_seconds), save, last_save),
        ]
        if checkpoint.average_last:
            # After the last save, the checkpoints are read, and their average is evaluated and
            # saved.
            average = found.get("evaluation", guess) + checkpoint.average_last * self._write_seconds
            periodic.append(Periodic(0, 0.0, average))
        if evaluation.samples_at == "epoch":
            epoch_steps = self.dataset.num_rows(self.seq_len) // self.batch.at(self.state.step)
            periodic.append(Periodic(max(epoch_steps, 1), samples, samples))
        if self.tasks:
            every, tasks = evaluation.tasks_every_steps, found.get("tasks", 0.0)
            periodic.append(Periodic(every or evaluation.every_steps, tasks, tasks))
        return periodic

    @property
    def _write_seconds(self) -> float:
        """Estimated seconds for writing a checkpoint, based on the time taken to write a file at
        the start of the run, if one was written.
        """
        if "file" in self.times.seconds:
            return self.times.seconds["file"] * self.checkpoint_bytes / PROBE_BYTES
        return self.checkpoint_bytes / WRITTEN_PER_SECOND

    @property
    def save_seconds(self) -> tuple[float, float]:
        """Seconds for which training waits for a regular save and for the save after the last step.
        The two durations are based on the last save, or estimated if there was none.
        """
        if "save" in self.times.seconds:
            save = self.times.seconds["save"]
            return save, save + self.times.write_seconds
        # A thread writes checkpoints while training continues. The run waits only until the last
        # checkpoint is written.
        is_waiting = self.recipe.checkpoint.asynchronous is False
        return self._write_seconds if is_waiting else 0.0, self._write_seconds

    @property
    def save_interval(self) -> float | None:
        """Maximum seconds between two checkpoints. None for runs without a time budget and for runs
        that save only at the end.
        """
        if self.budget is None or not self.recipe.checkpoint.every_steps:
            return None
        return save_interval(self.budget.seconds, self.save_seconds[1])

    def _steps_between_saves(self, sequence_seconds: float) -> int:
        every, seconds = self.recipe.checkpoint.every_steps, self.save_interval
        if seconds is None:
            return every
        step_seconds = sequence_seconds * self.batch.at(self.state.step)
        return min(every, math.ceil(seconds / max(step_seconds, 1e-9)))

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint's tensors in bytes."""
        optimizer = self.program.optimizer
        return checkpoint_bytes(optimizer.num_parameters, optimizer.state_bytes)

    @property
    def _evaluated_sequences(self) -> int:
        """Number of sequences in an evaluation."""
        config, train_rows = self.recipe.evaluation, self.dataset.num_rows(self.seq_len)
        texts = [one for one in (self.validation, self.kept) if one is not None]
        held_out = sum(
            min(one.num_rows(self.seq_len), config.max_rows or train_rows) for one in texts
        )
        return held_out + min(train_rows, config.train_rows)

    # Methods used in each step, which read batches, update the state and write metrics.

    def read_batches(self) -> list[Batch]:
        """Read the micro-batches of the next step. Return an empty list if the last step still has
        to be evaluated.

        Errors are stored in `unreadable` instead of being raised, so that all processes of a run
        can end together.
        """
        if self.state.pending is not None or self.unreadable is not None:
            return []
        self._read = self._read_early or self._next_read()
        self._read_early = None
        return self._read.batches

    def read_early(self) -> list[Batch]:
        """Read the micro-batches of the step after the current one. The next call to `read_batches`
        returns the same micro-batches."""
        self._read_early = self._next_read()
        return self._read_early.batches

    def put_back(self) -> None:
        """Undo `read_early`. The batches are put back and used for the following steps, which may
        have a different number of batches.
        """
        if self._read_early is not None:
            self._unused = self._read_early.batches + self._unused
            self._read_early = None

    def _next_read(self) -> _Read:
        began, batches = time.perf_counter(), list[Batch]()
        # Read all batches of the step first, so that none of them is used if one can't be read.
        try:
            for _ in range(self.micro_batches_of(self.state.step)):
                batches.append(self._unused.pop(0) if self._unused else self.loader.next_batch())
        except DataError as error:
            self.unreadable = str(error)
        seconds = time.perf_counter() - began
        rows = self.loader.rows_seen - len(self._unused) * self.loader.global_rows
        return _Read(batches, began, seconds, rows)

    @property
    def rows_read(self) -> int:
        """Number of rows that have been read for all steps up to and including the current one."""
        return self.loader.rows_seen if self._read is None else self._read.rows

    def micro_batches_of(self, step: int) -> int:
        """Return the number of batches that this process reads from the loader for a step. The
        first step is 0.
        """
        return self.batch.at(step) // (self.recipe.batch.rows * self.engine.size)

    def await_first_evaluation(self) -> None:
        """Make the training loop evaluate a new run's model before the first step, as step 0, if
        the recipe requires this or the run has no steps. The loss is a baseline for later losses.
        """
        config, is_new = self.recipe.evaluation, self.state.step == 0 and self.saved_step < 0
        # The losses of kept text are always compared with those of the starting model.
        evaluates = (config.on_start and config.every_steps > 0) or self.kept is not None
        texts = (self.validation, self.kept)
        has_losses = any(text is not None for text in texts) or config.train_rows > 0
        if is_new and ((evaluates and has_losses) or self.is_last(0)):
            self.state.pending = {"step": 0, "tokens_seen": 0, "epoch": 0.0}

    def begin_step(self) -> float:
        """Begin the next step by incrementing the step counter. Enable gradient clipping, unless
        the step belongs to the part of the warm-up in which gradients are not clipped. Return the
        step's learning rate as a fraction of the peak.
        """
        # The learning-rate schedule counts steps from 0, but the metrics count them from 1.
        lr_scale = self.schedule.lr_scale(self.state.step)
        config, optimizer = self.recipe.optimizer, self.program.optimizer
        is_warm = self.state.step >= self.schedule.warmup_steps or not config.clip_after_warmup
        optimizer.clips = config.max_grad_norm > 0 and is_warm
        self.state.step += 1
        # The validation loss of the previous step does not belong to this step's weights.
        self.state.val_loss = None
        return lr_scale

    def micro_batches(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batches on the device, split into micro-batches of the current size."""
        parts = (part for batch in batches for part in batch.split(self.micro_batch_size))
        return (part.to(self.program.hardware.device) for part in parts)

    def end_step(self, result: StepResult, lr_scale: float) -> None:
        """Add the step's tokens and rows to the state, and set its metrics as `state.pending`.

        Args:
            result: measurements of the step.
            lr_scale: the step's learning rate as a fraction of the peak.

        Raises:
            DivergedError: too many steps in a row were skipped.
        """
        state = self.state
        assert self._read is not None
        # The forward pass of this step may have begun before the end of the previous step.
        now = time.perf_counter()
        seconds = now - max(self._read.began, self._step_ended)
        self._step_ended = now
        state.tokens_seen += result.tokens
        state.skipped = result.skipped
        state.skipped_steps += result.skipped
        # Update the number of used rows only at the end of a step, so that the rows of an
        # interrupted step are read again.
        state.rows_seen = self.rows_read
        record = self._metrics(result, lr_scale, seconds)
        self.times.count(self.batch.at(state.step - 1))
        # A skipped step may have infinite or NaN values. Replace them with None, because JSON does
        # not support them.
        state.pending = {k: v if math.isfinite(v) else None for k, v in record.items()}
        # The time spent waiting for a save is part of the following step's metrics.
        self.save_stall_seconds, self.unsaved = 0.0, True
        self.guard.require_fit()

    def _metrics(self, result: StepResult, lr_scale: float, seconds: float) -> dict[str, float]:
        """Return the step's metrics, as in metrics.jsonl, before any evaluation."""
        program = self.program
        state = self.state
        hardware = self.program.hardware
        sequences = self.batch.at(state.step - 1)
        # Count all tokens of the sequences, including tokens without a loss, as is usual for the
        # MFU (model FLOPs utilization).
        tokens_per_second = sequences * self.seq_len / seconds
        # Sum the peak FLOP/s of all devices, including devices that work on the same sequences
        # (tensor parallelism, pipeline stages).
        peak = peak_flops(hardware.device, program.dtype) * self.engine.world.size
        router = program.router_metrics(result.tokens)
        # Exclude the routers' auxiliary loss, so that train/loss is comparable with val/loss. A
        # z-loss is included.
        auxiliary = (
            router.get("moe/router_loss", 0.0) * program.model.config.router_loss_coefficient
        )
        epochs = self.dataset.epochs_by_corpus(state.rows_seen, self.seq_len)
        return {
            "step": state.step,
            "train/loss": result.loss - auxiliary,
            "learning_rate": self.recipe.optimizer.learning_rate * lr_scale,
            "grad_norm": result.grad_norm,
            "tokens_seen": state.tokens_seen,
            "epoch": state.rows_seen / self.loader.rows_per_epoch,
            "tokens_per_second": tokens_per_second,
            "learned_tokens_per_second": result.tokens / seconds,
            "samples_per_second": sequences / seconds,
            "mfu": self._flops_per_token * tokens_per_second / peak,
            "memory_bytes": peak_memory_bytes(hardware.device),
            **self._gpu.read(),
            "seconds": seconds,
            # If the data was read during the previous step, reading may have taken longer than the
            # step itself.
            "data_wait_seconds": 0.0 if self._read is None else min(self._read.seconds, seconds),
            "save_stall_seconds": self.save_stall_seconds,
            "skipped_steps": state.skipped_steps,
            **{f"epoch/{name}": seen for name, seen in epochs.items()},
            **({"global_batch_tokens": sequences * self.seq_len} if self.batch.ramp_steps else {}),
            **({"skipped": True} if result.skipped else {}),
            **({"loss_scale": program.scaler.scale} if program.scaler else {}),
            **router,
            **program.preference_metrics("train"),
        }

    def write_record(self) -> dict[str, Any]:
        """Write the step's complete metrics and sample texts to the logs, and return the
        metrics.
        """
        record = self.state.pending
        assert record is not None
        # Check the folder first, because another run may have replaced it.
        self.require_folder()
        if self.budget is not None:
            record["elapsed_seconds"] = self.budget.seconds_used
        self.logs.write_step(record, self.samples)
        # Check the trackers after writing, because they read the logs.
        self.trackers.check()
        self.last_record = record
        self.samples = []
        self.state.pending = None
        self.unsaved = True
        return record

    def add_event(self, event: str, step: int, **details: Any) -> None:
        """Add a line to the run's events."""
        self.require_folder()
        # Events are part of the state, which is saved in each checkpoint. A resumed run restores
        # events.jsonl from the checkpoint.
        self.state.events.append({"step": step, "event": event, **details})
        self.logs.write_events(self.state.events)
