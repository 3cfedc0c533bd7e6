"""The forecast of a run's memory and speed, beside the measured ones.

The forecaster is an argument, because the planner runs the training step itself and is in a higher
layer.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from firstlight.files.atomic import write_json
from firstlight.hardware.allocator import AllocatedPeak
from firstlight.hardware.device import Hardware, peak_memory_bytes
from firstlight.hardware.resident import reset_peak
from firstlight.recipe import ResolvedRecipe
from firstlight.report.records import MOSTLY_LEARNED

#: File in the run folder.
FORECAST_NAME = "forecast.json"

#: Speeds among a step's metrics.
_RATES = ("tokens_per_second", "learned_tokens_per_second", "samples_per_second")

#: Memory on a CPU in addition to the resident memory before the first step: oneDNN's code, buffers
#: of the threads and other libraries that load late; torch's compiler; and for each further byte of
#: tensors, the gaps of the C library. docs/benchmarks/planner.md has the measurements.
_LIBRARY_BYTES = 28 * 2**20
_COMPILER_BYTES = 110 * 2**20
_KEPT_SHARE = 0.2

#: Steps at a start that are slower than the others: the first touches memory, and compiles.
_SLOW_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """Memory and speed of a run, as they are expected on each device.

    Attributes:
        peak_bytes: the most that is allocated for tensors at a time, evaluations, sample texts and
            saves included.
        phase: the phase of that peak: "forward", "loss", "backward", "optimizer", "evaluation",
            "samples", "save", "averaging", ...
        parts: bytes of the peak by kind of tensor.
        tokens_per_second: least, expected and most, of all processes; None where that isn't known.
        phases: the peak of each phase, bytes.
        process_bytes: the most resident memory of the process on a CPU, including libraries and the
            allocator's reserve; None on a GPU.
    """

    peak_bytes: int
    phase: str
    parts: Mapping[str, int]
    tokens_per_second: tuple[float, float, float] | None
    phases: Mapping[str, int] = field(default_factory=dict)
    process_bytes: int | None = None

    @property
    def in_words(self) -> str:
        """For people."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        of = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in parts)
        text = f"tensors take up to {_size(self.peak_bytes)}, in the {self.phase} ({of})"
        if self.process_bytes is not None:
            text += f"; the process {_size(self.process_bytes)}"
        if self.tokens_per_second is None:
            return text
        low, expected, high = self.tokens_per_second
        return f"{text}, {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})"


