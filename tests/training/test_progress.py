"""The progress display of a run: on terminals of every size, in notebooks, and as lines in a
log.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from firstlight.console import notebook_display, say
from firstlight.training import progress
from firstlight.training.progress import LossCurve, NotebookView, RunProgress, TrainingProgress


def record(step: int, loss: float | None = 2.5, **further: Any) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": loss,
        "learning_rate": 0.003,
        "tokens_per_second": 4000.0,
        "samples_per_second": 15.6,
        "memory_bytes": 300 << 20,
        **further,
    }


def progress_of(
    steps: int, max_steps: int = 100, seconds: float = 0.5, **options: Any
) -> RunProgress:
    """Return a progress with this many steps done."""
    clock = itertools.count(0.0, seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(clock))
        found = RunProgress(lambda: max_steps, 0, **options)
        for step in range(1, steps + 1):
            found.step(record(step, 8 / step**0.2))
    return found


# The loss curve


def test_curve_keeps_means_of_equally_many_steps() -> None:
    curve = LossCurve()
    for step in range(1, 2 * curve.most + 2):
        curve.add(step, float(step))
    # 512 means of two steps are merged into 256 means of four when step 1,025 comes.
    assert (curve.first_step, curve.last_step) == (1, 2 * curve.most + 1)
    assert curve.means[:2] == [2.5, 6.5]
    assert len(curve.means) == curve.most // 2 + 1
    curve.add(9999, float("nan"))
    assert curve.last_step == 2 * curve.most + 1


def test_curve_of_falling_values_is_drawn_from_upper_left_to_lower_right() -> None:
    curve = LossCurve()
    for step in range(8):
        curve.add(step + 1, 7.0 - step)
    drawn, high, low = curve.drawn(4, 2)
    assert drawn == ["⠑⢄", "  ⠑⢄"]
    assert (high, low) == (7.0, 0.0)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=700), st.integers(1, 90), st.integers(1, 9)
)
def test_curve_fits_its_area_and_reaches_both_edges(
    losses: list[float], columns: int, rows: int
) -> None:
    curve = LossCurve()
    for step, loss in enumerate(losses):
        curve.add(step + 1, loss)
    drawn, high, low = curve.drawn(columns, rows)
    assert len(drawn) == rows
    assert max(map(len, drawn)) <= columns
    assert high >= low
    # Within the range of the losses, except for rounding.
    assert min(losses) - 1e-6 <= low
    assert high <= max(losses) + 1e-6
    assert drawn[0].strip()
    if high > low:
        assert drawn[-1].strip()


# The display


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 40))
def test_progress_view_fits_every_terminal(columns: int, rows: int, steps: int) -> None:
    shown = progress_of(steps)
    shown.sample(steps, "def f", "(x):\n\treturn 1" * 20)
    lines = list(shown.lines(columns, rows))
    assert len(lines) <= max(rows - 1, 2)
    assert lines[0].startswith(f"step {steps}/100")
    # The first line is never omitted; the terminal truncates it.
    assert all(len(line) < columns for line in lines[2:])
    assert all("\t" not in line and "\x1b" not in line for line in lines)


def test_progress_view_shows_loss_speed_memory_time_and_last_sample() -> None:
    shown = progress_of(40, max_minutes=2.0)
    shown.predicted_bytes = 3 << 30
    shown.step(record(41, 3.25, **{"val/loss": 3.5}))
    shown.sample(41, "To be", "\x1b[31m or not\n\n \nto be")
    lines = list(shown.lines(140, 24))
    assert re.fullmatch(r"step 41/100   41%  █+░+  \S+ of 2:00, \S+ left", lines[0])
    assert lines[1] == (
        "loss 3.250  val/loss 3.500  4,000 tokens/s  15.6 samples/s  process 0.29 GiB (planned "
        "3.00 GiB)  learning rate 0.003"
    )
    assert lines[-3:] == ["step 41: ⟨U+001B⟩[31m or not", "to be", "prompt: 'To be'"]
    assert lines[-4].split() == ["step", "1", "41"]


def test_progress_sample_starts_with_continuation_and_keeps_prompt() -> None:
    shown = progress_of(1)
    assert shown.sample_lines(30, 4) == []
    shown.sample(9, "import os\n\nfrom pathlib import", "\n    Path, PurePath\n\nx = 1\ny\nz")
    assert shown.sample_lines(48, 4) == [
        "step 9: Path, PurePath",
        "x = 1",
        "y",
        r"prompt: 'import os\n\nfrom pathlib import'",
    ]
    # On a narrow terminal, a long line continues in the next row, and only the end of the prompt is
    # shown.
    assert shown.sample_lines(16, 3) == ["step 9: Path, P", "urePath", "…athlib import'"]
    assert shown.sample_lines(48, 1) == ["step 9: Path, PurePath"]
    assert len(shown.sample_lines(48)) == 5


def test_progress_time_left_follows_last_steps() -> None:
    # The first steps, which include compilation, do not count.
    shown = progress_of(3)
    assert shown.seconds_left is None
    assert progress_of(40, seconds=0.5).seconds_left == pytest.approx(60 * 0.5)
    assert progress_of(100).seconds_left == 0
    assert "left" not in progress_of(100).time


def test_progress_timed_run_ends_at_its_step_limit() -> None:
    """The passes end after 300 steps of one second, of which the decay takes 60, within a budget of
    30 minutes.
    """
    now, steps, limit = 0.0, 1800, 300
    shown = RunProgress(
        lambda: steps, 0, 30.0, clock=lambda: now, step_limit=lambda: limit if limit else None
    )
    shares: list[float] = []
    lefts: list[float] = []
    for step in range(1, 301):
        now += 1.0
        if step == 241:
            steps = 300
        shown.step(record(step, elapsed_seconds=now))
        shares.append(shown.share)
        lefts.append(shown.seconds_left or 0.0)
    assert shown.time == "5:00 of 30:00"
    # Unknown before a step has been measured.
    assert lefts[2] == 1797
    assert lefts[3:] == pytest.approx(list(range(296, -1, -1)))
    assert shares == pytest.approx([step / 300 for step in range(1, 301)])
    # If only the time budget ends the run, the rest of the budget is left.
    limit, steps = 0, 1800
    shown.restart()
    shown.step(record(300, elapsed_seconds=now))
    assert [shown.seconds_left, shown.share] == pytest.approx([1500, 1 / 6])
    # The time left never exceeds the rest of the budget, however slow the steps are.
    limit, now = 5000, 1790.0
    assert [shown.seconds_left, shown.share] == pytest.approx([10, 179 / 180])


def test_progress_time_left_does_not_jump_at_evaluation() -> None:
    now = 0.0
    shown = RunProgress(lambda: 400, 0, clock=lambda: now)
    lefts = []
    for step in range(1, 400):
        is_evaluation = step % 100 == 0
        now += 10.5 if is_evaluation else 0.5
        shown.step(record(step))
        lefts.append(shown.seconds_left or 0.0)
    assert lefts[49] == pytest.approx(350 * 0.5)
    for before, at in ((lefts[i - 2], lefts[i - 1]) for i in (100, 200, 300)):
        assert at < 1.5 * before


def test_progress_time_left_follows_slower_machine() -> None:
    now = 0.0
    shown = RunProgress(lambda: 400, 0, clock=lambda: now)
    for step in range(1, 201):
        now += 0.5 if step <= 100 else 1.0
        shown.step(record(step))
    assert shown.seconds_left == pytest.approx(200 * 0.875, rel=0.02)


def test_progress_total_and_time_left_are_shown_only_if_known() -> None:
    now, settled = 0.0, False
    shown = RunProgress(
        lambda: 150,
        0,
        1.0,
        clock=lambda: now,
        step_limit=lambda: 150 if settled else None,
        is_settled=lambda: settled,
    )
    figures = "loss 2.500  4,000 tokens/s  15.6 samples/s  process 300 MiB"
    shown.step(record(12, elapsed_seconds=19.0))
    assert shown.line == f"step 12  {figures}  41 s left"
    assert next(shown.lines(80, 24)).startswith("step 12   32%  █")
    # A resumed run takes all of its decided steps, although its budget is used up.
    settled = True
    for step in range(13, 17):
        now += 2.0
        shown.step(record(step, elapsed_seconds=60.0 + now))
        if step < 15:
            assert shown.line == f"step {step}/150  {figures}"
            assert shown.time == f"1:0{now:.0f} of 1:00"
    assert shown.line == f"step 16/150  {figures}  4 min 28 s left"
    shown.step(record(150, elapsed_seconds=99.0))
    assert shown.line == f"step 150/150  {figures}"


def test_progress_80_columns_show_loss_speed_memory_and_time_left() -> None:
    shown = progress_of(40, max_minutes=30.0)
    shown.predicted_bytes = 1299 << 20
    rates = {"tokens_per_second": 12082.0, "samples_per_second": 47.19}
    shown.step(record(41, 3.654, **rates, **{"val/loss": 6.238, "memory_bytes": 1208 << 20}))
    bar, *figures = list(shown.lines(80, 24))[:3]
    assert bar.endswith(" left")
    assert figures == [
        "loss 3.654  val/loss 6.238  12,082 tokens/s  47.19 samples/s",
        "process 1.18 GiB (planned 1.27 GiB)  learning rate 0.003",
    ]
    # A small terminal shows only one line of figures.
    assert list(shown.lines(80, 3))[1:] == figures[:1]


def test_progress_on_gpu_shows_reserved_memory_and_driver_values() -> None:
    shown = progress_of(40)
    gpu = {"reserved_bytes": 1400 << 20, "device_used_bytes": 2 << 30, "gpu_utilization": 0.97}
    shown.step(record(41, 3.654, **gpu))
    assert "tensors 300 MiB, reserved 1.37 GiB" in shown.figures
    assert "GPU 97% busy, 2.00 GiB used" in shown.figures


def test_progress_validation_loss_of_zero_is_shown() -> None:
    shown = RunProgress(lambda: 100, 0)
    shown.step({**record(1), "val/loss": 2.0})
    shown.step(record(2))
    assert "2.000" in "\n".join(shown.lines(80, 24))
    shown.step({**record(3), "val/loss": 0.0})
    assert "2.000" not in "\n".join(shown.lines(80, 24))


def test_progress_follows_changed_step_count() -> None:
    steps = 100
    shown = RunProgress(lambda: steps, 0)
    shown.step(record(50))
    assert shown.share == 0.5
    steps = 200
    assert shown.share == 0.25
    assert next(shown.lines(80, 24)).startswith("step 50/200   25%")


def test_progress_step_without_loss_is_shown_as_overflow() -> None:
    shown = progress_of(5)
    shown.step(record(6, None, skipped=True))
    assert shown.figures[0] == "loss overflow  (skipped)"
    assert shown.curve.last_step == 5


def test_progress_live_line_fits_every_terminal_and_ends_with_time_left() -> None:
    shown = progress_of(40)
    for columns in range(1, 200):
        assert "\n" not in shown.live_line(columns)
        assert columns < 60 or len(shown.live_line(columns)) < columns
    assert re.fullmatch(
        r"step 40/100   40%  █+░+  loss 3\.\d{3}  4,000 tokens/s  0:30 left",
        shown.live_line(80),
    )
    assert "  4,000 tokens/s  process 300 MiB  0:30 left" in shown.live_line(100)
    assert progress_of(100).live_line(80).endswith("loss 3.185  4,000 tokens/s  0:50")
    assert progress_of(0).live_line(80).endswith("waiting for the first step")


# Where the display appears


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the text sent to a terminal of 80 by 24."""
    terminal = io.StringIO()
    made = Console(
        file=terminal,
        force_terminal=True,
        force_interactive=True,
        highlight=False,
        width=80,
        height=24,
        _environ={},
    )
    monkeypatch.setattr(progress, "console", lambda: made)
    return terminal


