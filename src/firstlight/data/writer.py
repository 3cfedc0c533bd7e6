"""Writer of prepared folders of text, conversations and preference pairs (format: see `shards`)."""

from __future__ import annotations

import json
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
from firstlight.data.shards import (
    HEADER,
    LABELLED_VERSION,
    MAGIC,
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    REJECTED_NAME,
    UNREAD_NAME,
    VERSION,
    TokenArray,
    read_manifest,
    token_dtype,
)
from firstlight.data.sources import by_ending
from firstlight.errors import ConfigError, DataError, InputError
from firstlight.files.atomic import remove_file, require_free, sha256_of, write_file, write_json
from firstlight.files.disk import OutputFile
from firstlight.tokenizer import Tokenizer


def require_one_split(val_inputs: Sequence[object], val_fraction: float) -> None:
    """Raise a ConfigError if inputs to validate on are given and a share to hold out (not its
    default), too."""
    if val_inputs and val_fraction not in (0, 0.1):
        raise ConfigError("give either val_inputs (--val-input) or val_fraction (--val-fraction)")


def require_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that must not be replaced.

    Args:
        out: the folder to write.
        overwrite: an existing prepared folder may be replaced.

    Raises:
        InputError: `out` exists and `overwrite` is False; or `out` is a file, or a folder that is
            neither empty nor a prepared corpus.
    """
    if not overwrite:
        require_free(out, "choose another --out, or add --overwrite")
    elif out.is_dir() and any(out.iterdir()):
        try:
            read_manifest(out)
        except DataError as error:
            raise InputError(f"{out} is not a prepared corpus and is not overwritten") from error
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a folder: choose another --out")


class ShardWriter:
    """Writes the documents of one split into consecutive shards.

    Args:
        folder: the folder of the shards; a temporary one until the whole corpus is written.
        split: "train" or "val".
        dtype: dtype of the token ids, from `shards.token_dtype`.
        shard_tokens: a shard is closed once it holds at least this number of tokens.
        labelled: each document comes with its loss mask, which is held in memory until the shard
            is closed.

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
            tokens: token ids, of the writer's dtype [N].
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
            self._file.write(bytes(HEADER.size))  # replaced by the header when the shard is closed
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
            file.write(bytes(-file.size % 8))  # the offsets begin at a multiple of 8
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
        folder: a temporary folder until all is written.
        tokenizer: the tokenizer that gave the token ids; its files are written, too.
        shard_tokens: tokens after which the next shard begins.
        labelled: each document comes with its loss mask.

    Attributes:
        dtype: dtype of the token ids.
        counts: split -> numbers by name: "documents", "tokens", "text_bytes" (UTF-8 bytes)
            and, with `labelled`, "learned" (labels).
        rejected: number of rejected documents for each reason.
        first_rejected: place and reason of the first rejected document; "" if there is none.
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
        """A context in which the files are open for `write` and `reject`."""
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
            text_bytes: UTF-8 bytes of the document's text, added to `counts`.
        """
        self._shards[split].write(tokens, loss_mask)
        self.counts[split].update(documents=1, tokens=len(tokens), text_bytes=text_bytes)
        if loss_mask is not None:
            self.counts[split]["learned"] += int(loss_mask.sum())

    def reject(self, record: Record, error: BadRecordError) -> None:
        """Count a record as rejected, and write it to the list of rejected records."""
        self.rejected[error.reason] += 1
        self.first_rejected = self.first_rejected or f"{record.place}: {error}"
        entry = {"file": record.origin, "line": record.line}
        entry |= {"reason": error.reason, "detail": str(error)}
        self._log.write((json.dumps(entry) + "\n").encode())

    def rejections(self, names: Mapping[str, str]) -> str:
        """The numbers of rejected records in words.

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
        """Complete the folder; return its manifest.

        Args:
            written: number of input documents or records in the shards.
            fraction: requested share of validation.
            split_by: how validation was held out: "document", "tail", "example", "files" or "none".
            unread: files of the inputs that were not read, because of their kind.
            gzip_bytes: bytes of the validation text after gzip -9; None if not counted.
            further: further entries of the manifest.

        Raises:
            StorageError: a file system error.
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
