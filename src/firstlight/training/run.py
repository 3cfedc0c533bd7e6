"""A run: its parts, its state, and the records of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.checkpoint.checkpoint import Checkpoint
from firstlight.checkpoint.run_folder import HeldFolder
from firstlight.data.corpus import Corpus
from firstlight.data.loader import Batch, TokenLoader
from firstlight.errors import DataError
from firstlight.evaluation.perplexity import Evaluation
from firstlight.evaluation.scores import Task
from firstlight.hardware.device import peak_flops, peak_memory_bytes
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import Schedule, resolve_schedule
from firstlight.parallel.engine import Engine
from firstlight.recipe import ResolvedRecipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.datasets import origin
from firstlight.training.guard import Guard
from firstlight.training.length import LoopTimes, TimeBudget
from firstlight.training.metrics import RunLogs, SilentLogs
from firstlight.training.processes import wait_for_main
from firstlight.training.program import TrainingProgram
from firstlight.training.progress import TrainingProgress
from firstlight.training.starting_model import ModelIdentity
from firstlight.training.state import (
    TrainState,
    data_identity,
    restore,
)
from firstlight.training.step import StepResult
from firstlight.training.trackers import Trackers


@dataclass
class Run:
    """The state of one run, set up and checked, on which the loop, evaluations and saves work.

    Attributes:
        recipe: the recipe that the run carries out.
        program: model, optimizer, loss function and engine.
        folder: the run folder.
        tokenizer, dataset, validation: the data; `validation` is None without a held-out split.
        tasks: the tasks of the recipe's `evaluation` section.
        init_from: the model folder, run or hub id that the run started from.
        base: the frozen base of a run with `lora`.
        tell: called with each message for people.
        bar: the progress that a person sees, once `open`.
        branch_from: checkpoint of another run that this run continues, with that run's data order
            and random states, until this run has its own checkpoint.
        held: the run folder as the main process holds it; None in others.
        advise: returns the reason why memory ran out and a remedy, if there is a forecaster.
        state: progress of the run, saved with each checkpoint.
        saved_step: step of this run's newest checkpoint; -1 if there is none.
        unsaved: True if the state has changed since the newest checkpoint.
        evaluation: the last one of this call.
        last_record: metrics of the last step of this call.
        samples: sample texts of the step at hand, as lines of samples.jsonl.
        unreadable: message of the error that reading training data ended in; None before one.
        stopped_by: reason for ending before the last step; None without one.
        save_stall_seconds: time that training stood still for the last save.
        times: seconds of the loop's steps, evaluations and saves.
        budget: the time of a run in minutes; None for other runs.
        loader, logs, trackers: the data, the log files and the trackers, once `open`.
        schedule: learning-rate schedule of the whole run.
        batch: sequences of each optimizer step, all processes together.
        data_identity: see `state.data_identity`.
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

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.seq_len, self.guard = recipe.data.seq_len, Guard(recipe.guard)
        self.batch = recipe.batch.schedule(self.seq_len, self.engine.size)
        if self.budget is not None:
            self.times = self.budget.times
        self.schedule = self._resolved_schedule()
        self.data_identity = data_identity(
            self.dataset,
            self.tokenizer,
            self.seq_len,
            document_masking=recipe.data.document_masking,
        ) | origin(recipe.data, self.dataset)
        # By the whole model: a process may hold a shard of it or a stage.
        self._flops_per_token = train_flops_per_token(
            meta_model(self.program.model.config), self.seq_len, frozen=recipe.lora is not None
        )
        self._step_began = self._data_wait_seconds = 0.0
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
            self.seq_len,
            None if self.budget is None else self.budget.length,
        )

    @property
    def engine(self) -> Engine:
        """The engine by which processes share the model."""
        return self.program.engine

    @property
    def max_steps(self) -> int:
        """Steps of the whole run; of a run in minutes a prediction until they are decided."""
        return self.schedule.max_steps

    @property
    def goes_on(self) -> bool:
        """True if anything is left to be done."""
        return self.state.pending is not None or self.has_steps_left

    @property
    def has_steps_left(self) -> bool:
        """True if steps are left."""
        return self.schedule.is_open or self.state.step < self.max_steps

    def is_last(self, step: int) -> bool:
        """True if a step is the last one of the run."""
        return step == self.max_steps and not self.schedule.is_open

    def is_due(self, every_steps: int) -> bool:
        """True if an action with a period in steps, which is also done at the end, is due now."""
        # At the end in any case: the last weights are evaluated and saved at any step.
        at_end = self.is_last(self.state.step)
        return at_end or (every_steps > 0 and self.state.step % every_steps == 0)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a forward pass: the recipe's, or fewer since memory ran out."""
        return self.state.micro_batch_rows or self.recipe.batch.rows

    @property
    def recipe_now(self) -> ResolvedRecipe:
        """The recipe with the micro-batch size that memory has left."""
        return self.recipe.with_keys("batch", micro_batch_size=self.micro_batch_size)

    @property
    def held_bytes(self) -> int:
        """Bytes of the model's tensors, and of the optimizer's state where it was resumed."""
        # A new run has no state before its first update.
        state = self.program.optimizer.state_shards() if self.saved_step >= 0 else {}
        return sum(t.nbytes for t in (*self.program.model.parameters(), *state.values()))

    @property
    def logged_step(self) -> int:
        """The last step whose lines are in the logs; -1 without any."""
        # Without this run's own checkpoint, the existing files are those of an earlier attempt.
        return -1 if self.saved_step < 0 else self.state.step - (self.state.pending is not None)

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: weights, moments, random numbers, counters.

        Raises:
            CheckpointError: the checkpoint does not fit the run.
        """
        self.state = restore(checkpoint, self.program)
        # A resumed run judges a spike by the same steps as one that was not stopped.
        self.guard.load_state_dict(checkpoint.trainer_state.get("guard", {}))
        self.saved_step, self.unsaved = self.state.step, False

    def require_folder(self) -> None:
        """Raise an error if the run folder is no longer this run's; called before each write.

        Raises:
            CheckpointError: the folder was moved, removed or taken over by another run.
        """
        if self.held is not None:
            self.held.require()

    def take_length(self) -> None:
        """Take over the length of a run in minutes; it is on the disk when this ends."""
        self.schedule = self._resolved_schedule()
        wait_for_main(self.engine, self.write_budget)

    def write_budget(self) -> None:
        """Write the length of a run in minutes and the time that it has used to the disk."""
        if self.budget is not None:
            self.require_folder()
            self.budget.write(self.folder)

    # A step: batches are read, used, and their metrics written down

    def read_batches(self) -> list[Batch]:
        """The micro-batches of the next step; none if a step awaits its evaluation. An error is
        kept as `unreadable`: the processes of a run end together."""
        if self.state.pending is not None:
            return []
        self._step_began = time.perf_counter()
        batches = []
        # All at once: no micro-batch of a step is trained on when another can't be read.
        try:
            count = self.micro_batches_of(self.state.step)
            batches = [self.loader.next_batch() for _ in range(count)]
        except DataError as error:
            self.unreadable = str(error)
        self._data_wait_seconds = time.perf_counter() - self._step_began
        return batches

    def micro_batches_of(self, step: int) -> int:
        """Micro-batches that the loader gives this process for a step, counted from 0."""
        return self.batch.at(step) // (self.recipe.batch.rows * self.engine.size)

    def await_first_evaluation(self) -> None:
        """Have the loop evaluate the model as step 0, before a new run's first step: its losses are
        what training is compared with."""
        config, is_new = self.recipe.evaluation, self.state.step == 0 and self.saved_step < 0
        evaluates = config.on_start and config.every_steps > 0
        has_losses = self.validation is not None or config.train_rows > 0
        if is_new and ((evaluates and has_losses) or self.is_last(0)):
            self.state.pending = {"step": 0, "tokens_seen": 0, "epoch": 0.0}

    def begin_step(self) -> float:
        """Count a step; return its learning rate as a fraction of the peak."""
        # The schedule counts steps from 0: the first is step 0 of it, and step 1 of the metrics.
        lr_scale = self.schedule.lr_scale(self.state.step)
        self.state.step += 1
        # A checkpoint of this step has a validation loss only if this step is evaluated.
        self.state.val_loss = None
        return lr_scale

    def micro_batches(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches on the device, cut as small as memory needs them."""
        parts = (part for batch in batches for part in batch.split(self.micro_batch_size))
        return (part.to(self.program.hardware.device) for part in parts)

    def end_step(self, result: StepResult, lr_scale: float) -> None:
        """Count the step's tokens and rows; its metrics are then `state.pending`.

        Raises:
            DivergedError: too many steps in a row were skipped.
        """
        state = self.state
        seconds = time.perf_counter() - self._step_began
        state.tokens_seen += result.tokens
        state.skipped = result.skipped
        state.skipped_steps += result.skipped
        # Only now: a step that was interrupted reads its rows again.
        state.rows_seen = self.loader.state_dict()["rows_seen"]
        record = self._metrics(result, lr_scale, seconds)
        self.times.count(self.batch.at(state.step - 1))
        # JSON has no infinity and no NaN: a skipped step may have no loss, no norm.
        state.pending = {k: v if math.isfinite(v) else None for k, v in record.items()}
        # A save's stall is in the line of the step after it.
        self.save_stall_seconds, self.unsaved = 0.0, True
        self.guard.require_fit()

    def _metrics(self, result: StepResult, lr_scale: float, seconds: float) -> dict[str, float]:
        """The step's line of metrics.jsonl, before any evaluation."""
        program, state, hardware = self.program, self.state, self.program.hardware
        sequences = self.batch.at(state.step - 1)
        # All tokens of the rows, as MFU counts them; learned ones have a rate of their own.
        tokens_per_second = sequences * self.seq_len / seconds
        # All devices, also those that share the sequences of one part (tensor parallel, stages).
        peak = peak_flops(hardware.device, program.dtype) * self.engine.world.size
        router = program.router_metrics(result.tokens)
        # Without the router's loss, train/loss compares with val/loss; a z-loss stays in it.
        auxiliary = router.get("moe/router_loss", 0.0) * program.router_loss_coefficient
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
            "seconds": seconds,
            "data_wait_seconds": self._data_wait_seconds,
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
        """Write the step's metrics and texts down, now that nothing is missing; return them."""
        record = self.state.pending
        assert record is not None
        # Never a line into another run's folder that has taken this one's place.
        self.require_folder()
        if self.budget is not None:
            record["elapsed_seconds"] = self.budget.seconds_used
        self.logs.write_step(record, self.samples)
        # After the line is written: a tracker reads it from there.
        self.trackers.check()
        self.last_record = record
        self.samples, self.state.pending, self.unsaved = [], None, True
        return record

    def add_event(self, event: str, step: int, **details: Any) -> None:
        """Add a line to the run's events."""
        self.require_folder()
        # In the state, too: a checkpoint has the events, so that resuming can rewrite the file.
        self.state.events.append({"step": step, "event": event, **details})
        self.logs.write_events(self.state.events)
