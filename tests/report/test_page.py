"""report.html is complete, self-contained and small, and escapes a run's content."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from builders import slow_but
from firstlight.cli.main import main
from firstlight.console import visible
from firstlight.errors import CheckpointError
from firstlight.evaluation.comparison import (
    ComparedAnswer,
    ComparedValue,
    ModelComparison,
    Passage,
    Segment,
)
from firstlight.evaluation.scores import Metric
from firstlight.report.charts import Chart, Line, draw
from firstlight.report.report import chosen_samples, draw_report, run_page, write_model_comparison
from firstlight.report.summary import final_numbers
from firstlight.run_log.names import HTML_NAME, REPORT_NAME
from firstlight.run_log.reader import Series, read_run
from firstlight.training.loop import train
from report_runs import HOSTILE, MOST_HOSTILE, Page, record, validation, write_lines, write_run

_START = {
    "step": 0,
    "time": "2026-01-02T03:04:05+00:00",
    "max_steps": 20,
    "parameters": 1_234_567,
    "tokenizer_sha256": "aa",
    "gzip_bits_per_byte": 1.75,
    "machine": {"device": "cpu", "name": "Abacus 9", "memory_bytes": 2**34, "cpus": 2},
}


@pytest.fixture
def drawn_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests do not draw reports."""
    monkeypatch.setattr("firstlight.training.loop.draw_report", draw_report)


def page_of(run: Path) -> Page:
    return Page(run_page(read_run(run))).harmless()


def full_run(folder: Path, name: str = "run") -> Path:
    """Write a run with every optional part."""
    records = [
        record(
            step,
            **(validation(6 - step / 10) if step % 5 == 0 else {}),
            **({"train_eval/loss": 3 - step / 10} if step % 5 == 0 else {}),
            **({"arc/acc": step / 40, "arc/acc_stderr": 0.01} if step % 10 == 0 else {}),
            **({"arc/acc_norm": 0.5} if step == 20 else {}),
        )
        for step in range(1, 21)
    ]
    return write_run(
        folder / name,
        records,
        samples=[(step, "def f", f"(x{step}):\n    pass") for step in (5, 10, 15, 20)],
        events=[
            {"step": 7, "event": "rollback", "to_step": 5, "reason": "no number"},
            {"step": 9, "event": "out of memory", "micro_batch_rows": 4, "before": 8},
        ],
        starts=[_START, {**_START, "step": 15, "time": "2026-01-02T04:04:05+00:00"}],
        recipe={"model": {"model_type": "llama"}, "optimizer": {"learning_rate": 0.001}},
    )


