"""Chat page for a browser on this machine, based on Chainlit. The page sends nothing to other
machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from firstlight.console import say
from firstlight.errors import ConfigError, FirstlightError, MissingDependencyError
from firstlight.generation.chat import ChatSession, ConversationDecoder, ReasoningText
from firstlight.generation.config import SamplingConfig
from firstlight.lora.loading import LoadedModel
from firstlight.serving.config import is_loopback, listening_socket, url_for

T = TypeVar("T")

#: Folder that contains Chainlit's configuration and the page's script.
_FILES = Path(__file__).parent / "page"

#: Environment variables that could make Chainlit require a login, or store or send conversations.
_FOREIGN_VARIABLES = re.compile(
    r"(CHAINLIT|OAUTH|SLACK|TEAMS|DISCORD|LITERAL)_\w+|DATABASE_URL|BUCKET_NAME"
)

#: Time limit in seconds for responses in progress to finish when the server shuts down.
_GRACE_SECONDS = 2


@dataclass(frozen=True)
class Address:
    """Address of the page.

    Attributes:
        host: a loopback address.
        port: the port; 0 selects any free port.
    """

    host: str
    port: int


def require_web(host: str, port: int) -> Address:
    """Check that the page can be served, and return its address. Call this function before loading
    a model, so that a problem is reported without waiting for the model.

    Raises:
        ConfigError: other machines could reach the host, or the port is invalid.
        MissingDependencyError: Chainlit is not installed.
    """
    name = host.removeprefix("[").removesuffix("]")
    if not is_loopback(name):
        raise ConfigError(
            f"the page has no password protection, so it can't be served at {name}: omit --host, "
            "and use a tunnel from other machines: ssh -L 8000:127.0.0.1:8000 THIS_MACHINE"
        )
    address = Address("127.0.0.1" if name == "localhost" else name, port)
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}")
    if importlib.util.find_spec("chainlit") is None:
        raise MissingDependencyError("chainlit", "chat", "chat --web")
    return address


def serve_chat(
    loaded: LoadedModel,
    address: Address,
    *,
    compile: bool = False,
    **options: Any,
) -> None:
    """Serve the page until Ctrl-C is pressed. Each browser tab has a separate conversation.

    This function can be called only once per process, because Chainlit's application is a global
    object.

    Args:
        loaded: a model from `firstlight.load`.
        address: an address from `require_web`.
        compile: see `ConversationDecoder`.
        options: `system`, `settings` and `template_options` of each new `ChatSession`.

    Raises:
        StorageError: the port is in use.
        ConfigError: the model can't be compiled on this machine.
        ConfigError, ModelError, InputError, TokenizerError: see `ChatSession`.
    """
    from firstlight.serving.access import LoopbackGuard

    decoder = ConversationDecoder(loaded.model, compile=compile)
    if compile:
        decoder.with_room(1)

    def new_session() -> ChatSession:
        return ChatSession(loaded, decoder=decoder, **options)

    new_session()  # Check the arguments before serving the page.
    with (
        contextlib.suppress(KeyboardInterrupt),
        listening_socket(address.host, address.port) as listener,
        tempfile.TemporaryDirectory() as folder,
        _environment(_app_folder(Path(folder))),
    ):
        app = _chainlit_app(new_session, loaded.folder.name)
        say(f"chat at {url_for(listener)} (press Ctrl-C to stop)")
        _serve(LoopbackGuard(app), listener)


def _app_folder(folder: Path) -> Path:
    """Copy Chainlit's files to `folder`, which Chainlit then uses instead of the working
    directory.
    """
    for part, name in ((".chainlit", "config.toml"), ("public", "page.js")):
        (folder / part).mkdir()
        shutil.copyfile(_FILES / name, folder / part / name)
    return folder


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Remove `_FOREIGN_VARIABLES` from the environment and set the variables that Chainlit needs,
    including its folder. Restore the previous environment on exit.
    """
    before = dict(os.environ)
    for name in before:
        if _FOREIGN_VARIABLES.fullmatch(name):
            del os.environ[name]
    os.environ["CHAINLIT_APP_ROOT"] = str(folder)
    # Do not read .env in the working directory.
    os.environ["CHAINLIT_ENV_FILE"] = str(folder / "none")
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
        lifespan="off",  # Chainlit's shutdown would end the entire process.
        log_level="error",
        server_header=False,
        ws_max_size=1 << 20,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


# The page


def _chainlit_app(new_session: Callable[[], ChatSession], model_name: str) -> Any:
    """Return Chainlit's ASGI application, with callbacks that generate answers with the model."""
    chainlit: Any = importlib.import_module("chainlit")
    logging.getLogger("chainlit").setLevel(logging.ERROR)
    settings: Any = importlib.import_module("chainlit.config").config
    settings.run.headless = True
    settings.code.data_layer = lambda: None  # Store nothing.
    page = _Page(chainlit, new_session, model_name)
    chainlit.on_chat_start(page.start)
    chainlit.on_settings_update(page.change)
    chainlit.on_message(page.answer)
    chainlit.on_chat_end(page.end)
    return importlib.import_module("chainlit.server").app


