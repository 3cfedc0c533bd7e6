"""Access control for the server and the chat page. This module checks the host, origin and API key
of each request. It creates error responses in OpenAI's format, and sets headers that prevent a page
from contacting other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.serving.config import is_loopback

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")

#: HTTP status recorded in the metrics when a client disconnects before its response is complete.
#: nginx uses the same status.
CLIENT_GONE = 499

#: Error `type` for each HTTP status. For all other statuses, the type is "invalid_request_error"
#: for statuses below 500, and "server_error" for 500 and above.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

#: Message sent to the client after an internal failure, whose cause is only logged.
FAILED = "the server failed to answer this request: see its log for the reason"
OUT_OF_MEMORY = "the server does not have enough memory for this text: lower max_tokens"

#: <link> and <meta> tags with a URL on another host, which a browser might fetch.
_FOREIGN_TAG = re.compile(r"<(?:link|meta)\b[^>]*[\"'](?:https?:)?//[^>]*>", re.IGNORECASE)
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.IGNORECASE | re.DOTALL)
_PAGE_HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",
}


# The docstrings of the classes below appear as descriptions in the OpenAPI document.


class ErrorDetails(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """JSON body of the response to a rejected or failed request."""

    error: ErrorDetails


class RequestError(HTTPException):
    """Error response to a request that was rejected or that failed.

    Args:
        status: HTTP status.
        message: message for the client; it describes the problem and how to solve it.
        param: name of the invalid request field.
        code: machine-readable error code.
        headers: additional response headers.

    Attributes:
        content: JSON body of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        details = ErrorDetails(message=message, type=kind, param=param, code=code)
        self.content = Error(error=details).model_dump_json().encode()

    @property
    def response(self) -> Response:
        """The HTTP response."""
        return Response(self.content, self.status_code, self.headers, "application/json")


class ClientGoneError(RequestError):
    """Raised when the client has closed the connection and can't receive a response."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client closed the connection")


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of the header called `name`, which must be lowercase. Return None if the
    header is missing, and "" if it occurs more than once.
    """
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    if not values:
        return None
    return values[0] if len(values) == 1 else ""


