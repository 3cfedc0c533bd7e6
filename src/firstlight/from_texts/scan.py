"""Scan the inputs once before the settings are chosen. The scan detects whether the inputs are
conversations or text. In text, it detects writing systems and duplicates, and it selects the
documents to hold out."""

from __future__ import annotations

import hashlib
import shlex
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.progress import TextColumn

from firstlight.console import counted, human_bytes, progress_bar
from firstlight.data.cleaning import ChangeCounts, change_lines, is_separator
from firstlight.data.formats.reading import read_all
from firstlight.data.formats.registry import format_of
from firstlight.data.kinds import start_from
from firstlight.data.opening import compress
from firstlight.data.records import (
    COMMON_SHARE,
    REASONS,
    RECORD_SUFFIXES,
    Record,
    digest_of,
    find_records,
    kind_of_records,
    nothing_read,
    one_character,
    read_documents,
)
from firstlight.data.sources import (
    STANDARD_LIBRARY,
    DataSource,
    by_ending,
    distinct_inputs,
    find_sources,
    holds_one_document,
    limited_sources,
    listed,
    note_on_inputs,
    text_size,
    unread_files,
    without,
)
from firstlight.errors import InputError
from firstlight.from_texts.held_out import (
    HeldOut,
    NearDuplicates,
    held_out_share,
    hold_out,
    hold_out_given,
)
from firstlight.from_texts.ngrams import TextSample
from firstlight.from_texts.request import Request
from firstlight.planner.advise.law import Hardness, TextFacts, latin_bytes_per_token

#: Maximum number of file names in a message.
SHOWN_FILES = 5
#: Maximum number of bytes to read. In a larger corpus, only the first part of each file is read.
MOST_BYTES = 256 << 20
#: Number of characters that are processed at a time when counting characters.
_BLOCK_CHARACTERS = 1 << 22
#: Number of unreadable documents after which reading stops if no readable document has been found.
_HOPELESS = 1000
#: Number of bytes in a block of text that is compressed with gzip, and maximum number of these
#: blocks. Both limit the time for compression. A block is at least as long as deflate's window of
#: 32 KiB.
_GZIP_BLOCK_BYTES, _GZIP_BLOCKS = 32 << 10, 128

#: Common names for some Unicode scripts, keyed by their Unicode names.
_SCRIPT_NAMES = {"CJK": "Han", "HIRAGANA": "Japanese kana", "KATAKANA": "Japanese kana"}


@dataclass(frozen=True)
class CorpusFacts:
    """Facts about the scanned part of a corpus.

    Attributes:
        documents: number of documents with text, including duplicates.
        text_bytes: UTF-8 bytes of the documents, without duplicates.
        characters: number of characters in the documents, without duplicates.
        total_bytes: estimated bytes of the whole corpus; equal to `text_bytes` if the whole corpus
            was read.
        common_characters: number of distinct characters that make up 99.9% of the text.
        scripts: fraction of the bytes of letters that belongs to each Unicode script, keyed by
            script. The largest fraction comes first.
        duplicates: number of documents with the same text as an earlier document.
        near_duplicates: number of documents that are similar to an earlier document.
        compared: number of documents that were compared with earlier documents; these are the first
            documents of the corpus.
        rejected: number of unreadable documents, keyed by reason (see `records.REASONS`).
        first_rejected: location and error of the first unreadable document, keyed by reason.
        gzip_bits_per_byte: size of the text that was read after compression with gzip -9, in bits
            per byte. If the text is longer than 4 MiB, the value is estimated from evenly spaced
            blocks.
        hardness: difficulty of learning the text.
        content_key: hash of all text that was read. If only a sample was read, the hash also
            includes the number of bytes that were read from each file.
        is_sampled: True if only part of the corpus was read.
        changes: number of documents or files with each kind of change, keyed by kind; see
            `cleaning`.
        changed_files: names of files, keyed by kind of change. Only kinds that occur in a single
            file are included.
    """

    documents: int
    text_bytes: int
    characters: int
    total_bytes: int
    common_characters: int
    scripts: Mapping[str, float]
    duplicates: int
    near_duplicates: int
    compared: int
    rejected: Mapping[str, int]
    first_rejected: Mapping[str, str]
    gzip_bits_per_byte: float
    hardness: Hardness
    content_key: str
    is_sampled: bool = False
    changes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    changed_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_per_character(self) -> float:
        """Mean UTF-8 bytes per character of the text."""
        return self.text_bytes / max(self.characters, 1)

    @property
    def gzip_text(self) -> str:
        """`gzip_bits_per_byte` formatted for messages, with "about" if it is an estimate."""
        is_exact = not self.is_sampled and self.text_bytes // _GZIP_BLOCK_BYTES <= _GZIP_BLOCKS
        return f"{'' if is_exact else 'about '}{self.gzip_bits_per_byte:.2f}"


