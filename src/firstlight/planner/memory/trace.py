"""Trace code that runs on fake tensors. A trace contains the operators that the code calls, and the
storages that it creates, with their lifetimes.

With torch's `FakeTensorMode`, the outputs of operators have shapes but no memory. `Tracer`, a
dispatch mode on top of it, records when each storage is created and freed, on a clock that ticks
once per operator. Tracing only takes a dictionary look-up per tensor, because the memory in use at
each tick is computed afterwards in `prediction.py`.

A storage that operator k creates and that is freed before operator k + 1 begins is alive only at
tick k. The trace does not contain the memory that kernels allocate internally; see `kernels.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from firstlight.planner.memory.kernels import Layout, Operator, bytes_of, flops_of

_aten: Any = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

#: Value of `death` for a storage that is alive at the end of the trace.
ALIVE = 2**62

#: Placeholder values returned when code reads a scalar from a fake tensor, which has no data. The
#: key is True for floating-point dtypes and False for all other dtypes. The values are small and
#: finite.
_READ_VALUES = {True: 0.5, False: 1}


@dataclass
class Storage:
    """The memory of a tensor and its views.

    Attributes:
        size: size in bytes.
        birth, death: first and last tick at which the storage is alive.
        phase: phase in which it was created; "" before the first phase.
        part: kind of the storage's content, one of `prediction.PARTS`; "" until it is known.
        recomputed: True if the storage was created when the backward pass recomputed a part of the
            forward pass.
    """

    size: int
    birth: int
    phase: str
    part: str = ""
    recomputed: bool = False
    death: int = ALIVE


@dataclass
class Trace:
    """The trace of a run.

    Attributes:
        storages: storages in the order of their creation.
        operators: distinct operators in the order of their first call.
        calls: index of the called operator in `operators`, one per tick.
        phases: index of the current phase in `phase_names`, one per tick.
        segments: (first tick, last tick) of each forward pass that autograd records.
        recomputations: (first tick, last tick) of each recomputed forward pass within a backward
            pass.
        host_bytes: peak size in bytes of the tensors that were moved from the device to host
            memory.
        notes: assumptions of the prediction, as shown to the user.
    """

    storages: list[Storage] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    calls: array[int] = field(default_factory=lambda: array("l"))
    phases: array[int] = field(default_factory=lambda: array("h"))
    phase_names: list[str] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    recomputations: list[tuple[int, int]] = field(default_factory=list)
    host_bytes: int = 0
    notes: list[str] = field(default_factory=list)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the operators called in its context. The operators must run on
    fake tensors.

    Use `phase` to label each phase of a step, and `mark` to label storages whose kind of content is
    known, such as weights.

    Attributes:
        trace: the trace so far.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch's compiler ignores this mode and runs code that has already
        been compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._known: dict[int, Storage] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._keys: dict[Any, int] = {}
        self._phase, self._phase_index = "", -1
        self._recomputed_since = -1
        self._host = 0
        self._is_paused, self._is_inside = False, False
        self._part = ""
        # Activation checkpointing in compiled code uses higher-order operators, which torch rejects
        # in modes without this attribute.
        self.supports_higher_order_operators = True
        self.enter_phase("setup")

    # Phases and parts

    def enter_phase(self, name: str) -> None:
        """Start a phase, to which all subsequent operators belong."""
        if name == self._phase:
            return
        names = self.trace.phase_names
        if name not in names:
            names.append(name)
        self._phase, self._phase_index = name, names.index(name)

    @property
    def phase_name(self) -> str:
        """The current phase."""
        return self._phase

    @property
    def tick(self) -> int:
        """The tick of the last operator, or -1 before the first operator."""
        return len(self.trace.calls) - 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign the operators called in the context to this phase, and resume the previous phase
        on exit."""
        before = self._phase
        self.enter_phase(name)
        try:
            yield
        finally:
            self.enter_phase(before)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Trace a forward pass in the context. Storages that are alive on exit are saved for the
        backward pass."""
        first = self.tick + 1
        with self.phase("forward"):
            yield
        self.trace.segments.append((first, self.tick))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause tracing in the context. Tensors created in the context must be freed before it
        ends."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Assign this part to the storages created in the context."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def mark(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Assign a part to the storages of the tensors. Storages that were not recorded yet are
        recorded as if they were created now."""
        for tensor in tensors:
            for plain in _plain_tensors(tensor):
                self._storage_for(plain).part = part

    def start_again(self) -> None:
        """Discard the trace so far. A storage that is still alive is recorded again when it is
        marked or returned by an operator."""
        self.trace = Trace(phase_names=self.trace.phase_names)
        for storages in (self._known, self._watched, self._keys):
            storages.clear()

    def move_to_host(self, size: int) -> None:
        """Add `size` bytes to the host memory in use. A negative size is subtracted."""
        self._host += size
        self.trace.host_bytes = max(self.trace.host_bytes, self._host)

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and record it."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        # Reading `tensor.device` is also dispatched to this mode, but it does not launch a kernel.
        if func is _PRIM_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is _aten._local_scalar_dense.default:
            return _READ_VALUES[args[0].is_floating_point()]
        if any(is_traceable_wrapper_subclass(kind) for kind in types if kind is not FakeTensor):
            # The code of the tensor subclass runs first. It calls operators on the inner tensors.
            return NotImplemented
        # Composite operators are decomposed by autograd. If autograd is not active, they reach this
        # mode undecomposed.
        if (torch.is_inference_mode_enabled() or self._is_inside) and _is_composite(func):
            # `func.decompose` is not used. For some operators, its Python code makes copies that
            # the real kernel does not make.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        inner = _implementation(func) if isinstance(func, OpOverload) else None
        if inner is not None:
            return self._trace_inside(inner, args, kwargs)
        if func is _aten.add.Tensor and self._is_sum_of_gradients(args):
            result = args[0].add_(args[1])
        else:
            result = func(*args, **kwargs)
        self._follow_recomputation()
        self._count(func, args, kwargs, result)
        for tensor in _tensors_in(result):
            self._storage_for(tensor)
        return result

    def _is_sum_of_gradients(self, args: tuple[Any, ...]) -> bool:
        """Return True if this call adds the gradients of a weight that is used twice, such as an
        embedding that is tied to the head. Autograd adds real gradients in place, but it allocates
        a new tensor for the sum of fake gradients."""
        if not self._phase.startswith("backward") or torch.is_grad_enabled():
            return False
        node = torch._C._current_autograd_node()
        edges = () if node is None else node.next_functions
        weights = (getattr(edge, "variable", None) for edge, _ in edges)
        shapes = {one.shape for one in weights if one is not None}
        return all(isinstance(one, Tensor) and one.shape in shapes for one in args)

    def _trace_inside(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the Python code of an operator without autograd, and trace the operators that the
        code calls."""
        before, self._is_inside = self._is_inside, True
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._is_inside = before

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        inputs = tuple((t.shape, t.dtype) for t in _tensors_in((args, kwargs)))
        outputs = tuple((t.shape, t.dtype) for t in _tensors_in(result))
        options = _options(func, args)
        # Identical calls share one entry. Even a step with hundreds of layers has few distinct
        # calls.
        key = (func, self._phase_index, inputs, outputs, options)
        index = self._keys.get(key)
        if index is None:
            index = self._keys[key] = len(self.trace.operators)
            self.trace.operators.append(
                _operator(
                    func,
                    self._phase,
                    (inputs, outputs),
                    options,
                    args=args,
                    kwargs=kwargs,
                    result=result,
                )
            )
        self.trace.calls.append(index)
        self.trace.phases.append(self._phase_index)

    def _follow_recomputation(self) -> None:
        """Record the ticks of recomputed forward passes. They are detected by the grad mode, which
        a backward pass enables only while it recomputes a forward pass."""
        tick = len(self.trace.calls)
        if self._phase.startswith("backward") and torch.is_grad_enabled():
            if self._recomputed_since < 0:
                self._recomputed_since = tick
        elif self._recomputed_since >= 0:
            self.trace.recomputations.append((self._recomputed_since, tick - 1))
            self._recomputed_since = -1

    # Storages

    def _storage_for(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        # A tensor and its views have the same C++ storage, but different Python objects for this
        # storage.
        identity = storage._cdata
        known = self._known.get(identity)
        if known is None:
            known = Storage(storage.nbytes(), max(self.tick, 0), self._phase, self._part)
            # A recomputed tensor is freed during the backward pass of its layer.
            known.recomputed = self._recomputed_since >= 0
            self._known[identity] = known
            # The callback runs when the last tensor that uses the storage is deleted.
            self._watched[identity] = weakref.ref(storage, partial(self._forget, identity))
            self.trace.storages.append(known)
        return known

    def _forget(self, identity: int, _: object) -> None:
        # From now on, the address can be reused, so a different storage may get the same identity.
        self._known.pop(identity).death = self.tick
        del self._watched[identity]

    def finish(self) -> Trace:
        """End the trace and return it. The `death` of storages that are still alive is `ALIVE`."""
        if self._recomputed_since >= 0:
            self.trace.recomputations.append((self._recomputed_since, self.tick))
            self._recomputed_since = -1
        self._known.clear()
        self._watched.clear()
        return self.trace


#: Custom operators of this package whose Python code is traced, because it creates large temporary
#: tensors. For all other custom operators, a trace contains only the outputs.
_TRACED_INSIDE = (
    "firstlight::linear_cross_entropy",
    "firstlight::nf4_linear",
    "firstlight::nf4_linear_backward",
)


def _implementation(func: Any) -> Callable[..., Any] | None:
    name = func.name() if func.namespace == "firstlight" else ""
    return OPDEFS[name]._init_fn if name in _TRACED_INSIDE else None


def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return isinstance(func, OpOverload) and has_kernel(str(func._name), _COMPOSITE)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the inner tensors of a tensor that is a wrapper subclass. Yield the tensor itself if it
    is a plain tensor."""
    if tensor is None:
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def _options(func: Any, args: tuple[Any, ...]) -> str:
    """Return the properties of a call, other than shapes and dtypes, that affect the memory
    allocated by the kernel."""
    if func is _ATTENTION_BACKWARD and not args[0].transpose(1, 2).is_contiguous():
        return "copies the gradient"
    if func in _PRODUCTS and args[_PRODUCTS[func]].stride(-1) != 1:
        return "transposed"
    return ""


_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: For each matrix product operator, the index of the first factor among its arguments.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.bmm.default: 0,
    _aten.bmm.out: 0,
    _aten.addmm.default: 1,
    _aten.addmm.out: 1,
}


def _operator(
    func: Any,
    phase: str,
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]],
    options: str,
    *,
    args: tuple[Any, ...],
    kwargs: Any,
    result: Any,
) -> Operator:
    inputs, outputs = (tuple((tuple(shape), dtype) for shape, dtype in group) for group in layouts)
    is_view = getattr(func, "is_view", False) or str(func) == "aten.detach.default"
    moved = 0 if is_view else sum(map(bytes_of, (*inputs, *outputs)))
    flops = flops_of(func, args, kwargs, result)
    return Operator(
        str(func), phase, inputs, outputs, flops=flops, moved_bytes=moved, options=options
    )