@pytest.fixture(scope="module")
def drawn_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a full run with its report once; tests copy it."""
    run = full_run(tmp_path_factory.mktemp("drawn"))
    draw_report(run)
    return run


def test_run_page_shows_everything_a_run_holds(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path))
    text = " ".join(page.texts("main"))
    for part in (
        "complete: 20 steps",
        "llama of 1.235M parameters",
        "Abacus 9",
        "02 January 2026, 03:04 UTC",
        "validation loss4.0000 nats",
        "best 4.0000 at step 20",
        "2.000gzip -9: 1.750 on all validation text",
        "; medians",
        "back to step 5: no number",
        "micro-batch size 4 instead of 8",
        "from the checkpoint of step 15",
        "learning_rate: 0.001",
        "16.0 GiB",
        "± 0.0100",
    ):
        assert part in " ".join(text.split()), part
    assert page.texts("pre")[:4] == [f"def f(x{s}):\n    pass" for s in (20, 15, 10, 5)]
    assert page.texts("summary")[:4] == [f"step {s}" for s in (20, 15, 10, 5)]
    curves = {c["name"]: c for chart in page.curves() for c in chart["curves"]}
    exact = [float(f"{5 / s:.6g}") for s in range(1, 21)]
    assert curves["train/loss, each step"]["y"] == exact
    assert curves["val/loss"]["x"] == [5, 10, 15, 20]
    assert curves["val/loss"]["y"] == [5.5, 5, 4.5, 4]
    (loss,) = (c for c in page.curves() if "val/loss" in {one["name"] for one in c["curves"]})
    beside = {one["name"]: one["y"] for one in loss["curves"]}
    assert beside["train_eval/loss"] == [2.5, 2, 1.5, 1]
    assert curves["arc/acc"]["y"] == [0.25, 0.5]
    assert {"learning rate", "gradient norm", "throughput", "memory", "mfu"} <= curves.keys()


@pytest.mark.usefixtures("no_drawings")
def test_run_page_of_gpu_run_shows_reserved_and_used_memory_and_utilization(tmp_path: Path) -> None:
    gpu = {"reserved_bytes": 2**29, "device_used_bytes": 2**30, "gpu_utilization": 0.9}
    run = write_run(tmp_path / "run", [record(s, **gpu) for s in (1, 2)])
    curves = {c["name"]: c["y"] for chart in page_of(run).curves() for c in chart["curves"]}
    assert curves["reserved by the allocator"] == [0.5, 0.5]
    assert curves["used on the GPU, all processes"] == [1, 1]
    assert curves["gpu utilization"] == [90, 90]
    numbers = final_numbers(read_run(run))
    assert {key: numbers[key] for key in gpu} == gpu


@pytest.mark.usefixtures("no_drawings")
def test_run_page_of_conversations_shows_learned_tokens_per_second(tmp_path: Path) -> None:
    def pages(learned: float) -> str:
        rates = {"learned_tokens_per_second": learned, "samples_per_second": 7.5}
        folder = tmp_path / str(learned)
        write_run(folder, [record(1, **rates), record(2, **rates)])
        return " ".join(page_of(folder).texts("main"))

    assert "250 learned tokens/s, 7.5 samples/s, MFU" in pages(250.0)
    assert "learned tokens/s" not in pages(990.0)


def test_run_numbers_match_end_of_run(tmp_path: Path) -> None:
    numbers = final_numbers(read_run(full_run(tmp_path)))
    assert numbers == {
        "run_folder": str(tmp_path / "run"),
        "step": 20,
        "max_steps": 20,
        "tokens_seen": 2560,
        "epoch": 2.0,
        "train/loss": 0.25,
        "val/loss": 4.0,
        "perplexity": 16.0,
        "bits_per_byte": 2.0,
        "skipped_steps": 0,
        "best_val/loss": 4.0,
        "best_val/loss_step": 20,
        "best_bits_per_byte": 2.0,
        "gzip_bits_per_byte": 1.75,
        "tokens_per_second": 1010.5,
        "learned_tokens_per_second": None,
        "samples_per_second": None,
        "step_seconds": 36.0,
        "mfu": 0.25,
        "memory_bytes": 2**28 + 20,
        "reserved_bytes": None,
        "device_used_bytes": None,
        "gpu_utilization": None,
        "hours": pytest.approx(0.2),
        "parameters": 1_234_567,
        "rollbacks": 1,
        "resumed": 1,
        "arc/acc": 0.5,
        "arc/acc_stderr": 0.01,
        "arc/acc_norm": 0.5,
        "train_eval/loss": 1.0,
    }
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_run_page_best_validation_loss_may_be_earlier_one(tmp_path: Path) -> None:
    losses = {1: 4.0, 2: 3.0, 3: 3.5}
    run = write_run(tmp_path / "run", [record(s, **validation(v)) for s, v in losses.items()])
    numbers = final_numbers(read_run(run))
    assert (numbers["val/loss"], numbers["best_val/loss"]) == (3.5, 3.0)
    assert (numbers["best_val/loss_step"], numbers["best_bits_per_byte"]) == (2, 1.5)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_run_page_supports_runs_of_any_length(tmp_path: Path, count: int) -> None:
    run = write_run(tmp_path / "run", [record(step) for step in range(1, count + 1)])
    page = page_of(run)
    assert f"{count} step{'s' if count != 1 else ''}" in page.content
    assert ("nothing yet" in page.content) == (count == 0)


def test_run_page_folder_with_only_recipe_is_supported(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: {seed: 1}\n", encoding="utf-8")
    assert "seed" in page_of(tmp_path).texts("pre")[0]


@pytest.mark.parametrize("text", slow_but(MOST_HOSTILE, HOSTILE))
def test_run_page_escapes_content_of_run(tmp_path: Path, text: str) -> None:
    """Samples, prompts, names, keys, events, the recipe and the machine appear as plain text."""
    name = text.replace("/", "").replace("\x00", "").replace("\ud800", "")
    # File names and YAML allow fewer characters than samples.
    listed = "".join(c for c in text if c.isprintable())
    run = write_run(
        tmp_path / name,
        [
            record(1, **{f"{text}/acc": 0.5, text: 2.0}),
            record(2, **{f"{text}/acc": 0.5, text: 3.0, f"{text}/acc_stderr": 0.1}),
        ],
        samples=[(2, text, text)],
        events=[
            {"step": 1, "event": text, "why": text},
            {"step": 2, "event": "rollback", "to_step": text, "reason": text},
        ],
        starts=[{"step": 0, "time": text, "machine": {"name": text, text: text}}],
        recipe={"model": {"model_type": listed}, listed: [listed]},
    )
    page = page_of(run)
    assert "alert(1)" not in page.texts("script")[0]
    assert page.texts("pre")[0] == visible(text) * 2
    assert page.texts("h1") == [visible(name)]
    assert page.texts("title")[0] == f"{visible(name)} · firstlight"


@pytest.mark.usefixtures("no_drawings")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.text())
def test_run_page_shows_any_sample_unchanged(tmp_path: Path, prompt: str, text: str) -> None:
    run = write_run(tmp_path / "run", [], samples=[(1, prompt, text)])
    # HTML would drop a line break right after `<pre>`; there is none.
    assert '<pre class="sample"><b>' in run_page(read_run(run))
    assert page_of(run).texts("pre")[0] == visible(prompt) + visible(text)


def test_visible_shows_control_characters_by_code_point() -> None:
    assert visible("a\u202eb\x00\r\n\tc\rd") == "a⟨U+202E⟩b⟨U+0000⟩\n\tc⟨U+000D⟩d"
    assert visible("\ud800\u2028\ufeff") == "⟨U+D800⟩⟨U+2028⟩⟨U+FEFF⟩"
    family = "👩\u200d👩\u200d👧 naïve עברית \u00a0"
    assert visible(family) == family


@pytest.mark.parametrize(
    "value",
    slow_but(
        (1e-320, 1e300),
        [0.0, -1.0, 1e-320, 1e300, 1e99, -1e99, math.nan, math.inf, 5],
    ),
)
def test_run_page_with_extreme_values_draws_finite_curves(tmp_path: Path, value: float) -> None:
    names = ("train/loss", "val/loss", "grad_norm", "learning_rate", "memory_bytes", "seconds")
    records = [
        {"step": step, **dict.fromkeys(names, number)}
        for step, number in enumerate((value, 1.0, value))
    ]
    path = write_run(tmp_path / "run", records)
    for tag, attributes in page_of(path).elements:
        drawn = " ".join(value for key, value in attributes.items() if key != "aria-label")
        if tag in ("path", "use", "text", "svg"):
            assert not re.search(r"\b(nan|inf)", drawn, re.IGNORECASE)
    draw_report(path)


def drawn_points(chart: Chart, *, log: bool) -> list[list[list[float]]]:
    axes = Figure().subplots()
    draw(axes, chart, log=log)
    return [np.asarray(line.get_xydata()).tolist() for line in axes.lines]


def test_chart_logarithmic_axis_omits_zero() -> None:
    curve = Series(np.arange(1.0, 4.0), np.array([2.0, 0.0, 3.0]))
    chart = Chart("Loss", "", [Line("loss", curve, 0)])
    assert drawn_points(chart, log=False) == [[[1, 2], [2, 0], [3, 3]]]
    assert drawn_points(chart, log=True) == [[[1, 2], [3, 3]]]


def test_chart_of_positive_values_with_zero_starts_at_zero() -> None:
    curve = Series(np.arange(3.0), np.array([5.0, 4.0, 6.0]))
    axes = Figure().subplots()
    draw(axes, Chart("Speed", "", [Line("speed", curve, 0)], zero=True))
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 6


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("metrics.jsonl", "broken\n{}\n", r"metrics\.jsonl:1 is damaged"),
        ("samples.jsonl", '{"step": 1}\n', r"samples\.jsonl is damaged: a line has no prompt"),
        ("events.jsonl", '{"step": 1}\n', r"events\.jsonl is damaged: a line has no event"),
        ("events.jsonl", '{"step": 1%s, "event": "x"}\n\n' % ("0" * 99), "step up to 9,007"),
        ("starts.jsonl", "1\n2\n", r"starts\.jsonl:1 is damaged"),
        ("recipe.yaml", "a: [\n", r"recipe\.yaml is damaged"),
        ("recipe.yaml", "text\n", r"recipe\.yaml is damaged: it has no sections"),
    ],
)
def test_run_page_damaged_file_is_named_and_old_report_kept(
    tmp_path: Path, drawn_run: Path, name: str, content: str, said: str
) -> None:
    run = shutil.copytree(drawn_run, tmp_path / "run")
    before = {n: (run / n).read_bytes() for n in (HTML_NAME, REPORT_NAME)}
    (run / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=said):
        draw_report(run)
    assert {n: (run / n).read_bytes() for n in before} == before


def without_each(line: dict[str, Any], *kept: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key of a record except those in `kept`, with two records: one without the key, and
    one with null.
    """
    for key in line.keys() - {"step", *kept}:
        yield key, {name: value for name, value in line.items() if name != key}
        yield key, {**line, key: None}


