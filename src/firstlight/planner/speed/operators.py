"""Kinds of operators in the speed model (matrix products, attention, and streams, which are bound
by memory bandwidth), with the sizes and bytes that their speed depends on.

A trace knows shapes and dtypes, not strides. Whether a factor of a product lies transposed in
memory, which costs up to half of its speed on CPUs, is derived from the way autograd
differentiates: see `transposed_factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from firstlight.planner.memory.kernels import (
    LISTS,
    Layout,
    Operator,
    OperatorCount,
    bytes_of,
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
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addbmm", "_scaled_mm", "_int_mm"),
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
        transposed: True for each of the two factors that lies transposed in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    added: bool = False
    transposed: tuple[bool, bool] = (False, False)

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def layout(self) -> str:
        """The factors' layouts in BLAS' letters: "n" for as written, "t" for transposed."""
        return "".join("t" if it else "n" for it in self.transposed)


def product_of(operator: Operator, transposed: tuple[bool, bool] = (False, False)) -> MatrixProduct:
    """The matrix product of an operator of the kind "matrix_products". The products of all experts
    count as one product of all rows by one weight; their backward pass as two of them.

    Args:
        operator: the operator.
        transposed: see `transposed_factors`.
    """
    name = operator.base_name
    if is_grouped(operator):
        count = 2 if name.endswith("backward") else 1
        ((rows, _), dtype), (_, n, k) = operator.inputs[0], operator.inputs[count][0]
        return MatrixProduct(count, rows, n, k, dtype, transposed=transposed)
    factors = [layout for layout in operator.inputs if len(layout[0]) >= 2]
    added = name in ("addmm", "baddbmm", "addbmm")
    if added:
        factors = [layout for layout in operator.inputs[1:] if len(layout[0]) >= 2]
    (first, dtype), (second, _) = factors[:2]
    n, k = (second[-2], second[-1]) if name == "linear" else (second[-1], second[-2])
    if len(second) > 2:
        return MatrixProduct(math.prod(first[:-2]), first[-2], n, k, dtype, added, transposed)
    return MatrixProduct(1, math.prod(first[:-1]), n, k, dtype, added, transposed)


def transposed_factors(counts: Iterable[OperatorCount]) -> dict[Operator, tuple[bool, bool]]:
    """For each matrix product, True for each factor that is transposed in memory.

    A layer with T tokens and weight W computes x @ W.T if W is stored [out, in], and x @ W if it is
    stored [in, out]. Autograd gives the weight's gradient the layout of the weight (torch's
    mm_mat2_backward): g.T @ x or x.T @ g. So if there is a product [in, T] x [T, out] besides the
    forward product [T, in] x [in, out], W is stored [in, out]; otherwise [out, in]. For a square
    weight both have the same shape: it is taken to be stored as the others. Of batched products,
    those with n > k (queries by keys) have a transposed second factor.
    """
    products = {
        entry.operator: product_of(entry.operator)
        for entry in counts
        if kind_of(entry.operator) == "matrix_products"
    }
    made = {(it.m, it.n, it.k) for one, it in products.items() if one.phase != "optimizer"}
    weights = {  # sizes of the weights that are stored [in, out]
        (it.k, it.n)
        for one, it in products.items()
        if one.phase == "forward" and it.k != it.n and (it.k, it.n, it.m) in made
    }
    squares = {(it.k, it.k) for _, it in products.items()} if weights else set()
    stored_in_out = weights | squares
    forward = {
        (it.m, it.k, it.n) for one, it in products.items() if one.phase in ("forward", "loss")
    }
    result = {}
    for one, it in products.items():
        if is_grouped(one):
            result[one] = (False, False)
        elif it.batch > 1:
            result[one] = (False, it.n > it.k)
        elif one.phase == "optimizer":
            result[one] = (False, False)
        elif {(it.k, it.m, it.n), (it.k, it.n, it.m)} & forward and one.phase != "forward":
            result[one] = (True, False)
        elif one.phase == "forward" or ((it.m, it.k, it.n) in forward and one.phase == "loss"):
            result[one] = (False, (it.k, it.n) not in stored_in_out)
        else:
            result[one] = (False, (it.n, it.k) in stored_in_out)
        if "transposed" in one.options:  # the tracer has seen the strides of the first factor
            result[one] = (True, result[one][1])
    return result


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


def smaller(operator: Operator) -> Operator | None:
    """An operator of the same kind and about half the work, which runs at the same rate; None if
    there is no such operator.

    For a product the largest size is halved, for attention the batch, for other operators the first
    dimension of the tensors that have it; from lists of tensors, the largest tensor is left out.
    """
    if not operator.outputs:
        return _shorter_lists(operator)
    if kind_of(operator) == "matrix_products":
        return _halved(operator, _largest_size(operator))
    if is_attention(operator):
        return _half_the_batch(operator)
    shapes = [shape for shape, _ in (*operator.inputs, *operator.outputs) if len(shape) > 1]
    if not shapes or "embedding" in operator.base_name:
        return None
    # The data's first dimension; a norm's gradient, a mask or a bias may not have it.
    return _halved(operator, max(shapes, key=math.prod)[0])


def _largest_size(operator: Operator) -> int:
    product = product_of(operator)
    return max(product.m, product.n, product.k)


def _halved(operator: Operator, size: int) -> Operator | None:
    if size < 2:
        return None

    def half(layout: Layout) -> Layout:
        shape, dtype = layout
        return tuple(-(-n // 2) if n == size else n for n in shape), dtype

    return _resized(operator, half)


def _half_the_batch(operator: Operator) -> Operator | None:
    batch = operator.inputs[0][0][0]
    if batch < 2:
        return None

    def half(layout: Layout) -> Layout:
        shape, dtype = layout
        # A mask of two dimensions is shared by all sequences.
        has_it = len(shape) > 2 and shape[0] == batch
        return ((batch // 2, *shape[1:]) if has_it else shape), dtype

    return _resized(operator, half)


def _resized(operator: Operator, resize: Callable[[Layout], Layout]) -> Operator:
    inputs, outputs = (tuple(map(resize, group)) for group in (operator.inputs, operator.outputs))
    return replace(
        operator, inputs=inputs, outputs=outputs, moved_bytes=total_bytes(inputs + outputs)
    )


def _shorter_lists(operator: Operator) -> Operator | None:
    lists = LISTS.get(operator.base_name)
    if lists is None or len(operator.inputs) <= lists:
        return None
    count = len(operator.inputs) // lists
    largest = max(range(count), key=lambda i: bytes_of(operator.inputs[i]))
    kept = tuple(
        layout for i, layout in enumerate(operator.inputs[: lists * count]) if i % count != largest
    )
    return replace(operator, inputs=kept, moved_bytes=total_bytes(kept))
