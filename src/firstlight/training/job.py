"""One run: the state that a training loop works on, and what it does with it."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from firstlight.checkpoint.checkpoint import CHECKPOINTS, Checkpoint, load_checkpoint
from firstlight.checkpoint.saving import CheckpointSaver, PassiveSaver, checkpoint_before
from firstlight.checkpoint.sharded_saving import ShardedSaver
from firstlight.data.corpus import Corpus
from firstlight.data.loader import Batch, TokenLoader
from firstlight.errors import DataError, FirstlightError, TrainingError
from firstlight.evaluation.perplexity import Evaluation
from firstlight.evaluation.results import Task
from firstlight.files.atomic import remove_file, remove_leftovers, write_file
from firstlight.hardware.device import is_out_of_memory, peak_flops, peak_memory_bytes
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import resolve_schedule
from firstlight.parallel import barrier
from firstlight.recipe import Recipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.adapters import AdapterBase
from firstlight.training.datasets import evaluate_dataset, origin
from firstlight.training.fit import fewer_rows
from firstlight.training.guard import DivergedError, Guard
from firstlight.training.logs import RunLogs, SilentLogs
from firstlight.training.processes import on_main, wait_for_main
from firstlight.training.program import TrainingProgram
from firstlight.training.progress import TrainingProgress
from firstlight.training.state import (
    TrainState,
    capture,
    data_identity,
    restore,
    restore_torch_random_states,
    torch_random_states,
)
from firstlight.training.step import MicroBatchTooLargeError, StepResult
from firstlight.training.stopping import SAVE_NOW_NAME
from firstlight.training.validation import sample_texts, task_results

RECIPE_NAME = "recipe.yaml"


class Job:
    """One run, set up and checked: what the loop works with.

    Attributes:
        schedule: of the whole run.
        max_steps: of the whole run.
        rows_a_step: rows of an optimizer step, all processes together.
        state: where it stands.
        saved_step: of the newest checkpoint of what it has done; -1 before the first.
        evaluation: the last one.
        data_identity: see `state.data_identity`.
        unreadable: the message of the error that reading training data ended in; None before one.
        require_folder: raises a CheckpointError if the run folder was moved or removed.
        advise: after memory ran out, says what filled it and what would have saved it.
        tell: is told what people should read.
    """

    def __init__(
        self,
        program: TrainingProgram,
        tokenizer: Tokenizer,
        dataset: Corpus,
        validation: Corpus | None,
        init_from: str | None,
        base: AdapterBase | None,
        tasks: Sequence[Task] = (),
    ) -> None:
        recipe = program.recipe
        assert recipe.run.dir is not None
        assert recipe.data.seq_len is not None
        self.program, self.recipe, self.hardware = program, recipe, program.hardware
        self.model, self.optimizer, self.tokenizer = program.model, program.optimizer, tokenizer
        self.dataset, self.validation = dataset, validation
        self.init_from, self.base, self.tasks = init_from, base, tasks
        self.run_folder, self.seq_len = Path(recipe.run.dir), recipe.data.seq_len
        self.engine = program.engine
        self.accumulation = recipe.batch.accumulation(self.seq_len, self.engine.size)
        self.rows_a_step = recipe.batch.rows * self.accumulation * self.engine.size
        self.schedule = resolve_schedule(
            recipe.schedule,
            recipe.optimizer.learning_rate,
            dataset.num_rows(self.seq_len),
            self.rows_a_step,
            self.seq_len,
        )
        self.max_steps = self.schedule.max_steps
        self.state, self.guard = TrainState(), Guard(recipe.guard)
        self.saved_step = -1
        self.evaluation: Evaluation | None = None
        self._unsaved = True
        self._stall_seconds = 0.0
        self._samples: list[dict[str, Any]] = []
        self.data_identity = data_identity(
            dataset, tokenizer, self.seq_len, document_masking=recipe.data.document_masking
        ) | origin(recipe.data, dataset)
        self._flops_per_token = train_flops_per_token(
            meta_model(self.model.config), self.seq_len, frozen=recipe.lora is not None
        )
        self.unreadable: str | None = None
        self.require_folder: Callable[[], None] = lambda: None
        self._batches: list[Batch] = []
        self._step_began = self._waited = 0.0
        self.advise: Callable[[], str | None] = lambda: None
        self.tell: Callable[[str], None] = lambda _: None
        self._logs: RunLogs | SilentLogs
        self._loader: TokenLoader
        self._saver: CheckpointSaver | PassiveSaver | ShardedSaver

    # Beginning and end

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: weights, moments, random numbers, counters.

        Raises:
            CheckpointError: it does not fit.
        """
        self.state = restore(checkpoint, self.program)
        self.guard.load_state_dict(checkpoint.trainer_state.get("guard", {}))
        self.saved_step, self._unsaved = self.state.step, False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the run folder ready: drop what a killed run left, open logs, loader and saver."""
        wait_for_main(self.engine, self._make_folder_ready)
        loader = TokenLoader(
            self.dataset,
            self.seq_len,
            self.recipe.batch.rows,
            self.recipe.run.seed,
            rows_seen=self.state.rows_seen,
            document_masking=self.recipe.data.document_masking,
            rank=self.engine.rank,
            world_size=self.engine.size,
            workers=self.recipe.data.workers,
            # A step takes all its micro-batches at its beginning.
            prefetch=max(self.recipe.data.prefetch, self.accumulation),
            pin_memory=self._pin_memory,
        )
        with (
            loader as self._loader,
            self._open_logs() as self._logs,
            self._saving(),
        ):
            yield

    def _make_folder_ready(self) -> None:
        for folder in (self.run_folder, self.run_folder / CHECKPOINTS):
            remove_leftovers(folder)
        text = yaml.safe_dump(self.recipe.model_dump(), sort_keys=False, allow_unicode=True)
        write_file(self.run_folder / RECIPE_NAME, text)

    def _open_logs(self) -> RunLogs | SilentLogs:
        if not self.engine.is_main:
            return SilentLogs()
        return RunLogs(
            self.run_folder,
            self._logged_step,
            self.state.events,
            tensorboard=self.recipe.run.tensorboard,
        )

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        config = self.recipe.checkpoint
        if config.sharded:
            self._saver = ShardedSaver(self.run_folder, config, self.engine, self.max_steps)
        elif self.engine.is_main:
            self._saver = CheckpointSaver(self.run_folder, config, self.require_folder)
        else:
            self._saver = PassiveSaver()
        self._saver.saved_step = self.saved_step
        try:
            yield
        except BaseException:
            # What went wrong first is said, whatever the background writer ran into.
            with contextlib.suppress(FirstlightError):
                self._saver.close()
            raise
        self._saver.close()

    def tell_mix(self, tell: Callable[[str], None]) -> None:
        """Say what of each corpus of a mix the run sees from its first step to its last."""
        for line in self.dataset.describe_run(self.max_steps * self.rows_a_step, self.seq_len):
            tell(line)

    @property
    def recipe_now(self) -> Recipe:
        """With the micro-batch that memory has left."""
        rows = self.state.micro_batch_rows or self.recipe.batch.rows
        batch = self.recipe.batch.model_copy(update={"micro_batch_size": rows})
        return self.recipe.model_copy(update={"batch": batch})

    @property
    def goes_on(self) -> bool:
        """Whether anything is left to be done."""
        return self.state.pending is not None or self.state.step < self.max_steps

    @property
    def held_bytes(self) -> int:
        """Bytes of the model's tensors, and of the optimizer's state where it was resumed."""
        state = self.optimizer.state_shards() if self.saved_step >= 0 else {}
        return sum(t.nbytes for t in (*self.model.parameters(), *state.values()))

    @property
    def _logged_step(self) -> int:
        """The last step whose lines are in the logs."""
        # Without a checkpoint of its own, what is there is an earlier attempt's.
        return 0 if self.saved_step < 0 else self.state.step - (self.state.pending is not None)

    @property
    def _pin_memory(self) -> bool:
        asked = self.recipe.data.pin_memory
        return self.hardware.device.type == "cuda" if asked is None else asked

    # A step: read, computed, evaluated if that is due, written down

    def read_batches(self) -> None:
        """Take the micro-batches of the next step from the loader, unless a step awaits its
        evaluation. An error is kept as `unreadable`: the processes of a run end together."""
        if self.state.pending is not None:
            return
        self._step_began = time.perf_counter()
        try:
            self._batches = [self._loader.next_batch() for _ in range(self.accumulation)]
        except DataError as error:
            self.unreadable = str(error)
        self._waited = time.perf_counter() - self._step_began

    def step(self) -> None:
        """Do one optimizer step on the batches read; its metrics are then `state.pending`.

        Raises:
            DivergedError: too many steps were skipped, or one that can't be: see `go_back`.
            TrainingError: not even one row fits into memory.
            CheckpointError, StorageError: the checkpoint being written could not be.
        """
        self._saver.require_written()
        state = self.state
        share = self.schedule.lr_scale(state.step)
        batches, self._batches = self._batches, []
        state.step += 1
        state.val_loss = None
        result = self._update(batches, share)
        seconds = time.perf_counter() - self._step_began
        state.tokens_seen += result.tokens
        state.skipped = result.skipped
        state.skipped_steps += result.skipped
        state.rows_seen = self._loader.state_dict()["rows_seen"]
        rows = sum(len(batch.input_ids) for batch in batches) * self.engine.size
        tokens_per_second = rows * self.seq_len / seconds
        peak = peak_flops(self.hardware.device, self.program.dtype) * self.engine.world.size
        router = self.program.router_metrics(result.tokens)
        auxiliary = router.get("moe/router_loss", 0.0) * self.program.router_loss_coefficient
        record = {
            "step": state.step,
            "train/loss": result.loss - auxiliary,
            "learning_rate": self.recipe.optimizer.learning_rate * share,
            "grad_norm": result.grad_norm,
            "tokens_seen": state.tokens_seen,
            "epoch": state.rows_seen / self._loader.rows_per_epoch,
            "tokens_per_second": tokens_per_second,
            "learned_tokens_per_second": result.tokens / seconds,
            "samples_per_second": rows / seconds,
            "mfu": self._flops_per_token * tokens_per_second / peak,
            "memory_bytes": peak_memory_bytes(self.hardware.device),
            "seconds": seconds,
            "data_wait_seconds": self._waited,
            "save_stall_seconds": self._stall_seconds,
            "skipped_steps": state.skipped_steps,
            **self._epochs_by_corpus(),
            **({"skipped": True} if result.skipped else {}),
            **({"loss_scale": self.program.scaler.scale} if self.program.scaler else {}),
            **router,
            **self.program.preference_metrics("train"),
        }
        # JSON has no infinity and no NaN: a skipped step may have no loss, no norm.
        state.pending = {k: v if math.isfinite(v) else None for k, v in record.items()}
        self._stall_seconds, self._unsaved = 0.0, True
        self.guard.require_fit()

    def _epochs_by_corpus(self) -> dict[str, float]:
        """How often each corpus of a mix has been seen, as metrics."""
        seen = self.dataset.epochs_by_corpus(self.state.rows_seen, self.seq_len)
        return {f"epoch/{name}": epochs for name, epochs in seen.items()}

    def _update(self, batches: list[Batch], share: float) -> StepResult:
        """The step itself, repeated with smaller micro-batches as long as memory runs out."""
        state, random = self.state, torch_random_states()
        device = self.hardware.device
        while True:
            rows = state.micro_batch_rows or self.recipe.batch.rows
            try:
                parts = (part for batch in batches for part in batch.split(rows))
                on_device = (part.to(device) for part in parts)
                return self.program.step(on_device, share, self.guard.accepts)
            except MicroBatchTooLargeError as error:
                problem = str(error)
            except DivergedError:
                raise
            except TrainingError as error:
                raise TrainingError(f"step {state.step}: {error}") from None
            except (RuntimeError, MemoryError) as error:
                # In an update: part of it may have been made, so that nothing can be repeated.
                if not is_out_of_memory(error):
                    raise
                raise self._out_of_memory_in_update(rows, str(error)) from error
            self._halve(rows, problem)
            restore_torch_random_states(random)

    def _halve(self, rows: int, problem: str) -> None:
        """Go on with fewer rows a forward pass, for this run and whatever resumes it."""
        fewer, advice = fewer_rows(rows), self.advise()
        if not fewer:
            raise TrainingError(
                f"step {self.state.step}: out of memory with a micro-batch of one row "
                f"({' '.join(problem.split())[:200]}): lower data.seq_len, or set "
                "efficiency.activation_checkpointing to full and efficiency.loss_chunk_tokens "
                f"to 512{f'; {advice}' if advice else ''}"
            )
        self.tell(
            f"out of memory with a micro-batch of {rows} rows{f': {advice}' if advice else ''}; "
            f"going on with {fewer}"
        )
        self.state.micro_batch_rows = fewer
        self.add_event("out of memory", self.state.step, micro_batch_rows=fewer, before=rows)
        self.program.forget_statistics()
        gc.collect()
        if self.hardware.device.type == "cuda":
            torch.cuda.empty_cache()

    def _out_of_memory_in_update(self, rows: int, problem: str) -> TrainingError:
        advice, short = self.advise(), " ".join(problem.split())[:200]
        return TrainingError(
            f"step {self.state.step}: out of memory with a micro-batch of {rows} rows, in the "
            f"update ({short}): lower batch.micro_batch_size or data.seq_len"
            f"{f'; {advice}' if advice else ''}"
        )

    def is_due(self, every_steps: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now."""
        at_end = self.state.step == self.max_steps
        return at_end or (every_steps > 0 and self.state.step % every_steps == 0)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether this step is followed by validation loss and sample texts."""
        return self.is_due(self.recipe.evaluation.every_steps)

    @property
    def tasks_are_due(self) -> bool:
        """Whether this step is followed by the tasks."""
        config = self.recipe.evaluation
        return bool(self.tasks) and self.is_due(config.tasks_every_steps or config.every_steps)

    def evaluate(self, bar: TrainingProgress, check: Callable[[], None]) -> None:
        """Of validation loss, sample texts and scores in tasks what is due, for the step's metrics.

        Args:
            bar: told what comes out.
            check: called between any two batches and texts' pieces; may raise.

        Raises:
            DivergedError: the weights are of no use.
        """
        check()
        # They have done their work, and an evaluation needs room of its own.
        self.optimizer.zero_grad()
        self.model.eval()
        self._samples = []
        if self.evaluation_is_due:
            self._validate(bar, check)
        if self.tasks_are_due:
            self._score(bar, check)

    def _validate(self, bar: TrainingProgress, check: Callable[[], None]) -> None:
        step, pending = self.state.step, self.state.pending
        assert pending is not None
        for prompt, text in sample_texts(
            self.program, self.tokenizer, self.run_folder, check, answered=self.dataset.has_examples
        ):
            self._samples.append({"step": step, "prompt": prompt, "text": text})
            bar.message(f"step {step}: {prompt!r} -> {text!r}")
        config = self.recipe.evaluation
        if self.validation is not None:
            found, by_corpus = self._loss_on(self.validation, "val/loss", config.max_rows, check)
            preferred = self.program.preference_metrics("val")
            pending |= self._take_validation(found, by_corpus, preferred, bar)
        if config.train_rows:
            found, by_corpus = self._loss_on(
                self.dataset, "train_eval/loss", config.train_rows, check
            )
            pending |= {
                "train_eval/loss": found.loss,
                **self.program.preference_metrics("train_eval"),
                **{f"train_eval/loss/{name}": one.loss for name, one in by_corpus.items()},
            }
            bar.message(
                f"step {step}: train_eval/loss {found.loss:.4f} "
                f"({found.rows} of {found.total_rows} rows)"
            )

    def _loss_on(
        self, dataset: Corpus, key: str, max_rows: int, check: Callable[[], None]
    ) -> tuple[Evaluation, dict[str, Evaluation]]:
        return evaluate_dataset(
            self.program, dataset, self.seq_len, check, key=key, max_rows=max_rows
        )

    def _take_validation(
        self,
        found: Evaluation,
        by_corpus: Mapping[str, Evaluation],
        preferred: Mapping[str, float],
        bar: TrainingProgress,
    ) -> dict[str, float]:
        """Keep the last evaluation, say it, and return its metrics."""
        step, rows = self.state.step, f"({found.rows} of {found.total_rows} rows)"
        self.evaluation, best = found, self.state.best_val_loss
        self.state.val_loss = found.loss
        self.state.best_val_loss = found.loss if best is None else min(best, found.loss)
        if best is not None and found.loss > best:
            rows = f"{rows}; lowest so far {best:.4f}"
        if preferred:
            # Of pairs there is neither a perplexity nor a number of bits.
            self.evaluation = replace(found, perplexity=math.nan, bits_per_byte=math.nan)
            bar.message(
                f"step {step}: val/loss {found.loss:.4f}, "
                f"{preferred['val/reward_accuracy']:.1%} of pairs in the right order, reward "
                f"margin {preferred['val/reward_margin']:.3f} {rows}"
            )
            return {"val/loss": found.loss, **preferred}
        bar.message(
            f"step {step}: val/loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, "
            f"{found.bits_per_byte:.4f} bits a byte {rows}"
        )
        return {
            "val/loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            **{f"val/loss/{name}": one.loss for name, one in by_corpus.items()},
        }

    def _score(self, bar: TrainingProgress, check: Callable[[], None]) -> None:
        pending = self.state.pending
        assert pending is not None
        for score in task_results(self.program, self.tokenizer, self.run_folder, self.tasks, check):
            bar.message(f"step {self.state.step}: {score}")
            pending |= {f"{score.task}/{name}": x for name, x in score.figures().items()}

    def write_record(self) -> dict[str, Any]:
        """Write the step's metrics and texts down, now that nothing is missing; return them."""
        record = self.state.pending
        assert record is not None
        self.require_folder()
        self._logs.write_step(record, self._samples)
        self._samples, self.state.pending, self._unsaved = [], None, True
        return record

    def add_event(self, event: str, step: int, **details: Any) -> None:
        """Add a line to the run's events."""
        self.state.events.append({"step": step, "event": event, **details})
        self._logs.write_events(self.state.events)

    # Checkpoints

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint is due, or asked for with a file `save-now` in the run folder.

        One is due every so many steps, and where the validation loss is the lowest so far and the
        best checkpoint is to be kept. None is due while steps are being skipped: it would take the
        place of one from before the trouble.
        """
        is_calm, asked = not self.guard.skipped_in_a_row, self._is_asked
        config = self.recipe.checkpoint
        is_best = bool(config.keep_best and config.every_steps) and self._is_best
        return (is_calm and (self.is_due(config.every_steps) or is_best)) or asked

    @property
    def _is_best(self) -> bool:
        """Whether the validation loss was measured at this step, and never was lower."""
        return self.state.val_loss is not None and self.state.val_loss == self.state.best_val_loss

    @property
    def _is_asked(self) -> bool:
        return on_main(self.engine, (self.run_folder / SAVE_NOW_NAME).is_file)

    def save(self) -> None:
        """Save a checkpoint of this moment; the saver deletes the ones that are too many."""
        asked = self._is_asked
        # On a CPU, the copy that is written takes their place.
        self.optimizer.zero_grad()
        self._logs.sync()
        self._stall_seconds = self._saver.save(self.state.step, self._capture)
        self.saved_step, self._unsaved = self.state.step, False
        if asked:
            self._saver.wait()
            wait_for_main(self.engine, lambda: remove_file(self.run_folder / SAVE_NOW_NAME))

    def finish_saving(self) -> None:
        """Save what is not saved yet, and wait until it is on the disk."""
        if self._unsaved:
            self.save()
        self._saver.wait()
        barrier()

    def go_back(self, error: DivergedError, bar: TrainingProgress) -> None:
        """Put an earlier checkpoint's weights, moments, random numbers and step back, and go on
        from there with the data that come next.

        Raises:
            DivergedError: the recipe says to stop, has allowed no more than were, or there is no
                checkpoint.
        """
        failed, config = self.state, self.recipe.guard
        problem = f"step {failed.step}: {error}"
        targets = [e["to_step"] for e in failed.events if e["event"] == "rollback"]
        done, before = len(targets), failed.step
        if targets and failed.step - targets[-1] == self.guard.skipped_in_a_row:
            before = targets[-1]  # not a step could be made from there
        if config.on_divergence == "stop":
            raise DivergedError(problem)
        if done >= config.max_rollbacks:
            raise DivergedError(f"{problem} (after {done} rollbacks)")
        self._saver.wait()
        folder = on_main(self.engine, lambda: self._folder_before(before))
        if folder is None:
            raise DivergedError(f"{problem} (there is no checkpoint to go back to yet)")
        self.take_up(load_checkpoint(Path(folder), verify=False))
        self._saver.saved_step = self.saved_step
        self.guard.skipped_in_a_row = 0
        # The data go on, and what was learned about the machine stays.
        self.state.rows_seen = self._loader.state_dict()["rows_seen"]
        self.state.micro_batch_rows, self.state.events = failed.micro_batch_rows, failed.events
        self._samples = []
        self.program.forget_statistics()
        self._logs.drop_after(self._logged_step)
        self.add_event("rollback", failed.step, to_step=self.state.step, reason=str(error))
        bar.message(f"{problem}; back to step {self.state.step}")

    def _folder_before(self, step: int) -> str | None:
        every = self.recipe.checkpoint.every_steps
        folder = checkpoint_before(self.run_folder, step, self.saved_step, every)
        return None if folder is None else str(folder)

    def _capture(self) -> Checkpoint:
        # Not the loader's own count: it may have given batches that no step was made on.
        rows_seen = self.state.rows_seen
        return capture(
            self.state,
            self.program,
            self.tokenizer,
            self.base,
            {
                "init_from": self.init_from,
                "recipe": self.recipe.model_dump(),
                "data": self.data_identity,
                "loader": {
                    "rows_seen": rows_seen,
                    "epoch": rows_seen // self._loader.rows_per_epoch,
                    "seed": self.recipe.run.seed,
                    "rows_per_epoch": self._loader.rows_per_epoch,
                },
                "guard": self.guard.state_dict(),
            },
        )
