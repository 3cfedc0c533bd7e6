"""The config.json of another program's model, from its file, the caller and the program's defaults.

The caller can't contradict the file. A setting that neither has gets the program's default, with a
note; without a default, the model is refused with the request to give the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign.layout import Settings, Shape
from firstlight.errors import ModelError, nearest
from firstlight.models import GPT2Config
from firstlight.models.rope import Llama3Rope, rope_frequencies
from firstlight.weights.huggingface import config_from_hf

#: Keys of a GPT-2's config.json, under common names or its own.
_GPT2_KEYS = {
    *GPT2Config.hf_names,
    *GPT2Config.hf_names.values(),
    "n_ctx",
    "qkv_bias",
    "activation_function",
    "reorder_and_upcast_attn",
    "task_specific_params",
}
_LLAMA_KEYS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "initializer_range",
    "pretraining_tp",
}
#: Keys of any config.json that do not describe the architecture.
_OTHER_KEYS = {
    "model_type",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
}
#: Written because Hugging Face's config classes would otherwise assume the special tokens of their
#: own models. The ids of a tokenizer, if there is one, replace them.
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def given_config(path: Path, config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The caller's config without nulls; in a GPT-2's, aliases are replaced by GPT-2's own keys.

    Raises:
        ModelError: a key is unknown.
    """
    is_gpt2 = model_type == "gpt2"
    known = _OTHER_KEYS | (_GPT2_KEYS if is_gpt2 else _LLAMA_KEYS)
    given = {}
    for name, value in config.items():
        # GPT-2's own config.json has a dozen settings of an old classification head.
        if name not in known and not name.startswith("summary_"):
            raise ModelError(
                f"{path} is a {model_type} model, and a config.json of that kind "
                f"has no key '{name}'{nearest(name, known)}"
            )
        if value is not None:
            given[GPT2Config.hf_names.get(name, name) if is_gpt2 else name] = value
    return given


def _merged(
    path: Path, assumed: dict[str, Any], given: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """All three merged; later ones take precedence.

    Args:
        path: the file, for messages.
        assumed: the program's defaults.
        given: the caller's settings.
        found: settings in the file, which `given` must not contradict.

    Raises:
        ModelError: `given` contradicts `found`.
    """
    # With rope_parameters, a separate rope_theta (transformers 4's key) would be ignored: it must
    # not differ from the one inside.
    rope, told = {**assumed, **given, **found}.get("rope_parameters"), dict(found)
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        told["rope_theta"] = rope["rope_theta"]
    for key in told.keys() & given.keys():
        if given[key] != told[key]:
            raise ModelError(
                f"{path} has {key} {told[key]!r}, and the config given says {given[key]!r}: leave "
                f"{key} out of the config"
            )
    return {**assumed, **given, **found}


def gpt2_config(
    path: Path,
    shape: Shape,
    given: dict[str, Any],
    settings: Settings,
) -> tuple[dict[str, Any], list[str]]:
    """The config.json of a GPT-2, and notes on the settings that were assumed.

    Args:
        path: the file, for messages.
        shape: shape of the model, from its tensors.
        given: the caller's settings.
        settings: settings in the program's files.

    Raises:
        ModelError: two of `shape`, `given` and `settings` contradict each other, or the number of
            heads is unknown.
    """
    sizes, model_args = shape.sizes, settings.model_args or {}
    notes = [note for key, note in settings.notes.items() if key not in given]
    found: dict[str, Any] = {
        **settings.found,
        "model_type": "gpt2",
        "vocab_size": sizes["V"],
        "n_positions": sizes["P"],
        "n_ctx": sizes["P"],
        "n_embd": sizes["C"],
        "n_inner": 4 * sizes["C"],
        "n_layer": shape.layers,
        "tie_word_embeddings": shape.tied,
        "qkv_bias": shape.qkv_bias,
    }
    for theirs in ("vocab_size", "block_size", "n_embd", "n_layer"):
        ours = found["n_positions" if theirs == "block_size" else theirs]
        if model_args.get(theirs, ours) != ours:
            raise ModelError(
                f"{path}: {settings.where} say {theirs} {model_args[theirs]!r}, its tensors {ours}"
            )
    if "n_head" in model_args:
        found["n_head"] = model_args["n_head"]
    dropout = model_args.get("dropout", 0.0)
    assumed = {
        **_NO_SPECIAL_TOKENS,
        **settings.assumed,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout),
    }
    if "n_head" not in {**given, **found}:
        assumed["n_head"] = _guess_heads(path, sizes["C"])
        notes.append(
            f"The file doesn't say how many heads there are: {assumed['n_head']} of size 64 were "
            'taken (give "n_head" if that is wrong).'
        )
    config = _merged(path, assumed, given, found)
    _check_heads(path, config["n_head"], "n_head", sizes["C"])
    for key, choices in settings.choices.items():
        if config[key] not in choices:
            raise ModelError(
                f"{path}: {key} is {config[key]!r}, and its program computes "
                f"{' or '.join(map(repr, choices))}: correct {key} in the config"
            )
    checked = config_from_hf(config, f"{path}: config")
    del config["qkv_bias"]  # `to_hf` adds the key only if there are no biases
    return {**config, **checked.to_hf()}, notes


