"""Linear layers with 4-bit weights in the NF4 format (Dettmers et al. 2023, arXiv 2305.14314,
section 3).

Weights are divided into blocks of 64. A block is stored as a scale, which is the largest absolute
value in the block, and a 4-bit code for each weight. The code selects the nearest of 16 quantiles
of a normal distribution. The scales are themselves quantised to 8 bits. This takes 0.516 bytes per
weight. Quantisation and dequantisation are done by bitsandbytes, on CPUs and CUDA GPUs.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.models.gpt2 import Conv1D
from firstlight.models.ops import product_dtype

#: Number of weights that share a scale, and number of scales that share a second-level scale. These
#: are the defaults of bitsandbytes.
BLOCK_SIZE = 64
_NESTED_BLOCK_SIZE = 256
#: Number of entries in the table that maps the 8-bit code of a scale to its value.
_TABLE_SIZE = 256
#: Dtypes to which bitsandbytes can dequantise.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_nf4(device: torch.device) -> None:
    """Check that kernels for 4-bit weights are available on a device.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
        ConfigError: bitsandbytes does not support the device.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"lora.quantize nf4 requires a CPU or a CUDA GPU, but the device is {device}: set "
            "lora.quantize to none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError("bitsandbytes", "8bit", "lora.quantize nf4")


class NF4Linear(nn.Module):
    """A frozen linear layer with a 4-bit weight.

    Args:
        layer: layer to quantise. Its bias is not quantised.

    Attributes:
        packed: 4-bit codes of the weight [out, in] in row-major order, two codes per uint8.
        scales: 8-bit code of the scale of each block, uint8 [blocks].
        statistics: concatenation of three fp32 tensors: the table that maps the codes of the scales
            to values, [256]; the mean of the scales, [1]; and the second-level scales. They are
            stored as bytes (uint8), so that `LanguageModel.cast` does not round them.
        is_conv1d: True if the layer was a `Conv1D`, which stores weights as [in, out].
        dtype: dtype of the original weight.
    """

    packed: Tensor
    scales: Tensor
    statistics: Tensor

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        self.is_conv1d = isinstance(layer, Conv1D)
        weight = (layer.weight.T if self.is_conv1d else layer.weight).detach()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.bias = weight.dtype, layer.bias
        packed, state = quantize_4bit(
            weight.float().contiguous(),
            blocksize=BLOCK_SIZE,
            compress_statistics=True,
            quant_type="nf4",
        )
        statistics = torch.cat([state.state2.code, state.offset.view(1), state.state2.absmax])
        self.register_buffer("packed", packed)
        self.register_buffer("scales", state.absmax)
        self.register_buffer("statistics", statistics.float().view(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to inputs of shape [..., in]. Outputs have shape [..., out]."""
        x = x.to(product_dtype(x))
        shape = (self.out_features, self.in_features)
        y: Tensor = _nf4_linear(x, self.packed, self.scales, self.statistics, *shape)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [out, in] in `dtype`."""
        shape = (self.out_features, self.in_features)
        return dequantized(self.packed, self.scales, self.statistics, shape, dtype)


def dequantized(
    packed: Tensor, scales: Tensor, statistics: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight of an `NF4Linear`, dequantised to `dtype`.

    Args:
        packed, scales, statistics: buffers of the `NF4Linear`.
        shape: (out, in).
        dtype: dtype of the result.

    Returns:
        Weight [out, in].
    """
    numbers = statistics.view(torch.float32)
    table = numbers[:_TABLE_SIZE]
    mean = numbers[_TABLE_SIZE]
    nested = numbers[_TABLE_SIZE + 1 :]
    largest = torch.ops.bitsandbytes.dequantize_blockwise(
        scales, nested, table, _NESTED_BLOCK_SIZE, torch.float32
    )
    # Dequantise the weight as a single row, because the CPU kernel uses the wrong scales if the row
    # length is not a multiple of the block size.
    row = [shape[0] * shape[1]]
    made = dtype if dtype in _DTYPES else torch.float32
    flat: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed, largest + mean, BLOCK_SIZE, "nf4", row, made
    )
    return flat.view(shape).to(dtype)


# This is a custom operator, so that the backward pass can dequantise the weight again. With plain
# operators, autograd would keep the dequantised weight until the backward pass, and no memory would
# be saved. In addition, torch.compile does not trace into a custom operator.
@torch.library.custom_op("firstlight::nf4_linear", mutates_args=())
def _nf4_linear(
    x: Tensor, packed: Tensor, scales: Tensor, statistics: Tensor, rows: int, columns: int
) -> Tensor:
    return F.linear(x, dequantized(packed, scales, statistics, (rows, columns), x.dtype))


@_nf4_linear.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Tensor, statistics: Tensor, rows: int, columns: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.custom_op("firstlight::nf4_linear_backward", mutates_args=())
def _nf4_linear_backward(
    grad: Tensor, packed: Tensor, scales: Tensor, statistics: Tensor, rows: int, columns: int
) -> Tensor:
    return grad @ dequantized(packed, scales, statistics, (rows, columns), grad.dtype)


@_nf4_linear_backward.register_fake
def _(
    grad: Tensor, packed: Tensor, scales: Tensor, statistics: Tensor, rows: int, columns: int
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_bits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.shape = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    packed, scales, statistics = ctx.saved_tensors
    grad_x = _nf4_linear_backward(grad, packed, scales, statistics, *ctx.shape)
    return grad_x, None, None, None, None, None


_nf4_linear.register_autograd(_backward, setup_context=_save_bits)
