"""PDF documents: one text for each file, with its pages joined.

PDFium finds the characters in reading order. This module joins lines to paragraphs by their
positions, joins words that a line's end divides, and leaves out the headers, footers and page
numbers that repeat.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from firstlight.data.formats import UnreadableDocument

#: PDFium's mark for a hyphen that divides a word at the end of a line.
_HYPHEN = "\x02"
#: Every n-th character is checked for a missing entry in its font's map; maximum share of these.
_CHECKED, _MOST_UNMAPPED = 8, 0.1
#: Number of pages at the beginning without text after which a document counts as scanned.
_SCANNED_PAGES = 200
#: Number of lines at the top and at the bottom of a page that may be headers and footers.
_MARGIN_LINES = 2
#: For text from right to left, as fractions of the font's size: minimum width of a space between
#: words, of a space that PDFium found, too, and the shift of a mark. Numbers and Latin words in it
#: run from left to right.
_RTL_SPACE, _RTL_GAP, _MARK_SHIFT = 0.3, 0.05, 0.08
_SWAPPED = str.maketrans("()[]", ")(][")
_LTR = re.compile(r"[0-9A-Za-z\u00c0-\u024f](?:[^\u0590-\u08ff]*[0-9A-Za-z\u00c0-\u024f])?")
#: A space between two Chinese or Japanese characters.
_WIDE_SPACE = re.compile(r"(?<=[\u2e80-\u9fff\uff00-\uff60]) (?=[\u2e80-\u9fff\uff00-\uff60])")
_SENTENCE_ENDS = (".", "!", "?", ":", "。", "！", "？", "؟", "”", '"')


class _Line(NamedTuple):
    """A line of text, and its box in points: the beginning and the end of the line, its bottom and
    its top. For text from right to left, the signs of the first two are reversed."""

    text: str
    begin: float
    end: float
    bottom: float
    top: float

    @property
    def height(self) -> float:
        return max(self.top - self.bottom, 1.0)


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("pages 1 to N", text) of a PDF. The place also states how many headers, footers and
    page numbers were left out.

    Raises:
        UnreadableDocument: the file is damaged, encrypted or scanned, or its fonts do not state
            which letters they draw.
    """
    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableDocument(
                "it is encrypted: remove its password with "
                "qpdf --decrypt --password=PASSWORD IN OUT"
            ) from error
        raise UnreadableDocument(f"it is damaged ({error}): replace it") from error
    pages: list[list[_Line]] = []
    checked = unmapped = 0
    for number in range(len(document)):
        try:
            page = document[number]
        except pypdfium2.PdfiumError:  # A damaged page.
            pages.append([])
            continue
        text_page = page.get_textpage()
        pages.append(_lines(text_page))
        count = text_page.count_chars()
        for index in range(0, count, _CHECKED):
            checked += 1
            unmapped += pdfium.FPDFText_HasUnicodeMapError(text_page, index) == 1
        text_page.close()
        page.close()
        if number >= _SCANNED_PAGES and not any(pages):
            break
    text = "".join(line.text for lines in pages for line in lines)
    strange = sum(unicodedata.category(c) in ("Co", "Cn", "Cs") or c == "\ufffd" for c in text)
    if not text.strip():
        raise UnreadableDocument(
            "its pages are images without text: recognise it with ocrmypdf IN OUT"
        )
    if unmapped > _MOST_UNMAPPED * checked or strange > _MOST_UNMAPPED * len(text):
        raise UnreadableDocument(
            "its fonts do not state which letters they draw: export it again, or recognise its "
            "text with ocrmypdf --force-ocr IN OUT"
        )
    kept, left_out = _without_margins(pages)
    place = f"pages 1 to {len(pages):,}" if len(pages) > 1 else "page 1"
    if left_out:
        place += f", without {left_out:,} headers, footers and page numbers"
    yield place, _joined(kept)


def _lines(page: Any) -> list[_Line]:
    count = page.count_chars()
    text = page.get_text_range() if count else ""
    if len(text) != count:
        # Characters outside of the basic plane take two units, so positions would be shifted.
        codes = (pdfium.FPDFText_GetUnicode(page, index) for index in range(count))
        text = "".join(chr(code) if code and not 0xD800 <= code < 0xE000 else " " for code in codes)
    is_rtl = sum(unicodedata.bidirectional(c) in ("R", "AL") for c in text) > len(text) / 4
    found: list[_Line] = []
    pieces = _mirrored(list(_rtl_pieces(page, text))) if is_rtl else _pieces(page, text)
    for line in pieces:
        if found and _is_same(found[-1], line):
            last = found.pop()
            gap = line.begin - last.end
            between = " " if gap > 0.12 * last.height else ""
            higher = last if last.height >= line.height else line
            content = last.text + between + line.text
            line = _Line(content, last.begin, max(last.end, line.end), higher.bottom, higher.top)
        found.append(line)
    return found