def test_run_page_incomplete_events_are_omitted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        {"step": 7, "event": "rollback", "to_step": 5, "reason": "no number"},
        {"step": 9, "event": "out of memory", "micro_batch_rows": 4, "before": 8},
        {"step": 20, "event": "diverged", "reason": "no number"},
        {"step": 3, "event": "length", "max_steps": 20, "max_minutes": 1.5},
        {"step": 4, "event": "correction", "max_steps": 20, "before": 30},
    ]
    damaged = [(event, *one) for event in events for one in without_each(event, "event")]
    lines = [*events, *(line for *_, line in damaged)]
    folder = write_run(tmp_path / "run", [record(20)], events=lines)
    run = read_run(folder)
    assert {event["event"] for event in run.what_happened} == {e["event"] for e in events}
    assert len(run.what_happened) == len(events)
    assert run.left_out == [
        f"{folder}: {event['event']!r} at step {event['step']} is left out: its record has no {key}"
        for event, key, _ in damaged
    ]
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().err
    assert all(f"note: {line}\n" in said for line in run.left_out)


@pytest.mark.usefixtures("no_drawings")
def test_run_page_supports_incomplete_starts(tmp_path: Path) -> None:
    branch = {**_START, "step": 15, "branched_from": "trunk", "warmup_steps": 2, "init_from": "a"}
    for key, line in without_each(branch):
        starts = [_START, line]
        run = read_run(write_run(tmp_path / "run", [record(20)], starts=starts))
        Page(run_page(run)).harmless()
        names = [event["event"] for event in run.what_happened]
        if key == "time" or line.get("branched_from", "") is None:
            assert (names, len(run.left_out)) == ([], 1)
        else:
            assert names == ["branched" if "branched_from" in line else "resumed"]
            assert run.left_out == []


