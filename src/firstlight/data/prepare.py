"""Turn documents into token shards: read, split, encode in parallel, write in order.

The result depends on the inputs and the tokenizer only, not on the engine: documents are read in
one order, encoded by any free process, and written in the first order.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.progress import Progress, TaskID, TextColumn

from firstlight.console import progress_bar
from firstlight.data import ray_engine
from firstlight.data.conversations import BadRecordError
from firstlight.data.encoding import Encode, TextPiece, encode_in_order
from firstlight.data.records import REASONS, Record, nothing_read, read_documents
from firstlight.data.shards import TokenArray, read_manifest
from firstlight.data.sources import TEXT_SUFFIXES, DataSource, find_sources, unread_files
from firstlight.data.writer import CorpusWriter
from firstlight.errors import ConfigError, DataError, InputError
from firstlight.files.atomic import new_folder, require_free
from firstlight.tokenizer import Tokenizer

Engine = Literal["local", "ray"]
#: The split of a document by its text; see `prepare`.
SplitOf = Callable[[str], Literal["train", "val", "tail"] | None]

#: Corpora below this many bytes are encoded in this process: starting others takes longer.
_SMALL_CORPUS_BYTES = 16 << 20
#: Longer documents are encoded in parts of about this many characters.
_PIECE_CHARACTERS = 1 << 18
#: Characters that are read ahead to count the documents before they are split.
_LOOKAHEAD_CHARACTERS = 1 << 28

_NEWLINE_AFTER_LETTER = re.compile(r"(?<=[^\W\d_])\n")


def prepare(
    inputs: Sequence[str | Path | DataSource],
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    val_fraction: float = 0.1,
    split_of: SplitOf | None = None,
    workers: int | None = None,
    engine: Engine = "local",
    ray_address: str | None = None,
    text_key: str = "text",
    overwrite: bool = False,
    shard_tokens: int = 100_000_000,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the token shards of a corpus into the folder `out`; return their manifest.

    Args:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG]", see `find_sources`; or what
            that has returned.
        tokenizer: a tokenizer, or the folder or file of one.
        out: the folder to write.
        val_fraction: share of the text's bytes that is held out for validation, in whole
            documents; of fewer than 1/val_fraction documents, the last part of each document.
        split_of: decides for the text of each document in place of that: "train", "val", "tail" for
            its last `val_fraction` alone, or None for a duplicate, which is rejected.
        workers: processes that encode; None chooses by the size of the corpus. More than one
            needs the caller's script to be importable (`if __name__ == "__main__":`).
        engine: "local" encodes in `workers` processes of this machine, "ray" on a Ray cluster
            (see `ray_engine`), with the same result.
        ray_address: address of the Ray cluster; None is Ray's own choice.
        text_key: the field with the text in JSONL lines, Parquet columns and datasets.
        overwrite: replace `out` if it is a prepared corpus.
        shard_tokens: tokens after which the next shard is begun.
        progress: show a progress bar on stderr.

    Raises:
        InputError: an input is missing or unreadable, or there is no text at all.
        TokenizerError: the tokenizer can't be loaded.
        ConfigError: an argument is out of range or of the other engine; no Ray cluster is there.
        MissingDependencyError: a package that the inputs or the engine need is not installed.
        StorageError: the disk is full or not writable; nothing is left behind.
        DataError: encoding failed for good: processes are killed, or a node lacks something.
    """
    _require_valid(val_fraction, workers, shard_tokens, engine, ray_address)
    out, (names, sources) = Path(out).expanduser(), _sources_of(inputs)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_pretrained(tokenizer)
    require_replaceable(out, overwrite)
    with (
        _encoder(tokenizer, sources, workers, engine, ray_address) as encode,
        new_folder(out, replace=overwrite, synced=True) as folder,
        progress_bar(TextColumn("{task.fields[done]}"), shown=progress) as bar,
        closing(read_documents(sources, text_key)) as records,
    ):
        task = bar.add_task("tokenizing", total=_text_bytes(sources), done="")
        writer = CorpusWriter(folder, tokenizer, shard_tokens)
        preparation = _Preparation(writer, val_fraction, split_of, bar, task)
        preparation.run(records, encode)
        return preparation.manifest(unread_files(names))


