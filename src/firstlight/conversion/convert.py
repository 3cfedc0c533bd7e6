"""Convert a model to a Hugging Face folder, a GGUF file or an Ollama folder.

The converted model is read back, and it is rejected if it differs from the source.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from firstlight.checkpoint.checkpoint import (
    is_sharded_checkpoint,
    load_trainer_state,
    saved_vocab_multiple,
    tokens_read,
)
from firstlight.checkpoint.manifest import CHECKPOINTS
from firstlight.checkpoint.selection import read_model_folder
from firstlight.checkpoint.sharded import sharded_model
from firstlight.conversion.check import (
    TOLERANCES,
    check_dtype,
    logits_of,
    prompt_ids,
    require_finite,
    require_same_chat,
    require_same_logits,
    require_same_tensors,
)
from firstlight.conversion.foreign import nanochat
from firstlight.conversion.foreign.model import ForeignModel, foreign_folder, read_foreign
from firstlight.conversion.ollama import modelfile
from firstlight.conversion.pickled import pickled_tensors
from firstlight.conversion.quantize import QUANTISED, import_llama_cpp, quantise_source
from firstlight.errors import ConfigError, InputError, ModelError, nearest
from firstlight.files.atomic import new_folder, read_file, read_json, require_free
from firstlight.lora.files import adapter_chain, is_adapter
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES, ModelConfig
from firstlight.models.accounting import meta_model
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.formats import PICKLED_TOKENIZER
from firstlight.weights.composite import Carried, read_carried, text_content
from firstlight.weights.gguf.reader import read_gguf
from firstlight.weights.gguf.writer import gguf_notes, import_gguf, write_gguf
from firstlight.weights.hub import is_gguf
from firstlight.weights.huggingface import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKENS_KEY,
    config_from_hf,
    end_ids,
    eos_ids_of,
    export_notes,
    generation_config,
    read_config,
    read_generation,
    tokenizer_of,
)
from firstlight.weights.loading import fitting_tensors, is_finite, one_by_one, weights_to_save
from firstlight.weights.stored import (
    FLOAT_FORMATS,
    WEIGHTS_NAME,
    has_pickled_weights,
    open_tensors,
    save_weights,
)

#: Dtypes that each target format supports. "auto" keeps the dtype of the source.
_GGUF_FORMATS = ("auto", "f32", "f16", "bf16", "q8_0", *QUANTISED)
_FORMATS = {
    "hf": ("auto", "f32", "f16", "bf16"),
    "gguf": _GGUF_FORMATS,
    "ollama": _GGUF_FORMATS,
}
_SHORT_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "fp32": "f32",
    "fp16": "f16",
}
_TORCH_DTYPES = {kind.lower(): dtype for kind, dtype in FLOAT_FORMATS.items()}

#: Maximum size of a calibration text in bytes. Only the first 32,768 tokens of the text are used.
_MAX_CALIBRATION_BYTES = 10_000_000
#: File from which Ollama reads a model's template, stop strings and context length.
MODELFILE = "Modelfile"

#: Tokenizer files that are copied unchanged from a model folder.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
#: Subfolder in which transformers stores additional chat templates.
_MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        out: folder to which the model was written.
        file: path of the GGUF file in `out`. None for a Hugging Face model folder.
        program: program or library that wrote the source, such as "Hugging Face", "adapter (PEFT)"
            or "nanoGPT".
        model_type: model family, as specified in config.json.
        parameters: total number of elements in the weights that were written.
        dtype: dtype or format of the weights. It is "f32", "f16", "bf16", "q8_0" or a format of
            llama.cpp's quantiser. For a Hugging Face folder, it can also be "f64", or "mixed" if
            the weights have several dtypes.
        largest_difference: largest difference between the logits of the source and the result on a
            fixed prompt. The mean at each position, to which softmax is invariant, is subtracted
            first.
        largest_logit: largest absolute logit of the source, after the same subtraction.
        has_chat_template: True if the source and the result have the same chat template. False if
            neither of them has a chat template.
        notes: messages to the user.
        perplexity: for files that llama.cpp quantised, a tuple with the perplexity of the source on
            a fixed text, the perplexity of the result on the same text, and the number of bits per
            weight in the file. None for all other results.
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
    perplexity: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class _Result:
    """The converted model after it has been read back from its files. `name` identifies the model
    in messages.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Literal["hf", "gguf", "ollama"] = "hf",
    dtype: str = "auto",
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    tolerance: float | None = None,
    calibration: str | Path | None = None,
    best: bool = False,
) -> Conversion:
    """Convert a model, and verify that the conversion has not changed it.

    If an error occurs, `out` is not written.

    Args:
        source: a Hugging Face model folder, a run, a GGUF file, a hub id, or a checkpoint of
            another program. Checkpoints of nanoGPT, LLMs-from-scratch and torchtune are files.
            Checkpoints of OpenAI's GPT-2, Meta's Llama, litgpt and nanochat are folders.
        out: folder to write. It must not exist or must be empty, and it must not be inside the
            source.
        to: format of the result. "hf" writes a Hugging Face model folder, "gguf" writes a GGUF file
            to the folder, and "ollama" writes a GGUF file and a Modelfile.
        dtype: dtype of the result. "auto" keeps the dtype of the source. The other values are
            "f32", "f16" and "bf16" and, for GGUF files, also "q8_0" and the formats of llama.cpp's
            quantiser, such as "q4_k_m".
        tokenizer: folder or file of a tokenizer that replaces the tokenizer of the source.
        config: JSON file with settings that are missing from the checkpoint of another program,
            under the keys of a Hugging Face config.json.
        tolerance: largest allowed difference between logits, as a fraction of the largest logit.
            None to use the limit in `TOLERANCES`. For the formats of llama.cpp's quantiser,
            `tolerance` is the largest allowed relative increase in perplexity instead, and None
            selects the limit in `PERPLEXITY_LIMITS`.
        calibration: text file from which the importance matrix for llama.cpp's quantiser is
            computed.
        best: True to convert the checkpoint with the lowest validation loss if the source is a run
            folder. False to convert the newest checkpoint.

    Raises:
        ConfigError: an option is invalid.
        InputError: `out` is not empty, or a file is missing.
        ModelError, CheckpointError, TokenizerError: the source can't be read or can't be
            expressed in the target format, or the result's tensors, logits, perplexity or chat
            template differ.
        MissingDependencyError: the gguf package (for GGUF files) or llama-cpp-python (for the
            formats of llama.cpp's quantiser) is not installed.
        StorageError: a file can't be written.
    """
    dtype, text = _checked_options(to, dtype, tolerance, calibration)
    out = _free_place(out, source)

    def write(model: Source) -> Conversion:
        model = with_qkv_biases(model) if to != "hf" else model
        own_config = config_from_hf(model.config, model.name)
        _require_fit(model, own_config)
        if dtype in QUANTISED and model.tokenizer is None:
            raise ModelError(
                f"{dtype} must be verified on a text: specify a tokenizer with --tokenizer"
            )
        with new_folder(out) as folder:
            return _converted(
                model, own_config, folder, out, to=to, dtype=dtype, text=text, tolerance=tolerance
            )

    return read_source(source, tokenizer, config, write, best=best)


