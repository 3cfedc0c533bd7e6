"""Sizes of a model that matrix units read slowly, and the gain of aligned sizes.

Matrix units read 16 bytes at a time: 8 numbers of 16 bits. Products with a dimension that is not a
multiple of 8 use slower kernels (NVIDIA, "Matrix Multiplication Background User's Guide").
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

import torch

from firstlight.hardware.device import synchronize
from firstlight.methods.precision import dtype_of, packet_note
from firstlight.models.accounting import matrix_shapes
from firstlight.planner.speed.gpu import DEFAULT_SHARES, PACKET_BYTES
from firstlight.recipe import ResolvedRecipe

#: Numbers of 16 bits that matrix units read at a time, and the multiple that a vocabulary is padded
#: to.
_PACKET, _VOCABULARY = PACKET_BYTES // 2, 64

#: Speed-up of products by aligned sizes that is named for a GPU that is not at hand.
_GAIN_ON_GPUS = 1 / DEFAULT_SHARES.misaligned.expected

#: Multiplications of a measured product [tokens, inner] x [inner, size].
_PRODUCT_SIZE = 2e8
#: Bounds of a measured product's tokens, and its largest inner size.
_LEAST_TOKENS = 16
_MOST_TOKENS = 256
_MOST_INNER = 512
#: Counted measurements of each product.
_ROUNDS = 5

#: Smallest speed-up of a step that is worth a warning.
_LEAST_GAIN = 1.01


def alignment_warnings(
    recipe: ResolvedRecipe, here: torch.device | None, capability: tuple[int, int] | None = None
) -> Iterator[str]:
    """A warning for each misaligned size: its share of the work, and the gain of an aligned one.

    Args:
        recipe: recipe with its model.
        here: device of this machine that the gain is measured on; None takes the upper bound for
            GPUs.
        capability: CUDA's compute capability of the GPU; None for another device.
    """
    note = packet_note(recipe.model, recipe.efficiency, capability, above=_PACKET)
    if note is not None:
        yield note
    dtype = dtype_of(recipe.efficiency.precision)
    if here is None and dtype == torch.float32 and recipe.efficiency.products != "tf32":
        return  # not computed by matrix units
    shapes = matrix_shapes(recipe.model, recipe.efficiency.vocab_multiple)
    total = sum(rows * columns for rows, columns in shapes)
    for size in sorted({size for shape in shapes for size in shape if size % _PACKET}):
        own = [shape for shape in shapes if size in shape]
        share = sum(rows * columns for rows, columns in own) / total
        key = next((k for k, v in recipe.model if v == size and k.endswith("size")), None)
        if key is None and recipe.model.hidden_size % _PACKET:
            continue  # follows from the hidden size
        multiple = _PACKET
        if key == "vocab_size":
            multiple = _VOCABULARY
        elif key == "hidden_size":
            # Heads have an even number of values each.
            multiple = math.lcm(_PACKET, 2 * recipe.model.num_attention_heads)
        aligned = -(-size // multiple) * multiple
        inner = min(
            max([other for shape in own for other in shape if other != size], default=size),
            _MOST_INNER,
        )
        rate = (
            _GAIN_ON_GPUS
            if here is None
            else _measured_gain(here, dtype, inner, size, aligned=aligned)
        )
        gain = 1 / (1 - share * (1 - 1 / rate))
        if gain < _LEAST_GAIN:
            continue
        origin = "up to" if here is None else "measured here, about"
        advice = {
            "vocab_size": f"efficiency.vocab_multiple {multiple} pads it to {aligned:,}",
            None: f"take sizes of heads that are multiples of {_PACKET}",
        }.get(key, f"take {aligned:,}")
        name = f"a width of {size:,} inside the model" if key is None else f"model.{key} {size:,}"
        misaligned = any(other % _PACKET for shape in own for other in shape if other != size)
        together = ", with the other sizes aligned as well" if misaligned else ""
        yield (
            f"{name} is not a multiple of {_PACKET}, and {share:.0%} of the matrix products use "
            f"it: {advice}, {origin} {gain:.2f} times the speed of a step{together}"
        )


def _measured_gain(
    device: torch.device, dtype: torch.dtype, inner: int, size: int, *, aligned: int
) -> float:
    """Time of a linear layer's products (see `_product_seconds`) with `size`, divided by the time
    with `aligned`: the median of rounds in which the two take turns."""
    # A large vocabulary is measured with fewer tokens, so that planning stays fast.
    fitting = int(_PRODUCT_SIZE / (inner * aligned)) // _PACKET * _PACKET
    tokens = min(max(fitting, _LEAST_TOKENS), _MOST_TOKENS)
    ratios = []
    for _ in range(_ROUNDS + 1):
        seconds = [
            _product_seconds(device, dtype, tokens, inner, size=one) for one in (size, aligned)
        ]
        ratios.append(seconds[0] / seconds[1])
    # The first round loads the kernels, and is not counted.
    return statistics.median(ratios[1:])


def _product_seconds(
    device: torch.device, dtype: torch.dtype, tokens: int, inner: int, size: int
) -> float:
    """Seconds of a linear layer's products: the forward product, and the gradients of the input and
    of the weight. N tokens, I `inner`, S `size`."""
    x_NI = torch.ones(tokens, inner, device=device, dtype=dtype)
    weight_SI = torch.ones(size, inner, device=device, dtype=dtype)
    grad_NS = torch.ones(tokens, size, device=device, dtype=dtype)
    synchronize(device)
    start = time.perf_counter()
    x_NI @ weight_SI.T
    grad_NS @ weight_SI
    grad_NS.T @ x_NI
    synchronize(device)
    return time.perf_counter() - start
