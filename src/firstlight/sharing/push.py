"""Upload models and prepared corpora to the Hugging Face hub.

`push` and `push_data` write the files to share to a folder, and upload the folder with
huggingface_hub. No other module uploads files.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from firstlight.checkpoint.selection import read_model_folder
from firstlight.console import own_version
from firstlight.conversion.convert import convert
from firstlight.data import shards
from firstlight.errors import ConfigError, DataError, HubError, InputError, first_line
from firstlight.files.atomic import (
    new_folder,
    read_file,
    read_json,
    require_free,
    sha256_of,
    storage_errors,
    write_file,
    write_json,
)
from firstlight.recipe.load import yaml_text
from firstlight.report.report import loss_picture
from firstlight.run_log.names import RECIPE_NAME
from firstlight.sharing.card import (
    CARD_NAME,
    PICTURE_NAME,
    ModelFacts,
    corpus_card,
    corpus_facts,
    facts_of,
    model_card,
    neutral_recipe,
)
from firstlight.tokenizer import Tokenizer

#: JSON files in which other programs may have stored a local path of the model.
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """Result of `push` and `push_data`, which describes a model or corpus that was uploaded or
    written to a folder.

    Attributes:
        repository: USER/NAME on the hub.
        url: URL of the repository, or None if nothing was uploaded.
        folder: folder that was written, or None if the folder was temporary.
        files: sizes of the files in bytes, keyed by file name.
        step: step of the checkpoint. None for a corpus or a model without a run.
        unfinished_of: total number of steps in the run if the checkpoint was saved before the last
            step, otherwise None.
        notes: messages to the user.
    """

    repository: str
    url: str | None
    folder: Path | None
    files: dict[str, int]
    step: int | None = None
    unfinished_of: int | None = None
    notes: tuple[str, ...] = ()


def push(
    source: str | Path,
    repository: str,
    *,
    private: bool = False,
    gguf: str | None = None,
    licence: str | None = None,
    card: str | Path | None = None,
    best: bool = False,
    out: str | Path | None = None,
    upload: bool = True,
) -> Pushed:
    """Upload a model to the Hugging Face hub, with its weights, its tokenizer, its recipe and a
    model card.

    The weights are written by `convert`. The optimizer state and all other training state of a
    checkpoint are not uploaded. Files that are already on the hub are not uploaded again.

    Args:
        source: a run folder, a checkpoint, a Hugging Face model folder or a hub id.
        repository: name USER/NAME of the repository, which is created if it does not exist.
        private: True to create a private repository. An existing repository must then be private.
        gguf: format of a GGUF file to add, such as "q4_k_m" or "q8_0", or None.
        licence: licence for the card, as an id of the hub such as "apache-2.0".
        card: file to upload as the card. None to generate the card.
        best: True to use the checkpoint with the lowest validation loss if the source is a run
            folder. False to use the newest checkpoint.
        out: folder to write and keep. None to write a temporary folder or, if `upload` is False,
            the folder NAME in the current folder.
        upload: False to write the folder without uploading it.

    Raises:
        ConfigError: an argument is invalid, or `private` is True for a public repository.
        InputError: `out` is not empty, or `card` can't be read.
        ModelError, CheckpointError, TokenizerError: the model can't be read.
        HubError: the hub rejects the upload or can't be reached, or the connection is lost.
        MissingDependencyError: a package that the GGUF format requires is not installed.
        StorageError: a file can't be written.
    """
    _require_repository(repository, upload=upload)
    with _place(repository, out, upload=upload) as (folder, kept):

        def written(source: Path) -> tuple[ModelFacts, tuple[str, ...]]:
            facts = facts_of(source)
            with new_folder(folder) as new:
                return facts, _write_model(facts, repository, new, gguf, licence=licence, card=card)

        facts, notes = read_model_folder(source, written, best=best)
        url = upload_folder(folder, repository, kind="model", private=private) if upload else None
        unfinished_of = facts.max_steps if facts.is_unfinished else None
        return Pushed(
            repository,
            url,
            kept,
            _sizes(folder),
            step=facts.step,
            unfinished_of=unfinished_of,
            notes=notes,
        )


def push_data(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    licence: str | None = None,
    out: str | Path | None = None,
    upload: bool = True,
) -> Pushed:
    """Upload a prepared corpus to the Hugging Face hub, with its shards, its manifest, its
    tokenizer and a dataset card.

    `hf://datasets/USER/NAME` can then be used as `data.dir` on any machine. The lists of rejected
    and unread files are not uploaded, because they contain local paths.

    Args:
        folder: a folder written by `prepare`.
        repository: name USER/NAME of the repository, which is created if it does not exist.
        private: True to create a private repository. An existing repository must then be private.
        licence: licence for the card, as an id of the hub such as "cc-by-4.0".
        out: folder to write and keep. None to write a temporary folder with links to the shards or,
            if `upload` is False, the folder NAME in the current folder.
        upload: False to write the folder without uploading it.

    Raises:
        ConfigError: an argument is invalid, or `private` is True for a public repository.
        InputError: `out` is not empty, or a file of the tokenizer is missing.
        DataError: `folder` is not a prepared corpus, or is damaged.
        HubError: the hub rejects the upload or can't be reached, or the connection is lost.
        StorageError: a file can't be written.
    """
    _require_repository(repository, upload=upload)
    source = Path(os.path.abspath(Path(folder).expanduser()))
    manifest = shards.read_manifest(source)
    names = [*_verified_shards(source, manifest), shards.MANIFEST_NAME, *_TOKENIZER_FILES]
    with _place(repository, out, upload=upload) as (place, kept):
        with new_folder(place) as new:
            for name in names:
                if kept is None:
                    (new / name).symlink_to(source / name)
                else:
                    shutil.copyfile(source / name, new / name)
            text = corpus_card(corpus_facts(source, manifest), manifest, repository, licence)
            write_file(new / CARD_NAME, text)
        url = upload_folder(place, repository, kind="dataset", private=private) if upload else None
        return Pushed(repository, url, kept, _sizes(place))


@contextmanager
def _place(
    repository: str, out: str | Path | None, *, upload: bool
) -> Iterator[tuple[Path, Path | None]]:
    """Context manager for the folder to write.

    Yields two paths. The first is the folder to write. The second is the same folder if it is kept,
    and None if it is temporary.
    """
    name = repository.rpartition("/")[2]
    if out is None and upload:
        with tempfile.TemporaryDirectory(prefix="firstlight-push-") as temporary:
            yield Path(temporary) / name, None
        return
    folder = Path(name if out is None else out).expanduser()
    require_free(folder, "choose another --out")
    yield folder, folder


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _write_model(
    facts: ModelFacts,
    repository: str,
    folder: Path,
    gguf: str | None,
    *,
    licence: str | None,
    card: str | Path | None,
) -> tuple[str, ...]:
    """Write the files of a model to share to a folder. Return notes for the user."""
    # `convert` stores the name of the source folder in GGUF files as the name of the model, so the
    # folder `plain` has the name of the repository. Its parent folder can't conflict with the name
    # of a repository, because repository names never begin with a dot.
    staging = folder / ".model"
    plain = staging / repository.rpartition("/")[2]
    notes = list(convert(facts.folder, plain).notes)
    for name in _CONFIGS:
        _forget_folders(plain / name)
    file = None
    if gguf is not None:
        made = convert(plain, staging / ".gguf", to="gguf", dtype=gguf)
        assert made.file is not None
        notes += [note for note in made.notes if note not in notes]
        file = made.file.name
        made.file.rename(folder / file)
        made.out.rmdir()
    for path in list(plain.iterdir()):
        path.rename(folder / path.name)
    plain.rmdir()
    staging.rmdir()
    if facts.run is not None:
        write_file(folder / PICTURE_NAME, loss_picture(facts.run))
    if facts.run is not None and facts.run.recipe:
        values = neutral_recipe(facts.run.recipe)
        text = yaml_text(values)
        write_file(folder / RECIPE_NAME, text)
    if card is None:
        write_file(folder / CARD_NAME, model_card(facts, repository, licence=licence, gguf=file))
    else:
        write_file(folder / CARD_NAME, read_file(Path(card).expanduser(), _MAX_CARD_BYTES))
    return tuple(notes)


def _forget_folders(path: Path) -> None:
    """Remove entries with local paths, such as `_name_or_path`, from a JSON file."""
    if not path.is_file():
        return
    content: dict[str, Any] = read_json(path)
    kept = {
        key: value
        for key, value in content.items()
        if not (key.endswith(("path", "file", "dir")) and isinstance(value, str) and "/" in value)
    }
    if kept != content:
        write_json(path, kept)


def _verified_shards(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Check a prepared corpus, and return the names of its shards.

    The SHA-256 hashes of the shards must match the manifest, and the shards must have been prepared
    with the tokenizer in the folder.

    Raises:
        DataError: a shard is missing or damaged, or the tokenizer differs.
        InputError: a file of the tokenizer is missing.
    """
    entries = [one for split in manifest["splits"].values() for one in split["shards"]]
    with storage_errors(folder):
        for one in entries:
            path = folder / one["file"]
            if path.parent != folder or not path.is_file() or sha256_of(path) != one["sha256"]:
                raise DataError(
                    f"{path} is missing or damaged: prepare the corpus again before sharing it"
                )
    if Tokenizer.from_pretrained(folder).fingerprint != manifest["tokenizer_sha256"]:
        raise DataError(
            f"the shards in {folder} were not prepared with the tokenizer in this folder: prepare "
            "the corpus again"
        )
    missing = [name for name in _TOKENIZER_FILES if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} does not contain {missing[0]}: prepare the corpus again")
    return [one["file"] for one in entries]