def _converted(
    model: Source,
    config: ModelConfig,
    folder: Path,
    out: Path,
    to: str,
    dtype: str,
    text: str | None,
    tolerance: float | None,
) -> Conversion:
    """Write the converted model to a folder, and compare it with the source.

    Args:
        model, config: the source and its config.
        folder: temporary folder to write. It is renamed to the output folder at the end.
        to, dtype, tolerance: see `convert`.
        text: calibration text for llama.cpp's quantiser, or None.
    """
    quantised = dtype if dtype in QUANTISED else None
    chosen, rounding = _result_dtype(model.tensors, "auto" if quantised else dtype, to)
    file = f"{model.name}-{quantised or chosen}.gguf" if to != "hf" else None
    notes, loss = _notes(model, to), None
    if file is None:
        result = _write_folder(model, folder, None if dtype == "auto" else dtype)
    else:
        plain = folder / (f"plain-{file}" if quantised else file)
        result = _write_gguf(model, plain, chosen)
    # llama.cpp quantises an intermediate GGUF file whose weights are not rounded. The logits of
    # this file are compared with the default limit, because `tolerance` applies to the perplexity
    # of the quantised file.
    limit = None if quantised else tolerance
    difference, largest, more = _compare(model, config, result, rounding, tolerance=limit)
    if quantised:
        assert model.tokenizer is not None
        loss = quantise_source(
            plain,
            folder / str(file),
            quantised,
            config=model.config,
            tensors=model.tensors,
            tokenizer=model.tokenizer,
            text=text,
            limit=tolerance,
        )
        difference, largest = loss.difference, loss.largest
    if to == "ollama":
        content, said = modelfile(
            str(file), model.tokenizer, config.max_position_embeddings, model.generation
        )
        (folder / MODELFILE).write_text(content, encoding="utf-8")
        more += said
    return Conversion(
        out=out,
        file=None if file is None else out / file,
        program=model.program,
        model_type=config.model_type,
        parameters=sum(tensor.numel() for tensor in model.tensors.values()),
        dtype=quantised or chosen,
        largest_difference=difference,
        largest_logit=largest,
        has_chat_template=model.tokenizer is not None and model.tokenizer.chat_template is not None,
        notes=(*notes, *more),
        perplexity=None if loss is None else (loss.source, loss.result, loss.bits),
    )


