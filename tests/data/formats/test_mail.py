"""Tests of `data.formats.mail` with mails as Thunderbird, Gmail and Outlook write them."""

from __future__ import annotations

import os
import sys
from email.message import EmailMessage
from pathlib import Path

import pytest

from firstlight.data.formats import UnreadableDocument, mail
from firstlight.data.formats.mail import is_mail, read
from firstlight.data.formats.registry import format_of
from firstlight.errors import MissingDependencyError

_FIRST = """\
From ann@example.org Mon Mar  1 10:00:00 2021
From: Ann <ann@example.org>
To: Bob <bob@example.org>
Date: Mon, 1 Mar 2021 10:00:00 +0000
Subject: =?utf-8?q?Caf=C3=A9?=
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

The caf=E9 opens at nine. Shall we meet there tomorrow, or is the week after bett=
er for you?

>From there we can walk.

--
Ann
Example Street 1
""".replace("--\n", "-- \n")
_REPLY = """\
From bob@example.org Tue Mar  2 10:00:00 2021
From: Bob <bob@example.org>
To: Ann <ann@example.org>
Date: Tue, 2 Mar 2021 10:00:00 +0000
Subject: Re: Caf

Tomorrow is fine.

On Mon, 1 Mar 2021 at 10:00, Ann <ann@example.org>
wrote:
> The café opens at nine. Shall we meet there
> tomorrow, or is the week after better
> for you?
>
> From there we can walk.

See you,
Bob
"""
_LAST = """\
From ann@example.org Wed Mar  3 10:00:00 2021
From: Ann <ann@example.org>
Date: Wed, 3 Mar 2021 10:00:00 +0000
Subject: Poem

Carl sent me this:

> A line that nobody sent before.

--
Ann
Example Street 1
""".replace("--\n", "-- \n")


def _read(path: Path, content: str | bytes) -> list[tuple[str, str]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read(path))


def test_read_mbox_keeps_quotations_and_signatures_once_in_order_of_dates(tmp_path: Path) -> None:
    found = _read(tmp_path / "a.mbox", "\n".join([_LAST, _REPLY, _FIRST]))
    assert found == [
        (
            "message 3, 2021-03-01",
            "From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\n"
            "Date: Mon, 01 Mar 2021 10:00:00 +0000\nSubject: Café\n\n"
            "The café opens at nine. Shall we meet there tomorrow, or is the week after better for "
            "you?\n\nFrom there we can walk.\n\n-- \nAnn\nExample Street 1",
        ),
        (
            "message 2, 2021-03-02",
            "From: Bob <bob@example.org>\nTo: Ann <ann@example.org>\n"
            "Date: Tue, 02 Mar 2021 10:00:00 +0000\nSubject: Re: Caf\n\n"
            "Tomorrow is fine.\n\nSee you,\nBob",
        ),
        (
            "message 1, 2021-03-03",
            "From: Ann <ann@example.org>\nDate: Wed, 03 Mar 2021 10:00:00 +0000\nSubject: Poem\n\n"
            "Carl sent me this:\n\n> A line that nobody sent before.",
        ),
    ]


@pytest.mark.parametrize(
    "quotation",
    [
        "Am 01.03.2021 um 10:00 schrieb Ann:\n> The train leaves at ten. Do not be late.",
        "Le lun. 1 mars 2021 à 10:00, Ann <a@b.org> a écrit :\n\n> The train leaves at ten.\n"
        "> Do not be late.",
        "-----Original Message-----\nFrom: Ann\nSent: Monday\nTo: Bob\nSubject: Train\n\n"
        "The train leaves at ten. Do not be late. Bring the tickets. Bring the bag. Eat before.",
        "Von: Ann\nGesendet: Montag\nAn: Bob\nBetreff: Zug\n\nThe train leaves at ten. Do not be "
        "late. Bring the tickets. Bring the bag. Eat before.",
    ],
)
def test_read_mbox_leaves_out_quotations_of_every_mail_program(
    tmp_path: Path, quotation: str
) -> None:
    text = "The train leaves at ten. Do not be late. Bring the tickets. Bring the bag. Eat before."
    mails = [
        f"From a@b.org Mon Mar  1 10:00:0{number} 2021\nFrom: a@b.org\n\n{body}\n"
        for number, body in enumerate([text, f"I shall be there.\n\n{quotation}"])
    ]
    first, second = (text for _, text in _read(tmp_path / "a.mbox", "\n".join(mails)))
    assert first.endswith(text)
    assert second == "From: a@b.org\n\nI shall be there."


