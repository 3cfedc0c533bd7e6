"""Read Llama models in Meta's original format.

A model is a folder with `consolidated.*.pth` and `params.json`. Source: meta-llama/llama
`llama/model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign.layout import (
    Opened,
    Settings,
    is_number,
    llama_layout,
    require_range,
    tie,
    without_buffers,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.errors import ModelError
from firstlight.files.atomic import read_json

FILE = re.compile(r"consolidated\.(\d\d)\.pth")
CONFIG = "params.json"

LAYOUT = llama_layout(
    "Meta's Llama",
    ".attention.wq.weight",
    {
        "model.embed_tokens": "tok_embeddings",
        "model.layers.{}.input_layernorm": "layers.{}.attention_norm",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attention.wq",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attention.wk",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attention.wv",
        "model.layers.{}.self_attn.o_proj": "layers.{}.attention.wo",
        "model.layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
        "model.layers.{}.mlp.gate_proj": "layers.{}.feed_forward.w1",
        "model.layers.{}.mlp.up_proj": "layers.{}.feed_forward.w3",
        "model.layers.{}.mlp.down_proj": "layers.{}.feed_forward.w2",
        "model.norm": "norm",
        "lm_head": "output",
    },
    rotates_pairs=True,
)
#: Dimension along which the matrix of each module is sharded across the files, for tensor
#: parallelism.
_CUT = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}
#: Known keys of params.json. Some of them are read as settings of the model. The others are
#: ignored, because they do not affect the model or affect only the shapes of its tensors.
_KEYS = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "rope_high_freq_factor",
    "multiple_of",
    "ffn_dim_multiplier",
    "max_batch_size",
    "max_seq_len",
    "model_parallel_size",
}
#: Keys of params.json that must not be null because they have no default.
_NOT_NULL = ("dim", "n_layers", "n_heads", "vocab_size")
#: Hidden sizes of the Llama 3.2 text models with 1B and 3B parameters. Their RoPE scaling factor is
#: 32, while that of Llama 3.1 is 8.
_LLAMA_3_2_WIDTHS = (2048, 3072)


def files_in(folder: Path) -> list[Path]:
    """Return the `consolidated.*.pth` files in a folder, sorted by number."""
    return sorted(path for path in folder.iterdir() if FILE.fullmatch(path.name))


def open_folder(folder: Path) -> Opened:
    """Open the folder of a Llama model from Meta, which contains `params.json` and tensor-parallel
    shards in `consolidated.*.pth`.
    """
    files = files_in(folder)
    missing = {f"consolidated.{i:02}.pth" for i in range(len(files))} - {f.name for f in files}
    if missing:
        raise ModelError(f"{folder} lacks {min(missing)}: copy all files of the model")
    shards = [without_buffers(named_weights(path, read_pickle(path))) for path in files]
    for path, shard in zip(files, shards, strict=True):
        broken = [n for n, t in shard.items() if not isinstance(t, Tensor) or not is_whole(t)]
        if broken:
            raise ModelError(f"{path} has {broken[0]!r:.80}, which is not a plain tensor")
        tie(shard)
    settings = _settings(folder / CONFIG, read_json(folder / CONFIG))
    return Opened(LAYOUT, _joined(files, shards), settings)


def _joined(files: Sequence[Path], shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Concatenate the shards in the files into full tensors. If there is only one file, its tensors
    are returned unchanged.
    """
    if len(shards) == 1:
        return dict(shards[0])
    first = shards[0]
    for path, shard in zip(files, shards, strict=True):
        if {n: (t.shape, t.dtype) for n, t in shard.items()} != {
            n: (t.shape, t.dtype) for n, t in first.items()
        }:
            raise ModelError(
                f"{path} and {files[0]} are not parts of the same model: their shapes differ"
            )
    width = first["norm.weight"].numel() if "norm.weight" in first else 0
    joined = {}
    for name, tensor in first.items():
        module = name.split(".")[-2] if "." in name else name
        cut = _CUT.get(module)
        if module == "tok_embeddings" and tensor.dim() == 2:
            # Llama 1 and 2 shard the embedding along its width; Llama 3 shards it along the
            # vocabulary.
            cut = 0 if tensor.shape[1] == width else 1
        parts = [shard[name] for shard in shards]
        if cut is None:
            if not all(torch.equal(tensor, part) for part in parts):
                raise ModelError(f"{name} differs between {files[0]} and its other parts")
            joined[name] = tensor
        elif tensor.dim() != 2:
            raise ModelError(
                f"{files[0]}: {name} has shape {list(tensor.shape)}, but must be a matrix"
            )
        else:
            joined[name] = torch.cat(parts, cut)
    return joined


