"""Model folders in the Hugging Face layout, in and out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from firstlight.errors import InputError, ModelError
from firstlight.files import read_json
from firstlight.hub import find_model_folder
from firstlight.models import FAMILIES, Model, ModelConfig, build_model
from firstlight.tokenizer import Tokenizer

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
GENERATION_CONFIG_NAME = "generation_config.json"

#: Buffers that old checkpoints carry beside the weights; they are computed, not learned.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it.

    Attributes:
        model: in evaluation mode, on the device asked for.
        tokenizer: None where the folder has none.
        eos_token_ids: ids that end a generation.
        folder: where it was read from.
    """

    model: Model
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    folder: Path


def load_model(folder: str | Path, device: torch.device | str = "cpu") -> LoadedModel:
    """Load weights, config and tokenizer of a Hugging Face model folder or hub id, as fp32.

    Raises:
        ModelError: a file is missing or damaged, the family is unknown, or a tensor is
            missing, extra or of the wrong shape (named).
        TokenizerError: there is a tokenizer, and it is damaged.
    """
    folder = find_model_folder(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = build_model(config)
    _assign(model, _read_weights(folder), folder, device)
    model.finish_loading()
    model.to(device).eval()
    tokenizer = tokenizer_of(folder)
    return LoadedModel(model, tokenizer, _eos_token_ids(folder, tokenizer), folder)


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None where it has none.

    Raises:
        TokenizerError: there is one, and it is damaged.
    """
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        return None
    return Tokenizer.from_pretrained(folder)


def read_config(folder: Path) -> ModelConfig:
    """The model config of a folder's config.json.

    Raises:
        ModelError: it is missing, damaged, or of a family that firstlight doesn't have.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no {CONFIG_NAME}")
    content = _read_model_json(path)
    family = FAMILIES.get(str(content.get("model_type")))
    if family is None:
        raise ModelError(
            f"{path}: model_type '{content.get('model_type')}' is not supported "
            f"(supported: {', '.join(FAMILIES)})"
        )
    try:
        return family.config.from_hf(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{path}: {where}{message}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _read_model_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except InputError as error:
        raise ModelError(str(error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _weight_files(folder: Path) -> list[str]:
    """The one file of weights, or the shards of an index."""
    if (folder / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_model_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ModelError(f"{folder / INDEX_NAME} has no weight_map of tensors to files")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{folder / INDEX_NAME} names a file outside its folder: {outside[0]}")
        return names
    raise ModelError(
        f"{folder} has no {WEIGHTS_NAME}: only safetensors weights are read "
        "(pickled .bin and .pt files can run code when they are opened)"
    )


def weight_dtypes(folder: Path) -> list[str]:
    """The number formats of a folder's weights, as safetensors names them (F32, BF16)."""
    found = set()
    for name in _weight_files(folder):
        try:
            with safetensors.safe_open(folder / name, framework="pt") as file:
                found |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{folder / name} is damaged or cut short: {error}") from error
    return sorted(found)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder."""
    tensors: dict[str, Tensor] = {}
    for name in _weight_files(folder):
        try:
            tensors.update(safetensors.torch.load_file(folder / name))
        except FileNotFoundError:
            raise ModelError(f"{folder / name} is missing, though the index names it") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{folder / name} is damaged or cut short: {error}") from error
    return tensors


def _assign(
    model: Model, tensors: dict[str, Tensor], folder: Path, device: torch.device | str
) -> None:
    """Put the tensors into a meta-device model, refusing any that don't fit, by name."""
    expected = model.state_dict()
    if "transformer.wte.weight" in expected and "wte.weight" in tensors:
        tensors = {
            name if name.startswith("lm_head.") else f"transformer.{name}": tensor
            for name, tensor in tensors.items()
        }
    tensors = {n: t for n, t in tensors.items() if n in expected or not n.endswith(_BUFFERS)}
    embedding = next(
        name for name in expected if name.endswith(("embed_tokens.weight", "wte.weight"))
    )
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
        head = tensors.pop("lm_head.weight", None)
        if head is not None and embedding in tensors and not torch.equal(head, tensors[embedding]):
            raise ModelError(
                f"{folder}: config.json ties lm_head.weight to {embedding}, but the two differ"
            )
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(expected[name].shape)}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    # Quantised weights mean nothing without their scales.
    integers = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    for problem, names in (
        ("lacks", missing),
        ("has unknown", extra),
        ("has misshapen", wrong),
        ("has integer", integers),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{folder} {problem} tensors: {', '.join(names[:3])}{more}")
    # Copies: what was read is the file itself, memory-mapped, and changes when that does.
    copies = {n: t.to(device, torch.float32, copy=True) for n, t in tensors.items()}
    copies.setdefault("lm_head.weight", copies[embedding])
    model.load_state_dict(copies, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def _eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text: generation_config.json, else config.json, else the tokenizer."""
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        path = folder / name
        value = _read_model_json(path).get("eos_token_id") if path.is_file() else None
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return tuple(value)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    return ()


def model_files(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The text files of a Hugging Face model folder: all but the weights, by name."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    content = {**config.to_hf(), **special, "dtype": "float32", "torch_dtype": "float32"}
    generation = {name: value for name, value in special.items() if value is not None}
    return {
        CONFIG_NAME: json.dumps(content, indent=2) + "\n",
        GENERATION_CONFIG_NAME: json.dumps(generation, indent=2) + "\n",
        **tokenizer.files(),
    }


def weights_to_save(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`: on the CPU, contiguous, a tied head left out."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
