"""OpenDocument texts as LibreOffice and pandoc write them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from firstlight.data.formats import odt

_SPACES = " ".join(
    f'xmlns:{name}="urn:{name}"' for name in ("office", "text", "table", "style", "draw", "xlink")
)


def _read(folder: Path, body: str, styles: str = "", **parts: str) -> str:
    path = folder / "a.odt"
    with zipfile.ZipFile(path, "w") as archive:
        content = (
            f"<office:document-content {_SPACES}><office:automatic-styles>{styles}"
            f"</office:automatic-styles><office:body>{body}</office:body></office:document-content>"
        )
        archive.writestr("content.xml", content)
        for name, part in parts.items():
            archive.writestr(f"{name}/content.xml", part)
    ((place, text),) = odt.read(path)
    assert place == ""
    return text


def _paragraph(text: str, style: str = "") -> str:
    return f"<text:p text:style-name='{style}'>{text}</text:p>\n  "


def test_read_fields_are_text(tmp_path: Path) -> None:
    fields = (
        "See <text:bookmark-ref>Chapter 4</text:bookmark-ref>,\n   Table "
        "<text:sequence>7</text:sequence>, by <text:author-name>Ann</text:author-name>"
        "<draw:frame>\n <draw:text-box>\n<text:p>Box</text:p>\n </draw:text-box>\n</draw:frame>"
        "<office:annotation><text:p>comment</text:p></office:annotation> end"
    )
    assert _read(tmp_path, _paragraph(fields)) == "See Chapter 4, Table 7, by Ann\n\nBox\n\nend"


def test_read_nested_tables_and_layout_once(tmp_path: Path) -> None:
    def table(*cells: str) -> str:
        row = "".join(f"<table:table-cell>{cell}</table:table-cell>" for cell in cells)
        rows = f"<table:table-header-rows><table:table-row>{row}</table:table-row>"
        return f"<table:table>{rows}</table:table-header-rows></table:table>"

    inner = table(_paragraph("inner"))
    body = table(_paragraph("a"), _paragraph("b") + inner) + table(
        _paragraph("One.") + _paragraph("Two.")
    )
    assert _read(tmp_path, body) == "a\tb inner\n\nOne.\n\nTwo."


def test_read_code_keeps_its_indentation(tmp_path: Path) -> None:
    styles = "<style:style style:name='P4' style:parent-style-name='Preformatted_20_Text'/>"
    body = (
        _paragraph("Code:")
        + _paragraph("if x:", "P4")
        + _paragraph("<text:s text:c='4'/>y  =<text:s/><text:s/>1", "P4")
        + _paragraph("", "P4")
        + _paragraph("<text:s text:c='2'/>z", "P4")
        + _paragraph("End")
    )
    assert _read(tmp_path, body, styles) == "Code:\n\nif x:\n    y =  1\n\n  z\n\nEnd"


def test_read_numbers_of_lists_follow_their_definition(tmp_path: Path) -> None:
    styles = (
        "<text:list-style style:name='L1'>"
        "<text:list-level-style-number text:level='1' style:num-format='1' style:num-suffix='.'/>"
        "<text:list-level-style-number text:level='2' style:num-format='a' style:num-suffix=')' "
        "text:start-value='2'/></text:list-style>"
        "<text:list-style style:name='L2'><text:list-level-style-bullet text:level='1'/>"
        "</text:list-style>"
    )

    def items(*contents: str, more: str = "text:style-name='L1'") -> str:
        inner = "".join(f"<text:list-item>{content}</text:list-item>" for content in contents)
        return f"<text:list {more}>{inner}</text:list>"

    a, b, c, d = (_paragraph(letter) for letter in "abcd")
    body = items(a, b + items(c, d, more=""), d) + _paragraph("Text")
    body += items(a, more="text:style-name='L1' text:continue-numbering='true'")
    body += items(a, more="text:style-name='L1' text:continue-list='x'")
    body += items(a) + items(a, more="text:style-name='L2'")
    expected = "1. a\n2. b\nb) c\nc) d\n3. d\n\nText\n\n4. a\n\n5. a\n\n1. a\n\n- a"
    assert _read(tmp_path, body, styles) == expected


def test_read_formula_as_it_was_written(tmp_path: Path) -> None:
    frame = "<draw:frame><draw:object xlink:href='./Object 1'/></draw:frame>"
    formula = (
        "<math xmlns='m'><semantics><mi>E</mi><annotation>E = m c^2</annotation></semantics></math>"
    )
    text = _read(tmp_path, _paragraph(f"So {frame}."), **{"Object 1": formula})
    assert text == "So E = m c^2."
