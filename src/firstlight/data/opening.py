"""Open text files: decompress and decode them.

UTF-8 is supported. UTF-16 and UTF-32 are supported if the file begins with a byte-order mark (BOM),
which is never part of the text. A file in any other encoding is rejected, because a wrong guess
would silently change the text. The error message includes a command for converting the file. It
specifies the source encoding if `likely_encoding` can detect it.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import functools
import gzip
import importlib
import io
import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from firstlight.data.kinds import HEAD_BYTES, binary_file, is_binary, kind_by_bytes
from firstlight.errors import MissingDependencyError

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatch

#: The decompressed size of a file is limited to this number of bytes or this multiple of the
#: compressed size, whichever is larger. Text is usually 3 to 10 times as large as its compressed
#: form, and logs are up to 50 times as large.
_MOST_UNPACKED_BYTES, _MOST_UNPACKED_TIMES = 50_000_000, 100
#: Number of bytes added to the decompressed size for each line, because each line may be a document
#: and each document takes time to process.
_LINE_BYTES = 16
#: Number of bytes of a decompressed file that are read at a time.
_PIECE_BYTES = 1 << 17
#: Number of bytes of a .zst file that are decompressed at a time. It is small because 3 bytes can
#: decompress to 128 KiB.
_ZST_PIECE_BYTES = 1 << 11
#: A document can have at most this number of bytes or this multiple of the size of its file,
#: whichever is larger.
_LARGEST_DOCUMENT_BYTES, _LARGEST_DOCUMENT_TIMES = 1 << 26, 10
#: Number of bytes of a file that are read at a time.
_BLOCK_BYTES = 1 << 20
#: Byte-order marks and their encodings. UTF-32 comes first, because its little-endian mark begins
#: with the little-endian mark of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: (decompression command, compression command) for each suffix of a compressed file.
_PROGRAMS = {
    ".gz": ("gzip -dc", "gzip"),
    ".bz2": ("bzip2 -dc", "bzip2"),
    ".xz": ("xz -dc", "xz"),
    ".zst": ("zstd -dc", "zstd"),
}


class EncodingProblem(Exception):  # noqa: N818 - it becomes a rejected document, not an error
    """Raised if a file or a part of it is not text in a supported encoding.

    Attributes:
        reason: a key of `records.REASONS`.
        line: first line with invalid bytes, one-based.
    """

    def __init__(self, reason: str, detail: str, line: int = 1) -> None:
        super().__init__(detail)
        self.reason, self.line = reason, line


def head_of(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` bytes of a file, decompressed.

    Raises:
        OSError, EOFError: the file can't be read or decompressed.
    """
    with open_compressed(path) as file:
        return file.read(HEAD_BYTES)


