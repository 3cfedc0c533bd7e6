"""Tracing without memory: exact bytes where they can be counted by hand, and equality with torch's
allocator for the same code on real tensors.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import measured_memory
from builders import slow_but
from firstlight.errors import ConfigError
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.memory.kernels import Target, this_cpu
from firstlight.planner.memory.module import plan_module
from firstlight.planner.memory.prediction import predict
from firstlight.planner.memory.program import fake_tensors
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.memory.trace import Tracer
from firstlight.planner.plan.machine import find_machine
from planner_recipes import LLAMA, predict_evaluation, real_steps, recipe


class TwoLayers(nn.Module):
    """16 -> 32 -> 8, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32, bias=False)
        self.second = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu()).sum()
        return result


class TestCountedByHand:
    weights = 4 * (16 * 32 + 32 * 8)
    batch = 4 * 10 * 16

    def test_forward_pass_saves_tensors_needed_by_backward(self) -> None:
        tracer = Tracer()
        with fake_tensors(), tracer:
            model, x = TwoLayers(), torch.empty(10, 16)
            tracer.mark(model.parameters(), "weights")
            tracer.mark([x], "activations")
            with tracer.forward_pass():
                loss = model(x)
            trace = tracer.finish()
            del loss
        peak = predict(trace, Target()).phases["forward"]
        # The input; relu's result, which both relu and the second layer save; and the loss itself.
        assert peak.parts["weights"] == self.weights
        assert peak.parts["activations"] >= self.batch + 4 * 10 * 32
        # At most the first product together with relu's result.
        assert peak.bytes == self.weights + self.batch + 2 * 4 * 10 * 32

    def test_optimizer_phase_holds_weights_gradients_and_states(self) -> None:
        def adamw(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, fused=True)

        found = plan_module(TwoLayers(), [torch.empty(10, 16)], optimizer=adamw, target=Target())
        counters = 2 * 4
        assert found.phases["optimizer"].parts == {
            "weights": self.weights,
            "gradients": self.weights,
            "optimizer_states": 2 * self.weights + counters,
            "activations": self.batch,
        }

    def test_gradients_zeroed_in_place_stay_allocated(self) -> None:
        found = plan_module(
            TwoLayers(),
            [torch.empty(10, 16)],
            optimizer="sgd",
            zero_grad="in_place",
            target=Target(),
        )
        assert found.phases["forward"].parts["gradients"] == self.weights
        freed = plan_module(TwoLayers(), [torch.empty(10, 16)], optimizer="sgd", target=Target())
        assert "gradients" not in freed.phases["forward"].parts

    def test_accumulation_holds_gradients_of_earlier_micro_batch(self) -> None:
        found = plan_module(
            TwoLayers(),
            [torch.empty(10, 16)],
            optimizer="sgd",
            gradient_accumulation_steps=4,
            target=Target(),
        )
        assert found.phases["forward"].parts["gradients"] == self.weights

    def test_trace_counts_operators_and_their_flops(self) -> None:
        found = plan_module(TwoLayers(), [torch.empty(10, 16)], optimizer="sgd", target=Target())
        flops = sum(entry.count * entry.operator.flops for entry in found.operators)
        # 2 for the forward pass, 2 for the weights' gradients, and 2 for the gradient of the second
        # layer's input.
        assert flops == 2 * 10 * (2 * 16 * 32 + 3 * 32 * 8)
        products = [e for e in found.operators if e.operator.name == "aten.mm.default"]
        assert sum(entry.count for entry in products) == 5


def test_trace_invents_values_that_code_reads() -> None:
    tracer = Tracer()
    with fake_tensors(), tracer:
        assert torch.empty(3).sum().item() == 0.5
        assert int(torch.empty(3, dtype=torch.int64).sum()) == 1


def test_paused_tracer_records_nothing() -> None:
    tracer = Tracer()
    with fake_tensors(), tracer:
        with tracer.paused():
            torch.empty(3) + 1
        assert tracer.tick == -1
        torch.empty(3) + 1
        assert tracer.tick == 1


def test_gpu_setup_weights_are_made_on_cpu_except_for_references() -> None:
    def found(gpu: str | None, **sections: Any) -> dict[str, int]:
        target = find_machine(gpu).target
        lora = recipe(
            LLAMA, lora={"rank": 4, "quantize": "nf4"}, efficiency={"precision": "bf16"}, **sections
        )
        return trace_memory(lora, target).phases["setup"].parts

    model = recipe(LLAMA).model
    assert model is not None
    whole = count_parameters(meta_model(model)).total
    # The vocabulary's tables, which are half of it, are in bf16.
    assert found("RTX 4090")["weights"] < 3 * whole
    assert found(None)["weights"] > 4 * whole
    pairs = {"kind": "preference", "files": "pairs.jsonl", "dir": None}
    assert found("RTX 4090", data=pairs, preference={})["weights"] > 4 * whole


