"""Read Llama models from torchtune.

A model is a single file with weights. Source: pytorch/torchtune `models/convert_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.conversion.foreign.layout import Opened, llama_layout, tie, without_buffers

LAYOUT = llama_layout(
    "torchtune",
    ".attn.output_proj.weight",
    {
        "model.embed_tokens": "tok_embeddings",
        "model.layers.{}.input_layernorm": "layers.{}.sa_norm",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attn.q_proj",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attn.k_proj",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attn.v_proj",
        "model.layers.{}.self_attn.o_proj": "layers.{}.attn.output_proj",
        "model.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "model.layers.{}.mlp.gate_proj": "layers.{}.mlp.w1",
        "model.layers.{}.mlp.up_proj": "layers.{}.mlp.w3",
        "model.layers.{}.mlp.down_proj": "layers.{}.mlp.w2",
        "model.norm": "norm",
        "lm_head": "output",
    },
    norm="scale",
    rotates_pairs=True,
)


def open_weights(weights: Mapping[str, Any]) -> Opened:
    """Open a model, given its state_dict."""
    tensors = without_buffers(weights)
    tie(tensors)
    return Opened(LAYOUT, tensors)
