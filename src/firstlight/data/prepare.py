"""Turn documents into token shards: read, split, encode in parallel, write in order.

The result depends on the inputs and the tokenizer only, not on the number of workers:
documents are read in one order, encoded by whoever is free, and written in the first order.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from rich.progress import Progress, TaskID, TextColumn

from firstlight.console import progress_bar
from firstlight.data.shards import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    VERSION,
    ShardWriter,
    TokenArray,
    read_manifest,
    token_dtype,
)
from firstlight.data.sources import (
    REASONS,
    TEXT_SUFFIXES,
    Document,
    Rejected,
    find_sources,
    read_documents,
)
from firstlight.disk import OutputFile
from firstlight.errors import ConfigError, DataError, InputError
from firstlight.files import new_folder, remove_file, require_free, write_file, write_json
from firstlight.tokenizer import Tokenizer

REJECTED_NAME = "rejected.jsonl"

#: Longer documents are encoded in parts of about this many characters.
_PIECE_CHARACTERS = 1 << 18
#: A worker is handed about this many characters at a time.
_BATCH_CHARACTERS = 1 << 20
#: Corpora below this many bytes are encoded in this process: starting others takes longer.
_SMALL_CORPUS_BYTES = 16 << 20
#: How many characters are read ahead to find out whether there are enough documents to split.
_LOOKAHEAD_CHARACTERS = 1 << 28

_NEWLINE_AFTER_LETTER = re.compile(r"(?<=[^\W\d_])\n")


@dataclass(frozen=True)
class _Piece:
    """A part of a document on its way to the encoder."""

    text: str
    split: str
    first: bool
    last: bool


def prepare(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    val_fraction: float = 0.1,
    workers: int | None = None,
    text_key: str = "text",
    overwrite: bool = False,
    shard_tokens: int = 100_000_000,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the token shards of a corpus into the folder `out`; return their manifest.

    Args:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG]"; see `find_sources`.
        tokenizer: a tokenizer, or the folder or file of one.
        val_fraction: share of the text that is held out for validation, in whole documents:
            the next one whenever validation has fallen behind its share of the bytes. A corpus
            of fewer than 1/val_fraction documents gives the last part of each document
            instead. 0 holds nothing out.
        workers: processes that encode. None chooses by the size of the corpus. More than one
            needs the caller's script to be importable (`if __name__ == "__main__":`).
        text_key: the field with the text in JSONL lines, Parquet columns and datasets.
        overwrite: replace `out` if it is a prepared corpus.
        shard_tokens: tokens after which the next shard is begun.
        progress: show a progress bar on stderr.

    Raises:
        InputError: an input is missing or unreadable, or there is no text at all.
        TokenizerError: the tokenizer can't be loaded.
        ConfigError: `val_fraction`, `workers` or `shard_tokens` is out of range.
        StorageError: the disk is full or not writable; nothing is left behind.
    """
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction must be at least 0 and below 1, not {val_fraction}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens must be at least 1, not {shard_tokens}")
    out = Path(out).expanduser()
    sources = find_sources(inputs)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_pretrained(tokenizer)
    _require_replaceable(out, overwrite)
    total = sum(source.size for source in sources)
    if workers is None:
        workers = 1 if total < _SMALL_CORPUS_BYTES else len(_usable_cpus())
    with new_folder(out, replace=overwrite, synced=True) as folder, ExitStack() as stack:
        bar = stack.enter_context(progress_bar(TextColumn("{task.fields[done]}"), shown=progress))
        plain = all(
            s.path is not None and s.path.suffix in (*TEXT_SUFFIXES, ".jsonl") for s in sources
        )
        task = bar.add_task("tokenizing", total=total if plain else None, done="")
        manifest = _Preparation(tokenizer, folder, val_fraction, shard_tokens, bar, task).run(
            read_documents(sources, text_key), workers
        )
        _write_tokenizer_and_manifest(folder, tokenizer, manifest)
    return manifest


def _write_tokenizer_and_manifest(
    folder: Path, tokenizer: Tokenizer, manifest: dict[str, Any]
) -> None:
    for name, content in tokenizer.files().items():
        write_file(folder / name, content)
    write_json(folder / MANIFEST_NAME, manifest)


def _require_replaceable(out: Path, overwrite: bool) -> None:
    if not overwrite:
        require_free(out, "folder", "choose another --out, or add --overwrite")
    elif out.is_dir() and any(out.iterdir()):
        try:
            read_manifest(out)
        except DataError as error:
            raise InputError(f"{out} is not a prepared corpus and is not overwritten") from error
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a folder: choose another --out")


