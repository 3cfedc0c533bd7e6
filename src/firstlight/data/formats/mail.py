"""Mails: .eml files, mbox files, and the files in a Maildir folder.

A reply usually quotes the mail that it answers, and every mail of a person ends with the same
signature. Mails are therefore read in the order of their dates, and the sentences of a quotation or
a signature that an earlier mail contains are left out.
"""

from __future__ import annotations

import email
import email.policy
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any

from firstlight.data.formats import UnreadableDocument
from firstlight.data.opening import decoded, optional
from firstlight.errors import FirstlightError

#: A mail with more parts than this is left out, because no mail program writes it.
_MOST_PARTS = 1000
#: Number of sentences, of about 80 bytes of memory each, after which those of the earlier mails are
#: forgotten. Most quotations repeat a recent mail.
_MOST_SEEN = 1_000_000
#: Number of bytes at the beginning of a mail in which its date is searched.
_HEAD_BYTES = 1 << 14
#: The line between two mails in an mbox file, the line after it, and a line of a mail's header.
#: Text that begins with "From " has no field of a header below it.
_MBOX = re.compile(rb"From .*\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b.*\d:\d\d.*\n(?=>?[!-9;-~]+:)")
_FIELD = re.compile(rb"([!-9;-~]+):|[ \t]")
#: The line before a quotation, as mail programs write it in several languages, and the lines after
#: which all text is quoted without a mark. A long line is often wrapped once.
_SAID = (
    r"(?:On|Am|Le|El|Il|Op|Em|Den|W dniu|Dnia)\b[^\n]{6,150}(?:\n[^\n]{0,80})?"
    r"(?:wrote|schrieb|a écrit|escribió|ha scritto|schreef|escreveu|skrev|napisał)[^\n]{0,60}:"
)
_REST = (
    r"-{4,} ?(?i:Original Message|Ursprüngliche Nachricht|Message d'origine|Mensaje original|"
    r"Forwarded message|Weitergeleitete Nachricht|Message transféré) ?-{4,}"
    r"|Begin forwarded message:"
    r"|(?:From|Von|De): [^\n]+\n(?:Sent|Gesendet|Envoyé|Enviado|Date|Datum|Subject|Betreff): "
)
#: The parts of a mail's text that may repeat an earlier mail: what follows the lines above, a
#: signature or the line above a mailing list's footer, and quotations. The lookahead avoids a
#: search in lines that no quotation follows.
_REPEATED = re.compile(
    rf"^(?:{_REST}|-- \n|_{{10,}}\n)[\s\S]*"
    rf"|(?:^(?=[^\n]*(?:\n[^\n]*)?:[ \t]*\n\s*>){_SAID}[ \t]*\n\s*)?"
    r"^(?:>.*(?:\n|\Z)(?:[ \t]*\n(?=>))?)+",
    re.MULTILINE,
)
#: In a paragraph, the lines that say who wrote the text below.
_WRITERS = re.compile(rf"^(?:(?:{_REST})[\s\S]*|{_SAID}[ \t]*$)", re.MULTILINE)
#: The text of a mail that may only name the format of its other part, and the divisor of its
#: length when the two are compared.
_NOTICE_WEIGHT = 100
_NOTICE = re.compile(r"[\s\S]{0,100}\bHTML\b[\s\S]{0,100}")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")


def is_mbox(head: bytes) -> bool:
    """Return True if the first bytes of a file begin an mbox file."""
    return _MBOX.match(head) is not None


def is_mail(head: bytes) -> bool:
    """Return True if the first bytes of a file begin an mbox file, or are the header of a mail with
    its sender and its date or subject."""
    fields = _fields(head)
    return is_mbox(head) or (b"from" in fields and bool(fields & {b"date", b"subject"}))


def _fields(head: bytes) -> set[bytes]:
    """Return the names of the fields in the header at the beginning of a file, or an empty set if
    the file does not begin with a header."""
    lines = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0].splitlines()
    matches = [_FIELD.match(line) for line in lines]
    return {((one and one[1]) or b"").lower() for one in matches} if all(matches) else set()


def sent(path: Path) -> float:
    """Return the time when a mail was sent, in seconds since 1970, or 0 if it is unknown."""
    try:
        with path.open("rb") as file:
            return _sent(file.read(_HEAD_BYTES))
    except OSError:
        return 0.0  # The error is reported when the mail is read.


