"""Number formats used in a training step."""

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

#: Minimum CUDA compute capability of GPUs with fp8 matrix units.
FP8_CAPABILITY = (8, 9)

#: Error bounds for each precision, as documented in docs/methods.md. The first bound is the maximum
#: difference, in nats, between the loss and the loss of a more precise run. The second bound is the
#: maximum `weights_distance`. The bounds of fp32 also apply to methods that only change the order
#: of sums.
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (0.01, 0.05), "fp16": (0.001, 0.03)}


def weights_distance(
    found: Iterable[Tensor], exact: Iterable[Tensor], start: Iterable[Tensor]
) -> float:
    """Return the L2 distance between the weights of a trained model and exact weights, divided by
    the L2 distance that the exact weights moved in training. Each argument contains the same
    tensors [...] of a model, in the same order and on the CPU."""
    apart = moved = 0.0
    for one, other, before in zip(found, exact, start, strict=True):
        apart += float((one.double() - other.double()).square().sum())
        moved += float((other.double() - before.double()).square().sum())
    return math.sqrt(apart / moved)


#: Minimum CUDA compute capability of GPUs with fp16 matrix units.
FP16_CAPABILITY = (7, 0)


def has_only_fp16_units(hardware: Hardware) -> bool:
    """Return True for a CUDA GPU whose tensor cores support fp16 but not bf16, such as the V100 or
    T4.

    The GTX 16 series is excluded by name, because it has compute capability 7.5 but no tensor
    cores.
    """
    capability = hardware.capability
    has_units = capability is not None and capability >= FP16_CAPABILITY
    return has_units and not hardware.bf16 and "GTX 16" not in hardware.name


def resolve_precision(config: EfficiencyConfig, hardware: Hardware) -> torch.dtype:
    """Return the dtype of matrix products. For "auto", this is bf16 if matrix products are faster
    in bf16 than in fp32 on this hardware, and fp32 otherwise."""
    if config.precision == "auto":
        worth_it = hardware.bf16 and bf16_is_faster(hardware.device)
        return torch.bfloat16 if worth_it else torch.float32
    return dtype_of(config.precision)


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of matrix products for the given `EfficiencyConfig.precision`, which must
    not be "auto"."""
    return {
        "fp32": torch.float32,
        # tf32 is not a dtype, but a mode for multiplying fp32 tensors.
        "tf32": torch.float32,
        "fp16": torch.float16,
    }.get(precision, torch.bfloat16)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that computes matrix products in `dtype`. It has no effect for
    fp32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    # torch's cache of rounded weights is disabled. A forward pass uses each weight only once, and
    # with activation checkpointing, the cache would keep all rounded weights in memory, at 2 bytes
    # per parameter.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def keep_bf16_residual(model: Model) -> None:
    """Change the dtype of a plain model's residual stream from fp32 to the autocast dtype. The
    residual stream is rounded before the first layer. Norms are still computed in fp32, but return
    the autocast dtype."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = functools.partial(_layer_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, RMSNorm):
            module.register_forward_hook(lambda _module, _inputs, x: x.to(product_dtype(x)))
    model.layers[0].register_forward_pre_hook(
        lambda _layer, inputs: (inputs[0].to(product_dtype(inputs[0])), *inputs[1:])
    )


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    # Autocast would pass an fp32 copy of x to the CUDA kernel and keep it for the backward pass.
    # The copy is not needed, because the kernel computes in fp32 whatever the dtype of x is.
    # However, the weight must have the same dtype as x.
    dtype = product_dtype(x)
    weight, bias = (None if p is None else p.to(dtype) for p in (norm.weight, norm.bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(dtype), norm.normalized_shape, weight, bias, norm.eps)


#: Bytes per number in a matrix product, keyed by `EfficiencyConfig.products`. All other formats
#: take 2 bytes.
_PRODUCT_BYTES = {"fp32": 4, "tf32": 4, "fp8": 1}


def packet_note(
    config: ModelConfig,
    efficiency: EfficiencyConfig,
    capability: tuple[int, int] | None,
    *,
    above: int = 1,
) -> str | None:
    """Return a note that lists the widths of a model that a GPU's tensor cores can't read at full
    speed (see `matrix_packet_bytes`), and describes what these widths cost. Return None if there
    are no such widths.

    Args:
        config: config of the model.
        efficiency: the recipe's `efficiency` section.
        capability: CUDA compute capability of the GPU; None for any other device.
        above: only report widths that are multiples of this number.
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
        f"this GPU's tensor cores read only multiples of {multiple} at full speed, but the model "
        f"has {named}. Rounded up to the next multiples, these sizes would need {more - 1:.1%} "
        "more arithmetic, but no more time"
    )


@contextlib.contextmanager
def matmul_precision(config: EfficiencyConfig) -> Iterator[None]:
    """Set the precision of fp32 matrix products to `config.matmul_precision` within the context.
    With precision "tf32", the products use TF32 if the hardware supports it. TF32 rounds the inputs
    to a 10-bit mantissa. torch's global setting is restored on exit."""
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


#: Minimum number of weights in a layer that uses fp8. In smaller layers, computing the casts and
#: scales takes more time than fp8 saves.
FP8_LAYER_WEIGHTS = 4_000_000

NO_FP8_LAYERS = (
    "efficiency.precision fp8 needs linear layers of at least 4 million weights, in multiples of "
    "16, but this model has none: use bf16"
)


def require_fp8(hardware: Hardware, model: nn.Module) -> None:
    """Check that fp8 can be used.

    Raises:
        ConfigError: the device has no fp8 matrix units, torchao is not installed, or the model has
            no layers that can be converted.
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
    # torchao's module only supports weights of shape [out, in]. GPT-2's layers, whose weights have
    # the shape [in, out], keep their class and multiply with the settings of torchao's module.
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
    """Return the layers whose matrix products are computed in fp8 with precision "fp8", keyed by
    name. A layer must be large, and its sizes must be multiples of 16, as fp8 tensor cores require.
    The head is excluded, because its rounding errors would directly affect the loss. Routers are
    also excluded."""
    # With LoRA, the head's linear layer is called `lm_head.base_layer`.
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and name.removesuffix(".base_layer") != "lm_head"
        and all(size % 16 == 0 for size in module.weight.shape)
        and module.weight.numel() >= FP8_LAYER_WEIGHTS
    }
