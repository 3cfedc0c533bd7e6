"""Stand-ins for kernels in a trace on CPU tensors: a CUDA GPU's, so that autograd keeps the same
tensors for the backward pass as on the GPU, and empty ones for torch.compile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from firstlight.optim.eight_bit import quiet_import
from firstlight.planner.memory.kernels import Target

_aten: Any = torch.ops.aten

#: Functions whose inputs CUDA's autocast casts to fp32, unlike a CPU's (ATen's autocast_mode.h,
#: AT_FORALL_FP32); only those that models and losses use.
_IN_FP32 = {
    F.layer_norm,
    torch.layer_norm,
    F.group_norm,
    F.cross_entropy,
    F.nll_loss,
    F.kl_div,
    F.l1_loss,
    F.smooth_l1_loss,
    F.mse_loss,
    F.binary_cross_entropy_with_logits,
    F.cosine_similarity,
    F.softplus,
    torch.exp,
    Tensor.exp,
    torch.log,
    Tensor.log,
    torch.pow,
    Tensor.pow,
    Tensor.__pow__,
    torch.rsqrt,
    Tensor.rsqrt,
    torch.reciprocal,
    Tensor.reciprocal,
    torch.logsumexp,
    Tensor.logsumexp,
    torch.norm,
    Tensor.norm,
}

#: Functions that CUDA's autocast calls with `dtype=torch.float32` (AT_FORALL_FP32_SET_OPT_DTYPE).
_WITH_FP32_RESULT = {
    F.softmax,
    torch.softmax,
    Tensor.softmax,
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    torch.sum,
    Tensor.sum,
    torch.prod,
    Tensor.prod,
    torch.cumsum,
    Tensor.cumsum,
}


_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


class _SoftmaxKeepingInput(torch.autograd.Function):
    """Softmax before torch 1.11, which kept its whole input for the backward pass, only to know the
    input's dtype (pytorch issue 64000)."""

    @staticmethod
    def forward(ctx: Any, function: Any, scores: Tensor, args: Any, kwargs: Any) -> Any:
        result = function(scores, *args, **kwargs)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scores, result = ctx.saved_tensors
        grad = _aten._softmax_backward_data(grads[0], result, -1, result.dtype)
        return None, grad.to(scores.dtype), None, None


