"""Tests of Parquet files whose rows share values: memory use is bounded, and ordinary text is read
quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firstlight.data.records import read_records
from firstlight.data.sources import find_sources
from firstlight.data.tables import _longest_found, _longest_shared, _page_head, _plan
from firstlight.errors import InputError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

_MEGABYTE = 1 << 20


def plan_of(path: Path, columns: list[str] | None = None) -> tuple[int, list[str]]:
    """Return (number of rows read at a time, columns that share values in memory)."""
    return _plan(path, parquet.read_metadata(path), columns)


def write(path: Path, values: Any, **options: Any) -> Path:
    """Write a file with a single column, `text`, without pyarrow's own schema, as other programs
    do.
    """
    parquet.write_table(pyarrow.table({"text": values}), path, store_schema=False, **options)
    return path


def shared(text: str, rows: list[int | None]) -> Any:
    """Return rows that share a text or are null."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(rows, pyarrow.int32()), [text])


def values_of(path: Path, key: str | None = "text") -> list[Any]:
    return [record.value for record in read_records(find_sources([path], (".parquet",)), key)]


def test_parquet_plan_short_texts_use_large_batches(tmp_path: Path) -> None:
    # The dictionary page is 1.6 MB; each of its texts has 16 characters.
    path = write(tmp_path / "a.parquet", [f"{row:016}" for row in range(80_000)])
    assert plan_of(path) == (1024, [])
    assert [value["text"] for value in values_of(path)] == [f"{row:016}" for row in range(80_000)]
    page_bytes = _longest_shared(path, parquet.read_metadata(path).row_group(0).column(0))
    assert _longest_found(path, "text", 0, page_bytes) == 16
    # The dictionary page is larger than the part that is read.
    assert _longest_found(path, "text", 0, page_bytes + 1) == page_bytes + 1


@pytest.mark.parametrize(
    ("size", "rows", "columns"), [(1, 64, []), (4, 16, []), (9, 1024, ["text"])]
)
@pytest.mark.parametrize("first", [0, None])
def test_parquet_plan_long_text_uses_few_rows_or_memory(
    tmp_path: Path, size: int, rows: int, columns: list[str], first: int | None
) -> None:
    # Four bytes less, so that the dictionary page has exactly this size. A null hides the
    # dictionary.
    text = "a" * (size * _MEGABYTE - 4)
    path = write(tmp_path / "a.parquet", shared(text, [first, *[0] * 2000]), compression="zstd")
    assert plan_of(path) == (rows, columns)


def test_parquet_plan_long_texts_share_values_in_memory(tmp_path: Path) -> None:
    # Nulls first, so that the first page does not show the shared text.
    rows = [None, *[0] * 2000]
    path = write(tmp_path / "a.parquet", shared("a" * 20 * _MEGABYTE, rows), compression="zstd")
    assert plan_of(path) == (1024, ["text"])
    before = pyarrow.total_allocated_bytes()
    with parquet.ParquetFile(path, read_dictionary=["text"]) as file:
        for batch in file.iter_batches(batch_size=1024):
            assert len(batch.column(0).dictionary) == 1
            assert pyarrow.total_allocated_bytes() - before < 100 * _MEGABYTE
    with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
        values_of(path)


#: Counts the bytes allocated by a test. It must live as long as the memory.
_COUNTED = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())


def test_parquet_distinct_texts_of_large_row_group_use_memory_of_one_batch(tmp_path: Path) -> None:
    texts = [f"{row:06}" + "a" * 4000 for row in range(10_000)]
    path = write(tmp_path / "a.parquet", texts)
    assert parquet.read_metadata(path).num_row_groups == 1
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(_COUNTED)
    try:
        assert [value["text"] for value in values_of(path)] == texts
    finally:
        pyarrow.set_memory_pool(usual)
    # A batch is 4 MB, and the row group 40 MB.
    assert _MEGABYTE < _COUNTED.max_memory() < 16 * _MEGABYTE


