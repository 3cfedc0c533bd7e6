"""Read and write adapters in PEFT's file format.

    FOLDER/
        adapter_config.json         LoRA's settings, and the folder or hub id of the base model
        adapter_model.safetensors   tensors whose names begin with base_model.model:
                                    - for adapted layers: LAYER.lora_A.weight [r, in],
                                      LAYER.lora_B.weight [out, r] and, for DoRA,
                                      LAYER.lora_magnitude_vector [out];
                                    - for an adapted embedding: LAYER.lora_embedding_A [r, V] and
                                      LAYER.lora_embedding_B [C, r];
                                    - for trained rows:
                                      LAYER.token_adapter.trainable_tokens_delta [n, C];
                                    - for modules that are trained in full: their parameter names.

LAYER is the name of a layer in the base model. The names of the tensors determine which layers are
adapted. adapter_config.json specifies all other values, such as alpha, and must be consistent with
the tensors.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from firstlight.errors import ConfigError, InputError, ModelError, nearest
from firstlight.files.atomic import read_json
from firstlight.lora.layers import (
    HEAD,
    PREFIX,
    SUFFIXES,
    TOKENS,
    LoraConfig,
    TokenIds,
    TrainableTokens,
    add_lora,
    compiled,
    fill_adapter,
    linear_layers,
    lora_layers,
    lora_parameters,
    modules_in_full,
    token_tables,
)
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D
from firstlight.weights.hub import find_model_folder
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.loading import cut_vocabulary, grow_vocabulary
from firstlight.weights.stored import (
    FLOAT_FORMATS,
    INDEX_NAME,
    WEIGHTS_NAME,
    StoredTensor,
    read_header,
)

#: Maximum total number of entries in rank_pattern and alpha_pattern, and maximum number of
#: characters in an entry. The deepest models have 900 linear layers.
_MOST_PATTERNS = 3000
_MOST_PATTERN_CHARS = 500
#: Maximum CPU time in seconds for matching all patterns against all layer names. Most adapters take
#: 0.001 s.
_MOST_MATCH_SECONDS = 2.0


def require_quick_patterns(path: Path, patterns: list[str]) -> None:
    """Raise an error if matching the patterns could take too long, judging by the number of
    patterns, their lengths and the repetitions that they contain.

    Args:
        path: path of the settings file, for error messages.
        patterns: entries of rank_pattern and alpha_pattern.

    Raises:
        ModelError: the patterns could take too long to match, or a pattern is invalid.
    """
    if len(patterns) > _MOST_PATTERNS:
        raise ModelError(
            f"{path}: rank_pattern and alpha_pattern have {len(patterns):,} entries, more than the "
            f"limit of {_MOST_PATTERNS:,}: merge the adapter with PEFT (merge_and_unload)"
        )
    for pattern in patterns:
        # With repeated groups, or many repetitions or choices, matching can take exponential time
        # on a single name.
        choices = len(re.findall(r"\(", pattern)) + len(re.findall(r"(?<!\()\?", pattern))
        is_slow = re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3
        if is_slow or choices > 5 or len(pattern) > _MOST_PATTERN_CHARS:
            raise ModelError(
                f"{path}: pattern {short(pattern)} has too many repetitions: use full layer names"
            )
        try:
            compiled(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{path}: {short(pattern)} is not a pattern: {error}") from error


def require_quick_matches(path: Path, patterns: list[str], layers: Iterable[str]) -> None:
    """Match the patterns against all layer names, and raise an error if this takes too long. The
    total can be too long even if each individual match is fast.

    Args:
        path: path of the settings file, for error messages.
        patterns: patterns that have passed `require_quick_patterns`.
        layers: names of the adapted layers.

    Raises:
        ModelError: matching takes more than 2 seconds of CPU time.
    """
    end = time.thread_time() + _MOST_MATCH_SECONDS
    for layer in layers:
        for pattern in patterns:
            compiled(pattern).match(layer)
            if time.thread_time() > end:
                raise ModelError(
                    f"{path}: rank_pattern and alpha_pattern take too long to match names such as "
                    f"{layer}: use full layer names"
                )


def short(value: object) -> str:
    """Format a value for messages, truncated to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