def _sources_of(
    inputs: Sequence[str | Path | DataSource],
) -> tuple[list[str | Path], list[DataSource]]:
    """(the inputs that are names, all sources)."""
    names = [one for one in inputs if not isinstance(one, DataSource)]
    sources = [one for one in inputs if isinstance(one, DataSource)]
    if names or not sources:  # `find_sources` refuses to find nothing
        sources += find_sources(names)
    return names, sources


def _require_valid(
    val_fraction: float, workers: int | None, shard_tokens: int, engine: str, address: str | None
) -> None:
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction must be at least 0 and below 1, not {val_fraction}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens must be at least 1, not {shard_tokens}")
    if engine not in get_args(Engine):
        raise ConfigError(f"engine must be one of {', '.join(get_args(Engine))}, not {engine}")
    if engine == "ray" and workers is not None:
        raise ConfigError("workers are processes of the local engine: leave them out with ray")
    if engine != "ray" and address is not None:
        raise ConfigError("ray_address is where engine ray finds its cluster: choose that engine")


def _encoder(
    tokenizer: Tokenizer,
    sources: Sequence[DataSource],
    workers: int | None,
    engine: Engine,
    ray_address: str | None,
) -> AbstractContextManager[Encode]:
    if engine == "ray":
        return ray_engine.encoder(tokenizer, ray_address)
    if workers is None:
        small = sum(source.size for source in sources) < _SMALL_CORPUS_BYTES
        workers = 1 if small else _usable_cpus()
    return nullcontext(functools.partial(encode_in_order, tokenizer=tokenizer, workers=workers))


def _text_bytes(sources: Sequence[DataSource]) -> int | None:
    """The bytes of text to encode; None if a source does not show them by its size."""
    plain = (*TEXT_SUFFIXES, ".jsonl")
    if all(s.path is not None and s.path.suffix in plain for s in sources):
        return sum(source.size for source in sources)
    return None


def require_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse to write to a place that is taken.

    Raises:
        InputError: something is there, and `overwrite` is not set, or it is no prepared folder.
    """
    if not overwrite:
        require_free(out, "folder", "choose another --out, or add --overwrite")
    elif out.is_dir() and any(out.iterdir()):
        try:
            read_manifest(out)
        except DataError as error:
            raise InputError(f"{out} is not a prepared corpus and is not overwritten") from error
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file, not a folder: choose another --out")


def _usable_cpus() -> int:
    """The number of processors for this process: a container may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def look_ahead(documents: Iterator[Record], fraction: Fraction) -> tuple[bool, Iterator[Record]]:
    """(there are at least 1/fraction documents, all documents again)."""
    wanted = math.ceil(1 / fraction) if fraction else 0
    seen: list[Record] = []
    characters = 0
    while len(seen) < wanted and characters < _LOOKAHEAD_CHARACTERS:
        document = next(documents, None)
        if document is None:
            break
        seen.append(document)
        characters += len(document.value)
    return len(seen) >= wanted, itertools.chain(seen, documents)


def cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """The text without its last `fraction`, and that; cut at the end of a line if one is near."""
    position = math.floor(len(text) * (1 - fraction))
    # No further back than makes the second part twice as long as asked for.
    line_end = text.rfind("\n", max(2 * position - len(text), 0), position) + 1
    position = line_end or position
    return text[:position], text[position:]


def cut_long(text: str) -> list[str]:
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


