"""Parts of a GPT-2 in elementary operations, as in textbooks, instead of torch's classes.

Only `bench methods` trains with them, in the first rows of its ladder:

    mask    each layer stores a causal mask of the whole context in fp32, and slices and converts it
            for each batch, instead of making a mask for the batch
    layers  LayerNorm and GELU in elementary operations, instead of torch.nn.LayerNorm and gelu
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

#: Names of the parts.
PARTS = ("mask", "layers")


class WrittenOutNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) in elementary operations, [..., C] to [..., C]."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.eps)) + self.bias


class WrittenOutMLP(GPT2MLP):
    """GPT-2's MLP, [B, T, C] to [B, T, C], with the tanh form of GELU in elementary operations."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = self.c_fc(x_BTC)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return self.dropout(self.c_proj(0.5 * x * (1 + torch.tanh(inner))))  # type: ignore[no-any-return]


def _attend_with(
    stored: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions
) -> Tensor:
    """`plain_attention` with a stored mask, fp32 [context, context], 1 where a query [row] must not
    attend to a key [column]; a mask in `options` replaces it."""
    if options.mask is None:
        mask = ~stored.bool()[: q_BHTD.shape[-2], : k_BKSD.shape[-2]]
        options = options._replace(mask=mask)
    return plain_attention(q_BHTD, k_BKSD, v_BKSD, options)


def write_out(model: Model, parts: Collection[str], context: int) -> None:
    """Replace parts of a GPT-2 by those of this module; the weights stay the same, and the results
    up to rounding.

    Args:
        model: the model, changed in place.
        parts: names of `PARTS`.
        context: rows and columns of the stored masks.
    """
    for module in list(model.modules()):
        if isinstance(module, GPT2Attention) and "mask" in parts:
            stored = torch.triu(torch.ones(context, context, device=module.c_attn.weight.device), 1)
            module.attend = functools.partial(_attend_with, stored)
        elif type(module) is nn.LayerNorm and "layers" in parts:
            module.__class__ = WrittenOutNorm
        elif (
            type(module) is GPT2MLP
            and "layers" in parts
            and module.activation_function == "gelu_new"
        ):
            module.__class__ = WrittenOutMLP
