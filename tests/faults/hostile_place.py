"""Where hostile files are made: a folder a case, with sound material to spoil."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from firstlight.checkpoint.manifest import sealed

SPARSE_BYTES = 1 << 30
DEEP = 100_000


class Bomb:
    """Says so when it is unpickled: it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@dataclass(frozen=True)
class Place:
    """The folder of one case.

    Attributes:
        folder: all that a case may change.
        outside: a folder beside it; `secret` lies in it.
        sound: a run of some steps ("run"), its checkpoint as a model folder ("model"), the data
            ("data") and a tokenizer ("tokenizer").
        recipe: of that run.
    """

    folder: Path
    outside: Path
    sound: Mapping[str, Path]
    recipe: Mapping[str, Any]

    @property
    def secret(self) -> Path:
        """A file that nothing may open."""
        return self.outside / "secret"

    def copy(self, kind: str) -> Path:
        """A copy of sound material, to be spoiled."""
        # Without what vouches for its files: they are to be looked at themselves.
        left_out = ["manifest.json", "optimizer.*", "trainer_state.json"] if kind == "model" else []
        ignored = shutil.ignore_patterns(*left_out)
        return Path(shutil.copytree(self.sound[kind], self.folder / kind, ignore=ignored))

    @property
    def checkpoint(self) -> Path:
        """The copied run's newest checkpoint."""
        return max((self.folder / "run" / "checkpoints").iterdir())

    def recipe_file(self, **sections: Any) -> Path:
        """The recipe of the copied run, with other values in some sections (None: left out)."""
        values = json.loads(json.dumps(self.recipe))
        values["run"]["dir"] = str(self.folder / "run")
        for section, changed in sections.items():
            if changed is None:
                del values[section]
            else:
                values[section] = {**values.get(section, {}), **changed}
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def file(self, name: str, content: bytes | str) -> Path:
        """A file in the case's folder."""
        path = self.folder / name
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return path

    def pickled(self) -> bytes:
        """A pickle that runs code when it is read."""
        return pickle.dumps({"weights": [1.0], "bomb": Bomb(self.outside / "executed")})


@dataclass(frozen=True)
class Opened:
    """What is to be opened, and with which of the driver's calls."""

    call: str
    path: Path


Build = Callable[[Place], Opened]


def without(path: Path) -> Path:
    """The place of a file that is no more."""
    path.unlink(missing_ok=True)
    return path


def sparse(path: Path, size: int = SPARSE_BYTES, start: bytes = b"") -> Path:
    """A file of many bytes that takes no room on the disk."""
    with open(without(path), "wb") as file:
        file.write(start)
        file.truncate(size)
    return path


def fifo(path: Path) -> Path:
    """A pipe in the place of a file: whoever opens it waits without end."""
    os.mkfifo(without(path))
    return path


def folder_instead(path: Path) -> Path:
    """A folder in the place of a file."""
    without(path).mkdir()
    return path


def link(path: Path, target: Path | str) -> Path:
    """A symbolic link in the place of a file."""
    without(path).symlink_to(target)
    return path


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """A JSON file with something done to its content."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def set_json(path: Path, **values: Any) -> None:
    """A JSON object with other values."""
    change_json(path, lambda content: content.update(values))


def add_json_text(path: Path, text: str) -> None:
    """A JSON object with more at its end, as text: what Python's writer would not write."""
    content = path.read_text(encoding="utf-8").rstrip()
    assert content.endswith("}")
    path.write_text(f"{content[:-1]}, {text}}}", encoding="utf-8")


def reseal(checkpoint: Path, change: Callable[[Any], object] = lambda _: None) -> None:
    """A checkpoint's manifest that vouches for its files as they are: whoever can write the one
    can write the other."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in manifest["files"].items():
        file = checkpoint / name
        if file.is_file() and file.stat().st_size < 1 << 27:
            content = file.read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("sha256")
    change(manifest)
    path.write_text(sealed(manifest), encoding="utf-8")


def reseal_data(folder: Path, change: Callable[[Any], object] = lambda _: None) -> None:
    """A data manifest that vouches for its shards as they are."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            content = (folder / shard["file"]).read_bytes()
            shard |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def safetensors_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header, which may lie about its length."""
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data
