"""Checkpoints with random weights, of about any size, for benchmarks to load."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from firstlight.console import say
from firstlight.errors import ConfigError, InputError, StorageError
from firstlight.files.atomic import new_folder, read_json, storage_errors, write_json
from firstlight.generation.engine import DTYPES
from firstlight.models import LlamaConfig, build_model
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

#: Parameters that `model_config` reaches.
SMALLEST, LARGEST = 1_500_000, 30_000_000_000

#: The model folders, with one file of weights and with several.
SINGLE, SHARDED = "single", "sharded"
_SHARDS = 4


def parse_count(text: str) -> int:
    """'0.5B' -> 500000000; K, M and B are thousands, millions and billions.

    Raises:
        ConfigError: it is not such a number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError(f"'{text}' is not a number of parameters: use for instance 0.5B or 2M")
    factor = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2].upper()]
    return round(float(match[1]) * factor)


def model_config(parameters: int) -> LlamaConfig:
    """A Qwen2 model of about so many parameters: 896 wide for half a billion, as Qwen2.5-0.5B.

    The width comes in steps of two heads of 64; the vocabulary makes up the difference.
    """
    width = min(range(128, 8193, 128), key=lambda C: abs(_size(C) - parameters))
    layers, intermediate, vocabulary = _proportions(width)
    rest = parameters - (_size(width) - vocabulary * width)
    return LlamaConfig(
        model_type="qwen2",
        vocab_size=max(1024, round(rest / width)),
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )


def _proportions(width: int) -> tuple[int, int, int]:
    """(layers, width of the MLP, vocabulary) as in Qwen2.5-0.5B, which has 24, 4864, 151936."""
    intermediate = round(width / 896 * 4864 / 64) * 64
    return min(28, round(width / 896 * 24)), intermediate, min(151_936, 170 * width)


def _size(width: int) -> int:
    """Parameters of a model of `_proportions`."""
    layers, intermediate, vocabulary = _proportions(width)
    attention = 2 * width * width + width + 2 * (128 * width + 128)
    return layers * (attention + 3 * width * intermediate + 2 * width) + (1 + vocabulary) * width


def make_checkpoints(parameters: int, dtype: str, folder: Path, sharded: bool) -> dict[str, Any]:
    """Write the checkpoint as one file, and where asked in shards, unless they are there.

    Args:
        parameters: of the model, about.
        dtype: "bfloat16" or "float32".
        folder: gets the model folders `single` and `sharded`.
        sharded: whether the second is needed.

    Returns:
        "parameters", "file_bytes", "dtype" and the model folder's "shape".

    Raises:
        InputError: something else has the folders' names.
        StorageError: the disk has too little space.
    """
    config = model_config(parameters)
    content = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    with torch.device("meta"):
        model = build_model(config).to(DTYPES[dtype])
    size = sum(parameter.nbytes for parameter in model.parameters())
    paths = [folder / name for name in (SINGLE, SHARDED)[: 1 + sharded]]
    missing = [path for path in paths if not _is_there(path, content)]
    if missing:
        _require_space(folder, len(missing) * size)
        say(f"making a checkpoint of {size / 1e9:.3g} GB in {folder}")
        model.to_empty(device="cpu")
        model.finish_loading()
        model.init_weights(torch.Generator().manual_seed(0))
    for path in missing:
        shard_bytes = size if path.name == SINGLE else size // _SHARDS
        with new_folder(path) as place:
            write_json(place / CONFIG_NAME, content)
            save_weights(weights_to_save(model), place, max_shard_bytes=shard_bytes)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file_bytes": sum(path.stat().st_size for path in paths[0].glob("*.safetensors")),
        "dtype": dtype,
        "shape": config.model_dump(mode="json"),
    }


def _is_there(path: Path, content: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is there already.

    Raises:
        InputError: another one is.
    """
    if not path.exists():
        return False
    if (path / CONFIG_NAME).is_file() and read_json(path / CONFIG_NAME) == content:
        return True
    raise InputError(
        f"{path} holds something else than this benchmark's checkpoint: "
        "choose another --dir or the same --parameters and --dtype"
    )


def _require_space(folder: Path, needed: int) -> None:
    """Raises StorageError: the folder's disk has not so many bytes, and a twentieth, free."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise StorageError(
            f"the checkpoint needs {needed / 1e9:.3g} GB, and {folder} has {free / 1e9:.3g} GB "
            "free: choose another folder with --dir or fewer --parameters"
        )
