"""Thousands of generated requests of all kinds: no 5xx status, and every error in OpenAI's
format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import Answer, Direct, events, new_direct
from tiny import WatchedDecoder

from firstlight.serving.request import ChatRequest, CompletionRequest, GenerationRequest

PATHS: dict[str, type[GenerationRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
NAMES = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "foo", ""})

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([10**400, -1, 0, 1e308, "\x00", "<|im_end|>", "\U0010ffff"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
_TEXT = st.text(max_size=30) | st.sampled_from(["the star", "<|im_end|>", "日本 🙂"])
_IDS = st.lists(st.integers(0, 321), min_size=1, max_size=10)
#: Valid values; JSON provides enough invalid ones.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": _TEXT
    | st.lists(_TEXT, min_size=1, max_size=3)
    | _IDS
    | st.lists(_IDS, min_size=1, max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "developer"]),
                "content": _TEXT
                | st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT}),
                    min_size=1,
                    max_size=3,
                ),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    "model": st.sampled_from([None, "tiny", "other"]),
    "stream": st.just(True),
    "stream_options": st.sampled_from([None, {}, {"include_usage": True}]),
    "max_tokens": st.integers(1, 4),
    "max_completion_tokens": st.integers(1, 4),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 400),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 321).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
}


_NEEDED = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
_SPOILED = [b"", b"", b"\x00", b"\xff", b'"', b"{", b"]", b"NaN", b"9" * 50]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Generate paths and bodies, from valid requests to random bytes."""
    path = draw(st.sampled_from(sorted(PATHS)))
    needed = _NEEDED[path]
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60) | JSON.map(lambda one: json.dumps(one).encode()))
    fields = sorted(name for name in FIELDS if name in PATHS[path].model_fields)
    chosen = draw(st.lists(st.sampled_from(fields), max_size=4))
    content = {name: draw(FIELDS[name]) for name in [needed, *chosen]}
    content.setdefault("max_tokens", 2)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        content[draw(st.sampled_from(NAMES))] = draw(JSON)
    body = json.dumps(content).encode()
    if draw(st.integers(0, 4)) == 0:  # truncate the body, or insert something
        place, added = draw(st.integers(0, len(body))), draw(st.sampled_from(_SPOILED))
        body = body[:place] + added + (body[place:] if added else b"")
    return path, body


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    """Create an application that receives many requests."""
    app = new_direct(WatchedDecoder(8))
    yield app
    app.close()


def require_proper(answer: Answer, path: str) -> None:
    """Check that the status is not 5xx and that the response has OpenAI's format."""
    assert answer.complete
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert answer.error["message"]
    elif answer.headers["content-type"] == "application/json":
        found = answer.json
        generated = found["usage"]["completion_tokens"]
        assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + generated
        for choice in found["choices"]:
            assert choice["finish_reason"] in ("length", "stop")
            assert isinstance(choice["text" if "text" in choice else "message"], str | dict)
    else:
        chunks = events(answer.body)
        assert not any("error" in chunk for chunk in chunks)


def hunted(direct: Direct, count: int) -> tuple[Callable[[], None], list[int]]:
    """Return a hypothesis test with this many requests, and the list that gets their statuses."""
    statuses: list[int] = []

    @settings(max_examples=count, suppress_health_check=list(HealthCheck), database=None)
    @given(request=requests())
    def hunt(request: tuple[str, bytes]) -> None:
        path, body = request
        answer = direct.ask(path, method="POST", body=[body])
        require_proper(answer, path)
        statuses.append(answer.status)

    return hunt, statuses


def require_settled(direct: Direct) -> None:
    assert (direct.service.scheduler.running, direct.service.scheduler.waiting) == (0, 0)
    assert direct.ask("/health").status == 200


def test_server_answers_three_hundred_generated_requests(direct: Direct) -> None:
    hunt, statuses = hunted(direct, 300)
    hunt()
    require_settled(direct)
    # Enough requests of both kinds, valid and invalid.
    assert len(statuses) >= 300
    assert statuses.count(200) > 45
    assert statuses.count(400) > 45


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_server_answers_twenty_thousand_generated_requests(direct: Direct) -> None:
    hunt, statuses = hunted(direct, 20_000)
    hunt()
    require_settled(direct)
    assert len(statuses) >= 20_000


_HEADER = st.tuples(
    st.sampled_from(
        [b"host", b"origin", b"authorization", b"content-type", b"content-length", b"expect",
         b"content-encoding", b"transfer-encoding", b"cookie", b"range", b"x-forwarded-for"]
    ),
    st.binary(max_size=20) | st.sampled_from(
        [b"localhost", b"application/json", b"http://localhost", b"null", b"-1", b"99999999999"]
    ),
)  # fmt: skip


@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "X"]),
    path=st.sampled_from(["/health", "/metrics", "/v1/models", "/v1/completions", "/v1/models/"])
    | st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: f"/{text}"),
    headers=st.lists(_HEADER, max_size=5),
    local=st.booleans(),
)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_server_answers_requests_to_any_path_with_any_headers(
    direct: Direct, method: str, path: str, headers: list[tuple[bytes, bytes]], local: bool
) -> None:
    sent = [*([(b"host", b"localhost")] if local else []), *headers]
    answer = direct.ask(path, method=method, headers=sent, body=[b"{}"])
    assert answer.complete
    assert answer.status < 500
    if answer.status >= 400:
        assert answer.error["message"]
