"""The Hugging Face hub: downloads happen here and nowhere else."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError, ModelError, StorageError, describe_os_error, nearest

#: What a model folder is made of. Never pickled weights, never code.
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
#: Pickled weights, for a conversion of a model that has no others.
_PICKLED = ["pytorch_model*.bin"]

#: Copies of the same weights that some models keep for other programs.
_LEFT_OUT = ["*/*", "consolidated*.safetensors"]

#: What keeps a download from being written, rather than from arriving.
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)


def find_model_folder(name: str | Path, *, pickled: bool = False) -> Path:
    """The folder of a local model, or of a hub id after its download.

    A hub id is OWNER/NAME (`openai-community/gpt2`), followed by @REVISION for another branch,
    tag or commit than the newest of `main`. The revision begins at the first "@", which no name
    contains, so that it may itself contain "@" and "/" (`OWNER/NAME@refs/pr/1`).

    huggingface_hub does the downloading, with its cache (`HF_HOME`), its token (`HF_TOKEN` or
    `hf auth login`) and its other settings (`HF_ENDPOINT`, `HF_HUB_OFFLINE`). What the cache
    holds is not downloaded again, and is used without a word when the hub can't be reached.
    With `pickled`, a `pytorch_model.bin` is downloaded where there are no safetensors.

    Raises:
        ModelError: neither a folder nor something that can be downloaded.
        StorageError: the cache can't be written.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    repository, at, revision = text.partition("@")
    looks_like_hub_id = (
        repository.count("/") == 1
        and not repository.startswith((".", "/", "~"))
        and not (at and not revision)
    )
    if path.exists() or not looks_like_hub_id:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = "" if path.exists() else nearest(path.name, siblings)
        problem = (
            "is a file, not a folder (a model's folder is named whole; `firstlight convert` reads "
            "files of nanoGPT and LLMs-from-scratch)"
            if path.exists()
            else "does not exist"
        )
        if not path.exists() and "/" not in text:
            hint = f"{hint}; a model of the hub is OWNER/NAME, as openai-community/gpt2"
        raise ModelError(f"model folder {text} {problem}{hint}")
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        options["ignore_patterns"] = _LEFT_OUT
        folder = Path(snapshot_download(repository, allow_patterns=_DOWNLOADED, **options))
        if pickled and not any(folder.glob("*.safetensors")):
            snapshot_download(repository, allow_patterns=_PICKLED, **options)
        return folder
    except Exception as error:
        # The errors of its HTTP library come through too, and which library that is varies.
        raise _failure(error, text) from error


def repository_of(folder: Path) -> str | None:
    """OWNER/NAME of the hub's model that a folder of huggingface_hub's cache holds."""
    found = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
    return f"{found[1]}/{found[2]}" if found and folder.parent.name == "snapshots" else None


def _failure(error: Exception, text: str) -> FirstlightError:
    """The error for people that says why the hub id `text` could not be downloaded."""
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        error.filename = error.filename or constants.HF_HUB_CACHE
        return StorageError(f"{describe_os_error(error)} (HF_HOME moves the hub's cache)")
    parent = Path(text).expanduser().parent
    siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    hint = nearest(Path(text).name, siblings)
    return ModelError(
        f"{text} is not a folder here{hint}, and it can't be downloaded from the hub: "
        f"{_reason(error, text)}"
    )


def _reason(error: Exception, text: str) -> str:
    """What went wrong with the download of the hub id `text`, and what to do, in one line."""
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
        cause = _first_line(error.__cause__ or error)
        return f"{constants.ENDPOINT} can't be used ({cause}), and {lack}: try later"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return f"the hub refused the token: {log_in} to a valid one"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
