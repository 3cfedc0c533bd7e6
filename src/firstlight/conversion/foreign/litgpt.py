"""Read Llama-like models from litgpt.

A model is a folder with `lit_model.pth` and `model_config.yaml`. Source: Lightning-AI/litgpt
`litgpt/model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign.layout import (
    Layout,
    Opened,
    Settings,
    is_number,
    llama_layout,
    optimizer_states,
    require_range,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.errors import ModelError
from firstlight.files.atomic import read_file
from firstlight.recipe.load import parse_yaml

FILE = "lit_model.pth"
CONFIG = "model_config.yaml"
#: Maximum size of model_config.yaml in bytes.
_MAX_CONFIG_BYTES = 1_000_000

#: litgpt's module names, keyed by the module names of Hugging Face's Llama. The fused matrix for
#: queries, keys and values is split into [q], [k] and [v] when the checkpoint is opened.
_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{}.input_layernorm": "transformer.h.{}.norm_1",
    "model.layers.{}.self_attn.q_proj": "transformer.h.{}.attn.qkv[q]",
    "model.layers.{}.self_attn.k_proj": "transformer.h.{}.attn.qkv[k]",
    "model.layers.{}.self_attn.v_proj": "transformer.h.{}.attn.qkv[v]",
    "model.layers.{}.self_attn.o_proj": "transformer.h.{}.attn.proj",
    "model.layers.{}.post_attention_layernorm": "transformer.h.{}.norm_2",
    "model.layers.{}.mlp.gate_proj": "transformer.h.{}.mlp.fc_1",
    "model.layers.{}.mlp.up_proj": "transformer.h.{}.mlp.fc_2",
    "model.layers.{}.mlp.down_proj": "transformer.h.{}.mlp.proj",
    "model.norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
#: Additional tensors in litgpt's checkpoints. Qwen2 has biases for queries, keys and values, and
#: Qwen3 has norms for queries and keys.
_BIASES = {
    f"model.layers.{{}}.self_attn.{x}_proj.bias": (f"transformer.h.{{}}.attn.qkv[{x}].bias",)
    for x in "qkv"
}
_NORMS = {
    f"model.layers.{{}}.self_attn.{x}_norm.weight": (f"transformer.h.{{}}.attn.norm_{x}.weight",)
    for x in "qk"
}
#: Keys of litgpt's model_config.yaml for which only certain values are supported. Each key is
#: mapped to its default value in litgpt, which is used if the file does not contain the key, and to
#: the supported values.
_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "norm_class_name": ("LayerNorm", ("RMSNorm",)),
    "mlp_class_name": ("GptNeoxMLP", ("LLaMAMLP",)),
    "parallel_residual": (True, (False,)),
    "shared_attention_norm": (False, (False,)),
    "rotary_percentage": (0.25, (1, 1.0)),
    "rope_condense_ratio": (1, (1,)),
    "bias": (True, (False,)),
    "lm_head_bias": (False, (False,)),
    "norm_qk_type": ("default", ("default",)),
    "norm_1": (True, (True,)),
    "norm_2": (True, (True,)),
    "post_attention_norm": (False, (False,)),
    "post_mlp_norm": (False, (False,)),
    "scale_embeddings": (False, (False,)),
    "attention_logit_softcapping": (None, (None,)),
    "final_logit_softcapping": (None, (None,)),
    "attention_scores_scalar": (None, (None,)),
    "rope_local_base_freq": (None, (None,)),
    "latent_attention": (None, (None,)),
    "n_expert": (0, (0,)),
}
_NEEDED = ("n_layer", "n_head", "n_embd", "intermediate_size", "block_size", "norm_eps")


def open_folder(folder: Path) -> Opened:
    """Open the folder of a Llama-like litgpt model, which contains `lit_model.pth` and
    `model_config.yaml`.
    """
    path, config_path = folder / FILE, folder / CONFIG
    content = read_file(config_path, _MAX_CONFIG_BYTES)
    try:
        values = parse_yaml(content)
    except ValueError as error:
        raise ModelError(f"{config_path} is not valid YAML ({error}): copy it again") from error
    settings, rows = _settings(config_path, values)
    saved = read_pickle(path)
    weights = named_weights(path, saved)
    layout = _layout(
        qkv_bias=settings.found["model_type"] == "qwen2",
        qk_norm=settings.found["model_type"] == "qwen3",
    )
    return Opened(
        layout,
        _cut_qkv(path, weights, rows),
        settings,
        optimizer_states(saved),
    )


def _cut_qkv(path: Path, weights: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Split litgpt's fused matrix `attn.qkv` into three tensors `attn.qkv[q]`, `attn.qkv[k]` and
    `attn.qkv[v]`. `rows` contains the number of rows for queries, keys and values.
    """
    cut: dict[str, Any] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.*\.attn\.qkv)\.(weight|bias)", name)
        if match is None or not isinstance(value, Tensor):
            cut[name] = value
        elif value.dim() == 0 or len(value) != sum(rows):
            raise ModelError(
                f"{path}: {name} has shape {list(value.shape)}, but {CONFIG} requires "
                f"{sum(rows)} rows"
            )
        elif not is_whole(value):
            raise ModelError(f"{path}: {name} has fewer elements than its shape requires")
        else:
            for letter, part in zip("qkv", torch.split(value, list(rows)), strict=True):
                cut[f"{match[1]}[{letter}].{match[2]}"] = part
    return cut


