"""transformers' Trainer with bf16 and torch_compile, as `firstlight bench training` measures it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers.trainer_callback import PrinterCallback

from firstlight.data.loader import Batch
from firstlight.recipe import Recipe


class _Clock(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class _Rows(IterableDataset[dict[str, torch.Tensor]]):
    """Single rows of batches. The Trainer's models shift the labels themselves."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._batches:
            for row in batch.input_ids:
                yield {"input_ids": row, "labels": row}


class _Times(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.stop()


def train_with_trainer(
    recipe: Recipe,
    batches: Iterator[Batch],
    steps: int,
    rows: int,
    clock: _Clock,
    *,
    compile_model: bool,
) -> list[float]:
    """Train a fresh model of the recipe's shape; the loss of each step.

    The vocabulary is not padded, dropout is off, attention is torch's, the optimizer is the
    Trainer's default with clipping to 1; the learning rate is constant.

    Args:
        recipe: its model, learning rate, seed and device.
        batches: one a step.
        steps: how many.
        rows: of a batch.
        clock: told when each step begins and ends.
        compile_model: False leaves torch.compile out, for dry runs.
    """
    assert recipe.model is not None
    values = recipe.model.to_hf()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            bf16=True,
            torch_compile=compile_model,
            use_cpu=recipe.run.device == "cpu",
            learning_rate=recipe.optimizer.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=recipe.optimizer.weight_decay,
            max_grad_norm=1.0,
            adam_beta2=0.95,
            seed=recipe.run.seed % 2**32,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=_Rows(batches),
            callbacks=[_Times(clock)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
