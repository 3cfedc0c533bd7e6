"""Tests of `data.formats.mail` with mails as Thunderbird, Gmail and Outlook write them."""

from __future__ import annotations

from email.message import EmailMessage
from pathlib import Path

import pytest

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.mail import is_mail, read

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
    assert _read(tmp_path / "a.eml", bomb) == [("the mail has more than 1,000 parts", "")]


def test_read_mail_of_nested_parts_is_left_out(tmp_path: Path) -> None:
    head = "".join(
        f"Content-Type: multipart/mixed; boundary=b{number}\n\n--b{number}\n"
        for number in range(2_000)
    )
    ((place, text),) = _read(tmp_path / "a.eml", f"From: a@b.org\n{head}\na\n")
    assert (place, text) == ("the mail is malformed", "")


def test_read_text_is_rejected_as_mail(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match="it does not begin with the header of a mail"):
        _read(tmp_path / "a.eml", "A text.\n")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"Return-Path: <a@b.org>\r\nReceived: from c\r\n\tby d\r\nFrom: a\r\nDate: b\r\n", True),
        (b"From a@b.org Mon Mar  1 10:00:00 2021\n", True),
        (b"Subject: a\nFrom: b\n\nA text.", True),
        (b"Date: of birth\n\nA text. From: me\n", False),
        (b"From: me\n\nA letter.\n", False),
        (b"A text.\n", False),
    ],
)
def test_is_mail_requires_two_fields_of_a_header(head: bytes, expected: bool) -> None:
    assert is_mail(head) is expected
