"""Forecast the memory and speed of a run, and compare the forecast with measurements.

Forecasts are made by the planner, which runs the training step and belongs to a higher layer, so
this package can't import it. The forecaster is therefore passed as an argument.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from firstlight.console import gib
from firstlight.files.atomic import write_json
from firstlight.hardware.device import Hardware, peak_memory_bytes
from firstlight.hardware.process_memory import AllocatedPeak, reset_peak
from firstlight.recipe import ResolvedRecipe
from firstlight.report.summary import MOSTLY_LEARNED
from firstlight.run_log.names import FORECAST_NAME

#: Keys under which the metrics of a step contain its speeds.
_RATES = ("tokens_per_second", "learned_tokens_per_second", "samples_per_second")

#: Additional memory of a process on a CPU. It is not part of the resident memory before the first
#: step, and does not belong to tensors that are created later. The measurements are listed in
#: docs/benchmarks/planner.md. The constants are:
#:
#: - bytes of libraries that are loaded late, such as oneDNN's code and the buffers of threads
#: - bytes used by torch's compiler
#: - bytes of unused gaps kept by the C library's allocator, per byte of tensors created later
_LIBRARY_BYTES = 28 * 2**20
_COMPILER_BYTES = 110 * 2**20
_KEPT_SHARE = 0.2

#: Number of steps at the start of a process that are slower because they allocate memory and
#: compile.
_SLOW_STEPS = 2


@dataclass(frozen=True)
class Forecast:
    """Expected memory use of a run on each device, and its expected speed.

    Attributes:
        peak_bytes: largest total size of all tensors that exist at the same time, in bytes.
            Evaluations, the generation of sample texts and saves are taken into account.
        phase: phase in which the peak occurs: "forward", "loss", "backward", "optimizer",
            "evaluation", "samples", "save", "averaging", ...
        parts: bytes used at the peak by each kind of tensor.
        tokens_per_second: (lowest, expected, highest) total speed of all processes, or None if
            unknown.
        phases: peak memory in bytes of each phase, keyed by the name of the phase.
        process_bytes: peak of the process's resident memory on a CPU, including libraries and
            memory kept by the allocator; None on a GPU.
    """

    peak_bytes: int
    phase: str
    parts: Mapping[str, int]
    tokens_per_second: tuple[float, float, float] | None
    phases: Mapping[str, int] = field(default_factory=dict)
    process_bytes: int | None = None

    @property
    def in_words(self) -> str:
        """The forecast as text that is shown to the user."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        of = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts)
        text = f"tensors {gib(self.peak_bytes)}, most in the {self.phase} ({of})"
        if self.process_bytes is not None:
            text += f"; process {gib(self.process_bytes)}"
        if self.tokens_per_second is None:
            return text
        low, expected, high = self.tokens_per_second
        return f"{text}; {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})"


