from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import CheckpointError, StorageError
from firstlight.files import disk as seam
from firstlight.files.disk import Disk
from firstlight.run_log.reader import read_json_lines, read_metrics
from firstlight.run_log.writer import JsonLines, keep_until, missing_steps


def write(path: Path, *records: dict[str, Any]) -> None:
    with closing(JsonLines(path)) as lines:
        for record in records:
            lines.write(record)


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_json_lines(path)]


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.floats(allow_nan=False, allow_infinity=False)
            | st.integers()
            | st.text(st.characters(exclude_categories=["Cs"]))
            | st.none(),
        ).map(lambda record: {**record, "step": len(record)})
    )
)
def test_metrics_written_and_read_are_bitwise_equal(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    write(path, *records)
    read = read_json_lines(path)
    assert read == records
    # == treats 0.0 like -0.0 and 1 like 1.0; repr does not.
    assert repr(read) == repr(records)
    assert path.read_bytes().count(b"\n") == len(records)


def test_metrics_line_is_readable_once_written(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with closing(JsonLines(path)) as lines:
        lines.write({"step": 1})
        assert steps(path) == [1]
        lines.write({"step": 2})
        lines.sync()
        assert steps(path) == [1, 2]


def test_metrics_existing_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1})
    write(path, {"step": 2})
    assert steps(path) == [1, 2]


def test_read_json_lines_missing_file_returns_no_records(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "none.jsonl") == []
    keep_until(tmp_path / "none.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_read_json_lines_skips_last_line_truncated_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first, second = {"step": 1, "text": "ä\n日"}, {"step": 2, "text": "🙂"}
    write(path, first)
    start = path.stat().st_size
    write(path, second)
    whole = path.read_bytes()
    for size in range(start, len(whole) + 1):
        path.write_bytes(whole[:size])
        # If only the newline is missing, the last line is still complete.
        expected = [first, second] if size >= len(whole) - 1 else [first]
        assert read_json_lines(path) == expected


@pytest.mark.parametrize(
    "line", [b"{broken\n", b"\n", b"\xff\n", b"\0\0\0\n", b'{"step": -1%s}\n' % (b"0" * 99)]
)
def test_read_json_lines_damaged_middle_line_raises_and_is_named(
    tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl:2 is damaged"):
        read_json_lines(path)


def test_metrics_append_after_incomplete_line_gives_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2}, {"step": 3})
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "train/lo')
    keep_until(path, 3)
    write(path, {"step": 4})
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        {"step": step} for step in (1, 2, 3, 4)
    ]


def test_keep_until_drops_and_reports_damaged_and_unordered_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n{"step": 2}\n\xff\n{"step": 9}\n')
    steps_kept, problem = keep_until(path, 4)
    assert steps_kept == steps(path) == [1, 2]
    assert problem is not None
    assert "m.jsonl:2 is damaged" in problem


@pytest.mark.parametrize(
    "there, kept",
    [
        ((1, 2, 30, 4, 5, 6, 7, 8), [1, 2, 4, 5, 6, 7, 8]),
        ((1, 2, 3, 4, 5, 6, 2, 8), [1, 2, 3, 4, 5, 6, 8]),
        ((1, 2, 2, 3), [1, 2, 3]),
        ((-4, 1, 2), [1, 2]),
    ],
)
def test_keep_until_wrong_step_drops_only_its_line(
    tmp_path: Path, there: tuple[int, ...], kept: list[int]
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *({"step": step} for step in there))
    before = path.read_bytes()
    found, problem = keep_until(path, 40)
    assert found == steps(path) == kept
    assert read_metrics(path).steps.tolist() == kept
    assert problem is not None
    assert f"{path} is damaged" in problem
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == before


def test_keep_until_unpaired_surrogate_stays_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "text": "\\ud800"}\n{"step": 2, "text": "é"}\n', encoding="utf-8")
    before = path.read_bytes()
    assert keep_until(path, 2) == ([1, 2], None)
    assert path.read_bytes() == before


