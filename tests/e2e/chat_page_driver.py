"""The page's server for tests: pieces come when the test lets them, and connections are told.

    python chat_page_driver.py MODEL_FOLDER [PIECES]

A number on a line of stdin lets so many more pieces of the answers come; PIECES come at once. Each
connection to another machine, and each name that is looked up, is a line "FOREIGN ..." of stderr.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from firstlight.console import say
from firstlight.generation import chat
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import load, pieces_of
from firstlight.serving.chat_page import require_web, serve_chat
from firstlight.serving.config import is_loopback

_permits = threading.Semaphore(0)


def _let(count: int) -> None:
    if count:
        _permits.release(count)


def _read_permits() -> None:
    for line in sys.stdin:
        _let(int(line))
    _let(1 << 20)  # nobody waits for a test that has gone


def _held_pieces(text: Continuation, decoder: BatchDecoder) -> Iterator[str]:
    for piece in pieces_of(text, decoder):
        _permits.acquire()
        yield piece


def _tell_foreign(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "localhost"
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if host not in (None, "") and not is_loopback(str(host).strip("[]")):
        say(f"FOREIGN {event} {host}")


def main() -> None:
    """Serve until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
    sys.addaudithook(_tell_foreign)
    folder, *pieces = sys.argv[1:]
    _let(int(pieces[0]) if pieces else 0)
    chat.pieces_of = _held_pieces  # type: ignore[attr-defined]
    threading.Thread(target=_read_permits, daemon=True).start()
    serve_chat(load(folder), require_web("localhost", 0))


if __name__ == "__main__":
    main()
