"""Regular expressions for layer names in an adapter's settings. Slow ones are refused, since a
stranger's adapter may bring them."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from pathlib import Path

from firstlight.errors import ModelError

#: Most entries of rank_pattern and alpha_pattern together (the deepest models have 900 linear
#: layers), and most characters of one.
_MOST_PATTERNS = 3000
_MOST_PATTERN_CHARS = 500
#: Seconds of CPU time in which all patterns must have been matched with all layer names. Those of
#: most adapters take 0.001.
_MOST_MATCH_SECONDS = 2.0


@functools.lru_cache(maxsize=2 * _MOST_PATTERNS)
def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of an entry of `rank_pattern` or `alpha_pattern`. It matches the end
    of a layer's name after a dot, or the whole name."""
    return re.compile(rf"(.*\.)?({pattern})$")


def require_quick_patterns(path: Path, patterns: list[str]) -> None:
    """Refuse patterns that may take long to match, by their number, length and repetitions.

    Args:
        path: the settings' file, for error messages.
        patterns: entries of rank_pattern and alpha_pattern.

    Raises:
        ModelError: there are such patterns, or one is invalid.
    """
    if len(patterns) > _MOST_PATTERNS:
        raise ModelError(
            f"{path}: rank_pattern and alpha_pattern have {len(patterns):,} entries, more than the "
            f"{_MOST_PATTERNS:,} that are read: merge the adapter with PEFT (merge_and_unload)"
        )
    for pattern in patterns:
        # With repeated groups, or many repetitions or choices, matching can take exponential time
        # on a single name.
        choices = len(re.findall(r"\(", pattern)) + len(re.findall(r"(?<!\()\?", pattern))
        is_slow = re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3
        if is_slow or choices > 5 or len(pattern) > _MOST_PATTERN_CHARS:
            raise ModelError(
                f"{path}: pattern {short(pattern)} repeats too much: name the layers in full"
            )
        try:
            compiled(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{path}: {short(pattern)} is no pattern: {error}") from error


def require_quick_matches(path: Path, patterns: list[str], layers: Iterable[str]) -> None:
    """Refuse patterns that together take long on the layer names, although each match is quick.

    Args:
        path: the settings' file, for error messages.
        patterns: patterns that `require_quick_patterns` accepts.
        layers: names of layers.

    Raises:
        ModelError: matching takes more than 2 seconds of CPU time.
    """
    end = time.thread_time() + _MOST_MATCH_SECONDS
    for layer in layers:
        for pattern in patterns:
            compiled(pattern).match(layer)
            if time.thread_time() > end:
                raise ModelError(
                    f"{path}: rank_pattern and alpha_pattern take too long on names such as "
                    f"{layer}: name the layers in full"
                )


def short(value: object) -> str:
    """A value for messages, cut at 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