def test_read_eml_names_attachments_and_keeps_the_text_of_two_alternatives(tmp_path: Path) -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "Ann <ann@example.org>", "Plan"
    mail.set_content("The plan is attached.\n")
    mail.add_alternative("<p>The plan is <b>attached</b>.</p>", subtype="html")
    mail.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="plan.pdf")
    assert _read(tmp_path / "a.eml", mail.as_bytes()) == [
        (
            "",
            "From: Ann <ann@example.org>\nSubject: Plan\n\nThe plan is attached.\n\n"
            "[attachment: plan.pdf]",
        )
    ]


@pytest.mark.parametrize("charset", ["unknown-8bit", "ascii", "utf-8"])
def test_read_eml_with_wrong_charset_decodes_windows_1252(tmp_path: Path, charset: str) -> None:
    head = f"From: a@b.org\nContent-Type: text/plain; charset={charset}\n\n"
    ((_, text),) = _read(tmp_path / "a.eml", head.encode() + "schön – für".encode("cp1252"))
    assert text == "From: a@b.org\n\nschön – für"


def test_read_flowed_mail_joins_the_lines_of_a_paragraph(tmp_path: Path) -> None:
    head = "From: a@b.org\nContent-Type: text/plain; format=flowed\n\n"
    ((_, text),) = _read(tmp_path / "a.eml", f"{head}One line \nof two.\nAnother.\n-- \nA")
    assert text == "From: a@b.org\n\nOne line of two.\nAnother.\n-- \nA"


def test_read_mail_of_10000_parts_is_left_out(tmp_path: Path) -> None:
    part = "--x\nContent-Type: text/plain\n\na\n"
    bomb = f"From: a@b.org\nContent-Type: multipart/mixed; boundary=x\n\n{part * 10_000}--x--\n"
    with pytest.raises(UnreadableDocument, match="the mail has more than 1,000 parts"):
        _read(tmp_path / "a.eml", bomb)


def test_read_mail_of_nested_parts_is_left_out(tmp_path: Path) -> None:
    head = "".join(
        f"Content-Type: multipart/mixed; boundary=b{number}\n\n--b{number}\n"
        for number in range(2_000)
    )
    with pytest.raises(UnreadableDocument, match="the mail is malformed"):
        _read(tmp_path / "a.eml", f"From: a@b.org\n{head}\na\n")


def test_read_text_is_rejected_as_mail(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match="it does not begin with the header of a mail"):
        _read(tmp_path / "a.eml", "A text.\n")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"Return-Path: <a@b.org>\r\nReceived: from c\r\n\tby d\r\nFrom: a\r\nDate: b\r\n", True),
        (b"From a@b.org Mon Mar  1 10:00:00 2021\nReceived: from c\n", True),
        (b"From Mon 10:00 on, we walk.\nThen we eat.\n", False),
        (b"From 10:00 to noon, we walk.\nThen: we eat.\n", False),
        (b"Subject: a\nFrom: b\n\nA text.", True),
        (b"Date: of birth\n\nA text. From: me\n", False),
        (b"From: me\n\nA letter.\n", False),
        (b"A text.\n", False),
    ],
)
def test_is_mail_requires_two_fields_of_a_header(head: bytes, expected: bool) -> None:
    assert is_mail(head) is expected


def _parts(kind: str, *parts: str) -> str:
    """Return a mail with several parts, each of which begins with its header."""
    body = "".join(f"--x\n{part}\n" for part in parts)
    return f"From: a@b.org\nContent-Type: multipart/{kind}; boundary=x\n\n{body}--x--\n"


_PLAIN, _HTML = "Content-Type: text/plain\n\n", "Content-Type: text/html\n\n"
_PICTURE = "Content-Type: image/png; name=a.png\nContent-Disposition: inline\n\nx"


