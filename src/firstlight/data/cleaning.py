"""Clean text while it is being read.

`split_documents` splits text into documents at separators such as <|endoftext|>. `cleaned` replaces
CRLF line endings, and removes Project Gutenberg's header and licence, and everything in subtitles
that is not shown.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import unescape
from types import MappingProxyType
from typing import NamedTuple

#: Strings that mark the beginning or end of a document in text files.
_SEPARATOR = re.compile(
    rb"<(?i:\|(?:end|start|begin)_?of_?text\||\|[be]o[sd]\||/?s|[be]o[sd]"
    rb"|\xef\xbd\x9c(?:begin|end)\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c)>",
)
#: Number of bytes examined on each side of a separator string to decide whether it separates
#: documents or is only mentioned in the text. The longest separator has at most half as many bytes.
_CONTEXT = 64
#: End of a document directly before a separator: a letter, a digit, punctuation or a closing quote.
#: The pattern does not match an opening quote, which is common in source code: a quote after a
#: space, a bracket, an operator or the prefix of a string literal.
_TEXT_BEFORE = re.compile(
    rb"(?:[\w\x80-\xff.!?;)\]*_~]|(?<![\s(\[{=,:;+])(?<!\b[bfru])[\"'])\Z", re.IGNORECASE
)
#: End of a sentence before a separator, optionally followed by spaces.
_SENTENCE_END = re.compile(rb"(?:[.!?]|\xe2\x80\xa6|\xe3\x80\x82)[\"')\]*_\x80-\xff]*[ \t]*\Z")
#: Beginning of a document after a separator, optionally with opening quotes. If the document
#: follows the separator directly, it can begin with any letter or digit (`_TEXT_AFTER`). If there
#: may be spaces in between, it must not begin with a lower-case letter (`_CAPITAL_AFTER`).
_CAPITAL_AFTER = re.compile(rb"[ \t]*[\"'(\[*_#-]*[A-Z0-9\x80-\xff]")
_TEXT_AFTER = re.compile(rb"[\"'(\[*_#-]*[\w\x80-\xff]")
_LINE_START, _LINE_END = re.compile(rb"\n[ \t]*\Z"), re.compile(rb"[ \t\r]*(?:\n|\Z)")
#: Blank lines at the beginning of a document or, if there are none, the leading spaces of the first
#: line.
_BLANK = re.compile(rb"(?:[ \t\r]*\n)+|[ \t]*")

#: Lines that Project Gutenberg adds before and after the text of a book. The pattern has these
#: groups:
#: - start: the end of the header since 2003, "*** START OF THE PROJECT GUTENBERG EBOOK TITLE ***".
#:   The title may span several lines. In some years, the line contains THIS instead of THE or ETEXT
#:   instead of EBOOK, or has no spaces after the asterisks.
#: - print: the end of the header before 2003, "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN
#:   ETEXTS*Ver.04.29.93*END*".
#: - end: the end of the book, "*** END OF THE PROJECT GUTENBERG EBOOK ..." or "End of (the|this)
#:   Project Gutenberg('s) ...", or both.
_MARKS = re.compile(
    r"^[ \t\[]*(?:"
    r"(?P<start>\*+[ \t]*START[ \t]+OF[ \t]+(?:TH(?:E|IS)[ \t]+)?PROJECT[ \t]+GUTENBERG"
    r"(?:(?:[^\n]|\n(?![ \t\r]*\n)){0,600}?\*{3}[^\n]*|[^\n]*))"
    r"|(?P<print>\*+[ \t]*END[ \t]*(?:\*[ \t]*)?THE[ \t]+SMALL[ \t]+PRINT[^\n]*)"
    r"|(?P<end>(?:\*+[ \t]*)?(?:END|ENDE|FIN)[ \t]+(?:(?:OF|DIESES|DE)[ \t]+)?"
    r"(?:TH(?:E|IS)[ \t]+)?PROJE[CK]T[ \t]+GUTENBERG[^\n]*)"
    r")",
    re.IGNORECASE | re.MULTILINE,
)
#: Credits paragraph after the start line in books released before 2020.
_CREDITS = re.compile(
    r"\s*(?:This )?(?:e-?(?:text|book) )?(?:was )?(?:produced|prepared|transcribed) (?:by|from)\b"
    r"(?:[^\n]|\n(?![ \t\r]*\n)){0,2000}",
    re.IGNORECASE,
)

#: Substrings for a fast check: any text that matches `_MARKS` contains at least one of them.
_OF_GUTENBERG = ("utenberg", "UTENBERG", "SMALL", "Small", "small P", "small p")
#: Parts of a subtitle file that are removed: the header of a .vtt file, and the lines before the
#: text of each subtitle. Those lines are blank or contain the subtitle's number or name (in SubRip
#: or WebVTT) or its start and end times.
_TIMES = re.compile(
    r"\AWEBVTT(?:[^\n]|\n(?!\n))*"
    r"|(?:\A|(?<!\n)\n)\n*(?:[^\n]+\n)?(?:\d+:)?\d\d:\d\d[.,]\d{3}[ \t]+-->[^\n]*(?:\n|\Z)"
)
#: Blocks of a .vtt file that are not shown: comments and styles.
_NOT_SHOWN = re.compile(r"(?m)(?<=\n\n)(?:NOTE|STYLE|REGION)(?=[ \t\n])(?:[^\n]|\n(?!\n))*\n*")
#: Speaker of a subtitle in WebVTT, such as <v.loud Bob>.
_VOICE = re.compile(r"<v(?:\.[^\s>]*)?[ \t]+([^>\n]+)>")
#: Tags and times in subtitles, and positions such as {\an8}.
_SUBTITLE_TAG = re.compile(
    r"</?(?:[bciusv]|font|lang|ruby|rt)(?:[.\s][^<>]*)?>|<(?:\d+:)+\d+\.\d+>|\{\\[^{}\n]*\}",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z]+);")
#: Names of the changes made by `cleaned`, under which they are counted. If text was split at a
#: separator, the name of the change is the separator string itself.
CRLF = "crlf"
GUTENBERG = "gutenberg"
SUBTITLES = "subtitles"
#: Prefix of the name under which a separator string is counted if it is left in the text.
_KEPT = "kept "
#: Prefixes of the names under which two kinds of documents are counted: documents that contain a
#: chat control token as plain text (`CHAT`), and documents that consist of the turns of a
#: conversation (`TRANSCRIPT`).
CHAT, TRANSCRIPT = "chat ", "turns "


class DocumentPart(NamedTuple):
    """A document that results from splitting text at separators.

    Attributes:
        line: one-based number of the line on which the document begins.
        content: the document in UTF-8, possibly invalid; None if it is too long.
        changes: names of the changes that were made to the document. They include the separator at
            which the document was split off, and "kept SEPARATOR" for each separator string that
            was left in the document's text.
    """

    line: int
    content: bytes | None
    changes: tuple[str, ...] = ()


def split_documents(
    blocks: Iterable[bytes],
    largest: float = math.inf,
    *,
    is_code: bool = False,
    is_whole: bool = False,
) -> Iterator[DocumentPart]:
    """Split text into documents at separators. Text without separators is a single document.

    A separator string separates documents if it is alone on its line, or if one document clearly
    ends before it and another begins after it. A separator string that is quoted or mentioned
    within a sentence is kept as part of the text. Whitespace around separators is removed.
    Documents that consist only of whitespace are dropped, unless there are no other documents.

    Args:
        blocks: the text in UTF-8, in blocks of any size.
        largest: maximum size of a document in bytes; a longer document is yielded without its
            content.
        is_code: True for source code, where a separator is recognised only if it is alone on its
            line.
        is_whole: True to treat the text as one document and ignore separators.
    """
    document = _Document(largest)
    rest = b""
    place = 0
    is_first = True
    for block in itertools.chain(blocks, [None]):
        text = rest + (block or b"")
        begin, mark = 0, None
        while not is_whole and (mark := _SEPARATOR.search(text, place)):
            if block is not None and len(text) - mark.end() < _CONTEXT:
                break
            place = mark.end()
            start = max(begin, mark.start() - _CONTEXT)
            before, after = text[start : mark.start()], text[place : place + _CONTEXT]
            # Treat the beginning of a document as the beginning of a line.
            before = before if start > begin or document.size else b"\n" + before
            if not _separates(mark[0], before, after, is_code=is_code):
                # <s> is common in code, where it has other meanings.
                if not is_code or _is_long(mark[0]):
                    document.kept[f"{_KEPT}{mark[0].decode()}"] = None
                continue
            document.add(text[begin : mark.start()])
            parts = list(document.end(mark[0].decode()))
            yield from parts
            begin, is_first = place, is_first and not parts
        if block is None:
            document.add(text[begin:])
            yield from document.end("", even_empty=is_first)
            return
        # The last bytes of the block may contain the beginning of a separator that extends into the
        # next block. They may also contain a separator string that can't be classified without the
        # text after it.
        place = max(place, len(text) - _CONTEXT // 2 if mark is None else mark.start())
        end = max(begin, place - _CONTEXT)
        document.add(text[begin:end])
        rest, place = text[end:], place - end


class _Document:
    """The document that is currently being read.

    Attributes:
        size: number of bytes of the document so far.
        kept: names of the changes for separator strings that were left in the document's text.
    """

    def __init__(self, largest: float) -> None:
        self.size, self.kept = 0, dict[str, None]()
        self._largest = largest
        self._parts: list[bytes] = []
        self._line, self._newlines = 1, 0
        self._separator = ""

    def add(self, part: bytes) -> None:
        """Append a part of the text."""
        self.size += len(part)
        self._newlines += part.count(b"\n")
        if self.size > self._largest:
            self._parts.clear()  # Do not keep a document in memory if it is too long.
        else:
            self._parts.append(part)

    def end(self, separator: str, *, even_empty: bool = False) -> Iterator[DocumentPart]:
        """Yield the current document and begin the next one. An empty document is yielded only if
        `even_empty` is True.

        Args:
            separator: the separator that follows the document; "" at the end of the text.
        """
        content, line = b"".join(self._parts), self._line
        beside = separator or self._separator
        if beside and (blank := _BLANK.match(content)):
            line += content.count(b"\n", 0, blank.end())
            content = content[blank.end() :].rstrip()
        if self.size > self._largest:
            yield DocumentPart(line, None)
        elif even_empty or content.strip():
            yield DocumentPart(line, content, (*((beside,) if beside else ()), *self.kept))
        self._line += self._newlines
        self.size = 0
        self._newlines = 0
        self._separator = beside
        self.kept = {}
        self._parts.clear()


def _separates(mark: bytes, before: bytes, after: bytes, *, is_code: bool) -> bool:
    """Return True if a separator string at this position separates documents.

    Args:
        mark: the separator string.
        before, after: up to `_CONTEXT` bytes of text before and after the separator string.
        is_code: see `split_documents`.
    """
    begins_line = _LINE_START.search(before) is not None
    ends_line = _LINE_END.match(after) is not None
    if begins_line and ends_line:
        return True
    if is_code or not _is_long(mark):
        return False
    touches = begins_line or _TEXT_BEFORE.search(before) is not None
    if ends_line:
        return touches or _TEXT_BEFORE.search(before.rstrip(b" \t*-")) is not None
    if _SEPARATOR.match(after):
        return touches
    if touches and not begins_line and after[:1] in (b" ", b"\t"):
        return _TEXT_AFTER.match(after.lstrip(b" \t")) is not None
    if touches or _SENTENCE_END.search(before):
        return _TEXT_AFTER.match(after) is not None or _CAPITAL_AFTER.match(after) is not None
    return False


def _is_long(mark: bytes) -> bool:
    """Return True if a separator string, such as <|endoftext|>, is never used in text for any other
    purpose.
    """
    return mark[1:2] in (b"|", b"\xef")


def cleaned(
    text: str, *, is_code: bool = False, is_subtitles: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Clean the text of a document. Return the cleaned text and the names of the changes that were
    made. The cleaned text is "" if nothing remains.

    CRLF line endings are replaced with LF. Project Gutenberg's header and licence are removed,
    except from source code. The numbers, times and tags of subtitles are removed from subtitle
    files, and each line of rolling captions is kept once.

    Args:
        text: the text of a document.
        is_code: True for source code.
        is_subtitles: True for a subtitle file.
    """
    changes: tuple[str, ...] = ()
    if "\r\n" in text:
        text, changes = text.replace("\r\n", "\n"), (CRLF,)
    # Searching for each word is faster than a regular expression with alternatives.
    if not is_code and any(word in text for word in _OF_GUTENBERG):
        body = without_gutenberg(text)
        if body != text:
            text, changes = body, (*changes, GUTENBERG)
    if is_subtitles and _TIMES.search(text):
        text, changes = _subtitles(text), (*changes, SUBTITLES)
    return text if text.strip() else "", changes


