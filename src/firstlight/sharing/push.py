"""`push` and `push_data`: write the folder of a model or corpus that is shared, and upload it to
the Hugging Face hub by huggingface_hub. No other module uploads anything."""

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

#: Files in which other programs may have written the path that a model was read from.
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """A model or corpus that was uploaded, or whose folder was written.

    Attributes:
        repository: USER/NAME on the hub.
        url: URL of the repository's page; None if nothing was uploaded.
        folder: the folder that was written; None if it was temporary.
        files: size in bytes of each file, by name.
        step: step of the run's checkpoint; None for a model without a run, or a corpus.
        unfinished_of: number of steps of the whole run if the checkpoint is from an earlier step;
            else None.
        notes: remarks for the user.
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
    """Upload a model to the Hugging Face hub: weights, tokenizer, recipe and a card.

    The weights are written by `convert`, so that neither optimizer state nor anything else in a
    checkpoint is uploaded. A file that the hub already has is not sent again.

    Args:
        source: a run folder, a checkpoint, a Hugging Face model folder or a hub id.
        repository: USER/NAME; the repository is created if it does not exist.
        private: create a private repository; an existing one must be private.
        gguf: format of a GGUF file to add, such as "q4_k_m" or "q8_0"; None adds none.
        licence: the hub's id of the licence for the card, such as "apache-2.0".
        card: a file to upload as the card; None writes the card.
        best: take a run folder's checkpoint with the lowest validation loss, not the newest.
        out: a folder to write and keep. None writes a temporary folder; with `upload` False, the
            folder NAME in the current folder.
        upload: False only writes the folder.

    Raises:
        ConfigError: an argument is invalid, or `private` is True for a public repository.
        InputError: `out` is not empty, or `card` can't be read.
        ModelError, CheckpointError, TokenizerError: the model can't be read.
        HubError: the hub refuses, can't be reached, or the connection breaks.
        MissingDependencyError: a package that the GGUF format needs is not installed.
        StorageError: the file system refuses a write.
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
    """Upload a prepared corpus to the Hugging Face hub: shards, manifest, tokenizer and a card.

    `hf://datasets/USER/NAME` is then a corpus for `data.dir` on any machine. Lists of rejected and
    unread files are not uploaded, since they contain paths of this machine.

    Args:
        folder: a folder that `prepare` wrote.
        repository: USER/NAME; the repository is created if it does not exist.
        private: create a private repository; an existing one must be private.
        licence: the hub's id of the licence for the card, such as "cc-by-4.0".
        out: a folder to write and keep. None writes a temporary folder with links to the shards;
            with `upload` False, the folder NAME in the current folder.
        upload: False only writes the folder.

    Raises:
        ConfigError: an argument is invalid, or `private` is True for a public repository.
        InputError: `out` is not empty, or a file of the tokenizer is missing.
        DataError: `folder` is not a prepared corpus, or is damaged.
        HubError: the hub refuses, can't be reached, or the connection breaks.
        StorageError: the file system refuses a write.
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
    """Yield (the folder to write, that folder if it is kept or None if it is temporary)."""
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
    """Write all files of a shared model into a folder; return remarks for the user."""
    # `convert` takes the model's name in a GGUF file from the folder's name: `plain` is therefore
    # named like the repository. No repository's name begins with a dot, so that `.model` can't
    # clash with it.
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
    """Remove the entries of a JSON file that contain a path of the machine where it was written,
    such as `_name_or_path`."""
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
    """Return the names of the shards, after a check that each has its SHA-256 in the manifest, and
    that the tokenizer is the one that they were made with.

    Raises:
        DataError: a shard is missing or damaged, or the tokenizer is another one.
        InputError: a file of the tokenizer is missing.
    """
    entries = [one for split in manifest["splits"].values() for one in split["shards"]]
    with storage_errors(folder):
        for one in entries:
            path = folder / one["file"]
            if path.parent != folder or not path.is_file() or sha256_of(path) != one["sha256"]:
                raise DataError(
                    f"{path} is missing or damaged: prepare the corpus again before it is shared"
                )
    if Tokenizer.from_pretrained(folder).fingerprint != manifest["tokenizer_sha256"]:
        raise DataError(f"{folder} has another tokenizer than its shards were made with")
    missing = [name for name in _TOKENIZER_FILES if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} has no {missing[0]}: prepare the corpus again")
    return [one["file"] for one in entries]


#: USER/NAME as the hub accepts it: letters, digits, "-", "_" and ".", but no two of "-" and "." in
#: a row in NAME.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*(?:\.[\w-]+)*/\w+(?:[.-]\w+)*", re.ASCII)
_MAX_NAME = 96
#: Patterns of an earlier upload's weights, which are deleted if they are not in the new folder: a
#: program would load them together with the new ones.
_REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"]


def _require_repository(repository: str, *, upload: bool) -> None:
    """Check a repository's name, and that an upload to it is possible, before any work is done.

    Raises:
        ConfigError: the name is not USER/NAME, or no repository of the hub can have it.
        HubError: `upload` is True, and there is no token (the user is not logged in), or
            HF_HUB_OFFLINE is set.
    """
    if "/" not in repository:
        raise ConfigError(
            f"'{repository}' has no owner: write USER/{repository}, with your name on the hub or "
            "that of an organization"
        )
    name = repository.rpartition("/")[2]
    if _REPOSITORY.fullmatch(repository) is None or len(name) > _MAX_NAME:
        raise ConfigError(
            f"'{repository}' is not the name of a repository: write USER/NAME of letters, digits, "
            "and single - _ . between them"
        )
    if not upload:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, and nothing can be uploaded: unset it")
    if not get_token():
        raise HubError(
            "there is no token of the hub: log in with `hf auth login`, or set HF_TOKEN, to a "
            "token that may write"
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
    """Return one line with the reason why an upload failed, and a remedy."""
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
    """Yield an error, its cause (or the error during whose handling it was raised), and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
