"""`firstlight serve` as a process: start, refusal to start, shutdown, and operation under
attack.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner
from test_connections import HEALTH, POST, is_closed, read_answer
from test_disconnects import content_for, raw_request
from tiny import PATIENCE, tiny_model, tiny_tokenizer

from firstlight.cli.generate import require_packages, serve_command
from firstlight.errors import ConfigError, MissingDependencyError, StorageError
from firstlight.files.atomic import write_file
from firstlight.serving.config import MAX_CHOICES, MAX_PROMPTS
from firstlight.serving.server import Server
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny model in a folder."""
    made = tmp_path_factory.mktemp("models") / "my-model"
    made.mkdir()
    for name, text in model_files(tiny_model().config, tiny_tokenizer()).items():
        write_file(made / name, text)
    save_weights(weights_to_save(tiny_model()), made)
    return made


@dataclass
class Running:
    """A server process.

    Attributes:
        process: the command.
        ready: the JSON object printed by --json.
    """

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]

    @property
    def address(self) -> tuple[str, int]:
        """The address for sockets."""
        return "127.0.0.1", int(self.ready["url"].rpartition(":")[2])

    def connect(self) -> socket.socket:
        """Open a connection with a timeout."""
        return socket.create_connection(self.address, timeout=PATIENCE)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and return exit code and stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said.decode()


