"""A run in a Jupyter notebook: an output of the cell that is updated during the run, and the
picture of the report."""

from __future__ import annotations

import html
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firstlight.console import notebook_display
from firstlight.training.course import Course

#: Seconds between two updates of the output.
_SECONDS_BETWEEN_UPDATES = 1.0
#: Characters of a line; width and height of the loss curve in pixels.
_COLUMNS, _WIDTH, _HEIGHT = 110, 640, 150
#: Most message lines that are shown above the figures.
_MOST_MESSAGES = 40


class NotebookView:
    """The course of a run as one output of a cell, with the messages of the run above it.

    Args:
        course: the figures of the run.
        display: IPython's `display`.
    """

    def __init__(self, course: Course, display: Callable[..., Any]) -> None:
        self._course, self._display = course, display
        self._messages: list[str] = []
        self._handle: Any = None
        self._due = 0.0

    def open(self) -> None:
        """Show the output below the cell."""
        self._handle = self._display(self._content(), raw=True, display_id=True)

    def step(self, course: Course) -> None:
        """Show the course after a step, at most once a second, and after the last step."""
        if time.monotonic() >= self._due or course.is_done:
            self._update()

    def message(self, text: str) -> None:
        """Show a message line above the figures."""
        self._messages = [*self._messages, text][-_MOST_MESSAGES:]
        self._update()

    def close(self) -> None:
        """Draw the last state."""
        self._update()

    def _update(self) -> None:
        self._due = time.monotonic() + _SECONDS_BETWEEN_UPDATES
        if self._handle is not None:
            self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """The output by MIME type, as text and as HTML: a notebook shows the one that it can."""
        (
            first,
            figures,
            *_,
        ) = self._course.lines(_COLUMNS, 3)
        plain = [*self._messages, first, figures, *self._course.sample_lines(_COLUMNS)]
        escaped = html.escape("\n".join([*self._messages, first, figures]))
        sample = html.escape("\n".join(self._course.sample_lines(_COLUMNS)))
        page = f"<pre>{escaped}</pre>{_curve(self._course)}<pre>{sample}</pre>"
        return {"text/plain": "\n".join(plain), "text/html": page}


def _curve(course: Course) -> str:
    """The loss curve as an SVG element; "" if it has fewer than two points."""
    means = course.curve.means
    if len(means) < 2:
        return ""
    high, low = course.curve.edges
    scale = (_HEIGHT - 20) / (high - low) if high > low else 0.0
    width = (_WIDTH - 70) / (len(means) - 1)
    points = " ".join(
        f"{60 + width * i:.1f},{10 + (high - min(mean, high)) * scale:.1f}"
        for i, mean in enumerate(means)
    )
    text = 'font-family="monospace" font-size="12" fill="currentColor"'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 15}" width="{_WIDTH}" role="img" '
        'aria-label="training loss by step">'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<text x="2" y="15" {text}>{high:.3f}</text>'
        f'<text x="2" y="{_HEIGHT - 6}" {text}>{low:.3f}</text>'
        f'<text x="60" y="{_HEIGHT + 12}" {text}>step {course.curve.first_step:,}</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT + 12}" text-anchor="end" {text}>'
        f"{course.curve.last_step:,}</text></svg>"
    )


def show_picture(path: Path) -> None:
    """Show a picture below the cell; does nothing outside a notebook or if the file is missing."""
    display = notebook_display()
    if display is not None and path.is_file():
        display(importlib.import_module("IPython.display").Image(filename=str(path)))