class CudaKernels(TorchFunctionMode):
    """Function mode in which functions on CPU tensors run as on a CUDA GPU.

    - `scaled_dot_product_attention` is flash attention, which keeps queries, keys, values, output
      and the log-sum-exp of each query. If that can't be used, it is the memory-efficient kernel,
      which keeps the same; if neither can, two products and a softmax, which keep all scores.
    - `dropout` keeps a mask of one byte an element, not a factor of the element's dtype.
    - autocast computes norms, softmax and losses in fp32.

    Args:
        target: a CUDA device.
        kernel: attention kernel: "flash", "efficient", "cudnn" or "math"; None chooses as torch.
    """

    def __init__(self, target: Target, kernel: str | None = None) -> None:
        super().__init__()
        self._target, self._kernel = target, kernel
        # Read here, because in code that torch.compile traces this would break the graph.
        cuda: Any = torch.backends.cuda
        self._has_flash = cuda.flash_sdp_enabled() and target.capability >= (8, 0)
        self._has_efficient = cuda.mem_efficient_sdp_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function as a GPU would."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        # A CPU keeps a factor of the input's dtype; CUDA's fused kernel one byte an element.
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is Tensor.backward:
            # Operations that a backward pass recomputes run as on a GPU, too.
            with self:
                return _backward(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            if func in _IN_FP32:
                args = tuple(_widened(value, half) for value in args)
                kwargs = {name: _widened(value, half) for name, value in kwargs.items()}
            elif func in _WITH_FP32_RESULT and _is_half(args[0]) and not kwargs.get("dtype"):
                kwargs = {**kwargs, "dtype": torch.float32}
        if func in _SOFTMAX and self._target.torch_version < (1, 11):
            softmax: Any = _SoftmaxKeepingInput.apply
            return softmax(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(half) for x in (query, key, value))
        kernel = self._kernel or self._chosen(query, attn_mask, enable_gqa)
        grouped = query.shape[1] != key.shape[1]
        if kernel == "math":
            groups = query.shape[1] // key.shape[1]
            if grouped:
                key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            return _math_attention(
                query, key, value, attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale
            )
        # cuDNN's kernel keeps what flash attention keeps.
        if kernel in ("flash", "cudnn"):
            flash = _aten._scaled_dot_product_flash_attention
            found: tuple[Tensor, ...] = flash(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
            return found[0]
        if grouped:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        # The kernel keeps the logarithms of its sums only where a backward pass will ask for them.
        learns = torch.is_grad_enabled() and query.requires_grad
        bias = _bias(attn_mask, query, key)
        efficient = _aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)
        return found[0]

    def _chosen(self, query: Tensor, mask: Tensor | None, grouped: bool) -> str:
        """torch's choice (sdp_utils.cpp). Flash attention needs half precision, no mask, heads of
        at most 256, and compute capability 8.0. The memory-efficient kernel does not take
        `enable_gqa`, and needs capability 8.0 for bf16."""
        half = query.dtype in (torch.float16, torch.bfloat16)
        if self._has_flash and half and mask is None and query.shape[-1] <= 256:
            return "flash"
        bf16_missing = query.dtype == torch.bfloat16 and self._target.capability < (8, 0)
        if self._has_efficient and not grouped and not bf16_missing:
            return "efficient"
        return "math"


def kernels_of(
    target: Target, kernel: str | None = None
) -> contextlib.AbstractContextManager[object]:
    """`CudaKernels` for a CUDA device; no change for a CPU."""
    return CudaKernels(target, kernel) if target.kind == "cuda" else contextlib.nullcontext()


def _backward(tensor: Tensor, gradient: Tensor | None = None, **_: Any) -> None:
    # `Tensor.backward` and `torch.autograd.backward` call this function, which no mode intercepts.
    start = torch.ones_like(tensor) if gradient is None else gradient
    _engine_run_backward(
        (tensor,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    size = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    # As torch's math kernel: both factors are scaled before the product, so that it does not
    # overflow in half precision.
    scores = (query * size**0.5) @ (key * size**0.5).transpose(-2, -1)
    if mask is not None:
        bias = _bias(mask, query, key)
        assert bias is not None
        scores = scores + bias
    weights = scores.softmax(-1)
    return _dropout(weights, dropout, True) @ value if dropout else weights @ value


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as numbers that are added to the scores, [..., T, S]."""
    if mask is None:
        return None
    # Its values do not matter, its memory does: the kernel takes a bias of the queries' dtype.
    bias = query.new_zeros(mask.shape).masked_fill_(mask, 0) if mask.dtype == torch.bool else mask
    return bias.expand(*query.shape[:-1], key.shape[-2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    # native_dropout keeps a mask of one byte a number, as CUDA's fused kernel does.
    dropped: Callable[..., tuple[Tensor, Tensor]] = torch.native_dropout
    return dropped(input, p, True)[0]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _widened(value: Any, half: torch.dtype) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == half else value


@contextlib.contextmanager
def stubbed_compiler() -> Iterator[None]:
    """Context in which torch.compile makes code for a CPU whose kernels do nothing, and which
    allocates through torch's operators. Compiled functions are dropped at its start and its end."""
    with quiet_import():
        import torch._functorch.config as functorch_config
        import torch._inductor.async_compile as async_compile
        import torch._inductor.compile_fx
        import torch._inductor.cpu_vec_isa as vector_units
        from torch._inductor import config
        from torch._inductor.codecache import PyCodeCache

    guards = torch._C._dynamo.guards
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    options = {"size_asserts": False, "fx_graph_cache": False, "compile_threads": 1}
    # A garbage collection would take 0.1 to 0.2 s, and fake tensors have no memory to free.
    quickly = torch._dynamo.config.patch(run_gc_after_compile=False)
    with (
        replaced(guards, "_empty_strided_cpu", _empty_strided),
        replaced(guards, "_reinterpret_tensor", _reinterpret),
        # Memory is allocated by the code around the kernels, which need not be compiled for it.
        replaced(async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: _nothing),
        # Inductor would start the C++ compiler to find out the machine's vector instructions.
        replaced(vector_units, "valid_vec_isa_list", list),
        # Only logs and caches, which are not kept, need readable code.
        replaced(torch.fx.GraphModule, "print_readable", lambda *_, **__: ""),
        config.patch(options),
        quickly,
        functorch_config.patch(enable_autograd_cache=False),
    ):
        try:
            yield
        finally:
            torch._dynamo.reset()
            PyCodeCache.cache_clear()


@dataclass
class Graphs:
    """Form in which a compiled step runs.

    Attributes:
        runs: True if the graphs of its forward and backward pass run operator by operator, as they
            were before inductor fused them; False if inductor's code runs.
    """

    runs: bool


@contextlib.contextmanager
def graphs_kept(*, fuses: bool) -> Iterator[Graphs]:
    """Context in which the graphs of compiled code are kept, and can run in place of the code.

    The graphs already say which tensors are saved for the backward pass, so each layer of a model
    adds the same memory to the graphs as to inductor's code.

    Args:
        fuses: True compiles the graphs with inductor as well; False only runs the graphs.
    """
    with quiet_import():
        import torch._inductor.compile_fx as compile_fx
    from torch._dynamo.backends.debugging import boxed_nop

    chosen = Graphs(runs=not fuses)
    compile_graph = compile_fx._compile_fx_inner

    def keep(graph: torch.fx.GraphModule, inputs: Any, *args: Any, **options: Any) -> Any:
        # A copy, because inductor changes the graph that it is given.
        plain = boxed_nop(_copied(graph), inputs)
        if not fuses:
            return plain
        fused: Any = compile_graph(graph, inputs, *args, **options)

        def run(arguments: list[Any]) -> Any:
            return (plain if chosen.runs else fused)(arguments)

        # The callee empties the list of arguments, so that these tensors can be freed early.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with replaced(compile_fx, "_compile_fx_inner", keep):
        yield chosen


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context without Python's cyclic garbage collector. Among the compiler's millions of live
    objects it takes a tenth of the time. Also, the storages in a trace then do not depend on the
    moments at which the collector runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which an attribute of `owner` has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(
    tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _nothing(*_: object) -> None:
    """Does nothing."""