class _Preparation:
    """The state of one run of `prepare`: the split by bytes, the document being put together."""

    def __init__(
        self,
        writer: CorpusWriter,
        val_fraction: float,
        split_of: SplitOf | None,
        bar: Progress,
        task: TaskID,
    ) -> None:
        self.writer, self.tokenizer, self.dtype = writer, writer.tokenizer, writer.dtype
        self.fraction = Fraction(str(val_fraction))
        self.split_of = split_of
        self.bar, self.task = bar, task
        self.written = 0
        self.split_by = "none"
        self.gzip_bytes = 0

    def run(self, records: Iterable[Record], encode: Encode) -> None:
        """Write everything.

        Raises:
            InputError: there is no text.
        """
        # The same container as gzip -9 writes, to compare a model's bits per byte with.
        compressor = zlib.compressobj(9, wbits=31)
        with self.writer.open(), ExitStack() as stack:
            # Closed on the way out of an error: what works elsewhere ends before the folder goes.
            encoded = stack.enter_context(closing(encode(self._pieces(self._accepted(records)))))
            parts: list[TokenArray] = []
            for piece, tokens in encoded:
                parts.append(tokens)
                self._count(piece)
                if piece.split == "val":
                    self.gzip_bytes += len(compressor.compress(piece.text.encode("utf-8")))
                if piece.last:
                    self.writer.write(piece.split, self._with_separators(parts))
                    parts = []
        self.gzip_bytes += len(compressor.flush())
        if not self.written:
            raise InputError(nothing_read(self.writer.rejected, self.writer.first_rejected))

    def manifest(self, unread: Sequence[Path]) -> dict[str, Any]:
        """Complete the folder; return its manifest."""
        return self.writer.finish(
            self.written, self.fraction, self.split_by, unread, gzip_bytes=self.gzip_bytes
        )

    def _accepted(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if record.error is None:
                yield record
            else:
                self.writer.reject(record, record.error)

    def _pieces(self, documents: Iterator[Record]) -> Iterator[TextPiece]:
        """Assign each document to a split and cut long ones into pieces."""
        cuttable = self.tokenizer.splits_at_newline_after_letter
        for document, split in self._assigned(documents):
            self.written += 1
            if split == "tail":
                head, tail = cut_tail(document.value, self.fraction)
                shares = [("train", head), ("val", tail)]
            else:
                shares = [(split, document.value)]
            for name, text in shares:
                texts = cut_long(text) if cuttable else [text]
                for number, part in enumerate(texts if text else []):
                    yield TextPiece(part, name, number == 0, number == len(texts) - 1)

    def _assigned(self, documents: Iterator[Record]) -> Iterator[tuple[Record, str]]:
        """Each document that is written, with its split."""
        if self.split_of is not None:
            for document in documents:
                split = self.split_of(document.value)
                if split is None:
                    self.writer.reject(document, BadRecordError("duplicate", REASONS["duplicate"]))
                    continue
                self.split_by = "tail" if split == "tail" else "document"
                yield document, split
            return
        enough, documents = look_ahead(documents, self.fraction)
        if self.fraction:
            self.split_by = "document" if enough else "tail"
        seen = held_out = 0
        for document in documents:
            if self.split_by == "tail":
                yield document, "tail"
                continue
            size = len(document.value.encode("utf-8"))
            # Held out whenever validation has fallen behind its share of the bytes: the share is
            # kept all along the corpus, whatever comes and however it is sorted.
            split = "val" if held_out < self.fraction * seen else "train"
            seen += size
            held_out += size if split == "val" else 0
            yield document, split

    def _count(self, piece: TextPiece) -> None:
        size = len(piece.text.encode("utf-8"))
        counts = self.writer.counts
        counts[piece.split]["text_bytes"] += size
        total = sum(count["text_bytes"] for count in counts.values())
        done = f"{self.written:,} documents, {total / 1e6:,.0f} MB"
        self.bar.update(self.task, advance=size, done=done)

    def _with_separators(self, parts: list[TokenArray]) -> TokenArray:
        before = [self.tokenizer.bos_token_id] if self.tokenizer.add_bos else []
        after = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        return np.concatenate(
            [np.array(before, self.dtype), *parts, np.array(after, self.dtype)], dtype=self.dtype
        )