def test_run_page_of_many_steps_stays_small(tmp_path: Path) -> None:
    """Tested with fifty thousand steps; more steps do not enlarge the page."""
    lines = [record(step, **{"train/loss": math.sin(step) + 3}) for step in range(1, 50_001)]
    lines[31_000]["train/loss"] = 99.0
    samples = [(step, "<" * 100, "&<>'\"" * 400) for step in range(1, 2000)]
    run = write_run(tmp_path / "run", lines, samples=samples)
    content = run_page(read_run(run))
    assert len(content.encode()) < 3_000_000
    page = Page(content).harmless()
    (raw,) = (c for chart in page.curves() for c in chart["curves"] if "each step" in c["name"])
    assert max(raw["y"]) == 99.0
    assert (raw["x"][0], raw["x"][-1]) == (1, 50_000)
    steps = page.texts("summary")
    assert steps[0] == "step 1,999"
    assert 100 < len(steps) < 1999
    assert "of 1999 evaluations" in " ".join(page.texts("small"))


def test_run_page_shows_all_samples_that_fit() -> None:
    few = [{"step": step, "prompt": "p", "text": "t"} for step in (1, 1, 2, 3)]
    shown, note = chosen_samples(few)
    assert shown == [
        ("3", [("p", "t")]),
        ("2", [("p", "t")]),
        ("1", [("p", "t"), ("p", "t")]),
    ]
    assert note == ""
    huge = [{"step": step, "prompt": "", "text": "<" * 10**6} for step in range(40)]
    shown, note = chosen_samples(huge)
    assert 1 <= len(shown) < 40
    assert shown[0][0] == "39"
    assert note == f"{len(shown)} of 40 evaluations"
    assert shown[0][1][0][1].endswith("[…]")


