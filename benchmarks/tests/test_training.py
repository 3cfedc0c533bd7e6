"""`python -m benchmarks training`, with a model of about ten thousand parameters."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from plain_recipe import plain_recipe
from torch import nn

from benchmarks import training
from benchmarks.__main__ import training_command
from benchmarks.options import TrainingBench
from benchmarks.programs import PlainGPT2, autocast_loop, pure_bf16_loop
from benchmarks.training import (
    PROGRAMS,
    TrainingRow,
    bench_training,
    choose_programs,
    draw,
    operator_shares,
    phase_shares,
    summarize,
    training_rows,
)
from benchmarks.training import measure as training_once
from firstlight.bench.rows import RowOutcome
from firstlight.bench.steps import plan_steps, write_tokens
from firstlight.data.loader import Batch
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.hardware.environment import TRAINING
from firstlight.models import GPT2Config, empty_model
from firstlight.recipe import BatchConfig, Recipe, ResolvedRecipe
from firstlight.training.program import TrainingProgram

pytestmark = pytest.mark.usefixtures("forked_processes")

_CPU = Hardware(torch.device("cpu"), "a CPU", 2**34, bf16=True)
_TINY = GPT2Config(
    vocab_size=256,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Write a recipe with the tiny model, without compilation."""
    path = tmp_path / "tiny.yaml"
    values = {
        "data": {"dir": "x"},
        "model": _TINY.model_dump(),
        "efficiency": {"compile": False},
        "optimizer": {"learning_rate": 2e-3},
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With other load on the machine, two threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_recipe(**sections: Any) -> ResolvedRecipe:
    values = {
        "run": {"device": "cpu"},
        "model": _TINY.model_dump(),
        "data": {"dir": "-", "seq_len": 32},
        "batch": {"micro_batch_size": 4, "global_batch_tokens": 128},
        "efficiency": {"compile": False, "precision": "fp32", "attention": "sdpa"},
    }
    return plain_recipe({**values, **sections})


# The numbers.

_HEAD = {
    "seq_len": 10,
    "micro_batch_size": 4,
    "flops_per_token": 5.0,
    "machine": {"ceilings": {"float32": 1000.0, "bfloat16": 400.0}},
}
_ROWS = [
    TrainingRow(name, "firstlight" if name.startswith("firstlight") else name, tiny_recipe())
    for name in ("firstlight", "firstlight a.b=c", "reference")
]


def run_of(seconds: list[float], peak: int, loss: float = 3.0) -> dict[str, Any]:
    return {
        "first_step_seconds": 9.0,
        "step_seconds": seconds,
        "step_cpu_seconds": [2 * s for s in seconds],
        "losses": [5.0, loss],
        "total_peak_bytes": peak,
        "peak_bytes": peak - 10,
        "chosen": {},
    }


def test_training_bench_rates_are_medians_and_ratios_relative_to_reference() -> None:
    replies = {
        "firstlight": [
            {**run_of([2.0, 2.0, 4.0], 100), "first_step_seconds": 30.0},
            run_of([1.0, 8.0, 1.0], 300, 4.0),
        ],
        "firstlight a.b=c": [run_of([1.0, 1.0, 1.0], 50), run_of([1.0, 1.0, 1.0], 50)],
        "reference": [run_of([4.0, 4.0, 5.0], 400), run_of([4.0, 2.0, 5.0], 400)],
    }
    outcomes = {name: RowOutcome(runs=runs) for name, runs in replies.items()}
    ours, variant, reference = summarize(_ROWS, outcomes, _HEAD)
    # Steps of 1, 1, 2, 2, 4 and 8 seconds, with 40 tokens each.
    assert ours["tokens_per_second"] == 20.0
    assert (ours["tokens_per_second_min"], ours["tokens_per_second_max"]) == (5.0, 40.0)
    assert ours["share_of_ceiling"] == 0.1
    assert ours["cpu_seconds"] == 4.0
    assert (ours["total_peak_bytes"], ours["peak_bytes"]) == (200, 190)
    assert (ours["final_loss"], ours["first_step_seconds"]) == (3.5, 30.0)
    assert reference["tokens_per_second"] == 10.0
    # The first turn is 4 s to 2 s, the second 4 s to 1 s.
    assert ours["speed_ratio"] == 2.0
    assert (ours["speed_ratio_min"], ours["speed_ratio_max"]) == (2.0, 4.0)
    assert (ours["memory_ratio"], variant["memory_ratio"]) == (0.5, 0.125)
    assert (reference["speed_ratio"], reference["memory_ratio"]) == (1.0, 1.0)
    assert variant["speed_ratio"] == 4.0
    assert [row["status"] for row in (ours, variant, reference)] == ["measured"] * 3


def test_training_bench_without_reference_has_no_ratios() -> None:
    outcomes = {
        "firstlight": RowOutcome(runs=[run_of([1.0], 5)]),
        "firstlight a.b=c": RowOutcome(),
        "reference": RowOutcome(problem="killed"),
    }
    ours, waiting, reference = summarize(_ROWS, outcomes, _HEAD)
    assert (ours["status"], ours["speed_ratio"], ours["memory_ratio"]) == ("measured", None, None)
    assert (waiting["status"], waiting["reason"]) == ("waiting", "not measured yet")
    assert (reference["status"], reference["reason"]) == ("failed", "killed")
    outcomes["reference"].runs.append(run_of([2.0], 5))
    reference = summarize(_ROWS, outcomes, _HEAD)[2]
    assert (reference["status"], reference["reason"], reference["speed_ratio"]) == (
        "measured",
        "killed",
        1.0,
    )


# The plan.


def rows_of(bench: TrainingBench) -> list[TrainingRow]:
    return training_rows(bench, plan_steps(bench, "benchmarks training"))


def test_training_bench_defaults_are_gpt2_with_default_settings() -> None:
    bench = TrainingBench(device="cpu", programs=["reference"])
    plan, rows = plan_steps(bench, "benchmarks training"), rows_of(bench)
    assert (plan.name, plan.seq_len, plan.micro_batch_size) == ("gpt2-124m", 1024, 4)
    assert (plan.steps, plan.repeats) == (4, 3)
    assert [row.name for row in rows] == ["firstlight", "reference"]
    recipe = rows[0].recipe
    assert recipe.efficiency == Recipe.model_fields["efficiency"].default
    assert recipe.optimizer == Recipe.model_fields["optimizer"].default
    assert recipe.batch == BatchConfig(global_batch_tokens=4096)
    quick = plan_steps(TrainingBench(device="cpu", quick=True, steps=2), "benchmarks training")
    assert (quick.name, quick.seq_len, quick.steps, quick.repeats) == ("small", 256, 2, 1)


def test_training_bench_recipe_sets_model_optimizer_and_efficiency(model: str) -> None:
    (row,) = rows_of(TrainingBench(model=model, device="cpu", programs=[]))
    assert row.recipe.model == _TINY
    assert row.recipe.efficiency.compile is False
    assert row.recipe.optimizer.learning_rate == 2e-3
    assert row.recipe.data.seq_len == 32


def test_training_bench_each_variant_is_row_with_only_its_keys(model: str) -> None:
    variants = [
        "efficiency.precision=bf16_params",
        "batch.micro_batch_size=1, optimizer.betas=[0.8,0.9],optimizer.learning_rate=3e-4",
        "efficiency.precision=bf16_params",
    ]
    bench = TrainingBench(model=model, device="cpu", programs=[], variants=variants)
    plain, low, other = rows_of(bench)
    assert (low.name, other.name) == tuple(f"firstlight {variant}" for variant in variants[:2])
    assert {low.program, other.program} == {"firstlight"}
    precision = {"precision": "bf16_params"}
    efficiency = plain.recipe.efficiency.model_copy(update=precision)
    assert low.recipe.model_copy(update={"efficiency": plain.recipe.efficiency}) == plain.recipe
    assert low.recipe.efficiency == efficiency
    assert other.recipe.optimizer.betas == [0.8, 0.9]
    assert other.recipe.optimizer.learning_rate == 3e-4
    assert (other.recipe.batch.rows, other.recipe.batch.accumulation(32)) == (1, 4)
    assert other.recipe.efficiency == plain.recipe.efficiency


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "gpt2-125m"}, r"model 'gpt2-125m' is unknown \(did you mean 'gpt2-124m'\?\)"),
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"repeats": -1}, "repeats is -1"),
        ({"seq_len": 1025}, "seq_len 1025 exceeds gpt2-124m's context of 1024"),
        ({"programs": ["trianer"]}, r"program 'trianer' is unknown \(did you mean 'trainer'\?\)"),
        ({"programs": ["x"]}, "program 'x' is unknown: use reference, reference-fp32, pure-bf16"),
        (
            {"model": "llama-110m", "programs": ["pure-bf16"]},
            "program 'pure-bf16' is a loop for GPT-2, but llama-110m is another",
        ),
        ({"variants": ["precision"]}, "--set precision: 'precision' is not section.key=value"),
        ({"variants": ["model.hidden_size=8"]}, "of one of the sections batch, data, efficiency"),
        (
            {"variants": ["efficiency.precison=fp32"]},
            r"^--set efficiency\.precison=fp32: unknown key .*\(did you mean 'precision'\?\)",
        ),
        (
            {"variants": ["batch.global_batch_tokens=8192"]},
            "every row trains 4096 tokens per step in rows of 1024: use --seq-len",
        ),
        ({"variants": ["data.seq_len=512"]}, "every row trains 4096 tokens per step"),
        ({"variants": ["batch.micro_batch_size=3"]}, "4096 is not a multiple of"),
        (
            {"variants": ["efficiency.optimizer_in_backward=true,batch.micro_batch_size=1"]},
            "--set .*can't accumulate gradients",
        ),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_training_bench_invalid_options_raise_config_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(TrainingBench(**({"device": "cpu", "programs": []} | options)))


