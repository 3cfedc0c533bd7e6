"""The OpenAPI document describes exactly the requests that are accepted and the responses that are
sent. The examples were found by schemathesis, which tests/faults/test_fuzzed_server.py runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from live import Direct, new_direct
from test_server_api import POSTS, body_for
from tiny import CONTEXT, WatchedDecoder, tiny_loaded, tiny_tokenizer

from firstlight.lora.loading import LoadedModel
from firstlight.tokenizer import Tokenizer

jsonschema_rs = pytest.importorskip("jsonschema_rs")

SIZE = tiny_tokenizer().vocab_size


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    """Create an application for this machine."""
    app = new_direct(WatchedDecoder(8))
    yield app
    app.close()


@pytest.fixture(scope="module")
def document(direct: Direct) -> Any:
    """Return its OpenAPI document."""
    return direct.ask("/openapi.json").json


def is_documented(document: Any, path: str, body: Any) -> bool:
    """Return True if the document allows a request body."""
    (media,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    schema = {**media["schema"], "components": document["components"]}
    return bool(jsonschema_rs.is_valid(schema, body))


#: Fields, and True if they are valid.
BOTH: list[tuple[dict[str, Any], bool]] = [
    ({"seed": 610.0}, True),
    ({"seed": 610.5}, False),
    ({"max_tokens": 2.0, "n": 1.0, "top_k": 4.0}, True),
    ({"n": 2.5}, False),
    ({"n": 9}, False),
    ({"temperature": 2.5}, False),
    ({"stream_options": {"include_usage": True}}, False),
    ({"stream_options": {"include_usage": True}, "stream": False}, False),
    ({"stream_options": {"include_usage": True}, "stream": True}, True),
    ({"stream_options": None}, True),
    ({"logit_bias": {"321": 1}}, True),
    ({"logit_bias": {"05": 1}}, False),
    ({"logit_bias": {"5": 100.5}}, False),
    ({"frequency_penalty": -2, "presence_penalty": 2.0}, True),
    ({"frequency_penalty": -2.5}, False),
    ({"response_format": {"type": "text"}}, True),
    ({"response_format": {"type": "json_object"}}, True),
    ({"response_format": {"type": "json_schema"}}, False),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, False),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
     True),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"": 0}}}},
     True),
    ({"unknown": 1}, True),
    ({"stop": ["a"] * 5}, False),
    ({"user": None, "metadata": {"": [None]}}, True),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": ""}, True),
    ({"prompt": [5.0, 3]}, True),
    ({"prompt": [[134217729, 5.0]]}, False),
    ({"prompt": [SIZE]}, False),
    ({"prompt": [SIZE - 1]}, True),
    ({"prompt": [[SIZE]]}, False),
    ({"prompt": [1] * CONTEXT}, False),
    ({"prompt": [1] * (CONTEXT - 1)}, True),
    ({"prompt": ["x"] * 64, "max_tokens": 1}, True),
    ({"prompt": ["x"] * 36, "n": 2, "max_tokens": 1}, True),
    ({"prompt": [1] * 10, "n": 8, "max_tokens": 1}, True),
    ({"echo": True, "max_tokens": 0, "logprobs": 5}, True),
    ({"logprobs": 6}, False),
]
CHATS: list[tuple[dict[str, Any], bool]] = [
    ({"top_logprobs": 2}, False),
    ({"top_logprobs": 2, "logprobs": False}, False),
    ({"top_logprobs": 2, "logprobs": True}, True),
    ({"top_logprobs": None}, True),
    ({"max_completion_tokens": 4}, False),  # together with max_tokens
    ({"max_completion_tokens": 4, "max_tokens": None}, True),
    ({"max_tokens": 0}, False),
    ({"tools": [], "tool_choice": "auto"}, True),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
    ({"tool_choice": "required"}, False),
    ({"echo": True}, True),
]
CASES = [(path, *case) for path in POSTS for case in BOTH]
CASES += [(POSTS[0], *case) for case in COMPLETIONS] + [(POSTS[1], *case) for case in CHATS]


@pytest.mark.parametrize("path, fields, fine", CASES, ids=lambda value: str(value)[:60])
def test_openapi_document_allows_exactly_accepted_bodies(
    direct: Direct, document: Any, path: str, fields: dict[str, Any], fine: bool
) -> None:
    body = body_for(path, **fields)
    assert is_documented(document, path, body) is fine
    answer = direct.ask(path, body)
    assert answer.status == (200 if fine else 400), answer.body
    kind = answer.headers["content-type"].partition(";")[0]
    documented = document["paths"][path]["post"]["responses"]["200" if fine else "4XX"]["content"]
    assert kind in documented
    if kind == "application/json":
        schema = {**documented[kind]["schema"], "components": document["components"]}
        jsonschema_rs.validate(schema, answer.json)


def test_openapi_routes_without_body_follow_document(direct: Direct, document: Any) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/metrics"):
        answer = direct.ask(path)
        route = document["paths"][path.replace("/tiny", "/{model}")]["get"]
        ((kind, media),) = route["responses"]["200"]["content"].items()
        assert answer.headers["content-type"].partition(";")[0] == kind
        if kind == "application/json":
            schema = {**media["schema"], "components": document["components"]}
            jsonschema_rs.validate(schema, answer.json)


def test_openapi_document_omits_chat_for_model_without_template() -> None:
    plain = tiny_tokenizer()
    config = {k: v for k, v in plain.config.items() if k != "chat_template"}
    tokenizer = Tokenizer(plain.backend, eos_token=plain.eos_token, config=config)
    loaded = tiny_loaded()
    app = new_direct(loaded=LoadedModel(loaded.model, tokenizer, (), loaded.folder))
    try:
        assert POSTS[1] not in app.ask("/openapi.json").json["paths"]
        answer = app.ask(POSTS[1], body_for(POSTS[1]))
        assert (answer.status, answer.error["code"]) == (400, "no_chat_template")
    finally:
        app.close()


def test_openapi_document_is_self_contained_json(document: Any) -> None:
    text = json.dumps(document)
    for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert name in document["components"]["schemas"]
