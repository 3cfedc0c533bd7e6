"""Checkpoints: complete or not there at all, verified before use.

    RUN/checkpoints/step-00000200/
        config.json, generation_config.json, tokenizer.json, tokenizer_config.json
        model.safetensors       a valid Hugging Face model folder up to here
        optimizer.safetensors   moments and counters by parameter name; random-number states
        trainer_state.json      step, tokens seen, data position, the resolved recipe
        manifest.json           size and sha256 of every file above; written last

With `checkpoint.sharded`, each process writes its shards (see sharded.py); these files replace the
two files of tensors:

        model.shard-00001-of-00004.safetensors, ...      weights
        optimizer.shard-00001-of-00004.safetensors, ...  moments, counters, random-number states

The last checkpoint of a run has model.safetensors too.

A checkpoint is written under a temporary name, synced, and renamed. A folder without a manifest is
not a checkpoint. An older checkpoint of the same step is renamed to
step-00000200-replaced-0123abcd, and stays until the new one is verified.
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
from firstlight.lora.files import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.stored import WEIGHTS_NAME, read_header

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"

#: Valid names of a checkpoint's files: in its folder, and not hidden.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's content, as written and as read.

    Attributes:
        files: text files by name: config, tokenizer.
        model: tensors of model.safetensors; with adapter_config.json among the files, those of
            adapter_model.safetensors.
        optimizer: tensors of optimizer.safetensors.
        trainer_state: everything else; JSON. `val_loss`: the validation loss at this very step,
            if there is one.
        is_copy: True if nothing changes the tensors any more; False if they may be those of an
            active run.
        sharded_folder: the folder of a sharded checkpoint that was read; its tensors are read
            straight into model and optimizer, and are not among these. None for any other.
    """

    files: Mapping[str, str]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    trainer_state: Mapping[str, Any]
    is_copy: bool = False
    sharded_folder: Path | None = None


