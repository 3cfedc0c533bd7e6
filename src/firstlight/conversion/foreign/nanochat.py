"""Read nanochat models with the original architecture.

A model is a folder with the files `model_STEP.pt` and `meta_STEP.json`. The path of a
`model_STEP.pt` file in such a folder is also accepted. Source: karpathy/nanochat `nanochat/gpt.py`
before 11 January 2026.

The original architecture has no value embeddings, residual scaling factors or sliding windows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign.layout import Layout, Opened, Settings, require_range
from firstlight.conversion.pickled import is_whole
from firstlight.errors import ModelError
from firstlight.files.atomic import read_json

#: For each module of Hugging Face's nanochat model, the shape of its weight and the name of the
#: module in nanochat.
_MODULES = {
    "model.embed_tokens": ("V C", "transformer.wte"),
    "model.layers.{}.self_attn.q_proj": ("Q C", "transformer.h.{}.attn.c_q"),
    "model.layers.{}.self_attn.k_proj": ("K C", "transformer.h.{}.attn.c_k"),
    "model.layers.{}.self_attn.v_proj": ("K C", "transformer.h.{}.attn.c_v"),
    "model.layers.{}.self_attn.o_proj": ("C Q", "transformer.h.{}.attn.c_proj"),
    "model.layers.{}.mlp.fc1": ("F C", "transformer.h.{}.mlp.c_fc"),
    "model.layers.{}.mlp.fc2": ("C F", "transformer.h.{}.mlp.c_proj"),
    "lm_head": ("V C", "lm_head"),
}
LAYOUT = Layout(
    program="nanochat",
    kind="nanochat",
    mark=".attn.c_q.weight",
    names={f"{ours}.weight": (f"{theirs}.weight",) for ours, (_, theirs) in _MODULES.items()},
    shapes={f"{ours}.weight": shape for ours, (shape, _) in _MODULES.items()},
)
#: Keys of Hugging Face's config.json, keyed by nanochat's names for the settings that describe the
#: shape of a model.
_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "sequence_len": "max_position_embeddings",
}
_FILE = re.compile(r"model_(\d+)\.pt")
#: nanochat pads the number of rows of the embedding and the output head to a multiple of this
#: number.
_ROWS = 64
#: Maximum number of names in a message.
_SHOWN = 12


def files_in(folder: Path) -> list[Path]:
    """Return the `model_STEP.pt` files in a nanochat folder, sorted by step."""
    steps = {
        int(match[1]): path for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    }
    return [steps[step] for step in sorted(steps) if steps[step].is_file()]


def open_file(path: Path, weights: Mapping[str, Any]) -> Opened:
    """Open a nanochat model that has the architecture used before 11 January 2026.

    The file `meta_STEP.json` must be in the same folder as `model_STEP.pt`.
    """
    match = _FILE.fullmatch(path.name)
    meta = path.with_name(f"meta_{match[1]}.json") if match else None
    if meta is None or not meta.is_file():
        raise ModelError(
            f"{path} is a nanochat file, but its settings are missing: use a model_STEP.pt with "
            "its meta_STEP.json in the same folder, or that folder"
        )
    settings = _settings(meta, read_json(meta))
    _require_first_form(path, weights, settings)
    size, own = settings.found["vocab_size"], dict(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        rows = own.get(name)
        if isinstance(rows, Tensor) and rows.dim() == 2 and 0 < len(rows) - size < _ROWS:
            own[name] = rows[:size]
    tensors = [one for one in own.values() if isinstance(one, Tensor) and is_whole(one)]
    # When nanochat trains on a GPU, it stores the embedding in bf16 and all other tensors in fp32.
    # Convert the embedding to fp32, which is exact. Transformers then loads all tensors in the same
    # dtype.
    is_mixed = {tensor.dtype for tensor in tensors} == {torch.float32, torch.bfloat16}
    is_widened = is_mixed and len(tensors) == len(own)
    if is_widened:
        own = {name: tensor.float() for name, tensor in own.items()}
    return Opened(LAYOUT, own, settings)


def _settings(path: Path, meta: Any) -> Settings:
    """Return the settings of a nanochat model. The shape of the model is read from meta_STEP.json,
    and all other settings are values that nanochat hard-codes.

    Raises:
        ModelError: a setting is missing or not a positive integer.
    """
    values = meta.get("model_config") if isinstance(meta, Mapping) else None
    if not isinstance(values, Mapping):
        raise ModelError(f"{path} has no model_config: it is not a nanochat file")
    require_range(path, values)
    for key in _KEYS:
        if key not in values:
            raise ModelError(f"{path}: model_config has no {key}: copy the file again")
        if type(values[key]) is not int or values[key] < 1:
            raise ModelError(f"{path}: {key} is not an integer: copy the file again")
    found = {ours: values[key] for key, ours in _KEYS.items()}
    return Settings(
        found={
            "model_type": "nanochat",
            **found,
            # nanochat calls `F.rms_norm` with its default epsilon.
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "final_logit_softcapping": 15.0,
        },
        model_args=values,
    )


def _require_first_form(path: Path, weights: Mapping[str, Any], settings: Settings) -> None:
    """Reject nanochat models with a newer architecture. The message names the tensors and settings
    that the original architecture does not have.
    """
    known = {name.replace("{}", "*") for names in LAYOUT.names.values() for name in names}
    found = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in weights)
    more = [name for name in found if name not in known]
    more += [str(key) for key in settings.model_args or () if key not in _KEYS]
    if more:
        raise ModelError(
            f"{path} is from a later nanochat version, which no Hugging Face class supports "
            "(NanoChatForCausalLM implements the version before 11 January 2026): it also has "
            f"{', '.join(more[:_SHOWN])}; use it with nanochat"
        )
