"""SIGKILL from outside at random times, again and again, until a run is complete."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driven import MEASURED, newest, write_recipe
from scale import cases

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.run_log.reader import read_json_lines

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("kill_driver.py")
_SEED = 20

#: Steps between two checkpoints.
_INTERVAL = 4


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def end_of(run: Path) -> dict[str, Any]:
    """Hashes of weights and of moments with random states, the cursor, and every line."""
    folder = newest(run)
    state = load_trainer_state(folder)
    del state["recipe"]["run"]["dir"]
    lines = read_json_lines(run / "metrics.jsonl")
    return {
        "weights": sha256(folder / "model.safetensors"),
        "moments": sha256(folder / "optimizer.safetensors"),
        "state": state,
        "metrics": [{k: v for k, v in line.items() if k not in MEASURED} for line in lines],
        "samples": (run / "samples.jsonl").read_bytes(),
        "litter": sorted(run.rglob(".tmp-*")),
    }


def test_run_killed_at_random_times_ends_like_uninterrupted_run(
    tmp_path: Path, data: Path, record_property: Any
) -> None:
    recipes = [
        write_recipe(
            tmp_path,
            name,
            data,
            schedule={"max_steps": 16},
            evaluation={"every_steps": 6, "max_rows": 2},
            checkpoint={"every_steps": _INTERVAL, "asynchronous": name == "asynchronous"},
        )
        for name in ("synchronous", "asynchronous")
    ]
    count = cases(4, 200)
    request = {"recipes": [str(path) for path in recipes], "kills": count, "seed": _SEED}
    done = subprocess.run(
        [sys.executable, str(_DRIVER)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    whole = [end_of(Path(runs[index]["folder"])) for index in range(2)]
    assert [len(run["kills"]) for run in runs[:2]] == [0, 0]
    for run in runs[2:]:
        where = f"seed {_SEED}, {run}"
        found = end_of(Path(run["folder"]))
        assert [key for key in found if found[key] != whole[run["recipe"]][key]] == [], where
        # A save waits for the one before: with a second thread, that much more may be repeated.
        most = _INTERVAL * (1 + run["recipe"])
        for _, logged, saved in run["kills"]:
            assert logged - saved <= most, where
    kills = sum(len(run["kills"]) for run in runs)
    assert kills >= count
    record_property("cases", ("runs killed at a random time and resumed", kills))
