"""Reading logs while another process writes them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from firstlight.run_log.reader import LineFollower, StepFollower


def append(path: Path, *lines: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_follower_returns_each_line_once_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    follower = LineFollower(path)
    assert follower.new() == ([], False)
    append(path, {"a": 1}, {"a": 2})
    with path.open("ab") as file:
        file.write(b'{"a": ')
    assert follower.new() == ([{"a": 1}, {"a": 2}], False)
    assert follower.new() == ([], False)
    with path.open("ab") as file:
        file.write(b'3}\n{"a": 4}\n')
    assert follower.new() == ([{"a": 3}, {"a": 4}], False)
    follower.close()


def test_follower_skips_lines_that_are_not_objects(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\nnull\n{]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    follower = LineFollower(path)
    assert follower.new() == ([{"a": 1}, {"a": 2}], False)
    follower.close()


def test_follower_replaced_file_is_read_from_start(tmp_path: Path) -> None:
    path, other = tmp_path / "log.jsonl", tmp_path / "other"
    follower = LineFollower(path)
    append(path, {"a": 1}, {"a": 2})
    follower.new()
    # Longer than the first text, so the size alone does not reveal the change.
    append(other, {"a": 1}, {"b": 2}, {"b": 3})
    os.replace(other, path)
    assert follower.new() == ([{"a": 1}, {"b": 2}, {"b": 3}], True)
    path.unlink()
    assert follower.new() == ([], True)
    append(path, {"c": 1})
    assert follower.new() == ([{"c": 1}], False)
    # Truncated in place.
    path.write_text("", encoding="utf-8")
    assert follower.new() == ([], True)
    follower.close()


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=2)), st.data())
def test_follower_any_split_gives_same_objects(records: list[dict[str, str]], data: Any) -> None:
    content = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        follower = LineFollower(path)
        for start, end in zip([0, *places], [*places, len(content)], strict=True):
            with path.open("ab") as file:
                file.write(content[start:end])
            found += follower.new()[0]
        follower.close()
    assert found == records


def test_follower_pairs_steps_with_texts_written_after_them(tmp_path: Path) -> None:
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    follower = StepFollower(metrics, samples)
    append(metrics, {"step": 1})
    append(samples, {"step": 2, "text": "a"}, {"step": 2, "text": "b"})
    assert follower.new() == [({"step": 1}, [])]
    append(metrics, {"step": 2}, {"step": 3}, {"no": "step"})
    both = [{"step": 2, "text": "a"}, {"step": 2, "text": "b"}]
    assert follower.new() == [({"step": 2}, both), ({"step": 3}, [])]
    # Back to step 1; the process that continues writes a different text.
    for path in (metrics, samples):
        path.unlink()
    append(samples, {"step": 2, "text": "c"})
    append(metrics, {"step": 1}, {"step": 2})
    assert follower.new() == [({"step": 1}, []), ({"step": 2}, [{"step": 2, "text": "c"}])]
    follower.close()