def test_keep_until_first_of_two_lines_of_a_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    own = [{"step": step, "seed": 1} for step in (1, 2, 3)]
    write(path, *own, *({"step": step, "seed": 2} for step in (1, 2, 3)))
    keep_until(path, 3)
    assert read_json_lines(path) == own


def test_keep_until_drops_samples_without_text_and_keeps_those_of_one_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "samples.jsonl"
    good = [{"step": step, "prompt": "a", "text": "b"} for step in (0, 2, 2, 4)]
    write(path, *good[:2], {"step": 2}, {"step": 2, "prompt": "a", "text": None}, *good[2:])
    _, problem = keep_until(path, 4, samples=True)
    assert read_json_lines(path) == good
    assert problem is not None
    assert f"{path} is damaged" in problem


def test_keep_until_unreadable_log_is_set_aside_under_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2})
    before = path.read_bytes()
    (tmp_path / "m.jsonl.damaged").write_text("of an earlier time")
    monkeypatch.setattr("firstlight.run_log.reader.MAX_LOG_BYTES", 5)
    kept, problem = keep_until(path, 4)
    assert (kept, path.read_bytes()) == ([], b"")
    assert problem is not None
    assert problem.endswith(f"the old file is now {path}.damaged-2")
    assert (tmp_path / "m.jsonl.damaged-2").read_bytes() == before
    assert (tmp_path / "m.jsonl.damaged").read_text() == "of an earlier time"


@pytest.mark.parametrize(
    "there, first, last, missing",
    [
        ((1, 2, 3), 1, 3, ""),
        ((), 1, 0, ""),
        ((), 1, 3, "1 to 3"),
        ((2, 3, 5, 9), 1, 10, "1, 4, 6 to 8, 10"),
        ((11, 12), 11, 12, ""),
        ((11, 12), 10, 13, "10, 13"),
    ],
)
def test_missing_steps_are_named(
    there: tuple[int, ...], first: int, last: int, missing: str
) -> None:
    assert missing_steps(there, first, last) == missing


@given(st.integers(0, 12), st.integers(0, 12))
def test_keep_until_drops_later_lines_and_keeps_others_bitwise(
    tmp_path_factory: pytest.TempPathFactory, written: int, step: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    write(path, *({"step": n, "train/loss": 1 / (n + 7), "text": "é"} for n in range(1, 9)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:written]))
    keep_until(path, step)
    assert path.read_bytes() == b"".join(lines[: min(written, step)])


_OVER_THE_LIMIT = """
import resource, sys
from pathlib import Path
from firstlight.errors import StorageError
from firstlight.run_log.writer import JsonLines

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
lines = JsonLines(Path(sys.argv[1]))
written = 0
try:
    while True:
        lines.write({"step": written + 1, "text": "x" * 60})
        written += 1
except StorageError as error:
    print(written, error)
"""


@pytest.mark.usefixtures("forked_processes")
def test_metrics_line_rejected_by_disk_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _OVER_THE_LIMIT, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    written, _, message = done.stdout.partition(" ")
    assert "file size limit was reached" in message
    assert steps(path) == list(range(1, int(written) + 1))
    assert path.read_bytes().endswith(b"\n")
    assert path.stat().st_size > 800


class AlmostFull(Disk):
    """Accepts bytes while `room` allows, then none."""

    def __init__(self, *room: int) -> None:
        self.room = list(room)

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, memoryview(data)[: self.room.pop(0)])


def test_metrics_partial_write_is_completed_or_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An almost full disk accepts part of a line, then nothing."""
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1})
    before = path.read_bytes()
    with closing(JsonLines(path)) as lines:
        monkeypatch.setattr(seam, "disk", AlmostFull(4))
        with pytest.raises(StorageError, match="disk is full"):
            lines.write({"step": 2})
        assert path.read_bytes() == before
        monkeypatch.setattr(seam, "disk", AlmostFull(4, 4, 100))
        lines.write({"step": 2})
    assert steps(path) == [1, 2]
