"""Prepare a recipe and its training step for tracing. While the step runs, hooks report to the
tracer which phase has begun, and which tensors are weights, gradients and optimizer states.
`equivalent` returns the recipe that is traced in place of the user's recipe.

The step is traced on CPU tensors. Kernels of a CUDA GPU are replaced by functions with which
autograd saves the same tensors for the backward pass as on the GPU (`kernels_of`). The kernels that
torch.compile would generate are also replaced (`replaced`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from firstlight.hardware.device import Hardware
from firstlight.methods import EfficiencyConfig, LossFunction
from firstlight.methods.memory import COPIES_BESIDE
from firstlight.optim.eight_bit import quiet_import
from firstlight.optim.optimizer import Optimizer
from firstlight.planner.memory.kernels import Target
from firstlight.planner.memory.trace import Tracer
from firstlight.recipe import ResolvedRecipe
from firstlight.training.preference import answer_log_probs
from firstlight.training.program import TrainingProgram

_aten: Any = torch.ops.aten

#: Functions whose inputs autocast casts to fp32 on CUDA but not on a CPU (AT_FORALL_FP32 in ATen's
#: autocast_mode.h). Functions that models and losses do not use are omitted.
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
    """Softmax as implemented in torch versions before 1.11. It saves the entire input for the
    backward pass, although the backward pass needs only the dtype of the input (PyTorch issue
    64000)."""

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
    """Function mode in which functions on CPU tensors save the same tensors for the backward pass
    as they would on a CUDA GPU.

    - `scaled_dot_product_attention` uses the first kernel in torch's order that supports the
      inputs: cuDNN's kernel (on Hopper and data-centre Blackwell), flash attention, or the
      memory-efficient kernel. These kernels save the queries, keys, values, output and the
      log-sum-exp of each query. If no kernel supports the inputs, it uses two matrix products and a
      softmax, which save all scores.
    - `dropout` saves a mask of one byte per element instead of a factor in the element's dtype.
    - Autocast computes norms, softmax and losses in fp32.

    Args:
        target: a CUDA device.
        kernel: name of the attention kernel ("flash", "efficient", "cudnn" or "math"); None for
            torch's choice.
        expands: True for firstlight's own models. If torch's kernels do not support grouped heads,
            these models repeat the keys and values of each group (`models.ops`).
    """

    def __init__(self, target: Target, kernel: str | None = None, *, expands: bool = False) -> None:
        super().__init__()
        self._target, self._kernel = target, kernel
        self._expands = expands
        # These settings are read in advance, because reading them in code that torch.compile traces
        # would cause a graph break.
        cuda: Any = torch.backends.cuda
        self._has_flash = cuda.flash_sdp_enabled() and target.capability >= (8, 0)
        self._has_efficient = cuda.mem_efficient_sdp_enabled()
        # This condition is taken from `check_prefer_cudnn_attention` in torch's sdp_utils.cpp. The
        # wheels of these torch versions contain cuDNN 9.15 or later.
        prefers_cudnn = target.capability[0] in (9, 10) and target.torch_version >= (2, 11)
        self._has_cudnn = cuda.cudnn_sdp_enabled() and prefers_cudnn

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function as it would run on a GPU."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        # For each element, a CPU saves a factor in the input's dtype, and CUDA's fused kernel saves
        # one byte.
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is Tensor.backward:
            # Operations that are recomputed in a backward pass also run as they would on a GPU.
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
        grouped = query.shape[1] != key.shape[1]
        groups_stay = enable_gqa and not self._expands
        kernel = self._kernel or self._chosen(query, attn_mask, dropout_p, grouped=groups_stay)
        if kernel == "math":
            groups = query.shape[1] // key.shape[1]
            if grouped:
                key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            return _math_attention(
                query, key, value, attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale
            )
        # Without a mask, cuDNN's kernel saves the same tensors as flash attention.
        if kernel == "flash" or (kernel == "cudnn" and attn_mask is None):
            flash = _aten._scaled_dot_product_flash_attention
            found: tuple[Tensor, ...] = flash(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
            return found[0]
        # The kernel saves the log-sum-exp only if it is needed for a backward pass.
        learns = torch.is_grad_enabled() and query.requires_grad
        bias = _bias(attn_mask, query, key)
        if kernel == "cudnn":
            cudnn = _aten._scaled_dot_product_cudnn_attention
            found = cudnn(query, key, value, bias, learns, dropout_p, is_causal, False, scale=scale)
            return found[0]
        if grouped:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        efficient = _aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)
        return found[0]

    def _chosen(self, query: Tensor, mask: Tensor | None, dropout: float, *, grouped: bool) -> str:
        """Return the attention kernel that torch would choose, as implemented in sdp_utils.cpp.

        cuDNN and flash attention require half precision and compute capability 8.0 or higher. cuDNN
        also requires a head dimension that is a multiple of 8 and at most 128, and a dropout
        probability that is a multiple of 1/16. Flash attention does not support masks, and requires
        a head dimension of at most 256. The memory-efficient kernel requires heads whose size is a
        multiple of 16 bytes. It also requires capability 8.0 or higher for bf16, and torch 2.14 or
        later for `enable_gqa`.
        """
        half, size = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
        capability = self._target.capability
        # Evaluation and generation run without cuDNN's kernel (`varying_lengths`).
        takes_cudnn = self._has_cudnn and torch.is_grad_enabled() and size <= 128 and size % 8 == 0
        if takes_cudnn and half and float(16 * dropout).is_integer():
            return "cudnn"
        # On GPUs with less shared memory per multiprocessor, the backward pass of flash attention
        # does not support some head dimensions.
        has_less = (8, 6) <= capability <= (8, 9) or capability[0] == 12
        no_backward = has_less and (192 < size <= 224 or (size > 224 and dropout > 0))
        learns = torch.is_grad_enabled() and query.requires_grad
        takes_flash = self._has_flash and half and size <= 256 and not (learns and no_backward)
        if takes_flash and mask is None:
            return "flash"
        bf16_missing = query.dtype == torch.bfloat16 and capability < (8, 0)
        aligned = size % (8 if half else 4 if capability >= (8, 0) else 1) == 0
        takes_groups = not grouped or self._target.torch_version >= (2, 14)
        if self._has_efficient and takes_groups and aligned and not bf16_missing:
            return "efficient"
        return "math"


def kernels_of(
    target: Target, kernel: str | None = None, *, expands: bool = True
) -> contextlib.AbstractContextManager[object]:
    """Return `CudaKernels` for a CUDA device. For a CPU, return a context manager that does
    nothing."""
    if target.kind != "cuda":
        return contextlib.nullcontext()
    return CudaKernels(target, kernel, expands=expands)


def _backward(tensor: Tensor, gradient: Tensor | None = None, **_: Any) -> None:
    # `Tensor.backward` and `torch.autograd.backward` call this function. Modes do not intercept it.
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
    # As in torch's math kernel, both factors are scaled before the product, so that the product
    # does not overflow in half precision.
    scores = (query * size**0.5) @ (key * size**0.5).transpose(-2, -1)
    if mask is not None:
        bias = _bias(mask, query, key)
        assert bias is not None
        scores = scores + bias
    weights = scores.softmax(-1)
    return _dropout(weights, dropout, True) @ value if dropout else weights @ value


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the attention mask as values that are added to the scores, of shape [..., T, S]."""
    if mask is None:
        return None
    # The kernel requires a bias in the dtype of the queries. Only the size of the bias matters
    # here, so its values are arbitrary.
    bias = query.new_zeros(mask.shape).masked_fill_(mask, 0) if mask.dtype == torch.bool else mask
    return bias.expand(*query.shape[:-1], key.shape[-2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    # Like CUDA's fused kernel, native_dropout stores a mask with one byte per element.
    dropped: Callable[..., tuple[Tensor, Tensor]] = torch.native_dropout
    return dropped(input, p, True)[0]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _widened(value: Any, half: torch.dtype) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == half else value


@contextlib.contextmanager
def stubbed_compiler() -> Iterator[None]:
    """Inside the context, torch.compile generates CPU code that allocates memory through torch's
    operators but whose kernels do nothing. Compiled functions are discarded on entry and exit."""
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
    # A garbage collection would take 0.1 to 0.2 s and would not free any memory, because the
    # tensors are fake.
    quickly = torch._dynamo.config.patch(run_gc_after_compile=False)
    with (
        replaced(guards, "_empty_strided_cpu", _empty_strided),
        replaced(guards, "_reinterpret_tensor", _reinterpret),
        # Kernels need not be compiled, because the code around them allocates the memory.
        replaced(async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: _nothing),
        # Otherwise, inductor would start the C++ compiler to detect the machine's vector
        # instructions.
        replaced(vector_units, "valid_vec_isa_list", list),
        # Readable code is only needed for logs and caches, which are discarded in any case.
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
    """Determines whether a compiled step runs as graphs or as the code that inductor generated from
    these graphs.

    Attributes:
        runs: True if the graphs of the forward and backward pass run operator by operator, as they
            were before inductor fused operators; False if inductor's code runs.
    """

    runs: bool


@contextlib.contextmanager
def graphs_kept(*, fuses: bool) -> Iterator[Graphs]:
    """Store the graphs of all code that is compiled in the context. The graphs can then run instead
    of the compiled code.

    The tensors that are saved for the backward pass are the same in the graphs and in inductor's
    code. Each layer of a model therefore adds the same amount of memory in both cases.

    Args:
        fuses: True to also compile the graphs with inductor; False to only run the graphs.
    """
    with quiet_import():
        import torch._inductor.compile_fx as compile_fx
    from torch._dynamo.backends.debugging import boxed_nop

    chosen = Graphs(runs=not fuses)
    compile_graph = compile_fx._compile_fx_inner

    def keep(graph: torch.fx.GraphModule, inputs: Any, *args: Any, **options: Any) -> Any:
        # The graph is copied, because inductor modifies it.
        plain = boxed_nop(_copied(graph), inputs)
        if not fuses:
            return plain
        fused: Any = compile_graph(graph, inputs, *args, **options)

        def run(arguments: list[Any]) -> Any:
            return (plain if chosen.runs else fused)(arguments)

        # The called function empties the list of arguments, so that the tensors can be freed early.
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
    """Disable Python's cyclic garbage collector in the context. The collector would take a tenth of
    the total time, because the compiler creates millions of objects. In addition, the lifetimes of
    storages in a trace would depend on when the collector runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of `owner` to a different value inside the context."""
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
    """Do nothing."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside the context, create all tensors as fake tensors, which have no memory. See also
    `tables_put_back`."""
    # Real tensors are allowed in the context, for example tables that a library created earlier.
    with tables_put_back(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def tables_put_back() -> Iterator[None]:
    """On exit, discard the tables that bitsandbytes created in the context. They are fake tensors
    and can't be used later."""
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
    """Inside the context, trace the steps of all torch optimizers as the "optimizer" phase, and
    mark their gradients and states."""
    before = ["setup"]

    def enter(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before.append(tracer.phase_name)
        tracer.mark((p.grad for p in parameters_of(optimizer)), "gradients")
        tracer.enter_phase("optimizer")

    def leave(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracer.enter_phase(before.pop())
        tracer.mark(_optimizer_states(optimizer), "optimizer_states")

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
    """Yield all parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in parameters_of(optimizer):
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield value


def marked_loss(head_loss: Callable[..., Tensor], tracer: Tracer) -> Callable[..., Tensor]:
    """Return the head's loss function, with its forward pass traced as the "loss" phase and its
    backward pass as the "backward of loss" phase."""

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
    """Return `training.preference.answer_log_probs` with its forward and backward pass marked as
    phases. For preference pairs, this function is used in place of the head's loss."""
    marked = marked_loss(answer_log_probs, tracer)

    def log_probs(logits_BTV: Tensor, *args: Any) -> Tensor:
        tracer.mark((logits_BTV,), "logits_and_loss")
        return marked(logits_BTV, *args)

    return log_probs


def watch_program(program: TrainingProgram, tracer: Tracer) -> None:
    """Replace a program's optimizer and loss function with wrappers that report the program's
    tensors and phases to the tracer."""
    loss_sum = program.loss_sum
    program.optimizer = cast(Optimizer, _TracedOptimizer(program, tracer))

    def marked_loss_sum(*args: Any, **kwargs: Any) -> Tensor:
        with tracer.forward_pass():
            loss = loss_sum(*args, **kwargs)
        tracer.enter_phase("backward")
        return loss

    program.loss_sum = marked_loss_sum


class _TracedOptimizer:
    """Wrapper around the optimizer of a program. It marks gradients, master weights and the
    "clipping" phase."""

    def __init__(self, program: TrainingProgram, tracer: Tracer) -> None:
        self._optimizer, self._tracer = program.optimizer, tracer
        self._weights = list(program.model.parameters())
        own = {id(p) for p in self._weights}
        # Master weights belong to the optimizer states, because they exist only for its updates.
        self._masters = [m for m in self._optimizer.updated.values() if id(m) not in own]
        tracer.mark(self._masters, "optimizer_states")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def accumulate(self) -> None:
        """Replace the gradients of the weights with the gradients of the master weights, and mark
        both sets of gradients; see `Optimizer.accumulate`."""
        self._tracer.mark((p.grad for p in self._weights), "gradients")
        self._optimizer.accumulate()
        self._tracer.mark((m.grad for m in self._masters), "gradients")

    def clip_gradients(self, *args: Any) -> Tensor:
        """See `Optimizer.clip_gradients`."""
        with self._tracer.phase("clipping"):
            return self._optimizer.clip_gradients(*args)


#: Minimum number of elements of an offloaded tensor, as in `methods.memory`.
_OFFLOADED_ELEMENTS = 1024


def host_activations(
    loss_sum: LossFunction, model: nn.Module, tracer: Tracer, target: Target
) -> LossFunction:
    """Apply `methods.memory.offloaded_activations` to fake tensors.

    For a GPU, offloaded activations are counted as host memory, except for those that are still
    being copied while the computation continues. On a CPU, each offloaded activation is a copy in
    the same memory.
    """
    weights = {id(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())}
    # Keep these storages alive while ids are compared. Otherwise, a new storage could get the id of
    # a deleted one.
    kept = [p.untyped_storage() for p in (*model.parameters(), *model.buffers())]
    leaving: deque[Tensor] = deque(maxlen=COPIES_BESIDE)
    last: Callable[[], _Offloaded | None] | None = None

    def pack(tensor: Tensor) -> Any:
        nonlocal last
        if id(tensor.untyped_storage()) in weights or tensor.numel() < _OFFLOADED_ELEMENTS:
            return tensor
        if target.kind == "cpu":
            return _Offloaded(torch.empty_like(tensor))
        tracer.move_to_host(tensor.numel() * tensor.element_size())
        leaving.append(tensor.detach())
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
        packed = _Offloaded(None, *layout, before=last)
        last = weakref.ref(packed)
        return packed

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.copy is not None:
            copy: Tensor = packed.copy
            return copy
        leaving.clear()
        following = packed
        for _ in range(1 + COPIES_BESIDE):
            if following is not None and following.on_device is None:
                made = torch.empty_strided(following.shape, following.stride, dtype=following.dtype)
                tracer.move_to_host(-made.numel() * made.element_size())
                following.on_device = made
            before = following and following.before
            following = before and before()
        tensor: Tensor = packed.on_device
        packed.on_device = None
        return tensor

    def offloaded(*args: Any, **kwargs: Any) -> Tensor:
        assert kept
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss_sum(*args, **kwargs)

    return offloaded


@dataclass(eq=False)
class _Offloaded:
    """An offloaded activation, which is a tensor in host memory or, on a CPU, a copy of the tensor.
    See `methods.memory._Activation`."""

    copy: Tensor | None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    before: Callable[[], _Offloaded | None] | None = None
    on_device: Tensor | None = None


#: Hardware that is assumed for the traced program: a CPU with 1 PiB of memory and bf16 support.
PLANNED = Hardware(torch.device("cpu"), "a planned device", 2**50, bf16=True)

#: Values of `efficiency.attention` that select a GPU kernel, which is traced with `CudaKernels`.
_GPU_KERNELS = ("flash", "efficient", "cudnn", "math")


@dataclass(frozen=True)
class Equivalent:
    """The recipe and the kernels that are traced in place of the user's recipe and the real
    kernels.

    Attributes:
        recipe: the recipe to trace.
        kernel: name of the attention kernel on a GPU; see `CudaKernels`. None for torch's choice.
        offloads: True if activations are offloaded to host memory.
        notes: assumptions of the prediction, as shown to the user.
    """

    recipe: ResolvedRecipe
    kernel: str | None
    offloads: bool
    notes: tuple[str, ...]

    def with_(self, recipe: ResolvedRecipe) -> Equivalent:
        """Return a copy with a different recipe to trace."""
        return replace(self, recipe=recipe)


def equivalent(recipe: ResolvedRecipe, target: Target) -> Equivalent:
    """Return the recipe and kernels to trace for a recipe on a target device."""
    config, notes = recipe.efficiency, []
    chosen: dict[str, Any] = {"activation_offload": False}
    kernel = None
    if target.kind == "cuda":
        kernel = config.attention if config.attention in _GPU_KERNELS else None
        # These kernels do not exist on a CPU. The traced recipe uses "sdpa", which `CudaKernels`
        # replaces with the GPU's kernel.
        if config.attention in (*_GPU_KERNELS, "flex"):
            chosen["attention"] = "sdpa"
        if config.precision == "fp8":
            chosen["precision"] = "bf16"
            notes.append("fp8 is planned as bf16: the scaled fp8 copies of inputs are not counted")
        # tf32 affects only how a GPU computes matrix products. The tensors are fp32.
        if config.precision == "tf32":
            chosen["precision"] = "fp32"
        if config.compile:
            notes.append("compiled code is planned with the code that inductor generates for CPUs")
    recipe = recipe.with_keys("efficiency", **chosen)
    recipe = _without_masks(recipe, config.attention, target)
    # Paged memory requires CUDA. Optimizer states have the same sizes without paging.
    if recipe.optimizer.name == "paged_adamw8bit":
        notes.append(
            "paged optimizer state is counted on the device, where it stays as long as it fits"
        )
        recipe = recipe.with_keys("optimizer", name="adamw8bit")
    # On a CPU, Muon updates matrices one by one unless an implementation is set.
    optimizer = recipe.optimizer
    is_open = (optimizer.name, optimizer.implementation) == ("muon", "auto")
    if target.kind == "cuda" and is_open:
        recipe = recipe.with_keys("optimizer", implementation="fused")
    # Pinned memory is rejected on a CPU. It does not affect the prediction, because it is host
    # memory.
    if recipe.data.pin_memory:
        recipe = recipe.with_keys("data", pin_memory=None)
    return Equivalent(recipe, kernel, config.activation_offload, tuple(notes))


def without_compile(config: EfficiencyConfig) -> dict[str, Any]:
    """Return the changes to the `efficiency` section that turn off torch.compile and remove the
    keys that configure it. Activation checkpointing with a memory budget is also turned off,
    because only the compiler can choose which activations to recompute."""
    plain = {"compile": False, "compile_regional": False, "compile_mode": "default"}
    if config.activation_checkpointing == "budget":
        plain["activation_checkpointing"] = "none"
    return {key: value for key, value in plain.items() if getattr(config, key) != value}


def uncompiled(recipe: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe without torch.compile, so that the same step runs operator by operator."""
    config = recipe.efficiency
    if not config.compile:
        return recipe
    return recipe.with_keys("efficiency", **without_compile(config))


def _without_masks(recipe: ResolvedRecipe, attention: str, target: Target) -> ResolvedRecipe:
    """If a GPU computes document masks with flex attention, return the recipe without document
    masks, because flex attention does not store a mask of size T x T."""
    masked = recipe.data.document_masking and attention == "flex"
    if target.kind == "cpu" or not masked:
        return recipe
    return recipe.with_keys("data", document_masking=False)
