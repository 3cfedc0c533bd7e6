"""A run that is killed, at whatever moment, and resumed is the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from scale import FULL, cases

from firstlight.checkpoint.checkpoint import verify_checkpoint
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.data.prepare import prepare
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("crash_driver.py")
_SEED = 1
#: Of such small runs, threads would only wait for each other.
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
}

# One after the other, each on what the one before left: 20 steps, a checkpoint every 4, and
# an epoch of 9 steps.
_CRASHES: list[list[Any] | None] = [
    ["step", 2, 1],  # before the first checkpoint
    ["half model.safetensors", 4, 1],  # while the first checkpoint is written
    ["rename .tmp-step-00000004", 4, 1],  # when it is complete, but for its name
    ["step", 7, 1],  # between two checkpoints
    ["sync optimizer.safetensors", 8, 1],  # while the second is synced
    ["half optimizer.safetensors", 8, 1],
    ["half metrics.jsonl", 10, 1],  # in the middle of a line of metrics, in the second epoch
    ["rename step-00000004", 12, 1],  # between writing a checkpoint and deleting the oldest
    ["unlink manifest.json", 16, 1],  # while the oldest is deleted
    ["step", 19, 1],  # in the third epoch
    ["rename .tmp-step-00000020", 20, 1],  # while the last checkpoint is written
]
_FEW = [["step", 7, 1], ["half model.safetensors", 8, 1], ["step", 19, 1], None]
#: Family and optimizer, whether it saves asynchronously, and when it is killed.
_RUNS = {
    ("gpt2", "adamw"): (False, _CRASHES),
    # Where a run is saved does not depend on what is, and each write of a background save is a
    # moment of `test_run_killed_at_any_disk_call_resumes`.
    ("llama", "muon"): (True, _CRASHES if FULL else _FEW),
    **({("gpt2", "muon"): (True, _FEW), ("llama", "adamw"): (False, _FEW)} if FULL else {}),
}


def drive(plan: Sequence[tuple[Path, list[Any] | None]]) -> list[dict[str, Any]]:
    """Do the plan in one process; see the driver."""
    done = subprocess.run(
        [sys.executable, str(_DRIVER)],
        input=json.dumps([(str(recipe), crash) for recipe, crash in plan]),
        capture_output=True,
        text=True,
        env=_ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


def write_recipe(folder: Path, name: str, data: Path, **sections: Any) -> Path:
    """The recipe NAME.yaml of a run in the folder NAME, both in `folder`."""
    recipe = {
        "run": {"dir": str(folder / name), "device": "cpu"},
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 32, "gradient_accumulation_steps": 2},
        "schedule": {"max_steps": 20, "warmup_steps": 3},
        "evaluation": {"every_steps": 5, "max_rows": 2, "sample_tokens": 3, "on_start": False},
        "checkpoint": {"every_steps": 4, "keep_last": 2},
        # What "auto" makes of these is measured anew by a run without a checkpoint.
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def run_of(recipe: Path) -> Path:
    return recipe.with_suffix("")


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, train/loss) of every line, in the order of the file."""
    return [(r["step"], r["train/loss"]) for r in read_json_lines(run / "metrics.jsonl")]


def litter(run: Path) -> list[Path]:
    return sorted(run.rglob(".tmp-*"))


def assert_same_run(broken: Path, whole: Path) -> None:
    """Every step once and with the same loss; the same weights, moments and samples."""
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, len(expected) + 1))
    assert losses(broken) == expected
    (*_, last), (*_, expected_last) = list_checkpoints(broken), list_checkpoints(whole)
    verify_checkpoint(last)
    assert last.name == expected_last.name
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"):
        assert (last / name).read_bytes() == (expected_last / name).read_bytes(), name
    assert (broken / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert litter(broken) == []


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Tokenizer) -> Path:
    """A folder of runs killed as `_RUNS` says but not yet finished, and of whole ones."""
    folder = tmp_path_factory.mktemp("crashed")
    # A quarter of the corpus, and of a step's rows: as many steps an epoch.
    data = folder / "data"
    prepare(sorted(corpus.iterdir())[:30], tokenizer, data)
    plan: list[tuple[Path, list[Any] | None]] = []
    for (family, optimizer), (asynchronous, crashes) in _RUNS.items():
        sections = {
            "model": _MODELS[family],
            "optimizer": {"name": optimizer},
            "batch": {"micro_batch_size": 16, "gradient_accumulation_steps": 1},
            # The saves are counted: only those that are due.
            "checkpoint": {
                "every_steps": 4,
                "keep_last": 2,
                "keep_best": 0,
                "asynchronous": asynchronous,
            },
        }
        whole = write_recipe(folder, f"{family}-{optimizer}-whole", data, **sections)
        broken = write_recipe(folder, f"{family}-{optimizer}-broken", data, **sections)
        plan += [(whole, None), *((broken, crash) for crash in crashes)]
    killed = [result["killed"] for result in drive(plan)]
    assert killed == [crash is not None for _, crash in plan]
    return folder


