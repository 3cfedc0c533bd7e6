"""An HTTP server on this machine that serves a folder, and has bad days: cut transfers, wrong
bytes, refusals."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, Self

from waiting import PATIENCE_SECONDS

#: "cut" ends the connection before the promised length; "short" promises no more than half;
#: "endless" promises nothing and does not end; a number is the status of a refusal.
Fault = Literal["cut", "short", "long", "wrong", "endless"] | int

#: What "endless" ends at after all.
ENDLESS_BYTES = 1 << 28


class RemoteServer:
    """Serves a folder below /data; as a dataset of the hub, below /datasets/OWNER/NAME, too.

    Attributes:
        requests: the names of the files that were asked for, in order.
        sent: bytes of endless answers.
        gate: a file whose name is here waits until the event is set.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.gate: dict[str, threading.Event] = {}
        self._folder = folder
        self._faults: dict[str, list[Fault]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"{self.endpoint}/data"

    def fail(self, name: str, faults: Sequence[Fault]) -> None:
        """What goes wrong with the next requests for a file, in order."""
        self._faults[name] = list(faults)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self, self.path.partition("?")[0])

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        return Handler

    def _hub_answer(self, path: str) -> object:
        """Of the hub: what a dataset is, and which files are in its folder `data`."""
        if "/tree/" not in path:
            return {"id": "owner/name", "sha": "0" * 40, "siblings": [], "private": False}
        return [
            {"type": "file", "path": f"data/{file.name}", "size": file.stat().st_size, "oid": "0"}
            for file in self._folder.iterdir()
        ]

    def _answer(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if path.startswith("/api/datasets/"):
            _send(handler, 200, json.dumps(self._hub_answer(path)).encode())
            return
        name = path.rpartition("/")[2]
        self.requests.append(name)
        if name in self.gate:
            self.gate[name].wait(PATIENCE_SECONDS)
        faults = self._faults.get(name)
        fault = faults.pop(0) if faults else None
        file = self._folder / name
        if isinstance(fault, int) or not file.is_file():
            _send(handler, fault if isinstance(fault, int) else 404, b"no")
            return
        content = file.read_bytes()
        if fault == "cut":
            _send(handler, 200, content[: len(content) // 2], len(content))
            handler.close_connection = True
        elif fault == "short":
            _send(handler, 200, content[: len(content) // 2])
        elif fault == "long":
            _send(handler, 200, content + b"more")
        elif fault == "endless":
            self._send_endlessly(handler)
        elif fault == "wrong":
            _send(handler, 200, content[:-1] + bytes([content[-1] ^ 1]))
        else:
            _send(handler, 200, content)

    def _send_endlessly(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < ENDLESS_BYTES:
                sent += handler.wfile.write(bytes(1 << 16))
        self.sent += sent


def _send(
    handler: BaseHTTPRequestHandler, status: int, content: bytes, length: int | None = None
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)