class _Page:
    """Chainlit's callbacks. Each browser tab has a separate `ChatSession`."""

    def __init__(
        self, chainlit: Any, new_session: Callable[[], ChatSession], model_name: str
    ) -> None:
        self._chainlit = chainlit
        self._new_session = new_session
        # Replace special characters so that the folder's name can't contain markup.
        self._name = re.sub(r"[^\w. -]", " ", model_name)
        self._answers = Answers()

    async def start(self) -> None:
        chainlit, session = self._chainlit, self._new_session()
        chainlit.user_session.set("session", session)
        await chainlit.ChatSettings(_widgets(chainlit.input_widget, session.settings)).send()
        kind = (
            ""
            if session.has_template
            else " It does not have a chat template, so it continues your text."
        )
        text = f"{self._name}, {session.context:,} tokens of context.{kind}"
        await chainlit.Message(text).send()

    async def change(self, values: dict[str, Any]) -> None:
        session = self._chainlit.user_session.get("session")
        try:
            session.settings = changed_settings(session.settings, values)
        except FirstlightError as error:
            await self._chainlit.ErrorMessage(str(error)).send()

    async def answer(self, message: Any) -> None:
        chainlit = self._chainlit
        session, reply = chainlit.user_session.get("session"), chainlit.Message("")
        notes, thoughts = [], ""
        if self._answers.busy:
            notes = [chainlit.Message("Another tab's answer is being generated; yours is next.")]
            await notes[0].send()
        try:
            async with contextlib.aclosing(self._answers.pieces(session, message.content)) as parts:
                async for part in parts:
                    while notes:
                        await notes.pop().remove()
                    # The reasoning is shown until the answer's text begins.
                    if isinstance(part, ReasoningText):
                        thoughts += part
                        await reply.stream_token(part)
                    else:
                        await reply.stream_token(part, is_sequence=bool(thoughts))
                        thoughts = ""
        except FirstlightError as error:
            await chainlit.ErrorMessage(str(error)).send()
        finally:
            for note in notes:
                await note.remove()
            if reply.content:
                await reply.update()

    async def end(self) -> None:
        task = self._chainlit.context.session.current_task
        if task is not None:
            task.cancel()


#: Label, description and range of each `SamplingConfig` field shown on the page. A field with a
#: range (minimum, maximum) is shown as a slider. A field without a range is shown as an integer
#: input.
_SETTINGS: Mapping[str, tuple[str, str, tuple[float, float] | None]] = {
    "temperature": (
        "Temperature",
        "0 always chooses the most likely token; higher values give more variety",
        (0, 2),
    ),
    "top_k": ("Top k", "sample from the k most likely tokens; 0 is off", None),
    "top_p": (
        "Top p",
        ("sample from the most likely tokens whose probabilities sum to p; 1 is off"),
        (0.05, 1),
    ),
    "max_new_tokens": ("Answer length", "maximum number of tokens in an answer", None),
}


def _widgets(widgets: Any, now: SamplingConfig) -> list[Any]:
    """Return the widgets for the page's settings. They show the values in `now`."""
    found = []
    for name, (label, description, limits) in _SETTINGS.items():
        value = getattr(now, name)
        shown = {"id": name, "label": label, "initial": value, "description": description}
        if limits is None:
            found.append(widgets.NumberInput(**shown))
        else:
            least, most = limits[0], max(limits[1], value)
            found.append(widgets.Slider(**shown, min=least, max=most, step=0.05))
    return found


def changed_settings(settings: SamplingConfig, values: Mapping[str, Any]) -> SamplingConfig:
    """Return the sampling settings updated with the values sent by the page. Empty fields are
    ignored.

    Raises:
        ConfigError: a value is not a number or is out of range.
    """
    changes: dict[str, Any] = {}
    for name, (_, _, limits) in _SETTINGS.items():
        value = values.get(name)
        if value is None or value == "":  # The user has cleared the field.
            continue
        kind = int if limits is None else float
        try:
            # Sliders send numbers; input fields send text.
            changes[name] = kind(float(value))
            is_number = changes[name] == float(value)
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            article = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name} must be {article}, not {value!r}")
    return replace(settings, **changes)


class Answers:
    """Generates answers with one model, one at a time. Generation runs in a separate thread, so it
    does not block the event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """True while an answer is being generated."""
        return self._lock.locked()

    async def pieces(self, session: ChatSession, text: str) -> AsyncGenerator[str, None]:
        """Wait until all earlier answers are complete. Then generate an answer, and yield its text
        as it is generated. If the generator is closed or cancelled, the answer ends after the
        current token.

        Raises:
            FirstlightError: see `ChatSession.answer`.
        """
        async with self._lock:
            pieces: Iterator[str] = await _in_thread(session, session.answer, text)
            assert isinstance(pieces, Generator)
            try:
                while (piece := await _in_thread(session, next, pieces, None)) is not None:
                    yield piece
            finally:
                session.stop()
                pieces.close()


async def _in_thread(session: ChatSession, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread. If this coroutine is cancelled, it stops the session and then
    waits until the function returns, because the function uses the model until then. A second
    cancellation does not end this wait.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    finally:
        while not call.done():
            session.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call])
