"""The calibration store: read, written, filled by measuring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from firstlight.efficiency.allocator import keep_memory
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json
from firstlight.hardware.device import find_hardware
from firstlight.planner.calibration import (
    FORMAT,
    Calibration,
    Entry,
    features_of,
    machine_fingerprint,
    store_path,
)
from firstlight.planner.prediction import OperatorCount
from firstlight.planner.reference import Reference, measure_reference
from firstlight.planner.replay import can_replay, time_operator
from firstlight.planner.speed_kinds import is_free, smaller, transposed_factors
from firstlight.planner.trace import Operator

#: Of one operator's measurements, at a time.
_OPERATOR_SECONDS = 0.25
#: Of one call; of longer ones a part is timed.
_LONGEST_CALL = 0.1
#: How much more urgent it is to time what is like nothing that was timed.
_GUESSED_WEIGHT = 5.0
#: Operators that take less of a step are left to interpolation.
_LEAST_SHARE = 0.002


def load_calibration(
    folder: Path | None = None,
    reference: Reference | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Calibration:
    """This machine's store, empty where there is none or none that can be used: its notes say so.

    Args:
        folder: None is calibration/ in the cache.
        reference: what the reference operators take; None measures it.
        fingerprint: None is this machine's.
    """
    found = dict(fingerprint or machine_fingerprint())
    path = store_path(found, folder)
    reference = reference or measure_reference()
    if not path.exists():
        return Calibration(found, reference)
    try:
        entries = parse_store(read_json(path), found)
    except InputError as error:
        return Calibration(found, reference, notes=[f"calibration {path} is ignored: {error}"])
    return Calibration(found, reference, entries)


def parse_store(values: Any, fingerprint: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of a store.

    Raises:
        InputError: it is of another machine or format, or damaged.
    """
    try:
        if values["format"] != FORMAT:
            raise InputError(f"its format is {values['format']}, not {FORMAT}")
        if values["fingerprint"] != dict(fingerprint):
            raise InputError("it was measured on another machine or with other settings")
        return {key: _entry(value) for key, value in values["entries"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"it is damaged ({type(error).__name__}: {error})") from error


def _entry(value: Mapping[str, Any]) -> Entry:
    entry = Entry(
        str(value["group"]),
        tuple(float(size) for size in value["sizes"]),
        float(value["work"]),
        str(value["reference"]),
        [float(ratio) for ratio in value["ratios"]],
    )
    if entry.reference not in ("float32", "bfloat16", "stream") or not entry.ratios:
        raise ValueError("an entry without times")
    if min(entry.ratios) <= 0 or entry.work < 0:
        raise ValueError("a time that is not positive")
    return entry


def save_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Write the store; returns its path.

    Raises:
        StorageError: the disk refuses.
    """
    path = store_path(calibration.fingerprint, folder)
    write_json(path, calibration.to_json())
    return path


def measure_operators(
    calibration: Calibration,
    counts: Iterable[OperatorCount],
    seconds: float = 4.0,
) -> None:
    """Time operators of a step, those that cost most first: at first what is not in the store,
    then what is, once more.

    Args:
        calibration: gets the measurements.
        counts: of a step.
        seconds: no measurement begins after it.
    """
    counts = list(counts)
    transposed = transposed_factors(counts)
    keep_memory(find_hardware("cpu"))
    costs: dict[Operator, float] = {}
    seen: dict[Operator, float] = {}
    for entry in counts:
        one = entry.operator
        if not is_free(one):
            turned = transposed.get(one, (False, False))
            estimate = calibration.seconds(one, turned)
            costs[one] = entry.count * estimate.seconds
            # What is only guessed may cost far more.
            seen[one] = costs[one] * (_GUESSED_WEIGHT if estimate.source == "guessed" else 1.0)
    least = _LEAST_SHARE * sum(costs.values())
    parts = {one: _part(one, transposed.get(one, (False, False)), calibration) for one in costs}
    wanted = [one for one in costs if seen[one] >= least and can_replay(parts[one])]

    def order(one: Operator) -> tuple[bool, float]:
        features = features_of(parts[one], transposed.get(one, (False, False)))
        return features.key in calibration.entries, -seen[one]

    end = time.perf_counter() + seconds
    for one in sorted(wanted, key=order):
        left = end - time.perf_counter()
        if left <= 0:
            break
        turned = transposed.get(one, (False, False))
        found = time_operator(parts[one], turned, most_seconds=min(_OPERATOR_SECONDS, left))
        calibration.add(features_of(parts[one], turned), found)


def _part(operator: Operator, transposed: tuple[bool, bool], calibration: Calibration) -> Operator:
    """As much of an operator as can be timed."""
    part = operator
    while calibration.seconds(part, transposed).seconds > _LONGEST_CALL or not can_replay(part):
        less = smaller(part)
        if less is None:
            break
        part = less
    return part