#: Pattern for the names USER/NAME that the hub accepts. They consist of letters, digits, "-", "_"
#: and ".", without two consecutive "-" or "." in NAME.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*(?:\.[\w-]+)*/\w+(?:[.-]\w+)*", re.ASCII)
_MAX_NAME = 96
#: Patterns for weight files from an earlier upload. Files that match and are not in the new folder
#: are deleted from the hub, because programs would load them together with the new weights.
_REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"]


def _require_repository(repository: str, *, upload: bool) -> None:
    """Check that the name of a repository is valid and that uploads are possible. This check is
    made before any files are written.

    Raises:
        ConfigError: the name is not USER/NAME, or is not allowed on the hub.
        HubError: `upload` is True, and either the user is not logged in or HF_HUB_OFFLINE is set.
    """
    if "/" not in repository:
        raise ConfigError(
            f"'{repository}' does not have an owner: use USER/{repository}, where USER is your "
            "name on the hub or the name of an organization"
        )
    name = repository.rpartition("/")[2]
    if _REPOSITORY.fullmatch(repository) is None or len(name) > _MAX_NAME:
        raise ConfigError(
            f"'{repository}' is not a valid repository name: use USER/NAME with letters, digits, "
            "and single - _ . between them"
        )
    if not upload:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it")
    if not get_token():
        raise HubError(
            "there is no hub token: log in with `hf auth login` or set HF_TOKEN, using a token "
            "with write permission"
        )