def _subtitles(text: str) -> str:
    """Return the lines that a viewer reads."""
    if text.startswith("WEBVTT"):
        text = _NOT_SHOWN.sub("", text)
    cues = []
    for cue in _TIMES.split(text):
        shown = _SUBTITLE_TAG.sub("", _VOICE.sub(r"\1: ", cue))
        shown = _ENTITY.sub(lambda found: unescape(found[0]), shown).replace("\xa0", " ")
        cues.append([line.strip() for line in shown.split("\n") if line.strip()])
    new = [_unrepeated(lines, before) for before, lines in zip([[], *cues], cues, strict=False)]
    repeats = sum(len(lines) < len(cue) for lines, cue in zip(new, cues, strict=True))
    # Rolling captions repeat lines in most cues, while a film has a few answers that are the same.
    rolling = 2 * repeats > len([cue for cue in cues if cue])
    return "\n".join(line for cue in (new if rolling else cues) for line in cue) + "\n"


def _unrepeated(lines: list[str], before: list[str]) -> list[str]:
    """Return the lines of a cue without the first ones if the cue before ended with them."""
    counts = range(min(len(lines), len(before)), 0, -1)
    return lines[next((n for n in counts if lines[:n] == before[-n:]), 0) :]


def without_gutenberg(text: str) -> str:
    """Return the text without Project Gutenberg's header, credits and licence.

    If the text contains several books, all of them are kept. Text without any of the lines that
    Project Gutenberg adds (see `_MARKS`) is returned unchanged. If nothing remains of the text, the
    result is "".
    """
    books: list[str] = []
    begin = 0
    is_inside = True
    is_marked = False
    for mark in _MARKS.finditer(text):
        if mark["print"] is not None and not text[mark.end() :].strip():
            continue  # In a few books, the small print comes after the text.
        if mark["end"] is not None:
            if is_inside:
                books.append(text[begin : mark.start()])
            is_inside = False
        else:
            if is_inside and is_marked and mark["print"] is None:
                books.append(text[begin : mark.start()])  # No line marks the end of the book.
            begin, is_inside = mark.end(), True
        is_marked = True
    if not is_marked:
        return text
    if is_inside:
        books.append(text[begin:])
    bodies = (_CREDITS.sub("", book, count=1) if _CREDITS.match(book) else book for book in books)
    kept = [body for body in (body.strip() for body in bodies) if body]
    return "\n\n\n".join(kept) + "\n" if kept else ""


