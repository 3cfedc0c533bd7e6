"""Token shards: the format of a prepared corpus on disk, and the reader of shards. `writer.py` has
the writer.

A prepared folder holds

    manifest.json           counts, sha256 of each shard, the tokenizer's fingerprint
    tokenizer.json, tokenizer_config.json
    train-00000.bin ...     shards of the training split
    val-00000.bin ...       shards of the validation split, if there is one
    rejected.jsonl          rejected documents, with file, line and reason, if there are any

A shard is, little-endian:

    offset  size          content
    0       8             magic b"FLTOKENS"
    8       4             version (uint32) = 1
    12      4             bytes per token (uint32): 2 = uint16, 4 = uint32
    16      8             number of tokens N (uint64)
    24      8             number of documents D (uint64)
    32      32            zeros, reserved
    64      N * bytes     the tokens
    ...     0 to 7        zeros, up to a multiple of 8
    ...     (D + 1) * 8   document offsets (uint64): document i is tokens[offsets[i]:offsets[i+1]]

Manifest and shards of conversations (see `examples`) have version 2. Each document of such a shard
is one example, and the shard ends with a loss mask:

    ...     N             one byte for each token: 1 if it is a label, else 0

Tokens are uint16 if every id of the tokenizer fits. The tokens of a document include the bos before
its text (if the tokenizer adds one) and the eos after it (if there is one). A document is never
split over shards.

Shards are not mapped into memory, because a mapped file that is truncated ends the process with
SIGBUS, and one that is overwritten silently gives other bytes. Instead, `pread` reads a shard in
blocks, and each block is compared with its checksum from when the file was verified (or, without
verification, from when the block was first read).
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import struct
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import DataError, describe_os_error
from firstlight.files.atomic import read_json_object

MAGIC = b"FLTOKENS"
VERSION = 1
#: The version of folders and shards with a loss mask.
LABELLED_VERSION = 2
HEADER = struct.Struct("<8sIIQQ32x")

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "firstlight-tokens"
#: List of rejected records, one JSON object a line.
REJECTED_NAME = "rejected.jsonl"
#: List of the files in input folders that were not read, one a line.
UNREAD_NAME = "unread.txt"
ADVICE = "prepare the corpus again"

_FIELDS = {"vocab_size": int, "tokenizer_sha256": str, "splits": dict}
_SPLIT_FIELDS = {"documents": int, "tokens": int, "text_bytes": int, "shards": list}
_SHARD_FIELDS = {"file": str, "tokens": int, "bytes": int, "sha256": str}

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

#: Bytes of a block. Small, because reading any token takes the checksum of its whole block (13 µs
#: at the 5 GB/s of zlib's CRC-32 with carry-less multiplication); but large enough that the
#: checksums of 100 GB take only 12 MB of memory.
BLOCK_BYTES = 1 << 16
#: Document offsets that are checked at a time when a shard is opened.
_OFFSETS_AT_ONCE = 1 << 17
#: One document offset of this number is held in memory; those in between are read when needed.
_OFFSETS_HELD = 512
#: Tokens of a shard that are compared with the vocabulary at a time.
_CHECKED_AT_ONCE = 1 << 17


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        DataError: the manifest is missing, damaged, or of another format or version.
    """
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist: make it with `firstlight prepare`")
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"{folder} is not a prepared corpus (no {MANIFEST_NAME}): run `firstlight prepare`"
        )
    fault = "is not the manifest of a prepared corpus"
    manifest = read_json_object(path, DataError, fault)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path} {fault}")
    if manifest.get("version") not in (VERSION, LABELLED_VERSION):
        raise DataError(
            f"{path} is of version {manifest.get('version')}; this firstlight reads {VERSION} "
            f"and {LABELLED_VERSION}"
        )
    _require_fields(path, manifest, _FIELDS)
    for split in manifest["splits"].values():
        _require_fields(path, split, _SPLIT_FIELDS)
        for shard in split["shards"]:
            _require_fields(path, shard, _SHARD_FIELDS)
    return manifest


