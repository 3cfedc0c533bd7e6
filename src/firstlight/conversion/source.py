"""The source of a conversion: a model folder, an adapter, or another program's file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from firstlight.checkpoint.checkpoint import (
    is_sharded_checkpoint,
    load_trainer_state,
    saved_vocab_multiple,
)
from firstlight.checkpoint.manifest import CHECKPOINTS
from firstlight.checkpoint.selection import read_model_folder
from firstlight.checkpoint.sharded import sharded_model
from firstlight.conversion.foreign import nanochat
from firstlight.conversion.foreign.model import ForeignModel, foreign_folder, read_foreign
from firstlight.conversion.pickled import pickled_tensors
from firstlight.errors import ConfigError, InputError, nearest
from firstlight.files.atomic import read_json
from firstlight.lora.files import adapter_chain, is_adapter
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES
from firstlight.models.accounting import meta_model
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.formats import PICKLED_TOKENIZER
from firstlight.weights.huggingface import CONFIG_NAME, read_config, tokenizer_of
from firstlight.weights.loading import fitting_tensors, one_by_one, weights_to_save
from firstlight.weights.mxfp4 import open_tensors
from firstlight.weights.stored import WEIGHTS_NAME, has_pickled_weights

T = TypeVar("T")

#: Fewer rows than this beyond the tokenizer's vocabulary are taken for padding, since programs pad
#: to a multiple of 64 or 128.
_MAX_PADDING = 128


@dataclass(frozen=True)
class Source:
    """A model to convert.

    Attributes:
        program: the program that wrote the model, or "adapter (PEFT)".
        name: name of the result, of characters that a file name can have.
        config: content of config.json, with the ids of special tokens of `tokenizer` if that is
            not from the same folder.
        tensors: tensors by their Hugging Face names, memory-mapped where possible.
        tokenizer: tokenizer of the result, if any.
        folder: Hugging Face folder whose other files are copied to the result; None if there is
            none.
        notes: remarks for the user.
    """

    program: str
    name: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    folder: Path | None
    notes: tuple[str, ...] = ()


def read_source(
    source: str | Path,
    tokenizer: str | Path | None,
    config: str | Path | None,
    use: Callable[[Source], T],
    *,
    best: bool = False,
) -> T:
    """Open the model to convert, and return the result of calling `use` on it. If a training run in
    progress deletes the checkpoint during that call, `use` is called again on the newest one.

    Args:
        source: a Hugging Face model folder, a run, a hub id, or another program's file.
        tokenizer: a tokenizer's folder or file, which replaces the source's tokenizer.
        config: a JSON file with settings that another program's files lack.
        use: function that reads the model's tensors and files, and writes the result.
        best: take a run's checkpoint with the lowest validation loss, not the newest.

    Raises:
        ConfigError: `config` or `best` does not fit this source, or `config` is not an object.
        InputError: a file is missing, or of an unsupported kind.
        ModelError, CheckpointError, TokenizerError: the source can't be read. Errors of `use` are
            passed on.
    """
    given = None
    if tokenizer is not None:
        given = Tokenizer.from_pretrained(Path(tokenizer).expanduser())
    path = Path(source).expanduser()
    if not best and path.exists() and (path.is_file() or foreign_folder(path) is not None):
        return use(_read_foreign(path, given, config))
    if path.suffix in (".pt", ".pth") and not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"checkpoint {path} does not exist{nearest(path.name, siblings)}")
    if config is not None:
        raise ConfigError("--config is for other programs' checkpoints: a model folder has its own")
    name = _name_of(source)
    return read_model_folder(
        source, lambda folder: use(_read_folder(folder, name, given)), pickled=True, best=best
    )


def _read_folder(folder: Path, name: str, given: Tokenizer | None) -> Source:
    """The model of a Hugging Face folder or an adapter. The tokenizer `given`, if any, replaces the
    model's own."""
    if is_adapter(folder):
        return _read_adapter(folder, name, given)
    content, tensors = read_folder(folder)
    model = Source(
        program="Hugging Face",
        name=name,
        config=content if given is None else {**content, **_special_tokens(given)},
        tensors=tensors,
        tokenizer=given or tokenizer_of(folder),
        folder=folder if given is None else None,
    )
    return with_qkv_biases(model)


def with_qkv_biases(model: Source) -> Source:
    """The model; if it is a GPT-2 without biases of queries, keys and values, with biases of zeros,
    since GPT-2 has these biases in other programs."""
    if model.config.get("model_type") != "gpt2" or model.config.get("qkv_bias", True):
        return model
    tensors = dict(model.tensors)
    for name, weight in model.tensors.items():
        if name.endswith(".attn.c_attn.weight"):
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(weight.shape[1])
    note = (
        "queries, keys and values have no biases here (qkv_bias: false), and in other programs' "
        "GPT-2 they have: zeros were written for them, which are trained where the result is"
    )
    config = {key: value for key, value in model.config.items() if key != "qkv_bias"}
    return dataclasses.replace(model, config=config, tensors=tensors, notes=(*model.notes, note))


