"""Write, read and verify checkpoints.

    RUN/checkpoints/step-00000200/
        config.json, generation_config.json, tokenizer.json, tokenizer_config.json
        model.safetensors       these files are a valid Hugging Face model folder
        optimizer.safetensors   moments and counters by parameter name; random-generator states
        trainer_state.json      step, tokens seen, data position, the resolved recipe
        manifest.json           size and sha256 of every file above; written last

With `lora`, adapter_config.json and adapter_model.safetensors replace config.json and
model.safetensors, as in PEFT folders.

With `checkpoint.sharded`, each process writes its own shards (see sharded.py). These files replace
model.safetensors and optimizer.safetensors:

        model.shard-00001-of-00004.safetensors, ...      weights
        optimizer.shard-00001-of-00004.safetensors, ...  moments, counters, random-generator states

The last checkpoint of a run also contains model.safetensors.

A checkpoint is written under a temporary name, synced, and renamed. A folder without a manifest is
not a checkpoint. An older checkpoint of the same step is renamed to step-00000200-replaced-0123abcd
and kept until the new one is verified.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from firstlight.checkpoint.manifest import (
    MANIFEST_NAME,
    checkpoint_folder,
    file_marks,
    new_checkpoint,
    read_manifest,
    require_plain_file,
    sealed,
    write_manifest,
    write_texts,
)
from firstlight.checkpoint.run_folder import HeldFolder
from firstlight.checkpoint.sharded import shard_names
from firstlight.errors import (
    CheckpointError,
    ModelError,
    describe_os_error,
)
from firstlight.files.atomic import forget_cached, read_json_object, sha256_of
from firstlight.files.disk import HashedFile, OutputFile
from firstlight.files.tensor_file import write_tensors
from firstlight.lora.files import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, config_folder
from firstlight.weights.composite import Carried, text_tensors
from firstlight.weights.huggingface import CONFIG_NAME, TOKENS_KEY
from firstlight.weights.loading import nonfinite_tensor
from firstlight.weights.stored import WEIGHTS_NAME, read_header

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"

#: Pattern for valid names of files in a checkpoint. Files in subfolders and hidden files are not
#: allowed.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint that will be written or has been read.

    Attributes:
        files: contents of the text files that store the config and the tokenizer, keyed by file
            name.
        model: tensors in model.safetensors, or in adapter_model.safetensors if `files` includes
            adapter_config.json, keyed by name.
        optimizer: tensors in optimizer.safetensors, keyed by name.
        trainer_state: JSON object in trainer_state.json. If the validation loss was measured at
            exactly this step, it is stored as `val_loss`.
        is_copy: True if the tensors are a copy that is never modified; False if a run that is still
            training may update them in place.
        carried: parts of the starting model's folder that are written with the model; None if it
            contained only a text model.
        sharded_folder: folder from which a sharded checkpoint was read; None for other checkpoints.
            If set, `model` and `optimizer` are empty, and the shards are later read directly into
            the tensors of the run.
    """

    files: Mapping[str, str]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    trainer_state: Mapping[str, Any]
    is_copy: bool = False
    carried: Carried | None = None
    sharded_folder: Path | None = None


def save_checkpoint(
    run_folder: Path,
    step: int,
    checkpoint: Checkpoint,
    after: int | None = None,
    held: HeldFolder | None = None,
) -> Path:
    """Write a checkpoint. Return its folder.

    Args:
        run_folder: the run's folder.
        step: number of completed optimizer steps.
        checkpoint: content of the checkpoint.
        after: step of the checkpoint from which the run continued. All checkpoints saved after that
            one belong to a dead branch (see manifest.py). None if the run continued from the
            checkpoint that was saved last.
        held: the locked run folder. Its run id is written to the manifest, and the folder is
            checked immediately before the checkpoint is renamed to its final name. If None, no run
            id is written and the folder is not checked.

    Raises:
        CheckpointError: a weight, a moment or a number in the state is not finite, or the run
            folder no longer belongs to this run. No checkpoint is created.
        StorageError: a file system error occurred and no checkpoint was created.
    """
    require_finite(step, checkpoint.model)
    require_finite(step, checkpoint.optimizer)
    texts = checkpoint_texts(step, checkpoint)
    model, carried = checkpoint.model, checkpoint.carried
    model = model if carried is None else carried.with_tensors(model)
    with new_checkpoint(run_folder, step) as temporary:
        written = [
            *write_texts(temporary, texts),
            _write_tensors(temporary / _weights_name(checkpoint.files), model),
            _write_tensors(temporary / OPTIMIZER_NAME, checkpoint.optimizer),
        ]
        loss = checkpoint.trainer_state.get("val_loss")
        marks = file_marks(written)
        run_id = None if held is None else held.run_id
        write_manifest(
            temporary, run_folder, step, marks, val_loss=loss, after=after, run_id=run_id
        )
        if held is not None:
            held.require()
    return checkpoint_folder(run_folder, step)


