"""Create checkpoint folders and read their manifests. A folder and all of its files are created
atomically.

A manifest contains the size and SHA-256 of every file. The checkpoints in a run folder are numbered
from 1 in the order in which they were saved: `sequence` is the number of the checkpoint, and
`parent` is the number of the checkpoint from which the run continued. `run_id` is the id of the run
that wrote the manifest. It prevents a checkpoint that was copied from the folder of another run
from being used or deleted. Manifests of older versions have no `run_id` and are assumed to belong
to the run in the folder.

Together, the manifests record the history of a run. If a run continues from an older checkpoint,
because newer ones are damaged or after a rollback, the newer checkpoints belong to a dead branch.
They are identified by `sequence` and `parent`. Comparing steps would not be sufficient, because the
first checkpoint of the new branch may have an earlier step than all checkpoints of the dead branch.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, FirstlightError, InputError, describe_os_error
from firstlight.files.atomic import (
    MAX_JSON_BYTES,
    json_text,
    new_folder,
    parse_json,
    read_file,
    read_json,
    storage_errors,
)
from firstlight.files.disk import HashedFile, OutputFile

CHECKPOINTS = "checkpoints"
MANIFEST_NAME = "manifest.json"
#: Name of the file in a run folder that contains the id of the run and the id of its latest start.
RUN_NAME = "run.json"
FORMAT = "firstlight-checkpoint"
VERSION = 2

#: Characters with which `json_text` ends every JSON object.
_END = "\n}\n"

_STEP_FOLDER = re.compile(r"step-(\d{8,})(-replaced-[0-9a-f]{8})?", re.ASCII)


#: Errors that can occur if a checkpoint is deleted while it is being read. RuntimeError is raised
#: by torch.
READING_ERRORS = (FirstlightError, OSError, RuntimeError)


@dataclass(frozen=True)
class Saved:
    """Description of a complete checkpoint, read from its manifest.

    Attributes:
        folder: the checkpoint's folder.
        step: number of completed optimizer steps.
        sequence: one-based number of this checkpoint in the order of saving; 0 if the manifest is
            damaged.
        parent: `sequence` of the checkpoint from which the run continued; 0 if the run started from
            scratch.
        val_loss: validation loss at this step, or None if it was not measured. In a run with kept
            text, the value that `TrainState.val_loss` describes.
        run_id: id of the run that saved the checkpoint; None if the manifest is damaged or was
            written by a version without ids.
    """

    folder: Path
    step: int
    sequence: int = 0
    parent: int = 0
    val_loss: float | None = None
    run_id: str | None = None

    def leaves_behind(self, other: Saved) -> bool:
        """Return True if this checkpoint shows that `other` is on an abandoned branch of the run.
        `other` must have been saved before this checkpoint. It is on an abandoned branch if the run
        then went back to a checkpoint that was saved before `other`, and continued from there to
        this checkpoint. It is also on an abandoned branch if its step is the same as this
        checkpoint's step or later.
        """
        return other.sequence < self.sequence and (
            other.sequence > self.parent or other.step >= self.step
        )


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return the checkpoint folder of a step."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def require_kept(checkpoint: Path) -> None:
    """Raise an error if a path refers to a checkpoint that its run has deleted. Every other path is
    accepted.

    Raises:
        CheckpointError: the path has the form of a checkpoint in a run folder, but does not exist.
    """
    folder = checkpoint.parent
    is_of_run = step_of(checkpoint) is not None and folder.name == CHECKPOINTS and folder.is_dir()
    if is_of_run and not checkpoint.exists():
        raise CheckpointError(
            f"checkpoint {checkpoint} does not exist: a run deletes its older checkpoints "
            f"(checkpoint.keep_last, keep_every); use {folder.parent} for its newest checkpoint"
        )


@contextlib.contextmanager
def reading_checkpoint(checkpoint: Path) -> Iterator[None]:
    """If the run deletes the checkpoint during the `with` block, replace the resulting error with
    an error that explains what happened.

    Raises:
        CheckpointError: the checkpoint was deleted. This error replaces the original one.
    """
    try:
        yield
    except READING_ERRORS:
        require_kept(checkpoint)
        raise


def step_folders(run_folder: Path) -> list[Path]:
    """Return all folders that are named like a checkpoint, including incomplete ones, sorted by
    name.
    """
    folder = run_folder / CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if step_of(path) is not None and path.is_dir())


def saved_checkpoints(run_folder: Path) -> list[Saved]:
    """Return the complete checkpoints of a run in the order in which they were saved.

    A checkpoint with a damaged manifest is placed after all checkpoints with lower steps.
    Checkpoints of other runs (see `foreign_checkpoints`) are omitted.
    """
    found = _complete(run_folder)
    own = (None, _run_id(run_folder, found))
    found = [one for one in found if one.run_id in own]

    def place(saved: Saved) -> tuple[int, int]:
        below = (other.sequence for other in found if other.step <= saved.step)
        return saved.sequence or max(below), saved.step

    return sorted(found, key=place)


def foreign_checkpoints(run_folder: Path) -> list[str]:
    """Return a message for each checkpoint in a run folder that was saved by another run."""
    found = _complete(run_folder)
    run_id = _run_id(run_folder, found)
    return [
        f"{one.folder} is a checkpoint of another run ({one.run_id}; this folder belongs to run "
        f"{run_id})"
        for one in found
        if one.run_id not in (None, run_id)
    ]


def _complete(run_folder: Path) -> list[Saved]:
    """Return the complete checkpoints of all runs in a run folder, sorted by name."""
    found: list[Saved] = []
    for folder in step_folders(run_folder):
        step = step_of(folder)
        if step is None or not (folder / MANIFEST_NAME).is_file():
            continue
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            found.append(Saved(folder, step))
        else:
            sequence, parent = manifest["sequence"], manifest["parent"]
            run_id = manifest.get("run_id")
            found.append(
                Saved(folder, step, sequence, parent, val_loss=manifest["val_loss"], run_id=run_id)
            )
    return found


def names_run(saved: Saved, run_id: str | None) -> bool:
    """Return True if `run_id` is None or occurs in the text of a checkpoint's manifest, which may
    be damaged.
    """
    if run_id is None:
        return True
    with contextlib.suppress(InputError):
        return run_id.encode() in read_file(saved.folder / MANIFEST_NAME, MAX_JSON_BYTES)
    return False


def run_id_of(run_folder: Path) -> str | None:
    """Return the id of the run in a folder, or None if neither run.json nor any checkpoint contains
    an id.
    """
    return _run_id(run_folder, _complete(run_folder))


def _run_id(run_folder: Path, found: Sequence[Saved]) -> str | None:
    """Return the run id in run.json. If this file is missing or damaged, return the run id in the
    latest checkpoint that has one, or None.
    """
    with contextlib.suppress(InputError):
        content = read_json(run_folder / RUN_NAME)
        if isinstance(content, dict) and isinstance(content.get("run_id"), str):
            return str(content["run_id"])
    named = [one for one in found if one.run_id is not None]
    return max(named, key=lambda one: one.sequence).run_id if named else None


def sequence_at(saved: Sequence[Saved], step: int | None) -> int:
    """Return the `sequence` of the last saved checkpoint at or before a given step, or 0 if there
    is none.

    Args:
        saved: the checkpoints of a run.
        step: last step that is considered; None to consider all checkpoints.
    """
    return max((one.sequence for one in saved if step is None or one.step <= step), default=0)


def sealed(content: Mapping[str, Any]) -> str:
    """Serialise a manifest as JSON, and add the SHA-256 of this JSON as its last entry."""
    return _seal(json_text(content))


def _seal(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text.removesuffix(_END)},{_END[:-2]}  "sha256": "{digest}"{_END}'


def _is_sealed(text: str) -> bool:
    """Return True if the SHA-256 entry of a manifest matches the rest of the manifest's text."""
    return text == _seal(text[: -len(_seal(_END))] + _END)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and verify it against the SHA-256 that it contains.

    Raises:
        CheckpointError: the manifest is missing or damaged, or has a different format or version.
    """
    path = folder / MANIFEST_NAME
    require_plain_file(path)
    try:
        # Read the file only once, because it may be deleted or replaced by another process at any
        # time.
        content = read_file(path, MAX_JSON_BYTES)
        manifest = parse_json(path, content)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has version {manifest.get('version')}, but this version of firstlight reads "
            f"version {VERSION}: use the version of firstlight that wrote it"
        )
    if not _is_sealed(content.decode(errors="replace")):
        raise CheckpointError(f"{path} is damaged: its sha256 does not match its content")
    _require_fields(path, manifest)
    if step_of(folder) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{folder} contains step {manifest['step']}, which does not match its name: rename it"
        )
    return manifest


def _require_fields(path: Path, manifest: dict[str, Any]) -> None:
    loss, files = manifest.get("val_loss", False), manifest.get("files")
    # Reject booleans, which are instances of int in Python.
    sound = loss is None or type(loss) is float
    sound = sound and isinstance(manifest.get("run_id", ""), str)
    for name, least in (("step", 0), ("sequence", 1), ("parent", 0)):
        sound = sound and type(manifest.get(name)) is int and manifest[name] >= least
    sound = sound and isinstance(files, dict)
    for entry in files.values() if sound and files else ():
        sound = (
            sound
            and isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and type(entry.get("sha256")) is str
        )
    if not sound:
        raise CheckpointError(f"{path} lacks required keys of a checkpoint's manifest")


def require_plain_file(path: Path) -> None:
    """Raise an error if a path is not a regular file.

    Raises:
        CheckpointError: the path does not exist, is a symbolic link, or is not a regular file.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {describe_os_error(error)}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path} is not a regular file (a link?): replace it with a copy of the file"
        )


