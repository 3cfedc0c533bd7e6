"""Word documents as Word, Word Online and other programs write them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from firstlight.data.formats import docx

_WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def _read(folder: Path, body: str, main: str = "word/document.xml", **parts: str) -> str:
    path = folder / "a.docx"
    with zipfile.ZipFile(path, "w") as archive:
        relation = f'<Relationship Type="http://x/officeDocument" Target="/{main}"/>'
        archive.writestr("_rels/.rels", f'<Relationships xmlns="r">{relation}</Relationships>')
        archive.writestr(main, f"<w:document {_WORD}><w:body>{body}</w:body></w:document>")
        for name, content in parts.items():
            archive.writestr(f"word/{name}.xml", f"<w:{name} {_WORD}>{content}</w:{name}>")
    ((place, text),) = docx.read(path)
    assert place == ""
    return text


def _paragraph(text: str, style: str = "", item: str = "") -> str:
    number = "<w:numPr><w:ilvl w:val='{}'/><w:numId w:val='{}'/></w:numPr>"
    properties = f"<w:pStyle w:val='{style}'/>" if style else ""
    properties += number.format(*item.split()) if item else ""
    run = f"<w:r><w:t xml:space='preserve'>{text}</w:t></w:r>"
    return f"<w:p><w:pPr>{properties}</w:pPr>{run}</w:p>"


def test_read_tables_with_content_controls_and_layout(tmp_path: Path) -> None:
    control = "<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>"
    cell = "<w:tc>{}</w:tc>"
    rows = control.format(f"<w:tr>{cell.format(_paragraph('row'))}</w:tr>")
    inner = f"<w:tbl><w:tr>{cell.format(_paragraph('inner'))}</w:tr></w:tbl>"
    controlled = control.format(cell.format(_paragraph("controlled")))
    rows += f"<w:tr>{controlled}{cell.format(_paragraph('a') + _paragraph('b') + inner)}</w:tr>"
    layout = f"<w:tr>{cell.format(_paragraph('One.') + _paragraph('Two.'))}</w:tr>"
    body = f"<w:tbl>{rows}</w:tbl>{_paragraph('Text')}<w:tbl>{layout}</w:tbl>{_paragraph('End')}"
    expected = "row\ncontrolled\ta b inner\n\nText\n\nOne.\n\nTwo.\n\nEnd"
    assert _read(tmp_path, body) == expected


def test_read_main_part_and_notes_are_found_by_relations(tmp_path: Path) -> None:
    body = "<w:p><w:r><w:t>Online</w:t><w:footnoteReference w:id='2'/></w:r></w:p>"
    note = f"<w:footnote w:id='2'>{_paragraph('Note')}</w:footnote>"
    text = _read(tmp_path, body, main="word/document2.xml", footnotes=note)
    assert text == "Online[1]\n\n[1] Note"


@pytest.mark.parametrize(("value", "expected"), [("", "a"), (" w:val='0'", "ahidden")])
def test_read_hidden_text_is_left_out(tmp_path: Path, value: str, expected: str) -> None:
    run = f"<w:r><w:rPr><w:vanish{value}/></w:rPr><w:t>hidden</w:t></w:r>"
    assert _read(tmp_path, f"<w:p><w:r><w:t>a</w:t></w:r>{run}</w:p>") == expected


def test_read_code_keeps_its_indentation_and_lines(tmp_path: Path) -> None:
    styles = "<w:style w:styleId='C1'><w:name w:val='HTML Preformatted'/></w:style>"
    body = (
        _paragraph("Some  prose.")
        + _paragraph("x = 1", "C1")
        + _paragraph("if x:", "C1")
        + _paragraph("    y  =  2", "C1")
        + _paragraph("", "C1")
        + _paragraph("z = 3", "C1")
        + _paragraph("Typed:")
        + _paragraph("    by  hand")
        + "<w:p><w:r><w:tab/><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r></w:p>"
        + _paragraph("End")
    )
    expected = (
        "Some prose.\n\nx = 1\nif x:\n    y  =  2\n\nz = 3\n\nTyped:\n    by hand\n\ta b\n\nEnd"
    )
    assert _read(tmp_path, body, styles=styles) == expected


def test_read_numbers_of_lists_follow_their_definition(tmp_path: Path) -> None:
    level = (
        "<w:lvl w:ilvl='{}'><w:start w:val='{}'/><w:numFmt w:val='{}'/>"
        "<w:lvlText w:val='{}'/></w:lvl>"
    )
    numbered = level.format(0, 1, "decimal", "%1.") + level.format(1, 1, "lowerLetter", "%1%2)")
    bullets = level.format(0, 1, "bullet", "&#xF0B7;")
    none = level.format(0, 1, "none", "%1")
    later = level.format(0, 3, "upperRoman", "Part %1:")
    lists = enumerate((numbered, bullets, later, none), start=1)
    numbering = "".join(
        f"<w:abstractNum w:abstractNumId='{n}'>{levels}</w:abstractNum>"
        f"<w:num w:numId='{n}'><w:abstractNumId w:val='{n}'/></w:num>"
        for n, levels in lists
    )
    numbering += (
        "<w:num w:numId='9'><w:abstractNumId w:val='1'/><w:lvlOverride w:ilvl='0'>"
        "<w:startOverride w:val='1'/></w:lvlOverride></w:num>"
    )
    styles = (
        "<w:style w:styleId='P'><w:name w:val='Part'/><w:pPr><w:numPr><w:numId w:val='3'/>"
        "</w:numPr></w:pPr></w:style>"
    )
    items = [
        ("a", "0 1"),
        ("b", "1 1"),
        ("c", "1 1"),
        ("d", "0 1"),
        ("e", "1 1"),
        ("f", "0 2"),
        ("g", "0 4"),
    ]
    body = "".join(_paragraph(text, item=item) for text, item in items)
    body += _paragraph("Text", item="0 0") + _paragraph("h", "P") + _paragraph("i", "P")
    body += _paragraph("j", item="0 9") + _paragraph("k", "P", item="0 0")
    expected = (
        "1. a\n1a) b\n1b) c\n2. d\n2a) e\n- f\n\ng\n\nText\n\nPart III: h\nPart IV: i\n1. j\n\nk"
    )
    assert _read(tmp_path, body, styles=styles, numbering=numbering) == expected
