"""Reading and writing model folders in the Hugging Face layout.

The folder of an adapter (PEFT's, or a checkpoint of a run with `lora`) is read as its base model
with the adapter merged in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from firstlight.errors import ModelError
from firstlight.files.atomic import read_json_object, sha256_of
from firstlight.lora.files import (
    ADAPTER_WEIGHTS_NAME,
    adapter_chain,
    adapter_settings,
    load_adapter,
)
from firstlight.lora.layers import merge_lora
from firstlight.models import FAMILIES, Model, ModelConfig, build_model
from firstlight.tokenizer import SPLIT_PATTERNS, Tokenizer
from firstlight.tokenizer.chat_labels import turn_end_ids
from firstlight.weights.hub import find_model_folder
from firstlight.weights.loading import LoadingMode, count_tensors, load_weights
from firstlight.weights.stored import FileState, stored_tensors

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and files.

    Attributes:
        model: the model in evaluation mode, on the requested device.
        tokenizer: the folder's tokenizer; None if it has none.
        eos_token_ids: ids that end a generation.
        folder: the model folder, or an adapter's own folder.
        mapped: the files that are memory-mapped as parameters; () if the weights were copied.
        trained_on: description of a checkpoint's training data (`checkpoint.selection.trained_on`);
            None if it was not read.
    """

    model: Model
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    folder: Path
    mapped: tuple[FileState, ...] = ()
    trained_on: Mapping[str, Any] | None = None

    def require_unchanged(self) -> None:
        """Refuse weights whose mapped file has changed. To be called before each use of the model.

        Raises:
            ModelError: a mapped file was changed in place.
        """
        for file in self.mapped:
            file.require_unchanged()


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    mode: LoadingMode = "auto",
    vocab_multiple: int = 1,
    config: ModelConfig | None = None,
) -> LoadedModel:
    """Load weights, config and tokenizer of a Hugging Face model folder or hub id.

    An adapter is merged into its base. Files that the adapter lacks (tokenizer, generation config)
    are read from the base.

    Args:
        folder: a model folder, an adapter's folder, or a hub id.
        device: the parameters' device.
        dtype: the parameters' dtype; None is the file's.
        mode: the loading mode, see `firstlight.weights.loading`.
        vocab_multiple: the embedding's rows are padded to a multiple of this number.
        config: config with which the model is built; None is that of the folder.

    Raises:
        ModelError: a file is missing or damaged; the family is unknown; a tensor is missing, extra
            or of the wrong shape (the message names it); or an adapter's base is missing, or its
            kind is not supported.
        TokenizerError: the folder's tokenizer is damaged.
    """
    folder = find_model_folder(folder)
    *adapters, base = adapter_chain(folder)
    model = unloaded_model(config or read_config(base), base, vocab_multiple)
    mapped = load_weights(model, base, device=device, dtype=dtype, mode=mode)
    tokenizer = tokenizer_of(base)
    eos_token_ids = _eos_token_ids(base, tokenizer)
    for adapter in reversed(adapters):
        load_adapter(model, adapter)
        merge_lora(model)
        own = tokenizer_of(adapter)
        # An adapter's tokenizer for chats may have another end-of-text token than the base's. The
        # model may generate either, and both end a text.
        eos_token_ids = _eos_token_ids(adapter, None) or tuple(
            dict.fromkeys((*eos_token_ids, *(() if own is None else _eos_token_ids(adapter, own))))
        )
        tokenizer = own or tokenizer
    return LoadedModel(model.eval(), tokenizer, eos_token_ids, folder, mapped)


#: Numbers of layers, and of experts in all layers, that are allowed whatever the files hold, since
#: a model of that size is built quickly on the meta device.
_FEW_LAYERS, _FEW_EXPERTS = 200, 20_000
#: Minimum number of tensors in a layer, and of an expert.
_LAYER_TENSORS, _EXPERT_TENSORS = 5, 1


