"""Compute a decoding step of a plain Llama model on a CPU, for a small number of sequences, in a
single call into `few_rows.cpp`.

With separate torch operations, a step of a small model takes twice as long as reading the model's
weights, because each layer consists of 20 operations, each of which starts threads and allocates
its result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from firstlight.generation.few_rows import ROW_MULTIPLE, FewRowsLinear, Int8Linear, steps
from firstlight.models import KVCache, Llama, Model
from firstlight.models.llama import LlamaAttention, LlamaBlock, LlamaMLP, RMSNorm
from firstlight.models.ops import Embedding, attention

#: Head dimensions must be a multiple of this number, because the kernel processes a head in vectors
#: of up to 16 numbers.
_HEAD_MULTIPLE = 16
#: Maximum number of sequences in a step. For more sequences, torch's matrix products are faster.
MOST_TEXTS = 16


class _Linear(ctypes.Structure):
    """ctypes equivalent of the struct `Linear` in few_rows.cpp. The next two classes mirror the
    structs `Layer` and `Llama`.
    """

    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "scale", "bias")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in "q k v o gate up down".split()),
        *((f"{name}_norm", ctypes.c_void_p) for name in "attention mlp q k".split()),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_long),
    ]


class _Llama(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("head", _Linear),
        *((name, ctypes.c_void_p) for name in "embedding final_norm work".split()),
        *((name, ctypes.c_long) for name in "layer_count hidden inner heads kv_heads".split()),
        *((name, ctypes.c_long) for name in "head_dim vocab max_tokens most_rows padding".split()),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class LlamaStep:
    """Decoding step for the sequences in the first rows of a cache. Instances are created by
    `llama_step`.

    Results are rounded at the same points as in the model, except that attention keeps fp32 between
    its operations.

    Args:
        model: a model that satisfies `_is_plain`; its parameters must not be replaced afterwards.
        cache: the model's key-value cache.

    Attributes:
        most_rows: maximum number of sequences.
    """

    def __init__(self, model: Llama, cache: KVCache) -> None:
        config = model.config
        final_norm: Any = model.final_norm
        # The model and the cache are kept alive, because the pointers refer to their memory.
        self._model, self._cache = model, cache
        self._dtype, self._rows = model.embedding.weight.dtype, len(model.embedding.weight)
        self.most_rows = min(MOST_TEXTS, len(cache.keys[0]))
        self._kernel = steps()[_weight(model.lm_head).dtype]
        layers = (_Layer * config.num_hidden_layers)()
        layer: Any
        for number, (own, layer) in enumerate(zip(layers, model.layers, strict=True)):
            attend, mlp = layer.self_attn, layer.mlp
            for name in "q k v o".split():
                setattr(own, name, _pointers(getattr(attend, f"{name}_proj")))
            for name in "gate up down".split():
                setattr(own, name, _pointers(getattr(mlp, f"{name}_proj")))
            own.attention_norm = layer.input_layernorm.weight.data_ptr()
            own.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
            if attend.has_qk_norm:
                own.q_norm = attend.q_norm.weight.data_ptr()
                own.k_norm = attend.k_norm.weight.data_ptr()
            own.keys = cache.keys[number].data_ptr()
            own.values = cache.values[number].data_ptr()
            own.window = config.attention_spec(number).window or 0
        threads, width = torch.get_num_threads(), config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        # Sizes of the buffers of `Work` in few_rows.cpp. The first buffers are shared by all
        # threads, and the remaining buffers exist once per thread.
        shared = (config.hidden_size, width, keys, keys, width, config.intermediate_size)
        each = (config.head_dim, config.head_dim, max(cache.max_tokens, config.head_dim))
        normed = self.most_rows * _padded(config.hidden_size)
        size = self.most_rows * sum(map(_padded, shared))
        size += threads * (normed + sum(map(_padded, each)))
        self._work = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._llama = _Llama(
            layers=layers,
            head=_pointers(model.lm_head),
            embedding=model.embedding.weight.data_ptr(),
            final_norm=final_norm.weight.data_ptr(),
            work=self._work.data_ptr(),
            layer_count=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            max_tokens=cache.max_tokens,
            most_rows=self.most_rows,
            padding=ROW_MULTIPLE,
            eps=config.rms_norm_eps,
            scale=config.attention_spec(0).scale or config.head_dim**-0.5,
        )
        self._threads = threads

    def __call__(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Append one token to each sequence. Return the logits [B, V] of the following tokens.

        Args:
            token_ids: the new token of each of the first B sequences. B is at most `most_rows`.
            lengths: number of tokens in each sequence before its new token.

        Raises:
            IndexError: an id is outside the embedding table.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self._rows:
                raise IndexError(
                    f"token id {token_id} is outside the embedding table of {self._rows} rows"
                )
        rows = len(token_ids)
        assert rows == len(lengths) <= self.most_rows
        ids_B, positions_B = torch.tensor([token_ids, lengths], dtype=torch.int64, device="cpu")
        ((cos, sin),) = self._model.rotary.tables(positions_B[:, None], positions_B + 1)
        # The tables are rounded to the model's dtype, as in `LlamaAttention`.
        cos, sin = (table.to(self._dtype).float().contiguous() for table in (cos, sin))
        logits_BV = torch.empty(rows, self._llama.vocab, dtype=self._dtype, device="cpu")
        self._kernel(
            ctypes.byref(self._llama),
            cos.data_ptr(),
            sin.data_ptr(),
            ids_B.data_ptr(),
            positions_B.data_ptr(),
            rows,
            logits_BV.data_ptr(),
            self._threads,
        )
        return logits_BV


def llama_step(model: Model, cache: KVCache) -> LlamaStep | None:
    """Return a decoding step for a model and its cache. Return None if the model is not a plain
    Llama model on a CPU, or if there are no kernels for its dtype.

    Args:
        model: a model in evaluation mode that was changed by `few_rows.use_few_rows`.
        cache: the model's key-value cache.
    """
    return LlamaStep(model, cache) if _is_plain(model) else None


def _is_plain(model: Model) -> TypeGuard[Llama]:
    """Return True if the kernel computes exactly the model's forward pass. All modules must have
    the expected classes, without hooks or replaced functions. All parameters must share one dtype.
    The weights of all linear layers must also share one dtype, which can be int8.
    """
    if type(model) is not Llama or model.config.head_dim % _HEAD_MULTIPLE:
        return False
    config = model.config
    dtype = model.embedding.weight.dtype
    classes = (LlamaBlock, LlamaAttention, LlamaMLP, RMSNorm, FewRowsLinear, Int8Linear)
    modules = [*model.layers.modules(), model.final_norm, model.lm_head]
    hooks = [(one._forward_hooks, one._forward_pre_hooks) for one in model.modules()]
    tensors = [
        *model.parameters(),
        *(buffer for module in modules for buffer in module.buffers(recurse=False)),
    ]
    linear = [module for module in modules if isinstance(module, FewRowsLinear | Int8Linear)]
    return (
        config.logit_softcap is None
        and config.rotary_dim == config.head_dim
        and config.rope_local_base_freq is None
        and all(type(module) in (*classes, nn.ModuleList) for module in modules)
        and type(model.embedding) is Embedding
        and not any(map(any, hooks))
        and all(
            module.attend is attention and module.rope == 0
            for module in modules
            if isinstance(module, LlamaAttention)
        )
        # This excludes fake and distributed tensors.
        and all(type(tensor) in (nn.Parameter, Tensor) for tensor in tensors)
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        and all(parameter.dtype == dtype for parameter in model.parameters())
        and len({_weight(module).dtype for module in linear}) == 1
        and _weight(model.lm_head).dtype in steps()
    )


def _padded(size: int) -> int:
    return -(-size // ROW_MULTIPLE) * ROW_MULTIPLE


def _weight(layer: nn.Linear | Int8Linear) -> Tensor:
    """Return the weight [out, in] of a linear layer."""
    return layer.weight_int8 if isinstance(layer, Int8Linear) else layer.weight


def _pointers(layer: nn.Linear | Int8Linear) -> _Linear:
    scale = layer.scale if isinstance(layer, Int8Linear) else None
    tensors = (_weight(layer), scale, layer.bias)
    return _Linear(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
