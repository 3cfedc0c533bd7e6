"""`firstlight tune`: the search space, short trials, resumed studies, and results.

Trials run in this process: `ask` and `ForkServer` have tests of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cli.main import main
from firstlight.errors import CheckpointError, ConfigError, FirstlightError, TrainingError
from firstlight.hardware.fresh_process import error_of
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.tuning.search import TuneResult, trial_processes, tune
from firstlight.tuning.search import measure as tuning_once
from firstlight.tuning.space import (
    POINTS,
    SearchKey,
    default_search,
    own_values,
    parse_search,
    trial_recipe,
    with_values,
)
from firstlight.tuning.study import in_order, pruning_trial, table

optuna = pytest.importorskip("optuna", reason="optuna is not installed")

_RATE = "optimizer.learning_rate"

_RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


def small(**sections: Any) -> Recipe:
    """Return a recipe with 1,000 steps of 8 x 32 tokens."""
    values = {"data": {"dir": "x", "seq_len": 32}, "schedule": {"max_steps": 1000}}
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return parse_recipe({**values, "model": model, **sections})


# Search space.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{_RATE}=1e-4..1e-2:log", SearchKey(_RATE, (), 1e-4, 1e-2, log=True)),
        (f"{_RATE}=0.5..2", SearchKey(_RATE, (), 0.5, 2.0)),
        ("lora.rank=4..16", SearchKey("lora.rank", (), 4, 16, whole=True)),
        (
            "optimizer.betas=[0.9,0.95],[0.8, 0.9]",
            SearchKey("optimizer.betas", ("[0.9,0.95]", "[0.8, 0.9]")),
        ),
        ("schedule.kind=linear, wsd", SearchKey("schedule.kind", ("linear", "wsd"))),
    ],
)
def test_parse_search_accepts_range_or_values(text: str, expected: SearchKey) -> None:
    assert parse_search(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.learnin_rate=1..2", "did you mean 'optimizer.learning_rate'"),
        (_RATE, "is not KEY=LOW..HIGH"),
        (f"{_RATE}=2..1", "the smaller one first"),
        (f"{_RATE}=a..b", "a range must be two numbers"),
        (f"{_RATE}=1..nan", "a range must be two numbers"),
        (f"{_RATE}=0..1:log", "must begin above 0"),
        (f"{_RATE}=3", "two different values"),
        (f"{_RATE}=3,3", "two different values"),
        (f"{_RATE}={{,[", "--search"),
        ("batch.micro_batch_size=1.5..4", "is an integer"),
        ("optimizer.name=1..2", "is not a number"),
        ("run.seed=1,2", "section run can't be searched"),
        ("schedule.max_steps=1,2", "see the same number of tokens"),
    ],
)
def test_parse_search_invalid_text_raises_config_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_search(text)


def test_default_search_spans_rates_decay_and_warmup_around_recipe() -> None:
    recipe = small(optimizer={"name": "muon", "learning_rate": 0.01, "weight_decay": 0.0})
    found = {one.key: (one.low, one.high) for one in default_search(recipe)}
    assert found == {
        _RATE: (pytest.approx(0.002), pytest.approx(0.05)),
        "optimizer.muon_learning_rate": (pytest.approx(0.002), pytest.approx(0.05)),
        "schedule.warmup_ratio": (0.005, 0.2),
    }
    assert "optimizer.weight_decay" in {one.key for one in default_search(small())}
    keys = default_search(recipe)
    own = {**dict.fromkeys(found, 0.01), "schedule.warmup_ratio": 0.05}
    assert own_values(keys, recipe, 0.05) == own
    assert "schedule.warmup_ratio" not in own_values(keys, recipe, 0.5)


@given(st.floats(1e-5, 1e-1))
def test_search_value_is_rounded_to_three_digits_within_range(value: float) -> None:
    found = SearchKey(_RATE, (), 1.2345e-5, 0.098765, log=True).rounded(value)
    assert isinstance(found, float)
    assert 1.2345e-5 <= found <= 0.098765
    inside = min(max(value, 1.2345e-5), 0.098765)
    assert math.isclose(found, inside, rel_tol=0.0051)


# A trial's recipe.


def test_trial_recipe_compresses_whole_schedule() -> None:
    schedule = {"kind": "wsd", "max_steps": 1000, "warmup_steps": 100, "cooldown_steps": 400}
    recipe = small(
        schedule=schedule,
        optimizer={"name": "muon", "muon_momentum_warmup_steps": 300},
        evaluation={"max_rows": 7, "sample_prompts": ["x"], "tasks": ["lm-eval:x"]},
        checkpoint={"every_steps": 10, "keep_last": 3, "average_last": 3},
        run={"max_minutes": 3, "seed": 5},
    )
    values, steps = trial_recipe(recipe, {_RATE: 0.5}, 100, 1000, 32)
    found = parse_recipe(values)
    assert steps == found.schedule.max_steps == 100
    assert (found.schedule.warmup_steps, found.schedule.cooldown_steps) == (10, 40)
    assert found.optimizer.muon_momentum_warmup_steps == 30
    assert (found.optimizer.learning_rate, found.run.seed, found.run.max_minutes) == (0.5, 5, None)
    assert (found.evaluation.every_steps, found.evaluation.max_rows) == (-(-100 // POINTS), 7)
    assert not found.evaluation.sample_prompts
    assert not found.evaluation.tasks
    assert (found.checkpoint.every_steps, found.checkpoint.average_last) == (0, 0)


def test_trials_with_other_batch_sizes_see_same_number_of_tokens() -> None:
    recipe = small(batch={"micro_batch_size": 8})
    values, steps = trial_recipe(recipe, {"batch.micro_batch_size": "2"}, 100, 1000, 32)
    assert steps == parse_recipe(values).schedule.max_steps == 400
    assert with_values(recipe, {"batch.micro_batch_size": "2"}, 32).schedule.max_steps == 4000
    # Epochs have already been converted to tokens.
    epochs = small(batch={"micro_batch_size": 8}, schedule={"epochs": 3})
    assert with_values(epochs, {"batch.micro_batch_size": "2"}, 32).schedule.epochs == 3


def test_trial_value_replaces_equivalent_key() -> None:
    recipe = small(schedule={"max_steps": 1000, "warmup_steps": 100})
    found = with_values(recipe, {"schedule.warmup_ratio": 0.02}, 32).schedule
    assert (found.warmup_steps, found.warmup_ratio) == (None, 0.02)


@pytest.mark.parametrize("path", _RECIPES, ids=lambda p: str(p.stem))
def test_with_values_without_changes_returns_same_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    assert with_values(recipe, {}, 32) == recipe


# Early stopping.


def test_pruning_ends_only_worst_quarter_after_a_third() -> None:
    curves = [[[p, p, p, 10.0 - p + i] for p in range(1, POINTS + 1)] for i in range(8)]

    def ended(worse: float, among: int = 8) -> list[bool]:
        trial, found = pruning_trial(curves[:among]), []
        for point in range(1, POINTS):
            trial.report(10.0 - point + worse, point)
            found.append(trial.should_prune())
        return found  # fmt: skip

    assert ended(20.0) == [False, True, True, True, True]
    assert not any(ended(5.0))
    assert not any(ended(20.0, among=4))


# Studies.


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that replaces the trial process by calling another function in this
    process.
    """

    def use(run: Any) -> None:
        @contextlib.contextmanager
        def processes(_: object) -> Iterator[Any]:
            yield run

        monkeypatch.setattr("firstlight.tuning.search.trial_processes", processes)

    return use


