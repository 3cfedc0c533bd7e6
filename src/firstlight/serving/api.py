"""The HTTP routes: OpenAI's API, health and metrics of the server."""

from __future__ import annotations

import asyncio
import html
import importlib.util
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstlight.console import say, visible
from firstlight.errors import FirstlightError
from firstlight.serving.access import (
    CLIENT_GONE,
    FAILED,
    Access,
    ClientGoneError,
    RequestError,
    RequestGuard,
    error_body,
    json_response,
    read_body,
)
from firstlight.serving.openapi import (
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    Models,
    request_body,
    responses,
    with_schemas,
)
from firstlight.serving.processor import PreparedRequest
from firstlight.serving.request import ChatRequest, CompletionRequest, GenerationRequest
from firstlight.serving.response import GeneratedChoice, usage_of
from firstlight.serving.scheduler import Update
from firstlight.serving.service import Service

_PLAIN_ROUTES = (
    "/",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/health",
    "/metrics",
    "/openapi.json",
)
#: Method, path and description of the routes on the start page.
_ROUTES = (
    ("POST", "/v1/chat/completions", "answers a conversation"),
    ("POST", "/v1/completions", "continues a text"),
    ("GET", '<a href="/v1/models">/v1/models</a>', "the model"),
    ("GET", '<a href="/health">/health</a>', "whether requests are answered"),
    ("GET", '<a href="/metrics">/metrics</a>', "counts and times for Prometheus"),
    ("GET", '<a href="/openapi.json">/openapi.json</a>', "all fields and their bounds"),
)
_PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    # The page loads nothing and runs no script.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}
_Endpoint = Callable[[Request], Awaitable[Response]]
_LAST_EVENT = b"data: [DONE]\n\n"


def create_app(service: Service, access: Access) -> RequestGuard:
    """Create the server's ASGI application; `app` of the result is its FastAPI application.

    Args:
        service: the started service; it is stopped when the application shuts down.
        access: allowed hosts and origins, and the API key.
    """

    ending = ThreadPoolExecutor(1)
    ending.submit(int)  # its thread starts now: there may be no memory for it later

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        service.attach(loop)
        yield
        # In a thread, because the scheduler passes its last updates to this event loop.
        await loop.run_in_executor(ending, service.stop)

    app = FastAPI(
        title="firstlight",
        description="A language model behind OpenAI's interface.",
        lifespan=lifespan,
        # FastAPI's documentation pages would load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
    )
    _add_handlers(app)
    _add_information(app, service)
    _add_generation(app, service)
    plain = app.openapi

    def documented() -> dict[str, Any]:
        return app.openapi_schema or with_schemas(plain(), service.processor)

    app.openapi = documented  # type: ignore[method-assign]

    def count(path: str, status: int) -> None:
        service.metrics.count_request(_route_of(path), status)

    return RequestGuard(app, access, service.limits, count)


def _route_of(path: str) -> str:
    """Name of a route for the metrics. Unknown paths are "other", so that clients can't create any
    number of names."""
    if path in _PLAIN_ROUTES:
        return path
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _add_handlers(app: FastAPI) -> None:
    """Respond to every exception with an error in OpenAI's format."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error.response

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing here", 405: "this can't be asked with this method"}
        message = words.get(error.status_code, str(error.detail))
        content = error_body(error.status_code, message)
        return json_response(content, error.status_code, error.headers)

    @app.exception_handler(FirstlightError)
    async def unable(request: Request, error: FirstlightError) -> Response:
        # Logged as one line; other exceptions are logged with their traceback.
        say(f"firstlight: {request.scope['state']['request_id']}: {error}")
        return json_response(error_body(500, FAILED), 500)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # The cause is logged, and not sent to the client.
        return json_response(error_body(500, FAILED), 500)


def _add_information(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "firstlight",
    }

    # HEAD too, with which browsers and monitors look for a page.
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def start() -> Response:
        """A page for people who open the server's address in a browser."""
        return Response(start_page(service.name, service.folder), headers=_PAGE_HEADERS)

    @app.get("/v1/models", responses=responses(Models, 401, 403))
    async def models() -> Response:
        """List the server's only model."""
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", responses=responses(ModelCard, 401, 403, 404))
    async def model(model: str) -> Response:
        """Describe a model."""
        if model != service.name:
            raise RequestError(
                404,
                f"this server has no such model: use '{service.name}'",
                param="model",
                code="model_not_found",
            )
        return json_response(card)

    @app.get("/health", responses=responses(Health, 403, 503))
    async def health() -> Response:
        """Check that the server can answer requests. Needs no API key."""
        service.require_able()
        return json_response({"status": "ok"})

    @app.get("/metrics", responses=responses(None, 401, 403))
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(
            service.metrics.page(), headers={"content-type": service.metrics.content_type}
        )