class Forecaster(Protocol):
    """Predicts runs."""

    def forecast(
        self, recipe: ResolvedRecipe, hardware: Hardware, processes: int
    ) -> Forecast | None:
        """The forecast of a run; None if it can't be made.

        Args:
            recipe: the recipe that the run carries out.
            hardware: hardware of each process.
            processes: number of processes that share the batch.
        """

    def advise(self, recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
        """The reason why memory ran out, and the one change that would have saved it, with its cost
        in speed; None where neither can be found.

        Args:
            recipe: the recipe with the micro-batch size that did not fit.
            hardware: hardware of each process.
            processes: number of processes that share the batch.
        """


class ForecastComparison:
    """The forecast of a run and its measurements, side by side. A context; measuring ends with it.

    Args:
        hardware: hardware of this process, before the run has taken any memory.

    Attributes:
        forecast: the forecast of the run; None without one.
        label_share: share of the tokens of the run's sequences that are labels.
        seq_len: tokens of a sequence.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.forecast: Forecast | None = None
        self.label_share, self.seq_len = 1.0, 1
        self._hardware = hardware
        self._level = _level(hardware)
        self._rates: dict[str, list[float]] = {name: [] for name in _RATES}
        self._steps = 0
        self._allocated = AllocatedPeak()

    def __enter__(self) -> ForecastComparison:
        return self

    def __exit__(self, *of_error: Any) -> None:
        self._allocated.__exit__(*of_error)

    def predict_process(self, held_bytes: int, *, compiles: bool, code_bytes: int = 0) -> None:
        """Add the memory of the whole process to the forecast, on a CPU: the resident memory at
        this moment, and that of further tensors and libraries. Both kinds of memory are measured
        from here on.

        Args:
            held_bytes: bytes of the forecast's tensors that are in memory already.
            compiles: True if torch's compiler will be loaded.
            code_bytes: bytes of the code that oneDNN will compile for experts.
        """
        if self.forecast is None or self._hardware.device.type == "cuda":
            return
        coming = (1 + _KEPT_SHARE) * max(self.forecast.peak_bytes - held_bytes, 0)
        # A process also holds libraries' buffers, which are loaded on first use.
        libraries = _LIBRARY_BYTES + (_COMPILER_BYTES if compiles else 0)
        total = int(psutil.Process().memory_info().rss + coming + libraries + code_bytes)
        self.forecast = replace(self.forecast, process_bytes=total)
        self._allocated.start(held_bytes)
        # Before a run on texts, its tokenizer and the trials of its speed may have taken more.
        reset_peak()

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's metrics in."""
        self._steps += 1
        if self._steps == _SLOW_STEPS:
            self._allocated.look_less()
        # An evaluation and a save leave buffers behind, as does the first step.
        if self._allocated.is_running and (self._steps <= _SLOW_STEPS or "val/loss" in record):
            self._allocated.find_level(_tensor_bytes())
        for name, found in self._rates.items():
            rate = record.get(name)
            if rate is not None:
                found.append(float(rate))

    def measured(self) -> dict[str, Any]:
        """The measurements of the run so far.

        Returns:
            "peak_bytes": of tensors, by a GPU's allocator; None on a CPU, where nobody counts.
            "allocated_bytes": on a CPU, of tensors and of libraries' buffers for a step, by the C
                library's allocator; None where it doesn't count.
            "process_bytes": on a CPU the most resident memory of the process since the prediction,
            else None.
            "tokens_per_second", "learned_tokens_per_second" and "samples_per_second": the medians
            of all steps but the first ones, None without any.
        """
        # A GPU's peak counts from this process' beginning, with what the caller had on it before.
        peak = peak_memory_bytes(self._hardware.device)
        on_gpu = self._hardware.device.type == "cuda"
        return {
            "peak_bytes": max(peak - self._level, 0) if on_gpu else None,
            "allocated_bytes": self._allocated.peak_bytes,
            "process_bytes": None if on_gpu else peak,
            **{name: _median(found[_SLOW_STEPS:]) for name, found in self._rates.items()},
        }

    def _predicted(self, forecast: Forecast) -> dict[str, Any]:
        """The forecast as JSON values, with its rate in learned tokens and sequences as well."""
        rates = forecast.tokens_per_second
        return asdict(forecast) | {
            "learned_tokens_per_second": _times(rates, self.label_share),
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
        predicted_values = self._predicted(self.forecast)
        write_json(run_folder / FORECAST_NAME, {"predicted": predicted_values, "measured": found})
        text = _memory_in_words(self.forecast, found)
        rate, predicted = found["tokens_per_second"], self.forecast.tokens_per_second
        if rate is None or predicted is None:
            return text
        text += f"; tokens/s: predicted {predicted[1]:,.0f}, measured {rate:,.0f}"
        learned = found["learned_tokens_per_second"]
        if self.label_share >= MOSTLY_LEARNED or learned is None:
            return text
        expected = predicted[1] * self.label_share
        return f"{text}; learned tokens/s: predicted {expected:,.0f}, measured {learned:,.0f}"


def _memory_in_words(forecast: Forecast, found: Mapping[str, Any]) -> str:
    """Each figure beside its own kind."""
    tensors = found["peak_bytes"] or found["allocated_bytes"]
    kinds = {
        "tensors": (forecast.peak_bytes, "allocated", tensors),
        "the process": (forecast.process_bytes, "resident", found["process_bytes"]),
    }
    told = [
        f"of {kind}: predicted {_size(predicted)}, {name} {_size(measured)}"
        for kind, (predicted, name, measured) in kinds.items()
        if predicted is not None and measured is not None
    ]
    return f"memory {'; '.join(told)}"


def _tensor_bytes() -> int:
    """Bytes of all tensors that there are between two steps; takes a tenth of a second."""
    sizes: dict[int, int] = {}
    for one in gc.get_objects():
        # No other class counts: wrapped tensors hold plain ones, and a plan's have no memory.
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided:
            # A measurement never ends a run.
            with contextlib.suppress(RuntimeError):
                storage = one.untyped_storage()
                # By address: views and ties share a storage, which counts once.
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _times(rates: Sequence[float] | None, factor: float) -> list[float] | None:
    return None if rates is None else [rate * factor for rate in rates]


def _level(hardware: Hardware) -> int:
    on_gpu = hardware.device.type == "cuda"
    return torch.cuda.memory_allocated(hardware.device) if on_gpu else 0


def _size(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