@pytest.mark.parametrize(
    ("mail", "expected"),
    [
        (
            _parts("mixed", f"{_PLAIN}Before.", _PICTURE, f"{_PLAIN}After."),
            "Before.\n\nAfter.\n\n[attachment: a.png]",
        ),
        (_parts("mixed", f"{_HTML}<p>Body.", f"{_PLAIN}A footer."), "Body.\n\nA footer."),
        ("From: a@b.org\nContent-Type: multipart/mixed; boundary=x\n\nNo parts.", "No parts."),
        (
            _parts(
                "mixed",
                f"{_PLAIN}See below.",
                f"Content-Type: message/rfc822\n\nFrom: c@d.org\nSubject: Inner\n{_PLAIN}A text.",
            ),
            "See below.\n\n-------- Forwarded message --------\nFrom: c@d.org\nSubject: Inner\n\n"
            "A text.",
        ),
        (_parts("alternative", f"{_PLAIN}", f"{_HTML}<p>Only HTML."), "Only HTML."),
        (
            _parts("alternative", f"{_PLAIN}See the page.", f"{_HTML}{'A letter. ' * 3}"),
            "A letter. A letter. A letter.",
        ),
        (
            _parts("alternative", f"{_PLAIN}Your program does not show HTML.", f"{_HTML}A letter."),
            "A letter.",
        ),
        (_parts("alternative", f"{_PLAIN}A letter.", f"{_HTML}<b>A letter.</b>"), "A letter."),
        (_parts("mixed", f"{_PLAIN}A letter.", f"{_HTML} "), "A letter."),
    ],
)
def test_read_mail_reads_every_part_that_a_person_sees(
    tmp_path: Path, mail: str, expected: str
) -> None:
    assert _read(tmp_path / "a.eml", mail) == [("", f"From: a@b.org\n\n{expected}")]


def test_read_mail_without_lxml_reads_the_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lxml", None)
    mail = _parts("alternative", f"{_PLAIN}Short.", f"{_HTML}{'A letter. ' * 3}")
    assert _read(tmp_path / "a.eml", mail) == [("", "From: a@b.org\n\nShort.")]
    with pytest.raises(MissingDependencyError, match="reading HTML mails needs the 'lxml' package"):
        _read(tmp_path / "b.eml", f"From: a@b.org\n{_HTML}<p>A letter.")


@pytest.mark.parametrize(
    ("charset", "content", "expected"),
    [
        ("gb2312", "朱镕基先生，您好。".encode("gbk"), "朱镕基先生，您好。"),
        ("iso-8859-1", "it’s “fine” – 5 €".encode("cp1252"), "it’s “fine” – 5 €"),
        ("utf-8", "süße Grüße ".encode() * 50 + b"\xff", "süße Grüße " * 50 + "\ufffd"),
    ],
)
def test_read_mail_decodes_what_mail_programs_declare(
    tmp_path: Path, charset: str, content: bytes, expected: str
) -> None:
    head = f"From: a@b.org\nContent-Type: text/plain; charset={charset}\n\n"
    assert _read(tmp_path / "a.eml", head.encode() + content) == [
        ("", f"From: a@b.org\n\n{expected}")
    ]


def test_read_html_mail_without_charset_uses_that_of_the_page(tmp_path: Path) -> None:
    page = '<meta charset="windows-1251"><p>Это письмо.'.encode("cp1251")
    ((_, text),) = _read(tmp_path / "a.eml", f"From: a@b.org\n{_HTML}".encode() + page)
    assert text == "From: a@b.org\n\nЭто письмо."


def test_read_mail_in_an_unknown_encoding_is_rejected(tmp_path: Path) -> None:
    content = b"From: a@b.org\nContent-Type: text/plain; charset=x-mine\n\n"
    with pytest.raises(UnreadableDocument, match="the encoding of the mail is unknown"):
        _read(tmp_path / "a.eml", content + "Это".encode("cp1251"))
    with pytest.raises(UnreadableDocument, match="encoding is unknown"):
        _read(tmp_path / "b.eml", f"From: a@b.org\n{_HTML}<p>".encode() + "Это".encode("cp1251"))
    parts = _parts("alternative", f"{_PLAIN}A letter.", f"{_HTML}<p>XXX").encode()
    ((_, text),) = _read(tmp_path / "c.eml", parts.replace(b"XXX", "Это".encode("cp1251")))
    assert text == "From: a@b.org\n\nA letter."


def _mbox(*bodies: str) -> str:
    """Return an mbox file of mails with one day between them."""
    mails = [
        f"From - Mon Mar  1 10:00:00 2021\nDate: {day} Mar 2021 10:00:00 +0000\n{body}\n"
        for day, body in enumerate(bodies, start=1)
    ]
    return "\n".join(mails)


def _texts(path: Path, *bodies: str) -> list[str]:
    """Return the texts of mails in an mbox file without their headers."""
    return [text.partition("\n\n")[2] for _, text in _read(path, _mbox(*bodies))]


