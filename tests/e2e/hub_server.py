"""A Hugging Face hub on this machine: its endpoints, its headers, and its bad days.

It answers what the download of a model asks, with the headers that huggingface_hub reads:

    GET       /api/models/OWNER/NAME/revision/REVISION     the commit, and names of files
    GET       /api/models/OWNER/NAME/tree/COMMIT           files with sizes and hashes
    HEAD GET  /OWNER/NAME/resolve/COMMIT/FILE              small files; for large ones, a way to
    HEAD GET  /cdn/SHA256/FILE                             another host, which needs no token

Uploads are answered by hub_uploads.py. A dataset is the repository datasets/OWNER/NAME, whose
paths begin with /api/datasets and /datasets.

A commit is named by the hash of its files, so that other files are another commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import unquote, urlsplit

from hub_uploads import answer_upload

Access = Literal["public", "gated", "private"]
End = Literal["close", "reset", "stall"]

_INFO = re.compile(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/tree/([^/]+)/?")
_RESOLVE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CDN = re.compile(r"/cdn/([0-9a-f]{64})/([^/]+)")
_RANGE = re.compile(r"bytes=(\d+)-")

#: Files that the hub keeps elsewhere, as it does all of Git LFS.
_LARGE = (".safetensors", ".bin", ".gguf", ".png")

_MESSAGES = {
    "GatedRepo": "Access to this model is restricted. You must have access to it. Please log in.",
    "RepoNotFound": "Repository not found",
    "RevisionNotFound": "Invalid rev id",
    "EntryNotFound": "Entry not found",
}


@dataclass(frozen=True)
class Request:
    """One request that came in: `path` without the query, `headers` by lower-case name."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def file(self) -> str | None:
        """The file of a repository that is asked for; None if it asks for something else."""
        match = _RESOLVE.fullmatch(self.path) or _CDN.fullmatch(self.path)
        return None if match is None else match.groups()[-1]


@dataclass(frozen=True)
class File:
    """A file of a commit. `oid` is the SHA-256 of a large file, else what git calls it."""

    content: bytes
    large: bool
    oid: str


@dataclass
class Repository:
    """The commits of one model by hash, and the names (branches) of some of them."""

    access: Access
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str | None:
        """The commit that a name or a commit's hash means."""
        commit = self.names.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class _Break:
    """The next `times` answers end after `after_bytes`, though more were announced."""

    after_bytes: int
    end: End
    times: int


@dataclass
class Hub:
    """A hub that serves what `add` gave it, from entering the `with` until `stop` or leaving.

    Attributes:
        requests: all that came in, in order.
        writers: the tokens that may write, each with the owner whose repositories these are.
        objects: large files that were uploaded, by SHA-256.
        uploads_left: number of large files that arrive before the connection is reset within
            each; None is no limit.
        readers: the tokens that may read gated and private models.
        strangers: other tokens that it knows. Any that is in neither is refused.
        refused: HTTP status by method, instead of an answer.
        announced: a false size by file name, in place of the real one.
        ignores_ranges: all of a file comes, whatever part of it was asked for.
        stalled: set once an answer has stopped coming (`break_off` with "stall").
    """

    requests: list[Request] = field(default_factory=list)
    writers: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads_left: int | None = None
    readers: set[str] = field(default_factory=set)
    strangers: set[str] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)
    ignores_ranges: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stopped = threading.Event()
        self._breaks: dict[str, _Break] = {}
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """What to set HF_ENDPOINT to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def cdn_url(self) -> str:
        """The same server by another name, which makes it another host."""
        return f"http://localhost:{self._server.server_port}/cdn"

    def stop(self) -> None:
        """Be gone: from now on connections are refused."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def add(
        self, repository: str, folder: Path, revision: str = "main", access: Access = "public"
    ) -> str:
        """Serve the files of a folder as `repository` (OWNER/NAME) at `revision`.

        Args:
            access: "public"; "gated", which all see and `readers` download; or "private".

        Returns:
            The hash of the commit.
        """
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        files = {name: stored(name, path.read_bytes()) for name, path in names.items()}
        return self.commit(repository, files, revision, access)

    def commit(self, repository: str, files: dict[str, File], revision: str, access: Access) -> str:
        """Let files be all that a repository has at a revision; return the hash of the commit."""
        listing = "".join(f"{name} {file.oid}\n" for name, file in files.items())
        commit = hashlib.sha1(f"{repository}\n{listing}".encode()).hexdigest()
        kept = self.repositories.setdefault(repository, Repository(access))
        kept.commits[commit] = files
        kept.names[revision] = commit
        return commit

    def break_off(self, name: str, after_bytes: int, end: End = "close", times: int = 1) -> None:
        """Let the next `times` answers with file `name` end after some bytes of them.

        Args:
            end: the connection is closed in good order, reset, or open and silent until `stop`.
        """
        self._breaks[name] = _Break(after_bytes, end, times)

    def next_break(self, name: str) -> _Break | None:
        """What is to happen to an answer with file `name`, if anything."""
        with self._lock:
            found = self._breaks.get(name)
            if found is None or found.times == 0:
                return None
            found.times -= 1
            return found

    def asked_for(self, method: str = "GET") -> list[str]:
        """The files of repositories that were asked for, once for each time, sorted."""
        files = [request.file for request in self.requests if request.method == method]
        return sorted(file for file in files if file is not None)

    def ranges(self, name: str) -> list[str | None]:
        """What part of file `name` each request for its content asked for, in order."""
        return [
            request.headers.get("range")
            for request in self.requests
            if request.method == "GET" and request.file == name
        ]


