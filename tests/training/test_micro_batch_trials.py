from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plain_recipe import plain_recipe

from firstlight.errors import ConfigError
from firstlight.hardware import fresh_process
from firstlight.hardware.device import find_hardware
from firstlight.hardware.fresh_process import error_of
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training import micro_batch_trials
from firstlight.training.loop import train
from firstlight.training.micro_batch_trials import cuts, largest_micro_batch, try_step
from firstlight.training.program import TrainingProgram
from firstlight.training.step import StepResult

pytestmark = pytest.mark.usefixtures("forked_processes")

_CPU = find_hardware("cpu")


def recipe_of(rows: int = 1, total: int = 12, **sections: Any) -> ResolvedRecipe:
    return plain_recipe(
        {
            "model": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 30,
                "max_position_embeddings": 16,
            },
            "data": {"dir": "data", "seq_len": 16},
            "batch": {"micro_batch_size": rows, "global_batch_tokens": total * 16},
            "efficiency": {"precision": "fp32"},
            **sections,
        }
    )


# --- tried sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total,expected",
    [
        (1, [1]),
        (2, [2, 1]),
        (12, [12, 6, 3, 1]),
        (32, [32, 16, 8, 4, 2, 1]),
        (7, [7, 1]),
        (15, [15, 5, 1]),
        (30, [30, 15, 6, 3, 1]),
    ],
)
def test_micro_batch_sizes_are_halved_where_batch_divides_evenly(
    total: int, expected: list[int]
) -> None:
    assert list(cuts(total)) == expected


@given(st.integers(1, 5000))
def test_micro_batch_sizes_divide_batch_and_at_least_halve(total: int) -> None:
    found = list(cuts(total))
    assert found[0] == total
    assert found[-1] == 1
    assert all(total % rows == 0 for rows in found)
    assert all(b <= a // 2 for a, b in itertools.pairwise(found))


# --- the search --------------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], str]) -> list[int]:
    """Replace the trial process by a function of the number of rows. It returns an error type, or
    "" for a successful trial.

    Returns: The list that gets the requested numbers of rows.
    """
    asked: list[int] = []

    def tried(module: str, request: Mapping[str, Any], environment: object) -> dict[str, Any]:
        assert request["device"] == "cpu"
        recipe = parse_resolved_recipe(request["recipe"])
        asked.append(recipe.batch.rows)
        kind = answer(recipe.batch.rows)
        if kind:
            return error_of(kind, "Words: the last line")
        return {"peak_bytes": 5, "step_seconds": 0.5}

    monkeypatch.setattr(micro_batch_trials, "ask", tried)
    return asked


def test_largest_micro_batch_is_found_by_halving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, lambda rows: "" if rows <= 4 else "MemoryError")
    told: list[str] = []
    assert largest_micro_batch(recipe_of(total=12), _CPU, told.append) == 3
    assert asked == [12, 6, 3]
    assert told == ["micro-batch of 3 rows, the largest that fits in memory (of 12 rows per step)"]


def test_largest_micro_batch_killed_process_counts_as_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, lambda rows: "" if rows == 1 else "Killed")
    assert largest_micro_batch(recipe_of(total=4), _CPU, lambda _: None) == 1


def test_largest_micro_batch_no_fit_raises_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, lambda rows: "MemoryError")
    with pytest.raises(ConfigError, match="not even a micro-batch of one row of 16 tokens fits"):
        largest_micro_batch(recipe_of(total=4), _CPU, lambda _: None)
    assert asked == [4, 2, 1]


def test_largest_micro_batch_config_error_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, lambda rows: "ConfigError")
    with pytest.raises(ConfigError, match=r"^Words: the last line$"):
        largest_micro_batch(recipe_of(total=4), _CPU, lambda _: None)
    assert asked == [4]


def test_largest_micro_batch_other_failure_shows_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda rows: "Failed")
    with pytest.raises(ConfigError, match=r"auto failed: Words: the last line \(set a number"):
        largest_micro_batch(recipe_of(total=4), _CPU, lambda _: None)