def test_read_mbox_does_not_split_text_at_from(tmp_path: Path) -> None:
    text = "Hello.\n\nFrom 10:00 on, we walk.\nAnd:\n\nFrom here, too."
    assert _texts(tmp_path / "a.mbox", f"\n{text}", "\nBye.") == [text, "Bye."]


def test_read_html_mail_marks_quotations_and_leaves_out_known_ones(tmp_path: Path) -> None:
    said = "On Mon, 1 Mar 2021 at 10:00, Ann wrote:"
    known = f"{_HTML}Fine.<div>{said}</div><blockquote><p>Where?</p><p>When?</p></blockquote>"
    new = f'{_HTML}Look.<div class="yahoo_quoted"><p>One.</p><p>Two.</p></div>'
    assert _texts(tmp_path / "a.mbox", "\nWhere?\n\nWhen?", known, new) == [
        "Where?\n\nWhen?",
        "Fine.",
        "Look.\n\n> One.\n>\n> Two.",
    ]


def test_read_hidden_part_of_html_mail_is_left_out(tmp_path: Path) -> None:
    page = '<div style="Display: none">Preview</div><p>A letter.'
    assert _texts(tmp_path / "a.mbox", f"{_HTML}{page}") == ["A letter."]


def test_read_mbox_forgets_earlier_mails_before_the_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "_MOST_SEEN", 3)
    bodies = ["\nOne. Two. Three.", "\nFour.\n\n> One.", "\nFive.\n\n> One."]
    assert _texts(tmp_path / "a.mbox", *bodies) == ["One. Two. Three.", "Four.", "Five.\n\n> One."]


def test_read_comments_inside_a_quotation_are_kept(tmp_path: Path) -> None:
    first = "\nWe meet at noon. Please bring the report. The room is 12.\n\nAnn"
    reply = (
        "\nSee below.\n\nFrom: Ann\nSent: Monday\nTo: Bob\nSubject: Meeting\n\nWe meet at noon. "
        "[Bob] No, at one. Please bring the report.\nThe room is 12.\n\nAnn"
    )
    inline = (
        "\nOn Mon, 1 Mar 2021 at 10:00, Ann wrote:\n> We meet at noon. Please bring the\n"
        "> report.\n"
        "> On Sun, 1 Feb 2021 at 10:00, Carl wrote:\n>\n> > An unknown line.\n\nYes."
    )
    assert _texts(tmp_path / "a.mbox", first, reply, inline)[1:] == [
        "See below.\n\n[Bob] No, at one.",
        "> > An unknown line.\n\nYes.",
    ]


def test_read_footer_of_a_mailing_list_is_kept_once(tmp_path: Path) -> None:
    footer = f"{'_' * 47}\nA mailing list\na@lists.org"
    assert _texts(tmp_path / "a.mbox", f"\nOne.\n{footer}", f"\nTwo.\n{footer}") == [
        f"One.\n{footer}",
        "Two.",
    ]


def test_read_mail_without_text_of_its_own_is_left_out(tmp_path: Path) -> None:
    found = _read(tmp_path / "a.mbox", _mbox("\nOne.", "\n> One.", f"{_HTML}<img src=a>", "\nTwo."))
    problem = "the mail contains no text, or only quotations of earlier mails"
    assert [text or place for place, text in found] == [
        "Date: Mon, 01 Mar 2021 10:00:00 +0000\n\nOne.",
        f"message 2: {problem}",
        f"message 3: {problem}",
        "Date: Thu, 04 Mar 2021 10:00:00 +0000\n\nTwo.",
    ]
    with pytest.raises(UnreadableDocument, match=problem):
        _read(tmp_path / "a.eml", f"From: a@b.org\n{_PICTURE}")


@pytest.mark.parametrize(
    ("name", "content", "is_mail_file"),
    [
        ("Inbox", _FIRST, True),
        ("1", _FIRST.partition("\n")[2], True),
        ("cur/1614592800.M1.host:2,S", _FIRST.partition("\n")[2], True),
        ("README", "From Mon 10:00 on, we walk.\n", False),
        ("Inbox.txt", _FIRST, False),
    ],
)
def test_format_of_file_without_suffix_is_mail_by_its_first_bytes(
    tmp_path: Path, name: str, content: str, is_mail_file: bool
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    found = format_of(path)
    assert (found is not None and found.name == "mail") is is_mail_file


def test_format_of_pipe_is_none_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert format_of(tmp_path / "pipe") is None
