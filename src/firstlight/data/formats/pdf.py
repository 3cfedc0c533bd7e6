"""PDF documents: one text for each file, with its pages joined.

PDFium finds the characters in reading order. This module joins lines to paragraphs by their
positions, joins words that a line's end divides, and leaves out the headers, footers and page
numbers that repeat.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pypdfium2
import pypdfium2.raw as pdfium

from firstlight.data.formats import UnreadableDocument

#: PDFium's mark for a hyphen that divides a word at the end of a line.
_HYPHEN = "\x02"
#: A piece of text without line ends, and the space between two words.
_PIECE, _SPACE = re.compile(r"[^\r\n\ufffe\x02]+[\ufffe\x02]?"), re.compile("(?<=[^ ]) +(?=[^ ])")
_HYPHENS = (_HYPHEN, "-", "\u00ad")
#: A word that is not at the beginning or the end of a line, and the rest of an address or of a name
#: in code.
_INNER_WORD = re.compile(r"(?<=[^\w-])\w[\w-]*\w(?=[^\w-])")
_ADDRESS = re.compile(r"[\w-]*(?:[@/_=]|\.\w)")
#: Minimum share of lines with a hyphen at the end in a document with divided words.
_DIVIDED = 0.03
#: Every n-th character is checked for a missing entry in its font's map; maximum share of these.
_CHECKED, _MOST_UNMAPPED = 8, 0.1
#: Number of pages at the beginning without text after which a document counts as scanned.
_SCANNED_PAGES = 200
#: Maximum number of pages with only a picture, such as a cover, that no message names.
_PICTURES = 2
_RECOGNISE = "recognise them with ocrmypdf --skip-text IN OUT"
#: Number of lines at the top and at the bottom of a page that may be headers and footers.
_MARGIN_LINES = 2
#: Minimum gap between two columns of a table, as a multiple of the size of the font.
_COLUMN_GAP = 1.5
#: Minimum gap between two Chinese or Japanese words, as a multiple of the size of the font. Smaller
#: ones justify a line.
_WIDE_SPACE = 0.6
#: Minimum gap between two words that are drawn apart, as a multiple of the size of the font.
_WORD_GAP = 0.12
#: The mark of a list item.
_MARK = re.compile(r"\W+\Z|\W?\w{1,3}[.):]?\Z")
#: Where headers and footers are: maximum distance from the edge of the page, as a share of its
#: height, or a gap beside them, as a multiple of the usual distance of two lines.
_EDGE, _WIDE_GAP = 0.06, 1.3
#: Three numbers or more, where "#" stands for a number.
_NUMBERS = re.compile(r"(\W*#){3}[\W#]*\Z")
#: Maximum share of lines that begin with a small letter in poems, forms and tables.
_LOWER = 0.15
#: For text from right to left, as fractions of the font's size: minimum width of a space between
#: words and of a space that PDFium found, too, and the shift of a mark. Numbers and Latin words in
#: it run from left to right.
_RTL_SPACE, _RTL_GAP = 0.3, 0.05
_MARK_SHIFT = 0.08
_SWAPPED = str.maketrans("()[]", ")(][")
_LTR = re.compile(r"[0-9A-Za-z\u00c0-\u024f](?:[^\u0590-\u08ff]*[0-9A-Za-z\u00c0-\u024f])?")
_SENTENCE_ENDS = (".", "!", "?", ":", "。", "！", "？", "؟", "”", '"')


class _Line(NamedTuple):
    """A line of text, and its place in points: the beginning and the end of the line, its baseline,
    and the size of its font. For text from right to left, the signs of the first two are
    reversed. The columns of a table are separated by tabs."""

    text: str
    begin: float
    end: float
    bottom: float
    height: float

    @property
    def top(self) -> float:
        return self.bottom + self.height


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("pages 1 to N", text) of a PDF, and its number of images without text. The place also
    states how many headers, footers and page numbers were left out.

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
    boxes: list[tuple[float, ...]] = []
    checked = unmapped = images = 0
    for number in range(len(document)):
        try:
            page = document[number]
        except pypdfium2.PdfiumError:  # A damaged page.
            pages.append([])
            boxes.append((0.0, 0.0, 1.0, 1.0))
            continue
        boxes.append(page.get_mediabox())
        text_page = page.get_textpage()
        pages.append(_lines(text_page))
        if not pages[-1]:
            images += any(page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE], max_depth=3))
        count = text_page.count_chars()
        for index in range(0, count, _CHECKED):
            checked += 1
            unmapped += pdfium.FPDFText_HasUnicodeMapError(text_page, index) == 1
        text_page.close()
        page.close()
        if number >= _SCANNED_PAGES and not any(pages):
            break
    _require_text(pages, unmapped / max(checked, 1))
    kept, left_out = _without_margins(pages, boxes)
    place = f"pages 1 to {len(pages):,}" if len(pages) > 1 else "page 1"
    if left_out:
        place += f", without {left_out:,} headers, footers and page numbers"
    yield place, _joined(kept)
    if images > _PICTURES:
        yield f"{images:,} of its pages are images without text: {_RECOGNISE}", ""


def _require_text(pages: Sequence[list[_Line]], unmapped: float) -> None:
    """Check that most pages have text, and that most letters are known.

    Args:
        pages: the lines of the pages.
        unmapped: share of the characters that have no entry in the map of their font.

    Raises:
        UnreadableDocument: the document is scanned, or its fonts have no maps.
    """
    empty = sum(not lines for lines in pages)
    if empty == len(pages):
        raise UnreadableDocument(
            "its pages are images without text: recognise it with ocrmypdf IN OUT"
        )
    # Archives add a page of text to a scanned document.
    if 2 * empty > len(pages):
        raise UnreadableDocument(
            f"{empty:,} of its {len(pages):,} pages are images without text: {_RECOGNISE}"
        )
    if unmapped > _MOST_UNMAPPED:
        raise UnreadableDocument(
            "its fonts do not state which letters they draw: export it again, or recognise its "
            "text with ocrmypdf --force-ocr IN OUT"
        )


def _lines(page: Any) -> list[_Line]:
    count = page.count_chars()
    text = page.get_text_range() if count else ""
    if len(text) != count:
        # Characters outside of the basic plane take two units, so positions would be shifted.
        codes = (pdfium.FPDFText_GetUnicode(page, index) for index in range(count))
        text = "".join(chr(code) if code and not 0xD800 <= code < 0xE000 else " " for code in codes)
    is_rtl = sum(unicodedata.bidirectional(c) in ("R", "AL") for c in text) > len(text) / 4
    found: list[_Line] = []
    pieces = _mirrored(list(_rtl_pieces(page, text))) if is_rtl else _ltr_pieces(page, text)
    for line in pieces:
        if found and _is_same(found[-1], line):
            last = found.pop()
            gap = (line.begin - last.end) / last.height
            is_wide = _is_wide(last.text[-1:]) and _is_wide(line.text[:1])
            least = _WIDE_SPACE if is_wide else _WORD_GAP
            between = "\t" if gap > 2 else " " if gap > least else ""
            higher = last if last.height >= line.height else line
            content = last.text + between + line.text
            end = max(last.end, line.end)
            line = _Line(content, last.begin, end, higher.bottom, higher.height)
        found.append(line)
    return found


def _ltr_pieces(page: Any, text: str) -> Iterator[_Line]:
    """Yield the pieces of lines that PDFium found, for text from left to right."""
    for match in _pieces(page, text):
        indices = [i for i in range(match.start(), match.end()) if not text[i].isspace()]
        if not indices:
            continue
        middle = indices[len(indices) // 2]
        places = [_place(page, index) for index in (indices[0], middle, indices[-1])]
        begin, end = min(p[0] for p in places), max(p[1] for p in places)
        bottom, height = sorted((p[2:] for p in places), key=lambda p: p[1])[1]
        content = _with_columns(page, match, height).replace("\ufffe", _HYPHEN)
        yield _Line(content.strip(), begin, end, bottom, height)


def _pieces(page: Any, text: str) -> Iterator[re.Match[str]]:
    """Yield the pieces of a page's text that have no line ends. PDFium misses some line ends before
    words that are lower or higher than the word before them."""
    for line in _PIECE.finditer(text):
        start = line.start()
        for space in _SPACE.finditer(text, start, line.end()):
            last, word = _box(page, space.start() - 1), _box(page, space.end())
            if word.top < last.bottom or word.bottom > last.top:
                yield cast("re.Match[str]", _PIECE.match(text, start, space.start()))
                start = space.end()
        yield cast("re.Match[str]", _PIECE.match(text, start, line.end()))


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
    x, y = ctypes.c_double(), ctypes.c_double()
    matrix = pdfium.FS_MATRIX()
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
        # PDFium also reports spaces inside words, after marks. The letters there have no gap.
        is_space = left - glyph.right > _RTL_SPACE * glyph.size
        is_space |= glyph.word != word and left - glyph.right > _RTL_GAP * glyph.size
        text = glyph.text if glyph.text < "\ufb50" else unicodedata.normalize("NFKC", glyph.text)
        parts.append(" " * is_space + text)
        left, word = min(left, glyph.left), glyph.word
    text = _LTR.sub(lambda run: run[0][::-1], "".join(parts))
    first = max(glyphs, key=lambda one: one.size)
    return _Line(text, -glyphs[0].right, -left, first.baseline, first.size)


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


def _place(page: Any, index: int) -> tuple[float, float, float, float]:
    """Return where a character begins and ends in the direction of its line, its baseline, and the
    size of its font, in points. The heights of boxes are less regular: some end at the ink."""
    x, y = ctypes.c_double(), ctypes.c_double()
    matrix = pdfium.FS_MATRIX()
    pdfium.FPDFText_GetCharOrigin(page, index, ctypes.byref(x), ctypes.byref(y))
    pdfium.FPDFText_GetMatrix(page, index, ctypes.byref(matrix))
    box = _box(page, index)
    scale = math.hypot(matrix.a, matrix.b) or 1.0
    right, up = matrix.a / scale, matrix.b / scale
    ends = (box.left * right + box.bottom * up, box.right * right + box.top * up)
    size = pdfium.FPDFText_GetFontSize(page, index) * math.hypot(matrix.c, matrix.d)
    return min(ends), max(ends), y.value * right - x.value * up, max(size, 1.0)


def _with_columns(page: Any, line: re.Match[str], height: float) -> str:
    """Return a line of text with tabs in the place of wide gaps, except after the mark of a list
    item. Words of another font may not be in their order, and are moved."""
    words = []
    for match in re.finditer("[^ ]+", line[0]):
        start, end = line.start() + match.start(), line.start() + match.end()
        words.append((_box(page, start).left, _box(page, end - 1).right, start, match[0]))
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(words)]
    # In text that is upside down, all gaps are negative.
    is_moved = min(gaps, default=0) < -height / 2 and max(gaps) > 0
    if is_moved:
        words.sort()
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(words)]
    content = words[0][3]
    for gap, (_, _, start, word) in zip(gaps, words[1:], strict=True):
        # All gaps are wide in a justified line with few words.
        is_column = gap > _COLUMN_GAP * height and (gap > 1.5 * min(gaps) or gap > 3 * height)
        is_joined = _is_wide(content[-1]) and _is_wide(word[0]) and gap < _WIDE_SPACE * height
        is_joined = is_joined and pdfium.FPDFText_IsGenerated(page, start - 1) == 1
        if is_column and not _MARK.match(content):
            content += "\t"
        elif not (is_joined or (is_moved and gap < _WORD_GAP * height)):
            content += " "
        content += word
    return content


def _is_same(last: _Line, line: _Line) -> bool:
    """Return True if a piece of text is in the same line as the last one and follows it."""
    overlap = min(last.top, line.top) - max(last.bottom, line.bottom)
    lower = min(last.height, line.height)
    return overlap > 0.5 * lower and line.begin - last.end > -0.5 * lower


def _without_margins(
    pages: Sequence[list[_Line]], boxes: Sequence[tuple[float, ...]]
) -> tuple[list[list[_Line]], int]:
    """Leave out headers, footers and page numbers: lines at the top or the bottom of pages that
    have the same text but for numbers, at the same height. In some pages, they are near to the edge
    of the page, or a wide gap separates them from the body. Return the pages and the number of
    lines that were left out.

    Args:
        pages: the lines of the pages.
        boxes: left, bottom, right and top edges of the pages.
    """
    keys: Counter[tuple[str, int]] = Counter()
    margins = []
    for lines, (_, low, _, high) in zip(pages, boxes, strict=True):
        found: dict[int, tuple[str, int]] = {}
        apart = set()
        heights = sorted({round(line.bottom / 2) for line in lines}, reverse=True)
        gaps = [above - below for above, below in itertools.pairwise(heights)]
        wide = _WIDE_GAP * sorted(gaps)[(len(gaps) - 1) // 2] if gaps else 0.0
        for index, line in enumerate(lines):
            row = heights.index(round(line.bottom / 2))
            key = re.sub(r"\d+|\b[ivxlc]+\b", "#", line.text), round(line.bottom / 4)
            # Numbers alone are a row of a table.
            if min(row, len(heights) - 1 - row) < _MARGIN_LINES and not _NUMBERS.match(key[0]):
                found[index] = key
                between = [*gaps[row:_MARGIN_LINES], *gaps[max(len(gaps) - _MARGIN_LINES, 0) : row]]
                edge = min(high - line.bottom, line.bottom - low) / (high - low)
                apart |= {key} if 0 <= edge < _EDGE or max(between, default=0) > wide else set()
        margins.append(found)
        keys.update(apart)
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
    hyphens = _Hyphens([line.text for lines in pages for line in lines])
    usual = _distances(line for lines in pages for line in lines)
    parts: list[str] = []
    last: _Line | None = None
    right = 0.0
    for lines in pages:
        found = _distances(lines)
        is_verse = _is_verse(lines)
        for line in lines:
            if last is not None:
                distances = (
                    found[size] if len(found[size := round(line.height)]) > 4 else usual[size]
                )
                distance = sorted(distances)[len(distances) // 5] if distances else 1.2 * size
                between = _between(last, line, right, distance)
                if is_verse and between == " " and not last.text.endswith(_HYPHENS):
                    between = "\n"
                _append(parts, line.text, between, hyphens)
            else:
                parts.append(line.text)
            ends = sorted(one.end for one in lines if abs(one.begin - line.begin) < 2 * line.height)
            right = ends[int(0.9 * (len(ends) - 1))]
            last = line
        # The first line of the next page is above this one.
        last = last and last._replace(bottom=-math.inf)
    return "".join(parts).replace(_HYPHEN, "-")


def _distances(lines: Iterable[_Line]) -> defaultdict[int, list[float]]:
    """Return the distances of successive lines in points by the size of their font."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for last, line in itertools.pairwise(lines):
        if 0.7 * line.height < last.bottom - line.bottom < 4 * line.height:
            found[round(line.height)].append(last.bottom - line.bottom)
    return found


