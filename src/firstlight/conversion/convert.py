"""`convert`: a model of one program becomes one of another, and is compared with it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.checkpoint import resolve_model_folder
from firstlight.conversion.check import (
    logits_of,
    prompt_ids,
    require_same_chat,
    require_same_logits,
)
from firstlight.conversion.foreign import ForeignModel, read_foreign
from firstlight.conversion.gguf_file import gguf_notes, write_gguf
from firstlight.conversion.gguf_reader import read_gguf
from firstlight.errors import ConfigError, InputError, ModelError, nearest
from firstlight.files import new_folder, read_json, require_free
from firstlight.huggingface import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    config_from_hf,
    export_notes,
    generation_config,
    read_config,
    tokenizer_of,
)
from firstlight.models import build_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights import fitting_tensors, open_mapped, save_weights

#: The dtype names of each target -> what the file calls it; "auto" keeps that of the source.
_DTYPES = {
    "hf": {"auto": "auto", "f32": "float32", "f16": "float16", "bf16": "bfloat16"},
    "gguf": {"auto": "auto", "f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "q8_0"},
}
_LONG_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

#: What a tokenizer may consist of; copied as it is where the source is a model folder.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        out: the folder that was written.
        file: the GGUF file in it; None for a Hugging Face folder.
        program: whose model the source was: "Hugging Face", "nanoGPT", "LLMs-from-scratch".
        model_type: the family.
        parameters: how many numbers were written.
        dtype: "f32", "f16", "bf16", "q8_0"; "mixed" where the source has several.
        largest_difference: of two logits, source and result, on a fixed prompt.
        largest_logit: of the source, for comparison.
        has_chat_template: whether there is one, which then renders alike in both.
        notes: what a person should know.
    """

    out: Path
    file: Path | None
    program: str
    model_type: str
    parameters: int
    dtype: str
    largest_difference: float
    largest_logit: float
    has_chat_template: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """A model to convert: `logits` computes its own, `folder` is set for Hugging Face's."""

    program: str
    name: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    folder: Path | None
    logits: Callable[[Tensor], Tensor]
    notes: tuple[str, ...] = ()


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Literal["hf", "gguf"] = "hf",
    dtype: str = "auto",
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    tolerance: float | None = None,
) -> Conversion:
    """Convert a model, and refuse the result where it doesn't compute what the source does.

    Args:
        source: a Hugging Face model folder, a run, a hub id, or a file: nanoGPT's `ckpt.pt`, an
            LLMs-from-scratch `model.pth`.
        out: the folder to write; must be missing or empty.
        to: "hf" (a Hugging Face model folder) or "gguf" (a file for llama.cpp in the folder).
        dtype: "auto" (that of the source), "f32", "f16", "bf16", and for GGUF "q8_0".
        tokenizer: a tokenizer's folder or file, where the source has none or another is wanted.
        config: a JSON file with keys of a Hugging Face config.json that a `.pt` or `.pth` file
            doesn't say.
        tolerance: the greatest difference of two logits that passes, as a share of the largest;
            None is right for the format's rounding.

    Raises:
        ConfigError: an option can't be meant.
        InputError: `out` holds something.
        ModelError, CheckpointError, TokenizerError: the source can't be read, can't be
            expressed in the target, or the result's logits or chat template differ.
        StorageError: the disk refuses. In every case nothing is written.
    """
    if to not in _DTYPES:
        raise ConfigError(f"to '{to}' is unknown{nearest(to, _DTYPES)}: hf or gguf")
    dtype = _LONG_NAMES.get(dtype, dtype)
    if dtype not in _DTYPES[to]:
        raise ConfigError(f"dtype '{dtype}' is not one of {to}: {', '.join(_DTYPES[to])}")
    out = Path(out).expanduser()
    require_free(out, "folder", "choose another --out")
    model = _read(source, tokenizer, config)
    expected_config = config_from_hf(model.config, model.name)
    if model.tokenizer is not None and model.tokenizer.vocab_size > expected_config.vocab_size:
        raise ModelError(
            f"the tokenizer has {model.tokenizer.vocab_size} tokens, more than the "
            f"{expected_config.vocab_size} of {model.name}: they don't belong together"
        )
    kinds = {tensor.dtype for tensor in model.tensors.values()}
    own = next((name for name, kind in _TORCH_DTYPES.items() if kinds == {kind}), "mixed")
    chosen = own if dtype == "auto" else dtype
    ids = prompt_ids(
        model.tokenizer, expected_config.vocab_size, expected_config.max_position_embeddings
    )
    expected = model.logits(ids)
    notes = list(model.notes)
    if model.tokenizer is None:
        notes.append("there is no tokenizer: give one with --tokenizer")
    file = None
    with new_folder(out) as folder:
        if to == "gguf":
            chosen = "f32" if chosen == "mixed" else chosen
            file = f"{model.name}-{chosen}.gguf"
            notes += gguf_notes(model.config, model.tokenizer)
            found = _write_gguf(model, folder / file, chosen, ids)
        else:
            notes += export_notes(model.config, model.tokenizer)
            found = _write_folder(model, folder, None if dtype == "auto" else dtype, ids)
        kind = "bf16" if chosen == "mixed" else chosen
        difference, largest = require_same_logits(
            expected, found, _DTYPES["hf"].get(kind, kind), tolerance
        )
    template = model.tokenizer.chat_template if model.tokenizer is not None else None
    return Conversion(
        out=out,
        file=out / file if file is not None else None,
        program=model.program,
        model_type=expected_config.model_type,
        parameters=sum(tensor.numel() for tensor in model.tensors.values()),
        dtype=chosen,
        largest_difference=difference,
        largest_logit=largest,
        has_chat_template=template is not None,
        notes=tuple(notes),
    )


