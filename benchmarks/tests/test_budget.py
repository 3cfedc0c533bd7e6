"""`python -m benchmarks budget`: chosen settings compared with random ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import budget
from benchmarks.budget import bench_budget, draw, is_same_run, page, random_settings
from benchmarks.options import BudgetBench
from firstlight.data.shards import read_manifest
from firstlight.errors import ConfigError
from firstlight.from_texts.choices import choose
from firstlight.hardware.fresh_process import error_of
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Hardness, Length, MachineFacts, TextFacts
from firstlight.recipe import parse_recipe
from firstlight.run_log.names import METRICS_NAME
from firstlight.run_log.reader import read_json_lines


class FakeRun:
    """Replaces the process of a run; larger models reach a lower loss."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def __call__(self, module: str, request: dict[str, Any], *_: object) -> dict[str, Any]:
        self.requests.append(request)
        width = request["settings"].get("model.hidden_size", 200)
        if width == 64:
            return error_of("Failed", "killed by signal 9: most likely out of memory")
        bits, curve = 3 - width / 1000, [[0.5, 4.0], [1.0, 2.5]]
        if width == 128:
            return {"bits_per_byte": None, "curve": [[0.5, 4.5]], "seconds": 20.0, "step": 5}
        found = {"bits_per_byte": bits, "curve": curve, "seconds": 59.0, "gzip": 3.1, "xz": None}
        lengths = {"step": 10, "tokens": 100, "parameters": 1_000_000}
        return found | lengths | {"expected": [2.5, 2.7]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setattr(budget, "ask", run)
    return run


def test_budget_bench_second_call_measures_only_missing_runs(tmp_path: Path, fake: FakeRun) -> None:
    few = BudgetBench(tmp_path, corpora=("a.txt", "b.txt"), budgets=("1m",), trials=1)
    more = BudgetBench(tmp_path, corpora=("a.txt", "b.txt"), budgets=("1m",), trials=2)
    bench_budget(few, lambda _: None)
    assert len(fake.requests) == 4
    result = bench_budget(more, lambda _: None)
    assert [one["settings"] for one in fake.requests[4:]] == [random_settings(2)] * 2
    assert len(result["runs"]) + len(result["problems"]) == 6


def test_budget_bench_results_of_other_machine_are_not_measured_again(
    tmp_path: Path, fake: FakeRun
) -> None:
    before = bench_budget(BudgetBench(tmp_path, ("there/a.txt",), trials=1), lambda _: None)
    after = bench_budget(BudgetBench(tmp_path, ("here/a.txt",), trials=1), lambda _: None)
    assert len(fake.requests) == 2
    assert after["runs"] == before["runs"]


def test_budget_page_compares_chosen_run_with_best_draw(tmp_path: Path, fake: FakeRun) -> None:
    bench = BudgetBench(tmp_path, ("a.txt",), ("1m",), 8)
    bench_budget(bench, lambda _: None)
    result = bench_budget(bench, lambda _: None)  # from the results file
    ends = [run["bits_per_byte"] for run in result["runs"][1:]]
    draws = [bits for bits in ends if bits is not None]
    assert len(draws) < len(ends)
    (row,) = [line for line in page(result, "p.png").splitlines() if line.startswith("| a, 1m")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 2.8 is above the expected range, 2.5 to 2.7.
    assert cells[1:4] == ["2.8000", "2.50 to 2.70, missed", f"{min(draws):.4f} of {len(ends)}"]
    assert cells[4] == f"{len(ends) - len(draws)}"
    assert cells[5] == f"{2.8 / min(draws) - 1:+.1%}"
    assert cells[6:] == ["3.100", "", "59", "1M"]
    assert draw(result).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("share", "bits", "is_hopeless"),
    [
        (0.09, 9.0, False),
        (0.1, 3.91, True),
        (0.19, 3.89, False),
        (0.25, 3.44, False),
        (0.25, 3.46, True),
        (0.5, 2.19, False),
        (0.5, 2.21, True),
        (0.75, 1.97, False),
        (0.75, 1.99, True),
    ],
)
def test_budget_run_far_above_chosen_settings_is_hopeless(
    share: float, bits: float, is_hopeless: bool
) -> None:
    # Halfway between 2.0 and 1.6, the chosen settings are at 1.8.
    chosen = [(0.25, 3.0), (0.5, 2.0), (1.0, 1.6)]
    assert budget.is_hopeless(share, bits, chosen) is is_hopeless


@pytest.mark.parametrize(
    ("run", "budget", "is_same"),
    [
        # 100 s of 3 minutes: the run ended after its passes; with 2 minutes, time could have ended
        # it.
        ({"bits_per_byte": 2.0, "seconds": 100.0, "curve": [[1.0, 2.0]]}, "10m", True),
        ({"bits_per_byte": 2.0, "seconds": 100.0, "curve": [[1.0, 2.0]]}, "2m", False),
        ({"bits_per_byte": 2.0, "seconds": 170.0, "curve": [[1.0, 2.0]]}, "10m", False),
        # Ended early: all of its steps would have taken 120 s, or 160 s.
        ({"bits_per_byte": None, "seconds": 60.0, "curve": [[0.5, 2.21]]}, "10m", True),
        ({"bits_per_byte": None, "seconds": 80.0, "curve": [[0.5, 2.21]]}, "10m", False),
        # The chosen settings of the other budget are not far enough below it.
        ({"bits_per_byte": None, "seconds": 60.0, "curve": [[0.5, 2.19]]}, "10m", False),
    ],
)
def test_budget_run_ending_before_both_budgets_is_shared(
    run: dict[str, Any], budget: str, is_same: bool
) -> None:
    chosen = [(0.25, 3.0), (0.5, 2.0), (1.0, 1.6)]
    assert is_same_run(run | {"budget": "3m"}, budget, chosen) is is_same


@pytest.mark.parametrize("budgets", [("2m", "10m"), ("10m", "2m")])
def test_budget_bench_random_runs_ending_before_both_budgets_run_once(
    tmp_path: Path, fake: FakeRun, budgets: tuple[str, str]
) -> None:
    bench = BudgetBench(tmp_path, ("a.txt",), budgets, 20)
    runs = bench_budget(bench, lambda _: None)["runs"]
    asked = [one["settings"] for one in fake.requests]
    assert asked.count({}) == 2
    # A killed run has no result, and is tried again with each budget.
    killed = [one for one in asked if one.get("model.hidden_size") == 64]
    assert len(asked) == 2 + 20 + len(killed) / 2
    first, second = ([one for one in runs if one["budget"] == budget] for budget in budgets)
    assert [one["bits_per_byte"] for one in first] == [one["bits_per_byte"] for one in second]
    assert len({one["digest"] for one in runs}) == len(runs)
    assert {one.get("measured_with") for one in second[1:]} == {budgets[0]}


@pytest.mark.parametrize(
    ("length", "share"),
    [
        # Measured by time until the number of steps is decided, unless the limit of epochs comes
        # first.
        ({"predicted_steps": 20}, 0.1),
        ({"predicted_steps": 20, "most_steps": 40}, 0.25),
        # The decided number may be larger than the predicted one.
        ({"predicted_steps": 20, "most_steps": 90, "max_steps": 50}, 0.2),
    ],
)
def test_budget_share_of_steps_uses_actual_run_length(length: dict[str, Any], share: float) -> None:
    record = {"step": 10, "elapsed_seconds": 12.0}
    assert budget.share_of_steps(record, length | {"max_minutes": 2.0}) == pytest.approx(share)


def test_budget_bench_random_runs_without_chosen_one_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def fails(*request: Any) -> dict[str, Any]:
        asked.append(request)
        return error_of("Failed", "out of memory")

    monkeypatch.setattr(budget, "ask", fails)
    result = bench_budget(BudgetBench(tmp_path, ("a.txt",), trials=2), lambda _: None)
    assert len(asked) == 1
    assert len(result["problems"]) == 3


@pytest.mark.parametrize("is_ended", [False, True])
def test_budget_hopeless_run_is_ended_at_evaluation(tmp_path: Path, is_ended: bool) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"{number} is less than {number + 1}.\n" * 60)
    settings = {"model.hidden_size": 64, "model.num_hidden_layers": 1, "schedule.epochs": 1.0}
    request = {"text": str(texts), "budget": "20m", "run": str(tmp_path / "run")}
    chosen = [[0.1, 0.01], [1.0, 0.01]] if is_ended else []
    found = budget.measure(request | {"settings": settings, "chosen": chosen})
    shares, bits = zip(*found["curve"], strict=True)
    if is_ended:
        assert found["bits_per_byte"] is None
        assert found["step"] < 17
        assert shares[-1] < 1
    else:
        assert shares[-1] == 1
        # The first point is the mean training loss of the first 2 of 17 steps.
        _, *lines = read_json_lines(tmp_path / "run" / METRICS_NAME)
        loss = sum(line["train/loss"] for line in lines[:2]) / 2
        split = read_manifest(tmp_path / "run" / "data")["splits"]["train"]
        per_byte = split["tokens"] / split["text_bytes"] / math.log(2)
        assert (shares[0], bits[0]) == pytest.approx((2 / 17, loss * per_byte))
        # The run also evaluates all of the held-out text.
        assert found["bits_per_byte"] == pytest.approx(bits[-1], rel=0.02)


