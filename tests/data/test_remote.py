"""Tests of prepared corpora at URLs: downloaded completely, verified, cached, and downloaded again
if damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from firstlight.data import remote
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.data.remote import is_url, local_folder
from firstlight.data.sources import SOURCES_NAME
from firstlight.errors import DataError, FirstlightError, MissingDependencyError, StorageError
from firstlight.files.cache import cache_folder
from firstlight.tokenizer import Tokenizer, train_tokenizer
from remote_server import ENDLESS_BYTES, Fault, RemoteServer
from waiting import PATIENCE_SECONDS, wait_until

SHARD = "train-00001.bin"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate cache folder, and do not wait between attempts."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "_WAITS_SECONDS", (0.0, 0.0, 0.0))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Tokenizer) -> Path:
    """Write the corpus in several shards. Tests must not change it."""
    folder = tmp_path_factory.mktemp("remote") / "prepared"
    prepare([corpus], tokenizer, folder, shard_tokens=3000)
    return folder


@pytest.fixture
def source(tmp_path: Path, prepared: Path) -> Path:
    """Return a copy of the corpus that a test may change."""
    return Path(shutil.copytree(prepared, tmp_path / "source"))


@pytest.fixture
def server(source: Path) -> Iterator[RemoteServer]:
    with RemoteServer(source) as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    """Return the names of the files that are downloaded for a corpus."""
    files = [p for p in folder.iterdir() if not p.name.startswith(".") and p.name != SOURCES_NAME]
    return {p.name: p.read_bytes() for p in files}


def refusal(url: str) -> str:
    with pytest.raises(FirstlightError) as caught:
        local_folder(url)
    return str(caught.value)


def whole_files_only(cache: Path, source: Path) -> bool:
    """Return True if the cache contains only complete files of the source."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    return all(path.read_bytes() == (source / path.name).read_bytes() for path in files)


def change_manifest(source: Path, change: Any) -> None:
    manifest = json.loads((source / "manifest.json").read_text())
    change(manifest)
    (source / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "location, expected",
    [
        ("s3://bucket/folder", True),
        ("S3://bucket", True),
        ("hf://datasets/owner/name", True),
        ("simplecache::s3://bucket/a", True),
        ("file:///tmp/x", True),
        ("data/corpus", False),
        ("/data/corpus", False),
        ("s3:/bucket", False),
        ("a folder://x", False),
        ("./a://b", False),
    ],
)
def test_is_url_distinguishes_urls_from_folders(location: str, expected: bool) -> None:
    assert is_url(location) is expected


def test_local_folder_local_path_is_returned_unchanged(cache: Path) -> None:
    assert local_folder("data/corpus") == Path("data/corpus")
    assert local_folder("~/corpus") == Path.home() / "corpus"
    assert not cache.exists()


def test_cache_folder_follows_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FIRSTLIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "firstlight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "firstlight"


def test_local_folder_remote_corpus_equals_original(prepared: Path) -> None:
    system = fsspec.filesystem("memory")
    system.put(str(prepared), "/remote-corpus", recursive=True)
    try:
        here = local_folder(f"file://{prepared}")
        there = local_folder("memory://remote-corpus")
        assert contents(here) == contents(there) == contents(prepared)
        assert here != there
        assert local_folder("memory://remote-corpus/") == there
    finally:
        system.rm("/remote-corpus", recursive=True)


def test_local_folder_http_corpus_is_fetched_once(server: RemoteServer, source: Path) -> None:
    folder = local_folder(server.url)
    assert contents(folder) == contents(source)
    assert sorted(server.requests) == sorted(contents(source)), "each file once"
    assert TokenDataset(folder, "train").num_tokens == TokenDataset(source, "train").num_tokens
    server.requests.clear()
    assert local_folder(server.url) == folder
    assert server.requests == ["manifest.json"]


def test_local_folder_fetches_only_needed_splits(server: RemoteServer) -> None:
    folder = local_folder(server.url, ("val",))
    assert [name for name in contents(folder) if name.endswith(".bin")] == ["val-00000.bin"]
    TokenDataset(folder, "val")
    server.requests.clear()
    assert local_folder(server.url, ("train", "val", "none")) == folder
    assert "val-00000.bin" not in server.requests
    assert SHARD in server.requests


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", SHARD])
@pytest.mark.parametrize("fault", ["cut", 500, 429])
def test_local_folder_interrupted_transfer_is_retried(
    server: RemoteServer, source: Path, name: str, fault: Fault
) -> None:
    server.fail(name, [fault] * 3)
    assert contents(local_folder(server.url)) == contents(source)
    assert server.requests.count(name) == 4


