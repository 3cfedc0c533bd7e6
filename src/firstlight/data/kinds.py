"""Kinds of files that are not plain text, detected by their first bytes or by their ending, each
with the command that extracts its text.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

#: First bytes of a file from which its kind is detected.
HEAD_BYTES = 1 << 16

#: Control characters that texts don't have: those below 0x20 except 0x08 to 0x0D (backspace to
#: carriage return) and 0x1B (escape).
_CONTROLS = bytes([*range(0x08), *range(0x0E, 0x1B), *range(0x1C, 0x20)])
#: A file is binary if at least this number and at least this share of its first bytes are control
#: characters. In compressed data, a tenth of the bytes are; a text may have a few.
_LEAST_CONTROLS, _LEAST_CONTROL_SHARE = 8, 0.02


class FileKind(NamedTuple):
    """A kind of file.

    Attributes:
        name: name of the kind with its article, for messages.
        remedy: advice on how to get a text file, with the placeholders {file} (the file), {text} (a
            text file beside it), {lines} (a JSONL file) and {folder} (a folder beside it).
    """

    name: str
    remedy: str

    def advice(self, path: Path) -> str:
        """The remedy for the file `path`, with paths quoted for a shell."""
        stem = path.with_name(re.sub(r"(?<=.)(\.tar)?\.[^.]+$", "", path.name))
        text = stem.with_name(f"{stem.name}.txt")
        # The command must not write over the file that it reads.
        text = stem.with_name(f"{stem.name}.plain.txt") if text == path else text
        names = {"file": path, "text": text, "folder": stem}
        names["lines"] = stem.with_name(f"{stem.name}.jsonl")
        return self.remedy.format(**{key: shlex.quote(str(name)) for key, name in names.items()})


_PDF = FileKind("a PDF document", "make text of it with pdftotext {file} {text}")
_DOCX, _ODT, _EPUB, _HTML, _RTF = (
    FileKind(name, f"make text of it with pandoc -f {form} {{file}} -t plain -o {{text}}")
    for name, form in (
        ("a Word document", "docx"),
        ("an OpenDocument text", "odt"),
        ("an e-book", "epub"),
        ("a web page", "html"),
        ("a document in rich text format", "rtf"),
    )
)
_SHEET = FileKind(
    "a spreadsheet",
    "save it as CSV in a spreadsheet program, and name the column of the text with --text-key",
)
_SLIDES = FileKind("a presentation", "save it as PDF, and make text of that with pdftotext")
_OLD_OFFICE = FileKind(
    "a document of an older Office program",
    "make text of it with soffice --headless --convert-to txt {file}",
)
_ZIP, _TAR, _7Z, _RAR = (
    FileKind(name, f"unpack it with {command}, and name that folder")
    for name, command in (
        ("a ZIP archive", "unzip {file} -d {folder}"),
        ("a tar archive", "mkdir {folder} && tar -xf {file} -C {folder}"),
        ("a 7z archive", "7z x {file} -o{folder}"),
        ("a RAR archive", "unrar x {file} {folder}/"),
    )
)
_GZIP, _BZIP2, _ZSTD, _XZ = (
    FileKind("a compressed file", f"unpack it with {tool} -dc < {{file}} > {{text}}")
    for tool in ("gzip", "bzip2", "zstd", "xz")
)
_IMAGE = FileKind("an image", "leave it out, or have its letters read by tesseract {file} {folder}")
_SOUND = FileKind("a recording", "leave it out, or write down first what is spoken in it")
_SQLITE = FileKind(
    "an SQLite database",
    "export its text with sqlite3 -header -csv {file} 'select COLUMN as text from TABLE' > OUT.csv",
)
_PARQUET = FileKind("a Parquet table", "let its name end in .parquet")
_ARRAY, _PROGRAM, _BINARY = (
    FileKind(name, "leave it out") for name in ("a file of numbers", "a program", "a binary file")
)
#: The kind of text files with any ending that is not of another kind.
OTHER_TEXT = FileKind("text", "")
_NOTEBOOK = FileKind("a notebook", "make text of it with jupyter nbconvert --to markdown {file}")
_LINES = FileKind("JSON with one record a line", "let its name end in .jsonl")
_JSON = FileKind(
    "JSON, of which texts are read one a line",
    "make a file of lines with jq -c '.[]' {file} > OUT.jsonl",
)

#: (offset, bytes at this offset, kind). For a ZIP file, `_IN_ZIP` is searched, too.
_SIGNATURES = (
    (0, b"%PDF-", _PDF),
    (0, b"PK\x03\x04", _ZIP),
    (0, b"\x1f\x8b", _GZIP),
    (0, b"BZh", _BZIP2),
    (0, b"\x28\xb5\x2f\xfd", _ZSTD),
    (0, b"\xfd7zXZ\x00", _XZ),
    (0, b"7z\xbc\xaf\x27\x1c", _7Z),
    (0, b"Rar!\x1a\x07", _RAR),
    (257, b"ustar", _TAR),
    (0, b"\x89PNG\r\n", _IMAGE),
    (0, b"\xff\xd8\xff", _IMAGE),
    (0, b"GIF8", _IMAGE),
    (8, b"WEBP", _IMAGE),
    (0, b"II*\x00", _IMAGE),
    (0, b"MM\x00*", _IMAGE),
    (8, b"WAVE", _SOUND),
    (0, b"ID3", _SOUND),
    (0, b"OggS", _SOUND),
    (0, b"fLaC", _SOUND),
    (4, b"ftyp", _SOUND),
    (0, b"SQLite format 3\x00", _SQLITE),
    (0, b"PAR1", _PARQUET),
    (0, b"\x93NUMPY", _ARRAY),
    (0, b"\x89HDF", _ARRAY),
    (0, b"\x7fELF", _PROGRAM),
    (0, b"MZ", _PROGRAM),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _OLD_OFFICE),
)
#: (pattern of the first entries of a ZIP file, the kind of such a file).
_IN_ZIP = (
    (rb"mimetypeapplication/epub", _EPUB),
    (rb"mimetypeapplication/vnd\.oasis\.opendocument\.text", _ODT),
    (rb"mimetypeapplication/vnd\.oasis\.opendocument\.spreadsheet", _SHEET),
    (rb"mimetypeapplication/vnd\.oasis\.opendocument\.presentation", _SLIDES),
    (rb"PK\x03\x04.{26}word/", _DOCX),
    (rb"PK\x03\x04.{26}xl/", _SHEET),
    (rb"PK\x03\x04.{26}ppt/", _SLIDES),
)

_ENDINGS = {
    _PDF: ".pdf",
    _NOTEBOOK: ".ipynb",
    _DOCX: ".docx .docm",
    _ODT: ".odt",
    _EPUB: ".epub",
    _HTML: ".html .htm .xhtml",
    _RTF: ".rtf",
    _SHEET: ".xlsx .xls .xlsm .ods",
    _SLIDES: ".pptx .ppt .odp",
    _OLD_OFFICE: ".doc",
    _ZIP: ".zip",
    _TAR: ".tar .tgz .tbz2 .txz .tar.gz .tar.bz2 .tar.xz .tar.zst",
    _7Z: ".7z",
    _RAR: ".rar",
    _GZIP: ".gz",
    _BZIP2: ".bz2",
    _ZSTD: ".zst",
    _XZ: ".xz",
    _IMAGE: ".png .jpg .jpeg .gif .webp .tif .tiff .bmp .heic .ico",
    _SOUND: ".mp3 .wav .ogg .flac .m4a .mp4 .mkv .avi .mov .webm",
    _SQLITE: ".sqlite .sqlite3",
    _ARRAY: ".npy .npz .pt .pth .safetensors .gguf .h5",
    _PROGRAM: ".exe .dll .so .o .pyc .class",
}
_BY_ENDING = {ending: kind for kind, names in _ENDINGS.items() for ending in names.split()}

#: End of a jq program: conversations whose roles take turns and that end with an answer.
_UNTIL_ANSWER = (
    """ | .messages |= (reduce .[] as $m ([]; if .[-1].role == $m.role then """
    """.[-1].content += "\\n" + $m.content else . + [$m] end) | """
    """until(. == [] or .[-1].role == "assistant"; .[:-1])) | select(.messages != [])' """
    """{file} > {lines}, and name that file"""
)
#: (pattern in the first bytes, kind) of the chats that other programs export as JSON.
_EXPORTS = (
    (
        rb'"type":\s*"(?:personal_chat|bot_chat|saved_messages|(?:private|public)_\w+)"'
        rb'|"about":\s*"Here is the data you requested',
        FileKind(
            "Telegram's export of chats",
            """make one text of each chat with jq -c '[.. | .messages? | arrays][] | {{text: """
            """[.[] | [.text | arrays[], strings | .text? // .] | add | strings | """
            """select(. != "")] | join("\\n")}}' {file} > {lines}, and name that file""",
        ),
    ),
    (
        rb'"mapping":\s*\{',
        FileKind(
            "ChatGPT's export of conversations",
            """make conversations of it with jq -c '.[] | {{messages: [[.mapping[].message | """
            """select(.author.role == "user" or .author.role == "assistant")] | """
            """sort_by(.create_time)[] | {{role: .author.role, content: """
            """([.content.parts[]? | strings] | join(""))}} | select(.content != "")]}}"""
            + _UNTIL_ANSWER,
        ),
    ),
    (
        rb'"chat_messages":\s*\[',
        FileKind(
            "Claude's export of conversations",
            """make conversations of it with jq -c '.[] | {{messages: [.chat_messages[] | """
            """{{role: (if .sender == "human" then "user" else .sender end), content: .text}} | """
            """select(.content != "")]}}""" + _UNTIL_ANSWER,
        ),
    ),
)

