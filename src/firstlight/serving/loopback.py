"""Guards of the chat page: only this machine may use it, and the page may not use other hosts."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from firstlight.errors import ConfigError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: <link> and <meta> tags with the URL of another host, from which a browser may fetch something.
_FOREIGN_TAG = re.compile(r"<(?:link|meta)\b[^>]*[\"'](?:https?:)?//[^>]*>", re.IGNORECASE)
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.IGNORECASE | re.DOTALL)

_HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",
}


def is_loopback(host: str) -> bool:
    """True if a name or address (IPv6 without brackets) can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(host: str) -> str:
    """Check that a host is a loopback address; return the address to listen at.

    Raises:
        ConfigError: other machines could reach the host.
    """
    address = host.removeprefix("[").removesuffix("]")
    if not is_loopback(address):
        raise ConfigError(
            f"the page has no passwords, so it can't be served at {host}: leave --host out, and "
            "from another machine use a tunnel: ssh -L 8000:127.0.0.1:8000 THIS_MACHINE"
        )
    return "127.0.0.1" if host == "localhost" else address


def refusal(headers: dict[str, str]) -> str | None:
    """Reason why a request is refused; None if it is accepted.

    The header Host must be a name of the local machine: requests from a web page whose name
    resolves to this machine (DNS rebinding) have that page's name. The header Origin, if there is
    one, must be the origin of this page, because any page can open a WebSocket. Ports are not
    compared with the server's port, so that tunnels work.

    Args:
        headers: the request's headers, with names in lower case.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name is None or not is_loopback(name):
        return "the header Host names another machine: open the page as http://localhost"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        return "the header Origin names another page: open this page itself"
    return None


def content_security_policy(host: str, html: str = "") -> str:
    """The header Content-Security-Policy, which allows resources of this host and the inline
    scripts of the page.

    Args:
        host: the request's header Host.
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
        "style-src 'self' 'unsafe-inline'",  # Chainlit's components write style attributes
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


def without_foreign_tags(html: str) -> str:
    """Remove the <link> and <meta> tags with URLs of other hosts from a page."""
    return _FOREIGN_TAG.sub("", html)


class LoopbackGuard:
    """An ASGI layer that accepts only requests of the local machine and of the page itself (see
    `refusal`). It adds headers to responses that keep the page from using other hosts, and removes
    tags that refer to other hosts from HTML.

    Args:
        app: application that responds to accepted requests.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        reason = refusal(headers)
        if reason is not None:
            await _refuse(scope, send, reason)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            # Without accept-encoding, because tags can't be found in a compressed page.
            plain = [entry for entry in scope["headers"] if entry[0] != b"accept-encoding"]
            response = _GuardedResponse(send, headers["host"])
            await self._app({**scope, "headers": plain}, receive, response)


async def _refuse(scope: Scope, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    body = f"{reason}\n".encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _GuardedResponse:
    """Passes a response on with added headers. HTML is held until it is complete, to remove
    tags."""

    def __init__(self, send: Send, host: str) -> None:
        self._send, self._host = send, host
        self._start: Event = {}
        self._html: bytearray | None = None

    async def __call__(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._start = event
            kind = dict(event.get("headers", [])).get(b"content-type", b"")
            if kind.startswith(b"text/html"):
                self._html = bytearray()
            else:
                await self._begin("")
        elif self._html is None or event["type"] != "http.response.body":
            await self._send(event)
        else:
            self._html += event.get("body", b"")
            if not event.get("more_body", False):
                html = without_foreign_tags(self._html.decode("utf-8", errors="replace"))
                await self._begin(html)
                await self._send({"type": "http.response.body", "body": html.encode()})

    async def _begin(self, html: str) -> None:
        added = {**_HEADERS, "content-security-policy": content_security_policy(self._host, html)}
        if self._html is not None:
            added["content-length"] = str(len(html.encode()))
        kept = [e for e in self._start.get("headers", []) if e[0].lower().decode() not in added]
        headers = [*kept, *((name.encode(), value.encode()) for name, value in added.items())]
        await self._send({**self._start, "headers": headers})
