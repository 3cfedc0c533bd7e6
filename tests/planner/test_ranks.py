"""The memory of each part on one of several devices, by engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plain_recipe import plain_recipe

from firstlight.errors import ConfigError
from firstlight.models import LlamaConfig
from firstlight.models.accounting import meta_model
from firstlight.planner.memory.prediction import MemoryPrediction, PhasePeak
from firstlight.planner.memory.ranks import of_one_rank, own_part, with_own_tables
from firstlight.planner.speed.throughput import bubble, exchange_of, waiting_bytes
from firstlight.recipe import PreferenceConfig, ResolvedRecipe

_MIB = 2**20
_CONFIG = {"model_type": "gpt2", "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2}


def recipe(accumulation: int = 1, **distributed: Any) -> ResolvedRecipe:
    return plain_recipe(
        {
            "data": {"dir": "/nowhere", "seq_len": 64},
            "model": _CONFIG,
            "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": accumulation},
            "distributed": distributed,
        }
    )


def whole() -> dict[str, int]:
    """Return the bytes of the fp32 weights, the gradients and the moments of the whole model."""
    model = recipe().model
    size = 4 * sum(p.numel() for p in meta_model(model).parameters())
    return {"weights": size, "gradients": size, "optimizer_states": 2 * size}


def alone() -> MemoryPrediction:
    parts = {**whole(), "activations": 40 * _MIB}
    peaks = {name: PhasePeak(sum(parts.values()), dict(parts)) for name in ("forward", "optimizer")}
    size = peaks["forward"].bytes
    return MemoryPrediction(size, "forward", dict(parts), peaks, size + 7, 0, 0, ())


def test_rank_memory_ddp_holds_full_state_and_buckets() -> None:
    forward = {name: size for name, size in alone().parts.items() if name != "gradients"}
    phases = {**alone().phases, "forward": PhasePeak(sum(forward.values()), forward)}
    found = of_one_rank(replace(alone(), phases=phases), recipe(), 4)
    # The buckets hold the gradients in every phase.
    assert found.phases["forward"].parts["gradients"] == whole()["gradients"]
    assert found.peak_bytes == alone().peak_bytes
    assert found.overhead_bytes == 400 * _MIB
    assert of_one_rank(alone(), recipe(), 1) == alone()
    # Gradients accumulated over earlier micro-batches are not in the buckets.
    found = of_one_rank(alone(), recipe(2), 4)
    assert found.peak_bytes == alone().peak_bytes + whole()["gradients"]


def test_rank_memory_fsdp_shards_state_and_keeps_full_gradients_if_accumulating() -> None:
    found = of_one_rank(alone(), recipe(engine="fsdp"), 4)
    step = found.phases["optimizer"].parts
    assert {name: step[name] for name in whole()} == {k: v // 4 for k, v in whole().items()}
    assert step["activations"] == 40 * _MIB
    assert "communication" not in step
    assert found.peak_bytes == sum(found.parts.values())
    assert found.reserved_bytes == found.peak_bytes + 7
    # Embedding, positions and the last norm, plus the next layer.
    outside, layer = 300 * 32 + 1024 * 32 + 64, 12 * 32 * 32 + 13 * 32
    assert found.phases["forward"].parts["communication"] == 4 * (outside + layer)
    more = of_one_rank(alone(), recipe(2, engine="fsdp"), 4)
    assert more.phases["forward"].parts["gradients"] == whole()["gradients"]
    half = of_one_rank(alone(), recipe(engine="fsdp", shard=2), 4)
    assert half.parts["weights"] == whole()["weights"] // 2
    moved = of_one_rank(alone(), recipe(engine="fsdp", offload="cpu"), 4)
    assert not {"weights", "optimizer_states"} & moved.parts.keys()
    assert moved.host_bytes == 4 * whole()["weights"] // 4


def test_rank_memory_notes_cpu_memory_of_start() -> None:
    one = recipe()
    assert one.model is not None
    large = one.model.model_copy(update={"hidden_size": 1024, "num_hidden_layers": 80})
    size = 4 * sum(p.numel() for p in meta_model(large).parameters()) / 2**30
    found = of_one_rank(alone(), one.model_copy(update={"model": large}), 4)
    said = f"in CPU memory: 4 x {size:.1f} GiB"
    assert said in found.notes[-1]
    zero = recipe(engine="deepspeed").model_copy(update={"model": large})
    assert said in of_one_rank(alone(), zero, 4).notes[-1]


def test_rank_memory_reference_of_preference_pairs_uses_whole_model() -> None:
    started = replace(alone(), phases={**alone().phases, "setup": alone().phases["forward"]})
    pairs = recipe(engine="fsdp").model_copy(update={"preference": PreferenceConfig()})
    found = of_one_rank(started, pairs, 4).phases["setup"]
    assert found.parts["weights"] == whole()["weights"]
    found = of_one_rank(started, recipe(engine="fsdp"), 4).phases["setup"]
    assert found.parts["weights"] == whole()["weights"] // 4


def test_rank_memory_deepspeed_shards_by_zero_stage_and_keeps_weight_copy() -> None:
    size = whole()["weights"]
    for stage, weights in ((1, size), (2, size), (3, size // 4)):
        found = of_one_rank(alone(), recipe(engine="deepspeed", zero_stage=stage), 4)
        step = found.phases["optimizer"].parts
        assert step["weights"] == weights + size // 4
        assert step["optimizer_states"] == 2 * size // 4
        # The shard of the gradients, and the tensor read by the update.
        assert step["gradients"] == 2 * size // 4
    # Stage 1 has all gradients and their bucket until the last micro-batch is done.
    forward = of_one_rank(alone(), recipe(2, engine="deepspeed", zero_stage=1), 4).phases["forward"]
    assert forward.parts["gradients"] == forward.parts["communication"] // 2 == size


def test_rank_memory_zero_3_gathers_parameters_only_with_several_processes() -> None:
    size = whole()["weights"]
    whole_model = PhasePeak(size, {"weights": size})
    started = replace(alone(), phases={**alone().phases, "setup": whole_model})
    zero = recipe(engine="deepspeed", zero_stage=3)
    found = of_one_rank(started, zero, 4)
    assert found.phases["setup"] == whole_model
    # The bucket, and all parameters, which are small enough to stay gathered.
    assert found.phases["forward"].parts["communication"] == 2 * size
    assert found.phases["optimizer"].parts["communication"] == 2 * size
    assert of_one_rank(alone(), zero, 1).phases["forward"].parts["communication"] == size


def test_rank_memory_zero_offload_on_cpu_counts_as_device_memory() -> None:
    size = whole()["weights"]
    largest = 4 * 1024 * 32
    moved = recipe(engine="deepspeed", zero_stage=1, offload="cpu")
    gpu, cpu = (of_one_rank(alone(), moved, 4, on_cpu=on_cpu) for on_cpu in (False, True))
    assert "optimizer_states" not in gpu.parts
    # Two moments, two copies of the weights, the gradients, and a buffer for one of these.
    assert gpu.host_bytes == 5 * size // 4 + largest
    assert cpu.host_bytes == 0
    found = cpu.phases["optimizer"].bytes
    assert found == gpu.phases["optimizer"].bytes + gpu.host_bytes


def test_rank_exchange_counts_micro_batches_and_offloaded_bytes() -> None:
    found = exchange_of(recipe(3, engine="fsdp"), 1000, 2, host_bytes=50)
    assert (found.gathers_weights, found.micro_batches, found.gradient_bytes) == (True, 3, 4000)
    assert found.offloaded_bytes == 2 * 50 * 3


# Model parallelism


def llama(accumulation: int = 1, tied: bool = False, **distributed: Any) -> ResolvedRecipe:
    return plain_recipe(
        {
            "data": {"dir": "/nowhere", "seq_len": 64},
            "model": {
                "vocab_size": 301,
                "hidden_size": 32,
                "intermediate_size": 96,
                "num_hidden_layers": 5,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": tied,
            },
            "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": accumulation},
            "distributed": distributed,
        }
    )


def test_own_part_has_its_heads_layers_and_batch_share() -> None:
    one = llama(tensor_parallel=2).model_copy()
    batch = one.batch.model_copy(
        update={"global_batch_tokens": 1024, "gradient_accumulation_steps": None}
    )
    one = one.model_copy(update={"batch": batch})
    found = own_part(one, 4)
    assert isinstance(found.model, LlamaConfig)
    assert (found.model.num_attention_heads, found.model.num_key_value_heads) == (2, 1)
    assert (found.model.head_dim, found.model.intermediate_size) == (8, 48)
    # Two replicas share the batch.
    assert found.batch.global_batch_tokens == 512
    staged = own_part(llama(pipeline=2), 2).model
    assert staged is not None
    assert staged.num_hidden_layers == 3
    assert own_part(llama(), 1) == llama()


def test_own_part_indivisible_shapes_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 2 is not divisible"):
        own_part(llama(tensor_parallel=4), 4)
    with pytest.raises(ConfigError, match="pipeline places the embedding and the head"):
        own_part(llama(pipeline=2, tied=True), 2)
    with pytest.raises(ConfigError, match=r"3 processes can't be divided .*: plan for 4"):
        own_part(llama(tensor_parallel=2), 3)


def test_rank_memory_vocabulary_tables_are_sharded_into_equal_parts() -> None:
    one = llama(tensor_parallel=2)
    part = own_part(one, 2)
    assert part.model is not None
    names = dict(meta_model(part.model).named_parameters())
    whole = sum(p.numel() for p in names.values())
    peak = PhasePeak(5 * 4 * whole, {"weights": 4 * whole, "activations": 16 * whole})
    before = MemoryPrediction(peak.bytes, "loss", peak.parts, {"loss": peak}, peak.bytes, 0, 0, ())
    found = with_own_tables(before, one, part)
    # Two tables of 301 rows and width 32; this rank has 151 rows of each.
    assert found.parts["weights"] == 4 * (whole - 2 * 150 * 32)
    assert found.parts["activations"] == 16 * whole
    assert found.peak_bytes == sum(found.parts.values())


def test_pipeline_first_stage_holds_pending_activations_and_last_the_loss() -> None:
    one = llama(accumulation=4, pipeline=3)
    part = own_part(one, 3)
    hidden = 4 * 2 * 64 * 32

    def found(activations: int, logits: int) -> MemoryPrediction:
        forward = PhasePeak(activations, {"activations": activations})
        loss = PhasePeak(
            activations + logits, {"activations": activations, "logits_and_loss": logits}
        )
        phases = {"forward": forward, "loss": loss}
        before = MemoryPrediction(loss.bytes, "loss", loss.parts, phases, loss.bytes, 0, 0, ())
        return with_own_tables(before, one, part)

    first = found(1000, 10)
    assert (first.phase, first.parts["activations"]) == ("forward", 3000)
    assert first.peak_bytes == 3000 + 2 * hidden
    last = found(1000, 5000)
    assert (last.phase, last.peak_bytes) == ("loss", 6000 + 2 * hidden)


def test_pipeline_bubble_is_wait_for_first_micro_batch() -> None:
    sent = exchange_of(llama(accumulation=4, pipeline=2), 1000, 2)
    assert (sent.processes, sent.stages) == (1, 2)
    assert bubble(sent) == 1 / 4
    assert waiting_bytes(sent) == 2 * 4 * sent.hidden_bytes
    assert bubble(exchange_of(llama(), 1000, 1)) == 0
