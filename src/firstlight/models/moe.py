"""Mixture of experts: a router that picks a few MLPs for each token.

Shape letters: N tokens of a batch, K experts that each token visits, E experts, C hidden size,
F width inside an expert, M = N * K visits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.llama_config import MoEConfig
from firstlight.models.ops import product_dtype


class Router(nn.Linear):
    """The matrix whose outputs choose each token's experts: neither adapted nor quantised."""


class Experts(nn.Module):
    """All experts' weights of a layer, stacked: [E, 2F, C] (gate, then up) and [E, C, F]; each
    expert is a SwiGLU (Shazeer 2020).

    Args:
        experts: E.
        size: C.
        hidden: F.
    """

    def __init__(self, experts: int, size: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, hidden))

    def forward(self, x_NC: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Each token's weighted sum over the experts it visits, [N, C].

        Args:
            x_NC: input of the layer.
            experts_NK: numbers of each token's experts, int64.
            weights_NK: their weights in the sum.

        Visits are sorted by expert, so that each expert's are one block of a grouped matrix
        product. Everything is a permutation or a sum in fixed order: the same bits every time,
        also on a GPU.
        """
        N, K = experts_NK.shape
        experts_M = experts_NK.flatten()
        # Stable, as devices break ties in different ways otherwise.
        order_M = experts_M.argsort(stable=True)
        ends_E = _visits(experts_NK, len(self.down_proj)).cumsum(0)
        # A token occurs here once for each of its experts.
        x_MC = x_NC[:, None].expand(N, K, -1).reshape(N * K, -1)[order_M]
        y_MC = self.visited(x_MC, experts_M[order_M], ends_E)
        # The inverse permutation, and not a scatter, which GPUs add up in no fixed order.
        places_NK = order_M.argsort().view(N, K)
        if x_NC.device.type == "cpu" and not _has_kernel(self.down_proj):
            # By expert, as transformers adds up where there is no grouped kernel.
            places_NK, order_NK = places_NK.sort(-1)
            weights_NK = weights_NK.gather(1, order_NK)
        y_NKC = y_MC[places_NK]
        return (y_NKC * weights_NK[..., None].to(y_NKC.dtype)).sum(1)

    def visited(self, x_MC: Tensor, experts_M: Tensor, ends_E: Tensor) -> Tensor:
        """Each row's result of its expert, [M, C].

        Args:
            x_MC: rows, those of expert 0 first.
            experts_M: each row's expert, int64.
            ends_E: end of each expert's rows, int [E].
        """
        gate_MF, up_MF = grouped_linear(x_MC, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate_MF) * up_MF, self.down_proj, ends_E)


class RoutedMLP(nn.Module):
    """A router and the experts of one layer. A family says in `route` how tokens choose."""

    experts: Experts

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The router's logits [N, E], and the weights and the numbers of each token's experts, both
        [N, K]."""
        raise NotImplementedError

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, [B, T, C], and the router's logits, [N, E]."""
        x_NC = x_BTC.flatten(0, 1)
        logits_NE, weights_NK, experts_NK = self.route(x_NC)
        return self.experts(x_NC, experts_NK, weights_NK).view_as(x_BTC), logits_NE


class SparseMLP(RoutedMLP):
    """The experts of Mixtral and Qwen3-MoE, chosen by the greatest probabilities of a softmax over
    all experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts_per_tok, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = Experts(*sizes)

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RoutedMLP.route`."""
        logits_NE = self.gate(x_NC)
        # In fp32, as in transformers: in bf16 experts of close logits would change places.
        weights_NK, experts_NK = logits_NE.float().softmax(-1).topk(self.num_experts_per_tok)
        # The chosen experts' probabilities sum to less than 1, the less the more experts there are.
        if self.normalise:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return logits_NE, weights_NK, experts_NK


def grouped_linear(x_MC: Tensor, weight_EFC: Tensor, ends_E: Tensor) -> Tensor:
    """Row block e of `x` times the transpose of `weight[e]`, [M, F].

    Args:
        x_MC: rows [M, C], those of expert 0 first.
        weight_EFC: matrices [E, F, C], one an expert.
        ends_E: end of each expert's rows, int [E].

    torch's grouped kernel needs rows of a multiple of 16 bytes, and on GPUs bf16. If it can't be
    used, there is one product for each expert over its rows, or over blocks of them where these are
    faster.
    """
    dtype = product_dtype(weight_EFC)
    # torch's kernel takes ends as int32 only.
    product: Tensor = _grouped_linear(x_MC.to(dtype), weight_EFC.to(dtype), ends_E.int())
    return product


#: The CPU reads the rows of each expert where there is no grouped kernel, which CUDA graphs can't
#: record: torch.compile records the code before and after.
_TAGS = (torch.Tag.cudagraph_unsafe,)


# An operator of its own, since torch.compile knows the shapes of torch's for bf16 only.
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
    # Autograd may give an expanded or transposed view, and the kernel needs rows in order.
    grad_MF = grad_MF.contiguous()
    if _takes_blocks(x_MC, weight_EFC):
        # Contiguous, as from other kernels, for any layout of the weight: compiled code needs it.
        grad_x_MC, grad_EFC = torch.empty_like(x_MC), weight_EFC.new_empty(weight_EFC.shape)
        for expert, (rows, block, own) in enumerate(_blocks(x_MC, ends_E)):
            grad_x_MC[rows] = (grad_MF[block] @ weight_EFC[expert])[own]
            # The product sums over rows: the block's rows of other experts must count as zero.
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
    # The inputs alone: neither gradient needs the output.
    ctx.save_for_backward(*inputs)


_grouped_linear.register_autograd(_backward, setup_context=_save_inputs)


def _has_kernel(weight_EFC: Tensor) -> bool:
    dtype, device = weight_EFC.dtype, weight_EFC.device.type
    aligned = all(size * dtype.itemsize % 16 == 0 for size in weight_EFC.shape[1:])
    if device == "cuda":
        modern = torch.cuda.get_device_capability(weight_EFC.device) >= (8, 0)
        return aligned and modern and dtype == torch.bfloat16
    return aligned and device == "cpu" and dtype in (torch.bfloat16, torch.float32)


#: Rows an expert from which on `_blocks` are faster: fewer have few different numbers.
ROWS_OF_BLOCKS = 128


def _takes_blocks(x_MC: Tensor, weight_EFC: Tensor) -> bool:
    """On CPUs in bf16, oneDNN compiles code for each number of rows that is new, and keeps that of
    the last thousand; and routers send another number in each step."""
    on_cpu = weight_EFC.device.type == "cpu" and weight_EFC.dtype == torch.bfloat16
    return on_cpu and len(x_MC) >= ROWS_OF_BLOCKS * len(weight_EFC)


#: Products of an expert's two weights in a step: forward, and for both gradients.
_PRODUCTS = 6
#: Products that oneDNN keeps, and bytes of each with its code: measured on an AMD EPYC with
#: avx512_bf16, when a run kept as many as it can.
_KEPT_PRODUCTS, _PRODUCT_BYTES = 1024, 7 * 2**20 // 10


def kept_code_bytes(rows: int, experts: int) -> int:
    """About the bytes of code that oneDNN keeps for the products of experts on a CPU in bf16.

    Args:
        rows: rows of all experts of a layer in a forward pass, visits of its tokens.
        experts: experts of a layer.
    """
    # Routers give most experts less than twice their share. Blocks have few numbers of rows.
    sizes = 32 if rows >= ROWS_OF_BLOCKS * experts else -(-2 * rows // experts)
    return min(_PRODUCTS * sizes, _KEPT_PRODUCTS) * _PRODUCT_BYTES


def _blocks(x_MC: Tensor, ends_E: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Each expert's rows; the rows that are multiplied in their place, of a number that comes again
    and again; and where in those they are."""
    first = 0
    for last in ends_E.tolist():
        count = last - first
        # At most a sixteenth more, from 128 on; and some sixteen numbers of each magnitude.
        step = max(8, 1 << max(count.bit_length() - 5, 0))
        size = min(-(-count // step) * step, len(x_MC))
        begin = min(first, len(x_MC) - size)
        own = slice(first - begin, last - begin)
        yield slice(first, last), slice(begin, begin + size), own
        first = last


def _split(rows: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Each expert's rows."""
    # Reading the ends waits for the device: only where there is no grouped kernel.
    return torch.split(rows, ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


class RouterStatistics:
    """Statistics of a model's routers over some forward passes.

    Attributes:
        loss_sum: load-balancing loss times valid labels, summed over the passes.
        visits_LE: number of visits to each expert of each layer, int64 [L, E].
    """

    def __init__(self) -> None:
        self.loss_sum: Tensor | None = None
        self.visits_LE: Tensor | None = None

    def add(self, loss_sum: Tensor, visits_LE: Tensor) -> None:
        """Count a forward pass: its loss [] times the valid labels, and visits int64 [L, E]."""
        # Kept on the device: reading them would wait for the GPU in each micro-batch.
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        self.visits_LE = visits_LE if self.visits_LE is None else self.visits_LE + visits_LE

    def take(self, tokens: int) -> dict[str, float]:
        """The metrics of the passes so far, over `tokens` valid labels; then clear the statistics.

        `moe/router_loss` is the mean load-balancing loss. An expert's load is its visits over
        the mean of its layer's experts: `moe/max_load` and `moe/min_load` are the extremes over
        all layers (1 is perfect balance), `moe/unused_experts` is the number of experts without
        visits.
        """
        if self.loss_sum is None or self.visits_LE is None:
            return {}
        # fp32 counts exactly up to 16 million only, which a step may have.
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
    """The router's auxiliary loss [] over all layers, and each expert's visits by layer, [L, E].

    E times the sum over experts of (visits a token) x (mean probability): K when all experts
    are visited alike, higher otherwise (Fedus et al. 2021, eq. 4, as transformers computes it:
    means over the tokens of all layers together).

    Args:
        logits_LNE: the router's logits [N, E] of each layer.
        num_experts_per_tok: K.
    """
    probabilities_LNE = [logits.float().softmax(-1) for logits in logits_LNE]
    # A choice has no gradient: it reaches the router through the probabilities alone.
    chosen_LNK = [one.detach().topk(num_experts_per_tok).indices for one in probabilities_LNE]
    return balancing_loss(probabilities_LNE, chosen_LNK)


def balancing_loss(scores_LNE: list[Tensor], chosen_LNK: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss [] and the visits [L, E] of `load_balancing_loss`.

    Args:
        scores_LNE: the experts' scores for each token, which sum to 1, [N, E] of each layer.
        chosen_LNK: the experts that each token visits, int64 [N, K] of each layer.
    """
    probabilities_LNE = torch.stack(scores_LNE)
    experts = probabilities_LNE.shape[-1]
    visits_LE = torch.stack([_visits(chosen_NK, experts) for chosen_NK in chosen_LNK])
    tokens = probabilities_LNE.shape[0] * probabilities_LNE.shape[1]
    share_E = visits_LE.sum(0).float() / tokens
    return experts * (share_E * probabilities_LNE.mean((0, 1))).sum(), visits_LE


def _visits(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Number of tokens routed to each expert, int64 [E]."""
    # Not `bincount`, which on a GPU adds in no fixed order and waits for its size.
    every_E = torch.arange(num_experts, device=experts_NK.device)
    return (experts_NK.flatten()[:, None] == every_E).sum(0)
