"""Memory of a GPU as its driver counts it: tensors, what torch's allocator holds ready, the
process's context, and other processes."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


def driver_used_bytes() -> int | None:
    """Bytes of the GPU's memory that are in use by all processes; None where that is not known.

    NVML says it without a CUDA context of this process, so that what there was before one can be
    read too. Without nvidia-ml-py it comes from CUDA, once this process has a context.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible and not visible.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # noqa: BLE001  (no library, no driver, no right to ask: the same to us)
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not is_used:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free