def _layout(*, qkv_bias: bool, qk_norm: bool) -> Layout:
    """Return the layout of a Llama-like litgpt model.

    Args:
        qkv_bias: True if the query, key and value projections have biases.
        qk_norm: True if queries and keys are normalised.
    """
    plain = llama_layout("litgpt", ".mlp.fc_1.weight", _MODULES)
    names, shapes = dict(plain.names), dict(plain.shapes)
    if qkv_bias:
        names |= _BIASES
        shapes |= {name: "Q" if "q_proj" in name else "K" for name in _BIASES}
    if qk_norm:
        names |= _NORMS
        shapes |= dict.fromkeys(_NORMS, "D")
    return replace(plain, names=names, shapes=shapes)


def _settings(path: Path, values: Any) -> tuple[Settings, tuple[int, int, int]]:
    """Return the settings of a Llama-like litgpt model, which are read from model_config.yaml.

    Returns:
        A tuple of the settings and the numbers of rows for queries, keys and values in the fused
        matrix `attn.qkv`.

    Raises:
        ModelError: a setting is missing or invalid, or the architecture is not supported.
    """
    if not isinstance(values, Mapping):
        raise ModelError(f"{path} is not a litgpt file: it contains no settings")
    require_range(path, values)
    for key, (default, allowed) in _FIXED.items():
        if values.get(key, default) not in allowed:
            raise ModelError(
                f"{path}: {key} is {values.get(key, default)!r}, but must be {allowed[0]!r}, as "
                "in Llama, Mistral, Qwen2 and Qwen3; other litgpt models are not supported: "
                "export the model with `litgpt convert_from_litgpt`"
            )
    missing = [key for key in _NEEDED if not is_number(values.get(key))]
    if missing:
        raise ModelError(f"{path} has no {missing[0]}: it is not a complete model_config.yaml")
    heads, groups = values["n_head"], values.get("n_query_groups") or values["n_head"]
    size = values.get("head_size") or (values["n_embd"] // heads if heads else 0)
    if any(type(value) is not int or value < 1 for value in (heads, groups, size)):
        raise ModelError(f"{path}: n_head, n_query_groups and head_size must be integers")
    window = values.get("sliding_window_size")
    traits = {
        "mistral": window is not None,
        "qwen2": bool(values.get("attn_bias")),
        "qwen3": bool(values.get("norm_qk")),
    }
    kinds = [kind for kind, has in traits.items() if has]
    windows = values.get("sliding_window_indices") or ()
    if not isinstance(windows, Sequence):
        raise ModelError(f"{path}: sliding_window_indices is not a list: copy the file again")
    if len(kinds) > 1 or (window is not None and 0 in windows):
        raise ModelError(
            f"{path}: no supported family combines attn_bias, norm_qk and windows (in some layers)"
        )
    found = {
        "model_type": kinds[0] if kinds else "llama",
        "hidden_size": values["n_embd"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "max_position_embeddings": values["block_size"],
        "rms_norm_eps": float(values["norm_eps"]),
        "rope_parameters": _rope(path, values),
        **({"sliding_window": window} if window is not None else {}),
    }
    return Settings(found=found), (heads * size, groups * size, groups * size)


def _rope(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert litgpt's RoPE settings to the `rope_parameters` of a Hugging Face config.json."""
    theta = values.get("rope_base", 10_000)
    if not is_number(theta):
        raise ModelError(f"{path}: rope_base is not a number: copy the file again")
    rope = {"rope_type": "default", "rope_theta": float(theta)}
    scaling = values.get("rope_adjustments")
    if scaling is None:
        return rope
    keys = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if not isinstance(scaling, Mapping) or scaling.keys() != keys:
        raise ModelError(f"{path}: rope_adjustments other than Llama 3's are not supported")
    renamed = {key.replace("max_seq_len", "max_position_embeddings"): scaling[key] for key in keys}
    return {**rope, **renamed, "rope_type": "llama3"}
