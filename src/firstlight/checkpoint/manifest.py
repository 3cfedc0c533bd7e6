"""A checkpoint's folder and its manifest: a folder appears with all of its files or not at all.

The manifest has the size and SHA-256 of every file. It also has the number of this save in the run
folder, counted from 1 (`sequence`), and that of the save from which its run continued (`parent`).

It names the run that wrote it (`run_id`), so that a checkpoint that was copied from another run's
folder is neither used nor deleted. Manifests of older versions name none, and count as the run's
own.

Manifests so tell the history of a run, and which checkpoints are kept. A run that continues from an
older checkpoint, because newer ones are damaged or at a rollback, leaves the checkpoints in between
as a dead branch. Steps don't tell dead branches: the first checkpoint of the new branch may be of
an earlier step than all of the dead one; `sequence` and `parent` do.
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
#: The run folder's file with the id of the run, and that of the start that writes into the folder.
RUN_NAME = "run.json"
FORMAT = "firstlight-checkpoint"
VERSION = 2

#: End of the text of a JSON object.
_END = "\n}\n"

_STEP_FOLDER = re.compile(r"step-(\d{8,})(-replaced-[0-9a-f]{8})?", re.ASCII)


#: Errors of reading a checkpoint that is deleted meanwhile; torch's own are RuntimeErrors.
READING_ERRORS = (FirstlightError, OSError, RuntimeError)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        folder: the checkpoint's folder.
        step: the optimizer step of its run.
        sequence: the number of this save of the run folder, from 1; 0 if the manifest is damaged.
        parent: the sequence of the checkpoint from which its run went on; 0: from the start.
        val_loss: the validation loss at its step; None if it was not measured there.
        run_id: the id of the run that saved it; None of a version without ids, or damaged.
    """

    folder: Path
    step: int
    sequence: int = 0
    parent: int = 0
    val_loss: float | None = None
    run_id: str | None = None

    def leaves_behind(self, other: Saved) -> bool:
        """True if this save's run went on from before the other, which is of a dead branch."""
        return other.sequence < self.sequence and (
            other.sequence > self.parent or other.step >= self.step
        )


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder's name says; None for a folder of another name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def require_kept(checkpoint: Path) -> None:
    """Refuse the path of a checkpoint that its run has deleted; other paths pass.

    Raises:
        CheckpointError: the run's folder has no such checkpoint.
    """
    folder = checkpoint.parent
    is_of_run = step_of(checkpoint) is not None and folder.name == CHECKPOINTS and folder.is_dir()
    if is_of_run and not checkpoint.exists():
        raise CheckpointError(
            f"checkpoint {checkpoint} does not exist: a run deletes its older checkpoints "
            f"(checkpoint.keep_last, keep_every); name {folder.parent} for its newest one"
        )


@contextlib.contextmanager
def reading_checkpoint(checkpoint: Path) -> Iterator[None]:
    """A context for reading a checkpoint of another run, which may delete it meanwhile.

    Raises:
        CheckpointError: the checkpoint was deleted; in place of the error of reading it.
    """
    try:
        yield
    except READING_ERRORS:
        require_kept(checkpoint)
        raise