def _notes(model: Source, to: str) -> list[str]:
    """Return notes for the user about the source, about differences between the model in firstlight
    and in the target program, and about a missing tokenizer.
    """
    if to == "hf":
        notes = export_notes(model.config, model.tokenizer)
    else:
        notes = gguf_notes(model.config, model.tokenizer, model.generation)
    missing = "there is no tokenizer: specify one with --tokenizer"
    return [*model.notes, *notes, *([missing] if model.tokenizer is None else [])]


def _result_dtype(tensors: Mapping[str, Tensor], dtype: str, to: str) -> tuple[str, str]:
    """Return the dtype of the result and the format to which its weights are rounded.

    The dtype is "mixed" if the tensors have several dtypes. The format is "f32" if the weights are
    not rounded.
    """
    kinds = {tensor.dtype for tensor in tensors.values()}
    own = next((name for name, kind in _TORCH_DTYPES.items() if kinds == {kind}), "mixed")
    chosen = own if dtype == "auto" else dtype
    if to != "hf" and chosen not in _FORMATS[to]:
        chosen = "f32"
    return chosen, "f32" if chosen == own else chosen


def _checked_options(
    to: str, dtype: str, tolerance: float | None, calibration: str | Path | None
) -> tuple[str, str | None]:
    """Check the options of `convert`. Return the short name of the dtype, and the calibration text.

    Raises:
        ConfigError, MissingDependencyError: an option is invalid, or a package is not installed.
        InputError: the calibration text can't be read.
    """
    if to not in _FORMATS:
        raise ConfigError(f"to '{to}' is unknown{nearest(to, _FORMATS)}: hf, gguf or ollama")
    dtype = _SHORT_NAMES.get(dtype.lower(), dtype.lower())
    if dtype not in _FORMATS[to]:
        raise ConfigError(
            f"{to} does not support dtype '{dtype}'{nearest(dtype, _FORMATS[to])}: choose one of "
            f"{', '.join(_FORMATS[to])}"
        )
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"tolerance {tolerance} is invalid: use a number of at least 0")
    if to != "hf":
        import_gguf()
    if dtype in QUANTISED:
        import_llama_cpp()
    if calibration is None:
        return dtype, None
    if dtype not in QUANTISED:
        raise ConfigError(
            "--calibration requires one of llama.cpp's formats, for example --to gguf --dtype "
            "q4_k_m"
        )
    content = read_file(Path(calibration).expanduser(), _MAX_CALIBRATION_BYTES)
    return dtype, content.decode("utf-8", "replace")


