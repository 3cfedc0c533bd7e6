"""What a run was expected to take, beside what it takes.

Who can predict is passed in: the planner runs the training step itself, and so stands above it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from firstlight.files import write_json
from firstlight.hardware import Hardware, peak_memory_bytes
from firstlight.training.config import Recipe
from firstlight.training.metrics import MOSTLY_LEARNED

#: In the run's folder.
FORECAST_NAME = "forecast.json"

#: Of a step's metrics.
_RATES = ("tokens_per_second", "learned_tokens_per_second", "samples_per_second")

#: Steps at a start that are slower than the others: the first touches memory, and compiles.
_SLOW_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take of each device.

    Attributes:
        peak_bytes: of memory, as the allocator counts it.
        phase: of the step, in which that is.
        parts: what it consists of.
        tokens_per_second: least, expected and most, of all processes; None where that isn't known.
    """

    peak_bytes: int
    phase: str
    parts: Mapping[str, int]
    tokens_per_second: tuple[float, float, float] | None

    @property
    def in_words(self) -> str:
        """For people."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        of = ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts)
        text = f"peak memory {_gib(self.peak_bytes)} ({of})"
        if self.tokens_per_second is None:
            return text
        low, expected, high = self.tokens_per_second
        return f"{text}, {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})"


class Forecaster(Protocol):
    """Predicts runs."""

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        """What a run takes; None where that can't be said.

        Args:
            recipe: with everything decided.
            hardware: of each process.
            processes: that share the batch.
        """

    def advise(self, recipe: Recipe, hardware: Hardware, processes: int) -> str | None:
        """After memory ran out: what filled it, and which one change would have saved it, at what
        cost in speed. None where that can't be said.

        Args:
            recipe: with everything decided, the micro-batch included that did not fit.
            hardware: that it ran on.
            processes: that share the batch.
        """


class Comparison:
    """Sets what a run takes beside its forecast.

    Args:
        hardware: of this process, before the run has taken any memory.

    Attributes:
        forecast: of the run; None without one.
        learned_share: of the tokens of the run's sequences, the share that is learned.
        seq_len: tokens of a sequence.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.forecast: Forecast | None = None
        self.learned_share, self.seq_len = 1.0, 1
        self._hardware = hardware
        self._level = _level(hardware)
        self._rates: dict[str, list[float]] = {name: [] for name in _RATES}

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's metrics in."""
        for name, found in self._rates.items():
            rate = record.get(name)
            if rate is not None:
                found.append(float(rate))

    def measured(self) -> dict[str, Any]:
        """What the run has taken.

        Returns:
            "peak_bytes" and what "kind" they are: allocated on a GPU, or on a CPU the growth of
            resident memory since the start; "tokens_per_second", "learned_tokens_per_second" and
            "samples_per_second": the medians of all steps but the first ones, None without any.
        """
        return {
            "peak_bytes": max(peak_memory_bytes(self._hardware.device) - self._level, 0),
            "kind": "allocated" if self._hardware.device.type == "cuda" else "resident growth",
            **{name: _median(found[_SLOW_STEPS:]) for name, found in self._rates.items()},
        }

    def predicted(self) -> dict[str, Any]:
        """The forecast as JSON values, with what its rate is in learned tokens and sequences."""
        assert self.forecast is not None
        rates = self.forecast.tokens_per_second
        return asdict(self.forecast) | {
            "learned_tokens_per_second": _times(rates, self.learned_share),
            "samples_per_second": _times(rates, 1 / self.seq_len),
        }

    def write(self, run_folder: Path) -> str | None:
        """Write forecast.json; return the two side by side, for people. None without a forecast.

        Raises:
            StorageError: the disk refuses.
        """
        if self.forecast is None:
            return None
        found = self.measured()
        write_json(run_folder / FORECAST_NAME, {"predicted": self.predicted(), "measured": found})
        text = (
            f"memory: predicted {_gib(self.forecast.peak_bytes)}, {found['kind']} "
            f"{_gib(found['peak_bytes'])}"
        )
        rate, predicted = found["tokens_per_second"], self.forecast.tokens_per_second
        if rate is None or predicted is None:
            return text
        text += f"; tokens/s: predicted {predicted[1]:,.0f}, measured {rate:,.0f}"
        learned = found["learned_tokens_per_second"]
        if self.learned_share >= MOSTLY_LEARNED or learned is None:
            return text
        expected = predicted[1] * self.learned_share
        return f"{text}; learned tokens/s: predicted {expected:,.0f}, measured {learned:,.0f}"


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _times(rates: Sequence[float] | None, factor: float) -> list[float] | None:
    return None if rates is None else [rate * factor for rate in rates]


def _level(hardware: Hardware) -> int:
    if hardware.device.type == "cuda":
        return torch.cuda.memory_allocated(hardware.device)
    return int(psutil.Process().memory_info().rss)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
