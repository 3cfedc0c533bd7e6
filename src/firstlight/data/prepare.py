"""Prepare text as token shards: read documents, split them, encode them in parallel and write them
in order.

The result depends on the inputs, the tokenizer and the options. It does not depend on the engine or
the number of processes: any idle process can encode a document, but documents are always written in
the order in which they were read.

The input `random:TOKENS[:SEED]` prepares random tokens instead of text, for measuring speed and
memory. The result is an ordinary prepared folder that can be used with any command.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from rich.progress import TextColumn

from firstlight.console import parse_count, progress_bar, say
from firstlight.data.cleaning import ChangeCounts
from firstlight.data.conversations import BadRecordError
from firstlight.data.encoding import (
    Encode,
    Encoded,
    TextPiece,
    encode,
    encode_in_order,
    ray_encoder,
)
from firstlight.data.formats.reading import read_all
from firstlight.data.opening import compress
from firstlight.data.records import (
    REASONS,
    Record,
    digest_of,
    mark_of,
    nothing_read,
    read_documents,
    with_words,
)
from firstlight.data.shards import CorpusWriter, TokenArray, require_one_split, require_replaceable
from firstlight.data.sources import (
    DataSource,
    find_sources,
    neutral_name,
    text_bytes,
    unread_files,
    without,
    write_sources,
)
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import new_folder
from firstlight.hardware.environment import usable_cpus
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.formats import cut_long

Engine = Literal["local", "ray"]
#: Function that returns the split to which a document is assigned, given the document's text. If it
#: returns "tail", only the last part of the document is held out for validation, and `val_fraction`
#: is the size of this part. If it returns None, the document is dropped as a duplicate.
SplitOf = Callable[[str], Literal["train", "val", "tail"] | None]

#: A corpus with fewer bytes than this is encoded in the calling process, because starting
#: additional processes would take longer.
_SMALL_CORPUS_BYTES = 16 << 20
#: Maximum number of characters that `look_ahead` reads into memory. If it has not found 1/fraction
#: documents by then, the corpus is treated as having too few documents.
_LOOKAHEAD_CHARACTERS = 1 << 28
#: Prefix of an input that requests random tokens.
_RANDOM_PREFIX = "random:"
#: Number of tokens in a document of random tokens, including separators. The last document of a
#: split may be shorter.
_DOCUMENT_TOKENS = 1024


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
    max_documents: int | None = None,
    max_tokens: int | None = None,
    val_inputs: Sequence[str | Path] = (),
    as_is: bool = False,
    strip_gutenberg: bool = True,
    overwrite: bool = False,
    shard_tokens: int = 100_000_000,
    progress: bool = False,
    expected_bytes: int | None = None,
) -> dict[str, Any]:
    """Write a corpus as token shards to the `out` folder and return the manifest.

    Args:
        inputs: INPUTs (see `find_sources`), or sources returned by `find_sources`. The INPUT
            "random:TOKENS[:SEED]" can't be combined with any other INPUT.
        tokenizer: a tokenizer, or a folder or file that contains one.
        out: the folder to write.
        val_fraction: fraction of the text (in bytes) to hold out for validation, in whole
            documents. If there are fewer than 1/val_fraction documents, the end of each document is
            held out instead.
        split_of: see `SplitOf`; None splits only by `val_fraction`.
        workers: number of encoding processes; None selects it automatically. With more than one
            process, each process imports the caller's script, which must therefore use `if __name__
            == "__main__":`.
        engine: "local" to encode in `workers` processes, "ray" to encode on a Ray cluster.
        ray_address: address of the Ray cluster; None lets Ray choose.
        text_key: name of the text field in JSONL lines, tables and datasets.
        max_documents: maximum number of documents to read; None means no limit.
        max_tokens: maximum number of tokens, including separators. `val_fraction` is the fraction
            of these tokens that is used for validation. The last document of each split is
            truncated at a character boundary. None means no limit.
        val_inputs: INPUTs whose documents form the validation split. If they are specified, no part
            of `inputs` is held out, and documents that also occur in `val_inputs` are excluded from
            training. `max_documents` and `max_tokens` apply only to `inputs`.
        as_is: True to read text unchanged. Otherwise, text is split into documents at separators
            such as <|endoftext|>, CRLF is replaced with LF, and Project Gutenberg's header and
            licence are removed.
        strip_gutenberg: ignored; use `as_is`.
        overwrite: True to replace `out` if it is a prepared corpus.
        shard_tokens: number of tokens after which a new shard begins.
        progress: True to show a progress bar on stderr.
        expected_bytes: approximate size of the text in bytes, for the progress bar; None to use the
            size of the files if they are uncompressed text.

    Raises:
        InputError, TokenizerError: an input or the tokenizer can't be read, or the inputs contain
            no text.
        ConfigError, MissingDependencyError: an argument is invalid, or a package or cluster is
            missing.
        DataError, StorageError: encoding or writing failed; no incomplete folder remains.
    """
    _require_valid_engine(engine, ray_address, workers)
    _require_positive(
        workers=workers,
        shard_tokens=shard_tokens,
        max_documents=max_documents,
        max_tokens=max_tokens,
    )
    require_one_split(val_inputs, val_fraction)
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction must be at least 0 and below 1, not {val_fraction}")
    # Use the exact value of the decimal fraction, because a binary float only approximates it.
    fraction = Fraction(0) if val_inputs else Fraction(str(val_fraction))
    out, drawn = Path(out).expanduser(), requested_tokens(inputs)
    names, sources = ([], []) if drawn else _sources_of(inputs, as_is=as_is)
    held_out = find_sources(val_inputs, as_is=as_is) if val_inputs else []
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_pretrained(tokenizer)
    require_replaceable(out, overwrite)
    if drawn is not None:
        if (split_of, max_documents, max_tokens) != (None, None, None):
            raise ConfigError(
                f"{drawn.name} already specifies the number of tokens: omit the limits"
            )
        if val_inputs:
            raise ConfigError(f"{drawn.name} does not support validation inputs: omit val_inputs")
        return prepare_random(
            drawn, tokenizer, out, fraction, overwrite=overwrite, shard_tokens=shard_tokens
        )
    encoder = _encoder(
        tokenizer, sources, workers, engine, ray_address=ray_address, max_tokens=max_tokens
    )
    with encoder as encode, new_folder(out, replace=overwrite, synced=True) as folder:
        preparation = _Preparation(
            CorpusWriter(folder, tokenizer, shard_tokens),
            fraction,
            split_of,
            max_documents=max_documents,
            max_tokens=max_tokens,
        )
        sources = without(sources, held_out)
        lines = read_all([one.path for one in [*held_out, *sources]], progress=progress)
        for line in lines if names else ():
            say(line)
        marks = {source: mark_of(source) for source in [*sources, *held_out]}
        if expected_bytes is None and not (max_documents or max_tokens):
            expected_bytes = text_bytes([*sources, *held_out])
        preparation.run(
            sources,
            text_key,
            encode,
            progress=progress,
            expected_bytes=expected_bytes,
            held_out=held_out,
        )
        if changed := [source.name for source, mark in marks.items() if mark_of(source) != mark]:
            more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            say(
                f"{changed[0]}{more} changed while the corpus was being prepared, so {out} may "
                "contain old text: run prepare again"
            )
        options = [word for one in val_inputs for word in ("--val-input", neutral_name(str(one)))]
        options += ["--text-key", text_key] if text_key != "text" else []
        options += ["--as-is"] if as_is else []
        write_sources(folder, names, options)
        return preparation.finish(unread_files([*names, *val_inputs]))


def _sources_of(
    inputs: Sequence[str | Path | DataSource], *, as_is: bool
) -> tuple[list[str | Path], list[DataSource]]:
    """Resolve inputs to sources. Return the inputs that had to be resolved, and the sources of all
    inputs.
    """
    names = [one for one in inputs if not isinstance(one, DataSource)]
    sources = [one for one in inputs if isinstance(one, DataSource)]
    if names or not sources:  # This call raises an error if there are no inputs.
        sources += find_sources(names, as_is=as_is)
    return names, sources


def _require_valid_engine(engine: str, address: str | None, workers: int | None) -> None:
    if engine not in get_args(Engine):
        raise ConfigError(f"engine must be one of {', '.join(get_args(Engine))}, not {engine}")
    if engine == "ray" and workers is not None:
        raise ConfigError("workers applies only to the local engine: omit it with engine ray")
    if engine != "ray" and address is not None:
        raise ConfigError("ray_address requires engine ray: set engine to ray, or omit ray_address")


def _require_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be at least 1, not {number}")


def _encoder(
    tokenizer: Tokenizer,
    sources: Sequence[DataSource],
    workers: int | None,
    engine: Engine,
    ray_address: str | None,
    max_tokens: int | None,
) -> AbstractContextManager[Encode]:
    if engine == "ray":
        return ray_encoder(tokenizer, ray_address)
    if workers is None:
        small = sum(source.size for source in sources) < _SMALL_CORPUS_BYTES
        workers = 1 if small else usable_cpus()
    here = functools.partial(
        encode_in_order, tokenizer=tokenizer, workers=workers, max_tokens=max_tokens
    )
    return nullcontext(here)


def look_ahead(documents: Iterator[Record], fraction: Fraction) -> tuple[bool, Iterator[Record]]:
    """Determine whether there are enough documents to hold out a fraction of them. Return two
    values: whether there are at least 1/fraction documents, and an iterator over all documents.
    """
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


class _Preparation:
    """The state of one call of `prepare`.

    Documents are numbered from 1 in reading order, skipping rejected documents.
    """

    def __init__(
        self,
        writer: CorpusWriter,
        fraction: Fraction,
        split_of: SplitOf | None,
        *,
        max_documents: int | None,
        max_tokens: int | None,
    ) -> None:
        self.writer = writer
        self.tokenizer = writer.tokenizer
        self.dtype = writer.dtype
        self.fraction, self.split_of = fraction, split_of
        self.max_documents, self.max_tokens = max_documents, max_tokens
        self.has_val_inputs = False
        self.separators = separators_of(writer.tokenizer)
        #: Number of documents read so far (`accepted`), number of documents written so far
        #: (`written`), and position of the last written document in reading order (`last_written`).
        self.accepted = self.written = self.last_written = 0
        #: Documents that were changed while they were read and have not been written yet. Document
        #: numbers are mapped to (file, names of the changes).
        self.changed: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.changes = ChangeCounts()
        #: Rejected records that have not been counted yet, each with the number of the document
        #: before it. Used only with `max_tokens`. Rejected records after the last written document
        #: must not be counted. Otherwise, the manifest would depend on how far documents are read
        #: ahead.
        self.waiting: deque[tuple[int, Record, BadRecordError]] = deque()
        self.split_by = "none"
        self.gzip_bytes = 0

    def run(
        self,
        sources: Sequence[DataSource],
        text_key: str,
        encode: Encode,
        *,
        progress: bool,
        expected_bytes: int | None = None,
        held_out: Sequence[DataSource] = (),
    ) -> None:
        """Write all documents.

        Args:
            sources: the sources of the text.
            text_key, progress, expected_bytes: see `prepare`.
            encode: function that encodes pieces of text and keeps their order.
            held_out: sources of validation text. If there are none, part of the training text is
                held out.

        Raises:
            InputError: there is no text.
            ConfigError: `max_tokens` is too small for any text.
        """
        self.has_val_inputs = bool(held_out)
        # The size after gzip -9 is a baseline for a model's bits per byte. wbits 31 selects the
        # gzip format.
        compressor = zlib.compressobj(9, wbits=31)
        with (
            progress_bar(TextColumn("{task.fields[done]}"), shown=progress) as bar,
            closing(with_words(read_documents(sources, text_key))) as records,
            closing(read_documents(held_out, text_key)) as others,
            closing(self._accepted(records, self.max_documents)) as documents,
            closing(self._accepted(others if held_out else ())) as validation,
            self.writer.open(),
            # Close the encoder even after an error, so that its processes end before the folder is
            # removed.
            closing(encode(self._pieces(documents, validation))) as encoded,
        ):
            task = bar.add_task("tokenizing", total=expected_bytes, done="")
            parts: list[TokenArray] = []
            for piece, tokens in self._within_limits(encoded):
                parts.append(tokens)
                text = piece.text.encode("utf-8")
                self.writer.counts[piece.split]["text_bytes"] += len(text)
                size = sum(count["text_bytes"] for count in self.writer.counts.values())
                done = f"{self.written:,} documents, {size / 1e6:,.0f} MB"
                bar.update(task, advance=len(text), done=done)
                if piece.split == "val":
                    self.gzip_bytes += compress(compressor, text)
                if piece.last:
                    self.writer.write(piece.split, self._with_separators(parts))
                    parts = []
        self.gzip_bytes += len(compressor.flush())
        if not self.written:
            if self.max_tokens is not None and self.accepted:
                raise ConfigError(f"max_tokens {self.max_tokens} leaves no room for text: raise it")
            raise InputError(nothing_read(self.writer.rejected, self.writer.first_rejected))
        if not self.writer.counts["train"]["documents"]:
            beside = (
                "that is not also in val_inputs" if held_out else ("other than the held-out text")
            )
            raise InputError(f"the inputs contain no text to train on {beside}")

    def finish(self, unread: Sequence[Path]) -> dict[str, Any]:
        """Write the remaining files of the prepared folder, and return the manifest.

        Args:
            unread: files in the inputs that were not read because their type is not supported.
        """
        further: dict[str, Any] = {
            "max_documents": self.max_documents,
            "max_tokens": self.max_tokens,
            "cleaned": self.changes.record() or None,
        }
        return self.writer.finish(
            self.written,
            self.fraction,
            self.split_by,
            unread,
            gzip_bytes=self.gzip_bytes,
            **{name: value for name, value in further.items() if value is not None},
        )

    def _accepted(
        self, records: Iterable[Record], most: int | None = None
    ) -> Generator[Record, None, None]:
        """Yield at most `most` records, skipping any record that can't be read."""
        for number, record in enumerate(self._readable(records), start=1):
            yield record
            # Check before reading the next record, which may require a download.
            if number == most:
                return

    def _readable(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if record.error is not None:
                self._reject(record, record.error)
                continue
            self.accepted += 1
            if record.changes:
                self.changed[self.accepted] = record.origin, record.changes
            yield record

    def _reject(self, record: Record, error: BadRecordError) -> None:
        """Count a record as rejected. If there is a `max_tokens` limit, the record is not counted
        until a later document has been written.
        """
        if self.max_tokens is None:
            self.writer.reject(record, error)
        else:
            self.waiting.append((self.accepted, record, error))

    def _reject_before(self, document: float) -> None:
        """Count the pending rejected records that precede document number `document`."""
        while self.waiting and self.waiting[0][0] < document:
            _, record, error = self.waiting.popleft()
            self.writer.reject(record, error)

    def _within_limits(self, encoded: Encoded) -> Iterator[tuple[TextPiece, TokenArray]]:
        """Yield the pieces to write, up to `max_tokens` tokens, and count their documents as
        written.
        """

        def to_the_end() -> Iterator[tuple[TextPiece, TokenArray]]:
            yield from encoded
            self._reject_before(math.inf)

        pieces = to_the_end()
        if self.max_tokens is not None:
            pieces = within_tokens(
                pieces,
                self.max_tokens,
                self.fraction,
                sum(map(len, self.separators)),
                encode=lambda text: encode([text], self.tokenizer)[0],
            )
        for piece, tokens in pieces:
            if piece.document != self.last_written:
                self._reject_before(piece.document)
                self.last_written = piece.document
                self.written += 1
                if piece.document in self.changed:
                    self.changes.add(*self.changed.pop(piece.document))
            yield piece, tokens

    def _pieces(
        self, documents: Iterator[Record], held_out: Iterable[Record] = ()
    ) -> Iterator[TextPiece]:
        """Assign each document to a split, divide long documents into pieces, and yield all pieces.

        Args:
            documents: training documents, some of which may be held out for validation.
            held_out: validation documents, which are processed before the training documents.
        """
        assigned = self._assigned(documents, held_out)
        cuttable = self.tokenizer.encodes_in_pieces
        for number, (document, split) in enumerate(assigned, start=1):
            if split is None:
                self._reject(document, BadRecordError("duplicate", REASONS["duplicate"]))
                continue
            if split == "tail":
                head, tail = cut_tail(document.value, self.fraction)
                shares = [("train", head), ("val", tail)]
            else:
                shares = [(split, document.value)]
            for name, text in shares:
                texts = cut_long(text) if cuttable else [text]
                for place, part in enumerate(texts if text else []):
                    yield TextPiece(
                        part, name, place == 0, place == len(texts) - 1, document=number
                    )

    def _assigned(
        self, documents: Iterator[Record], others: Iterable[Record]
    ) -> Iterator[tuple[Record, str | None]]:
        """Yield each document with its split, which is None for a duplicate."""
        validated: set[bytes] = set()
        for document in others:
            digest = digest_of(document.value)
            yield document, None if digest in validated else "val"
            validated.add(digest)
        if self.has_val_inputs:
            if not validated:
                reason = nothing_read(self.writer.rejected, self.writer.first_rejected)
                raise InputError(f"the validation inputs contain no text: {reason}")
            self.split_by = "files"
            for document in documents:
                yield document, None if digest_of(document.value) in validated else "train"
            return
        if self.split_of is not None:
            for document in documents:
                split = self.split_of(document.value)
                if split is not None:
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
            # Hold out a document whenever the validation split contains less than `val_fraction` of
            # the bytes read so far. This spreads the held-out documents over the entire corpus,
            # even if the corpus is sorted.
            split = "val" if held_out < self.fraction * seen else "train"
            seen += size
            held_out += size if split == "val" else 0
            yield document, split

    def _with_separators(self, parts: list[TokenArray]) -> TokenArray:
        before, after = (np.array(ids, self.dtype) for ids in self.separators)
        return np.concatenate([before, *parts, after], dtype=self.dtype)


def separators_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids added before each document and the token ids added after it."""
    before = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    after = [tokenizer.eos_token_id]
    return [i for i in before if i is not None], [i for i in after if i is not None]


# Splitting documents


def cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """Split text into two parts, the second of which has about `fraction` of the characters. If
    there is a line ending nearby, split after it. Return (first part, second part).

    Args:
        text: the text.
        fraction: fraction of the characters to put in the second part, from 0 to 1.
    """
    position = math.floor(len(text) * (1 - fraction))
    # Search backwards for a line ending, up to the point where the second part would be twice as
    # long.
    line_end = text.rfind("\n", max(2 * position - len(text), 0), position) + 1
    position = line_end or position
    return text[:position], text[position:]


def within_tokens(
    encoded: Iterable[tuple[TextPiece, TokenArray]],
    max_tokens: int,
    val_fraction: Fraction,
    separators: int,
    encode: Callable[[str], TokenArray],
) -> Iterator[tuple[TextPiece, TokenArray]]:
    """Yield the pieces that fit into `max_tokens`. Stop when both splits are full.

    Args:
        encoded: each piece with its tokens, in order.
        max_tokens: maximum number of tokens in both splits together, including separators.
        val_fraction: fraction of `max_tokens` that is used for the validation split; 0 means that
            the validation split has no limit.
        separators: number of separator tokens (bos, eos) added to each document.
        encode: function that returns the token ids of a string.

    Yields:
        (piece, tokens). If a document exceeds the limit of its split, it is truncated at the limit,
        and `last` is set in its last piece. All later documents of the split are skipped.

    Raises:
        ConfigError: `max_tokens` leaves no room for text besides the separators of one document.
    """
    held_out = round(max_tokens * val_fraction)
    left = {"train": max_tokens - held_out, "val": held_out}
    open_splits = {split for split in left if left[split] > separators}
    if not open_splits:
        raise ConfigError(f"max_tokens {max_tokens} leaves no room for text: raise it")
    for piece, tokens in encoded:
        split = piece.split
        if split == "val" and not val_fraction:
            yield piece, tokens
            continue
        if split not in open_splits:
            continue
        room = left[split] - separators
        if len(tokens) > room:
            text = longest_prefix(piece.text, room, len(tokens), lambda text: len(encode(text)))
            piece, tokens = piece._replace(text=text, last=True), encode(text)
            open_splits.remove(split)
        if piece.text or not piece.first:
            yield piece, tokens
        left[split] -= len(tokens) + (separators if piece.last else 0)
        if piece.last and left[split] <= separators:
            open_splits.discard(split)
        if not open_splits:
            return


def longest_prefix(text: str, room: int, tokens: int, count: Callable[[str], int]) -> str:
    """Return the longest prefix of a string that has at most `room` tokens.

    The prefix consists of whole characters. It may have a few tokens fewer than `room`, because the
    next character may take several tokens or change how the preceding characters are merged. It is
    found by bisection, under the assumption that a longer prefix never has fewer tokens.

    Args:
        text: the text.
        room: maximum number of tokens in the prefix; less than `tokens`.
        tokens: number of tokens in `text`.
        count: function that returns the number of tokens in a string.
    """
    # Start from an estimate, so that a short prefix is found without encoding a long string
    # completely.
    fits, too_long = 0, len(text)
    guess = room * len(text) // tokens + 16
    while guess < too_long:
        if count(text[:guess]) > room:
            too_long = guess
            break
        fits, guess = guess, 2 * guess
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count(text[:middle]) > room:
            too_long = middle
        else:
            fits = middle
    return text[:fits]


# Random tokens


@dataclass(frozen=True)
class RandomTokens:
    """Request for random tokens.

    Attributes:
        name: the input exactly as the user wrote it.
        tokens: number of tokens in both splits together, including separators.
        seed: seed of the random generator.
    """

    name: str
    tokens: int
    seed: int


def requested_tokens(inputs: Sequence[object]) -> RandomTokens | None:
    """Return the random tokens that the inputs request, or None if they do not request any.

    Raises:
        InputError: random tokens are combined with other inputs, or their number or seed is not a
            number.
    """
    name = next((str(one) for one in inputs if str(one).startswith(_RANDOM_PREFIX)), None)
    if name is None:
        return None
    if len(inputs) > 1:
        raise InputError(f"{name} can't be combined with other inputs: prepare it separately")
    number, _, seed = name.removeprefix(_RANDOM_PREFIX).partition(":")
    try:
        tokens = int(parse_count(number))
        if tokens < 1 or not (seed or "0").isdecimal():
            raise ConfigError("no number")
    except ConfigError as error:
        raise InputError(
            f"{name} is not of the form random:TOKENS[:SEED]: use for example random:10M or "
            "random:10M:7"
        ) from error
    return RandomTokens(name, tokens, int(seed or "0"))


def prepare_random(
    drawn: RandomTokens,
    tokenizer: Tokenizer,
    out: Path,
    val_fraction: Fraction,
    overwrite: bool,
    shard_tokens: int,
) -> dict[str, Any]:
    """Write shards of uniformly random tokens, in documents of 1,024 tokens, and return the
    manifest.

    The number of text bytes in the manifest is the sum of the sizes of the individual tokens.
    Control tokens occur only between documents.

    Args:
        drawn: the request, with the number of tokens and the seed.
        tokenizer: the tokenizer. The tokens are drawn from its vocabulary.
        out: the folder to write.
        val_fraction: fraction of the tokens that is held out for validation.
        overwrite: True to replace `out` if it exists.
        shard_tokens: number of tokens after which a new shard begins.

    Raises:
        StorageError: the disk is full or not writable.
        InputError: all tokens of the tokenizer are control tokens.
    """
    vocabulary = set(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    plain = np.array(sorted(vocabulary - tokenizer.special_token_ids), np.int64)
    if not len(plain):
        raise InputError("the tokenizer has only control tokens: use another one")
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    sizes[plain] = [len(tokenizer.decode([token]).encode()) for token in plain.tolist()]
    held_out = round(drawn.tokens * val_fraction)
    with new_folder(out, replace=overwrite, synced=True) as folder:
        writer = CorpusWriter(folder, tokenizer, shard_tokens)
        with writer.open():
            for number, (split, count) in enumerate(
                (("train", drawn.tokens - held_out), ("val", held_out))
            ):
                generator = np.random.default_rng([drawn.seed, number])
                for document in _random_documents(count, plain, tokenizer, generator):
                    text_bytes = int(sizes[document].sum())
                    writer.write(split, document.astype(writer.dtype), text_bytes=text_bytes)
        written = sum(count["documents"] for count in writer.counts.values())
        split_by = "document" if held_out else "none"
        return writer.finish(written, val_fraction, split_by, [], random_seed=drawn.seed)


def _random_documents(
    count: int,
    plain: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
    generator: np.random.Generator,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield documents that consist of random token ids, int64 [tokens]. Stop when the documents
    have `count` tokens in total.

    Args:
        count: total number of tokens, including separators.
        plain: token ids in the vocabulary that are not control tokens, int64 [ids].
        tokenizer: the tokenizer, for the ids of the separators.
        generator: the random generator, whose state advances with each document.
    """
    before, after = separators_of(tokenizer)
    while count:
        length = min(count, _DOCUMENT_TOKENS)
        inner = max(length - len(before) - len(after), 0)
        text = plain[generator.integers(len(plain), size=inner)]
        yield np.concatenate([before, text, after]).astype(np.int64)[:length]
        count -= length
