"""One run: the state that a training loop works on, and what it does with it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from firstlight.checkpoint import CHECKPOINTS, prune_checkpoints, save_checkpoint
from firstlight.data.loader import TokenLoader
from firstlight.data.packing import num_rows
from firstlight.data.shards import TokenDataset
from firstlight.efficiency import autocast
from firstlight.errors import CheckpointError, ModelError, TrainingError
from firstlight.evaluation.perplexity import Evaluation, evaluate_split, evaluation_rows
from firstlight.files import remove_leftovers, storage_errors, write_file
from firstlight.generation.engine import GenerationStream
from firstlight.generation.sampling import SamplingConfig
from firstlight.hardware import peak_flops, peak_memory_bytes
from firstlight.huggingface import LoadedModel
from firstlight.models import Llama, MoEConfig
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import warmup_cosine
from firstlight.tokenizer import Tokenizer
from firstlight.training.adapters import AdapterBase
from firstlight.training.config import Recipe
from firstlight.training.metrics import METRICS_NAME, SAMPLES_NAME, JsonLines, keep_until
from firstlight.training.program import TrainingProgram
from firstlight.training.progress import TrainingProgress
from firstlight.training.state import TrainState, capture
from firstlight.training.step import DIVERGED

RECIPE_NAME = "recipe.yaml"


class Job:
    """One run, set up and checked: what the loop works with."""

    def __init__(
        self,
        program: TrainingProgram,
        tokenizer: Tokenizer,
        dataset: TokenDataset,
        validation: TokenDataset | None,
        init_from: str | None,
        base: AdapterBase | None,
    ) -> None:
        recipe = program.recipe
        assert recipe.run.dir is not None
        assert recipe.data.seq_len is not None
        self.program, self.recipe, self.hardware = program, recipe, program.hardware
        self.model, self.optimizer, self.tokenizer = program.model, program.optimizer, tokenizer
        self.dataset, self.validation = dataset, validation
        self.init_from, self.base = init_from, base
        self.run_folder, self.seq_len = Path(recipe.run.dir), recipe.data.seq_len
        self.accumulation = recipe.batch.accumulation(self.seq_len)
        self.max_steps, self.warmup_steps = _schedule(recipe, dataset, self.accumulation)
        self.state = TrainState()
        self.saved_step = -1
        self.evaluation: Evaluation | None = None
        self._flops_per_token = train_flops_per_token(
            meta_model(self.model.config), self.seq_len, frozen=recipe.lora is not None
        )
        self.metrics: JsonLines
        self._samples: JsonLines
        self._loader: TokenLoader

    @property
    def _pin_memory(self) -> bool:
        asked = self.recipe.data.pin_memory
        return self.hardware.device.type == "cuda" if asked is None else asked

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Take the run folder: lock it, drop what a killed run left, open the logs."""
        with storage_errors(self.run_folder):
            self.run_folder.mkdir(parents=True, exist_ok=True)
        with _lock(self.run_folder):
            for folder in (self.run_folder, self.run_folder / CHECKPOINTS):
                remove_leftovers(folder)
            if self.saved_step != self.state.step:  # not resumed: logs of a dead run are void
                for name in (METRICS_NAME, SAMPLES_NAME):
                    (self.run_folder / name).unlink(missing_ok=True)
            keep_until(self.run_folder / METRICS_NAME, self.state.step)
            keep_until(self.run_folder / SAMPLES_NAME, self.state.step)
            text = yaml.safe_dump(self.recipe.model_dump(), sort_keys=False, allow_unicode=True)
            write_file(self.run_folder / RECIPE_NAME, text)
            self._loader = TokenLoader(
                self.dataset,
                self.seq_len,
                self.recipe.batch.rows,
                self.recipe.run.seed,
                rows_seen=self.state.rows_seen,
                document_masking=self.recipe.data.document_masking,
                workers=self.recipe.data.workers,
                # A step takes all its micro-batches at its beginning.
                prefetch=max(self.recipe.data.prefetch, self.accumulation),
                pin_memory=self._pin_memory,
            )
            with (
                self._loader,
                contextlib.closing(JsonLines(self.run_folder / METRICS_NAME)) as self.metrics,
                contextlib.closing(JsonLines(self.run_folder / SAMPLES_NAME)) as self._samples,
            ):
                yield

    def step(self) -> dict[str, Any]:
        """Do one optimizer step; return its metrics."""
        start = time.perf_counter()
        device, state = self.hardware.device, self.state
        batches = [self._loader.next_batch().to(device) for _ in range(self.accumulation)]
        waited = time.perf_counter() - start
        share = warmup_cosine(
            state.step, self.max_steps, self.warmup_steps, self.recipe.schedule.min_lr_ratio
        )
        try:
            result = self.program.step(batches, share)
        except TrainingError as error:
            raise TrainingError(f"step {state.step + 1}: {error}") from None
        seconds = time.perf_counter() - start
        state.step += 1
        state.tokens_seen += result.tokens
        state.rows_seen = self._loader.state_dict()["rows_seen"]
        tokens_per_second = result.tokens / seconds
        peak = peak_flops(device, self.program.dtype)
        router = self._router_metrics(result.tokens)
        auxiliary = router.get("moe/router_loss", 0.0) * self._router_loss_coefficient
        return {
            "step": state.step,
            "train/loss": result.loss - auxiliary if math.isfinite(result.loss) else None,
            "learning_rate": self.recipe.optimizer.learning_rate * share,
            # JSON has no infinity: a step that fp16 skipped has no norm.
            "grad_norm": None if result.skipped else result.grad_norm,
            "tokens_seen": state.tokens_seen,
            "epoch": state.rows_seen / self._loader.rows_per_epoch,
            "tokens_per_second": tokens_per_second,
            "mfu": self._flops_per_token * tokens_per_second / peak,
            "memory_bytes": peak_memory_bytes(device),
            "seconds": seconds,
            "data_wait_seconds": waited,
            **self._scaler_metrics(),
            **router,
        }

    def _scaler_metrics(self) -> dict[str, float]:
        """The loss scale, and the steps it skipped since the run began; {} without fp16."""
        scaler = self.program.scaler
        if scaler is None:
            return {}
        return {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped_steps}

    def _router_metrics(self, tokens: int) -> dict[str, float]:
        """What the routers of a Mixture of Experts did in this step; {} for a dense model."""
        if isinstance(self.model, Llama) and self.model.router_statistics is not None:
            return self.model.router_statistics.take(tokens)
        return {}

    @property
    def _router_loss_coefficient(self) -> float:
        config = self.model.config
        return config.router_aux_loss_coef if isinstance(config, MoEConfig) else 0.0

    def is_due(self, every_steps: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now."""
        at_end = self.state.step == self.max_steps
        return at_end or (every_steps > 0 and self.state.step % every_steps == 0)

    def evaluate(self, bar: TrainingProgress) -> dict[str, Any]:
        """Validation loss, and sample texts; return the metrics."""
        self.model.eval()
        self._write_samples(bar)
        if self.validation is None:
            return {}
        rows = num_rows(self.validation.num_tokens, self.seq_len)
        self.evaluation = evaluate_split(
            self.program.evaluation_loss,
            self.validation,
            seq_len=self.seq_len,
            batch_size=self.recipe.batch.rows,
            device=self.hardware.device,
            document_masking=self.recipe.data.document_masking,
            rows=evaluation_rows(rows, self.recipe.evaluation.max_rows),
        )
        found = self.evaluation
        if not math.isfinite(found.loss):
            raise TrainingError(f"step {self.state.step}: val/loss is {found.loss}; {DIVERGED}")
        bar.message(
            f"step {self.state.step}: val/loss {found.loss:.4f}, "
            f"perplexity {found.perplexity:.2f}, "
            f"{found.bits_per_byte:.4f} bits a byte ({found.rows} of {found.total_rows} rows)"
        )
        return {
            "val/loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
        }

    def _write_samples(self, bar: TrainingProgress) -> None:
        config = self.recipe.evaluation
        sampling = SamplingConfig(config.sample_tokens, config.temperature, top_k=50, seed=0)
        eos = self.tokenizer.eos_token_id
        loaded = LoadedModel(
            self.model, self.tokenizer, () if eos is None else (eos,), self.run_folder
        )
        for prompt in config.sample_prompts:
            try:
                with autocast(self.hardware.device, self.program.dtype):
                    text = "".join(GenerationStream(loaded, prompt, sampling))
            except ModelError as error:
                raise TrainingError(f"step {self.state.step}: {error}; {DIVERGED}") from None
            self._samples.write({"step": self.state.step, "prompt": prompt, "text": text})
            bar.message(f"step {self.state.step}: {prompt!r} -> {text!r}")

    def save(self) -> None:
        """Write a checkpoint of this moment, then delete the ones that are too many."""
        self.metrics.sync()
        self._samples.sync()
        checkpoint = capture(
            self.state,
            self.program,
            self.tokenizer,
            self.base,
            {
                "init_from": self.init_from,
                "recipe": self.recipe.model_dump(),
                "data": self.data_identity(),
            },
        )
        save_checkpoint(self.run_folder, self.state.step, checkpoint)
        self.saved_step = self.state.step
        prune_checkpoints(self.run_folder, self.recipe.checkpoint.keep_last, self.state.step)

    def data_identity(self) -> dict[str, Any]:
        """Which data this is, so that a run is not resumed on another."""
        manifest = json.dumps(self.dataset.manifest, sort_keys=True).encode()
        return {
            "dir": str(self.dataset.folder.resolve()),
            "seq_len": self.seq_len,
            "document_masking": self.recipe.data.document_masking,
            "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
            "tokenizer_sha256": self.tokenizer.fingerprint,
        }


def _schedule(recipe: Recipe, dataset: TokenDataset, accumulation: int) -> tuple[int, int]:
    """(max_steps, warmup_steps) with the defaults worked out."""
    assert recipe.data.seq_len is not None
    rows_a_step = recipe.batch.rows * accumulation
    epoch = math.ceil(num_rows(dataset.num_tokens, recipe.data.seq_len) / rows_a_step)
    max_steps = recipe.schedule.max_steps or epoch
    warmup_steps = recipe.schedule.warmup_steps
    return max_steps, max_steps // 20 if warmup_steps is None else warmup_steps


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the run folder: two processes writing to one run would ruin it. The lock goes with
    the process, however it ends."""
    with storage_errors(folder):
        file = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"run folder {folder} is in use by another process") from None
        yield