def test_view_storage_counts_once_and_lives_with_view() -> None:
    tracer = Tracer()
    with fake_tensors(), tracer:
        view = torch.empty(100, dtype=torch.uint8)[:10]
        gc.collect()
        torch.empty(1)
        trace = tracer.finish()
        del view
    sizes = [storage.size for storage in trace.storages]
    assert sizes == [100, 4]
    assert trace.storages[0].death >= tracer.tick


def test_plan_module_leaves_module_unchanged() -> None:
    model = TwoLayers()
    before = {name: p.clone() for name, p in model.named_parameters()}
    plan_module(model, [torch.empty(10, 16)], target=Target())
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_plan_module_on_meta_device_allocates_nothing() -> None:
    with torch.device("meta"):
        model, x = TwoLayers(), torch.empty(10, 16)
    real = plan_module(TwoLayers(), [torch.empty(10, 16)], target=Target())
    assert plan_module(model, [x], target=Target()) == real


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optimizer": "adamv"}, "did you mean 'adamw'"),
        ({"precision": "fp61"}, "did you mean 'fp16'"),
        ({"activation_checkpointing": True}, "not have gradient_checkpointing_enable"),
        ({"loss": lambda _: torch.empty(2)}, "the model does not return a loss"),
        ({"optimizer": None}, "optimizer 'None' is unknown"),
        ({"gradient_accumulation_steps": 0}, "it must be at least 1"),
        ({"zero_grad": "x"}, "zero_grad 'x' is unknown"),
    ],
)
def test_plan_module_unsupported_input_raises_config_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_module(TwoLayers(), [torch.empty(10, 16)], **arguments)


def test_plan_module_without_parameters_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="ReLU has no trainable parameters"):
        plan_module(nn.ReLU(), [torch.empty(10, 16)], target=Target())


def test_plan_module_accepts_loss_in_dictionary() -> None:
    class Named(TwoLayers):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": x, "loss": super().forward(x)}

    plain = plan_module(TwoLayers(), [torch.empty(10, 16)], target=Target())
    assert plan_module(Named(), [torch.empty(10, 16)], target=Target()).peak_bytes == (
        plain.peak_bytes
    )


def test_plan_module_notes_uncounted_convolution_workspace() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x).sum()
            return result

    (note,) = plan_module(Convolution(), [torch.empty(2, 3, 8, 8)], target=Target()).notes
    assert note.startswith("memory that libraries allocate inside convolution")
    assert plan_module(TwoLayers(), [torch.empty(10, 16)], target=Target()).notes == ()


def test_plan_module_notes_uncounted_recurrent_workspace() -> None:
    recurrent = nn.GRU(4, 4)
    target = find_machine("RTX 4090").target
    options = {"loss": lambda found: found[0].sum(), "target": target}
    (note,) = plan_module(recurrent, [torch.empty(2, 3, 4)], **options).notes  # type: ignore[arg-type]
    assert note.startswith("memory that libraries allocate inside gru is")


