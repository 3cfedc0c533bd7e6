"""Kinds of GPUs that were measured: the constants of the speed model, fitted there.

`firstlight bench gpu` fits them (`speed_fit.py`). Two files of one format hold them by the GPU's
name in `gpus.GPUS`: measured_gpus.json beside this module, for everybody, and gpus.json in the
cache's calibration/ of the machine that measured, which goes first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from firstlight.data.remote import cache_folder
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json
from firstlight.hardware.gpus import GPU
from firstlight.planner.roofline import DEFAULT_SHARES, Range, Shares

#: Of the files; others are ignored.
FORMAT = 1

PACKAGED = Path(__file__).with_name("measured_gpus.json")

#: The fitted constants, with the least and the most that each can be. Those of the backward pass of
#: attention and of compiled launches follow from these.
BOUNDS: dict[str, tuple[float, float]] = {
    "products": (0.2, 1.0),
    "attention": (0.1, 1.0),
    "bandwidth": (0.3, 1.0),
    "launch_seconds": (1e-6, 60e-6),
    "fused_traffic": (0.6, 4.0),
}

#: A range is never narrower: runs of one program differ by as much.
_LEAST_ERROR = 0.03


@dataclass(frozen=True)
class MeasuredGpu:
    """The constants of one kind of GPU, and how far they carry.

    Attributes:
        constants: values by the names in `BOUNDS`.
        error: size of the relative error that 95 of 100 held-out configurations are within.
        fitted: number of configurations that the constants were fitted on.
        held_out: number of configurations that the error was measured on.
        torch: version of torch that was measured.
        context_bytes: memory of a process beside torch's allocator; None if it was not measured.
    """

    constants: Mapping[str, float]
    error: float
    fitted: int
    held_out: int
    torch: str
    context_bytes: int | None = None

    @property
    def source(self) -> str:
        """The origin of speeds that are predicted with it, for people."""
        return (
            f"measured on this GPU type: {self.fitted} configurations fitted, {self.held_out} "
            f"others within {self.error:.0%} (torch {self.torch})"
        )


def shares_of(constants: Mapping[str, float], error: float = 0.0, source: str = "") -> Shares:
    """The model's shares for fitted constants.

    Args:
        constants: values by the names in `BOUNDS`.
        error: relative width of the ranges, on each side.
        source: see `Shares`.
    """

    def share(value: float) -> Range:
        return Range(value / (1 + error), value, value * (1 + error))

    def seconds(value: float) -> Range:
        return Range(value * (1 + error), value, value / (1 + error))

    default = DEFAULT_SHARES
    backward = default.attention_backward.expected / default.attention.expected
    compiled = default.compiled_launch_seconds.expected / default.launch_seconds.expected
    return replace(
        default,
        products=share(constants["products"]),
        attention=share(constants["attention"]),
        attention_backward=share(constants["attention"] * backward),
        bandwidth=share(constants["bandwidth"]),
        kernel_seconds=seconds(default.kernel_seconds.expected),
        launch_seconds=seconds(constants["launch_seconds"]),
        compiled_launch_seconds=seconds(constants["launch_seconds"] * compiled),
        # Its width is that of the bandwidth.
        fused_traffic=Range.exact(constants["fused_traffic"]),
        source=source or default.source,
    )


def measured_gpu(gpu: GPU) -> MeasuredGpu | None:
    """What was measured of a GPU's kind; None if nothing was."""
    return _all_measured(cache_folder() / "calibration" / "gpus.json").get(gpu.name)


def shares_for(gpu: GPU) -> Shares:
    """The fitted shares of a GPU's kind, or those of the data sheet."""
    found = measured_gpu(gpu)
    if found is None:
        return DEFAULT_SHARES
    return shares_of(found.constants, max(found.error, _LEAST_ERROR), found.source)


def save_measured(path: Path, name: str, measured: MeasuredGpu) -> None:
    """Put a kind of GPU into a file of them, which is made where it is missing or damaged.

    Raises:
        StorageError: the disk refuses.
    """
    gpus = {key: asdict(value) for key, value in read_measured(path).items()}
    write_json(path, {"format": FORMAT, "gpus": {**gpus, name: asdict(measured)}})
    _all_measured.cache_clear()


def read_measured(path: Path) -> dict[str, MeasuredGpu]:
    """The kinds of GPUs of a file; {} where it is missing, damaged or of another format."""
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            return {}
        return {str(name): _parsed(value) for name, value in values["gpus"].items()}
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return {}


@functools.cache
def _all_measured(own: Path) -> dict[str, MeasuredGpu]:
    return read_measured(PACKAGED) | read_measured(own)


def _parsed(value: Mapping[str, Any]) -> MeasuredGpu:
    constants = {name: float(value["constants"][name]) for name in BOUNDS}
    error, context = float(value["error"]), value.get("context_bytes")
    in_bounds = all(low <= constants[name] <= high for name, (low, high) in BOUNDS.items())
    if not in_bounds or error < 0:
        raise ValueError("constants out of bounds")
    return MeasuredGpu(
        constants,
        error,
        int(value["fitted"]),
        int(value["held_out"]),
        str(value["torch"]),
        None if context is None else int(context),
    )
