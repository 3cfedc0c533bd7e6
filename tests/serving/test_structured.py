"""Structured answers follow their JSON Schema, and no schema takes much time or memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from live import Direct, events, new_direct
from test_server_api import POSTS, body_for, refused
from tiny import CONTEXT, WatchedDecoder, tiny_loaded, tiny_tokenizer

from firstlight.generation import structured
from firstlight.generation.structured import Grammars, SchemaError, Vocabulary
from firstlight.serving.response import TokenTexts

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["star", "bird", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "references": {
        "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"$ref": "#/$defs/point"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"const": 7}, {"type": "null"}, {"enum": ["日本", '"', "\\"]}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2, "multipleOf": 0.5},
}


def asked_format(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module", params=["no end token", "end token"])
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    """Create an application for this machine."""
    app = new_direct(WatchedDecoder(8), loaded=tiny_loaded(eos=request.param == "end token"))
    yield app
    app.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Create the grammars of the tiny tokenizer."""
    texts = TokenTexts(tiny_tokenizer())
    found = Grammars(texts.vocabulary(tiny_tokenizer().vocab_size, [0]))
    yield found
    found.close()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_structured_answer_of_random_model_follows_schema(
    direct: Direct, path: str, schema: dict[str, Any]
) -> None:
    """Ten choices each, at high temperature and greedy, without and with streaming."""
    valid = jsonschema_rs.validator_for(schema)
    fields = {"max_tokens": 60, "response_format": asked_format(schema), "n": 5, "seed": 3}
    texts = []
    for temperature in (0, 2):
        content = body_for(path, **fields, temperature=temperature)
        choices = direct.ask(path, content).json["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        found = [one["text"] if "text" in one else one["message"]["content"] for one in choices]
        pieces = [""] * 5
        for chunk in events(direct.ask(path, {**content, "stream": True}).body):
            (one,) = chunk["choices"]
            pieces[one["index"]] += one.get("text") or one.get("delta", {}).get("content") or ""
        assert pieces == found
        texts += found
    for text in texts:
        assert valid.is_valid(json.loads(text)), text
    assert len(set(texts)) > 1


@pytest.mark.parametrize("path", POSTS)
def test_structured_json_object_format_allows_any_object(direct: Direct, path: str) -> None:
    """An answer that reaches the length limit is the start of an object."""
    for one in ({"type": "json_object"}, asked_format(None)):
        fields = body_for(path, max_tokens=40, n=8, seed=1, temperature=1, response_format=one)
        bias = {str(tiny_tokenizer().encode("}")[0]): 9, str(tiny_tokenizer().encode('"')[0]): 6}
        choices = direct.ask(path, {**fields, "logit_bias": bias}).json["choices"]
        ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
        assert len(ended) > 1
        for choice in choices:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text.startswith("{")
            assert choice not in ended or isinstance(json.loads(text), dict)
    plain = body_for(path, response_format={"type": "text"}, temperature=0)
    free = direct.ask(path, body_for(path, temperature=0)).json
    assert direct.ask(path, plain).json["choices"] == free["choices"]


def test_structured_masks_exclude_control_tokens_and_tokens_without_text(
    grammars: Grammars,
) -> None:
    size = tiny_tokenizer().vocab_size
    constraint = grammars.constraint({"type": "string"})
    constraint.push(tiny_tokenizer().encode('"')[0])
    allowed = constraint.allowed(size + 9)
    assert not allowed[size:].any()
    assert not allowed[list(tiny_tokenizer().special_token_ids)].any()
    assert allowed.sum() > 100


@pytest.mark.parametrize("path", POSTS)
def test_structured_invalid_formats_return_400(direct: Direct, path: str) -> None:
    named = "response_format.json_schema.name"
    wrong: list[tuple[Any, str]] = [
        ("json", "response_format"),
        ({"type": "xml"}, "response_format"),
        ({}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, named),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, named),
        (asked_format(5), "response_format.json_schema.schema"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for value, param in wrong:
        answer = direct.ask(path, body_for(path, response_format=value))
        assert (answer.status, answer.error["param"]) == (400, param), value


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


HOSTILE: dict[str, dict[str, Any]] = {
    "unknown keyword": {"type": "array", "uniqueItems": True},
    "another machine": {"$ref": "http://127.0.0.1:1/schema"},
    "no such definition": {"$ref": "#/$defs/none"},
    "nothing satisfies it": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "itself": {"$ref": "#"},
    "no schema": {"type": 5},
    "its own options": {"x-guidance": {"lenient": True}, "contains": {}},
    "deep": nested(90),
    "large": {"enum": [f"value {n}" for n in range(8000)]},
    "look-around": {"type": "string", "pattern": r"^(?=a)(\w+)\1$"},
    "repeats of repeats": {"type": "string", "pattern": f"^{'(' * 5}a{'{1000})' * 5}$"},
    "intersections": {"allOf": [{"type": "string", "pattern": f".*{c}.*"}
                                for c in "abcdefghijklmnopqrst"]},
    "states": {"allOf": [{"type": "string", "pattern": f"(.*{c}.{{{n}}})*"}
                         for n, c in enumerate("abcdefghijklmnop", 3)]},
    "products": {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}}
                                      for j in range(8)]} for i in range(8)]},
    "a million items": {"type": "array", "minItems": 10**9, "items": nested(3)},
    "brackets": {"type": "string", "pattern": "(" * 20_000 + ")" * 20_000},
}  # fmt: skip
#: Long but cheap: the answer is the start of a valid one.
FOLLOWED = ("deep", "a million items")


