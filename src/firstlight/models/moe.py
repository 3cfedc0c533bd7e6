"""Mixture of experts, in which a router chooses a few MLPs (experts) for each token.

Names in this code use the word visit for a pair of a token and one of the experts chosen for that
token.

Shape letters:

    N   number of tokens in a batch
    K   number of experts per token
    E   number of experts per layer
    C   hidden size
    F   inner width of an expert
    M   number of visits, N * K
    L   number of layers with experts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.ops import product_dtype


class Router(nn.Linear):
    """A linear layer that computes the router logits, by which the experts of each token are
    chosen. It is a separate class so that routers can be excluded from LoRA adapters and
    quantisation."""


class Experts(nn.Module):
    """All experts of a layer. Each expert is a SwiGLU MLP (Shazeer 2020, arXiv 2002.05202). The
    weights are stored in stacked tensors: `gate_up_proj` of shape [E, 2F, C], in which the rows of
    the gate come first, and `down_proj` of shape [E, C, F].

    Args:
        experts: number of experts, E.
        size: hidden size, C.
        hidden: inner width of an expert, F.
    """

    def __init__(self, experts: int, size: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, hidden))

    def forward(self, x_NC: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [N, C].

        Each token is repeated for each of its experts, and the resulting rows are sorted by expert.
        All rows of an expert then form one block of a grouped matrix product. All operations are
        permutations or sums in a fixed order, so the result is bitwise reproducible, even on a GPU.

        Args:
            x_NC: input of the layer.
            experts_NK: indices of each token's experts, int64 [N, K].
            weights_NK: weights by which the experts' outputs are multiplied, [N, K].
        """
        N, K = experts_NK.shape
        experts_M = experts_NK.flatten()
        # The sort must be stable. Otherwise, the order of equal indices would depend on the device.
        order_M = experts_M.argsort(stable=True)
        ends_E = _visits(experts_NK, len(self.down_proj)).cumsum(0)
        # Each token has one row for each of its experts.
        x_MC = x_NC[:, None].expand(N, K, -1).reshape(N * K, -1)[order_M]
        y_MC = self.visited(x_MC, experts_M[order_M], ends_E)
        # The outputs are gathered with the inverse permutation. A scatter would add them up in an
        # undefined order on GPUs.
        places_NK = order_M.argsort().view(N, K)
        if x_NC.device.type == "cpu" and not _has_kernel(self.down_proj):
            # Outputs are added in the order of the expert indices, as in transformers without a
            # grouped kernel.
            places_NK, order_NK = places_NK.sort(-1)
            weights_NK = weights_NK.gather(1, order_NK)
        y_NKC = y_MC[places_NK]
        return (y_NKC * weights_NK[..., None].to(y_NKC.dtype)).sum(1)

    def visited(self, x_MC: Tensor, experts_M: Tensor, ends_E: Tensor) -> Tensor:
        """Apply the assigned expert to each row, and return the outputs, [M, C].

        Args:
            x_MC: inputs, sorted by expert. Each row belongs to a token and one of the token's
                experts.
            experts_M: index of the expert of each row, int64 [M].
            ends_E: end (exclusive) of each expert's rows in `x_MC`, int [E].
        """
        gate_MF, up_MF = grouped_linear(x_MC, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate_MF) * up_MF, self.down_proj, ends_E)


class RoutedMLP(nn.Module):
    """A router and the experts of one layer. Each family implements `route`, which chooses the
    experts of each token."""

    experts: Experts

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            x_NC: input of the layer.

        Returns:
            The router's logits [N, E]; the weights of each token's experts [N, K]; and the indices
            of these experts, int64 [N, K].
        """
        raise NotImplementedError

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, [B, T, C], and the router's logits, [N, E]."""
        x_NC = x_BTC.flatten(0, 1)
        logits_NE, weights_NK, experts_NK = self.route(x_NC)
        return self.experts(x_NC, experts_NK, weights_NK).view_as(x_BTC), logits_NE


