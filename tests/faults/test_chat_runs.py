"""Runs on conversations that are stopped or killed end as those that were not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from driven import MEASURED, Chain, differences, drive, newest, run_of, write_recipe

from firstlight.data.chat import prepare_chat
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")

_TEMPLATE = (
    "{%- for m in messages -%}{{- m.role ~ ': ' ~ m.content ~ eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
)
_SETTINGS: dict[str, Any] = {
    "model": {"max_position_embeddings": 64},
    "schedule": {"max_steps": 20},
    "batch": {"micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """30 conversations, some longer than a row."""
    folder = tmp_path_factory.mktemp("chats")
    records = [
        {
            "instruction": f"the light {n}",
            "output": " ".join(["dawn", "star", "bird"] * (n % 5 + 1)),
        }
        for n in range(30)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_chat([folder / "a.jsonl"], tokenizer.extended([], _TEMPLATE), folder / "out")
    return folder / "out"


def recipe_of(folder: Path, name: str, chats: Path) -> Path:
    path = write_recipe(folder, name, chats, **_SETTINGS)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe["data"] |= {"seq_len": 48, "long": "cut"}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def test_a_run_that_is_stopped_ends_as_one_that_was_not(tmp_path: Path, chats: Path) -> None:
    whole = recipe_of(tmp_path, "whole", chats)
    places = [("update", 5, 1), ("check", 10, 2), ("record", 13, 1)]
    recipes = [recipe_of(tmp_path, f"stopped-{place}", chats) for place, _, _ in places]
    plan: list[Chain] = [[(whole, {})]]
    plan += [
        [(recipe, {"signal": ["SIGTERM", *place]}), (recipe, {})]
        for recipe, place in zip(recipes, places, strict=True)
    ]
    results = drive(plan)
    for recipe, (first, second) in zip(recipes, results[1:], strict=True):
        assert (first["code"], second["code"]) == (75, 0), (first, second)
        assert differences(run_of(recipe), run_of(whole)) == []


def end_of(run: Path) -> dict[str, Any]:
    folder = newest(run)
    return {
        "weights": (folder / "model.safetensors").read_bytes(),
        "moments": (folder / "optimizer.safetensors").read_bytes(),
        "metrics": [
            {key: value for key, value in line.items() if key not in MEASURED}
            for line in read_json_lines(run / "metrics.jsonl")
        ],
    }


def test_a_run_that_is_killed_ends_as_one_that_was_not(tmp_path: Path, chats: Path) -> None:
    recipe = recipe_of(tmp_path, "run", chats)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kill_driver.py"))],
        input=json.dumps({"recipes": [str(recipe)], "kills": 4, "seed": 9}),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    whole, *killed = [end_of(Path(run["folder"])) for run in json.loads(done.stdout)]
    assert killed
    for found in killed:
        assert [key for key in found if found[key] != whole[key]] == []