def is_separator(change: str) -> bool:
    """Return True if the name of a change is a separator string."""
    kept = (_KEPT, CHAT, TRANSCRIPT)
    return change not in (CRLF, GUTENBERG, SUBTITLES) and not change.startswith(kept)


class ChangeCounts:
    """Counts of the changes that were made to documents while they were read."""

    def __init__(self) -> None:
        self._documents: Counter[str] = Counter()
        self._files: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def add(self, origin: str, changes: Iterable[str]) -> None:
        """Count the changes made to a document. All documents from the same file must be added
        consecutively.

        Args:
            origin: name of the document's file.
            changes: names of the changes.
        """
        for change in changes:
            self._documents[change] += 1
            if self._last.get(change) != origin:
                self._files[change] += 1
                self._last[change] = origin

    def record(self) -> dict[str, dict[str, int]]:
        """Return a JSON object with the number of documents and the number of files in which each
        change was made.
        """
        counts = self._documents.items()
        return {key: {"documents": n, "files": self._files[key]} for key, n in sorted(counts)}

    def names(self) -> dict[str, str]:
        """For each change that was made in only one file, return the name of that file."""
        return {key: name for key, name in self._last.items() if self._files[key] == 1}


def change_lines(
    record: Mapping[str, Mapping[str, int]],
    names: Mapping[str, str] = MappingProxyType({}),
    *,
    total: int = 0,
) -> Iterator[str]:
    """Yield a message to the user for each kind of change.

    Args:
        record, names: results of the `ChangeCounts` methods with these names.
        total: number of documents in the corpus.
    """
    for change, counts in record.items():
        documents, files = counts["documents"], counts["files"]
        number = f"{documents:,} document{'s' if documents != 1 else ''}"
        where = names.get(change) or f"{files:,} file{'s' if files != 1 else ''}"
        within = "" if documents == files else f" in {number}"
        if change == CRLF:
            yield f"{where}: CRLF line endings replaced with LF{within} (--as-is keeps them)"
        elif change == GUTENBERG:
            what = "Project Gutenberg's header and licence"
            yield f"{where}: {what} removed{within} (--as-is keeps them)"
        elif change == SUBTITLES:
            what = "numbers, times and tags of subtitles"
            yield f"{where}: {what} removed{within} (--as-is keeps them)"
        elif change.startswith(_KEPT):
            mark = change.removeprefix(_KEPT)
            yield f"{where}: {mark} that is not between documents is treated as plain text{within}"
        elif change.startswith(CHAT):
            yield (
                f"warning: {where}: {change.removeprefix(CHAT)} is treated as plain "
                f"text{within}; write chats as records with `messages`, which --init-from MODEL "
                "(train) and --kind chat (prepare) read"
            )
        elif change.startswith(TRANSCRIPT):
            # Warn only if more than half of the documents consist of the turns of a conversation. A
            # few such documents may be chapters of a book.
            if 2 * documents > total:
                yield (
                    f"warning: {where}: {number} with turns of {change.removeprefix(TRANSCRIPT)}, "
                    "treated as plain text; to read them as conversations, use --init-from MODEL "
                    "--data.kind chat (train) or --kind chat (prepare)"
                )
        else:
            yield f"{where}: {number}, separated by {change} (--as-is treats it as text)"
