"""Download models from the Hugging Face hub. This is the only module that downloads models."""

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

#: Patterns of the files to download. Pickled weights and Python code are excluded, because code in
#: them could be executed.
_WEIGHTS = "*.safetensors"
_DOWNLOADED = ["*.json", _WEIGHTS, "*.jinja", "tokenizer.model", "merges.txt"]
#: Patterns of pickled weights. They are downloaded only when a model without safetensors files is
#: converted.
_PICKLED = ["pytorch_model*.bin"]

#: Patterns of files that are never downloaded, because they are copies of the weights for other
#: programs.
_LEFT_OUT = ["*/*", "consolidated*.safetensors"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
#: Common names of local folders with runs or models. They are not interpreted as names of users or
#: organisations on the hub.
_LOCAL_FOLDERS = frozenset(
    ("run", "runs", "checkpoints", "out", "output", "outputs", "mine", "models", "data", "demo")
)

#: Error numbers that indicate that a download could not be written to disk.
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)


def is_gguf(path: Path) -> bool:
    """Return True if `path` is a GGUF file.

    The file is recognised by its suffix or by its first bytes, because Ollama's files have no
    suffix.
    """
    if not path.is_file() or path.suffix.lower() == ".gguf":
        return path.is_file()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"GGUF"
    return False


def find_model_folder(
    name: str | Path, *, pickled: bool = False, weights: bool = True, typed: bool = True
) -> Path:
    """Return the folder of a model, which can be a local folder, a GGUF file or a model on the hub.
    GGUF files are unpacked into the cache, and hub models are downloaded if necessary.

    A hub id is OWNER/NAME (`openai-community/gpt2`) for the newest commit of `main`, or
    OWNER/NAME@REVISION for another branch, tag or commit. The revision starts after the first "@",
    because repository names can't contain "@". The revision itself can contain "@" and "/"
    (`OWNER/NAME@refs/pr/1`).

    Downloads use huggingface_hub with its cache (`HF_HOME`), token (`HF_TOKEN` or `hf auth login`)
    and other settings (`HF_ENDPOINT`, `HF_HUB_OFFLINE`). Files that are already in the cache are
    not downloaded again. If the hub can't be reached, the cached files are used without a message
    to the user.

    Args:
        name: a folder, a GGUF file or a hub id.
        pickled: True to download `pytorch_model*.bin` if the model has no safetensors files.
        weights: True to download the weights. False to download only config.json, the tokenizer and
            other small files.
        typed: True if the user typed the name. A typed name that looks like a mistyped path is not
            looked up on the hub, unless it includes a revision, as in `OWNER/NAME@main`.

    Raises:
        ModelError: `name` is not a folder and can't be downloaded.
        StorageError: the cache can't be written.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        # Import this module here, because it imports torch, which is needed only for GGUF files.
        from firstlight.weights.gguf.reader import gguf_folder

        return gguf_folder(path)
    text = str(name)
    repository, at, revision = text.partition("@")
    looks_like_hub_id = _HUB_ID.fullmatch(repository) is not None and not (at and not revision)
    hint = "" if path.exists() else _near(path)
    is_path = typed and not at and _is_mistyped_path(path, hint)
    if path.exists() or not looks_like_hub_id or is_path:
        problem = (
            "is a file, not a folder (specify the model's folder; `firstlight convert` reads "
            "files of nanoGPT and LLMs-from-scratch)"
            if path.exists()
            else "does not exist"
        )
        if not path.exists() and "/" not in text:
            hint = (
                f"{hint}; a model on the hub has the form OWNER/NAME, such as openai-community/gpt2"
            )
        elif not path.exists() and looks_like_hub_id:
            hint = f"{hint}: train it first, or use {text}@main for the hub model of that name"
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
        # huggingface_hub does not catch the errors of its HTTP library, and different versions of
        # huggingface_hub use different libraries.
        raise _failure(error, text) from error


def is_hub_id(name: str) -> bool:
    """Return True if `name` refers to a hub model, with or without @REVISION, and not to a local
    path.
    """
    repository, at, _ = name.partition("@")
    path = Path(repository)
    if _HUB_ID.fullmatch(repository) is None or path.exists():
        return False
    return bool(at) or not _is_mistyped_path(path, _near(path))


def _near(path: Path) -> str:
    """Return a suggestion for the user, such as " (did you mean 'mine/run'?)", if a path that does
    not exist is similar to an existing path. Return "" if no existing path is similar.
    """
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
    """Return True if a name of the form OWNER/NAME, which is not the path of an existing file, is
    probably a mistyped path rather than a hub id.

    The name is probably a path if the folder OWNER exists, if `hint` suggests a similar path, or if
    OWNER is a common name for a folder with runs.
    """
    return bool(hint) or path.parent.is_dir() or path.parts[0] in _LOCAL_FOLDERS


def _failure(error: Exception, text: str) -> FirstlightError:
    """Return an error that explains why the hub model `text` could not be downloaded."""
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        error.filename = error.filename or constants.HF_HUB_CACHE
        return StorageError(f"{describe_os_error(error)} (HF_HOME moves the hub's cache)")
    hint = _near(Path(text).expanduser())
    return ModelError(
        f"{text} is not a local folder{hint}, and it can't be downloaded from the hub: "
        f"{_reason(error, text)}"
    )


def _reason(error: Exception, text: str) -> str:
    """Return one line that explains why the hub model `text` could not be downloaded, and what to
    do about it.
    """
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
        lack = f"the cache in {constants.HF_HUB_CACHE} does not contain all files of the model"
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and {lack}: unset it to download"
        cause = first_line(error.__cause__ or error)
        return f"{constants.ENDPOINT} is not available ({cause}), and {lack}: try again later"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return f"the hub refused the token: {log_in} to a valid token"
    return first_line(error)
