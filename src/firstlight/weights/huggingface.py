"""Read and write the files of Hugging Face model folders, except for the weights.

To load a model with its weights, or an adapter, use `firstlight.lora.loading`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import ValidationError

from firstlight.errors import ModelError
from firstlight.files.atomic import read_json_object
from firstlight.models import FAMILIES, Model, ModelConfig, build_model
from firstlight.tokenizer import SPLIT_PATTERNS, Tokenizer
from firstlight.tokenizer.chat_labels import turn_end_ids
from firstlight.weights.composite import CONFIG_NAME as CONFIG_NAME
from firstlight.weights.composite import require_known_keys, text_content
from firstlight.weights.loading import count_tensors
from firstlight.weights.stored import stored_tensors

GENERATION_CONFIG_NAME = "generation_config.json"
#: Key of config.json with the number of tokens that the model has read in all of its training.
#: Transformers keeps keys that it does not know.
TOKENS_KEY = "firstlight_tokens_seen"


#: A config is always accepted if it has at most this many layers and, across all layers, at most
#: this many experts. Models up to this size can be built quickly on the meta device.
_FEW_LAYERS, _FEW_EXPERTS = 200, 20_000
#: Minimum number of tensors per layer, and minimum number of tensors per expert.
_LAYER_TENSORS, _EXPERT_TENSORS = 5, 1


def unloaded_model(
    config: ModelConfig, folder: Path, vocab_multiple: int = 1, *, tensors: int | None = None
) -> Model:
    """Build a model on the meta device from its config.

    The numbers of layers and experts are first compared with the number of tensors in the files,
    because a damaged config.json can specify arbitrarily large numbers.

    Args:
        config: config from the folder's config.json.
        folder: the model folder.
        vocab_multiple: the number of rows of the embedding is padded to a multiple of this number.
        tensors: number of tensors in the files of the folder, where each expert in a stack of
            experts counts as a separate tensor. None to read this number from the files.

    Raises:
        ModelError: the files contain too few tensors for the config's layers or experts, or are
            damaged.
    """
    count = count_tensors(stored_tensors(folder)) if tensors is None else tensors
    layers, experts = config.num_hidden_layers, config.expert_count or 0
    for says, size, most in (
        (f"num_hidden_layers {layers}", layers, max(count // _LAYER_TENSORS, _FEW_LAYERS)),
        (
            f"num_experts {experts} in {layers} layers",
            layers * experts,
            max(count // _EXPERT_TENSORS, _FEW_EXPERTS),
        ),
    ):
        if size > most:
            raise ModelError(
                f"{folder}: {CONFIG_NAME} specifies {says}, but the files have only {count} "
                "tensors: they belong to different models"
            )
    try:
        with torch.device("meta"):
            return build_model(config, vocab_multiple)
    except (RuntimeError, TypeError, OverflowError) as error:  # A size exceeds 64 bits.
        raise ModelError(f"{folder}: {CONFIG_NAME}: these sizes are impossible: {error}") from error


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder, or return None if the folder has none.

    Raises:
        TokenizerError: the folder's tokenizer is damaged.
    """
    return Tokenizer.from_pretrained(folder) if has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder contains a file with a standard file name for tokenizers."""
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    return any((folder / name).is_file() for name in names)


def read_config(folder: Path) -> ModelConfig:
    """Read the model config in a folder's config.json.

    Raises:
        ModelError: config.json is missing or damaged, or its family is not supported.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        require_not_trainer(folder)
        raise ModelError(f"{folder} is not a model folder: it does not contain {CONFIG_NAME}")
    return config_from_hf(read_json_object(path, ModelError), str(path))


def require_not_trainer(folder: Path) -> None:
    """Raise an error if a folder without config.json was written by the Trainer of transformers.

    Raises:
        ModelError: the Trainer wrote this folder. The message explains which folder to use.
    """
    numbers = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.iterdir())
    if steps := [int(found[1]) for found in numbers if found]:
        newest = folder / f"checkpoint-{max(steps)}"
        raise ModelError(
            f"{folder} is an output folder of transformers' Trainer, not a model folder: use one "
            f"of its checkpoints; the newest is {newest}"
        )
    if (folder / "training_args.bin").is_file():
        raise ModelError(
            f"{folder} is a checkpoint of transformers' Trainer without {CONFIG_NAME}: copy "
            f"{CONFIG_NAME} and the tokenizer files of the trained model into it"
        )


#: Advice on how to dequantise a model, for each quantisation library.
_UNDO = {
    "mlx-lm": ", or undo it with `mlx_lm.convert --dequantize --hf-path FOLDER --mlx-path NEW`",
    "bitsandbytes": ", or undo it with transformers: model.dequantize(), model.save_pretrained",
}


def _require_plain(content: Mapping[str, Any], where: str) -> None:
    """Raise an error if config.json describes quantised weights in an unsupported format. Only
    MXFP4 is supported.
    """
    packed = content.get("quantization_config") or content.get("quantization")
    values = packed if isinstance(packed, Mapping) else {}
    program = values.get("quant_method") or (
        "mlx-lm" if "group_size" in values else "another program"
    )
    family = FAMILIES.get(str(content.get("model_type")))
    has_mxfp4 = family is not None and family.spec.has_mxfp4
    if not packed or (program == "mxfp4" and has_mxfp4):
        return
    bits = values.get("bits") or (4 if values.get("load_in_4bit") else None)
    to_bits = f" to {bits} bits" if bits else ""
    undo = _UNDO.get(str(program), "")
    raise ModelError(
        f"{where}: the weights were quantised by {program}{to_bits}, and quantised weights are "
        f"not supported: use the unquantised model{undo} (for an adapter, set "
        "base_model_name_or_path in adapter_config.json to that model)"
    )