class Forecaster(Protocol):
    """Interface for predicting the memory use and speed of runs.
    `planner.plan.processes.RunForecaster` is one implementation."""

    def forecast(
        self, recipe: ResolvedRecipe, hardware: Hardware, processes: int
    ) -> Forecast | None:
        """Return the forecast of a run, or None if it can't be made.

        Args:
            recipe: recipe of the run.
            hardware: hardware of each process.
            processes: number of processes that share the batch.
        """

    def advise(self, recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
        """Return text that explains why memory ran out. The text also suggests a single change to
        the recipe that makes the run fit, and names its cost in speed. Return None if neither the
        reason nor a remedy is known.

        Args:
            recipe: recipe with the micro-batch size that did not fit.
            hardware: hardware of each process.
            processes: number of processes that share the batch.
        """


class ForecastComparison:
    """Forecast of a run, compared with measurements. Used as a context manager, it stops measuring
    on exit.

    Create this object before the run allocates any memory.

    Args:
        hardware: hardware of this process.

    Attributes:
        forecast: forecast of the run, or None.
        label_share: fraction of the tokens in the run's sequences for which a loss is computed.
        seq_len: number of tokens per sequence.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.forecast: Forecast | None = None
        self.label_share, self.seq_len = 1.0, 1
        self._hardware = hardware
        on_gpu = hardware.device.type == "cuda"
        #: Bytes that are already allocated on the GPU before the run starts; 0 on a CPU.
        self._level = torch.cuda.memory_allocated(hardware.device) if on_gpu else 0
        self._rates: dict[str, list[float]] = {name: [] for name in _RATES}
        self._steps = 0
        self._allocated = AllocatedPeak()
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> ForecastComparison:
        return self

    def __exit__(self, *of_error: Any) -> None:
        self._allocated.__exit__(*of_error)

    def predict_process(self, held_bytes: int, *, compiles: bool, code_bytes: int = 0) -> None:
        """On a CPU, predict `forecast.process_bytes` and start measuring memory. On a GPU or
        without a forecast, do nothing.

        The prediction is the current resident memory plus the memory of tensors and libraries that
        are not allocated yet. From this point on, the memory of the tensors and of the process is
        measured.

        Args:
            held_bytes: bytes of tensors that the forecast includes and that are already in memory.
            compiles: True if torch's compiler will be loaded.
            code_bytes: bytes of the code that oneDNN will compile for experts.
        """
        if self.forecast is None or self._hardware.device.type == "cuda":
            return
        coming = (1 + _KEPT_SHARE) * max(self.forecast.peak_bytes - held_bytes, 0)
        # Some libraries are loaded and allocate their buffers only when they are first used.
        libraries = _LIBRARY_BYTES + (_COMPILER_BYTES if compiles else 0)
        total = int(psutil.Process().memory_info().rss + coming + libraries + code_bytes)
        self.forecast = replace(self.forecast, process_bytes=total)
        self._allocated.start(held_bytes)
        # The process may have used more memory before the run: `firstlight train TEXTS` first
        # trains a tokenizer and measures the speed.
        reset_peak()

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a step's metrics to the measurements."""
        self._steps += 1
        if self._steps == _SLOW_STEPS:
            self._allocated.look_less()
        # Measure again after evaluations, saves and the first steps, because libraries allocate
        # buffers at these points and keep them.
        if self._allocated.is_running and (self._steps <= _SLOW_STEPS or "val/loss" in record):
            self._allocated.find_level(self.tensor_bytes())
        for name, found in self._rates.items():
            rate = record.get(name)
            if rate is not None:
                found.append(float(rate))

    def tensor_bytes(self) -> int:
        """Return the total size in bytes of all tensors that exist between two steps. This takes
        about 0.1 seconds.
        """
        sizes: dict[int, int] = {}
        found: dict[int, weakref.ref[torch.Tensor]] = {}
        # The garbage collector does not list tensors that have been frozen since the last call, so
        # add the tensors that were found in that call.
        remembered = [reference() for reference in self._tensors]
        # Chain the objects instead of copying them into a list, because the list would itself be
        # tracked by the garbage collector.
        for one in itertools.chain(gc.get_objects(), remembered):
            # Skip subclasses of tensors. The plain tensors inside wrappers are counted separately,
            # and the planner's fake tensors do not take any memory.
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided:
                found[id(one)] = weakref.ref(one)
                # Ignore errors, because a failed measurement must not end a run.
                with contextlib.suppress(RuntimeError):
                    storage = one.untyped_storage()
                    # Use the address as the key, because views and tied tensors share a storage,
                    # which must be counted only once.
                    sizes[storage.data_ptr()] = storage.nbytes()
        self._tensors = list(found.values())
        return sum(sizes.values())

    def measured(self) -> dict[str, Any]:
        """Return the measurements of the run so far.

        Returns:
            - "peak_bytes": on a GPU, the peak size of all tensors according to torch's allocator;
              None on a CPU, for which torch does not measure this size.
            - "allocated_bytes": on a CPU, the peak size of tensors and libraries' buffers in a
              step, according to the C library's allocator; None if the allocator does not measure
              it.
            - "process_bytes": on a CPU, the peak of the process's resident memory since the
              prediction; None on a GPU.
            - "tokens_per_second", "learned_tokens_per_second", "samples_per_second": medians over
              all steps except the first two; None if there are no other steps.
        """
        # On a GPU, the peak is measured from the start of this process, so subtract the memory that
        # was allocated before the run.
        peak = peak_memory_bytes(self._hardware.device)
        on_gpu = self._hardware.device.type == "cuda"
        return {
            "peak_bytes": max(peak - self._level, 0) if on_gpu else None,
            "allocated_bytes": self._allocated.peak_bytes,
            "process_bytes": None if on_gpu else peak,
            **{
                name: statistics.median(found[_SLOW_STEPS:]) if found[_SLOW_STEPS:] else None
                for name, found in self._rates.items()
            },
        }

    def _predicted(self, forecast: Forecast) -> dict[str, Any]:
        """Return the forecast as JSON values. They include the speed in sequences and in learned
        tokens, which are the tokens that contribute to the loss.
        """
        rates = forecast.tokens_per_second
        factors = {
            "learned_tokens_per_second": self.label_share,
            "samples_per_second": 1 / self.seq_len,
        }
        return asdict(forecast) | {
            name: None if rates is None else [rate * factor for rate in rates]
            for name, factor in factors.items()
        }

    def write(self, run_folder: Path) -> str | None:
        """Write forecast.json, and return the measurements and the forecast as text for messages.
        Without a forecast, do nothing and return None.

        Raises:
            StorageError: the file can't be written.
        """
        if self.forecast is None:
            return None
        found = self.measured()
        planned = self._predicted(self.forecast)
        write_json(run_folder / FORECAST_NAME, {"predicted": planned, "measured": found})
        rates = {
            "tokens_per_second": "tokens/s",
            # Show this rate only if clearly fewer tokens contribute to the loss than are processed,
            # as in conversations.
            **({} if self.label_share >= MOSTLY_LEARNED else {_RATES[1]: "learned tokens/s"}),
        }
        speeds = []
        for name, unit in rates.items():
            if found[name] is not None:
                rate = planned[name]
                beside = "" if rate is None else f" (planned {rate[1]:,.0f})"
                speeds.append(f"{found[name]:,.0f} {unit}{beside}")
        memory = [
            f"{kind} {gib(size, expected)} (planned {gib(expected, size)})"
            for kind, size, expected in (
                ("tensors", found["peak_bytes"] or found["allocated_bytes"], planned["peak_bytes"]),
                ("process", found["process_bytes"], planned["process_bytes"]),
            )
            if size is not None and expected is not None
        ]
        parts = {"median step": speeds, "memory": memory}
        return "; ".join(f"{name}: {', '.join(told)}" for name, told in parts.items() if told)