def grouped_linear(x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor) -> Tensor:
    """Compute a grouped matrix product, [M, F], in which the rows of each expert e are multiplied
    by the transpose of `weight_EFC[e]`. The result has the dtype of autocast if autocast is
    enabled, otherwise the dtype of the weight.

    torch's grouped kernel requires rows whose size is a multiple of 16 bytes. On GPUs, it also
    requires bf16 and compute capability 8.0 or higher. If the kernel can't be used, a separate
    product is computed for each expert. The product includes only the rows of the expert or, if
    that is faster, a larger block of rows (see `_takes_blocks`).

    Args:
        x_MC: input rows, sorted by expert.
        weight_EFC: one matrix [F, C] for each expert.
        ends_E: end (exclusive) of each expert's rows in `x_MC`, int [E].
    """
    dtype = product_dtype(weight_EFC)
    # torch's kernel requires int32 for the ends.
    product: Tensor = _grouped_linear(x_MC.to(dtype), weight_EFC.to(dtype), ends_E.int())
    return product


#: Without a grouped kernel, the CPU must read the number of rows of each expert from the GPU. A
#: CUDA graph can't contain such a read, so torch.compile records only the code before and after the
#: operator.
_TAGS = (torch.Tag.cudagraph_unsafe,)


# This is a custom operator, because torch.compile can infer the result shapes of `F.grouped_mm`
# only for bf16.
@torch.library.custom_op("firstlight::grouped_linear", mutates_args=(), tags=_TAGS)
def _grouped_linear(x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor) -> Tensor:
    if _takes_blocks(x_MC, weight_EFC):
        out_MF = x_MC.new_empty(len(x_MC), weight_EFC.shape[1])
        for weight_FC, (rows, block, own) in zip(weight_EFC, _blocks(x_MC, ends_E), strict=True):
            out_MF[rows] = F.linear(x_MC[block], weight_FC)[own]
        return out_MF
    if _has_kernel(weight_EFC):
        return F.grouped_mm(x_MC, weight_EFC.transpose(1, 2), offs=ends_E)
    blocks = zip(_split(x_MC, ends_E), weight_EFC.unbind(0), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in blocks])


@_grouped_linear.register_fake
def _(x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor) -> Tensor:
    return x_MC.new_empty(x_MC.shape[0], weight_EFC.shape[1])