#: Settings that do not affect an adapter whose tensors already exist, and are therefore ignored.
#: All other settings that are not fields of `PeftConfig` must be off (null, false, empty or 0).
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
#: Values of `init_lora_weights` for which PEFT does not change the base model's weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


class PeftConfig(BaseModel):
    """The content of an adapter_config.json. Keys without a field are stored in `model_extra`."""

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
    modules_to_save: Annotated[list[str], Field(max_length=1000)] | None = None
    trainable_token_indices: TokenIds | dict[str, TokenIds] | None = None
    ensure_weight_tying: bool = False

    def lora(self, *, targets: list[str], modules_to_save: list[str]) -> LoraConfig:
        """Return the settings as a recipe's `lora` section.

        Args:
            targets: names of the layers for which the weights file contains adapters.
            modules_to_save: names of the modules that the weights file contains in full.
        """
        return LoraConfig(
            rank=self.r,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            targets=targets,
            modules_to_save=modules_to_save,
            trainable_token_indices=self.trainable_token_indices or [],
            ensure_weight_tying=self.ensure_weight_tying,
            use_rslora=self.use_rslora,
            rank_pattern=self.rank_pattern or {},
            alpha_pattern=self.alpha_pattern or {},
            dora=self.use_dora,
        )


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
            "and DoRA adapters of language models are supported"
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


#: Maximum length of a chain of adapters in which the base model of each adapter is the next
#: adapter.
_LONGEST_CHAIN = 16


def is_adapter(folder: Path) -> bool:
    """Return True if a folder contains an adapter but no model."""
    has_weights = any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not has_weights


def adapter_chain(folder: Path) -> list[Path]:
    """Return the folder of an adapter, followed by the folder of its base model. If the base is
    itself an adapter, the folder of its base follows, and so on. The last folder is a model folder.
    If `folder` is a model folder, return [folder].

    `base_model_name_or_path` specifies the base model, as a path, which can be relative to the
    adapter's folder, or as the hub id of a model to download.

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
                f"{folder} begins a chain of more than {_LONGEST_CHAIN} adapters, each of which "
                f"adapts the next: merge them with `firstlight convert`"
            )
    return chain


def config_folder(folder: Path) -> Path:
    """Return the folder whose config.json describes a model: the given folder or, for an adapter
    without a config.json, the folder of its base model.

    Raises:
        ModelError: see `adapter_chain`.
    """
    return folder if (folder / CONFIG_NAME).is_file() else adapter_chain(folder)[-1]


def _base_of(folder: Path) -> Path:
    config, path = read_peft_config(folder), folder / ADAPTER_CONFIG_NAME
    name = config.base_model_name_or_path
    if not name:
        raise ModelError(
            f"{path} does not name a base model: set base_model_name_or_path to the folder or hub "
            "id of the adapted model"
        )
    try:
        if (folder / name).is_dir():
            return folder / name
        # PEFT stores the hub id and the revision in two fields. Here they are combined as
        # ID@REVISION.
        return find_model_folder(
            f"{name}@{config.revision}" if config.revision else name, typed=False
        )
    except (ModelError, OSError) as error:  # for example, if the name is too long
        raise ModelError(
            f"{path} names a base model that can't be loaded: {error}; correct "
            "base_model_name_or_path"
        ) from error


def _adapted_layer(name: str) -> tuple[str, str] | None:
    """Split the name of a tensor in an adapter file into the name of the adapted layer and the name
    of the layer's parameter. Return None if the tensor does not belong to an adapted layer."""
    for kind, suffix in SUFFIXES.items():
        if name.startswith(PREFIX) and name.endswith(f".{suffix}"):
            return name.removeprefix(PREFIX).removesuffix(f".{suffix}"), kind
    return None


def adapter_settings(folder: Path) -> str:
    """Return the settings that affect the outputs of an adapter, as a JSON string. Adapters with
    the same tensors and the same string produce the same outputs.

    Raises:
        ModelError: see `read_peft_config`.
    """
    config = read_peft_config(folder)
    used = {"r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"}
    others = ("trainable_token_indices", "ensure_weight_tying")
    return config.model_dump_json(include=used | {key for key in others if getattr(config, key)})