_KEYS = re.compile(rb'"([a-z]{4,20})"\s*:')
_RECORDS = {"chat": "conversations", "preference": "preference pairs"}

#: Advice on how to train on records of each kind.
START_FROM = {
    "chat": "to teach a model to answer with them, start from one: firstlight train FILE "
    "--init-from MODEL",
    "preference": "a model that answers already learns from them with a recipe: firstlight train "
    "recipes/tour-dpo.yaml --init-from MODEL --data.files FILE",
}


def kind_by_bytes(head: bytes) -> FileKind | None:
    """The kind of a file by the signature in its first bytes; None if it has no known one."""
    if head.startswith(b"%PDF-"):
        return _PDF
    # A text may begin with the letters of a signature; it has no control characters.
    if not _control_characters(head):
        return None
    for offset, signature, kind in _SIGNATURES:
        if head.startswith(signature, offset):
            inner = (one for name, one in _IN_ZIP if kind is _ZIP and re.search(name, head, re.S))
            return next(inner, kind)
    return None


def is_binary(head: bytes) -> bool:
    """True if the first bytes of a file have more control characters than a text has."""
    controls = _control_characters(head)
    return controls >= _LEAST_CONTROLS and controls >= _LEAST_CONTROL_SHARE * len(head)


def _control_characters(head: bytes) -> int:
    return len(head) - len(head.translate(None, _CONTROLS))


