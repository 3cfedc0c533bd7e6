"""Predict the memory use of training any `nn.Module`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError, nearest
from firstlight.planner.memory.kernels import Target, this_cpu
from firstlight.planner.memory.prediction import MemoryPrediction, predict
from firstlight.planner.memory.program import (
    fake_tensors,
    kernels_of,
    mark_weights,
    optimizer_phases,
)
from firstlight.planner.memory.trace import Trace, Tracer

#: Function that creates an optimizer from parameters.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: Optimizers that `plan_module` accepts by name.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_for_loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}

#: Operators whose names contain one of these substrings call oneDNN or cuDNN, which allocate memory
#: internally.
_OPAQUE = ("convolution", "rnn", "lstm", "gru")

_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def plan_module(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any],
    *,
    optimizer: str | MakeOptimizer = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    precision: Literal["fp32", "fp16", "bf16"] = "fp32",
    gradient_accumulation_steps: int = 1,
    activation_checkpointing: bool = False,
    zero_grad: Literal["set_to_none", "in_place"] = "set_to_none",
    max_grad_norm: float = 0.0,
    target: Target | None = None,
) -> MemoryPrediction:
    """Predict the memory use of a module's training steps without allocating any tensors.

    Args:
        model: the module, which is not changed. It can be on any device, including meta.
        batch: arguments of one forward pass. Only the shapes and dtypes of tensors are used.
        optimizer: a name in `OPTIMIZERS`, or a function that creates an optimizer from parameters.
        loss: function that receives the model's output and returns the loss. If it is None, the
            loss is the output's `loss` attribute or its first item.
        precision: "fp32", or "fp16" or "bf16" for autocast. The parameters keep their dtype.
        gradient_accumulation_steps: number of backward passes per optimizer step.
        activation_checkpointing: True to enable activation checkpointing with the model's
            `gradient_checkpointing_enable` method.
        zero_grad: "set_to_none" to free gradients after a step, "in_place" to keep them in memory
            as zeros.
        max_grad_norm: norm to which gradients are clipped; 0 for no clipping.
        target: device for which to predict; None for this machine's CPU.

    Returns:
        The prediction. It does not include memory that libraries allocate inside convolutions and
        recurrent layers. If the trace contains such operators, `notes` contains a warning.

    Raises:
        ConfigError: an argument is invalid, the model does not return a loss, or
            `activation_checkpointing` is True but the model does not have a
            `gradient_checkpointing_enable` method.
    """
    make = _make_optimizer(optimizer)
    _require_valid(precision, gradient_accumulation_steps, zero_grad)
    target, tracer = target or this_cpu(), Tracer()
    kernels = kernels_of(target, expands=False)
    with fake_tensors(), tracer, optimizer_phases(tracer), kernels:
        fake, arguments = _fake_copy(model), _fake_values(batch)
        mark_weights(fake, tracer)
        tracer.mark(_tensors(arguments), "activations")
        parameters = _trained_parameters(fake, checkpoints=activation_checkpointing)
        updates = make(parameters)
        # Trace two steps, because the optimizer's state is created in the first step and is in
        # memory during the entire second step.
        for micro_batches in (1, min(2, gradient_accumulation_steps)):
            second = tracer.tick + 1
            for _ in range(micro_batches):
                with tracer.forward_pass(), _autocast(_DTYPES[precision]):
                    value = _loss_from(_call(fake, arguments), loss)
                _backward(value, gradient_accumulation_steps, parameters, tracer)
                del value
            if max_grad_norm:
                with tracer.phase("clipping"):
                    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            updates.step()
            updates.zero_grad(set_to_none=zero_grad == "set_to_none")
        trace = tracer.finish()
    trace.notes += _opaque_layers(trace, model)
    return predict(trace, target, second)


def _backward(
    loss: Tensor, micro_batches: int, parameters: Sequence[Tensor], tracer: Tracer
) -> None:
    tracer.enter_phase("backward")
    (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
    tracer.mark((p.grad for p in parameters), "gradients")


def _trained_parameters(model: nn.Module, *, checkpoints: bool) -> list[nn.Parameter]:
    """Put a module in training mode and return its trained parameters."""
    if checkpoints:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                f"{type(model).__name__} does not have gradient_checkpointing_enable: disable "
                "activation_checkpointing, or use torch.utils.checkpoint in the model"
            )
        enable()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters: set requires_grad "
            "for some of them"
        )
    return parameters


def _require_valid(precision: str, gradient_accumulation_steps: int, zero_grad: str) -> None:
    if precision not in _DTYPES:
        raise ConfigError(f"precision '{precision}' is unknown{nearest(precision, [*_DTYPES])}")
    if gradient_accumulation_steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps}: it must be at least 1"
        )
    if zero_grad not in ("set_to_none", "in_place"):
        raise ConfigError(f"zero_grad '{zero_grad}' is unknown: use set_to_none or in_place")


def _opaque_layers(trace: Trace, model: nn.Module) -> Iterator[str]:
    names = {one.name.split(".")[1] for one in trace.operators if one.name.startswith("aten.")}
    # Recurrent layers can appear as matrix products in a trace, so they are detected by the type of
    # the module.
    names |= {part.mode.lower() for part in model.modules() if isinstance(part, nn.RNNBase)}
    found = sorted(name for name in names if any(part in name for part in _OPAQUE))
    if found:
        yield (
            f"memory that libraries allocate inside {', '.join(found)} is not counted: a "
            "step with convolutions or recurrent layers may take far more"
        )


def _make_optimizer(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    if callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer '{optimizer}' is unknown{nearest(str(optimizer), [*OPTIMIZERS])} (known: "
            f"{', '.join(OPTIMIZERS)}; or pass a function that creates one for parameters)"
        )
    return OPTIMIZERS[optimizer]


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _fake_copy(model: nn.Module) -> nn.Module:
    """Copy a module, and replace its tensors with fake tensors."""
    # Fake tensors are keyed by the ids of the original tensors, so that tied parameters stay tied.
    memo: dict[int, Any] = {}
    for module in model.modules():
        # Modules can also store tensors in plain attributes. deepcopy would copy these tensors.
        own = (*module._parameters.values(), *_tensors(vars(module)))
        for value in (*own, *module._buffers.values()):
            if value is not None and id(value) not in memo:
                memo[id(value)] = _fake_tensor(value)
    # deepcopy treats the tensors in the memo as already copied, so no real tensor is copied.
    return copy.deepcopy(model, memo)


def _fake_tensor(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _fake_values(values: Any) -> Any:
    if isinstance(values, Tensor):
        return _fake_tensor(values)
    if isinstance(values, Mapping):
        return {name: _fake_values(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return tuple(_fake_values(value) for value in values)
    return values


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [value for value in values if isinstance(value, Tensor)]


def _call(model: nn.Module, arguments: Any) -> Any:
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)


def _loss_from(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    found: Any
    if loss is not None:
        found = loss(output)
    elif isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    else:
        found = getattr(output, "loss", None)
    if found is None:
        found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ConfigError(
            "the model does not return a loss: add labels to the batch, or pass plan_module a "
            "function that computes the loss from the model's output"
        )
    return found