class Adapter(NamedTuple):
    """An adapter read from a folder.

    Attributes:
        config: settings that `add_lora` needs to create the adapter's layers.
        tensors: values of the adapter's parameters, for `fill_adapter`.
        changes_base: True if the adapter file replaced the base model's frozen embedding or head.
    """

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    changes_base: bool


def load_adapter(model: Model, folder: Path, vocab_multiple: int = 1) -> None:
    """Add the adapter in a folder to its base model, and freeze the weights of the base model. See
    `read_adapter` for the arguments and errors."""
    adapter = read_adapter(model, folder, vocab_multiple)
    try:
        add_lora(model, adapter.config, None)
    except ConfigError as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG_NAME}: {error}") from error
    fill_adapter(model, adapter.tensors, str(folder / ADAPTER_WEIGHTS_NAME))


def read_adapter(model: Model, folder: Path, vocab_multiple: int = 1) -> Adapter:
    """Return the adapter in a folder. Tokens of the adapter that the model does not have are added
    to the model. If the folder contains a different frozen embedding or head, it replaces the
    embedding or head of the model.

    Args:
        model: the base model without adapters.
        folder: the adapter's folder, which contains the files described in this module's docstring.
        vocab_multiple: the number of rows of the embedding is rounded up to a multiple of this
            number.

    Raises:
        ModelError: a file is missing or damaged, has an unsupported setting, or does not match the
            model.
    """
    settings, stored, copies = _read_layout(model, folder, vocab_multiple)
    path = folder / ADAPTER_WEIGHTS_NAME
    try:
        trained = token_tables(model, settings)
    except ConfigError as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG_NAME}: {error}") from error
    is_changed = _take_base_tables(model, {name: stored[name] for name in copies}, path, trained)
    values = {name: _read(tensor) for name, tensor in stored.items() if name not in copies}
    embedding, head = f"{PREFIX}{model.embedding_name}.lora_embedding_", f"{PREFIX}{HEAD}.lora_"
    if _ensures_tie(model, settings) and f"{embedding}A" in values:
        values[f"{head}A.weight"] = values[f"{embedding}B"].T
        values[f"{head}B.weight"] = values[f"{embedding}A"].T
    return Adapter(settings, values, is_changed)


def adapter_lora(model: Model, folder: Path) -> LoraConfig:
    """Return the settings that `add_lora` needs to create the adapter in a folder. The adapter's
    weights are not read. Tokens of the adapter that the model does not have are added to the model.

    Args:
        model: the base model without adapters, on any device.
        folder: the adapter's folder.

    Raises:
        ModelError: see `read_adapter`.
    """
    return _read_layout(model, folder, 1)[0]


def _read_layout(
    model: Model, folder: Path, vocab_multiple: int
) -> tuple[LoraConfig, dict[str, StoredTensor], set[str]]:
    """Return an adapter's settings, the tensors in its file, and the names of the tensors in the
    file that are copies of base model tensors. See `read_adapter` for the arguments and errors."""
    config, path = read_peft_config(folder), folder / ADAPTER_WEIGHTS_NAME
    if not path.is_file():
        raise ModelError(
            f"{folder} does not contain {ADAPTER_WEIGHTS_NAME}: only safetensors weights are "
            "supported (pickled .bin files can run code when opened)"
        )
    stored = read_header(path)
    fit_vocabulary(model, folder, vocab_multiple)
    layers: dict[str, nn.Module] = {model.embedding_name: model.embedding, **linear_layers(model)}
    stored = _without_doubles(model, config, stored)
    kinds = {name: found for name in stored if (found := _adapted_layer(name)) is not None}
    adapted = list(dict.fromkeys(layer for layer, kind in kinds.values() if kind != TOKENS))
    if not adapted:
        raise ModelError(f"{path} contains no adapter")
    known = [layer for layer in adapted if layer in layers]
    patterns = [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]
    require_quick_matches(folder / ADAPTER_CONFIG_NAME, patterns, known)
    others = {name: tensor for name, tensor in stored.items() if name not in kinds}
    modules = [*(config.modules_to_save or []), *([HEAD] if _ensures_tie(model, config) else [])]
    full = [n for n in others if _is_saved(n, modules) and not n.endswith(_COPIES)]
    for target in config.modules_to_save or []:
        is_there = any(_is_saved(name, [target]) for name in full)
        if not is_there and any(name.endswith(target) for name, _ in model.named_modules()):
            raise ModelError(f"{path} lacks the weights of {target}, which modules_to_save lists")
    settings = config.lora(
        targets=_short_names(adapted, layers),
        modules_to_save=_short_names(
            dict.fromkeys(n.removeprefix(PREFIX).rpartition(".")[0] for n in full),
            (name for name, _ in model.named_modules()),
        ),
    )
    for layer in adapted:
        if layer not in layers:
            raise ModelError(
                f"{path} adapts {layer}, which is not a linear layer of the base model"
                f"{nearest(layer, layers)}"
            )
        _require_rank(model, layer, settings, stored, path)
    return settings, stored, others.keys() - set(full)


