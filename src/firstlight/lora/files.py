"""Adapters as files, in PEFT's format.

    FOLDER/
        adapter_config.json         LoRA's settings, and the folder or hub id of the base model
        adapter_model.safetensors   base_model.model.LAYER.lora_A.weight [r, in], .lora_B.weight
                                    [out, r], and for DoRA .lora_magnitude_vector [out]

LAYER is the linear layer's name in the base model. The adapted layers are read from the tensors'
names; the settings give what the tensors do not show, such as alpha, and must agree with them.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from firstlight.errors import InputError, ModelError, nearest
from firstlight.files.atomic import read_json
from firstlight.lora.layers import (
    PREFIX,
    SUFFIXES,
    LinearLayer,
    LoraConfig,
    fill_adapter,
    linear_layers,
    lora_layers,
    wrap,
)
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D
from firstlight.weights.hub import find_model_folder
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.stored import (
    FLOAT_FORMATS,
    INDEX_NAME,
    WEIGHTS_NAME,
    StoredTensor,
    read_header,
)

#: Maximum number of entries of rank_pattern and alpha_pattern together (the deepest models have 900
#: linear layers), and maximum number of characters of an entry.
_MOST_PATTERNS = 3000
_MOST_PATTERN_CHARS = 500
#: Seconds of CPU time in which all patterns must have been matched with all layer names. Those of
#: most adapters take 0.001.
_MOST_MATCH_SECONDS = 2.0


@functools.lru_cache(maxsize=2 * _MOST_PATTERNS)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile an entry of `rank_pattern` or `alpha_pattern`. It matches the end of a layer's name
    after a dot, or the whole name."""
    return re.compile(rf"(.*\.)?({pattern})$")