def binary_file(path: Path, kind: FileKind = _BINARY) -> str:
    """The message about a file that is not text, although its ending is that of a text."""
    return f"it is {kind.name}: {kind.advice(path)}"


def kind_by_ending(ending: str) -> FileKind | None:
    """The kind of files with an ending such as .tar.gz; None if the ending is unknown."""
    return _BY_ENDING.get(ending) or _BY_ENDING.get(f".{ending.rpartition('.')[2]}")


def kind_of(path: Path, ending: str) -> FileKind:
    """The kind of a file whose ending is not supported.

    Raises:
        OSError: the file can't be read.
    """
    # The ending comes first, because the first bytes of a .tar.gz are those of any .gz.
    if (known := kind_by_ending(ending)) is not None:
        return known
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if (found := kind_by_bytes(head)) is not None:
        return found
    if ending == ".json":
        return exported_chats(head) or _json_kind(head)
    is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return _BINARY if is_binary(head) and not is_wide else OTHER_TEXT


def exported_chats(head: bytes) -> FileKind | None:
    """The kind of a JSON file that another program exported its chats to, by its first bytes; None
    if it is not known to be one."""
    return next((kind for sign, kind in _EXPORTS if re.search(sign, head)), None)


def _json_kind(head: bytes) -> FileKind:
    kind = conversation_kind({key.decode() for key in _KEYS.findall(head)})
    if kind is not None:
        return FileKind(
            f"JSON of {_RECORDS[kind]}, not text",
            f"firstlight prepare --kind {kind} reads it; {START_FROM[kind]}",
        )
    one_a_line = re.match(rb"\s*\{.*\}\s*\n\s*\{", head[: head.find(b"\n") + 80])
    return _LINES if one_a_line else _JSON


def conversation_kind(fields: Collection[str]) -> Literal["chat", "preference"] | None:
    """The value of `prepare --kind` that reads records with these fields; None for texts."""
    if {"chosen", "rejected"} <= set(fields):
        return "preference"
    chat = {"messages", "conversations", "conversation"} & set(fields)
    return "chat" if chat or {"instruction", "output"} <= set(fields) else None


def conversation_text(fields: Collection[str]) -> str | None:
    """The message about records with these fields in place of texts; None if they may be texts."""
    if (kind := conversation_kind(fields)) is None:
        return None
    names = ", ".join(list(fields)[:8])
    return (
        f"{_RECORDS[kind]}, not text (fields: {names}): firstlight prepare --kind {kind} reads "
        f"them; {START_FROM[kind]}"
    )
