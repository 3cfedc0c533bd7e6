"""The formats of documents that are not plain text, by the suffixes of their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple


class Format(NamedTuple):
    """A format of documents.

    Attributes:
        name: name of one document, for messages, such as "EPUB".
        module: the module that reads the format, with a function `read` (see `formats`).
        packages: importable names of the optional packages that the module needs.
    """

    name: str
    module: str
    packages: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """True if the packages that the reader needs are installed."""
        return all(importlib.util.find_spec(package) for package in self.packages)


_ROOM = "firstlight.data.formats."
_HTML = Format("web page", _ROOM + "html", ("lxml",))
_WORD = Format("Word document", _ROOM + "docx", ("lxml",))
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
    ".rtf": Format("RTF document", _ROOM + "rtf", ("striprtf",)),
    ".ipynb": Format("notebook", _ROOM + "notebook"),
}


def format_of(path: Path) -> Format | None:
    """Return the format of a file, or None if it is not in `FORMATS`."""
    name = path.name.lower()
    return next((one for suffix, one in FORMATS.items() if name.endswith(suffix)), None)