@contextmanager
def running(folder: Path, *options: str, **environment: str) -> Iterator[Running]:
    """Run the command, and yield it once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "firstlight", "serve", str(folder), "--port=0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, said = process.communicate(timeout=PATIENCE)
            raise AssertionError(said.decode())
        yield Running(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_serve_prints_address_and_exits_with_0(folder: Path) -> None:
    with running(folder, "--max-batch-size=3", "--max-context-tokens=64") as server:
        ready = server.ready
        assert ready["model"] == "my-model"
        assert (ready["max_batch_size"], ready["max_context_tokens"]) == (3, 64)
        # 2 layers, 2 heads of dimension 4, keys and values, 4 bytes each.
        assert ready["cache_bytes"] == 2 * 2 * 4 * 2 * 4 * 64 * 3
        assert ready["needs_key"] is False
        with urllib.request.urlopen(f"{ready['url']}/v1/models", timeout=PATIENCE) as answer:
            (card,) = json.load(answer)["data"]
        assert card["id"] == "my-model"
        with server.connect() as stream:
            content = content_for("/v1/completions", stream=True, max_tokens=50)
            stream.sendall(raw_request("/v1/completions", content))
            assert stream.recv(4096).startswith(b"HTTP/1.1 200")
            code, said = server.end()
            received = b""
            while piece := stream.recv(4096):
                received += piece
        assert b"data: [DONE]" in received
        assert code == 0
        url = ready["url"]
        assert f"serving my-model; API: {url}/v1, chat page: {url}/ (Ctrl-C" in said
        assert "at most 3 concurrent texts of 64 tokens" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_serve_exits_with_0_for_each_ending_signal(folder: Path, number: int) -> None:
    key = folder.parent / "key"
    key.write_text("From-A-File\n", encoding="utf-8")
    with running(folder, f"--api-key-file={key}", "--model-name=other") as server:
        assert server.ready["needs_key"] is True
        assert server.ready["model"] == "other"
        with server.connect() as connection:
            connection.sendall(HEALTH.replace(b"health", b"metrics"))
            assert read_answer(connection)[0] == 401
            right = b"Authorization: Bearer From-A-File\r\n\r\n"
            connection.sendall(HEALTH.replace(b"health", b"metrics")[:-2] + right)
            assert read_answer(connection)[0] == 200
        code, said = server.end(number)
        assert code == 0
        assert "From-A-File" not in said
        # A browser can't send the key.
        assert "chat page" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_signals_ignored_at_start_stay_ignored(number: int) -> None:
    server = Server(uvicorn.Config(lambda: None), shutdown_timeout=0)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with server.capture_signals():
            signal.raise_signal(number)
        ended = [server.should_exit]
        signal.signal(number, before)
        with suppress(KeyError), server.capture_signals():
            signal.raise_signal(number)
            raise KeyError
        assert [*ended, server.should_exit] == [False, True]
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, before)


def invoke(*arguments: str) -> Any:
    """Return the error of a command that does not start."""
    result = CliRunner().invoke(serve_command, arguments)
    return result.exception


def test_serve_public_host_without_key_raises_config_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIRSTLIGHT_API_KEY", raising=False)
    error = invoke(str(folder), "--host=0.0.0.0")
    assert isinstance(error, ConfigError)
    assert "FIRSTLIGHT_API_KEY" in str(error)
    for empty in ("", "a b"):
        monkeypatch.setenv("FIRSTLIGHT_API_KEY", empty)
        assert isinstance(invoke(str(folder), "--host=0.0.0.0"), ConfigError)


def test_serve_port_in_use_raises_storage_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = invoke(str(folder), f"--port={port}")
    assert isinstance(error, StorageError)
    reason = os.strerror(errno.EADDRINUSE)
    assert str(error) == (f"can't listen on 127.0.0.1 port {port}: {reason}; choose another --port")
    error = invoke(str(folder), "--host=127.0.0.999")
    assert isinstance(error, ConfigError)


def test_serve_missing_package_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[serve\]'"):
        require_packages()


# Attacks


class Besieger:
    """Opens slow and malicious connections, all at the same time, until it is told to stop."""

    def __init__(self, server: Running, slow: int) -> None:
        self._server, self._slow = server, slow
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._drip)] + [
            threading.Thread(target=attack) for attack in (self._large, self._deep)
        ]
        self.begun = threading.Barrier(4)
        self.drops = self.large = self.deep = 0

    def __enter__(self) -> Besieger:
        for thread in self._threads:
            thread.start()
        self.begun.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _drip(self) -> None:
        """Hold connections open, send one byte on each in turn, and replace those that are
        closed.
        """
        generator = random.Random(0)
        beginnings = (HEALTH[:9], POST + b"Content-Length: 900\r\n\r\n", b"")
        with ExitStack() as stack:
            held: list[socket.socket] = []

            def another() -> socket.socket:
                made = stack.enter_context(self._server.connect())
                made.sendall(generator.choice(beginnings))
                made.setblocking(False)
                return made

            held = [another() for _ in range(self._slow)]
            self.begun.wait(PATIENCE)
            while not self._over.wait(0.001):
                place = generator.randrange(len(held))
                try:
                    held[place].send(b"x")
                    if held[place].recv(4096) == b"":
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
                except OSError:
                    self.drops += 1
                    held[place].close()
                    held[place] = another()

    def _large(self) -> None:
        self.begun.wait(PATIENCE)
        piece = b" " * 2**16
        while not self._over.is_set():
            with self._server.connect() as connection, suppress(OSError):
                connection.sendall(POST + f"Content-Length: {100 * 2**20}\r\n\r\n".encode())
                for _ in range(1600):
                    connection.sendall(piece)
            self.large += 1

    def _deep(self) -> None:
        self.begun.wait(PATIENCE)
        body = b'{"prompt":' * 100_000
        head = POST + f"Content-Length: {len(body)}\r\n\r\n".encode()
        while not self._over.is_set():
            with self._server.connect() as connection:
                connection.sendall(head + body)
                assert read_answer(connection)[0] == 400
            self.deep += 1


def besieged(folder: Path, slow: int, requests: int) -> tuple[list[float], Besieger]:
    """Return the seconds taken by each valid request during an attack."""
    took = []
    with running(folder, "--header-timeout=2", "--body-timeout=2") as server:
        with Besieger(server, slow) as besieger:
            for number in range(requests):
                began = time.monotonic()
                with server.connect() as good:
                    good.sendall(HEALTH)
                    assert read_answer(good)[0] == 200
                took.append(time.monotonic() - began)
                if number % 10 == 0:
                    with server.connect() as good:
                        content = content_for("/v1/completions", max_tokens=3)
                        good.sendall(raw_request("/v1/completions", content))
                        assert read_answer(good)[0] == 200
        code, said = server.end()
        assert code == 0, said
        assert "Traceback" not in said
    return sorted(took), besieger


def test_serve_answers_client_among_thirty_slow_ones(folder: Path) -> None:
    took, besieger = besieged(folder, slow=30, requests=60)
    assert len(took) == 60
    assert besieger.deep > 0


@pytest.mark.slow
def test_serve_answers_client_within_a_second_among_500_slow_ones(
    folder: Path, record_property: Any
) -> None:
    took, besieger = besieged(folder, slow=500, requests=1000)
    p99 = took[len(took) * 99 // 100]
    record_property("p99", p99)
    print(  # noqa: T201
        f"/health: p50 {took[len(took) // 2]:.4f} s, p99 {p99:.4f} s, worst {took[-1]:.4f} s; "
        f"{besieger.drops} slow connections dropped, {besieger.large} large bodies, "
        f"{besieger.deep} deep ones"
    )
    assert besieger.drops > 100
    assert p99 < 1.0


def test_serve_slow_client_does_not_delay_shutdown(folder: Path) -> None:
    with running(folder) as server, ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(4)]
        slow[0].sendall(HEALTH[:9])
        slow[1].sendall(POST + b"Content-Length: 9\r\n\r\n{")
        slow[2].sendall(HEALTH)
        assert read_answer(slow[2])[0] == 200
        code, said = server.end()
        assert all(is_closed(connection) for connection in slow)
        assert code == 0
        assert "Traceback" not in said


def test_serve_second_interrupt_before_shutdown_ends_answers() -> None:
    async def is_cancelled() -> bool:
        server = Server(uvicorn.Config(lambda: None), shutdown_timeout=600)
        server.servers, server.force_exit = [], True
        for _ in range(2):
            server.handle_exit(signal.SIGINT, None)
        answer = asyncio.create_task(asyncio.sleep(PATIENCE))
        server.server_state.tasks.add(answer)
        answer.add_done_callback(server.server_state.tasks.discard)
        await server.shutdown()
        return answer.cancelled()

    assert asyncio.run(is_cancelled())


@pytest.mark.parametrize("stream", [False, True])
def test_serve_second_interrupt_ends_answers_with_api_error(
    folder: Path, tmp_path: Path, stream: bool
) -> None:
    """The response is neither a plain-text 500 nor a traceback. A single interrupt would wait for
    ten minutes.
    """
    # Four million sequential steps, which no machine completes before the second signal.
    long = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((long / "config.json").read_text(encoding="utf-8"))
    write_file(long / "config.json", json.dumps({**config, "max_position_embeddings": 8192}))
    content = content_for(
        "/v1/completions", stream=stream, max_tokens=8000, prompt=["x"] * MAX_PROMPTS, n=MAX_CHOICES
    )
    options = ("--shutdown-timeout=600", "--max-batch-size=1", "--max-queue=1000")
    with running(long, *options) as server, server.connect() as connection:
        connection.sendall(raw_request("/v1/completions", content))
        if stream:
            begun = connection.recv(2**16)
            assert begun.startswith(b"HTTP/1.1 200"), f"waited for a stream, and got {begun!r}"
        else:
            wait_until_running(server, connection)
        server.process.send_signal(signal.SIGINT)
        wait_until_refused(server)
        code, said = server.end(signal.SIGINT)
        received = b""
        while piece := connection.recv(2**16):
            received += piece
    assert b"the server is stopping" in received
    assert b"Internal Server Error" not in received
    assert stream or received.startswith(b"HTTP/1.1 503")
    assert code == 0
    assert "Traceback" not in said
    assert "ERROR" not in said


def wait_until_running(server: Running, connection: socket.socket) -> None:
    """Wait until the server generates texts for the request sent through the connection."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with urllib.request.urlopen(f"{server.ready['url']}/metrics", timeout=PATIENCE) as answer:
            (seen,) = re.findall(r"^firstlight_running_sequences .*", answer.read().decode(), re.M)
        if not seen.endswith(" 0.0"):
            return
        is_answered, _, _ = select.select([connection], [], [], 0.01)
        if is_answered:
            status, *_, body = read_answer(connection)
            raise AssertionError(f"waited for a running text, and got {status}: {body!r}")
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE:g} s for a running text, and saw last: {seen}")


def wait_until_refused(server: Running) -> None:
    """Wait until the server stops accepting connections."""
    deadline = time.monotonic() + PATIENCE
    # A reset means that the server stopped listening while the connection was being established.
    with suppress(ConnectionRefusedError, ConnectionResetError):
        while time.monotonic() < deadline:
            server.connect().close()
            # Without a pause, a server slower than this loop would run out of file descriptors.
            time.sleep(0.02)
        raise AssertionError(f"waited {PATIENCE:g} s for a refusal, and connections are accepted")


def test_serve_health_reports_truncated_weights_file(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    with running(copy, "--loading=mmap") as server:
        with server.connect() as connection:
            connection.sendall(HEALTH)
            assert read_answer(connection)[0] == 200
        (weights,) = copy.glob("*.safetensors")
        os.truncate(weights, weights.stat().st_size - 1)
        with server.connect() as connection:
            connection.sendall(HEALTH)
            status, *_, body = read_answer(connection)
        assert status == 503
        assert b"weights_changed" in body
        assert server.end()[0] == 0
