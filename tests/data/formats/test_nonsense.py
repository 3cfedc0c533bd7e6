"""Text whose characters are not those that its author wrote."""

from __future__ import annotations

import base64
import codecs
import random
from pathlib import Path

import pytest

from firstlight.data.formats import reading
from firstlight.data.formats.nonsense import nonsense_in

_ROOT = Path(__file__).parents[3]
_ENGLISH = (
    "When the ship left the harbour in the early morning, nobody on board expected that the "
    "journey would take longer than a week. The captain had sailed this route many times, and "
    "his crew knew every island, every current and each of the small villages along the coast. "
    "They carried timber, salt and two old printing presses, which a school had ordered."
)
_TEXTS = {
    "Finnish": "Kun laiva lähti satamasta varhain aamulla, kukaan ei odottanut, että matka "
    "kestäisi yli viikon. Kapteeni oli purjehtinut tämän reitin monta kertaa, ja hänen miehistönsä "
    "tunsi jokaisen saaren, jokaisen virran ja kaikki pienet kylät rannikon varrella. He "
    "kuljettivat puutavaraa, suolaa ja kahta vanhaa painokonetta.",
    "Vietnamese": "Khi con tàu rời bến cảng vào sáng sớm, không ai trên tàu nghĩ rằng chuyến đi sẽ "
    "kéo dài hơn một tuần. Thuyền trưởng đã đi tuyến đường này nhiều lần, và thủy thủ đoàn của ông "
    "biết rõ từng hòn đảo, từng dòng hải lưu và mỗi ngôi làng nhỏ dọc bờ biển.",
    "Russian": "Когда корабль ранним утром вышел из гавани, никто на борту не ожидал, что "
    "путешествие продлится больше недели. Капитан много раз ходил этим путём, и его команда знала "
    "каждый остров, каждое течение и все маленькие деревни вдоль побережья.",
    "Greek": "Όταν το πλοίο άφησε το λιμάνι νωρίς το πρωί, κανείς δεν περίμενε ότι το ταξίδι θα "
    "διαρκούσε περισσότερο από μία εβδομάδα. Ο καπετάνιος είχε κάνει πολλές φορές το ίδιο.",
    "Swahili": "Meli ilipoondoka bandarini asubuhi na mapema, hakuna mtu aliyetarajia kwamba "
    "safari ingechukua zaidi ya wiki moja. Nahodha alikuwa amesafiri njia hii mara nyingi, na "
    "mabaharia wake walijua kila kisiwa, kila mkondo na vijiji vyote vidogo vya pwani.",
    "Thai": "เมื่อเรือออกจากท่าในตอนเช้าตรู่ ไม่มีใครคาดคิดว่าการเดินทางจะใช้เวลานานกว่าหนึ่งสัปดาห์",
    "Chinese": "清晨，船离开港口的时候，船上没有人想到这次航行会超过一个星期。",
    "base64": base64.encodebytes(random.Random(0).randbytes(6000)).decode(),
    "DNA": "".join(random.Random(0).choices("ACGT", k=4000)),
    "numbers": "\n".join(f"{n}\t{n * n}\t{n / 7:.4f}" for n in range(300)),
    "names": "Nguyễn Văn Út, Müller, Krzyżanowski, Ó Súilleabháin, Þórbjörn, Škvrňák, Ng, Hrdlička",
    "modes of a terminal": "cooked sane cread -ignbrk brkint -inlcr -igncr icrnl icanon iexten "
    "echo echoe echok -echonl -noflsh",
    "Gaelic": "seachdain bhliadhna bliadhnaichean bliadhna naoidh an-dràsta aon mh na seachd sia "
    "trì an-diugh a-màireach dà an-dè",
    "a page about encodings": _ENGLISH + " Für, Öl, für, größer, süß, Äpfel, Ähre, dünn, schön, "
    "Maß, fünf: decoded wrongly, ü becomes Ã¼, ä becomes Ã¤, and ö becomes Ã¶ and é Ã©.",
}
_SHIFTED = "".join(chr(ord(c) + 1) if c.isalpha() else c for c in _ENGLISH)
_REPLACED = ("its letters were replaced by others (", "--force-ocr IN OUT")


