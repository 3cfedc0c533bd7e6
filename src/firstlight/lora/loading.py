"""Loading a model folder in the Hugging Face layout, with its tokenizer.

An adapter folder (from PEFT, or a checkpoint of a run with `lora`) is loaded as its base model with
the adapter merged.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import ConfigError, ModelError
from firstlight.files.atomic import sha256_of
from firstlight.lora.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    Adapter,
    adapter_chain,
    adapter_lora,
    adapter_settings,
    load_adapter,
    read_adapter,
)
from firstlight.lora.layers import LoraConfig, add_lora, merge_lora
from firstlight.models import Model, ModelConfig, build_model
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_labels import turn_end_ids
from firstlight.weights.hub import find_model_folder
from firstlight.weights.huggingface import (
    eos_ids_of,
    read_config,
    read_generation,
    sampling_settings,
    tokenizer_of,
    unloaded_model,
)
from firstlight.weights.loading import LoadingMode, load_weights
from firstlight.weights.stored import FileState, stored_tensors


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and files.

    Attributes:
        model: the model in evaluation mode, on the requested device.
        tokenizer: the folder's tokenizer; None if it has none.
        eos_token_ids: ids that end a generation.
        folder: the model folder, or the adapter's folder.
        mapped: the files that are memory-mapped as parameters; () if the weights were copied.
        trained_on: description of a checkpoint's training data (`checkpoint.selection.trained_on`);
            None if it was not read.
        generation: content of generation_config.json.
        adapter: the folder's adapter, if it was not merged.
    """

    model: Model
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    folder: Path
    mapped: tuple[FileState, ...] = ()
    trained_on: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The model's settings for a `SamplingConfig`; see `sampling_settings`."""
        return sampling_settings(self.generation)

    @functools.cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer in a chat: `eos_token_ids`, and the token that ends a turn
        in the chat template."""
        turn_ends = () if self.tokenizer is None else turn_end_ids(self.tokenizer)
        return tuple(dict.fromkeys((*self.eos_token_ids, *turn_ends)))

    def require_unchanged(self) -> None:
        """Raise an error if a mapped weight file has changed. Call this before using the model.

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
    merge: bool = True,
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
        config: config used to create the model; None for the folder's config.
        merge: False to keep the folder's adapter separate, as `LoadedModel.adapter`.

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
    eos_token_ids = eos_ids_of(base, tokenizer)
    kept: Adapter | None = None
    for adapter in reversed(adapters):
        if merge or adapter != adapters[0]:
            load_adapter(model, adapter, vocab_multiple)
            merge_lora(model)
        else:
            kept = read_adapter(model, adapter, vocab_multiple)
        own = tokenizer_of(adapter)
        # An adapter's chat tokenizer may have a different end-of-text token than the base. The
        # model may generate either of them, and both end a text.
        eos_token_ids = eos_ids_of(adapter, None) or tuple(
            dict.fromkeys((*eos_token_ids, *(() if own is None else eos_ids_of(adapter, own))))
        )
        tokenizer = own or tokenizer
    generation = read_generation((*adapters, base))
    return LoadedModel(
        model.eval(), tokenizer, eos_token_ids, folder, mapped, generation=generation, adapter=kept
    )


def model_without_weights(
    folder: Path, config: ModelConfig, *, merge: bool = True
) -> tuple[Model, LoraConfig | None]:
    """Build on the meta device the model that `load_model` would load from a folder. Return it, and
    the settings of the folder's adapter (None if there is no adapter).

    Args:
        folder: a model folder, or an adapter's folder.
        config: config of the base model.
        merge: False leaves the folder's adapter out of the model, except for its new tokens.

    Raises:
        ModelError: see `load_model`.
    """
    with torch.device("meta"):
        model = build_model(config)
    *adapters, _ = adapter_chain(folder)
    lora: LoraConfig | None = None
    for adapter in reversed(adapters):
        lora = adapter_lora(model, adapter)
        if merge or adapter != adapters[0]:
            try:
                add_lora(model, lora, None)
            except ConfigError as error:
                raise ModelError(f"{adapter / ADAPTER_CONFIG_NAME}: {error}") from error
            merge_lora(model)
    return model, lora


def base_identity(folder: Path) -> str:
    """Return the SHA-256, in hexadecimal, of a model's weights and config, including the base's for
    an adapter.

    The checkpoints of a run with `lora` do not contain the base. With this hash, a resumed run
    notices that its base has changed. All weights are read, which takes about a second per GB.

    Raises:
        ModelError: a file is missing or damaged.
    """
    *adapters, base = adapter_chain(folder)
    parts = [read_config(base).model_dump_json()]
    parts += [sha256_of(path) for path in sorted({t.path for t in stored_tensors(base).values()})]
    for adapter in reversed(adapters):
        parts += [adapter_settings(adapter), sha256_of(adapter / ADAPTER_WEIGHTS_NAME)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
