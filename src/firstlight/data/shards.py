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
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from firstlight.data.packing import num_rows, row_span, separate_documents, shuffled_index
from firstlight.data.shard_file import LABELLED_VERSION, VERSION, Shard
from firstlight.errors import DataError, InputError
from firstlight.files.atomic import read_json

#: What a prepared folder holds, by the names of `data.kind`, or a mix of several.
Kind = Literal["text", "chat", "preference", "mix"]

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "firstlight-tokens"
#: Records that were not taken, one JSON object a line.
REJECTED_NAME = "rejected.jsonl"
#: Files of folders that were not read, one a line.
UNREAD_NAME = "unread.txt"

_FIELDS = {"vocab_size": int, "tokenizer_sha256": str, "splits": dict}
_SPLIT_FIELDS = {"documents": int, "tokens": int, "text_bytes": int, "shards": list}
_SHARD_FIELDS = {"file": str, "tokens": int, "bytes": int, "sha256": str}

#: Tokens of a shard that are compared with the vocabulary together.
_CHECKED_AT_ONCE = 1 << 17
_ADVICE = "prepare the corpus again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class CorpusPart:
    """One corpus of a mix, or one that is alone.

    Attributes:
        name: of its metrics; "" of one that is alone.
        dataset: the split.
        weight: rows in a period of the mix: see `mixing.whole_weights`.
    """

    name: str
    dataset: TokenDataset
    weight: int


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

    Attributes:
        text_bytes: UTF-8 bytes of the split's text.
        gzip_bytes: bytes of the text after gzip -9; None where not recorded.
    """

    #: Of the folders that are read.
    version = VERSION
    kind: Kind = "text"
    has_examples = False

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

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        return (CorpusPart("", self, 1),)

    @property
    def gzip_bits_per_byte(self) -> float | None:
        return 8 * self.gzip_bytes / self.text_bytes if self.gzip_bytes else None

    # The methods of `corpus.Corpus`

    def num_rows(self, seq_len: int) -> int:
        return num_rows(self.num_tokens, seq_len)

    def require_row(self, seq_len: int) -> None:
        if self.num_tokens < seq_len + 1:
            raise DataError(
                f"the '{self.split}' split of {self.folder} has {self.num_tokens} tokens, "
                f"fewer than one row of data.seq_len {seq_len} needs ({seq_len + 1}): "
                "lower data.seq_len or prepare more text"
            )

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        rows = self.num_rows(seq_len)
        epoch, place = divmod(position, rows)
        return self, shuffled_index(place, rows, seed, epoch)

    def fill_row(
        self,
        row: int,
        input_ids: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        document_ids: npt.NDArray[np.int32] | None,
    ) -> None:
        """Write a row.

        Args:
            row: its number.
            input_ids: of the row [T]; places that are left over stay as they are.
            labels: likewise; those that are not learned stay as they are.
            document_ids: likewise; all are written. None without document masking.
        """
        span = row_span(row, len(input_ids))
        tokens = self[span]
        length = len(tokens) - 1
        input_ids[:length] = tokens[:-1]
        learned = np.ones(length, dtype=bool)
        if document_ids is not None:
            numbers, left_out = separate_documents(
                self.document_starts(span), length, eos_opens=self.eos_separates
            )
            document_ids[:length] = numbers
            document_ids[length:] = numbers[-1] + 1
            learned[left_out] = False
        labels[:length][learned] = tokens[1:][learned]

    def references_of(self, rows: Sequence[int], seq_len: int) -> npt.NDArray[np.float64] | None:
        """`loader.Batch.references` of the rows: of preference pairs alone."""
        return None

    def predicts_first(self, first_id: int | None) -> bool:
        """Whether the very first token is predicted, from `first_id`: a leading bos stands for no
        text, and there is nothing to predict it from. An example's first one is not learned."""
        return first_id is not None and int(self[0:1][0]) != first_id

    def bits_a_nat(self, *, document_masking: bool, first_id: int | None = None) -> float:
        """Bits per byte of the text for each nat per token; see `evaluate_split`."""
        predicted = self._num_predicted(document_masking=document_masking, first_id=first_id)
        return predicted / self.text_bytes / math.log(2)

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        """The number of tokens that are predicted in an epoch."""
        if document_masking and self.documents_begin_with_bos:
            return self.num_tokens - self.num_documents
        return self.num_tokens - (not self.predicts_first(first_id))

    def learned_share(self, seq_len: int) -> float:
        return 1.0

    # What a run says and records of text: nothing

    def describe(self, seq_len: int) -> Iterator[str]:
        return iter(())

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        return iter(())

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        return []

    def identity(self) -> dict[str, Any]:
        return {}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        return {}


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
