"""The routes: what OpenAI's clients ask for, the server's health, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from firstlight.console import say
from firstlight.errors import FirstlightError
from firstlight.serving.documentation import (
    answers,
    error_responses,
    request_body,
    with_schemas,
)
from firstlight.serving.guarding import CLIENT_GONE, Access, Guard, read_body
from firstlight.serving.problems import FAILED, ClientGoneError, RequestError, error_body
from firstlight.serving.replies import EventStream, error_response, json_response, whole_answer
from firstlight.serving.schemas import ChatRequest, CompletionRequest
from firstlight.serving.service import Service
from firstlight.serving.work import Work

_MODEL = "/v1/models/{model:path}"
_PLAIN_ROUTES = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/health",
    "/metrics",
    "/openapi.json",
)


def create_app(service: Service, access: Access) -> Guard:
    """The server as an ASGI application; its FastAPI is in `.app`.

    Args:
        service: that answers. It is started, and stopped when the application shuts down.
        access: who may ask.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.attach(asyncio.get_running_loop())
        yield
        # In a thread: the scheduler hands the last updates to this loop.
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="firstlight",
        description="A language model behind OpenAI's interface.",
        lifespan=lifespan,
        # Their pages would load scripts from elsewhere.
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
        return app.openapi_schema or with_schemas(plain(), service.bounds)

    app.openapi = documented  # type: ignore[method-assign]

    def count(path: str, status: int) -> None:
        service.metrics.count_request(_route_of(path), status)

    return Guard(app, access, service.limits, count)


def _route_of(path: str) -> str:
    """A route's name for the counters: there are few, whatever clients ask for."""
    if path in _PLAIN_ROUTES:
        return path
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _add_handlers(app: FastAPI) -> None:
    """Whatever goes wrong is told in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error_response(error)

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
        # The log gets one line for it, and the traceback of any other error.
        say(f"firstlight: {request.scope['state']['request_id']}: {error}")
        return json_response(error_body(500, FAILED), 500)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # What it was goes to the log, not to the client.
        return json_response(error_body(500, FAILED), 500)


def _add_information(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "firstlight",
    }

    @app.get("/v1/models", responses=answers("Models") | error_responses(401, 403))
    async def models() -> Response:
        """The one model there is."""
        return json_response({"object": "list", "data": [card]})

    @app.get(_MODEL, responses=answers("Model") | error_responses(401, 403, 404))
    async def model(model: str) -> Response:
        """A model by its name."""
        if model != service.name:
            raise RequestError(
                404,
                f"this server has no such model, only '{service.name}'",
                param="model",
                code="model_not_found",
            )
        return json_response(card)

    @app.get("/health", responses=answers("Health") | error_responses(403, 503))
    async def health() -> Response:
        """Whether requests are answered. Needs no key."""
        if not service.scheduler.alive:
            raise RequestError(503, "the server is stopping, or has failed", code="stopping")
        return json_response({"status": "ok"})

    @app.get("/metrics", responses=answers("") | error_responses(401, 403))
    async def metrics() -> Response:
        """What is counted, in Prometheus' text format."""
        return Response(
            service.metrics.page(), headers={"content-type": service.metrics.content_type}
        )


def _add_generation(app: FastAPI, service: Service) -> None:
    errors = error_responses(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)

    async def answer(request: Request, make: Callable[[bytes], Work]) -> Response:
        work = await service.prepared(make, await _timely_body(request, service))
        if work.stream:
            return EventStream(service, work)
        return await whole_answer(service, work, request)

    whole = answers("Completion", streamed=True)

    @app.post(
        "/v1/completions", responses=whole | errors, openapi_extra=request_body(CompletionRequest)
    )
    async def completions(request: Request) -> Response:
        """Continue one or more texts."""
        return await answer(request, service.workshop.completion)

    whole = answers("ChatCompletion", streamed=True)

    @app.post(
        "/v1/chat/completions", responses=whole | errors, openapi_extra=request_body(ChatRequest)
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, service.workshop.chat)


async def _timely_body(request: Request, service: Service) -> bytes:
    limits = service.limits
    try:
        async with asyncio.timeout(limits.body_timeout):
            return await read_body(request.scope, request.receive, limits.max_body_bytes)
    except TimeoutError:
        raise RequestError(
            408, f"the body did not arrive within {limits.body_timeout:g} seconds", code="timeout"
        ) from None
