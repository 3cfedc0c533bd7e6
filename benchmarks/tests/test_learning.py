"""`python -m benchmarks learning`, with a model of a few thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.__main__ import main
from benchmarks.learning import (
    BEFORE,
    NEW,
    ROWS,
    SIZES,
    RowFigures,
    bench_learning,
    choose_rows,
    find_row,
    learning_cases,
    learning_groups,
    page,
    recipe_values,
    verdicts,
)
from benchmarks.options import LearningBench
from firstlight.bench.rows import Found
from firstlight.errors import ConfigError
from firstlight.hardware.fresh_process import error_of
from firstlight.recipe import parse_recipe
from firstlight.recipe.resolve import for_new_model

pytestmark = pytest.mark.usefixtures("forked_processes")

_TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(str(number) for number in range(8000)))
    return path


@pytest.fixture
def bench(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> LearningBench:
    """Return two rows with two seeds of three steps each."""
    monkeypatch.setitem(SIZES, "tiny", _TINY)
    return LearningBench(
        tmp_path / "out",
        corpora=(f"bytes:{text}",),
        sizes=("tiny",),
        rows=("nanogpt", BEFORE),
        seeds=2,
        tokens=3 * 2048,
    )


class FakeRun:
    """Replaces the process of a run, and records its requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def __call__(self, module: str, request: dict[str, Any], environment: object) -> Found:
        self.requests.append(request)
        recipe = parse_recipe(request["recipe"])
        if request["pace"]:
            return {"step_seconds": 0.5}
        seed, steps = recipe.run.seed, recipe.schedule.max_steps
        assert recipe.data.seq_len is not None
        assert steps is not None
        tokens = steps * recipe.batch.rows * recipe.data.seq_len
        bits = (2.0 if recipe.optimizer.name == "adamw" else 1.5) + 0.01 * (seed % 10)
        ends = {"tokens": tokens, "seconds": 2.0 * steps, "bits_per_byte": bits}
        curve = [[tokens / 2, steps, bits + 1], [tokens, 2.0 * steps, bits]]
        return {**ends, "parameters": 1, "gzip_bits_per_byte": 1.0, "curve": curve}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setattr(learning, "ask", run)
    return run


# The rows.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_learning_bench_rows_are_recipes_that_training_accepts(name: str, size: str) -> None:
    values = recipe_values(ROWS[name], size)
    values["data"]["dir"] = "x"
    recipe = parse_recipe(values)
    assert recipe.model is not None
    assert recipe.model.hidden_size == SIZES[size]["hidden_size"]
    assert recipe.model.max_position_embeddings == recipe.data.seq_len


def test_learning_bench_new_model_row_equals_recipe_without_settings() -> None:
    values = recipe_values(ROWS["new"], "2.6m") | {"data": {"dir": "data"}}
    given = {"init", "optimizer", "schedule"}
    row = parse_recipe({**values, "schedule": {**values["schedule"], "max_steps": 50}})
    bare = parse_recipe(
        {key: value for key, value in values.items() if key not in given}
        | {"schedule": {"max_steps": 50}}
    )
    taken = for_new_model(bare, {})
    assert bare.model_dump(include=given) != row.model_dump(include=given)
    assert taken.model_dump(include=given) == row.model_dump(include=given)


def test_learning_bench_variant_changes_the_row_it_names() -> None:
    row = find_row(f"{BEFORE}:optimizer.betas=[0.9, 0.95],optimizer.learning_rate=1e-2")
    values, before = recipe_values(row, "2.6m"), recipe_values(ROWS[BEFORE], "2.6m")
    changed = {"betas": [0.9, 0.95], "learning_rate": 0.01}
    assert row.of == BEFORE
    assert values == {**before, "optimizer": {**before["optimizer"], **changed}}


