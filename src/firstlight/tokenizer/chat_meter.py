"""Limits on rendering a chat template: time, size of the text, size of the values.

A single call of a built-in function can't be interrupted. So the cost of an operation whose time or
memory grows with its input is counted before it runs, and the time is checked afterwards. In
messages, "it" is the chat template.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError

#: Most characters of a rendered conversation, and of any value while it is rendered.
MAX_CHARS = 10_000_000
#: Characters that an item of a list counts as.
_CHARS_PER_ITEM = 20
#: Most bytes of all values together that one rendering creates.
MAX_BYTES_MADE = 150_000_000
#: Bytes that a short string counts as, such as each part of a split text.
BYTES_PER_PIECE = 80
#: Most items that are sorted, grouped or made unique; each takes about a microsecond.
MAX_ITEMS = 100_000
#: Most bits of an integer.
_MAX_INTEGER_BITS = 100_000
#: Most characters in the argument of `strip`, with each of which it compares characters of a text.
_MAX_STRIPPED_CHARS = 1000
#: Most characters of a text times those searched for from its end: `rfind` may compare all pairs.
_MAX_BACKWARD_COMPARISONS = 100_000_000
#: Most processor time of one rendering. A conversation of a million words takes a tenth of it.
MAX_SECONDS = 0.7
#: Characters that are processed between two checks of the time; characters that any operation
#: counts at least.
_SIZE_PER_CLOCK, _LEAST_SIZE = 20_000, 400
#: Values of a nested value, and items of a loop, between two calls of `Meter.tick`.
_VALUES_PER_TICK = 200
_ITEMS_PER_TICK = 16

_SPLITTING = ("split", "rsplit", "splitlines")
_FROM_THE_END = ("rfind", "rindex", "rpartition", "rsplit")
_PLAIN_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper lower partition "
    "removeprefix removesuffix startswith swapcase title upper".split()
)
_PADDING = ("ljust", "rjust", "center", "zfill")
_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1")


class Meter:
    """Counts the time and memory of one rendering.

    Every method raises a SecurityError if a limit is exceeded.
    """

    def __init__(self) -> None:
        self._started = time.thread_time()
        self._made = 0
        self._since_clock = 0

    def tick(self, size: int = 0) -> None:
        """Check the time limit; called wherever a template can loop.

        Args:
            size: characters that were processed. The clock is read once for many small sizes,
                because reading it takes longer than a small operation.
        """
        self._since_clock += size + _LEAST_SIZE
        if self._since_clock < _SIZE_PER_CLOCK:
            return
        self._since_clock = 0
        if time.thread_time() - self._started > MAX_SECONDS:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, size: int, chars: int = 0) -> None:
        """Count a value before it is created.

        Args:
            size: bytes of the value.
            chars: characters of the value, if it is a text.
        """
        if chars > MAX_CHARS:
            raise SecurityError(f"it makes more than {MAX_CHARS:,} characters at once")
        self._made += max(size, 0)
        if self._made > MAX_BYTES_MADE:
            raise SecurityError(f"it makes more than {MAX_BYTES_MADE:,} bytes")

    def made(self, value: Any) -> Any:
        """Count a value that was created, and return it."""
        if isinstance(value, str | bytes | list | tuple | dict | set):
            if isinstance(value, str | bytes) and len(value) > MAX_CHARS:
                raise SecurityError(f"it makes a text of more than {MAX_CHARS:,} characters")
            size = sys.getsizeof(value)
            self.make(size)
            self.tick(size)
        else:
            self.tick()
        return value

    def keep(self, value: Any) -> None:
        """Check the size of a value that is assigned to a variable, so that no variable can be
        doubled without end."""
        self.size(value, "it keeps a value")

    def size(self, value: Any, action: str, most: int | None = None) -> int:
        """Characters of a value: of all strings in it, and 20 for each item of a container.

        Args:
            value: any value, nested or not.
            action: beginning of the error message.
            most: the limit; None is `MAX_CHARS`.

        Raises:
            SecurityError: the value has more than `most` characters.
        """
        most = MAX_CHARS if most is None else most
        if isinstance(value, str) and len(value) <= most:
            self.tick(len(value))
            return len(value)
        size, seen, rest = 0, 0, [value]
        while rest:
            item = rest.pop()
            seen += 1
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, dict):
                size += 2 * _CHARS_PER_ITEM * len(item)
                if size <= most:
                    rest.extend(item)
                    rest.extend(item.values())
            elif isinstance(
                item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView
            ):
                size += _CHARS_PER_ITEM * len(item)
                if size <= most:
                    rest.extend(item)
            else:
                size += _CHARS_PER_ITEM
            if size > most:
                raise SecurityError(f"{action} of more than {most:,} characters")
            if seen % _VALUES_PER_TICK == 0:
                self.tick(_SIZE_PER_CLOCK)
        self.tick(_LEAST_SIZE * seen)
        return size

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items, one by one, with the limits checked between them."""
        for number, item in enumerate(items):
            if number % _ITEMS_PER_TICK == 0:
                self.tick(_ITEMS_PER_TICK * _LEAST_SIZE)
                self.make(_ITEMS_PER_TICK * BYTES_PER_PIECE)
            yield item


def joined_bytes(items: Iterable[Any], separator: str | bytes) -> int:
    """Upper bound on the bytes of `separator.join(items)`."""
    between = sys.getsizeof(separator)
    return sum(
        between + (sys.getsizeof(i) if isinstance(i, str | bytes) else BYTES_PER_PIECE)
        for i in items
    )


