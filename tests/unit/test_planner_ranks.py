"""What engines leave of each part on one of several devices."""

from __future__ import annotations

from typing import Any

import pytest

from firstlight.errors import ConfigError
from firstlight.planner.prediction import MemoryPrediction, PhasePeak
from firstlight.planner.ranks import exchange_of, of_one_rank
from firstlight.training.config import Recipe, parse_recipe

_MIB = 2**20
_STATE = {"weights": 80 * _MIB, "gradients": 80 * _MIB, "optimizer_states": 160 * _MIB}


def recipe(accumulation: int = 1, **distributed: Any) -> Recipe:
    return parse_recipe(
        {
            "data": {"dir": "/nowhere", "seq_len": 64},
            "model": {
                "model_type": "gpt2",
                "vocab_size": 300,
                "hidden_size": 32,
                "num_attention_heads": 2,
            },
            "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": accumulation},
            "distributed": distributed,
        }
    )


def alone() -> MemoryPrediction:
    peak = PhasePeak(360 * _MIB, {**_STATE, "activations": 40 * _MIB})
    phases = {"backward": peak}
    return MemoryPrediction(peak.bytes, "backward", peak.parts, phases, peak.bytes + 7, 0, 0, ())


def test_ddp_has_everything_on_each_and_the_buffers_of_what_is_sent() -> None:
    found = of_one_rank(alone(), recipe(), 4)
    assert (found.parts, found.peak_bytes) == (alone().parts, alone().peak_bytes)
    assert found.overhead_bytes == 400 * _MIB
    assert of_one_rank(alone(), recipe(), 1) == alone()


def test_fsdp_cuts_state_and_keeps_whole_gradients_where_it_accumulates() -> None:
    found = of_one_rank(alone(), recipe(engine="fsdp"), 4)
    assert {name: found.parts[name] for name in _STATE} == {k: v // 4 for k, v in _STATE.items()}
    assert found.parts["activations"] == 40 * _MIB
    assert found.peak_bytes == sum(found.parts.values())
    assert found.reserved_bytes == found.peak_bytes + 7
    more = of_one_rank(alone(), recipe(2, engine="fsdp"), 4)
    assert more.parts["gradients"] == 80 * _MIB
    half = of_one_rank(alone(), recipe(engine="fsdp", shard=2), 4)
    assert half.parts["weights"] == 40 * _MIB


def test_zero_cuts_by_its_stage_and_moves_what_is_offloaded() -> None:
    for stage, cut in ((1, 1), (2, 2), (3, 3)):
        found = of_one_rank(alone(), recipe(engine="deepspeed", zero_stage=stage), 4)
        names = ("optimizer_states", "gradients", "weights")
        assert [found.parts[name] < _STATE[name] for name in names] == [i < cut for i in range(3)]
    moved = of_one_rank(alone(), recipe(engine="deepspeed", zero_stage=1, offload="cpu"), 4)
    assert "optimizer_states" not in moved.parts
    assert moved.host_bytes == 40 * _MIB


def test_what_is_not_planned_is_said() -> None:
    with pytest.raises(ConfigError, match="pipeline are not planned"):
        of_one_rank(alone(), recipe(pipeline=2), 2)


def test_what_is_sent_counts_micro_batches_and_what_waits_on_the_host() -> None:
    found = exchange_of(recipe(3, engine="fsdp"), 1000, 2, host_bytes=50)
    assert (found.engine, found.micro_batches, found.gradient_bytes) == ("fsdp", 3, 4000)
    assert found.offloaded_bytes == 2 * 50 * 3
