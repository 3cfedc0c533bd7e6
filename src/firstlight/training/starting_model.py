"""Provide the model with which a run starts. It can be a new model, the model of a checkpoint or
the model passed with --init-from.

A run with `lora` trains adapters of a frozen base model. Its checkpoints contain only the name of
the base model, not its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil
import torch
from pydantic import ValidationError
from torch import Tensor

from firstlight.checkpoint.checkpoint import (
    is_sharded_checkpoint,
    load_checkpoint,
    load_trainer_state,
    saved_vocab_multiple,
    tokens_read,
)
from firstlight.checkpoint.manifest import reading_checkpoint
from firstlight.checkpoint.selection import read_model_folder, resolve_model_folder
from firstlight.checkpoint.sharded import fitting_model
from firstlight.console import gib
from firstlight.errors import CheckpointError, ConfigError, DataError, ModelError
from firstlight.hardware.device import Hardware
from firstlight.lora.files import (
    Adapter,
    adapter_chain,
    base_name,
    config_folder,
    fit_vocabulary,
)
from firstlight.lora.layers import LoraConfig, add_lora, fill_adapter, with_new_tokens
from firstlight.lora.loading import LoadedModel, base_identity, load_model
from firstlight.lora.quantized import require_nf4
from firstlight.models import DEFAULT_FAMILY, Model, ModelConfig, padded_vocab_size
from firstlight.models.accounting import meta_model
from firstlight.models.language_model import InitConfig
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe, ResolvedRecipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.processes import on_main
from firstlight.weights.composite import Carried, read_carried
from firstlight.weights.huggingface import (
    read_config,
    read_generation,
    training_notes,
    unloaded_model,
)
from firstlight.weights.loading import (
    file_tensors,
    fitting_tensors,
    grow_vocabulary,
    nonfinite_tensor,
)

#: Keys of the `model` section that can change the config of the --init-from model. All of them
#: configure its position encoding or its maximum number of positions.
_POSITION_KEYS = frozenset(("max_position_embeddings", "rope_scaling", "rope_theta"))


def with_positions(
    recipe: Recipe, config: ModelConfig, init_from: str | Path, tell: Callable[[str], None]
) -> ModelConfig:
    """Return the config of the --init-from model. The position keys of the recipe's `model` section
    are applied if that section has no other keys. A section with other keys describes a different
    model and is ignored.

    Args:
        recipe: the recipe.
        config: config of the model.
        init_from: name of the model, for messages.
        tell: called with a message if the config is changed.

    Raises:
        ConfigError: the model does not support these positions.
    """
    # Ignore model_type, because it has a default value if the section does not set it.
    names = set() if recipe.model is None else _written_keys(recipe.model) - {"model_type"}
    changes = {name: getattr(recipe.model, name) for name in sorted(names)}
    is_same = all(getattr(config, name, None) == value for name, value in changes.items())
    if is_same or not names <= _POSITION_KEYS:
        return config
    if not config.has_rotary:
        raise ConfigError(
            f"{init_from} is a {config.model_type} model, whose positions are learned and can't "
            "be changed: remove the model section"
        )
    if recipe.lora is not None:
        raise ConfigError(
            f"LoRA checkpoints refer to {init_from} with its original positions: remove the lora "
            "section or the model section"
        )
    try:
        changed = type(config)(**{**config.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"model: {init_from} can't have these positions: {first}") from error
    tell(f"the positions of {init_from} are changed: {', '.join(f'model.{n}' for n in changes)}")
    return changed


def contradictions(recipe: Recipe, config: ModelConfig) -> list[str]:
    """Return the keys, as `model.KEY`, whose values in the recipe differ from those in `config`."""
    if recipe.model is None:
        return []
    # Compare only keys that the recipe sets, because a default is not a contradiction.
    found = changed_keys(recipe.model.model_dump(), config.model_dump())
    given = _written_keys(recipe.model) - ({"vocab_size"} if not recipe.model.vocab_size else set())
    if not given <= _POSITION_KEYS | {"model_type"}:
        given |= {"model_type"}
    elif recipe.model.model_type == DEFAULT_FAMILY:
        # A recipe that sets only position keys does not specify a model family.
        given -= {"model_type"}
    return [f"model.{name}" for name in found if name in given]


def _written_keys(model: ModelConfig) -> set[str]:
    """Return the keys that a recipe's `model` section sets, excluding those derived by
    validation.
    """
    usual = type(model).model_validate({"model_type": model.model_type})
    filled = usual.model_fields_set - {"model_type"}
    return {
        name
        for name in model.model_fields_set
        if name not in filled or getattr(model, name) != getattr(usual, name)
    }


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two mappings, in sorted order. A missing key is
    treated as None.
    """
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