def stored(name: str, content: bytes) -> File:
    """A file of a commit."""
    large = name.endswith(_LARGE)
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return File(content, large, hashlib.sha256(content).hexdigest() if large else git)


class _Server(ThreadingHTTPServer):
    """The server of a hub, on a free port."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """One request to a hub."""

    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: `Hub.requests` has it."""

    def _answer(self) -> None:
        hub, path = self.server.hub, urlsplit(self.path).path
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(Request(self.command, unquote(path), headers))
        if self.command in hub.refused:
            self.send(hub.refused[self.command])
        elif self.command in ("POST", "PUT"):
            answer_upload(self, hub, unquote(path))
        elif match := _INFO.fullmatch(path):
            self._send_info(match[1], match[2] or "main")
        elif match := _TREE.fullmatch(path):
            self._send_tree(*match.groups())
        elif match := _CDN.fullmatch(path):
            self._send_from_cdn(*match.groups())
        elif match := _RESOLVE.fullmatch(path):
            self._send_file(*match.groups())
        else:
            self.send(404)

    def _files(
        self, repository: str, revision: str, reads_files: bool = False
    ) -> tuple[str, dict[str, File]] | None:
        """A revision's commit and its files; None when an error was sent in their place."""
        hub = self.server.hub
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme and (
            scheme != "Bearer" or token not in hub.readers | hub.strangers | set(hub.writers)
        ):
            message = "Invalid credentials in Authorization header"
            self.send(401, {"X-Error-Message": message})
            return None
        found = hub.repositories.get(repository)
        if found is None or (found.access == "private" and not self._may_read(token, repository)):
            self._refuse(404 if token else 401, "RepoNotFound")
        elif found.access == "gated" and reads_files and token not in hub.readers:
            self._refuse(403 if token else 401, "GatedRepo")
        elif (commit := found.commit_of(unquote(revision))) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return commit, found.commits[commit]
        return None

    def _may_read(self, token: str, repository: str) -> bool:
        hub, owner = self.server.hub, repository.removeprefix("datasets/").partition("/")[0]
        return token in hub.readers or hub.writers.get(token) == owner

    def _send_info(self, repository: str, revision: str) -> None:
        found = self._files(repository, revision)
        if found is not None:
            commit, files = found
            siblings = [{"rfilename": name} for name in files]
            private = self.server.hub.repositories[repository].access == "private"
            name = repository.removeprefix("datasets/")
            self.send_json({"id": name, "sha": commit, "siblings": siblings, "private": private})

    def _send_tree(self, repository: str, revision: str) -> None:
        found = self._files(repository, revision)
        if found is None:
            return
        entries: list[dict[str, object]] = []
        for name, file in found[1].items():
            size = len(file.content)
            entry: dict[str, object] = {"type": "file", "path": name, "size": size}
            if file.large:
                entry["lfs"] = {"oid": file.oid, "size": size, "pointerSize": 134}
            entries.append({**entry, "oid": file.oid[:40]})
        self.send_json(entries)

    def _send_file(self, repository: str, revision: str, name: str) -> None:
        found = self._files(repository, revision, reads_files=True)
        if found is None:
            return
        commit, files = found
        file = files.get(unquote(name))
        if file is None:
            self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
        if not file.large:
            self.send(200, headers, file.content)
            return
        size = self.server.hub.announced.get(name, len(file.content))
        headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{file.oid}"'}
        self.send(302, {**headers, "Location": f"{self.server.hub.cdn_url}/{file.oid}/{name}"})

    def _send_from_cdn(self, oid: str, name: str) -> None:
        repositories = self.server.hub.repositories.values()
        commits = (files for repository in repositories for files in repository.commits.values())
        content = next(
            file.content for files in commits for file in files.values() if file.oid == oid
        )
        begin = _RANGE.fullmatch(self.headers.get("Range", ""))
        if begin is None or self.server.hub.ignores_ranges:
            self.send(200, {"Accept-Ranges": "bytes"}, content, name)
            return
        start, size = int(begin[1]), len(content)
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        self.send(206, headers, content[start:], name)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        """One of the hub's own errors."""
        message = "Invalid username or password." if status == 401 else _MESSAGES[code]
        message = _MESSAGES[code] if code == "GatedRepo" else message
        self.send(status, {**(headers or {}), "X-Error-Code": code, "X-Error-Message": message})

    def send_json(self, content: object) -> None:
        """Send a value as JSON."""
        self.send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def send(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        name: str | None = None,
    ) -> None:
        """The whole answer. That with file `name` may be told to break off."""
        self.send_response(status)
        for header, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        broken = self.server.hub.next_break(name) if name is not None else None
        try:
            self.wfile.write(body if broken is None else body[: broken.after_bytes])
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            return  # it hung up, or was killed
        if broken is not None and broken.end == "reset":
            self.reset()
        if broken is not None and broken.end == "stall":
            self.server.hub.stalled.set()
            self.server.hub.stopped.wait()

    def reset(self) -> None:
        """Let the connection end with a reset: closing without lingering is what sends one."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