def account_for_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Count the result of a binary operator (+, *, %, **, ...) before it is computed.

    Raises:
        SecurityError: the result would exceed a limit.
    """
    if isinstance(left, int) and isinstance(right, int):
        a, b = left.bit_length(), right.bit_length()
        bits = a * max(right, 0) if operator == "**" else a + b
        if bits > _MAX_INTEGER_BITS:
            raise SecurityError(f"it makes a number of more than {_MAX_INTEGER_BITS:,} bits")
    elif operator == "%" and isinstance(left, str | bytes):
        account_for_format(meter, left, right)
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                chars = len(sequence) * count
                is_text = isinstance(sequence, str | bytes)
                meter.make(chars * (_width(sequence) if is_text else 8), chars if is_text else 0)
    elif operator == "+" and isinstance(left, str | bytes | list | tuple):
        meter.make(sys.getsizeof(left) + sys.getsizeof(right))


def account_for_format(meter: Meter, template: str | bytes, values: Any) -> None:
    """Count a formatted text before it is created: a format can insert a value many times, and a
    width of a few digits can fill the memory.

    Raises:
        SecurityError: the text could exceed a limit, or takes a width from a value (`%*d`).
    """
    text = template if isinstance(template, str) else template.decode("latin-1")
    if re.search(r"%[^%a-zA-Z]*\*", text):
        raise SecurityError("it formats with a width that is not in the format")
    size = meter.size(values, "it formats a value")
    places = text.count("%") + text.count("{")
    widths = sum(int(digits[:12]) for digits in re.findall(r"[0-9]+", text))
    chars = len(text) + widths + places * size
    meter.make(chars, chars)


def account_for_method(meter: Meter, owner: Any, name: str, arguments: list[Any]) -> None:
    """Count the result of a method before it is called.

    Args:
        meter: the rendering's meter.
        owner: the text, number or container whose method is called.
        name: name of the method.
        arguments: its arguments, positional and keyword.

    Raises:
        SecurityError: the result could exceed a limit, or no template needs the method.
    """
    if isinstance(owner, str | bytes):
        _account_for_text(meter, owner, name, arguments)
    elif isinstance(owner, int):
        chars = max((value for value in arguments if isinstance(value, int)), default=0)
        meter.make(chars, chars)
    elif isinstance(owner, list | tuple | dict | set):
        if name in ("count", "index", "__contains__"):
            meter.size(owner, f"it calls {name} on a list")
        meter.make(sys.getsizeof(owner))


def _account_for_text(meter: Meter, owner: str | bytes, name: str, arguments: list[Any]) -> None:
    """`account_for_method` for the methods of a text, each by the size of its result."""
    size = sys.getsizeof(owner)
    texts = [value for value in arguments if isinstance(value, str | bytes)]
    numbers = [value for value in arguments if isinstance(value, int)]
    comparisons = len(owner) * sum(map(len, texts))
    if name in _FROM_THE_END and comparisons > _MAX_BACKWARD_COMPARISONS:
        raise SecurityError(f"it calls {name} with a text of many characters")
    if name in ("format", "format_map"):
        account_for_format(meter, owner, arguments)
        meter.make(0, sum(numbers))
    elif name == "replace" and len(texts) > 1:
        meter.make(replaced_bytes(owner, texts[0], texts[1]))
    elif name == "join" and arguments:
        meter.make(joined_bytes(arguments[0], owner))
    elif name == "expandtabs":
        meter.make(size, len(owner) * max([8, *numbers]))
    elif name in _PADDING:
        meter.make(size, max([0, *numbers]))
    elif name in _SPLITTING:
        pieces = len(owner) // 2
        if name != "splitlines" and texts and texts[0]:
            pieces = owner.count(texts[0])  # type: ignore[arg-type]
        meter.make(size + BYTES_PER_PIECE * (pieces + 1))
    elif name in ("strip", "lstrip", "rstrip"):
        if any(len(text) > _MAX_STRIPPED_CHARS for text in texts):
            raise SecurityError(f"it calls {name} with more than {_MAX_STRIPPED_CHARS} characters")
    elif name in ("encode", "decode"):
        if any(text.lower() not in _ENCODINGS for text in texts if isinstance(text, str)):
            raise SecurityError(f"it calls {name} with a codec that no template needs")
        meter.make(4 * size)
    elif name in _PLAIN_METHODS:
        meter.make(0)
    else:
        raise SecurityError(f"it calls {name}, which can make a text far longer")


def replaced_bytes(text: Any, old: Any, new: Any) -> int:
    """Bytes of `text.replace(old, new)`."""
    if isinstance(text, str) != isinstance(old, str):
        return 0  # a mix of str and bytes: `replace` itself will raise a TypeError
    width = max(_width(text), _width(new))
    return int(width * (len(text) + text.count(old) * len(new)))


def _width(text: Any) -> int:
    """Bytes of a character in Python's memory: 1, 2 or 4."""
    if isinstance(text, bytes) or text.isascii():
        return 1
    return 4 if sys.getsizeof(text) >= 4 * len(text) else 2


def one_line(text: Any) -> str:
    """A template's text for a message: at most 300 characters in one line, without control
    characters, which a terminal could take for commands."""
    words = "".join(c if c.isprintable() else " " for c in str(text)[:1000]).split()
    return " ".join(words)[:300]