def test_budget_invalid_time_raises_before_first_run(tmp_path: Path, fake: FakeRun) -> None:
    with pytest.raises(ConfigError, match="soon"):
        bench_budget(BudgetBench(tmp_path, ("a.txt",), ("soon",)), lambda _: None)
    assert not fake.requests


@pytest.mark.parametrize("number", range(1, 21))
def test_budget_drawn_settings_make_valid_recipe(number: int) -> None:
    text = TextFacts(4096, 2e6, 3.3, Hardness(1.5, 2.24, 1.0), 1e5)
    machine = MachineFacts("cpu", "cpu", [(1e7, 1e4), (1e8, 1e3)], 1 << 34)
    drawn = random_settings(number)
    values = choose(text, machine, Length(180.0), drawn).values
    values["data"]["dir"] = "x"
    values["model"]["vocab_size"] = drawn["model.vocab_size"]
    recipe = parse_recipe(values)
    assert recipe.model is not None
    assert recipe.model.hidden_size == drawn["model.hidden_size"]
    assert recipe.schedule.kind == defaults.LAYOUT["schedule.kind"]


def test_budget_two_texts_of_same_name_raise_config_error(tmp_path: Path, fake: FakeRun) -> None:
    with pytest.raises(ConfigError, match="two texts have the name x"):
        bench_budget(BudgetBench(tmp_path, ("a/x.txt", "b/x.md")), lambda _: None)
    assert not fake.requests
