"""Patterns of layers' names in an adapter's settings: compiled, and refused where they are slow."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from pathlib import Path

from firstlight.errors import ModelError

#: Entries of rank_pattern and alpha_pattern together; the deepest models have 900 linear layers.
_MOST_PATTERNS = 3000
_MOST_PATTERN_CHARS = 500
#: Seconds of a core that all patterns may take on all layers' names: most adapters' take 0.001.
_MOST_MATCH_SECONDS = 2.0


@functools.lru_cache(maxsize=2 * _MOST_PATTERNS)
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of `rank_pattern` or `alpha_pattern`, which matches the end of a layer's name."""
    return re.compile(rf"(.*\.)?({pattern})$")


def require_quick_patterns(path: Path, patterns: list[str]) -> None:
    """Refuse patterns that would take long, by their number or their repetitions.

    Raises:
        ModelError: there are such patterns, or one is invalid.
    """
    if len(patterns) > _MOST_PATTERNS:
        raise ModelError(
            f"{path}: rank_pattern and alpha_pattern have {len(patterns):,} entries, more than the "
            f"{_MOST_PATTERNS:,} that are read: merge the adapter with PEFT (merge_and_unload)"
        )
    for pattern in patterns:
        # A regular expression with repeated groups, or many repetitions or choices, can take for
        # ever on one name.
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
    """Refuse patterns that take long on the names of the layers, each of them little.

    Raises:
        ModelError: the patterns take too long.
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