def test_learning_bench_rows_are_own_recipes_unless_changes_are_requested() -> None:
    assert not any(row.of for row in choose_rows([], []).values())
    assert len(choose_rows([], [])) > 3
    baseline, *changes = choose_rows(["changes"], []).items()
    assert baseline[0] == BEFORE
    assert len(changes) > 5
    assert all(row.of == BEFORE for _, row in changes)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("befor:optimizer.eps=1", "row 'befor' is unknown"),
        ("before:eps=1", "'eps=1' is not section.key=value"),
        ("before:run.seed=1", "of one of the sections data, model, init"),
        ("before:optimizer.eps={", "--set"),
    ],
)
def test_learning_bench_variant_of_unknown_row_or_key_raises_config_error(
    variant: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_rows([], [variant])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 1, "minutes": 1.0}, "--tokens and --minutes"),
        ({"minutes": 0.0}, "must be greater than 0"),
        ({"held_out_tokens": 100}, "--held-out-tokens is 100: it must be at least 8192"),
        ({"sizes": ("3m",)}, "size '3m' is unknown"),
        ({"seeds": 0}, "at least 1"),
        ({"variants": ("before:optimizer.eps=none",)}, "row before:optimizer.eps=none"),
    ],
)
def test_learning_bench_invalid_options_raise_config_error(
    tmp_path: Path, text: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        learning_cases(LearningBench(tmp_path / "out", corpora=(str(text),), **options))


# Runs.


def test_learning_bench_alternates_rows_over_seeds_within_budget(
    bench: LearningBench, fake: FakeRun
) -> None:
    result = bench_learning(bench, lambda _: None)
    recipes = [parse_recipe(request["recipe"]) for request in fake.requests]
    assert [(one.optimizer.name, one.run.seed) for one in recipes] == [
        ("adamw", 1337),
        ("muon", 1337),
        ("adamw", 1338),
        ("muon", 1338),
    ]
    assert [one.schedule.max_steps for one in recipes] == 4 * [3]
    assert [(run["row"], run["seed"]) for run in result["runs"]] == [
        ("nanogpt", 1337),
        ("nanogpt", 1338),
        (BEFORE, 1337),
        (BEFORE, 1338),
    ]
    assert result["complete"]


def test_learning_bench_time_budget_is_paced_once_per_row(
    bench: LearningBench, fake: FakeRun
) -> None:
    timed = LearningBench(**{**vars(bench), "tokens": None, "minutes": 0.1})
    bench_learning(timed, lambda _: None)
    assert [request["pace"] for request in fake.requests] == [True, False] * 2 + [False] * 2
    runs = [parse_recipe(one["recipe"]) for one in fake.requests if not one["pace"]]
    # A tenth of a minute at half a second per step.
    assert [one.schedule.max_steps for one in runs] == 4 * [12]


def test_learning_bench_held_out_sample_is_separate_result(
    bench: LearningBench, fake: FakeRun
) -> None:
    bench_learning(bench, lambda _: None)
    assert {request["held_out_tokens"] for request in fake.requests} == {None}
    fake.requests.clear()
    sampled = LearningBench(**{**vars(bench), "held_out_tokens": 16384})
    result = bench_learning(sampled, lambda _: None)
    assert [request["held_out_tokens"] for request in fake.requests] == 4 * [16384]
    # An eighth of the tokens, in rows of 256.
    assert {request["recipe"]["evaluation"]["max_rows"] for request in fake.requests} == {8}
    titles = [group.title for group in learning_groups(result["runs"])]
    assert titles == [
        "numbers bytes, tiny, 6,144 tokens, 16,384 held-out tokens",
        "numbers bytes, tiny, 6,144 tokens",
    ]


def test_learning_bench_second_call_measures_missing_or_changed_runs(
    bench: LearningBench, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_learning(LearningBench(**{**vars(bench), "seeds": 1}), lambda _: None)
    # The incomplete line that a kill leaves behind.
    with open(bench.folder / "results.jsonl", "a") as file:
        file.write('{"digest": "')
    fake.requests.clear()
    bench_learning(bench, lambda _: None)
    assert [request["recipe"]["run"]["seed"] for request in fake.requests] == [1338, 1338]

    fake.requests.clear()
    changes = {**ROWS["nanogpt"].changes, "optimizer.learning_rate": 1e-3}
    monkeypatch.setitem(ROWS, "nanogpt", type(ROWS["nanogpt"])(changes))
    result = bench_learning(bench, lambda _: None)
    assert [request["recipe"]["optimizer"]["learning_rate"] for request in fake.requests] == [
        1e-3,
        1e-3,
    ]
    lines = (bench.folder / "results.jsonl").read_text().splitlines()
    assert len(lines) == len(result["runs"]) == 4


def test_learning_bench_failed_run_ends_no_other(
    bench: LearningBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun()

    def ask(module: str, request: dict[str, Any], environment: object) -> Found:
        if request["recipe"]["optimizer"]["name"] == "adamw":
            return error_of("DivergedError", "the loss is not finite")
        return fake(module, request, environment)

    monkeypatch.setattr(learning, "ask", ask)
    result = bench_learning(bench, lambda _: None)
    assert list(result["problems"].values()) == ["the loss is not finite"]
    assert [run["row"] for run in result["runs"]] == [BEFORE, BEFORE]


def test_learning_bench_command_trains_and_writes_page(
    bench: LearningBench, capsys: pytest.CaptureFixture[str]
) -> None:
    # One real run, whose results are compared with the run's own figures.
    place = bench.folder / "docs" / "benchmarks" / "learning.md"
    command = (
        f"learning --out {bench.folder} --sizes tiny --corpus {bench.corpora[0]} --rows {BEFORE} "
        f"--seeds 1 --tokens {3 * 2048} --page {place} --json"
    )
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    (run,) = json.loads(out)["runs"]
    assert run["tokens"] == 3 * 2048
    assert [point[0] for point in run["curve"]] == [2048, 4096, 6144]
    assert run["curve"][-1][1] == pytest.approx(run["seconds"])
    # The curve's points are measured on a sample in bf16, the final figure on all of the text.
    assert run["curve"][-1][2] == pytest.approx(run["bits_per_byte"], rel=0.02)
    assert 1 < run["bits_per_byte"] < 8.1
    assert f"{run['bits_per_byte']:.4f}" in place.read_text()
    assert (bench.folder / "docs" / "images" / "learning.png").read_bytes()[1:4] == b"PNG"
    assert not list(bench.folder.glob(".run-*"))


# Figures.


def line(row: str, seed: int, bits: float, corpus: str = "a", size: str = "2.6m") -> dict[str, Any]:
    curve = [[100, 10.0, bits + 2], [200, 30.0, bits]]
    where = {"corpus": corpus, "size": size, "budget": "200 tokens", "row": row, "seed": seed}
    return {**where, "bits_per_byte": bits, "seconds": 30.0, "curve": curve}


def figures(runs: list[dict[str, Any]]) -> dict[str, RowFigures]:
    (group,) = learning_groups(runs)
    return {row.name: row for row in group.rows}


_CHANGE = f"{BEFORE}:schedule.min_lr_ratio=0.0"


def test_learning_bench_figures_are_means_over_seeds_with_paired_gains() -> None:
    runs = [line("nanogpt", seed, 2.0) for seed in range(3)]
    runs += [line(BEFORE, seed, 1.5 + 0.1 * seed) for seed in range(3)]
    runs += [line(_CHANGE, seed, 1.2 + 0.05 * seed) for seed in range(3)]
    found = figures(runs)
    assert found[BEFORE].bits_per_byte == pytest.approx(1.6)
    assert found[BEFORE].gains == pytest.approx([0.5, 0.4, 0.3])
    # Compared seed by seed with the row that it changes, not with the baseline.
    assert found[_CHANGE].gains == pytest.approx([0.3, 0.35, 0.4])
    assert found[_CHANGE].gain_in_spreads == pytest.approx(0.35 / 0.05)
    assert found["nanogpt"].gains == []


def test_learning_bench_baseline_loss_is_interpolated_between_points() -> None:
    found = figures([line("nanogpt", 0, 2.0), line(BEFORE, 0, 1.0)])
    # From 3.0 at 100 tokens to 1.0 at 200: 2.0 is halfway.
    assert found[BEFORE].to_goal() == (150, 20)
    assert found["nanogpt"].to_goal() == (200, 30)
    assert figures([line("nanogpt", 0, 1.0), line(BEFORE, 0, 2.0)])[BEFORE].to_goal() is None


@pytest.mark.parametrize("row", [_CHANGE, NEW])
@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({("a", "2.6m"): 0.1, ("b", "30m"): 0.1}, "kept: gains on a, b, at 2.6m, 30m"),
        ({("a", "2.6m"): 0.1, ("b", "2.6m"): 0.1}, "open: gains on a, b, at 2.6m"),
        ({("a", "2.6m"): 0.1, ("b", "30m"): 0.1, ("c", "30m"): -0.1}, "not kept: worse on c 30m"),
        ({("a", "2.6m"): 0.01, ("b", "30m"): 0.0}, "not kept: no gain above twice its spread"),
    ],
)
def test_learning_bench_change_is_kept_for_gains_on_two_corpora_and_sizes(
    gains: dict[tuple[str, str], float], verdict: str, row: str
) -> None:
    runs = []
    for (corpus, size), gain in gains.items():
        # The seeds differ much, but the gain varies little between seeds.
        for seed, noise in enumerate((-0.01, 0.0, 0.01)):
            runs.append(line("nanogpt", seed, 9.0 + seed, corpus, size))
            runs.append(line(BEFORE, seed, 2.0 + seed, corpus, size))
            runs.append(line(row, seed, 2.0 + seed - gain + noise, corpus, size))
    assert verdicts(learning_groups(runs)) == {row: verdict}
    two_seeds = [run for run in runs if run["seed"] < 2]
    assert verdicts(learning_groups(two_seeds)) == {}


def test_learning_bench_new_settings_are_compared_with_previous_or_baseline() -> None:
    runs = [
        line(name, seed, bits)
        for name, bits in (("nanogpt", 3.0), (NEW, 1.0))
        for seed in (0, 1, 2)
    ]
    assert (figures(runs)[NEW].over, figures(runs)[NEW].gains) == ("nanogpt", [2.0, 2.0, 2.0])
    assert verdicts(learning_groups(runs)) == {}
    runs += [line(BEFORE, seed, 1.5) for seed in (0, 1, 2)]
    assert (figures(runs)[NEW].over, figures(runs)[NEW].gains) == (BEFORE, [0.5, 0.5, 0.5])
    assert figures(runs)[BEFORE].over == "nanogpt"


def test_learning_bench_page_lists_recipes_and_verdicts() -> None:
    runs = [line(name, seed, 2.0) for name in (BEFORE, _CHANGE) for seed in range(3)]
    machine = {"name": "a CPU", "threads": 2, "torch": "2"}
    problems = {"a, 2.6m, new": "too few steps"}
    text = page({"runs": runs, "machine": machine, "problems": problems}, "x.png")
    assert "## Runs that failed\n\n- a, 2.6m, new: too few steps\n\n" in text
    assert "## a, 2.6m, 200 tokens" in text
    assert f"- `{_CHANGE}`: not kept: no gain above twice its spread" in text
    assert "![" in text
