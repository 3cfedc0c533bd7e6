"""Documents in rich text format as word processors write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.data.formats import rtf


def _read(folder: Path, content: str) -> str:
    path = folder / "a.rtf"
    path.write_bytes(content.encode("latin-1"))
    ((place, text),) = rtf.read(path)
    assert place == ""
    return text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # Word writes bytes in the encoding of the font, and Unicode with a replacement.
        (
            r"{\fonttbl{\f0\fcharset0 A;}{\f1\fcharset204 B;}}\f0 caf\'e9 \f1\'e4\'e0\plain \'fc",
            "café даü",
        ),
        (r"\ansicpg1251 \'cf\u1088?\u-10179?\u-8704?.", "Пр😀."),
        (r"{\fonttbl{\f0\fcharset128 A;}}\'93\'fa\'96\'7b", "日本"),
        (r"\uc2\u8211\'96\'97 x{\uc0\u8212}y", "– x—y"),
        (r"\ansicpg99 \'e9", "é"),
        (r"\{a\}\\ b\~c\_d\-e \ldblquote f\rdblquote  x\tab y", "{a}\\ b c-de “f” x y"),
    ],
)
def test_read_characters_are_decoded(tmp_path: Path, content: str, expected: str) -> None:
    assert _read(tmp_path, rf"{{\rtf1\ansi\deff0{content}\par}}") == expected


def test_read_leaves_out_what_is_not_shown(tmp_path: Path) -> None:
    content = (
        r"{\rtf1{\stylesheet{\s1 Style;}}{\info{\title T}}{\header Head\par}{\*\generator X;}"
        r"{\pict\bin4 }}\{ }{\v hidden}{\deleted deleted}Shown \v no\v0 and{\v a \plain b}"
        r"{\field{\*\fldinst HYPERLINK x}{\fldrslt  link}}{\shp{\*\shpinst{\sp{\sn a}{\sv 1}}"
        r"{\shptxt  box}}{\shprslt old}}{\*\annotation comment}.\par}"
    )
    assert _read(tmp_path, content) == "Shown andb link box."


def test_read_keeps_bars_tables_and_paragraphs(tmp_path: Path) -> None:
    content = (
        r"{\rtf1 ls | grep x\par\par next\line line\par"
        r"\trowd\cellx1\pard\intbl A\par a|\cell B\cell\row\pard\intbl C\cell\cell\row\pard"
        r" after\par\trowd\intbl one\par two\cell\row\pard end\par}"
    )
    expected = "ls | grep x\n\nnext\nline\n\nA a|\tB\nC\n\nafter\n\none\n\ntwo\n\nend"
    assert _read(tmp_path, content) == expected


def test_read_footnotes_come_once_at_the_end(tmp_path: Path) -> None:
    content = (
        r"{\rtf1 a{\super\chftn}{\footnote\pard\chftn  First.\par Second.} b\par"
        r"\trowd c{\*\footnote Third.}\cell d\cell\row}"
    )
    assert _read(tmp_path, content) == "a[1] b\n\nc[2]\td\n\n[1] First.\nSecond.\n\n[2] Third."


def test_read_lists_and_indented_lines(tmp_path: Path) -> None:
    content = (
        r"{\rtf1 List:\par{\listtext\'b7\tab}x\par{\pntext 2.\tab}y\par def f():\par"
        "     return 1\\\n}"
    )
    assert _read(tmp_path, content) == "List:\n\n- x\n2. y\n\ndef f():\n    return 1"


def test_read_damaged_groups_are_read_to_the_end(tmp_path: Path) -> None:
    assert _read(tmp_path, r"{\rtf1 {\b a}}}} b {\i c") == "a b c"