@pytest.mark.usefixtures("no_drawings")
def test_run_page_truncates_many_events_to_the_last(tmp_path: Path) -> None:
    events = [{"step": 1, "event": "rollback", "to_step": 0, "reason": str(n)} for n in range(900)]
    page = page_of(write_run(tmp_path / "run", [record(1), record(2)], events=events))
    assert "the last 500 of 900" in page.content
    assert "back to step 0: 899" in page.content


@pytest.mark.usefixtures("drawn_report")
def test_train_finished_run_leaves_both_reports_with_machine(recipe: dict[str, Any]) -> None:
    recipe["evaluation"]["sample_prompts"] = ["the <light>"]
    run = train(recipe).run_folder
    page = Page((run / HTML_NAME).read_text(encoding="utf-8")).harmless()
    (start,) = read_run(run).starts
    assert (start["step"], start["max_steps"]) == (0, 12)
    assert start["machine"]["name"] in " ".join(page.texts("table"))
    numbers = final_numbers(read_run(run))
    assert f"gzip -9: {numbers['gzip_bits_per_byte']:.3f}" in page.content
    assert 0 < numbers["gzip_bits_per_byte"] < 8
    assert numbers["parameters"] == start["parameters"] > 10_000
    assert page.texts("pre")[0].startswith("the <light>")
    draw_report(run)
    assert "complete: 12 steps" in page.content


def test_run_page_restart_from_beginning_forgets_earlier_starts(recipe: dict[str, Any]) -> None:
    class StoppedError(Exception):
        pass

    def stop(metrics: Any) -> None:
        if metrics["step"] == 9:
            raise StoppedError

    run = Path(recipe["run"]["dir"])
    run.mkdir()
    write_lines(run / "starts.jsonl", [{"step": 0}, {"step": 3}])
    with pytest.raises(StoppedError):
        train(recipe, on_step=stop)
    assert [start["step"] for start in read_run(run).starts] == [0]
    train(recipe, resume=True)
    assert [start["step"] for start in read_run(run).starts] == [0, 8]
    train(recipe, resume=True)  # nothing is left to do
    assert [start["step"] for start in read_run(run).starts] == [0, 8]
    assert [event["event"] for event in read_run(run).what_happened] == ["resumed"]


