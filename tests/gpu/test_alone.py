"""Each method on the device under test, within the bounds of docs/methods.md."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from runs import Outcome, Runs, difference, make_program, same_bits, train_recipe
from switches import (
    ALONE,
    INDUCTOR,
    INDUCTOR_BOUNDS,
    ON_CUDA,
    SWITCHES,
    Combination,
    Switch,
    needed,
)

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware
from firstlight.recipe import ResolvedRecipe
from firstlight.training.program import TrainingProgram

from .conftest import DEVICE

# torch's compiler accesses the gradient of every input, including a layer's input.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # torch 2.11 creates its oneDNN layers like this when it compiles the first step.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

_OTHER = "cpu" if torch.device(DEVICE).type == "cuda" else "cuda"
_MODELS = ("llama", "gpt2")
#: bitsandbytes pages the moments of parameters with at least 100,000 values.
_WIDE = {"model.intermediate_size": 2048}


@pytest.fixture(scope="module")
def runs(rows: Path, hardware: Hardware) -> Runs:
    """Return runs with the kernels that torch selects by default."""
    return Runs(rows, hardware)


@pytest.fixture(scope="module")
def exact_runs(rows: Path, hardware: Hardware) -> Runs:
    """Return runs with kernels whose sums have a fixed order."""
    return Runs(rows, hardware, {"run.deterministic": True})


@pytest.fixture(scope="module")
def cpu_runs(rows: Path) -> Runs:
    """Return the same runs on the CPU."""
    return Runs(rows)


def _alone(switch: Switch, model: str) -> Combination:
    choice = (switch.factor, switch.value)
    return frozenset((("model", model), choice, *needed(choice)))


def _cases(*kinds: str) -> list[ParameterSet]:
    """Return each switch of some kinds with each model. Switches of another device are omitted
    (CPU) or skipped on a CPU (GPU).
    """
    by_name: dict[str, Switch] = {}
    for switch in [*SWITCHES, *ALONE, *ON_CUDA]:
        name = f"{switch.factor}-{switch.value}"
        if switch.kind in kinds and not (switch.on == _OTHER and name in by_name):
            by_name[name] = switch
    cases = []
    for name, switch in by_name.items():
        if switch.on == "cpu" and _OTHER == "cpu":
            continue
        marks = [pytest.mark.needs(switch.needs)] if switch.needs else []
        if switch.on == "cuda":
            marks.append(pytest.mark.cuda_only(f"{switch.factor} {switch.value}"))
        if switch.slow:
            marks.append(pytest.mark.cuda_only("on a CPU it compiles for half a minute"))
        if switch.kind == "mathematics" and switch.factor == "model":
            continue
        for model in _MODELS:
            if model == "gpt2" and switch.value == "inductor":
                continue
            cases.append(pytest.param(switch, model, id=f"{name}-{model}", marks=marks))
    return cases


def _require_near(run: Outcome, plain: Outcome, loss: float, weights: float) -> None:
    found = difference(run, plain)
    assert run.skipped == 0
    assert found.loss <= loss
    assert found.weights <= weights


@pytest.mark.parametrize("switch, model", _cases("rounding", "approximate"))
def test_method_on_device_stays_near_plain_run(runs: Runs, switch: Switch, model: str) -> None:
    combination = _alone(switch, model)
    if switch.value == "paged_adamw8bit":
        runs = Runs(runs.data, runs.hardware, _WIDE)
    run, plain = runs.of(combination), runs.plain(combination)
    _require_near(run, plain, switch.loss, switch.weights)
    # Lower precision changes the result: the method was active.
    assert switch.kind != "approximate" or difference(run, plain).weights > 1e-5
    # torchao compiles its optimizer.
    assert (run.graphs > 0) == (switch.factor == "compile" or "torchao" in switch.value)


@pytest.mark.parametrize("switch, model", _cases("exact"))
def test_exact_method_on_device_changes_no_bit(
    exact_runs: Runs, switch: Switch, model: str
) -> None:
    combination = _alone(switch, model)
    run, plain = exact_runs.of(combination), exact_runs.plain(combination)
    if run.graphs and exact_runs.hardware.device.type == "cuda":
        # During tracing, torch may select other kernels than in eager mode.
        _require_near(run, plain, 1e-5, 1e-3)
    else:
        assert same_bits(run, plain)


@pytest.mark.parametrize("switch, model", _cases("mathematics", "plain"))
def test_method_on_device_matches_cpu(
    runs: Runs, cpu_runs: Runs, switch: Switch, model: str
) -> None:
    combination = _alone(switch, model)
    run, on_cpu = runs.of(combination), cpu_runs.of(combination)
    # Kernels of another device sum in a different order.
    _require_near(run, on_cpu, 1e-5 * switch.amplifies, 1e-3 * switch.amplifies)


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.cuda_only("inductor compiles for half a minute on a CPU: make test-slow")
@pytest.mark.parametrize(
    "with_it",
    [
        *(with_it for with_it in INDUCTOR if "compile_mode" not in with_it),
        {"compile_mode": "reduce-overhead", "compile_regional": True},
        {"compile_mode": "reduce-overhead", "activation_checkpointing": "full"},
        {"compile_mode": "reduce-overhead", "loss_chunk_tokens": 24},
    ],
    ids=str,
)
def test_inductor_on_device_stays_near_plain_run(
    runs: Runs, model: str, with_it: dict[str, object]
) -> None:
    combination = frozenset([("model", model)])
    recipe = _with(runs.recipe(combination), efficiency={"compile": True, **with_it})
    run = train_recipe(recipe, hardware=runs.hardware)
    assert run.graphs > 0
    _require_near(run, runs.plain(combination), *INDUCTOR_BOUNDS)


@pytest.mark.cuda_only("CUDA graphs")
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("model", _MODELS)
def test_cuda_graphs_accumulate_gradients_of_several_micro_batches(
    runs: Runs, model: str, micro: int
) -> None:
    combination = frozenset([("model", model)])
    recipe = _with(
        runs.recipe(combination),
        efficiency={"compile": True, "compile_mode": "reduce-overhead"},
        batch={"micro_batch_size": micro, "gradient_accumulation_steps": 4 // micro},
    )
    run = train_recipe(recipe, hardware=runs.hardware)
    _require_near(run, runs.plain(combination), *INDUCTOR_BOUNDS)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_recomputed_on_device_drops_same_values(
    exact_runs: Runs, checkpointing: str, precision: str
) -> None:
    outcomes = []
    for chosen in ("none", checkpointing):
        recipe = _with(
            exact_runs.recipe(frozenset([("model", "gpt2")])),
            model={"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
            efficiency={"activation_checkpointing": chosen, "precision": precision},
        )
        outcomes.append(train_recipe(recipe, hardware=exact_runs.hardware))
    assert same_bits(*outcomes)
    assert not same_bits(outcomes[0], exact_runs.plain(frozenset([("model", "gpt2")])))


@pytest.mark.parametrize("model", _MODELS)
def test_fp16_overflow_on_device_halves_scale_and_changes_no_bit(
    runs: Runs, model: str, device: torch.device
) -> None:
    program = make_program(
        runs.recipe(frozenset([("model", model), ("precision", "fp16")])), runs.hardware
    )
    assert program.scaler is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (4, 33), generator=generator)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 4 * 32).to(device)
    assert not program.step([batch], 0.1).skipped
    before = _everything(program)
    program.scaler.scale = 2.0**40
    assert program.step([batch], 0.1).skipped
    assert program.scaler.scale == 2.0**39
    assert program.scaler.skipped_steps == 1
    after = _everything(program)
    assert all(torch.equal(before[name], after[name]) for name in before)
    program.scaler.scale = 2.0**8
    assert not program.step([batch], 0.1).skipped
    assert not all(torch.equal(before[name], t) for name, t in _everything(program).items())


def _everything(program: TrainingProgram) -> dict[str, torch.Tensor]:
    """Return weights and moments on the CPU."""
    tensors = {**program.model.state_dict(), **program.optimizer.state_tensors()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _with(recipe: ResolvedRecipe, **sections: dict[str, object]) -> ResolvedRecipe:
    """Return the recipe with other values in some sections."""
    changed = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()
    }
    return recipe.model_copy(update=changed)


@pytest.mark.cuda_only("the allocator's peak is that of a GPU")
@pytest.mark.parametrize(
    "name, settings",
    [
        ("full checkpointing", {"efficiency.activation_checkpointing": "full"}),
        ("selective checkpointing", {"efficiency.activation_checkpointing": "selective"}),
        ("offloaded activations", {"efficiency.activation_offload": True}),
        ("chunked loss", {"efficiency.loss_chunk_tokens": 128}),
        ("sgd", {"optimizer.name": "sgd"}),
        ("adafactor", {"optimizer.name": "adafactor"}),
    ],
)
def test_memory_saving_method_on_device_lowers_peak(
    runs: Runs, name: str, settings: dict[str, object]
) -> None:
    large: dict[str, object] = {
        "model.hidden_size": 256,
        "model.num_hidden_layers": 6,
        "model.vocab_size": 4096,
        "model.max_position_embeddings": 256,
        "data.seq_len": 256,
    }
    peaks = []
    for chosen in ({}, settings):
        recipe = runs.recipe(frozenset(), {**large, **chosen})
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_recipe(recipe, hardware=runs.hardware)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.97 * peaks[0], name
