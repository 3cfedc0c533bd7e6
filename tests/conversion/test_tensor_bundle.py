"""Tests of reading TensorFlow checkpoints: valid tensors, and every kind of damage."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_folders import HEADER, block, draw, entry, field, table, varint, write_bundle

from firstlight.conversion.foreign.openai import _LANES, _byte_table, crc32c, read_bundle
from firstlight.errors import FirstlightError, ModelError

TENSORS = {
    **draw({"model/h0/ln_1/g": (5,), "model/h0/attn/w": (1, 3, 4), "model/wte": (7, 3)}),
    "global_step": torch.tensor(12),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
}
DATA, INDEX = "model.ckpt.data-00000-of-00001", "model.ckpt.index"


@pytest.mark.parametrize(
    "content, expected",
    [  # RFC 3720, appendix B.4
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
)
def test_crc32c_matches_known_values(content: bytes, expected: int) -> None:
    assert crc32c(np.frombuffer(content, np.uint8)) == expected


@pytest.mark.parametrize("extra", [-1, 0, 1, 4, 4 * _LANES - 1, 4 * _LANES + 7])
def test_crc32c_long_content_matches_bytewise_result(extra: int) -> None:
    content = random.Random(extra).randbytes(4 * _LANES + extra)
    state = 0xFFFFFFFF
    for byte in content:
        state = _byte_table()[(state ^ byte) & 255] ^ state >> 8
    assert crc32c(np.frombuffer(content, np.uint8)) == state ^ 0xFFFFFFFF


def test_tensor_bundle_tensors_are_read_by_name(tmp_path: Path) -> None:
    write_bundle(tmp_path / "model.ckpt", TENSORS)
    found = read_bundle(tmp_path / "model.ckpt")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", [INDEX, DATA])
def test_tensor_bundle_changed_byte_raises_or_changes_nothing(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / "model.ckpt", TENSORS)
    content = (tmp_path / name).read_bytes()
    silent = 0
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        (tmp_path / name).write_bytes(changed)
        found = None
        with contextlib.suppress(FirstlightError):
            found = read_bundle(tmp_path / "model.ckpt")
        if found is not None:
            silent += 1
            assert all(torch.equal(found[key], tensor) for key, tensor in TENSORS.items())
    # The footer's padding, and the block without entries, do not affect the tensors.
    assert silent <= 50


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", [INDEX, DATA])
def test_tensor_bundle_truncated_files_raise(tmp_path: Path, name: str, share: float) -> None:
    write_bundle(tmp_path / "model.ckpt", TENSORS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelError, match=rf"{name} .*damaged, truncated or not a TensorFlow"):
        read_bundle(tmp_path / "model.ckpt")


@pytest.mark.parametrize("name", [INDEX, DATA])
def test_tensor_bundle_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / "model.ckpt", TENSORS)
    (tmp_path / name).unlink()
    with pytest.raises(FirstlightError, match=name):
        read_bundle(tmp_path / "model.ckpt")


FOUR = torch.ones(4)
BYTES = FOUR.numpy().tobytes()
CHECKSUM = entry(FOUR, 0, BYTES)[-5:]
NO_BYTES = entry(torch.zeros(0), 0, b"")[-5:]
HUGE = field(2, field(1, 2**62))


def message(dtype: int, sizes: list[bytes], size: int, *more: bytes) -> bytes:
    return field(1, dtype) + field(2, b"".join(sizes)) + field(5, size) + CHECKSUM + b"".join(more)


@pytest.mark.parametrize(
    "header, value, problem",
    [
        (field(1, 2), entry(FOUR, 0, BYTES), "refers to 2 data files"),
        (HEADER + field(2, 1), entry(FOUR, 0, BYTES), "the opposite byte order"),
        (HEADER, message(7, [field(2, field(1, 4))], 16), "x with an unknown dtype"),
        (HEADER, message(1, [field(2, field(1, 5))], 16), "a size for x that does not match"),
        (
            HEADER,
            message(1, [field(2, field(1, 2**60))] * 2, 16),
            "a size for x that does not match",
        ),
        (HEADER, message(1, [field(2, field(1, 2**63))], 16), "an invalid shape for x"),
        (HEADER, message(1, [HUGE, HUGE, field(2, b"")], 0, NO_BYTES), "an invalid shape for x"),
        (HEADER, message(1, [field(2, field(1, 1))] * 17, 4), "an invalid shape for x"),
        (HEADER, message(1, [field(3, 1)], 16), "an invalid shape for x"),
        (HEADER, message(1, [field(2, field(1, 4))], 16, field(3, 1)), "a size for x that"),
        (HEADER, message(1, [field(2, field(1, 4))], 16, field(4, 2**62)), "ends beyond them"),
        (HEADER, message(1, [field(2, field(1, 4))], 16, field(7, b"")), "x in slices"),
        (HEADER, entry(FOUR, 0, BYTES)[:-2], "a field beyond its end"),
        (HEADER, entry(torch.zeros(4), 0, bytes(16)), "values of x that don't match"),
    ],
)
def test_tensor_bundle_invalid_entries_raise(
    tmp_path: Path, header: bytes, value: bytes, problem: str
) -> None:
    (tmp_path / DATA).write_bytes(BYTES)
    (tmp_path / INDEX).write_bytes(table({b"": header, b"x": value}))
    with pytest.raises(ModelError, match=problem):
        read_bundle(tmp_path / "model.ckpt")


def test_tensor_bundle_overlapping_tensors_raise(tmp_path: Path) -> None:
    (tmp_path / DATA).write_bytes(BYTES)
    whole = entry(FOUR, 0, BYTES)
    (tmp_path / INDEX).write_bytes(table({b"": HEADER, b"x": whole, b"y": whole}))
    with pytest.raises(ModelError, match="fewer than its tensors in total"):
        read_bundle(tmp_path / "model.ckpt")


def test_tensor_bundle_compressed_blocks_raise(tmp_path: Path) -> None:
    write_bundle(tmp_path / "model.ckpt", TENSORS)
    content = bytearray((tmp_path / INDEX).read_bytes())
    # The first block ends after its restarts, which are two numbers.
    length = content.index(struct.pack("<I", 2) + b"\0") + 4
    content[length] = 1
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match="compressed blocks"):
        read_bundle(tmp_path / "model.ckpt")


def test_tensor_bundle_index_with_many_long_names_raises(tmp_path: Path) -> None:
    (tmp_path / DATA).write_bytes(BYTES)
    name = b"x" * 1001
    (tmp_path / INDEX).write_bytes(table({b"": HEADER, name: entry(FOUR, 0, BYTES)}))
    with pytest.raises(ModelError, match="a name that is too long"):
        read_bundle(tmp_path / "model.ckpt")


def test_tensor_bundle_overlapping_blocks_raise(tmp_path: Path) -> None:
    (tmp_path / DATA).write_bytes(BYTES)
    data = block({b"": HEADER, b"x": entry(FOUR, 0, BYTES)})
    # The same block without entries, a hundred times.
    again = varint(len(data)) + varint(len(block({})) - 5)
    handles = {b"\0": varint(0) + varint(len(data) - 5)}
    places = block({**handles, **{bytes([i]): again for i in range(1, 100)}})
    data += block({})
    footer = varint(0) + varint(0) + varint(len(data)) + varint(len(places) - 5)
    content = data + places + footer.ljust(40, b"\0") + table({})[-8:]
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match="blocks"):
        read_bundle(tmp_path / "model.ckpt")