def _pieces(page: Any, text: str) -> Iterator[_Line]:
    """Yield the pieces of lines that PDFium found, for text from left to right."""
    for match in re.finditer(r"[^\r\n\ufffe\x02]+[\ufffe\x02]?", text):
        indices = [i for i in range(match.start(), match.end()) if not text[i].isspace()]
        if not indices:
            continue
        chosen = (indices[0], indices[len(indices) // 2], indices[-1])
        boxes = [_box(page, index) for index in chosen]
        begin, end = min(box.left for box in boxes), max(box.right for box in boxes)
        middle = sorted(boxes, key=lambda box: box.top - box.bottom)[1]
        content = _WIDE_SPACE.sub(partial(_narrow, page, match.start()), match[0])
        content = content.replace("\ufffe", _HYPHEN).strip()
        yield _Line(content, begin, end, middle.bottom, middle.top)


def _narrow(page: Any, start: int, space: re.Match[str]) -> str:
    """Return "" for a space between two wide characters that only justifies a line. `start` is the
    index of the line's first character."""
    left, right = _box(page, start + space.start() - 1), _box(page, start + space.end())
    return "" if right.left - left.right < 0.6 * (right.top - right.bottom) else " "


class _Glyph(NamedTuple):
    """A character, the number of PDFium's words before it, the ends of its box, its baseline, and
    the size of its font in points."""

    text: str
    word: int
    left: float
    right: float
    baseline: float
    size: float


def _rtl_pieces(page: Any, text: str) -> Iterator[_Line]:
    """Yield the pieces of lines for text from right to left. PDFium gives the words of such text in
    either order, and marks above letters apart from these. Therefore the characters of each line
    are put into the order of their positions."""
    rows: list[list[_Glyph]] = []
    x, y, matrix = ctypes.c_double(), ctypes.c_double(), pdfium.FS_MATRIX()
    words = 0
    for index, character in enumerate(text):
        words += character.isspace()
        if character.isspace() or unicodedata.category(character) in ("Cc", "Cf"):
            continue
        box = _box(page, index)
        pdfium.FPDFText_GetCharOrigin(page, index, x, y)
        pdfium.FPDFText_GetMatrix(page, index, ctypes.byref(matrix))
        size = pdfium.FPDFText_GetFontSize(page, index) * abs(matrix.d) or 1.0
        is_mark = unicodedata.combining(character) > 0
        begin, end = box.left, box.right
        if is_mark:
            # A mark above a letter ends with it, but follows it.
            begin, end = begin - _MARK_SHIFT * size, end - _MARK_SHIFT * size
        elif box.bottom > y.value + 0.3 * size:
            # A letter of a ligature that is drawn with a mark has the box of the mark.
            begin, end = begin - 0.12 * size, end + 0.35 * size
        glyph = _Glyph(character, words, begin, end, y.value, size)
        near = [row for row in rows[-2:] if abs(row[-1].baseline - y.value) < 0.35 * size]
        if near:
            # The last character of a line may come before the line above it.
            rows.remove(near[0])
            rows.append(near[0])
            near[0].append(glyph)
        else:
            rows.append([glyph])
    for row in rows:
        # Both letters of a ligature have its box, and PDFium gives the last one first.
        row.reverse()
        piece: list[_Glyph] = []
        for glyph in sorted(row, key=lambda one: -one.right):
            if piece and piece[-1].left - glyph.right > 1.5 * glyph.size:
                yield _rtl_line(piece)
                piece = []
            piece.append(glyph)
        yield _rtl_line(piece)


def _rtl_line(glyphs: Sequence[_Glyph]) -> _Line:
    parts = []
    left, word = glyphs[0].right, glyphs[0].word
    for glyph in glyphs:
        # PDFium also finds spaces inside of words, after marks, where there is no gap.
        is_space = left - glyph.right > _RTL_SPACE * glyph.size
        is_space |= glyph.word != word and left - glyph.right > _RTL_GAP * glyph.size
        text = glyph.text if glyph.text < "\ufb50" else unicodedata.normalize("NFKC", glyph.text)
        parts.append(" " * is_space + text)
        left, word = min(left, glyph.left), glyph.word
    text = _LTR.sub(lambda run: run[0][::-1], "".join(parts))
    first = max(glyphs, key=lambda one: one.size)
    bottom, top = first.baseline - 0.25 * first.size, first.baseline + 0.75 * first.size
    return _Line(text, -glyphs[0].right, -left, bottom, top)


def _mirrored(lines: list[_Line]) -> list[_Line]:
    """Swap the parentheses of a page if they face outwards, because some programs store the signs
    that are drawn, and these are mirrored in text from right to left."""
    text = f" {' '.join(line.text for line in lines)} "
    outwards = len(re.findall(r"\s\)\w|\w\(\s", text)) - len(re.findall(r"\s\(\w|\w\)\s", text))
    if outwards <= 0:
        return lines
    return [line._replace(text=line.text.translate(_SWAPPED)) for line in lines]


def _box(page: Any, index: int) -> Any:
    """Return the box of a character in points."""
    box = pdfium.FS_RECTF()
    pdfium.FPDFText_GetLooseCharBox(page, index, ctypes.byref(box))
    return box


def _is_same(last: _Line, line: _Line) -> bool:
    """Return True if two pieces of text are in the same line of the same column."""
    overlap = min(last.top, line.top) - max(last.bottom, line.bottom)
    lower = min(last.height, line.height)
    gap = line.begin - last.end
    return overlap > 0.5 * lower and -0.5 * lower < gap < 2 * lower


def _without_margins(pages: Sequence[list[_Line]]) -> tuple[list[list[_Line]], int]:
    """Leave out headers, footers and page numbers: lines at the top or the bottom of pages that
    have the same text but for numbers, at the same height. Return the pages and the number of lines
    that were left out."""
    keys: Counter[tuple[str, int]] = Counter()
    margins = []
    for lines in pages:
        order = sorted(range(len(lines)), key=lambda index: -lines[index].top)
        found = {}
        for index in {*order[:_MARGIN_LINES], *order[-_MARGIN_LINES:]}:
            key = re.sub(r"\d+|\b[ivxlc]+\b", "#", lines[index].text)
            found[index] = (key, round(lines[index].bottom / 4))
        margins.append(found)
        keys.update(set(found.values()))
    least = 2 if len(pages) < 4 else 3
    kept = [
        [
            line
            for index, line in enumerate(lines)
            if index not in found or keys[found[index]] < least
        ]
        for lines, found in zip(pages, margins, strict=True)
    ]
    return kept, sum(map(len, pages)) - sum(map(len, kept))


def _joined(pages: Sequence[list[_Line]]) -> str:
    """Join lines to paragraphs, and words that are divided."""
    words = Counter(
        word for lines in pages for line in lines for word in re.findall(r"[\w-]+", line.text)
    )
    parts: list[str] = []
    last: _Line | None = None
    right = pitch = 0.0
    for lines in pages:
        pairs = itertools.pairwise(lines)
        gaps = sorted(a.bottom - b.top for a, b in pairs if a.top > b.top)
        pitch = gaps[len(gaps) // 2] if gaps else 0.0
        for line in lines:
            if last is not None:
                between = _between(last, line, right, pitch)
                _append(parts, line.text, between, words)
            else:
                parts.append(line.text)
            ends = sorted(one.end for one in lines if abs(one.begin - line.begin) < 2 * line.height)
            right = ends[int(0.9 * (len(ends) - 1))]
            last = line
    return "".join(parts).replace(_HYPHEN, "-")


def _between(last: _Line, line: _Line, right: float, pitch: float) -> str:
    """Return the text between two lines: a space, a line end or a blank line.

    Args:
        last, line: the lines.
        right: end of the lines in the column of `last`.
        pitch: usual distance between two lines.
    """
    if last.text.endswith(_HYPHEN):
        return " "
    is_ended = last.text.endswith(_SENTENCE_ENDS)
    first_word = len(line.text.split()[0]) / len(line.text) * (line.end - line.begin)
    is_short = right - last.end > first_word + 0.5 * last.height
    if line.top > last.top:  # The line is in the next column or on the next page.
        return " " if not is_ended and not is_short and line.text[:1].islower() else "\n\n"
    gap = last.bottom - line.top
    if gap > pitch + 0.35 * line.height or abs(line.height - last.height) > 0.15 * last.height:
        return "\n\n"
    is_indented = line.begin > last.begin + 0.8 * line.height
    if is_ended and is_indented:
        return "\n\n"
    return "\n" if is_short else " "


def _append(parts: list[str], text: str, between: str, words: Counter[str]) -> None:
    """Append a line to the text."""
    last = parts[-1]
    if between == " " and last.endswith((_HYPHEN, "-", "\u00ad")) and text[:1].isalpha():
        before = re.findall(r"[\w-]*$", last[:-1])[0]
        after = re.findall(r"^[\w-]*", text)[0]
        is_divided = text[0].islower() and before[-1:].isalpha()
        # A hyphen belongs to the word if the text has the word with it elsewhere.
        is_divided &= words[f"{before}-{after}"] <= words[before + after]
        parts[-1] = last[:-1] + ("" if is_divided else "-")
        parts.append(text)
        return
    is_one = _is_wide(last[-1:]) and _is_wide(text[:1])
    if last[-1:].isalpha() and any(map(_is_wide, last)):
        # Between wide characters, some programs divide Latin words without a hyphen.
        before, after = re.findall(r"[A-Za-z]*$", last)[0], re.findall(r"^[A-Za-z]*", text)[0]
        is_one |= bool(before and after) and words[before + after] > 0
    parts += ["" if is_one and between == " " else between, text]


def _is_wide(character: str) -> bool:
    """Return True for a character of a script that is written without spaces."""
    return (
        character != ""
        and unicodedata.east_asian_width(character) in "WF"
        and not ("\uac00" <= character <= "\ud7a3")
    )
