"""A checkpoint's config.json has what the readers of other programs ask for.

The lists are taken from their sources: vllm-project/vllm
`vllm/transformers_utils/model_arch_config_convertor.py` (sgl-project/sglang's
`python/sglang/srt/configs/model_config.py` asks for the same), ml-explore/mlx-lm
`mlx_lm/models/*.py` (fields of `ModelArgs` without a default, and the ones of rotary positions).
transformers is asked itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.models import FAMILIES
from firstlight.tokenizer import train_tokenizer
from firstlight.weights.huggingface import model_files

#: Attributes of transformers' config that vLLM and SGLang read, for every family.
VLLM: tuple[str, ...] = (
    "architectures",
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
VLLM += ("hidden_size", "dtype", "max_position_embeddings")
VLLM_HEADS = ("num_key_value_heads", "head_dim")
VLLM_EXPERTS = ("num_experts_per_tok",)
#: Keys of the number of experts; a family has one of them.
VLLM_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")

_MLX: tuple[str, ...] = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "rms_norm_eps",
)
_MLX += ("num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling")
_MLX += ("max_position_embeddings", "tie_word_embeddings")
_MLX_EXPERTS = ("num_experts", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size")
#: Keys of config.json that mlx-lm's families read. Its GPT-2 is another's: see
#: docs/serving-elsewhere.md.
MLX = {
    "llama": (*_MLX, "head_dim", "attention_bias", "mlp_bias"),
    "mistral": (*_MLX, "head_dim"),
    "qwen2": _MLX,
    "qwen3": (*_MLX, "head_dim"),
    "granite": (
        *(*_MLX, "attention_bias", "mlp_bias", "logits_scaling", "attention_multiplier"),
        *("embedding_multiplier", "residual_multiplier"),
    ),
    "mixtral": (*_MLX, "num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": (*_MLX, "head_dim", *_MLX_EXPERTS, "num_experts_per_tok", "norm_topk_prob"),
}


def small(kind: str) -> Any:
    """The config of a small model."""
    shape: dict[str, Any] = {"vocab_size": 280, "hidden_size": 64, "num_hidden_layers": 2}
    shape["num_attention_heads"] = 4
    config: Any = FAMILIES[kind].config
    return config(model_type=kind, **shape)


def written(kind: str) -> dict[str, str]:
    """The JSON files of a checkpoint of a small model."""
    return model_files(small(kind), train_tokenizer(["hello there"], 280))


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_config_has_what_vllm_and_sglang_read(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, text in written(kind).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    names = VLLM if kind == "gpt2" else VLLM + VLLM_HEADS
    # Where heads follow from the other sizes, they compute them, too.
    names = tuple(name for name in names if name not in FAMILIES[kind].spec.derived_keys)
    count = small(kind).expert_count
    for name in names + (VLLM_EXPERTS if count else ()):
        assert getattr(config, name, None) is not None, name
    if count:
        assert any(getattr(config, name, 0) == count for name in VLLM_EXPERT_COUNTS)
    (architecture,) = config.architectures
    assert getattr(transformers, architecture).config_class is type(config)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == 0


@pytest.mark.parametrize("kind", MLX)
def test_config_json_has_what_mlx_lm_reads(kind: str) -> None:
    content = json.loads(written(kind)["config.json"])
    assert [name for name in MLX[kind] if name not in content] == []
    # Its rotary positions come from these two, not from transformers 5's one object.
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"]
    assert content["rope_scaling"] is None