def step_folders(run_folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, complete or not, by name."""
    folder = run_folder / CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if step_of(path) is not None and path.is_dir())


def saved_checkpoints(run_folder: Path) -> list[Saved]:
    """The complete checkpoints of a run in the order in which they were saved.

    A checkpoint whose manifest is damaged comes after those of lower steps. Checkpoints of another
    run in the folder (see `foreign_checkpoints`) are left out.
    """
    found = _complete(run_folder)
    own = (None, _run_id(run_folder, found))
    found = [one for one in found if one.run_id in own]

    def place(saved: Saved) -> tuple[int, int]:
        below = (other.sequence for other in found if other.step <= saved.step)
        return saved.sequence or max(below), saved.step

    return sorted(found, key=place)


def foreign_checkpoints(run_folder: Path) -> list[str]:
    """A message for each checkpoint in a run folder that another run has saved."""
    found = _complete(run_folder)
    run_id = _run_id(run_folder, found)
    return [
        f"{one.folder} is a checkpoint of another run ({one.run_id}; this folder is run {run_id}'s)"
        for one in found
        if one.run_id not in (None, run_id)
    ]


def _complete(run_folder: Path) -> list[Saved]:
    """The complete checkpoints in a run folder, whatever run they are of, by name."""
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
            found.append(Saved(folder, step, sequence, parent, manifest["val_loss"], run_id))
    return found


def names_run(saved: Saved, run_id: str | None) -> bool:
    """True if a checkpoint's manifest, which may be damaged, names a run; True without an id."""
    if run_id is None:
        return True
    with contextlib.suppress(InputError):
        return run_id.encode() in read_file(saved.folder / MANIFEST_NAME, MAX_JSON_BYTES)
    return False


def run_id_of(run_folder: Path) -> str | None:
    """The id of the run that a folder is of; None for a folder without any."""
    return _run_id(run_folder, _complete(run_folder))


def _run_id(run_folder: Path, found: Sequence[Saved]) -> str | None:
    """The id in run.json; if the file is missing or damaged, the id of the last save with one."""
    with contextlib.suppress(InputError):
        content = read_json(run_folder / RUN_NAME)
        if isinstance(content, dict) and isinstance(content.get("run_id"), str):
            return str(content["run_id"])
    named = [one for one in found if one.run_id is not None]
    return max(named, key=lambda one: one.sequence).run_id if named else None


def sequence_at(saved: Sequence[Saved], step: int | None) -> int:
    """The sequence of the checkpoint of a step, or else of the last one before; 0: none.

    Args:
        saved: the checkpoints of a run.
        step: the step; None is the step of the last save.
    """
    return max((one.sequence for one in saved if step is None or one.step <= step), default=0)


def sealed(content: Mapping[str, Any]) -> str:
    """A manifest's text: its content as JSON, and as the last key the SHA-256 of that text."""
    return _seal(json_text(content))


def _seal(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text.removesuffix(_END)},{_END[:-2]}  "sha256": "{digest}"{_END}'


def _is_sealed(text: str) -> bool:
    """True if not one character of a manifest's text is changed."""
    return text == _seal(text[: -len(_seal(_END))] + _END)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, verified by its own SHA-256.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another format or version.
    """
    path = folder / MANIFEST_NAME
    require_plain_file(path)
    try:
        # Once: it may be deleted any time, and other bytes may take its place.
        content = read_file(path, MAX_JSON_BYTES)
        manifest = parse_json(path, content)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has version {manifest.get('version')}, and this firstlight reads version "
            f"{VERSION}: use the firstlight that wrote it"
        )
    if not _is_sealed(content.decode(errors="replace")):
        raise CheckpointError(f"{path} is damaged: its sha256 is not that of its content")
    _require_fields(path, manifest)
    if step_of(folder) not in (None, manifest["step"]):
        raise CheckpointError(f"{folder} holds step {manifest['step']}, unlike its name: rename it")
    return manifest


def _require_fields(path: Path, manifest: dict[str, Any]) -> None:
    loss, files = manifest.get("val_loss", False), manifest.get("files")
    # A bool is an int to Python.
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
        raise CheckpointError(f"{path} lacks keys of a checkpoint's manifest")


def require_plain_file(path: Path) -> None:
    """Refuse a path that is a link, or anything but a file.

    Raises:
        CheckpointError: the path is missing, a link, or no file.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {describe_os_error(error)}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is a link or not a file: copy the file itself there")


@contextlib.contextmanager
def new_checkpoint(run_folder: Path, step: int) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes the checkpoint of a step when the block ends
    well. `OutputFile` writes all files in it, the manifest last: see `write_manifest`.

    Raises:
        StorageError: the disk refuses; the checkpoint does not appear.
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
    """Write the manifest, which makes a folder a checkpoint.

    Args:
        folder: the temporary folder of `new_checkpoint`.
        marks: `file_marks` of all files in it.
        val_loss: the validation loss at this step.
        after: the step of the checkpoint from which the run went on: later saves are of a dead
            branch. None: the last save.
        run_id: the id of the run that saves.

    Raises:
        OSError: the disk refuses.
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
    """The manifest's entries of files: `bytes` and `sha256` by name."""
    return {file.path.name: {"bytes": file.size, "sha256": file.sha256} for file in files}


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[HashedFile]:
    """Write text files into a folder; return them, for their sizes and hashes.

    Raises:
        OSError: the disk refuses.
    """
    return [_write_text(folder / name, content) for name, content in texts.items()]


def _write_text(path: Path, content: str) -> HashedFile:
    with HashedFile(path) as file:
        file.write(content.encode("utf-8"))
    return file


def own_past(found: Sequence[Saved]) -> list[Saved]:
    """The checkpoints with a sound manifest that are not of a dead branch, in the given order.

    A checkpoint of a later step than one saved after it is of a dead branch as well.
    """
    saved = _line(found)
    return [
        one for one in found if one.sequence and not any(two.leaves_behind(one) for two in saved)
    ]


def best_first(past: Sequence[Saved]) -> list[Saved]:
    """The checkpoints whose validation loss was measured at their step, the lowest loss first; of
    equal losses the last save first."""
    measured = [(one.val_loss, -one.sequence, one) for one in past if one.val_loss is not None]
    return [one for _, _, one in sorted(measured, key=lambda entry: entry[:2])]


def best_saved(run_folder: Path) -> list[Saved]:
    """`best_first` of a run's own past, by the manifests alone."""
    return best_first(own_past(saved_checkpoints(run_folder)))


def _line(found: Sequence[Saved]) -> list[Saved]:
    """The checkpoints that led to the newest one, newest first. Only these tell what is dead: a
    checkpoint of a dead branch doesn't, one that was replaced at the same step still does."""
    line: list[Saved] = []
    for one in sorted(found, key=lambda one: one.sequence, reverse=True):
        if one.sequence and (not line or one.sequence <= line[-1].parent):
            line.append(one)
    return line
