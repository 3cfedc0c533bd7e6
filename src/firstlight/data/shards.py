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

Of conversations (see `examples`) manifest and shards have version 2. A document is one example
there, and at a shard's end stands

    ...     N             for each token one byte: 1 if it is learned, else 0

uint16 is used while every id of the tokenizer fits in it. A document is its tokens between
the tokenizer's bos (if it adds one) and eos, and lies in one shard whole.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.data.shard_file import (
    HEADER,
    LABELLED_VERSION,
    MAGIC,
    VERSION,
    Shard,
    TokenArray,
)
from firstlight.disk import OutputFile
from firstlight.errors import DataError, InputError
from firstlight.files import read_json, sha256_of

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "firstlight-tokens"

_FIELDS = {"vocab_size": int, "tokenizer_sha256": str, "splits": dict}
_SPLIT_FIELDS = {"documents": int, "tokens": int, "text_bytes": int, "shards": list}
_SHARD_FIELDS = {"file": str, "tokens": int, "bytes": int, "sha256": str}

#: Tokens of a shard that are compared with the vocabulary together.
_CHECKED_AT_ONCE = 1 << 17
_ADVICE = "prepare the corpus again"


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


class TokenDataset:
    """The tokens of one split, as if they were one long array. What is read of it is checked each
    time: a shard that changes or is cut short while it is in use is an error (see `shard_file`).

    Args:
        folder: a folder that `prepare` wrote.
        split: "train" or "val".
        verify: compare every shard with the sha256 in the manifest, and its ids with the
            vocabulary, first: about a second for each GB. Sizes, headers and document offsets
            are checked in any case, and so is each token when it is read.

    Raises:
        DataError: the folder is no prepared corpus, lacks the split, or is damaged; or it holds
            conversations, which are read by `examples.ExampleDataset`.
    """

    #: Of the folders that are read.
    version = VERSION

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        self.folder, self.split = Path(folder).expanduser(), split
        self.manifest = read_manifest(self.folder)
        if self.manifest["version"] != self.version:
            kinds = {VERSION: "text", LABELLED_VERSION: "conversations"}
            raise DataError(
                f"{folder} holds {kinds[self.manifest['version']]}, not {kinds[self.version]}"
            )
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
        self.vocab_size: int = self.manifest["vocab_size"]
        names = [shard["file"] for shard in entry["shards"]]
        if len(set(names)) != len(names):
            raise DataError(f"{folder}: the manifest names a shard of '{split}' twice: {_ADVICE}")
        self._shards = [self._open_shard(shard, verify) for shard in entry["shards"]]
        self._starts = list(accumulate((one.num_tokens for one in self._shards), initial=0))
        self.num_tokens = self._starts[-1]
        documents = sum(shard.num_documents for shard in self._shards)
        if (self.num_tokens, documents) != (entry["tokens"], entry["documents"]):
            raise DataError(f"{folder}: the shards of '{split}' don't add up to its manifest")

    def _open_shard(self, entry: dict[str, Any], verify: bool) -> Shard:
        if Path(entry["file"]).name != entry["file"]:
            raise DataError(f"{self.folder}: the manifest names a shard outside: {entry['file']}")
        path = self.folder / entry["file"]
        if not path.is_file():
            raise DataError(f"shard {path} is missing: {_ADVICE}")
        if path.stat().st_size != entry["bytes"]:
            raise DataError(f"shard {path} has the wrong size: {_ADVICE}")
        shard = Shard(path, self.version, entry["sha256"] if verify else None)
        shard.check_documents()
        if shard.num_tokens != entry["tokens"]:
            raise DataError(f"shard {path} does not hold what its manifest says: {_ADVICE}")
        if shard.itemsize < token_dtype(self.vocab_size).itemsize:
            raise DataError(
                f"shard {path} has 2 bytes for each token, too few for the ids of its vocabulary "
                f"of {self.vocab_size}: those above 65535 were cut off; {_ADVICE}"
            )
        if verify:
            for start in range(0, shard.num_tokens, _CHECKED_AT_ONCE):
                part = shard.tokens(start, start + _CHECKED_AT_ONCE)
                self._require_known(part, f"shard {path}")
        return shard

    def _require_known(self, tokens: npt.NDArray[Any], where: str) -> None:
        """Refuse ids that the vocabulary doesn't have: a model has no row for them."""
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"{where} holds token id {largest}, beyond its vocabulary of {self.vocab_size} "
                f"tokens: {_ADVICE}"
            )

    def __getitem__(self, span: slice) -> npt.NDArray[np.int64]:
        """Tokens `start:stop` as int64 (cut at the end, like any slice).

        Raises:
            DataError: a shard was changed or cut short since it was opened, or holds an id beyond
                the vocabulary.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        result = np.empty(max(stop - start, 0), dtype=np.int64)
        filled, position = 0, start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            offset = position - self._starts[index]
            part = self._shards[index].tokens(offset, offset + stop - position)
            result[filled : filled + len(part)] = part
            filled += len(part)
            position += len(part)
        self._require_known(result, f"the '{self.split}' split of {self.folder}")
        return result

    def document_starts(self, span: slice) -> npt.NDArray[np.int64]:
        """Where documents begin among tokens `start:stop`, counted from `start`, ascending.

        A place stands there twice where an empty document precedes another.

        Raises:
            DataError: a shard was changed or cut short since it was opened.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        parts = [np.empty(0, dtype=np.int64)]
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._shards)):
            base, shard = self._starts[index], self._shards[index]
            if base >= stop:
                break
            first, last = (shard.documents_before(max(key - base, 0)) for key in (start, stop))
            parts.append(shard.offsets(first, last).astype(np.int64) + (base - start))
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
        # A bool is an int to Python, and nothing here can be less than none.
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise DataError(f"{path} is damaged ('{name}'): {_ADVICE}")
