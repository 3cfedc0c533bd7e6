"""Tests of `firstlight bench methods` with a model of about ten thousand parameters."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.bench import methods
from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.methods import (
    ALONE,
    LADDER,
    PLAIN,
    PROCESSES,
    TIME_IS_UP,
    WRITTEN_OUT,
    MethodOutcome,
    MethodRow,
    MethodRuns,
    MethodsWork,
    accumulation,
    alone_rows,
    changes_up_to,
    child_environment,
    choose_rows,
    draw,
    ladder_rows,
    larger_batch,
    plain_recipe,
    processes_here,
    recipe_keys,
    summarize,
    tables_of,
    why_skipped,
)
from firstlight.bench.models import MODELS, SMALL, find_model
from firstlight.bench.rows import MethodsBench
from firstlight.bench.steps import StepsPlan, Tokens, plan_steps, write_out, write_tokens
from firstlight.bench.steps import measure as training_once
from firstlight.cli.main import main
from firstlight.errors import ConfigError, InputError
from firstlight.hardware import fresh_process
from firstlight.hardware.device import Hardware
from firstlight.hardware.fresh_process import ForkServer, ask, ask_ranks, error_of, signals_waiting
from firstlight.hardware.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from firstlight.models import GPT2Config, empty_model
from firstlight.models.gpt2 import GPT2Attention
from firstlight.models.language_model import InitConfig
from firstlight.recipe import Recipe, ResolvedRecipe, parse_resolved_recipe
from firstlight.recipe.conflicts import require_combination
from firstlight.recipe.load import changed_recipe

pytestmark = pytest.mark.usefixtures("forked_processes")

_CPU = Hardware(torch.device("cpu"), "a CPU", 2**34, bf16=True)
_GPU = Hardware(torch.device("cuda"), "a GPU", 2**34, bf16=True)
_TINY = GPT2Config(
    vocab_size=211,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A recipe with the tiny model."""
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps({"data": {"dir": "x"}, "model": _TINY.model_dump()}))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Write three thousand tokens of the standard library."""
    path = tmp_path / "tokens.safetensors"
    write_tokens(path, 3000, _TINY.vocab_size)
    return path


@pytest.fixture
def work(tokens: Path) -> MethodsWork:
    """Return a request for two steps of the tiny model, one of them timed."""
    plain = plain_recipe(_TINY, "cpu", 16, 4)
    request = {"data": str(tokens), "warmup_steps": 1, "steps": 1}
    return MethodsWork(plain, request, tokens.parent / "caches", deadline=None)


def parsed(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> ResolvedRecipe:
    return parse_resolved_recipe(changed_recipe(plain, recipe_keys(changes)))


def plan_of(bench: MethodsBench) -> StepsPlan:
    plan = plan_steps(bench, "bench methods")
    assert tables_of(bench, plan)
    return plan


def all_rows(hardware: Hardware) -> list[MethodRow]:
    return [*alone_rows(4, 16, hardware), *ladder_rows(4, hardware)[1:]]


# The rows.


@pytest.mark.parametrize("hardware", [_CPU, _GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_bench_rows_are_recipes_that_training_accepts(name: str, hardware: Hardware) -> None:
    plain = plain_recipe(find_model(name), str(hardware.device), 256, 8)
    ladder = ladder_rows(8, hardware)
    every = [(row, row.changes) for row in alone_rows(8, 256, hardware)]
    skipped = [row.name for row in ladder if why_skipped(row, hardware, 8, quick=False)]
    every += [(row, changes_up_to(ladder, rung, skipped)) for rung, row in enumerate(ladder)]
    refused = []
    for row, changes in every:
        recipe = parsed(plain, changes)
        assert recipe.batch.accumulation(256) >= 1
        if why_skipped(row, hardware, 8, quick=False):
            continue
        try:
            require_combination(recipe, hardware)
        except ConfigError:
            refused.append(row.name)
    # The layers have too few weights for fp8 to be worthwhile.
    small = (SMALL, "gpt2-124m", "llama-110m", "smollm2-135m")
    assert refused == (["fp8"] if hardware is _GPU and name in small else [])


@pytest.mark.parametrize("hardware", [_CPU, _GPU], ids=["cpu", "cuda"])
def test_bench_rows_have_unique_names(hardware: Hardware) -> None:
    names = [row.name for row in all_rows(hardware)]
    assert len(set(names)) == len(names)
    assert not {ALONE, LADDER} & set(names)


def test_plain_row_uses_no_method() -> None:
    recipe = parsed(plain_recipe(find_model(SMALL), "cpu", 256, 8), PLAIN.changes)
    efficiency = recipe.efficiency
    assert (efficiency.precision, efficiency.attention) == ("fp32", "plain")
    assert (recipe.optimizer.name, recipe.optimizer.implementation) == ("adamw", "for-loop")
    assert recipe.batch.accumulation(256) == 1
    assert (efficiency.compile, efficiency.loss_chunk_tokens) == (False, 0)
    chosen = {"precision", "attention", "compile", "loss_chunk_tokens"}
    rest = efficiency.model_dump(exclude=chosen)
    assert rest == Recipe.model_fields["efficiency"].default.model_dump(exclude=chosen)


@given(st.integers(1, 512))
def test_accumulation_row_keeps_rows_per_step_and_large_batch_doubles_them(rows: int) -> None:
    cut, large = accumulation(rows), larger_batch(rows)
    micro = cut["batch.micro_batch_size"]
    assert micro * cut["batch.gradient_accumulation_steps"] == rows
    assert micro < rows or rows == 1
    assert (large["batch.micro_batch_size"], large["batch.gradient_accumulation_steps"]) == (
        2 * rows,
        1,
    )


def test_ladder_rows_follow_order_of_guide() -> None:
    plain = plain_recipe(find_model("gpt2-124m"), "cuda", 1024, 4)
    ladder = ladder_rows(4, _GPU)
    assert [row.name for row in ladder] == (
        "baseline +mask-on-the-fly +tf32 +fused-adamw +pinned-memory +bf16 +torch-classes "
        "+flash-attention +compile +padded-vocabulary +larger-batch +ddp"
    ).split()
    written = [changes_up_to(ladder, rung, ())[WRITTEN_OUT] for rung in range(len(ladder))]
    assert written == [("mask", "layers"), *[("layers",)] * 5, *[()] * 6]
    recipes = [parsed(plain, changes_up_to(ladder, rung, ())) for rung in range(len(ladder))]
    assert [one.efficiency.precision for one in recipes] == ["fp32"] * 2 + ["tf32"] * 3 + [
        "bf16"
    ] * 7
    assert [one.data.pin_memory for one in recipes] == [False] * 4 + [True] * 8
    top = recipes[9]
    assert (top.batch.micro_batch_size, top.batch.gradient_accumulation_steps) == (4, 1)
    assert top.optimizer.implementation == "fused"
    assert top.efficiency.model_dump() == {
        **Recipe.model_fields["efficiency"].default.model_dump(),
        "precision": "bf16",
        "attention": "sdpa",
        "loss_chunk_tokens": 0,
        "vocab_multiple": 64,
        "compile": True,
    }
    assert (recipes[10].batch.micro_batch_size, recipes[10].efficiency) == (8, top.efficiency)


def test_ladder_rows_unsupported_on_machine_give_reason() -> None:
    def reasons(ladder: list[MethodRow]) -> dict[str, str]:
        found = {row.name: why_skipped(row, _CPU, 4, quick=False) for row in ladder}
        return {name: reason for name, reason in found.items() if reason}

    on_cpu = reasons(ladder_rows(4, _CPU))
    assert on_cpu.pop("+ddp") == "needs two threads, but torch uses only one here"
    assert on_cpu == {
        "+tf32": "needs a GPU: CPUs have no TF32",
        "+pinned-memory": "needs a GPU: batches are not copied on a CPU",
    }
    llama = ladder_rows(4, _CPU, is_gpt2=False)
    skipped = set(reasons(llama)) - set(on_cpu)
    assert skipped == {"+mask-on-the-fly", "+torch-classes", "+ddp"}
    assert llama[0].changes[WRITTEN_OUT] == ()


def test_ladder_last_row_uses_one_process_per_gpu_or_two_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for threads, processes in ((1, 1), (2, 2), (8, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert processes_here(_CPU) == processes
    assert processes_here(_GPU) == 3
    one, several = (ladder_rows(4, _GPU, processes=count)[-1] for count in (1, 3))
    assert why_skipped(one, _GPU, 4, quick=False) == "needs a second GPU here"
    assert why_skipped(several, _GPU, 4, quick=False) == ""
    # Not cuda:1, because the processes can't all use the same GPU.
    expected = {"run.device": "cuda", "distributed.engine": "ddp", PROCESSES: 3}
    assert several.changes == expected
    assert set(recipe_keys(several.changes)) == {"run.device", "distributed.engine"}


def test_ladder_gpu_without_bf16_uses_fp16_and_skips_tf32() -> None:
    old = Hardware(torch.device("cuda"), "an old GPU", 2**34, bf16=False)
    rows = {row.name: row for row in ladder_rows(8, old)}
    assert "+fp16" in rows
    reason = why_skipped(rows["+tf32"], old, 4, quick=False)
    assert reason == "needs a GPU with compute capability 8.0: this one has no TF32"


def test_written_out_model_computes_same_result() -> None:
    config = _TINY
    model, written = (empty_model(config, 1) for _ in range(2))
    for one in (model, written):
        one.init_weights(torch.Generator().manual_seed(1), InitConfig())
    write_out(written, ("mask", "layers"), config.max_position_embeddings)
    changed = {type(module).__name__ for module in written.modules()}
    assert {"WrittenOutNorm", "WrittenOutMLP"} <= changed
    assert not {"LayerNorm", "GPT2MLP"} & changed
    layers = [module for module in written.modules() if isinstance(module, GPT2Attention)]
    assert len({id(layer.attend) for layer in layers}) == len(layers) == config.num_hidden_layers
    input_ids = torch.arange(12).view(2, 6) % config.vocab_size
    losses = [one(input_ids, input_ids) for one in (model, written)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for weight, other in zip(model.parameters(), written.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-5)


@given(st.sets(st.integers(0, 9)), st.integers(0, 9))
def test_ladder_row_includes_keys_of_previous_rows(fallen: set[int], rung: int) -> None:
    ladder = ladder_rows(8, _CPU)
    left_out = {ladder[i].name for i in fallen}
    changes = changes_up_to(ladder, rung, left_out)
    expected: dict[str, Any] = {}
    for i in range(rung + 1):
        if i == rung or i not in fallen:
            expected.update(ladder[i].changes)
    assert changes == expected
    if rung and rung - 1 not in fallen:
        below = changes_up_to(ladder, rung - 1, left_out)
        assert below.items() <= (changes | below).items()
        assert set(below) <= set(changes)


def test_rows_unsupported_on_cpu_give_reason() -> None:
    reasons = {row.name: why_skipped(row, _CPU, 4, quick=True) for row in all_rows(_CPU)}
    skipped = {name for name, reason in reasons.items() if reason}
    assert skipped - {"fp16"} == set(
        "offload tf32 fp8 paged-adamw8bit efficient cudnn flex compile-cudagraphs "
        "adamw8bit-torchao compile-regional compile-budget qlora foreach flash math "
        "blockwise +tf32 +pinned-memory +ddp".split()
    )
    assert reasons["offload"] == "needs a GPU: activations on a CPU are already in host memory"
    assert reasons["compile-budget"] == "skipped by --quick"
    on_gpu = {row.name for row in all_rows(_GPU) if why_skipped(row, _GPU, 4, quick=False)}
    assert on_gpu == {"huge-pages", "+ddp"}
    one_row = {row.name for row in all_rows(_CPU) if why_skipped(row, _CPU, 1, quick=False)}
    assert "accumulation" in one_row


# The plan.


def test_bench_defaults_are_gpt2_and_small_model_with_quick() -> None:
    plan = plan_of(MethodsBench(device="cpu"))
    assert (plan.name, plan.seq_len, plan.micro_batch_size) == ("gpt2-124m", 1024, 4)
    assert (plan.steps, plan.repeats) == (4, 3)
    quick = plan_of(MethodsBench(device="cpu", quick=True, steps=2))
    assert (quick.name, quick.seq_len, quick.steps, quick.repeats) == (SMALL, 256, 2, 1)


def test_find_model_recipe_without_vocab_size_uses_gpt2_vocabulary(
    model: Path, tmp_path: Path
) -> None:
    assert find_model(str(model)) == _TINY
    plan = plan_of(MethodsBench(model=str(model), device="cpu"))
    assert plan.seq_len == _TINY.max_position_embeddings
    path = tmp_path / "open.yml"
    path.write_text("data: {dir: x}\nmodel: {model_type: gpt2}\n", encoding="utf-8")
    assert find_model(str(path)).vocab_size == 50257


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "gpt2-125m"}, r"model 'gpt2-125m' is unknown \(did you mean 'gpt2-124m'\?\)"),
        ({"model": "huge"}, "model 'huge' is unknown: use small, gpt2-124m, .* or a RECIPE.yaml"),
        ({"model": "nothing.yaml"}, "recipe nothing.yaml does not exist"),
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"repeats": -1}, "repeats is -1"),
        ({"seq_len": 1025}, "seq_len 1025 exceeds gpt2-124m's context of 1024"),
        ({"rows": ["bf61"]}, r"row 'bf61' is unknown \(did you mean 'bf16'\?\)"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_bench_methods_invalid_options_raise_config_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(MethodsBench(**({"device": "cpu"} | options)))


def test_find_model_recipe_without_model_raises_config_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("data: {dir: x}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"empty\.yaml has no model: add a `model:` section"):
        find_model(str(path))


@pytest.mark.parametrize(
    "names, alone, ladder",
    [
        (["sdpa", "bf16"], ["plain", "bf16", "sdpa"], []),
        (["+tf32"], [], ["baseline", "+mask-on-the-fly", "+tf32"]),
        (["plain"], ["plain"], []),
        (["fused", "+mask-on-the-fly"], ["plain", "fused"], ["baseline", "+mask-on-the-fly"]),
    ],
)
def test_chosen_rows_include_their_baselines(
    names: list[str], alone: list[str], ladder: list[str]
) -> None:
    tables = {ALONE: alone_rows(4, 256, _CPU), LADDER: ladder_rows(4, _CPU)}
    chosen = choose_rows(tables, names)
    assert [row.name for row in chosen[ALONE]] == alone
    assert [row.name for row in chosen[LADDER]] == ladder


def test_choose_rows_accepts_table_names() -> None:
    tables = {ALONE: alone_rows(4, 256, _CPU), LADDER: ladder_rows(4, _CPU)}
    assert choose_rows(tables, []) == tables
    assert choose_rows(tables, [LADDER]) == {ALONE: [], LADDER: tables[LADDER]}
    assert choose_rows(tables, [ALONE]) == {ALONE: tables[ALONE], LADDER: []}


# The data.


def test_bench_tokens_come_from_standard_library_and_are_reproducible(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        write_tokens(file, 20_000, 101)
    assert files[0].read_bytes() == files[1].read_bytes()
    arrays = safetensors.numpy.load_file(files[0])
    assert arrays["tokens"].shape == (20_000,)
    assert set(arrays["tokens"]) == set(range(101))
    # Every document ends with the last id.
    starts = arrays["starts"]
    assert starts[0] == 0
    assert len(starts) > 20
    assert set(arrays["tokens"][starts[1:] - 1]) == {100}


def test_bench_tokens_short_library_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    with pytest.raises(InputError, match="source of Python's standard library"):
        write_tokens(tmp_path / "tokens", 10, 50)
    (library / "a.py").write_text("x = 1\ndef f():\n  pass\n", encoding="utf-8")
    write_tokens(tmp_path / "tokens", 30, 50)
    arrays = safetensors.numpy.load_file(tmp_path / "tokens")
    # `x`, ` `, `=`, ` `, `1`, newline, end | `def`, ` `, `f`, `(`, `)`, `:`, `\n  `, `pass`, ...
    assert arrays["starts"].tolist() == [0, 7, 17, 24]
    assert arrays["tokens"][17:30].tolist() == arrays["tokens"][:13].tolist()


def test_tokens_batch_rows_are_consecutive_and_documents_numbered(tmp_path: Path) -> None:
    stream = np.arange(40, dtype=np.int64)
    arrays = {"tokens": stream, "starts": np.array([0, 5, 16], dtype=np.int64)}
    path = tmp_path / "tokens"
    path.write_bytes(safetensors.numpy.save(arrays))
    batch = Tokens(path, 8).batch(1, 2, documents=True)
    assert batch.input_ids.tolist() == [list(range(8, 16)), list(range(16, 24))]
    assert batch.labels.tolist() == [list(range(9, 17)), list(range(17, 25))]
    assert batch.num_valid == 16
    assert batch.document_ids is not None
    # Token 15 ends a document and is also the first input of the next document.
    assert batch.document_ids.tolist() == [[0] * 7 + [1], [0] * 8]
    assert Tokens(path, 8).batch(0, 1, documents=False).document_ids is None


# One row.


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Restore the number of threads. Runs use one, because two wait for each other under load."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def request_of(work: MethodsWork, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "resolved": True,
        "recipe": parsed(work.plain, changes).model_dump(),
        "data": work.request["data"],
        "warmup_steps": 2,
        "steps": 3,
        "threads": 1,
    }


@pytest.mark.usefixtures("one_thread")
def test_methods_preserving_result_end_at_plain_loss(work: MethodsWork) -> None:
    rows = {row.name: row for row in all_rows(_CPU)}
    plain = training_once(request_of(work, {}))
    assert len(plain["losses"]) == 5
    assert len(plain["step_seconds"]) == 3
    assert plain["losses"][-1] < plain["losses"][0]
    for name in ("accumulation", "checkpointing-full", "fused", "sdpa", "chunked-loss", "vocab-64"):
        losses = training_once(request_of(work, rows[name].changes))["losses"]
        assert losses == pytest.approx(plain["losses"], rel=2e-6), name
    low = training_once(request_of(work, rows["bf16"].changes))["losses"]
    assert low == pytest.approx(plain["losses"], rel=2e-3)
    assert low != plain["losses"]


@pytest.mark.usefixtures("one_thread")
def test_methods_changing_result_have_different_losses(work: MethodsWork) -> None:
    tokens = Path(work.request["data"])
    arrays = safetensors.numpy.load_file(tokens)
    arrays["starts"] = np.arange(0, 3000, 7)
    tokens.write_bytes(safetensors.numpy.save(arrays))
    rows = {row.name: row for row in all_rows(_CPU)}
    plain = training_once(request_of(work, {}))["losses"]
    for name in ("larger-batch", "lora", "document-masking"):
        losses = training_once(request_of(work, rows[name].changes))["losses"]
        assert losses != pytest.approx(plain, rel=2e-6), name


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_ladder_last_row_two_processes_match_one_with_both_batches(
    work: MethodsWork,
) -> None:
    torch.set_num_threads(1)
    ddp = ladder_rows(4, _CPU, processes=2)[-1]
    found = work.measure(ddp.changes, huge_pages=False)
    one = work.measure(larger_batch(4), huge_pages=False)
    assert len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert found["losses"] != pytest.approx(work.measure({}, huge_pages=False)["losses"], rel=1e-6)
    assert len(found["step_seconds"]) == 1
    assert found["peak_bytes"] > 0


def test_ask_ranks_failed_rank_reports_cause_not_lost_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Mapping[str, str]] = []
    gone, cause = error_of("RankError", "rank 1 has gone"), error_of("Failed", "MemoryError")
    results: list[dict[str, Any]] = [gone, cause]

    def all_of(
        module: str, request: object, environments: list[Mapping[str, str]], seconds: float | None
    ) -> list[dict[str, Any]]:
        seen.extend(environments)
        return results

    monkeypatch.setattr(fresh_process, "_ask_all", all_of)
    assert ask_ranks("m", {}, {"A": "b"}, 2) == cause
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["A"]) for one in seen] == [
        ("0", "0", "2", "b"),
        ("1", "1", "2", "b"),
    ]
    assert len({one["MASTER_PORT"] for one in seen}) == 1
    results[:] = [{"x": 1}, {"x": 2}]
    assert ask_ranks("m", {}, {}, 2) == {"x": 1}


def test_recipe_steps_refused_by_training_raise_config_error(work: MethodsWork) -> None:
    """`fresh_process.answer` converts the error to a result."""
    changes = {"efficiency.optimizer_in_backward": True, **accumulation(4)}
    with pytest.raises(ConfigError, match="can't accumulate gradients"):
        training_once(request_of(work, changes))


def test_peak_resident_bytes_after_reset_excludes_earlier_peak() -> None:
    level = resident_bytes()
    # Allocated by the system, because the heap may have this much free memory left from other
    # tests.
    with mmap.mmap(-1, 200_000_000) as large:
        for _ in range(200):
            large.write(bytes(1_000_000))
    # Linux counts pages in batches per core, and reclaims some pages from an idle process.
    assert peak_resident_bytes() >= level + 190_000_000
    reset_peak()
    assert peak_resident_bytes() < level + 100_000_000


# All rows.

_RUN = {
    "first_step_seconds": 9.0,
    "step_seconds": [2.0],
    "losses": [5.0, 4.0],
    "peak_bytes": 1000,
    "total_peak_bytes": 3000,
}


class FakeProcesses:
    """Replacement for `ask` that records each request. It returns the entry in `answers` for the
    first changed key that has one, otherwise a successful run.
    """

    def __init__(self, answers: Mapping[tuple[str, Any], dict[str, Any]]) -> None:
        self.answers = answers
        self.seen: list[tuple[dict[str, Any], Mapping[str, str]]] = []

    def __call__(
        self,
        module: str,
        request: Mapping[str, Any],
        environment: Mapping[str, str],
        seconds: float | None,
    ) -> dict[str, Any]:
        assert module == "firstlight.bench.steps"
        self.seen.append((request["recipe"], environment))
        for (name, value), answer in self.answers.items():
            section, key = name.split(".")
            if request["recipe"][section][key] == value:
                return answer
        return _RUN


def run_rows(
    work: MethodsWork,
    monkeypatch: pytest.MonkeyPatch,
    processes: FakeProcesses,
    tables: Mapping[str, list[MethodRow]],
    repeats: int = 1,
) -> MethodRuns:
    monkeypatch.setattr(methods, "ask", processes)
    runs = MethodRuns(tables)
    runs.measure_all(work, repeats, lambda: None)
    return runs


def test_bench_runner_alternates_rows_and_runs_shared_rows_once(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        ALONE: [
            PLAIN,
            MethodRow("accumulation", accumulation(4)),
            MethodRow("huge", huge_pages=True),
        ],
        LADDER: [PLAIN, MethodRow("+accumulation", accumulation(4))],
    }
    processes = FakeProcesses({})
    runner = run_rows(work, monkeypatch, processes, tables, repeats=2)
    shown = [
        (recipe["batch"]["micro_batch_size"], environment.get("THP_MEM_ALLOC_ENABLE"))
        for recipe, environment in processes.seen
    ]
    assert shown == 2 * [(4, None), (1, None), (4, "1")]
    assert runner.outcomes[f"{ALONE}: accumulation"] is runner.outcomes[f"{LADDER}: +accumulation"]
    assert all(len(outcome.runs) == 2 for outcome in runner.outcomes.values())


def test_bench_runner_failed_row_is_not_retried_and_ladder_continues(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = [row for row in ladder_rows(4, _CPU) if not row.needs_gpu][:5]
    processes = FakeProcesses(
        {
            ("efficiency.precision", "bf16"): error_of("Failed", "killed by signal 9"),
            ("efficiency.precision", "fp16"): error_of("Failed", "MemoryError: no"),
        }
    )
    tables = {ALONE: [PLAIN, MethodRow("fp16", {"efficiency.precision": "fp16"})], LADDER: ladder}
    runner = run_rows(work, monkeypatch, processes, tables, repeats=2)
    killed, fp16 = runner.outcomes[f"{LADDER}: +bf16"], runner.outcomes[f"{ALONE}: fp16"]
    assert (killed.problem, killed.refused) == ("killed by signal 9", False)
    assert (fp16.problem, fp16.refused) == ("MemoryError: no", False)
    assert [recipe["efficiency"]["precision"] for recipe, _ in processes.seen].count("bf16") == 1
    after = runner.outcomes[f"{LADDER}: +torch-classes"]
    assert [row.name for row in ladder[3:]] == ["+bf16", "+torch-classes"]
    assert after.changes == {**ladder[0].changes, **ladder[2].changes, **ladder[4].changes}
    assert len(after.runs) == 2


@pytest.mark.parametrize(
    "kind, refused", [("ConfigError", True), ("MissingDependencyError", True), ("DataError", False)]
)
def test_bench_runner_refused_row_is_not_reported_as_failure(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    answer = error_of(kind, "not here: use bf16")
    processes = FakeProcesses({("efficiency.precision", "fp8"): answer})
    tables = {ALONE: [PLAIN, MethodRow("fp8", {"efficiency.precision": "fp8"})], LADDER: []}
    outcome = run_rows(work, monkeypatch, processes, tables).outcomes[f"{ALONE}: fp8"]
    assert (outcome.problem, outcome.refused) == ("not here: use bf16", refused)


def test_keys_rejected_by_recipe_are_reported_as_refused(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {ALONE: [PLAIN, MethodRow("x", {"optimizer.name": "adagrad"})], LADDER: []}
    processes = FakeProcesses({})
    outcome = run_rows(work, monkeypatch, processes, tables).outcomes[f"{ALONE}: x"]
    assert "optimizer.name" in outcome.problem
    assert outcome.refused
    assert len(processes.seen) == 1


def test_bench_runner_runs_compiled_rows_last(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {ALONE: alone_rows(4, 16, _CPU), LADDER: ladder_rows(4, _CPU)}
    processes = FakeProcesses({})
    run_rows(work, monkeypatch, processes, tables)
    compiles = [recipe["efficiency"]["compile"] for recipe, _ in processes.seen]
    assert compiles == sorted(compiles)
    assert 0 < sum(compiles) < len(compiles)


def test_bench_runner_out_of_time_starts_no_more_rows(
    work: MethodsWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = dataclasses.replace(work, deadline=time.monotonic())
    processes = FakeProcesses({})
    runner = run_rows(work, monkeypatch, processes, {ALONE: [PLAIN], LADDER: []})
    assert processes.seen == []
    assert runner.outcomes[f"{ALONE}: plain"].problem == TIME_IS_UP


def test_ask_process_past_timeout_returns_timeout_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    assert ask("stub", {}, os.environ, 0.01)["error"]["type"] == "TimeoutError"


@pytest.mark.slow
def test_forked_measurement_equals_new_process_and_leaves_no_process(
    work: MethodsWork, one_thread: None
) -> None:
    environment = child_environment(False, work.caches)
    with ForkServer(environment, "firstlight.bench.steps") as server:
        found = server.ask(request_of(work, {}), None)
        assert found["losses"] == training_once(request_of(work, {}))["losses"]
        assert found["peak_bytes"] > 0
        assert server.ask({}, None) == error_of("Failed", "KeyError: 'recipe'")
        endless = {**request_of(work, {}), "warmup_steps": 10**9}
        assert server.ask(endless, 0.01)["error"]["type"] == "TimeoutError"
        assert "losses" in server.ask(request_of(work, {}), None)
        pid = server._server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_signal_during_fork_server_import_ends_wait(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(30)\n",
        encoding="utf-8",
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with pytest.raises(KeyboardInterrupt), ForkServer(environment, "slow_module") as server:
        server.ask({}, None)
    assert server._server.returncode == -signal.SIGKILL


def test_signal_during_process_start_is_raised_afterwards() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the block's end is what raises
        with signals_waiting():
            signal.raise_signal(signal.SIGINT)
            steps.append("started")
        steps.append("not reached")
    assert steps == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_child_environment_uses_training_settings_unless_user_set_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    found = child_environment(False, tmp_path)
    assert (found.get("THP_MEM_ALLOC_ENABLE"), found["GOMP_SPINCOUNT"]) == (None, "5000")
    assert child_environment(True, tmp_path)["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment(True, tmp_path)["GOMP_SPINCOUNT"] == "7"


# The numbers.

_HEAD: dict[str, Any] = {
    "seq_len": 10,
    "micro_batch_size": 4,
    "flops_per_token": 5.0,
    "machine": {"matmul_flops": 1000.0, "device": "cpu"},
}


def outcome_of(
    seconds: list[list[float]], peaks: list[int], changes: dict[str, Any]
) -> MethodOutcome:
    runs = [
        {**_RUN, "step_seconds": steps, "peak_bytes": peak, "losses": [9.0, 3.0 + turn]}
        for turn, (steps, peak) in enumerate(zip(seconds, peaks, strict=True))
    ]
    return MethodOutcome(changes=changes, runs=runs)


def test_rates_are_medians_over_steps_and_ratios_relative_to_first_row() -> None:
    first = outcome_of([[2.0, 4.0, 2.0], [8.0, 2.0, 1.0], [2.0, 4.0, 8.0]], [100, 300, 200], {})
    other = outcome_of([[1.0]], [50], larger_batch(4))
    plain, larger = summarize([(PLAIN, first), (MethodRow("larger"), other)], _HEAD)
    # Steps of 1, 2, 2, 2, 2, 4, 4, 8 and 8 seconds with 4 rows per step.
    assert plain["samples_per_second"] == 2.0
    assert (plain["samples_per_second_min"], plain["samples_per_second_max"]) == (0.5, 4.0)
    assert plain["tokens_per_second"] == 20.0
    assert plain["mfu"] == 0.1
    assert (plain["peak_bytes"], plain["final_loss"]) == (200, 4.0)
    assert (plain["speed_ratio"], plain["memory_ratio"]) == (1.0, 1.0)
    assert larger["samples_per_second"] == 8.0
    assert (larger["speed_ratio"], larger["memory_ratio"]) == (4.0, 0.25)
    assert (larger["micro_batch_size"], larger["gradient_accumulation_steps"]) == (8, 1)


def test_bench_row_counts_rows_of_all_processes_and_one_ceiling_per_gpu() -> None:
    changes = {**larger_batch(4), PROCESSES: 3}
    for device, mfu in (("cpu", 0.6), ("cuda", 0.2)):
        head = {**_HEAD, "machine": {**_HEAD["machine"], "device": device}}
        (row,) = summarize([(MethodRow("+ddp"), outcome_of([[2.0]], [5], changes))], head)
        assert (row["samples_per_second"], row["tokens_per_second"]) == (12.0, 120.0)
        assert (row["processes"], row["micro_batch_size"]) == (3, 8)
        assert row["mfu"] == pytest.approx(mfu)


def test_bench_without_first_row_has_no_ratios() -> None:
    failed = MethodOutcome(problem="killed")
    rows = [(PLAIN, failed), (MethodRow("a"), outcome_of([[1.0]], [5], {})), (MethodRow("b"), None)]
    plain, measured, waiting = summarize(rows, _HEAD)
    assert (plain["status"], plain["reason"]) == ("failed", "killed")
    assert (measured["speed_ratio"], measured["memory_ratio"]) == (None, None)
    assert waiting["status"] == "waiting"
    result = {
        **_HEAD,
        "model": "m",
        "complete": False,
        ALONE: [plain, measured, waiting],
        LADDER: [],
    }
    result["machine"] = {"name": "a CPU"}
    assert draw(result).startswith(b"\x89PNG")
    assert draw({**result, ALONE: [waiting]}).startswith(b"\x89PNG")


def test_draw_panels_median_rounded_outside_spread_returns_png() -> None:
    panel = Panel("tokens/s", ["a", "b"], [0.1 + 0.2, 1.0], spread=[(0.3, 0.3), (1.0, 1.0)])
    assert draw_panels("a picture", [[panel]]).startswith(b"\x89PNG")


# The command.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_bench_methods_command_prints_tables_and_one_json_object(
    model: Path, tmp_path: Path, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "bench",
        "methods",
        "--model",
        str(model),
        "--rows",
        "bf16,tf32,+tf32,+fused-adamw",
    ]
    arguments += ["--steps", "2", "--repeats", "1", "--device", "cpu", "--out", str(out), "--json"]
    assert main(arguments) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((out / "methods.json").read_text(encoding="utf-8"))
    assert result["complete"] is True
    assert [row["status"] for row in result[ALONE]] == ["measured", "skipped", "measured"]
    baseline, mask, tf32, fused = result[LADDER]
    assert [row["status"] for row in (baseline, mask, fused)] == 3 * ["measured"]
    assert (tf32["name"], tf32["status"]) == ("+tf32", "skipped")
    plain, _, bf16 = result[ALONE]
    for row in (baseline, mask, fused):
        assert row["final_loss"] == pytest.approx(plain["final_loss"], rel=2e-6)
    ratio = fused["samples_per_second"] / mask["samples_per_second"]
    assert fused["ratio_to_previous"] == pytest.approx(ratio)
    assert bf16["final_loss"] != plain["final_loss"]
    for row in (plain, bf16):
        assert len(row["runs"][0]["step_seconds"]) == 2
        assert 0 < row["peak_bytes"] < row["runs"][0]["total_peak_bytes"]
        assert row["mfu"] > 0
    lines = captured.err.splitlines()
    assert any(line.startswith("each method alone") and "tokens/s" in line for line in lines)
    assert any(line.startswith("bf16 (4x1)") for line in lines)
    assert any(line.startswith("+fused-adamw (4x1)") for line in lines)
    assert any(line.endswith("vs previous row") for line in lines)
    assert "tf32: skipped: needs a GPU: CPUs have no TF32" in lines
    assert (out / "methods.png").read_bytes().startswith(b"\x89PNG")
    assert list(temporary.iterdir()) == []


_INTERPRETER = """\
#!/bin/sh
request=$(cat)
case "$request" in
  *'"precision": "bf16"'*) kill -9 $$ ;;
  *'"attention": "sdpa"'*) echo $$ > {fifo}; exec sleep 1000 ;;
  *) printf %s "$request" | {python} "$@" ;;
