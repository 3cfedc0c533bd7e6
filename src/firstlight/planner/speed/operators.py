"""Kinds of operators in the speed model (matrix products, attention, and streams, which are bound
by memory bandwidth), with the sizes and bytes that their speed depends on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from firstlight.planner.memory.kernels import (
    Operator,
    total_bytes,
)

Kind = Literal[
    "matrix_products",
    "attention",
    "elementwise",
    "optimizer",
    "communication",
    "launching",
    "data",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Phases whose streams are of the kind "optimizer".
_OPTIMIZER_PHASES = ("optimizer", "clipping")

#: Products of each expert's rows by its own weight, all experts in one call (`models.moe`).
_GROUPED = ("grouped_linear", "grouped_linear_backward")

_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "addbmm",
    "_scaled_mm",
    "_int_mm",
    *_GROUPED,
)

_ATTENTION = ("scaled_dot_product", "flash_attention", "flex_attention", "blockwise_attention")

#: Number of tensors that the attention kernels take without a mask.
_INPUTS_WITHOUT_MASK = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 6,
    "blockwise_attention": 3,
    "blockwise_attention_backward": 4,
}

#: Operators that start no kernel: they return a view or an uninitialised tensor, or no tensor.
_FREE = frozenset(
    """view _unsafe_view reshape expand alias detach t transpose permute numpy_T slice select
    split unbind unsqueeze squeeze empty empty_like new_empty empty_strided lift_fresh
    promote_types as_strided to set_ _record_function_enter_new _record_function_exit
    split_with_sizes narrow chunk flatten unflatten view_as is_same_size""".split()
)


def is_free(operator: Operator) -> bool:
    """True if the operator starts no kernel."""
    name = operator.base_name
    # A cast to the dtype that a tensor has already returns the tensor itself.
    if name == "to":
        return operator.inputs[:1] == operator.outputs[:1]
    return name in _FREE or not (operator.inputs or operator.outputs)


def kind_of(operator: Operator) -> Kind:
    """The kind that an operator's time counts under; operators without a kernel have one, too."""
    name = operator.base_name
    if operator.name.startswith(("c10d", "_c10d_functional")):
        return "communication"
    if name in _PRODUCTS:
        return "matrix_products"
    if is_attention(operator):
        return "attention"
    return "optimizer" if operator.phase in _OPTIMIZER_PHASES else "elementwise"


def is_attention(operator: Operator) -> bool:
    """True if the operator is one of the fused kernels of attention."""
    name = operator.base_name
    return any(kernel in name for kernel in _ATTENTION)


def is_grouped(operator: Operator) -> bool:
    """True if the operator multiplies the rows of all experts in one call."""
    return operator.base_name in _GROUPED


def is_masked(operator: Operator) -> bool:
    """True if an attention kernel was given a mask; training without a mask is causal."""
    plain = _INPUTS_WITHOUT_MASK.get(operator.base_name)
    return plain is not None and len(operator.inputs) > plain


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product: `batch` times [m, k] x [k, n].

    Attributes:
        added: True if a bias or another matrix is added.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    added: bool = False

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


def product_of(operator: Operator) -> MatrixProduct:
    """The matrix product of an operator of the kind "matrix_products". The products of all experts
    count as one product of all rows by one weight; their backward pass as two of them."""
    name = operator.base_name
    if is_grouped(operator):
        count = 2 if name.endswith("backward") else 1
        ((rows, _), dtype), (_, n, k) = operator.inputs[0], operator.inputs[count][0]
        return MatrixProduct(count, rows, n, k, dtype=dtype)
    factors = [layout for layout in operator.inputs if len(layout[0]) >= 2]
    added = name in ("addmm", "baddbmm", "addbmm")
    if added:
        factors = [layout for layout in operator.inputs[1:] if len(layout[0]) >= 2]
    (first, dtype), (second, _) = factors[:2]
    n, k = (second[-2], second[-1]) if name == "linear" else (second[-1], second[-2])
    if len(second) > 2:
        return MatrixProduct(math.prod(first[:-2]), first[-2], n, k, dtype=dtype, added=added)
    return MatrixProduct(1, math.prod(first[:-1]), n, k, dtype=dtype, added=added)


#: Number of times that in-place operators over lists, whose results are not in a trace, move each
#: byte of their inputs. AdamW reads four tensors and writes three of them, all but the gradient.
_LIST_TRAFFIC = {
    "_fused_adamw_": 7 / 4,
    "_fused_adam_": 7 / 4,
    "_fused_sgd_": 5 / 3,
    "_foreach_mul_": 2.0,
    "_foreach_add_": 2.0,
    "_foreach_div_": 2.0,
    "_foreach_lerp_": 1.5,
    "_foreach_addcmul_": 4 / 3,
    "_foreach_addcdiv_": 4 / 3,
}


def streamed_bytes(operator: Operator) -> float:
    """Bytes that an operator really reads and writes: a look-up reads its rows, not the table."""
    name = operator.base_name
    if is_free(operator):
        return 0.0
    if not operator.outputs and name in _LIST_TRAFFIC:
        return _LIST_TRAFFIC[name] * total_bytes(operator.inputs)
    if name in ("embedding", "gather", "index_select", "index"):
        return 2.0 * total_bytes(operator.outputs) + total_bytes(operator.inputs[1:])
    if name == "nll_loss_forward":
        return float(total_bytes(operator.inputs[1:]))
    if name in ("nll_loss_backward", "embedding_dense_backward"):
        # The whole gradient is set to zero; other traffic of nll_loss is negligible.
        return float(
            total_bytes(operator.outputs) + 2 * total_bytes(operator.inputs[:1])
            if name.startswith("emb")
            else total_bytes(operator.outputs)
        )
    if name in ("scatter_add_", "index_add_", "scatter_"):
        return 3.0 * total_bytes(operator.inputs[2:])
    if not operator.outputs:
        # An in-place operator names no result: its input is read and written.
        return 2.0 * operator.moved_bytes
    return float(operator.moved_bytes)
