"""Documents in rich text format: the text without deleted or hidden passages, and each footnote
once, at the end.

A file consists of groups in braces, control words and bytes. A group inherits the properties of the
group around it, and may be a destination such as a table of fonts, whose content is not text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import Paragraphs

#: A byte in hexadecimal, a control word with its number, a control symbol, a brace, or bytes.
_TOKEN = re.compile(
    rb"\\'([0-9a-fA-F]{2})|\\([a-zA-Z]+)(-?\d{1,9})? ?|\\([\s\S])|([{}])|[\r\n]+|([^\\{}\r\n]+)"
)
#: Destinations without text. So are those that are marked with \*, except the ones in `_KEPT`.
_DROPPED = frozenset(
    "colortbl stylesheet info pict header headerl headerr headerf footer footerl footerr footerf "
    "filetbl shprslt sp xe tc rxe nonesttables template private mmathPict".split()
)
_KEPT = frozenset("footnote shpinst fonttbl listtext pntext".split())
#: Destinations whose content is not a part of the paragraph around them. The content of "label" is
#: the number of an item of a list.
_KINDS = {"footnote": "footnote", "listtext": "label", "pntext": "label", "fonttbl": "fonts"}
_CHARACTERS = dict(
    zip(
        "emdash endash emspace enspace qmspace bullet lquote rquote ldblquote rdblquote tab "
        "nestcell line zwj zwnj ~ _ { } \\".split(),
        "—–   •‘’“”\t\t\n\u200d\u200c\xa0-{}\\",
        strict=True,
    )
)
_ENDS = ("par", "sect", "page", "nestrow", "\n", "\r")
_TABLES = ("cell", "row", "trowd", "intbl", "pard")
#: Encodings by the number of a font's character set.
_CHARSETS = dict(
    pair.split("=")
    for pair in "0=cp1252 77=mac_roman 128=cp932 129=cp949 130=johab 134=gb18030 136=cp950 "
    "161=cp1253 162=cp1254 163=cp1258 177=cp1255 178=cp1256 186=cp1257 204=cp1251 222=cp874 "
    "238=cp1250".split()
)
_ENCODINGS = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850"}


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a document in rich text format.

    Raises:
        UnreadableDocument: the file is not in this format, or has no text.
    """
    content = path.read_bytes()
    if not content.startswith(b"{\\rtf"):
        raise UnreadableDocument("it is not in rich text format: exclude it")
    if not (text := _Document().text(content)):
        raise UnreadableDocument("it has no text: exclude it")
    yield "", text


class _Group(NamedTuple):
    """The properties of a group.

    Attributes:
        kind: "text", a kind of destination (see `_KINDS`), or "" if the content is not text.
        font: number of the font, or "" for the default.
        replaced: number of characters after a Unicode character that stand for it in old programs.
        is_hidden: True for hidden and deleted text.
    """

    kind: str = "text"
    font: str = ""
    replaced: int = 1
    is_hidden: bool = False


