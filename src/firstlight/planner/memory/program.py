"""Hooks that tell a tracer, while a step runs, its phases and which tensors are weights, gradients
and optimizer states; and the recipe that is traced in place of the real one (`equivalent`)."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from firstlight.hardware.device import Hardware
from firstlight.methods import EfficiencyConfig, LossFunction
from firstlight.optim.optimizer import Optimizer
from firstlight.planner.memory.kernels import Target
from firstlight.planner.memory.trace import Tracer
from firstlight.recipe import ResolvedRecipe
from firstlight.training.preference import answer_log_probs
from firstlight.training.program import TrainingProgram


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Context in which new tensors have no memory; see also `tables_put_back`."""
    # Real tensors, such as tables that a library made before, may be used inside.
    with tables_put_back(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def tables_put_back() -> Iterator[None]:
    """Have bitsandbytes forget the tables that it makes inside: fake ones are of no use later."""
    library = sys.modules.get("bitsandbytes.functional")
    kept = None if library is None else dict(library.name2qmap)
    try:
        yield
    finally:
        library = sys.modules.get("bitsandbytes.functional")
        if library is not None:
            library.name2qmap.clear()
            library.name2qmap.update(kept or {})
        kernels = sys.modules.get("bitsandbytes.backends.default.ops")
        for value in () if kernels is None else vars(kernels).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def mark_weights(model: nn.Module, tracer: Tracer) -> None:
    """Mark the model's current parameters and buffers as weights."""
    tracer.mark((*model.parameters(), *model.buffers()), "weights")


@contextlib.contextmanager
def optimizer_phases(tracer: Tracer) -> Iterator[None]:
    """Context in which the step of every torch optimizer is the phase "optimizer", and its
    gradients and states are marked."""
    before = ["setup"]

    def enter(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before.append(tracer.phase_name)
        tracer.mark((p.grad for p in parameters_of(optimizer)), "gradients")
        tracer.enter_phase("optimizer")

    def leave(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracer.enter_phase(before.pop())
        tracer.mark(_states_of(optimizer), "optimizer_states")

    handles = (
        register_optimizer_step_pre_hook(enter),
        register_optimizer_step_post_hook(leave),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All of an optimizer's parameters."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in parameters_of(optimizer):
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield value


def marked_loss(head_loss: Callable[..., Tensor], tracer: Tracer) -> Callable[..., Tensor]:
    """The head's loss function, with phases "loss" and "backward of loss" for its passes."""

    def loss(x: Tensor, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            with tracer.making("logits_and_loss"):
                return head_loss(x, *args)
        if x.requires_grad:
            x.register_hook(_enter_backward)  # type: ignore[no-untyped-call]
        with tracer.phase("loss"):
            result = head_loss(x, *args)
        result.register_hook(_enter_backward_of_loss)  # type: ignore[no-untyped-call]
        return result

    def _enter_backward(_: Tensor) -> None:
        tracer.enter_phase("backward")

    def _enter_backward_of_loss(_: Tensor) -> None:
        tracer.enter_phase("backward of loss")

    return loss


def marked_log_probs(tracer: Tracer) -> Callable[..., Tensor]:
    """`training.preference.answer_log_probs` with marked phases, which preference pairs have in
    place of the head's loss."""
    marked = marked_loss(answer_log_probs, tracer)

    def log_probs(logits_BTV: Tensor, *args: Any) -> Tensor:
        tracer.mark((logits_BTV,), "logits_and_loss")
        return marked(logits_BTV, *args)

    return log_probs


def watch_program(program: TrainingProgram, tracer: Tracer) -> None:
    """Let the tracer know the tensors of a program and the phases of its steps; changes the
    program's optimizer and loss function."""
    loss_sum = program.loss_sum
    program.optimizer = cast(Optimizer, _TracedOptimizer(program, tracer))

    def marked_loss_sum(*args: Any, **kwargs: Any) -> Tensor:
        with tracer.forward_pass():
            loss = loss_sum(*args, **kwargs)
        tracer.enter_phase("backward")
        return loss

    program.loss_sum = marked_loss_sum


class _TracedOptimizer:
    """A program's optimizer that marks gradients and master weights, and the phase "clipping"."""

    def __init__(self, program: TrainingProgram, tracer: Tracer) -> None:
        self._optimizer, self._tracer = program.optimizer, tracer
        self._weights = list(program.model.parameters())
        own = {id(p) for p in self._weights}
        # Master weights are counted as states of the optimizer: they exist for its updates alone.
        self._masters = [m for m in self._optimizer.updated.values() if id(m) not in own]
        tracer.mark(self._masters, "optimizer_states")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def accumulate(self) -> None:
        """See `Optimizer.accumulate`, which replaces gradients of weights by those of masters."""
        self._tracer.mark((p.grad for p in self._weights), "gradients")
        self._optimizer.accumulate()
        self._tracer.mark((m.grad for m in self._masters), "gradients")

    def clip_gradients(self, *args: Any) -> Tensor:
        """See `Optimizer.clip_gradients`."""
        with self._tracer.phase("clipping"):
            return self._optimizer.clip_gradients(*args)


#: Elements of the smallest tensor that is offloaded, as in `methods.memory`.
_OFFLOADED_ELEMENTS = 1024


def host_activations(
    loss_sum: LossFunction, model: nn.Module, tracer: Tracer, target: Target
) -> LossFunction:
    """`methods.memory.offloaded_activations` on fake tensors: for a GPU, the activations of the
    forward pass are counted in the host's memory; on a CPU, they are a copy in the same memory."""
    weights = {id(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())}
    # Kept alive as long as ids are compared: otherwise another storage could get the same id.
    kept = [p.untyped_storage() for p in (*model.parameters(), *model.buffers())]

    def pack(tensor: Tensor) -> Any:
        if id(tensor.untyped_storage()) in weights or tensor.numel() < _OFFLOADED_ELEMENTS:
            return tensor
        if target.kind == "cpu":
            return _Offloaded(torch.empty_like(tensor))
        tracer.move_to_host(tensor.numel() * tensor.element_size())
        return _Offloaded(None, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.copy is not None:
            copy: Tensor = packed.copy
            return copy
        made = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype)
        tracer.move_to_host(-made.numel() * made.element_size())
        return made

    def offloaded(*args: Any, **kwargs: Any) -> Tensor:
        assert kept
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss_sum(*args, **kwargs)

    return offloaded


@dataclass(frozen=True)
class _Offloaded:
    """A tensor in the host's memory, or its copy on a CPU."""

    copy: Tensor | None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


#: Hardware that the traced program gets: a CPU with a PiB of memory, and with bf16.
PLANNED = Hardware(torch.device("cpu"), "a planned device", 2**50, bf16=True)

#: Values of `efficiency.attention` that name a GPU's kernel; `CudaKernels` traces them.
_GPU_KERNELS = ("flash", "efficient", "cudnn", "math")


@dataclass(frozen=True)
class Equivalent:
    """Recipe and kernels that stand in for the real step in a trace.

    Attributes:
        recipe: the recipe to trace.
        kernel: attention kernel on a GPU, see `CudaKernels`; None is torch's choice.
        offloads: True if activations are offloaded to the host's memory.
        notes: assumptions of the prediction, as text for the user.
    """

    recipe: ResolvedRecipe
    kernel: str | None
    offloads: bool
    notes: tuple[str, ...]

    def with_(self, recipe: ResolvedRecipe) -> Equivalent:
        """The same kernels and notes with another recipe to trace."""
        return replace(self, recipe=recipe)


def equivalent(recipe: ResolvedRecipe, target: Target) -> Equivalent:
    """The recipe and kernels to trace for a recipe on a target."""
    config, notes = recipe.efficiency, []
    chosen: dict[str, Any] = {"activation_offload": False}
    kernel = None
    if target.kind == "cuda":
        kernel = config.attention if config.attention in _GPU_KERNELS else None
        # A CPU has none of these kernels; `CudaKernels` puts them in the place of torch's choice.
        if config.attention in (*_GPU_KERNELS, "flex"):
            chosen["attention"] = "sdpa"
        if config.precision == "fp8":
            chosen["precision"] = "bf16"
            notes.append("fp8 is planned as bf16: the scaled copies of factors are left out")
        # tf32 is a mode of a GPU's products: its tensors are fp32.
        if config.precision == "tf32":
            chosen["precision"] = "fp32"
        if config.compile:
            notes.append("compiled code is planned as inductor makes it for CPUs")
    recipe = recipe.with_keys("efficiency", **chosen)
    recipe = _without_masks(recipe, config.attention, target)
    # Only CUDA has paged memory; without it, the states have the same sizes.
    if recipe.optimizer.name == "paged_adamw8bit":
        notes.append("paged states are counted on the device, where they lie while they fit")
        recipe = recipe.with_keys("optimizer", name="adamw8bit")
    # Without a GPU, Muon updates matrices one by one unless an implementation is given.
    optimizer = recipe.optimizer
    is_open = (optimizer.name, optimizer.implementation) == ("muon", "auto")
    if target.kind == "cuda" and is_open:
        recipe = recipe.with_keys("optimizer", implementation="fused")
    # Refused without a GPU. Page-locked memory is host memory, which is not predicted.
    if recipe.data.pin_memory:
        recipe = recipe.with_keys("data", pin_memory=None)
    return Equivalent(recipe, kernel, config.activation_offload, tuple(notes))


def without_compile(config: EfficiencyConfig) -> dict[str, Any]:
    """The changes of a section that remove torch.compile, including the keys that configure
    compiling. Recomputation within a memory budget is the compiler's own choice and has no
    replacement."""
    plain = {"compile": False, "compile_regional": False, "compile_mode": "default"}
    if config.activation_checkpointing == "budget":
        plain["activation_checkpointing"] = "none"
    return {key: value for key, value in plain.items() if getattr(config, key) != value}


def uncompiled(recipe: ResolvedRecipe) -> ResolvedRecipe:
    """The recipe without torch.compile: the same step, operator by operator."""
    config = recipe.efficiency
    if not config.compile:
        return recipe
    return recipe.with_keys("efficiency", **without_compile(config))


def _without_masks(recipe: ResolvedRecipe, attention: str, target: Target) -> ResolvedRecipe:
    """The recipe without document masks if a GPU computes them by flex attention, which has no mask
    of T x T elements in memory."""
    masked = recipe.data.document_masking and attention == "flex"
    if target.kind == "cpu" or not masked:
        return recipe
    return recipe.with_keys("data", document_masking=False)
