"""The numbers behind the curves: reading, thinning and formatting them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.console import compact, rounded
from firstlight.errors import CheckpointError
from firstlight.run_log.reader import Series, read_metrics, smoothed, thin

_FINITE = st.floats(-1e300, 1e300)


def series(values: list[float]) -> Series:
    return Series(np.arange(1, len(values) + 1, dtype=np.float64), np.array(values))


def write(path: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + end, encoding="utf-8")
    return path


# --- thinning --------------------------------------------------------------------------------


@given(st.lists(_FINITE, max_size=300), st.integers(1, 20))
def test_thinning_keeps_ends_and_extremes(values: list[float], buckets: int) -> None:
    whole = series(values)
    found = thin(whole, buckets)
    assert len(found) <= 2 * buckets + 2
    if len(values) <= 2 * buckets + 2:
        assert found is whole
    points = list(zip(found.x.tolist(), found.y.tolist(), strict=True))
    assert set(points) <= set(zip(whole.x.tolist(), whole.y.tolist(), strict=True))
    assert found.x.tolist() == sorted(set(found.x.tolist()))
    if values:
        assert points[0] == (1.0, values[0])
        assert points[-1] == (float(len(values)), values[-1])
        assert found.y.min() == min(values)
        assert found.y.max() == max(values)


@given(st.lists(_FINITE, min_size=30, max_size=300))
def test_thinning_keeps_extremes_of_every_stretch(values: list[float]) -> None:
    buckets = 10
    found = thin(series(values), buckets)
    for number in range(buckets):
        start, end = (n * len(values) // buckets for n in (number, number + 1))
        inside = found.y[(found.x > start) & (found.x <= end)]
        assert inside.min() == min(values[start:end])
        assert inside.max() == max(values[start:end])


# --- reading ---------------------------------------------------------------------------------


def test_read_metrics_returns_columns_exactly(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"step": s, "train/loss": 1 / s, "count": s, "skipped": s == 3} for s in range(1, 9001)
    ]
    records[5]["train/loss"] = None
    records[8500]["val/loss"] = 0.1
    metrics = read_metrics(write(tmp_path / "m", records))
    assert metrics.steps.tolist() == list(range(1, 9001))
    losses = metrics.series("train/loss")
    assert losses.x.tolist() == [s for s in range(1, 9001) if s != 6]
    assert losses.y.tolist() == [1 / s for s in range(1, 9001) if s != 6]
    assert metrics.series("val/loss").x.tolist() == [8501.0]
    assert metrics.last("val/loss") == 0.1
    assert metrics.last("other") is None
    assert len(metrics.series("other")) == 0


def test_read_metrics_skips_non_finite_values(tmp_path: Path) -> None:
    values: list[Any] = [None, "text", [1], {"a": 1}, math.nan, math.inf, 10**400, 1e301, 2.5]
    records = [{"step": step, "a": value} for step, value in enumerate(values)]
    path = tmp_path / "m"
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in records if r["a"] != 10**400), encoding="utf-8"
    )
    metrics = read_metrics(path)
    assert metrics.series("a").y.tolist() == [2.5]
    assert metrics.series("a").x.tolist() == [8.0]


def test_metrics_series_supports_steps_tokens_and_hours(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "v": 1.0, "tokens_seen": 10, "seconds": 1800.0, "save_stall_seconds": 0.0},
        {"step": 2, "v": 2.0, "tokens_seen": 20, "seconds": 1800.0, "save_stall_seconds": 900.0},
        {"step": 3, "v": 3.0, "seconds": 900.0},
    ]
    metrics = read_metrics(write(tmp_path / "m", records))
    assert metrics.series("v", "step").x.tolist() == [1, 2, 3]
    assert metrics.series("v", "tokens").x.tolist() == [10, 20]
    assert metrics.series("v", "tokens").y.tolist() == [1, 2]
    assert metrics.series("v", "hours").x.tolist() == [0.5, 1.25, 1.5]


@pytest.mark.parametrize("end", ['{"step": 3, "a"', '{"step": 3}}\n', "\x00\x00\x00"])
def test_read_metrics_skips_incomplete_last_line(tmp_path: Path, end: str) -> None:
    metrics = read_metrics(write(tmp_path / "m", [{"step": 1}, {"step": 2}], end))
    assert metrics.steps.tolist() == [1, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": true}', '{"step": 1.5}', "", '{"step": 1}'])
def test_read_metrics_damaged_middle_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"m:2 is damaged"):
        read_metrics(path)


def test_read_metrics_missing_or_empty_file_has_no_steps(tmp_path: Path) -> None:
    assert len(read_metrics(tmp_path / "m").steps) == 0
    (tmp_path / "m").write_bytes(b"")
    assert len(read_metrics(tmp_path / "m").hours) == 0


def test_smoothing_keeps_positions_of_curve() -> None:
    found = smoothed(series([3.0] * 200))
    assert found.x.tolist() == list(range(1, 201))
    assert found.y == pytest.approx(3.0)


@pytest.mark.parametrize(
    "value, text, short",
    [
        (0, "0", "0"),
        (1500, "1.5k", "1,500"),
        (1_000_000, "1M", "1M"),
        (2.5e9, "2.5B", "2.5B"),
        (0.00025, "0.00025", "0.00025"),
        (1e-7, "1e-07", "1.000e-07"),
        (4494.2, "4.4942k", "4,494"),
        (639_840, "639.84k", "639.8k"),
        (3.14159265, "3.14159265", "3.142"),
        (-1500, "-1.5k", "-1,500"),
        (1e20, "1e+20", "1.000e+20"),
        (9999.7, "9.9997k", "10k"),
    ],
)
def test_numbers_are_formatted_compactly(value: float, text: str, short: str) -> None:
    assert compact(value) == text
    assert rounded(value) == short
