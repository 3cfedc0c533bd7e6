"""Uploads to the Hugging Face hub by huggingface_hub. No other module uploads anything."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from firstlight.console import own_version
from firstlight.errors import ConfigError, HubError, first_line

#: USER/NAME as the hub accepts it: letters, digits, "-", "_" and ".", but no two of "-" and "." in
#: a row in NAME.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*(?:\.[\w-]+)*/\w+(?:[.-]\w+)*", re.ASCII)
_MAX_NAME = 96
#: Patterns of an earlier upload's weights, which are deleted if they are not in the new folder: a
#: program would load them together with the new ones.
_REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"]


def require_repository(repository: str) -> None:
    """Check that an upload to a repository is possible, before any work is done.

    Raises:
        ConfigError: the name is not USER/NAME.
        HubError: there is no token (the user is not logged in), or HF_HUB_OFFLINE is set.
    """
    require_name(repository)
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, and nothing can be uploaded: unset it")
    if not get_token():
        raise HubError(
            "there is no token of the hub: log in with `hf auth login`, or set HF_TOKEN, to a "
            "token that may write"
        )


def require_name(repository: str) -> None:
    """Refuse a name that no repository of the hub can have.

    Raises:
        ConfigError: the name is not USER/NAME.
    """
    if "/" not in repository:
        raise ConfigError(
            f"'{repository}' has no owner: write USER/{repository}, with your name on the hub or "
            "that of an organization"
        )
    name = repository.rpartition("/")[2]
    if _REPOSITORY.fullmatch(repository) is None or len(name) > _MAX_NAME:
        raise ConfigError(
            f"'{repository}' is no name of a repository: write USER/NAME of letters, digits, and "
            "single - _ . between them"
        )


def upload_folder(
    folder: Path, repository: str, *, kind: Literal["model", "dataset"], private: bool
) -> str:
    """Upload a folder, and return the repository's URL. The repository is created if it does not
    exist.

    A file that the hub has with the same content is not sent again, so that a second call continues
    an interrupted upload. Weights of an earlier upload that are not in the folder are deleted (for
    models); all other files in the repository stay.

    Args:
        folder: the folder; links in it are followed.
        repository: USER/NAME.
        kind: kind of the repository.
        private: create a private repository, and refuse a public one. With False, the hub's
            defaults decide for a new repository.

    Raises:
        ConfigError: `private` is True, and the repository is public.
        HubError: the hub refuses, can't be reached, or the connection breaks.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="firstlight", library_version=own_version())
    try:
        api.create_repo(repository, repo_type=kind, private=private or None, exist_ok=True)
        found = api.repo_info(repository, repo_type=kind)
        if private and not found.private:
            raise ConfigError(
                f"{repository} is there already and public: make it private in its settings on "
                "the hub, or leave --private out"
            )
        with warnings.catch_warnings():
            # huggingface_hub warns of a card without a licence. The user has chosen to give none,
            # and the card says so.
            warnings.filterwarnings("ignore", message="Warnings while validating metadata")
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                repo_type=kind,
                commit_message=f"Upload {repository.rpartition('/')[2]} with firstlight",
                delete_patterns=_REPLACED if kind == "model" else None,
            )
    except ConfigError:
        raise
    except Exception as error:
        # huggingface_hub passes on errors of its HTTP library, which differs between versions.
        raise HubError(f"{repository} can't be uploaded: {_reason(error, repository)}") from error
    prefix = "datasets/" if kind == "dataset" else ""
    return f"{api.endpoint}/{prefix}{repository}"


def _reason(error: BaseException, repository: str) -> str:
    """One line with the reason why an upload failed, and a remedy."""
    from huggingface_hub import errors

    owner = repository.partition("/")[0]
    for one in _chain(error):
        status = one.response.status_code if isinstance(one, errors.HfHubHTTPError) else None
        if status == 401:
            return "the hub refused the token: log in with `hf auth login` or set HF_TOKEN anew"
        if status in (403, 404):
            return (
                f"the hub does not let this token write there: {owner} must be your name or an "
                "organization of yours, and the token one that may write"
            )
        if status is not None and 400 <= status < 500 and status not in (408, 429):
            return first_line(one)
        if isinstance(one, ValueError) and "metadata" in str(one):
            return f"the hub refuses the card: {' '.join(str(one).split())}"
    last = list(_chain(error))[-1]
    return (
        f"{first_line(last) or type(last).__name__}; what has arrived is kept: give the same "
        "command again, which sends the rest"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause (or the error during whose handling it was raised), and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
