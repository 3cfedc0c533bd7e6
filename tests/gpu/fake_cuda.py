"""A simulated CUDA GPU: tensors without memory on a device `cuda`, in a torch without CUDA.

torch's FakeTensorMode gives each operator's result its shape, dtype and device, and no memory.
`FakeCuda` is on top of it and rejects what CUDA kernels do not support: operands on two devices,
and attention kernels that do not support a mask, a dtype or a head dimension. It records the
operators that run, and `fake_cuda` records the calls of `torch.cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from firstlight.planner.memory.program import tables_put_back

from .no_gpu import LIBRARY, Asked, torch_cuda

_aten: Any = torch.ops.aten


@dataclass
class Call:
    """An operator that ran.

    Attributes:
        name: torch's name, such as "aten.mm.default".
        inputs, outputs: (device type, dtype, shape) of each tensor.
    """

    name: str
    inputs: list[tuple[str, torch.dtype, tuple[int, ...]]]
    outputs: list[tuple[str, torch.dtype, tuple[int, ...]]]


#: Operators that accept tensors of two devices.
_MAY_MIX = (
    "copy_",
    "_to_copy",
    "index",
    "index_put_",
    "lift_fresh",
    "_has_compatible_shallow_copy_type",
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

#: Custom operators whose code runs on fake tensors.
_OWN = (
    "firstlight::blockwise_attention",
    "firstlight::blockwise_attention_backward",
    "firstlight::linear_cross_entropy",
    "firstlight::nf4_linear",
    "firstlight::nf4_linear_backward",
)

#: Values returned when code reads from tensors without memory: small and finite.
_READ_VALUES = {True: 0.5, False: 1}


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on fake tensors as CUDA would, and records them.

    Attributes:
        calls: operators that ran.
        reads: how many times code waited for a value of the GPU.
        last_read: number of calls before the last of these reads.
        uploads: number of copies to the GPU.
        waits: number of copies for which the host waited, because they were not from page-locked
            memory.
        truth: value returned when code reads a truth value.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.reads = self.last_read = 0
        self.uploads = self.waits = 0
        self.truth = True
        self._is_inside = False
        self.supports_higher_order_operators = True

    @contextlib.contextmanager
    def recording(self, *_: object, **__: object) -> Iterator[None]:
        """Simulate `torch.cuda.graph`, during which nothing may be read or waited for."""
        before = self.reads, self.waits
        yield
        assert (self.reads, self.waits) == before, "the host waited while a graph was recorded"

    def listed(self, tensor: Tensor) -> Any:
        """Simulate `Tensor.tolist`, which returns the values after a single wait."""
        self._note_read(tensor)
        value = _READ_VALUES[tensor.is_floating_point()]
        return np.full(tensor.shape, value).tolist()

    def _note_read(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self.reads, self.last_read = self.reads + 1, len(self.calls)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True if torch's compiler may ignore this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator.

        Raises:
            RuntimeError: CUDA does not support the operator.
        """
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func in (_aten._local_scalar_dense.default, _aten.item.default):
            self._note_read(args[0])
            if args[0].dtype == torch.bool:
                return self.truth
            return _READ_VALUES[args[0].is_floating_point()]
        if func is _aten.equal.default:
            self._note_read(args[0])
            return True
        if (torch.is_inference_mode_enabled() or self._is_inside) and _is_composite(func):
            # Operators that autograd decomposes elsewhere, before they come here.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        tensors = list(_tensors_in((args, kwargs)))
        _require_one_device(func, tensors)
        self._note_upload(func, args, kwargs)
        if (own := _own_code(func)) is not None:
            self._run_inside(own, args, kwargs)
        # torch's fake tensors do not support this operator, which returns nothing.
        result = None if func is _aten._fused_sgd_.default else func(*args, **kwargs)
        outputs = list(_tensors_in(result))
        self.calls.append(Call(str(func), _layouts(tensors), _layouts(outputs)))
        return result

    def _note_upload(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is _aten._to_copy.default:
            source, target, is_async = args[0], kwargs.get("device"), kwargs.get("non_blocking")
        elif func is _aten.copy_.default:
            target, source, *flags = args
            target, is_async = target.device, any(flags) or kwargs.get("non_blocking")
        else:
            return
        if source.device.type == "cpu" and target is not None and target.type == "cuda":
            self.uploads += 1
            self.waits += not (is_async and getattr(source, "is_page_locked", False))

    def _run_inside(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the code of a custom operator, of which fake tensors only know the result."""
        before, self._is_inside = self._is_inside, True
        try:
            with self:
                inner(*args, **kwargs)
        finally:
            self._is_inside = before

    def named(self, *parts: str) -> list[Call]:
        """Return the calls whose operator has one of these names (the part after the namespace)."""
        return [call for call in self.calls if call.name.split(".")[1] in parts]

    def on_host(self) -> list[Call]:
        """Return the calls that computed on tensors in host memory, except copies to the GPU, and
        views.
        """
        return [
            call
            for call in self.calls
            if call.name.split(".")[1] not in (*_MAY_MIX, "unsqueeze", "slice", "detach")
            and any(kind == "cpu" and shape for kind, _, shape in (*call.inputs, *call.outputs))
        ]


def _pinned(tensor: Tensor) -> Tensor:
    tensor.is_page_locked = True  # type: ignore[attr-defined]
    return tensor


def _own_code(func: Any) -> Any:
    name = str(func._schema.name) if isinstance(func, OpOverload) else ""
    return OPDEFS[name]._init_fn if name in _OWN else None


def _is_composite(func: Any) -> bool:
    name = func._schema.overload_name if isinstance(func, OpOverload) else ""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return isinstance(func, OpOverload) and has_kernel(
        str(func._schema.name) + (f".{name}" if name else ""), _COMPOSITE
    )


_PLAIN_ATTENTION = F.scaled_dot_product_attention
#: Since this version, the memory-efficient kernel supports grouped queries.
TORCH_TAKES_GROUPS = torch.__version__ >= "2.14"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` with the kernel that CUDA selects (torch's
    sdp_utils.cpp).

    A torch without CUDA takes that of no kernel.

    Raises:
        RuntimeError: torch would refuse it, or no kernel that is switched on takes it.
    """
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(half) for x in (query, key, value))
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise RuntimeError("Expected query, key, and value to have the same dtype")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("The number of heads must match")
    learns = torch.is_grad_enabled() and query.requires_grad
    kernel = _kernel(query, key, attn_mask, dropout_p, is_causal=is_causal, learns=learns)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = query.new_zeros(bias.shape).masked_fill_(bias, 0)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    found: tuple[Tensor, ...]
    if kernel == "flash":
        flash = _aten._scaled_dot_product_flash_attention
        found = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif kernel == "efficient":
        efficient = _aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)
    elif kernel == "cudnn":
        cudnn = _aten._scaled_dot_product_cudnn_attention
        found = cudnn(query, key, value, bias, learns, dropout_p, is_causal, False, scale=scale)
    else:
        return _PLAIN_ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return found[0]


