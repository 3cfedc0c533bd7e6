"""The Hugging Face hub: downloads happen here and nowhere else."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
from pathlib import Path
from typing import Any

from firstlight.errors import (
    FirstlightError,
    ModelError,
    StorageError,
    describe_os_error,
    first_line,
)

#: Files of a model folder: never pickled weights, never code.
_WEIGHTS = "*.safetensors"
_DOWNLOADED = ["*.json", _WEIGHTS, "*.jinja", "tokenizer.model", "merges.txt"]
#: Pickled weights, for a conversion of a model that has no others.
_PICKLED = ["pytorch_model*.bin"]

#: Copies of the same weights that some models keep for other programs.
_LEFT_OUT = ["*/*", "consolidated*.safetensors"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
#: Folders that people write runs and models into, and no owner of models.
_LOCAL_FOLDERS = frozenset(
    ("run", "runs", "checkpoints", "out", "output", "outputs", "mine", "models", "data", "demo")
)

#: Errors of writing a download, not of receiving it.
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)


def find_model_folder(
    name: str | Path, *, pickled: bool = False, weights: bool = True, typed: bool = True
) -> Path:
    """The folder of a local model, or of a hub id after its download.

    A hub id is OWNER/NAME (`openai-community/gpt2`), followed by @REVISION for another branch,
    tag or commit than the newest of `main`. The revision begins at the first "@", which no name
    contains, so that it may itself contain "@" and "/" (`OWNER/NAME@refs/pr/1`).

    huggingface_hub does the downloading, with its cache (`HF_HOME`), its token (`HF_TOKEN` or
    `hf auth login`) and its other settings (`HF_ENDPOINT`, `HF_HUB_OFFLINE`). Files in the cache
    are not downloaded again, and are used without a message if the hub can't be reached. With
    `pickled`, a `pytorch_model.bin` is downloaded where there are no safetensors. Without
    `weights`, only the other files are: config.json and the tokenizer.

    A name that was `typed` by a person and looks like a mistyped path (see `_is_mistyped_path`) is
    not asked for at the hub; with a revision (`OWNER/NAME@main`) it is.

    Raises:
        ModelError: neither a folder nor something that can be downloaded.
        StorageError: the cache can't be written.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    repository, at, revision = text.partition("@")
    looks_like_hub_id = _HUB_ID.fullmatch(repository) is not None and not (at and not revision)
    hint = "" if path.exists() else _near(path)
    is_path = typed and not at and _is_mistyped_path(path, hint)
    if path.exists() or not looks_like_hub_id or is_path:
        problem = (
            "is a file, not a folder (a model's folder is named whole; `firstlight convert` reads "
            "files of nanoGPT and LLMs-from-scratch)"
            if path.exists()
            else "does not exist"
        )
        if not path.exists() and "/" not in text:
            hint = f"{hint}; a model of the hub is OWNER/NAME, as openai-community/gpt2"
        elif not path.exists() and looks_like_hub_id:
            hint = f"{hint}: train it first, or write {text}@main for the hub's model of that name"
        raise ModelError(f"model folder {text} {problem}{hint}")
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"revision": revision} if revision else {}
    patterns = _DOWNLOADED if weights else [p for p in _DOWNLOADED if p != _WEIGHTS]
    try:
        options["ignore_patterns"] = _LEFT_OUT
        folder = Path(snapshot_download(repository, allow_patterns=patterns, **options))
        if pickled and not any(folder.glob("*.safetensors")):
            snapshot_download(repository, allow_patterns=_PICKLED, **options)
        return folder
    except Exception as error:
        # The errors of its HTTP library come through too, and which library that is varies.
        raise _failure(error, text) from error


def is_hub_id(name: str) -> bool:
    """True if a name, with or without @REVISION, means a model of the hub and no folder here."""
    repository, at, _ = name.partition("@")
    path = Path(repository)
    if _HUB_ID.fullmatch(repository) is None or path.exists():
        return False
    return bool(at) or not _is_mistyped_path(path, _near(path))


def repository_of(folder: Path) -> str | None:
    """OWNER/NAME of the hub's model that a folder of huggingface_hub's cache holds."""
    found = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
    return f"{found[1]}/{found[2]}" if found and folder.parent.name == "snapshots" else None


def _near(path: Path) -> str:
    """ "(did you mean 'mine/run'?)" of a path that does not exist, "" where nothing is near."""
    match: list[str] = []
    with contextlib.suppress(OSError):
        if path.parent.is_dir():
            names = difflib.get_close_matches(
                path.name, [entry.name for entry in path.parent.iterdir()], n=1, cutoff=0.5
            )
            match = [str(path.parent / name) for name in names]
        else:
            folders = [entry for entry in path.parent.parent.iterdir() if entry.is_dir()]
            alike = difflib.get_close_matches(path.parent.name, [f.name for f in folders])
            inside = [str(e) for f in folders if f.name in alike for e in f.iterdir()]
            match = difflib.get_close_matches(str(path), inside, n=1, cutoff=0.75)
    return f" (did you mean '{match[0]}'?)" if match else ""


def _is_mistyped_path(path: Path, hint: str) -> bool:
    """True if NAME/NAME that does not exist is a path rather than a hub id: it is in a folder that
    is there, is near to something that is there, or begins as the folders of runs do."""
    return bool(hint) or path.parent.is_dir() or path.parts[0] in _LOCAL_FOLDERS


def _failure(error: Exception, text: str) -> FirstlightError:
    """The error for people that says why the hub id `text` could not be downloaded."""
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        error.filename = error.filename or constants.HF_HUB_CACHE
        return StorageError(f"{describe_os_error(error)} (HF_HOME moves the hub's cache)")
    hint = _near(Path(text).expanduser())
    return ModelError(
        f"{text} is not a folder here{hint}, and it can't be downloaded from the hub: "
        f"{_reason(error, text)}"
    )


def _reason(error: Exception, text: str) -> str:
    """One line with the fault of a download of the hub id `text`, and its remedy."""
    from huggingface_hub import constants, errors

    repository, _, revision = text.partition("@")
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repository}"
        return f"the repository is gated: ask for access at {page}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or it is private or gated: check the name, or {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision or constants.DEFAULT_REVISION}'"
    if isinstance(error, errors.LocalEntryNotFoundError):
        lack = f"the cache in {constants.HF_HUB_CACHE} does not hold all of the model"
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and {lack}: unset it to download"
        cause = first_line(error.__cause__ or error)
        return f"{constants.ENDPOINT} can't be used ({cause}), and {lack}: try later"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return f"the hub refused the token: {log_in} to a valid one"
    return first_line(error)
