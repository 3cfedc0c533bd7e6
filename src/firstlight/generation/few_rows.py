"""Linear layers that are optimised for inputs with few rows on a CPU. Such inputs occur in
decoding, where each sequence has only one new token.

With few rows, the speed of a linear layer is limited by memory bandwidth: its run time is the time
needed to read its weights. In measurements, torch's kernels for inputs with one row reached only a
third of the memory bandwidth, because they read several rows of the weight matrix at once and do
not prefetch across pages. The kernels in `few_rows.cpp` read the rows in order and prefetch further
ahead. They are compiled on first use, which takes one or two seconds, and stored in the user's
cache folder. Weights can be rounded to 8 bits (`Int8Linear`), which halves the number of bytes to
read.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.errors import StorageError
from firstlight.files.atomic import write_file
from firstlight.files.cache import cache_folder
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D
from firstlight.models.moe import Router

#: Maximum number of input rows for the kernels. With more rows, arithmetic takes longer than
#: reading the weights, and torch's kernels are faster.
MOST_ROWS = 8

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_SOURCE = Path(__file__).with_suffix(".cpp")
#: Time limit for compilation, in seconds. Compilation takes a few seconds on an idle machine.
_COMPILER_SECONDS = 120.0

#: File with Linux's setting for 2 MiB pages. The active value is in brackets, as in "always
#: [madvise] never".
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_Kernel = Callable[..., None]


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that uses the few-rows kernel if `takes_few_rows` returns True. Inputs have shape
    [..., in], and outputs have shape [..., out].
    """

    def forward(self, x: Tensor) -> Tensor:
        if takes_few_rows(x, self.weight):
            return few_rows_linear(x, self.weight, None, self.bias)
        return super().forward(x)


class FewRowsConv1D(Conv1D):
    """GPT-2's `Conv1D` that uses the few-rows kernel if `takes_few_rows` returns True and `lay_out`
    has stored the weight, of shape [in, out], in memory as [out, in]. Inputs have shape [..., in],
    and outputs have shape [..., out].
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t()
        if weight.is_contiguous() and takes_few_rows(x, weight):
            return few_rows_linear(x, weight, None, self.bias)
        return super().forward(x)


def use_few_rows(model: Model) -> None:
    """Change the classes of a model's linear layers to `FewRowsLinear` and `FewRowsConv1D`, in
    place. Names, values and gradients of parameters stay the same. `FewRowsConv1D` uses the kernel
    only after `lay_out`.

    Args:
        model: a model that is only used for generation.
    """
    for module in model.modules():
        # Only these exact classes are changed, because a subclass can have a different forward
        # pass.
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
        elif type(module) is Conv1D:
            module.__class__ = FewRowsConv1D


def lay_out(model: Model) -> None:
    """Copy the weights of `FewRowsConv1D` layers on the CPU into the memory layout [out, in] if a
    kernel exists for their dtype. Names, shapes and values stay the same, but sums over weights can
    be rounded differently.

    Args:
        model: a model changed by `use_few_rows`. Other models do not have `FewRowsConv1D` layers.
    """
    for module in model.modules():
        if isinstance(module, FewRowsConv1D):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in _products():
                weight.data = weight.data.t().contiguous().t()


@torch.no_grad()
def use_large_pages(model: Model, *, is_mapped: bool) -> None:
    """Move the weights of linear layers to memory with 2 MiB pages, in place, if Linux supports
    such pages. With 4 KiB pages, address translation takes a sixth of the time of a decoding step.
    Values and weight tying stay the same.

    Args:
        model: a model changed by `use_few_rows` that has not been passed to a decoder yet. Conv1D
            layers are handled by `lay_out`.
        is_mapped: True if the parameters are memory-mapped files. In this case, only the weights of
            `Int8Linear` layers are moved.
    """
    weights = [
        layer.weight_int8 if isinstance(layer, Int8Linear) else layer.weight
        for layer in model.modules()
        if isinstance(layer, Int8Linear) or (isinstance(layer, FewRowsLinear) and not is_mapped)
    ]
    ends = list(itertools.accumulate(-(-weight.nbytes // 64) * 64 for weight in weights))
    if not weights or any(weight.device.type != "cpu" for weight in weights):
        return
    try:
        if "[never]" in _LARGE_PAGES.read_text(encoding="utf-8"):
            return
        memory = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # The operating system is not Linux, or there is not enough memory.
        return
    for weight, start in zip(weights, [0, *ends], strict=False):
        place = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=start)
        weight.data = place.view(weight.shape).copy_(weight)


def takes_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return True if `few_rows_linear` can be used. For this, `x` must be on the CPU and have at
    most `MOST_ROWS` rows, a kernel must exist for the dtypes, and gradients and autocast must be
    disabled.

    Args:
        x: [..., in].
        weight: [out, in].
    """
    return (
        x.device.type == "cpu"
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and x.dtype in (torch.float32, torch.bfloat16)
        and weight.dtype in (x.dtype, torch.int8)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and has_kernels()
    )


