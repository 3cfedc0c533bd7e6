"""Answers on their way to the client: whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstlight.serving.answers import Choice, usage_of
from firstlight.serving.problems import ClientGoneError, RequestError
from firstlight.serving.scheduler import Update
from firstlight.serving.service import Service
from firstlight.serving.work import Work

_DONE = b"data: [DONE]\n\n"


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Plain data as JSON."""
    return Response(
        json.dumps(content, ensure_ascii=False).encode(),
        status,
        dict(headers or {}),
        "application/json",
    )


def error_response(error: RequestError) -> Response:
    """A refusal."""
    return json_response(error.body(), error.status, error.headers)


async def whole_answer(service: Service, work: Work, request: Request) -> Response:
    """The answer in one object.

    Raises:
        RequestError, ClientGoneError: see `Service.running` and `Progress`.
    """
    choices = [Choice() for _ in work.texts]
    async with service.running(work, request.receive, *_connection(request.scope)) as progress:
        async for updates in progress:
            for index, update in updates:
                _add(choices[index], update)
    usage = usage_of(work.prompt_tokens, choices)
    return json_response(work.answer.whole(choices, usage))


def _add(choice: Choice, update: Update) -> None:
    choice.pieces.append(update.piece)
    choice.tokens += update.tokens
    choice.logprobs.extend(update.logprobs)
    choice.finish_reason = update.finish_reason


class EventStream(Response):
    """An answer piece by piece. Its first byte is sent when there is a first token, so that what
    goes wrong before has its own status.

    Args:
        service: that does it.
        work: what was asked for.
    """

    def __init__(self, service: Service, work: Work) -> None:
        self.status_code, self.background = 200, None
        self._service, self._work = service, work
        self._choices = [Choice() for _ in work.texts]
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as ASGI has it.

        Raises:
            RequestError, ClientGoneError: nothing has been sent.
        """
        try:
            connection = _connection(scope)
            async with self._service.running(self._work, receive, *connection) as progress:
                async for updates in progress:
                    await self._send(send, b"".join(map(_event, self._chunks(updates))))
            last = b""
            if self._work.tells_usage:
                usage = usage_of(self._work.prompt_tokens, self._choices)
                last = _event(self._work.answer.usage(usage))
            await self._send(send, last + _DONE, more=False)
        except RequestError as error:
            if not self._begun:
                raise
            await self._send(send, _event(error.body()) + _DONE, more=False)
        except ClientGoneError:
            if not self._begun:
                raise
            # Nobody reads it; it says that the response is over.
            await self._send(send, b"", more=False)

    async def _send(self, send: Send, content: bytes, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # nginx would collect the pieces.
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if content or not more:
            await send({"type": "http.response.body", "body": content, "more_body": more})

    def _chunks(self, updates: Sequence[tuple[int, Update]]) -> Iterable[dict[str, Any]]:
        answer = self._work.answer
        for index, update in updates:
            choice = self._choices[index]
            if not choice.pieces:
                opening = answer.opening(index)
                if opening is not None:
                    yield opening
            choice.tokens += update.tokens
            choice.logprobs.extend(update.logprobs)
            choice.pieces = [update.piece]  # what was sent before is not needed
            if update.finish_reason is not None:
                yield from answer.ending(index, update.piece, choice.logprobs, update.finish_reason)
            elif update.piece:
                yield answer.piece(index, update.piece, choice.logprobs)
                choice.logprobs.clear()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _connection(scope: Scope) -> tuple[Callable[[], None], str]:
    """What closes the connection, where the server can do that, and the request's id."""
    state = scope["state"]
    return state.get("abort", lambda: None), state["request_id"]