T = TypeVar("T")

_BASE_KEYS = ("name", "sha256")


@dataclass(frozen=True)
class ModelIdentity:
    """Name and weight hash of the model from which a run started.

    Attributes:
        name: the folder or hub id of the model.
        sha256: hash of the model's weights; see `base_identity`.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class LoraBase(ModelIdentity):
    """Frozen base model of a run with `lora`.

    Attributes:
        lora: the `lora` section of the run, if it differs from the recipe's section because an
            adapter is trained further or because tokens were added; None to use the recipe's
            section.
    """

    lora: dict[str, Any] | None = None


@dataclass(frozen=True)
class FirstModel:
    """Model with which a run starts.

    Attributes:
        config: config of the trained model.
        model: the --init-from model with its weights, or the base model of a resumed run with
            `lora`; None if `new_model` creates the model.
        identity: identity of the starting model of a new run on preference pairs; None for other
            runs.
        base: the base model of a run with `lora`; None for other runs.
        adapter: values of the --init-from adapter that is trained further; empty for new adapters.
        generation: content of the model's generation_config.json.
        tokens: number of tokens that the --init-from model has read; None if it is unknown.
        carried: parts of the model's folder that are written with each checkpoint, or None.
    """

    config: ModelConfig
    model: Model | None = None
    identity: ModelIdentity | None = None
    base: LoraBase | None = None
    adapter: Mapping[str, Tensor] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = 0
    carried: Carried | None = None

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe. If `base` has a `lora` section, it replaces the recipe's section."""
        if self.base is None or self.base.lora is None:
            return recipe
        return recipe.model_copy(update={"lora": LoraConfig.model_validate(self.base.lora)})


def first_model(
    recipe: Recipe,
    tokenizer: Tokenizer,
    newest: Path | None,
    init_from: str | Path | None,
    *,
    new_rows: str,
    pairs: bool,
    engine: Engine,
    tell: Callable[[str], None],
) -> FirstModel:
    """Return the model with which a run starts. A new model has only a config, because its weights
    depend on the resolved recipe.

    Args:
        recipe, engine: recipe and engine of the run.
        tokenizer: the tokenizer of the data.
        newest: the checkpoint from which the run is resumed; None for a new run.
        init_from, new_rows: see `train`.
        pairs: True if the data consists of preference pairs.
        tell: called with each message to the user.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the model, tokenizer and recipe do not
            match.
    """
    if engine.config.pipeline > 1 and (init_from is not None or recipe.lora is not None):
        raise ConfigError(
            "distributed.pipeline can only start from random weights or resume a run (--resume): "
            f"remove {'--init-from' if recipe.lora is None else 'lora'}, or use "
            "distributed.engine fsdp"
        )
    if recipe.lora is not None and newest is not None:
        return resumed_base(recipe, newest, tell)
    if recipe.lora is not None and init_from is None:
        raise ConfigError(
            "lora trains adapters of an existing model: pass the model with --init-from, or "
            "remove the lora section to train all weights from scratch"
        )
    if init_from is not None and recipe.init != InitConfig():
        raise ConfigError(
            "the init section applies to random weights, but --init-from loads trained ones: "
            "remove one of them"
        )
    if newest is not None:
        config = _resumed_config(recipe, newest, tell)
        carried = read_carried(newest, read_config(newest))
        return FirstModel(config, generation=read_generation([newest]), carried=carried)
    if init_from is None:
        return FirstModel(_new_config(recipe, tokenizer, engine))

    def starting(folder: Path) -> FirstModel:
        chain = adapter_chain(folder)
        if recipe.lora is not None and len(chain) > 2:
            raise ConfigError(
                f"{init_from} is an adapter of an adapter, which PEFT does not support: merge it "
                f"with `firstlight convert {init_from} --to hf --out DIR`, and start from DIR"
            )
        loaded, lora = _starting_model(
            recipe, tokenizer, folder, init_from, new_rows=new_rows, pairs=pairs, tell=tell
        )
        identity, base = None, None
        # Compute the hash immediately after reading the weights, so that it matches the files that
        # were read.
        if pairs:
            identity = ModelIdentity(base_name(init_from, folder), base_identity(folder))
        if recipe.lora is not None:
            named = init_from if len(chain) == 1 else chain[1]
            base = LoraBase(
                base_name(named, chain[-1]),
                base_identity(chain[-1]),
                None if lora == recipe.lora or lora is None else lora.model_dump(),
            )
        return FirstModel(
            loaded.model.config,
            loaded.model,
            identity,
            base,
            {} if loaded.adapter is None else loaded.adapter.tensors,
            loaded.generation,
            tokens_read(folder),
            _carried(chain[-1], recipe, tell),
        )

    return read_start(init_from, engine, starting)