def few_rows_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T * scale + bias`, accumulated in fp32 and rounded once. The result of a
    row does not depend on the other rows. Even its rounding is the same for any number of rows.

    Args:
        x: [..., in], float32 or bfloat16, with at most `MOST_ROWS` rows.
        weight: [out, in], contiguous, in the dtype of `x`. If `x` is bfloat16, the weight can also
            be int8.
        scale, bias: [out], in the dtype of `x`; None means a scale of 1 or a bias of 0.

    Returns:
        [..., out], in the dtype of `x`.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.firstlight.few_rows_linear(x, weight, scale, bias)
        return result
    return _few_rows_linear(x, weight, scale, bias)


def _few_rows_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    o_size, k_size = weight.shape
    rows = x.float().contiguous()
    out = torch.empty(*x.shape[:-1], o_size, dtype=x.dtype, device="cpu")
    _products()[weight.dtype](
        weight.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        rows.data_ptr(),
        out.data_ptr(),
        rows.numel() // k_size,
        k_size,
        o_size,
        torch.get_num_threads(),
    )
    return out


# `torch.library.custom_op` is not used because its overhead per call exceeds the time of a small
# product.
_operators = torch.library.Library("firstlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "few_rows_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_operators.impl("few_rows_linear", _few_rows_linear, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("firstlight::few_rows_linear", lib=_operators)  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# The kernels

#: Kernel name for each weight dtype.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}


def has_kernels() -> bool:
    """Return True if this machine can compile and load the kernels for inputs with few rows."""
    return bool(_products())


def ready_to_compile() -> None:
    """Make torch.compile treat the result of `has_kernels` as a constant.

    A decorator is not used, because it would import torch's compiler. The import takes a second,
    and most programs that generate text do not use the compiler.
    """
    torch.compiler.assume_constant_result(has_kernels)  # type: ignore[no-untyped-call]


@functools.cache
def _products() -> dict[torch.dtype, _Kernel]:
    """Return the matrix-product kernel for each weight dtype, or an empty dict if the kernels can't
    be compiled or loaded.
    """
    return _kernels("product", [ctypes.c_void_p] * 5 + [ctypes.c_long] * 3 + [ctypes.c_int])


@functools.cache
def steps() -> dict[torch.dtype, _Kernel]:
    """Return the decoding-step kernel for each weight dtype (see `llama_step.LlamaStep`), or an
    empty dict if the kernels can't be compiled or loaded.
    """
    pointer = ctypes.c_void_p
    return _kernels("step", [pointer] * 5 + [ctypes.c_long, pointer, ctypes.c_int])


def _kernels(kind: str, types: list[Any]) -> dict[torch.dtype, _Kernel]:
    """Return a dict with the kernel for each weight dtype.

    Args:
        kind: "product" or "step".
        types: ctypes types of the kernel's arguments.
    """
    library = _library()
    if library is None:
        return {}
    found = {}
    for dtype, name in _NAMES.items():
        kernel = getattr(library, f"{kind}_{name}")
        kernel.restype, kernel.argtypes = None, types
        found[dtype] = kernel
    return found


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, StorageError, subprocess.SubprocessError):
        return None


def _compiled() -> Path:
    """Return the path of the kernels' shared library, compiling the library first if it does not
    exist.

    Raises:
        OSError, StorageError, SubprocessError: the library can't be compiled.
    """
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    # The name includes the processor, because machines with different instruction sets can share a
    # home folder.
    parts = (_SOURCE.read_text(encoding="utf-8"), compiler, *_FLAGS, _processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = _cache_folder()
    library = folder / f"few_rows-{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / library.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_SECONDS)
            # `write_file` syncs the file before renaming it, so a power failure can't leave a
            # truncated library.
            write_file(library, built.read_bytes())
    return library


def _cache_folder() -> Path:
    """Return the user's cache folder for libraries. Other users must not have write access to it,
    because the libraries in it are executed.

    Raises:
        OSError: the folder can't be created, or other users can write to it.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} is writable by other users")
    return folder


def _processor() -> str:
    """Return a string that identifies this machine's processor and its vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


# 8-bit weights

#: Maximum number of input rows for torch's int8 kernel on a CPU. With more rows, it is faster to
#: convert the weights to bf16 first.
_INT8_ROWS = 16
#: Rows are zero-padded to a multiple of this length, because torch's kernel reads past the end of
#: rows of any other length.
ROW_MULTIPLE = 32


class Int8Linear(nn.Module):
    """Linear layer with int8 weights from -127 to 127 and one scale per output. It needs half the
    memory of a bf16 layer. Inputs have shape [..., in], outputs have shape [..., out], and both
    are bf16.

    Source: pytorch-labs/gpt-fast `quantize.py` (weight-only int8). Weights are rounded to the
    nearest integer after scaling. The scale of each output is chosen so that the weight with the
    largest absolute value becomes 127 or -127.

    Args:
        weight: weights to quantise, [out, in].
        bias: [out], or None.

    Attributes:
        weight_int8: [out, in], with `in` zero-padded to a multiple of 32.
        scale: factor by which the integer weights of each output are multiplied, bf16 [out].
    """

    weight_int8: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight_int8, scale = rounded(weight)
        self._filling = -weight.shape[1] % ROW_MULTIPLE
        self.register_buffer("weight_int8", F.pad(weight_int8, (0, self._filling)))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.reshape(-1, x.shape[-1]), (0, self._filling))
        if takes_few_rows(rows, self.weight_int8):
            y = few_rows_linear(rows, self.weight_int8, self.scale, self.bias)
            return y.view(*x.shape[:-1], -1)
        if x.device.type == "cpu" and rows.shape[0] <= _INT8_ROWS:
            y = torch._weight_int8pack_mm(rows, self.weight_int8, self.scale)
        else:
            y = F.linear(rows, self.weight_int8.to(x.dtype)) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights of shape [out, in]. Return int8 weights of the same shape and their bf16
    scales, of shape [out].
    """
    scale = weight.float().abs().amax(1).div(127).clamp(min=torch.finfo(torch.bfloat16).tiny)
    scale = scale.to(torch.bfloat16)
    integers = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8).contiguous(), scale


@torch.no_grad()
def quantize_int8(model: Model) -> None:
    """Replace a model's linear layers, including its head, with `Int8Linear`, in place.

    Embeddings, norms, routers and stacked experts are not changed. Afterwards, the model can't be
    trained or saved.

    Args:
        model: a model with bf16 weights.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            weight = module.weight.t()
        elif isinstance(module, nn.Linear) and not isinstance(module, Router):
            weight = module.weight
        else:
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Int8Linear(weight, module.bias))
