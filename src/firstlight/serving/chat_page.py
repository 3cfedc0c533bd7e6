"""The chat page: Chainlit in a browser on this machine, and nothing that leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import re
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firstlight.console import say
from firstlight.errors import (
    ConfigError,
    FirstlightError,
    MissingDependencyError,
    describe_os_error,
)
from firstlight.generation.chat import CHAT_SETTINGS, ChatSession, ConversationDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.serving.loopback import LoopbackGuard, require_loopback
from firstlight.weights.huggingface import LoadedModel

#: Chainlit's configuration: text is text, nobody else's page, no files, no changes to what was
#: said.
_CONFIG = """\
[project]
allow_origins = []
session_timeout = 300

[features]
unsafe_allow_html = false
latex = false
user_message_markdown = false
edit_message = false

[features.spontaneous_file_upload]
enabled = false

[features.audio]
enabled = false

[features.mcp]
enabled = false

[UI]
name = "firstlight"
cot = "hidden"
custom_js = "/public/page.js"

[meta]
generated_by = "2.0.0"
"""

#: The Content-Security-Policy keeps images from being fetched; this keeps the page from trying.
_PAGE_JS = """\
"use strict";
(() => {
  const own = (value) => {
    try {
      const url = new URL(value, location.href);
      return url.origin === location.origin || ["data:", "blob:"].includes(url.protocol);
    } catch {
      return false;
    }
  };
  const note = (image, url) => {
    image.title = "not shown, since it is on another machine: " + url;
  };
  const image = HTMLImageElement.prototype;
  for (const name of ["src", "srcset"]) {
    const plain = Object.getOwnPropertyDescriptor(image, name);
    const set = function (value) {
      own(value) ? plain.set.call(this, value) : note(this, value);
    };
    Object.defineProperty(image, name, { ...plain, set });
  }
  const plainly = Element.prototype.setAttribute;
  image.setAttribute = function (name, value) {
    const fetched = /^(src|srcset)$/i.test(name) && !own(value);
    fetched ? note(this, value) : plainly.call(this, name, value);
  };
})();
"""

#: What Chainlit reads of the environment would have it log in, store or send what is said.
_FOREIGN_VARIABLES = re.compile(
    r"(CHAINLIT|OAUTH|SLACK|TEAMS|DISCORD|LITERAL)_\w+|DATABASE_URL|BUCKET_NAME"
)

#: Seconds that answers have to end in when the server is to.
_GRACE_SECONDS = 2


@dataclass(frozen=True)
class Address:
    """Where the page is.

    Attributes:
        host: of this machine, loopback.
        port: 0 for any that is free.
    """

    host: str
    port: int


def require_web(host: str, port: int) -> Address:
    """Where the page will be; to be asked before a model is loaded.

    Raises:
        ConfigError: other machines could reach the host, or the port is none.
        MissingDependencyError: Chainlit is not installed.
    """
    address = Address(require_loopback(host), port)
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}")
    if importlib.util.find_spec("chainlit") is None:
        raise MissingDependencyError("chainlit", "chat", "chat --web")
    return address


def serve_chat(
    loaded: LoadedModel,
    address: Address,
    *,
    system: str | None = None,
    settings: SamplingConfig = CHAT_SETTINGS,
    compile: bool = False,
) -> None:
    """Show the page until Ctrl-C. Every tab has a conversation of its own.

    Chainlit lives in this process: it can be done once in each.

    Args:
        loaded: from `firstlight.load`.
        address: from `require_web`.
        system, settings: of each new conversation.
        compile: see `BatchDecoder`.

    Raises:
        ConfigError: the port is taken, or it can't be compiled here.
        ConfigError, ModelError, InputError, TokenizerError: see `ChatSession`.
    """
    decoder = ConversationDecoder(loaded.model, compile=compile)
    if compile:
        decoder.with_room(1)

    def new_session() -> ChatSession:
        return ChatSession(loaded, system=system, settings=settings, decoder=decoder)

    new_session()  # what is wrong with it is said here, not on the page
    with (
        contextlib.suppress(KeyboardInterrupt),
        _listening(address) as listener,
        tempfile.TemporaryDirectory() as folder,
        _environment(_app_folder(Path(folder))),
    ):
        app = _chainlit_app(new_session, loaded.folder.name)
        host, port = listener.getsockname()[:2]
        say(f"chat at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
        _serve(LoopbackGuard(app), listener)


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"can't listen at {address.host}, port {address.port}: "
                f"{describe_os_error(error)}: choose another --port"
            ) from error
        yield listener


def _app_folder(folder: Path) -> Path:
    """A folder for what Chainlit would write into the working directory."""
    (folder / ".chainlit").mkdir()
    (folder / ".chainlit" / "config.toml").write_text(_CONFIG, encoding="utf-8")
    (folder / "public").mkdir()
    (folder / "public" / "page.js").write_text(_PAGE_JS, encoding="utf-8")
    return folder


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """The environment that Chainlit may see."""
    before = dict(os.environ)
    for name in before:
        if _FOREIGN_VARIABLES.fullmatch(name):
            del os.environ[name]
    os.environ["CHAINLIT_APP_ROOT"] = str(folder)
    os.environ["CHAINLIT_ENV_FILE"] = str(folder / "none")  # not the .env of where we are
    os.environ["TRACELOOP_TELEMETRY"] = "false"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(app: Any, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        lifespan="off",  # Chainlit's ends the whole process
        log_level="error",
        server_header=False,
        ws_max_size=1 << 20,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


# The page


def _chainlit_app(new_session: Callable[[], ChatSession], model_name: str) -> Any:
    """Chainlit's ASGI application, with our answers."""
    chainlit: Any = importlib.import_module("chainlit")
    logging.getLogger("chainlit").setLevel(logging.ERROR)
    settings: Any = importlib.import_module("chainlit.config").config
    settings.run.headless = True
    settings.code.data_layer = lambda: None  # nothing is stored
    answers = Answers()
    # Of a folder's name only what is no markup.
    name = re.sub(r"[^\w. -]", " ", model_name)

    async def start() -> None:
        session = new_session()
        chainlit.user_session.set("session", session)
        await chainlit.ChatSettings(_widgets(chainlit.input_widget, session.settings)).send()
        kind = "" if session.has_template else " It has no chat template: it continues your text."
        await chainlit.Message(f"{name}, {session.context:,} tokens of context.{kind}").send()

    async def change(values: dict[str, Any]) -> None:
        session = chainlit.user_session.get("session")
        try:
            session.settings = changed_settings(session.settings, values)
        except FirstlightError as error:
            await chainlit.ErrorMessage(str(error)).send()

    async def answer(message: Any) -> None:
        session, reply = chainlit.user_session.get("session"), chainlit.Message("")
        notes = []
        if answers.busy:
            notes = [chainlit.Message("Another tab's answer is being made; this one comes next.")]
            await notes[0].send()
        try:
            async with contextlib.aclosing(answers.pieces(session, message.content)) as pieces:
                async for piece in pieces:
                    while notes:
                        await notes.pop().remove()
                    await reply.stream_token(piece)
        except FirstlightError as error:
            await chainlit.ErrorMessage(str(error)).send()
        finally:
            for note in notes:
                await note.remove()
            if reply.content:
                await reply.update()

    async def end() -> None:
        task = chainlit.context.session.current_task
        if task is not None:
            task.cancel()

    chainlit.on_chat_start(start)
    chainlit.on_settings_update(change)
    chainlit.on_message(answer)
    chainlit.on_chat_end(end)
    return importlib.import_module("chainlit.server").app