@dataclass(frozen=True)
class Scan:
    """The result of scanning a corpus.

    Attributes:
        sources: files and datasets of the corpus.
        facts: facts about the corpus.
        split: documents that are held out.
        prompts: beginnings of held-out documents, used as prompts for sample texts.
        held_out_files: text files that are held out, with the limits up to which they were read.
        val_documents: number of validation documents given by the user, without duplicates; 0 if a
            part of the training text is held out.
        unread: names of files that are not read because they do not contain text.
    """

    sources: Sequence[DataSource]
    facts: CorpusFacts
    split: HeldOut
    prompts: Sequence[str]
    held_out_files: Sequence[DataSource] = ()
    val_documents: int = 0
    unread: Sequence[str] = ()

    @property
    def val_bytes(self) -> float:
        """UTF-8 bytes of the held-out text that was read."""
        return self.split.fraction * self.facts.text_bytes

    def limited(self, most_bytes: int) -> list[DataSource]:
        """Return sources limited to about `most_bytes` bytes of text in total, including all
        held-out text files.

        Held-out files are read up to the same limits as in the scan. With different limits, their
        hashes would not match those in `split`.
        """
        return limited_sources(self.sources, most_bytes, self.held_out_files)


def scan_corpus(
    sources: Sequence[DataSource],
    text_key: str = "text",
    *,
    val_sources: Sequence[DataSource] = (),
    most_bytes: int = MOST_BYTES,
    progress: bool = False,
) -> Scan:
    """Read a corpus once. If the corpus is large, read only the first part of each file.

    Args:
        sources: files and datasets to read; see `find_sources`.
        text_key: field that holds the text in JSONL lines, tables and datasets.
        val_sources: validation data. If it is empty, a part of `sources` is held out.
        most_bytes: maximum number of bytes to read.
        progress: True to show a progress bar on stderr.

    Raises:
        InputError: there is no text; see also `read_documents`.
        MissingDependencyError: see `read_documents`.
    """
    limited_val = limited_sources(val_sources, most_bytes)
    limited = [*limited_val, *limited_sources(sources, most_bytes)]
    sources = [*val_sources, *sources]
    counts = _Counts()
    with progress_bar(TextColumn("{task.fields[done]}"), shown=progress) as bar:
        total = sum(source.most_bytes or source.size for source in limited) or None
        task = bar.add_task("reading", total=total, done="")
        for number, source in enumerate(limited):
            rejected = counts.rejected
            with closing(read_documents([source], text_key)) as records:
                for record in records:
                    size = counts.add(record, source)
                    bar.update(task, advance=size, done=f"{counts.documents:,} documents")
                    is_hopeless = counts.rejected - rejected >= _HOPELESS
                    if source.dataset is not None and is_hopeless and not counts.documents:
                        break
            if number + 1 == len(limited_val):
                counts.end_validation()
    held = counts.held_out()
    facts = counts.facts(sources, limited, text_key, held)
    kept = limited_val or counts.files(held)
    return Scan(
        sources,
        facts,
        held,
        counts.prompts(held),
        held_out_files=kept,
        val_documents=counts.val_documents,
    )


