"""A web page of active runs, served to this machine only: the page of `firstlight report A B`,
which is drawn again when the runs' files change."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from firstlight.errors import ConfigError, FirstlightError, describe_os_error
from firstlight.report.compare import compare, dashboard_page, distinct_labels
from firstlight.report.length import LENGTH_NAME
from firstlight.report.records import (
    EVENTS_NAME,
    METRICS_NAME,
    RECIPE_NAME,
    SAMPLES_NAME,
    STARTS_NAME,
    read_run,
    require_run,
)

_FILES = (METRICS_NAME, SAMPLES_NAME, EVENTS_NAME, STARTS_NAME, RECIPE_NAME, LENGTH_NAME)
_ADDRESS = "127.0.0.1"


class Dashboard:
    """Draws the page of the current state of some runs.

    Args:
        folders: run folders, and folders that contain run folders, where new runs are found, too.

    Raises:
        InputError: a folder is missing, or is neither of these.
        ConfigError: a folder is given twice.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        for folder in folders:
            if not _runs_in(folder):
                require_run(folder)
        distinct_labels(folders)
        self._lock = threading.Lock()
        self._drawn: dict[str, tuple[str, bytes]] = {}

    def page(self, query: str) -> tuple[str, bytes]:
        """The page of the runs whose names contain all words of `query`, and its ETag.

        Raises:
            FirstlightError: a file of a run is damaged.
        """
        runs = [run for folder in self._folders for run in _runs_in(folder) or [folder]]
        runs = list({run.resolve(): run for run in runs}.values())
        labels = distinct_labels(runs)
        words = query.lower().split()
        chosen = [
            run
            for run, label in zip(runs, labels, strict=True)
            if all(word in label.lower() for word in words)
        ]
        tag = _tag(query, chosen)
        # Under a lock, so that a page that several browser tabs request is drawn once.
        with self._lock:
            drawn = self._drawn.get(query)
            if drawn is None or drawn[0] != tag:
                text = dashboard_page(compare([read_run(run) for run in chosen]), query)
                drawn = (tag, text.encode())
                # Only the last four pages are kept: while a user types a search text, each letter
                # is a query of its own.
                self._drawn = {**dict(list(self._drawn.items())[-3:]), query: drawn}
            return drawn


def _runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder of runs, sorted by name; [] if `folder` is a run itself."""
    if not folder.is_dir() or _is_run(folder):
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_NAME).is_file()


def _tag(query: str, runs: Sequence[Path]) -> str:
    """An ETag that changes when a file of the runs changes, by inode, size and time."""
    found = hashlib.sha256(query.encode())
    for path in (run / name for run in runs for name in _FILES):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.update(f"{path}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return f'"{found.hexdigest()[:32]}"'


def serve(dashboard: Dashboard, port: int) -> ThreadingHTTPServer:
    """Make the HTTP server of a dashboard, on the loopback address only. The caller runs it by
    `serve_forever`.

    Args:
        dashboard: the dashboard.
        port: port number; 0 takes a free port.

    Raises:
        ConfigError: the port can't be opened.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            own = f":{self.connection.getsockname()[1]}"
            # DNS rebinding: a web site whose name resolves to this machine must not read the runs.
            if self.headers.get("Host") not in (_ADDRESS + own, "localhost" + own):
                return self._reply(421, b"open the address that firstlight dashboard has printed")
            asked = urlsplit(self.path)
            if asked.path != "/":
                return self._reply(404, b"there is one page: /")
            query = " ".join(parse_qs(asked.query).get("q", []))[:200]
            try:
                tag, content = dashboard.page(query)
            except FirstlightError as error:
                return self._reply(503, str(error).encode())
            if self.headers.get("If-None-Match") == tag:
                return self._reply(304, b"", tag)
            return self._reply(200, content, tag)

        def _reply(self, status: int, content: bytes, tag: str | None = None) -> None:
            self.send_response(status)
            kind = "text/html" if status == 200 else "text/plain"
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            if tag is not None:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Do nothing, so that requests are not logged in the terminal."""

    try:
        return ThreadingHTTPServer((_ADDRESS, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port}: {describe_os_error(error)}: name another one with --port"
        ) from error
