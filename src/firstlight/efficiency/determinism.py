"""The same bits each time that a step is computed again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic

from firstlight.efficiency.config import EfficiencyConfig
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: Sizes of cuBLAS' workspace with which it adds up in one order; the first is that of Hopper's
#: usual one.
_CUBLAS_SIZES = (":4096:8", ":16:8")


def require_same_bits(hardware: Hardware) -> None:
    """Make ready for `same_bits` with `deterministic`: on a CUDA GPU, give cuBLAS a workspace of a
    fixed size. To be called before the process's first matrix product on a GPU: torch looks at the
    environment once.

    Raises:
        ConfigError: the environment has another size, or a matrix product was computed without it.
    """
    if hardware.device.type != "cuda":
        return
    size = os.environ.setdefault(_CUBLAS, _CUBLAS_SIZES[0])
    if size not in _CUBLAS_SIZES:
        raise ConfigError(
            f"run.deterministic needs {_CUBLAS} to be {' or '.join(_CUBLAS_SIZES)}, and it is "
            f"'{size}': unset it"
        )
    one = torch.ones(8, 8, device=hardware.device)
    with _deterministic():
        try:
            one @ one
        except RuntimeError as error:
            if _CUBLAS not in str(error):
                raise
            raise ConfigError(
                "run.deterministic has to be known before this process's first matrix product on "
                f"a GPU: set {_CUBLAS}={_CUBLAS_SIZES[0]} in its environment"
            ) from None


@contextlib.contextmanager
def same_bits(
    config: EfficiencyConfig, hardware: Hardware, *, deterministic: bool = False
) -> Iterator[None]:
    """What is computed inside gives the same bits every time: on a CPU always, on a CUDA GPU with
    `deterministic`, which `require_same_bits` was called for.

    On a CPU, only threads of compiled code would add up in no fixed order (the gradient of the
    embedding). On a GPU, so do the backward passes of attention and of a compiled embedding, and
    inductor chooses among kernels by measuring them.
    """
    kind = hardware.device.type
    if (kind == "cpu" and config.compile is True) or (kind == "cuda" and deterministic):
        with _deterministic():
            yield
    else:
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic algorithms. The setting is global, so it is put back; filling new
    memory, which comes with it, is left out."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Inductor's choice of kernels without measuring comes with it.
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=only_warns)
        settings.fill_uninitialized_memory = before[1]
