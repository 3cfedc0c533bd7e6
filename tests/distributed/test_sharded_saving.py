"""Each process writes its shards of a checkpoint. A checkpoint appears only if all of them are
complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spawned import run_ranks

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("sharded_driver.py")


def _scenarios(folder: Path, size: int) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    results = run_ranks(_DRIVER, [str(folder)], size, timeout=200)
    found = []
    for result in results:
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
        found.append({line["scenario"]: line["found"] for line in lines})
    return found


def _require_sound(folder: Path, size: int, meshes: list[str]) -> None:
    last = f"rank {size - 1}"
    for found in _scenarios(folder, size):
        names = [f"{mesh}-{asynchronous}" for mesh in meshes for asynchronous in (False, True)]
        # Of two saved checkpoints, only the last is kept, with the values at the time of saving.
        assert found["whole"] == {name: ["step-00000002", [], []] for name in names}
        for full, infinite, left, names in found["faults"].values():
            assert full.startswith(f"StorageError: {last}: the disk is full")
            assert infinite.startswith(f"CheckpointError: {last}: step 2: tensor seven is not")
            assert left == []
            assert names == ["step-00000003"]


def test_shards_of_two_processes_form_one_checkpoint(tmp_path: Path) -> None:
    _require_sound(tmp_path, 2, ["all"])


@pytest.mark.slow
def test_shards_of_four_processes_form_one_checkpoint(tmp_path: Path) -> None:
    _require_sound(tmp_path, 4, ["all", "hybrid"])
