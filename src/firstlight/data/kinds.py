"""Detect file types other than plain text, and define the field names by which conversations are
recognised.

A file type is detected from the first bytes or the suffix of a file. Most types come with a command
that extracts the text.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

#: Number of bytes at the beginning of a file from which its type is detected.
HEAD_BYTES = 1 << 16

#: Control characters that do not occur in text: all below 0x20 except 0x08 to 0x0D (backspace to
#: carriage return) and 0x1B (escape).
_CONTROLS = bytes([*range(0x08), *range(0x0E, 0x1B), *range(0x1C, 0x20)])
#: A file is binary if its first bytes contain at least this number of control characters and they
#: make up at least this fraction. About 10 % of the bytes in compressed data are control
#: characters, while a text file may contain a few.
_LEAST_CONTROLS, _LEAST_CONTROL_SHARE = 8, 0.02


class FileKind(NamedTuple):
    """A file type.

    Attributes:
        name: name of the type, including its article, for messages.
        remedy: advice on how to extract the text. It can contain the placeholders {file} (the
            file), {text} (a text file in the same folder), {lines} (a JSONL file) and {folder} (a
            folder next to the file).
        endings: suffixes of files of this type, separated by spaces.
        first_bytes: pattern that matches the first bytes of files of this type; b"" if the type
            can't be detected from the first bytes.
    """

    name: str
    remedy: str
    endings: str = ""
    first_bytes: bytes = b""

    def advice(self, path: Path, count: int = 1) -> str:
        """Return the advice for the file at `path`, with all paths quoted for a shell. If `count`
        is not 1, the advice is phrased for this number of files, and `path` is a placeholder for
        their names.
        """
        if self.remedy == _BY_READER and not path.name.lower().endswith(
            tuple(self.endings.split())
        ):
            return f"rename it to end in {self.endings.split()[0]}"
        stem = path.with_name(re.sub(r"(?<=.)(\.tar)?\.[^.]+$", "", path.name))
        text = stem.with_name(f"{stem.name}.txt")
        # The command must not overwrite the file that it reads.
        text = stem.with_name(f"{stem.name}.plain.txt") if text == path else text
        if self.name == COMPRESSED and path.suffix.lower() in self.endings.split():
            text = path.with_suffix("")  # The name may have a second suffix: paper.pdf.gz.
        names = {"file": path, "text": text, "folder": stem}
        names["parent"] = path.parent
        names["lines"] = stem.with_name(f"{stem.name}.jsonl")
        remedy = self.remedy
        if count != 1:
            remedy = re.sub(r"\bit\b", "them", re.sub(r"\bits\b", "their", remedy))
        return remedy.format(**{key: shlex.quote(str(name)) for key, name in names.items()})


_TEXT_BY = "extract its text with "
#: Advice for formats whose reader (see `formats.registry`) is not installed.
_BY_READER = "install its reader with pip install 'firstlight[documents]'"
_SHEET = (
    "save it as CSV in a spreadsheet program, and give the name of its text column with --text-key"
)
_SLIDES = "save it as PDF, and use that file"
_UNPACKED_BY = "unpack it with %s, and use that folder"
COMPRESSED, _PIPED_BY = "a compressed file", "unpack it with %s -dc < {file} > {text}"
#: Templates of patterns for the first bytes of two kinds of ZIP files: an OpenDocument file of a
#: given type, and a ZIP file that contains a folder with a given name.
_OPEN_DOCUMENT = rb"PK\x03\x04.*mimetypeapplication/vnd\.oasis\.opendocument\."
_FOLDER = rb"(?=PK\x03\x04).*PK\x03\x04.{26}"

_PDF = FileKind("a PDF document", _BY_READER, ".pdf", rb"%PDF-")
_BINARY = FileKind("a binary file", "exclude it")
#: File type for text whose suffix does not belong to any other type.
OTHER_TEXT = FileKind("text", "")
#: File types. The first type whose pattern matches is used.
_KINDS = (
    _PDF,
    FileKind("a notebook", _BY_READER, ".ipynb"),
    FileKind("an e-book", _BY_READER, ".epub", rb"PK\x03\x04.*mimetypeapplication/epub"),
    FileKind("an OpenDocument text", _BY_READER, ".odt", _OPEN_DOCUMENT + b"text"),
    FileKind("a spreadsheet", _SHEET, ".ods", _OPEN_DOCUMENT + b"spreadsheet"),
    FileKind("a presentation", _SLIDES, ".odp", _OPEN_DOCUMENT + b"presentation"),
    FileKind("a Word document", _BY_READER, ".docx .docm", _FOLDER + b"word/"),
    FileKind("a spreadsheet", _SHEET, ".xlsx .xls .xlsm", _FOLDER + b"xl/"),
    FileKind("a presentation", _SLIDES, ".pptx .ppt", _FOLDER + b"ppt/"),
    FileKind("a web page", _BY_READER, ".html .htm .xhtml"),
    FileKind("a document in rich text format", _BY_READER, ".rtf"),
    FileKind(
        "a document in an older Office format",
        f"{_TEXT_BY}soffice --headless --convert-to txt --outdir {{parent}} {{file}}",
        ".doc",
        rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    ),
    FileKind("a ZIP archive", _UNPACKED_BY % "unzip {file} -d {folder}", ".zip", rb"PK\x03\x04"),
    FileKind(
        "a tar archive",
        _UNPACKED_BY % "mkdir {folder} && tar -xf {file} -C {folder}",
        ".tar .tgz .tbz2 .txz .tar.gz .tar.bz2 .tar.xz .tar.zst",
        rb".{257}ustar",
    ),
    FileKind(
        "a 7z archive", _UNPACKED_BY % "7z x {file} -o{folder}", ".7z", rb"7z\xbc\xaf\x27\x1c"
    ),
    FileKind("a RAR archive", _UNPACKED_BY % "unrar x {file} {folder}/", ".rar", rb"Rar!\x1a\x07"),
    FileKind(COMPRESSED, _PIPED_BY % "gzip", ".gz", rb"\x1f\x8b"),
    FileKind(COMPRESSED, _PIPED_BY % "bzip2", ".bz2", rb"BZh"),
    FileKind(COMPRESSED, _PIPED_BY % "zstd", ".zst", rb"\x28\xb5\x2f\xfd"),
    FileKind(COMPRESSED, _PIPED_BY % "xz", ".xz", rb"\xfd7zXZ\x00"),
    FileKind(
        "an image",
        "exclude it, or extract its text with tesseract {file} {folder}",
        ".png .jpg .jpeg .gif .webp .tif .tiff .bmp .heic .ico",
        rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|.{8}WEBP|II\*\x00|MM\x00\*",
    ),
    FileKind(
        "a recording",
        "exclude it, or transcribe it first",
        ".mp3 .wav .ogg .flac .m4a .mp4 .mkv .avi .mov .webm",
        rb".{8}WAVE|ID3|OggS|fLaC|.{4}ftyp",
    ),
    FileKind(
        "an SQLite database",
        "export its text with sqlite3 -header -csv {file} 'select COLUMN as text from TABLE' > "
        "OUT.csv",
        ".sqlite .sqlite3",
        rb"SQLite format 3\x00",
    ),
    FileKind("a Parquet table", "rename it to end in .parquet", "", rb"PAR1"),
    FileKind(
        "an Arrow table",
        "convert it with Dataset.to_parquet of the datasets package",
        ".arrow",
        rb"ARROW1",
    ),
    FileKind(
        "a file of numbers",
        "exclude it",
        ".npy .npz .pt .pth .safetensors .gguf .h5",
        rb"\x93NUMPY|\x89HDF",
    ),
    FileKind("a program", "exclude it", ".exe .dll .so .o .pyc .class", rb"\x7fELF|MZ"),
)
_LINES = FileKind("JSON with one record per line", "rename it to end in .jsonl")
_JSON = FileKind(
    "JSON, which must have one text per line",
    "convert it to JSON Lines with jq -c '.[]' {file} > OUT.jsonl",
)
_BY_ENDING = {ending: kind for kind in _KINDS for ending in kind.endings.split()}

#: A pattern that occurs in the first bytes of the chats that Telegram exports.
TELEGRAM_SIGN = (
    rb'"type":\s*"(?:personal_chat|bot_chat|saved_messages|'
    rb'(?:private|public)_(?:group|supergroup|channel))"|"about":\s*"Here is the data you requested'
)
#: Types of JSON files to which other programs export chats. Each entry consists of a pattern that
#: occurs in the first bytes of such a file, and the file type.
_EXPORTS = (
    (
        TELEGRAM_SIGN,
        FileKind(
            "a chat export from Telegram",
            "none of its senders is an assistant: train on it as text, without records beside it",
        ),
    ),
)

_KEYS = re.compile(rb'"([A-Za-z_]{4,20})"\s*:')
_RECORDS = {"chat": "conversations", "preference": "preference pairs"}

#: Field names of records, grouped by meaning. Names are also recognised in upper case, and with
#: spaces or hyphens instead of underscores. If several fields have the same meaning, the first one
#: is used.
MESSAGE_FIELDS = ("messages", "conversations", "conversation")
QUESTION_FIELDS = tuple("instruction prompt question query problem input inputs user human".split())
ANSWER_FIELDS = tuple(
    "output completion response solution answer answers assistant target targets".split()
)
#: Fields whose text is appended to the question in the same message.
CONTEXT_FIELDS = ("input", "context")
SYSTEM_FIELDS = tuple(
    "system system_prompt system_message system_instruction systemprompt systeminstruction".split()
)
#: Fields of a record that may contain the reasoning before the answer, in addition to the keys for
#: reasoning in its messages.
REASONING_FIELDS = tuple(
    "cot complex_cot chain_of_thought rationale thinking_trajectory thinking_trajectories "
    "deepseek_thinking_trajectory".split()
)
#: Fields by which a record is recognised as a single message from a tree of conversations.
TREE_FIELDS = {"message_id", "role", "text"}
#: Field names of preference pairs, as (name for the preferred answer, name for the rejected
#: answer).
PAIR_FIELDS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
)


def start_from(kind: Literal["chat", "preference"], files: Sequence[str] = ("FILE",)) -> str:
    """Return advice on how to train on the records in these files."""
    start = "a model that answers" if kind == "preference" else "an existing model"
    return (
        f"to train a model on them, start from {start}: firstlight train {shlex.join(files)} "
        "--init-from MODEL"
    )


def kind_by_bytes(head: bytes) -> FileKind | None:
    """Return the type of a file from the signature in its first bytes, or None if it has no known
    signature."""
    if head.startswith(b"%PDF-"):
        return _PDF
    # Text may happen to begin with the letters of a signature, but does not contain control
    # characters.
    if not _control_characters(head):
        return None
    kinds = (kind for kind in _KINDS if kind.first_bytes)
    return next((kind for kind in kinds if re.match(kind.first_bytes, head, re.DOTALL)), None)


def is_binary(head: bytes) -> bool:
    """Return True if the first bytes of a file contain more control characters than text does."""
    controls = _control_characters(head)
    return controls >= _LEAST_CONTROLS and controls >= _LEAST_CONTROL_SHARE * len(head)


def _control_characters(head: bytes) -> int:
    return len(head) - len(head.translate(None, _CONTROLS))


def binary_file(path: Path, kind: FileKind = _BINARY) -> str:
    """Return the error message for a file that has the suffix of a text file but is not text."""
    return f"it is {kind.name}: {kind.advice(path)}"


def kind_by_ending(ending: str) -> FileKind | None:
    """Return the type of files with a suffix such as .tar.gz, or None if the suffix is unknown."""
    return _BY_ENDING.get(ending) or _BY_ENDING.get(f".{ending.rpartition('.')[2]}")


def kind_of(path: Path, ending: str) -> FileKind:
    """Return the type of a file whose suffix is not supported.

    Raises:
        OSError: the file can't be read.
    """
    # Check the suffix first, because a .tar.gz file begins with the same bytes as any .gz file.
    if (known := kind_by_ending(ending)) is not None:
        return known
    with open(path, "rb") as file:
        return kind_of_content(file.read(HEAD_BYTES), ending)


def kind_of_content(head: bytes, ending: str) -> FileKind:
    """For a file with an unknown suffix, detect the type from its first bytes."""
    if (found := kind_by_bytes(head)) is not None:
        return found
    if ending == ".json":
        return exported_chats(head) or _json_kind(head)
    is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return _BINARY if is_binary(head) and not is_wide else OTHER_TEXT


def exported_chats(head: bytes) -> FileKind | None:
    """Return the type of a JSON file with chats exported by another program, detected from its
    first bytes, or None if it is not recognised.
    """
    return next((kind for sign, kind in _EXPORTS if re.search(sign, head)), None)


def _json_kind(head: bytes) -> FileKind:
    kind = conversation_kind({key.decode() for key in _KEYS.findall(head)})
    if kind is not None:
        return FileKind(
            f"JSON of {_RECORDS[kind]}, not text",
            f"firstlight prepare --kind {kind} reads it; {start_from(kind)}",
        )
    one_a_line = re.match(rb"\s*\{.*\}\s*\n\s*\{", head[: head.find(b"\n") + 80])
    return _LINES if one_a_line else _JSON


def field_name(field: object) -> str:
    """Return the name of a record's field in lower case, with underscores."""
    return re.sub(r"[\s-]+", "_", str(field).strip().lower())


