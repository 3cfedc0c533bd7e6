"""Load models and their tokenizers from folders in the Hugging Face layout.

A folder can also contain an adapter created by PEFT or by a LoRA run. In this case, the base model
is loaded, and the adapter is merged into it.
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
    """A loaded model with its tokenizer and related settings.

    Attributes:
        model: model in evaluation mode, on the requested device.
        tokenizer: tokenizer of the folder; None if the folder does not contain a tokenizer.
        eos_token_ids: ids of the tokens that end generation.
        folder: the model folder, or the adapter's folder.
        mapped: files that are memory-mapped as parameters; empty if the weights were copied.
        trained_on: description of the checkpoint's training data, as returned by
            `checkpoint.selection.trained_on`; None if it was not read.
        generation: content of generation_config.json.
        adapter: adapter of the folder if it was not merged into the model, otherwise None.
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
        """Sampling settings of the model, as arguments for a `SamplingConfig` (see
        `sampling_settings`)."""
        return sampling_settings(self.generation)

    @functools.cached_property
    def chat_end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a response in a chat: the `eos_token_ids` and the token that
        ends a turn in the chat template."""
        turn_ends = () if self.tokenizer is None else turn_end_ids(self.tokenizer)
        return tuple(dict.fromkeys((*self.eos_token_ids, *turn_ends)))

    def require_unchanged(self) -> None:
        """Check that the memory-mapped weight files have not changed. Call this method before using
        the model.

        Raises:
            ModelError: a mapped file was modified in place.
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
    """Load the weights, the config and the tokenizer of a Hugging Face model folder or hub id.

    An adapter is merged into its base model. If the adapter's folder does not contain a tokenizer
    or a generation config, they are read from the base model's folder.

    Args:
        folder: model folder, adapter folder or hub id.
        device: device of the parameters.
        dtype: dtype of the parameters; None for the dtype in the files.
        mode: loading mode (see `firstlight.weights.loading`).
        vocab_multiple: the number of rows of the embedding is rounded up to a multiple of this
            number.
        config: config used to create the model; None for the folder's config.
        merge: False to return the adapter of the folder separately, as `LoadedModel.adapter`.

    Raises:
        ModelError: a file is missing or damaged; the family is unknown; a tensor is missing,
            unexpected or of the wrong shape (the message names it); the base model of an adapter is
            missing; or the kind of adapter is not supported.
        TokenizerError: the tokenizer of the folder is damaged.
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
        # The adapter's chat tokenizer and the base model's tokenizer can have different end-of-text
        # tokens. The model can generate either of them, so both end generation.
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
    """Create the model that `load_model` would load from a folder, but on the meta device. Return
    the model and the settings of the folder's adapter. The settings are None if the folder does not
    contain an adapter.

    Args:
        folder: model folder or adapter folder.
        config: config of the base model.
        merge: False to create the model without the folder's adapter. Tokens that the adapter adds
            are still included.

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
    """Return the SHA-256 hash of the weights and the config of a model, in hexadecimal. For an
    adapter, the hash includes the weights and the config of its base model.

    The checkpoints of a LoRA run do not contain the base model. When such a run is resumed, this
    hash shows whether the base model has changed. All weights are read, which takes about a second
    per GB.

    Raises:
        ModelError: a file is missing or damaged.
    """
    *adapters, base = adapter_chain(folder)
    parts = [read_config(base).model_dump_json()]
    parts += [sha256_of(path) for path in sorted({t.path for t in stored_tensors(base).values()})]
    for adapter in reversed(adapters):
        parts += [adapter_settings(adapter), sha256_of(adapter / ADAPTER_WEIGHTS_NAME)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