def upload_folder(
    folder: Path, repository: str, *, kind: Literal["model", "dataset"], private: bool
) -> str:
    """Upload a folder to a repository, which is created if it does not exist. Return the URL of the
    repository.

    Files that are already on the hub with the same content are not uploaded again, so a second call
    resumes an interrupted upload. For a model, weight files from an earlier upload are deleted if
    they are not in the folder. All other files in the repository are kept.

    Args:
        folder: folder to upload. Symbolic links in the folder are followed.
        repository: USER/NAME.
        kind: kind of the repository.
        private: True to create a private repository and to reject an existing public repository.
            False to create a repository with the default visibility of the hub.

    Raises:
        ConfigError: `private` is True, and the repository is public.
        HubError: the hub rejects the upload or can't be reached, or the connection is lost.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="firstlight", library_version=own_version())
    try:
        api.create_repo(repository, repo_type=kind, private=private or None, exist_ok=True)
        found = api.repo_info(repository, repo_type=kind)
        if private and not found.private:
            raise ConfigError(
                f"{repository} already exists and is public: make it private in its settings on "
                "the hub, or omit --private"
            )
        with warnings.catch_warnings():
            # huggingface_hub warns about a card without a licence. Hide this warning. The user has
            # chosen not to specify a licence, and the card mentions that there is none.
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
        # huggingface_hub does not catch the errors of its HTTP library, and different versions of
        # huggingface_hub use different libraries.
        raise HubError(f"{repository} can't be uploaded: {_reason(error, repository)}") from error
    prefix = "datasets/" if kind == "dataset" else ""
    return f"{api.endpoint}/{prefix}{repository}"


def _reason(error: BaseException, repository: str) -> str:
    """Return one line that explains why an upload failed, and what to do about it."""
    from huggingface_hub import errors

    owner = repository.partition("/")[0]
    for one in _chain(error):
        status = one.response.status_code if isinstance(one, errors.HfHubHTTPError) else None
        if status == 401:
            return (
                "the hub refused the token: log in again with `hf auth login` or set HF_TOKEN "
                "to a valid token"
            )
        if status in (403, 404):
            return (
                f"the token has no write permission there: {owner} must be your name or one of "
                "your organizations, and the token must have write permission"
            )
        if status is not None and 400 <= status < 500 and status not in (408, 429):
            return first_line(one)
        if isinstance(one, ValueError) and "metadata" in str(one):
            return f"the hub rejected the model card: {' '.join(str(one).split())}"
    last = list(_chain(error))[-1]
    return (
        f"{first_line(last) or type(last).__name__}; run the same command again to upload the "
        "rest (completed files are kept)"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, followed by the chain of errors that caused it. The cause of each error is
    its `__cause__` or, if that is None, its `__context__`.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