def _read_adapter(folder: Path, name: str, given: Tokenizer | None) -> Source:
    """An adapter merged into its base. The base's other files are copied, unless there is another
    tokenizer (given, or the adapter's) or the adapter unties the head."""
    base = adapter_chain(folder)[-1]
    loaded = load_model(folder)
    content: dict[str, Any] = read_json(base / CONFIG_NAME)
    tied = loaded.model.config.tie_word_embeddings
    is_untied = read_config(base).tie_word_embeddings and not tied
    merged = {**content, "tie_word_embeddings": False} if is_untied else content
    own = given or tokenizer_of(folder)
    tensors = weights_to_save(loaded.model)
    model = Source(
        program="adapter (PEFT)",
        name=name,
        config=merged if own is None else {**merged, **_special_tokens(own)},
        tensors=tensors,
        tokenizer=given or loaded.tokenizer,
        folder=base if own is None and not is_untied else None,
        notes=(f"the adapter was merged into its base, {base}",),
    )
    return with_qkv_biases(model)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json of a model folder as an object, and its tensors by their Hugging Face names.

    Tensors are memory-mapped, except those of a sharded checkpoint, which are assembled in memory,
    and experts in MXFP4, which are unpacked. Stacked experts are split into views of each.

    Raises:
        ModelError, CheckpointError: a file is missing or damaged, or the tensors don't fit
            config.json.
    """
    if is_sharded_checkpoint(folder) and not (folder / WEIGHTS_NAME).is_file():
        multiple = saved_vocab_multiple(folder, load_trainer_state(folder))
        return read_json(folder / CONFIG_NAME), weights_to_save(sharded_model(folder, multiple))
    config = read_config(folder)
    content: dict[str, Any] = read_json(folder / CONFIG_NAME)
    if has_pickled_weights(folder):
        return content, pickled_tensors(folder)
    stored = fitting_tensors(meta_model(config), folder)
    # MXFP4 weights are written unpacked.
    content.pop("quantization_config", None)
    return content, one_by_one(open_tensors(stored), config)


def _name_of(source: str | Path) -> str:
    """A model's name, from its file, folder or run folder, or from its name on the hub."""
    path = Path(source).expanduser()
    if path.is_file():
        name = path.stem
    elif path.is_dir():
        path = Path(os.path.abspath(path))
        if path.parent.name == CHECKPOINTS:
            path = path.parent.parent
        name = path.name
    else:
        name = str(source).partition("@")[0].rpartition("/")[2]
    # File names are limited to 255 bytes, and a character takes up to 4.
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60] or "model"


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}


def _read_foreign(path: Path, tokenizer: Tokenizer | None, config: str | Path | None) -> Source:
    """The model in another program's file or folder; arguments as in `read_source`."""
    is_pickled = path.name.startswith("pytorch_model") and path.suffix == ".bin"
    if path.suffix.lower() in (".safetensors", ".json") or is_pickled:
        raise InputError(f"{path} is one file of a model: name its folder, {path.parent}")
    if path.suffix.lower() == ".gguf":
        raise InputError(f"{path}: GGUF files are written, not converted: name what it was made of")
    values = None
    if config is not None:
        values = read_json(Path(config).expanduser())
        if not isinstance(values, dict):
            raise ConfigError(f"{config} is not a JSON object")
    folder = foreign_folder(path)
    if folder is not None:
        path, tokenizer = folder, tokenizer or _tokenizer_beside(folder)
    foreign = _without_padding(read_foreign(path, config=values), tokenizer)
    special = {} if tokenizer is None else _special_tokens(tokenizer)
    needs_tokenizer = tokenizer is None and foreign.program == nanochat.LAYOUT.program
    return Source(
        program=foreign.program,
        name=_name_of(path),
        config={**foreign.config, **special},
        tensors=foreign.tensors,
        tokenizer=tokenizer,
        folder=None,
        notes=(*foreign.notes, PICKLED_TOKENIZER) if needs_tokenizer else foreign.notes,
    )


def _tokenizer_beside(folder: Path) -> Tokenizer | None:
    """The tokenizer in the folder of another program's model, or `tokenizer.model` in its parent
    folder, where Meta's downloads have it; None if there is none."""
    for place in (folder, folder.parent / "tokenizer.model"):
        names = ("tokenizer.json", "tokenizer.model", "vocab.bpe", "merges.txt")
        if place.is_file() or any((place / name).is_file() for name in names):
            return Tokenizer.from_pretrained(place)
    return None


def _without_padding(model: ForeignModel, tokenizer: Tokenizer | None) -> ForeignModel:
    """The model without the rows of embedding and head that pad its vocabulary beyond the
    tokenizer's: their ids are no tokens, and must never be predicted. `_MAX_PADDING` rows or more
    are not taken for padding, and stay with a note."""
    size = model.config["vocab_size"]
    extra = 0 if tokenizer is None else size - tokenizer.vocab_size
    if tokenizer is None or extra <= 0:
        return model
    if extra >= _MAX_PADDING:
        note = f"{extra} ids of the model stand for no token of the tokenizer: is it the right one?"
        return dataclasses.replace(model, notes=(*model.notes, note))
    family = FAMILIES[model.config["model_type"]].model
    names = (f"{family.embedding_name}.weight", family.head_file_name)
    tensors = {
        name: tensor[: tokenizer.vocab_size] if name in names else tensor
        for name, tensor in model.tensors.items()
    }
    note = f"{extra} rows that padded the vocabulary were left out"
    return dataclasses.replace(
        model,
        config={**model.config, "vocab_size": tokenizer.vocab_size},
        tensors=tensors,
        notes=(*model.notes, note),
    )
