"""Display the progress of a run, including its metrics, the loss curve and the latest sample text.

In a terminal or a notebook, the view is updated live. In a log, one line is written per minute.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from firstlight.console import (
    console,
    gib,
    notebook_display,
    rounded,
    say,
    shortened,
    time_text,
    visible,
)
from firstlight.report.summary import MOSTLY_LEARNED, memory_kind

#: Number of steps at the start of a process that are excluded from the mean step time, because they
#: allocate memory and compile.
_SLOW_STEPS = 2

#: Maximum heights in rows of the loss curve, of the sample text with its prompt, and of the lines
#: with figures.
_CURVE_ROWS = 8
_SAMPLE_ROWS = 4
_FIGURE_ROWS = 2
#: Minimum terminal size for showing the loss curve and more than one row of figures.
_LEAST_COLUMNS, _LEAST_ROWS = 40, 12
#: Width in columns of the percentage and of the progress bar in a line of the terminal.
_BAR_COLUMNS = 24
#: Bit that sets the dot in each row and column of a braille character (Unicode 15, chapter 21.1).
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class LossCurve:
    """Loss curve of a run, stored in constant memory as means over equal numbers of steps.

    Attributes:
        first_step, last_step: first and last step in the curve; both 0 while it is empty.
    """

    #: Maximum number of means. When this number would be exceeded, neighbouring means are merged in
    #: pairs.
    most = 512

    def __init__(self) -> None:
        self.first_step = self.last_step = 0
        #: Pairs of a sum and a count, one for each mean. Entries are replaced rather than modified,
        #: because the drawing thread reads the list while steps are added.
        self._parts: list[tuple[float, int]] = []
        self._steps_of_a_mean = 1

    def add(self, step: int, loss: float) -> None:
        """Add a step's loss. Losses that are not finite are ignored."""
        if not math.isfinite(loss):
            return
        self.first_step, self.last_step = self.first_step or step, step
        if self._parts and self._parts[-1][1] < self._steps_of_a_mean:
            total, count = self._parts[-1]
            self._parts[-1] = (total + loss, count + 1)
            return
        if len(self._parts) == self.most:
            pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
            self._parts = [(a + b, m + n) for (a, m), (b, n) in pairs]
            self._steps_of_a_mean *= 2
        self._parts.append((loss, 1))

    @property
    def means(self) -> list[float]:
        """Mean losses, in the order of the steps."""
        return [total / count for total, count in self._parts]

    @property
    def edges(self) -> tuple[float, float]:
        """Losses at the upper and lower edges of a plot of the means."""
        return _edges(self.means)

    def drawn(self, columns: int, rows: int) -> tuple[list[str], float, float]:
        """Draw the curve with braille characters.

        Returns: A list of `rows` lines of at most `columns` characters, the loss at the upper edge,
        and the loss at the lower edge.
        """
        points = _resampled(self.means, 2 * columns)
        high, low = _edges(points)
        scale = (4 * rows - 1) / (high - low) if high > low else 0.0
        heights = [round((high - min(point, high)) * scale) for point in points]
        cells = [[0] * columns for _ in range(rows)]
        before = heights[0]
        for x, y in enumerate(heights):
            # Draw a vertical line that starts at the height of the previous dot, so that a steep
            # curve does not have gaps.
            for dot in range(min(before + (y > before), y), max(before - (y < before), y) + 1):
                cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
            before = y
        # Remove trailing spaces, which would wrap onto a new line if the user makes the terminal
        # narrower.
        texts = ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]
        return [text.rstrip() for text in texts], high, low

    def lines(self, columns: int, rows: int) -> Iterator[str]:
        """Yield the curve as `rows` lines, labelled with the losses at its edges, followed by a
        line with its first and last steps.
        """
        label = 8
        drawn, high, low = self.drawn(columns - label - 1, rows)
        for number, row in enumerate(drawn):
            edge = {0: f"{high:.3f}", rows - 1: f"{low:.3f}"}.get(number, "")
            yield f"{edge:>{label - 1}} {row}"
        first, last = f"step {self.first_step:,}", f"{self.last_step:,}"
        yield " " * label + f"{first}{last:>{columns - label - 1 - len(first)}}"