class GzipSample:
    """Evenly spaced blocks of the text, from which the size of the compressed text is estimated.

    The beginning of the text would not be representative, because files with similar names often
    have similar content.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._window = b""
        #: Pairs (preceding block, block). The preceding block is kept because gzip can refer to the
        #: preceding 32 KiB of text.
        self._blocks: list[tuple[bytes, bytes]] = []
        self._seen = 0
        self._step = 1

    def add(self, content: bytes) -> None:
        """Append a document to the text."""
        for start in range(0, len(content), _GZIP_BLOCK_BYTES):
            self._rest += content[start : start + _GZIP_BLOCK_BYTES]
            if len(self._rest) >= _GZIP_BLOCK_BYTES:
                self._add_block(bytes(self._rest[:_GZIP_BLOCK_BYTES]))
                del self._rest[:_GZIP_BLOCK_BYTES]

    def _add_block(self, block: bytes) -> None:
        if self._seen % self._step == 0:
            self._blocks.append((self._window, block))
        self._seen += 1
        self._window = block
        if len(self._blocks) > _GZIP_BLOCKS:
            self._blocks, self._step = self._blocks[::2], 2 * self._step

    def bits_per_byte(self) -> float:
        """Return the compressed size of the text in bits per byte. The size is exact if no block
        was dropped."""
        blocks = [block for _, block in self._blocks]
        if self._step == 1:
            text = b"".join([*blocks, self._rest])
            gzip = zlib.compressobj(9, wbits=31)
            return 8 * (compress(gzip, text) + len(gzip.flush())) / len(text)
        size = 0
        for window, block in self._blocks:
            deflate = zlib.compressobj(9, wbits=-15, zdict=window)
            size += compress(deflate, block) + len(deflate.flush())
        return 8 * size / sum(map(len, blocks))


class _Counts:
    """Statistics of the documents read so far."""

    def __init__(self) -> None:
        self.documents = self.text_bytes = self.duplicates = self.near = 0
        self.val_documents = 0
        self._changes = ChangeCounts()
        self._near = NearDuplicates()
        self._digests: dict[bytes, int] = {}
        self._files: dict[bytes, DataSource] = {}
        self._histogram = np.zeros(0x110000, np.int64)
        self._waiting: list[str] = []
        self._waiting_characters = 0
        self._gzip = GzipSample()
        self._sample = TextSample()
        self._openings: dict[bytes, list[str]] = {}
        self._key = hashlib.sha256()
        self._rejected: Counter[str] = Counter()
        self._first_rejected: dict[str, str] = {}

    @property
    def rejected(self) -> int:
        """Number of unreadable documents."""
        return self._rejected.total()

    def add(self, record: Record, source: DataSource) -> int:
        """Add a document of a source to the statistics. Return its approximate size in bytes for
        the progress bar."""
        if record.error is not None:
            reason = record.error.reason
            self._rejected[reason] += 1
            self._first_rejected.setdefault(reason, f"{record.place}: {record.error}")
            return 0
        text: str = record.value
        self.documents += 1
        self._changes.add(record.origin, record.changes)
        digest = digest_of(text)
        self._key.update(digest)
        if digest in self._digests:
            self.duplicates += 1
            return len(text)
        content = text.encode("utf-8")
        size = len(content)
        self._digests[digest] = size
        # If an entire file is held out, its hash matches only if the file is later read in the same
        # way as in the scan.
        if holds_one_document(source) and not any(map(is_separator, record.changes)):
            self._files[digest] = source
        self.text_bytes += size
        self.near += self._near.add(text)
        self._gzip.add(content)
        share = held_out_share(size)
        self._sample.add(digest, text, int(len(text) * (1 - share)))
        if len(self._openings) < _MOST_OPENINGS:
            # The candidates for prompts are taken from the beginning of the text and from positions
            # near its end, because the ends of documents are held out if there are only a few
            # documents.
            places = (0, *(int(len(text) * (1 - share * part)) for part in (0.9, 0.6, 0.3)))
            self._openings[digest] = [opening_of(text[at : at + 1000], at) for at in places]
        self._waiting.append(text)
        self._waiting_characters += len(text)
        if self._waiting_characters >= _BLOCK_CHARACTERS:
            self._count_characters()
        return size

    def end_validation(self) -> None:
        """Mark all documents read so far as validation documents.

        Raises:
            InputError: no document was read.
        """
        self.val_documents = len(self._digests)
        if not self.val_documents:
            raise InputError(f"the validation inputs contain no text: {self._nothing_read}")

    @property
    def _nothing_read(self) -> str:
        """Return the error message for inputs without text."""
        return nothing_read(self._rejected, next(iter(self._first_rejected.values()), ""))

    def _count_characters(self) -> None:
        waiting = "".join(self._waiting)
        for begin in range(0, len(waiting), _BLOCK_CHARACTERS):
            block = waiting[begin : begin + _BLOCK_CHARACTERS].encode("utf-32-le")
            codes = np.frombuffer(block, "<u4")
            self._histogram += np.bincount(codes, minlength=len(self._histogram))
        self._waiting, self._waiting_characters = [], 0

    def facts(
        self,
        sources: Sequence[DataSource],
        limited: Sequence[DataSource],
        text_key: str,
        held: HeldOut,
    ) -> CorpusFacts:
        """Return the facts about all text that was read.

        Args:
            sources: all sources.
            limited: the same sources with the limits up to which they were read.
            text_key: field that holds the text in JSONL lines, tables and datasets.
            held: split that determines which documents are held out.

        Raises:
            InputError: there is no text, or the text is a single repeated character.
        """
        if not self.documents:
            raise InputError(self._nothing_read)
        self._count_characters()
        is_sampled = list(limited) != list(sources)
        limits = [(s.name, s.size, s.most_bytes) for s in limited] if is_sampled else []
        self._key.update(repr((text_key, limits)).encode())
        if self.val_documents:
            self._key.update(f"{self.val_documents} for validation".encode())
        whole = int(sum(text_size(source) for source in sources))
        counted = np.sort(self._histogram[self._histogram > 0])[::-1]
        characters = int(counted.sum())
        common = int(np.searchsorted(np.cumsum(counted), COMMON_SHARE * characters)) + 1
        if common == 1:
            character = chr(int(self._histogram.argmax()))
            raise InputError(one_character(character, counted[0] / characters))
        return CorpusFacts(
            documents=self.documents,
            text_bytes=self.text_bytes,
            characters=characters,
            total_bytes=max(whole, self.text_bytes) if is_sampled else self.text_bytes,
            common_characters=min(common, len(counted)),
            scripts=_scripts(self._histogram),
            duplicates=self.duplicates,
            near_duplicates=self.near,
            compared=self._near.compared,
            rejected=dict(self._rejected),
            first_rejected=self._first_rejected,
            changes=self._changes.record(),
            changed_files=self._changes.names(),
            gzip_bits_per_byte=self._gzip.bits_per_byte(),
            hardness=self._sample.hardness(held),
            content_key=self._key.hexdigest()[:16],
            is_sampled=is_sampled,
        )

    def held_out(self) -> HeldOut:
        """Select the documents to hold out."""
        if self.val_documents:
            return hold_out_given(self._near, self._digests, self.val_documents)
        return hold_out(self._near, self._digests)

    def files(self, held: HeldOut) -> list[DataSource]:
        """Return the text files that are held out."""
        return [file for digest, file in self._files.items() if digest in (held.digests or ())]

    def prompts(self, held: HeldOut) -> list[str]:
        """Return the beginnings of up to three held-out documents."""
        if held.digests is None:
            ends = [own[1:] for one, own in self._openings.items() if one not in held.whole]
            texts = [text for end in ends for text in end]
        else:
            whole = [own for one, own in self._openings.items() if one in held.digests]
            texts = [own[0] for own in whole]
            if len(texts) < _PROMPTS:
                later = [text for own in whole for text in own[1:]]
                return [one for one in dict.fromkeys(texts + later) if one][:_PROMPTS]
        step = max(len(texts) // _PROMPTS, 1)
        return [one for one in dict.fromkeys(texts[::step]) if one][:_PROMPTS]


#: Maximum number of prompts, maximum characters of a prompt, and maximum number of documents whose
#: beginnings are kept.
_PROMPTS = 3
_PROMPT_CHARACTERS = 60
_MOST_OPENINGS = 10_000


def opening_of(text: str, start: int = 0) -> str:
    """Return some words from the beginning of `text` for use as a prompt. If `start` is above 0,
    `text` starts in the middle of a document, and its incomplete first line is skipped."""
    text = (text[text.find("\n") + 1 :] if start else text).lstrip("\ufeff\n\r ")
    # Use at most half of the text, so that there is text left that the model could predict.
    cut = text[: min(_PROMPT_CHARACTERS, (len(text) + 1) // 2)]
    end = max(cut.rfind(" "), cut.rfind("\n"))
    return (cut[:end] if end > _PROMPT_CHARACTERS // 3 else cut).rstrip()


def _scripts(histogram: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, float]:
    """Return the fraction of the UTF-8 bytes of letters that belongs to each Unicode script.
    `histogram` contains the number of occurrences of each code point."""
    counts: Counter[str] = Counter()
    for code in np.flatnonzero(histogram).tolist():
        character = chr(code)
        if character.isalpha():
            first = unicodedata.name(character, "OTHER").split()[0]
            name = _SCRIPT_NAMES.get(first, first.capitalize())
            counts[name] += int(histogram[code]) * len(character.encode("utf-8"))
    return {name: count / counts.total() for name, count in counts.most_common()}


def described(scan: Scan) -> Iterator[str]:
    """Yield lines that describe a scan to the user. There is one line for each way in which
    documents were changed or left out."""
    facts = scan.facts
    shown = [f"{name} {share:.0%}" for name, share in facts.scripts.items() if share >= 0.01]
    scripts = ", ".join(shown[:5]) or "no letters"
    yield (
        f"{counted(facts.documents, 'document')}, {human_bytes(facts.text_bytes)} of text "
        f"({scripts}); compressed with gzip -9: {facts.gzip_text} bits per byte"
    )
    yield from change_lines(facts.changes, facts.changed_files, total=facts.documents)
    if count := scan.val_documents:
        yield (
            f"validation: {counted(count, 'document')} from --val-input; none of the other texts "
            "are held out"
        )
        if left_out := len(scan.split.left_out):
            yield f"left out: {counted(left_out, 'near-duplicate')} of the validation text"
    if facts.is_sampled:
        yield (
            f"scanned a sample of the texts (about {human_bytes(facts.total_bytes)} in total): "
            "some files, and the first part of long files"
        )
    if count := facts.duplicates:
        yield f"left out: {counted(count, 'duplicate')}"
    if count := facts.near_duplicates - len(scan.split.left_out):
        sides = "kept in the same split as the documents they resemble"
        if scan.split.digests is None and not scan.split.whole:
            sides = "parts of them may be in both the training and the validation split"
        yield f"{counted(count, 'near-duplicate')}: {sides}"
        if similar := scan.split.similar:
            who = "held-out document resembles" if similar == 1 else "held-out documents resemble"
            yield (
                f"{similar:,} {who} an earlier one: gzip and xz benefit from the common parts, but "
                "the model does not"
            )
    compared = facts.documents - facts.duplicates - facts.compared
    if compared > 0:
        yield (
            f"only the first {facts.compared:,} documents were searched for near-duplicates: "
            f"near-duplicates among the other {compared:,} may be in both splits"
        )
    elif facts.is_sampled:
        yield "only the sample was searched for near-duplicates"
    for reason, count in facts.rejected.items():
        kind = REASONS[reason]
        first = facts.first_rejected[reason].removesuffix(f": {kind}")
        yield f"left out: {counted(count, 'document')}, {kind}; first: {first}"


def estimated_text(facts: CorpusFacts, vocab_size: int, held_out: float) -> TextFacts:
    """Estimate token statistics of the text before it has a tokenizer.

    Args:
        facts: facts about the corpus.
        vocab_size: vocabulary size of the tokenizer.
        held_out: bytes of text that are held out.
    """
    # Compared with Latin script, other scripts have more bytes per character and slightly fewer
    # characters per token. The exponent of 0.8 is an estimate that includes both effects.
    per_token = latin_bytes_per_token(vocab_size) * facts.bytes_per_character**0.8
    return TextFacts(
        vocab_size,
        (facts.total_bytes - held_out) / per_token,
        per_token,
        facts.hardness,
        val_tokens=held_out / per_token,
        bytes_per_character=facts.bytes_per_character,
    )


def conversations_in(
    inputs: Sequence[str], text_key: str = "text", *, datasets: bool = True
) -> list[DataSource]:
    """Return the input files that contain conversations or preference pairs.

    Args:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG[:SPLIT]]".
        text_key: field that holds the text in JSONL lines, tables and datasets.
        datasets: True to also check datasets on the Hugging Face hub.
    """
    found: dict[str, DataSource] = {}
    for item in inputs:
        # "stdlib" always means Python's standard library, even if a file has this name.
        if item == STANDARD_LIBRARY:
            continue
        try:
            sources = find_records([item])
        except InputError:
            continue
        for source in sources:
            is_asked = source.dataset is None or datasets
            if is_asked and kind_of_records(source, text_key) is not None:
                found.setdefault(source.key, source)
    return list(found.values())


def require_texts(inputs: Sequence[str], text_key: str = "text") -> None:
    """Reject inputs that are mostly conversations or preference pairs, because a new model can't be
    trained on them. `text_key` is the field that holds the text in JSONL lines, tables and
    datasets.

    Raises:
        InputError: most of the inputs' bytes are conversations or preference pairs.
    """
    # The exports of ChatGPT and Claude are read as conversations and as texts.
    sources = [
        source
        for source in conversations_in(inputs, text_key, datasets=False)
        if source.path is None or format_of(source.path) is None
    ]
    if not sources:
        return
    try:
        others = find_sources(inputs)
    except InputError:
        others = []
    names = {source.name for source in sources}
    others = [source for source in others if source.name not in names]
    is_mostly_text = sum(one.size for one in others) >= sum(one.size for one in sources)
    if not (is_mostly_text or any(one.dataset for one in others)):
        kind = kind_of_records(sources[0], text_key)
        held = "conversations" if kind == "chat" else "preference pairs"
        advice = start_from(kind or "chat", file_names(inputs, sources))
        if others:
            advice += f"; for a new model, pass only the texts, such as {others[0].name}"
        raise InputError(f"{sources[0].name} contains {held}: {advice}")


def file_names(inputs: Sequence[str], sources: Sequence[DataSource]) -> list[str]:
    """Return the value of the recipe's `data.files` for `sources`. If `sources` are the only record
    files among the inputs, this is the list of inputs. Otherwise, it is the list of the names of
    `sources`.

    Args:
        inputs: files, folders, globs or "hf:NAME[:CONFIG[:SPLIT]]".
        sources: sources among the inputs that contain conversations.
    """
    names = {source.name for source in sources}
    try:
        whole = {source.name for source in find_records(inputs)} == names
    except InputError:
        whole = False
    return distinct_inputs(inputs) if whole else [source.name for source in sources]


def other_files(inputs: Sequence[str], sources: Sequence[DataSource]) -> list[str]:
    """Return the names of the input files that are not read because they do not contain
    conversations."""
    keys = {source.key for source in sources}
    others = [str(path) for path in unread_files(inputs, RECORD_SUFFIXES)]
    for item in distinct_inputs(inputs):
        try:
            others += [one.name for one in find_records([item]) if one.key not in keys]
        except InputError:  # This input is a text file.
            others += [item] if Path(item).is_file() else []
    return list(dict.fromkeys(others))


#: Minimum number of bytes of text. With less text, none would be left for validation.
LEAST_BYTES = 1000


def scan_texts(
    request: Request,
    tell: Callable[[str], None],
    check: Callable[[Request], None] = Request.check,
    *,
    progress: bool,
) -> Scan:
    """Scan the text of a request. The first message is printed before reading begins.

    Args:
        request: inputs, length and overrides of the run.
        tell: callback for each message to the user.
        check: function that rejects invalid overrides.
        progress: True to show a progress bar on stderr.

    Raises:
        InputError: the inputs can't be read, or have too little text.
        ConfigError: an override is invalid.
    """
    named = [*request.inputs, *request.val_inputs]
    val_sources = (
        find_sources(request.val_inputs, as_is=request.as_is) if request.val_inputs else []
    )
    sources = without(find_sources(request.inputs, as_is=request.as_is), val_sources)
    tell(reading_line(named, [*sources, *val_sources]))
    if note := note_on_inputs(named):
        tell(note)
    # The check runs after the first message, because it imports torch, which takes several seconds.
    check(request)
    for line in read_all([one.path for one in [*val_sources, *sources]], progress=progress):
        tell(line)
    scan = scan_corpus(sources, request.text_key, val_sources=val_sources, progress=progress)
    for line in described(scan):
        tell(line)
    trained = scan.facts.text_bytes - (scan.val_bytes if scan.val_documents else 0)
    trained -= scan.split.left_out_bytes
    if trained < LEAST_BYTES:
        beside = " that are not in --val-input" if scan.val_documents else ""
        raise InputError(
            f"the inputs have only {trained:,.0f} bytes of text{beside}, too little to learn from: "
            f"add text, at least {LEAST_BYTES:,} bytes and preferably a megabyte"
        )
    unread = unread_files(named)
    names = [str(file) for file in unread]
    if unread:
        kinds = listed(by_ending(unread))
        count = counted(len(unread), "file")
        tell(f"skipped {count} of other kinds: {kinds}; first: {first_names(names)}")
    return replace(scan, unread=names)


def first_names(names: Sequence[str]) -> str:
    """Join the first few file names into one string."""
    return ", ".join(names[:SHOWN_FILES]) + (", ..." if len(names) > SHOWN_FILES else "")


def reading_line(inputs: Sequence[str], sources: Sequence[DataSource]) -> str:
    """Return the first message of a run, which names its inputs."""
    named = shlex.join(inputs) if len(inputs) <= 3 else f"{len(inputs)} inputs"
    files = [source for source in sources if source.dataset is None]
    parts = [counted(len(files), "file")] if files else []
    if files:
        parts.append(human_bytes(sum(source.size for source in files)))
    if len(files) < len(sources):
        parts.append(counted(len(sources) - len(files), "dataset"))
    return f"reading {named}: {', '.join(parts)}"
