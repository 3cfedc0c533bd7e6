"""An interrupted and resumed run ends like an uninterrupted one, for all number formats."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import one_thread

from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import TrainResult, train
from firstlight.weights.stored import WEIGHTS_NAME

_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "fp16": {"efficiency": {"precision": "fp16"}},
    "bf16_params": {"efficiency": {"precision": "bf16_params"}},
    "bf16_residual": {"efficiency": {"precision": "bf16", "bf16_residual": True}},
    "adamw8bit": {
        "efficiency": {"precision": "fp32"},
        "optimizer": {"name": "adamw8bit", "eight_bit_library": "bitsandbytes"},
    },
    "adamw8bit, embeddings in 32 bits": {
        "efficiency": {"precision": "fp32"},
        "optimizer": {
            "name": "adamw8bit",
            "eight_bit_library": "bitsandbytes",
            "embeddings_in_32_bits": True,
        },
    },
    "all-at-once": {
        "efficiency": {
            "precision": "bf16_params",
            "activation_checkpointing": "full",
            "loss_chunk_tokens": 24,
            "vocab_multiple": 64,
            "optimizer_in_backward": True,
        },
        "optimizer": {"name": "muon", "max_grad_norm": 0.0},
        "data": {"document_masking": True, "workers": 3, "prefetch": 3},
    },
}

#: Metrics that do not depend on the computation alone.
_MEASURED = {
    "tokens_per_second",
    "learned_tokens_per_second",
    "samples_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_wait_seconds",
    "save_stall_seconds",
}


class StoppedError(Exception):
    """Ends a run from within, like Ctrl-C."""


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def _recipe(base: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    values = copy.deepcopy(base)
    values["run"]["dir"] = str(folder)
    values["schedule"] = {"max_steps": 6, "warmup_steps": 1}
    values["checkpoint"] = {"every_steps": 3}
    values["evaluation"] = {"every_steps": 3, "max_rows": 4, "sample_tokens": 2, "on_start": False}
    # Wide enough for 8-bit optimizers to store some moments in 8 bits.
    values["model"] |= {"hidden_size": 64}
    for section, settings in _CASES[name].items():
        values.setdefault(section, {}).update(settings)
    values["efficiency"]["compile"] = False
    return values


def _outcome(result: TrainResult) -> tuple[list[dict[str, Any]], bytes]:
    records = [
        {key: value for key, value in record.items() if key not in _MEASURED}
        for record in read_json_lines(result.run_folder / "metrics.jsonl")
    ]
    return records, (result.checkpoint / WEIGHTS_NAME).read_bytes()


@pytest.mark.parametrize("name", _CASES)
def test_resumed_run_ends_with_same_weights_as_uninterrupted_run(
    recipe: dict[str, Any], tmp_path: Path, name: str
) -> None:
    if name.startswith("adamw8bit") and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    whole = train(_recipe(recipe, tmp_path / "whole", name))
    broken = _recipe(recipe, tmp_path / "broken", name)

    def stop(record: Mapping[str, Any]) -> None:
        # Step 4 is completed but lost: the newest checkpoint is from step 3.
        if record["step"] == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(broken, on_step=stop)
    resumed = train(broken, resume=True)
    records, weights = _outcome(whole)
    assert _outcome(resumed) == (records, weights)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["train/loss"] < records[0]["train/loss"]
    if name == "fp16":
        assert {"loss_scale", "skipped_steps"} <= records[-1].keys()


def test_loss_scale_continues_after_resume(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.training.guard._STEPS_BETWEEN_GROWTHS", 4)
    whole = train(_recipe(recipe, tmp_path / "whole", "fp16"))
    records, _ = _outcome(whole)
    # Four good steps in a row double the scale; the next two do not.
    good = [not now["skipped_steps"] for now in records]
    assert all(good)
    assert [record["loss_scale"] for record in records] == [2.0**16] * 3 + [2.0**17] * 3
    broken = _recipe(recipe, tmp_path / "broken", "fp16")

    def stop(record: Mapping[str, Any]) -> None:
        if record["step"] == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(broken, on_step=stop)
    assert _outcome(train(broken, resume=True))[0] == records