def conversation_kind(
    fields: Collection[str], text_key: str = "text"
) -> Literal["chat", "preference"] | None:
    """Return the value of `prepare --kind` for records with these fields, or None for text
    documents.

    Args:
        fields: names of the fields.
        text_key: name of the text field; "" if there is none. A record that has this field is a
            text document, even if it also contains a question and an answer. If `text_key` is
            "text", there are exceptions: preference pairs, lists of messages and records in
            Alpaca's format are not text documents.
    """
    names = {field_name(field) for field in fields}
    # The index of a table written by pandas is a column named "".
    has_text = text_key != "" and text_key in fields
    if has_text and text_key != "text":
        return None
    if any(names.issuperset(pair) for pair in PAIR_FIELDS):
        return "preference"
    if names >= TREE_FIELDS:
        return "chat"
    if names.intersection(MESSAGE_FIELDS) or {"instruction", "output"} <= names:
        return "chat"
    is_answered = names.intersection(QUESTION_FIELDS) and names.intersection(ANSWER_FIELDS)
    return "chat" if is_answered and not has_text else None


def conversation_text(fields: Collection[str]) -> str | None:
    """Return a message if the records are conversations rather than text documents, or None if they
    may be text documents.
    """
    if (kind := conversation_kind(fields)) is None:
        return None
    names = ", ".join(list(fields)[:8])
    return (
        f"{_RECORDS[kind]}, not text (fields: {names}): firstlight prepare --kind {kind} reads "
        f"files that contain nothing else; {start_from(kind)}"
    )