def encoding_of(head: bytes, path: Path) -> str:
    """Return Python's name for a file's encoding, detected from its first bytes: utf-8-sig (UTF-8
    with or without a BOM), utf-16 or utf-32. The bytes after the BOM are not checked.

    Raises:
        EncodingProblem: the content is not text, or is UTF-16 or UTF-32 without a BOM.
    """
    head = head[:HEAD_BYTES]
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked is not None:
        return marked
    if (kind := kind_by_bytes(head)) is not None:
        raise EncodingProblem("binary", binary_file(path, kind))
    # Text in UTF-16 or UTF-32 contains many zeros or other bytes that do not occur in UTF-8 text.
    looks_binary = is_binary(head)
    if looks_binary or 4 * head.count(0) > len(head):
        matches = _matches(head[: len(head) // 4 * 4], _WIDE) or _matches(head, _WIDE)
        if matches:
            found = _iconv_name(matches[0].encoding)
            raise EncodingProblem("bad_utf8", f"the file is {found}{_advice(path, found)}")
    if looks_binary:
        raise EncodingProblem("binary", binary_file(path))
    return "utf-8-sig"


#: Python's names for the encodings to detect: 16-bit and 32-bit encodings, encodings of non-Latin
#: alphabets, and encodings of the Latin alphabet.
_WIDE = ("utf_32_le", "utf_32_be", "utf_16_le", "utf_16_be")
_NOT_LATIN = tuple(
    "cp932 euc_jp gb18030 big5 cp949 cp1251 koi8_r koi8_u cp866 iso8859_5 cp1253 iso8859_7 "
    "cp1255 iso8859_8 cp1256 iso8859_6 cp874".split()
)
_LATIN = tuple("cp1252 cp1250 cp1254 cp1257 cp850 cp775 mac_roman iso8859_2".split())
#: Two conditions for detecting an encoding: the minimum number of non-ASCII bytes, and the minimum
#: margin between the best match and all other encodings. The margin is a difference in
#: charset-normalizer's measure of disorder ("chaos").
_LEAST_BYTES, _LEAST_DISTANCE = 20, 0.05
#: Number of ASCII bytes before the first non-ASCII byte of a file that are also examined.
_CONTEXT_BYTES = 1000
#: Windows-1252 bytes of the non-ASCII characters in German, French, Spanish, Portuguese, Italian,
#: Dutch and Scandinavian text, except bytes that represent a different letter in Windows-1250 or
#: Windows-1254.
_WESTERN = set(
    "àáâãäåæçèéêëìíîïñòóôöøùúûüßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÖØÙÚÛÜŒ«»°§¡£€©®…–—‘’“”„‚•·ºª\xa0".encode(
        "cp1252"
    )
)
#: Encoding declaration in the first or second line of a Python file (PEP 263).
_DECLARED = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


@functools.lru_cache(maxsize=8)
def likely_encoding(path: Path) -> str | None:
    """Return iconv's name for the encoding of a text file that is not valid UTF-8, or None if the
    encoding is uncertain.

    The following can be detected: the encoding that a Python file declares, UTF-8 with a few
    invalid bytes, common encodings of non-Latin alphabets, and Windows-1252 (which includes
    ISO-8859-1).
    """
    with open_compressed(path) as file:
        head = content = file.read(HEAD_BYTES)
        while content.isascii() and (block := file.read(HEAD_BYTES)):
            content = content[-_CONTEXT_BYTES:] + block
        content += file.read(HEAD_BYTES)
    declared = _DECLARED.match(head)
    if declared is not None and (name := _known(declared[1].decode("ascii", "replace"))):
        return _iconv_name(name)
    # Drop the last line, because it may end in the middle of a character.
    return _detected(content[: content.rfind(b"\n") + 1] or content)


def _detected(content: bytes) -> str | None:
    """Return iconv's name for the encoding of text that is not valid UTF-8, or None if the encoding
    is uncertain."""
    if _has_few_invalid(content):
        return "UTF-8"
    high = [byte for byte in content if byte > 0x7F]
    matches = _matches(content, (*_NOT_LATIN, *_LATIN)) if len(high) >= _LEAST_BYTES else []
    if matches and (best := matches[0]).encoding in _NOT_LATIN:
        others = [match for match in matches if str(match) != str(best)]
        is_clear = all(match.chaos >= best.chaos + _LEAST_DISTANCE for match in others)
        return _iconv_name(best.encoding) if is_clear else None
    return _western(content, high)


def _has_few_invalid(content: bytes, encoding: str = "utf-8") -> bool:
    """Return True if most non-ASCII characters are valid in an encoding."""
    text = content.decode(encoding, "replace")
    return sum(character > "\x7f" for character in text) > 3 * text.count("\ufffd")


#: The encodings that browsers use for declared names (https://encoding.spec.whatwg.org/#names-and-labels),
#: by the names of Python's codecs. They contain more characters than the declared ones.
_BROWSER_ENCODINGS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}


#: Text whose encoding can't be detected is decoded as UTF-8 if less than this share is invalid.
_MOST_INVALID = 0.001


def decoded(content: bytes, declared: str | None) -> str | None:
    """Decode a document whose format allows it to declare its encoding, such as a web page or a
    mail. Many declarations are missing or wrong, and a few bytes may be invalid.

    Args:
        content: the document.
        declared: the declared name of the encoding; None without a declaration.

    Returns:
        The text, or None if the encoding is uncertain.
    """
    marked = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    if marked is None and 4 * content[:HEAD_BYTES].count(0) > len(content[:HEAD_BYTES]):
        wide = _matches(content[:HEAD_BYTES], _WIDE)
        marked = wide[0].encoding if wide else None
    if marked is not None:
        return content.decode(marked, "replace")
    names = ["utf-8"]
    with contextlib.suppress(LookupError):
        found = codecs.lookup(declared or "utf-8").name
        name = _BROWSER_ENCODINGS.get(found, found)
        # Text in UTF-8 is often declared as Windows-1252, which accepts all of it. Text in the
        # Asian encodings may by chance be valid UTF-8. Without zeros, text is not UTF-16.
        comes_first = name.startswith(("cp125", "iso8859", "koi8", "mac", "cp874", "utf"))
        names = ["utf-8", name] if comes_first else [name, "utf-8"]
    for name in names:
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            return content.decode(name)
    for name in names:
        with contextlib.suppress(LookupError):
            if _has_few_invalid(content, name):
                return content.decode(name, "replace")
    if (likely := _detected(content)) is not None:
        return content.decode(likely, "replace")
    text = content.decode("utf-8", "replace")
    return text if text.count("\ufffd") < _MOST_INVALID * len(text) else None


def _matches(content: bytes, encodings: Sequence[str]) -> Sequence[CharsetMatch]:
    """Return the encodings with which the content can be decoded, best match first."""
    from charset_normalizer import from_bytes

    found = from_bytes(
        content, cp_isolation=list(encodings), preemptive_behaviour=False, enable_fallback=False
    )
    return list(found)


def _iconv_name(encoding: str) -> str:
    """Convert Python's name of an encoding to iconv's name: utf_16_le becomes UTF-16LE."""
    return re.sub("_([LB]E)$", r"\1", encoding.upper()).replace("_", "-")


def _known(name: str) -> str | None:
    """Return the name of Python's codec for a declared encoding, or None if it is unknown. This is
    only called for text that is not valid UTF-8. A declaration of ASCII or a UTF encoding must be
    wrong, so the result is also None.
    """
    try:
        found = codecs.lookup(name).name
    except LookupError:
        return None
    return None if found.startswith("utf") or found == "ascii" else found


def _western(content: bytes, high: Sequence[int]) -> str | None:
    """Return "WINDOWS-1252" if the text consists mostly of ASCII letters with isolated accented
    letters, otherwise None. charset-normalizer can't be used here, because it prefers Windows-1250
    for French and German.

    Args:
        content: the text.
        high: all non-ASCII bytes in the text.
    """
    letters = len(re.findall(rb"[A-Za-z]", content))
    is_alone = len(high) < letters / 2 + 1 and not re.search(rb"[\x80-\xff]{4}", content)
    # If these bytes occur inside a word, the text is in an MS-DOS code page or Mac OS Roman.
    is_inside = re.search(rb"[a-z][\x80-\x91\x93-\x9b\x9d-\x9f][a-z]", content)
    return "WINDOWS-1252" if is_alone and not is_inside and set(high) <= _WESTERN else None


def decoded_utf8(content: bytes, path: Path) -> str:
    """Decode a document from UTF-8.

    Args:
        content: bytes of the document.
        path: file that contains the document, for the error message.

    Raises:
        EncodingProblem: the document is not UTF-8. The message shows the first invalid byte and its
            line, counted from the first line of the document.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = bad_byte(content[error.start], path)
        raise EncodingProblem("bad_utf8", problem, line) from error


def largest_document(path: Path) -> int:
    """Return the maximum size of a document after decompression, in bytes. It is 64 MiB or ten
    times the size of the file, whichever is larger. The limit never applies to uncompressed files,
    in which a document is at most as large as the file.
    """
    return max(_LARGEST_DOCUMENT_BYTES, _LARGEST_DOCUMENT_TIMES * path.stat().st_size)


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """Return all bytes of a file. If the file is longer than `most_bytes`, return only its
    beginning. In this case, the result has more than `most_bytes` bytes, which shows the caller
    that the limit is exceeded.
    """
    # Read in blocks, because a single read of `most_bytes` would allocate that much memory even for
    # a tiny file.
    content = io.BytesIO()
    while content.tell() <= most_bytes and (block := file.read(_BLOCK_BYTES)):
        content.write(block)
    return content.getvalue()


def blocks_of(stream: IO[bytes], most_bytes: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of any size. With a limit, yield only the lines that end
    within the first `most_bytes` bytes. If the first line is longer than that, yield its first
    `most_bytes` bytes, without an incomplete character at the end.

    Args:
        stream: the file from its beginning, as returned by `utf8_stream`.
        most_bytes: the limit in bytes; None means no limit.
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
        # The last character, which may be incomplete, begins at the last byte that is not a UTF-8
        # continuation byte (0x80 to 0xBF).
        end = len(rest) - 1
        while end > 0 and 0x80 <= rest[end] < 0xC0:
            end -= 1
        yield rest[: max(end, 0)]


def utf8_stream(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return a stream of a file's text in UTF-8, without a BOM.

    A UTF-8 file is not checked, because the callers reject invalid lines individually. For an
    invalid UTF-16 or UTF-32 file, the stream returns the text before the invalid bytes and then
    raises EncodingProblem.

    Args:
        file: the file from its beginning, as returned by `open_compressed`.
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
    """Yield the text of a UTF-16 or UTF-32 file with a BOM, in chunks of UTF-8 without a BOM."""
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
            # Return the valid text before the invalid bytes.
            text = error.object[: error.start].decode(codec)
            yield text.encode("utf-8")
            where = f"from byte {place - waiting + error.start:,}"
            problem = f"not valid {encoding.upper()} {where}: {error.reason}"
            raise EncodingProblem("bad_utf16", problem, lines + text.count("\n")) from None
        yield text.encode("utf-8")
        place, lines = place + len(read), lines + text.count("\n")
        if not read:
            return


def bad_byte(byte: int, path: Path) -> str:
    """Return a message about an invalid UTF-8 byte, along with a command that converts the file."""
    return f"byte 0x{byte:02x} is not UTF-8{_advice(path, likely_encoding(path))}"


def _advice(path: Path, encoding: str | None) -> str:
    """Return the end of an error message, with a command that converts the file to UTF-8."""
    name = encoding or "ENCODING"
    # If the file is UTF-8 except for a few bytes, "-c" drops the invalid bytes.
    options = "-c -f UTF-8" if name == "UTF-8" else f"-f {name}"
    read, write = shlex.quote(str(path)), shlex.quote(str(_converted(path)))
    iconv = f"iconv {options} -t utf-8"
    programs = _PROGRAMS.get(path.suffix.lower())
    if programs is None:
        command = f"{iconv} {read} > {write}"
    else:
        command = f"{programs[0]} {read} | {iconv} | {programs[1]} > {write}"
    if encoding is None:
        command += ", where ENCODING is its encoding: GB18030, BIG5, EUC-KR, ISO-8859-2, ..."
    return f": convert it with {command}"


def _converted(path: Path) -> Path:
    """Return the path for the converted file: a.txt.gz becomes a.utf-8.txt.gz."""
    stem, dot, endings = path.name.partition(".")
    return path.with_name(f"{stem}.utf-8{dot}{endings}")


# Compression


def open_compressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed according to its suffix (.gz, .bz2, .xz, .zst). Of a
    .zip file, open the conversations in an export of ChatGPT or Claude.

    Raises:
        OSError: the file can't be opened. Reading the file also raises this error if the file is
            damaged, or decompresses to an implausible size for text (see `require_unpacked_size`).
        EOFError: the file is truncated. This error is raised while the file is read.
        MissingDependencyError: the package for .zst files is not installed.
    """
    suffix = path.suffix.lower()
    zstandard = optional("zstandard", f"reading {path}") if suffix == ".zst" else None
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    openers[".zip"] = _open_zipped_export
    file = openers.get(suffix, open)(path, "rb")
    if suffix not in openers and zstandard is None:
        return cast("IO[bytes]", file)
    chunks = iter(lambda: file.read(_PIECE_BYTES), b"")
    if zstandard is not None:
        chunks = _unpacked_zst(file, zstandard)
    return io.BufferedReader(_ChunkFile(_bounded(chunks, path), file), _PIECE_BYTES)


def _open_zipped_export(path: Path, mode: str) -> IO[bytes]:
    assert mode == "rb"
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.open("conversations.json")
    except (KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise OSError("it contains no conversations.json of ChatGPT or Claude") from error


class _ChunkFile(io.RawIOBase):
    """File-like object that reads its content from an iterator of byte chunks. Closing it also
    closes `source`.
    """

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
    """Yield `chunks`, which are the decompressed content of the file at `path`. Call
    `require_unpacked_size` for each chunk, to reject a file with an implausible size.
    """
    total = 0
    try:
        for chunk in chunks:
            total += len(chunk) + _LINE_BYTES * chunk.count(b"\n")
            require_unpacked_size(path, total)
            yield chunk
    except (zlib.error, lzma.LZMAError) as error:
        raise OSError(str(error)) from error


def require_unpacked_size(path: Path, unpacked_bytes: int) -> None:
    """Reject a file whose decompressed size is implausible for text.

    Args:
        path: the compressed file.
        unpacked_bytes: number of decompressed bytes, in total or so far.

    Raises:
        OSError: `unpacked_bytes` is more than 50 MB and more than 100 times the file's size.
    """
    if unpacked_bytes <= _MOST_UNPACKED_BYTES:
        return
    if unpacked_bytes > _MOST_UNPACKED_TIMES * path.stat().st_size:
        raise OSError(
            f"it unpacks to more than {_MOST_UNPACKED_TIMES} times its size, which is unusual "
            "for text: unpack it yourself if it is text"
        )


def _unpacked_zst(file: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """Decompress a .zst file in chunks.

    The library's own reader is not used, because it would treat a truncated file as complete.

    Raises:
        OSError: the file is damaged.
        EOFError: the file is truncated.
    """
    # `zstd --long=31` writes windows of 2 GiB, which exceed the default limit.
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
        raise EOFError("the compressed file is truncated")


#: Number of bytes that are compressed at a time. For data that compresses slowly, such as a genome,
#: xz takes 0.2 seconds to compress this many bytes.
_COMPRESSED_BYTES = 1 << 16


class Compressor(Protocol):
    """Interface of the compressor objects of zlib and lzma."""

    def compress(self, data: bytes, /) -> bytes: ...


def compress(compressor: Compressor, data: bytes) -> int:
    """Compress data in small blocks, because signals are handled only between calls to zlib or
    lzma. Return the number of compressed bytes, excluding bytes that `compressor` still buffers.
    """
    starts = range(0, len(data), _COMPRESSED_BYTES)
    return sum(len(compressor.compress(data[at : at + _COMPRESSED_BYTES])) for at in starts)


def optional(package: str, purpose: str, extra: str = "data") -> Any:
    """Import and return an optional package.

    Args:
        package: the module to import.
        purpose: description of the work that requires the package, with which the error message
            begins.
        extra: the firstlight extra that installs the package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingDependencyError(package.partition(".")[0], extra, purpose) from None
