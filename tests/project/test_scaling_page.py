"""docs/scaling.md says what the code says: the memory table, files, keys and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firstlight.cli.train import LAUNCH_OPTIONS
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.recipe import known_keys
from scaling_table import BEGIN, END, MODELS, PAGE, WAYS, gib, table

_ROOT = Path(__file__).resolve().parents[2]
_TEXT = PAGE.read_text(encoding="utf-8")


def test_scaling_page_memory_table_matches_arithmetic() -> None:
    written = _TEXT.split(f"{BEGIN}\n", 1)[1].split(f"\n{END}", 1)[0]
    assert written == table(), "run: python tests/scaling_table.py"
    assert written.count("\n") == 1 + len(MODELS) * len(WAYS)


def test_scaling_page_models_have_published_sizes() -> None:
    totals = [count_parameters(meta_model(config)).total for config in MODELS.values()]
    assert totals == [1_235_814_400, 8_030_261_248, 70_553_706_496]


@pytest.mark.parametrize("bytes_per_parameter", [4, 12])
def test_scaling_page_start_and_save_bytes_match_parameters(
    bytes_per_parameter: int,
) -> None:
    totals = (count_parameters(meta_model(config)).total for config in MODELS.values())
    cells = " | ".join(f"{gib(bytes_per_parameter * total)} GiB" for total in totals)
    assert f": {bytes_per_parameter} bytes per parameter | {cells} |" in _TEXT


def test_scaling_page_files_exist() -> None:
    paths = re.findall(r"`((?:examples|recipes|tests|docs|src)/[\w./-]*)", _TEXT)
    links = re.findall(r"\]\(([^)#:]+)\)", _TEXT)
    assert len(paths) > 8
    for path in paths:
        assert (_ROOT / path).exists(), path
    for link in links:
        assert (PAGE.parent / link).exists(), link


@pytest.mark.parametrize("section", ["distributed", "batch", "efficiency", "checkpoint", "run"])
def test_scaling_page_recipe_keys_exist(section: str) -> None:
    named = set(re.findall(rf"`{section}\.(\w+)", _TEXT))
    assert {f"{section}.{key}" for key in named} <= set(known_keys())
    assert section != "distributed" or named >= {"engine", "shard", "offload", "timeout_seconds"}


def test_scaling_page_has_every_launch_option() -> None:
    for option in LAUNCH_OPTIONS:
        assert f"--{option}" in _TEXT