def checkpoint_texts(step: int, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the contents of a checkpoint's text files, keyed by file name. They are the text files
    of the model folder and trainer_state.json.

    Raises:
        CheckpointError: a number in the state is not finite.
    """
    return {**checkpoint.files, STATE_NAME: _state_text(step, checkpoint.trainer_state)}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> HashedFile:
    with HashedFile(path) as file:
        write_tensors(file, tensors, {"format": "pt"})
    return file


def _state_text(step: int, state: Mapping[str, Any]) -> str:
    """Return the content of trainer_state.json. All non-ASCII characters are escaped, because paths
    with undecodable bytes (surrogate escapes) can't be encoded as UTF-8.
    """
    try:
        return json.dumps(state, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise CheckpointError(
            f"step {step}: {STATE_NAME} can't be written ({error}); no checkpoint was written"
        ) from error


def require_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if a tensor contains NaN or infinity.

    Raises:
        CheckpointError: a tensor is not finite. The message names the tensor and `step`.
    """
    if (name := nonfinite_tensor(tensors.items())) is not None:
        raise CheckpointError(
            f"step {step}: tensor {name} is not finite; no checkpoint was written"
        )


def checkpoint_bytes(model_parameters: int, optimizer_state_bytes: int) -> int:
    """Return the approximate size in bytes of a checkpoint with fp32 weights and optimizer state.

    Args:
        model_parameters: number of parameters of the model.
        optimizer_state_bytes: size of the optimizer state in bytes.
    """
    return 4 * model_parameters + optimizer_state_bytes


def verify_checkpoint(folder: Path, *, from_disk: bool = False) -> None:
    """Verify every file of a checkpoint against the manifest.

    Args:
        folder: the checkpoint's folder.
        from_disk: True to drop the operating system's cached copies first, where possible, so that
            the files are read from the disk.

    Raises:
        CheckpointError: a file is missing, is not a regular file, does not match the size or
            SHA-256 in the manifest, or belongs to a different step. The message names the file.
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    tensors = shard_names(files) or [_weights_name(files), OPTIMIZER_NAME]
    config_name = ADAPTER_CONFIG_NAME if ADAPTER_WEIGHTS_NAME in files else CONFIG_NAME
    for name in (config_name, *tensors, STATE_NAME):
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST_NAME} does not list {name}")
    for name, entry in files.items():
        if _PLAIN_NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{folder / MANIFEST_NAME} lists a file outside the checkpoint: {name!r}"
            )
        path = folder / name
        require_plain_file(path)
        try:
            if path.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{path} is damaged: its size differs from the manifest")
            if from_disk:
                forget_cached(path)
            if sha256_of(path) != entry["sha256"]:
                raise CheckpointError(f"{path} is damaged: its sha256 differs from the manifest")
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {describe_os_error(error)}") from error
    step, found = manifest["step"], load_trainer_state(folder).get("step", manifest["step"])
    if found != step:
        raise CheckpointError(
            f"{folder} contains files from two checkpoints: {STATE_NAME} is for step "
            f"{found!r:.100}, but {MANIFEST_NAME} is for step {step}"
        )


def copy_checkpoint(folder: Path, run_folder: Path, run_id: str | None) -> None:
    """Copy a verified checkpoint of another run into a run folder that does not contain
    checkpoints.

    Args:
        folder: the checkpoint of the other run.
        run_folder: the run folder to which the checkpoint is copied.
        run_id: id of the run in `run_folder`, for the manifest of the copy.

    Raises:
        CheckpointError: a file has changed since it was verified.
        StorageError: a file system error occurred and no copy was created.
    """
    manifest = read_manifest(folder)
    with new_checkpoint(run_folder, manifest["step"]) as temporary:
        for name, entry in manifest["files"].items():
            with (folder / name).open("rb") as source, HashedFile(temporary / name) as copy:
                while block := source.read(1 << 24):
                    copy.write(block)
            if copy.sha256 != entry["sha256"]:
                raise CheckpointError(
                    f"{folder / name} has changed since it was verified: use another checkpoint"
                )
        own = {**manifest, "run_id": run_id}
        del own["sha256"]
        with OutputFile(temporary / MANIFEST_NAME) as file:
            file.write(sealed(own).encode())


def _weights_name(names: Container[str]) -> str:
    """Return the name of the file that contains a checkpoint's weights. This is the adapter file if
    `names` includes an adapter config, and the file of the full model otherwise.
    """
    return ADAPTER_WEIGHTS_NAME if ADAPTER_CONFIG_NAME in names else WEIGHTS_NAME


def load_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint to resume from. The tensors of a sharded checkpoint are not read (see
    `Checkpoint.sharded_folder`).

    Args:
        folder: the checkpoint's folder.
        verify: True to verify every file against the manifest first; False if the caller has
            already verified the checkpoint.

    Returns:
        The checkpoint, with its tensors on the CPU and with empty `files`.

    Raises:
        CheckpointError: a file is damaged or can't be read.
    """
    if verify:
        verify_checkpoint(folder)
    if is_sharded_checkpoint(folder):
        return Checkpoint({}, {}, {}, load_trainer_state(folder), sharded_folder=folder)
    try:
        names = read_manifest(folder)["files"]
        for name in (_weights_name(names), OPTIMIZER_NAME):
            read_header(folder / name)
        model = text_tensors(safetensors.torch.load_file(folder / _weights_name(names)), folder)
        optimizer = safetensors.torch.load_file(folder / OPTIMIZER_NAME)
    except (safetensors.SafetensorError, OSError, ModelError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    return Checkpoint({}, model, optimizer, load_trainer_state(folder))


def is_sharded_checkpoint(folder: Path) -> bool:
    """Return True if a checkpoint was written with `checkpoint.sharded` and therefore contains
    shard files.
    """
    return bool(shard_names(path.name for path in folder.iterdir()))


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """Return the JSON object in trainer_state.json of a verified checkpoint.

    Raises:
        CheckpointError: trainer_state.json can't be read, or is not a JSON object.
    """
    path = folder / STATE_NAME
    state = read_json_object(path, CheckpointError, "is damaged: it is not a JSON object")
    _require_objects(path, state)
    return state


def tokens_read(folder: Path) -> int | None:
    """Return the number of tokens that the model in a folder has read in all of its training, or
    None if it is unknown. The tokens of an adapter's base count.

    Raises:
        CheckpointError, ModelError: a file is damaged or missing.
    """
    if (folder / STATE_NAME).is_file():
        state = load_trainer_state(folder)
        # Older versions did not record what the initial model had read.
        before = state.get("initial_tokens", None if state.get("init_from") else 0)
        own = state.get("tokens_seen")
        return before + own if type(before) is type(own) is int else None
    described_by = config_folder(folder)
    if described_by != folder:
        return tokens_read(described_by)
    count = read_json_object(folder / CONFIG_NAME, ModelError).get(TOKENS_KEY)
    return count if type(count) is int and count >= 0 else None


def saved_vocab_multiple(folder: Path, state: Mapping[str, Any]) -> int:
    """Return the number to a multiple of which a checkpoint's vocabulary size was padded. Return 1
    if the vocabulary is not padded.

    Args:
        folder: the checkpoint's folder, for the error message.
        state: the checkpoint's `trainer_state`.

    Raises:
        CheckpointError: the number in the state is not a positive integer.
    """
    multiple = state.get("recipe", {}).get("efficiency", {}).get("vocab_multiple", 1)
    if type(multiple) is not int or multiple < 1:
        raise CheckpointError(
            f"{folder}: trainer_state.json is damaged: vocab_multiple is {multiple!r:.100}"
        )
    return multiple


def _require_objects(path: Path, state: Mapping[str, Any]) -> None:
    """Raise an error if a section of the state is not a JSON object. The keys in a section are
    checked by the functions that use the section.
    """
    names = ("data", "guard", "loader", "random", "recipe", "schedule")
    parts = {name: state.get(name, {}) for name in names}
    if isinstance(recipe := parts["recipe"], dict):
        # In a recipe, these sections can be null.
        optional: dict[str, Any] = {
            name: {} for name in ("model", "lora", "preference") if recipe.get(name) is None
        }
        parts |= {f"recipe.{name}": value for name, value in (recipe | optional).items()}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"{path} is damaged: '{name}' is not an object")
