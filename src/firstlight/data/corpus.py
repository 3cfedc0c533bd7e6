"""A prepared corpus: how a run sees it, and how its folder is written.

`Corpus` is what training, evaluation and planning need of a split, whatever it holds:

    text                `shards.TokenDataset`
    conversations       `examples.ExampleDataset`
    preference pairs    `examples.PreferenceDataset`
    a mix of corpora    `mixing.MixedDataset`

`CorpusWriter` writes the folders of all of them (`shards` describes these).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from firstlight.data.conversations import BadRecordError
from firstlight.data.records import Record
from firstlight.data.shard_file import LABELLED_VERSION, VERSION, ShardWriter, TokenArray
from firstlight.data.shards import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    REJECTED_NAME,
    UNREAD_NAME,
    CorpusPart,
    Kind,
    TokenDataset,
    token_dtype,
)
from firstlight.data.sources import by_ending
from firstlight.files.atomic import remove_file, write_file, write_json
from firstlight.files.disk import OutputFile
from firstlight.tokenizer import Tokenizer


class Corpus(Protocol):
    """A split of prepared data, in rows of `seq_len` predictions.

    Attributes:
        kind: what the data are.
        has_examples: some rows are packed examples, which need document masking.
        folder: the prepared folder, with the tokenizer.
        split: "train" or "val".
        manifest: of the folder, or of all corpora with their weights.
        vocab_size: ids of the tokenizer.
        num_tokens: tokens of the split.
        parts: the corpora of a mix, or the one alone.
        gzip_bits_per_byte: bits per byte of gzip -9 on the text; None where not recorded.
    """

    folder: Path
    split: str
    manifest: dict[str, Any]
    vocab_size: int
    num_tokens: int

    @property
    def kind(self) -> Kind: ...

    @property
    def has_examples(self) -> bool: ...

    @property
    def parts(self) -> tuple[CorpusPart, ...]: ...

    @property
    def gzip_bits_per_byte(self) -> float | None: ...

    def num_rows(self, seq_len: int) -> int:
        """The number of rows, which are an epoch; a DataError if examples don't fit into rows."""

    def require_row(self, seq_len: int) -> None:
        """Raise a DataError if the split is shorter than a row, or examples don't fit into rows."""

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        """(split, row in it) that comes after `position` others: the order of a run."""

    def learned_share(self, seq_len: int) -> float:
        """Of the tokens of a run's sequences, the share that is learned: of text all, of
        conversations what the assistant says beside prompts and padding."""

    def describe(self, seq_len: int) -> Iterator[str]:
        """What a run sees of conversations, and what of them it does not, for people."""

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        """What the first `rows` rows of a mix are, for people."""

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        """What a run's record has of conversations: see `Packing.record`."""

    def identity(self) -> dict[str, Any]:
        """What tells a run's data from others, beside manifest and folder."""

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        """How often each corpus of a mix has been seen after the first rows, by its name."""


class CorpusWriter:
    """Writes a prepared folder: the shards of both splits, the list of what was rejected, and the
    manifest.

    Args:
        folder: a temporary folder until all is written.
        tokenizer: the one that the tokens are of.
        shard_tokens: tokens after which the next shard is begun.
        labelled: each document comes with which of its tokens are learned.

    Attributes:
        dtype: type of the tokens.
        counts: documents, tokens and UTF-8 bytes of text of each split; with labels also the
            tokens that are learned.
        rejected: number of rejected documents by reason.
        first_rejected: place and fault of the first of them; "" if there is none.
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
        """The files, open for `write` and `reject`."""
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
        learned: npt.NDArray[np.bool_] | None = None,
        *,
        text_bytes: int = 0,
    ) -> None:
        """Append one document to a split: its tokens, and which of them are learned."""
        self._shards[split].write(tokens, learned)
        self.counts[split].update(documents=1, tokens=len(tokens), text_bytes=text_bytes)
        if learned is not None:
            self.counts[split]["learned"] += int(learned.sum())

    def reject(self, record: Record, error: BadRecordError) -> None:
        """List a record as not taken, with the fault."""
        self.rejected[error.reason] += 1
        self.first_rejected = self.first_rejected or f"{record.place}: {error}"
        entry = {"file": record.origin, "line": record.line}
        entry |= {"reason": error.reason, "detail": str(error)}
        self._log.write((json.dumps(entry) + "\n").encode())

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
        """Complete the folder; return its manifest.

        Args:
            written: documents that were taken, whole.
            fraction: share of them that was to be held out.
            split_by: how they were.
            unread: files that were not read.
            gzip_bytes: bytes of the validation text after gzip -9, where they were counted.
            further: more entries of the manifest.

        Raises:
            StorageError: the disk refuses.
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
            write_file(self.folder / UNREAD_NAME, "".join(f"{file}\n" for file in unread))
        for name, content in self.tokenizer.files().items():
            write_file(self.folder / name, content)
        write_json(self.folder / MANIFEST_NAME, manifest)
        return manifest