def _guess_heads(path: Path, width: int) -> int:
    """The number of heads if their size is 64, as in all of OpenAI's GPT-2s."""
    if width % 64:
        raise ModelError(
            f"{path} doesn't say how many heads there are, and its width {width} is no multiple "
            'of 64, the usual size of a head: give "n_head" in the config (--config FILE.json)'
        )
    return width // 64


def _check_heads(path: Path, heads: Any, key: str, width: int) -> None:
    """Refuse a number of heads that does not divide the width of all queries."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or width % heads:
        raise ModelError(f"{path}: {key} is {heads!r}, expected a divisor of the width {width}")


def llama_config(
    path: Path, shape: Shape, given: dict[str, Any], settings: Settings, program: str
) -> tuple[dict[str, Any], list[str]]:
    """The config.json of a Llama-like or nanochat model, and notes on the settings that were
    assumed.

    Args:
        path, shape, given, settings: see `gpt2_config`.
        program: name of the program.

    Raises:
        ModelError: heads, context or rotary base are unknown, or contradict the file.
    """
    sizes = shape.sizes
    told = {
        "vocab_size": sizes["V"],
        "hidden_size": sizes["C"],
        "intermediate_size": sizes["F"],
        "num_hidden_layers": shape.layers,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
    }
    for key, value in settings.found.items():
        if told.get(key, value) != value:
            raise ModelError(f"{path}: its settings say {key} {value!r}, its tensors {told[key]!r}")
    found = {"model_type": "llama", **told, **settings.found}
    assumed = {**_NO_SPECIAL_TOKENS, "rms_norm_eps": 1e-5, **settings.assumed}
    config = _merged(path, assumed, given, found)
    _check_llama_is_complete(path, config)
    heads = config["num_attention_heads"]
    _check_heads(path, heads, "num_attention_heads", sizes["Q"])
    head_dim = sizes["Q"] // heads
    if sizes["K"] % head_dim:
        raise ModelError(
            f"{path}: keys of width {sizes['K']} can't be heads of size {head_dim} "
            f"(num_attention_heads {heads}): correct num_attention_heads"
        )
    shown = {"num_key_value_heads": sizes["K"] // head_dim, "head_dim": head_dim}
    for key, value in shown.items():
        if found.get(key, value) != value:
            raise ModelError(f"{path}: its settings say {key} {found[key]!r}, its tensors {value}")
    config = _merged(path, assumed, given, {**found, **shown})
    checked = config_from_hf(config, f"{path}: config")
    scaling = getattr(checked, "rope_scaling", None)
    if not isinstance(scaling, (NoneType, Llama3Rope)):
        raise ModelError(
            f"{path}: {program} computes no rotary positions of type {scaling.rope_type!r}: "
            "correct rope_parameters"
        )
    if settings.sines is not None and len(settings.sines) > 1:
        _check_rope(path, checked, settings.sines)
    notes = [note for key, note in settings.notes.items() if key not in given]
    if "rms_norm_eps" not in {**given, **found}:
        notes.append(f"The norms' epsilon is taken to be 1e-05, as in {program}.")
    return {**config, **checked.to_hf()}, notes


def _check_llama_is_complete(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config without heads, context or rotary base, which have no safe default."""
    missing = [k for k in ("num_attention_heads", "max_position_embeddings") if k not in config]
    rope = config.get("rope_parameters")
    if "rope_theta" not in config and not (isinstance(rope, Mapping) and "rope_theta" in rope):
        missing.append("rope_parameters (with rope_theta)")
    if missing:
        raise ModelError(
            f"{path} doesn't say its {', '.join(missing)}: give them in the config "
            '(--config FILE.json), such as {"num_attention_heads": 32, "max_position_embeddings": '
            '8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}'
        )


def _check_rope(path: Path, config: Any, sines: Tensor) -> None:
    """Compare the config's rotary frequencies with a table of sines that the file holds.

    Args:
        path: the file, for messages.
        config: the model's config.
        sines: table [positions, head size], which may have been saved in bf16.

    Raises:
        ModelError: they differ.
    """
    # At position 1, the angles are the frequencies themselves.
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    saved = sines[1, : len(frequencies)].float()
    if not torch.allclose(saved, frequencies.sin(), rtol=1e-2, atol=1e-6):
        raise ModelError(
            f"{path} holds rotary tables that rope_theta {config.rope_theta:g} with the config's "
            "scaling doesn't give: correct rope_parameters"
        )
