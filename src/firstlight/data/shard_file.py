"""One shard file (`shards` describes the format): written, and read so that a change under a run is
noticed.

A file that is mapped into memory and then cut short ends the process with SIGBUS, and one that is
overwritten gives other bytes in silence. This file is read by `pread` in blocks instead, and each
block is compared with the checksum from when the file was verified (from when the block was first
read, if the file was not verified).
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import struct
import weakref
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import DataError, describe_os_error
from firstlight.files.atomic import sha256_of
from firstlight.files.disk import OutputFile

MAGIC = b"FLTOKENS"
VERSION = 1
#: The version of folders and shards that say which tokens are learned.
LABELLED_VERSION = 2
HEADER = struct.Struct("<8sIIQQ32x")

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

#: Bytes of a block: small, since a row of tokens costs the checksum of its whole block (13 µs at
#: the 5 GB/s of zlib's CRC-32 with carry-less multiplication); large enough that the checksums of
#: 100 GB take 12 MB.
BLOCK_BYTES = 1 << 16
#: Document offsets that are checked together when a shard is opened.
_OFFSETS_AT_ONCE = 1 << 17
#: One document offset of so many is held in memory: the others between two of these are read.
_OFFSETS_HELD = 512


class BlockFile:
    """A file that is read in checked blocks, by any number of threads.

    Args:
        path: the file; opened once, so that a file that takes its name later is not seen.

    Attributes:
        size: bytes of the file when it was opened.

    Raises:
        DataError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = _opened(path)
        except OSError as error:
            advice = ""
            if error.errno == errno.EMFILE:
                advice = ": raise the limit with `ulimit -n`, or prepare fewer, larger shards"
            raise DataError(f"{describe_os_error(error)}{advice}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size
        # CRC-32 of each block; -1 where a block has not been read yet.
        self._checksums = np.full(-(-self.size // BLOCK_BYTES), -1, dtype=np.int64)

    def sha256(self) -> str:
        """SHA-256 of all bytes, in hexadecimal; the checksum of each block is taken on the way.

        Raises:
            DataError: see `read`.
        """
        digest = hashlib.sha256()
        for block in range(len(self._checksums)):
            digest.update(self._block(block))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `start:stop`, which lie inside the file.

        Raises:
            DataError: the file was changed or cut short since it was opened, or can't be read.
        """
        assert 0 <= start <= stop <= self.size
        first = start // BLOCK_BYTES
        blocks = [self._block(block) for block in range(first, -(-stop // BLOCK_BYTES))]
        found = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return found[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _block(self, block: int) -> bytes:
        start = block * BLOCK_BYTES
        expected = min(BLOCK_BYTES, self.size - start)
        try:
            data = os.pread(self._descriptor, expected, start)
        except OSError as error:
            error.filename = str(self.path)
            raise DataError(describe_os_error(error)) from error
        if len(data) < expected:
            raise self._changed(f"cut short (it ends before byte {start + expected:,})")
        checksum = zlib.crc32(data)
        known = int(self._checksums[block])
        if known not in (-1, checksum):
            raise self._changed(f"changed (between bytes {start:,} and {start + expected:,})")
        self._checksums[block] = checksum
        return data

    def _changed(self, problem: str) -> DataError:
        return DataError(
            f"{self.path} was {problem} while it was in use: restore it or prepare the corpus "
            "again, then go on with --resume"
        )


def _opened(path: Path) -> int:
    """The descriptor of a file. A corpus may have more shards than the soft limit of open files,
    often 1,024: then that is raised to the hard limit."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Shard:
    """The header of a shard, and access to its tokens, document offsets and labels.

    Every method that reads raises a DataError if the file was changed or cut short meanwhile.

    Args:
        path: the shard's file.
        version: the version that the header has to say.
        sha256: the SHA-256 that the file has to have, in hexadecimal; None to leave it unverified.

    Attributes:
        file: the file, read in checked blocks.
        num_tokens: number of tokens N.
        num_documents: number of documents D.
        itemsize: bytes of a token.

    Raises:
        DataError: the file is not a shard, is of another version, is cut short or damaged.
    """

    def __init__(self, path: Path, version: int = VERSION, sha256: str | None = None) -> None:
        self.path, self.file = path, BlockFile(path)
        if sha256 is not None and self.file.sha256() != sha256:
            raise DataError(
                f"shard {path} is damaged (its sha256 is not the manifest's): prepare the corpus "
                "again"
            )
        if self.file.size < HEADER.size:
            raise DataError(f"{path} is not a token shard: it is too short")
        self.itemsize: int
        self.num_tokens: int
        self.num_documents: int
        header = HEADER.unpack(self.file.read(0, HEADER.size))
        magic, found, self.itemsize, self.num_tokens, self.num_documents = header
        if magic != MAGIC:
            raise DataError(f"{path} is not a token shard: it does not begin with {MAGIC.decode()}")
        if found != version or self.itemsize not in (2, 4):
            raise DataError(f"{path} is a token shard of an unknown version")
        self._offsets_at = -(-(HEADER.size + self.num_tokens * self.itemsize) // 8) * 8
        self._labels_at = self._offsets_at + (self.num_documents + 1) * 8
        labels = self.num_tokens if version == LABELLED_VERSION else 0
        if self.file.size != self._labels_at + labels:
            raise DataError(f"{path} is cut short or damaged")
        self._held_offsets = np.empty(0, dtype=np.uint64)

    def tokens(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Tokens `start:stop` (cut at the end, like any slice), read-only."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        at = HEADER.size
        data = self.file.read(at + start * self.itemsize, at + stop * self.itemsize)
        return np.frombuffer(data, dtype=f"<u{self.itemsize}")

    def offsets(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint64]:
        """Document offsets `start:stop` of the D + 1 (cut at the end), read-only."""
        stop = self.num_documents + 1 if stop is None else min(stop, self.num_documents + 1)
        data = self.file.read(self._offsets_at + start * 8, self._offsets_at + stop * 8)
        return np.frombuffer(data, dtype="<u8")

    def learned(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """For each of the tokens `start:stop` of a labelled shard, whether it is learned."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        data = self.file.read(self._labels_at + start, self._labels_at + stop)
        return np.frombuffer(data, dtype=np.uint8).astype(bool)

    def documents_before(self, token: int) -> int:
        """How many documents begin before a token.

        Needs `check_documents` once before.
        """
        # Of the held offsets, the last one before the token and the next: the answer is between.
        held = int(np.searchsorted(self._held_offsets, np.uint64(token)))
        if held == 0:
            return 0
        first = (held - 1) * _OFFSETS_HELD + 1
        stop = min(held * _OFFSETS_HELD, self.num_documents)
        if first >= stop:
            return stop
        return first + int(np.searchsorted(self.offsets(first, stop), np.uint64(token)))

    def check_documents(self) -> None:
        """Refuse document offsets that do not lead from 0 to the last token, never back.

        Raises:
            DataError: they don't.
        """
        held, ascending, ends = [], True, []
        for start in range(0, self.num_documents + 1, _OFFSETS_AT_ONCE):
            part = self.offsets(start, start + _OFFSETS_AT_ONCE + 1)
            ascending = ascending and bool((part[1:] >= part[:-1]).all())
            held.append(part[:_OFFSETS_AT_ONCE:_OFFSETS_HELD])
            ends += [int(part[0]), int(part[-1])]
        if not ascending or (ends[0], ends[-1]) != (0, self.num_tokens):
            raise DataError(
                f"shard {self.path} is damaged (its documents don't follow on each other): "
                "prepare the corpus again"
            )
        self._held_offsets = np.concatenate(held)


class ShardWriter:
    """Writes the documents of one split into consecutive shards.

    Args:
        folder: where the shards go; a temporary folder until the whole corpus is written.
        split: "train" or "val".
        dtype: from `shards.token_dtype`.
        shard_tokens: a shard is closed once it holds at least this many tokens.
        labelled: each document comes with which of its tokens are learned; what is said of a
            shard is held in memory until it is closed.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int = 100_000_000,
        *,
        labelled: bool = False,
    ) -> None:
        self.shards: list[dict[str, Any]] = []
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_tokens = shard_tokens
        self._learned: bytearray | None = bytearray() if labelled else None
        self._file: OutputFile | None = None
        self._stack = ExitStack()
        self._offsets: list[int] = [0]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._close_shard()
        else:
            self._stack.__exit__(kind, error, traceback)

    def write(self, tokens: TokenArray, learned: npt.NDArray[np.bool_] | None = None) -> None:
        """Append one document's tokens, and which of them are learned where that is told."""
        assert tokens.dtype == self._dtype
        assert (learned is None) is (self._learned is None)
        if learned is not None and self._learned is not None:
            assert len(learned) == len(tokens)
            self._learned += learned.tobytes()
        if self._file is None:
            name = f"{self._split}-{len(self.shards):05d}.bin"
            self._file = self._stack.enter_context(OutputFile(self._folder / name))
            self._file.write(bytes(HEADER.size))
        self._file.write(tokens.tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        if self._offsets[-1] >= self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        file, tokens, documents = self._file, self._offsets[-1], len(self._offsets) - 1
        with self._stack:
            file.write(bytes(-file.size % 8))
            file.write(np.asarray(self._offsets, dtype="<u8").tobytes())
            version = VERSION
            if self._learned is not None:
                file.write(bytes(self._learned))
                version, self._learned = LABELLED_VERSION, bytearray()
            file.write_over_start(
                HEADER.pack(MAGIC, version, self._dtype.itemsize, tokens, documents)
            )
        self.shards.append(
            {
                "file": file.path.name,
                "tokens": tokens,
                "documents": documents,
                "bytes": file.size,
                "sha256": sha256_of(file.path),
            }
        )
        self._file, self._offsets = None, [0]