def _free_place(out: str | Path, source: str | Path) -> Path:
    """Return `out` as a path. Raise an error if the folder is not empty or is in the source."""
    out, folder = Path(out).expanduser(), Path(source).expanduser()
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"folder {out} is the source or is inside it, but the source must not be modified: "
            "choose another --out"
        )
    require_free(out, "choose another --out")
    return out


def _require_fit(model: Source, config: ModelConfig) -> None:
    """Raise an error if the tokenizer has more tokens than the model, or if a weight is NaN or
    infinite.
    """
    if model.tokenizer is not None and model.tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {model.tokenizer.vocab_size} tokens, more than the "
            f"{config.vocab_size} of {model.name}: use the model's own tokenizer"
        )
    require_finite(model.tensors, model.name)


def _write_gguf(model: Source, path: Path, dtype: str) -> _Result:
    """Write the model to a GGUF file, and read the file back."""
    write_gguf(
        path,
        model.config,
        model.tensors,
        model.tokenizer,
        dtype=dtype,  # type: ignore[arg-type]
        name=model.name,
        generation=model.generation,
    )
    result = read_gguf(path)
    own, rendered = model.tokenizer, None
    if own is not None:
        config = {k: v for k, v in own.config.items() if k != "chat_template"}
        template = result.metadata.get("tokenizer.chat_template")
        config |= {"chat_template": template} if template else {}
        rendered = Tokenizer(
            own.backend, bos_token=own.bos_token, eos_token=own.eos_token, config=config
        )
    return _Result(path.name, result.config, result.tensors, rendered)


def _write_folder(model: Source, folder: Path, dtype: str | None) -> _Result:
    """Write the model to a Hugging Face model folder, and read the folder back."""
    if model.folder is not None:
        for name in (CONFIG_NAME, GENERATION_CONFIG_NAME, *_TOKENIZER_FILES):
            if (model.folder / name).is_file():
                shutil.copyfile(model.folder / name, folder / name)
        if (model.folder / _MORE_TEMPLATES).is_dir():
            shutil.copytree(model.folder / _MORE_TEMPLATES, folder / _MORE_TEMPLATES)
    elif model.tokenizer is not None:
        special = json.dumps(generation_config(model.tokenizer, model.generation), indent=2) + "\n"
        for name, text in {**model.tokenizer.files(), GENERATION_CONFIG_NAME: special}.items():
            (folder / name).write_text(text, encoding="utf-8")
    is_changed = model.folder is None or read_json(model.folder / CONFIG_NAME) != model.config
    tensors = _rounded(model.tensors, dtype)
    if is_changed or dtype is not None:
        dtypes = _dtype_entries(model.tensors, dtype)
        config = {**model.config, **dtypes}
        if model.carried is not None:
            config = model.carried.config_json(config_from_hf(model.config, model.name), dtypes)
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if model.carried is not None:
        tensors = model.carried.with_tensors(tensors)
        for name, text in model.carried.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    save_weights(tensors, folder)
    return _Result("the converted folder", *read_folder(folder), tokenizer_of(folder))


def _dtype_entries(tensors: Mapping[str, Tensor], dtype: str | None) -> dict[str, str]:
    """Return the entries of config.json that specify the dtype of the tensors, or an empty dict if
    the tensors have several dtypes. Transformers 5 reads the key "dtype", and transformers 4 reads
    the key "torch_dtype".
    """
    kinds = {_TORCH_DTYPES[dtype]} if dtype else {tensor.dtype for tensor in tensors.values()}
    names = [str(kind).removeprefix("torch.") for kind in kinds]
    return {"dtype": names[0], "torch_dtype": names[0]} if len(names) == 1 else {}


