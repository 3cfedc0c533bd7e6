"""Times of this machine's operators: measured, kept in a file, and used to estimate others.

Each kind of machine has a store, a JSON file in the cache's calibration/ (see
`files.cache.cache_folder`). The file's name is a hash of the processor, the number of threads,
torch's version and the settings of its threads and allocator, which the file contains as well. For
each operator that was timed, the file has the last few times, each divided by the time of a
reference operator at that moment. A time is predicted as the median of these ratios times the
present time of the reference, because machines in data centres are not always equally fast.

An operator that was not measured is estimated from the most similar ones (`_interpolated`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from firstlight.files.cache import cache_folder
from firstlight.hardware.device import find_hardware
from firstlight.planner.memory.kernels import Layout, Operator
from firstlight.planner.speed.gpu import attention_flops
from firstlight.planner.speed.operators import (
    is_attention,
    is_free,
    is_grouped,
    is_masked,
    kind_of,
    product_of,
    smaller,
    streamed_bytes,
)

#: Format of the file; files of other formats are ignored.
FORMAT = 2
#: Times of one operator that are kept.
_KEPT_TIMES = 7
#: Largest distance of two operators, in base-2 logarithms of their sizes (a factor of 4 in one
#: size), at which the rate of one counts as interpolated from the other, not as guessed.
_NEAR = 2.0
#: Assumed rate of attention before it is measured, as a share of the rate of fp32 products.
_FUSED_SHARE = 0.2
#: Environment variables that change the speed of torch's operators on a CPU.
_SETTINGS = (
    "GOMP_SPINCOUNT",
    "OMP_NUM_THREADS",
    "KMP_BLOCKTIME",
    "THP_MEM_ALLOC_ENABLE",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
)

Source = Literal["measured", "interpolated", "guessed"]


def machine_fingerprint() -> dict[str, Any]:
    """The properties of a machine and process that must be equal for times to be comparable."""
    hardware = find_hardware("cpu")
    return {
        "cpu": hardware.name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def store_path(fingerprint: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Path of a machine's store.

    Args:
        fingerprint: see `machine_fingerprint`.
        folder: folder of the stores; None is calibration/ in the cache.
    """
    text = json.dumps(fingerprint, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return (folder or cache_folder() / "calibration") / f"{name}.json"


@dataclass(frozen=True)
class Features:
    """Properties of an operator that determine its time.

    Attributes:
        key: identity of exactly this operator.
        group: name shared by operators whose rates are comparable.
        sizes: base-2 logarithms of sizes; their distance measures similarity within the group.
        work: FLOPs or bytes of one call.
        reference: name of the reference operator whose speed varies with the machine as this
            operator's does, see `Reference`.
    """

    key: str
    group: str
    sizes: tuple[float, ...]
    work: float
    reference: str


def features_of(operator: Operator, transposed: tuple[bool, bool] = (False, False)) -> Features:
    """The properties of an operator that determine its time.

    Args:
        operator: the operator.
        transposed: memory layout of a product's factors, see `transposed_factors`.
    """
    name = operator.base_name
    shown = " ".join(map(_layout_text, operator.inputs[:6]))
    results = " ".join(map(_layout_text, operator.outputs[:3]))
    key = f"{name} {shown} -> {results} {operator.options}"
    if kind_of(operator) == "matrix_products":
        product = product_of(operator, transposed)
        dtype = _dtype_text(product.dtype)
        sizes = tuple(map(_log2, (product.batch, product.m, product.n, product.k)))
        # Many small products in one call, each with its own weight, have another rate.
        group = f"product {dtype} {name if is_grouped(operator) else product.layout}"
        # Other dtypes have no reference: their measurements are relative to fp32's.
        reference = dtype if dtype == "bfloat16" else "float32"
        return Features(f"{product.layout} {key}", group, sizes, product.flops, reference)
    if is_attention(operator):
        shape, kept = next(layout for layout in operator.inputs if len(layout[0]) == 4)
        batch, heads, tokens, size = shape
        masked = "masked" if is_masked(operator) else "causal"
        group = f"{name} {_dtype_text(kept)} {masked} {size}"
        work = attention_flops(operator)
        return Features(key, group, (_log2(tokens), _log2(batch * heads)), work, "float32")
    moved = streamed_bytes(operator)
    # Lists of all parameters are told apart by their number and bytes, not by hundreds of shapes.
    if len(operator.inputs) > 6:
        key += f" {len(operator.inputs)} {moved}"
    dtypes = ",".join(
        dict.fromkeys(_dtype_text(d) for _, d in (*operator.inputs[:2], *operator.outputs[:1]))
    )
    return Features(key, f"{name} {dtypes}", (_log2(moved),), moved, "stream")


def _layout_text(layout: Layout) -> str:
    return f"{_dtype_text(layout[1])}{list(layout[0])}".replace(" ", "")


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _log2(value: float) -> float:
    return math.log2(max(value, 1.0))


@dataclass
class Entry:
    """An operator that was timed.

    Attributes:
        group, sizes, work: see `Features`.
        ratios: the last few ratios of its time to the reference's.
        reference: see `Features`.
    """

    group: str
    sizes: tuple[float, ...]
    work: float
    reference: str
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class OperatorTime:
    """An operator's time.

    Attributes:
        seconds: duration of one call.
        source: "measured" for a time of this operator, "interpolated" from similar operators,
            "guessed" from less similar ones or from a reference operator.
    """

    seconds: float
    source: Source


@dataclass(frozen=True)
class Reference:
    """Current times of the reference operators.

    Attributes:
        seconds: durations by name: "float32", "bfloat16" (products) and "stream".
        rates: FLOP/s or bytes a second, by the same names.
        call_seconds: cost of an operator call alone (Python, autograd, dispatch), see
            `store._call_seconds`.
    """

    seconds: dict[str, float]
    rates: dict[str, float]
    call_seconds: float


class Calibration:
    """The times of this machine's operators.

    Args:
        fingerprint: description of the machine, see `machine_fingerprint`.
        reference: present durations of the reference operators.
        entries: timed operators by `Features.key`.
        notes: remarks on the store, as text for the user.
    """

    def __init__(
        self,
        fingerprint: Mapping[str, Any],
        reference: Reference,
        entries: Mapping[str, Entry] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.fingerprint, self.reference = dict(fingerprint), reference
        self.entries = dict(entries or {})
        self.notes = list(notes)
        self._groups: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            self._groups.setdefault(entry.group, []).append(entry)

    def seconds(
        self, operator: Operator, transposed: tuple[bool, bool] = (False, False)
    ) -> OperatorTime:
        """Seconds of one call of an operator.

        Args:
            transposed: memory layout of a product's factors, see `transposed_factors`.
        """
        if is_free(operator):
            return OperatorTime(0.0, "measured")
        features = features_of(operator, transposed)
        # Of an operator that is too large, a smaller one (`smaller`) was timed, at the same rate.
        part: Operator | None = operator
        while part is not None:
            of_part = features_of(part, transposed)
            if of_part.key in self.entries and of_part.work:
                found = self.estimate(of_part)
                return OperatorTime(found.seconds * features.work / of_part.work, found.source)
            part = smaller(part)
        return self.estimate(features)

    def estimate(self, features: Features) -> OperatorTime:
        """Estimated seconds of an operator of these features."""
        known = self.entries.get(features.key)
        if known is not None and known.ratios:
            return OperatorTime(known.ratio * self._now(known.reference), "measured")
        near = self._groups.get(features.group, [])
        if near:
            return self._interpolated(features, near)
        alike = self._alike(features)
        if alike:
            found = self._interpolated(features, alike)
            is_product = features.group.startswith("product")
            return found if is_product else OperatorTime(found.seconds, "guessed")
        return OperatorTime(self._guess(features), "guessed")

    def _guess(self, features: Features) -> float:
        """Seconds at the rate of the reference operator; for attention, the operators with two
        sizes, at `_FUSED_SHARE` of it."""
        rate = self.reference.rates[features.reference]
        return features.work / (rate if len(features.sizes) != 2 else _FUSED_SHARE * rate)

    def _alike(self, features: Features) -> list[Entry]:
        """Entries of related groups: products of the dtype in any layout; streams of any kind."""
        first = features.group.split()[:2]
        if first[0] == "product":
            return [e for e in self.entries.values() if e.group.split()[:2] == first]
        if features.reference != "stream":
            return []
        return [e for e in self.entries.values() if e.reference == "stream" and e.work]

    def _interpolated(self, features: Features, near: list[Entry]) -> OperatorTime:
        """Time from the rates of other entries: exact at their sizes, never beyond their range.

        With one size, linear between the logarithms of the two entries around it; beyond all
        entries, the rate of the nearest. With several sizes, the mean of the four nearest entries,
        weighted by the inverse square of their distance in the logarithms of sizes (Shepard 1968).
        """
        timed = [entry for entry in near if entry.ratios]
        if not timed:
            return OperatorTime(self._guess(features), "guessed")
        ranked = sorted(timed, key=lambda entry: math.dist(entry.sizes, features.sizes))
        if len(features.sizes) == 1:
            weights = _line(ranked, features.sizes[0])
        else:
            distances = [math.dist(entry.sizes, features.sizes) for entry in ranked[:4]]
            weights = [
                (entry, 1.0 / (distance * distance + 1e-9))
                for entry, distance in zip(ranked, distances, strict=False)
            ]
        # Logarithms, so that twice as fast and half as fast cancel out.
        total = sum(weight * self._log_pace(entry) for entry, weight in weights)
        pace = math.exp(total / sum(weight for _, weight in weights))
        nearest = math.dist(ranked[0].sizes, features.sizes)
        source: Source = "interpolated" if nearest <= _NEAR else "guessed"
        return OperatorTime(features.work * pace, source)

    def _log_pace(self, entry: Entry) -> float:
        """The logarithm of an entry's seconds for each FLOP or byte."""
        return math.log(entry.ratio * self._now(entry.reference) / max(entry.work, 1.0))

    def _now(self, reference: str) -> float:
        return self.reference.seconds[reference]

    def add(self, features: Features, seconds: float) -> None:
        """Add a measurement that was made now.

        Args:
            features: features of the operator.
            seconds: duration of one call.
        """
        entry = self.entries.get(features.key)
        if entry is None:
            entry = Entry(features.group, features.sizes, features.work, features.reference)
            self.entries[features.key] = entry
            self._groups.setdefault(entry.group, []).append(entry)
        # The median of the last few counts: a single time may be that of a busy moment.
        entry.ratios = [*entry.ratios, seconds / self._now(features.reference)][-_KEPT_TIMES:]

    def to_json(self) -> dict[str, Any]:
        """The content of the store."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "entries": {
                key: {
                    "group": entry.group,
                    "sizes": list(entry.sizes),
                    "work": entry.work,
                    "reference": entry.reference,
                    "ratios": entry.ratios,
                }
                for key, entry in self.entries.items()
            },
        }


def _line(ranked: Sequence[Entry], size: float) -> list[tuple[Entry, float]]:
    """The nearest entry below a size and the nearest above, with their weights.

    Args:
        ranked: entries with one size each, the nearest first.
    """
    below = next((entry for entry in ranked if entry.sizes[0] <= size), None)
    above = next((entry for entry in ranked if entry.sizes[0] >= size), None)
    if below is None or above is None:
        return [(ranked[0], 1.0)]
    width = above.sizes[0] - below.sizes[0]
    share = (size - below.sizes[0]) / width if width else 0.0
    return [(below, 1.0 - share), (above, share)]
