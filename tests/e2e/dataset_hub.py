"""A Hugging Face hub of datasets on this machine, which counts the bytes that it gives away.

It answers what the `datasets` library asks for streaming, for one dataset, `owner/name`:

    GET       /api/datasets/owner/name/revision/REVISION     the commit
    GET       /api/datasets/owner/name/tree/COMMIT/FOLDER    what lies in a folder
    HEAD GET  /datasets/owner/name/resolve/REVISION/FILE     a file, or a range of its bytes
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

NAME = "owner/name"

_COMMIT = "0123456789abcdef" * 2 + "01234567"
_INFO = re.compile(rf"/api/datasets/{NAME}(/revision/[^/]+)?")
_TREE = re.compile(rf"/api/datasets/{NAME}/tree/[^/]+/?(.*)")
_RESOLVE = re.compile(rf"/datasets/{NAME}/resolve/[^/]+/(.*)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class DatasetHub(ThreadingHTTPServer):
    """A hub that serves `files` as the dataset `owner/name`, inside a `with`.

    Attributes:
        sent: how many bytes of each file have been asked for.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.sent = dict(files), Counter[str]()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> DatasetHub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        """What to set HF_ENDPOINT to."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: DatasetHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if _INFO.fullmatch(path):
            names = [{"rfilename": name} for name in self.server.files]
            self._send_json({"id": NAME, "sha": _COMMIT, "siblings": names, "private": False})
        elif match := _TREE.fullmatch(path):
            self._send_folder(match[1])
        elif match := _RESOLVE.fullmatch(path):
            self._send_file(match[1])
        else:
            code = "EntryNotFound" if NAME in path else "RepoNotFound"
            self._send(404, {"X-Error-Code": code})

    def _send_folder(self, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, content in self.server.files.items():
            first, _, rest = name.removeprefix(prefix).partition("/")
            if name.startswith(prefix):
                kind, size = ("directory", 0) if rest else ("file", len(content))
                entry = {"type": kind, "path": prefix + first, "size": size, "oid": "0" * 40}
                entries[first] = entry
        if entries:
            self._send_json(list(entries.values()))
        else:
            self._send(404, {"X-Error-Code": "EntryNotFound"})

    def _send_file(self, name: str) -> None:
        content = self.server.files.get(name)
        if content is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{"0" * 40}"', "Accept-Ranges": "bytes"}
        begin = _RANGE.fullmatch(self.headers.get("Range", ""))
        if begin is None:
            self._send(200, headers, content, name)
            return
        start, stop = int(begin[1]), min(int(begin[2] or len(content)) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(206, headers, content[start:stop], name)

    def _send_json(self, content: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(
        self, status: int, headers: dict[str, str], body: bytes = b"", name: str | None = None
    ) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            if name is not None:
                self.server.sent[name] += len(body)
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                return  # who asked has enough
