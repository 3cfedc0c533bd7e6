"""Train a firstlight model with the Trainer of Hugging Face transformers.

    python examples/transformers_trainer.py RECIPE.yaml [--section.key VALUE]...

prints the loss of each step, which equals that of `firstlight train RECIPE.yaml`. Run here: one
process on a CPU (tests/parity/test_other_trainers.py). Not run here: GPUs, several processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import transformers
from parts import MIXED_PRECISION, Parts, parts_of, run
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers.trainer_callback import PrinterCallback

from firstlight.methods.memory import checkpoint_layers
from firstlight.models import Model
from firstlight.recipe import Recipe


class MeanLoss(nn.Module):
    """The output that the Trainer expects of a model: named values, with a loss already divided by
    the valid tokens of the whole step, which the Trainer counts.

    Args:
        model: model whose forward pass returns the summed loss; it is trained in place.
    """

    accepts_loss_kwargs = True  # otherwise the Trainer would divide by the accumulation steps again

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor
    ) -> dict[str, Tensor]:
        return {"loss": self.inner(input_ids, labels) / num_items_in_batch}

    def activation_checkpointing_enable(self, **settings: object) -> None:
        """Recompute activations in the backward pass; called with gradient_checkpointing=True.

        Args:
            settings: the Trainer's settings for torch's function, which are not used here.
        """
        checkpoint_layers(self.inner, selective=False)

    gradient_checkpointing_enable = activation_checkpointing_enable  # earlier versions call it


class Rows(IterableDataset[dict[str, Tensor]]):
    """The rows of a loader, one by one. Labels are already shifted, as in `TokenLoader`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        with self._parts.loader() as loader:
            while True:
                batch = loader.next_batch()
                for input_ids, labels in zip(batch.input_ids, batch.labels, strict=True):
                    yield {"input_ids": input_ids, "labels": labels}


def train(recipe: Recipe) -> list[float]:
    """Train with the recipe, and return the loss of each step."""
    parts = parts_of(recipe)
    precision = MIXED_PRECISION[recipe.efficiency.precision]
    arguments = transformers.TrainingArguments(
        output_dir=recipe.run.dir,
        use_cpu=recipe.run.device == "cpu",
        seed=recipe.run.seed % 2**32,
        max_steps=parts.schedule.max_steps,
        per_device_train_batch_size=recipe.batch.rows,
        gradient_accumulation_steps=recipe.batch.accumulation(parts.seq_len),
        gradient_checkpointing=recipe.efficiency.activation_checkpointing != "none",
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        max_grad_norm=recipe.optimizer.max_grad_norm,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=recipe.run.device != "cpu" and torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(
        model=MeanLoss(parts.model),
        args=arguments,
        train_dataset=Rows(parts),
        optimizers=(
            parts.optimizer,
            torch.optim.lr_scheduler.LambdaLR(parts.optimizer, parts.schedule.lr_scale),
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    for number, loss in enumerate(run(train), start=1):
        print(f"step {number} loss {loss!r}")  # noqa: T201
