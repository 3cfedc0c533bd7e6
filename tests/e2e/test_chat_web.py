"""The chat page in a real browser."""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from talking_models import write_talking_model

from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

_DRIVER = Path(__file__).with_name("chat_page_driver.py")
_CHROMIUM = "/usr/bin/chromium"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()

_PATIENCE_MS = 60_000
_GREETING = "tokens of context"


class Server:
    """The page's server, in a process and an empty folder of its own."""

    def __init__(self, model: Path, folder: Path, *, pieces: int = 0) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        environment = {**os.environ, "TMPDIR": str(folder.with_suffix(".tmp"))}
        environment |= {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
        # What must not matter: that some other program is to store, log in or send.
        environment |= {
            "DATABASE_URL": "postgresql://database.example/x",
            "LITERAL_API_KEY": "x",
            "CHAINLIT_CUSTOM_AUTH": "1",
        }
        Path(environment["TMPDIR"]).mkdir()
        folder.mkdir()
        (folder / ".env").write_text("CHAINLIT_CUSTOM_AUTH=1\n")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_DRIVER), str(model), str(pieces)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment,
            )
        while "chat at " not in self.log:
            assert self.process.poll() is None, self.log
        self.url = self.log.split("chat at ")[1].split()[0]

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def temporary(self) -> list[Path]:
        return list(self.folder.with_suffix(".tmp").iterdir())

    def let(self, pieces: int) -> None:
        """Have so many more pieces come."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pieces}\n".encode())
        self.process.stdin.flush()

    def end(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


Started = Callable[..., Server]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    if importlib.util.find_spec("chainlit") is None:  # to import it would write files here
        pytest.skip("chainlit is not installed")
    servers: list[Server] = []

    def start(answer: str, *, pieces: int = 0, endless: bool = False) -> Server:
        model = write_talking_model(tmp_path / "a model", answer, endless=endless, context=1 << 12)
        servers.append(Server(model, tmp_path / "here", pieces=pieces))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Page:
    """A tab that is ready to be talked to."""

    def __init__(self, browser: Any, url: str) -> None:
        self.tab = browser.new_page(viewport={"width": 1000, "height": 700})
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("websocket", lambda websocket: self.requests.append(websocket.url))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.goto(url)
        self.wait_for(_GREETING)

    def wait_for(self, text: str, count: int = 1) -> None:
        self.tab.get_by_text(text).nth(count - 1).wait_for(timeout=_PATIENCE_MS)

    def ask(self, text: str) -> None:
        self.tab.locator("#chat-input").click()
        self.tab.keyboard.type(text)
        self.tab.keyboard.press("Enter")

    @property
    def answers(self) -> list[str]:
        """What the model said, the greeting left out."""
        texts = self.tab.locator("[data-step-type=assistant_message] [role=article]")
        return [text for text in texts.all_inner_texts() if _GREETING not in text]

    def wait_for_answers(self, *answers: str) -> None:
        """Until the answers are these."""
        self.tab.wait_for_function(
            """([wanted, greeting]) => {
                const all = [...document.querySelectorAll(
                    "[data-step-type=assistant_message] [role=article]")];
                const texts = all.map((element) => element.innerText.trim());
                const answers = texts.filter((text) => !text.includes(greeting));
                return JSON.stringify(answers) === JSON.stringify(wanted);
            }""",
            arg=[list(answers), _GREETING],
            timeout=_PATIENCE_MS,
        )

    def change_answer_length(self, tokens: int) -> None:
        self.tab.locator("#chat-settings-open-modal").click()
        self.tab.locator("input#max_new_tokens").fill(str(tokens))
        self.tab.locator("#confirm").click()
        self.tab.locator("#chat-settings").wait_for(state="hidden")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not shutil.which(_CHROMIUM):
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield chromium
        chromium.close()


def test_chat_page_holds_conversation(browser: Any, started: Started) -> None:
    server = started("The stone sings of old light", pieces=0)
    page = Page(browser, server.url)
    page.wait_for("a model, 4,096 tokens of context.")
    page.ask("hello")
    server.let(2)
    page.wait_for_answers("The stone")  # and it goes on while the rest is not made yet
    server.let(3)
    page.wait_for_answers("The stone sings of old")
    server.let(2)  # the last word, the end
    page.wait_for_answers("The stone sings of old light")
    page.change_answer_length(2)
    page.ask("more")
    server.let(10)
    page.wait_for_answers("The stone sings of old light", "The stone")
    page.change_answer_length(0)
    page.wait_for("max_new_tokens must be at least 1, not 0")
    # A reload begins anew, with the settings of the command line.
    page.tab.reload()
    page.wait_for(_GREETING)
    assert page.answers == []
    server.let(10)
    page.ask("again")
    page.wait_for_answers("The stone sings of old light")
    assert page.errors == []
    assert {urlsplit(url).netloc for url in page.requests} == {urlsplit(server.url).netloc}
    assert {urlsplit(url).scheme for url in page.requests} == {"http", "ws"}
    page.tab.close()
    assert server.end() == 0
    assert sorted(path.name for path in server.folder.iterdir()) == [".env"]
    assert server.temporary == []
    assert server.log == f"chat at {server.url} (press Ctrl-C to stop)\n"


_ATTACK = "<img src=x onerror=hacked()> ![seen](http://elsewhere/picture) **so** [there](http://x/)"


def test_chat_page_shows_markup_as_text_and_fetches_nothing_external(
    browser: Any, started: Started
) -> None:
    said = "Look: <svg onload=hacked()> ![seen](http://elsewhere/picture) done"
    server = started(said, pieces=1000)
    page = Page(browser, server.url)
    page.tab.evaluate("() => { window.hacked = () => { window.flag = true } }")
    page.ask(f"<script>hacked()</script> {_ATTACK}")
    page.wait_for("done")
    page.wait_for(f"<script>hacked()</script> {_ATTACK}")
    [answer] = page.answers
    assert answer.startswith("Look: <svg onload=hacked()>")
    picture = page.tab.locator("img[alt=seen]")
    assert picture.get_attribute("src") is None
    assert "http://elsewhere/picture" in picture.get_attribute("title")
    # Whatever else would fetch: the page may not.
    page.tab.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve());
            document.body.insertAdjacentHTML("beforeend", "<video src='http://127.0.0.2:1/'>");
        })"""
    )
    page.tab.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve());
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=hacked()>");
        })"""
    )
    assert page.tab.evaluate("window.flag") is None
    hosts = {urlsplit(url).hostname for url in page.requests}
    assert hosts - {"127.0.0.2"} == {"127.0.0.1"}
    page.tab.close()
    assert server.end() == 0
    assert "FOREIGN" not in server.log


def test_chat_page_supports_stopping_leaving_and_waiting(browser: Any, started: Started) -> None:
    """Each tab has its own conversation, and the model is for one at a time."""
    server = started("On and", endless=True)
    one, other = Page(browser, server.url), Page(browser, server.url)
    one.ask("first")
    server.let(3)
    one.wait_for_answers("On andOn")
    other.ask("second")
    other.wait_for("Another tab's answer is being generated; yours is next.")
    one.tab.locator("#stop-button").click()
    one.wait_for("Task manually stopped.")
    server.let(3)  # one for the stopped answer, which is not shown
    other.wait_for_answers("On and")
    assert one.answers[0].strip() == "On andOn"
    assert other.tab.get_by_text("Another tab's answer").count() == 0
    one.ask("third")
    one.wait_for("Another tab's answer is being generated; yours is next.")
    other.tab.close()
    # The server hears of it in a moment; pieces until then are still the closed tab's.
    while "next" in one.answers[-1]:
        server.let(1)
    assert [answer.strip() for answer in one.answers[:2]] == ["On andOn", "Task manually stopped."]
    assert one.answers[2].startswith("On")
    # Ctrl-C, with an answer being made.
    server.process.send_signal(signal.SIGINT)
    server.let(400)
    assert server.process.wait(PATIENCE_SECONDS) == 0
    assert server.temporary == []


def test_chat_page_rejects_foreign_hosts_and_origins(started: Started) -> None:
    server = started("yes")
    address = urlsplit(server.url)
    assert address.hostname is not None

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=PATIENCE_SECONDS
        )
        connection.putrequest("GET", path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", errors="replace")
        if answer.status == 200:
            assert "default-src 'none'" in (answer.getheader("content-security-policy") or "")
            assert not re.search(r"googleapis|gstatic|jsdelivr|cloud", text)
        connection.close()
        return answer.status

    socket = "/ws/socket.io/?EIO=4&transport="
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    own, foreign = address.netloc, f"evil.example:{address.port}"
    assert status("/", Host=own) == 200
    assert status("/", Host=foreign) == 403
    assert status(f"{socket}polling", Host=own) == 200
    assert status(f"{socket}polling", Host=own, Origin="http://evil.example") == 403
    assert status(f"{socket}websocket", Host=own, Origin=f"http://{own}", **upgrade) == 101
    assert status(f"{socket}websocket", Host=own, Origin="http://evil.example", **upgrade) == 403
    assert status(f"{socket}websocket", Host=foreign, **upgrade) == 403