def _is_verse(lines: Sequence[_Line]) -> bool:
    """Return True if each line of a page begins with a capital letter or a number, as in poems,
    forms and tables."""
    firsts = [line.text[0] for line in lines[1:] if line.text[0].isalnum()]
    # Letters of scripts without capitals say nothing, so text of these scripts is joined.
    small = sum(first.isalpha() and not first.isupper() for first in firsts)
    return len(firsts) > max(len(lines) / 2, 2) and small < _LOWER * len(firsts)


def _between(last: _Line, line: _Line, right: float, distance: float) -> str:
    """Return the text between two lines: a space, a line end or a blank line.

    Args:
        last, line: the lines.
        right: end of the lines in the column of `last`.
        distance: usual distance of two lines in a paragraph.
    """
    if last.text.endswith(_HYPHEN):
        return " "
    is_ended = last.text.endswith(_SENTENCE_ENDS)
    first_word = len(line.text.split()[0]) / len(line.text) * (line.end - line.begin)
    is_short = right - last.end > first_word + 0.5 * last.height
    if line.top > last.top:  # The line is in the next column or on the next page.
        return " " if not is_ended and not is_short and line.text[:1].islower() else "\n\n"
    gap = last.bottom - line.bottom - distance
    if gap > 0.35 * line.height or abs(line.height - last.height) > 0.15 * last.height:
        return "\n\n"
    is_indented = line.begin > last.begin + 0.8 * line.height
    if is_ended and is_indented:
        return "\n\n"
    return "\n" if is_short or "\t" in last.text + line.text else " "