def test_parquet_plan_counts_other_columns_only_if_read(tmp_path: Path) -> None:
    table = {"text": ["x"] * 3, "other": shared("a" * 20 * _MEGABYTE, [0, 0, 0])}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet", store_schema=False)
    assert plan_of(tmp_path / "a.parquet", ["text"]) == (1024, [])
    assert plan_of(tmp_path / "a.parquet") == (1024, ["other"])


def test_parquet_plan_shares_list_texts_if_rows_may_hold_many(tmp_path: Path) -> None:
    lists = pyarrow.ListArray.from_arrays([0, 5000], shared("a" * _MEGABYTE, [0] * 5000))
    path = write(tmp_path / "a.parquet", lists, compression="zstd")
    assert plan_of(path) == (1024, ["text.list.element"])
    with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
        values_of(path, None)
    few = pyarrow.ListArray.from_arrays([0, 60], shared("a" * (_MEGABYTE - 4), [0] * 60))
    assert plan_of(write(tmp_path / "b.parquet", few)) == (1024, [])


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.nulls(10_000, pyarrow.string()),
        pyarrow.ListArray.from_arrays([0, 100_000], shared("a", [0] * 100_000)),
    ],
)
def test_parquet_rows_and_values_of_zero_bytes_are_counted(
    tmp_path: Path, column: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", column)
    assert len(values_of(path, None)) == len(column)
    monkeypatch.setattr("firstlight.data.opening._MOST_UNPACKED_BYTES", 10_000)
    with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
        values_of(path, None)


def test_parquet_values_of_lists_are_counted(tmp_path: Path) -> None:
    numbers = pyarrow.ListArray.from_arrays([0, 7_000_000], pyarrow.array([7] * 7_000_000))
    path = write(tmp_path / "a.parquet", numbers)
    with pytest.raises(OSError, match="unpacks to more than 100 times its size"):
        plan_of(path)
    ids = pyarrow.ListArray.from_arrays([0, 2000, 4000], pyarrow.array(range(4000)))
    assert plan_of(write(tmp_path / "b.parquet", ids)) == (1024, [])


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_parquet_delta_encoded_texts_are_read(tmp_path: Path, encoding: str) -> None:
    texts = [f"a text and {number}" for number in range(3000)]
    options = {"use_dictionary": False, "column_encoding": {"text": encoding}}
    path = write(tmp_path / "a.parquet", texts, **options)
    assert [value["text"] for value in values_of(path)] == texts


def test_parquet_texts_with_shared_prefixes_use_small_batches(tmp_path: Path) -> None:
    text = "a" * _MEGABYTE
    options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    path = write(tmp_path / "a.parquet", [text] * 200, **options)
    rows, columns = plan_of(path)
    assert 32 < rows < 64  # The stored differences take slightly more bytes than the text.
    assert columns == []
    with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
        values_of(path)
    lists = pyarrow.ListArray.from_arrays([0, 200], pyarrow.array([text] * 200))
    options["column_encoding"] = {"text.list.element": "DELTA_BYTE_ARRAY"}
    path = write(tmp_path / "b.parquet", lists, **options)
    with pytest.raises(InputError, match="stored as DELTA_BYTE_ARRAY, RLE, with which a small"):
        values_of(path, None)


def test_parquet_fixed_width_values_use_small_batches(tmp_path: Path) -> None:
    wide = pyarrow.array([b"a" * _MEGABYTE] * 100, pyarrow.binary(_MEGABYTE))
    assert plan_of(write(tmp_path / "a.parquet", wide, compression="zstd")) == (64, [])


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"\x15\x04\x15\x80\x80\x80\x01\x15", (2, 1 << 20)),
        (b"\x15\x00\x15\x03\x15", (0, -2)),
        (b"\x15\x04\x25\x02", (None, 0)),  # A different field.
        (b"\x15\x04\x15\xff\xff", (None, 0)),  # Truncated.
        (b"", (None, 0)),
    ],
)
def test_parquet_page_header_gives_type_and_size(head: bytes, found: tuple[Any, int]) -> None:
    assert _page_head(head) == found