def _rounded(tensors: Mapping[str, Tensor], dtype: str | None) -> Mapping[str, Tensor]:
    """Convert tensors to `dtype`, which is "f32", "f16" or "bf16". If it is None, return the
    tensors unchanged.

    Raises:
        ModelError: a number is too large for `dtype`.
    """
    if dtype is None:
        return tensors
    rounded = {name: tensor.to(_TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}
    for name, tensor in rounded.items():
        if not is_finite(tensor):
            raise ModelError(
                f"{name} contains a number too large for {dtype}: choose another --dtype"
            )
    return rounded


def _compare(
    model: Source, config: ModelConfig, result: _Result, kind: str, *, tolerance: float | None
) -> tuple[float, float, list[str]]:
    """Raise an error if the differences between the result and the source can't be explained by
    rounding the weights to the format `kind`.

    Returns:
        A tuple of the largest difference between logits of the source and the result, the largest
        absolute logit of the source, and notes for the user.
    """
    notes: list[str] = []
    if model.tokenizer is not None:
        found = result.tokenizer
        if found is None or found.fingerprint != model.tokenizer.fingerprint:
            raise ModelError(f"the tokenizer of {result.name} differs from the source's tokenizer")
        notes = require_same_chat(model.tokenizer, found, result.name)
    # Gemma's norms multiply by 1 + w, where w is the stored weight. GGUF files contain the rounded
    # value of 1 + w instead of w.
    is_shifted = config.family.norm_kind == "one_plus"
    require_same_tensors(model.tensors, result.tensors, kind, "norm.weight" if is_shifted else "")
    dtype = check_dtype(config)
    limit = TOLERANCES[kind]
    if dtype == torch.bfloat16:
        limit = max(limit, TOLERANCES["bf16"])
    limit = limit if tolerance is None else tolerance
    ids = prompt_ids(model.tokenizer, config.vocab_size, config.max_position_embeddings)
    is_routed = config.expert_count > 0 and kind != "f32"
    difference, largest = require_same_logits(
        logits_of(model.config, model.tensors, ids, dtype),
        logits_of(result.config, result.tensors, ids, dtype),
        limit,
        is_routed=is_routed,
    )
    if difference <= limit * largest:
        return difference, largest, notes
    note = (
        "rounding routes some tokens to different experts, so their logits differ more than usual"
    )
    return difference, largest, [*notes, note]


T = TypeVar("T")

#: Embedding rows beyond the tokens of the tokenizer are considered padding only if there are fewer
#: of them than this number. Programs pad the vocabulary to a multiple of 64 or 128.
_MAX_PADDING = 128


@dataclass(frozen=True)
class Source:
    """A model to convert.

    Attributes:
        program: program that wrote the model, or "adapter (PEFT)".
        name: name of the result. It contains only characters that are valid in file names.
        config: content of config.json. If the tokenizer was replaced, the ids of the new special
            tokens replace those of the old.
        tensors: tensors, keyed by Hugging Face name. They are memory-mapped if possible.
        tokenizer: tokenizer of the result, if any.
        folder: Hugging Face folder whose other files are copied to the result, or None.
        notes: messages to the user.
        generation: content of the model's generation_config.json. It is used even if `folder` is
            None.
        carried: parts of the source's folder that a Hugging Face folder also contains, or None.
    """

    program: str
    name: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    folder: Path | None
    notes: tuple[str, ...] = ()
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    carried: Carried | None = None


def read_source(
    source: str | Path,
    tokenizer: str | Path | None,
    config: str | Path | None,
    use: Callable[[Source], T],
    *,
    best: bool = False,
) -> T:
    """Open a model, call `use` with it, and return the value that `use` returns.

    If the model is part of an active run that deletes the checkpoint during the call, `use` is
    called again with the newest checkpoint.

    Args:
        source: a Hugging Face model folder, a run, a hub id, or a checkpoint of another program.
        tokenizer: folder or file of a tokenizer that replaces the source's tokenizer.
        config: JSON file with settings that are missing from the checkpoint of another program.
        use: function that receives the opened model, reads its tensors and files, and writes the
            result.
        best: True to use a run's checkpoint with the lowest validation loss instead of the newest.

    Raises:
        ConfigError: `config` or `best` can't be used with this source, or the file `config` does
            not contain a JSON object.
        ModelError, CheckpointError, TokenizerError: the source can't be read. Errors raised by
            `use` are propagated.
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
        raise ConfigError(
            "--config applies only to other programs' checkpoints: a model folder has its own "
            "config.json"
        )
    name = _name_of(source)
    return read_model_folder(
        source, lambda folder: use(_read_folder(folder, name, given)), pickled=True, best=best
    )


def _read_folder(folder: Path, name: str, given: Tokenizer | None) -> Source:
    """Read a Hugging Face model folder or an adapter folder. If `given` is not None, it is a
    tokenizer that replaces the tokenizer of the model.
    """
    if is_adapter(folder):
        return _read_adapter(folder, name, given)
    content, tensors = read_folder(folder)
    content |= _history(folder)
    model = Source(
        program="Hugging Face",
        name=name,
        config=content if given is None else {**content, **_special_tokens(given)},
        tensors=tensors,
        tokenizer=given or tokenizer_of(folder),
        folder=folder if given is None else None,
        generation=_generation(read_generation([folder]), eos_ids_of(folder, None), given),
        carried=read_carried(folder, config_from_hf(content, name)),
    )
    return with_qkv_biases(model)


def _history(folder: Path) -> dict[str, int]:
    """Return the entry of config.json for the number of tokens that the model has read, or {}."""
    tokens = tokens_read(folder)
    return {} if tokens is None else {TOKENS_KEY: tokens}


def _generation(
    content: Mapping[str, Any], ends: Sequence[int], given: Tokenizer | None
) -> dict[str, Any]:
    """Return the content for generation_config.json, with the ids of all end-of-text tokens of the
    model. If `given` is not None, it is a tokenizer that replaces the tokenizer of the model, and
    token ids are omitted.
    """
    if given is not None:
        return {key: value for key, value in content.items() if not key.endswith("_token_id")}
    return {**content, "eos_token_id": [*ends]} if ends else dict(content)


def with_qkv_biases(model: Source) -> Source:
    """Add zero biases for queries, keys and values to a GPT-2 model without such biases, because
    other programs require them. Return any other model unchanged.
    """
    if model.config.get("model_type") != "gpt2" or model.config.get("qkv_bias", True):
        return model
    tensors = dict(model.tensors)
    for name, weight in model.tensors.items():
        if name.endswith(".attn.c_attn.weight"):
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(weight.shape[1])
    note = (
        "this model has no biases for queries, keys and values (qkv_bias: false), but other "
        "programs require them in GPT-2: zero biases were written, and training the result also "
        "trains them"
    )
    config = {key: value for key, value in model.config.items() if key != "qkv_bias"}
    return dataclasses.replace(model, config=config, tensors=tensors, notes=(*model.notes, note))


def _read_adapter(folder: Path, name: str, given: Tokenizer | None) -> Source:
    """Merge an adapter into its base model.

    The other files of the base model are copied only if its tokenizer and vocabulary remain in use.
    They are not copied if the tokenizer is replaced by `given` or by a tokenizer in the adapter
    folder. Likewise, they are not copied if the adapter unties the output head or adds tokens.
    """
    base = adapter_chain(folder)[-1]
    loaded = load_model(folder)
    content = text_content(read_json(base / CONFIG_NAME), str(base / CONFIG_NAME))
    before, now = read_config(base), loaded.model.config
    changes = {
        key: getattr(now, key)
        for key in ("tie_word_embeddings", "vocab_size")
        if getattr(now, key) != getattr(before, key)
    }
    merged = {**content, **changes, **_history(folder)}
    own = given or tokenizer_of(folder)
    tensors = weights_to_save(loaded.model)
    model = Source(
        program="adapter (PEFT)",
        name=name,
        config=merged if own is None else {**merged, **_special_tokens(own)},
        tensors=tensors,
        tokenizer=given or loaded.tokenizer,
        folder=base if own is None and not changes else None,
        notes=(f"the adapter was merged into its base, {base}",),
        generation=_generation(loaded.generation, loaded.eos_token_ids, given),
        carried=read_carried(base, before),
    )
    return with_qkv_biases(model)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of a model folder's config.json, and the tensors of the model, keyed by
    Hugging Face name.

    Tensors are memory-mapped, with two exceptions: the tensors of a sharded checkpoint are
    assembled in memory, and experts in MXFP4 are unpacked. Stacked experts are split into one view
    per expert.

    Raises:
        ModelError, CheckpointError: a file is missing or damaged, or the tensors don't match
            config.json.
    """
    if is_sharded_checkpoint(folder) and not (folder / WEIGHTS_NAME).is_file():
        multiple = saved_vocab_multiple(folder, load_trainer_state(folder))
        return read_json(folder / CONFIG_NAME), weights_to_save(sharded_model(folder, multiple))
    config = read_config(folder)
    content = dict(text_content(read_json(folder / CONFIG_NAME), str(folder / CONFIG_NAME)))
    if has_pickled_weights(folder):
        return content, pickled_tensors(folder)
    stored = fitting_tensors(meta_model(config), folder)
    # Remove this entry, because MXFP4 weights are unpacked and the result is therefore not
    # quantised.
    content.pop("quantization_config", None)
    return content, one_by_one(open_tensors(stored), config)


def _name_of(source: str | Path) -> str:
    """Return a name for the model, derived from the name of its file, folder or run, or from its
    hub id.
    """
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
    # File names are limited to 255 bytes, and a character can take up to 4 bytes.
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60] or "model"


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}