@pytest.mark.parametrize("direct", ["end token"], indirect=True)
@pytest.mark.parametrize("name", HOSTILE)
def test_structured_arbitrary_schemas_are_answered_with_little_cpu_time(
    direct: Direct, name: str
) -> None:
    """Measured in CPU time of the processes that follow schemas, because wall-clock time depends on
    other load.
    """
    before = {child.pid for child in psutil.Process().children()}
    content = body_for(POSTS[1], response_format=asked_format(HOSTILE[name]))
    if name in FOLLOWED:
        answer = direct.ask(POSTS[1], content)
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"].startswith("[[[")
    else:
        message = refused(direct, POSTS[1], content, "response_format", "unsupported_schema")
        assert "\n" not in message
        assert len(message) < 300
    assert len({child.pid for child in psutil.Process().children()} - before) <= 2
    content = body_for(POSTS[1], max_tokens=60, response_format=asked_format(PERSON))
    found = direct.ask(POSTS[1], content).json["choices"][0]["message"]["content"]
    assert jsonschema_rs.is_valid(PERSON, json.loads(found))


def test_structured_slow_schema_is_ended(
    monkeypatch: pytest.MonkeyPatch, grammars: Grammars
) -> None:
    children = psutil.Process().children
    grammars.constraint(PERSON)
    before = len(children())
    with pytest.raises(SchemaError, match="takes too much time or memory"):
        grammars.constraint(HOSTILE["repeats of repeats"])
    # The process that tried the schema has ended; the process that follows other schemas has not.
    assert len(children()) == before - 1
    # A rejected schema is not tried again.
    monkeypatch.setattr(grammars, "_trying", None)
    with pytest.raises(SchemaError, match="takes too much time or memory"):
        grammars.constraint(HOSTILE["repeats of repeats"])


def test_structured_text_continues_when_another_ended_the_process(grammars: Grammars) -> None:
    schema = {"enum": ["the star falls", "the stone"]}
    encode = tiny_tokenizer().encode
    texts = [encode('"the star falls"'), encode('"the stone"')]
    constraints = [grammars.constraint(schema) for _ in texts]
    for ids, constraint in zip(texts, constraints, strict=True):
        assert not constraint.push(ids[0])
    process = grammars._following._process
    assert process is not None
    process.kill()
    process.wait()
    # The constraint that uses the dead process fails; the others are not affected.
    with pytest.raises(SchemaError, match="takes too much time or memory"):
        constraints[0].push(texts[0][1])
    for token_id in texts[1][1:-1]:
        assert constraints[1].allowed(322)[token_id]
        assert not constraints[1].push(token_id)
    assert constraints[1].push(texts[1][-1])


def test_structured_schema_failing_midway_returns_400(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, token_id: int) -> bool:
        raise SchemaError("the schema takes too much time or memory to follow: simplify it")

    monkeypatch.setattr(structured.Constraint, "push", fail)
    content = body_for(POSTS[1], response_format=asked_format(PERSON))
    refused(direct, POSTS[1], content, "response_format", "unsupported_schema")
    monkeypatch.undo()
    assert direct.ask(POSTS[1], content).status == 200


def test_structured_schema_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_MEMORY", 2**20)
    monkeypatch.setattr(structured, "_SCHEMA_SECONDS", 60.0)
    found = Grammars(Vocabulary([bytes([n]) for n in range(256)], [], []))
    try:
        with pytest.raises(SchemaError):
            found.constraint({"enum": [f"value {n}" for n in range(3000)]})
    finally:
        found.close()


def test_structured_without_library_names_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "can_structure", lambda: False)
    app = new_direct()
    try:
        for path in POSTS:
            for one in ({"type": "json_object"}, asked_format(PERSON)):
                content = body_for(path, response_format=one)
                message = refused(app, path, content, "response_format", "unsupported_parameter")
                assert "pip install 'firstlight[structured]'" in message
            assert app.ask(path, body_for(path, response_format={"type": "text"})).status == 200
    finally:
        app.close()


def test_structured_processes_end_with_service() -> None:
    app = new_direct()
    before = {child.pid for child in psutil.Process().children()}
    app.ask(POSTS[1], body_for(POSTS[1], response_format={"type": "json_object"}))
    begun = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(begun) == 2
    app.close()
    assert not any(child.is_running() for child in begun)


def test_structured_full_context_ends_with_length(direct: Direct) -> None:
    schema = {"type": "string", "minLength": 2 * CONTEXT}
    content = body_for(POSTS[0], max_tokens=None, response_format=asked_format(schema))
    assert direct.ask(POSTS[0], content).json["choices"][0]["finish_reason"] == "length"
