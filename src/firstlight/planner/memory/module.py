"""The memory of training steps of any `nn.Module`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError, nearest
from firstlight.planner.memory.emulation import CudaKernels
from firstlight.planner.memory.kernels import Target, this_cpu
from firstlight.planner.memory.prediction import MemoryPrediction, predict
from firstlight.planner.memory.program import fake_tensors, mark_weights, optimizer_phases
from firstlight.planner.memory.trace import Trace, Tracer

#: Makes an optimizer of parameters.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_for_loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}

#: Operators of libraries (oneDNN, cuDNN) that take memory inside, by what they are called.
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
    """What training steps of a module take, without allocating anything.

    Args:
        model: the module, on any device (also meta); it is not changed.
        batch: arguments of one forward pass, as a mapping or a sequence; only the shapes and dtypes
            of tensors count.
        optimizer: a name of `OPTIMIZERS`, or a function of the trained parameters that makes the
            optimizer.
        loss: makes the loss of what the model returns; None takes its `loss` (an attribute or a
            key), or its first part.
        precision: "fp16" and "bf16" are autocast over parameters as they are.
        gradient_accumulation_steps: backward passes a step.
        activation_checkpointing: True calls the model's own `gradient_checkpointing_enable`.
        zero_grad: "set_to_none" frees gradients after a step; "in_place" keeps them as zeros.
        max_grad_norm: gradients are clipped to it; 0 leaves them.
        target: the device to predict for; None is this machine's CPU.

    Returns:
        The prediction. What the libraries of convolutions and recurrent layers take inside is not
        in it; its notes say so where their operators are in the trace.

    Raises:
        ConfigError: an argument can't be meant, or the model has no loss or no
            `gradient_checkpointing_enable`.
    """
    make = _make_optimizer(optimizer)
    if precision not in _DTYPES:
        raise ConfigError(f"precision '{precision}' is unknown{nearest(precision, [*_DTYPES])}")
    if gradient_accumulation_steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps}: at least 1 is needed"
        )
    if zero_grad not in ("set_to_none", "in_place"):
        raise ConfigError(f"zero_grad '{zero_grad}' is unknown: use set_to_none or in_place")
    dtype = _DTYPES[precision]
    target = target or this_cpu()
    tracer = Tracer()
    kernels = CudaKernels(target) if target.kind == "cuda" else contextlib.nullcontext()
    with fake_tensors(), tracer, optimizer_phases(tracer), kernels:
        fake, arguments = _fake_copy(model), _fake_values(batch)
        mark_weights(fake, tracer)
        tracer.mark(_tensors(arguments), "activations")
        if activation_checkpointing:
            _enable_checkpointing(fake)
        fake.train()
        parameters = [p for p in fake.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError(f"{type(model).__name__} has no parameters that are trained")
        updates = make(parameters)
        counted = 0
        for step in range(2):
            counted = tracer.tick + 1
            for _ in range(min(2, gradient_accumulation_steps) if step else 1):
                with tracer.forward_pass(), _autocast(dtype):
                    value = _loss_of(_call(fake, arguments), loss)
                tracer.enter_phase("backward")
                (value / gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
                tracer.mark((p.grad for p in parameters), "gradients")
                del value
            if max_grad_norm:
                with tracer.phase("clipping"):
                    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            updates.step()
            updates.zero_grad(set_to_none=zero_grad == "set_to_none")
        trace = tracer.finish()
    trace.notes += _opaque_layers(trace, model)
    return predict(trace, target, counted)


def _opaque_layers(trace: Trace, model: nn.Module) -> Iterator[str]:
    names = {one.name.split(".")[1] for one in trace.operators if one.name.startswith("aten.")}
    # Some of which are traced as the products that they could be computed with.
    names |= {part.mode.lower() for part in model.modules() if isinstance(part, nn.RNNBase)}
    found = sorted(name for name in names if any(part in name for part in _OPAQUE))
    if found:
        yield (
            f"what libraries take inside of {', '.join(found)} is not counted: with convolutions "
            "and recurrent layers a step may take far more"
        )


def _make_optimizer(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    if callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer '{optimizer}' is unknown{nearest(str(optimizer), [*OPTIMIZERS])} (known: "
            f"{', '.join(OPTIMIZERS)}; or give a function that makes one of parameters)"
        )
    return OPTIMIZERS[optimizer]


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _fake_copy(model: nn.Module) -> nn.Module:
    """The same module with tensors without memory."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *_tensors(vars(module))):
            if value is not None and id(value) not in memo:
                memo[id(value)] = _fake_tensor(value)
        for value in module._buffers.values():
            if value is not None and id(value) not in memo:
                memo[id(value)] = _fake_tensor(value)
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


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
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
            "the model gives no loss: put labels into the batch, or give plan_module a loss "
            "function of the model's output"
        )
    return found


def _enable_checkpointing(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"{type(model).__name__} has no gradient_checkpointing_enable: leave "
            "activation_checkpointing out, or put torch.utils.checkpoint into the model yourself"
        )
    enable()
