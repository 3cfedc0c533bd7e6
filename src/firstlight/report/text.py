"""Texts from a run, made fit for people to read."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

#: Characters without a look of their own that spell words and pictures in many scripts.
_JOINERS = "\u200c\u200d"
#: Categories of characters that act on the text around them, or that no file may hold.
_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(text: object) -> str:
    """A text from a run, with what would act on a page (control characters, marks that turn the
    direction of writing, halves of characters) as its number: U+202E becomes '⟨U+202E⟩'. Line
    ends become "\\n"; tabs stay."""
    lines = str(text).replace("\r\n", "\n")
    if lines.isprintable():
        return lines
    return "".join(c if _is_harmless(c) else f"⟨U+{ord(c):04X}⟩" for c in lines)


def _is_harmless(character: str) -> bool:
    return (
        character in "\n\t"
        or character in _JOINERS
        or unicodedata.category(character) not in _ACTING
    )


def plain(value: object) -> str:
    """A value of a recipe in one line, as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(plain, value))}]"
    return repr(value) if isinstance(value, str) and value.strip() != value else str(value)


def loss_text(loss: float, decimals: int = 4) -> str:
    """A loss for people: with so many decimals, but for one of a run that has diverged."""
    return f"{loss:.{decimals}f}" if abs(loss) < 10_000 else f"{loss:.4g}"


def own_version() -> str:
    """Which firstlight this is; "unknown" where it is not installed as a package."""
    try:
        return version("firstlight")
    except PackageNotFoundError:
        return "unknown"