# The command line with reports: a fork draws none.
_DRAWING = """
import sys
from firstlight.cli.main import main
from firstlight.report.report import draw_report
from firstlight.training import loop

loop.draw_report = draw_report
sys.exit(main())
"""


@pytest.mark.parametrize("family, optimizer", _RUNS)
def test_run_killed_at_many_moments_resumes_bit_for_bit(
    crashed: Path, family: str, optimizer: str
) -> None:
    recipe = crashed / f"{family}-{optimizer}-broken.yaml"
    whole = crashed / f"{family}-{optimizer}-whole"
    records = read_json_lines(whole / "metrics.jsonl")
    assert len(records) == 20
    epochs = [int(record["epoch"]) for record in records]
    assert sorted(set(epochs)) == [0, 1, 2]  # the plan crosses two epoch edges
    if _RUNS[family, optimizer][1] is _CRASHES:
        # Killed while it was saving: there is something half-written, and it is not looked at.
        assert litter(run_of(recipe) / "checkpoints")
        draws = optimizer == "adamw"
        program = ["-c", _DRAWING] if draws else ["-m", "firstlight"]
        command = [sys.executable, *program, "train", str(recipe), "--resume"]
        done = subprocess.run(command, capture_output=True, text=True, env=_ONE_THREAD)
        assert done.returncode == 0, done.stderr
        assert "step-00000016 (step 16)" in done.stderr
        assert (run_of(recipe) / "report.png").is_file() == draws
    assert_same_run(run_of(recipe), whole)


def test_kill_test_model_uses_dropout(crashed: Path) -> None:
    config = json.loads(
        (list_checkpoints(crashed / "gpt2-adamw-whole")[-1] / "config.json").read_text("utf-8")
    )
    assert (config["embd_pdrop"], config["attn_pdrop"], config["resid_pdrop"]) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_killed_at_any_disk_call_resumes(
    tmp_path: Path,
    data: Path,
    asynchronous: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """Kill before the first such call of a run, before the second, ... and resume each time."""
    sections = {
        "model": {**_MODELS["llama"], "num_hidden_layers": 1},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 4},
        "evaluation": {"every_steps": 0, "sample_tokens": 1, "max_rows": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "asynchronous": asynchronous},
    }
    whole = write_recipe(tmp_path, "whole", data, **sections)
    (done,) = drive([(whole, None)])
    calls = done["calls"]
    assert calls > 80
    chosen = random.Random(_SEED).sample(range(1, calls + 1), cases(4, calls))
    recipes = [write_recipe(tmp_path, f"broken-{number}", data, **sections) for number in chosen]
    plan: list[tuple[Path, list[Any] | None]] = []
    for number, recipe in zip(chosen, recipes, strict=True):
        plan += [(recipe, ["call", 0, number]), (recipe, None)]
    # The call after the last is never come by.
    plan.append((write_recipe(tmp_path, "last", data, **sections), ["call", 0, calls + 1]))
    results = drive(plan)
    killed = [result["killed"] for result in results]
    assert killed == [True, False] * len(chosen) + [False], f"seed {_SEED}: {chosen}"
    for recipe in recipes:
        assert_same_run(run_of(recipe), run_of(whole))
    record_property("cases", ("runs killed at a call that changes the disk", len(chosen)))
