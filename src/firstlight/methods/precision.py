"""Number formats of a training step."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, bf16_is_faster
from firstlight.hardware.gpus import matrix_packet_bytes
from firstlight.methods.config import EfficiencyConfig
from firstlight.models import Model, ModelConfig
from firstlight.models.accounting import matrix_shapes
from firstlight.models.gpt2 import Conv1D
from firstlight.models.llama import RMSNorm
from firstlight.models.ops import product_dtype

#: Minimum CUDA compute capability with fp8 matrix units.
FP8_CAPABILITY = (8, 9)

#: Bounds of docs/methods.md by precision: maximum difference of a loss from a more precise run, in
#: nats, and maximum `weights_distance`. Sums in a different order have the bounds of fp32.
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (0.01, 0.05), "fp16": (0.001, 0.03)}


def weights_distance(
    found: Iterable[Tensor], exact: Iterable[Tensor], start: Iterable[Tensor]
) -> float:
    """Return the L2 distance between trained weights and exact weights, divided by the distance
    that training moved the exact weights. All arguments have the same tensors [...] of a model, on
    the CPU."""
    apart = moved = 0.0
    for one, other, before in zip(found, exact, start, strict=True):
        apart += float((one.double() - other.double()).square().sum())
        moved += float((other.double() - before.double()).square().sum())
    return math.sqrt(apart / moved)


#: Minimum CUDA compute capability with fp16 matrix units.
FP16_CAPABILITY = (7, 0)


def has_only_fp16_units(hardware: Hardware) -> bool:
    """Return True for a CUDA GPU whose tensor cores support fp16 but not bf16, such as V100 or T4.

    The GTX 16 series has capability 7.5 but no tensor cores.
    """
    capability = hardware.capability
    has_units = capability is not None and capability >= FP16_CAPABILITY
    return has_units and not hardware.bf16 and "GTX 16" not in hardware.name


def resolve_precision(config: EfficiencyConfig, hardware: Hardware) -> torch.dtype:
    """Return the dtype of matrix products. "auto" is bf16 if products are faster in bf16 than in
    fp32 on this hardware, otherwise fp32."""
    if config.precision == "auto":
        worth_it = hardware.bf16 and bf16_is_faster(hardware.device)
        return torch.bfloat16 if worth_it else torch.float32
    return dtype_of(config.precision)


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of matrix products in a precision of `EfficiencyConfig`, except "auto"."""
    return {
        "fp32": torch.float32,
        # tf32 is a mode of multiplying fp32 tensors, not a dtype.
        "tf32": torch.float32,
        "fp16": torch.float16,
    }.get(precision, torch.bfloat16)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Run matrix products in `dtype` in the context. Do nothing for fp32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    # torch's cache of rounded weights is off: a forward pass uses each weight once, and with
    # activation checkpointing the cache would be the only reason to keep all of them, 2 bytes per
    # parameter.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def keep_bf16_residual(model: Model) -> None:
    """Make the residual stream of a plain model use autocast's dtype instead of fp32: it is rounded
    before the first layer, and norms, which compute in fp32, return that dtype."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = functools.partial(_layer_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, RMSNorm):
            module.register_forward_hook(lambda _module, _inputs, x: x.to(product_dtype(x)))
    model.layers[0].register_forward_pre_hook(
        lambda _layer, inputs: (inputs[0].to(product_dtype(inputs[0])), *inputs[1:])
    )


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    # Autocast would pass an fp32 copy of x to CUDA's kernel, and keep it for the backward pass. The
    # kernel computes in fp32 anyway, but requires a weight of x's dtype.
    dtype = product_dtype(x)
    weight, bias = (None if p is None else p.to(dtype) for p in (norm.weight, norm.bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(dtype), norm.normalized_shape, weight, bias, norm.eps)


#: Bytes per number in a matrix product, by `EfficiencyConfig.products`; 2 for all others.
_PRODUCT_BYTES = {"fp32": 4, "tf32": 4, "fp8": 1}


def packet_note(
    config: ModelConfig,
    efficiency: EfficiencyConfig,
    capability: tuple[int, int] | None,
    *,
    above: int = 1,
) -> str | None:
    """Return a note about the widths of a model that a GPU's tensor cores can't read at full speed
    (see `matrix_packet_bytes`), with their cost, or None if there are none.

    Args:
        config: config of the model.
        efficiency: the recipe's section.
        capability: CUDA compute capability of the GPU; None for another device.
        above: only widths that are multiples of this number are reported.
    """
    products = efficiency.products
    if capability is None or capability < FP16_CAPABILITY or products == "fp32":
        return None
    multiple = matrix_packet_bytes(capability) // _PRODUCT_BYTES.get(products, 2)
    shapes = matrix_shapes(config, efficiency.vocab_multiple)
    sizes = sorted({size for shape in shapes for size in shape if size % multiple})
    sizes = [size for size in sizes if size % above == 0]
    if not sizes:
        return None
    keys = {value: key for key, value in config if key.endswith("size")}
    padded = {size: -(-size // multiple) * multiple for size in sizes}
    more = sum(
        padded.get(rows, rows) * padded.get(columns, columns) for rows, columns in shapes
    ) / sum(rows * columns for rows, columns in shapes)
    named = ", ".join(
        f"{keys.get(size, 'a width inside the model')} {size:,} (next: {next_size:,})"
        for size, next_size in padded.items()
    )
    return (
        f"not multiples of {multiple}, which this GPU's tensor cores read at full speed: {named}. "
        f"Their products cost at least as much as with the next multiples: {more - 1:.1%} more "
        "arithmetic"
    )


@contextlib.contextmanager
def matmul_precision(config: EfficiencyConfig) -> Iterator[None]:
    """Compute fp32 matrix products with `config.matmul_precision` in the context. With precision
    "tf32" they use TF32 if the hardware supports it (inputs with 10 bits of mantissa). torch's
    global setting is restored at the end."""
    chosen = "high" if config.precision == "tf32" else config.matmul_precision
    if chosen is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


#: Minimum number of weights in a layer that uses fp8. The casts and scales of smaller layers take
#: longer than fp8 saves.
FP8_LAYER_WEIGHTS = 4_000_000

NO_FP8_LAYERS = (
    "efficiency.precision fp8 needs linear layers of at least 4 million weights, in multiples of "
    "16, but this model has none: use bf16"
)


def require_fp8(hardware: Hardware, model: nn.Module) -> None:
    """Check that fp8 can be used.

    Raises:
        ConfigError: there are no fp8 matrix units, no torchao, or no layers that can be converted.
    """
    device = hardware.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            "efficiency.precision fp8 needs a GPU with fp8 matrix units (compute capability 8.9 "
            f"or higher), but this is {hardware.name}: use bf16"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "efficiency.precision fp8 needs torchao: pip install 'firstlight[8bit]', or use bf16"
        )
    if not fp8_layers(model):
        raise ConfigError(NO_FP8_LAYERS)


def convert_to_fp8(model: nn.Module) -> None:
    """Convert the layers in `fp8_layers` to fp8 matrix multiplication with tensorwise scaling
    (torchao; Micikevicius et al. 2022, arXiv 2209.05433)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    layers = fp8_layers(model)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in layers)
    # torchao only has a module for weights [out, in]; GPT-2's layers use its settings.
    settings = Float8Linear(1, 1, bias=False, device="meta", config=Float8LinearConfig())
    for layer in layers.values():
        if isinstance(layer, Conv1D):
            forward = functools.partial(_fp8_conv1d, layer, settings)
            layer.forward = forward  # type: ignore[method-assign]


def _fp8_conv1d(layer: Conv1D, settings: Any, x: Tensor) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    y: Tensor = matmul_with_hp_or_float8_args.apply(
        x.to(product_dtype(x)), layer.weight, settings.linear_mm_config, settings.config
    )
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def fp8_layers(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Return the layers whose products are in fp8 with precision "fp8", by name: large layers whose
    sizes are multiples of 16, as fp8 tensor cores require. The head is excluded, because its errors
    would directly affect the loss, and so are routers."""
    # With LoRA, the head's linear layer is called `lm_head.base_layer`.
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and name.removesuffix(".base_layer") != "lm_head"
        and all(size % 16 == 0 for size in module.weight.shape)
        and module.weight.numel() >= FP8_LAYER_WEIGHTS
    }