@pytest.mark.parametrize(
    "bf16, faster, chosen",
    [
        (True, True, ["reference"]),
        (True, False, ["reference", "reference-fp32"]),
        (False, True, ["reference", "reference-fp32"]),
    ],
)
def test_training_bench_without_fast_bf16_adds_fp32_reference(
    bf16: bool, faster: bool, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "bf16_is_faster", lambda device: faster)
    hardware = Hardware(torch.device("cpu"), "a CPU", 2**34, bf16=bf16)
    assert choose_programs(None, hardware, True, "m") == chosen
    assert choose_programs(None, hardware, False, "m") == []


def test_training_bench_trainer_is_omitted_if_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_programs(list(PROGRAMS), _CPU, True, "m") == list(PROGRAMS[:3])
    said = capsys.readouterr().err
    assert said == "transformers and accelerate not installed: the row 'trainer' is skipped\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_programs(["trainer", "trainer"], _CPU, False, "m") == ["trainer"]


# The bare loops.


def weights_of(plain: PlainGPT2) -> dict[str, torch.Tensor]:
    """Return the same model's weights under firstlight's names."""
    names = {
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn",
        "attention_out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp_in": "mlp.c_fc",
        "mlp_out": "mlp.c_proj",
    }
    first = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
    result = {}
    for name, value in plain.state_dict().items():
        parts = name.split(".")
        if parts[0] == "head":
            continue
        if parts[0] == "layers":
            inside, kind = parts[2], parts[3]
            matrix = "norm" not in inside and kind == "weight"
            new = f"transformer.h.{parts[1]}.{names[inside]}.{kind}"
            result[new] = value.T.clone() if matrix else value.clone()
        else:
            result[f"transformer.{first[parts[0]]}.{parts[1]}"] = value.clone()
    return result


