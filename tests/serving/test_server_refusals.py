"""Rejected requests, with errors that name the invalid field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live import Direct, new_direct
from test_server_api import POSTS, body_for, refused

from firstlight.serving.config import Limits
from firstlight.serving.request import UnsupportedFields


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    """Create an application for this machine."""
    app = new_direct()
    yield app
    app.close()


# Fields that would change the response

REFUSED_VALUES: dict[str, Any] = {
    "best_of": 2,
    "suffix": "end",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "web_search_options": {},
    "moderation": {},
}


#: Field -> values that have no effect.
NEUTRAL_VALUES: dict[str, list[Any]] = {
    "best_of": [1],
    "suffix": [""],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", UnsupportedFields.model_fields)
def test_unsupported_parameter_is_rejected_by_name_unless_neutral(
    direct: Direct, path: str, name: str
) -> None:
    content = body_for(path, **{name: REFUSED_VALUES[name]})
    assert name in refused(direct, path, content, name, "unsupported_parameter")
    for neutral in (None, *NEUTRAL_VALUES.get(name, ())):
        assert direct.ask(path, body_for(path, **{name: neutral})).status == 200


def test_boolean_false_is_not_accepted_as_0(direct: Direct) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        refused(direct, POSTS[0], body_for(POSTS[0], **{name: False}), name, None)


@pytest.mark.parametrize("path", POSTS)
def test_logit_bias_with_invalid_values_is_rejected(direct: Direct, path: str) -> None:
    wrong: list[Any] = [
        {"5": 101}, {"5": -100.5}, {"5": True}, {"5": None}, {"x": 1}, {"-1": 1}, {"05": 1},
        {"1.0": 1}, {"": 1}, [1], "5", {str(i): 0 for i in range(1025)},
    ]  # fmt: skip
    for value in wrong:
        message = refused(direct, path, body_for(path, logit_bias=value), "logit_bias", None)
        assert "token ids to numbers from -100 to 100" in message
    message = refused(direct, path, body_for(path, logit_bias={"322": 1}), "logit_bias", None)
    assert "contains token id 322, but the model has 322 tokens" in message
    many = {str(i): 0 for i in range(322)}
    for fine in ({}, None, {"321": -100}, {"5": 1.5}, many):
        assert direct.ask(path, body_for(path, logit_bias=fine)).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_parameters_without_effect_on_answer_are_accepted(direct: Direct, path: str) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": {"b": [1]}},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
    }
    assert direct.ask(path, body_for(path, **harmless)).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_unknown_field_close_to_a_known_one_is_rejected_with_suggestion(
    direct: Direct, path: str
) -> None:
    content = body_for(path, temprature=1)
    message = refused(direct, path, content, "temprature", "unknown_parameter")
    assert "did you mean 'temperature'?" in message


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 2.5),
        ("max_tokens", True), ("n", 0), ("n", 9), ("n", 10**30), ("temperature", -0.1),
        ("temperature", 2.1), ("temperature", "0"), ("top_p", 0), ("top_p", 1.5), ("top_k", -1),
        ("top_k", 1.5), ("min_p", 2), ("repetition_penalty", 0), ("seed", 2**63),
        ("frequency_penalty", 2.5), ("frequency_penalty", "1"), ("presence_penalty", -2.1),
        ("seed", "1"), ("stop", ""), ("stop", ["a"] * 5), ("stop", ["a", ""]), ("stop", [1]),
        ("stop", "x" * 257), ("stream", "yes"), ("stream", 1), ("user", 5), ("model", 5),
        ("model", "x" * 257), ("metadata", []), ("logprobs", "yes"), ("logprobs", 6),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_rejected_by_name(
    direct: Direct, path: str, name: str, value: Any
) -> None:
    refused(direct, path, body_for(path, **{name: value}), name, None)


def test_parameters_of_other_route_are_rejected(direct: Direct) -> None:
    chat = POSTS[1]
    refused(direct, chat, body_for(chat, max_tokens=0), "max_tokens", None)
    refused(direct, POSTS[0], body_for(POSTS[0], echo=1), "echo", None)
    refused(direct, chat, body_for(chat, top_logprobs=2), "top_logprobs", None)
    refused(direct, chat, body_for(chat, logprobs=True, top_logprobs=21), "top_logprobs", None)
    refused(direct, chat, body_for(chat, max_completion_tokens=4), "max_tokens", None)
    assert direct.ask(chat, body_for(chat, max_completion_tokens=3)).status == 200
    for path in POSTS:
        content = body_for(path, stream_options={"include_usage": True})
        refused(direct, path, content, "stream_options", None)


# Bodies


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "user": "a", "user": "a"}',
        b'{"metadata": {"a": 1, "a": 1}, "prompt": "x"}',
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "x"} x',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
    ids=lambda body: body[:24],
)
def test_body_not_a_json_object_returns_400(direct: Direct, path: str, body: bytes) -> None:
    answer = direct.ask(path, method="POST", body=[body])
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/x-www-form-urlencoded")],
        [(b"content-type", b"application/jsonp")],
        [(b"content-type", b"application/json")] * 2,
        [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")],
    ],
)
def test_body_without_json_content_type_returns_415(
    direct: Direct, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    body = [json.dumps(body_for(path)).encode()]
    answer = direct.ask(path, headers=[(b"host", b"localhost"), *headers], body=body)
    assert answer.status == 415
    assert answer.error["type"] == "invalid_request_error"
    is_compressed = (b"content-encoding", b"gzip") in headers
    cause = "not be compressed" if is_compressed else "send Content-Type: application/json"
    assert cause in answer.error["message"]
    fine = [(b"host", b"localhost"), (b"content-type", b"Application/JSON; charset=utf-8")]
    body = [json.dumps(body_for(path)).encode()]
    assert direct.ask(path, headers=fine, body=body).status == 200


@pytest.mark.parametrize("key", ["metadata", "logit_bias", "stream_options", "n", "unknown"])
@pytest.mark.parametrize("values", [{str(i): 1 for i in range(20_000)}, [{}] * 20_001])
def test_body_with_too_many_names_returns_413_before_validation(
    direct: Direct, key: str, values: Any
) -> None:
    answer = direct.ask(POSTS[0], body_for(POSTS[0], **{key: values}))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "more than 20,000 names and objects" in answer.error["message"]


def test_body_with_many_names_below_limit_is_answered(direct: Direct) -> None:
    names = {str(i): 1 for i in range(19_000)}
    assert direct.ask(POSTS[0], body_for(POSTS[0], metadata=names, max_tokens=1)).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_body_too_large_returns_413_and_is_not_read_to_end(path: str) -> None:
    app = new_direct(limits=Limits(max_body_bytes=1000))
    plain = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    try:
        said = [*plain, (b"content-length", b"1001")]
        answer = app.ask(path, method="POST", headers=said, body=[b"never read"])
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        pieces = [b" " * 400] * 10
        answer = app.ask(path, headers=plain, body=pieces)
        assert (answer.status, len(pieces)) == (413, 7)
        exact = json.dumps(body_for(path)).encode().ljust(1000)
        assert app.ask(path, body=[exact]).status == 200
    finally:
        app.close()