class Access:
    """Allowed hosts and origins of a server, and its API key.

    A server at a loopback address accepts a request only if the Host header contains a name of the
    local machine or a name in `hosts`. Otherwise, an attacker could make a different host name
    resolve to this machine (DNS rebinding). The port in the Host header is not checked, so that
    tunnels work.

    Args:
        host: name or address that the server listens on.
        key: API key; None disables the check.
        hosts: additional names allowed in the Host header. If empty, a server at a non-loopback
            address allows all names.
        origins: origins of other web pages that are allowed (values of the Origin header).
    """

    def __init__(
        self,
        host: str,
        key: bytes | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self._key_digest = None if key is None else hashlib.sha256(key).digest()
        self._hosts = {name.lower() for name in hosts}
        self._any_host = not self._hosts and not is_loopback(host)
        self.origins = {origin.lower() for origin in origins}

    @property
    def needs_key(self) -> bool:
        """True if clients must send the API key."""
        return self._key_digest is not None

    def require(self, scope: Scope) -> None:
        """Reject a request whose host or origin is not allowed.

        Raises:
            RequestError: status 403.
        """
        host = (header(scope, b"host") or "").lower()
        match = _HOST.fullmatch(host)
        name = "" if match is None else match[1]
        is_allowed = self._any_host or name in self._hosts or is_loopback(name.strip("[]"))
        if not name or not is_allowed:
            raise RequestError(
                403,
                "the Host header of the request is not allowed: use localhost, or start the "
                "server with --allowed-host",
                code="host_not_allowed",
            )
        origin = header(scope, b"origin")
        # The Origin header of a WebSocket request also has the scheme http or https.
        scheme = scope["scheme"].replace("ws", "http")
        if origin is not None and origin.lower() not in {f"{scheme}://{host}", *self.origins}:
            raise RequestError(
                403,
                "web pages from this Origin are not allowed to call the server: start it with "
                "--allowed-origin",
                code="origin_not_allowed",
            )

    def require_key(self, scope: Scope) -> None:
        """Reject a request with a missing or wrong API key. Requests to /health do not require a
        key.

        Raises:
            RequestError: status 401.
        """
        if self._key_digest is None or scope["path"] == "/health":
            return
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        # Compare digests, which all have the same length, so that the time taken reveals nothing
        # about the key.
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._key_digest):
            raise RequestError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class RequestGuard:
    """ASGI middleware that rejects unauthorised requests, and requests whose path, query and
    headers together are too large. It also responds to CORS preflight requests, adds headers to
    responses and counts requests.

    Args:
        app: application that receives the accepted requests.
        access: allowed hosts and origins, and the API key.
        max_header_bytes: maximum size of path, query and headers together.
        count: callback that receives the path and status of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        max_header_bytes: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._app, self._access = app, access
        self._max_header_bytes, self._count = max_header_bytes, count
        self._answer: ASGIApp = self._answer_with_key
        if access.origins:
            # CORS is handled before the key is checked, because browsers do not send a key with a
            # preflight request. This order also allows a page to read the error for a wrong key.
            self._answer = CORSMiddleware(
                self._answer_with_key,
                allow_origins=sorted(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        added = [(b"x-content-type-options", b"nosniff"), (b"x-request-id", request_id.encode())]

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            self._require_head_size(scope)
            self._access.require(scope)
            await self._answer(scope, receive, send_with_headers)
        except RequestError as error:
            await error.response(scope, receive, send_with_headers)
        finally:
            self._count(scope["path"], status)

    async def _answer_with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._access.require_key(scope)
        except RequestError as error:
            await error.response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _require_head_size(self, scope: Scope) -> None:
        """Reject a request whose path, query and headers are too large. uvicorn enforces its limit
        only if they arrive in several parts.
        """
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(k) + len(v) for k, v in scope["headers"]) > self._max_header_bytes:
            raise RequestError(
                431,
                f"the request's path and headers are longer than {self._max_header_bytes:,} "
                "bytes: send shorter headers",
            )


class LoopbackGuard:
    """ASGI middleware that accepts only requests from the local machine and from the page itself,
    as described for `Access`. It adds response headers that prevent the page from contacting other
    hosts, and removes HTML tags that refer to other hosts.

    Args:
        app: application that responds to accepted requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = BaseHTTPMiddleware(app, _add_page_headers)
        self._access = Access("127.0.0.1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        try:
            self._access.require(scope)
        except RequestError as error:
            await error.response(scope, receive, send)  # This also rejects WebSockets.
            return
        # Remove the accept-encoding header, because tags can't be found in a compressed page.
        headers = [entry for entry in scope["headers"] if entry[0] != b"accept-encoding"]
        await self._app({**scope, "headers": headers}, receive, send)


async def _add_page_headers(
    request: Request, respond: Callable[[Request], Awaitable[Any]]
) -> Response:
    response = await respond(request)
    page = ""
    if response.headers.get("content-type", "").startswith("text/html"):
        html = b"".join([piece async for piece in response.body_iterator])
        page = _FOREIGN_TAG.sub("", html.decode("utf-8", errors="replace"))
        response = Response(page, response.status_code, dict(response.headers))
        response.headers["content-length"] = str(len(response.body))
    policy = content_security_policy(request.headers["host"], page)
    response.headers.update({**_PAGE_HEADERS, "content-security-policy": policy})
    return response  # type: ignore[no-any-return]


def content_security_policy(host: str, html: str = "") -> str:
    """Return the value of the Content-Security-Policy header. It allows only resources from this
    host and the inline scripts of the page.

    Args:
        host: the request's Host header.
        html: HTML of the page; "" for other responses.
    """
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in _INLINE_SCRIPT.findall(html)
    )
    scripts = " ".join(("'self'", *(f"'sha256-{digest}'" for digest in hashes)))
    rules = (
        "default-src 'none'",
        f"script-src {scripts}",
        "style-src 'self' 'unsafe-inline'",  # Chainlit's components use style attributes.
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        f"connect-src 'self' ws://{host}",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join(rules)
