"""The progress of a run: a live view in a terminal or a notebook, one line a minute in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from firstlight.console import console, notebook_display, say, visible
from firstlight.training.course import Course
from firstlight.training.notebook import NotebookView

#: Seconds to the first line of a log, and between two lines afterwards.
_SECONDS_TO_FIRST_LINE, _SECONDS_BETWEEN_LINES = 10.0, 60.0
#: Frames per second of the live view.
_FRAMES_PER_SECOND = 2.0


class View(Protocol):
    """A terminal, notebook or log that shows the course of a run."""

    def open(self) -> None:
        """Start drawing."""

    def step(self, course: Course) -> None:
        """Show the course of the run after a step.

        Args:
            course: the figures of the run, which include the step.
        """

    def message(self, text: str) -> None:
        """Show a message line in addition to the course."""

    def close(self) -> None:
        """Draw the last state, and stop drawing."""


class _NoView:
    """Shows nothing."""

    def open(self) -> None: ...

    def step(self, course: Course) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class _LogView(_NoView):
    """Writes messages, and a line of the run's figures each minute and after the last step."""

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
    """Draws the course in the last rows of a terminal, in a thread of rich."""

    def __init__(self, course: Course, target: Console) -> None:
        self._live = Live(
            course,
            console=target,
            refresh_per_second=_FRAMES_PER_SECOND,
            # Otherwise rich would print stdout above its rows, also if it is redirected to a file.
            redirect_stdout=False,
            vertical_overflow="crop",
        )

    def open(self) -> None:
        self._live.start()

    def message(self, text: str) -> None:
        self._live.console.print(visible(text), markup=False)

    def close(self) -> None:
        self._live.stop()


def _view(course: Course) -> View:
    """The view for the place where the process runs: notebook, terminal or log."""
    display, target = notebook_display(), console()
    if display is not None:
        return NotebookView(course, display)
    return _TerminalView(course, target) if target.is_interactive else _LogView()


class TrainingProgress:
    """Shows a run to the user: steps, loss, speed, memory, remaining time, last sample text. A
    context manager.

    Args:
        course: the figures of the run.
        shown: False shows nothing at all.
    """

    def __init__(self, course: Course, *, shown: bool) -> None:
        self._course = course
        # Terminal and notebook draw the sample text themselves; elsewhere it is a message.
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
        # A terminal that was closed must not end the run with an error.
        with contextlib.suppress(OSError):
            self._view.close()

    def predict_memory(self, predicted_bytes: int | None) -> None:
        """Show the predicted memory, in bytes, beside the measured memory; None shows none."""
        self._course.predicted_bytes = predicted_bytes

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        self._course.step(record)
        self._view.step(self._course)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show the model's continuation `text` of a prompt."""
        self._course.sample(step, prompt, text)
        if self._shows_samples:
            self._view.message(f"step {step}: {prompt!r} -> {text!r}")

    def message(self, text: str) -> None:
        """Show a message line to the user."""
        self._view.message(text)