def _carried(folder: Path, recipe: Recipe, tell: Callable[[str], None]) -> Carried | None:
    """Return the parts of the starting model's folder that are written with each checkpoint. A run
    with `lora` does not write them, because its checkpoints refer to the base model."""
    carried = read_carried(folder, read_config(folder))
    if carried is None:
        return None
    parts = f"{', '.join(carried.parts)} in {folder}"
    if recipe.lora is None:
        tell(f"not trained, but written unchanged with each checkpoint: {parts}")
        return carried
    tell(
        f"not trained: {parts}; to use the adapter in other programs, merge it with "
        "`firstlight convert`"
    )
    return None


def new_model(recipe: ResolvedRecipe, engine: Engine, *, has_weights: bool) -> Model:
    """Create the model of a resolved recipe.

    Args:
        recipe: recipe of the run.
        engine: engine of the run.
        has_weights: True if the weights are loaded from a checkpoint and do not have to be
            initialised.
    """
    multiple = recipe.efficiency.vocab_multiple
    if has_weights:
        return engine.new_model(recipe.model, multiple)
    # Generate random numbers on the CPU, so that the initial weights are the same on all devices.
    generator = torch.Generator().manual_seed(recipe.run.seed)
    return engine.new_model(recipe.model, multiple, generator=generator, init=recipe.init)


def read_start(init_from: str | Path, engine: Engine, read: Callable[[Path], T]) -> T:
    """Read the model to start from. All processes read the checkpoint that the main process
    considers the newest, and fail if that checkpoint is deleted.

    Args:
        init_from: model folder, run folder or hub id of the model to start from; see `train`.
        engine: the engine of the run.
        read: function that reads a model folder; see `read_model_folder`.
    """
    if engine.world.size == 1:
        return read_model_folder(init_from, read)

    def found() -> str | None:
        # Send the main process's path to all processes only if it is a local folder, because each
        # machine caches hub models separately.
        is_here = Path(init_from).expanduser().is_dir()
        return str(resolve_model_folder(init_from)) if is_here else None

    name = on_main(engine, found)
    folder = resolve_model_folder(init_from) if name is None else Path(name)
    with reading_checkpoint(folder):
        return read(folder)


