"""The record of `make test-gpu`: what has passed is not run again before its source changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu import record
from gpu.record import Record, first_things_first

TEST = "tests/gpu/test_alone.py::test_one"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("src/firstlight/a.py", "tests/gpu/test_alone.py", "tests/gpu/test_other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1", encoding="utf-8")
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    monkeypatch.setattr(record, "_FOLDER", tmp_path / "tests/gpu")
    return tmp_path


@pytest.mark.parametrize(
    "changed, is_green",
    [
        ("tests/gpu/test_other.py", True),
        ("tests/gpu/test_alone.py", False),
        ("tests/gpu/helper.py", False),
        ("src/firstlight/a.py", False),
    ],
)
def test_gpu_record_passed_test_counts_until_its_file_or_source_changes(
    changed: str, is_green: bool, checkout: Path
) -> None:
    path = checkout / "record.json"
    Record(path, "cuda").note(TEST, passed=True)
    assert Record(path, "cuda").has_passed(TEST)
    assert not Record(path, "cpu").has_passed(TEST)
    (checkout / changed).write_text("2", encoding="utf-8")
    assert Record(path, "cuda").has_passed(TEST) == is_green
    assert not Record(path, "cuda").has_failed(TEST)


def test_gpu_record_failed_or_missing_test_counts_as_failed(checkout: Path) -> None:
    found = Record(checkout / "record.json", "cuda")
    assert found.has_failed(TEST)
    found.note(TEST, passed=True)
    assert not found.has_failed(TEST)
    found.note(TEST, passed=False)
    assert Record(checkout / "record.json", "cuda").has_failed(TEST)


def test_gpu_record_workers_begin_with_urgent_tests_and_lose_none() -> None:
    tests = list(range(10))
    found = first_things_first(tests, [number in (3, 8) for number in tests], workers=2)
    assert found == [3, 0, 1, 2, 4, 8, 5, 6, 7, 9]
    assert first_things_first(tests, [False] * 10, workers=3) == tests