def _edges(points: list[float]) -> tuple[float, float]:
    """Return the losses at the upper and lower edges of the plot, which are the 95th percentile of
    the losses and the lowest loss. The highest loss is not used as the upper edge, because the high
    losses at the start of a run would flatten the rest of the curve.
    """
    ordered = sorted(points)
    return ordered[math.ceil(0.95 * (len(ordered) - 1))], ordered[0]


def _resampled(values: list[float], count: int) -> list[float]:
    """Resample a curve to `count` values. A longer curve is averaged over neighbouring values, and
    a shorter one is linearly interpolated.
    """
    if len(values) >= count:
        edges = [round(i * len(values) / count) for i in range(count + 1)]
        return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    places = np.linspace(0, len(values) - 1, count)
    interpolated: list[float] = np.interp(places, range(len(values)), values).tolist()
    return interpolated


class RunProgress:
    """Metrics and remaining time of a run, formatted as lines of text.

    Args:
        max_steps: function that returns the total number of steps of the run, which may change
            during a run with a time budget.
        start_step: number of steps already completed when this call to `train` began.
        max_minutes: time budget of the run in minutes, or None.
        clock: monotonic clock in seconds; None for `time.monotonic`.
        step_limit: function that returns the step at which a run with a time budget ends even if
            time remains. This is the decided number of steps. Until that number is decided, it is
            the limit given by `max_steps` or `epochs` in the recipe. None for no limit.
        is_settled: function that returns False while `max_steps` may still change. The total number
            of steps is shown only once it can't change.

    Attributes:
        predicted_bytes: predicted memory of the run in bytes, or None without a forecast.
        curve: the training losses.
    """

    def __init__(
        self,
        max_steps: Callable[[], int],
        start_step: int,
        max_minutes: float | None = None,
        clock: Callable[[], float] | None = None,
        step_limit: Callable[[], int | None] = lambda: None,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._step_limit, self._is_settled = step_limit, is_settled
        self._max_steps = max_steps
        self._start_step = start_step
        self._max_minutes = max_minutes
        self._clock = clock or time.monotonic
        self._sample = self._prompt = ""
        self.predicted_bytes: int | None = None
        self.restart()

    def restart(self) -> None:
        """Reset the progress to zero steps."""
        self._begun, self._last_at = self._clock(), 0.0
        self._done = 0
        self._mean_seconds = 0.0
        self._most_share = 0.0
        self._record: Mapping[str, Any] = {"step": self._start_step}
        self._val_loss: float | None = None
        self.curve = LossCurve()

    def step(self, record: Mapping[str, Any]) -> None:
        """Add a step's metrics."""
        now = self._clock()
        self._done += 1
        if self._done > _SLOW_STEPS + 1:
            # Measure the time since the last step, including evaluations and saves, because more
            # evaluations and saves will follow.
            seconds = now - self._last_at
            # Give step n a weight of n in the mean, so that the mean adapts to a machine that slows
            # down. A mean over only the last few steps would jump at each evaluation, which can
            # take as long as many steps.
            weight = 2 / (self._done - _SLOW_STEPS)
            self._mean_seconds += weight * (seconds - self._mean_seconds)
        self._last_at, self._record = now, record
        self._most_share = self.share
        if record["train/loss"] is not None:
            self.curve.add(record["step"], record["train/loss"])
        if record.get("val/loss") is not None:
            self._val_loss = record["val/loss"]

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Set the displayed sample text: a prompt and the model's continuation."""
        self._sample = f"step {step}: {visible(text).lstrip()}"
        self._prompt = f"prompt: {prompt!r}"

    @property
    def is_done(self) -> bool:
        """True if the last step of the run is complete."""
        return self._is_settled() and bool(self._record["step"] >= self._max_steps())

    @property
    def share(self) -> float:
        """Completed fraction of the run, from 0 to 1. For a run with a time budget, this is the
        fraction of the time that is used or the fraction of the step limit that is reached,
        whichever is larger.
        """
        last = self._last_step
        by_steps = 0.0 if last is None else min(float(self._record["step"]) / max(last, 1), 1.0)
        if self._budget_left is None or self._max_minutes is None:
            return by_steps
        # Never return a smaller fraction than before. Deciding the number of steps can only lower
        # the step limit, but a later correction may raise it.
        by_time = 1 - self._budget_left / (60 * self._max_minutes)
        return max(by_steps, by_time, self._most_share)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the run, based on the mean step time. For a run with a
        time budget, the estimate is at most the remaining time. None if it can't be estimated, for
        example in the first steps after resuming a run that exceeds its budget.
        """
        # A run with a decided number of steps completes all of them, even if its time is used up.
        budget_left, last = self._budget_left or None, self._last_step
        if last is None or (self._done <= _SLOW_STEPS + 1 and not self.is_done):
            return budget_left
        by_steps = float(max(last - self._record["step"], 0)) * self._mean_seconds
        return by_steps if budget_left is None else min(by_steps, budget_left)

    @property
    def _last_step(self) -> int | None:
        """Last possible step of the run; None if the run is limited only by its time budget."""
        is_by_steps = self._budget_left is None or self.is_done
        return self._max_steps() if is_by_steps else self._step_limit()

    @property
    def _budget_left(self) -> float | None:
        """Remaining seconds of a run's time budget; None without a time budget or before the first
        step.
        """
        used = self._record.get("elapsed_seconds")
        if used is None or self._max_minutes is None:
            return None
        return max(60 * self._max_minutes - self._seconds_over, 0.0)

    @property
    def _seconds_over(self) -> float:
        """Elapsed seconds of this call to `train` or, for a run with a time budget, of the whole
        run.
        """
        used = self._record.get("elapsed_seconds")
        if used is None:
            return self._clock() - self._begun
        return float(used) + self._clock() - self._last_at

    @property
    def line(self) -> str:
        """Metrics of the last step as one line of a log."""
        record, seconds = self._record, self.seconds_left
        left = ""
        if seconds is not None and not self.is_done:
            left = f"  {time_text(max(seconds, 1))} left"
        return f"{self._step}  {_loss(record)}  {_rates(record)}  {_memory(record)}{left}"

    @property
    def _step(self) -> str:
        """Number of the last completed step, followed by the total number of steps if this total
        can no longer change.
        """
        step = f"step {self._record['step']:,}"
        return f"{step}/{self._max_steps():,}" if self._is_settled() else step

    @property
    def _time_left(self) -> str:
        """Remaining time as text for a terminal, or "" if it is unknown."""
        left = self.seconds_left
        return "" if left is None else f"{_clock(max(left, 1))} left"

    def live_line(self, columns: int) -> str:
        """Return the most important figures in one line with a progress bar, for a terminal with
        `columns` columns.
        """
        record, step = self._record, self._step
        time = _clock(self._seconds_over) if self.is_done else self._time_left
        figures = "waiting for the first step"
        if "train/loss" in record:
            rate = _rates(record).split("  ")[0]
            room = columns - len(step) - len(time) - _BAR_COLUMNS
            shown = [_loss(record), rate, _memory(record)]
            figures = f"{_fitting(shown, room, 1)[0]}  {time}".rstrip()
        return _bar(step, self.share, figures, columns)

    @property
    def time(self) -> str:
        """Elapsed and remaining time, as text for a terminal."""
        budget = "" if self._max_minutes is None else f" of {_clock(60 * self._max_minutes)}"
        left = "" if self.is_done else self._time_left
        return f"{_clock(self._seconds_over)}{budget}{left and ', '}{left}"

    @property
    def figures(self) -> list[str]:
        """Metrics of the last step as text, in descending order of importance. Before the first
        step, the list contains only a note.
        """
        record = self._record
        if "train/loss" not in record:
            return ["waiting for the first step"]
        val = [] if self._val_loss is None else [f"val/loss {self._val_loss:.3f}"]
        memory = _memory(record, self.predicted_bytes)
        if "reserved_bytes" in record:
            memory += f", reserved {gib(record['reserved_bytes'])}"
        gpu = []
        if "gpu_utilization" in record:
            used = gib(record["device_used_bytes"])
            gpu = [f"GPU {record['gpu_utilization']:.0%} busy, {used} used"]
        rate = f"learning rate {record['learning_rate']:.3g}"
        return [_loss(record), *val, *_rates(record).split("  "), memory, *gpu, rate]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(options.max_width, console.height):
            yield Text(line, no_wrap=True, overflow="crop")

    def lines(self, columns: int, rows: int) -> Iterator[str]:
        """Yield the lines of the view for a terminal of `columns` by `rows` characters."""
        yield _bar(self._step, self.share, self.time, columns)
        is_large = columns >= _LEAST_COLUMNS and rows >= _LEAST_ROWS
        figures = _fitting(self.figures, columns, _FIGURE_ROWS if is_large else 1)
        yield from figures
        free = rows - 2 - len(figures)
        sample = self.sample_lines(columns, max(min(free - 1, _SAMPLE_ROWS), 0))
        height = min(free - len(sample) - 2, _CURVE_ROWS)
        if is_large and self.curve.last_step:
            yield from self.curve.lines(columns, height)
        yield from sample

    def sample_lines(self, columns: int, rows: int | None = None) -> list[str]:
        """Return the model's last continuation, wrapped to `columns` columns and without blank
        lines, followed by a line with its prompt.

        Args:
            columns: width of the terminal.
            rows: maximum number of lines; None for no limit.
        """
        width = columns - 1
        if not self._sample or width < 1:
            return []
        # At the start of training, a model generates many blank lines.
        lines = [line for line in self._sample.expandtabs(4).splitlines() if line.strip()]
        wrapped = [line[i : i + width] for line in lines for i in range(0, len(line), width)]
        # The continuation follows the end of the prompt, so a long prompt is truncated at its
        # start.
        long = len(self._prompt) - width
        prompt = f"…{self._prompt[long + 1 :]}" if long > 0 else self._prompt
        return [*wrapped[: None if rows is None else max(rows - 1, 1)], prompt][:rows]


def _bar(left: str, share: float, right: str, columns: int) -> str:
    """Return a line that contains a progress bar between two strings. The bar is omitted if the
    line is too short for it.
    """
    text = f"{left}  {share:4.0%}  "
    room = columns - 1 - len(text) - len(right) - 2
    if room < 5:
        return _fitting([left, f"{share:.0%}", right], columns, 1)[0]
    full = round(share * room)
    return f"{text}{'█' * full}{'░' * (room - full)}  {right}"


def _fitting(parts: list[str], columns: int, rows: int) -> list[str]:
    """Arrange `parts` in at most `rows` lines. Parts at the end that do not fit are left out."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) < columns:
            lines[-1] += f"  {part}"
        elif len(lines) < rows and len(part) < columns:
            lines.append(part)
        else:
            break
    return lines


def _clock(seconds: float) -> str:
    """Format seconds as a clock time: 75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _loss(record: Mapping[str, Any]) -> str:
    loss = record["train/loss"]
    text = f"loss {'overflow' if loss is None else format(loss, '.3f')}"
    return f"{text}  (skipped)" if record.get("skipped") else text


def _memory(record: Mapping[str, Any], planned: int | None = None) -> str:
    size = record["memory_bytes"]
    text = f"{memory_kind(record)} {gib(size, planned or 0)}"
    return text if planned is None else f"{text} (planned {gib(planned, size)})"


def _rates(record: Mapping[str, Any]) -> str:
    """Return the tokens and sequences per second as text. If clearly fewer tokens contribute to the
    loss, as in conversations, the text also includes the rate of these tokens. Metrics written by
    older releases may lack some of these values.
    """
    tokens = record["tokens_per_second"]
    learned, samples = (record.get(f"{n}_per_second") for n in ("learned_tokens", "samples"))
    text = f"{tokens:,.0f} tokens/s"
    if learned is not None and learned < MOSTLY_LEARNED * tokens:
        text += f" ({learned:,.0f} learned)"
    return text if samples is None else f"{text}  {rounded(samples)} samples/s"


#: Seconds from the start until the first line of a log is written, and seconds between subsequent
#: lines.
_SECONDS_TO_FIRST_LINE, _SECONDS_BETWEEN_LINES = 10.0, 60.0
#: Frames per second of the live view.
_FRAMES_PER_SECOND = 2.0


class View:
    """Base class for views that show the progress of a run in a terminal, notebook or log. The base
    class itself shows nothing.
    """

    def open(self) -> None:
        """Start drawing."""

    def step(self, progress: RunProgress) -> None:
        """Show the progress of the run after a step.

        Args:
            progress: the progress of the run, including this step.
        """

    def message(self, text: str) -> None:
        """Show a message line in addition to the progress."""

    def close(self) -> None:
        """Draw the final state, and stop drawing."""


class _LogView(View):
    """Writes messages to a log. A line with the run's metrics is added every minute and after the
    last step.
    """

    def __init__(self) -> None:
        self._due = time.monotonic() + _SECONDS_TO_FIRST_LINE

    def step(self, progress: RunProgress) -> None:
        now = time.monotonic()
        if now >= self._due or progress.is_done:
            self._due = now + _SECONDS_BETWEEN_LINES
            say(progress.line)

    def message(self, text: str) -> None:
        say(text)


class _TerminalView(View):
    """Draws the progress in a terminal, from a background thread of the rich library. The small
    view takes the last row. The large view takes several rows and includes the loss curve and the
    last sample text.
    """

    def __init__(self, progress: RunProgress, target: Console, *, is_large: bool) -> None:
        def line() -> Text:
            return Text(progress.live_line(target.width), no_wrap=True, overflow="crop")

        self._live = Live(
            get_renderable=(lambda: progress) if is_large else line,
            console=target,
            refresh_per_second=_FRAMES_PER_SECOND,
            # Do not let rich redirect stdout. It would print stdout above the progress even if
            # stdout is redirected to a file.
            redirect_stdout=False,
            vertical_overflow="crop",
        )

    def open(self) -> None:
        self._live.start()

    def message(self, text: str) -> None:
        self._live.console.print(visible(text), markup=False)

    def close(self) -> None:
        self._live.stop()


def _view(progress: RunProgress, *, is_large: bool) -> View:
    """Return the view for the process's output, which is a notebook, a terminal or a log."""
    display, target = notebook_display(), console()
    if display is not None:
        return NotebookView(progress, display)
    if not target.is_interactive:
        return _LogView()
    return _TerminalView(progress, target, is_large=is_large)


def sample_line(prompt: str, text: str, width: int) -> str:
    """Return the end of a prompt and its sample text in one line of at most `width` characters,
    with whitespace collapsed.
    """
    most = width // 3
    end = " ".join(prompt.split())
    if len(end) > most:
        end = end[-most:]
        # If there is a space in the first half of the truncated prompt, begin after it, at the
        # start of a word.
        first, space, rest = end.partition(" ")
        end = f"…{rest if space and 2 * len(first) < most else end}"
    return shortened(f"{end!r} -> {' '.join(text.split())!r}", width, at_space=True)


class TrainingProgress:
    """Shows the progress of a run to the user: steps, loss, speed, memory, remaining time and the
    last sample text. Use it as a context manager.

    Args:
        progress: the figures of the run.
        shown: False to show nothing at all.
        is_large: True to draw the loss curve and the last sample text in a terminal instead of a
            single line.
    """

    def __init__(self, progress: RunProgress, *, shown: bool, is_large: bool = False) -> None:
        self._progress = progress
        self._view = _view(progress, is_large=is_large) if shown else View()
        # The notebook view and the large terminal view include the sample text. All other views
        # show it as a message.
        draws = NotebookView if not is_large else (NotebookView, _TerminalView)
        self._shows_samples = shown and not isinstance(self._view, draws)
        self._sampled_step = -1

    def __enter__(self) -> TrainingProgress:
        self._view.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # A closed terminal must not end the run with an error.
        with contextlib.suppress(OSError):
            self._view.close()

    def predict_memory(self, predicted_bytes: int | None) -> None:
        """Show the predicted memory, in bytes, next to the measured memory. None shows no
        prediction.
        """
        self._progress.predicted_bytes = predicted_bytes

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        self._progress.step(record)
        self._view.step(self._progress)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a prompt and the model's continuation `text`. In views that show samples as
        messages, only the first sample of each step is shown.
        """
        self._progress.sample(step, prompt, text)
        if self._shows_samples and step != self._sampled_step:
            self._sampled_step, start = step, f"step {step}: "
            line = sample_line(prompt, text, console().width - len(start) - 1)
            self._view.message(f"{start}{line}")

    def message(self, text: str) -> None:
        """Show a message line to the user."""
        self._view.message(text)


#: Seconds between two updates of the output.
_SECONDS_BETWEEN_UPDATES = 1.0
#: Line width in characters, followed by the width and height of the loss curve in pixels.
_COLUMNS = 110
_WIDTH = 640
_HEIGHT = 150
#: Maximum number of message lines shown above the figures.
_MOST_MESSAGES = 40


class NotebookView(View):
    """Shows the progress of a run in a notebook. The cell has a single output, in which the run's
    messages appear above the figures.

    Args:
        progress: the figures of the run.
        display: IPython's `display`.
    """

    def __init__(self, progress: RunProgress, display: Callable[..., Any]) -> None:
        self._progress, self._display = progress, display
        self._messages: list[str] = []
        self._handle: Any = None
        self._due = 0.0

    def open(self) -> None:
        """Show the output below the cell."""
        self._handle = self._display(self._content(), raw=True, display_id=True)

    def step(self, progress: RunProgress) -> None:
        """Show the progress after a step, at most once per second, and always after the last
        step.
        """
        if time.monotonic() >= self._due or progress.is_done:
            self._update()

    def message(self, text: str) -> None:
        """Show a message line above the figures."""
        self._messages = [*self._messages, text][-_MOST_MESSAGES:]
        self._update()

    def close(self) -> None:
        """Draw the final state."""
        self._update()

    def _update(self) -> None:
        self._due = time.monotonic() + _SECONDS_BETWEEN_UPDATES
        if self._handle is not None:
            self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """Return the output as text and as HTML, keyed by MIME type. The notebook displays the
        richest type that it supports.
        """
        first, figures, *_ = self._progress.lines(_COLUMNS, 3)
        plain = [*self._messages, first, figures, *self._progress.sample_lines(_COLUMNS)]
        escaped = html.escape("\n".join([*self._messages, first, figures]))
        sample = html.escape("\n".join(self._progress.sample_lines(_COLUMNS)))
        page = f"<pre>{escaped}</pre>{_curve(self._progress)}<pre>{sample}</pre>"
        return {"text/plain": "\n".join(plain), "text/html": page}


def _curve(progress: RunProgress) -> str:
    """Return the loss curve as an SVG element, or "" if it has fewer than two points."""
    means = progress.curve.means
    if len(means) < 2:
        return ""
    high, low = progress.curve.edges
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
        f'<text x="60" y="{_HEIGHT + 12}" {text}>step {progress.curve.first_step:,}</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT + 12}" text-anchor="end" {text}>'
        f"{progress.curve.last_step:,}</text></svg>"
    )


def show_picture(path: Path) -> None:
    """Show an image file below the notebook cell. Do nothing outside a notebook or if the file is
    missing.
    """
    display = notebook_display()
    if display is not None and path.is_file():
        display(importlib.import_module("IPython.display").Image(filename=str(path)))
