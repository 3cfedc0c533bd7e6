"""The time that torch.compile takes on a machine, and the speed that it gains.

This module does not import torch, because the first line of `train TEXTS` comes before that.
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

#: By kind of device, and by `efficiency.compile_regional`: seconds of compiling a model, further
#: seconds for each of its layers, speed of a compiled step as a multiple, and the same for a step
#: that takes the time of launching its kernels.
#:
#: Measured: on 2 cores of a CPU, the seconds (by processor time, beside other programs) and
#: _CPU_WIDTH (1.18 times the speed for a width of 192); on an H100, 28 s and 2.07 times the speed
#: for a whole GPT-2 124M. The other figures for GPUs are estimates from the numbers of kernels.
_USUAL = {
    "cpu": {True: (13.0, 0.0, 1.0, 1.0), False: (14.0, 0.5, 1.0, 1.0)},
    "cuda": {True: (8.0, 0.0, 1.8, 3.0), False: (4.0, 2.0, 2.07, 5.5)},
}
#: On a CPU, a compiled step has 1 + _CPU_WIDTH / width times the speed: products between which
#: there is less to gain take most of the time of a wide model.
_CPU_WIDTH = 40.0
#: Compiling for a GPU takes this multiple on a machine with at most this number of cores.
_SLOW_HOST, _FEW_CORES = 3.0, 4
#: Compiling takes at least this multiple beside other programs.
_BUSY = 4.0
#: Multiple of its time that compiling has to save, because time and gain are estimates.
_MARGIN = 1.2
#: File in the cache folder with the times of compiling.
_TIMES_NAME = "compile_times.json"


@dataclass(frozen=True)
class Compiling:
    """A way to compile the training step of a model, or `NOT_COMPILED`.

    Attributes:
        compiles, regional: the values of `efficiency.compile` and `efficiency.compile_regional`.
        seconds: expected seconds of compiling.
        gain: expected speed of a step as a multiple of that without torch.compile.
        launch_gain: the same for a step that takes the time of launching its kernels.
    """

    compiles: bool
    regional: bool = False
    seconds: float = 0.0
    gain: float = 1.0
    launch_gain: float = 1.0


NOT_COMPILED = Compiling(False)


def best_way(ways: Iterable[Compiling], seconds: Callable[[Compiling], float]) -> Compiling:
    """The way to compile with which a run takes the least time.

    Args:
        ways: the ways among which to choose, mostly with `NOT_COMPILED`.
        seconds: function from a way to the seconds of the run, without those of compiling.
    """
    return min(ways, key=lambda way: seconds(way) + _MARGIN * way.seconds)


@functools.cache
def _torch_version() -> str:
    return version("torch")


@dataclass(frozen=True)
class Compiler:
    """torch.compile on a machine.

    Attributes:
        kind: "cpu" or "cuda", the kind of the device that is compiled for.
        device: name of a device of this machine, whose times are remembered; "" for another one.
        cores: number of cores of the machine.
        is_busy: True if other programs use the cores.
    """

    kind: str
    device: str
    cores: int
    is_busy: bool = False

    def ways(self, size: tuple[int, int]) -> list[Compiling]:
        """The ways to compile a model of a hidden size and a number of layers; not compiling is not
        among them."""
        times, found = self._times(), []
        for regional, (_, _, gain, launch_gain) in _USUAL[self.kind].items():
            usual = times.get(self._key(regional), 1.0) * self._usual(regional, size)
            seconds = times.get(self._key(regional, size), usual)
            seconds *= _BUSY if self.is_busy else 1.0
            if self.kind == "cpu":
                gain += _CPU_WIDTH / size[0]
            found.append(Compiling(True, regional, seconds, gain, launch_gain))
        return found

    def remember(
        self, size: tuple[int, int], seconds: float, *, regional: bool, cold: bool
    ) -> None:
        """Keep the time that compiling a model took: for its size and, if nothing was in inductor's
        cache (`cold`), as a multiple of the usual time for others."""
        times = self._times() | {self._key(regional, size): seconds}
        if cold:
            times[self._key(regional)] = seconds / self._usual(regional, size)
        with contextlib.suppress(StorageError):  # a cache that can't be written ends no run
            make_folder(cache_folder())
            write_json(cache_folder() / _TIMES_NAME, times)

    def _usual(self, regional: bool, size: tuple[int, int]) -> float:
        start, layer, _, _ = _USUAL[self.kind][regional]
        is_slow = self.kind == "cuda" and self.cores <= _FEW_CORES
        return (_SLOW_HOST if is_slow else 1.0) * (start + layer * size[1])

    def _key(self, regional: bool, *size: tuple[int, int]) -> str:
        part = "layer and loss" if regional else "model"
        where = f"{self.device}, {self.cores} cores, torch {_torch_version()}"
        return ", ".join([where, part, *(f"{layers} layers of {width}" for width, layers in size)])

    def _times(self) -> dict[str, float]:
        """The remembered times; {} if there are none, or if the file is damaged."""
        if not self.device:
            return {}
        try:
            text = (cache_folder() / _TIMES_NAME).read_text(encoding="utf-8")
            return {key: float(seconds) for key, seconds in json.loads(text).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