@torch.library.custom_op("firstlight::grouped_linear_backward", mutates_args=(), tags=_TAGS)
def _grouped_linear_backward(
    grad_MF: Tensor, x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    # The gradient from autograd can be an expanded or transposed view, but the kernel needs
    # contiguous rows.
    grad_MF = grad_MF.contiguous()
    if _takes_blocks(x_MC, weight_EFC):
        # The gradients are contiguous for any layout of the weight, as they are with the other
        # kernels. Compiled code relies on the strides of the fake result (see `register_fake`).
        grad_x_MC, grad_EFC = torch.empty_like(x_MC), weight_EFC.new_empty(weight_EFC.shape)
        for expert, (rows, block, own) in enumerate(_blocks(x_MC, ends_E)):
            grad_x_MC[rows] = (grad_MF[block] @ weight_EFC[expert])[own]
            # This product sums over the rows of the block, so the rows of other experts must be
            # zero.
            grad_NF = torch.zeros_like(grad_MF[block])
            grad_NF[own] = grad_MF[rows]
            torch.mm(grad_NF.T, x_MC[block], out=grad_EFC[expert])
        return grad_x_MC, grad_EFC
    if _has_kernel(weight_EFC):
        grad_x_MC = F.grouped_mm(grad_MF, weight_EFC, offs=ends_E)
        return grad_x_MC, F.grouped_mm(grad_MF.transpose(0, 1), x_MC, offs=ends_E)
    blocks = list(
        zip(_split(grad_MF, ends_E), _split(x_MC, ends_E), weight_EFC.unbind(0), strict=True)
    )
    return (
        torch.cat([grad @ weight for grad, _, weight in blocks]),
        torch.stack([grad.T @ rows for grad, rows, _ in blocks]),
    )


@_grouped_linear_backward.register_fake
def _(grad_MF: Tensor, x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_MC), weight_EFC.new_empty(weight_EFC.shape)


def _backward(ctx: Any, grad_MF: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x_MC, grad_weight_EFC = _grouped_linear_backward(grad_MF, *ctx.saved_tensors)
    return grad_x_MC, grad_weight_EFC, None


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    # Only the inputs are saved, because neither gradient depends on the output.
    ctx.save_for_backward(*inputs)


_grouped_linear.register_autograd(_backward, setup_context=_save_inputs)


def _has_kernel(weight_EFC: Tensor) -> bool:
    """Return True if torch's grouped kernel supports these weights on their device."""
    dtype, device = weight_EFC.dtype, weight_EFC.device.type
    aligned = all(size * dtype.itemsize % 16 == 0 for size in weight_EFC.shape[1:])
    if device == "cuda":
        modern = torch.cuda.get_device_capability(weight_EFC.device) >= (8, 0)
        return aligned and modern and dtype == torch.bfloat16
    return aligned and device == "cpu" and dtype in (torch.bfloat16, torch.float32)


def reads_rows_of_experts(model: nn.Module) -> bool:
    """Return True if each forward pass of a model on a CUDA GPU copies the number of rows for each
    expert to the CPU.

    torch's grouped kernel for compute capabilities 9 and 10 reads the row counts on the GPU. On
    other GPUs, torch computes a separate product for each expert, even in its grouped product.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    weights = [weight for one in experts for weight in (one.gate_up_proj, one.down_proj)]
    return not all(
        _has_kernel(weight)
        and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
        and torch.version.hip is None
        for weight in weights
    )


#: Minimum mean number of rows per expert for which `_blocks` is faster. With fewer rows, only a few
#: different row counts occur, and oneDNN can cache its code for all of them (see `_takes_blocks`).
ROWS_OF_BLOCKS = 128


def _takes_blocks(x_MC: Tensor, weight_EFC: Tensor) -> bool:
    """Return True if the products of the experts should be computed in `_blocks`. This is the case
    on CPUs in bf16 if there are many rows per expert.

    oneDNN compiles code for each new number of rows, and caches the code of the last
    `_KEPT_PRODUCTS` products. Routers assign a different number of rows to each expert in every
    step, so the code of most products would have to be compiled again. Blocks avoid this, because
    only a few different block sizes occur.
    """
    on_cpu = weight_EFC.device.type == "cpu" and weight_EFC.dtype == torch.bfloat16
    return on_cpu and len(x_MC) >= ROWS_OF_BLOCKS * len(weight_EFC)


#: Number of distinct matrix products that an expert computes per step. For each of its two weights,
#: these are the product in the forward pass and the products for the gradients of the input and of
#: the weight.
_PRODUCTS = 6
#: Number of products whose code oneDNN caches, and memory in bytes per cached product (0.7 MiB).
#: Both were measured on an AMD EPYC with avx512_bf16, in a run that filled the cache.
_KEPT_PRODUCTS, _PRODUCT_BYTES = 1024, 7 * 2**20 // 10


def kept_code_bytes(rows: int, experts: int) -> int:
    """Estimate how many bytes of code oneDNN caches for the products of experts on a CPU in bf16.

    Args:
        rows: total number of rows of all experts of a layer in a forward pass (tokens times experts
            per token).
        experts: number of experts of a layer.
    """
    # Without blocks, any number of rows can occur, but most experts have less than twice the mean
    # number. With blocks, about 32 different numbers of rows occur.
    sizes = 32 if rows >= ROWS_OF_BLOCKS * experts else -(-2 * rows // experts)
    return min(_PRODUCTS * sizes, _KEPT_PRODUCTS) * _PRODUCT_BYTES


def _blocks(x_MC: Tensor, ends_E: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield one block of rows for each expert. All blocks together have only a few different sizes.

    A block contains all rows of its expert. It is extended to one of these sizes by rows of
    neighbouring experts.

    Yields:
        The slice of the expert's rows in `x_MC`, the slice of the block's rows in `x_MC`, and the
        slice of the expert's rows in the block.
    """
    first = 0
    for last in ends_E.tolist():
        count = last - first
        # The size is rounded up to a multiple of `step`. Above 128 rows, this adds at most 1/16 and
        # results in about 16 different sizes between two powers of two.
        step = max(8, 1 << max(count.bit_length() - 5, 0))
        size = min(-(-count // step) * step, len(x_MC))
        begin = min(first, len(x_MC) - size)
        own = slice(first - begin, last - begin)
        yield slice(first, last), slice(begin, begin + size), own
        first = last


def _split(rows: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Split rows that are sorted by expert. Return one view for each expert."""
    # `tolist` waits for the device, so this is used only if no grouped kernel is available.
    return torch.split(rows, ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


class RouterStatistics:
    """Statistics of a model's routers, accumulated over forward passes.

    Attributes:
        loss_sum: load-balancing loss times the number of valid labels, summed over the forward
            passes, []; None before the first pass.
        visits_LE: number of tokens routed to each expert of each layer, int64 [L, E]; None before
            the first pass.
    """

    def __init__(self) -> None:
        self.loss_sum: Tensor | None = None
        self.visits_LE: Tensor | None = None

    def add(self, loss_sum: Tensor, visits_LE: Tensor) -> None:
        """Add the results of a forward pass: the load-balancing loss times the number of valid
        labels, [], and the number of tokens routed to each expert, int64 [L, E]."""
        # The sums stay on the device, because reading them would mean waiting for the GPU in each
        # micro-batch.
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        self.visits_LE = visits_LE if self.visits_LE is None else self.visits_LE + visits_LE

    def take(self, tokens: int) -> dict[str, float]:
        """Return metrics computed over all forward passes since the last call, and clear the
        statistics.

        The load of an expert is its number of tokens divided by the mean over all experts of its
        layer. With perfect balance, every expert has a load of 1.

        Args:
            tokens: number of valid labels in these forward passes.

        Returns:
            An empty dictionary if there was no forward pass, otherwise a dictionary with these
            keys:
            - `moe/router_loss`: mean load-balancing loss,
            - `moe/max_load`, `moe/min_load`: highest and lowest load of an expert, over all layers,
            - `moe/unused_experts`: number of experts that received no tokens, over all layers.
        """
        if self.loss_sum is None or self.visits_LE is None:
            return {}
        # fp32 can represent all integers only up to 16 million (2^24), and a step can route more
        # tokens.
        visits_LE = self.visits_LE.double()
        load_LE = visits_LE / visits_LE.mean(-1, keepdim=True)
        metrics = {
            "moe/router_loss": float(self.loss_sum) / tokens,
            "moe/max_load": float(load_LE.max()),
            "moe/min_load": float(load_LE.min()),
            "moe/unused_experts": int((visits_LE == 0).sum()),
        }
        self.loss_sum = self.visits_LE = None
        return metrics


def load_balancing_loss(
    logits_LNE: list[Tensor], num_experts_per_tok: int
) -> tuple[Tensor, Tensor]:
    """Compute the auxiliary load-balancing loss of the routers (Fedus et al. 2021, arXiv
    2101.03961, equation 4). As in transformers, means are taken over the tokens of all layers
    combined.

    Each expert contributes the number of tokens routed to it, divided by N, times its mean
    probability. The loss is E times the sum of these products. It equals K if all experts receive
    the same number of tokens, and it is usually greater otherwise.

    Args:
        logits_LNE: logits of the router [N, E] for each layer.
        num_experts_per_tok: number of experts per token, K.

    Returns:
        The loss, fp32 [], and the number of tokens routed to each expert, int64 [L, E].
    """
    probabilities_LNE = [logits.float().softmax(-1) for logits in logits_LNE]
    # The choice of experts is not differentiable. Gradients reach the router through the
    # probabilities only.
    chosen_LNK = [one.detach().topk(num_experts_per_tok).indices for one in probabilities_LNE]
    return balancing_loss(probabilities_LNE, chosen_LNK)


def balancing_loss(scores_LNE: list[Tensor], chosen_LNK: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the load-balancing loss [] and the number of tokens routed to each expert, int64 [L,
    E], for the given scores and chosen experts. See `load_balancing_loss` for the definition of the
    loss.

    Args:
        scores_LNE: scores [N, E] for each layer, which sum to 1 for each token.
        chosen_LNK: indices of each token's experts, int64 [N, K], for each layer.
    """
    probabilities_LNE = torch.stack(scores_LNE)
    experts = probabilities_LNE.shape[-1]
    visits_LE = torch.stack([_visits(chosen_NK, experts) for chosen_NK in chosen_LNK])
    tokens = probabilities_LNE.shape[0] * probabilities_LNE.shape[1]
    share_E = visits_LE.sum(0).float() / tokens
    return experts * (share_E * probabilities_LNE.mean((0, 1))).sum(), visits_LE


def _visits(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Count the tokens routed to each expert, int64 [E]."""
    # `bincount` is not used, because it is not deterministic on a GPU. In addition, the host would
    # have to wait until the size of the result is known.
    every_E = torch.arange(num_experts, device=experts_NK.device)
    return (experts_NK.flatten()[:, None] == every_E).sum(0)