def a_batch() -> Batch:
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(3))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 128)


def test_training_bench_bare_loop_in_fp32_matches_firstlight_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(5)
    theirs = PlainGPT2(_TINY)
    # Gradients that are large enough to be clipped, by a different factor in each step.
    nn.init.normal_(theirs.head.weight, 0.0, 0.5)
    monkeypatch.setattr("benchmarks.programs.PlainGPT2", lambda config: theirs)
    loop = autocast_loop(_TINY, _CPU.device, bf16=False, compile_model=False)
    recipe = tiny_recipe()
    ours = empty_model(_TINY)
    ours.load_state_dict(weights_of(theirs), strict=False)
    ours.finish_loading()
    program = TrainingProgram(recipe, ours, _CPU)
    batch = a_batch()
    norms = []
    for step in range(3):
        rate = recipe.optimizer.learning_rate * (step + 1) / 4
        loss = loop(batch.input_ids, batch.labels, rate)
        result = program.step([batch], (step + 1) / 4)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        norms.append(result.grad_norm)
    assert min(norms) > 1
    found = ours.state_dict()
    for name, value in weights_of(theirs).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6, msg=name)


def test_training_bench_bare_loop_pads_vocabulary_to_64() -> None:
    padded = PlainGPT2(_TINY.model_copy(update={"vocab_size": 211}))
    assert padded.head.weight.shape == (256, 16)
    assert padded.head.weight is padded.tokens.weight


