"""Which checkpoints a run has, and which of them are its own past.

Each manifest says which save of the run folder it is, counted from 1 (`sequence`), and after which
one its run went on (`parent`). A run that goes on from an older checkpoint, because newer ones are
damaged or at a rollback, leaves those in between behind as a dead branch. Steps don't tell:
the first checkpoint of the new branch may be of an earlier step than all of the dead one.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, InputError, describe_os_error
from firstlight.files.atomic import json_text, read_json

CHECKPOINTS = "checkpoints"
MANIFEST_NAME = "manifest.json"
FORMAT = "firstlight-checkpoint"
VERSION = 2

#: How the text of a JSON object ends.
_END = "\n}\n"

_STEP_FOLDER = re.compile(r"step-(\d{8,})(-replaced-[0-9a-f]{8})?", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, by its manifest.

    Attributes:
        folder: where it lies.
        step: of its run.
        sequence: which save of the run folder it is; 0 where the manifest is damaged.
        parent: the sequence of the checkpoint after which its run went on; 0: from the start.
        val_loss: the validation loss at its step, if it was measured there.
    """

    folder: Path
    step: int
    sequence: int = 0
    parent: int = 0
    val_loss: float | None = None

    def leaves_behind(self, other: Saved) -> bool:
        """Whether this one's run went on from before the other: that is of a dead branch."""
        return other.sequence < self.sequence and (
            other.sequence > self.parent or other.step >= self.step
        )


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder's name says; None for a folder of another name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(run_folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, complete or not, by name."""
    folder = run_folder / CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if step_of(path) is not None and path.is_dir())


def saved_checkpoints(run_folder: Path) -> list[Saved]:
    """The complete checkpoints of a run in the order in which they were saved.

    One whose manifest is damaged stands after those of lower steps.
    """
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
            found.append(Saved(folder, step, sequence, parent, manifest["val_loss"]))

    def place(saved: Saved) -> tuple[int, int]:
        below = (other.sequence for other in found if other.step <= saved.step)
        return saved.sequence or max(below), saved.step

    return sorted(found, key=place)


def own_past(found: Sequence[Saved]) -> list[Saved]:
    """Those with a sound manifest that are not of a dead branch, in the order in which they come.

    A checkpoint of a later step than one saved after it is of a dead branch as well.
    """
    saved = _line(found)
    return [
        one for one in found if one.sequence and not any(two.leaves_behind(one) for two in saved)
    ]


def best_first(past: Sequence[Saved]) -> list[Saved]:
    """Those whose validation loss was measured at their step, the lowest first; of equal ones the
    one saved last."""
    measured = [(one.val_loss, -one.sequence, one) for one in past if one.val_loss is not None]
    return [one for _, _, one in sorted(measured, key=lambda entry: entry[:2])]


def best_saved(run_folder: Path) -> list[Saved]:
    """`best_first` of what a run has been through, by the manifests alone."""
    return best_first(own_past(saved_checkpoints(run_folder)))


def _line(found: Sequence[Saved]) -> list[Saved]:
    """What the newest one's run went through, from the newest back: dead branches don't tell
    what is dead, but a checkpoint that was replaced by one of the same step still does."""
    line: list[Saved] = []
    for one in sorted(found, key=lambda one: one.sequence, reverse=True):
        if one.sequence and (not line or one.sequence <= line[-1].parent):
            line.append(one)
    return line


def sequence_at(saved: Sequence[Saved], step: int | None) -> int:
    """The sequence of the checkpoint of a step, or else of the last one before; 0: none.

    Args:
        step: None is that of the last one saved.
    """
    return max((one.sequence for one in saved if step is None or one.step <= step), default=0)


def sealed(content: Mapping[str, Any]) -> str:
    """A manifest's text: its content as JSON, and as the last key the SHA-256 of that text."""
    return _seal(json_text(content))


def _seal(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text.removesuffix(_END)},{_END[:-2]}  "sha256": "{digest}"{_END}'


def _is_sealed(text: str) -> bool:
    """Whether not one character of a manifest's text is changed."""
    return text == _seal(text[: -len(_seal(_END))] + _END)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: not one byte of it is changed.

    Raises:
        CheckpointError: it is missing, damaged, or of another format or version.
    """
    path = folder / MANIFEST_NAME
    require_plain_file(path)
    try:
        manifest = read_json(path)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} is of version {manifest.get('version')}; this firstlight reads {VERSION}"
        )
    if not _is_sealed(path.read_bytes().decode(errors="replace")):
        raise CheckpointError(f"{path} is damaged: its sha256 is not that of its content")
    _require_fields(path, manifest)
    if step_of(folder) not in (None, manifest["step"]):
        raise CheckpointError(f"{folder} is not what its name says, but of step {manifest['step']}")
    return manifest


def _require_fields(path: Path, manifest: dict[str, Any]) -> None:
    loss, files = manifest.get("val_loss", False), manifest.get("files")
    # A bool is an int to Python.
    sound = loss is None or type(loss) is float
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
        raise CheckpointError(f"{path} lacks what a checkpoint's manifest has")


def require_plain_file(path: Path) -> None:
    """Refuse what is no file, or only a link to one.

    Raises:
        CheckpointError: it is so.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {describe_os_error(error)}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is a link or no file: a checkpoint's files lie in it")