def start_page(name: str, folder: Path) -> str:
    """The page at the server's root, in HTML: the model, the routes, and the way to chat.

    Args:
        name: the model's name for clients.
        folder: folder of the model.
    """
    chat = shlex.join(["firstlight", "chat", str(folder), "--web", "--port", "0"])
    if importlib.util.find_spec("chainlit") is None:
        chat = f"pip install 'firstlight[chat]' && {chat}"
    rows = "".join(
        f"<tr><td><code>{method} {path}</code><td>{words}" for method, path, words in _ROUTES
    )
    # `visible`, because names of folders may have control characters.
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(visible(name))}</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 45em; margin: 2em auto; padding: 0 1em }}
code {{ overflow-wrap: anywhere }} td {{ padding: .2em 1em .2em 0; vertical-align: top }}</style>
<h1>{html.escape(visible(name))}</h1>
<p>firstlight serves this model by OpenAI's HTTP API, for programs:</p>
<table>{rows}</table>
<p>To chat in a browser, run this command. It prints the address of a chat page:</p>
<p><code>{html.escape(chat)}</code></p>
</html>
"""


def _add_generation(app: FastAPI, service: Service) -> None:
    errors = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)

    async def respond(request: Request, prepare: Callable[[bytes], PreparedRequest]) -> Response:
        body = await read_body(request.scope, request.receive, service.limits)
        prepared = await service.prepare(prepare, body, request.scope, request.receive)
        if prepared.stream:
            return EventStream(service, prepared)
        return await _whole_response(service, prepared, request)

    def post(
        path: str, body: type[GenerationRequest], response: type[BaseModel]
    ) -> Callable[[_Endpoint], _Endpoint]:
        described = responses(response, *errors, streamed=True)
        return app.post(path, responses=described, openapi_extra=request_body(body))

    @post("/v1/completions", CompletionRequest, Completion)
    async def completions(request: Request) -> Response:
        """Continue one or more texts."""
        return await respond(request, service.processor.completion)

    @post("/v1/chat/completions", ChatRequest, ChatCompletion)
    async def chat_completions(request: Request) -> Response:
        """Answer the last message of a conversation."""
        return await respond(request, service.processor.chat)


async def _whole_response(
    service: Service, prepared: PreparedRequest, request: Request
) -> Response:
    """Generate the texts, and respond with one object.

    Raises:
        RequestError, ClientGoneError: see `Service.running` and `Progress`.
    """
    choices = [GeneratedChoice() for _ in prepared.texts]
    async with service.running(prepared, request.scope, request.receive) as progress:
        async for updates in progress:
            for index, update in updates:
                choices[index].add(update)
    usage = usage_of(prepared.prompt_tokens, choices)
    return json_response(prepared.response.whole(choices, usage))


class EventStream(Response):
    """A streamed response (server-sent events). It starts with the first token, so that a failure
    before it can still have an error's status.

    Args:
        service: service that generates the texts.
        prepared: the request.
    """

    def __init__(self, service: Service, prepared: PreparedRequest) -> None:
        self.status_code, self.background = 200, None
        self._service, self._prepared = service, prepared
        self._choices = [GeneratedChoice() for _ in prepared.texts]
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application.

        Raises:
            RequestError, ClientGoneError: the failure came before the first token.
        """
        prepared = self._prepared
        try:
            async with self._service.running(prepared, scope, receive) as progress:
                async for updates in progress:
                    await self._send(send, b"".join(map(_event, self._chunks(updates))))
            last = b""
            if prepared.includes_usage:
                usage = usage_of(prepared.prompt_tokens, self._choices)
                last = _event(prepared.response.usage(usage))
            await self._send(send, last + _LAST_EVENT, more=False)
        except RequestError as error:
            if not self._has_begun:
                raise
            await self._send(send, _event(error.body) + _LAST_EVENT, more=False)
        except ClientGoneError:
            if not self._has_begun:
                raise
            # Nobody reads it, but uvicorn needs the end of the response.
            await self._send(send, b"", more=False)

    async def _send(self, send: Send, content: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # Otherwise nginx would buffer the chunks.
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if content or not more:
            await send({"type": "http.response.body", "body": content, "more_body": more})

    def _chunks(self, updates: Sequence[tuple[int, Update]]) -> Iterable[dict[str, Any]]:
        response = self._prepared.response
        for index, update in updates:
            choice = self._choices[index]
            if not choice.pieces:
                opening = response.opening(index)
                if opening is not None:
                    yield opening
            choice.pieces = []  # earlier pieces have been sent
            choice.add(update)
            if update.finish_reason is not None:
                yield from response.ending(
                    index, update.piece, choice.logprobs, update.finish_reason
                )
            elif update.piece:
                yield response.piece(index, update.piece, choice.logprobs)
                choice.logprobs.clear()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