def answer(request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Run a trial, with an error as its result, like `process.answer`."""
    assert seconds is None or seconds > 0
    try:
        found = json.dumps(tuning_once(json.loads(json.dumps(request))))
    except FirstlightError as error:
        return error_of(type(error).__name__, str(error))
    loaded: dict[str, Any] = json.loads(found)
    return loaded


def bowl(request: dict[str, Any], _: float | None = None) -> dict[str, Any]:
    """Run a trial whose loss is lowest at a learning rate of 0.003, in no time."""
    if request["pace"]:
        shape = {"objective": "bits_per_byte", "max_steps": 1000, "warmup_steps": 50, "seq_len": 32}
        return {"step_seconds": 0.1, "evaluation_seconds": 0.5, "start_seconds": 1.0, **shape}
    recipe = parse_recipe(request["recipe"])
    loss = 1 + math.log10(recipe.optimizer.learning_rate / 0.003) ** 2
    if recipe.optimizer.learning_rate > 0.05:
        return error_of("DivergedError", "loss is nan")
    trial = pruning_trial(request["curves"])
    curve: list[Any] = []
    for point in range(1, POINTS + 1):
        curve.append([point, 10 * point, 100 * point, loss + 1 / point])
        trial.report(curve[-1][3], point)
        if point < POINTS and trial.should_prune():
            return {"curve": curve, "pruned": True, "seconds": 1.0}
    return {"curve": curve, "pruned": False, "seconds": 2.0}


def lines_of(result: TuneResult) -> list[dict[str, Any]]:
    """Return the trials without their durations."""
    return [{**line, "wall_seconds": 0} for line in result.trials]


def test_study_finds_best_rate_and_ends_hopeless_trials(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(bowl)
    recipe = small(optimizer={"learning_rate": 0.01}, run={"dir": "runs/mine"})
    search = [f"{_RATE}=1e-4..1e-1:log"]
    result = tune(recipe, tmp_path / "study", search=search, trials=30)
    assert len(result.trials) == 30
    assert result.best is not None
    assert result.best["values"][_RATE] == pytest.approx(0.003, rel=0.2)
    states = [line["state"] for line in result.trials]
    assert states[0] == "complete"
    assert states.count("pruned") > 3
    assert states.count("failed") > 0
    assert result.importance == {_RATE: 1.0}
    # Its share of an hour would be 1,050 steps, but the whole run has 1,000.
    assert result.study.trial_steps == 1000
    assert result.best_recipe is not None
    best = load_recipe(result.best_recipe)
    assert best.schedule.max_steps == 1000
    assert best.optimizer.learning_rate == result.best["values"][_RATE]
    assert best.run.dir == str(tmp_path / "study" / "best")
    assert result.picture is not None
    assert result.picture.read_bytes()[:4] == b"\x89PNG"
    rows = table(result.study.search, "bits_per_byte", result.trials)
    assert rows[0] == ["trial", "bits_per_byte", "learning_rate", "steps", ""]
    assert [row[0] for row in rows[1:]] == [str(line["trial"]) for line in in_order(result.trials)]
    assert rows[-1][-1] == "failed"


def test_study_of_recipe_without_settings_searches_around_new_model_defaults(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    trained: list[Recipe] = []

    def run(request: dict[str, Any], _: float | None = None) -> dict[str, Any]:
        if request["pace"]:
            return bowl(request)
        trained.append(parse_recipe(request["recipe"]))
        curve = [[point, 10 * point, 100 * point, 2 - point / 10] for point in range(1, POINTS + 1)]
        return {"curve": curve, "pruned": False, "seconds": 2.0}

    in_process(run)
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = small(model={"model_type": "qwen3", **model})
    result = tune(recipe, tmp_path / "study", trials=2, trial_steps=60)
    assert "optimizer.muon_learning_rate" in {one.key for one in result.study.search}
    assert [(one.optimizer.name, one.schedule.kind) for one in trained] == 2 * [("muon", "wsd")]
    assert trained[0].optimizer.learning_rate == 0.3
    assert trained[0].init.residual_projections == "zero"


def test_study_killed_and_resumed_equals_uninterrupted_study(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(bowl)
    recipe, search = small(), [f"{_RATE}=1e-4..1e-2:log", "schedule.kind=linear,cosine"]
    whole = tune(recipe, tmp_path / "whole", search=search, trials=15, trial_steps=60)

    class Kill(BaseException):
        """An exception that no code catches."""

    def die(_: object) -> None:
        raise Kill

    def die_within(request: dict[str, Any], _: float | None = None) -> dict[str, Any]:
        if request["pace"] or not request["recipe"]["run"]["dir"].endswith("trial-009"):
            return bowl(request)
        raise Kill

    folder = tmp_path / "killed"
    with pytest.raises(Kill):
        tune(recipe, folder, search=search, trials=15, trial_steps=60, on_trial=die)
    in_process(die_within)
    with pytest.raises(Kill):
        tune(recipe, folder, search=search, trials=15)
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 8
    # A truncated line is ignored.
    with open(folder / "trials.jsonl", "a") as file:
        file.write('{"trial": 9, "step"')
    in_process(bowl)
    again = tune(recipe, folder, search=search, trials=15)
    assert lines_of(again) == lines_of(whole)
    # Further trials may be requested later.
    more = tune(recipe, folder, search=search, trials=17)
    assert lines_of(more)[:15] == lines_of(whole)


def test_study_folder_of_other_study_raises(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(bowl)
    search = [f"{_RATE}=1e-4..1e-2:log"]
    tune(small(), tmp_path / "s", search=search, trials=2, trial_steps=60)
    with pytest.raises(ConfigError, match="a study with a different search"):
        tune(small(), tmp_path / "s", trials=2)
    with pytest.raises(ConfigError, match="a study with a different recipe"):
        tune(small(run={"seed": 2}), tmp_path / "s", search=search, trials=2)
    with pytest.raises(ConfigError, match="a study with a different --trial-steps"):
        tune(small(), tmp_path / "s", search=search, trials=2, trial_steps=61)
    path = tmp_path / "s" / "trials.jsonl"
    path.write_text(path.read_text().replace(_RATE, "optimizer.eps"))
    with pytest.raises(CheckpointError, match=r"trials.jsonl:2 is not a trial of this study"):
        tune(small(), tmp_path / "s", search=search, trials=3)
    with pytest.raises(ConfigError, match="max_minutes does not set the number of steps"):
        tune(small(schedule={"max_minutes": 3}), tmp_path / "t")
    (tmp_path / "s" / "study.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        tune(small(), tmp_path / "s", search=search, trials=3)


def test_study_starts_no_trial_that_exceeds_budget(
    tmp_path: Path, in_process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow(request: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        now[0] += 0.0 if request["pace"] else 60.0
        return bowl(request, seconds)

    in_process(slow)
    monkeypatch.setattr("firstlight.tuning.search.time.monotonic", lambda: now[0])
    search = [f"{_RATE}=1e-4..1e-2:log"]
    found = tune(small(), tmp_path / "s", search=search, budget_minutes=4.5, trial_steps=60)
    # The next trial would end after five minutes.
    assert [line["wall_seconds"] for line in found.trials] == 4 * [60.0]
    with pytest.raises(ConfigError, match="raise --budget or --trial-minutes, lower --trials"):
        tune(small(), tmp_path / "t", search=search, budget_minutes=0.5)


def test_study_budget_ending_within_first_steps_raises_config_error(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(lambda *_: error_of("TimeoutError", "took more than 6 s"))
    with pytest.raises(ConfigError, match="raise --budget"):
        tune(small(), tmp_path / "s", budget_minutes=0.1)
    assert not (tmp_path / "s").exists()


def test_study_trials_on_gpu_run_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("firstlight.tuning.search.ask", lambda *given: asked.append(given))
    with trial_processes(torch.device("cuda")) as asker:
        asker({"pace": True}, 5.0)
    ((module, request, environment, seconds),) = asked
    assert module == "firstlight.tuning.search"
    assert (request, seconds) == ({"pace": True}, 5.0)
    assert "PATH" in environment


def test_study_of_few_values_tries_all_combinations_once(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(bowl)
    search = [f"{_RATE}=1e-3,2e-3,5e-3", "schedule.kind=linear,cosine"]
    found = tune(small(), tmp_path / "s", search=search, trials=20, trial_steps=60)
    values = [tuple(line["values"].values()) for line in found.trials]
    assert len(set(values)) == len(values) == 6
    assert found.best is not None
    assert found.best["values"][_RATE] == "2e-3"


def test_study_failing_values_fail_trial_and_failing_recipe_raises(
    tmp_path: Path, in_process: Callable[[Any], None]
) -> None:
    in_process(bowl)
    search = ["schedule.kind=linear,constant", "schedule.min_lr_ratio=0.0,0.5"]
    found = tune(small(), tmp_path / "s", search=search, trials=9, trial_steps=60)
    failed = [line for line in found.trials if line["state"] == "failed"]
    assert [line["values"]["schedule.kind"] for line in failed] == ["constant", "constant"]
    assert "min_lr_ratio applies only to kind cosine" in failed[0]["message"]
    with pytest.raises(
        TrainingError, match="training fails with the recipe's own values: loss is nan"
    ):
        tune(small(optimizer={"learning_rate": 1.0}), tmp_path / "t", trials=2, trial_steps=60)


# Real trials.


def test_tune_command_runs_short_trials_and_writes_best_recipe(
    tmp_path: Path,
    recipe: dict[str, Any],
    in_process: Callable[[Any], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    in_process(answer)
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps({**recipe, "schedule": {"max_steps": 40, "warmup_steps": 8}}))
    options = ["--search", f"{_RATE}=1e-5..1e-1:log", "--trials", "3", "--trial-steps", "10"]
    assert main(["tune", str(path), *options, "--json"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert (found["objective"], found["trial_steps"]) == ("bits_per_byte", 10)
    folder = tmp_path / "run-tune"
    assert found["folder"] == str(folder)
    for line in found["trials"]:
        assert [step for _, step, _, _ in line["curve"]] == [2, 4, 6, 8, 10]
        run = folder / f"trial-{line['trial']:03d}"
        trial = load_recipe(run / "recipe.yaml")
        assert (trial.schedule.max_steps, trial.schedule.warmup_steps) == (10, 2)
        metrics = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        assert metrics[-1]["bits_per_byte"] == line["objective"]
        assert not list(run.rglob("*.safetensors"))
    best = min(found["trials"], key=lambda line: line["objective"])
    assert found["best"] == best
    assert load_recipe(found["best_recipe"]).schedule.max_steps == 40
    assert "next: firstlight train" in said.err
    assert not (folder / "pace").exists()


def test_tune_recipe_without_held_out_text_raises_config_error(
    tmp_path: Path, recipe: dict[str, Any], in_process: Callable[[Any], None], data: Path
) -> None:
    in_process(answer)
    manifest = json.loads((data / "manifest.json").read_text())
    place = tmp_path / "train-only"
    place.mkdir()
    for file in data.iterdir():
        (place / file.name).symlink_to(file)
    del manifest["splits"]["val"]
    (place / "manifest.json").unlink()
    (place / "manifest.json").write_text(json.dumps(manifest))
    recipe["data"]["dir"] = str(place)
    with pytest.raises(ConfigError, match="no held-out text to evaluate a trial on"):
        tune(recipe, trials=2, trial_steps=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trials", "0"], "--trials is 0"),
        (["--budget", "soon"], "is not a duration"),
        (["--trial-steps", "3", "--trial-minutes", "2"], "use only one of them"),
        (["--search", f"{_RATE}=-1..1"], "learning_rate"),
        (["--search", f"{_RATE}=1,2", "--search", f"{_RATE}=3,4"], "is repeated"),
        (["--search", "optimizer.name=adamw,foo"], "(given: 'foo')"),
        (["--schedule.resume", "true"], "schedule.resume"),
    ],
)
def test_tune_command_invalid_options_print_one_line(
    tmp_path: Path, recipe: dict[str, Any], capfd: pytest.CaptureFixture[str],
    options: list[str], message: str,
) -> None:  # fmt: skip
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(recipe))
    assert main(["tune", str(path), *options]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run-tune").exists()


def test_tune_without_optuna_names_install_command(
    tmp_path: Path,
    recipe: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(recipe))
    assert main(["tune", str(path)]) == 1
    assert "pip install 'firstlight[tune]'\n" in capfd.readouterr().err
