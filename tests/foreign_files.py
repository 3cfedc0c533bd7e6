"""Small checkpoints as nanoGPT and LLMs-from-scratch save them, of random tensors."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, CONTEXT, WIDTH, LAYERS, MLP = 7, 5, 64, 2, 24


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random tensors, each of its own seed."""
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, (name, shape) in enumerate(shapes.items())
    }


def nanogpt(bias: bool = True, **args: Any) -> dict[str, Any]:
    """A checkpoint as nanoGPT's train.py saves it."""
    C = WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, C),
        "transformer.wpe.weight": (CONTEXT, C),
    }
    for i in range(LAYERS):
        block = {
            "ln_1": (C,),
            "attn.c_attn": (3 * C, C),
            "attn.c_proj": (C, C),
            "ln_2": (C,),
            "mlp.c_fc": (4 * C, C),
            "mlp.c_proj": (C, 4 * C),
        }
        for module, shape in block.items():
            shapes[f"transformer.h.{i}.{module}.weight"] = shape
            if bias:
                shapes[f"transformer.h.{i}.{module}.bias"] = shape[:1]
    shapes["transformer.ln_f.weight"] = (C,)
    if bias:
        shapes["transformer.ln_f.bias"] = (C,)
    model = draw(shapes)
    model["lm_head.weight"] = model["transformer.wte.weight"]
    model_args = {
        "n_layer": LAYERS,
        "n_head": 4,
        "n_embd": C,
        "block_size": CONTEXT,
        "bias": bias,
        "vocab_size": VOCABULARY,
        "dropout": 0.25,
        **args,
    }
    return {"model": OrderedDict(model), "optimizer": {"state": {}}, "model_args": model_args}


def book_gpt(qkv_bias: bool = False, C: int = WIDTH) -> dict[str, Tensor]:
    """A state_dict of LLMs-from-scratch's GPTModel."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_emb.weight": (VOCABULARY, C),
        "pos_emb.weight": (CONTEXT, C),
    }
    for i in range(LAYERS):
        block = f"trf_blocks.{i}."
        shapes[block + "att.mask"] = (CONTEXT, CONTEXT)
        for name in ("W_query", "W_key", "W_value"):
            shapes[f"{block}att.{name}.weight"] = (C, C)
            if qkv_bias:
                shapes[f"{block}att.{name}.bias"] = (C,)
        shapes |= {block + "att.out_proj.weight": (C, C), block + "att.out_proj.bias": (C,)}
        shapes |= {block + "ff.layers.0.weight": (4 * C, C), block + "ff.layers.0.bias": (4 * C,)}
        shapes |= {block + "ff.layers.2.weight": (C, 4 * C), block + "ff.layers.2.bias": (C,)}
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}{norm}.scale": (C,), f"{block}{norm}.shift": (C,)}
    shapes |= {"final_norm.scale": (C,), "final_norm.shift": (C,)}
    return draw({**shapes, "out_head.weight": (VOCABULARY, C)})


def book_llama(kv_width: int = 32) -> dict[str, Tensor]:
    """A state_dict of LLMs-from-scratch's Llama3Model."""
    C = WIDTH
    shapes: dict[str, tuple[int, ...]] = {"tok_emb.weight": (VOCABULARY, C)}
    for i in range(LAYERS):
        block = f"trf_blocks.{i}."
        for name, rows in (("W_query", C), ("W_key", kv_width), ("W_value", kv_width)):
            shapes[f"{block}att.{name}.weight"] = (rows, C)
        shapes[block + "att.out_proj.weight"] = (C, C)
        shapes |= {f"{block}ff.fc{k}.weight": (MLP, C) for k in (1, 2)}
        shapes[block + "ff.fc3.weight"] = (C, MLP)
        shapes |= {f"{block}norm{k}.weight": (C,) for k in (1, 2)}
    return draw({**shapes, "final_norm.weight": (C,), "out_head.weight": (VOCABULARY, C)})


LLAMA_CONFIG: dict[str, Any] = {
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
}


def save(path: Path, content: Any) -> Path:
    """Saves an object with torch.save; gives the path."""
    torch.save(content, path)
    return path
