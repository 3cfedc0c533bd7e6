from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.report import report
from firstlight.report.charts import png
from firstlight.report.report import draw_report
from firstlight.run_log.names import HTML_NAME, METRICS_NAME, REPORT_NAME, SAMPLES_NAME
from firstlight.run_log.reader import Series, read_run, smoothed


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": 5.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_second": 1000.0 + step,
        "mfu": 0.25,
        "memory_bytes": 2**28,
        **more,
    }


_VALIDATION = {"val/loss": 4.0, "perplexity": 54.6, "bits_per_byte": 2.0}


def write(run: Path, records: list[dict[str, Any]], *samples: str) -> Path:
    """Write the logs of a run with these records."""
    run.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (run / METRICS_NAME).write_text(lines, encoding="utf-8")
    lines = "".join(json.dumps({"step": 9, "prompt": "", "text": t}) + "\n" for t in samples)
    (run / SAMPLES_NAME).write_text(lines, encoding="utf-8")
    return run


def require_whole(content: bytes) -> None:
    """Check that a PNG is complete and large enough to be read."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 600
    assert height > 400


def draw(run: Path, records: list[dict[str, Any]], *samples: str) -> None:
    """Draw the picture of a run with these records, and check that it is complete."""
    require_whole(report.picture_of(read_run(write(run, records, *samples))))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 200])
def test_draw_report_supports_runs_of_any_length(tmp_path: Path, count: int) -> None:
    records = [
        record(step, **(_VALIDATION if step % 2 == 0 else {})) for step in range(1, count + 1)
    ]
    draw(tmp_path / "run", records, "one text", "another")


def test_draw_report_run_without_steps_shows_losses_at_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []

    def drawn(figure: Any) -> bytes:
        figures.append(figure)
        return png(figure)

    monkeypatch.setattr(report, "png", drawn)
    draw(tmp_path / "run", [{"step": 0, "tokens_seen": 0, **_VALIDATION}], "its text")
    loss, text = figures[0].axes
    assert loss.get_xlabel() == "step"
    assert loss.get_legend_handles_labels()[1] == ["val/loss"]
    assert loss.lines[0].get_xydata().tolist() == [[0, 4.0]]
    assert text.texts[0].get_text() == "its text"


def test_draw_report_run_without_validation_samples_or_gradients_is_supported(
    tmp_path: Path,
) -> None:
    draw(tmp_path / "run", [record(1), record(2)])
    draw(tmp_path / "zero", [record(1, grad_norm=0.0), record(2, grad_norm=0.0)])
    (tmp_path / "zero" / SAMPLES_NAME).unlink()
    (tmp_path / "zero" / METRICS_NAME).unlink()
    assert draw_report(tmp_path / "zero").stat().st_size > 1000


@pytest.mark.parametrize(
    "first, second",
    [
        ("price: $5 and $6^{", r"$\frac{$ \$ \\$ $$"),
        ("日本語 🙂 ⴰⵎⴰⵣⵉⵖ \U0010ffff", "\x00\x01\x1b[31m\x7f\u2028\u200b\ufffd"),
        ("a\tb\r\nc\x0bd\x0ce", "\n" * 100),
        ("word " * 2000, "x" * 5000),
        ("e\u0301\u0301\u0301\u0301" * 50, "\u202eright to left\u202c العربية עברית"),
        ("{curly} %s %(x)s _under_ ^^ \\",) * 2,
    ],
)
def test_draw_report_accepts_any_model_text(tmp_path: Path, first: str, second: str) -> None:
    draw(tmp_path / "run", [record(1, **_VALIDATION)], first, second)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_draw_report_draws_arbitrary_text(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    draw(tmp_path_factory.mktemp("report") / "run", [record(1)], text)


@pytest.mark.parametrize("name", ["a$^$b 日本 🙂", r"-\frac{a_b^c"])
def test_draw_report_run_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    run = write(tmp_path / name, [record(1)])
    path = draw_report(run)
    assert path == run / REPORT_NAME
    require_whole(path.read_bytes())
    assert sorted(p.name for p in run.iterdir()) == [
        METRICS_NAME,
        HTML_NAME,
        REPORT_NAME,
        SAMPLES_NAME,
    ]


def smooth(values: list[float]) -> list[float]:
    series = Series(np.arange(len(values), dtype=float), np.array(values))
    return list(smoothed(series).y)


@given(st.floats(-1e6, 1e6), st.integers(1, 5000))
def test_smooth_keeps_constant_values(value: float, count: int) -> None:
    assert smooth([value] * count) == pytest.approx([value] * count, rel=1e-9, abs=1e-9)


def test_smooth_halves_weight_per_half_life() -> None:
    # Weights 1, 1/2, 1/4 backwards from the newest: with so few points, the half-life is one point.
    assert smooth([4.0, 2.0, 1.0]) == pytest.approx([4.0, (2 + 2) / 1.5, (1 + 1 + 1) / 1.75])
    assert smooth([]) == []