@pytest.mark.parametrize("fault", ["cut", "short", "long", "wrong"])
def test_local_folder_wrong_bytes_are_never_kept(
    server: RemoteServer, source: Path, cache: Path, fault: Fault
) -> None:
    server.fail(SHARD, [fault] * 4)
    said = {
        "cut": "could not be fetched: ",
        "short": f"has {(source / SHARD).stat().st_size // 2:,} of its ",
        "long": "has more than its ",
        "wrong": "is damaged: its sha256 differs from the manifest (tried 4 times):",
    }[str(fault)]
    message = refusal(server.url)
    assert message.startswith(f"{server.url}/{SHARD} {said}")
    assert "(tried 4 times): try again later" in message
    assert server.requests.count(SHARD) == 4
    assert whole_files_only(cache, source)
    # Files that were downloaded before the error are kept and not downloaded again.
    server.requests.clear()
    assert contents(local_folder(server.url)) == contents(source)
    assert "train-00000.bin" not in server.requests
    assert server.requests.count(SHARD) == 1


def test_local_folder_reads_no_more_than_declared_file_size(
    server: RemoteServer, cache: Path
) -> None:
    server.fail(SHARD, ["endless"] * 4)
    assert f"{SHARD} has more than its " in refusal(server.url)
    assert server.requests.count(SHARD) == 4
    assert server.sent < ENDLESS_BYTES
    assert all(path.stat().st_size < 10**6 for path in cache.rglob("*"))


def test_local_folder_http_client_error_is_not_retried(server: RemoteServer) -> None:
    server.fail(SHARD, [403])
    assert f"{server.url}/{SHARD} can't be read: 403" in refusal(server.url)
    assert server.requests.count(SHARD) == 1


class Forbidden(MemoryFileSystem):  # type: ignore[misc]
    """A file system in which no file may be read."""

    protocol = "forbidden"
    opened = 0

    def _open(self, *_: Any, **__: Any) -> None:
        type(self).opened += 1
        raise PermissionError("access denied for you")


def test_local_folder_access_denied_is_not_retried() -> None:
    fsspec.register_implementation("forbidden", Forbidden, clobber=True)
    assert refusal("forbidden://x") == (
        "access to forbidden://x/manifest.json was denied: access denied for you; "
        "check your credentials"
    )
    assert Forbidden.opened == 1


def test_local_folder_tokenizer_not_matching_shards_fails(
    server: RemoteServer, source: Path, texts: list[str]
) -> None:
    train_tokenizer(texts, 300).save_pretrained(source)
    assert "tokenizer.json differs from the tokenizer that the shards" in refusal(server.url)
    (source / "tokenizer.json").write_text("{")
    assert "tokenizer.json differs from the tokenizer that the shards" in refusal(server.url)


def test_local_folder_damaged_cached_manifest_is_rewritten(
    server: RemoteServer, source: Path
) -> None:
    folder = local_folder(server.url)
    (folder / "manifest.json").write_text("{}")
    assert local_folder(server.url) == folder
    assert contents(folder) == contents(source)


@pytest.mark.parametrize("same_size", [True, False])
def test_local_folder_damaged_cached_file_is_fetched_again(
    server: RemoteServer, source: Path, same_size: bool
) -> None:
    folder = local_folder(server.url)
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if same_size else b""))
    server.requests.clear()
    local_folder(server.url, verify=False)
    assert server.requests.count(SHARD) == (0 if same_size else 1)
    assert contents(local_folder(server.url)) == contents(source)


def test_local_folder_reprepared_corpus_gets_new_folder(
    server: RemoteServer, source: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    before = local_folder(server.url)
    old = contents(before)
    shutil.rmtree(source)
    prepare([corpus], tokenizer, source, val_fraction=0.2)
    after = local_folder(server.url)
    assert after != before
    assert contents(after) == contents(source)
    assert contents(before) == old


@pytest.mark.parametrize(
    "name",
    ["../train-00000.bin", "/etc/x.bin", "..", ".lock", "a/b.bin", "tokenizer.json", "x?.bin"],
)
def test_local_folder_shard_names_outside_folder_fail(
    server: RemoteServer, source: Path, cache: Path, name: str
) -> None:
    def change(manifest: Any) -> None:
        manifest["splits"]["val"]["shards"][0]["file"] = name

    change_manifest(source, change)
    assert f"lists an invalid shard name: {name}" in refusal(server.url)
    assert server.requests == ["manifest.json"]
    assert whole_files_only(cache, source)


def test_local_folder_shard_listed_twice_fails(server: RemoteServer, source: Path) -> None:
    def change(manifest: Any) -> None:
        manifest["splits"]["val"]["shards"][0]["file"] = SHARD

    change_manifest(source, change)
    assert f"the manifest lists {SHARD} twice" in refusal(server.url)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "firstlight-tokens"}', b"\xff"])
