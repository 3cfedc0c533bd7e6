"""A model folder loads in mlx-lm without conversion, and computes the same there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import own_model, some_ids, write_folder

from firstlight.models import FAMILIES
from firstlight.tokenizer import Tokenizer

#: mlx-lm does not have a class for Arcee, expects the tensor names of GPT-2's and nanochat's
#: original checkpoints, and reads gpt-oss only in MXFP4.
_NOT_READ = ("arcee", "gpt2", "nanochat", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text")
#: Settings that mlx-lm requires to load a family.
_NEEDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
    **{
        family: {"tie_word_embeddings": False}
        for family in ("deepseek_v3", "glm4", "gpt_neox", "stablelm")
    },
    "olmo3": {"sliding_window": 16},
    "lfm2": {"tie_word_embeddings": True},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
#: mlx-lm computes the tanh approximation of GPT-NeoX's GELU.
_TOLERANCES = {"gpt_neox": 2e-3}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _NOT_READ])
def test_mlx_lm_computes_same_logits(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    sizes = {"vocab_size": 53, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    config: Any = FAMILIES[family].config
    own = own_model(config(model_type=family, **sizes, **_NEEDS.get(family, {})), seed=0)
    theirs, _ = load_model(write_folder(tmp_path / "model", own, tokenizer))
    ids = some_ids(0)
    with torch.no_grad():
        expected = own(ids)
    logits = torch.tensor(theirs(mx.array(ids.tolist())).astype(mx.float32).tolist())
    assert expected.abs().max() > 0.5, "the comparison would say nothing"
    torch.testing.assert_close(logits, expected, atol=_TOLERANCES.get(family, 1e-4), rtol=0)