def test_chart_secondary_axis_has_round_numbers_at_matching_steps() -> None:
    """The batch grows from 100 to 200 tokens at step 50."""
    steps = np.arange(101.0)
    tokens = Series(steps, np.where(steps < 50, 100 * steps, 200 * steps - 5000))
    losses = Line("loss", Series(steps, np.exp(-steps)), 0)
    axes = Figure().subplots()
    falling = Series(np.arange(3.0), np.array([0.0, 2.0, 1.0]))
    draw(axes, Chart("Loss", "", [losses], below=("tokens seen", tokens), above=("no", falling)))
    (below,) = axes.child_axes
    assert below.get_xlabel() == "tokens seen"
    assert below.get_xlim() == axes.get_xlim()
    labels = [label.get_text() for label in below.get_xticklabels()]
    places = dict(zip(labels, below.get_xticks(), strict=True))
    assert {key: places[key] for key in ("0", "5k", "10k")} == {
        "0": 0,
        "5k": pytest.approx(50),
        "10k": pytest.approx(75),
    }


def test_run_page_shows_losses_by_steps_tokens_and_epochs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(step) for step in range(1, 21)])
    page = run_page(read_run(folder))
    chart = page[page.index("<svg") : page.index("</svg>")]
    names = re.findall(r"<text[^>]*>([^<]*)<", chart)
    assert {"step", "tokens seen", "epochs", "2k"} <= set(names)


# Two models


def compared_value(name: str, unit: str, size: int | None = None) -> ComparedValue:
    before, after = Metric(1.5, 0.01), Metric(1.25, 0.02)
    return ComparedValue(name, before, after, Metric(-0.25, 0.005), unit, 40, size)


def models_page(comparison: ModelComparison, folder: Path) -> Page:
    write_model_comparison(comparison, folder / "page.html")
    return Page((folder / "page.html").read_text(encoding="utf-8")).harmless()


def test_model_page_shows_values_marks_and_answers(tmp_path: Path) -> None:
    segments = (
        Segment("the ", 1.0, 1.0, marked=False),
        Segment("king", 1.0, 7.25, marked=True),
        Segment("\n", 2.0, 1.0, marked=False),
    )
    texts = [compared_value("a.txt", "document", 1000), compared_value("b.txt", "row", 500)]
    page = models_page(
        ModelComparison(
            "base",
            "tuned",
            same_tokenizer=False,
            texts=texts,
            worse=[Passage("a.txt", 3, 5.25, segments)],
            better=[],
            tasks=[compared_value("hellaswag acc", "item")],
            answers=[ComparedAnswer("Who?", "I", "you")],
        ),
        tmp_path,
    )
    assert page.texts("h1") == ["base → tuned"]
    row = ["1.500 ± 0.010", "1.250 ± 0.020", "-0.2500 ± 0.0050"]
    assert page.texts("td") == [
        *(*row, "40 documents"),
        *(*row, "40 rows"),
        *(*row, "40 items"),
    ]
    assert page.texts("h2") == [
        "Bits per byte lower is better",
        "Tasks",
        "Passages that got worse",
        "Answers",
    ]
    assert "a.txt, document 3 +5.2 bits" in page.texts("h3")
    spans = [a for tag, a in page.elements if tag == "span" and "title" in a]
    assert [one["class"] for one in spans] == ["rise s4 carries", "fall s1"]
    assert spans[0]["title"] == "1.00 → 7.25 bits"
    assert page.texts("pre") == ["the king\n", "I", "you"]
    assert "Different tokenizers" in " ".join(page.texts("p"))


def test_model_page_escapes_hostile_texts(tmp_path: Path) -> None:
    text = "".join(HOSTILE)
    segments = (Segment(text, 1.0, 2.0, marked=True), Segment(text, 1.0, 1.0, marked=False))
    passage = Passage(text, 1, 1.0, segments)
    models_page(
        ModelComparison(
            text,
            text,
            same_tokenizer=True,
            texts=[compared_value(text, "row", 1)],
            worse=[passage],
            better=[passage],
            tasks=[compared_value(text, "item")],
            answers=[ComparedAnswer(text, text, text)],
        ),
        tmp_path,
    )