@pytest.mark.parametrize("name", _TEXTS)
def test_text_of_any_kind_is_not_nonsense(name: str) -> None:
    assert nonsense_in(_TEXTS[name]) == ""
    assert nonsense_in(_ENGLISH + "\n" + _TEXTS[name]) == ""


def test_documentation_and_code_are_not_nonsense() -> None:
    paths = [*_ROOT.glob("docs/**/*.md"), *_ROOT.glob("src/**/*.py")]
    assert len(paths) > 200
    assert [path for path in paths if nonsense_in(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("shift", [1, 2, 3, -29, -31])
def test_text_of_font_with_shifted_letters_is_nonsense(shift: int) -> None:
    text = "".join(chr(ord(c) + shift) if c.isalpha() else c for c in _ENGLISH)
    found = nonsense_in(text)
    assert found.startswith(_REPLACED[0])
    assert repr(" ".join(text.split())[:20].strip()) in found
    assert found.endswith(_REPLACED[1])


def test_text_in_other_alphabet_with_replaced_letters_is_nonsense() -> None:
    russian = "".join(chr(ord(c) + 1) if c.isalpha() else c for c in _TEXTS["Russian"])
    assert nonsense_in(russian).startswith(_REPLACED[0])


@pytest.mark.parametrize(
    ("text", "encoding", "decoded"),
    [
        ("Öl für die Tür und Äpfel", "utf-8", "cp1252"),
        ("I don’t “quote” what isn’t his", "utf-8", "latin-1"),
        ("Когда корабль вышел", "utf-8", "latin-1"),
        ("Öl für die Tür und Äpfel", "latin-1", "utf-8"),
        (_TEXTS["Russian"], "cp1251", "cp1252"),
        (_TEXTS["Chinese"] * 3, "gb18030", "cp1252"),
    ],
)
def test_text_in_wrong_encoding_is_nonsense(text: str, encoding: str, decoded: str) -> None:
    garbled = codecs.decode(text.encode(encoding), decoded, "replace")
    assert nonsense_in(garbled).startswith("its encoding was not recognised ('")
    assert nonsense_in(text) == ""


def test_characters_that_are_not_text_are_nonsense() -> None:
    private = "".join(chr(0xF000 + ord(c)) if c in "aeiou" else c for c in _ENGLISH)
    share = sum(c in "aeiou" for c in _ENGLISH) / len(_ENGLISH.replace(" ", ""))
    assert nonsense_in(private).startswith(f"{share:.0%} of its characters are not text: export")
    bullets = _ENGLISH.replace(",", " \uf0b7").replace(".", " \uf0b7")
    assert bullets.count("\uf0b7") > 4
    assert nonsense_in(bullets) == ""


def test_few_strange_words_in_another_script_are_not_nonsense() -> None:
    assert nonsense_in(_TEXTS["Chinese"] * 20 + _SHIFTED) == ""


def test_document_of_nonsense_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text(f"<p>{_ENGLISH}</p>")
    bad.write_text(f"<p>{_SHIFTED}</p>")
    [line] = reading.read_all([good, bad])
    problem = line.removeprefix(f"read 1 web page; left out 1: {bad}: ")
    assert problem.startswith("its letters were replaced by others ('Xifo uif tijq mfgu u'): ")
    assert list(reading.documents_in(good)) == [("", _ENGLISH, "")]
    assert list(reading.documents_in(bad)) == [("", "", problem)]


def test_part_of_nonsense_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    mails = tmp_path / "mails.mbox"
    with mails.open("w") as file:
        for text in (_ENGLISH, _SHIFTED):
            file.write(f"From a@b.c Mon Jan  1 00:00:00 2024\nSubject: s\n\n{text}\n\n")
    (_, text, _), (_, empty, problem) = reading.documents_in(mails)
    assert _ENGLISH in text
    assert empty == ""
    assert problem.startswith("message 2: its letters were replaced by others ('")