def _settings(path: Path, params: Any) -> Settings:
    """Return the settings of a Llama model from Meta, which are read from params.json.

    params.json does not contain the context length, because Meta's code hard-codes it for each
    model. The context length is therefore inferred from the other settings. It is the same as in
    Hugging Face's config.json for the model.

    Raises:
        ModelError: a setting is missing or invalid, or belongs to a different architecture.
    """
    if not isinstance(params, Mapping) or not {"dim", "n_layers", "n_heads"} <= params.keys():
        raise ModelError(
            f"{path} lacks dim, n_layers or n_heads: it does not belong to a Llama model from Meta"
        )
    # An unknown feature that is disabled does not affect the model.
    unknown = [k for k, v in params.items() if k not in _KEYS and v not in (None, False)]
    if unknown:
        raise ModelError(f"{path} has {unknown[0]}: this kind of model is not supported")
    for key, value in params.items():
        if not is_number(value) and (value is not None or key in _NOT_NULL):
            raise ModelError(f"{path}: {key} is not a number: copy the file again")
    require_range(path, params)
    scaled, theta = bool(params.get("use_scaled_rope")), params.get("rope_theta") or 10_000.0
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
    notes = {}
    if scaled:
        usual = 32.0 if params["dim"] in _LLAMA_3_2_WIDTHS else 8.0
        rope |= {
            "rope_type": "llama3",
            "factor": float(params.get("rope_scaling_factor") or usual),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(params.get("rope_high_freq_factor") or 4.0),
            "original_max_position_embeddings": 8192,
        }
        notes["rope_parameters"] = (
            f"The scaling factor of the rotary positions is assumed to be {rope['factor']:g}, as "
            f"in Llama 3.{2 if usual == 32 else 1} (set rope_parameters in --config if that is "
            "wrong)."
        )
    # Llama 3.1 and 3.2 scale the RoPE frequencies. The RoPE base is 500,000 in Llama 3, 1,000,000
    # in Code Llama and 10,000 in Llama 1 and 2. Llama 1 has a norm epsilon of 1e-6, which
    # distinguishes it from Llama 2.
    context = 131_072 if scaled else {5e5: 8192, 1e6: 16_384}.get(theta, 4096)
    if theta == 10_000.0 and params.get("norm_eps") == 1e-6:
        context = 2048
    notes["max_position_embeddings"] = (
        f"The context is assumed to be {context:,}, as in Meta's models with such settings (set "
        "max_position_embeddings in --config if that is wrong)."
    )
    # Llama 1 and 2 store -1 here, which means that the tokenizer determines the vocabulary size.
    vocabulary = params.get("vocab_size", -1)
    return Settings(
        found={
            "hidden_size": params["dim"],
            "num_hidden_layers": params["n_layers"],
            "num_attention_heads": params["n_heads"],
            "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
            "rms_norm_eps": params.get("norm_eps") or 1e-5,
            **({"vocab_size": vocabulary} if vocabulary > 0 else {}),
        },
        assumed={"rope_parameters": rope, "max_position_embeddings": context},
        notes=notes,
    )