def resumed_base(recipe: Recipe, newest: Path, tell: Callable[[str], None]) -> FirstModel:
    """Load the base model of a resumed run, with its weights. If the run has a saved `lora`
    section, only dropout and quantisation are read from the recipe's section.

    Raises:
        CheckpointError: the run had no `lora` section, or its base model is missing or has changed.
    """
    saved = load_checkpoint(newest).trainer_state.get("lora_base")
    if saved is None:
        raise CheckpointError(
            f"{newest} belongs to a run without lora: remove the lora section, or start a new run "
            f"in another run.dir with --init-from {newest}"
        )
    if not isinstance(saved, dict) or not all(isinstance(saved.get(k), str) for k in _BASE_KEYS):
        raise CheckpointError(
            f"{newest}: trainer_state.json is damaged: it does not name a base model"
        )
    base = LoraBase(saved["name"], saved["sha256"], saved.get("lora"))
    if base.lora is not None and recipe.lora is not None:
        lora = continued_lora(recipe.lora, LoraConfig.model_validate(base.lora), tell)
        base = dataclasses.replace(base, lora=lora.model_dump())
    try:
        folder = resolve_model_folder(base.name)
        found = base_identity(folder)
        model = load_model(
            folder,
            dtype=torch.float32,
            mode="sequential",
            vocab_multiple=recipe.efficiency.vocab_multiple,
        ).model
        fit_vocabulary(model, newest, recipe.efficiency.vocab_multiple)
    except (ModelError, CheckpointError) as error:
        raise CheckpointError(
            f"{newest} can't be resumed without its base {base.name}: {error}"
        ) from error
    if found != base.sha256:
        raise CheckpointError(
            f"{newest} can't be resumed: its base {base.name} has changed (the weights' sha256 "
            "differs): restore the old one"
        )
    return FirstModel(model.config, model, base=base, generation=read_generation([newest]))