def _require_fields(path: Path, entry: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        value = entry.get(name) if isinstance(entry, dict) else None
        # `type`, not `isinstance`, because a bool is an instance of int.
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise DataError(f"{path} is damaged ('{name}'): {ADVICE}")


class BlockFile:
    """A file that is read in checked blocks, by any number of threads.

    Args:
        path: the file. It is opened once, so another file that gets its name later is not read.

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
        # CRC-32 of each block; -1 for a block that has not been read yet.
        self._checksums = np.full(-(-self.size // BLOCK_BYTES), -1, dtype=np.int64)

    def sha256(self) -> str:
        """SHA-256 of all bytes, in hexadecimal. The checksum of each block is stored, too.

        Raises:
            DataError: see `read`.
        """
        digest = hashlib.sha256()
        for block in range(len(self._checksums)):
            digest.update(self._block(block))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `start:stop`, which must be inside the file.

        Raises:
            DataError: the file was changed or truncated since it was opened, or can't be read.
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
            "again, then continue with --resume"
        )


def _opened(path: Path) -> int:
    """A descriptor of the file. If the soft limit of open files is reached, it is raised to the
    hard limit: a corpus may have more shards than the usual soft limit of 1,024."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Shard:
    """A shard's header, and access to its tokens, document offsets and loss mask.

    Every method that reads raises a DataError if the file was changed or truncated meanwhile.

    Args:
        path: the shard's file.
        version: the required version of the shard.
        sha256: the required SHA-256 of the file, in hexadecimal; None does not verify the file.

    Attributes:
        file: the file, read in checked blocks.
        num_tokens: number of tokens N.
        num_documents: number of documents D.
        itemsize: bytes of a token, 2 or 4.

    Raises:
        DataError: the file is not a shard, is of another version, or is truncated or damaged.
    """

    def __init__(self, path: Path, version: int = VERSION, sha256: str | None = None) -> None:
        self.path, self.file = path, BlockFile(path)
        if sha256 is not None and self.file.sha256() != sha256:
            raise DataError(f"shard {path} is damaged (its sha256 is not the manifest's): {ADVICE}")
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
        self._mask_at = self._offsets_at + (self.num_documents + 1) * 8
        mask_bytes = self.num_tokens if version == LABELLED_VERSION else 0
        if self.file.size != self._mask_at + mask_bytes:
            raise DataError(f"{path} is cut short or damaged")
        self._held_offsets = np.empty(0, dtype=np.uint64)

    def tokens(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Token ids `start:stop`, read-only [stop - start] (fewer at the end, as for slices)."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        at = HEADER.size
        data = self.file.read(at + start * self.itemsize, at + stop * self.itemsize)
        return np.frombuffer(data, dtype=f"<u{self.itemsize}")

    def offsets(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint64]:
        """Document offsets `start:stop` of all D + 1, read-only [stop - start]."""
        stop = self.num_documents + 1 if stop is None else min(stop, self.num_documents + 1)
        data = self.file.read(self._offsets_at + start * 8, self._offsets_at + stop * 8)
        return np.frombuffer(data, dtype="<u8")

    def loss_mask(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Loss mask of the tokens `start:stop` of a labelled shard, bool [stop - start]."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        data = self.file.read(self._mask_at + start, self._mask_at + stop)
        return np.frombuffer(data, dtype=np.uint8).astype(bool)

    def documents_before(self, token: int) -> int:
        """Number of documents that begin before a token; call `check_documents` first."""
        # Only the offsets between two held ones are read: from the last held offset before the
        # token to the next held offset.
        held = int(np.searchsorted(self._held_offsets, np.uint64(token)))
        if held == 0:
            return 0
        first = (held - 1) * _OFFSETS_HELD + 1
        stop = min(held * _OFFSETS_HELD, self.num_documents)
        if first >= stop:
            return stop
        return first + int(np.searchsorted(self.offsets(first, stop), np.uint64(token)))

    def check_documents(self) -> None:
        """Require document offsets that begin with 0, never decrease and end with N. One offset of
        `_OFFSETS_HELD` is then held in memory, for `documents_before`.

        Raises:
            DataError: the offsets are damaged.
        """
        held = []
        ascending = True
        ends = []
        for start in range(0, self.num_documents + 1, _OFFSETS_AT_ONCE):
            part = self.offsets(start, start + _OFFSETS_AT_ONCE + 1)
            ascending = ascending and bool((part[1:] >= part[:-1]).all())
            held.append(part[:_OFFSETS_AT_ONCE:_OFFSETS_HELD])
            ends += [int(part[0]), int(part[-1])]
        if not ascending or (ends[0], ends[-1]) != (0, self.num_tokens):
            raise DataError(
                f"shard {self.path} is damaged (its documents don't follow on each other): {ADVICE}"
            )
        self._held_offsets = np.concatenate(held)


def open_shard(
    folder: Path, entry: Mapping[str, Any], version: int, vocab_size: int, verify: bool
) -> Shard:
    """Open a shard, and check it against its entry in the manifest.

    Args:
        folder: the prepared folder.
        entry: the shard's entry in the manifest.
        version: version of the folder.
        vocab_size: number of ids of the tokenizer.
        verify: compare all bytes with the sha256 of the entry, and all ids with the vocabulary.

    Raises:
        DataError: the shard is missing or damaged, or differs from its entry.
    """
    if Path(entry["file"]).name != entry["file"]:
        raise DataError(f"{folder}: the manifest names a shard outside: {entry['file']}")
    path = folder / entry["file"]
    if not path.is_file():
        raise DataError(f"shard {path} is missing: {ADVICE}")
    if path.stat().st_size != entry["bytes"]:
        raise DataError(f"shard {path} has the wrong size: {ADVICE}")
    shard = Shard(path, version, entry["sha256"] if verify else None)
    shard.check_documents()
    if shard.num_tokens != entry["tokens"]:
        raise DataError(f"shard {path} does not hold what its manifest says: {ADVICE}")
    if shard.itemsize < token_dtype(vocab_size).itemsize:
        raise DataError(
            f"shard {path} has 2 bytes for each token, too few for the ids of its vocabulary "
            f"of {vocab_size}: those above 65535 were cut off; {ADVICE}"
        )
    for start in range(0, shard.num_tokens if verify else 0, _CHECKED_AT_ONCE):
        part = shard.tokens(start, start + _CHECKED_AT_ONCE)
        require_known(part, vocab_size, f"shard {path}")
    return shard


def require_known(tokens: npt.NDArray[Any], vocab_size: int, where: str) -> None:
    """Refuse token ids beyond the vocabulary, for which a model has no embedding.

    Args:
        tokens: token ids, of any integer dtype.
        vocab_size: number of ids of the tokenizer.
        where: description of the tokens, for the message.

    Raises:
        DataError: there is such an id.
    """
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{where} holds token id {largest}, beyond its vocabulary of {vocab_size} "
            f"tokens: {ADVICE}"
        )
