"""Checkpoints: complete or not there at all, checked before use.

    RUN/checkpoints/step-00000200/
        config.json, generation_config.json, tokenizer.json, tokenizer_config.json
        model.safetensors       a valid Hugging Face model folder up to here
        optimizer.safetensors   moments and counters by parameter name; random-number states
        trainer_state.json      step, tokens seen, data position, the resolved recipe
        manifest.json           size and sha256 of every file above; written last

A checkpoint is written under a temporary name, synced, and renamed. A folder without its
manifest is no checkpoint.
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
import torch
from torch import Tensor

from firstlight.console import say
from firstlight.errors import CheckpointError, InputError
from firstlight.files import (
    new_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    sha256_of,
    storage_errors,
    write_json,
)
from firstlight.hub import find_model_folder
from firstlight.huggingface import CONFIG_NAME
from firstlight.lora import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from firstlight.stored import WEIGHTS_NAME, save_tensors

CHECKPOINTS = "checkpoints"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
MANIFEST_NAME = "manifest.json"
FORMAT = "firstlight-checkpoint"
VERSION = 1

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's content, as written and as read.

    Attributes:
        files: text files by name: config, tokenizer.
        model: tensors of model.safetensors; with adapter_config.json among the files, those of
            adapter_model.safetensors.
        optimizer: tensors of optimizer.safetensors.
        trainer_state: everything else; JSON.
    """

    files: Mapping[str, str]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    trainer_state: Mapping[str, Any]


def save_checkpoint(run_folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint; return its folder.

    Raises:
        CheckpointError: a weight is not a finite number: such a checkpoint is never published.
        StorageError: the disk refuses; the folder does not appear.
    """
    for name, tensor in checkpoint.model.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"step {step}: tensor {name} is not finite; no checkpoint was written"
            )
    folder = checkpoint_folder(run_folder, step)
    # What is there already is damaged: a run goes on from its newest checkpoint that is not.
    with new_folder(folder, replace=True) as temporary:
        for name, content in checkpoint.files.items():
            (temporary / name).write_text(content, encoding="utf-8")
        save_tensors(checkpoint.model, temporary / _weights_name(checkpoint.files))
        save_tensors(checkpoint.optimizer, temporary / OPTIMIZER_NAME)
        state = json.dumps(checkpoint.trainer_state, indent=2, allow_nan=False)
        (temporary / STATE_NAME).write_text(state + "\n", encoding="utf-8")
        entries = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(temporary.iterdir())
        }
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": entries}
        write_json(temporary / MANIFEST_NAME, manifest)
    return folder


def checkpoint_bytes(model_parameters: int, optimizer_state_bytes: int) -> int:
    """About how large a checkpoint becomes: fp32 weights and optimizer state."""
    return 4 * model_parameters + optimizer_state_bytes


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folder = run_folder / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _STEP_FOLDER.fullmatch(path.name)) and (path / MANIFEST_NAME).is_file()
    ]
    return [path for _, path in sorted(found)]


def verify_checkpoint(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: a file is missing, damaged or of another size (named).
    """
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST_NAME} is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} is of version {manifest.get('version')}; this firstlight reads {VERSION}"
        )
    for name in (CONFIG_NAME, _weights_name(files), OPTIMIZER_NAME, STATE_NAME):
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST_NAME} does not list {name}")
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if not isinstance(entry, dict) or path.stat().st_size != entry.get("bytes"):
            raise CheckpointError(f"{path} is damaged: its size is not the manifest's")
        if sha256_of(path) != entry.get("sha256"):
            raise CheckpointError(f"{path} is damaged: its sha256 is not the manifest's")


def _weights_name(names: Container[str]) -> str:
    """The file of a checkpoint's weights, by the names of its other files."""
    return ADAPTER_WEIGHTS_NAME if ADAPTER_CONFIG_NAME in names else WEIGHTS_NAME


def newest_checkpoint(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, or None, and what is wrong with newer ones.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    problems: list[str] = []
    for folder in reversed(list_checkpoints(run_folder)):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return folder, problems
    if problems:
        raise CheckpointError(f"no checkpoint of {run_folder} can be used: {'; '.join(problems)}")
    return None, []


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint that has been verified, for resuming.

    Raises:
        CheckpointError: a file can't be read.
    """
    try:
        names = [path.name for path in folder.iterdir()]
        model = safetensors.torch.load_file(folder / _weights_name(names))
        optimizer = safetensors.torch.load_file(folder / OPTIMIZER_NAME)
        state = read_json(folder / STATE_NAME)
    except (safetensors.SafetensorError, OSError, InputError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    return Checkpoint({}, model, optimizer, state)


def prune_checkpoints(run_folder: Path, keep_last: int, newest_step: int) -> None:
    """Delete all but the `keep_last` newest checkpoints, and what killed runs left behind.

    Args:
        newest_step: of the checkpoint just written. Those of later steps go, and don't count:
            they were damaged when the run was taken up from an earlier one.
    """
    newest = checkpoint_folder(run_folder, newest_step)
    checkpoints = list_checkpoints(run_folder)
    kept = checkpoints[: checkpoints.index(newest) + 1][-keep_last:]
    with storage_errors(run_folder):
        for folder in checkpoints:
            if folder not in kept:
                remove_folder(folder)
        remove_leftovers(run_folder / CHECKPOINTS)


def resolve_model_folder(name: str | Path) -> Path:
    """The model folder that CHECKPOINT means: a run folder's newest complete checkpoint, a
    checkpoint folder, any Hugging Face model folder, or a hub id.

    Raises:
        CheckpointError: a run folder without a usable checkpoint.
        ModelError: nothing is there.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / CONFIG_NAME).is_file() and (path / CHECKPOINTS).is_dir():
        newest, problems = newest_checkpoint(path)
        for problem in problems:
            say(f"warning: {problem}: an older checkpoint is taken")
        if newest is None:
            raise CheckpointError(f"run folder {path} has no complete checkpoint yet")
        return newest
    folder = find_model_folder(name)
    if (folder / MANIFEST_NAME).is_file() and (folder / STATE_NAME).is_file():
        verify_checkpoint(folder)
    return folder


def trained_on(folder: Path) -> dict[str, Any]:
    """`dir`, `seq_len` and `document_masking` of the data that a checkpoint was trained on; {} for
    other folders."""
    if not (folder / STATE_NAME).is_file():
        return {}
    try:
        state = read_json(folder / STATE_NAME)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    data = state.get("data") if isinstance(state, dict) else None
    return data if isinstance(data, dict) else {}
