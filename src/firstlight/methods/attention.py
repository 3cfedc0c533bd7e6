"""Select the attention backend and install it in a plain model.

Shape letters are defined in `models/ops.py`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from firstlight.errors import ConfigError
from firstlight.methods.config import EfficiencyConfig
from firstlight.models import Model, ModelConfig
from firstlight.models.blockwise import blockwise_attention
from firstlight.models.ops import (
    AttentionFunction,
    AttentionOptions,
    MaskFunction,
    SelfAttention,
    at_least_fp32,
    attention,
    dense_mask,
    for_each_query_head,
    plain_attention,
    soft_capped,
)

#: Minimum head dimension and maximum number of tokens for which blockwise attention was faster than
#: torch's CPU kernel. See `takes_blockwise` for the measurements.
BLOCKWISE_HEAD_SIZE, _BLOCKWISE_TOKENS = 64, 1024

#: Backends that support training only on CUDA.
GPU_BACKENDS = ("efficient", "cudnn", "flex")

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def resolve_attention(
    config: EfficiencyConfig,
    device: str,
    dtype: torch.dtype,
    model: ModelConfig,
    seq_len: int,
    *,
    documents: bool,
    compiles: bool,
) -> str:
    """Return the attention backend. "auto" resolves to "sdpa", for which torch selects the kernel,
    except in these cases:

    - If torch's fused kernels do not support the model (see `able_backends`), "auto" becomes
      "blockwise". On CUDA, it becomes "flex" if "flex" supports the model, the model does not have
      sinks, and `compiles` is True.
    - If rows are masked by document on CUDA, there is no dropout, and `compiles` is True, "auto"
      becomes "flex", which does not store the mask.
    - On a CPU, "auto" becomes "blockwise" if `takes_blockwise` returns True.

    Args:
        config: the recipe's `efficiency` section.
        device: type of the device: "cpu", "cuda" or "mps".
        dtype: dtype of the matrix products.
        model: config of the model.
        seq_len: number of tokens in a row.
        documents: True if rows are masked by document.
        compiles: True if torch.compile can be used on the device.
    """
    if config.attention != "auto":
        return config.attention
    able = able_backends(model)
    # All layers of a model have the same dropout and sinks, so it is sufficient to check layer 0.
    spec = model.attention_spec(0)
    dropout = spec.dropout
    if able is not None:
        # With flex, the effect of sinks is computed from the kernel's log-sum-exp. The backward
        # pass of the log-sum-exp has not been tested on a GPU.
        takes_flex = "flex" in able and not spec.sinks
        return "flex" if takes_flex and device == "cuda" and compiles else "blockwise"
    if documents and device == "cuda":
        return "flex" if not dropout and compiles else "sdpa"
    return "blockwise" if device == "cpu" and takes_blockwise(model, dtype, seq_len) else "sdpa"


def takes_blockwise(model: ModelConfig, dtype: torch.dtype, seq_len: int) -> bool:
    """Return True if "auto" selects blockwise attention on a CPU. This is the case in bf16 with a
    head dimension of at least 64 and up to 1,024 tokens. With dropout, which torch's fused CPU
    kernel does not support, either bf16 or a head dimension of at least 64 is sufficient.

    In measurements, blockwise attention took 0.7 to 0.9 times as long as torch's kernel in bf16
    within these limits, compiled or not. It took 1.0 to 1.2 times as long with 2,048 tokens, and up
    to 1.3 times as long with head dimension 32. With dropout, it took 0.5 to 0.9 times as long, but
    1.2 times in fp32 with head dimension 32.
    """
    half, large = dtype == torch.bfloat16, model.head_dim >= BLOCKWISE_HEAD_SIZE
    if model.attention_spec(0).dropout:
        return half or large
    return half and large and seq_len <= _BLOCKWISE_TOKENS


def able_backends(model: ModelConfig) -> tuple[str, ...] | None:
    """Return the backends that support the attention layers of a model. Return None if all backends
    support them. The settings that determine the result are the same in all layers."""
    spec = model.attention_spec(0)
    if spec.sinks:
        return ("blockwise", "plain", "flex")
    if spec.value_dim not in (None, model.head_dim):
        return ("blockwise", "plain", "math")
    return None if spec.softcap is None else ("flex", "blockwise", "plain")


def why_unable(model: ModelConfig, backend: str, device: str = "cuda") -> str:
    """Return the reason why a backend does not support a model. The reason is worded so that it can
    complete a sentence. Return "" if the backend supports the model.

    Args:
        model: config of the model.
        backend: value of `EfficiencyConfig.attention`.
        device: type of the device for which the sentence recommends backends.
    """
    able = able_backends(model)
    if able is None or backend in ("auto", *able):
        return ""
    able = tuple(name for name in able if device == "cuda" or name not in GPU_BACKENDS)
    spec = model.attention_spec(0)
    what = "compute the attention sinks" if spec.sinks else "cap the scores"
    if spec.value_dim is not None:
        what = "handle the different key and value head sizes"
    return f"can't {what} of {model.model_type} models: use {', '.join(able)} or auto"


def choose_attention(model: Model, backend: str) -> None:
    """Install an attention backend, a value of `EfficiencyConfig.attention`, in the layers of a
    model.

    Raises:
        ConfigError: the backend does not support the model's attention.
    """
    problem = why_unable(model.config, backend)
    if problem:
        raise ConfigError(f"attention '{backend}' {problem}")
    attend, make_mask = _backends()[backend]
    spec = model.config.attention_spec(0)
    if backend == "flex" and (spec.softcap is not None or spec.sinks):
        # By default, fused kernels handle purely causal masks, but they support neither soft caps
        # nor sinks.
        make_mask = functools.partial(flex_mask, always=True)
    model.make_mask = make_mask
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = attend


def _backends() -> dict[str, tuple[AttentionFunction, MaskFunction]]:
    found: dict[str, tuple[AttentionFunction, MaskFunction]] = {
        "plain": (plain_attention, dense_mask),
        "blockwise": (blockwise_attention, dense_mask),
        "sdpa": (attention, dense_mask),
        "flex": (flex_attention, flex_mask),
    }
    for name, backend in _BACKENDS.items():
        found[name] = (functools.partial(_by_kernel, backend), dense_mask)
    return found


def _by_kernel(
    backend: SDPBackend,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    options: AttentionOptions,
) -> Tensor:
    # Some kernels do not support grouped-query attention.
    k_BKSD, v_BKSD = (for_each_query_head(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
    with sdpa_kernel(backend):
        return attention(q_BHTD, k_BKSD, v_BKSD, options)


#: Settings to restore, one for each active `varying_lengths` context. The setting applies to the
#: whole process, but several threads can generate text at the same time. The last thread to finish
#: restores the original setting.
_BEFORE: list[bool] = []
_CHANGING = threading.Lock()


@contextlib.contextmanager
def varying_lengths() -> Iterator[None]:
    """Context manager and decorator for code that computes attention over sequences whose lengths
    change from call to call.

    Within the context, torch does not use cuDNN's attention kernel. By default, torch prefers this
    kernel on Hopper and Blackwell. However, cuDNN takes tens of milliseconds on the host to plan
    each new shape, and every decoded token has a new shape. In training, all rows have the same
    length, so cuDNN plans only once.
    """
    cuda: Any = torch.backends.cuda
    with _CHANGING:
        _BEFORE.append(cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _CHANGING:
            cuda.enable_cudnn_sdp(_BEFORE.pop())


def flex_mask(
    positions: Tensor,
    total: int,
    window: int | None,
    document_ids_BT: Tensor | None,
    *,
    always: bool = False,
) -> Any:
    """Create the block mask for `flex_attention`. It is equivalent to the result of `dense_mask`,
    but does not store a T x S mask. Blocks of 128 x 128 in which all keys are masked are skipped.
    For a purely causal mask, or if there is a cache, return the result of `dense_mask` instead.

    Args:
        positions: positions of the queries in their rows, int64 [T] or [B, T].
        total: number of keys. Their positions are counted from 0.
        window: number of tokens that a query attends to, including its own token; None for all
            earlier tokens.
        document_ids_BT: id of each token's document, int [B, T], or None for a single document. A
            query attends only to keys of its own document.
        always: True to create a block mask even for a purely causal mask.
    """
    # No block mask is needed in this case, because torch's fused kernels support causal masks, and
    # a cache can't be combined with documents.
    plain = document_ids_BT is None and window is None and not always
    if plain or positions.dim() == 2 or len(positions) != total:
        return dense_mask(positions, total, window, document_ids_BT)
    # This is imported here because it loads torch's compiler, which the other backends do not need.
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        if document_ids_BT is not None:
            seen = seen & (document_ids_BT[batch, query] == document_ids_BT[batch, key])
        return seen

    # If the rows are not masked by document, they share one mask. All heads always share one mask.
    rows = None if document_ids_BT is None else len(document_ids_BT)
    return create_block_mask(
        visible, rows, None, len(positions), total, device=str(positions.device)
    )


def flex_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute attention [B, H, T, D]. With a block mask, use torch's compiled FlexAttention (Dong
    et al. 2024, arXiv 2412.05496). Without a block mask, use torch's fused kernels or, if there is
    a soft cap or there are sinks, blockwise attention. See `AttentionFunction` for the arguments.
    """
    mask, dropout, scale, softcap, sinks_H = options
    if mask is None or isinstance(mask, Tensor):
        other = attention if softcap is None and sinks_H is None else blockwise_attention
        return other(q_BHTD, k_BKSD, v_BKSD, options)
    assert dropout == 0.0, "flex attention does not support dropout"
    grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
    arguments = {"block_mask": mask, "scale": scale, "enable_gqa": grouped}
    if softcap is not None:
        arguments["score_mod"] = _capping(softcap)
    result: Tensor
    if sinks_H is None:
        result = _compiled_flex()(q_BHTD, k_BKSD, v_BKSD, **arguments)
        return result
    from torch.nn.attention.flex_attention import AuxRequest

    result, found = _compiled_flex()(
        q_BHTD, k_BKSD, v_BKSD, **arguments, return_aux=AuxRequest(lse=True)
    )
    # A sink s adds exp(s) to the denominator exp(lse) of the softmax, and nothing to the sum of
    # values. The result is therefore multiplied by exp(lse) / (exp(lse) + exp(s)).
    left_BHT1 = torch.sigmoid(found.lse - at_least_fp32(sinks_H)[:, None])[..., None]
    return (result * left_BHT1).to(result.dtype)


@functools.cache
def _capping(bound: float) -> Callable[..., Tensor]:
    # The function is cached for each value of the soft cap, because a new function would be
    # compiled again.
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return soft_capped(score, bound)

    return cap


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    # If FlexAttention is not compiled, it stores all T x S scores.
    return torch.compile(uncompiled, dynamic=False)
