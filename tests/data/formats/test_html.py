"""The text of web pages as other programs write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.data.formats import UnreadableDocument, html

#: A paragraph that is longer than a menu, a search form or a notice.
LONG = "This is a paragraph about the sea, the wind and the mountains behind the town. " * 5
TEXT = LONG.strip()
#: Text that is long enough for its encoding to be detected.
RUSSIAN = (
    "Анна живёт в Москве, а Борис переехал в Новосибирск. Каждую весну они встречаются в Казани: "
    "Анна едет поездом, Борис летит самолётом. Однажды Борис опоздал, потому что в Омске шёл снег. "
    "«Ничего страшного», — сказала Анна. — «Мы пойдём в театр завтра». Вечером Дмитрий и Елена "
    "пригласили их на ужин. Говорили о книгах Толстого и Чехова, о Волге и о детях."
)


def read(folder: Path, content: str | bytes) -> str:
    path = folder / "a.html"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    ((place, text),) = html.read(path)
    assert place == ""
    return text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(
            f"<form id='aspnetForm'><h1>News</h1><p>{LONG}</p></form>",
            f"News\n\n{TEXT}",
            id="page-in-a-form",
        ),
        pytest.param(
            f"<p>{LONG}</p><form>Search: <input name=q></form>", TEXT, id="search-in-a-form"
        ),
        pytest.param(
            f"<div class='site has-sidebar'><p>{LONG}</p></div><div>Imprint</div>",
            f"{TEXT}\n\nImprint",
            id="class-of-the-page-names-its-sidebar",
        ),
        pytest.param(
            f"<p>{LONG}</p><section id='related-work'><p>Related work</p></section>",
            f"{TEXT}\n\nRelated work",
            id="chapter-with-the-name-of-a-menu",
        ),
        pytest.param(
            f"<p>{LONG}</p><div class='related posts'><a>One</a> <a>Two</a></div>",
            TEXT,
            id="menu-with-its-name",
        ),
        pytest.param(
            f"<p>Top</p><article>First {LONG}</article><article>Second {LONG}</article>",
            f"Top\n\nFirst {TEXT}\n\nSecond {TEXT}",
            id="several-articles",
        ),
        pytest.param(
            f"<nav>Home</nav><p>Around</p><main><article>One {LONG}</article>Two</main>",
            f"One {TEXT}\n\nTwo",
            id="main-part",
        ),
        pytest.param(
            f"<header><h1>The title</h1><p>By me</p></header><p>{LONG}</p>",
            f"The title\n\nBy me\n\n{TEXT}",
            id="title-in-a-header",
        ),
        pytest.param(
            f"<header><p>The best shop</p><h1>A</h1></header><p>{LONG}</p>", TEXT, id="header"
        ),
    ],
)
def test_text_of_a_page_is_read_whatever_its_elements_are_called(
    tmp_path: Path, content: str, expected: str
) -> None:
    assert read(tmp_path, f"<html><body>{content}</body></html>") == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "<p>A <img src=a.png> and <o:p>an</o:p> unknown <x-y>one</x-y></p>",
            "A and an unknown one",
        ),
        (
            "<p>これは<ruby><rb>漢字</rb><rp>（</rp><rt>かんじ</rt><rp>）</rp></ruby>です</p>",
            "これは漢字です",
        ),
        (
            "<p>Let <math><mi>x</mi><mo>+</mo><msup><mi>y</mi><mn>2</mn></msup></math>.</p>",
            "Let x+y2.",
        ),
        ("<p>a wo\xadrd, bro<wbr>ken and ze\u200bro</p>", "a word, broken and zero"),
        ("<pre>def f():<br>  pass<br><b>end</b></pre>", "def f():\n  pass\nend"),
        ("<ol><li>a<li>b<ol><li>c</ol><li>d</ol>x", "1. a\n2. b\n1. c\n3. d\n\nx"),
        ("<p>a<font>" * 300, "\n\n".join("a" * 300)),
        (f"<table><tr><td><p>A</p><p>{LONG}</p></table>", f"A\n\n{TEXT}"),
        (f"<table><tr><td><p>A</p><p>{LONG}</p><td>B</table>", f"A\n\n{TEXT}\n\nB"),
        (
            "<table><caption>T</caption><tr><td>a<td><p>b</p>c<tr><td>1<td>2</table>",
            "T\n\na\tb c\n1\t2",
        ),
    ],
)
def test_parts_of_a_page_are_lines_and_paragraphs_as_shown(
    tmp_path: Path, content: str, expected: str
) -> None:
    assert read(tmp_path, f"<meta charset=utf-8>{content}") == expected


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("gb2312", "gbk", "作者是朱镕基"),
        ("Shift_JIS", "cp932", "①②③ 髙橋さん"),
        ("iso-8859-1", "cp1252", "“Smart quotes” – it’s common…"),
        ("iso-8859-1", "utf-8", "Größe und Maß"),
        ("utf-16", "utf-8", "Größe und Maß"),
        ("unknown-8bit", "utf-8", "Größe und Maß"),
        ("utf-8", "cp1252", "Größe und Maß"),
        ("koi8-r", "koi8-r", "Это текст"),
        (None, "utf-16", "Größe und Maß"),
        (None, "cp1252", "Die Größe und das Maß der Dinge"),
        (None, "cp1251", RUSSIAN),
    ],
)
def test_page_with_wrong_or_missing_encoding_is_read_like_in_a_browser(
    tmp_path: Path, declared: str | None, encoding: str, text: str
) -> None:
    meta = f'<meta charset="{declared}">' if declared else ""
    content = f"<html><head>{meta}</head><body><p>{text}</p></body></html>"
    assert read(tmp_path, content.encode(encoding)) == text.strip()


def test_page_with_few_invalid_bytes_keeps_its_encoding(tmp_path: Path) -> None:
    content = "<meta charset=utf-8><p>Größe, Maß, naïve Straße</p>".encode() + b"<p>bad \xff</p>"
    assert read(tmp_path, content) == "Größe, Maß, naïve Straße\n\nbad \ufffd"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3", "it is a PDF document"),
        ("<p>коротко</p>".encode("cp1251"), "its encoding is unknown: convert it to UTF-8"),
    ],
)
def test_file_that_is_not_a_readable_page_is_left_out(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(UnreadableDocument, match=reason):
        read(tmp_path, content)