def test_local_folder_invalid_manifest_fails(
    server: RemoteServer, source: Path, content: bytes
) -> None:
    (source / "manifest.json").write_bytes(content)
    assert refusal(server.url).startswith(f"{server.url}: ")


def test_local_folder_endless_manifest_is_read_to_limit_only(
    server: RemoteServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_JSON_BYTES", 100)
    assert refusal(server.url) == f"{server.url}/manifest.json is longer than 100 bytes"


def test_local_folder_full_disk_raises_before_fetching(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(StorageError, match="0 MB free: free some space, or set"):
        local_folder(server.url)
    assert SHARD not in server.requests


@pytest.mark.parametrize(
    "url, kind, said",
    [
        (
            "gs://bucket/data",
            MissingDependencyError,
            r"'gcsfs' package: pip install 'firstlight\[remote\]'",
        ),
        ("nosuch://x/y", DataError, "nosuch://x/y can't be opened: Protocol not known: nosuch"),
        ("memory://not-there", DataError, "has no manifest.json: use a complete folder"),
        ("file:///not/there", DataError, "has no manifest.json: use a complete folder"),
        ("https://me:secret@host/data", DataError, "must not contain a password"),
        ("https://host/data?version=2", DataError, "is not the URL of a folder: remove the part"),
        ("http://127.0.0.1:1/data", DataError, r"could not be fetched: .*\(tried 4 times\)"),
    ],
)
def test_local_folder_unreadable_locations_raise_without_secrets(
    url: str, kind: type[FirstlightError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(kind, match=said) as caught:
        local_folder(url)
    assert "secret" not in str(caught.value)


FETCH = """
import sys
from firstlight.data.remote import local_folder
print(local_folder(sys.argv[1]))
"""


def fetching(url: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *options, "-c", FETCH, url], stdout=subprocess.PIPE, text=True
    )


def wait_for(server: RemoteServer, name: str, count: int = 1) -> None:
    wait_until(
        f"{count} requests for {name}; requests",
        lambda: server.requests,
        lambda requests: requests.count(name) >= count,
    )


def test_local_folder_simultaneous_processes_fetch_once(server: RemoteServer, source: Path) -> None:
    server.gate[SHARD] = threading.Event()
    processes = [fetching(server.url) for _ in range(3)]
    try:
        wait_for(server, "manifest.json", 3)
        wait_for(server, SHARD)
        server.gate[SHARD].set()
        folders = {
            process.communicate(timeout=PATIENCE_SECONDS)[0].strip() for process in processes
        }
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    (folder,) = folders
    assert contents(Path(folder)) == contents(source)
    counts = {name: server.requests.count(name) for name in contents(source)}
    assert counts == {**dict.fromkeys(counts, 1), "manifest.json": 3}


def test_local_folder_killed_process_leaves_complete_files_and_no_lock(
    server: RemoteServer, source: Path, cache: Path
) -> None:
    server.gate[SHARD] = threading.Event()
    process = fetching(server.url)
    try:
        wait_for(server, SHARD)
    finally:
        process.kill()
        process.communicate()
        server.gate[SHARD].set()
    (folder,) = (cache / "data").iterdir()
    assert any(name.startswith(f".tmp-{SHARD}") for name in os.listdir(folder))
    server.requests.clear()
    assert contents(local_folder(server.url)) == contents(source)
    assert "train-00000.bin" not in server.requests
    assert sorted(os.listdir(folder)) == sorted([".lock", *contents(source)])


def test_local_folder_hub_dataset_is_fetched(
    server: RemoteServer,
    source: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.endpoint, "token": False})
    server.fail(SHARD, ["wrong"])
    folder = local_folder("hf://datasets/owner/name/data")
    assert contents(folder) == contents(source)
    # An earlier folder listing is not trusted.
    shutil.rmtree(source)
    prepare([corpus], tokenizer, source, shard_tokens=1000)
    assert contents(local_folder("hf://datasets/owner/name/data")) == contents(source)


def test_local_folder_s3_bucket_is_fetched(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("corpora")
        system.put(f"{prepared}/", "corpora/text", recursive=True)
        assert contents(local_folder("s3://corpora/text")) == contents(prepared)
        wrong = (prepared / SHARD).read_bytes()[:-1] + b"?"
        system.pipe_file(f"corpora/text/{SHARD}", wrong)
        (folder,) = (cache_folder() / "data").iterdir()
        (folder / SHARD).unlink()
        assert "is damaged: its sha256 differs from the manifest" in refusal("s3://corpora/text")
        assert "s3://corpora/none has no manifest.json" in refusal("s3://corpora/none")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert "was denied: Unable to locate credentials" in refusal("s3://corpora/text")
    finally:
        server.stop()
