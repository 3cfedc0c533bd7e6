"""Opening of text files: decompression and decoding.

UTF-8, and UTF-16 and UTF-32 with a byte-order mark (BOM), are read; the BOM is never part of the
text. A file in any other encoding is refused with the command that converts it. The command names
the encoding if it can be detected (`likely_encoding`).
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from firstlight.data.encodings import likely_encoding
from firstlight.data.kinds import HEAD_BYTES, binary_file, is_binary, kind_by_bytes
from firstlight.errors import MissingDependencyError

#: A file may unpack to the larger of this number of bytes and this multiple of its own size. Text
#: has 3 to 10 times its compressed bytes, log files up to 50 times.
_MOST_UNPACKED_BYTES, _MOST_UNPACKED_TIMES = 50_000_000, 100
#: Bytes that a line counts in addition to its own: each line may be a document, which takes time.
_LINE_BYTES = 16
#: Bytes of a decompressed file that are read at a time.
_PIECE_BYTES = 1 << 17
#: Bytes of a .zst file that are unpacked at a time. Few, because 3 bytes can unpack to 128 KiB.
_ZST_PIECE_BYTES = 1 << 11
#: One document may have the larger of this number of bytes and this multiple of its file's size.
_LARGEST_DOCUMENT_BYTES, _LARGEST_DOCUMENT_TIMES = 1 << 26, 10
#: Bytes that are read of a file at a time.
_BLOCK_BYTES = 1 << 20
#: Byte-order marks. UTF-32's come first, because that of little-endian UTF-32 begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: (command that decompresses, command that compresses) for each ending of a compressed file.
_PROGRAMS = {
    ".gz": ("gzip -dc", "gzip"),
    ".bz2": ("bzip2 -dc", "bzip2"),
    ".zst": ("zstd -dc", "zstd"),
}


class EncodingProblem(Exception):  # noqa: N818 - it becomes a rejected document, not an error
    """A file, or a part of a file, is not text in a supported encoding.

    Attributes:
        reason: a key of `records.REASONS`.
        line: first line with invalid bytes, counted from 1.
    """

    def __init__(self, reason: str, detail: str, line: int = 1) -> None:
        super().__init__(detail)
        self.reason, self.line = reason, line


def head_of(path: Path) -> bytes:
    """The first `HEAD_BYTES` bytes of a file, decompressed.

    Raises:
        OSError, EOFError, zlib.error: the file can't be read or decompressed.
    """
    with open_compressed(path) as file:
        return file.read(HEAD_BYTES)


def encoding_of(head: bytes, path: Path) -> str:
    """Python's name of a file's encoding, from its first bytes: utf-8-sig (UTF-8 with or without a
    BOM), utf-16 or utf-32. The bytes after the BOM are not checked.

    Raises:
        EncodingProblem: the content is not text, or is UTF-16 or UTF-32 without a BOM.
    """
    head = head[:HEAD_BYTES]
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked is not None:
        return marked
    if (kind := kind_by_bytes(head)) is not None:
        raise EncodingProblem("binary", binary_file(path, kind))
    if (found := _without_mark(head)) is not None:
        raise EncodingProblem("bad_utf8", f"the file is {found.upper()}{_advice(path, found)}")
    if is_binary(head):
        if (found := _without_zeros(head)) is not None:
            raise EncodingProblem("bad_utf8", f"the file is {found.upper()}{_advice(path, found)}")
        raise EncodingProblem("binary", binary_file(path))
    return "utf-8-sig"


def _without_mark(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a BOM, detected from the zero bytes of its ASCII characters; None if
    the bytes show neither."""
    for width, names in ((4, ("utf-32le", "utf-32be")), (2, ("utf-16le", "utf-16be"))):
        size = len(head) // width
        zeros = [head[place::width].count(0) for place in range(width)]
        if size < 2:
            continue
        # An ASCII character's own byte is the first one in little-endian, the last in big-endian.
        # Every other byte must be zero in a third of the characters, and ten times as often as the
        # own byte.
        for name, others, own in (
            (names[0], zeros[1:], zeros[0]),
            (names[1], zeros[:-1], zeros[-1]),
        ):
            if min(others) > max(size // 3, 10 * own):
                return name
    return None


#: Characters of texts that are not in the Latin alphabet, from Greek to Thai and of East Asia.
_USUAL = re.compile(
    r"[\t\n\r -~\u0370-\u0e7f\u2010-\u2026\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef]"
)
#: Those of them that any hundred characters of such a text have: spaces, or kana, Hangul and East
#: Asian punctuation.
_FREQUENT = re.compile(r"[ \u3000-\u30ff\uac00-\ud7af\uff00-\uffef]")


def _without_zeros(head: bytes) -> str | None:
    """UTF-16 without a BOM of a text whose few ASCII characters don't show it; None if it is
    something else."""
    size = len(head) // 2
    for name in ("utf-16le", "utf-16be"):
        text = head[: 2 * size].decode(name, "ignore")
        usual, frequent = (len(one.findall(text)) for one in (_USUAL, _FREQUENT))
        if usual >= 0.95 * size and frequent >= 0.01 * size:
            return name
    return None


def decoded(content: bytes, path: Path) -> str:
    """The text of a whole file, without its BOM.

    Raises:
        EncodingProblem: the file is not in a supported encoding; the message names the first
            invalid byte.
    """
    encoding = encoding_of(content, path)
    if encoding == "utf-8-sig":
        return decoded_utf8(content.removeprefix(codecs.BOM_UTF8), path)
    return b"".join(_utf8_of_wide(io.BytesIO(content), encoding)).decode("utf-8")


def decoded_utf8(content: bytes, path: Path) -> str:
    """The text of a document in UTF-8.

    Args:
        content: the document.
        path: the file that it is from, for the message.

    Raises:
        EncodingProblem: the document is not UTF-8; the message names the first invalid byte, and
            the line is counted from the document's first one.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        advice = _advice(path, likely_encoding(content[: 1 << 20]))
        detail = f"byte 0x{content[error.start]:02x} is not UTF-8{advice}"
        raise EncodingProblem("bad_utf8", detail, line) from error


def largest_document(path: Path) -> int:
    """Largest size in bytes of one document of a file, unpacked: 64 MiB, or ten times the file's
    size if that is more. A document of an uncompressed file can't be larger."""
    return max(_LARGEST_DOCUMENT_BYTES, _LARGEST_DOCUMENT_TIMES * path.stat().st_size)


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """All bytes of a file. If the file is longer than `most_bytes`, only its beginning is returned,
    which is longer than `most_bytes`, too, so that the caller sees the excess."""
    # In blocks, because one read of `most_bytes` would allocate that much for the shortest file.
    content = io.BytesIO()
    while content.tell() <= most_bytes and (block := file.read(_BLOCK_BYTES)):
        content.write(block)
    return content.getvalue()


def blocks_of(stream: IO[bytes], most_bytes: int | None) -> Iterator[bytes]:
    """The bytes of a file in blocks of any size; with a limit, the complete lines in its first
    `most_bytes` bytes. If the first line is longer, its first `most_bytes` bytes are returned,
    without an incomplete character at their end.

    Args:
        stream: the file from its beginning, as `utf8_stream` returns it.
        most_bytes: the limit in bytes; None is no limit.
    """
    if most_bytes is None:
        yield from iter(lambda: stream.read(_BLOCK_BYTES), b"")
        return
    left = most_bytes
    line = [b""]
    is_first = True
    while left > 0 and (block := stream.read(min(left, _BLOCK_BYTES))):
        left -= len(block)
        if end := block.rfind(b"\n") + 1:
            yield b"".join([*line, block[:end]])
            line, is_first = [], False
        line.append(block[end:])
    rest = b"".join(line)
    if not stream.read(1):
        yield rest
    elif is_first:
        # The last character, which may be incomplete, begins at the last byte that is not one of
        # UTF-8's continuation bytes (0x80 to 0xBF).
        end = len(rest) - 1
        while end > 0 and 0x80 <= rest[end] < 0xC0:
            end -= 1
        yield rest[: max(end, 0)]


def utf8_stream(file: IO[bytes], path: Path) -> IO[bytes]:
    """The bytes of a file's text in UTF-8, without its BOM.

    A UTF-8 file is not checked, because the callers reject single lines of it. At invalid UTF-16 or
    UTF-32, reading raises EncodingProblem after the text before the invalid bytes.

    Args:
        file: the file from its beginning, as `open_compressed` returns it.
        path: the path of `file`.

    Raises:
        EncodingProblem: the file is not in a supported encoding.
    """
    head = head_of(path)
    if (encoding := encoding_of(head, path)) != "utf-8-sig":
        return io.BufferedReader(_ChunkFile(_utf8_of_wide(file, encoding)))
    if head.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


def _utf8_of_wide(file: IO[bytes], encoding: str) -> Iterator[bytes]:
    """The text of a UTF-16 or UTF-32 file with a BOM, in chunks of UTF-8 without a BOM."""
    first = file.read(4 if encoding == "utf-32" else 2)
    codec = f"{encoding}-{'le' if first.startswith(codecs.BOM_UTF16_LE) else 'be'}"
    decoder = codecs.getincrementaldecoder(codec)()
    place, lines = len(first), 1
    while True:
        read = file.read(HEAD_BYTES)
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(read, final=not read)
        except UnicodeDecodeError as error:
            # The text before the invalid bytes is valid and passed on.
            text = error.object[: error.start].decode(codec)
            yield text.encode("utf-8")
            where = f"from byte {place - waiting + error.start:,} on"
            problem = f"not valid {encoding.upper()} {where}: {error.reason}"
            raise EncodingProblem("bad_utf16", problem, lines + text.count("\n")) from None
        yield text.encode("utf-8")
        place, lines = place + len(read), lines + text.count("\n")
        if not read:
            return


def bad_byte(byte: int, path: Path) -> str:
    """The message about a byte of a file that is not UTF-8, with the command that converts the
    file."""
    return f"byte 0x{byte:02x} is not UTF-8{_advice(path, _likely_encoding_of(path))}"


@functools.lru_cache(maxsize=8)
def _likely_encoding_of(path: Path) -> str | None:
    return likely_encoding(head_of(path))


def _advice(path: Path, encoding: str | None) -> str:
    """The command that converts a file to UTF-8, as the end of a message."""
    name = "ENCODING" if encoding is None else encoding.upper()
    # "-c" drops the invalid bytes of a file that is UTF-8 otherwise.
    options = "-c -f UTF-8" if name == "UTF-8" else f"-f {name}"
    read, write = shlex.quote(str(path)), shlex.quote(str(_converted(path)))
    iconv = f"iconv {options} -t utf-8"
    programs = _PROGRAMS.get(path.suffix.lower())
    if programs is None:
        command = f"{iconv} {read} > {write}"
    else:
        command = f"{programs[0]} {read} | {iconv} | {programs[1]} > {write}"
    if encoding is None:
        command += ", with its encoding for ENCODING: GB18030, BIG5, EUC-KR, ISO-8859-2, ..."
    return f": convert it with {command}"


def _converted(path: Path) -> Path:
    """a.txt.gz -> a.utf-8.txt.gz."""
    stem, dot, endings = path.name.partition(".")
    return path.with_name(f"{stem}.utf-8{dot}{endings}")


# Compression


def open_compressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed according to its ending (.gz, .bz2, .zst).

    Raises:
        OSError: the file can't be opened; or, from a later read, it unpacks to far more than text
            does (see `require_unpacked_size`).
        MissingDependencyError: the package for .zst is not installed.
    """
    suffix = path.suffix.lower()
    zstandard = optional("zstandard", f"reading {path}") if suffix == ".zst" else None
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    file = openers.get(suffix, open)(path, "rb")
    if suffix not in _PROGRAMS:
        return cast("IO[bytes]", file)
    chunks = iter(lambda: file.read(_PIECE_BYTES), b"")
    if zstandard is not None:
        chunks = _unpacked_zst(file, zstandard)
    return io.BufferedReader(_ChunkFile(_bounded(chunks, path), file), _PIECE_BYTES)


class _ChunkFile(io.RawIOBase):
    """A file whose content is an iterator of chunks of bytes; closing it closes `source`, too."""

    def __init__(self, chunks: Iterator[bytes], source: IO[bytes] | None = None) -> None:
        self._chunks, self._source = chunks, source
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _bounded(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """`chunks`, the decompressed content of the file at `path`, limited by
    `require_unpacked_size`."""
    total = 0
    for chunk in chunks:
        total += len(chunk) + _LINE_BYTES * chunk.count(b"\n")
        require_unpacked_size(path, total)
        yield chunk


def require_unpacked_size(path: Path, unpacked_bytes: int) -> None:
    """Refuse a file that unpacks to far more than text does.

    Args:
        path: the compressed file.
        unpacked_bytes: bytes that the file unpacks to, or has unpacked to so far.

    Raises:
        OSError: `unpacked_bytes` is more than 50 MB and more than 100 times the file's size.
    """
    if unpacked_bytes <= _MOST_UNPACKED_BYTES:
        return
    if unpacked_bytes > _MOST_UNPACKED_TIMES * path.stat().st_size:
        raise OSError(
            f"it unpacks to more than {_MOST_UNPACKED_TIMES} times its size, as text doesn't: "
            "unpack it yourself if it is text"
        )


def _unpacked_zst(file: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """The decompressed content of a .zst file, in chunks.

    The library's own reader takes a truncated file for a complete one.

    Raises:
        OSError: the file is damaged.
        EOFError: the file is truncated.
    """
    # `zstd --long=31` writes windows of 2 GiB, which the default limit refuses.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    try:
        while compressed := file.read(_ZST_PIECE_BYTES):
            while compressed:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(compressed)
                compressed = b""
                if frame.eof:
                    compressed, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("the compressed file is cut short")


def optional(package: str, purpose: str, extra: str = "data") -> Any:
    """Import an optional package.

    Args:
        package: the module to import.
        purpose: the work that needs the package, as the beginning of the error message.
        extra: the extra of firstlight that installs the package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingDependencyError(package.partition(".")[0], extra, purpose) from None
