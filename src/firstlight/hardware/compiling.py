"""Estimate how long torch.compile takes on a machine, and how much it speeds up training.

This module does not import torch, because `train TEXTS` uses it before torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

from firstlight.errors import StorageError
from firstlight.files.atomic import make_folder, write_json
from firstlight.files.cache import cache_folder

#: Usual compile times and speed-ups, keyed by kind of device and `efficiency.compile_regional`.
#: Each entry contains the seconds for compiling a model, the additional seconds per layer, the
#: speed-up of a compiled step, and the speed-up of a step that is limited by kernel launches.
#:
#: The following figures were measured:
#:
#: - On 2 cores of a CPU, compilation took 15 s. The speed-up was 1.4 for a width of 64 and 1.18 for
#:   a width of 192.
#: - On an H100, compiling a full GPT-2 124M took 28 s, and the speed-up was 2.07.
#: - On an H200, compiling the loss and one layer of width 448 took 12 s.
#:
#: The other GPU figures are estimates based on the number of kernels.
_USUAL = {
    "cpu": {True: (15.0, 0.0, 1.0, 1.0), False: (16.0, 0.5, 1.01, 1.01)},
    "cuda": {True: (12.0, 0.0, 1.8, 3.0), False: (4.0, 2.0, 2.07, 5.5)},
}
#: On a CPU, _CPU_WIDTH / (_CPU_WIDTH + width) is added to the speed-up, which is therefore higher
#: for narrow models. In a wide model, matrix products take most of the time, and compilation speeds
#: up only the operations between matrix products.
_CPU_WIDTH = 40.0
#: Compiling for a GPU takes _SLOW_HOST times as long on machines with at most _FEW_CORES cores.
_SLOW_HOST, _FEW_CORES = 3.0, 4
#: Minimum factor by which compilation takes longer while other programs use the cores.
_BUSY = 4.0
#: Compilation is chosen only if it saves at least this multiple of the compile time. The margin is
#: necessary because both times are estimates. On one machine, compilation took 1.5 times as long as
#: estimated, and a run of 50 s had time for only two steps.
_MARGIN = 1.5
#: File in the cache folder that stores the compile times.
_TIMES_NAME = "compile_times.json"


@dataclass(frozen=True)
class Compiling:
    """A way to compile the training step of a model. `NOT_COMPILED` is the mode without
    compilation.

    Attributes:
        compiles, regional: values of the recipe keys `efficiency.compile` and
            `efficiency.compile_regional`.
        seconds: expected compile time in seconds.
        gain: expected speed of a step, as a multiple of its speed without torch.compile.
        launch_gain: value of `gain` for a step whose duration is dominated by kernel launches.
    """

    compiles: bool
    regional: bool = False
    seconds: float = 0.0
    gain: float = 1.0
    launch_gain: float = 1.0

    def left_of(self, seconds: float) -> float:
        """Return how many of the available `seconds` are left for training steps after compilation.
        The result is at least a tenth of `seconds`, so that models can be compared even if
        compilation takes longer than that.
        """
        return max(seconds - self.seconds, 0.1 * seconds, 0.0)


NOT_COMPILED = Compiling(False)


def best_compile_mode(
    modes: Iterable[Compiling], seconds: Callable[[Compiling], float]
) -> Compiling:
    """Return the compilation mode with the shortest total time. The total is the run time plus
    `_MARGIN` times the compile time.

    Args:
        modes: candidate modes, usually including `NOT_COMPILED`.
        seconds: function that returns the run time with a mode, in seconds, excluding its compile
            time.
    """
    return min(modes, key=lambda mode: seconds(mode) + _MARGIN * mode.seconds)


@functools.cache
def _torch_version() -> str:
    return version("torch")


@dataclass(frozen=True)
class Compiler:
    """Compile times of torch.compile on one machine.

    Attributes:
        kind: device type for which code is compiled, "cpu" or "cuda".
        device: name of the device, or "" if it is not in this machine. Compile times are stored
            only for devices in this machine.
        cores: number of cores of the machine.
    """

    kind: str
    device: str
    cores: int

    def modes(self, size: tuple[int, int], *, is_busy: bool = False) -> list[Compiling]:
        """Return all compilation modes for a model, except for `NOT_COMPILED`.

        Args:
            size: hidden size and number of layers of the model.
            is_busy: True if other programs use the cores.
        """
        multiple, found = self._times().get(self._key, 1.0), []
        for regional, (_, _, gain, launch_gain) in _USUAL[self.kind].items():
            seconds = multiple * self._usual(regional, size)
            seconds *= _BUSY if is_busy else 1.0
            if self.kind == "cpu":
                gain += _CPU_WIDTH / (_CPU_WIDTH + size[0])
            found.append(Compiling(True, regional, seconds, gain, launch_gain))
        return found

    def remember(self, size: tuple[int, int], seconds: float, *, regional: bool) -> None:
        """Record a compile time that was measured with an empty inductor cache. The time is stored
        as a multiple of the usual compile time.

        Only the smallest multiple is kept, because other load on the machine can only make
        compilation slower.
        """
        multiple, times = seconds / self._usual(regional, size), self._times()
        times[self._key] = min(multiple, times.get(self._key, multiple))
        with contextlib.suppress(
            StorageError
        ):  # a cache that is not writable must not stop the run
            make_folder(cache_folder())
            write_json(cache_folder() / _TIMES_NAME, times)

    def _usual(self, regional: bool, size: tuple[int, int]) -> float:
        start, layer, _, _ = _USUAL[self.kind][regional]
        is_slow = self.kind == "cuda" and self.cores <= _FEW_CORES
        return (_SLOW_HOST if is_slow else 1.0) * (start + layer * size[1])

    @property
    def _key(self) -> str:
        # The last number is the version of `_USUAL`. It is part of the key because the stored
        # values are multiples of the times in `_USUAL`.
        return f"{self.device}, {self.cores} cores, torch {_torch_version()}, 2"

    def _times(self) -> dict[str, float]:
        """Return the stored multiples of the usual compile times, or {} if the file is missing or
        damaged.
        """
        if not self.device:
            return {}
        try:
            text = (cache_folder() / _TIMES_NAME).read_text(encoding="utf-8")
            return {key: float(multiple) for key, multiple in json.loads(text).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