@contextlib.contextmanager
def new_checkpoint(run_folder: Path, step: int) -> Iterator[Path]:
    """Create an empty temporary folder that becomes the checkpoint of a step if the `with` block
    ends without an error. The caller must write files with `OutputFile`, which syncs them, and must
    write the manifest last.

    Raises:
        StorageError: a file system error occurred and no checkpoint was created.
    """
    folder = checkpoint_folder(run_folder, step)
    aside = folder.with_name(f"{folder.name}-replaced-{secrets.token_hex(4)}")
    with (
        storage_errors(folder),
        new_folder(folder, replace=True, aside=aside, synced=True) as temporary,
    ):
        yield temporary


def write_manifest(
    folder: Path,
    run_folder: Path,
    step: int,
    marks: Mapping[str, Mapping[str, Any]],
    *,
    val_loss: float | None = None,
    after: int | None = None,
    run_id: str | None = None,
) -> None:
    """Write the manifest of a checkpoint. A checkpoint is complete if it has a manifest.

    Args:
        folder: the temporary folder of `new_checkpoint`.
        run_folder: the run folder, whose checkpoints determine `sequence` and `parent`.
        step: number of completed optimizer steps.
        marks: the result of `file_marks` for all files in `folder`.
        val_loss: validation loss at this step, or None if it was not measured.
        after: see `save_checkpoint`.
        run_id: id of the run that saves the checkpoint; None to omit the key.

    Raises:
        OSError: a file system error.
    """
    saved = saved_checkpoints(run_folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        **({} if run_id is None else {"run_id": run_id}),
        "sequence": sequence_at(saved, None) + 1,
        "parent": sequence_at(saved, after),
        "val_loss": None if val_loss is None else float(val_loss),
        "files": {name: marks[name] for name in sorted(marks)},
    }
    with OutputFile(folder / MANIFEST_NAME) as file:
        file.write(sealed(manifest).encode())


