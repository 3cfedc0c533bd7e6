"""Detection of the encoding of a text that is not UTF-8, from its bytes: `likely_encoding`."""

from __future__ import annotations

import codecs
import re

#: Bytes in Windows-1252 of the non-ASCII characters of German, French, Spanish, Portuguese,
#: Italian, Dutch and Scandinavian texts. Letters whose byte is another letter in Windows-1250 or
#: Windows-1254 are left out.
_WESTERN = set(
    "àáâãäåæçèéêëìíîïñòóôöøùúûüßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÖØÙÚÛÜŒ«»°§¡£€©®…–—‘’“”„‚•·ºª\xa0".encode(
        "cp1252"
    )
)
#: The declaration of a Python file's encoding (PEP 263), in its first or second line.
_DECLARED = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


def likely_encoding(content: bytes) -> str | None:
    """iconv's name of the encoding of a text that is not valid UTF-8; None if it is uncertain.

    Detected are the encoding that a Python file declares, UTF-8 with a few invalid bytes,
    Shift-JIS, EUC-JP, Windows-1251, KOI8-R and Windows-1252 (which includes ISO-8859-1).

    Args:
        content: the beginning of the text, which may be cut inside a character.
    """
    declared = _DECLARED.match(content)
    if declared is not None and (name := _known(declared[1].decode("ascii", "replace"))):
        return name
    if _is_damaged_utf8(content):
        return "utf-8"
    return _japanese(content) or _cyrillic(content) or _western(content)


def _known(name: str) -> str | None:
    """Python's name of a declared encoding; None if the encoding is unknown, or is UTF or ASCII,
    which can't be true of a text that is not valid UTF-8."""
    try:
        found = codecs.lookup(name).name
    except LookupError:
        return None
    return None if found.startswith("utf") or found == "ascii" else found


def _is_damaged_utf8(content: bytes) -> bool:
    """True if there are more than twice as many valid characters outside ASCII as invalid ones."""
    text = content.decode("utf-8", "replace")
    good = sum(character > "\x7f" for character in text) - text.count("\ufffd")
    return good > 2 * text.count("\ufffd")


def _japanese(content: bytes) -> str | None:
    """Shift-JIS or EUC-JP, detected from kana, which are frequent in every Japanese text."""
    for name in ("shift_jis", "euc_jp"):
        try:
            text = content.decode(name)
        except UnicodeDecodeError as error:
            # `content` may end inside the last character.
            if error.start < len(content) - 2:
                continue
            text = content[: error.start].decode(name)
        wide = [character for character in text if character > "\x7f"]
        kana = sum("\u3041" <= character <= "\u30fc" for character in wide)
        if len(wide) >= 10 and kana > len(wide) / 3:
            return name.replace("_", "-")
    return None


def _cyrillic(content: bytes) -> str | None:
    """Windows-1251 or KOI8-R, detected from runs of bytes outside ASCII (accented letters in Latin
    texts are mostly single), and from the most frequent letters of Russian, because encodings
    of Greek and Hebrew use the same bytes for other letters."""
    high = [byte for byte in content if byte > 0x7F]
    words = re.findall(rb"[\x80-\xff]{3,}", content)
    if len(high) < 20 or 2 * sum(map(len, words)) < len(high):
        return None

    def share(low: int, up: int) -> float:
        return sum(low <= byte <= up for byte in high) / len(high)

    # Lower-case letters are 0xE0 to 0xFF in Windows-1251, and 0xC0 to 0xDF in KOI8-R. The two
    # further conditions of each encoding are the letter "а", and "ы" with the letters beside it.
    if share(0xC0, 0xFF) < 0.95:
        return None
    if share(0xE0, 0xFF) > 0.7 and share(0xE0, 0xE0) > 0.03 and share(0xFB, 0xFF) > 0.02:
        return "windows-1251"
    if share(0xC0, 0xDF) > 0.7 and share(0xC1, 0xC1) > 0.03 and share(0xD8, 0xDC) > 0.02:
        return "koi8-r"
    return None


def _western(content: bytes) -> str | None:
    """Windows-1252, detected from single accented letters among unaccented letters."""
    high = [byte for byte in content if byte > 0x7F]
    letters = len(re.findall(rb"[A-Za-z]", content))
    is_alone = len(high) < letters / 2 + 1 and not re.search(rb"[\x80-\xff]{4}", content)
    # Inside a word, these bytes are letters in MS-DOS code pages and in Mac OS Roman.
    is_inside = re.search(rb"[a-z][\x80-\x91\x93-\x9b\x9d-\x9f][a-z]", content)
    return "windows-1252" if is_alone and not is_inside and set(high) <= _WESTERN else None