def test_progress_terminal_is_restored_however_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_terminal(monkeypatch)

    def interrupted() -> None:
        with TrainingProgress(progress_of(0), shown=True) as bar:
            bar.step(record(1))
            bar.message("a [bold]message[/]")
            bar.sample(1, "To be", " or not")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    written = terminal.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert "a [bold]message[/]\n" in written
    # A sample text appears as a line above the progress, whose last frame remains.
    assert "step 1: 'To be' -> 'or not'\n" in written
    assert written.rindex("step 1/100") > written.index("step 1: 'To be'")


def test_progress_log_has_one_line_per_minute_and_last_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    shown = RunProgress(lambda: 100, 0)
    with TrainingProgress(shown, shown=True) as bar:
        for step in range(1, 101):
            now += 2.0 if step > 1 else 10.0
            bar.step(record(step))
        bar.sample(100, "a", "b\n\tc ")
        bar.sample(100, "second prompt", "of the same step")
        bar.sample(101, "the end of this prompt is shown, and so is", "entirely different " * 9)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[:-2]] == [
        "1/100",
        "31/100",
        "61/100",
        "91/100",
        "100/100",
    ]
    # The first line comes before the speed has settled: the time would include compilation.
    figures = "  loss 2.500  4,000 tokens/s  15.6 samples/s  process 300 MiB"
    assert lines[0] == f"step 1/100{figures}"
    assert lines[1] == f"step 31/100{figures}  2 min 18 s left"
    assert lines[4] == f"step 100/100{figures}"
    assert lines[-2] == "step 100: 'a' -> 'b c'"
    # Both texts are cut at a space.
    assert lines[-1].startswith("step 101: '…is shown, and so is' -> 'entirely different")
    assert 69 <= len(lines[-1]) <= 79
    assert re.search(r"[ '](entirely|different)…$", lines[-1])