def unloaded_model(
    config: ModelConfig, folder: Path, vocab_multiple: int = 1, *, tensors: int | None = None
) -> Model:
    """The model of a config, on the meta device. Its size is first checked against the number of
    tensors in the files, since a damaged config.json can have any numbers.

    Args:
        config: the config of the folder's config.json.
        folder: the model folder.
        vocab_multiple: the embedding's rows are padded to a multiple of this number.
        tensors: number of tensors in the folder's files, with each expert of a stack counted; None
            counts them.

    Raises:
        ModelError: the files have too few tensors for the config's layers or experts, or are
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
                f"{folder}: {CONFIG_NAME} says {says}, and its files have only {count} tensors: "
                "the two are not of one model"
            )
    try:
        with torch.device("meta"):
            return build_model(config, vocab_multiple)
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64-bit integers
        raise ModelError(f"{folder}: {CONFIG_NAME}: such sizes are impossible: {error}") from error


def base_identity(folder: Path) -> str:
    """SHA-256, in hexadecimal, over a model's weights and config; for an adapter, over its own and
    its base's.

    The checkpoints of a run with `lora` do not hold the base. By this hash a resumed run notices
    that its base has changed. All weights are read, which takes about a second for each GB.

    Raises:
        ModelError: a file is missing or damaged.
    """
    *adapters, base = adapter_chain(folder)
    parts = [read_config(base).model_dump_json()]
    parts += [sha256_of(path) for path in sorted({t.path for t in stored_tensors(base).values()})]
    for adapter in reversed(adapters):
        parts += [adapter_settings(adapter), sha256_of(adapter / ADAPTER_WEIGHTS_NAME)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None if it has none.

    Raises:
        TokenizerError: the folder's tokenizer is damaged.
    """
    return Tokenizer.from_pretrained(folder) if has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """True if a folder has a file with a usual name of a tokenizer."""
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    return any((folder / name).is_file() for name in names)


def read_config(folder: Path) -> ModelConfig:
    """The model config of a folder's config.json; for an adapter without one, that of its base.

    Raises:
        ModelError: config.json is missing, damaged, or of an unsupported family.
    """
    path = _config_path(folder)
    if not path.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no {CONFIG_NAME}")
    return config_from_hf(read_json_object(path, ModelError), str(path))


def _config_path(folder: Path) -> Path:
    path = folder / CONFIG_NAME
    return path if path.is_file() else adapter_chain(folder)[-1] / CONFIG_NAME


def config_from_hf(content: Mapping[str, Any], where: str) -> ModelConfig:
    """The model config of a config.json object.

    Args:
        content: the object.
        where: the object's name in messages.

    Raises:
        ModelError: the config is damaged, or of an unsupported family or quantisation.
    """
    family = FAMILIES.get(str(content.get("model_type")))
    packed = content.get("quantization_config")
    kind = packed.get("quant_method") if isinstance(packed, Mapping) else None
    if packed and not (kind == "mxfp4" and family is not None and family.spec.has_mxfp4):
        raise ModelError(
            f"{where}: quantization_config: quantised weights are not read: take the model that "
            "was not quantised"
        )
    if family is None:
        classes = content.get("architectures")
        architecture = f" ({classes[0]})" if isinstance(classes, list) and classes else ""
        raise ModelError(
            f"{where}: model_type '{content.get('model_type')}'{architecture} is not supported "
            f"(supported: {', '.join(FAMILIES)})"
        )
    try:
        return family.config.from_hf(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = "".join(f"{part}: " for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{where}: {location}{message}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error


def _eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text: from generation_config.json, else from config.json, else from the
    tokenizer; () if none of them has any."""
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        path = folder / name
        values = read_json_object(path, ModelError) if path.is_file() else {}
        value = values.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return tuple(value)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    return ()


def model_files(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The files of a Hugging Face model folder except the weights, as texts by name."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    content = {**config.to_hf(), **special, "dtype": "float32", "torch_dtype": "float32"}
    return {
        CONFIG_NAME: json.dumps(content, indent=2) + "\n",
        GENERATION_CONFIG_NAME: json.dumps(generation_config(tokenizer), indent=2) + "\n",
        **tokenizer.files(),
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """The `generation_config.json` of a model with this tokenizer, as an object. Ids that end a
    turn of the tokenizer's chat template also end a generation."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends += [end for end in turn_end_ids(tokenizer) if end not in ends]
    content: dict[str, int | list[int]] = {}
    if tokenizer.bos_token_id is not None:
        content["bos_token_id"] = tokenizer.bos_token_id
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return content


def training_notes(folder: Path) -> list[str]:
    """Notes for the user on training settings in a model folder's config.json that firstlight does
    not apply, such as dropout."""
    path = _config_path(folder)
    content = read_json_object(path, ModelError)
    family = FAMILIES.get(str(content.get("model_type")))
    # Of the keys below, GPT-2 applies resid_pdrop and embd_pdrop.
    applied = {} if family is None else family.config.model_fields
    names = ("attention_dropout", "hidden_dropout", "router_jitter_noise")
    return [
        f"{path} has {name} {content[name]}, which is not applied"
        for name in (*names, "resid_pdrop", "embd_pdrop")
        if content.get(name) and name not in applied
    ]


def export_notes(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[str]:
    """Notes for the user on differences between transformers and firstlight in reading a model
    folder.

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
        f"transformers 5 reads every tokenizer of a {config['model_type']} model with the split of "
        f"{split}, and gives other ids than this one: take model_type qwen3 or llama for it"
    ]