@pytest.mark.parametrize(
    "batch,said",
    [
        ({}, r"set batch\.global_batch_tokens .*multiple of data\.seq_len, 16"),
        (
            {
                "global_batch_tokens": 64,
                "gradient_accumulation_steps": 2,
            },
            r"instead of batch\.gradient_accumulation_steps",
        ),
        ({"global_batch_tokens": 40}, "use 32 or 48"),
        ({"global_batch_tokens": 4}, "use 16$"),
    ],
)
def test_micro_batch_auto_without_batch_size_raises_config_error(
    batch: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        largest_micro_batch(recipe_of(batch=batch), _CPU, lambda _: None)


# --- one trial ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows,expected", [(4, 1), (2, 2), (1, 2)])
def test_micro_batch_trial_holds_memory_of_accumulated_step(
    monkeypatch: pytest.MonkeyPatch, rows: int, expected: int
) -> None:
    seen: list[list[tuple[int, ...]]] = []
    step = TrainingProgram.step

    def watched(self: TrainingProgram, batches: Any, lr_scale: float) -> StepResult:
        seen.append([tuple(batch.input_ids.shape) for batch in batches])
        return step(self, batches, lr_scale)

    monkeypatch.setattr(TrainingProgram, "step", watched)
    try_step(recipe_of(rows, total=4), _CPU)
    assert seen == [[(rows, 16)] * expected] * 2


def test_micro_batch_trial_includes_documents_padding_and_adapters() -> None:
    trial = try_step(
        recipe_of(
            2,
            total=4,
            data={"dir": "data", "seq_len": 16, "document_masking": True},
            lora={"rank": 2},
            efficiency={"precision": "bf16", "vocab_multiple": 64, "loss_chunk_tokens": 8},
        ),
        _CPU,
    )
    assert trial.step_seconds > 0


def test_micro_batch_trial_incompatible_methods_raise_config_error() -> None:
    recipe = recipe_of(efficiency={"precision": "fp32", "optimizer_in_backward": True})
    with pytest.raises(ConfigError, match=r"set optimizer\.max_grad_norm to 0"):
        largest_micro_batch(recipe, _CPU, lambda _: None)


# --- real memory ---------------------------------------------------------------------------------


_LIMIT = """
import resource, sys
from pathlib import Path
from firstlight.hardware.fresh_process import answer
from firstlight.training.micro_batch_trials import measure
lines = dict(l.split(":", 1) for l in Path("/proc/self/status").read_text().splitlines())
used = int(lines["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 700_000_000,) * 2)
answer(measure, sys.stdin.read())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux alone says VmData")
def test_micro_batch_trial_limited_memory_finds_smaller_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 4 rows of 512 tokens have 246 MB of logits, which are in memory several times: one row fits
    # into 0.7 GB, 4 rows do not.
    recipe = plain_recipe(
        {
            "model": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 30_000,
                "max_position_embeddings": 512,
            },
            "data": {"dir": "data", "seq_len": 512},
            "batch": {"micro_batch_size": 1, "global_batch_tokens": 4 * 512},
            "efficiency": {"precision": "fp32", "attention": "sdpa", "compile": False},
        }
    )

    def limited(module: str, request: Mapping[str, Any], environment: object) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LIMIT],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
        return fresh_process._result(done.returncode, done.stdout, done.stderr)

    monkeypatch.setattr(micro_batch_trials, "ask", limited)
    rows = largest_micro_batch(recipe, _CPU, lambda _: None)
    assert rows in (1, 2)


def test_train_micro_batch_auto_uses_whole_batch_if_it_fits(recipe: dict[str, Any]) -> None:
    recipe["batch"] = {"micro_batch_size": "auto", "global_batch_tokens": 128}
    recipe["schedule"] = {"max_steps": 2, "warmup_steps": 0}
    recipe["efficiency"] = {"precision": "fp32"}
    result = train(recipe)
    saved = yaml.safe_load((result.run_folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert saved["batch"]["micro_batch_size"] == 4
    assert saved["batch"]["global_batch_tokens"] == 128