def require_quick_patterns(path: Path, patterns: list[str]) -> None:
    """Reject patterns that may take long to match, by their number, length and repetitions.

    Args:
        path: the settings' file, for error messages.
        patterns: entries of rank_pattern and alpha_pattern.

    Raises:
        ModelError: there are such patterns, or one is invalid.
    """
    if len(patterns) > _MOST_PATTERNS:
        raise ModelError(
            f"{path}: rank_pattern and alpha_pattern have {len(patterns):,} entries, more than the "
            f"{_MOST_PATTERNS:,} that are read: merge the adapter with PEFT (merge_and_unload)"
        )
    for pattern in patterns:
        # With repeated groups, or many repetitions or choices, matching can take exponential time
        # on a single name.
        choices = len(re.findall(r"\(", pattern)) + len(re.findall(r"(?<!\()\?", pattern))
        is_slow = re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3
        if is_slow or choices > 5 or len(pattern) > _MOST_PATTERN_CHARS:
            raise ModelError(
                f"{path}: pattern {short(pattern)} repeats too much: name the layers in full"
            )
        try:
            compiled(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{path}: {short(pattern)} is not a pattern: {error}") from error


def require_quick_matches(path: Path, patterns: list[str], layers: Iterable[str]) -> None:
    """Reject patterns that together take long on the layer names, although each match is quick.

    Args:
        path: the settings' file, for error messages.
        patterns: patterns that `require_quick_patterns` accepts.
        layers: names of layers.

    Raises:
        ModelError: matching takes more than 2 seconds of CPU time.
    """
    end = time.thread_time() + _MOST_MATCH_SECONDS
    for layer in layers:
        for pattern in patterns:
            compiled(pattern).match(layer)
            if time.thread_time() > end:
                raise ModelError(
                    f"{path}: rank_pattern and alpha_pattern take too long on names such as "
                    f"{layer}: name the layers in full"
                )


def short(value: object) -> str:
    """Format a value for messages, cut at 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

_T = TypeVar("_T", int, float)

#: Ignored settings: they have no effect on an adapter whose tensors exist. Any other
#: setting that is not a field of `PeftConfig` must be off (null, false, empty or 0).
_WITHOUT_EFFECT = {
    "auto_mapping",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
    "target_modules",
}
#: Values of `init_lora_weights` that leave the base model's weights unchanged.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


class PeftConfig(BaseModel):
    """The content of an adapter_config.json; other keys are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: Annotated[str, Field(max_length=4096)] | None = None
    revision: str | None = None
    r: int = Field(8, ge=1)
    lora_alpha: float = Field(8, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    bias: Literal["none"] = "none"
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] | None = None
    init_lora_weights: bool | str | None = True

    def scaling(self, layer: str) -> float:
        """Return the factor of a layer's product B A: alpha / r, or alpha / sqrt(r) with
        `use_rslora` (rank-stabilised LoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        rank = self.rank(layer)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, layer: str) -> int:
        """Return the rank r of a layer's B A."""
        return _by_pattern(self.rank_pattern, layer, self.r)


def _by_pattern(patterns: Mapping[str, _T] | None, layer: str, otherwise: _T) -> _T:
    """Return the value of the first pattern that matches the end of a layer's name, as in PEFT;
    `otherwise` if none matches."""
    given = (patterns or {}).items()
    return next((value for pattern, value in given if compiled(pattern).match(layer)), otherwise)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read the settings in an adapter's folder.

    Raises:
        ModelError: the file is missing or damaged, or a setting is not supported.
    """
    path = folder / ADAPTER_CONFIG_NAME
    try:
        config = PeftConfig.model_validate(read_json(path))
    except InputError as error:
        raise ModelError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ModelError(
            f"{path}: {name[:100]}: {first['msg']} (given: {short(first['input'])}); only LoRA "
            "and DoRA of language models are read"
        ) from error
    start = config.init_lora_weights
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights {short(start)} changed the base model's weights, which is "
            "not supported: convert the adapter with PEFT (save_pretrained's path_initial_model_for"
            "_weight_conversion), or merge it there"
        )
    for name, value in (config.model_extra or {}).items():
        if value and name not in _WITHOUT_EFFECT:
            raise ModelError(
                f"{path}: {name[:100]} is not supported: merge the adapter with PEFT "
                "(merge_and_unload), and use the merged model"
            )
    require_quick_patterns(path, [*(config.rank_pattern or {}), *(config.alpha_pattern or {})])
    return config


#: Maximum length of a chain of adapters in which each is the base model of the previous one.
_LONGEST_CHAIN = 16


def is_adapter(folder: Path) -> bool:
    """Return True if a folder contains an adapter but no model."""
    has_weights = any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not has_weights


def adapter_chain(folder: Path) -> list[Path]:
    """Return an adapter's folder, its base's folder, and so on while the base is an adapter, too;
    the last is a model folder. [folder] for a model folder.

    The base is `base_model_name_or_path`: a path relative to the adapter's folder, a path, or a
    hub id (downloaded).

    Raises:
        ModelError: a base is missing, or an adapter is its own base.
    """
    chain = [folder]
    while is_adapter(chain[-1]):
        base = _base_of(chain[-1])
        if any(base.samefile(earlier) for earlier in chain):
            raise ModelError(
                f"{chain[-1] / ADAPTER_CONFIG_NAME} names {base} as its base model, which is the "
                "adapter itself: correct base_model_name_or_path"
            )
        chain.append(base)
        if len(chain) > _LONGEST_CHAIN:
            raise ModelError(
                f"{folder} is an adapter of an adapter, and so on, more than {_LONGEST_CHAIN} "
                "times: merge them with `firstlight convert`"
            )
    return chain


def config_folder(folder: Path) -> Path:
    """Return the folder whose config.json describes a folder's model: for an adapter without one,
    that of its base.

    Raises:
        ModelError: see `adapter_chain`.
    """
    return folder if (folder / CONFIG_NAME).is_file() else adapter_chain(folder)[-1]


def _base_of(folder: Path) -> Path:
    config, path = read_peft_config(folder), folder / ADAPTER_CONFIG_NAME
    name = config.base_model_name_or_path
    if not name:
        raise ModelError(
            f"{path} names no base model: set base_model_name_or_path to the folder or hub id of "
            "the model that was adapted"
        )
    try:
        if (folder / name).is_dir():
            return folder / name
        # PEFT has hub id and revision in two fields; here both are one name, ID@REVISION.
        return find_model_folder(
            f"{name}@{config.revision}" if config.revision else name, typed=False
        )
    except (ModelError, OSError) as error:  # such as a name that is too long
        raise ModelError(
            f"{path} names a base model that can't be loaded: {error}; correct "
            "base_model_name_or_path"
        ) from error


def _adapted_layer(name: str) -> str | None:
    """Return the layer to which a tensor of an adapter's file belongs; None if the tensor is not
    one of an adapter."""
    for suffix in SUFFIXES.values():
        if name.startswith(PREFIX) and name.endswith(f".{suffix}"):
            return name.removeprefix(PREFIX).removesuffix(f".{suffix}")
    return None


def adapter_settings(folder: Path) -> str:
    """Return the settings on which an adapter's output depends, as JSON text: two adapters with the
    same tensors and this text compute the same.

    Raises:
        ModelError: see `read_peft_config`.
    """
    used = {"r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"}
    return read_peft_config(folder).model_dump_json(include=used)


def load_adapter(model: Model, folder: Path) -> None:
    """Add the adapter in a folder to its base model, whose weights are frozen.

    Args:
        model: the base model without adapters; changed in place.
        folder: the adapter's folder, with the files that this module's docstring describes.

    Raises:
        ModelError: a file is missing or damaged, needs an unsupported setting, or doesn't fit the
            model (named).
    """
    config, path = read_peft_config(folder), folder / ADAPTER_WEIGHTS_NAME
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {ADAPTER_WEIGHTS_NAME}: only safetensors weights are read (pickled "
            ".bin files can run code when they are opened)"
        )
    stored = read_header(path)
    others = {name: tensor for name, tensor in stored.items() if _adapted_layer(name) is None}
    _require_base_copies(model, others, path)
    adapted = dict.fromkeys(layer for name in stored if (layer := _adapted_layer(name)) is not None)
    if not adapted:
        raise ModelError(f"{path} contains no adapter")
    layers = linear_layers(model)
    known = [layer for layer in adapted if layer in layers]
    patterns = [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]
    require_quick_matches(folder / ADAPTER_CONFIG_NAME, patterns, known)
    for layer in adapted:
        if layer not in layers:
            raise ModelError(
                f"{path} adapts {layer}, which is not a linear layer of the base model"
                f"{nearest(layer, layers)}"
            )
        _require_rank(layer, layers[layer], config, stored, path)
    model.requires_grad_(False)
    settings = LoraConfig(dropout=config.lora_dropout, dora=config.use_dora)
    for layer in adapted:
        wrap(model, layer, config.rank(layer), config.scaling(layer), settings)
    tensors = {name: _read(tensor) for name, tensor in stored.items() if name not in others}
    fill_adapter(model, tensors, str(path))


def _require_rank(
    layer: str,
    base: LinearLayer,
    config: PeftConfig,
    stored: Mapping[str, StoredTensor],
    path: Path,
) -> None:
    """Check that a layer's rank in the settings is that of its tensor A in the file, before memory
    is allocated according to the settings.

    Raises:
        ModelError: A is missing, or has another shape.
    """
    name = f"{PREFIX}{layer}.{SUFFIXES['lora_A']}"
    if name not in stored:
        raise ModelError(f"{path} lacks tensor {name}")
    width = base.weight.shape[0 if isinstance(base, Conv1D) else 1]
    expected = [config.rank(layer), width]
    if list(stored[name].shape) != expected:
        raise ModelError(
            f"{path}: tensor {name} is {list(stored[name].shape)}, expected {expected} by "
            f"{ADAPTER_CONFIG_NAME}"
        )


def _read(stored: StoredTensor) -> Tensor:
    if stored.kind not in FLOAT_FORMATS:
        raise ModelError(f"{stored.path}: {stored.name} is {stored.kind}, not floating-point")
    return stored.read()


def _require_base_copies(model: Model, copies: Mapping[str, StoredTensor], path: Path) -> None:
    """Require that an adapter file's other tensors are copies of the base model's: PEFT also writes
    the base's embedding and head if the head is adapted.

    Raises:
        ModelError: a tensor is unknown, or differs from the base's.
    """
    base = model.state_dict()
    for name, stored in copies.items():
        own = base.get(name.removeprefix(PREFIX).replace(".base_layer.", "."))
        rows = model.config.vocab_size
        if own is None or not torch.equal(own[:rows].cpu(), _read(stored).to(own.dtype)):
            raise ModelError(
                f"{path} has tensor {name}, which is neither an adapter nor the base model's: an "
                "adapter that changes other weights is not supported; merge it with PEFT "
                "(merge_and_unload), and use the merged model"
            )


def adapter_files(model: Model, config: LoraConfig, base: str) -> dict[str, str]:
    """Return the text files that belong to `adapter_tensors`, by name.

    Args:
        model: a model with adapters.
        config: the recipe's `lora` section.
        base: the base model's folder (absolute, or relative to the adapter's) or hub id, with
            @REVISION unless that is the newest.
    """
    revision = ""
    if not Path(base).is_dir():
        base, _, revision = base.partition("@")
    alpha = int(config.alpha) if config.alpha.is_integer() else config.alpha
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        # Full names: in PEFT's model, a suffix could also match layers that are not adapted.
        "target_modules": [name for name, _ in lora_layers(model)],
        "use_dora": config.dora,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": model.config.stores_transposed,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    return {ADAPTER_CONFIG_NAME: json.dumps(content, indent=2) + "\n"}


#: Names of layers that PEFT treats as stacked experts in any model with experts.
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def peft_notes(model: Model) -> list[str]:
    """Return a message about adapters of the model that PEFT can't load: one line, or none."""
    names = [name for name, _ in lora_layers(model)]
    lost = [name for name in names if name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    if not lost or not model.config.expert_count:
        return []
    return [
        f"PEFT 0.21 does not load the adapters of {len(lost)} layers beside experts "
        f"({', '.join(_TAKEN_FOR_EXPERTS)}): for PEFT, leave them out of lora.targets, or merge "
        "with `firstlight convert RUN --to hf`"
    ]


def base_name(given: str | Path, folder: Path) -> str:
    """Return the base model's name for `adapter_files`: the absolute path of a folder or GGUF file;
    a hub id unchanged.

    Args:
        given: folder, GGUF file or hub id as given by the user.
        folder: the base model's folder, in the cache for a file or a hub id.
    """
    path = Path(given).expanduser()
    if not path.exists():
        return str(given)
    return str((folder if path.is_dir() else path).resolve())