def _usable_cpus() -> Sequence[int]:
    """The processors this process may run on (a container may allow fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


class _Preparation:
    """The state of one run of `prepare`: counters, writers, the document being put together."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        val_fraction: float,
        shard_tokens: int,
        bar: Progress,
        task: TaskID,
    ) -> None:
        self.tokenizer, self.folder, self.fraction = tokenizer, folder, Fraction(str(val_fraction))
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shard_tokens, self.bar, self.task = shard_tokens, bar, task
        self.rejected: Counter[str] = Counter()
        self.first_rejected: Rejected | None = None
        self.written = 0
        self.documents: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.text_bytes: Counter[str] = Counter()
        self.split_by = "none"
        self.gzip_bytes = 0

    def run(self, entries: Iterable[Document | Rejected], workers: int) -> dict[str, Any]:
        """Write everything; return the manifest."""
        # The same container as gzip -9 writes, to compare a model's bits per byte with.
        compressor = zlib.compressobj(9, wbits=31)
        with ExitStack() as stack:
            rejected_file = stack.enter_context(OutputFile(self.folder / REJECTED_NAME))
            writers = {
                split: stack.enter_context(
                    ShardWriter(self.folder, split, self.dtype, self.shard_tokens)
                )
                for split in ("train", "val")
            }
            accepted = self._accepted(entries, rejected_file)
            batches = _batches(self._pieces(accepted))
            parts: list[TokenArray] = []
            for piece, tokens in _encode_in_order(batches, self.tokenizer, self.dtype, workers):
                parts.append(tokens)
                self._count(piece)
                if piece.split == "val":
                    self.gzip_bytes += len(compressor.compress(piece.text.encode("utf-8")))
                if piece.last:
                    document = self._with_separators(parts)
                    writers[piece.split].write(document)
                    self.tokens[piece.split] += len(document)
                    self.documents[piece.split] += 1
                    parts = []
        self.gzip_bytes += len(compressor.flush())
        if not self.written:
            raise InputError(self._nothing_written())
        if not self.rejected:
            remove_file(self.folder / REJECTED_NAME)
        return self._manifest(writers)

    def _accepted(
        self, entries: Iterable[Document | Rejected], log: OutputFile
    ) -> Iterator[Document]:
        for entry in entries:
            if isinstance(entry, Document):
                yield entry
                continue
            self.rejected[entry.reason] += 1
            self.first_rejected = self.first_rejected or entry
            record = {
                "file": entry.origin,
                "line": entry.line,
                "reason": entry.reason,
                "detail": entry.detail,
            }
            log.write((json.dumps(record, ensure_ascii=True) + "\n").encode())

    def _pieces(self, documents: Iterator[Document]) -> Iterator[_Piece]:
        """Assign each document to a split and cut long ones into pieces."""
        enough, documents = _look_ahead(documents, self.fraction)
        if self.fraction:
            self.split_by = "document" if enough else "tail"
        cuttable = self.tokenizer.splits_at_newline_after_letter
        seen = held_out = 0
        for document in documents:
            self.written += 1
            if self.split_by == "tail":
                head, tail = _cut_tail(document.text, self.fraction)
                shares = [("train", head), ("val", tail)]
            else:
                size = len(document.text.encode("utf-8"))
                # Held out whenever validation has fallen behind its share of the bytes: the
                # share is kept all along the corpus, whatever comes and however it is sorted.
                split = "val" if held_out < self.fraction * seen else "train"
                seen += size
                held_out += size if split == "val" else 0
                shares = [(split, document.text)]
            for split, text in shares:
                texts = _cut_long(text) if cuttable else [text]
                for number, part in enumerate(texts if text else []):
                    yield _Piece(part, split, number == 0, number == len(texts) - 1)

    def _count(self, piece: _Piece) -> None:
        size = len(piece.text.encode("utf-8"))
        self.text_bytes[piece.split] += size
        done = f"{self.written:,} documents, {self.text_bytes.total() / 1e6:,.0f} MB"
        self.bar.update(self.task, advance=size, done=done)

    def _with_separators(self, parts: list[TokenArray]) -> TokenArray:
        before = [self.tokenizer.bos_token_id] if self.tokenizer.add_bos else []
        after = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        return np.concatenate(
            [np.array(before, self.dtype), *parts, np.array(after, self.dtype)], dtype=self.dtype
        )

    def _nothing_written(self) -> str:
        if self.first_rejected is None:
            return "the corpus is empty: the inputs hold no documents"
        reasons = ", ".join(f"{n} {REASONS[reason]}" for reason, n in self.rejected.items())
        first = self.first_rejected
        advice = "; name the field with --text-key" if "no_text" in self.rejected else ""
        return (
            f"the corpus is empty: all {self.rejected.total()} documents were rejected "
            f"({reasons}); first: {first.origin}:{first.line}: {first.detail}{advice}"
        )

    def _manifest(self, writers: dict[str, ShardWriter]) -> dict[str, Any]:
        splits: dict[str, Any] = {}
        for split, writer in writers.items():
            if writer.shards:
                splits[split] = {
                    "documents": self.documents[split],
                    "tokens": self.tokens[split],
                    "text_bytes": self.text_bytes[split],
                    "shards": writer.shards,
                }
        if "val" in splits:
            splits["val"]["gzip_bytes"] = self.gzip_bytes
        return {
            "format": MANIFEST_FORMAT,
            "version": VERSION,
            "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_sha256": self.tokenizer.fingerprint,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "documents": {
                "read": self.written + self.rejected.total(),
                "written": self.written,
                "rejected": dict(sorted(self.rejected.items())),
            },
            "val_fraction": float(self.fraction),
            "split_by": self.split_by,
            "splits": splits,
        }