def _read_foreign(path: Path, tokenizer: Tokenizer | None, config: str | Path | None) -> Source:
    """Read a model from a checkpoint of another program. `read_source` documents the arguments."""
    is_pickled = path.name.startswith("pytorch_model") and path.suffix == ".bin"
    if path.suffix.lower() in (".safetensors", ".json") or is_pickled:
        raise InputError(f"{path} is only one file of a model: use its folder, {path.parent}")
    if is_gguf(path):
        if config is not None:
            raise ConfigError(f"{path} has its own config: omit --config")
        model = read_gguf(path)
        own = tokenizer or model.tokenizer()
        return Source(
            program="GGUF",
            name=_name_of(path),
            config=model.config | ({} if own is None else _special_tokens(own)),
            tensors=model.tensors,
            tokenizer=own,
            folder=None,
            generation=_generation(model.generation, end_ids(model.generation), tokenizer),
        )
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
    """Return the tokenizer that is stored with a model of another program, or None if there is no
    tokenizer.

    The tokenizer is stored in the folder of the model or, as in the models that Meta distributes,
    in the file `tokenizer.model` of the parent folder.
    """
    for place in (folder, folder.parent / "tokenizer.model"):
        names = ("tokenizer.json", "tokenizer.model", "vocab.bpe", "merges.txt")
        if place.is_file() or any((place / name).is_file() for name in names):
            return Tokenizer.from_pretrained(place)
    return None


def _without_padding(model: ForeignModel, tokenizer: Tokenizer | None) -> ForeignModel:
    """Remove padding rows from the embedding and the output head. These are the rows of ids that
    have no token in the tokenizer. The model must never predict these ids.

    If there are at least `_MAX_PADDING` such rows, they are not considered padding. They are kept,
    and a note for the user is added.
    """
    size = model.config["vocab_size"]
    extra = 0 if tokenizer is None else size - tokenizer.vocab_size
    if tokenizer is None or extra <= 0:
        return model
    if extra >= _MAX_PADDING:
        note = (
            f"{extra} ids of the model have no token in the tokenizer: check that it is the "
            "right tokenizer"
        )
        return dataclasses.replace(model, notes=(*model.notes, note))
    family = FAMILIES[model.config["model_type"]].model
    names = (f"{family.embedding_name}.weight", family.head_file_name)
    tensors = {
        name: tensor[: tokenizer.vocab_size] if name in names else tensor
        for name, tensor in model.tensors.items()
    }
    note = f"{extra} padding rows of the vocabulary were removed"
    return dataclasses.replace(
        model,
        config={**model.config, "vocab_size": tokenizer.vocab_size},
        tensors=tensors,
        notes=(*model.notes, note),
    )
