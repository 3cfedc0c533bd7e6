"""Runs on conversations that are stopped or killed end as those that were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from driven import Chain, differences, drive, run_of, write_recipe

from firstlight.data.chat import prepare_chat
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


def test_chat_run_stopped_or_killed_ends_like_uninterrupted_run(
    tmp_path: Path, chats: Path
) -> None:
    whole = recipe_of(tmp_path, "whole", chats)
    stops = [
        ("SIGTERM", "update", 5, 1),
        ("SIGTERM", "check", 10, 2),
        ("SIGTERM", "record", 13, 1),
        ("SIGKILL", "record", 13, 1),
    ]
    recipes = [recipe_of(tmp_path, f"{name}-{place}", chats) for name, place, _, _ in stops]
    plan: list[Chain] = [[(whole, {})]]
    plan += [
        [(recipe, {"signal": stop}), (recipe, {})]
        for recipe, stop in zip(recipes, stops, strict=True)
    ]
    results = drive(plan)
    for recipe, stop, (first, second) in zip(recipes, stops, results[1:], strict=True):
        is_killed = stop[0] == "SIGKILL"
        said = (stop, first, second)
        assert (first["code"], second["code"]) == (-9 if is_killed else 75, 0), said
        # The best evaluation so far, at step 10, is saved as well, in the background: a kill three
        # steps later may come before that is done.
        assert first["saved"] in ((8, 10) if is_killed else (stop[2],)), said
        # The steps after the checkpoint are made twice.
        expected = ["drawn again"] if is_killed else []
        assert differences(run_of(recipe), run_of(whole)) == expected, said
