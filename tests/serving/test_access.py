"""Access control: API keys, host names, and pages from other origins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import KEY, Direct, new_direct, sample

from firstlight.errors import ConfigError, InputError
from firstlight.serving.access import Access, RequestError
from firstlight.serving.config import ServerOptions, checked_key, is_loopback, key_from_file

HOST = (b"host", b"localhost:8000")
JSON = (b"content-type", b"application/json")
COMPLETION = b'{"prompt": "x", "max_tokens": 1}'
CHAT = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
ROUTES = {
    "/v1/models": b"",
    "/v1/models/tiny": b"",
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/metrics": b"",
    "/openapi.json": b"",
    "/": b"",
    "/docs": b"",
    "/health/": b"",
    "//health": b"",
    "/nothing": b"",
}
WRONG_KEYS: dict[str, list[bytes]] = {
    "missing": [],
    "empty": [b""],
    "wrong": [b"Bearer Secret-Key-2"],
    "wrong case": [b"Bearer secret-key-1"],
    "prefix": [b"Bearer Secret-Key-"],
    "longer": [b"Bearer Secret-Key-11"],
    "basic": [b"Basic Secret-Key-1"],
    "no scheme": [KEY],
    "only a scheme": [b"Bearer "],
    "not ASCII": ["Bearer Sécret-Key-1".encode()],
    "latin-1": ["Bearer Secret-Key-1\xa0".encode("latin-1")],
    "two spaces": [b"Bearer  Secret-Key-1"],
    "twice": [b"Bearer Secret-Key-1", b"Bearer Secret-Key-1"],
    "right and wrong": [b"Bearer Secret-Key-1", b"Bearer x"],
    "several in one": [b"Bearer Secret-Key-1, Bearer x"],
    "very long": [b"Bearer " + b"x" * 10_000],
}


@pytest.fixture(scope="module")
def locked() -> Iterator[Direct]:
    """Create an application with a key."""
    app = new_direct(access=Access("0.0.0.0", KEY))
    yield app
    app.close()


@pytest.fixture(scope="module")
def local() -> Iterator[Direct]:
    """Create an application for this machine that does not require a key and allows one other
    origin.
    """
    app = new_direct(access=Access("127.0.0.1", None, ["My.Box"], ["https://Page.example", "null"]))
    yield app
    app.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("form", WRONG_KEYS)
def test_access_without_valid_key_returns_401(locked: Direct, path: str, form: str) -> None:
    sent = [(b"authorization", value) for value in WRONG_KEYS[form]]
    method = "POST" if ROUTES[path] else "GET"
    answer = locked.ask(path, method=method, headers=[HOST, JSON, *sent], body=[ROUTES[path]])
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("query", ["api_key=Secret-Key-1", "key=Secret-Key-1&token=Secret-Key-1"])
def test_access_key_in_query_returns_401(locked: Direct, path: str, query: str) -> None:
    headers = [HOST, JSON, (b"x-api-key", KEY)]
    answer = locked.ask(f"{path}?{query}", headers=headers, body=[ROUTES[path]])
    assert answer.status == 401


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
def test_access_with_valid_key_is_answered(locked: Direct, path: str, scheme: bytes) -> None:
    method = "POST" if ROUTES[path] else "GET"
    headers = [HOST, JSON, (b"authorization", scheme + b" " + KEY)]
    answer = locked.ask(path, method=method, headers=headers, body=[ROUTES[path]])
    missing = path in ("/docs", "/health/", "//health", "/nothing")
    assert answer.status == (404 if missing else 200)


def test_access_health_needs_no_key(locked: Direct) -> None:
    assert locked.ask("/health", headers=[HOST]).json == {"status": "ok"}


def test_access_other_methods_need_key(locked: Direct) -> None:
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "GE T"):
        answer = locked.ask("/v1/models", method=method, headers=[HOST], body=[b""])
        assert answer.status == 401


def test_access_preflight_from_foreign_origin_returns_403(locked: Direct) -> None:
    headers = [
        HOST,
        (b"origin", b"https://evil.example"),
        (b"access-control-request-method", b"POST"),
    ]
    answer = locked.ask("/v1/models", method="OPTIONS", headers=headers, body=[b""])
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "my.box:80"],
)
def test_access_local_host_names_are_answered(local: Direct, host: str) -> None:
    assert local.ask("/health", headers=[(b"host", host.encode())]).status == 200


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b""],
        [b"evil.example"],
        [b"evil.example:8000"],
        [b"localhost.evil.example"],
        [b"localhost:8000.evil.example"],
        [b"evil@localhost"],
        [b"localhost:"],
        [b"localhost:999999"],
        [b"127.0.0.1.nip.io"],
        [b"0.0.0.0"],
        [b"[::1"],
        ["lócalhost".encode()],
        [b"localhost\n"],
        [b"localhost", b"localhost"],
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions"])
def test_access_foreign_host_name_returns_403(local: Direct, path: str, hosts: list[bytes]) -> None:
    headers = [JSON, *((b"host", host) for host in hosts)]
    answer = local.ask(path, headers=headers, body=[ROUTES.get(path, b"")])
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "origins",
    [
        [b"https://evil.example"],
        [b"http://localhost"],  # a port that differs from the Host header's
        [b"http://localhost:3000"],
        [b"https://localhost:8000"],  # another scheme
        [b"x://localhost:8000"],
        [b"http://localhost:8000.evil.example"],
        [b""],
        [b"localhost:8000"],
        [b"http://localhost:8000", b"http://localhost:8000"],
        ["http://lócalhost:8000".encode()],
    ],
)
def test_access_foreign_origin_returns_403(local: Direct, origins: list[bytes]) -> None:
    for path in ("/health", "/v1/completions"):
        headers = [HOST, JSON, *((b"origin", origin) for origin in origins)]
        answer = local.ask(path, headers=headers, body=[ROUTES.get(path, b"")])
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


def test_access_own_origin_is_answered_without_cors_headers(local: Direct) -> None:
    headers = [HOST, (b"origin", b"http://localhost:8000")]
    answer = local.ask("/health", headers=headers)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", [b"https://page.example", b"null"])
def test_access_allowed_origin_is_answered_with_cors_headers(local: Direct, origin: bytes) -> None:
    headers = [HOST, JSON, (b"origin", origin)]
    for path in ("/v1/models", "/v1/completions", "/nothing"):
        answer = local.ask(path, headers=headers, body=[ROUTES[path]])
        assert answer.headers["access-control-allow-origin"] == origin.decode()
        assert answer.headers["vary"] == "Origin"
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
    wanted = (b"access-control-request-headers", b"authorization, x-stainless-os")
    asked = [HOST, headers[2], (b"access-control-request-method", b"POST"), wanted]
    answer = local.ask("/v1/completions", method="OPTIONS", headers=asked, body=[b""])
    assert answer.status == 200
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"


def test_access_preflight_without_key_is_answered_for_allowed_origins_only() -> None:
    app = new_direct(access=Access("127.0.0.1", KEY, origins=["https://page.example"]))
    page, method = (b"origin", b"https://page.example"), (b"access-control-request-method", b"POST")
    evil = (b"origin", b"https://evil.example")
    try:
        answer = app.ask("/v1/models", method="OPTIONS", headers=[HOST, page, method])
        assert answer.status == 200
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["x-content-type-options"] == "nosniff"
        for headers in ([(b"host", b"evil.example"), page, method], [HOST, evil, method]):
            answer = app.ask("/v1/models", method="OPTIONS", headers=headers)
            assert answer.status == 403
            assert answer.error["type"] == "permission_error"
        answer = app.ask("/v1/models", headers=[HOST, page])
        assert answer.status == 401  # which the page can read
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert sample(app.service, "firstlight_requests_total", route="/v1/models", status="403")
    finally:
        app.close()


def test_access_wildcard_origin_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="list each origin"):
        ServerOptions(allowed_origins=("https://page.example", "*"))


def test_access_public_server_accepts_any_or_listed_host_names() -> None:
    names = ("a.example", "localhost", "127.0.0.5", "[::1]", "b.example")

    def answered(access: Access) -> list[str]:
        return [name for name in names if is_answered(access, name)]

    assert answered(Access("0.0.0.0")) == list(names)
    assert answered(Access("0.0.0.0", hosts=["A.example"])) == list(names[:-1])
    assert answered(Access("127.0.0.5")) == list(names[1:-1])


def is_answered(access: Access, name: str) -> bool:
    """Return True if a request with this name in its Host header has access."""
    headers = [(b"host", name.encode())]
    try:
        access.require({"type": "http", "scheme": "http", "path": "/", "headers": headers})
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "", "127.1.evil"])
def test_access_public_server_requires_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="set an API key"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, api_key=KEY).host == host


def test_access_key_must_be_one_line_of_printable_characters(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\r\n")
    assert key_from_file(file) == KEY
    for content in (b"", b"\n", b"a b", b"a\nb", "ä".encode(), b"a\x00"):
        file.write_bytes(content)
        with pytest.raises(ConfigError):
            key_from_file(file)
    with pytest.raises(InputError):
        key_from_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="in X is empty"):
        checked_key(b"", "X")


@pytest.mark.parametrize(
    "values",
    [{"port": -1}, {"port": 65536}, {"max_batch_size": 0}, {"max_queue": -1},
     {"max_context_tokens": 1}, {"shutdown_timeout": float("nan")}],
)  # fmt: skip
def test_server_options_out_of_range_raise_config_error(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be between"):
        ServerOptions(**values)  # type: ignore[arg-type]
