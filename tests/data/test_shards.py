"""Tests of token shards: the documented layout, and the detection of every kind of damage."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.data.corpus import TokenDataset
from firstlight.data.shards import Shard, ShardWriter, read_manifest, token_dtype
from firstlight.errors import DataError
from firstlight.files.atomic import sha256_of, write_json
from firstlight.tokenizer import Tokenizer

DOCUMENTS: tuple[list[int], ...] = ([5, 6, 7], [8], [], [9, 10, 11, 12], [13, 14])


def write_corpus(
    folder: Path,
    documents: Sequence[Sequence[int]] = DOCUMENTS,
    *,
    dtype: str = "<u2",
    shard_tokens: int = 4,
) -> None:
    """Write a prepared folder with these documents as its training split."""
    with ShardWriter(folder, "train", np.dtype(dtype), shard_tokens) as writer:
        for document in documents:
            writer.write(np.array(document, dtype))
    manifest = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 65536 if dtype == "<u2" else 70000,
        "tokenizer_sha256": "0" * 64,
        "splits": {
            "train": {
                "documents": len(documents),
                "tokens": sum(map(len, documents)),
                "text_bytes": 100,
                "shards": writer.shards,
            }
        },
    }
    write_json(folder / "manifest.json", manifest)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.fixture
def few_files() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the soft limit on open files to the number of open files plus a
    given number.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(more: int) -> None:
        taken = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(len(taken) + more + 1) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_dataset_may_have_more_shards_than_soft_open_file_limit(
    tmp_path: Path, few_files: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path, [[number] for number in range(40)], shard_tokens=1)
    few_files(20)
    assert TokenDataset(tmp_path, "train")[0:40].tolist() == list(range(40))
    few_files(20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[0], limits[0]))
    with pytest.raises(DataError, match=r"Too many open files at .*`ulimit -n`"):
        TokenDataset(tmp_path, "train")


@pytest.mark.parametrize("dtype, letter, itemsize", [("<u2", "H", 2), ("<u4", "I", 4)])
def test_shard_file_matches_documented_layout(
    tmp_path: Path, dtype: str, letter: str, itemsize: int
) -> None:
    ids = [1, 2, 65535, 3] if itemsize == 2 else [1, 2, 65536, 4294967295]
    with ShardWriter(tmp_path, "val", np.dtype(dtype)) as writer:
        writer.write(np.array(ids[:3], dtype))
        writer.write(np.array([], dtype))
        writer.write(np.array(ids[3:], dtype))
    content = (tmp_path / "val-00000.bin").read_bytes()
    padding = -(4 * itemsize) % 8
    expected = (
        b"FLTOKENS"
        + struct.pack("<I", 1)
        + struct.pack("<I", itemsize)
        + struct.pack("<Q", 4)
        + struct.pack("<Q", 3)
        + bytes(32)
        + struct.pack(f"<4{letter}", *ids)
        + bytes(padding)
        + struct.pack("<4Q", 0, 3, 3, 4)
    )
    assert content == expected
    assert writer.shards == [
        {
            "file": "val-00000.bin",
            "tokens": 4,
            "documents": 3,
            "bytes": len(expected),
            "sha256": sha256_of(tmp_path / "val-00000.bin"),
        }
    ]


@pytest.mark.parametrize("count", range(9))
def test_shard_offsets_follow_tokens_at_multiple_of_eight(tmp_path: Path, count: int) -> None:
    with ShardWriter(tmp_path, "train", np.dtype("<u2")) as writer:
        writer.write(np.arange(count, dtype="<u2"))
    content = (tmp_path / "train-00000.bin").read_bytes()
    end = 64 + 2 * count
    assert len(content) % 8 == 0
    assert content[end:-16] == bytes(-end % 8)
    assert struct.unpack("<2Q", content[-16:]) == (0, count)
    shard = Shard(tmp_path / "train-00000.bin")
    assert shard.tokens().tolist() == list(range(count))
    assert shard.offsets().tolist() == [0, count]


@pytest.mark.parametrize(
    "vocab_size, itemsize", [(1, 2), (65535, 2), (65536, 2), (65537, 4), (128256, 4)]
)
def test_shard_dtype_is_16_bit_while_every_id_fits(vocab_size: int, itemsize: int) -> None:
    dtype = token_dtype(vocab_size)
    assert dtype.itemsize == itemsize
    assert np.array([vocab_size - 1], dtype)[0] == vocab_size - 1


def test_shard_writer_closes_full_shard_only_between_documents(tmp_path: Path) -> None:
    write_corpus(tmp_path, shard_tokens=4)
    shards = [Shard(path) for path in sorted(tmp_path.glob("train-*.bin"))]
    assert [shard.tokens().tolist() for shard in shards] == [
        [5, 6, 7, 8],
        [9, 10, 11, 12],
        [13, 14],
    ]
    assert [shard.offsets().tolist() for shard in shards] == [[0, 3, 4], [0, 0, 4], [0, 2]]
    entries = read_manifest(tmp_path)["splits"]["train"]["shards"]
    assert [entry["documents"] for entry in entries] == [2, 2, 1]


def test_shard_writer_split_without_documents_writes_no_shards(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "val", np.dtype("<u2")) as writer:
        pass
    assert writer.shards == []
    assert list(tmp_path.iterdir()) == []


def test_shard_writer_failure_leaves_no_valid_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"))

    def fail_half_way() -> None:
        with writer:
            writer.write(np.ones(1 << 20, "<u2"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert writer.shards == []
    with pytest.raises(DataError, match="does not begin with FLTOKENS"):
        Shard(tmp_path / "train-00000.bin")


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_dataset_yields_all_documents_in_order(tmp_path: Path, dtype: str) -> None:
    top = 65535 if dtype == "<u2" else 69999
    write_corpus(tmp_path, [*DOCUMENTS, [top]], dtype=dtype)
    dataset = TokenDataset(tmp_path, "train")
    assert dataset.num_tokens == 11
    assert dataset.num_documents == 6
    assert dataset.text_bytes == 100
    assert dataset.gzip_bytes is None
    assert dataset[0:11].tolist() == [*range(5, 15), top]
    assert dataset[0:11].dtype == np.int64


@functools.cache
def _dataset(sizes: tuple[int, ...], shard_tokens: int) -> tuple[TokenDataset, list[int]]:
    ids = list(range(100, 100 + sum(sizes)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    documents = [ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name), documents, shard_tokens=shard_tokens)
        # Open files stay readable after their names are deleted.
        return TokenDataset(name, "train"), ids


@given(
    sizes=st.sampled_from([(1,), (7, 1, 1, 9), (3, 0, 0, 5, 2), (4, 4, 4, 4), (1,) * 12]),
    shard_tokens=st.integers(1, 9),
    start=st.none() | st.integers(-40, 40),
    stop=st.none() | st.integers(-40, 40),
)
def test_dataset_slices_equal_list_slices(
    sizes: tuple[int, ...], shard_tokens: int, start: int | None, stop: int | None
) -> None:
    dataset, ids = _dataset(sizes, shard_tokens)
    assert dataset.num_tokens == len(ids)
    assert dataset[start:stop].tolist() == ids[start:stop]


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("position", [0, 8, 12, 16, 24, 40, 64, 70, -1])
def test_dataset_one_flipped_bit_anywhere_raises(tmp_path: Path, position: int) -> None:
    write_corpus(tmp_path)
    _flip(tmp_path / "train-00001.bin", position)
    with pytest.raises(DataError, match=r"train-00001\.bin is damaged .*prepare the corpus again"):
        TokenDataset(tmp_path, "train")


@pytest.mark.parametrize(
    "position, message",
    [
        (0, "is not a token shard: it does not begin with FLTOKENS"),
        (8, "is a token shard with an unknown version"),
        (12, "is a token shard with an unknown version"),
        (23, "is truncated or damaged"),
        (24, "is truncated or damaged"),
    ],
)
def test_dataset_wrong_header_raises_without_checksum(
    tmp_path: Path, position: int, message: str
) -> None:
    write_corpus(tmp_path)
    _flip(tmp_path / "train-00001.bin", position)
    with pytest.raises(DataError, match=rf"train-00001\.bin {message}"):
        TokenDataset(tmp_path, "train", verify=False)


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 65, -1])
@pytest.mark.parametrize("verify", [False, True])
def test_dataset_truncated_shard_raises(tmp_path: Path, keep: int, verify: bool) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "train-00002.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train-00002\.bin has the wrong size"):
        TokenDataset(tmp_path, "train", verify=verify)
    with pytest.raises(DataError, match=r"train-00002\.bin is (not a token shard|truncated)"):
        Shard(path)


def test_dataset_shard_of_other_corpus_raises(tmp_path: Path) -> None:
    for name, documents in (("a", [[1, 2, 3, 4]]), ("b", [[1, 2], [3, 4, 5, 6]])):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, documents, shard_tokens=100)
    shutil.copy(tmp_path / "b" / "train-00000.bin", tmp_path / "a" / "train-00000.bin")
    with pytest.raises(DataError, match=r"train-00000\.bin has the wrong size"):
        TokenDataset(tmp_path / "a", "train")


def test_dataset_missing_shard_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin is missing: prepare the corpus again"):
        TokenDataset(tmp_path, "train")


@pytest.mark.parametrize("way", ["absolute", "../outside.bin", "sub/train.bin", "..", ".", ""])
def test_dataset_manifest_with_shard_outside_folder_raises(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    write_corpus(folder)
    for copy in (tmp_path / "outside.bin", folder / "sub" / "train.bin"):
        shutil.copy(folder / "train-00000.bin", copy)
    name = str(folder / "train-00000.bin") if way == "absolute" else way

    def redirect(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["shards"][0]["file"] = name

    change_manifest(folder, redirect)
    with pytest.raises(DataError, match=r"lists a shard outside the folder:|is missing"):
        TokenDataset(folder, "train")


def _shard(manifest: dict[str, Any]) -> Any:
    return manifest["splits"]["train"]["shards"][0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.update(format="other"), "is not the manifest of a prepared corpus"),
        (lambda m: m.pop("format"), "is not the manifest of a prepared corpus"),
        (lambda m: m.update(version=3), "has version 3, but .* reads versions 1 and 2"),
        (lambda m: m.update(version=2), "contains conversations, not text"),
        (lambda m: m.pop("version"), "has version None, but .* reads versions 1"),
        (lambda m: m.pop("splits"), r"is damaged \('splits'\)"),
        (lambda m: m.update(splits=[]), r"is damaged \('splits'\)"),
        (lambda m: m.update(vocab_size="many"), r"is damaged \('vocab_size'\)"),
        (lambda m: m.pop("tokenizer_sha256"), r"is damaged \('tokenizer_sha256'\)"),
        (lambda m: m["splits"].update(train=None), r"is damaged \('documents'\)"),
        (lambda m: m["splits"]["train"].pop("text_bytes"), r"is damaged \('text_bytes'\)"),
        (lambda m: m["splits"]["train"].update(shards=3), r"is damaged \('shards'\)"),
        (lambda m: m["splits"]["train"]["shards"].append(1), r"is damaged \('file'\)"),
        (lambda m: _shard(m).update(file=5), r"is damaged \('file'\)"),
        (lambda m: _shard(m).pop("sha256"), r"is damaged \('sha256'\)"),
        (lambda m: _shard(m).update(tokens=3), "does not match its manifest"),
        (lambda m: _shard(m).update(sha256="0" * 64), r"train-00000\.bin is damaged"),
        (lambda m: m["splits"]["train"]["shards"].pop(), "don't match its manifest"),
    ],
)
def test_dataset_invalid_manifest_raises_data_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    write_corpus(tmp_path)
    change_manifest(tmp_path, change)
    with pytest.raises(DataError, match=message) as caught:
        TokenDataset(tmp_path, "train")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"'])
def test_dataset_unparsable_manifest_raises_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json is not"):
        read_manifest(tmp_path)


def test_dataset_folder_without_corpus_raises_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=(
            r"none does not exist: create it with `firstlight "
            r"prepare`"
        ),
    ):
        TokenDataset(tmp_path / "none", "train")
    with pytest.raises(DataError, match=r"is not a prepared corpus \(no manifest\.json\)"):
        TokenDataset(tmp_path, "train")
    write_corpus(tmp_path)
    with pytest.raises(DataError, match=r"has no 'val' split \(it has: train\): .*--val-fraction"):
        TokenDataset(tmp_path, "val")


def test_dataset_prepared_corpus_decodes_to_its_texts(
    data: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    found: list[str] = []
    for split in ("train", "val"):
        dataset = TokenDataset(data, split)
        ids = dataset[0 : dataset.num_tokens].tolist()
        assert ids[-1] == tokenizer.eos_token_id
        ends = [i for i, token_id in enumerate(ids) if token_id == tokenizer.eos_token_id]
        starts = [0, *(end + 1 for end in ends)]
        documents = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=False)]
        assert len(documents) == dataset.num_documents
        assert sum(len(text.encode()) for text in documents) == dataset.text_bytes
        found += documents
    assert sorted(found) == sorted(texts)
