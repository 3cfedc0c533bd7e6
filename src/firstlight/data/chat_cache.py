"""Conversations prepared once for all runs on them: a folder of the cache whose name says what is
in it.

    FIRSTLIGHT_CACHE (or XDG_CACHE_HOME/firstlight, or ~/.cache/firstlight) / chat / KEY

KEY is of the files' contents and names, the tokenizer's files with the template, and the options,
so that whatever changes is prepared anew. A dataset of the hub counts by the commit that its name
stands for at the moment. A folder that is damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.examples import open_split
from firstlight.data.opening import optional
from firstlight.data.records import find_records
from firstlight.data.remote import cache_folder, held
from firstlight.data.shard_file import LABELLED_VERSION
from firstlight.data.shards import MANIFEST_NAME, read_manifest
from firstlight.data.sources import DataSource
from firstlight.errors import DataError, InputError, describe_os_error, first_line
from firstlight.files.atomic import make_folder, remove_folder, sha256_of
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_fit import with_chat_template

#: Raise it when the same input is to become something else.
_VERSION = 1


def cached_chat(
    files: Sequence[str],
    val_files: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None,
    options: ChatOptions,
    tell: Callable[[str], None],
    *,
    where: str = "DIR",
    verify: bool = True,
    progress: bool = False,
) -> Path:
    """The folder of the prepared conversations, once they are. Any number of processes may ask at
    once: one of them prepares.

    Args:
        files, val_files, tokenizer, template, options: see `prepare_chat`.
        tell: called with each message for people.
        where: the tokenizer's folder, for messages.
        verify: compare a folder that is there with its SHA-256.
        progress: show a progress bar.

    Raises:
        InputError, DataError, TokenizerError, MissingDependencyError: see `prepare_chat`.
        StorageError: the cache can't be written.
    """
    tokenizer = with_chat_template(tokenizer, template, where)
    sources = {"train": find_records(files), "val": find_records(val_files) if val_files else []}
    folder = cache_folder() / "chat" / _key(sources, tokenizer, options)
    if not _is_whole(folder, verify):
        make_folder(folder.parent)
        lock = folder.with_name(f"{folder.name}.lock")
        with held(lock, "preparing the same conversations", progress):
            if not _is_whole(folder, verify):
                tell(f"preparing the conversations of {', '.join(map(str, files))}")
                if folder.exists():  # damaged
                    remove_folder(folder)
                prepare_chat(
                    files,
                    tokenizer,
                    folder,
                    val_inputs=val_files,
                    options=options,
                    progress=progress,
                )
    return folder


def _key(sources: dict[str, list[DataSource]], tokenizer: Tokenizer, options: ChatOptions) -> str:
    content: dict[str, Any] = {
        "version": [_VERSION, LABELLED_VERSION],
        "options": asdict(options),
        "tokenizer": tokenizer.files(),
        "sources": {
            split: [[source.name, _fingerprint(source)] for source in found]
            for split, found in sources.items()
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _fingerprint(source: DataSource) -> str:
    """Of what a source holds at the moment."""
    if source.path is not None:
        try:
            return sha256_of(source.path)
        except OSError as error:
            raise InputError(f"{source.name} can't be read: {describe_os_error(error)}") from error
    assert source.dataset is not None
    hub = optional("huggingface_hub", f"reading {source.name}")
    try:
        return str(hub.HfApi().dataset_info(source.dataset.partition(":")[0]).sha)
    # Names, networks and servers fail here, each library with its own errors.
    except Exception as error:
        raise InputError(
            f"dataset {source.name} can't be asked for: {first_line(error)}; without a connection, "
            "train on a folder that `firstlight prepare --kind chat` made of it (data.dir)"
        ) from error


def _is_whole(folder: Path, verify: bool) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        for split in read_manifest(folder)["splits"]:
            open_split(folder, split, verify=verify)
    except DataError:
        return False
    return True
