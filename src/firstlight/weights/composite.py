"""Model folders that contain a text model beside other parts, such as an image encoder.

Only the text model is read and trained. All other parts are carried along: a folder that is written
contains them unchanged, byte for byte, so that other programs can load it like the original.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import Tensor

from firstlight.errors import ModelError
from firstlight.files.atomic import read_json_object
from firstlight.models import FAMILIES, Family, ModelConfig
from firstlight.weights.stored import open_mapped, stored_tensors

T = TypeVar("T")

#: Name of the file with the config of a model.
CONFIG_NAME: Final = "config.json"
#: Prefixes of the text model's tensors, mapped to the prefixes that they replace. transformers 5
#: writes the first, and published models also use the second.
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
_HEAD = "lm_head.weight"
#: Files that describe how pictures, videos and sounds are converted to the input of a model.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
#: Keys of a composite config.json that do not describe the text model.
_OUTER_KEYS = frozenset(
    (
        "architectures model_type text_config vision_config tie_word_embeddings dtype "
        "torch_dtype transformers_version initializer_range auto_map mm_tokens_per_image "
        "projector_hidden_act multimodal_projector_bias spatial_merge_size "
        "vision_feature_layer use_cache language_model_only quantization_config quantization "
        "_name_or_path tokenizer_class"
    ).split()
)
#: Keys of every text config that do not change the outputs.
_USUAL_KEYS = frozenset(
    (
        "architectures model_type dtype torch_dtype transformers_version use_cache "
        "attention_dropout hidden_dropout auto_map _name_or_path tie_word_embeddings "
        "output_router_logits cache_implementation pretraining_tp use_bidirectional_attention "
        "router_jitter_noise _attn_implementation_autoset quantization_config quantization "
        "tokenizer_class"
    ).split()
)
_TOKEN_ENDINGS = ("_token_id", "_token_index", "_token_ids")


def text_content(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the text model. For a folder that contains
    only a text model, return `content`.

    Args:
        content: content of config.json.
        where: name of the config, for messages.

    Raises:
        ModelError: the text model is not supported, or a key is not understood.
    """
    kind = content.get("model_type")
    known = [name for name, family in FAMILIES.items() if kind in family.spec.composites]
    if not known:
        return content
    text = content.get("text_config") or {}
    model_type = text.get("model_type", known[0]) if isinstance(text, dict) else None
    if model_type not in known:
        raise ModelError(
            f"{where}: text_config: model_type '{model_type}' is not supported in a {kind} model "
            f"(supported: {', '.join(known)})"
        )
    _require_known(set(content) - _OUTER_KEYS, where)
    outer = {
        key: value
        for key, value in content.items()
        if key.endswith(_TOKEN_ENDINGS) or key in ("dtype", "torch_dtype", "tie_word_embeddings")
        if value is not None
    }
    spec = FAMILIES[model_type].spec
    usual = {"tie_word_embeddings": spec.hf_defaults.get("tie_word_embeddings", False)}
    found = {**usual, **text, **outer, "model_type": model_type}
    require_known_keys(found, FAMILIES[model_type], f"{where}: text_config")
    return found