def _sent(head: bytes) -> float:
    date = re.search(rb"(?mi)^(?:date:(.*)|\r?$)", head)
    try:
        return parsedate_to_datetime(str((date and date[1]) or b"", "ascii")).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def read(path: Path, seen: set[int] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each mail in a file.

    Args:
        path: an .eml file, a file of a Maildir folder, or an mbox file.
        seen: hashes of the sentences of earlier mails, to which those of the file are added.

    Raises:
        UnreadableDocument: the file is not a mail, or its only mail contains no new text.
    """
    seen = set() if seen is None else seen
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not is_mbox(head):
            if not _fields(head) & {b"from", b"to", b"subject", b"date"}:
                raise UnreadableDocument("it does not begin with the header of a mail: exclude it")
            yield _document(head + file.read(), seen)
            return
        file.seek(0)
        for _, number, start, end in sorted(_mails(file)):
            file.seek(start)
            # mbox files mark lines of the text that begin with "From " by a ">".
            content = re.sub(rb"(?m)^>(>*From )", rb"\1", file.read(end - start))
            place = f"message {number:,}"
            try:
                day, text = _document(content, seen)
                yield ", ".join(part for part in (place, day) if part), text
            except FirstlightError as error:
                yield f"{place}: {error}", ""


def _mails(file: IO[bytes]) -> list[tuple[float, int, int, int]]:
    """Return the time, the number, and the first and last position of each mail in an mbox file."""
    starts = []
    position = 0
    before = b""
    for line in file:
        if before and _MBOX.match(before + line):
            starts.append(position - len(before))
        before = line if line.startswith(b"From ") else b""
        position += len(line)
    mails = []
    for number, (start, end) in enumerate(itertools.pairwise([*starts, position]), start=1):
        file.seek(start)
        mails.append((_sent(file.read(min(end - start, _HEAD_BYTES))), number, start, end))
    return mails


def _document(content: bytes, seen: set[int]) -> tuple[str, str]:
    """Return the day and the text of a mail.

    Args:
        content: the mail, which in an mbox file begins with the line between two mails.
        seen: hashes of the sentences of the earlier mails, to which those of this mail are added.

    Raises:
        UnreadableDocument: the mail is malformed, or it has no text that `seen` lacks.
        MissingDependencyError: lxml is required and not installed.
    """
    try:
        mail = email.message_from_bytes(content, policy=email.policy.default)
        if sum(1 for _ in itertools.islice(mail.walk(), _MOST_PARTS + 1)) > _MOST_PARTS:
            raise UnreadableDocument(f"the mail has more than {_MOST_PARTS:,} parts")
        body, files = _body(mail)
        head = _head(mail)
        date = mail["Date"].datetime if mail["Date"] else None
    except FirstlightError:
        raise
    # The parser raises errors of many types for malformed fields.
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableDocument("the mail is malformed") from error
    if not (body := _without_repeats(body, seen)):
        raise UnreadableDocument("the mail contains no text, or only quotations of earlier mails")
    notes = "\n".join(f"[attachment: {name}]" for name in files)
    text = "\n\n".join(part for part in (head, body, notes) if part)
    return f"{date:%Y-%m-%d}" if date else "", text


def _head(mail: EmailMessage) -> str:
    fields = ((name, mail[name]) for name in ("From", "To", "Date", "Subject"))
    return "\n".join(f"{name}: {' '.join(str(value).split())}" for name, value in fields if value)


def _body(part: Any) -> tuple[str, list[str]]:
    """Return the text of a mail or of a part of it, as a person sees it, and the names of the files
    that it contains."""
    kind = part.get_content_type()
    if part.is_multipart():
        bodies = _bodies(part.get_payload(), has_choice=kind == "multipart/alternative")
        text = "\n\n".join(text for text, _ in bodies if text)
        if kind == "message/rfc822":
            head = _head(part.get_payload(0))
            text = "\n\n".join(["-------- Forwarded message --------\n" + head, text]).rstrip()
        return text, [name for _, names in bodies for name in names]
    # The text of a part without the boundary that it declares is read as it is.
    is_text = kind in ("text/plain", "text/html") or part.get_content_maintype() == "multipart"
    if not is_text or part.is_attachment():
        return "", [name] if (name := part.get_filename()) else []
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    charset = part.get_content_charset()
    if kind == "text/html":
        return _text_of_html(content, charset), []
    text = _decoded(content, charset).replace("\r\n", "\n")
    if part["Content-Type"] and part["Content-Type"].params.get("format") == "flowed":
        # In format=flowed, a space at the end of a line means that the paragraph continues.
        text = re.sub(r"(?m)^(?!-- $|>)(.*\S) \n(?!>)", r"\1 ", text)
    return text.strip("\n"), []


def _bodies(parts: Iterable[Any], *, has_choice: bool) -> list[tuple[str, list[str]]]:
    """Return the text and the files of several parts. If they are alternatives, return the first of
    those that have at least half of the longest text, because the first may be only a notice."""
    bodies = []
    problem = None
    for part in parts:
        try:
            bodies.append(_body(part))
        except FirstlightError as error:
            problem = error
    if problem and not (has_choice and any(text for text, _ in bodies)):
        raise problem
    if not has_choice or not bodies:
        return bodies
    sizes = [len(text) / (_NOTICE_WEIGHT if _NOTICE.fullmatch(text) else 1) for text, _ in bodies]
    return [next(b for b, size in zip(bodies, sizes, strict=True) if 2 * size >= max(sizes))]


def _decoded(content: bytes, charset: str | None) -> str:
    if (text := decoded(content, charset)) is None:
        raise UnreadableDocument("the encoding of the mail is unknown")
    return text


def _text_of_html(content: bytes, charset: str | None) -> str:
    """Return the text of an HTML mail, in which quotations are marked as in plain text."""
    optional("lxml", "reading HTML mails", "documents")
    html = importlib.import_module("firstlight.data.formats.html")
    mark = b"<meta>"  # A page without any element can't be parsed.
    if charset is not None:  # It takes precedence over the charset that the page declares.
        mark = b'<meta charset="utf-8">'
        content = _decoded(content, charset).encode("utf-8", "replace")
    tree = html.parsed(mark + content)
    for node in reversed(list(tree.iter("*"))):
        if "display:none" in node.get("style", "").replace(" ", "").lower():
            node.clear(keep_tail=True)
        elif html.tag_of(node) == "blockquote" or "yahoo_quoted" in node.get("class", ""):
            lines = html.text_of(node).splitlines()
            node.clear(keep_tail=True)
            node.tag = "pre"
            node.text = "\n".join(f"> {line}".rstrip() for line in lines)
    return str(html.text_of(tree))


def _without_repeats(body: str, seen: set[int]) -> str:
    """Remove what `seen` contains from the quotations and signatures, and add all other sentences
    of the mail to `seen`."""
    if len(seen) > _MOST_SEEN:
        seen.clear()
    kept = []
    ends = [(match.start(), match.end()) for match in _REPEATED.finditer(body)]
    before = 0
    for start, end in (*ends, (len(body), len(body))):
        kept.append(body[before:start])
        seen.update(_hash(sentence) for sentence in _sentences(body[before:start]))
        kept.append(_unseen(body[start:end], seen))
        before = end
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).strip()


def _unseen(quoted: str, seen: set[int]) -> str:
    """Return the sentences of a quotation that are not in `seen`, and add them to `seen`. The
    quotation is returned as it is if more than half of its sentences are not in `seen`."""
    kept = []
    known = total = 0
    for paragraph in re.split(r"\n(?:[> \t]*\n)+", quoted):
        sentences = _sentences(_WRITERS.sub("", re.sub(r"(?m)^[> \t]+", "", paragraph)))
        new = [" ".join(one.split()) for one in sentences if _hash(one) not in seen]
        total += len(sentences)
        known += len(sentences) - len(new)
        seen.update(map(_hash, new))
        if len(new) == len(sentences) > 0:
            kept.append(paragraph)
        elif new:
            mark = re.match(r"[> \t]*", paragraph)
            kept.append(f"{mark[0] if mark else ''}{' '.join(new)}")
    if 2 * known < total:
        return quoted
    return "".join(f"{paragraph}\n\n" for paragraph in kept)


def _sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text) if re.search(r"\w", part)]


def _hash(sentence: str) -> int:
    """Return a hash of a sentence that does not depend on line breaks, which change when a text is
    quoted."""
    return hash("".join(re.findall(r"\w+", sentence)))
