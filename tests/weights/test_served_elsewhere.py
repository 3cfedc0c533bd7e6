"""A checkpoint's config.json has the fields that other programs read.

The lists are taken from the sources of these programs: vllm-project/vllm
`vllm/transformers_utils/model_arch_config_convertor.py` (sgl-project/sglang's
`python/sglang/srt/configs/model_config.py` reads the same fields). transformers is tested directly,
as is mlx-lm in tests/parity/test_mlx.py.
"""

from __future__ import annotations

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
#: Keys with the number of experts; each family has one of them.
VLLM_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def small(kind: str) -> Any:
    """Return the config of a small model."""
    shape: dict[str, Any] = {"vocab_size": 280, "hidden_size": 64, "num_hidden_layers": 2}
    shape["num_attention_heads"] = 4
    config: Any = FAMILIES[kind].config
    return config(model_type=kind, **shape)


def written(kind: str) -> dict[str, str]:
    """Return the JSON files of a checkpoint of a small model."""
    return model_files(small(kind), train_tokenizer(["hello there"], 280))


@pytest.mark.parametrize("kind", FAMILIES)
def test_saved_config_has_fields_read_by_vllm_and_sglang(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, text in written(kind).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    names = VLLM if kind == "gpt2" else VLLM + VLLM_HEADS
    # If the head dimension follows from the other sizes, they compute it, too.
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