def file_marks(files: Iterable[HashedFile]) -> dict[str, dict[str, Any]]:
    """Return the manifest entries for files, as a dict that maps each file name to {"bytes": size,
    "sha256": hex digest}.
    """
    return {file.path.name: {"bytes": file.size, "sha256": file.sha256} for file in files}


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[HashedFile]:
    """Write text files to a folder. Return the written files, which can be passed to `file_marks`.

    Raises:
        OSError: a file system error.
    """
    return [_write_text(folder / name, content) for name, content in texts.items()]


def _write_text(path: Path, content: str) -> HashedFile:
    with HashedFile(path) as file:
        file.write(content.encode("utf-8"))
    return file


def own_past(found: Sequence[Saved]) -> list[Saved]:
    """Return the checkpoints that have an undamaged manifest and do not belong to a dead branch, in
    their original order.

    A checkpoint also belongs to a dead branch if a checkpoint that was saved later has the same or
    an earlier step.
    """
    saved = _line(found)
    return [
        one for one in found if one.sequence and not any(two.leaves_behind(one) for two in saved)
    ]


def best_first(past: Sequence[Saved]) -> list[Saved]:
    """Return the checkpoints that have a validation loss, lowest loss first. If losses are equal,
    the checkpoint that was saved last comes first.
    """
    measured = [(one.val_loss, -one.sequence, one) for one in past if one.val_loss is not None]
    return [one for _, _, one in sorted(measured, key=lambda entry: entry[:2])]


def best_saved(run_folder: Path) -> list[Saved]:
    """Return the checkpoints of a run that have a validation loss and do not belong to a dead
    branch, lowest loss first. Only the manifests are read; the files are not verified.
    """
    return best_first(own_past(saved_checkpoints(run_folder)))


def _line(found: Sequence[Saved]) -> list[Saved]:
    """Return the newest checkpoint and all of its ancestors, found by following `parent`, newest
    first. The result includes checkpoints that were replaced at the same step. All undamaged
    checkpoints that are not in the result belong to a dead branch.
    """
    line: list[Saved] = []
    for one in sorted(found, key=lambda one: one.sequence, reverse=True):
        if one.sequence and (not line or one.sequence <= line[-1].parent):
            line.append(one)
    return line