def _short_names(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Shorten layer names to their last parts, such as `q_proj`. If this would also match layers
    that are not in `names`, return the full names. Short names are preferred, because the memory of
    a run is planned with a model that has fewer layers and might not contain a layer with the full
    name."""
    wanted, ends = {*names}, dict.fromkeys(name.rpartition(".")[2] for name in names)
    is_exact = {name for name in known if name.rpartition(".")[2] in ends} == wanted
    return list(ends) if is_exact else list(names)


def _is_saved(name: str, modules: list[str]) -> bool:
    """Return True if a tensor belongs to one of the modules in `modules_to_save`. As in PEFT, the
    entries are matched against the ends of module names."""
    return any(f"{target}." in name.removeprefix(PREFIX) for target in modules if target)


def _without_doubles(
    model: Model, config: PeftConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Remove tensors that occur twice in an adapter file. PEFT writes the tensors of a head twice
    if the head shares the embedding's adapter or trained rows. If tokens were added, PEFT also
    writes the tensors of the wrappers around the embedding and the head."""
    doubles = [".modules_to_save.", ".original_module."]
    if model.config.tie_word_embeddings:
        given = config.trainable_token_indices
        by_table = given if isinstance(given, dict) else {"": given}
        others = [ids for name, ids in by_table.items() if name != HEAD]
        if others and by_table.get(HEAD, others[0]) == others[0]:
            doubles.append(f"{PREFIX}{HEAD}.token_adapter.")
        if _ensures_tie(model, config):
            doubles.append(f"{PREFIX}{HEAD}.lora_")
    return {n: t for n, t in stored.items() if not any(double in n for double in doubles)}


def _ensures_tie(model: Model, config: PeftConfig | LoraConfig) -> bool:
    """Return True if PEFT ties an adapted head to the embedding. PEFT recognises the embedding by
    its name."""
    tied = model.config.tie_word_embeddings and config.ensure_weight_tying
    return tied and model.embedding_name.endswith("embed_tokens")


def fit_vocabulary(model: Model, folder: Path, vocab_multiple: int) -> None:
    """Resize the vocabulary of a base model to the number of embedding rows in an adapter file. New
    rows are initialised with the mean of the existing rows.

    Args:
        model: base model to modify in place.
        folder: the adapter's folder.
        vocab_multiple: the number of rows of the embedding is rounded up to a multiple of this
            number.

    Raises:
        ModelError: the adapter trains tokens beyond the vocabulary, but there are ids between the
            end of the vocabulary and these tokens that it does not train.
    """
    count, table = model.config.vocab_size, f"{PREFIX}{model.embedding_name}."
    rows, path = count, folder / ADAPTER_WEIGHTS_NAME
    for name, tensor in (read_header(path) if path.is_file() else {}).items():
        if name.startswith(table) and len(tensor.shape) == 2:
            if name.endswith(".lora_embedding_A"):
                rows = tensor.shape[1]
            elif name.removeprefix(table) in ("weight", *_COPIES):
                rows = tensor.shape[0]
    given = read_peft_config(folder).trainable_token_indices or []
    lists = given.values() if isinstance(given, dict) else [given]
    new = sorted({token for ids in lists for token in ids if token >= rows})
    if new and new != list(range(rows, rows + len(new))):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG_NAME}: trainable_token_indices contains token {new[-1]}, "
            f"but the base model has {rows} tokens: name the base model that the adapter was "
            "trained with"
        )
    rows += len(new)
    if rows > count:
        grow_vocabulary(model, count, rows, vocab_multiple=vocab_multiple)
    elif rows < count:
        cut_vocabulary(model, rows, vocab_multiple=vocab_multiple)