def _kernel(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    learns: bool,
) -> str:
    """Return the first kernel in torch's order that supports these tensors
    (`select_sdp_backend`).
    """
    enabled = _enabled_kernels()
    capability = torch.cuda.get_device_capability()
    is_ampere, size = capability >= (8, 0), query.shape[-1]
    half = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and is_ampere)
    grouped, square = query.shape[1] != key.shape[1], query.shape[2] == key.shape[2]
    usable = {
        "cudnn": enabled["cudnn"]
        and (half and is_ampere and size <= 128 and size % 8 == 0 and key.shape[2] > 1)
        and (16 * dropout).is_integer()
        and not (dropout and query.shape[2] == 1)
        and not torch.are_deterministic_algorithms_enabled(),
        "flash": enabled["flash"]
        and (half and is_ampere and size <= 256 and mask is None and (square or not is_causal))
        and not (
            learns
            and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)
            and (192 < size <= 224 or (size > 224 and dropout > 0))
        ),
        "efficient": enabled["efficient"]
        and (half or query.dtype == torch.float32)
        and size % (8 if half else 4 if is_ampere else 1) == 0
        and (not grouped or TORCH_TAKES_GROUPS),
        "math": enabled["math"],
    }
    order = ["flash", "efficient", "math", "cudnn"]
    # `check_prefer_cudnn_attention`, with cuDNN 9.15.1 or later.
    if capability[0] in (9, 10):
        order = ["cudnn", "flash", "efficient", "math"]
    for name in order:
        if usable[name]:
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


# torch.compile can't trace these calls, which torch's own selection does not contain.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _enabled_kernels() -> dict[str, bool]:
    """Return for each kernel whether torch may select it."""
    cuda: Any = torch.backends.cuda
    return {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def _require_one_device(func: Any, tensors: list[Tensor]) -> None:
    name = str(func).split(".")[1] if "." in str(func) else str(func)
    # Scalars of the host are passed to kernels as arguments.
    devices = {t.device for t in tensors if t.dim() or t.device.type == "cuda"}
    if name not in _MAY_MIX and len(devices) > 1:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found "
            f"{', '.join(sorted(map(str, devices)))}"
        )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _layouts(tensors: list[Tensor]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(t.device.type, t.dtype, tuple(t.shape)) for t in tensors]


@contextlib.contextmanager
def fake_cuda(
    devices: int = 1, capability: tuple[int, int] = (9, 0)
) -> Iterator[tuple[FakeCuda, Asked]]:
    """Context manager in which tensors are fake and a fake GPU of a compute capability exists."""
    with (
        pytest.MonkeyPatch.context() as patch,
        torch_cuda(devices, capability) as asked,
        tables_put_back(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeCuda() as cuda,
    ):
        patch.setattr(torch.utils, "swap_tensors", _swapped)
        patch.setattr(Tensor, "pin_memory", _pinned)
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        patch.setattr(torch.cuda, "CUDAGraph", _Graph)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        patch.setattr(torch.cuda, "graph", cuda.recording)
        patch.setattr(FakeTensor, "tolist", lambda tensor: cuda.listed(tensor))
        assert LIBRARY is not None
        LIBRARY.pretend_gpu(1)
        try:
            yield cuda, asked
        finally:
            LIBRARY.pretend_gpu(0)


class _Graph:
    """A CUDA graph whose tensors have no values."""

    def replay(self) -> None:
        """Do nothing."""


def _swapped(one: Any, other: Any) -> None:
    """Simulate `torch.utils.swap_tensors`, with which `model.to` moves a fake parameter, but
    without rejecting tensors that have weak references: fake ones always have some.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