def config_from_hf(content: Mapping[str, Any], where: str) -> ModelConfig:
    """Parse a config.json object as a model config.

    Args:
        content: content of config.json.
        where: name of the config, for messages.

    Raises:
        ModelError: the config is damaged, or its family or quantisation is not supported.
    """
    _require_plain(content, where)
    content = text_content(content, where)
    family = FAMILIES.get(str(content.get("model_type")))
    if family is None:
        classes = content.get("architectures")
        architecture = f" ({classes[0]})" if isinstance(classes, list) and classes else ""
        composites = (name for one in FAMILIES.values() for name in one.spec.composites)
        raise ModelError(
            f"{where}: model_type '{content.get('model_type')}'{architecture} is not supported "
            f"(supported: {', '.join(FAMILIES)}, and the text models of "
            f"{', '.join(dict.fromkeys(composites))})"
        )
    if family.spec.requires_known_keys:
        require_known_keys(content, family, where)
    try:
        return family.config.from_hf(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = "".join(f"{part}: " for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{where}: {location}{message}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error


def eos_ids_of(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids of the end-of-text tokens, or () if there are none.

    The ids are read from generation_config.json. If it does not specify any, they are read from
    config.json or, failing that, from the tokenizer.
    """
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        if ends := end_ids(text_content(_read_optional(folder / name), str(folder / name))):
            return ends
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    return ()


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, ModelError) if path.is_file() else {}


def end_ids(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the end-of-text tokens from the content of config.json or
    generation_config.json, or () if there are none.
    """
    value: Any = content.get("eos_token_id")
    ids: list[Any] = value if isinstance(value, list) else [value]
    return tuple(ids) if all(isinstance(item, int) for item in ids) else ()


def read_generation(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the content of generation_config.json from the first folder that contains one, or {}.

    Raises:
        ModelError: the file is damaged.
    """
    found = (folder / GENERATION_CONFIG_NAME for folder in folders)
    return next((_read_optional(path) for path in found if path.is_file()), {})


#: Sampling settings that have the same names in generation_config.json and in `SamplingConfig`.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings in a generation_config.json. They replace the default values of
    `SamplingConfig`.

    As in transformers, the default temperature is 1 if `do_sample` is true. If `do_sample` is
    false, the most likely token is always chosen.
    """
    found = {"temperature": 1.0} if generation.get("do_sample") is True else {}
    for name in _SAMPLING:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Some programs write -1 to disable top_k.
            found[name] = int(min(max(value, 0), 2**31)) if name == "top_k" else float(value)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def model_files(
    config: ModelConfig,
    tokenizer: Tokenizer,
    generation: Mapping[str, Any] = MappingProxyType({}),
    tokens_read: int | None = None,
) -> dict[str, str]:
    """Return the content of each text file in a Hugging Face model folder, keyed by file name. The
    weights are not included.

    Args:
        config: config of the model.
        tokenizer: tokenizer of the model.
        generation: see `generation_config`.
        tokens_read: number of tokens that the model has read in all of its training; None if it is
            unknown.
    """
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    content = {**config.to_hf(), **special, "dtype": "float32", "torch_dtype": "float32"}
    content |= {} if tokens_read is None else {TOKENS_KEY: tokens_read}
    return {
        CONFIG_NAME: json.dumps(content, indent=2) + "\n",
        GENERATION_CONFIG_NAME: json.dumps(generation_config(tokenizer, generation), indent=2)
        + "\n",
        **tokenizer.files(),
    }


def generation_config(
    tokenizer: Tokenizer, generation: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the content of `generation_config.json` for a model with this tokenizer. The
    end-of-text tokens in it include the tokens that end a turn in the tokenizer's chat template.

    Args:
        tokenizer: tokenizer of the model.
        generation: content of the original model's `generation_config.json`. Its settings and
            end-of-text tokens are kept.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = list(dict.fromkeys((*ends, *turn_end_ids(tokenizer), *end_ids(generation))))
    content = dict(generation)
    if tokenizer.bos_token_id is not None:
        content["bos_token_id"] = tokenizer.bos_token_id
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return content


def training_notes(folder: Path) -> list[str]:
    """Return notes for the user about training settings in config.json that firstlight ignores,
    such as dropout.
    """
    path = folder / CONFIG_NAME
    content = text_content(read_json_object(path, ModelError), str(path))
    family = FAMILIES.get(str(content.get("model_type")))
    # For GPT-2, resid_pdrop and embd_pdrop are not ignored, so they are not reported.
    applied = {} if family is None else family.config.model_fields
    names = ("attention_dropout", "hidden_dropout", "router_jitter_noise")
    return [
        f"{path} has {name} {content[name]}, which is ignored"
        for name in (*names, "resid_pdrop", "embd_pdrop")
        if content.get(name) and name not in applied
    ]


def export_notes(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[str]:
    """Return notes for the user about settings in a model folder that transformers interprets
    differently from firstlight.

    Args:
        config: the folder's config.json.
        tokenizer: the folder's tokenizer.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    split = None if family is None else family.spec.tokenizer_split
    if split is None or tokenizer is None:
        return []
    pre_tokenizer = json.loads(tokenizer.backend.to_str())["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if any(step.get("pattern", {}).get("Regex") == SPLIT_PATTERNS[split] for step in steps):
        return []
    return [
        f"transformers 5 reads every tokenizer of a {config['model_type']} model with the split "
        f"pattern of {split}, which gives different ids than this tokenizer: use another "
        "model_type, such as qwen3 or qwen3_moe"
    ]
