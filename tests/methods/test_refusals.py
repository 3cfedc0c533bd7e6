"""Settings that conflict are refused, and the alternatives that the message suggests work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe
from switches import CPU, refused_pairs

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.methods import apply_methods
from firstlight.models import empty_model
from firstlight.optim.optimizer import Optimizer
from firstlight.recipe.conflicts import ineffective, require_combination
from firstlight.training.starting_model import attach

#: Used only for its device type; nothing is computed on it.
GPU = Hardware(torch.device("cuda"), "a GPU of a test", 2**34, bf16=True)
_APPLE = Hardware(torch.device("mps"), "an Apple GPU of a test", 2**34, bf16=False)

Settings = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """Settings that conflict.

    Attributes:
        one, other: the two conflicting sides; each is legal without the other.
        advice: changes that the message suggests; each resolves the conflict.
        needed: settings added to both sides.
        alone: settings added to `one` if `other` is absent.
        hardware: the hardware on which the settings are refused.
    """

    one: Settings
    other: Settings
    advice: list[Settings]
    needed: Settings
    hardware: Hardware = CPU
    alone: Settings = field(default_factory=dict)


_IN_BACKWARD = {"efficiency.optimizer_in_backward": True}
_OFF = {"efficiency.optimizer_in_backward": False}
_NO_CLIPPING = {"optimizer.max_grad_norm": 0.0}
_MASKED = {"data.document_masking": True}
_WINDOW = {"model.model_type": "mistral", "model.sliding_window": 16}
_NAMED_GPU = {"run.device": "cuda"}
_DROPOUT = {"model.model_type": "gpt2", "model.attn_pdrop": 0.1}


def _attention(name: str) -> Settings:
    return {"efficiency.attention": name}


def _precision(name: str) -> Settings:
    return {"efficiency.precision": name}


def _on_gpu(attention: str, other: Settings, *advice: Settings, **needed: Any) -> Refusal:
    return Refusal(_attention(attention), other, list(advice), {**_NAMED_GPU, **needed}, GPU)


_TIED: Settings = {"model.tie_word_embeddings": True}
_LORA: Settings = {"lora.rank": 4}
#: In the order of the keys in the section.
_HEAD_KEYS: Settings = {
    "optimizer.head_weight_decay": 0.2,
    "optimizer.head_lr_multiple": 0.5,
    "optimizer.head_betas": [0.8, 0.9],
}
_VECTOR_KEY: Settings = {"optimizer.vector_lr_multiple": 2.0}
_VECTOR_BETAS: Settings = {"optimizer.vector_betas": [0.8, 0.9]}
_BF16: Settings = {"efficiency.precision": "bf16"}

REFUSALS = {
    "in-backward-accumulation": Refusal(
        _IN_BACKWARD,
        {"batch.gradient_accumulation_steps": 2},
        [{"batch.micro_batch_size": 8, "batch.gradient_accumulation_steps": 1}, _OFF],
        _NO_CLIPPING,
    ),
    "in-backward-global-tokens": Refusal(
        _IN_BACKWARD,
        {"batch.global_batch_tokens": 256},
        [{"batch.micro_batch_size": 8}, _OFF],
        _NO_CLIPPING,
    ),
    "in-backward-clipping": Refusal(
        _IN_BACKWARD,
        {"optimizer.max_grad_norm": 1.0},
        [_NO_CLIPPING, _OFF],
        {},
        alone=_NO_CLIPPING,
    ),
    "in-backward-fp16": Refusal(_IN_BACKWARD, _precision("fp16"), [_BF16, _OFF], _NO_CLIPPING),
    "budget-uncompiled": Refusal(
        {"efficiency.activation_checkpointing": "budget"},
        {"efficiency.compile": False},
        [
            {"efficiency.compile": True},
            {"efficiency.activation_checkpointing": "selective"},
        ],
        {},
        alone={"efficiency.compile": True},
    ),
    "regional-uncompiled": Refusal(
        {"efficiency.compile_regional": True},
        {"efficiency.compile": False},
        [{"efficiency.compile": True}, {"efficiency.compile_regional": False}],
        {},
        alone={"efficiency.compile": True},
    ),
    "mode-uncompiled": Refusal(
        {"efficiency.compile_mode": "max-autotune"},
        {"efficiency.compile": False},
        [{"efficiency.compile": True}, {"efficiency.compile_mode": "default"}],
        {},
        alone={"efficiency.compile": True},
    ),
    "mode-backend": Refusal(
        {"efficiency.compile_mode": "reduce-overhead"},
        {"efficiency.compile_backend": "aot_eager"},
        [{"efficiency.compile_backend": "inductor"}, {"efficiency.compile_mode": "default"}],
        {"efficiency.compile": True},
    ),
    "graphs-experts": Refusal(
        {"efficiency.compile_mode": "reduce-overhead"},
        {"model.model_type": "mixtral", "model.num_experts": 4},
        [
            {"efficiency.compile_mode": "default"},
            {"efficiency.compile_mode": "max-autotune-no-cudagraphs"},
        ],
        {**_NAMED_GPU, "efficiency.compile": True},
        GPU,
    ),
    "fp8-small-layers": Refusal(
        _precision("fp8"),
        {},
        [_BF16],
        {"model.hidden_size": 1024},
        GPU,
        alone={"model.intermediate_size": 4096},
    ),
    **{
        f"bf16-residual-{precision}": Refusal(
            {"efficiency.bf16_residual": True},
            _precision(precision),
            [_BF16, {"efficiency.bf16_residual": False}],
            {},
            alone=_BF16,
        )
        for precision in ("fp32", "tf32", "fp16")
    },
    **{
        f"{name}-{what}": _on_gpu(
            name,
            masked,
            *map(_attention, ("auto", "flex", "efficient")),
            **_BF16,
        )
        for name in ("flash", "cudnn")
        for what, masked in (("documents", _MASKED), ("window", _WINDOW))
    },
    **{
        f"{name}-{low}": _on_gpu(name, _precision(low), _BF16, _attention("efficient"))
        for name in ("flash", "cudnn")
        for low in ("fp32", "tf32")
    },
    **{
        f"{name}-dropout": _on_gpu(
            name, _DROPOUT, {"model.attn_pdrop": 0.0}, _attention("auto"), **_BF16
        )
        for name in ("flash", "flex")
    },
    **{
        f"{name}-cpu": Refusal(
            _attention(name),
            {},
            list(map(_attention, ("auto", "sdpa", "flash", "math", "blockwise", "plain"))),
            {},
        )
        for name in ("efficient", "cudnn", "flex")
    },
    "pinned-cpu": Refusal({"data.pin_memory": True}, {}, [{"data.pin_memory": None}], {}),
    **{
        f"8bit-{name}": Refusal(
            {"optimizer.name": "adamw8bit"},
            {"optimizer.implementation": name},
            [{"optimizer.implementation": "auto"}, {"optimizer.name": "adamw"}],
            {},
        )
        for name in ("for-loop", "foreach", "fused")
    },
    "adafactor-fused": Refusal(
        {"optimizer.name": "adafactor"},
        {"optimizer.implementation": "fused"},
        [{"optimizer.implementation": "foreach"}, {"optimizer.name": "adamw"}],
        {},
    ),
    "paged-torchao": Refusal(
        {"optimizer.name": "paged_adamw8bit"},
        {"optimizer.eight_bit_library": "torchao"},
        [{"optimizer.eight_bit_library": "bitsandbytes"}, {"optimizer.name": "adamw8bit"}],
        {},
    ),
}


def check(settings: Settings, hardware: Hardware) -> None:
    """Run the checks that a run performs before its first step.

    Raises:
        ConfigError: the run would be refused.
    """
    values: dict[str, Any] = {
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 30,
            "max_position_embeddings": 32,
        },
        "data": {"dir": "data", "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "efficiency": {"precision": "bf16", "compile": False},
    }
    for name, value in settings.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    require_combination(plain_recipe(values), hardware)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_both_settings_and_its_advice_works(name: str) -> None:
    refusal = REFUSALS[name]
    both = {**refusal.needed, **refusal.one, **refusal.other}
    with pytest.raises(ConfigError) as error:
        check(both, refusal.hardware)
    said = str(error.value)
    assert "\n" not in said
    for settings in (refusal.one, *refusal.advice):
        for setting in settings:
            assert setting.split(".")[1] in said
    for advice in refusal.advice:
        check({**both, **advice}, refusal.hardware)


@pytest.mark.parametrize("name", [n for n, refusal in REFUSALS.items() if refusal.other])
def test_refusal_each_setting_alone_is_legal(name: str) -> None:
    refusal = REFUSALS[name]
    check({**refusal.needed, **refusal.alone, **refusal.one}, refusal.hardware)
    check({**refusal.needed, **refusal.other}, refusal.hardware)


@pytest.mark.parametrize(
    "model",
    [
        {"model.model_type": "gpt_oss"},
        {"model.model_type": "gemma2", "model.attn_logit_softcapping": 5.0},
        {"model.model_type": "deepseek_v3", "model.v_head_dim": 8},
        {"model.model_type": "llama"},
    ],
    ids=lambda model: model["model.model_type"],
)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_refusal_suggested_attention_supports_model_family(
    model: Settings, hardware: Hardware
) -> None:
    settings = model if hardware is CPU else {**model, **_NAMED_GPU}
    refused = set()
    for name in ("sdpa", "flash", "efficient", "math", "cudnn", "flex"):
        try:
            check({**settings, **_attention(name)}, hardware)
        except ConfigError as error:
            refused.add(name)
            said = str(error)
            assert said.count("efficiency.attention") == 1, said
            advised = re.split(", | or ", said.rpartition(": use ")[2])
            # These recipes are resolved, so they do not contain "auto".
            assert "auto" in advised
            for other in set(advised) - {"auto"}:
                check({**settings, **_attention(other)}, hardware)
    assert ("flex" in refused) == (hardware is CPU or model["model.model_type"] == "deepseek_v3")


def test_refusal_table_contains_every_refused_pair() -> None:
    found = {frozenset(f"{factor}={value}" for factor, value in pair) for pair in refused_pairs()}
    assert found == {
        frozenset(pair)
        for pair in (
            ("update=in-backward", "batch=accumulated"),
            ("update=in-backward", "batch=global-tokens"),
            ("update=in-backward", "clipping=on"),
            ("update=in-backward", "precision=fp16"),
            ("checkpointing=budget", "compile=no"),
            ("optimizer=adamw8bit", "implementation=for-loop"),
            ("optimizer=adamw8bit", "implementation=foreach"),
            ("optimizer=adamw8bit", "implementation=fused"),
            ("optimizer=adafactor", "implementation=fused"),
        )
    }


def test_refusal_reports_all_conflicts_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check(
            {
                **_IN_BACKWARD,
                **_precision("fp16"),
                **_attention("flex"),
                "batch.gradient_accumulation_steps": 2,
                "data.pin_memory": True,
            },
            CPU,
        )
    said = str(error.value)
    assert said.count("; ") == 4
    for part in ("accumulate", "clip", "overflowed", "efficiency.attention flex", "pin_memory"):
        assert part in said


def _recipe(**sections: Settings) -> Any:
    return plain_recipe(
        {
            "data": {"dir": "data", "seq_len": 32},
            **sections,
            "model": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 30,
                **sections.get("model", {}),
            },
        }
    )


def test_refusal_chunked_loss_with_adapted_head_names_both_solutions() -> None:
    recipe = _recipe(
        efficiency={"loss_chunk_tokens": 8, "precision": "fp32"},
        lora={"targets": ["lm_head", "q_proj"]},
    )
    model = empty_model(recipe.model)
    model.init_weights(torch.Generator().manual_seed(0))
    attach(model, recipe, CPU)
    with pytest.raises(ConfigError, match=r"remove lm_head from lora\.targets") as error:
        apply_methods(model, recipe.efficiency, CPU)
    assert "set efficiency.loss_chunk_tokens to 0" in str(error.value)
    # Both solutions work.
    apply_methods(model, recipe.efficiency.model_copy(update={"loss_chunk_tokens": 0}), CPU)
    other = _recipe(efficiency={"precision": "fp32"}, lora={"targets": ["q_proj"]})
    plain = empty_model(recipe.model)
    plain.init_weights(torch.Generator().manual_seed(0))
    attach(plain, other, CPU)
    apply_methods(plain, recipe.efficiency, CPU)


def test_refusal_fp8_on_cpu_suggests_bf16() -> None:
    recipe = _recipe(efficiency={"precision": "fp8"})
    with pytest.raises(ConfigError, match=r"needs a GPU with fp8 matrix units .*: use bf16"):
        apply_methods(empty_model(recipe.model), recipe.efficiency, CPU)


def test_refusal_paged_optimizer_on_cpu_suggests_unpaged_one() -> None:
    recipe = _recipe(optimizer={"name": "paged_adamw8bit"})
    model = empty_model(recipe.model)
    with pytest.raises(ConfigError, match="the device is cpu: set it to adamw8bit"):
        Optimizer(model, recipe.optimizer)


@pytest.mark.parametrize(
    "settings,hardware,said",
    [
        (
            _precision("tf32"),
            CPU,
            ["efficiency.precision tf32 is the same as fp32 on a cpu device"],
        ),
        (_precision("tf32"), GPU, []),
        ({"efficiency.activation_offload": True}, CPU, ["has no effect on a CPU"]),
        ({"efficiency.activation_offload": True}, _APPLE, []),
        ({"efficiency.empty_cache_steps": 5}, _APPLE, ["has no effect on a mps device"]),
        ({"efficiency.empty_cache_steps": 5}, GPU, []),
        (
            {"efficiency.compile": True, "efficiency.compile_mode": "max-autotune"},
            CPU,
            ["compile_mode max-autotune has an effect on GPUs only"],
        ),
        (
            {"efficiency.compile": True, "efficiency.compile_backend": "cudagraphs"},
            CPU,
            ["compile_backend cudagraphs needs a GPU"],
        ),
        (
            {"efficiency.precision": "bf16", "efficiency.matmul_precision": "medium"},
            GPU,
            ["matmul_precision applies only to products of fp32 tensors"],
        ),
        ({"efficiency.precision": "fp32", "efficiency.matmul_precision": "medium"}, GPU, []),
        (
            {**_precision("bf16_params"), "efficiency.bf16_residual": True},
            GPU,
            ["bf16_residual has no effect with efficiency.precision bf16_params"],
        ),
        ({**_BF16, "efficiency.bf16_residual": True}, GPU, []),
        (
            {**_precision("fp8"), "efficiency.compile": False},
            GPU,
            ["fp8 is slower than bf16 without torch.compile"],
        ),
        ({**_precision("fp8"), "efficiency.compile": True}, GPU, []),
        (_HEAD_KEYS, GPU, []),
        (
            {**_HEAD_KEYS, **_TIED},
            CPU,
            [f"{key} has no effect" for key in _HEAD_KEYS],
        ),
        (
            {**_HEAD_KEYS, **_TIED},
            GPU,
            [f"{key} has no effect" for key in _HEAD_KEYS],
        ),
        (
            {"optimizer.embedding_lr_multiple": 2.0, "optimizer.head_betas": [0.8, 0.9], **_LORA},
            GPU,
            [
                "embedding_lr_multiple has no effect with lora, which trains no embedding",
                "optimizer.head_betas has no effect with lora, which trains no head",
            ],
        ),
        ({**_VECTOR_KEY, **_LORA}, CPU, ["vector_lr_multiple has no effect with lora"]),
        ({**_VECTOR_KEY, "lora.dora": True}, CPU, []),
        (_VECTOR_BETAS, CPU, []),
        (
            {**_VECTOR_BETAS, "optimizer.name": "sgd"},
            CPU,
            ["vector_betas has no effect with optimizer.name sgd"],
        ),
        (
            {**_VECTOR_BETAS, "optimizer.name": "adafactor"},
            CPU,
            ["vector_betas has no effect with optimizer.name adafactor"],
        ),
        (
            {"optimizer.muon_beta2": 0.95},
            GPU,
            ["optimizer.muon_beta2 has no effect with optimizer.name adamw: it applies to muon"],
        ),
        ({"optimizer.muon_beta2": 0.95, "optimizer.name": "muon"}, GPU, []),
        ({}, CPU, []),
    ],
)
def test_notes_report_settings_without_effect(
    settings: Settings, hardware: Hardware, said: list[str]
) -> None:
    sections: dict[str, Settings] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    notes = list(ineffective(_recipe(**sections), hardware))
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))
