"""Number formats of a training step."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, bf16_is_faster
from firstlight.hardware.gpus import matrix_packet_bytes
from firstlight.methods.config import EfficiencyConfig
from firstlight.models import ModelConfig
from firstlight.models.accounting import matrix_shapes

#: CUDA's compute capability from which there are fp8 matrix units.
FP8_CAPABILITY = (8, 9)

#: Bounds of docs/methods.md by precision: greatest difference of a loss from that of a more precise
#: run, in nats, and greatest `weights_distance`. Sums in another order have those of fp32.
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (0.01, 0.05), "fp16": (0.001, 0.03)}


def weights_distance(
    found: Iterable[Tensor], exact: Iterable[Tensor], start: Iterable[Tensor]
) -> float:
    """The L2 distance of trained weights from exact ones, as a share of the distance that training
    moved the exact ones. Each argument has the same tensors [...] of a model, on the CPU."""
    apart = moved = 0.0
    for one, other, before in zip(found, exact, start, strict=True):
        apart += float((one.double() - other.double()).square().sum())
        moved += float((other.double() - before.double()).square().sum())
    return math.sqrt(apart / moved)


#: CUDA's compute capability from which there are fp16 matrix units.
FP16_CAPABILITY = (7, 0)


def has_only_fp16_units(hardware: Hardware) -> bool:
    """True for a CUDA GPU with matrix units for fp16 and none for bf16, such as a V100 or a T4.

    The GTX 16 series has capability 7.5 and no matrix units.
    """
    capability = hardware.capability
    has_units = capability is not None and capability >= FP16_CAPABILITY
    return has_units and not hardware.bf16 and "GTX 16" not in hardware.name


def resolve_precision(config: EfficiencyConfig, hardware: Hardware) -> torch.dtype:
    """The dtype of matrix products; "auto" is bf16 where this hardware multiplies it faster than
    fp32, else fp32."""
    if config.precision == "auto":
        worth_it = hardware.bf16 and bf16_is_faster(hardware.device)
        return torch.bfloat16 if worth_it else torch.float32
    return dtype_of(config.precision)


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of matrix products in a precision of `EfficiencyConfig`, "auto" excepted."""
    return {
        "fp32": torch.float32,
        # tf32 is a way to multiply fp32 tensors, not a dtype.
        "tf32": torch.float32,
        "fp16": torch.float16,
    }.get(precision, torch.bfloat16)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products run in `dtype`; does nothing for fp32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    # Without torch's cache of rounded weights: a forward pass multiplies with each weight once, and
    # with activation checkpointing only the cache would hold them all, 2 bytes a parameter.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


#: Bytes of a number in a matrix product, by `EfficiencyConfig.products`; 2 for the others.
_PRODUCT_BYTES = {"fp32": 4, "tf32": 4, "fp8": 1}


def packet_note(
    config: ModelConfig,
    efficiency: EfficiencyConfig,
    capability: tuple[int, int] | None,
    *,
    above: int = 1,
) -> str | None:
    """A note about the widths of a model that a GPU's matrix units do not read at full speed (see
    `matrix_packet_bytes`), with what they cost; None if there are none.

    Args:
        config: config of the model.
        efficiency: the recipe's section.
        capability: CUDA's compute capability of the GPU; None for another device.
        above: only widths that are multiples of this number are named.
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
        f"not multiples of {multiple}, which this GPU's matrix units read at full speed: {named}. "
        f"Their products cost at least what the next multiples cost: {more - 1:.1%} more arithmetic"
    )


@contextlib.contextmanager
def matmul_precision(config: EfficiencyConfig) -> Iterator[None]:
    """Context in which fp32 matrix products have `config.matmul_precision`; with the precision
    "tf32" they use TF32 where the hardware has it (inputs with 10 bits of mantissa). torch's global
    setting is restored at the end."""
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


def require_fp8(hardware: Hardware, model: nn.Module) -> None:
    """Refuse fp8 if it can't work.

    Raises:
        ConfigError: there are no fp8 matrix units, no torchao, or no layers that can be converted.
    """
    device = hardware.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            "efficiency.precision fp8 needs a GPU with fp8 matrix units (compute capability 8.9 "
            f"or higher), and this is {hardware.name}: use bf16"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "efficiency.precision fp8 needs torchao: pip install 'firstlight[8bit]', or use bf16"
        )
    if not _fp8_layers(model):
        raise ConfigError(
            "efficiency.precision fp8 converts linear layers of a Llama-like model whose sizes "
            "are multiples of 16, and this model has none: use bf16"
        )


def convert_to_fp8(model: nn.Module) -> None:
    """Let the layers' matrix products run in fp8, with one scale for each tensor (torchao;
    Micikevicius et al. 2022, arXiv 2209.05433). The head is not converted, because its errors would
    reach the loss directly."""
    from torchao.float8 import convert_to_float8_training

    names = _fp8_layers(model)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names)


def _fp8_layers(model: nn.Module) -> set[str]:
    # fp8 matrix units only take sizes that are multiples of 16. With LoRA, the head's linear layer
    # is called `lm_head.base_layer`.
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.removesuffix(".base_layer") != "lm_head"
        and all(size % 16 == 0 for size in module.weight.shape)
    }