def _require_rank(
    model: Model,
    layer: str,
    config: LoraConfig,
    stored: Mapping[str, StoredTensor],
    path: Path,
) -> None:
    """Check that the rank that the settings specify for a layer equals the rank of the layer's
    tensor A in the file. This must be checked before memory is allocated for the adapter, because
    the amount of memory depends on the settings.

    Raises:
        ModelError: the tensor A is missing or has a different shape.
    """
    base = model.get_submodule(layer)
    if base is model.embedding:
        kind, width = "lora_embedding_A", model.config.vocab_size
    else:
        weight = base.weight
        assert isinstance(weight, Tensor)
        kind, width = "lora_A", weight.shape[0 if isinstance(base, Conv1D) else 1]
    name = f"{PREFIX}{layer}.{SUFFIXES[kind]}"
    if name not in stored:
        raise ModelError(f"{path} lacks tensor {name}")
    expected = [config.rank_of(layer), width]
    if list(stored[name].shape) != expected:
        raise ModelError(
            f"{path}: tensor {name} is {list(stored[name].shape)}, expected {expected} by "
            f"{ADAPTER_CONFIG_NAME}"
        )


def _read(stored: StoredTensor) -> Tensor:
    if stored.kind not in FLOAT_FORMATS:
        raise ModelError(
            f"{stored.path}: tensor {stored.name} is {stored.kind}, not floating-point"
        )
    return stored.read()


#: Names under which an adapter file stores the original weight of an embedding or head with an
#: adapter or trained rows.
_COPIES = ("token_adapter.base_layer.weight", "base_layer.weight")


def _take_base_tables(
    model: Model,
    copies: Mapping[str, StoredTensor],
    path: Path,
    trained: Mapping[str, list[int]],
) -> bool:
    """Replace the embedding and the head of a base model with the embedding and the head in an
    adapter file. PEFT writes the embedding and the head to the file if they are adapted, or if
    tokens were added to the base model. All other tensors must be copies of the base model's
    tensors.

    Args:
        model: base model to modify in place.
        copies: tensors in the adapter file that are not part of the adapter, keyed by name.
        path: path of the adapter file, for error messages.
        trained: ids of the tokens whose rows the adapter replaces, keyed by the name of the
            embedding or head.

    Returns:
        True if the embedding or the head was replaced.

    Raises:
        ModelError: a tensor is unknown, or differs from the tensor of the base model.
    """
    known, is_changed = model.state_dict(), False
    tables = [f"{name}.weight" for name in (model.embedding_name, HEAD)]
    for name, stored in copies.items():
        plain = name.removeprefix(PREFIX)
        for copy in _COPIES:
            plain = plain.replace(f".{copy}", ".weight")
        rows, own = model.config.vocab_size, known.get(plain)
        value = _read(stored)
        table = plain.removesuffix(".weight")
        if table == HEAD and model.config.tie_word_embeddings and HEAD not in trained:
            table = model.embedding_name
        if own is not None and value.shape == own[:rows].shape and table in trained:
            # The adapter replaces these rows, so their values in the file are ignored.
            value = value.to(own.dtype, copy=True)
            value[trained[table]] = own[trained[table]].cpu()
        if own is not None and torch.equal(own[:rows].cpu(), value.to(own.dtype)):
            continue
        if own is None or plain not in tables or value.shape != own[:rows].shape:
            raise ModelError(
                f"{path} contains tensor {name}, which belongs neither to an adapter nor to the "
                "base model: adapters that change other weights are not supported; merge it with "
                "PEFT (merge_and_unload), and use the merged model"
            )
        replaced = own.new_zeros(own.shape)
        replaced[:rows] = value
        changed = tables if model.config.tie_word_embeddings and not is_changed else [plain]
        if is_changed and model.config.tie_word_embeddings:
            model.config = model.config.model_copy(update={"tie_word_embeddings": False})
        parameter = nn.Parameter(replaced)
        for one in changed:
            known[one] = parameter.detach()
            model.get_submodule(one.removesuffix(".weight")).weight = parameter
        is_changed = True
    return is_changed


