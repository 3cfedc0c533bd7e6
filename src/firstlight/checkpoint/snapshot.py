"""Copies of tensors on the CPU, in memory that is kept from one copy to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Snapshot:
    """Takes copies of the same tensors again and again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that don't change with the tensors; they are valid until the next are taken.

        Args:
            tensors: on any device, in any layout; they may share memory. Those on a GPU are
                copied into page-locked memory.
        """
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        # Without an argument, the current device would be waited for, which may be another.
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: self._buffers[name] for name in tensors}

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
