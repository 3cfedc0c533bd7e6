"""Each method and every pair of methods, compared with the plain fp32 run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from covering import pairs_of
from runs import Runs, difference, one_thread, same_bits, train_recipe
from switches import (
    ALONE,
    INDUCTOR,
    INDUCTOR_BOUNDS,
    ON_CUDA,
    SWITCHES,
    Combination,
    Switch,
    factors,
    needed,
    of_kinds,
    pairwise_combinations,
    recipe_of,
    refusal,
    refused_pairs,
    switches,
)
from table import PAGE, bounds_table, measured_table, with_table

from firstlight.data.prepare import prepare
from firstlight.files.atomic import write_file
from firstlight.tokenizer import train_tokenizer

#: Interactions of two methods: further differences of the loss and the weights.
_INTERACTIONS: dict[Combination, tuple[float, float]] = {
    # Adafactor scales its steps by the matrix's root mean square, which zero rows lower: 20 rows on
    # 300 by 3 %.
    frozenset({("optimizer", "adafactor"), ("vocabulary", "padded")}): (0.005, 0.05),
}

# torch's compiler accesses the gradient of every input, including a layer's input.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # torch's backend "cudagraphs" imports a module that uses torch.jit.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

_MODELS = ("llama", "gpt2")
_COMPARED = [s for s in [*SWITCHES, *ALONE] if s.kind not in ("plain", "mathematics")]
#: Precisions whose products round differently after torch.compile has fused them.
_FEWER_BITS = {"bf16", "bf16_residual", "bf16_params", "fp16"}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, texts: list[str]) -> Runs:
    # 300 tokens, which is not a multiple of 64.
    folder = tmp_path_factory.mktemp("methods") / "data"
    prepare([corpus], train_tokenizer(texts, 300), folder)
    return Runs(folder)


def _alone(switch: Switch, model: str) -> Combination:
    choice = (switch.factor, switch.value)
    return frozenset((("model", model), choice, *needed(choice)))


def _marks(switch: Switch, model: str) -> list[pytest.MarkDecorator]:
    # torch.compile takes seconds per model, so `make test` compiles only one.
    compiles = switch.factor == "compile" and model == "gpt2"
    marks = [pytest.mark.slow] if switch.slow or compiles else []
    if switch.missing:
        marks.append(pytest.mark.skip(reason=f"{switch.needs} is not installed"))
    return marks


# --- one method ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "model"),
    [
        pytest.param(s, model, id=f"{s.factor}-{s.value}-{model}", marks=_marks(s, model))
        for s in _COMPARED
        for model in _MODELS
    ],
)
def test_method_stays_within_documented_distance_of_plain_run(
    runs: Runs, switch: Switch, model: str
) -> None:
    if switch.value == "inductor" and model == "gpt2":
        pytest.skip("compiles for many seconds: llama's run does, the slow tests do both")
    combination = _alone(switch, model)
    run, plain = runs.of(combination), runs.plain(combination)
    found = difference(run, plain)
    runs.measured[f"{switch.factor} {switch.value}", model] = found
    assert run.skipped == 0
    if switch.kind == "exact":
        assert same_bits(run, plain)
        return
    assert found.loss <= switch.loss
    assert found.weights <= switch.weights
    # Lower precision changes the result: the method was active.
    assert switch.kind != "approximate" or found.weights > 1e-4


@pytest.mark.parametrize("model", _MODELS)
def test_method_tolerances_are_small_compared_with_training(runs: Runs, model: str) -> None:
    plain = runs.plain(frozenset([("model", model)]))
    learned = plain.losses[0] - plain.losses[-1]
    assert learned > 1
    assert all(switch.loss < learned / 100 for switch in _COMPARED)
    # Another order of the rows leads to very different weights.
    other = train_recipe(recipe_of(frozenset([("model", model)]), str(runs.data)), seed=8)
    assert difference(other, plain).weights > 0.5


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_dropout_drops_same_values(runs: Runs, checkpointing: str) -> None:
    outcomes = []
    for choice in ("none", checkpointing):
        recipe = recipe_of(
            frozenset([("model", "gpt2"), ("checkpointing", choice)]), str(runs.data)
        )
        assert recipe.model is not None
        dropout = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
        model = recipe.model.model_copy(update=dropout)
        outcomes.append(train_recipe(recipe.model_copy(update={"model": model})))
    assert same_bits(*outcomes)
    assert not same_bits(outcomes[0], runs.plain(frozenset([("model", "gpt2")])))


# --- several together ------------------------------------------------------------------------

_QUICK, _COMPILED = pairwise_combinations()


def _each_value_once() -> list[Combination]:
    """Return a few of the quick combinations without torch.compile (the slowest) that together
    contain each of their values.
    """
    plain = [row for row in _QUICK if ("compile", "regional") not in row]
    missing, rows = set().union(*plain), []
    while missing:
        rows.append(max(plain, key=lambda row: len(row & missing)))
        missing -= rows[-1]
    return rows


def _name(combination: Combination) -> str:
    return "-".join(switch.value for switch in switches(combination))


# `make test-slow` covers each pair of values.
_USUAL = _each_value_once()


@pytest.mark.parametrize(
    "combination",
    [pytest.param(c, id=_name(c)) for c in _USUAL]
    + [
        pytest.param(c, id=_name(c), marks=pytest.mark.slow)
        for c in [*_QUICK, *_COMPILED]
        if c not in _USUAL
    ],
)
def test_combined_methods_deviate_no_more_than_sum_of_each_alone(
    runs: Runs, combination: Combination
) -> None:
    run, plain = runs.of(combination), runs.plain(combination)
    values = {switch.value for switch in switches(combination)}
    compiled = not values.isdisjoint({"aot_eager", "regional"})
    assert (run.graphs > 0) == compiled
    assert run.skipped == 0
    if not (compiled and values & _FEWER_BITS):
        # An "exact" value does not change a single bit of the other methods' results.
        assert same_bits(
            run, runs.of(of_kinds(combination, "mathematics", "rounding", "approximate"))
        )
    chosen = switches(combination)
    amplified = max(switch.amplifies for switch in chosen)
    more = [bounds for pair, bounds in _INTERACTIONS.items() if pair <= combination]
    found = difference(run, plain)
    assert found.loss <= amplified * sum(s.loss for s in chosen) + sum(loss for loss, _ in more)
    assert found.weights <= amplified * sum(s.weights for s in chosen) + sum(w for _, w in more)


def test_method_combinations_cover_every_legal_pair() -> None:
    rows = [*_QUICK, *_COMPILED]
    met = set().union(*(pairs_of(dict(row)) for row in rows))
    possible = {
        frozenset(((a, one), (b, other)))
        for a, ones in factors().items()
        for b, others in factors().items()
        for one in ones
        for other in others
        if a < b
    }
    assert met == possible - refused_pairs()
    assert all(refusal(row) is None for row in rows)


# --- torch.compile for real: up to half a minute each ------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("with_it", INDUCTOR, ids=str)
def test_inductor_stays_near_plain_run(runs: Runs, model: str, with_it: dict[str, object]) -> None:
    combination = frozenset([("model", model)])
    recipe = recipe_of(combination, str(runs.data))
    config = recipe.efficiency.model_copy(update={"compile": True, **with_it})
    run = train_recipe(recipe.model_copy(update={"efficiency": config}))
    found = difference(run, runs.plain(combination))
    assert run.graphs > 0
    assert found.loss <= INDUCTOR_BOUNDS[0]
    assert found.weights <= INDUCTOR_BOUNDS[1]


# --- the page ----------------------------------------------------------------------------------


def test_methods_page_table_matches_tested_methods(
    runs: Runs, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page gets classes and bounds, equal on every machine; the terminal shows the
    measurements.
    """
    if runs.measured:
        with capsys.disabled():
            terminal = request.config.get_terminal_writer()
            terminal.line()
            for line in measured_table(runs.measured):
                terminal.line(line)
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_table(page, bounds_table([*SWITCHES, *ALONE, *ON_CUDA]))
    if wanted != page:
        write_file(PAGE, wanted)
    exact = wanted.partition("\n| exact | 0 | 0% | ")[2].partition(" |\n")[0].split(", ")
    assert len(exact) >= sum(s.kind == "exact" for s in SWITCHES) > 5