def adapter_files(model: Model, config: LoraConfig, base: str) -> dict[str, str]:
    """Return the contents of the text files to save together with `adapter_tensors`, keyed by file
    name.

    Args:
        model: a model with adapters.
        config: the recipe's `lora` section.
        base: folder or hub id of the base model. A folder is absolute or relative to the adapter's
            folder. A hub id is followed by @REVISION unless the newest revision is used.
    """
    revision = ""
    if not Path(base).is_dir():
        base, _, revision = base.partition("@")
    alpha = int(config.alpha) if config.alpha.is_integer() else config.alpha
    tokens = {
        name: module.token_ids.tolist()
        for name, module in model.named_modules()
        if isinstance(module, TrainableTokens)
    }
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        # Full names are used, because PEFT could match a suffix against layers that are not
        # adapted.
        "target_modules": [name for name, _ in lora_layers(model)],
        "use_dora": config.dora,
        "use_rslora": config.use_rslora,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "bias": "none",
        "fan_in_fan_out": model.config.stores_transposed,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": modules_in_full(model) or None,
        # These keys exist only in newer versions of PEFT, so they are written only if they are
        # needed.
        **({"trainable_token_indices": tokens} if tokens else {}),
        **({"ensure_weight_tying": True} if _ensures_tie(model, config) else {}),
    }
    return {ADAPTER_CONFIG_NAME: json.dumps(content, indent=2) + "\n"}


#: Layer names that PEFT always treats as stacked experts in models with experts.
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def peft_notes(model: Model) -> list[str]:
    """Return messages about the model's adapters that PEFT can't load. Each message is one line."""
    names = [name for name, _ in lora_layers(model)]
    tables = (n.rpartition(".")[0] for n in lora_parameters(model))
    head = model.head_file_name.removesuffix(".weight")
    if head != HEAD and HEAD in (*tables, *modules_in_full(model)):
        return [
            f"PEFT expects the head of {model.config.model_type} models under the name {head} and "
            "does not find its adapter: to use PEFT, merge with `firstlight convert RUN --to hf`"
        ]
    merge = "or merge with `firstlight convert RUN --to hf`"
    notes = []
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    for module in modules_in_full(model):
        own = [name for name in sorted(buffers) if name.startswith(f"{module}.")]
        if own:
            short = module.rpartition(".")[2]
            notes.append(
                f"PEFT does not load {module}, because adapters do not contain its "
                f"{own[0].rpartition('.')[2]}: to use PEFT, list only modules that do not contain "
                f"{short} in lora.modules_to_save, {merge}"
            )
            break
    lost = [name for name in names if name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    if lost and model.config.expert_count:
        notes.append(
            f"PEFT 0.21 does not load the adapters of {len(lost)} layers outside of the experts "
            f"({', '.join(_TAKEN_FOR_EXPERTS)}): to use PEFT, leave them out of lora.targets, "
            f"{merge}"
        )
    return notes


def base_name(given: str | Path, folder: Path) -> str:
    """Return the name of the base model, for use in `adapter_files`. The result is an absolute path
    if the model was specified as a folder or a GGUF file. A hub id is returned unchanged.

    Args:
        given: folder, GGUF file or hub id specified by the user.
        folder: folder of the base model. For a GGUF file or a hub id, this is a folder in the
            cache.
    """
    path = Path(given).expanduser()
    if not path.exists():
        return str(given)
    return str((folder if path.is_dir() else path).resolve())
