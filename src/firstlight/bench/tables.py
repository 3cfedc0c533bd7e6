"""Tables of benchmarks: cells from templates, and Markdown.

The templates of a row's cells are one string, separated by " | ". A template is a format string of
Python, with the names of `UNITS` as further format specifications.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any

from firstlight.console import human_bytes


def _binary(size: int) -> str:  # the sizes of caches in processors' data sheets
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size >> 10} KiB"


#: Format specifications of templates for numbers with a unit: "{peak_bytes:GiB}".
UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": human_bytes,
    "MB": lambda size: f"{size / 1e6:,.0f} MB",
    "GiB": lambda size: f"{size / 2**30:,.2f} GiB",
    "mebi": lambda size: f"{size / 2**20:,.0f}",
    "GB/s": lambda rate: f"{rate / 1e9:.1f} GB/s",
    "binary": _binary,
    "giga": lambda rate: f"{rate / 1e9:.3g}",
    "tera": lambda rate: f"{rate / 1e12:.3g}",
}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        unit = UNITS.get(format_spec)
        formatted: str = super().format_field(value, format_spec) if unit is None else unit(value)
        return formatted


def cell(template: str, row: Mapping[str, Any]) -> str:
    """A cell of a row; "" if the row lacks one of the template's values, or has None for it."""
    try:
        return _Formatter().vformat(template, (), row)
    except (KeyError, TypeError):  # None has no format and no items
        return ""


def cells(templates: str, row: Mapping[str, Any]) -> list[str]:
    """The cells of a row, from templates that are separated by " | "."""
    return [cell(template, row) for template in templates.split(" | ")]
