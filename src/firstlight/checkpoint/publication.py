"""How a checkpoint appears in its run folder: all of it, or nothing."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from firstlight.checkpoint.history import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    saved_checkpoints,
    sealed,
    sequence_at,
)
from firstlight.files.atomic import new_folder, storage_errors
from firstlight.files.disk import HashedFile, OutputFile


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
) -> None:
    """Write what makes a folder a checkpoint.

    Args:
        folder: that of `new_checkpoint`.
        marks: `file_marks` of all files in it.
        val_loss: the validation loss at this step.
        after: the step of the checkpoint after which the run went on: those saved since then
            are of a dead branch. None: the last one saved.

    Raises:
        OSError: the disk refuses.
    """
    saved = saved_checkpoints(run_folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "sequence": sequence_at(saved, None) + 1,
        "parent": sequence_at(saved, after),
        "val_loss": None if val_loss is None else float(val_loss),
        "files": {name: marks[name] for name in sorted(marks)},
    }
    with OutputFile(folder / MANIFEST_NAME) as file:
        file.write(sealed(manifest).encode())


def file_marks(files: Iterable[HashedFile]) -> dict[str, dict[str, Any]]:
    """What the manifest says of files: `bytes` and `sha256` by name."""
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


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"
