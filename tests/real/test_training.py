"""Training and scoring SmolLM2-135M-Instruct, whose weights come from a GGUF file. Run with
`make test-real`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from firstlight.planner.plan.processes import RunForecaster
from firstlight.recipe import parse_recipe
from firstlight.run_log.names import FORECAST_NAME
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train
from firstlight.weights.gguf.reader import gguf_folder
from real_weights import weights_folder

pytest.importorskip("gguf", reason="the package gguf is not installed")
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def file() -> Path:
    path = weights_folder() / "SmolLM2-135M-Instruct.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is missing: run `make test-real`")
    return path


@pytest.fixture(scope="module")
def records(shared: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((shared / "data/instruction-data.json").read_text())
    return found


def held_out_losses(file: Path, folder: Path, content: Any, **sections: Any) -> list[float]:
    """The losses on held-out examples before and after a run of twelve steps."""
    data = folder / "records.json"
    data.write_text(json.dumps(content))
    kind = "preference" if "preference" in sections else "chat"
    recipe = {
        "run": {"dir": str(folder / "run")},
        "data": {"kind": kind, "files": [str(data)], "long": "drop", "seq_len": 256},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 12, "warmup_steps": 1},
        "evaluation": {"every_steps": 12, "max_rows": 8, "sample_prompts": []},
        "checkpoint": {"every_steps": 12},
        "efficiency": {"compile": False},
        **sections,
    }
    with RunForecaster() as forecaster:
        train(parse_recipe(recipe), init_from=file, forecaster=forecaster)
    lines = read_json_lines(folder / "run" / "metrics.jsonl")
    return [line["val/loss"] for line in lines if "val/loss" in line]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"optimizer": {"name": "adamw", "learning_rate": 1e-4}}, id="full"),
        pytest.param(
            {"optimizer": {"name": "adamw", "learning_rate": 1e-3}, "lora": {"rank": 8}}, id="lora"
        ),
    ],
)
def test_fine_tuning_on_1000_instructions_lowers_held_out_loss_within_planned_memory(
    sections: dict[str, Any], file: Path, records: list[dict[str, str]], tmp_path: Path
) -> None:
    before, after = held_out_losses(file, tmp_path, records[:1000], **sections)
    assert after < 0.95 * before
    forecast = json.loads((tmp_path / "run" / FORECAST_NAME).read_text())
    planned, measured = forecast["predicted"]["peak_bytes"], forecast["measured"]["allocated_bytes"]
    assert measured == pytest.approx(planned, rel=0.02)


def test_dpo_lowers_held_out_loss(
    file: Path, records: list[dict[str, str]], tmp_path: Path
) -> None:
    pairs = [
        {
            "prompt": f"{record['instruction']}\n\n{record['input']}".strip(),
            "chosen": record["output"],
            "rejected": other["output"],
        }
        for record, other in zip(records[:200], records[200:400], strict=True)
    ]
    optimizer = {"name": "adamw", "learning_rate": 2e-5, "weight_decay": 0.0}
    before, after = held_out_losses(
        file, tmp_path, pairs, preference={"objective": "dpo"}, optimizer=optimizer
    )
    assert before == pytest.approx(math.log(2), abs=1e-4)
    assert after < 0.9 * before


@pytest.mark.filterwarnings("ignore")
def test_hellaswag_score_matches_lm_evaluation_harness(
    file: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from test_lm_eval import assert_three_agree, write_task

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    items = shared / "data" / "hellaswag-val-2k.jsonl"
    tasks = write_task(tmp_path / "tasks", items)
    assert assert_three_agree(gguf_folder(file), items, tasks, 6).items == 6
