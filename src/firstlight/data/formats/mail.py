"""Mails: .eml files, mbox files, and the files in a Maildir folder.

A reply usually quotes the mail that it answers, and every mail of a person ends with the same
signature. Mails are therefore read in the order of their dates, and a quotation or a signature is
left out if an earlier mail of the file already contains its sentences.
"""

from __future__ import annotations

import contextlib
import email
import email.policy
import importlib
import mailbox
import re
import tempfile
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path

from firstlight.data.formats import UnreadableDocument
from firstlight.errors import MissingDependencyError

#: A mail with more parts than this is left out, because no mail program writes it.
_MOST_PARTS = 1000
#: The first line of an mbox file, and a line of a mail's header.
_MBOX = re.compile(rb"From \S+.* \d\d:\d\d")
_FIELD = re.compile(rb"([!-9;-~]+):|[ \t]")
#: The line before a quotation, as mail programs write it in several languages, and the lines after
#: which all text is quoted without a mark. A long line is often wrapped once. The lookahead avoids
#: a search in lines that no quotation follows.
_SAID = (
    r"(?=[^\n]*(?:\n[^\n]*)?:[ \t]*\n\s*>)"
    r"(?:On|Am|Le|El|Il|Op|Em|Den|W dniu|Dnia)\b[^\n]{6,150}(?:\n[^\n]{0,80})?"
    r"(?:wrote|schrieb|a écrit|escribió|ha scritto|schreef|escreveu|skrev|napisał)[^\n]{0,60}:"
)
_REST = (
    r"-{4,} ?(?:Original Message|Ursprüngliche Nachricht|Message d'origine|Mensaje original|"
    r"Forwarded message|Weitergeleitete Nachricht|Message transféré) ?-{4,}"
    r"|Begin forwarded message:|(?:From|Von|De): [^\n]+\n(?:Sent|Gesendet|Envoyé|Enviado): "
)
#: The parts of a mail's text that may repeat an earlier mail.
_REPEATED = re.compile(
    rf"^(?:{_REST})[\s\S]*|^-- \n[\s\S]*"
    rf"|(?:^{_SAID}[ \t]*\n\s*)?^(?:>.*(?:\n|\Z)(?:[ \t]*\n(?=>))?)+",
    re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")


def is_mail(head: bytes) -> bool:
    """Return True if the first bytes of a file begin an mbox file, or are the header of a mail with
    its sender and its date or subject."""
    fields = _fields(head)
    return bool(_MBOX.match(head)) or (b"from" in fields and bool(fields & {b"date", b"subject"}))


def _fields(head: bytes) -> set[bytes]:
    """Return the names of the fields in the header at the beginning of a file, or an empty set if
    there is no header."""
    lines = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0].splitlines()
    matches = [_FIELD.match(line) for line in lines]
    return {((one and one[1]) or b"").lower() for one in matches} if all(matches) else set()


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each mail in a file.

    Args:
        path: an .eml file, a file of a Maildir folder, or an mbox file.

    Raises:
        UnreadableDocument: the file is not a mail.
    """
    with path.open("rb") as file:
        head = file.read(1 << 14)
    is_mbox = _MBOX.match(head) is not None
    if not is_mbox and not _fields(head) & {b"from", b"to", b"subject", b"date"}:
        raise UnreadableDocument("it does not begin with the header of a mail: exclude it")
    seen: set[int] = set()
    if not is_mbox:
        yield _document("", path.read_bytes(), seen)
        return
    with contextlib.closing(mailbox.mbox(path, create=False)) as box:
        keys = sorted(box.keys(), key=lambda key: _sent(box, key))
        for key in keys:
            # mbox files mark lines of the text that begin with "From " by a ">".
            content = re.sub(rb"(?m)^>(>*From )", rb"\1", box.get_bytes(key))
            yield _document(f"message {int(key) + 1:,}", content, seen)


def _sent(box: mailbox.mbox, key: str) -> float:
    head, _, _ = box.get_bytes(key).replace(b"\r\n", b"\n").partition(b"\n\n")
    try:
        return parsedate_to_datetime(email.message_from_bytes(head)["Date"]).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _document(place: str, content: bytes, seen: set[int]) -> tuple[str, str]:
    """Return the place and the text of a mail.

    Args:
        place: number of the mail in its file, or "".
        content: the mail.
        seen: hashes of the sentences of the earlier mails, to which those of this mail are added.
    """
    lead = f"{place}: " if place else ""
    try:
        mail = email.message_from_bytes(content, policy=email.policy.default)
        if sum(1 for _ in islice(mail.walk(), _MOST_PARTS + 1)) > _MOST_PARTS:
            return f"{lead}the mail has more than {_MOST_PARTS:,} parts", ""
        body = _without_repeats(_body(mail), seen)
        fields = ((name, mail[name]) for name in ("From", "To", "Date", "Subject"))
        head = [f"{name}: {' '.join(str(value).split())}" for name, value in fields if value]
        files = [part.get_filename() for part in mail.iter_attachments()]
    # The parser raises errors of many types for malformed fields.
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = error if isinstance(error, MissingDependencyError) else "the mail is malformed"
        return f"{lead}{problem}", ""
    notes = [f"[attachment: {name}]" for name in files if name]
    date = mail["Date"].datetime if mail["Date"] else None
    day = f"{date:%Y-%m-%d}" if date else ""
    text = "\n\n".join(part for part in ("\n".join(head), body, "\n".join(notes)) if part)
    return ", ".join(part for part in (place, day) if part), text


def _body(mail: EmailMessage) -> str:
    part = mail.get_body(("plain", "html"))
    if part is None:
        return ""
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    text = _decoded(content, part.get_content_charset("utf-8")).replace("\r\n", "\n")
    if part.get_content_subtype() == "html":
        reader = importlib.import_module("firstlight.data.formats.html")
        with tempfile.NamedTemporaryFile(suffix=".html") as file:
            file.write(f'<meta charset="utf-8">{text}'.encode("utf-8", "replace"))
            file.flush()
            text = "\n\n".join(found for _, found in reader.read(Path(file.name)))
    elif part["Content-Type"] and part["Content-Type"].params.get("format") == "flowed":
        # In format=flowed, a space at the end of a line means that the paragraph continues.
        text = re.sub(r"(?m)^(?!-- $|>)(.*\S) \n(?!>)", r"\1 ", text)
    return text.strip("\n")


def _decoded(content: bytes, charset: str) -> str:
    """Decode a text. Mails often declare an encoding that is unknown or wrong."""
    for name in (charset, "utf-8"):
        try:
            return content.decode(name)
        except (LookupError, UnicodeDecodeError):
            continue
    return content.decode("cp1252", "replace")


def _without_repeats(body: str, seen: set[int]) -> str:
    """Remove the quotations and signatures whose sentences are mostly in `seen`, and add all other
    sentences of the mail to `seen`."""
    kept = []
    own = [(match.start(), match.end()) for match in _REPEATED.finditer(body)]
    before = 0
    for start, end in (*own, (len(body), len(body))):
        kept.append(body[before:start])
        seen.update(_sentences(body[before:start]))
        quoted = re.sub(rf"\A(?:{_SAID}|{_REST})", "", body[start:end])
        sentences = _sentences(re.sub(r"(?m)^[> ]+", "", quoted))
        if 2 * sum(sentence in seen for sentence in sentences) < len(sentences):
            kept.append(body[start:end])
            seen.update(sentences)
        before = end
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).strip()


def _sentences(text: str) -> list[int]:
    """Return a hash for each sentence of a text. It does not depend on line breaks, which change
    when a text is quoted."""
    words = ("".join(re.findall(r"\w+", part)) for part in _SENTENCE_END.split(text))
    return [hash(word) for word in words if word]
