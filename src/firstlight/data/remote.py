"""Access prepared corpora at a URL. They are downloaded into a cache on this machine and verified.

Any protocol that fsspec supports can be used, such as s3://BUCKET/FOLDER, gs://,
hf://datasets/OWNER/NAME/FOLDER, https://HOST/FOLDER and file://. Credentials and endpoints are
configured in the same way as for the protocol's own tools (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
`gcloud auth`, HF_TOKEN). For public S3 buckets, set FSSPEC_S3_ANON=true.

Each corpus has its own folder in the data/ folder of the cache (see `files.cache`), named after the
hash of its URL and manifest. A corpus that is prepared again therefore gets a new folder. Files are
created atomically, after their size and SHA-256 have been verified against the manifest. Files that
are already in the cache and correct are not downloaded again. fsspec's cache (`filecache::`) is not
used, because it silently keeps damaged and truncated files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import re
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from rich.progress import DownloadColumn, TransferSpeedColumn

from firstlight.console import progress_bar
from firstlight.data.shards import MANIFEST_NAME, read_manifest
from firstlight.errors import (
    DataError,
    MissingDependencyError,
    StorageError,
    TokenizerError,
    first_line,
)
from firstlight.files.atomic import (
    MAX_JSON_BYTES,
    make_folder,
    remove_leftovers,
    replacing,
    sha256_of,
    storage_errors,
    write_file,
)
from firstlight.files.cache import cache_folder, held
from firstlight.tokenizer import Tokenizer

_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
#: Pattern for valid shard names. It excludes "/" and all characters with a special meaning in URLs,
#: so that a name can't refer to a file outside of the folder.
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.bin")
#: Files of the tokenizer. The manifest contains the fingerprint of tokenizer.json.
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
#: Maximum size of a tokenizer file in bytes; the largest known tokenizer.json is 40 MB.
_MAX_TOKENIZER_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
#: Delays before the second, third and fourth attempt to download a file, in seconds.
_WAITS_SECONDS = (1.0, 4.0, 15.0)
_LOCK_NAME = ".lock"
#: Options that make fsspec read a file as one stream (`block_size=0`) and, for HTTP, without
#: requesting the size of the file first (any value of `size`).
_STREAMED = {"http": {"block_size": 0, "size": 1}, "hf": {"block_size": 0}}
#: Timeout in seconds for connecting, and for receiving more data. The total duration of a download
#: is not limited.
_SILENCE_SECONDS = 60.0

Found = TypeVar("Found")


class _TransferError(Exception):
    """Raised if a transfer failed and may succeed on another attempt."""


#: A shard's entry in the manifest: "file", "bytes", "sha256", "tokens".
_Entry: TypeAlias = dict[str, Any]


def is_url(location: str | Path) -> bool:
    """Return True if `location` is a URL, and False if it is a path."""
    return _URL.match(str(location)) is not None


def local_folder(
    location: str | Path,
    splits: Sequence[str] | None = None,
    *,
    verify: bool = True,
    progress: bool = False,
) -> Path:
    """Return the local folder of a prepared corpus. A corpus at a URL is first downloaded into the
    cache. If several processes call this function at the same time, one of them downloads the
    corpus and the others wait.

    Args:
        location: a URL, or the path of a folder, which is returned without being checked.
        splits: names of the splits to download; splits that the corpus lacks are ignored. None
            downloads all splits.
        verify: True to verify cached files against the SHA-256 in the manifest instead of only
            checking their sizes, and to download damaged files again.
        progress: True to show a progress bar on stderr.

    Raises:
        DataError: the URL is invalid, there is no prepared corpus at the URL, or the corpus could
            not be downloaded completely in several attempts.
        MissingDependencyError: the protocol's package is not installed.
        StorageError: the cache can't be written, or the disk does not have enough space.
    """
    if not is_url(location):
        return Path(location).expanduser()
    store = _open_store(str(location).rstrip("/"))
    content = _retried(lambda: store.content(MANIFEST_NAME, MAX_JSON_BYTES))
    key = hashlib.sha256(store.url.encode() + b"\n" + content).hexdigest()[:32]
    folder = cache_folder() / "data" / key
    if not _holds(folder / MANIFEST_NAME, content):
        make_folder(folder)
        with held(folder / _LOCK_NAME, f"fetching {store.url}", progress):
            write_file(folder / MANIFEST_NAME, content)
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        raise DataError(f"{store.url}: {error}") from error
    fingerprint: str = manifest["tokenizer_sha256"]
    wanted = _wanted(store.url, manifest, splits)
    missing = _missing(folder, wanted, verify)
    if missing or not _is_tokenizer(folder, fingerprint):
        with held(folder / _LOCK_NAME, f"fetching {store.url}", progress):
            remove_leftovers(folder)
            # In the meantime, another process may have downloaded some of the missing shards.
            missing = _missing(folder, missing, verify)
            _fetch_tokenizer(store, folder, fingerprint)
            _fetch_shards(store, folder, missing, progress)
    return folder


class _Store:
    """A remote folder.

    Args:
        url: URL of the folder.
        system: fsspec file system that contains the folder.
        root: path of the folder in `system`.
        options: options for `system.open`.
    """

    def __init__(self, url: str, system: Any, root: str, options: dict[str, Any]) -> None:
        self.url = url
        self._system = system
        self._root = root
        self._options = options

    def parts(self, name: str) -> Generator[bytes, None, None]:
        """Yield the bytes of a file, in chunks of at most 1 MiB.

        Raises:
            DataError: the file does not exist, or access is denied.
            _TransferError: the file could not be read.
        """
        path = f"{self._root.rstrip('/')}/{name}"
        try:
            with self._system.open(path, "rb", **self._options) as file:
                while part := file.read(_CHUNK_BYTES):
                    yield part
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise DataError(
                f"{self.url} has no {name}: use a complete folder written by `firstlight prepare`"
            ) from error
        except ImportError as error:
            raise _missing_package(self.url, error) from error
        except Exception as error:
            # The package for each protocol raises its own errors.
            where, said = f"{self.url}/{name}", first_line(error)
            if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                raise DataError(
                    f"access to {where} was denied: {said}; check your credentials"
                ) from error
            if _is_refusal(error):
                raise DataError(f"{where} can't be read: {said}") from error
            raise _TransferError(f"{where} could not be fetched: {said}") from error

    def content(self, name: str, max_bytes: int) -> bytes:
        """Return all bytes of a file.

        Raises:
            DataError: the file does not exist, or is longer than `max_bytes`.
            _TransferError: the file could not be read.
        """
        content = bytearray()
        with contextlib.closing(self.parts(name)) as parts:
            for part in parts:
                content += part
                if len(content) > max_bytes:
                    raise DataError(f"{self.url}/{name} is longer than {max_bytes:,} bytes")
        return bytes(content)


def _open_store(url: str) -> _Store:
    """Open the folder at a URL. Raise a DataError if the URL is invalid."""
    parsed = urlsplit(url)
    if parsed.password is not None:
        raise DataError(
            "a data URL must not contain a password, because every checkpoint would reveal it: "
            "put it where the protocol's tools look for it, such as ~/.netrc"
        )
    is_http = parsed.scheme.lower() in ("http", "https")
    if is_http and (parsed.query or parsed.fragment):
        raise DataError(
            f"{url} is not the URL of a folder: remove the part that begins with ? or #"
        )
    # Do not reuse a file system object, because its listing of the folder may be outdated.
    options: dict[str, Any] = {"skip_instance_cache": True}
    try:
        if is_http:
            aiohttp = importlib.import_module("aiohttp")
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS
            )
            # With `trust_env`, proxies are read from environment variables and passwords from
            # ~/.netrc.
            options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
        # Import fsspec by name, because it has no type annotations.
        system, root = importlib.import_module("fsspec.core").url_to_fs(url, **options)
    except ImportError as error:
        raise _missing_package(url, error) from error
    except ValueError as error:
        raise DataError(f"{url} can't be opened: {first_line(error)}") from error
    protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
    return _Store(url, system, root, next((_STREAMED[p] for p in protocols if p in _STREAMED), {}))


def _missing_package(url: str, error: ImportError) -> MissingDependencyError:
    scheme = url.partition("://")[0].rpartition("::")[2].lower()
    known = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
    package = known.get(scheme, "aiohttp" if scheme in ("http", "https") else error.name or scheme)
    return MissingDependencyError(package, "remote", f"reading {scheme}:// URLs")


def _is_refusal(error: Exception) -> bool:
    """Return True for an HTTP status that indicates a permanent rejection: 400 to 499, except 408
    (timeout) and 429 (too many requests).
    """
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def _retried(work: Callable[[], Found]) -> Found:
    """Call `work` and return its result. If it raises `_TransferError`, retry it, with up to four
    attempts in total.

    Raises:
        DataError: all attempts failed.
    """
    for seconds in _WAITS_SECONDS:
        try:
            return work()
        except _TransferError:
            time.sleep(seconds)
    try:
        return work()
    except _TransferError as error:
        raise DataError(
            f"{error} (tried {len(_WAITS_SECONDS) + 1} times): try again later; completed files "
            "are kept"
        ) from error


def _wanted(url: str, manifest: dict[str, Any], splits: Sequence[str] | None) -> list[_Entry]:
    """Return the manifest entries of the splits' shards, without duplicates. None for `splits`
    selects all splits.

    Raises:
        DataError: a shard name is invalid, or two different shards have the same name.
    """
    chosen = [name for name in manifest["splits"] if splits is None or name in splits]
    found: dict[str, _Entry] = {}
    for shard in (shard for name in chosen for shard in manifest["splits"][name]["shards"]):
        name = shard["file"]
        if not _SHARD_NAME.fullmatch(name):
            raise DataError(f"{url}: the manifest lists an invalid shard name: {name}")
        first = found.setdefault(name, shard)
        if (first["bytes"], first["sha256"]) != (shard["bytes"], shard["sha256"]):
            raise DataError(f"{url}: the manifest lists {name} twice")
    return list(found.values())


def _missing(folder: Path, wanted: Sequence[_Entry], verify: bool) -> list[_Entry]:
    """Return the wanted shards that are missing from the folder or do not match their manifest
    entry. The size is always checked, but the SHA-256 is checked only if `verify` is True.
    """

    def is_there(file: _Entry) -> bool:
        path = folder / file["file"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return False
        return not verify or sha256_of(path) == file["sha256"]

    with storage_errors(folder):
        return [file for file in wanted if not is_there(file)]


def _holds(path: Path, content: bytes) -> bool:
    with storage_errors(path):
        return path.is_file() and path.read_bytes() == content


def _is_tokenizer(folder: Path, fingerprint: str) -> bool:
    if not all((folder / name).is_file() for name in _TOKENIZER_FILES):
        return False
    try:
        return Tokenizer.from_pretrained(folder).fingerprint == fingerprint
    except TokenizerError:
        return False


def _fetch_tokenizer(store: _Store, folder: Path, fingerprint: str) -> None:
    def fetch() -> None:
        if _is_tokenizer(folder, fingerprint):
            return
        for name in _TOKENIZER_FILES:
            write_file(folder / name, store.content(name, _MAX_TOKENIZER_BYTES))
        if not _is_tokenizer(folder, fingerprint):
            raise _TransferError(
                f"{store.url}/{_TOKENIZER_FILES[-1]} differs from the tokenizer that the shards "
                "were made with, or was damaged during the transfer"
            )

    _retried(fetch)


def _fetch_shards(store: _Store, folder: Path, files: Sequence[_Entry], progress: bool) -> None:
    total = sum(file["bytes"] for file in files)
    with storage_errors(folder):
        free = shutil.disk_usage(folder).free
    if total > free:
        raise StorageError(
            f"{store.url} needs {total / 1e6:,.0f} MB, but the disk of {folder} has only "
            f"{free / 1e6:,.0f} MB free: free some space, or set FIRSTLIGHT_CACHE to a folder on "
            "another disk"
        )
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), shown=progress) as bar:
        task = bar.add_task("fetching", total=total)
        done = 0

        def show(received: int) -> None:
            bar.update(task, completed=done + received)

        for file in files:
            _retried(functools.partial(_fetch, store, folder, file, show))
            done += file["bytes"]


def _fetch(store: _Store, folder: Path, file: _Entry, show: Callable[[int], None]) -> None:
    """Download one shard. `show` is called with the number of bytes received so far.

    Raises:
        DataError, _TransferError: see `_Store.parts`; also raised if the shard does not match the
            manifest.
    """
    digest = hashlib.sha256()
    received = 0
    shard = f"{store.url}/{file['file']}"
    with (
        replacing(folder / file["file"]) as target,
        contextlib.closing(store.parts(file["file"])) as parts,
    ):
        for part in parts:
            received += len(part)
            if received > file["bytes"]:
                break
            digest.update(part)
            target.write(part)
            show(received)
        if received != file["bytes"]:
            more = "more than" if received > file["bytes"] else f"{received:,} of"
            raise _TransferError(f"{shard} has {more} its {file['bytes']:,} bytes")
        if digest.hexdigest() != file["sha256"]:
            raise _TransferError(f"{shard} is damaged: its sha256 differs from the manifest")
