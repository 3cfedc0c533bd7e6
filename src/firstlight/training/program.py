"""Set up the model, optimizer, loss function and methods of a recipe for optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware
from firstlight.methods import (
    apply_methods,
    give_back_unused,
    keep_memory,
    loss_function,
    matmul_precision,
    plain_loss,
    require_same_bits,
    resolve_precision,
    same_bits,
)
from firstlight.models import Model
from firstlight.parallel import all_reduce_sum
from firstlight.parallel.engine import Engine, one_process
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.conflicts import require_combination
from firstlight.training.guard import LossScaler
from firstlight.training.preference import PreferenceObjective
from firstlight.training.step import StepResult, train_step


class TrainingProgram:
    """Model, optimizer and loss function of a recipe, set up for optimizer steps.

    Args:
        recipe: recipe of the run.
        model: the model with its weights in fp32; a frozen base model may have lower precision. The
            model is moved to the device and modified as required by the recipe's methods.
        hardware: the hardware of this process.
        engine: engine that connects the run's processes, or None for a single process.

    Attributes:
        model: the model on the device.
        optimizer: the optimizer of the model.
        dtype: dtype of the matrix products.
        loss_sum: function that computes the loss of a batch, summed over its valid tokens or pairs,
            as a scalar.
        evaluation_loss: function that computes the loss of a batch in evaluations. It is never
            compiled.
        text_loss: function that computes the cross-entropy of a batch of text in evaluations. It
            differs from `evaluation_loss` only in runs on preference pairs.
        scaler: loss scaler for fp16, or None in other precisions.
        preference: loss over preference pairs, or None for other data.
        is_ahead: True while the gradients already belong to the next step; see `RunAhead`.

    Raises:
        ConfigError: methods can't be combined or do not work on this machine; the message names an
            alternative.
    """

    def __init__(
        self, recipe: ResolvedRecipe, model: Model, hardware: Hardware, engine: Engine | None = None
    ) -> None:
        self.engine = engine or one_process(hardware.device)
        cut = self.engine.config
        require_combination(
            recipe, hardware, self.engine.name, cut.tensor_parallel, pipeline=cut.pipeline
        )
        keep_memory(hardware, sharded=self.engine.keeps_shards)
        if recipe.run.deterministic:
            require_same_bits(hardware)
        config = recipe.efficiency
        self.recipe, self.hardware = recipe, hardware
        # Do not move the model if the engine shards it, because the full model may not fit on the
        # device. Do not move it either if it is already on the device, because `nn.Module.to` would
        # replace the planner's fake parameters.
        is_there = all(p.device == hardware.device for p in model.parameters())
        self.model = model if self.engine.keeps_shards or is_there else model.to(hardware.device)
        # Apply the methods before the engine, because DDP and FSDP2 must wrap layers that already
        # have activation checkpointing.
        apply_methods(
            self.model,
            config,
            hardware,
            documents=recipe.data.document_masking,
            z_loss_coef=recipe.loss.z_loss_coef,
        )
        self.dtype = resolve_precision(config, hardware)
        initial: dict[str, Tensor] = {}
        if config.precision == "bf16_params":
            # Keep the fp32 values as master weights before casting the model. Frozen weights do not
            # need master weights.
            trained = (p for p in self.model.named_parameters() if p[1].requires_grad)
            initial = {name: parameter.detach() for name, parameter in trained}
            self.model.cast(torch.bfloat16)
        self.optimizer, forward = self.engine.set_up(
            self.model,
            recipe.optimizer,
            config.precision,
            in_backward=config.optimizer_in_backward,
            initial=initial,
        )
        section = recipe.preference
        self.preference = None if section is None else PreferenceObjective(section)
        self.loss_sum = loss_function(
            self.model, config, hardware, forward, objective=self.preference
        )
        self.evaluation_loss = plain_loss(self.model, config, hardware, self.preference)
        self.text_loss = plain_loss(self.model, config, hardware)
        self.scaler = LossScaler() if config.precision == "fp16" else None
        self.is_ahead = False
        self._steps = 0

    @contextlib.contextmanager
    def stepping(self, lr_scale: float) -> Iterator[None]:
        """Prepare one optimizer step (`train_step`): set the learning rate, the training mode and
        the precision. Clean up on exit.

        Args:
            lr_scale: learning rate as a fraction of its peak.
        """
        self.optimizer.set_learning_rate(lr_scale)
        # A previous evaluation may have disabled dropout and left parameters gathered. Call `train`
        # only if the model is not in training mode, because it visits all modules, and a GPU would
        # wait for that in each step.
        if not self.model.training:
            self.model.train()
        self.engine.reshard()
        config = self.recipe.efficiency
        same = same_bits(config, self.hardware, deterministic=self.recipe.run.deterministic)
        with matmul_precision(config), same:
            yield
        # Free the gradients here, because evaluations and saves need their memory. This takes place
        # while a GPU is still computing the update, so it does not delay the next step.
        if not self.is_ahead:
            self.optimizer.zero_grad()
        self._steps += 1
        if self._steps == 1:
            # Compilation and the optimizer's first step temporarily used additional memory.
            give_back_unused(self.hardware)
        every = config.empty_cache_steps
        # Return the allocator's cached blocks to the device, because later tensors may not fit into
        # blocks of these sizes.
        if every and self._steps % every == 0 and self.hardware.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(
        self,
        batches: Iterable[Batch],
        lr_scale: float,
        accepts: Callable[[float, float], bool] | None = None,
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of a global batch. This method can be used
        without a run.

        Args:
            batches: micro-batches on the device.
            lr_scale: learning rate as a fraction of its peak.
            accepts: called with the loss and gradient norm; returns False to skip the update. See
                `train_step`.

        Raises:
            DivergedError, MicroBatchTooLargeError: see `train_step`.
        """
        with self.stepping(lr_scale):
            return train_step(
                self.loss_sum,
                self.optimizer,
                batches,
                self.scaler,
                accepts=accepts,
                engine=self.engine,
            )

    def router_metrics(self, tokens: int) -> dict[str, float]:
        """Return the router metrics of a mixture-of-experts model for the last step, over all
        processes, or {} for a dense model.

        Args:
            tokens: number of valid tokens in the step.
        """
        statistics = self.model.router_statistics
        if statistics is None:
            return {}
        if self.engine.size > 1 and statistics.visits_LE is not None:
            assert statistics.loss_sum is not None
            statistics.loss_sum = all_reduce_sum(statistics.loss_sum.clone())
            statistics.visits_LE = all_reduce_sum(statistics.visits_LE.clone())
        return statistics.take(tokens)

    def preference_metrics(self, prefix: str) -> dict[str, float]:
        """Return the mean rewards of the preference pairs that all processes have used since the
        last call. Return {} if there are no pairs.

        Args:
            prefix: prefix of the metric names, such as "val".
        """
        if self.preference is None:
            return {}
        return self.preference.take(prefix, shared=self.engine.world.size > 1)

    def forget_statistics(self) -> None:
        """Discard the statistics of preference pairs and routers collected in an abandoned step."""
        if self.preference is not None:
            self.preference.forget()
        if (statistics := self.model.router_statistics) is not None:
            statistics.loss_sum = statistics.visits_LE = None
