"""Weights of 8 bits for generation: a token's time is that of reading the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.generation.few_rows import few_rows_linear, takes_few_rows
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D

#: From so many rows on, a CPU is faster with the weights made bf16 first.
_FEW_ROWS = 16
#: torch's kernel reads past the end of rows of other lengths: those are filled up with zeros.
_ROW_MULTIPLE = 32


class Int8Linear(nn.Module):
    """A linear layer whose weights are integers from -127 to 127, with a scale for each output:
    half the bytes of bf16. What is computed with them is bf16.

    Source: pytorch-labs/gpt-fast `quantize.py` (weight-only int8); rounding to nearest, the
    largest weight of an output being 127.

    Args:
        weight: [out, in].
        bias: [out].

    Attributes:
        weight_int8: [out, in], `in` filled up to a multiple of 32.
        scale: [out], what 1 stands for.
    """

    weight_int8: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight_int8, scale = rounded(weight)
        self._filling = -weight.shape[1] % _ROW_MULTIPLE
        self.register_buffer("weight_int8", F.pad(weight_int8, (0, self._filling)))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.reshape(-1, x.shape[-1]), (0, self._filling))
        if takes_few_rows(rows, self.weight_int8):
            y = few_rows_linear(rows, self.weight_int8, self.scale, self.bias)
            return y.view(*x.shape[:-1], -1)
        if x.device.type == "cpu" and rows.shape[0] <= _FEW_ROWS:
            y = torch._weight_int8pack_mm(rows, self.weight_int8, self.scale)
        else:
            y = F.linear(rows, self.weight_int8.to(x.dtype)) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [out, in] as int8 of the same shape, and their scale [out] in bf16."""
    scale = weight.float().abs().amax(1).div(127).clamp(min=torch.finfo(torch.bfloat16).tiny)
    scale = scale.to(torch.bfloat16)
    integers = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8).contiguous(), scale


@torch.no_grad()
def quantize_int8(model: Model) -> None:
    """Give a model's linear layers, its head with them, weights of 8 bits, in place.

    What is looked up (embeddings), norms, routers and stacked experts stay as they are. The model
    can't be trained or saved any more.

    Args:
        model: in bf16.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            weight = module.weight.t()
        elif isinstance(module, nn.Linear) and not name.endswith(".gate"):
            weight = module.weight
        else:
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Int8Linear(weight, module.bias))
