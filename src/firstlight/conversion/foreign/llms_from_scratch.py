"""Read GPT and Llama models from LLMs-from-scratch (rasbt/LLMs-from-scratch), which is the code for
the book "Build a Large Language Model (From Scratch)".

A checkpoint is a single file with the weights and, optionally, the optimizer state. The tensor
names are those used in `pkg/llms_from_scratch/ch04.py`, `llama3.py` and `ch05/07_gpt_to_llama`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from firstlight.conversion.foreign.layout import (
    GPT2_MODULES,
    GPT2_SHAPES,
    Layout,
    Opened,
    Settings,
    llama_layout,
    without_buffers,
)
from firstlight.errors import ModelError

#: Biases that exist only if the GPT model was created with `qkv_bias`.
QKV_BIAS = frozenset({"transformer.h.{}.attn.c_attn.bias"})

#: Module names of `GPTModel`, keyed by the module names of Hugging Face's GPT-2. If there are
#: several for one key, their weights are stacked along the output dimension.
_GPT = {
    "transformer.wte": ("tok_emb",),
    "transformer.wpe": ("pos_emb",),
    "transformer.h.{}.ln_1": ("trf_blocks.{}.norm1",),
    "transformer.h.{}.attn.c_attn": (
        "trf_blocks.{}.att.W_query",
        "trf_blocks.{}.att.W_key",
        "trf_blocks.{}.att.W_value",
    ),
    "transformer.h.{}.attn.c_proj": ("trf_blocks.{}.att.out_proj",),
    "transformer.h.{}.ln_2": ("trf_blocks.{}.norm2",),
    "transformer.h.{}.mlp.c_fc": ("trf_blocks.{}.ff.layers.0",),
    "transformer.h.{}.mlp.c_proj": ("trf_blocks.{}.ff.layers.2",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("out_head",),
}
#: `GPTModelFast` uses a single matrix for queries, keys and values.
_GPT_FAST = _GPT | {
    "transformer.h.{}.attn.c_attn": ("trf_blocks.{}.att.qkv",),
    "transformer.h.{}.attn.c_proj": ("trf_blocks.{}.att.proj",),
}


def _gpt_layout(
    mark: str, modules: Mapping[str, tuple[str, ...]], norm: Mapping[str, str]
) -> Layout:
    """Return the layout of a GPT model. `norm` maps "weight" and "bias" to the names that the
    program uses for the weight and the bias of a norm.
    """
    names = {}
    for module, (_, bias) in GPT2_MODULES.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            name = norm[kind] if "ln_" in module else kind
            names[f"{module}.{kind}"] = tuple(f"{one}.{name}" for one in modules[module])
    return Layout("LLMs-from-scratch", "gpt2", mark, names, shapes=GPT2_SHAPES, optional=QKV_BIAS)


GPT_FAST = _gpt_layout(".att.qkv.weight", _GPT_FAST, {"weight": "weight", "bias": "bias"})
GPT = _gpt_layout(".ff.layers.0.weight", _GPT, {"weight": "scale", "bias": "shift"})
#: Layout of `Llama2Model`, `Llama3Model` and `Llama3ModelFast`. As in Hugging Face, RoPE rotates
#: rows (i, i + D/2) of a head as a pair.
LLAMA = llama_layout(
    "LLMs-from-scratch",
    ".ff.fc1.weight",
    {
        "model.embed_tokens": "tok_emb",
        "model.layers.{}.input_layernorm": "trf_blocks.{}.norm1",
        "model.layers.{}.self_attn.q_proj": "trf_blocks.{}.att.W_query",
        "model.layers.{}.self_attn.k_proj": "trf_blocks.{}.att.W_key",
        "model.layers.{}.self_attn.v_proj": "trf_blocks.{}.att.W_value",
        "model.layers.{}.self_attn.o_proj": "trf_blocks.{}.att.out_proj",
        "model.layers.{}.post_attention_layernorm": "trf_blocks.{}.norm2",
        "model.layers.{}.mlp.gate_proj": "trf_blocks.{}.ff.fc1",
        "model.layers.{}.mlp.up_proj": "trf_blocks.{}.ff.fc2",
        "model.layers.{}.mlp.down_proj": "trf_blocks.{}.ff.fc3",
        "model.norm": "final_norm",
        "lm_head": "out_head",
    },
)


def open_gpt(weights: Mapping[str, Any], layout: Layout) -> Opened:
    """Open a GPT model. `layout` must be `GPT` or `GPT_FAST`.

    The activation function can be GELU or ReLU, because some readers of the book replace GELU with
    ReLU.
    """
    settings = Settings(
        found={"layer_norm_epsilon": 1e-5},
        assumed={"activation_function": "gelu_new"},
        choices={"activation_function": ("gelu_new", "relu")},
    )
    return Opened(layout, without_buffers(weights), settings)


def open_llama(path: Path, weights: Mapping[str, Any]) -> Opened:
    """Open a Llama model. If the file contains RoPE tables, as older files do, the number of heads
    and the context length are inferred from them.

    Raises:
        ModelError: the RoPE tables have an invalid shape.
    """
    found: dict[str, Any] = {"rms_norm_eps": 1e-5}
    sines, embedding = weights.get("trf_blocks.0.att.sin"), weights.get("tok_emb.weight")
    if not isinstance(sines, Tensor) or not isinstance(embedding, Tensor):
        return Opened(LLAMA, without_buffers(weights), Settings(found=found))
    width = embedding.shape[-1] if embedding.dim() else 0
    if sines.dim() != 2 or 0 in sines.shape or width % sines.shape[1]:
        raise ModelError(f"{path}: its rotary tables have the impossible shape {list(sines.shape)}")
    settings = Settings(
        found={**found, "num_attention_heads": width // sines.shape[1]},
        assumed={"max_position_embeddings": sines.shape[0]},
        sines=sines,
    )
    return Opened(LLAMA, without_buffers(weights), settings)
