"""Efficiency methods, which change how a step is computed but not its result. Each method
corresponds to one recipe key and modifies a plain model. This package also implements the z-loss,
an additional term of the training loss. Once the methods have been applied to a model,
`loss_function` creates the loss function for its training steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from firstlight.hardware.device import Hardware
from firstlight.methods.attention import choose_attention, resolve_attention
from firstlight.methods.compilation import (
    can_compile,
    compiled,
    keep_results,
    memory_budget,
    require_compiler,
    require_same_bits,
    room_for_programs,
    same_bits,
    uses_cuda_graphs,
)
from firstlight.methods.config import EfficiencyConfig, LossConfig
from firstlight.methods.memory import (
    checkpoint_layers,
    chunk_loss,
    give_back_unused,
    keep_memory,
    offloaded_activations,
)
from firstlight.methods.precision import (
    autocast,
    convert_to_fp8,
    keep_bf16_residual,
    matmul_precision,
    require_fp8,
    resolve_precision,
)
from firstlight.models import Model
from firstlight.models.ops import head_loss

__all__ = [
    "EfficiencyConfig",
    "LossConfig",
    "LossFunction",
    "apply_methods",
    "autocast",
    "can_compile",
    "give_back_unused",
    "keep_memory",
    "loss_function",
    "matmul_precision",
    "plain_loss",
    "require_same_bits",
    "resolve_attention",
    "resolve_precision",
    "same_bits",
]


class LossFunction(Protocol):
    """Interface of loss functions. The arguments are input_ids and labels, both int64 [B, T], and
    document_ids, which is int [B, T] or None. The result is the summed loss, fp32 []. The loss
    function for preference pairs has an additional argument, the `Batch.references` [B, D] of the
    pairs."""

    def __call__(
        self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
    ) -> Tensor: ...


#: A function that creates a loss function. It receives a function that computes the logits [B, T,
#: V] from the arguments input_ids, labels (None) and document_ids.
Objective = Callable[[Callable[..., Tensor]], LossFunction]


def apply_methods(
    model: Model,
    config: EfficiencyConfig,
    hardware: Hardware,
    *,
    documents: bool = False,
    z_loss_coef: float = 0.0,
) -> None:
    """Install the attention backend, the loss, activation checkpointing and fp8 layers in a model.
    The outputs of the model do not change in training, evaluation or generation.

    Args:
        model: plain model to modify in place.
        config: the recipe's `efficiency` section.
        hardware: hardware on which the model runs.
        documents: True if rows are masked by document.
        z_loss_coef: the recipe's `loss.z_loss_coef`.

    Raises:
        ConfigError: a method does not support this model or hardware.
    """
    dtype = resolve_precision(config, hardware)
    # The length of the rows is not known at this point, but it is at most
    # `max_position_embeddings`.
    longest = model.config.max_position_embeddings
    backend = resolve_attention(
        config,
        hardware.device.type,
        dtype,
        model.config,
        seq_len=longest,
        documents=documents,
        compiles=can_compile(hardware.device),
    )
    choose_attention(model, backend)
    if config.loss_chunk_tokens:
        chunk_loss(model, config.loss_chunk_tokens, z_loss_coef)
    elif z_loss_coef:
        model.head_loss = functools.partial(head_loss, z_loss_coef=z_loss_coef)
    if config.bf16_residual:
        keep_bf16_residual(model)
    if config.precision == "fp8":
        require_fp8(hardware, model)
        convert_to_fp8(model)
    if config.activation_checkpointing in ("full", "selective"):
        checkpoint_layers(model, config.activation_checkpointing == "selective")


def loss_function(
    model: Model,
    config: EfficiencyConfig,
    hardware: Hardware,
    forward: Callable[..., Tensor] | None = None,
    objective: Objective | None = None,
) -> LossFunction:
    """Return the function that computes the summed loss [] in training, with the precision,
    compilation and activation offloading that `config` specifies.

    Args:
        model: model to which the methods of `config` have been applied.
        config: the recipe's `efficiency` section.
        hardware: hardware on which the model runs.
        forward: function called in place of the model, such as the forward pass wrapped by an
            engine (`Engine.share`). None calls the model itself.
        objective: function that creates the loss function, given a function that computes logits.
            None selects the cross-entropy, which the model computes itself.

    Raises:
        ConfigError: `config.compile` is true and there is no compiler.
    """
    forward = forward or model
    if config.compile is True:
        require_compiler(config, hardware)
        forward = compiled(model, config, forward)
    dtype = resolve_precision(config, hardware)
    computed = forward if objective is None else objective(forward)
    recorded = uses_cuda_graphs(config, hardware)

    def loss_sum(*inputs: Any, **named: Any) -> Tensor:
        if recorded:
            keep_results(model)
        with contextlib.ExitStack() as stack:
            # Parameters in bf16 do not have to be cast, so autocast would only slow down the step.
            if config.precision != "bf16_params":
                stack.enter_context(autocast(hardware.device, dtype))
            if config.activation_offload:
                stack.enter_context(offloaded_activations(model))
            stack.enter_context(memory_budget(config))
            stack.enter_context(room_for_programs(config))
            return computed(*inputs, **named)

    return loss_sum


def plain_loss(
    model: Model,
    config: EfficiencyConfig,
    hardware: Hardware,
    objective: Objective | None = None,
) -> LossFunction:
    """Return the loss function for evaluation. Its precision is the same as in training. It is not
    compiled, because compiling it would take more time than it would save."""
    plain = config.model_copy(update={"compile": False})
    return loss_function(model, plain, hardware, objective=objective)