class _Hyphens:
    """The hyphens at the ends of a document's lines. A hyphen divides a word, or belongs to it.

    Args:
        lines: the lines of the document.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        inner = (word for line in lines for word in _INNER_WORD.findall(line))
        self._words = Counter(inner)
        self._latin = {word for line in lines for word in re.findall("[A-Za-z]+", line)}
        pairs = [pair for pair in itertools.pairwise(lines) if pair[0].endswith(_HYPHENS)]
        known = [self._evidence(last, line) for last, line in pairs]
        evidence = sum(one > 0 for one in known) - sum(one < 0 for one in known)
        # Programs that divide words do it at the ends of many lines.
        self._is_usual = evidence > 0 or (evidence == 0 and len(pairs) > _DIVIDED * len(lines))

    def has(self, word: str) -> bool:
        """Return True if the document contains a word of Latin letters."""
        return word in self._latin

    def divides(self, last: str, line: str) -> bool:
        """Return True if the hyphen at the end of a line divides a word."""
        if not (line[0].islower() and last[-2:-1].isalpha()):
            return False
        evidence = self._evidence(last, line)
        return evidence > 0 or (evidence == 0 and self._is_usual and not _ADDRESS.match(line))

    def _evidence(self, last: str, line: str) -> int:
        """Return how much more often the word occurs in lines without the hyphen than with it."""
        before, after = re.findall(r"[\w-]*$", last[:-1])[0], re.findall(r"^[\w-]*", line)[0]
        return self._words[before + after] - self._words[f"{before}-{after}"]


def _append(parts: list[str], text: str, between: str, hyphens: _Hyphens) -> None:
    """Append a line to the text."""
    last = parts[-1]
    # A hyphen after a space is a dash.
    is_hyphen = last.endswith(_HYPHENS) and last[-2:-1].strip() != ""
    if between == " " and is_hyphen and text[:1].isalpha():
        parts[-1] = last[:-1] + ("" if hyphens.divides(last, text) else "-")
        parts.append(text)
        return
    is_one = _is_wide(last[-1:]) and _is_wide(text[:1])
    if last[-1:].isalpha() and any(map(_is_wide, last)):
        # Between wide characters, some programs divide Latin words without a hyphen.
        before, after = re.findall(r"[A-Za-z]*$", last)[0], re.findall(r"^[A-Za-z]*", text)[0]
        is_one |= bool(before and after) and hyphens.has(before + after)
    parts += ["" if is_one and between == " " else between, text]


def _is_wide(character: str) -> bool:
    """Return True for a character of a script that is written without spaces."""
    return (
        character != ""
        and unicodedata.east_asian_width(character) in "WF"
        and not ("\uac00" <= character <= "\ud7a3")
    )
