"""Measure the response time of small requests and of /health in `firstlight serve` while other
clients continuously send prompts of a megabyte.

    python scripts/siege.py MODEL [--clients 16] [--seconds 10] [-- OPTION...]

MODEL and each OPTION are passed to `firstlight serve`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_WORDS = Path(__file__).resolve().parents[1].joinpath("docs/learning.md").read_text().split()
_BYTES = 1_000_000


def ask(url: str, content: dict[str, object] | None = None) -> int:
    """Send a request, read the whole response, and return its status."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def measured(url: str, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each small request and each /health request, which two clients send one
    by one.
    """
    prompt = {"prompt": "x", "max_tokens": 3}
    kinds: dict[str, Callable[[], int]] = {
        "small request": lambda: ask(f"{url}/v1/completions", prompt),
        "/health": lambda: ask(f"{url}/health"),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}

    def send(kind: str) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.monotonic()
            status = kinds[kind]()
            found[kind].append(time.monotonic() - begun)
            if status != 200:
                raise SystemExit(f"{kind}: status {status}")
            time.sleep(0.05)

    threads = [threading.Thread(target=send, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    """Start a server, measure it alone and under load, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("options", nargs="*", help="options of firstlight serve, after --")
    given = parser.parse_args()
    command = [sys.executable, "-m", "firstlight", "serve", given.model, "--port=0", "--json"]
    draw, over, statuses = random.Random(0), threading.Event(), Counter[int]()
    large = " ".join(draw.choices(_WORDS, k=_BYTES // 4))[:_BYTES]

    def besiege(url: str) -> None:
        while not over.is_set():
            statuses[ask(f"{url}/v1/completions", {"prompt": large, "max_tokens": 1})] += 1

    with subprocess.Popen([*command, *given.options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = str(json.loads(server.stdout.readline())["url"])
            alone = measured(url, given.seconds)
            clients = [threading.Thread(target=besiege, args=(url,)) for _ in range(given.clients)]
            for client in clients:
                client.start()
            beside = measured(url, given.seconds)
            over.set()
            for client in clients:
                client.join()
        finally:
            server.terminate()
    for kind, seconds in alone.items():
        before, after = statistics.median(seconds), statistics.median(beside[kind])
        print(
            f"{kind}: {before:.3f} s alone, {after:.3f} s ({after / before:.1f} times) beside "
            f"{given.clients} clients; the longest {max(beside[kind]):.3f} s"
        )
    print(f"responses to large prompts by status: {dict(statuses)}")


if __name__ == "__main__":
    main()
