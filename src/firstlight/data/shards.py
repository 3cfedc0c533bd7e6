"""Read and write token shards, the on-disk format of a prepared corpus. `CorpusWriter` writes the
shards and the manifest.

A prepared folder contains these files:

    manifest.json           counts, sha256 of each shard, the tokenizer's fingerprint
    tokenizer.json, tokenizer_config.json
    train-00000.bin ...     shards of the training split
    val-00000.bin ...       shards of the validation split, if there is one
    rejected.jsonl          rejected documents, with file, line and reason, if there are any

A shard consists of the following parts. All numbers are little-endian.

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

The manifest and shards of conversations (see `packing`) have version 2. Each document in such a
shard is one example, and the shard ends with a loss mask:

    ...     N             one byte per token: 1 if the token is a label, otherwise 0

Tokens are stored as uint16 if this dtype can represent every id of the tokenizer. The tokens of a
document include the bos before the text (if the tokenizer adds one) and the eos after it (if the
tokenizer has one). A document is never split across shards.

Shards are not memory-mapped, because the process would be killed by SIGBUS if a mapped file were
truncated, and the data would silently change if it were overwritten. Instead, shards are read in
blocks with `pread`. Each time a block is read, its checksum is compared with the one computed when
the file was verified or, without verification, when the block was first read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.data.conversations import BadRecordError
from firstlight.data.records import Record
from firstlight.data.sources import by_ending, unread_lines
from firstlight.errors import ConfigError, DataError, InputError, describe_os_error
from firstlight.files.atomic import (
    read_json_object,
    remove_file,
    require_free,
    sha256_of,
    write_file,
    write_json,
)
from firstlight.files.disk import OutputFile
from firstlight.tokenizer import Tokenizer

MAGIC = b"FLTOKENS"
VERSION = 1
#: Version of folders and shards with a loss mask.
LABELLED_VERSION = 2
HEADER = struct.Struct("<8sIIQQ32x")

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "firstlight-tokens"
#: File that lists the rejected records, one JSON object per line.
REJECTED_NAME = "rejected.jsonl"
#: File that lists the files in input folders that were not read, one per line.
UNREAD_NAME = "unread.txt"
ADVICE = "prepare the corpus again"

_FIELDS = {"vocab_size": int, "tokenizer_sha256": str, "splits": dict}
_SPLIT_FIELDS = {"documents": int, "tokens": int, "text_bytes": int, "shards": list}
_SHARD_FIELDS = {"file": str, "tokens": int, "bytes": int, "sha256": str}

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

#: Size of a block in bytes. A block is small because the checksum of the entire block must be
#: computed to read a single token. This takes 13 µs at 5 GB/s, the speed of zlib's CRC-32 with
#: carry-less multiplication. It is large enough for the checksums of 100 GB to fit into 12 MB of
#: memory.
BLOCK_BYTES = 1 << 16
#: Number of document offsets that are checked at a time when a shard is opened.
_OFFSETS_AT_ONCE = 1 << 17
#: Distance between the document offsets that are kept in memory. The offsets in between are read
#: from the file when they are needed.
_OFFSETS_HELD = 512
#: Number of tokens of a shard that are checked against the vocabulary at a time.
_CHECKED_AT_ONCE = 1 << 17


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 if it can represent all ids below `vocab_size`, otherwise return uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: the manifest is missing or damaged, or has a different format or version.
    """
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist: create it with `firstlight prepare`")
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
            f"{path} has version {manifest.get('version')}, but this version of firstlight reads "
            f"versions {VERSION} and {LABELLED_VERSION}"
        )
    _require_fields(path, manifest, _FIELDS)
    for split in manifest["splits"].values():
        _require_fields(path, split, _SPLIT_FIELDS)
        for shard in split["shards"]:
            _require_fields(path, shard, _SHARD_FIELDS)
    return manifest


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest, which identifies the training data of a run."""
    content = dict(manifest)
    if "chat" in content:
        # Leave out the counts of unused fields. They do not affect the data, and earlier versions,
        # whose runs can still be resumed, did not write them.
        content["chat"] = {k: v for k, v in content["chat"].items() if k != "unused_fields"}
    # Sort the keys, because the order of the keys in the manifest does not affect the data.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _require_fields(path: Path, entry: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        value = entry.get(name) if isinstance(entry, dict) else None
        # Compare the type instead of using `isinstance`, because a bool is an instance of int.
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise DataError(f"{path} is damaged ('{name}'): {ADVICE}")


class BlockFile:
    """File that is read in verified blocks by any number of threads.

    Args:
        path: the file. It is opened only once, so a different file that is later moved to this path
            is never read.

    Attributes:
        size: size of the file in bytes when it was opened.

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
        # CRC-32 of each block; -1 if the block has not been read yet.
        self._checksums = np.full(-(-self.size // BLOCK_BYTES), -1, dtype=np.int64)

    def sha256(self) -> str:
        """Return the hexadecimal SHA-256 of the file, and remember the checksum of each block.

        Raises:
            DataError: see `read`.
        """
        digest = hashlib.sha256()
        for block in range(len(self._checksums)):
            digest.update(self._block(block))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes `start:stop`, which must lie inside the file.

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
            raise self._changed(f"truncated (it ends before byte {start + expected:,})")
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
    """Open a file and return its descriptor. If this exceeds the soft limit on open files, increase
    that limit to the hard limit, because a corpus may have more shards than the usual soft limit of
    1,024.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Shard:
    """A shard file, which contains a header, tokens, document offsets and, for conversations, a
    loss mask.

    Every method that reads raises a DataError if the file was changed or truncated since it was
    opened.

    Args:
        path: file of the shard.
        version: the format version that the shard must have.
        sha256: the hexadecimal SHA-256 that the file must have; None to skip verification.

    Attributes:
        file: the file, read in verified blocks.
        num_tokens: number of tokens N.
        num_documents: number of documents D.
        itemsize: bytes per token, 2 or 4.

    Raises:
        DataError: the file is not a shard, has a different version, or is truncated or damaged.
    """

    def __init__(self, path: Path, version: int = VERSION, sha256: str | None = None) -> None:
        self.path, self.file = path, BlockFile(path)
        if sha256 is not None and self.file.sha256() != sha256:
            raise DataError(
                f"shard {path} is damaged (its sha256 differs from the manifest): {ADVICE}"
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
            raise DataError(f"{path} is a token shard with an unknown version")
        self._offsets_at = -(-(HEADER.size + self.num_tokens * self.itemsize) // 8) * 8
        self._mask_at = self._offsets_at + (self.num_documents + 1) * 8
        mask_bytes = self.num_tokens if version == LABELLED_VERSION else 0
        if self.file.size != self._mask_at + mask_bytes:
            raise DataError(f"{path} is truncated or damaged")
        self._held_offsets = np.empty(0, dtype=np.uint64)

    def tokens(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return the token ids `start:stop` as a read-only array, [stop - start]. As with any
        slice, the result is shorter if `stop` is beyond the end.
        """
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        at = HEADER.size
        data = self.file.read(at + start * self.itemsize, at + stop * self.itemsize)
        return np.frombuffer(data, dtype=f"<u{self.itemsize}")

    def offsets(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint64]:
        """Return elements `start:stop` of the D + 1 document offsets, [stop - start]. The array is
        read-only.
        """
        stop = self.num_documents + 1 if stop is None else min(stop, self.num_documents + 1)
        data = self.file.read(self._offsets_at + start * 8, self._offsets_at + stop * 8)
        return np.frombuffer(data, dtype="<u8")

    def loss_mask(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Return the loss mask of the tokens `start:stop` of a labelled shard, bool [stop -
        start]."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        data = self.file.read(self._mask_at + start, self._mask_at + stop)
        return np.frombuffer(data, dtype=np.uint8).astype(bool)

    def documents_before(self, token: int) -> int:
        """Return the number of documents that begin before a given token. `check_documents` must be
        called first.
        """
        # Read only the offsets between the two nearest ones in memory.
        held = int(np.searchsorted(self._held_offsets, np.uint64(token)))
        if held == 0:
            return 0
        first = (held - 1) * _OFFSETS_HELD + 1
        stop = min(held * _OFFSETS_HELD, self.num_documents)
        if first >= stop:
            return stop
        return first + int(np.searchsorted(self.offsets(first, stop), np.uint64(token)))

    def check_documents(self) -> None:
        """Check that the document offsets begin with 0, never decrease and end with N. Keep every
        `_OFFSETS_HELD`-th offset in memory for `documents_before`.

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
                f"shard {self.path} is damaged (its document offsets are invalid): {ADVICE}"
            )
        self._held_offsets = np.concatenate(held)


def open_shard(
    folder: Path, entry: Mapping[str, Any], version: int, vocab_size: int, verify: bool
) -> Shard:
    """Open a shard and check it against its entry in the manifest.

    Args:
        folder: the prepared folder.
        entry: the shard's entry in the manifest.
        version: format version of the folder.
        vocab_size: number of token ids of the tokenizer.
        verify: True to check all bytes against the sha256 of the entry, and all ids against the
            vocabulary.

    Raises:
        DataError: the shard is missing or damaged, or does not match its entry.
    """
    if Path(entry["file"]).name != entry["file"]:
        raise DataError(f"{folder}: the manifest lists a shard outside the folder: {entry['file']}")
    path = folder / entry["file"]
    if not path.is_file():
        raise DataError(f"shard {path} is missing: {ADVICE}")
    if path.stat().st_size != entry["bytes"]:
        raise DataError(f"shard {path} has the wrong size: {ADVICE}")
    shard = Shard(path, version, entry["sha256"] if verify else None)
    shard.check_documents()
    if shard.num_tokens != entry["tokens"]:
        raise DataError(f"shard {path} does not match its manifest: {ADVICE}")
    if shard.itemsize < token_dtype(vocab_size).itemsize:
        raise DataError(
            f"shard {path} has 2 bytes per token, too few for its vocabulary of {vocab_size}, so "
            f"ids above 65535 were truncated: {ADVICE}"
        )
    for start in range(0, shard.num_tokens if verify else 0, _CHECKED_AT_ONCE):
        part = shard.tokens(start, start + _CHECKED_AT_ONCE)
        require_known(part, vocab_size, f"shard {path}")
    return shard


def require_known(tokens: npt.NDArray[Any], vocab_size: int, where: str) -> None:
    """Raise an error if a token id is beyond the vocabulary, because a model has no embedding for
    it.

    Args:
        tokens: token ids, of any integer dtype.
        vocab_size: number of token ids of the tokenizer.
        where: description of the tokens, used in the error message.

    Raises:
        DataError: an id is beyond the vocabulary.
    """
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{where} contains token id {largest}, beyond its vocabulary of {vocab_size} tokens: "
            f"{ADVICE}"
        )


# Writing


def require_one_split(val_inputs: Sequence[object], val_fraction: float) -> None:
    """Raise a ConfigError if validation inputs are specified together with a non-default fraction
    to hold out.
    """
    if val_inputs and val_fraction not in (0, 0.1):
        raise ConfigError(
            "val_inputs (--val-input) and val_fraction (--val-fraction) are mutually exclusive: "
            "use only one of them"
        )


def require_replaceable(out: Path, overwrite: bool) -> None:
    """Raise an error if an output folder must not be replaced.

    Args:
        out: the folder to write.
        overwrite: True to allow replacing an existing prepared folder.

    Raises:
        InputError: `out` exists and `overwrite` is False. Also raised if `out` is a file, or a
            folder that is neither empty nor a prepared corpus.
    """
    if not overwrite:
        require_free(out, "choose another --out, or add --overwrite")
    elif out.is_dir() and any(out.iterdir()):
        try:
            read_manifest(out)
        except DataError as error:
            raise InputError(f"{out} is not a prepared corpus, so it is not overwritten") from error
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a folder: choose another --out")


class ShardWriter:
    """Writes the documents of one split into consecutive shards.

    Args:
        folder: folder for the shards, which has a temporary name until the entire corpus is
            written.
        split: "train" or "val".
        dtype: dtype of the token ids, from `token_dtype`.
        shard_tokens: number of tokens at which a shard is closed.
        labelled: True if each document has a loss mask, which is kept in memory until the shard is
            closed.

    Attributes:
        shards: manifest entry of each closed shard.
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
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._loss_mask: bytearray | None = bytearray() if labelled else None
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

    def write(self, tokens: TokenArray, loss_mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Append one document.

        Args:
            tokens: token ids, [N] in the writer's dtype.
            loss_mask: True for each token that is a label, bool [N]; None unless `labelled`.
        """
        assert tokens.dtype == self._dtype
        assert (loss_mask is None) is (self._loss_mask is None)
        if loss_mask is not None and self._loss_mask is not None:
            assert len(loss_mask) == len(tokens)
            self._loss_mask += loss_mask.tobytes()
        if self._file is None:
            name = f"{self._split}-{len(self.shards):05d}.bin"
            self._file = self._stack.enter_context(OutputFile(self._folder / name))
            self._file.write(bytes(HEADER.size))  # The header is written when the shard is closed.
        self._file.write(tokens.tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        if self._offsets[-1] >= self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        file = self._file
        tokens = self._offsets[-1]
        documents = len(self._offsets) - 1
        with self._stack:
            file.write(bytes(-file.size % 8))  # The offsets begin at a multiple of 8.
            file.write(np.asarray(self._offsets, dtype="<u8").tobytes())
            version = VERSION
            if self._loss_mask is not None:
                file.write(bytes(self._loss_mask))
                version, self._loss_mask = LABELLED_VERSION, bytearray()
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


class CorpusWriter:
    """Writes a prepared folder: the shards of both splits, the list of rejected records, and the
    manifest.

    Args:
        folder: the temporary folder to write to.
        tokenizer: the tokenizer that produced the token ids; its files are also written.
        shard_tokens: number of tokens after which a new shard begins.
        labelled: True if each document has a loss mask.

    Attributes:
        dtype: dtype of the token ids.
        counts: numbers of "documents", "tokens", "text_bytes" (UTF-8 bytes) and, with `labelled`,
            "learned" (labels), keyed by split.
        rejected: number of rejected documents for each reason.
        first_rejected: location of the first rejected document, and the reason why it was rejected;
            "" if no documents were rejected.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int, *, labelled: bool = False
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        names = ("documents", "tokens", *(("learned",) if labelled else ()), "text_bytes")
        self.counts = {split: Counter(dict.fromkeys(names, 0)) for split in ("train", "val")}
        self.rejected: Counter[str] = Counter()
        self.first_rejected = ""
        self._version = LABELLED_VERSION if labelled else VERSION
        self._shards = {
            split: ShardWriter(folder, split, self.dtype, shard_tokens, labelled=labelled)
            for split in self.counts
        }

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the files open for `write` and `reject`, and close them on exit."""
        with ExitStack() as stack:
            self._log = stack.enter_context(OutputFile(self.folder / REJECTED_NAME))
            for shards in self._shards.values():
                stack.enter_context(shards)
            yield
        if not self.rejected:
            remove_file(self.folder / REJECTED_NAME)

    def write(
        self,
        split: str,
        tokens: TokenArray,
        loss_mask: npt.NDArray[np.bool_] | None = None,
        *,
        text_bytes: int = 0,
    ) -> None:
        """Append one document to a split.

        Args:
            split: "train" or "val".
            tokens, loss_mask: see `ShardWriter.write`.
            text_bytes: number of UTF-8 bytes in the document's text, added to `counts`.
        """
        self._shards[split].write(tokens, loss_mask)
        self.counts[split].update(documents=1, tokens=len(tokens), text_bytes=text_bytes)
        if loss_mask is not None:
            self.counts[split]["learned"] += int(loss_mask.sum())

    def reject(self, record: Record, error: BadRecordError) -> None:
        """Count a record as rejected, and add it to the file of rejected records."""
        self.rejected[error.reason] += 1
        self.first_rejected = self.first_rejected or f"{record.place}: {error}"
        entry = {"file": record.origin, "line": record.line}
        entry |= {"reason": error.reason, "detail": str(error)}
        self._log.write((json.dumps(entry) + "\n").encode())

    def rejections(self, names: Mapping[str, str]) -> str:
        """Return the number of rejected records for each reason, formatted for a message.

        Args:
            names: description of each reason.
        """
        return ", ".join(f"{count} {names[reason]}" for reason, count in self.rejected.items())

    def finish(
        self,
        written: int,
        fraction: Fraction,
        split_by: str,
        unread: Sequence[Path],
        *,
        gzip_bytes: int | None = None,
        **further: Any,
    ) -> dict[str, Any]:
        """Write the remaining files of the prepared folder, and return the manifest.

        Args:
            written: number of input documents or records that were written to the shards.
            fraction: requested fraction of the data to hold out for validation.
            split_by: method by which validation data was held out: "document", "tail", "example",
                "files" or "none".
            unread: files in the inputs that were not read because their type is not supported.
            gzip_bytes: size of the validation text in bytes after compression with gzip -9; None if
                it was not measured.
            further: additional entries for the manifest.

        Raises:
            StorageError: a file can't be written.
        """
        splits: dict[str, dict[str, Any]] = {
            split: {**self.counts[split], "shards": writer.shards}
            for split, writer in self._shards.items()
            if writer.shards
        }
        if gzip_bytes is not None and "val" in splits:
            splits["val"]["gzip_bytes"] = gzip_bytes
        manifest = {
            "format": MANIFEST_FORMAT,
            "version": self._version,
            "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_sha256": self.tokenizer.fingerprint,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "documents": {
                "read": written + self.rejected.total(),
                "written": written,
                "rejected": dict(sorted(self.rejected.items())),
            },
            "val_fraction": float(fraction),
            "split_by": split_by,
            **further,
            "splits": splits,
            "unread_files": by_ending(unread),
        }
        if unread:
            write_file(self.folder / UNREAD_NAME, unread_lines(unread))
        for name, content in self.tokenizer.files().items():
            write_file(self.folder / name, content)
        write_json(self.folder / MANIFEST_NAME, manifest)
        return manifest
