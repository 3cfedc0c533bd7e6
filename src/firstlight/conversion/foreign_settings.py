"""Settings in the files of other programs' models, under the keys of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import ModelError


@dataclass(frozen=True)
class Settings:
    """Settings of another program's model.

    Attributes:
        found: settings in the files, by keys of a Hugging Face config.json.
        assumed: settings that the program's code has values for, by the same keys. The caller may
            override them.
        notes: a sentence for the user about an assumed setting, by its key.
        model_args: settings by the program's own names. Those of a GPT are compared with its
            tensors.
        where: place where `model_args` was found, for messages.
        sines: table of sines [positions, head size] that older Llamas of LLMs-from-scratch save;
            None if there is none.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    model_args: Mapping[str, Any] | None = None
    where: str = "its model_args"
    sines: Tensor | None = None


def book_llama_settings(path: Path, weights: Mapping[str, Any]) -> Settings:
    """Heads and context of a Llama of LLMs-from-scratch, from the rotary tables in its file; empty
    settings if the file has no tables.

    Raises:
        ModelError: the tables have an impossible shape.
    """
    sines, embedding = weights.get("trf_blocks.0.att.sin"), weights.get("tok_emb.weight")
    if not isinstance(sines, Tensor) or not isinstance(embedding, Tensor):
        return Settings()
    width = embedding.shape[-1] if embedding.dim() else 0
    if sines.dim() != 2 or 0 in sines.shape or width % sines.shape[1]:
        raise ModelError(f"{path}: its rotary tables are {list(sines.shape)}, which can't be")
    return Settings(
        found={"num_attention_heads": width // sines.shape[1]},
        assumed={"max_position_embeddings": sines.shape[0]},
        sines=sines,
    )


def openai_settings(path: Path, hparams: Any) -> Settings:
    """Settings of OpenAI's GPT-2, from hparams.json.

    Raises:
        ModelError: hparams.json lacks the number of heads.
    """
    if not isinstance(hparams, Mapping) or "n_head" not in hparams:
        raise ModelError(f"{path} has no n_head: it is not GPT-2's")
    names = {"n_vocab": "vocab_size", "n_ctx": "block_size"}
    args = {names.get(str(key), str(key)): value for key, value in hparams.items()}
    return Settings(model_args=args, where=path.name)


#: Keys of Meta's params.json that are known: settings of the model, and keys that have no effect
#: on it or whose effect the tensors' shapes show.
_META_KEYS = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta"),
    *("use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"),
    *("multiple_of", "ffn_dim_multiplier", "max_batch_size", "max_seq_len", "model_parallel_size"),
}
#: Keys of params.json that must not be null, since there is no default for them.
_META_NOT_NULL = ("dim", "n_layers", "n_heads", "vocab_size")
#: Widths of Llama 3.2's text models (1B, 3B), whose rotary scaling factor is 32; Llama 3.1's is 8.
_LLAMA_3_2_WIDTHS = (2048, 3072)


def meta_settings(path: Path, params: Any) -> Settings:
    """Settings of Meta's Llama, from params.json.

    The file lacks the context length, which Meta's code fixes for each model. It is guessed from
    the other settings, as in Hugging Face's config.json of the same model.

    Raises:
        ModelError: a setting is missing, invalid, or of another architecture.
    """
    if not isinstance(params, Mapping) or not {"dim", "n_layers", "n_heads"} <= params.keys():
        raise ModelError(f"{path} lacks dim, n_layers or n_heads: it is not of Meta's Llama")
    # An unknown key that is off does not change the model.
    unknown = [k for k, v in params.items() if k not in _META_KEYS and v not in (None, False)]
    if unknown:
        raise ModelError(f"{path} has {unknown[0]}: a model of that kind is not read")
    for key, value in params.items():
        if not _is_number(value) and (value is not None or key in _META_NOT_NULL):
            raise ModelError(f"{path}: {key} is no number: copy the file again")
    _require_range(path, params)
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
            f"The rotary positions are taken to be stretched by {rope['factor']:g}, as in Llama "
            f"3.{2 if usual == 32 else 1} (rope_parameters in --config if that is wrong)."
        )
    # Llama 3.1 and 3.2 have scaled frequencies, Llama 3 a base of 500,000, Code Llama 1,000,000.
    # Llama 1 and 2 share the base of 10,000; Llama 1 has an epsilon of 1e-6.
    context = 131_072 if scaled else {5e5: 8192, 1e6: 16_384}.get(theta, 4096)
    if theta == 10_000.0 and params.get("norm_eps") == 1e-6:
        context = 2048
    notes["max_position_embeddings"] = (
        f"The context is taken to be {context:,}, as in Meta's models with such settings "
        "(max_position_embeddings in --config if that is wrong)."
    )
    # Llama 1 and 2 have -1, which stands for the tokenizer's size.
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


def _is_number(value: Any) -> bool:
    """True for integers, floats and, as in Python, booleans, which some keys have."""
    return isinstance(value, (int, float))