def _read(source: str | Path, tokenizer: str | Path | None, config: str | Path | None) -> _Source:
    """The model to convert, with the tokenizer that it is to have."""
    given = Tokenizer.from_pretrained(tokenizer) if tokenizer is not None else None
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(path, given, config)
    if config is not None:
        raise ConfigError("--config is for .pt and .pth files: a model folder has its own")
    folder = resolve_model_folder(source)
    own_config = read_config(folder)
    with torch.device("meta"):
        shape = build_model(own_config)
    tensors = open_mapped(fitting_tensors(shape, folder))
    content = read_json(folder / CONFIG_NAME)
    return _Source(
        program="Hugging Face",
        name=path.resolve().name if path.is_dir() else str(source).rpartition("/")[2],
        config=content,
        tensors=tensors,
        tokenizer=given or tokenizer_of(folder),
        folder=folder if given is None else None,
        logits=lambda ids: logits_of(content, tensors, ids),
    )


def _read_file(path: Path, tokenizer: Tokenizer | None, config: str | Path | None) -> _Source:
    if path.suffix in (".safetensors", ".gguf", ".json"):
        raise InputError(
            f"{path} is not a checkpoint of nanoGPT or LLMs-from-scratch: for Hugging Face models "
            "name their folder"
        )
    values = None
    if config is not None:
        values = read_json(Path(config))
        if not isinstance(values, dict):
            raise ConfigError(f"{config} is not a JSON object")
    foreign = _without_padding(read_foreign(path, config=values), tokenizer)
    size = int(foreign.config["vocab_size"])
    special = {} if tokenizer is None else generation_config(tokenizer)
    return _Source(
        program=foreign.program,
        name=path.stem,
        config={**foreign.config, **special},
        tensors=foreign.tensors,
        tokenizer=tokenizer,
        folder=None,
        logits=lambda ids: foreign.logits(ids)[..., :size],
        notes=foreign.notes,
    )


def _without_padding(model: ForeignModel, tokenizer: Tokenizer | None) -> ForeignModel:
    """The model without the rows that pad its vocabulary beyond the tokenizer's, which must never
    be predicted."""
    size = model.config["vocab_size"]
    if tokenizer is None or tokenizer.vocab_size >= size:
        return model
    names = ("transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight")
    tensors = {
        name: tensor[: tokenizer.vocab_size] if name in names else tensor
        for name, tensor in model.tensors.items()
    }
    note = f"{size - tokenizer.vocab_size} rows that padded the vocabulary were left out"
    return dataclasses.replace(
        model,
        config={**model.config, "vocab_size": tokenizer.vocab_size},
        tensors=tensors,
        notes=(*model.notes, note),
    )


def _write_gguf(model: _Source, path: Path, dtype: str, ids: Tensor) -> Tensor:
    """Write the file; return the logits of what is read back from it."""
    write_gguf(
        path,
        model.config,
        model.tensors,
        model.tokenizer,
        dtype=dtype,  # type: ignore[arg-type]
        name=model.name,
    )
    result = read_gguf(path)
    if model.tokenizer is not None:
        own = model.tokenizer
        config = {k: v for k, v in own.config.items() if k != "chat_template"}
        config |= {"chat_template": result.chat_template} if result.chat_template else {}
        rendered = Tokenizer(
            own.backend, bos_token=own.bos_token, eos_token=own.eos_token, config=config
        )
        require_same_chat(own, rendered, path.name)
    return logits_of(result.config, result.tensors, ids)


def _write_folder(model: _Source, folder: Path, dtype: str | None, ids: Tensor) -> Tensor:
    """Write a Hugging Face model folder; return the logits of what is read back from it."""
    tensors = model.tensors
    config = dict(model.config)
    if dtype is not None:
        tensors = {name: tensor.to(_TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) == 1 and (dtype is not None or model.folder is None):
        name = str(kinds.pop()).removeprefix("torch.")
        config |= {"dtype": name, "torch_dtype": name}
    texts: dict[str, str] = {}
    if model.tokenizer is not None:
        texts = model.tokenizer.files()
        texts[GENERATION_CONFIG_NAME] = (
            json.dumps(generation_config(model.tokenizer), indent=2) + "\n"
        )
    if model.folder is not None:
        for name in (*_TOKENIZER_FILES, GENERATION_CONFIG_NAME):
            if (model.folder / name).is_file():
                shutil.copyfile(model.folder / name, folder / name)
    for name, content in texts.items():
        if not (folder / name).exists():
            (folder / name).write_text(content, encoding="utf-8")
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_weights(tensors, folder)
    own_config = read_config(folder)
    with torch.device("meta"):
        shape = build_model(own_config)
    written = open_mapped(fitting_tensors(shape, folder))
    if model.tokenizer is not None:
        result = tokenizer_of(folder)
        if result is None or result.fingerprint != model.tokenizer.fingerprint:
            raise ModelError("the converted folder's tokenizer is not the source's")
        require_same_chat(model.tokenizer, result, "the converted folder")
    return logits_of(config, written, ids)