def require_known_keys(content: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise an error for keys of a text model's config.json that are not understood.

    Raises:
        ModelError: a key is unknown, or its value is not supported. The message names it.
    """
    spec = family.spec
    known = {*family.config.model_fields, *spec.own_keys, *spec.json_names.values(), *_USUAL_KEYS}
    known |= {spec.activation_key, spec.period_key, spec.rope.local_theta_key, *spec.other_keys}
    known |= {"rope_parameters", "num_local_experts", f"_{spec.period_key}"}
    _require_known(set(content) - known, where)
    for key, allowed in spec.other_keys.items():
        if allowed and key in content and content[key] not in allowed:
            raise ModelError(
                f"{where}: {key} {content[key]!r} is not supported: only {allowed[0]!r} is"
            )


def _require_known(keys: set[str], where: str) -> None:
    if unknown := sorted(key for key in keys if not key.endswith(_TOKEN_ENDINGS)):
        raise ModelError(
            f"{where}: {', '.join(unknown)} is not understood, and could change the outputs: "
            "remove it if it does not"
        )


def text_tensors(tensors: Mapping[str, T], folder: Path) -> dict[str, T]:
    """Return the tensors of a folder's text model, under the names that a folder with only the text
    model would have. Tensors of other parts are omitted.

    Args:
        tensors: all tensors of the folder, keyed by name.
        folder: the folder.
    """
    if not is_composite(folder):
        return dict(tensors)
    named = {_text_name(name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _text_name(name: str) -> str | None:
    if name == _HEAD:
        return name
    for prefix, replaced in _PREFIXES.items():
        if name.startswith(prefix):
            return replaced + name.removeprefix(prefix)
    return None


def is_composite(folder: Path) -> bool:
    """Return True if a folder contains a text model beside other parts."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return False
    kind = read_json_object(path, ModelError).get("model_type")
    return any(kind in family.spec.composites for family in FAMILIES.values())


@dataclass(frozen=True)
class Carried:
    """Parts of a model folder that are carried along.

    Attributes:
        content: content of the folder's config.json.
        config: config of the text model in this folder.
        prefix: prefix of the text model's tensors, a key of `_PREFIXES`.
        tensors: memory-mapped tensors of the other parts, keyed by name. They remain readable if
            the folder is deleted.
        files: text files that belong to the other parts, keyed by name.
    """

    content: Mapping[str, Any]
    config: ModelConfig
    prefix: str
    tensors: Mapping[str, Tensor]
    files: Mapping[str, str]

    @property
    def parts(self) -> list[str]:
        """Names of the parts, such as "vision_tower"."""
        names = (name.removeprefix("model.").partition(".")[0] for name in self.tensors)
        return sorted(set(names))

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_texts(self, files: Mapping[str, str], config: ModelConfig) -> dict[str, str]:
        """Return the text files of a folder, with the files of the other parts and the complete
        config.json.

        Args:
            files: text files of a folder that contains only the text model.
            config: config of the text model.
        """
        dtypes = json.loads(files[CONFIG_NAME])
        kept = {key: dtypes[key] for key in ("dtype", "torch_dtype") if key in dtypes}
        content = json.dumps(self.config_json(config, kept), indent=2) + "\n"
        return {**files, **self.files, CONFIG_NAME: content}

    def config_json(self, config: ModelConfig, dtypes: Mapping[str, str]) -> dict[str, Any]:
        """Return the complete config.json. Keys of the text model are changed only if they differ
        between `config` and the original.

        Args:
            config: config of the text model.
            dtypes: entries that specify the dtype of the text model's tensors.
        """
        before, now = self.config.to_hf(), config.to_hf()
        changes = {key: value for key, value in now.items() if before.get(key) != value}
        outer = {key: changes[key] for key in ("tie_word_embeddings",) if key in changes}
        text = {**(self.content.get("text_config") or {}), **changes, **dtypes}
        return {**self.content, **dtypes, **outer, "text_config": text}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors of a folder, under their names in the folder.

        Args:
            tensors: tensors of the text model, under the names of a folder that contains only it.
        """
        replaced = _PREFIXES[self.prefix]
        named = {
            name if replaced and name == _HEAD else self.prefix + name.removeprefix(replaced): one
            for name, one in tensors.items()
        }
        return {**named, **self.tensors}


def read_carried(folder: Path, config: ModelConfig) -> Carried | None:
    """Return the parts of a model folder that are carried along, or None if it contains only a text
    model.

    Args:
        folder: the model folder.
        config: config of the folder's text model.

    Raises:
        ModelError: a file is damaged.
    """
    if not is_composite(folder):
        return None
    stored = stored_tensors(folder)
    prefixes = (p for name in stored for p in _PREFIXES if name.startswith(p))
    return Carried(
        read_json_object(folder / CONFIG_NAME, ModelError),
        config,
        next(prefixes, next(iter(_PREFIXES))),
        open_mapped({name: one for name, one in stored.items() if _text_name(name) is None}),
        {
            name: (folder / name).read_text(encoding="utf-8")
            for name in _PROCESSOR_FILES
            if (folder / name).is_file()
        },
    )
