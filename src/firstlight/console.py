"""Print messages and show progress bars on stderr. Format and parse numbers and durations.

Notebooks display output on stderr as errors, so messages are displayed as cell output in notebooks.
stdout is used only for results, such as generated text, tables or the JSON object that `--json`
prints.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from firstlight.errors import ConfigError


def console() -> Console:
    """Return a console that writes to the current `sys.stderr`.

    The console is not cached, because tests and notebooks may replace `sys.stderr`.
    """
    return Console(stderr=True, soft_wrap=True, highlight=False)


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` function if this process is a notebook kernel, otherwise None."""
    # In a notebook kernel, IPython has already been imported.
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    found: Callable[..., Any] = importlib.import_module("IPython.display").display
    return found


def say(message: str, *, end: str = "\n") -> None:
    """Print a message to stderr, followed by `end`.

    The message is printed as plain text. Rich markup is not interpreted, and control characters are
    replaced by `visible`. If stderr is not writable, for example because a pipe or terminal was
    closed, the program continues without messages.
    """
    message = visible(message)
    if (display := notebook_display()) is not None:
        display({"text/plain": message}, raw=True)
        return
    try:
        print(message, end=end, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        silence()


def silence() -> None:
    """Discard all further output to stderr."""
    # A ValueError means that the stream has no file descriptor.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def progress_bar(*columns: ProgressColumn, shown: bool = True) -> Progress:
    """Return a progress bar on stderr. It shows a description, the percentage, the given columns
    and the remaining time. A task without a total has no percentage and no remaining time.

    The bar is shown only if stderr is a terminal. If stderr is a file, the caller should print
    messages instead.
    """
    target = console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        # This column is empty if the total is unknown.
        TaskProgressColumn("{task.percentage:>3.0f}%"),
        *columns,
        TimeRemainingColumn(),
        console=target,
        disable=not shown or not target.is_terminal,
        transient=False,
    )


#: Format characters that are safe to display, because they do not change how other text is
#: displayed. They are the joiners that many scripts and emoji need, the soft hyphen, Arabic and
#: Syriac number signs, and the tags of flag emoji.
_HARMLESS = re.compile("[\u200c\u200d\u00ad\u0600-\u0605\u06dd\u070f\U000e0020-\U000e007f]")
#: Unicode categories of control and format characters, surrogates, and line and paragraph
#: separators.
_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(text: object) -> str:
    """Return the text in a form that is safe to display.

    Control characters, bidirectional formatting characters and surrogates are replaced with their
    code points, such as '⟨U+202E⟩'. Tabs and line breaks are kept; "\\r\\n" becomes "\\n".
    """
    lines = str(text).replace("\r\n", "\n")
    if lines.isprintable():
        return lines
    return "".join(c if _is_harmless(c) else f"⟨U+{ord(c):04X}⟩" for c in lines)


def _is_harmless(character: str) -> bool:
    return (
        character in "\n\t"
        or _HARMLESS.match(character) is not None
        or unicodedata.category(character) not in _ACTING
    )


def plain(value: object) -> str:
    """Format a recipe value on one line, in YAML syntax."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(plain, value))}]"
    return repr(value) if isinstance(value, str) and value.strip() != value else str(value)


def loss_text(loss: float, decimals: int = 4) -> str:
    """Format a loss with the given number of decimals.

    A loss of 10,000 or more, as in a diverged run, is formatted with 4 significant digits instead.
    """
    return f"{loss:.{decimals}f}" if abs(loss) < 10_000 else f"{loss:.4g}"


def own_version() -> str:
    """Return the version of firstlight, or "unknown" if it is not installed as a package."""
    try:
        return version("firstlight")
    except PackageNotFoundError:
        return "unknown"


def gib(size: float, beside: float = 0) -> str:
    """Format a memory size in GiB, or in MiB if it is below 1 GiB: 1610612736 -> '1.50 GiB',
    83886080 -> '80 MiB'.

    Args:
        size: size in bytes.
        beside: a second size in bytes, which will be shown next to `size`. The unit is chosen for
            the larger of the two sizes, so that both are shown in the same unit.
    """
    count = size / 2**30
    if max(size, beside) >= 2**30:
        return f"{count:,.{2 if count >= 0.01 or not count else 4}f} GiB"
    count *= 1024
    return f"{count:,.{0 if count >= 10 else 1}f} MiB"


def shortened(text: str, width: int, *, at_space: bool = False) -> str:
    """Truncate text to at most `width` characters. Truncated text ends in "…".

    Args:
        text: text to truncate.
        width: maximum number of characters.
        at_space: True to truncate the text after a complete word, unless this would leave less than
            half of `width`.
    """
    if len(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    space = text.rfind(" ", 0, width)
    return f"{kept[:space] if at_space and 2 * space >= width else kept}…"


_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def human_bytes(count: float) -> str:
    """Format a number of bytes: 1234567 -> '1.2 MB'."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def compact(value: float) -> str:
    """Format a number compactly, with up to 10 significant digits: 1500 -> '1.5k', 0.00025 ->
    '0.00025', 1e-7 -> '1e-07'."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.4g}"
    for unit, suffix in _SUFFIXES:
        if size >= unit:
            return f"{value / unit:.10g}{suffix}"
    return f"{value:.10g}"


def rounded(value: float) -> str:
    """Format a number rounded to four significant digits: 1234567 -> '1.235M', 4494.2 -> '4,494',
    3.14159 -> '3.142'."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3e}"
    for unit, suffix in _SUFFIXES:
        if size >= (9999.5 if unit == 1e3 else 0.99995 * unit):
            return f"{value / unit:.4g}{suffix}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def counted(count: float, noun: str, form: str = ",") -> str:
    """Format a number with a noun in the singular or plural: 2 and "shard" -> '2 shards'.

    `form` is the format specification of the number.
    """
    text = f"{count:{form}}"
    return f"{text} {noun}{'' if text == '1' else 's'}"


def time_text(seconds: float) -> str:
    """Format a duration: 95 -> '1 min 35 s'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


_TIMES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_time(text: str) -> float:
    """Convert a duration such as "90s", "30m", "1.5h", "1h30m" or "3d" to seconds.

    Raises:
        ConfigError: `text` is not a duration.
    """
    what = "duration: use a value such as 90s, 30m, 1.5h, 1h30m or 3d"
    parts = re.findall(r"[^a-z]+[a-z]*|[a-z]+", text.lower().rstrip()) or [text]
    matches = [re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)", part) for part in parts]
    total = sum(_value(match, _TIMES, text, what) for match in matches)
    units = [_TIMES[match[2]] for match in matches if match]
    if any(unit <= smaller for unit, smaller in itertools.pairwise(units)):
        raise ConfigError(f"'{text}' is not a {what}")  # such as 30m1h
    return total


def parse_count(text: str) -> float:
    """Convert a number such as "10B", "300M" or "2e9" to a float.

    Raises:
        ConfigError: `text` is not a number.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    return _value(match, _COUNTS, text, "number of tokens: use a value such as 10B or 300M")


def _value(match: re.Match[str] | None, units: dict[str, int], text: str, what: str) -> float:
    try:
        if match is not None and match[2] in units:
            value = float(match[1]) * units[match[2]]
            if math.isfinite(value):
                return value
    except ValueError:
        pass
    raise ConfigError(f"'{text}' is not a {what}")
