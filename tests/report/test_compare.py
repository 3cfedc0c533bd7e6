"""Comparing several runs, and `firstlight report`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import slow_but
from firstlight.cli.info import report_command
from firstlight.console import visible
from firstlight.errors import CheckpointError, ConfigError, FirstlightError, InputError
from firstlight.report.compare import (
    compare,
    distinct_labels,
    number_table,
    recipe_differences,
)
from firstlight.report.report import comparison_page, write_report
from firstlight.run_log.reader import read_run
from report_runs import HOSTILE, MOST_HOSTILE, Page, record, validation, write_run


def run(folder: Path, loss: float = 4.0, steps: int = 10, **more: Any) -> Path:
    """Write a run whose losses fall towards `loss`."""
    records = [
        record(
            step,
            **{"train/loss": loss + 1 / step},
            **(validation(loss + 2 / step) if step % 5 == 0 else {}),
        )
        for step in range(1, steps + 1)
    ]
    return write_run(folder, records, samples=[(steps, "p", f"of {loss}")], **more)


def report(*arguments: object) -> None:
    report_command.main([str(a) for a in arguments], prog_name="report", standalone_mode=False)


def compared(*folders: Path) -> Page:
    return Page(comparison_page(compare([read_run(folder) for folder in folders]))).harmless()


# --- labels ----------------------------------------------------------------------------------


def test_distinct_labels_are_as_short_as_possible(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("x/a/run", "x/b/run", "y/a/run", "x/other")]
    assert distinct_labels(folders) == ["x/a/run", "b/run", "y/a/run", "other"]
    assert distinct_labels([Path("/run"), Path("/a/run")])[1] == "a/run"


@given(st.sets(st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(tuple), min_size=1))
def test_distinct_labels_are_unique(parts: set[tuple[str, ...]]) -> None:
    folders = [Path("/", *names) for names in sorted(parts)]
    labels = distinct_labels(folders)
    assert len(set(labels)) == len(labels) == len(folders)
    for folder, label in zip(folders, labels, strict=True):
        assert str(folder).endswith(label)


def test_compare_folder_named_twice_raises_config_error(tmp_path: Path) -> None:
    run(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"link is listed twice"):
        write_report([tmp_path / "a", tmp_path / "link"], tmp_path / "c.html")


# --- compared values -------------------------------------------------------------------------


def test_recipe_differences_lists_only_differing_keys() -> None:
    found = recipe_differences(
        [
            {"run": {"dir": "a", "seed": 1}, "optimizer": {"betas": [0.9, 0.95], "name": "adamw"}},
            {"run": {"dir": "b", "seed": 1}, "optimizer": {"betas": [0.9, 0.99]}, "lora": None},
            {"run": {"dir": "c", "seed": True}, "optimizer": {"betas": [0.9, 0.95]}},
        ]
    )
    assert {key: [str(v) for v in values] for key, values in found.items()} == {
        "run.seed": ["1", "1", "True"],
        "optimizer.betas": ["[0.9, 0.95]", "[0.9, 0.99]", "[0.9, 0.95]"],
        "optimizer.name": ["adamw", "—", "—"],
        "lora": ["—", "None", "—"],
    }
    assert recipe_differences([{"a": {"b": 1}}, {"a": {"b": 1}}]) == {}


@pytest.mark.usefixtures("no_drawings")
def test_comparison_page_highlights_best_value(tmp_path: Path) -> None:
    starts = [{"step": 0, "tokenizer_sha256": "one"}]
    folders = [
        run(tmp_path / "a", 4.0, starts=starts),
        run(tmp_path / "b", 3.0, starts=starts),
        run(tmp_path / "c", 3.0, steps=4),
    ]
    rows = {name: (t, b) for name, t, b in number_table(compare([read_run(f) for f in folders]))}
    assert rows["validation loss"] == (["4.2000", "3.2000", "—"], {1})
    assert rows["tokens/s, median"] == (["1,006", "1,006", "1,002"], {0, 1})
    assert rows["steps"] == (["10", "10", "4"], set())
    assert rows["training time"][0] == ["6 min", "6 min", "2.4 min"]
    assert "rollbacks" not in rows
    # Losses with different tokenizers are not comparable.
    run(tmp_path / "b", 3.0, starts=[{"step": 0, "tokenizer_sha256": "two"}])
    found = compare([read_run(f) for f in folders])
    assert {name: b for name, _, b in number_table(found)}["validation loss"] == set()
    assert {name: b for name, _, b in number_table(found)}["bits per byte"] == {1}
    assert "have different tokenizers" in comparison_page(found)


def test_compare_accuracies_are_shown_with_errors(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(1, **{"arc/acc": 0.5, "arc/acc_stderr": 0.02})])
    write_run(tmp_path / "b", [record(1, **{"arc/acc": 0.25})])
    found = compare([read_run(tmp_path / name) for name in "ab"])
    assert number_table(found)[-1] == ("arc/acc", ["0.5000 ± 0.0200", "0.2500"], {0})


@pytest.mark.usefixtures("no_drawings")
def test_comparison_page_plots_all_runs_over_steps_tokens_and_hours(tmp_path: Path) -> None:
    recipes = [{"optimizer": {"learning_rate": rate}, "run": {"seed": 1}} for rate in (0.1, 0.2)]
    page = compared(
        run(tmp_path / "a", 4.0, recipe=recipes[0]),
        run(tmp_path / "b", 3.0, steps=5, recipe=recipes[1]),
    )
    charts = page.curves()
    assert [chart["x"] for chart in charts] == ["step", "tokens seen", "hours"] * 3
    train = charts[0]["curves"]
    assert [(c["name"], c["x"]) for c in train] == [
        ("a", list(range(1, 11))),
        ("b", list(range(1, 6))),
    ]
    assert charts[1]["curves"][1]["x"] == [128 * step for step in range(1, 6)]
    assert charts[2]["curves"][1]["x"] == pytest.approx([step / 100 for step in range(1, 6)])
    assert all(chart["curves"][0]["y"] == train[0]["y"] for chart in charts[:3])
    assert [c["y"] for c in charts[3]["curves"]] == [[4.4, 4.2], [3.4]]
    rows = [row.split() for row in page.texts("tr")]
    assert ["optimizer.learning_rate0.10.2"] in rows
    assert not any("seed" in row for line in rows for row in line)
    assert page.texts("pre") == ["pof 4.0", "pof 3.0"]


def test_comparison_page_accepts_empty_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.yaml").write_text("run: {seed: 1}\n", encoding="utf-8")
    page = compared(tmp_path / "a", tmp_path / "b")
    assert "nothing yet" in page.content
    assert page.content.count("none yet") == 2
    assert "1 of the runs have no recipe.yaml" not in page.content


@pytest.mark.parametrize(
    "text", slow_but(MOST_HOSTILE, [text for text in HOSTILE if "\ud800" not in text])
)
def test_comparison_page_escapes_content_of_runs(tmp_path: Path, text: str) -> None:
    name = text.replace("/", "").replace("\x00", "")
    listed = "".join(c for c in text if c.isprintable())
    folders = [
        write_run(
            tmp_path / parent / name,
            [record(1, **{f"{text}/acc": 0.5})],
            samples=[(1, text, text)],
            recipe={listed: f"{listed}{parent}"},
        )
        for parent in "ab"
    ]
    page = compared(*folders)
    assert page.texts("pre") == [visible(text) * 2] * 2
    assert page.texts("h3")[0].startswith(visible(f"a/{name}"))
    assert f"{listed}a" in page.texts("td")[-2]


@pytest.mark.usefixtures("no_drawings")
def test_comparison_page_many_runs_have_distinct_curves(tmp_path: Path) -> None:
    page = compared(*(run(tmp_path / f"run{n}", 3 + n / 10) for n in range(18)))
    styles = [curve["style"] for curve in page.curves()[0]["curves"]]
    assert len(set(styles)) == 16
    assert styles[8] == "c0 dashed"


# --- the command -----------------------------------------------------------------------------


def test_compare_single_run_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 11, "train/lo')
    report(folder, "--json")
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert found["report"] == str(folder / "report.html")
    assert found["picture"] == str(folder / "report.png")
    (numbers,) = found["runs"]
    assert (numbers["label"], numbers["step"], numbers["val/loss"]) == ("run", 10, 4.2)
    assert found["differences"] == {}
    assert "validation loss" in said
    assert str(folder / "report.html") in said
    Page((folder / "report.html").read_text(encoding="utf-8")).harmless()
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "comparison.html").exists()


@pytest.mark.slow
def test_compare_several_runs_writes_chosen_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [
        run(tmp_path / name / "run", loss, recipe={"run": {"seed": seed}, "lora": lora})
        for name, loss, seed, lora in (("a", 4.0, 1, {"rank": 8}), ("b", 3.0, 2, None))
    ]
    report(*folders, "--json", "--out", "both.html")
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert (found["report"], found["picture"]) == ("both.html", "both.png")
    assert [numbers["label"] for numbers in found["runs"]] == ["a/run", "b/run"]
    assert found["differences"] == {
        "run.seed": [1, 2],
        "lora.rank": [8, None],
        "lora": [None, None],
    }
    assert "a/run" in said
    picture = (tmp_path / "both.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 500
    assert not any((folder / "report.html").exists() for folder in folders)
    report(*folders)
    assert (tmp_path / "comparison.html").is_file()
    assert (tmp_path / "comparison.png").is_file()


@pytest.mark.usefixtures("no_drawings")
def test_compare_output_replaces_only_a_report(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [{"step": 1, "train/loss": 3.0}]) for name in "ab"]
    out = tmp_path / "both.html"
    write_report(folders, out)
    write_report(folders[:1], out)
    write_report(folders, out)
    picture = out.with_suffix(".png").read_bytes()
    for path in (out, out.with_suffix(".png")):
        before = path.read_bytes()
        path.write_bytes(
            b"mine" if path == out else picture.replace(b"firstlight report", b"x" * 17)
        )
        mine = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
        with pytest.raises(InputError, match=rf"{path.name} already exists and is not a report"):
            write_report(folders, out)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == mine
        path.write_bytes(before)
    out.unlink()
    out.mkdir()
    with pytest.raises(InputError, match=r"both\.html already exists"):
        write_report(folders, out)


def test_compare_output_must_end_in_html(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    for name in ("report.png", "report", "report.html.txt"):
        with pytest.raises(ConfigError, match=r"must end in \.html"):
            write_report([folder], tmp_path / name)


def test_compare_folder_without_run_is_named(tmp_path: Path) -> None:
    good = run(tmp_path / "run-1")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    checkpoint = good / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    cases: list[tuple[Path, type[FirstlightError], str]] = [
        (tmp_path / "run-2", InputError, r"run-2 does not exist \(did you mean 'run-1'\?\)"),
        (tmp_path / "no" / "where", InputError, r"no/where does not exist"),
        (tmp_path / "file", InputError, r"file is a file"),
        (
            tmp_path / "empty",
            InputError,
            r"empty is not a run folder, because it does not contain metrics\.jsonl",
        ),
        (checkpoint, InputError, r"step-00000004 is a checkpoint: use its run folder, .*run-1$"),
    ]
    for folder, kind, said in cases:
        for named in ([folder], [good, folder]):
            with pytest.raises(kind, match=said):
                write_report(named, tmp_path / "out.html")
    damaged = run(tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_text("{}\n{}\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"damaged/metrics\.jsonl:1 is damaged"):
        write_report([good, damaged], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
    with pytest.raises(click.UsageError, match="Missing"):
        report()
