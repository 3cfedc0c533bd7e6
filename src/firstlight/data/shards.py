"""Token shards: the one format in which a prepared corpus lies on disk.

A prepared folder holds

    manifest.json           counts, sha256 of each shard, the tokenizer's fingerprint
    tokenizer.json, tokenizer_config.json
    train-00000.bin ...     shards of the training split
    val-00000.bin ...       shards of the validation split, if there is one
    rejected.jsonl          documents that were not taken, with file, line and reason

A shard is, little-endian:

    offset  size          what
    0       8             magic b"FLTOKENS"
    8       4             version (uint32) = 1
    12      4             bytes per token (uint32): 2 = uint16, 4 = uint32
    16      8             number of tokens N (uint64)
    24      8             number of documents D (uint64)
    32      32            zeros, reserved
    64      N * bytes     the tokens
    ...     0 to 7        zeros, up to a multiple of 8
    ...     (D + 1) * 8   document offsets (uint64): document i is tokens[offsets[i]:offsets[i+1]]

uint16 is used while every id of the tokenizer fits in it. A document is its tokens between
the tokenizer's bos (if it adds one) and eos, and lies in one shard whole.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import DataError, InputError
from firstlight.files import read_json, sha256_of

MAGIC = b"FLTOKENS"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32x")
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "firstlight-tokens"

_FIELDS = {"vocab_size": int, "tokenizer_sha256": str, "splits": dict}
_SPLIT_FIELDS = {"documents": int, "tokens": int, "text_bytes": int, "shards": list}
_SHARD_FIELDS = {"file": str, "tokens": int, "bytes": int, "sha256": str}

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes the documents of one split into consecutive shards.

    Args:
        folder: where the shards go; a temporary folder until the whole corpus is written.
        split: "train" or "val".
        dtype: from `token_dtype`.
        shard_tokens: a shard is closed once it holds at least this many tokens.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = 100_000_000
    ) -> None:
        self.shards: list[dict[str, Any]] = []
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_tokens = shard_tokens
        self._file: IO[bytes] | None = None
        self._offsets: list[int] = [0]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self._close_shard()
        elif self._file is not None:
            self._file.close()

    def write(self, tokens: TokenArray) -> None:
        """Append one document's tokens."""
        assert tokens.dtype == self._dtype
        if self._file is None:
            name = f"{self._split}-{len(self.shards):05d}.bin"
            self._file = open(self._folder / name, "wb")  # noqa: SIM115 - outlives this call
            self._file.write(bytes(HEADER.size))
        self._file.write(tokens.tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        if self._offsets[-1] >= self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        file, tokens, documents = self._file, self._offsets[-1], len(self._offsets) - 1
        with file:
            file.write(bytes(-file.tell() % 8))
            file.write(np.asarray(self._offsets, dtype="<u8").tobytes())
            file.seek(0)
            file.write(HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, tokens, documents))
        path = Path(file.name)
        self.shards.append(
            {
                "file": path.name,
                "tokens": tokens,
                "documents": documents,
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
        )
        self._file, self._offsets = None, [0]


class TokenDataset:
    """The tokens of one split, memory-mapped, as if they were one long array.

    Args:
        folder: a folder that `prepare` wrote.
        split: "train" or "val".
        verify: compare every shard with the sha256 in the manifest first.

    Raises:
        DataError: the folder is no prepared corpus, lacks the split, or is damaged.
    """

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        self.folder, self.split = Path(folder).expanduser(), split
        self.manifest = read_manifest(self.folder)
        entry = self.manifest["splits"].get(split)
        if entry is None:
            known = ", ".join(self.manifest["splits"])
            raise DataError(
                f"{folder} has no '{split}' split (it has: {known}): "
                "prepare it again with --val-fraction above 0"
            )
        self.text_bytes: int = entry["text_bytes"]
        self.gzip_bytes: int | None = entry.get("gzip_bytes")
        self.num_documents: int = entry["documents"]
        opened = [self._open_shard(shard, verify) for shard in entry["shards"]]
        self._shards = [tokens for tokens, _ in opened]
        self._document_starts = [np.asarray(offsets)[:-1] for _, offsets in opened]
        self._starts = list(accumulate((len(shard) for shard in self._shards), initial=0))
        self.num_tokens = self._starts[-1]
        if self.num_tokens != entry["tokens"]:
            raise DataError(f"{folder}: the shards of '{split}' don't add up to its manifest")

    def _open_shard(
        self, shard: dict[str, Any], verify: bool
    ) -> tuple[TokenArray, npt.NDArray[np.uint64]]:
        if Path(shard["file"]).name != shard["file"]:
            raise DataError(f"{self.folder}: the manifest names a shard outside: {shard['file']}")
        path = self.folder / shard["file"]
        advice = "prepare the corpus again"
        if not path.is_file():
            raise DataError(f"shard {path} is missing: {advice}")
        if path.stat().st_size != shard["bytes"]:
            raise DataError(f"shard {path} has the wrong size: {advice}")
        if verify and sha256_of(path) != shard["sha256"]:
            raise DataError(f"shard {path} is damaged (its sha256 is not the manifest's): {advice}")
        tokens, offsets = read_shard(path)
        if len(tokens) != shard["tokens"]:
            raise DataError(f"shard {path} does not hold what its manifest says: {advice}")
        return tokens, offsets

    def __getitem__(self, span: slice) -> npt.NDArray[np.int64]:
        """Tokens `start:stop` as int64 (cut at the end, like any slice)."""
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        result = np.empty(max(stop - start, 0), dtype=np.int64)
        filled, position = 0, start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            shard, offset = self._shards[index], position - self._starts[index]
            part = shard[offset : offset + stop - position]
            result[filled : filled + len(part)] = part
            filled += len(part)
            position += len(part)
        return result

    def document_starts(self, span: slice) -> npt.NDArray[np.int64]:
        """Where documents begin among tokens `start:stop`, counted from `start`, ascending.

        A place stands there twice where an empty document precedes another.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        parts = [np.empty(0, dtype=np.int64)]
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._shards)):
            base, starts = self._starts[index], self._document_starts[index]
            if base >= stop:
                break
            # Keys of the starts' own type: others would convert all of them, at every call.
            keys = np.array([max(start - base, 0), stop - base], dtype=np.uint64)
            first, last = np.searchsorted(starts, keys)
            parts.append(starts[first:last].astype(np.int64) + (base - start))
        return np.concatenate(parts)

    @functools.cached_property
    def documents_begin_with_bos(self) -> bool:
        """Whether a bos is each document's first token; if not, the eos before it is what its
        first token is predicted from."""
        first = self[0:1].tolist()
        return bool(first == [self.manifest.get("bos_token_id")])

    @property
    def eos_separates(self) -> bool:
        """Whether the stream is text, eos, text, eos, ... without bos, as GPT-2's."""
        return self.manifest.get("eos_token_id") is not None and not self.documents_begin_with_bos


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        DataError: there is none, it is damaged, or it is of another format or version.
    """
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist: make it with `firstlight prepare`")
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"{folder} is not a prepared corpus (no {MANIFEST_NAME}): run `firstlight prepare`"
        )
    try:
        manifest = read_json(path)
    except InputError as error:
        raise DataError(str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path} is not the manifest of a prepared corpus")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{path} is of version {manifest.get('version')}; this firstlight reads {VERSION}"
        )
    _require_fields(path, manifest, _FIELDS)
    for split in manifest["splits"].values():
        _require_fields(path, split, _SPLIT_FIELDS)
        for shard in split["shards"]:
            _require_fields(path, shard, _SHARD_FIELDS)
    return manifest


def _require_fields(path: Path, entry: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
            raise DataError(f"{path} is damaged ('{name}'): prepare the corpus again")


def read_shard(path: Path) -> tuple[TokenArray, npt.NDArray[np.uint64]]:
    """(tokens, document offsets) of a shard, both memory-mapped.

    Raises:
        DataError: the file is not a shard, or is cut short.
    """
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{path} is not a token shard: it is too short")
    magic, version, itemsize, num_tokens, num_documents = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"{path} is not a token shard: it does not begin with {MAGIC.decode()}")
    if version != VERSION or itemsize not in (2, 4):
        raise DataError(f"{path} is a token shard of an unknown version")
    offsets_at = -(-(HEADER.size + num_tokens * itemsize) // 8) * 8
    if path.stat().st_size != offsets_at + (num_documents + 1) * 8:
        raise DataError(f"{path} is cut short or damaged")
    tokens: TokenArray = np.memmap(
        path, dtype=f"<u{itemsize}", mode="r", offset=HEADER.size, shape=(num_tokens,)
    )
    offsets: npt.NDArray[np.uint64] = np.memmap(
        path, dtype="<u8", mode="r", offset=offsets_at, shape=(num_documents + 1,)
    )
    return tokens, offsets
