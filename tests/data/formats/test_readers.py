"""The text of web pages, books, office documents, notebooks and PDFs."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from pypdfium2.raw import FS_RECTF

from firstlight.data.formats import UnreadableDocument, docx, epub, html, notebook, odt, pdf, rtf

_WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_ODF = 'xmlns:o="urn:office" xmlns:t="urn:text" xmlns:b="urn:table"'

#: Text that is not joined with the next chapter of a book.
_LONG = " ".join(["of a chapter"] * 8)


def package(path: Path, **files: str) -> Path:
    """Write a ZIP package. `__` in a name stands for a slash, and `_` for a point."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return path


def page(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def write_pdf(
    path: Path,
    pages: Sequence[str | list[tuple[int, int, str]]],
    font: str = "",
    encrypt: str = "",
) -> Path:
    """Write a PDF. Each page is a list of (x, y, text) in points, or the code that draws it; the
    font has 10 points."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        font or "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, lines in enumerate(pages):
        if isinstance(lines, str):
            drawn = lines
        else:
            drawn = "".join(f"BT /F 10 Tf {x} {y} Td ({text}) Tj ET\n" for x, y, text in lines)
        objects += [
            "<</Type/Page/Parent 2 0 R/MediaBox[0 0 400 600]/Resources<</Font<</F 3 0 R>>>>"
            f"/Contents {5 + 2 * number} 0 R>>",
            f"<</Length {len(drawn)}>>stream\n{drawn}endstream",
        ]
    content, offsets = "%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        offsets.append(len(content))
        content += f"{number} 0 obj\n{one}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    content += f"xref\n0 {size}\n0000000000 65535 f \n{table}"
    content += (
        f"trailer<</Size {size}/Root 1 0 R{encrypt}>>\nstartxref\n{content.index('xref')}\n%%EOF"
    )
    path.write_bytes(content.encode("latin-1"))
    return path


# Web pages


def test_web_page_has_text_without_menus_scripts_and_notices(tmp_path: Path) -> None:
    links = "".join(f'<li><a href="#">Entry {number}</a></li>' for number in range(5))
    content = (
        f"<html><head><title>t</title><script>x()</script></head><body><nav>Home</nav>"
        f'<ul>{links}</ul><div class="cookie-banner">Accept all</div><header>Site</header>'
        "<h1>A  heading</h1>\n<p>One\nparagraph with <b>bold</b>&nbsp;text.<br>A line.</p>"
        "<ol><li>first</li><li>second</li></ol><table><tr><th>a</th><td>b <p>c</p></td></tr>"
        "<tr><td>1</td><td>2</td></tr></table><pre>x = 1\n  y</pre><p hidden>secret</p>"
        '<p style="display: none">secret</p><footer>Imprint</footer></body></html>'
    )
    expected = (
        "A heading\n\nOne paragraph with bold text.\nA line.\n\n1. first\n2. second\n\n"
        "a\tb c\n1\t2\n\nx = 1\n  y"
    )
    assert list(html.read(page(tmp_path / "a.html", content))) == [("", expected)]


def test_web_page_footnotes_have_numbers_in_brackets(tmp_path: Path) -> None:
    content = (
        '<p>Text.<a href="#f"><sup>1</sup></a> A <a href="#b">link</a>, <a href="/b">2</a></p>'
        '<p>1. A note. <a href="#t">↩︎</a></p>'
    )
    [(_, text)] = html.read(page(tmp_path / "a.html", content))
    assert text == "Text.[1] A link, 2\n\n1. A note."


def test_web_page_main_element_is_read_alone(tmp_path: Path) -> None:
    content = "<body><div>Around</div><main><header>Title</header><p>Inside it.</p></main></body>"
    assert list(html.read(page(tmp_path / "a.html", content))) == [("", "Title\n\nInside it.")]


@pytest.mark.parametrize(
    "content",
    [
        b'<meta charset="windows-1251"><p>' + "Привет".encode("cp1251"),
        "<p>Привет".encode(),
        "<p>Привет".encode("utf-16"),
        '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><title/><p>'
        "Привет</p></html>".encode(),
    ],
)
def test_web_page_encoding_is_detected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.html").write_bytes(content)
    assert list(html.read(tmp_path / "a.html")) == [("", "Привет")]


def test_web_page_without_text_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match="loaded by a script: save it in a browser"):
        list(html.read(page(tmp_path / "a.html", "<body><script>load()</script></body>")))


# Books and office documents


def test_epub_chapters_come_in_order_of_the_spine(tmp_path: Path) -> None:
    book = package(
        tmp_path / "a.epub",
        **{
            "META-INF__container_xml": '<c><rootfile full-path="in/b.opf"/></c>',
            "in__b_opf": '<p><item id="n" href="n.xhtml" properties="nav"/>'
            '<item id="x" href="x%20y.xhtml"/><item id="z" href="z.xhtml"/>'
            '<itemref idref="n"/><itemref idref="z"/><itemref idref="x"/></p>',
            "in__n_xhtml": "<body><p>Contents</p></body>",
            "in__x y_xhtml": f"<body><p>The&nbsp;end {_LONG}</p></body>",
            "in__z_xhtml": f"<html><head><title/></head><body><p>Start {_LONG}</p></body></html>",
        },
    )
    expected = [("chapter 1", f"Start {_LONG}"), ("chapter 2", f"The end {_LONG}")]
    assert list(epub.read(book)) == expected


def test_encrypted_epub_is_unreadable(tmp_path: Path) -> None:
    book = package(
        tmp_path / "a.epub",
        **{
            "META-INF__container_xml": '<c><rootfile full-path="b.opf"/></c>',
            "META-INF__encryption_xml": '<e><CipherReference URI="x.xhtml"/></e>',
            "b_opf": '<p><item id="x" href="x.xhtml"/><itemref idref="x"/></p>',
            "x_xhtml": "<p>nonsense</p>",
        },
    )
    with pytest.raises(UnreadableDocument, match=r"it is encrypted \(DRM\)"):
        list(epub.read(book))


def test_word_document_has_tables_as_lines_and_footnotes_once(tmp_path: Path) -> None:
    run = "<w:r><w:t>{}</w:t></w:r>"
    item = "<w:pPr><w:numPr><w:numId w:val='1'/></w:numPr></w:pPr>"
    cell = "<w:tc><w:p>" + run + "</w:p></w:tc>"
    body = (
        f"<w:p>{run.format('Text')}<w:r><w:footnoteReference w:id='7'/></w:r>"
        f"<w:del>{run.format('deleted')}</w:del><w:ins>{run.format(' added')}</w:ins></w:p>"
        f"<w:p>{item}{run.format('one')}</w:p>"
        f"<w:p>{item}{run.format('two')}</w:p>"
        f"<w:tbl><w:tr>{cell.format('a')}{cell.format('b')}</w:tr></w:tbl>"
        f"<w:p>{run.format('End')}<w:r><w:br/><w:t>of it</w:t></w:r></w:p>"
    )
    document = package(
        tmp_path / "a.docx",
        word__document_xml=f"<w:document {_WORD}><w:body>{body}</w:body></w:document>",
        word__footnotes_xml=f"<w:f {_WORD}><w:footnote w:id='7'><w:p>{run.format('Note')}</w:p>"
        f"</w:footnote><w:footnote w:id='8'><w:p>{run.format('unused')}</w:p></w:footnote></w:f>",
    )
    expected = "Text[1] added\n\n- one\n- two\n\na\tb\n\nEnd\nof it\n\n[1] Note"
    assert list(docx.read(document)) == [("", expected)]


def test_opendocument_text_has_tables_as_lines_and_footnotes_once(tmp_path: Path) -> None:
    note = "<t:note><t:note-citation>1</t:note-citation><t:note-body><t:p>Note</t:p></t:note-body>"
    body = (
        "<t:tracked-changes><t:p>deleted</t:p></t:tracked-changes><t:h>Head</t:h>"
        f"<t:p>Text{note}</t:note><t:s/><t:span>with<t:tab/>more</t:span><t:line-break/>end</t:p>"
        "<t:list><t:list-item><t:p>one</t:p></t:list-item><t:list-item><t:p>two</t:p>"
        "</t:list-item></t:list><b:table><b:table-row><b:table-cell><t:p>a</t:p></b:table-cell>"
        "<b:table-cell><t:p>b</t:p></b:table-cell></b:table-row></b:table>"
    )
    document = package(tmp_path / "a.odt", content_xml=f"<o:c {_ODF}><o:body>{body}</o:body></o:c>")
    expected = "Head\n\nText[1] with more\nend\n\n- one\n- two\n\na\tb\n\n[1] Note"
    assert list(odt.read(document)) == [("", expected)]


def test_entities_of_xml_are_not_resolved(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    declared = f'<!DOCTYPE d [<!ENTITY x SYSTEM "file://{tmp_path}/secret">]>'
    text = f"{declared}<w:d {_WORD}><w:p><w:r><w:t>Before &x;</w:t></w:r></w:p></w:d>"
    document = package(tmp_path / "a.docx", word__document_xml=text)
    assert list(docx.read(document)) == [("", "Before")]


def test_office_document_that_is_not_a_package_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(100))
    with pytest.raises(UnreadableDocument, match=r"it is encrypted: save it without a password"):
        list(docx.read(path))
    path.write_bytes(b"PK and nothing else")
    with pytest.raises(UnreadableDocument, match="it is damaged: replace it"):
        list(docx.read(path))


def test_rich_text_is_decoded(tmp_path: Path) -> None:
    content = r"{\rtf1\ansi\ansicpg1251 {\b Bold} text \'cf\u1088?.\par Second}"
    text = page(tmp_path / "a.rtf", content)
    assert list(rtf.read(text)) == [("", "Bold text Пр.\n\nSecond")]
    with pytest.raises(UnreadableDocument, match="not in rich text format"):
        list(rtf.read(page(tmp_path / "b.rtf", "plain")))


def test_rich_text_footnotes_are_at_the_end(tmp_path: Path) -> None:
    first, second = r"{\*\footnote {\super\chftn} A \{ {\b note}.}", r"{\footnote\pard Two.}"
    content = rf"{{\rtf1 One{first} two{second} three.\par }}"
    [(_, text)] = rtf.read(page(tmp_path / "a.rtf", content))
    assert [line for line in text.splitlines() if line] == [
        "One[1] two[2] three.", "[1] A { note.", "[2] Two.",
    ]  # fmt: skip


def test_notebook_has_text_code_and_printed_results(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": "print(1)",
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"data": {"text/plain": "2", "image/png": "iVBOR"}},
            ],
        },
    ]
    book = page(tmp_path / "a.ipynb", json.dumps({"nbformat": 4, "cells": cells}))
    assert list(notebook.read(book)) == [("", "# Title\ntext\n\nprint(1)\n\n1\n\n2")]
    old = page(
        tmp_path / "b.ipynb",
        json.dumps({"worksheets": [{"cells": [{"input": ["x = 1"], "outputs": []}]}]}),
    )
    assert list(notebook.read(old)) == [("", "x = 1")]


# PDFs


def test_pdf_lines_are_joined_to_paragraphs_and_words(tmp_path: Path) -> None:
    lines = [
        (50, 500, "The first line of a paragraph is as long as the inter-"),
        (50, 488, "nationally known second line of this paragraph, whose"),
        (50, 476, "end is here."),
        (50, 452, "Another paragraph begins here, after a distance."),
    ]
    expected = (
        "The first line of a paragraph is as long as the internationally known second line of this "
        "paragraph, whose end is here.\n\nAnother paragraph begins here, after a distance."
    )
    assert list(pdf.read(write_pdf(tmp_path / "a.pdf", [lines]))) == [("page 1", expected)]


def test_pdf_columns_are_read_one_after_the_other(tmp_path: Path) -> None:
    left = [(40, 500 - 12 * n, text) for n, text in enumerate(("left column is", "as wide as it"))]
    right = [
        (220, 500 - 12 * n, text) for n, text in enumerate(("goes on in the", "right column."))
    ]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [[*left, *right]]))
    assert text == "left column is as wide as it goes on in the right column."


def test_pdf_repeated_headers_and_page_numbers_are_left_out(tmp_path: Path) -> None:
    pages = [
        [
            (50, 570, "The Title of the Book"),
            (50, 500, f"Page {word} has its own paragraph."),
            (50, 488, "It has another line."),
            (50, 476, f"It has a third line, {word}, too."),
            (200, 30, f"- {number} -"),
        ]
        for number, word in enumerate(("one", "two", "three", "four"), start=9)
    ]
    [(place, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", pages))
    assert place == "pages 1 to 4, without 8 headers, footers and page numbers"
    assert "Title" not in text
    assert "- 9 -" not in text
    assert text.count("has its own paragraph.") == 4


def test_pdf_rows_and_forms_that_repeat_are_kept(tmp_path: Path) -> None:
    rows = [(50, 580 - 14 * n, f"{n}1 {n}2 {n}3") for n in range(4)]
    form = [(50, 500 - 14 * n, text) for n, text in enumerate(("Name: A", "Age: 30", "Yes", "No"))]
    pages = [[*rows, *form, (200, 20, f"{number}")] for number in range(4)]
    page = "01 02 03\n11 12 13\n21 22 23\n31 32 33\n\nName: A\nAge: 30\nYes\nNo"
    [(place, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", pages))
    assert place == "pages 1 to 4, without 4 headers, footers and page numbers"
    assert text == "\n\n".join([page] * 4)


def test_pdf_header_next_to_the_text_is_left_out_if_it_is_at_the_edge(tmp_path: Path) -> None:
    pages = [
        [(50, 585, "Header"), (50, 573, f"Text {n} is long enough"), (50, 561, "for two lines.")]
        for n in ("a", "b", "c")
    ]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", pages))
    assert text == "\n\n".join(f"Text {n} is long enough for two lines." for n in "abc")


def test_pdf_table_has_one_line_for_each_row(tmp_path: Path) -> None:
    table = [
        (x, 500 - 14 * row, f"{'abc'[column]} {row}")
        for row in range(3)
        for column, x in enumerate((50, 150, 250))
    ]
    item = [
        (50, 440, "1."),
        (75, 440, "An item of a list, which is not a table, has one"),
        (75, 428, "more line."),
    ]
    expected = (
        "a 0\tb 0\tc 0\na 1\tb 1\tc 1\na 2\tb 2\tc 2\n\n"
        "1. An item of a list, which is not a table, has one more line."
    )
    assert list(pdf.read(write_pdf(tmp_path / "a.pdf", [[*table, *item]]))) == [
        ("page 1", expected)
    ]


def test_pdf_short_paragraphs_are_separated_by_their_distance(tmp_path: Path) -> None:
    """Most distances on the page are those of paragraphs."""
    page, y = [], 580
    for number in range(6):
        page += [
            (50, y, f"{number} is a paragraph of two lines, the first of which is"),
            (50, y - 12, "longer."),
        ]
        page += [(50, y - 36, "A short one."), (50, y - 60, "Another one.")]
        y -= 84
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [page]))
    assert text.split("\n\n") == [
        part
        for number in range(6)
        for part in (
            f"{number} is a paragraph of two lines, the first of which is longer.",
            "A short one.",
            "Another one.",
        )
    ]


def test_pdf_hyphen_is_kept_if_the_document_divides_no_words(tmp_path: Path) -> None:
    line = "a line in which no program divided any of the words it has"
    lines = [
        *[line] * 40,
        "The mailing list for this is at the following address: debian-",
        "admin@lists.debian.org, which is read by everybody, and so-",
        "called users of it.",
    ]
    page = [(20, 590 - 13 * n, text) for n, text in enumerate(lines)]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [page[:40], page]))
    assert (
        "address: debian-admin@lists.debian.org, which is read by everybody, and so-called" in text
    )


def test_pdf_line_end_that_pdfium_misses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """PDFium gives such lines for justified text that a browser printed."""
    boxes = {0: (300, 500), 7: (50, 470), 12: (80, 473)}

    def box(page: object, index: int) -> FS_RECTF:
        left, bottom = boxes[max(start for start in boxes if start <= index)]
        return FS_RECTF(left + 5 * index, bottom + 10, left + 5 * index + 5, bottom)

    monkeypatch.setattr(pdf, "_box", box)
    pieces = [piece[0] for piece in pdf._pieces(None, "in line Next 2nd\r\nx")]
    assert pieces == ["in line", "Next 2nd", "x"]


def test_pdf_words_of_another_font_are_moved_to_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "one two < >."
    lefts = {"one": 50, "two": 75, "<": 70, ">.": 90}
    places = {
        match.start() + offset: left + 5 * offset
        for match in re.finditer("[^ ]+", text)
        for left in [lefts[match[0]]]
        for offset in range(len(match[0]))
    }

    def box(page: object, index: int) -> FS_RECTF:
        return FS_RECTF(places[index], 10, places[index] + 5, 0)

    monkeypatch.setattr(pdf, "_box", box)
    [line] = re.finditer(".+", text)
    assert pdf._with_columns(None, line, 10.0) == "one <two>."


def test_pdf_hyphens_of_divided_words_addresses_and_dashes_are_told_apart(tmp_path: Path) -> None:
    lines = [
        "A hyphen at the end of a line can divide a word as in inter-",
        "nationally, be a part of the addresses of mail, as in debian-",
        "admin@lists.debian.org, or be a dash with a space before it -",
        "which is kept.",
    ]
    page = [(50, 500 - 12 * n, line) for n, line in enumerate(lines)]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [page]))
    assert text == (
        "A hyphen at the end of a line can divide a word as in internationally, be a part of the "
        "addresses of mail, as in debian-admin@lists.debian.org, or be a dash with a space before "
        "it - which is kept."
    )


def test_pdf_with_mostly_empty_pages_is_unreadable(tmp_path: Path) -> None:
    document = write_pdf(tmp_path / "a.pdf", [[(50, 500, "Terms of use")], [], []])
    with pytest.raises(UnreadableDocument) as caught:
        list(pdf.read(document))
    assert str(caught.value) == (
        "2 of its 3 pages are images without text: recognise them with ocrmypdf --skip-text IN OUT"
    )


def test_pdf_images_without_text_are_counted(tmp_path: Path) -> None:
    image = "q 100 0 0 100 50 50 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x00 EI Q\n"
    pages = [[(50, 500, f"Text {number}")] for number in range(4)] + [image] * 3
    [(place, text), problem] = pdf.read(write_pdf(tmp_path / "a.pdf", pages))
    assert (place, text) == ("pages 1 to 7", "Text 0\n\nText 1\n\nText 2\n\nText 3")
    advice = "recognise them with ocrmypdf --skip-text IN OUT"
    assert problem == (f"3 of its pages are images without text: {advice}", "")


def test_pdf_without_text_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match=r"images without text: .* ocrmypdf IN OUT"):
        list(pdf.read(write_pdf(tmp_path / "a.pdf", [[]])))


def test_damaged_pdf_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match=r"it is damaged .*: replace it"):
        list(pdf.read(page(tmp_path / "a.pdf", "%PDF-1.4 nothing")))


def test_pdf_whose_font_has_no_map_is_unreadable(tmp_path: Path) -> None:
    font = (
        "<</Type/Font/Subtype/Type0/BaseFont/X/Encoding/Identity-H/DescendantFonts[<</Type/Font"
        "/Subtype/CIDFontType2/BaseFont/X/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)"
        "/Supplement 0>>>>]>>"
    )
    document = write_pdf(tmp_path / "a.pdf", [[(50, 500, "some text in it")]], font)
    with pytest.raises(UnreadableDocument, match=r"do not state which letters .* --force-ocr"):
        list(pdf.read(document))


def test_encrypted_pdf_is_unreadable(tmp_path: Path) -> None:
    key = "0" * 64
    encrypt = f"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<{key}>/U<{key}>>>/ID[<00><00>]"
    document = write_pdf(tmp_path / "a.pdf", [[(50, 500, "text")]], encrypt=encrypt)
    with pytest.raises(UnreadableDocument, match=r"it is encrypted: .* qpdf --decrypt"):
        list(pdf.read(document))


def test_pdf_text_from_right_to_left_is_read_by_position(tmp_path: Path) -> None:
    # A to D are the letters of "سلام", E is a mark above a letter, F a question mark,
    # G and H parentheses, which are stored as they are drawn.
    names = "/uni0633 /uni0644 /uni0627 /uni0645 /afii57451 /afii57407 /parenleft /parenright"
    font = (
        "<</Type/Font/Subtype/TrueType/BaseFont/Helvetica/FirstChar 65/LastChar 72"
        f"/Widths[500 500 500 500 0 500 500 500]/Encoding<</Differences[65 {names}]>>>>"
    )
    # The left half of the second line comes before the first line.
    lines = [(140, 482, "FABED"), (200, 500, "DCBA"), (174, 482, "GDCBAH")]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [lines], font))
    assert text == "سلام (سلام) ملًس؟"


#: A font with Chinese characters.
SONG = (
    "<</Type/Font/Subtype/Type0/BaseFont/STSong-Light/Encoding/UniGB-UCS2-H/DescendantFonts["
    "<</Type/Font/Subtype/CIDFontType0/BaseFont/STSong-Light/DW 1000/W[1[500] 34[500 500]]"
    "/CIDSystemInfo<</Registry(Adobe)/Ordering(GB1)/Supplement 2>>>>]>>"
)


def test_pdf_chinese_text_has_no_spaces_of_justified_lines_and_whole_words(tmp_path: Path) -> None:
    lines = [
        (50, 500, "中文"), (73, 500, "中文"), (105, 500, "中文"), (125, 500, "Debia"),
        (50, 488, "n中文中文"), (50, 400, "Debian"),
    ]  # fmt: skip
    coded = [(x, y, text.encode("utf-16-be").decode("latin-1")) for x, y, text in lines]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [coded], SONG))
    assert text == "中文中文 中文Debian中文中文\n\nDebian"


def test_pdf_lines_of_scripts_without_capitals_are_no_verse(tmp_path: Path) -> None:
    lines: list[tuple[int, int, str]] = []
    for number in range(1, 8):
        lines.append((50, 560 - 36 * number, f"{number}中文中文中文"))
        lines += [(50, 548 - 36 * number, "中文")] if number < 5 else []
    coded = [(x, y, text.encode("utf-16-be").decode("latin-1")) for x, y, text in lines]
    [(_, text)] = pdf.read(write_pdf(tmp_path / "a.pdf", [coded], SONG))
    assert text.split("\n\n") == [
        f"{number}中文中文中文{'中文' if number < 5 else ''}" for number in range(1, 8)
    ]