def test_progress_disabled_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(progress_of(0), shown=False) as bar:
        bar.step(record(100))
        bar.message("a message")
        bar.sample(1, "a", "b")
    assert capsys.readouterr() == ("", "")


# In notebooks


class Output:
    """The only output of a cell."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw
        assert display_id
        self.shown.append(content)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(content)


def test_progress_in_notebook_updates_one_output_per_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    output = Output()
    shown = RunProgress(lambda: 1000, 0)
    view = NotebookView(shown, output)
    view.open()
    for step in range(1, 9):
        shown.step(record(step, 8.0 - step))
        view.step(shown)
        now += 0.4
    # When the display opens, and at the first step of each second.
    assert [content["text/plain"].split()[1] for content in output.shown] == [
        f"{step}/1,000" for step in (0, 1, 4, 7)
    ]
    view.message("val/loss < 3 & falling")
    shown.sample(8, "<b>", "To be")
    view.close()
    last = output.shown[-1]
    assert last["text/plain"].splitlines()[0] == "val/loss < 3 & falling"
    assert last["text/plain"].splitlines()[-2:] == ["step 8: To be", "prompt: '<b>'"]
    assert "val/loss &lt; 3 &amp; falling\nstep 8/1,000" in last["text/html"]
    assert "step 8: To be\nprompt: &#x27;&lt;b&gt;&#x27;" in last["text/html"]
    # Of the eight losses in the picture, 7.0 at step 1 is the highest and 0.0 the lowest.
    assert '<polyline points="60.0,10.0 ' in last["text/html"]
    assert '630.0,140.0" fill="none"' in last["text/html"]


def test_progress_outside_notebook_writes_messages_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook_display() is None
    # IPython on a terminal, or imported by a library.
    terminal = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert notebook_display() is None
    say("a message")
    assert capsys.readouterr() == ("", "a message\n")
