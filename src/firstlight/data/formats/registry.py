"""The formats of documents that are not plain text, by the suffixes of their files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from firstlight.data.formats.chats import is_chats
from firstlight.data.formats.mail import is_mail, sent
from firstlight.data.formats.wiki import is_dump
from firstlight.data.kinds import HEAD_BYTES, kind_by_bytes
from firstlight.data.opening import head_of


class Format(NamedTuple):
    """A format of documents.

    Attributes:
        name: name of one document, for messages, such as "EPUB".
        module: the module that reads the format, with a function `read` (see `formats`).
        packages: importable names of the optional packages that the module needs.
        order: function that returns the time by which the files of a folder are ordered, for a
            format whose documents repeat earlier ones. The module's function `read` then takes a
            set of what was read before, too.
    """

    name: str
    module: str
    packages: tuple[str, ...] = ()
    order: Callable[[Path], float] | None = None

    @property
    def is_installed(self) -> bool:
        """True if the packages that the reader needs are installed."""
        return all(importlib.util.find_spec(package) for package in self.packages)


_ROOM = "firstlight.data.formats."
_HTML = Format("web page", _ROOM + "html", ("lxml",))
_MAIL = Format("mail", _ROOM + "mail", order=sent)
_CHATS = Format("chat export", _ROOM + "chats")
_WIKI = Format("MediaWiki dump", _ROOM + "wiki", ("mwparserfromhell",))
_ARCHIVE = Format("archive", _ROOM + "archives")
_WORD = Format("Word document", _ROOM + "docx", ("lxml",))
#: Suffixes of files that may be an export of chats.
_EXPORT_SUFFIXES = (".txt", ".json", ".csv")
#: Suffixes of files that may be a web page or a document that was saved under another name.
_SAVED_SUFFIXES = ("", ".txt", ".doc", ".php", ".asp", ".aspx", ".jsp", ".cgi", ".cfm")
#: Beginning of a web page that is not a template of a program, which contains <? or <%.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*"
    rb"<(?:!doctype\s+html|html)[\s>](?!.*<[?%])",
    re.IGNORECASE | re.DOTALL,
)
#: Formats by suffix, in lower case. The first suffix with which a file's name ends decides.
FORMATS: dict[str, Format] = {
    ".pdf": Format("PDF", _ROOM + "pdf", ("pypdfium2",)),
    ".epub": Format("EPUB", _ROOM + "epub", ("lxml",)),
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _HTML,
    ".docx": _WORD,
    ".docm": _WORD,
    ".odt": Format("OpenDocument text", _ROOM + "odt", ("lxml",)),
    ".rtf": Format("RTF document", _ROOM + "rtf"),
    ".ipynb": Format("notebook", _ROOM + "notebook"),
    ".eml": _MAIL,
    ".mbox": _MAIL,
    ".mht": _MAIL,
    ".mhtml": _MAIL,
    **{f".xml{ending}": _WIKI for ending in ("", ".gz", ".bz2", ".xz")},
    **dict.fromkeys(".zip .tar .tgz .tbz2 .txz .tar.gz .tar.bz2 .tar.xz".split(), _ARCHIVE),
}


def installed_packages() -> tuple[bool, ...]:
    """Return for each format whether its packages are installed."""
    return tuple(one.is_installed for one in dict.fromkeys(FORMATS.values()))


def format_of(path: Path) -> Format | None:
    """Return the format of a file by its suffix or, for exports of chats, mails without a suffix,
    MediaWiki dumps and documents with the suffix of another format, by its first bytes. Return None
    for any other file and for a pipe.

    Raises:
        OSError, EOFError: the file can't be read.
    """
    name = path.name.lower()
    found = next((one for suffix, one in FORMATS.items() if name.endswith(suffix)), None)
    # The names of the files in a Maildir folder end in flags, as in "1614592800.M1.host:2,S".
    # Thunderbird's mbox files have no suffix.
    suffixes = (*_EXPORT_SUFFIXES, *_SAVED_SUFFIXES)
    is_open = path.suffix.lower() in suffixes or path.parent.name in ("cur", "new")
    if found in (_MAIL, _ARCHIVE) or not (found or is_open) or not path.is_file():
        return found
    # Callers ask once for each document in a file.
    return _format_of_content(path, found, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _format_of_content(path: Path, found: Format | None, changed_ns: int) -> Format | None:
    """Return the format of a file by its first bytes.

    Args:
        path: the file.
        found: its format by the suffix.
        changed_ns: time of the file's last change, so that a changed file is read again.
    """
    if found is _WIKI:
        with contextlib.suppress(OSError, EOFError):  # Its text can't be read, either.
            return found if is_dump(head_of(path)) else None
        return None
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        if found is None:
            raise
        return found  # A message that the document can't be read follows.
    saved = _saved_as(head)
    # A Word document is a ZIP file, too, and the first bytes may not show more. An archive in an
    # archive, whose size has no limit, is not read because of its name.
    if saved and saved.is_installed and saved is not _ARCHIVE:
        return saved
    if found:
        return found
    if (suffix := path.suffix.lower()) in _EXPORT_SUFFIXES and is_chats(head, suffix):
        return _CHATS
    return _MAIL if suffix not in _EXPORT_SUFFIXES and is_mail(head) else None


def _saved_as(head: bytes) -> Format | None:
    """Return the format of a document by its first bytes, or None if they are not known."""
    if head.startswith(b"{\\rtf"):
        return FORMATS[".rtf"]
    if _PAGE.match(head):
        return _HTML
    kind = kind_by_bytes(head)
    return FORMATS.get(kind.endings.partition(" ")[0]) if kind else None
