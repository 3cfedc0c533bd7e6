"""Parts of a GPT-2 written out as in textbooks, in place of torch's: the start of the ladder of
methods. Only benchmarks train with them.

    mask    each layer keeps a causal mask of the whole context, in fp32, and converts and cuts it
            for each batch, in place of a mask that is made for the batch
    layers  LayerNorm and GELU of single operations, in place of torch.nn.LayerNorm and gelu
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from firstlight.models import Model
from firstlight.models.gpt2 import GPT2MLP, GPT2Attention
from firstlight.models.ops import AttentionOptions, plain_attention

#: Parts that can be written out.
PARTS = ("mask", "layers")


class WrittenOutNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) of single operations, [..., C] to [..., C]."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.eps)) + self.bias


class WrittenOutMLP(GPT2MLP):
    """GPT-2's MLP with the tanh form of GELU of single operations."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = self.c_fc(x_BTC)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return self.dropout(self.c_proj(0.5 * x * (1 + torch.tanh(inner))))  # type: ignore[no-any-return]


def _attend_with(
    stored: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions
) -> Tensor:
    """`plain_attention` with a mask [context, context] that is 1 where a query may not look."""
    if options.mask is None:
        mask = ~stored.bool()[: q_BHTD.shape[-2], : k_BKSD.shape[-2]]
        options = options._replace(mask=mask)
    return plain_attention(q_BHTD, k_BKSD, v_BKSD, options)


def write_out(model: Model, parts: Collection[str], context: int) -> None:
    """Replace parts of a GPT-2 by written out ones; weights and results stay the same.

    Args:
        model: the model.
        parts: names of `PARTS`.
        context: rows and columns of the stored masks.
    """
    for module in list(model.modules()):
        if isinstance(module, GPT2Attention) and "mask" in parts:
            stored = torch.triu(torch.ones(context, context, device=module.c_attn.weight.device), 1)
            module.attend = functools.partial(_attend_with, stored)
        elif type(module) is nn.LayerNorm and "layers" in parts:
            module.__class__ = WrittenOutNorm
        elif type(module) is GPT2MLP and "layers" in parts and module.approximate == "tanh":
            module.__class__ = WrittenOutMLP