def _look_ahead(
    documents: Iterator[Document], fraction: Fraction
) -> tuple[bool, Iterator[Document]]:
    """Whether there are at least 1/fraction documents, and all of them again."""
    wanted = math.ceil(1 / fraction) if fraction else 0
    seen: list[Document] = []
    characters = 0
    while len(seen) < wanted and characters < _LOOKAHEAD_CHARACTERS:
        document = next(documents, None)
        if document is None:
            break
        seen.append(document)
        characters += len(document.text)
    return len(seen) >= wanted, itertools.chain(seen, documents)


def _cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """The text without its last `fraction`, and that; cut at a line's end where one is near."""
    position = math.floor(len(text) * (1 - fraction))
    # No further back than makes the second part twice as long as asked for.
    line_end = text.rfind("\n", max(2 * position - len(text), 0), position) + 1
    position = line_end or position
    return text[:position], text[position:]


def _cut_long(text: str) -> list[str]:
    """Pieces whose encodings join to the whole's: cut between a letter and a newline."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        match = _NEWLINE_AFTER_LETTER.search(text, start + _PIECE_CHARACTERS)
        if match is None:
            break
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_in_order(
    batches: Iterator[list[_Piece]], tokenizer: Tokenizer, dtype: np.dtype[Any], workers: int
) -> Iterator[tuple[_Piece, TokenArray]]:
    """Each piece with its tokens, in the order of the pieces, however many processes work."""
    if workers == 1:
        for batch in batches:
            yield from zip(batch, _encode([p.text for p in batch], tokenizer, dtype), strict=True)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.backend.to_str(), dtype),
    )
    waiting: deque[tuple[list[_Piece], Future[list[TokenArray]]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode_in_worker, [p.text for p in batch])))
            # Enough to keep everyone busy; the rest of the corpus stays on the disk.
            if len(waiting) >= 3 * workers:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        while waiting:
            done, future = waiting.popleft()
            yield from zip(done, future.result(), strict=True)
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process was killed, most likely for want of memory: use fewer --workers "
            "(and call prepare under `if __name__ == '__main__':` in a script)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(texts: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype[Any]) -> list[TokenArray]:
    # One text a call keeps the library to one thread: the processes already share the cores.
    ids = (np.array(tokenizer.encode_batch([text])[0], np.int64) for text in texts)
    return [_fitting(array, tokenizer.vocab_size, dtype) for array in ids]


def _fitting(ids: npt.NDArray[np.int64], vocab_size: int, dtype: np.dtype[Any]) -> TokenArray:
    """Ids in the type of the shards, which would silently cut off what is too large.

    Raises:
        DataError: an id is beyond the vocabulary.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"the tokenizer gives id {ids.max()}, beyond its own vocabulary of {vocab_size} "
            "tokens: its files are damaged; load it from where it came from again"
        )
    return ids.astype(dtype)


_worker_state: tuple[Tokenizer, np.dtype[Any]]


def _start_worker(tokenizer_json: str, dtype: np.dtype[Any]) -> None:
    global _worker_state
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of the terminal; the parent alone decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_state = (Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json)), dtype)


def _exit_with_parent() -> None:
    """A parent that is killed outright can't stop its workers: they stop themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> list[TokenArray]:
    return _encode(texts, *_worker_state)