def _require_range(path: Path, values: Mapping[Any, Any]) -> None:
    """Refuse NaN, infinity and numbers of 2^63 or more. No setting has them, and very large
    integers can't be converted to floats or printed."""
    for key, value in values.items():
        if isinstance(key, str) and _is_number(value) and not abs(value) < 2**63:
            raise ModelError(f"{path}: {key} is infinite or 2^63 or more: copy the file again")


#: nanochat's keys of a model's shape -> Hugging Face's keys.
NANOCHAT_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "sequence_len": "max_position_embeddings",
}


def nanochat_settings(path: Path, meta: Any) -> Settings:
    """Settings of a nanochat model: its shape from meta_STEP.json, the rest as fixed in nanochat's
    code.

    Raises:
        ModelError: a setting is missing or not a positive integer.
    """
    values = meta.get("model_config") if isinstance(meta, Mapping) else None
    if not isinstance(values, Mapping):
        raise ModelError(f"{path} has no model_config: it is not of nanochat")
    _require_range(path, values)
    for key in NANOCHAT_KEYS:
        if key not in values:
            raise ModelError(f"{path}: model_config has no {key}: copy the file again")
        if type(values[key]) is not int or values[key] < 1:
            raise ModelError(f"{path}: {key} is no whole number: copy the file again")
    found = {ours: values[key] for key, ours in NANOCHAT_KEYS.items()}
    return Settings(
        found={
            "model_type": "nanochat",
            **found,
            # The default of F.rms_norm, which nanochat calls without an epsilon.
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "final_logit_softcapping": 15.0,
        },
        model_args=values,
    )


#: Keys of litgpt's model_config.yaml whose value is fixed here -> (litgpt's default, used if the
#: file lacks the key; the values that are accepted).
_LITGPT_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
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
_LITGPT_NEEDED = ("n_layer", "n_head", "n_embd", "intermediate_size", "block_size", "norm_eps")


def litgpt_settings(path: Path, values: Any) -> tuple[Settings, tuple[int, int, int]]:
    """Settings of a Llama-like model of litgpt, from model_config.yaml.

    Returns:
        The settings, and the numbers of rows that queries, keys and values have in litgpt's one
        matrix for all three.

    Raises:
        ModelError: a setting is missing, invalid, or of an architecture that is not read.
    """
    if not isinstance(values, Mapping):
        raise ModelError(f"{path} is not of litgpt: it holds no settings")
    _require_range(path, values)
    for key, (default, allowed) in _LITGPT_FIXED.items():
        if values.get(key, default) not in allowed:
            raise ModelError(
                f"{path}: {key} is {values.get(key, default)!r}, and of litgpt's models those like "
                f"Llama, Mistral, Qwen2 and Qwen3 are read, which have {allowed[0]!r}: export it "
                "with `litgpt convert_from_litgpt`"
            )
    missing = [key for key in _LITGPT_NEEDED if not _is_number(values.get(key))]
    if missing:
        raise ModelError(f"{path} has no {missing[0]}: it is not a whole model_config.yaml")
    heads, groups = values["n_head"], values.get("n_query_groups") or values["n_head"]
    size = values.get("head_size") or (values["n_embd"] // heads if heads else 0)
    if any(type(value) is not int or value < 1 for value in (heads, groups, size)):
        raise ModelError(f"{path}: n_head, n_query_groups and head_size must be whole numbers")
    window = values.get("sliding_window_size")
    traits = {
        "mistral": window is not None,
        "qwen2": bool(values.get("attn_bias")),
        "qwen3": bool(values.get("norm_qk")),
    }
    kinds = [kind for kind, has in traits.items() if has]
    windows = values.get("sliding_window_indices") or ()
    if not isinstance(windows, Sequence):
        raise ModelError(f"{path}: sliding_window_indices is no list: copy the file again")
    if len(kinds) > 1 or (window is not None and 0 in windows):
        raise ModelError(
            f"{path}: attn_bias, norm_qk and windows (in some layers) together are of no family "
            "that is read"
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
        "rope_parameters": _litgpt_rope(path, values),
        **({"sliding_window": window} if window is not None else {}),
    }
    return Settings(found=found), (heads * size, groups * size, groups * size)


def _litgpt_rope(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a Hugging Face config.json, from litgpt's settings."""
    theta = values.get("rope_base", 10_000)
    if not _is_number(theta):
        raise ModelError(f"{path}: rope_base is no number: copy the file again")
    rope = {"rope_type": "default", "rope_theta": float(theta)}
    scaling = values.get("rope_adjustments")
    if scaling is None:
        return rope
    keys = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if not isinstance(scaling, Mapping) or scaling.keys() != keys:
        raise ModelError(f"{path}: rope_adjustments other than Llama 3's are not read")
    renamed = {key.replace("max_seq_len", "max_position_embeddings"): scaling[key] for key in keys}
    return {**rope, **renamed, "rope_type": "llama3"}