_WINDOW = {"sliding_window": 40}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 48},
    "granite": {"residual_multiplier": 0.2, "logits_scaling": 8.0},
    "smollm3": {},
    "phi3": _WINDOW,
    "olmo2": {},
    "olmo3": _WINDOW,
    "arcee": {},
    "glm4": {},
    "gemma3_text": {**_WINDOW, "rope_local_base_freq": 100.0},
    "stablelm": {"qk_layernorm": True},
    "gpt_neox": {"num_key_value_heads": 2},
    "nanochat": {},
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_METHODS: dict[str, dict[str, Any]] = {
    **{name: {"model": {**LLAMA, "model_type": name, **own}} for name, own in _FAMILIES.items()},
    "gemma2": {
        "model": {**LLAMA, "model_type": "gemma2", **_WINDOW, **_CAPS},
        "efficiency": {"attention": "blockwise"},
    },
    "plain": {},
    "llama": {"model": LLAMA},
    "bf16": {"efficiency": {"precision": "bf16"}},
    "bf16 residual": {"efficiency": {"precision": "bf16", "bf16_residual": True}},
    "bf16 residual, llama": {
        "model": LLAMA,
        "efficiency": {"precision": "bf16", "bf16_residual": True},
    },
    "fp16": {"efficiency": {"precision": "fp16"}},
    "bf16 parameters": {"efficiency": {"precision": "bf16_params"}},
    "accumulation": {"batch": {"gradient_accumulation_steps": 2}},
    "written-out attention": {"efficiency": {"attention": "plain"}},
    "math attention": {"efficiency": {"attention": "math"}},
    "full checkpointing": {"efficiency": {"activation_checkpointing": "full"}},
    "selective checkpointing": {"efficiency": {"activation_checkpointing": "selective"}},
    "offload": {"efficiency": {"activation_offload": True}},
    "chunked loss": {"efficiency": {"loss_chunk_tokens": 64}},
    "chunked loss, bf16": {"efficiency": {"loss_chunk_tokens": 256, "precision": "bf16"}},
    "documents": {"data": {"document_masking": True}},
    "foreach": {"optimizer": {"implementation": "foreach"}, "batch": {"micro_batch_size": 1}},
    "for-loop": {"optimizer": {"implementation": "for-loop"}, "batch": {"micro_batch_size": 1}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "8-bit, embeddings in 32 bits": {
        "optimizer": {
            "name": "adamw8bit",
            "eight_bit_library": "bitsandbytes",
            "embeddings_in_32_bits": True,
        }
    },
    "muon": {"optimizer": {"name": "muon"}},
    "sgd": {"optimizer": {"name": "sgd"}},
    "lion": {"optimizer": {"name": "lion"}},
    "in backward": {
        "efficiency": {"optimizer_in_backward": True},
        "optimizer": {"max_grad_norm": 0.0},
    },
    "LoRA": {"model": LLAMA, "lora": {"rank": 4}, "efficiency": {"precision": "bf16"}},
    "LoRA of the embedding, whole head": {
        "model": LLAMA | {"tie_word_embeddings": True},
        "lora": {"targets": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]},
    },
    "LoRA, rows of tokens": {
        "model": LLAMA | {"tie_word_embeddings": True},
        "lora": {"targets": ["q_proj"], "trainable_token_indices": [1, 2, 3]},
        "efficiency": {"precision": "bf16"},
    },
    "gpt-oss": {
        "model": LLAMA | {"model_type": "gpt_oss", **_EXPERTS, **_WINDOW},
        "efficiency": {"attention": "blockwise"},
    },
    **{
        f"deepseek_v{version}": {
            "model": {**LLAMA, "model_type": f"deepseek_v{version}", "num_key_value_heads": 4}
            | {"num_attention_heads": 4, "q_lora_rank": 32, "num_experts_per_tok": 2},
            "efficiency": {"attention": "blockwise"},
        }
        for version in (2, 3)
    },
    "qwen3_next": {
        "model": LLAMA
        | {"model_type": "qwen3_next", **_EXPERTS}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "qwen3_5_text": {
        "model": LLAMA
        | {"model_type": "qwen3_5_text", "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "qwen3_5_moe_text": {
        "model": LLAMA
        | {"model_type": "qwen3_5_moe_text", **_EXPERTS}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "lfm2": {"model": LLAMA | {"model_type": "lfm2"}},
    "experts": {"model": LLAMA | {"model_type": "mixtral", **_EXPERTS}},
}


#: Settings with different memory use; `make test-slow` runs all.
_UNLIKE = (
    *("bf16 residual", "fp16", "bf16 parameters", "accumulation", "full checkpointing"),
    *("selective checkpointing", "offload", "chunked loss, bf16", "documents", "foreach"),
    *("adafactor", "muon", "in backward", "LoRA", "gpt-oss", "qwen3_next", "experts"),
    *("LoRA of the embedding, whole head", "LoRA, rows of tokens"),
)


@pytest.mark.parametrize("name", slow_but(_UNLIKE, _METHODS))
def test_planned_recipe_matches_measured_steps(name: str) -> None:
    planned = recipe(**_METHODS[name])
    predicted = trace_memory(planned)
    with measured_memory() as measured:
        real_steps(planned)
    # In models this small, the buffers of half-precision products (an upper bound) and of small
    # random states are visible.
    assert measured.peak_bytes * 0.995 <= predicted.peak_bytes <= measured.peak_bytes * 1.05
    assert sum(predicted.parts.values()) == predicted.peak_bytes


def test_planned_plain_recipe_is_exact() -> None:
    planned = recipe()
    with measured_memory() as measured:
        real_steps(planned)
    assert abs(trace_memory(planned).peak_bytes - measured.peak_bytes) < 1000


def test_step_trace_has_expected_phases() -> None:
    found = trace_memory(recipe())
    names = {"setup", "forward", "loss", "backward of loss", "backward", "clipping", "optimizer"}
    assert set(found.phases) == names
    assert max(found.phases.values(), key=lambda peak: peak.bytes).bytes == found.peak_bytes
    assert "optimizer_states" in found.phases["forward"].parts
    # The logits and their logarithms.
    assert found.phases["loss"].parts["logits_and_loss"] >= 2 * 4 * 2 * 128 * 512


def test_evaluation_during_run_includes_optimizer_state() -> None:
    training, evaluation = trace_memory(recipe()), predict_evaluation(recipe())
    assert evaluation.phase == "evaluation"
    state = training.phases["forward"].parts["optimizer_states"]
    assert evaluation.parts["optimizer_states"] == state > 0


def test_planning_does_not_affect_real_training() -> None:
    planned = recipe(efficiency={"precision": "bf16"})
    trace_memory(planned)
    real_steps(planned)


def test_prediction_converts_to_json() -> None:
    import json

    values = json.loads(json.dumps(trace_memory(recipe()).to_json()))
    assert values["total_bytes"] == values["peak_bytes"]
    assert "operators" not in values


def test_measured_memory_counts_allocations_and_frees() -> None:
    with measured_memory() as result:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second = torch.empty(3000, dtype=torch.uint8)
        third = torch.empty(500, dtype=torch.uint8)
        del second, third
    assert result.peak_bytes == 3500


def test_this_cpu_target_has_torch_thread_count() -> None:
    assert this_cpu().threads == torch.get_num_threads()
