"""The recipes that come with the program: each reads as it stands, and the tour's fit together."""

from __future__ import annotations

import gc
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from builders import slow_but
from firstlight.cli.plan import write_recipe
from firstlight.data.conversations import to_conversation, to_pair
from firstlight.errors import ConfigError
from firstlight.planner.advise import defaults
from firstlight.planner.plan import plan as planning
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.planner.plan.plan import Budget, make_plan
from firstlight.recipe import load_recipe
from firstlight.training.loop import train
from planner_recipes import FixedEstimator, speed_of_h100

_ROOT = Path(__file__).resolve().parents[2]
_RECIPES = sorted((_ROOT / "recipes").glob("*.yaml"))

#: The recipes that start from weights: the rest train new models.
_FINE_TUNING = [
    "gpt2-124m-finetune",
    "llama-3.2-1b-lora",
    "sft-tiny",
    "tour-continue",
    "tour-dpo",
    "tour-sft",
]
_NEW_MODELS = [path for path in _RECIPES if path.stem not in _FINE_TUNING]


@pytest.mark.parametrize("path", _RECIPES, ids=lambda path: str(path.stem))
def test_project_recipe_parses_unchanged(path: Path) -> None:
    recipe = load_recipe(path)
    # Its resolved form, which is saved with the run, says the same.
    assert type(recipe).model_validate(recipe.model_dump()) == recipe
    rows = recipe.batch.micro_batch_size
    if recipe.data.seq_len is not None and isinstance(rows, int):
        assert recipe.batch.accumulation(recipe.data.seq_len) >= 1


@pytest.mark.parametrize("path", _RECIPES, ids=lambda path: str(path.stem))
def test_project_recipe_is_planned_before_data_preparation(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settled = resolve_for(load_recipe(path), find_machine("RTX 4090"))
    assert settled.model is not None
    sizes = {"gpt2-124m": 50257, "demo": 4096, "llama-1b-fsdp": 128256}
    assert settled.model.vocab_size == sizes.get(path.stem, settled.model.vocab_size) > 0


@pytest.mark.parametrize("name", _FINE_TUNING)
def test_budget_for_recipe_starting_from_weights_raises_config_error(name: str) -> None:
    recipe = load_recipe(_ROOT / "recipes" / f"{name}.yaml")
    with pytest.raises(ConfigError, match=r"suggest a new model, but a recipe with.* weights"):
        make_plan(recipe, find_machine("RTX 4090"), budget=Budget(seconds=60), searches=False)


@pytest.mark.parametrize(
    "path", slow_but(_NEW_MODELS[:3], _NEW_MODELS), ids=lambda path: str(path.stem)
)
def test_budget_suggestion_learns_with_family_and_optimizer_of_recipe(
    path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller than the smallest rung of the ladder, which takes seconds to train with Muon.
    monkeypatch.setattr(defaults, "SHAPES", ((64, 2),))
    monkeypatch.setattr(planning, "new_model_speed", speed_of_h100)
    small = {"data.dir": str(data), "data.seq_len": "32", "efficiency.compile": "false"}
    recipe = load_recipe(path, [*small.items(), ("efficiency.precision", "fp32")])
    plan = make_plan(
        recipe,
        find_machine("RTX 4090"),
        budget=Budget(tokens=12_800),
        searches=False,
        estimator=FixedEstimator(),
    )
    assert plan.chosen is not None
    write_recipe(tmp_path / "planned.yaml", plan.chosen)
    run = {"run.dir": str(tmp_path / "run"), "run.device": "cpu", "schedule.max_steps": "50"}
    # One process trains here: none shares its work.
    run |= {"distributed.engine": "none", "evaluation.max_rows": "1"}
    found = load_recipe(tmp_path / "planned.yaml", list(run.items()))
    before = plan.recipe
    assert found.model is not None
    assert found.model.model_type == before.model.model_type
    assert found.model.tie_word_embeddings == before.model.tie_word_embeddings
    assert (found.optimizer.name, found.init) == (before.optimizer.name, before.init)
    own = before.optimizer.model_copy(update={"tuned_width": before.model.hidden_size})
    scaled = own.for_width(found.model.hidden_size)
    # Suggested rates have three digits.
    for role in ("embedding", "head", "matrix", "vector"):
        assert found.optimizer.peak_rate(role) == pytest.approx(scaled.peak_rate(role), rel=2e-3)
    losses: list[float] = []
    train(found, on_step=lambda record: losses.append(record["train/loss"]))
    assert len(losses) == 50
    # The first step guesses about evenly.
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)
    assert mean(losses[-10:]) < losses[0] - 0.5


def test_prepared_data_overrides_vocabulary_of_recipe(data: Path) -> None:
    recipe = load_recipe(_ROOT / "recipes" / "demo.yaml", [("data.dir", str(data))])
    settled = resolve_for(recipe, find_machine("RTX 4090"))
    assert settled.model is not None
    assert settled.model.vocab_size == 320
    # A run takes the tokenizer's as well: the recipe's model names none.
    assert recipe.model is not None
    assert recipe.model.vocab_size == 0


@pytest.fixture(scope="module")
def tour() -> ModuleType:
    """scripts/tour.py."""
    specification = importlib.util.spec_from_file_location("tour", _ROOT / "scripts" / "tour.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["tour"] = module
    specification.loader.exec_module(module)
    return module


def test_tour_recipes_write_where_next_one_begins(tour: ModuleType) -> None:
    stages = {stage: load_recipe(_ROOT / "recipes" / f"tour-{stage}.yaml") for stage in tour.STAGES}
    for stage, recipe in stages.items():
        assert recipe.run.dir == f"{tour.FOLDER}/{stage}"
        assert (recipe.model is not None) == (stage == "pretrain")
    assert stages["pretrain"].data.dir == str(tour.DATA)
    assert [corpus.dir for corpus in stages["continue"].data.mix or ()] == [
        str(tour.DATA),
        str(tour.PROSE),
    ]
    assert stages["sft"].data.files == [str(tour.INSTRUCTIONS)]
    assert stages["dpo"].data.files == [str(tour.PAIRS)]
    assert stages["dpo"].preference is not None


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Before 3.11.8, `ast.parse` fails where a garbage collection lets another thread parse
    meanwhile, and libraries leave threads: github.com/python/cpython/issues/106905."""
    gc.disable()
    yield
    gc.enable()


def test_tour_questions_are_learnable(tour: ModuleType, no_garbage_collection: None) -> None:
    asked = tour.questions()
    assert len(asked) > 500
    assert (tour.QUESTION, "json") in asked
    for question, answer in asked:
        to_conversation({"instruction": question, "output": answer})
        to_pair({"prompt": question, "chosen": answer, "rejected": tour.winded(answer)})
