"""How the C library treats memory freed by training, tested in a separate process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time

import pytest

from firstlight.hardware import process_memory
from firstlight.hardware.process_memory import AllocatedPeak

_PROGRAM = """
import json, sys
import torch
from firstlight.hardware.process_memory import resident_bytes
from firstlight.methods import give_back_unused, keep_memory
from firstlight.hardware.device import find_hardware

hardware = find_hardware("cpu")
asked = keep_memory(hardware) if sys.argv[1] == "keep" else None
level = resident_bytes()
blocks = [torch.ones(2**20) for _ in range(50)]
last = torch.ones(2**20)
full = resident_bytes() - level
del blocks
freed = resident_bytes() - level
give_back_unused(hardware)
print(json.dumps([asked, full, freed, resident_bytes() - level]))
"""


def measure(word: str) -> tuple[bool | None, int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, word], capture_output=True, text=True, check=True
    )
    asked, full, freed, given = json.loads(done.stdout)
    return asked, full, freed, given


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_freed_memory_is_kept_until_released() -> None:
    asked, full, freed, given_back = measure("keep")
    assert asked is True
    assert full > 200_000_000
    assert freed > 190_000_000
    assert given_back < 50_000_000


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_freed_memory_is_returned_at_once_by_default() -> None:
    asked, full, freed, _ = measure("do not")
    assert asked is None
    assert full > 200_000_000
    assert freed < 50_000_000


def test_memory_sampling_of_slow_allocator_takes_a_twentieth_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """glibc visits each free block of the heap, which took 33 ms after reading a vocabulary."""
    now, waits = [0.0], []
    peak = AllocatedPeak()

    def sample() -> int:
        now[0] += 0.04
        return 1

    def wait(seconds: float) -> None:
        waits.append(seconds)
        peak._end.set()

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(process_memory, "allocated_bytes", sample)
    monkeypatch.setattr(peak._end, "wait", wait)
    peak._look()
    assert waits == [pytest.approx(0.8)]