class _Document:
    """A document that is being read."""

    def __init__(self) -> None:
        self._group = _Group()
        self._groups: list[_Group] = []
        self._is_optional = False
        self._skipped = 0
        self._bytes = bytearray()
        self._encoding, self._font = "cp1252", ""
        self._fonts: dict[str, str] = {}
        self._label = ""
        self._body, self._notes = Paragraphs(is_typed=True), Paragraphs(is_typed=True)
        #: The current paragraph or cell, and the paragraphs around the current footnote.
        self._open = Paragraphs(is_typed=True)
        self._outer: list[Paragraphs] = []
        self._cells: list[Paragraphs] = []
        self._is_in_table = self._is_item = False
        self._last = ""
        self._note_count = 0

    def text(self, content: bytes) -> str:
        """Return the text of a document, followed by its notes."""
        place = 0
        while found := _TOKEN.match(content, place):
            place = found.end()
            byte, word, number, symbol, brace, text = found.groups()
            if byte or text:
                new = bytes.fromhex(byte.decode()) if byte else text
                self._bytes += new[self._skipped :]
                self._skipped = max(self._skipped - len(new), 0)
                continue
            self._flush()
            if brace or word or symbol:
                self._skipped = 0
            if brace == b"{":
                self._groups.append(self._group)
            elif brace:
                self._end_group()
            elif word == b"bin":
                place += max(int(number or 0), 0)
            elif word or symbol:
                self._control((word or symbol).decode("latin-1"), (number or b"").decode())
        self._flush()
        self._is_in_table = False
        self._end_paragraph()
        self._body.end_group()
        self._body.add_all(self._notes)
        # Characters above U+FFFF are written as two halves.
        return self._body.text().encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _flush(self) -> None:
        if self._bytes:
            name = self._fonts.get(self._group.font or self._font, self._encoding)
            try:
                self._add(self._bytes.decode(name, "replace"))
            except LookupError:  # The document names a code page that does not exist.
                self._add(self._bytes.decode("cp1252", "replace"))
            self._bytes.clear()

    def _add(self, text: str) -> None:
        if self._group.is_hidden or self._group.kind in ("", "fonts"):
            return
        if self._group.kind == "label":
            self._label += text
        elif text == "\n":
            self._open.add_break()
        else:
            self._open.add(text)

    def _control(self, word: str, number: str) -> None:
        is_optional, self._is_optional = self._is_optional, word == "*"
        group = self._group
        if not group.kind or word in _DROPPED or (is_optional and word not in _KEPT):
            self._group = group._replace(kind="")
        elif word in _KINDS:
            self._group = group._replace(kind=_KINDS[word])
            if word == "footnote" and group.kind != "footnote":
                self._begin_note()
        elif word in _CHARACTERS:
            self._add(_CHARACTERS[word])
        elif word == "u" and number:
            self._add(chr(int(number) % 0x10000))
            self._skipped = group.replaced
        elif word in _ENDS:
            self._end_paragraph()
        elif word in _TABLES and not self._outer:
            self._table(word)
        else:
            self._property(word, number)

    def _property(self, word: str, number: str) -> None:
        group = self._group
        if word == "f":
            self._group = group._replace(font=number)
        elif word == "plain":
            self._group = group._replace(font="", is_hidden=False)
        elif word in ("v", "deleted"):
            self._group = group._replace(is_hidden=number != "0")
        elif word == "uc":
            self._group = group._replace(replaced=int(number or 1))
        elif word == "deff":
            self._font = number
        elif word == "fcharset" and number in _CHARSETS:
            self._fonts[group.font] = _CHARSETS[number]
        elif word in ("ansicpg", *_ENCODINGS):
            self._encoding = _ENCODINGS.get(word, f"cp{number}")

    def _table(self, word: str) -> None:
        if word == "cell":
            self._cells.append(self._open)
            self._open = Paragraphs(is_typed=True)
        elif word == "row":
            self._begin("row")
            self._body.add_cells(self._cells)
            self._cells = []
        self._is_in_table = word in ("cell", "trowd", "intbl")

    def _begin(self, kind: str) -> None:
        """Let a blank line follow what comes before, unless both are items, or rows of a table."""
        if not kind or kind != self._last:
            self._body.end_group()
        self._last = kind

    def _end_paragraph(self) -> None:
        if self._outer or self._is_in_table:
            self._open.end()
            return
        if self._cells:
            self._table("row")
        self._begin("item" if self._is_item else "")
        self._body.add_all(self._open)
        self._open, self._is_item = Paragraphs(is_typed=True), False

    def _begin_note(self) -> None:
        self._note_count += 1
        self._open.add(f"[{self._note_count}]")
        self._outer.append(self._open)
        self._open = Paragraphs(is_typed=True)
        self._open.mark(f"[{self._note_count}] ")

    def _end_group(self) -> None:
        kind = self._group.kind
        self._group = self._groups.pop() if self._groups else _Group()
        if kind == self._group.kind:
            return
        if kind == "footnote":
            self._notes.add_all(self._open)
            self._open = self._outer.pop()
        elif kind == "label":
            label, self._label = self._label.strip(), ""
            is_number = any(character.isalnum() for character in label)
            self._open.mark(f"{label} " if is_number else "- ")
            self._is_item = True