def _widgets(widgets: Any, now: SamplingConfig) -> list[Any]:
    """The settings of a page."""
    return [
        widgets.Slider(
            id="temperature",
            label="Temperature",
            initial=now.temperature,
            min=0,
            max=max(2, now.temperature),
            step=0.05,
            description="0 takes the likeliest token, higher spreads the choice",
        ),
        widgets.NumberInput(
            id="top_k",
            label="Top k",
            initial=now.top_k,
            description="only the k likeliest tokens; 0 is off",
        ),
        widgets.Slider(
            id="top_p",
            label="Top p",
            initial=now.top_p,
            min=0.05,
            max=1,
            step=0.05,
            description="only the likeliest tokens that sum to p; 1 is off",
        ),
        widgets.NumberInput(
            id="max_new_tokens",
            label="Answer length",
            initial=now.max_new_tokens,
            description="tokens of an answer, at most",
        ),
    ]


#: The settings of the page, and whether they are whole numbers.
_WHOLE = {"temperature": False, "top_k": True, "top_p": False, "max_new_tokens": True}


def changed_settings(settings: SamplingConfig, values: Mapping[str, Any]) -> SamplingConfig:
    """Settings with those that a page sent; others than the page's are left alone.

    Raises:
        ConfigError: one is no number, or out of range.
    """
    changes: dict[str, Any] = {}
    for name, whole in _WHOLE.items():
        value = values.get(name)
        if value is None or value == "":  # a field that was emptied
            continue
        changes[name] = _number(name, value, whole)
    return replace(settings, **changes)


def _number(name: str, value: object, whole: bool) -> float:
    """A number as a page sends it: of a slider as such, of a field as text."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if not whole:
            return number
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{name} must be a {'whole ' * whole}number, not {value!r}")


class Answers:
    """Answers of one model, one at a time, made in a thread, so that the page stays awake."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self._lock.locked()

    async def pieces(self, session: ChatSession, text: str) -> AsyncGenerator[str, None]:
        """The pieces of an answer, once all that were asked for before are done. Closed or
        cancelled, it ends the answer after the token at hand.

        Raises:
            FirstlightError: see `ChatSession.answer`.
        """
        async with self._lock:
            loop = asyncio.get_running_loop()
            queue: asyncio.Queue[str | None] = asyncio.Queue()
            ended = False

            def work() -> None:
                try:
                    pieces = session.answer(text)
                    assert isinstance(pieces, Generator)
                    with contextlib.closing(pieces):
                        # What ended before the session knew of an answer ends here.
                        while not ended and (piece := next(pieces, None)) is not None:
                            loop.call_soon_threadsafe(queue.put_nowait, piece)
                finally:
                    loop.call_soon_threadsafe(queue.put_nowait, None)

            thread = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                while (piece := await queue.get()) is not None:
                    yield piece
                await thread
            finally:
                ended = True
                session.stop()
                while not thread.done():
                    # Cancelled again or not: the model is free only when the thread has ended.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([thread])