esac
"""

_PROGRAM = """\
import sys
from firstlight.cli.main import main

sys.executable = sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""


_FOUND = {
    "plain": ("measured", ""),
    "bf16": ("failed", "killed by signal 9: most likely out of memory"),
    "fused": ("measured", ""),
    "sdpa": ("waiting", "not measured yet"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, exit_code, rows",
    [(signal.SIGINT, 130, "bf16,fused,sdpa"), (signal.SIGTERM, 143, "sdpa")],
)
def test_bench_interrupted_keeps_measurements_and_leaves_no_process(
    model: Path, tmp_path: Path, number: signal.Signals, exit_code: int, rows: str
) -> None:
    """The plain row is measured, bf16 is killed as if memory ran out, and sdpa never ends."""
    fifo, interpreter, out = tmp_path / "fifo", tmp_path / "python", tmp_path / "out"
    os.mkfifo(fifo)
    text = _INTERPRETER.format(fifo=fifo, python=sys.executable)
    interpreter.write_text(text, encoding="utf-8")
    interpreter.chmod(0o755)
    arguments = ["bench", "methods", "--model", str(model), "--rows", rows]
    arguments += ["--steps", "1", "--repeats", "1", "--device", "cpu", "--out", str(out), "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(interpreter), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as bench:
        child = int(fifo.read_text())  # Wait until the process of the sdpa row exists.
        bench.send_signal(number)
        stdout, stderr = bench.communicate()
    assert bench.returncode == exit_code, stderr
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    result = json.loads((out / "methods.json").read_text(encoding="utf-8"))
    found = {row["name"]: (row["status"], row["reason"]) for row in result[ALONE]}
    assert found == {name: _FOUND[name] for name in ("plain", *rows.split(","))}
    assert result["complete"] is False
    assert (out / "methods.png").read_bytes().startswith(b"\x89PNG")
    assert "plain (4x1)" in stderr
    assert "error" in json.loads(stdout)
    assert not list(tmp_path.glob("firstlight-bench-*"))


def test_quick_bench_disables_huge_pages_except_in_their_row(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, str]] = []

    class Server:
        def __init__(self, environment: Mapping[str, str], *_: str) -> None:
            seen.append(environment)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, *_: object) -> dict[str, Any]:
            return _RUN

    processes = FakeProcesses({})
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setattr(methods, "ForkServer", Server)
    monkeypatch.setattr(methods, "ask", processes)
    monkeypatch.setattr(methods, "_ceiling", lambda _: {"matmul_flops": 1.0, "matmul_dtype": "x"})
    bench = MethodsBench(model=str(model), device="cpu", quick=True, rows=["bf16", "huge-pages"])
    done = methods.bench_methods(bench, lambda _: None)
    assert [row["status"] for row in done[ALONE]] == ["measured"] * 3
    assert ["THP_MEM_ALLOC_ENABLE" in environment for environment in seen] == [False]
    assert [env["THP_MEM_ALLOC_ENABLE"] for _, env in processes.seen] == ["1"]


def test_quick_bench_time_limit_is_below_five_minutes() -> None:
    assert methods.QUICK_SECONDS < 300
