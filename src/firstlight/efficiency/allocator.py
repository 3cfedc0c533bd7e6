"""The C library's memory, kept between the steps of a run."""

from __future__ import annotations

import ctypes
import sys

from firstlight.hardware.device import Hardware

#: From malloc.h; the values are 32-bit integers.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


#: Largest allocation, in bytes, that is kept when freed: of a plain and of a sharded model.
_LIMIT, _LIMIT_SHARDED = 1 << 30, 4 << 20


def keep_memory(hardware: Hardware, *, sharded: bool = False) -> bool:
    """On a CPU with glibc: let the process keep the memory that it frees, instead of giving it
    back and taking it anew, page by page, in every step.

    A step makes and frees the same large tensors as the one before. glibc maps each from the
    system and unmaps it again, which was a third of the time of a step. For the rest of the
    process; returns whether it was done.

    Args:
        hardware: of the process.
        sharded: True gives larger tensors back, for a model that is sharded over processes. Its
            gathered layers and gradients come in many sizes between the activations: kept, they
            leave holes that fit nothing else (measured: a GiB of holes beside 0.8 GiB in use, so
            that fsdp took more memory than ddp).
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    limit = _LIMIT_SHARDED if sharded else _LIMIT
    # An old glibc takes no more than 32 MiB. Set first: the others alone would make it worse.
    if not (mallopt(_MMAP_THRESHOLD, limit) or mallopt(_MMAP_THRESHOLD, 32 << 20)):
        return False
    taken = [bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)), bool(mallopt(_TOP_PAD, 64 << 20))]
    return all(taken)


def give_back_unused(hardware: Hardware) -> None:
    """On a CPU with glibc: return the pages that hold nothing to the system.

    For the moment when a run has been set up and compiled: what that took is scattered over the
    heap, and would stay resident beside all that the steps need.
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
