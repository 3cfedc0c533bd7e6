"""Runs on conversations that are stopped or killed end as those that were not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driven import differences, drive, run_of, write_recipe

from firstlight.data.chat import prepare_chat
from firstlight.tokenizer import Tokenizer

_SETTINGS: dict[str, Any] = {
    "model": {"max_position_embeddings": 128},
    "schedule": {"max_steps": 20},
    "batch": {"micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """30 conversations, some longer than a row."""
    folder = tmp_path_factory.mktemp("chats")
    records = [
        {"instruction": f"the light {n}", "output": " ".join(["dawn", "star", "bird"] * (n % 5 + 1))}
        for n in range(30)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_chat([folder / "a.jsonl"], tokenizer, folder / "out", template="alpaca")
    return folder / "out"


def recipe_of(folder: Path, name: str, chats: Path) -> Path:
    data = {"seq_len": 128, "long": "cut"}
    return write_recipe(folder, name, chats, **_SETTINGS, data=data)


def test_a_run_that_is_stopped_ends_as_one_that_was_not(tmp_path: Path, chats: Path) -> None:
    whole = recipe_of(tmp_path, "whole", chats)
    places = [("update", 5, 1), ("check", 10, 2), ("record", 13, 1)]
    recipes = [recipe_of(tmp_path, f"stopped-{place}", chats) for place, _, _ in places]
    plan = [[(whole, {})]] + [
        [(recipe, {"signal": ["SIGTERM", *place]}), (recipe, {})]
        for recipe, place in zip(recipes, places, strict=True)
    ]
    results = drive(plan)
    for recipe, (first, second) in zip(recipes, results[1:], strict=True):
        assert (first["code"], second["code"]) == (75, 0), (first, second)
        assert differences(run_of(recipe), run_of(whole)) == []


def test_a_run_that_is_killed_ends_as_one_that_was_not(tmp_path: Path, chats: Path) -> None:
    whole, killed = (recipe_of(tmp_path, name, chats) for name in ("whole", "killed"))
    drive([[(whole, {})]])
    driver = Path(__file__).with_name("kill_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver)],
        input=json.dumps({"recipes": [str(killed)], "kills": 3, "seed": 9}),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(len(run["kills"]) for run in found) == 3
    for run in found:
        assert differences(Path(run["folder"]), run_of(whole)) == ["draws"]
