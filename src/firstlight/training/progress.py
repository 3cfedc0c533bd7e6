"""The progress of a run on stderr: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import TextColumn

from firstlight.console import progress_bar, rounded, say
from firstlight.training.metrics import MOSTLY_LEARNED

_SECONDS_BETWEEN_LINES = 15.0


class TrainingProgress:
    """Shows steps, loss, tokens/s, memory and the time left.

    Args:
        max_steps: steps of the whole run.
        start_step: the step that the bar begins at.
        shown: False shows nothing at all.
    """

    def __init__(self, max_steps: int, start_step: int, *, shown: bool) -> None:
        self._shown, self._max_steps, self._done = shown, max_steps, 0
        self._bar = progress_bar(TextColumn("{task.fields[figures]}"), shown=shown)
        self._task = self._bar.add_task(
            "training", total=max_steps, completed=start_step, figures=""
        )
        self._last_line = self._begun = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step's figures."""
        self._done += 1
        loss = record["train/loss"]
        figures = (
            f"step {record['step']}/{self._max_steps}  "
            f"loss {'overflow' if loss is None else format(loss, '.3f')}  "
            f"{'(skipped)  ' if record.get('skipped') else ''}"
            f"{_rates(record)}  "
            f"{record['memory_bytes'] / 2**30:.2f} GiB"
        )
        self._bar.update(self._task, completed=record["step"], figures=figures)
        now = time.monotonic()
        is_last = record["step"] == self._max_steps
        due = now - self._last_line >= _SECONDS_BETWEEN_LINES or is_last
        if self._shown and self._bar.disable and due:
            self._last_line = now
            left = (now - self._begun) / self._done * (self._max_steps - record["step"])
            say(f"{figures}  {left:.0f} s left")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._shown:
            return
        if self._bar.disable:
            say(text)
        else:
            self._bar.console.print(text, markup=False)


def _rates(record: Mapping[str, Any]) -> str:
    """Tokens and sequences a second; with conversations also the tokens of them that are learned.
    The metrics of an older release have less."""
    tokens = record["tokens_per_second"]
    learned, samples = (record.get(f"{n}_per_second") for n in ("learned_tokens", "samples"))
    text = f"{tokens:,.0f} tokens/s"
    if learned is not None and learned < MOSTLY_LEARNED * tokens:
        text += f" ({learned:,.0f} learned)"
    return text if samples is None else f"{text}  {rounded(samples)} samples/s"
