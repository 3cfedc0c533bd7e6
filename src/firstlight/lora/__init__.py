"""Low-rank adapters: a few trainable numbers beside a frozen model, in PEFT's file format.

Applied to a plain model from outside (`layers.py`), kept and read as PEFT does (`files.py`), over
a base that may be stored in 4 bits (`quantized.py`).
"""

from __future__ import annotations

from firstlight.lora.config import LoraConfig
from firstlight.lora.files import (
    ADAPTER_WEIGHTS_NAME,
    adapter_chain,
    adapter_files,
    adapter_settings,
    adapter_tensors,
    base_name,
    fill_adapter,
    is_adapter,
    load_adapter,
    save_adapter,
)
from firstlight.lora.layers import LoraLinear, add_lora, lora_parameters, merge_lora
from firstlight.lora.peft_config import ADAPTER_CONFIG_NAME
from firstlight.lora.quantized import require_nf4

__all__ = [
    "ADAPTER_CONFIG_NAME",
    "ADAPTER_WEIGHTS_NAME",
    "LoraConfig",
    "LoraLinear",
    "adapter_chain",
    "adapter_files",
    "adapter_settings",
    "adapter_tensors",
    "add_lora",
    "base_name",
    "fill_adapter",
    "is_adapter",
    "load_adapter",
    "lora_parameters",
    "merge_lora",
    "require_nf4",
    "save_adapter",
]