def save_checkpoint(
    run_folder: Path,
    step: int,
    checkpoint: Checkpoint,
    after: int | None = None,
    held: HeldFolder | None = None,
) -> Path:
    """Write a checkpoint; return its folder.

    Args:
        after: the step of the checkpoint from which the run went on: later saves are of a dead
            branch. None: the last save.
        held: the run folder as the process of the run holds it, which the manifest names, and
            which is checked right before the checkpoint appears in it.

    Raises:
        CheckpointError: a weight, a moment or a number of the state is not finite: such a
            checkpoint is never published; or the run folder is no longer this run's.
        StorageError: the disk refuses; the folder does not appear.
    """
    require_finite(step, checkpoint.model)
    require_finite(step, checkpoint.optimizer)
    texts = checkpoint_texts(step, checkpoint)
    with new_checkpoint(run_folder, step) as temporary:
        written = [
            *write_texts(temporary, texts),
            _write_tensors(temporary / _weights_name(checkpoint.files), checkpoint.model),
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
    """The text files of a checkpoint by name: the model folder's, and trainer_state.json.

    Raises:
        CheckpointError: a number of the state is not finite.
    """
    return {**checkpoint.files, STATE_NAME: _state_text(step, checkpoint.trainer_state)}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> HashedFile:
    with HashedFile(path) as file:
        write_tensors(file, tensors, {"format": "pt"})
    return file


def _state_text(step: int, state: Mapping[str, Any]) -> str:
    """The text of trainer_state.json, in ASCII: undecodable bytes of a path have no other form."""
    try:
        return json.dumps(state, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise CheckpointError(
            f"step {step}: {STATE_NAME} can't be written ({error}); no checkpoint was written"
        ) from error


def require_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that hold a NaN or an infinity.

    Raises:
        CheckpointError: a tensor is not finite; the state of `step` can't be saved.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise CheckpointError(
                f"step {step}: tensor {name} is not finite; no checkpoint was written"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:  # fp8 has no arithmetic of its own
        tensor = tensor.float()
    # A sum with a NaN or an infinity in it is never finite, and needs no memory; one of finite
    # numbers may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def checkpoint_bytes(model_parameters: int, optimizer_state_bytes: int) -> int:
    """About how large a checkpoint becomes: fp32 weights and optimizer state."""
    return 4 * model_parameters + optimizer_state_bytes


def verify_checkpoint(folder: Path, *, from_disk: bool = False) -> None:
    """Compare every file with the manifest.

    Args:
        from_disk: read from the disk itself, if the operating system can drop its cached copy of
            the files.

    Raises:
        CheckpointError: a file is missing, damaged, no plain file, of another size or of another
            step (named).
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    tensors = shard_names(files) or [_weights_name(files), OPTIMIZER_NAME]
    for name in (CONFIG_NAME, *tensors, STATE_NAME):
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
                raise CheckpointError(f"{path} is damaged: its size is not that in the manifest")
            if from_disk:
                forget_cached(path)
            if sha256_of(path) != entry["sha256"]:
                raise CheckpointError(f"{path} is damaged: its sha256 is not that in the manifest")
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {describe_os_error(error)}") from error
    step, found = manifest["step"], load_trainer_state(folder).get("step", manifest["step"])
    if found != step:
        raise CheckpointError(
            f"{folder} has files of two checkpoints: {STATE_NAME} is of step {found!r:.100}, and "
            f"{MANIFEST_NAME} of step {step}"
        )


def copy_checkpoint(folder: Path, run_folder: Path, run_id: str | None) -> None:
    """Copy a checkpoint of another run, which has been verified, into a run folder without any.

    Args:
        run_id: the id of the folder's run, which the copy's manifest names.

    Raises:
        CheckpointError: a file has changed.
        StorageError: the disk refuses; the folder does not appear.
    """
    manifest = read_manifest(folder)
    with new_checkpoint(run_folder, manifest["step"]) as temporary:
        for name, entry in manifest["files"].items():
            with (folder / name).open("rb") as source, HashedFile(temporary / name) as copy:
                while block := source.read(1 << 24):
                    copy.write(block)
            if copy.sha256 != entry["sha256"]:
                raise CheckpointError(f"{folder / name} has changed: name another checkpoint")
        own = {**manifest, "run_id": run_id}
        del own["sha256"]
        with OutputFile(temporary / MANIFEST_NAME) as file:
            file.write(sealed(own).encode())


def _weights_name(names: Container[str]) -> str:
    """The file of a checkpoint's weights, by the names of its other files."""
    return ADAPTER_WEIGHTS_NAME if ADAPTER_CONFIG_NAME in names else WEIGHTS_NAME


def load_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, for resuming; of a sharded one all but its tensors.

    Args:
        verify: compare every file with the manifest first; False where that was just done.

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
        model = safetensors.torch.load_file(folder / _weights_name(names))
        optimizer = safetensors.torch.load_file(folder / OPTIMIZER_NAME)
    except (safetensors.SafetensorError, OSError, ModelError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    return Checkpoint({}, model, optimizer, load_trainer_state(folder))


def is_sharded_checkpoint(folder: Path) -> bool:
    """True if each process wrote its shards of a checkpoint."""
    return bool(shard_names(path.name for path in folder.iterdir()))


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """The `trainer_state` of a checkpoint that has been verified, without its tensors.

    Raises:
        CheckpointError: trainer_state.json can't be read, or is not a JSON object.
    """
    path = folder / STATE_NAME
    state = read_json_object(path, CheckpointError, "is damaged: it is not a JSON object")
    _require_objects(path, state)
    return state


def saved_vocab_multiple(folder: Path, state: Mapping[str, Any]) -> int:
    """The multiple that the vocabulary of a checkpoint's model is padded to.

    Args:
        state: the checkpoint's `trainer_state`.

    Raises:
        CheckpointError: trainer_state.json has no such number.
    """
    multiple = state.get("recipe", {}).get("efficiency", {}).get("vocab_multiple", 1)
    if type(multiple) is not int or multiple < 1:
        raise CheckpointError(
            f"{folder}: trainer_state.json is damaged: vocab_multiple is {multiple!r:.100}"
        )
    return multiple


def _require_objects(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a state whose parts are no JSON objects; their readers check the keys in them."""
    names = ("data", "guard", "loader", "random", "recipe", "schedule")
    parts = {name: state.get(name, {}) for name in names}
    if isinstance(recipe := parts["recipe"], dict):
        # A recipe may leave these out.
        optional: dict[str, Any] = {
            name: {} for name in ("model", "lora", "preference") if recipe.get(name) is None
        }
        parts |= {f"recipe.{name}": value for name, value in (recipe | optional).items()}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"{path} is damaged: '{name}' is not an object")
