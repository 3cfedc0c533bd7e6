"""The progress of a run: a live view on a terminal or in a notebook, a line a minute in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from firstlight.console import console, notebook_display, say
from firstlight.training.course import Course
from firstlight.training.notebook import NotebookView

#: Seconds to the first line of a log, and then between two lines.
_SECONDS_TO_FIRST_LINE, _SECONDS_BETWEEN_LINES = 10.0, 60.0
#: Frames of the live view a second.
_FRAMES_PER_SECOND = 2.0


class View(Protocol):
    """A place where the course of a run is shown."""

    def open(self) -> None:
        """Begin."""

    def step(self, course: Course) -> None:
        """Show the course after a step."""

    def message(self, text: str) -> None:
        """Show a line beside it."""

    def close(self) -> None:
        """Show the end of it."""


class _NoView:
    def open(self) -> None: ...

    def step(self, course: Course) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class _LogView(_NoView):
    def __init__(self) -> None:
        self._due = time.monotonic() + _SECONDS_TO_FIRST_LINE

    def step(self, course: Course) -> None:
        now = time.monotonic()
        if now >= self._due or course.is_done:
            self._due = now + _SECONDS_BETWEEN_LINES
            say(course.line)

    def message(self, text: str) -> None:
        say(text)


class _TerminalView(_NoView):
    """The last rows of a terminal, drawn by a thread of rich's."""

    def __init__(self, course: Course, target: Console) -> None:
        self._live = Live(
            course,
            console=target,
            refresh_per_second=_FRAMES_PER_SECOND,
            # Else rich would print above its rows what `> file` is to get.
            redirect_stdout=False,
            vertical_overflow="crop",
        )

    def open(self) -> None:
        self._live.start()

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()


def _view(course: Course) -> View:
    display, target = notebook_display(), console()
    if display is not None:
        return NotebookView(course, display)
    return _TerminalView(course, target) if target.is_interactive else _LogView()


class TrainingProgress:
    """Shows a run to a person: steps, loss, speed, memory, the time left, the last sample text.

    Args:
        course: the figures of the run.
        shown: False shows nothing at all.
    """

    def __init__(self, course: Course, *, shown: bool) -> None:
        self._course = course
        self._shows_samples = True
        self._view: View = _NoView()
        if shown:
            self._view = _view(course)
            self._shows_samples = isinstance(self._view, _LogView)

    def __enter__(self) -> TrainingProgress:
        self._view.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # A closed terminal is no reason to end a run.
        with contextlib.suppress(OSError):
            self._view.close()

    def predict_memory(self, predicted_bytes: int | None) -> None:
        """Show the predicted memory beside the measured memory."""
        self._course.predicted_bytes = predicted_bytes

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step's figures."""
        self._course.step(record)
        self._view.step(self._course)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a text that the model has written."""
        self._course.sample(step, prompt, text)
        if self._shows_samples:
            self._view.message(f"step {step}: {prompt!r} -> {text!r}")

    def message(self, text: str) -> None:
        """Print a line for people."""
        self._view.message(text)