def attach(
    model: Model,
    recipe: ResolvedRecipe,
    hardware: Hardware,
    values: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Add the adapters of the recipe's `lora` section to the model, and freeze all other weights.
    Without such a section, do nothing.

    Frozen matrices are stored in the dtype of the matrix products. With precision bf16_params, all
    other frozen weights also have this dtype.

    Args:
        model: the model, which is changed in place.
        recipe: recipe of the run.
        hardware: the device that the model will be moved to.
        values: values that the adapters start with, as in `fill_adapter`; empty to initialise new
            adapters.

    Raises:
        ConfigError: a target can't be adapted, or 4-bit weights are not supported on this machine.
        MissingDependencyError: bitsandbytes, which 4-bit weights require, is not installed.
    """
    if recipe.lora is None:
        return
    if recipe.lora.quantize == "nf4":
        require_nf4(hardware.device)
    frozen = {
        "bf16": torch.bfloat16,
        "bf16_params": torch.bfloat16,
        "fp8": torch.bfloat16,
        "fp16": torch.float16,
    }.get(recipe.efficiency.precision)
    # Use a separate generator, so that the adapters do not depend on earlier random numbers.
    generator = torch.Generator().manual_seed(recipe.run.seed)
    add_lora(model, recipe.lora, generator, frozen_dtype=frozen)
    if values:
        fill_adapter(model, values, "the adapter of --init-from")
    if recipe.efficiency.precision == "bf16_params":
        # Cast here rather than in the training program. Otherwise, an fp32 embedding and head would
        # be moved to the device first, where they would take more memory than training with 4-bit
        # weights.
        model.cast(torch.bfloat16, frozen=True)


def _new_config(recipe: Recipe, tokenizer: Tokenizer, engine: Engine) -> ModelConfig:
    """Return the config of a new model. It is the recipe's `model` section with the vocabulary size
    of the tokenizer.

    Raises:
        ConfigError: the section is missing, or the model does not fit in memory.
        DataError: the section sets a different vocab_size.
    """
    if recipe.model is None:
        raise ConfigError("the recipe has no model: add a `model:` section, or use --init-from")
    wanted = recipe.model.vocab_size
    if wanted not in (0, tokenizer.vocab_size):
        relation = "larger" if wanted > tokenizer.vocab_size else "smaller"
        raise DataError(
            f"model.vocab_size {wanted} is {relation} than the vocabulary of the data's tokenizer, "
            f"which has {tokenizer.vocab_size} tokens: remove model.vocab_size to use this number"
        )
    config = recipe.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
    stages = engine.config.pipeline
    _require_memory(config, min(engine.world.local_size, stages) / stages)
    return config


def _require_memory(config: ModelConfig, share: float) -> None:
    """Raise an error if a model's weights do not fit in this machine's memory.

    Args:
        config: config of the model.
        share: fraction of the model that the processes of this machine store together.

    Raises:
        ConfigError: the weights do not fit in memory, or their sizes exceed the limits of torch.
    """
    # Check this before creating the model, because the system may kill a process that allocates too
    # much memory without an error message.
    memory = psutil.virtual_memory().total
    try:
        needed = 4 * sum(parameter.numel() for parameter in meta_model(config).parameters())
    # torch raises these errors for sizes that exceed 64 bits.
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ConfigError(f"model: these sizes are impossible: {error}; lower them") from error
    # If the run has pipeline stages, the processes of this machine store only a fraction of the
    # model.
    needed = int(needed * share)
    if needed > memory:
        raise ConfigError(
            f"model: the weights alone take {gib(needed)}, but this machine has {gib(memory)}: "
            "lower model.hidden_size or model.num_hidden_layers"
        )


def _resumed_config(recipe: Recipe, newest: Path, tell: Callable[[str], None]) -> ModelConfig:
    """Return the config of a checkpoint's model.

    Raises:
        CheckpointError: the recipe contradicts the config, or the files do not match each other.
    """
    state = load_trainer_state(newest)
    if state.get("lora_base") is not None:
        raise CheckpointError(
            f"{newest} belongs to a run with lora: restore the recipe's lora section, or start a "
            f"new run in another run.dir with --init-from {newest}"
        )
    config = read_config(newest)
    multiple = saved_vocab_multiple(newest, state)
    try:
        # The checkpoint's manifest shows that the files are unchanged. It does not show that they
        # match each other.
        if is_sharded_checkpoint(newest):
            fitting_model(config, newest, multiple)
        else:
            fitting_tensors(unloaded_model(config, newest), newest)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    started_from = state.get("init_from")
    if padded_vocab_size(config.vocab_size, multiple) != padded_vocab_size(
        config.vocab_size, recipe.efficiency.vocab_multiple
    ):
        raise CheckpointError(
            f"{newest} was saved with efficiency.vocab_multiple {multiple}, and its optimizer "
            f"state does not match {recipe.efficiency.vocab_multiple}: set the key to {multiple} "
            "again"
        )
    names = contradictions(recipe, config)
    # A run that started from --init-from uses the config of that model, regardless of the recipe.
    if names and started_from is None:
        raise CheckpointError(
            f"{newest} can't be resumed with another model: {', '.join(names)} changed: set the "
            "old values, or choose another run.dir for a new run"
        )
    if names:
        tell(f"warning: the model comes from {started_from}; ignored: {', '.join(names)}")
    return config


def _starting_model(
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path,
    init_from: str | Path,
    *,
    new_rows: str,
    pairs: bool,
    tell: Callable[[str], None],
) -> tuple[LoadedModel, LoraConfig | None]:
    """Return the --init-from model in `folder` and the `lora` section of the run. The model gets
    new rows for tokens that only the data's tokenizer has. With `lora`, an adapter in `folder` is
    not merged into its base model, and the section is taken from the adapter.

    Raises:
        ConfigError, DataError, ModelError: the model, tokenizer and recipe do not match.
    """
    multiple = recipe.efficiency.vocab_multiple
    described_by = config_folder(folder)
    config = with_positions(recipe, read_config(described_by), init_from, tell)
    loaded = load_model(
        folder,
        dtype=torch.float32,
        mode="sequential",
        vocab_multiple=multiple,
        config=config,
        merge=recipe.lora is None,
    )
    lora = recipe.lora
    if lora is not None and loaded.adapter is not None:
        lora = _continued(lora, loaded.adapter, init_from, tell)
    if (damaged := nonfinite_tensor(file_tensors(loaded.model).items())) is not None:
        raise ModelError(
            f"{folder} can't be trained: its tensor {damaged} contains non-finite values (NaN or "
            "infinity): start from an earlier checkpoint or from another model"
        )
    for note in training_notes(described_by):
        tell(f"warning: {note}")
    old = loaded.tokenizer
    if old is not None and old.fingerprint != tokenizer.fingerprint and tokenizer.extends(old):
        now = tokenizer.vocab_size
        if pairs:
            raise ConfigError(
                f"{init_from} was not trained on {now - old.vocab_size} tokens of the data's "
                "tokenizer: fine-tune it on conversations with them first (data.kind chat)"
            )
        if loaded.adapter is not None:
            raise ConfigError(
                f"the data's tokenizer has {now - old.vocab_size} more tokens than the tokenizer "
                f"of the adapter {init_from}, whose layers are fixed: merge it with `firstlight "
                "convert "
                f"{init_from} --to hf --out DIR`, and start from DIR"
            )
        # A tokenizer may have more tokens than the embedding of its model has rows.
        before = min(old.vocab_size, loaded.model.config.vocab_size)
        copied_from = _copied_token(new_rows, old)
        if copied_from is not None and copied_from >= before:
            raise ConfigError(
                f"new rows '{new_rows}': {init_from} does not have a row for this token: choose "
                "another"
            )
        grow_vocabulary(loaded.model, before, now, copied_from=copied_from, vocab_multiple=multiple)
        rows = "the mean of the old rows" if copied_from is None else f"the rows of {new_rows[5:]}"
        tell(f"{now - before} new tokens start from {rows} in the embedding and the head")
        if lora is not None:
            lora = with_new_tokens(loaded.model, lora, before, now)
    else:
        _require_fitting_start(loaded, tokenizer, init_from)
    names = contradictions(recipe, loaded.model.config)
    if names:
        tell(f"warning: the model comes from {init_from}; ignored: {', '.join(names)}")
    return loaded, lora


def _continued(
    lora: LoraConfig, adapter: Adapter, init_from: str | Path, tell: Callable[[str], None]
) -> LoraConfig:
    """Return the `lora` section with which an existing adapter is trained further. It contains the
    adapter's settings, with dropout and quantization from the recipe.

    Raises:
        ConfigError: the adapter's files replace an embedding or head of the base model that is not
            trained.
    """
    if adapter.changes_base:
        raise ConfigError(
            f"{init_from} contains an embedding that is not trained, but differs from the base "
            "model's embedding: merge the adapter "
            f"with `firstlight convert {init_from} --to hf --out DIR`, and start from DIR"
        )
    found = adapter.config
    tell(f"continuing to train the adapter {init_from}: rank {found.rank}, alpha {found.alpha:g}")
    return continued_lora(lora, found, tell)


def continued_lora(lora: LoraConfig, found: LoraConfig, tell: Callable[[str], None]) -> LoraConfig:
    """Return the settings of an existing adapter. Dropout and quantisation are taken from the
    recipe's `lora` section if it sets them. If other keys of the section differ from the adapter's,
    show a warning that names them.
    """
    own = {key: getattr(lora, key) for key in {"dropout", "quantize"} & lora.model_fields_set}
    found = found.model_copy(update=own)
    others = [k for k in sorted(lora.model_fields_set) if getattr(lora, k) != getattr(found, k)]
    if _token_ids(lora) <= _token_ids(found):
        # Do not report `trainable_token_indices` if the adapter includes all tokens that the recipe
        # lists. The values may differ because tokens were added when the run started, or because
        # adapter files contain full table names.
        others = [key for key in others if key != "trainable_token_indices"]
    if others:
        tell(f"warning: ignored: {', '.join(f'lora.{key}' for key in others)}")
    return found


def _token_ids(lora: LoraConfig) -> set[int]:
    given = lora.trainable_token_indices
    return {
        token for ids in (given.values() if isinstance(given, dict) else [given]) for token in ids
    }


def _copied_token(new_rows: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token named in `new_rows` ("copy:TOKEN"), or None for "mean".

    Raises:
        ConfigError: the token does not exist.
    """
    if new_rows == "mean":
        return None
    token_id = tokenizer.backend.token_to_id(new_rows.removeprefix("copy:"))
    if token_id is None:
        raise ConfigError(
            f"new rows '{new_rows}' is invalid: use mean, or copy:TOKEN with a token of the old "
            "tokenizer"
        )
    return token_id


def _require_fitting_start(
    loaded: LoadedModel, tokenizer: Tokenizer, init_from: str | Path
) -> None:
    if loaded.tokenizer is not None and loaded.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"the data was prepared with a different tokenizer than {init_from}: "
            f"prepare it with --tokenizer {loaded.folder}, or with one that "
            "`firstlight tokenizer extend` made from it"
        )
    if tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise DataError(
            f"the data's tokenizer has {tokenizer.vocab_size} tokens, more than the "
            f"{loaded.model.config.vocab_size} of {init_from}: prepare the data with the model's "
            "tokenizer"
        )