@pytest.mark.usefixtures("one_thread")
def test_training_bench_loops_learn_and_differ_only_in_rounding() -> None:
    batch = a_batch()
    losses = {}
    for name in ("fp32", "bf16", "pure"):
        torch.manual_seed(5)
        loop = (
            pure_bf16_loop(_TINY, _CPU.device, compile_model=False)
            if name == "pure"
            else autocast_loop(_TINY, _CPU.device, bf16=name == "bf16", compile_model=False)
        )
        losses[name] = [loop(batch.input_ids, batch.labels, 5e-3) for _ in range(8)]
        assert losses[name][-1] < losses[name][0] - 0.3, name
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-3)
    assert losses["pure"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["bf16"] != losses["fp32"]


# One run.

#: A learning rate that shows progress within a few steps, in bf16 too.
_FAST = {"optimizer": {"learning_rate": 5e-3}}


@pytest.fixture
def request_of(tmp_path: Path) -> dict[str, Any]:
    write_tokens(tmp_path / "tokens", 3000, _TINY.vocab_size)
    return {
        "program": "firstlight",
        "recipe": tiny_recipe(**_FAST).model_dump(),
        "micro_batch_size": 4,
        "data": str(tmp_path / "tokens"),
        "warmup_steps": 2,
        "steps": 3,
        "threads": 1,
    }


def record_compilation(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Record the functions to be compiled, without compiling them."""
    compiled: list[nn.Module] = []

    def compile_nothing(module: nn.Module, **_: Any) -> nn.Module:
        # Functions that libraries compile during their import are ignored.
        if isinstance(module, nn.Module):
            compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return compiled


# torch's compiler warns about torch's own scripts when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.usefixtures("one_thread")
def test_training_bench_programs_train_on_same_rows(
    request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = record_compilation(monkeypatch)
    runs = {
        program: training_once({**request_of, "program": program})
        for program in ("firstlight", "reference", "reference-fp32", "pure-bf16")
    }
    cut = tiny_recipe(batch={"micro_batch_size": 1, "global_batch_tokens": 128}, **_FAST)
    runs["cut"] = training_once({**request_of, "recipe": cut.model_dump()})
    assert len(compiled) == 3
    for run in runs.values():
        assert len(run["losses"]) == 5
        assert len(run["step_seconds"]) == len(run["step_cpu_seconds"]) == 3
        assert run["losses"][-1] < run["losses"][0]
        assert 0 <= run["peak_bytes"] < run["total_peak_bytes"]
        # Other weights, but the same rows.
        assert run["losses"] == pytest.approx(runs["firstlight"]["losses"], rel=2e-2)
    assert runs["cut"]["losses"] == pytest.approx(runs["firstlight"]["losses"], rel=2e-6)
    assert runs["cut"]["chosen"]["batch.gradient_accumulation_steps"] == 4
    assert runs["firstlight"]["chosen"] == {
        "batch.micro_batch_size": 4,
        "batch.gradient_accumulation_steps": 1,
        "efficiency.precision": "fp32",
        "efficiency.attention": "sdpa",
        "efficiency.compile": False,
        "efficiency.loss_chunk_tokens": 0,
    }
    assert runs["reference"]["chosen"] == {}
    assert runs["reference"]["losses"] != runs["reference-fp32"]["losses"]


@pytest.mark.filterwarnings("ignore")
def test_training_bench_trainer_runs_its_own_loop(
    request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    compiled = record_compilation(monkeypatch)
    run = training_once({**request_of, "program": "trainer"})
    assert len(compiled) == 1
    assert len(run["losses"]) == 5
    assert len(run["step_seconds"]) == 3
    assert run["losses"][-1] < run["losses"][0] < 5.5


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("program", ["firstlight", "reference-fp32"])
def test_training_bench_profiled_steps_are_split_by_phase_and_operator(
    request_of: dict[str, Any], program: str
) -> None:
    plain = training_once({**request_of, "program": program, "compile": False})
    further = {"phase_steps": 1, "profiled_steps": 1, "program": program, "compile": False}
    run = training_once({**request_of, **further})
    assert (plain["phases"], plain["operators"]) == ([], [])
    assert run["losses"] == plain["losses"]
    assert len(run["step_seconds"]) == 3
    shares = phase_shares([run])
    assert shares is not None
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1)
    (counted,) = run["operators"]
    # Two layers with four products each, and the head: once forward, twice backward.
    products = ("aten::mm", "aten::addmm", "aten::bmm")
    assert sum(counted[name]["calls"] for name in products if name in counted) >= 3 * 9
    rows = operator_shares([run])
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert 0.8 < sum(row["share"] for row in rows) <= 1
    assert torch.autograd.backward.__name__ == "backward"


def test_training_bench_phases_separate_forward_backward_and_update(
    request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    cut = tiny_recipe(batch={"micro_batch_size": 1, "global_batch_tokens": 128})
    run = training_once({**request_of, "recipe": cut.model_dump(), "phase_steps": 1})
    # The clock is read at the start and end of the step and of each of its four passes.
    assert run["phases"] == [{"forward": 4.0, "backward": 4.0, "update": 1.0}]


# The benchmark.


class FakeProcesses:
    """Replaces `ask`: records each request and environment, and answers with a run, or as
    configured.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.seen: list[tuple[dict[str, Any], Mapping[str, str]]] = []

    def __call__(
        self, module: str, request: dict[str, Any], environment: Mapping[str, str]
    ) -> dict[str, Any]:
        assert module == "benchmarks.training"
        assert Path(request["data"]).exists()
        self.seen.append((request, environment))
        found = self.answers.get(request["program"], run_of([1.0], 2**30))
        if isinstance(found, BaseException):
            raise found
        result: dict[str, Any] = found
        return result


@pytest.fixture
def quick_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that no machine reaches: the second measurement of bf16 is the best one."""
    rates = {"torch.float32": [3e9, 2e9], "torch.bfloat16": [4e9, 6e9]}
    monkeypatch.setattr(
        training, "measured_matmul_flops", lambda device, dtype: rates[str(dtype)].pop(0)
    )
    monkeypatch.setattr("firstlight.bench.steps.find_hardware", lambda device: _CPU)


@pytest.mark.usefixtures("quick_ceiling")
def test_training_bench_alternates_rows_in_their_environments(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRAINING:
        monkeypatch.delenv(name, raising=False)
    processes = FakeProcesses({"pure-bf16": {"error": {"type": "Failed", "message": "no"}}})
    monkeypatch.setattr(training, "ask", processes)
    bench = TrainingBench(
        model=model,
        repeats=2,
        programs=["reference", "pure-bf16"],
        variants=["efficiency.precision=fp32"],
    )
    results: list[dict[str, Any]] = []
    done = bench_training(bench, results.append)
    shown = [
        (
            request["program"],
            request["recipe"]["efficiency"]["precision"],
            environment.get("GOMP_SPINCOUNT"),
        )
        for request, environment in processes.seen
    ]
    turn = [
        ("firstlight", "auto", "5000"),
        ("firstlight", "fp32", "5000"),
        ("reference", "auto", None),
    ]
    # A failed row is not tried again.
    assert shown == [*turn, ("pure-bf16", "auto", None), *turn]
    assert [result["complete"] for result in results] == [False] * 7 + [True]
    assert done["machine"]["ceilings"] == {"float32": 3e9, "bfloat16": 6e9}
    assert [row["status"] for row in done["rows"]] == ["measured"] * 3 + ["failed"]
    (caches,) = {environment["TORCHINDUCTOR_CACHE_DIR"] for _, environment in processes.seen}
    assert not Path(caches).parent.exists()


@pytest.mark.usefixtures("quick_ceiling")
def test_training_bench_other_programs_may_use_same_environment(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRAINING:
        monkeypatch.delenv(name, raising=False)
    processes = FakeProcesses({})
    monkeypatch.setattr(training, "ask", processes)
    bench = TrainingBench(model=model, repeats=1, programs=["reference"], same_environment=True)
    bench_training(bench, lambda _: None)
    first, second = (dict(environment) for _, environment in processes.seen)
    assert first == second
    assert second["GOMP_SPINCOUNT"] == "5000"


@pytest.mark.usefixtures("quick_ceiling")
def test_training_bench_interrupted_keeps_finished_measurements(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ask", FakeProcesses({"reference": KeyboardInterrupt()}))
    out = tmp_path / "out"
    arguments = ["--model", model, "--programs", "reference", "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(training_command, arguments)
    assert result.exit_code != 0
    assert "firstlight  " in result.stdout
    assert "reference: waiting: not measured yet" in result.stdout
    written = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert written["complete"] is False
    assert [row["status"] for row in written["rows"]] == ["measured", "waiting"]
    assert (out / "training.png").read_bytes() == draw(written)


@pytest.mark.usefixtures("quick_ceiling")
def test_training_bench_table_shows_measured_values_and_choices(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    ours = {**run_of([0.5], 2**30), "chosen": {"efficiency.precision": "fp32"}}
    processes = FakeProcesses({"firstlight": ours, "reference": run_of([1.0], 2**31)})
    monkeypatch.setattr(training, "ask", processes)
    arguments = ["--model", model, "--programs", "reference", "--repeats", "1", "--json"]
    result = CliRunner().invoke(training_command, arguments)
    assert result.exit_code == 0, result.stderr
    said = result.stderr
    # 4 x 32 tokens in half a second.
    assert "firstlight       256  (256-256)" in said
    assert (
        "2.00x  (2.00-2.00)        1.00     1.00 GiB        0.50x      3.0000       9.0 s" in said
    )
    assert "0.00 TFLOP/s in float32, 0.00 TFLOP/s in bfloat16" in said
    assert "firstlight: efficiency.precision fp32" in said
    assert "--same-environment removes that difference" in said
    assert json.loads(result.stdout)["rows"][0]["speed_ratio"] == 2.0


def test_training_bench_command_runs_real_benchmark(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "measured_matmul_flops", lambda device, dtype: 1e12)
    arguments = "--micro-batch-size 2 --seq-len 16 --steps 1 --repeats 1 --device cpu --json"
    result = CliRunner().invoke(
        training_command,
        [
            "--model",
            model,
            "--programs",
            "",
            "--profile",
            *arguments.split(),
            "--set",
            "batch.micro_batch_size=1",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["complete"] is True
    plain, cut = found["rows"]
    assert (plain["status"], cut["status"]) == ("measured", "measured"), found["rows"]
    assert cut["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-5)
    assert plain["share_of_ceiling"] == pytest.approx(
        plain["tokens_per_second"] * found["flops_per_token"] / 1e12
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "training-operators.png",
        "training.json",
        "training.png",
    ]
    assert sum(plain["phases"].values()) == pytest.approx(1)
    assert "firstlight: operators" in result.stderr
    assert "aten::addmm" in result.stderr
