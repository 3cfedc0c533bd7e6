"""The filters and tests of chat templates: those of Jinja, with limits on their input and output.

In messages, "it" is the chat template.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any, cast

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

from firstlight.tokenizer.chat_meter import (
    BYTES_PER_PIECE,
    MAX_CHARS,
    MAX_ITEMS,
    Meter,
    account_for_format,
    joined_bytes,
    replaced_bytes,
)

#: Name of the variable with a rendering's meter. The space keeps templates from using it.
METER = " meter"

#: Jinja's filters that can lengthen a text, or take much time for each character; no chat template
#: needs them.
_LEFT_OUT = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
#: Filters that convert any value to a text, with the most characters that the value may have.
_OF_TEXT = {
    **dict.fromkeys(("capitalize", "e", "escape", "float", "forceescape", "int"), MAX_CHARS),
    **dict.fromkeys(("lower", "string", "trim", "truncate", "upper"), MAX_CHARS),
    # These process each word separately, which takes longer.
    **dict.fromkeys(("title", "urlencode", "wordcount"), 1_000_000),
}
#: Filters that process all items at once, and may compare each item with others.
_OF_ITEMS = ("dictsort", "groupby", "max", "min", "sort", "sum", "unique")
#: Filters that yield one item at a time.
_ONE_BY_ONE = ("map", "reject", "rejectattr", "select", "selectattr")
#: Filters that escape HTML: a character may become five, as in "&#39;".
_ESCAPING = ("e", "escape", "forceescape")
#: Tests whose time grows with the length of the compared values.
_LONG_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"),
    *("lessthan", "lower", "lt", "ne", "upper"),
)
#: Most characters in the argument of `trim`.
_MAX_STRIPPED_CHARS = 1000
#: Most digits to which `round` rounds.
_MAX_DIGITS = 100


def meter_of(context: Context) -> Meter:
    """The meter of the current rendering."""
    return cast(Meter, context.parent[METER])


def metered_filters(filters: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters by name, each with limits, and the filters that `chat_sandbox` inserts into
    templates, whose names begin with a space so that no template can use them."""
    metered = {
        name: _metered_filter(name, function)
        for name, function in filters.items()
        if name not in _LEFT_OUT
    }
    own: dict[str, Callable[..., Any]] = {
        " ticking": _ticking,
        " kept": _kept,
        " made": _made,
        " joined": _joined,
        " compared": _compared,
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "tojson": _to_json,
    }
    return metered | own


def metered_tests(tests: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Jinja's tests by name, with limits on those whose time grows with their input."""
    long = {name: _metered_test(tests[name]) for name in _LONG_TESTS}
    return {**tests, **long}


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter `function`, with its input and output counted."""

    @jinja2.pass_context
    @functools.wraps(function)
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        if name in _OF_TEXT:
            _account_for_text(meter, name, value, [*args, *kwargs.values()])
        elif name in _OF_ITEMS:
            value = _few_items(meter, name, value)
            if name == "sum" and not all(isinstance(v, int | float | str) for v in args):
                raise SecurityError("it sums up what is no number")
        elif name in _ONE_BY_ONE:
            value = meter.each(value)
        elif name == "list" and isinstance(value, str):
            meter.make(BYTES_PER_PIECE * len(value))
        elif name == "round" and any(
            v > _MAX_DIGITS for v in (*args, *kwargs.values()) if isinstance(v, int)
        ):
            raise SecurityError(f"it rounds to more than {_MAX_DIGITS} digits")
        made = function(*_first_argument(function, context), value, *args, **kwargs)
        if isinstance(made, GeneratorType):
            return meter.each(made)
        return meter.made(made)

    return filtered


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    @functools.wraps(function)
    def tested(context: Context, *args: Any) -> Any:
        meter_of(context).size(args, "it compares values", 2 * MAX_CHARS)
        return function(*_first_argument(function, context), *args)

    return tested


def _first_argument(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """The argument that Jinja passes to a filter or test before its value, because it was decorated
    with `pass_context`, `pass_eval_context` or `pass_environment`; () if there is none."""
    asked = getattr(function, "jinja_pass_arg", None)
    if asked is None:
        return ()
    found = {
        "context": context,
        "eval_context": context.eval_ctx,
        "environment": context.environment,
    }
    return (found[asked.name],)


def _account_for_text(meter: Meter, name: str, value: Any, arguments: list[Any]) -> None:
    size = meter.size(value, f"it puts a text through {name}", _OF_TEXT[name])
    meter.make(size * (6 if name in _ESCAPING else 1))
    texts = [text for text in arguments if isinstance(text, str)]
    if name == "trim" and any(len(text) > _MAX_STRIPPED_CHARS for text in texts):
        raise SecurityError(f"it trims more than {_MAX_STRIPPED_CHARS} characters")


def _few_items(meter: Meter, name: str, value: Any) -> Any:
    """The value, or a list of the items of an iterator, if it has at most `MAX_ITEMS` items."""
    if not hasattr(value, "__len__"):
        value = list(meter.each(value))
    meter.size(value, f"it puts a value through {name}")
    if len(value) > MAX_ITEMS:
        raise SecurityError(f"it puts more than {MAX_ITEMS:,} items through {name}")
    return value


# Filters that `chat_sandbox` inserts into templates


@jinja2.pass_context
def _ticking(context: Context, items: Any) -> Iterator[Any]:
    """The items of a `for` loop, with the limits checked between them."""
    meter = meter_of(context)
    meter.keep(items)
    return meter.each(items)


@jinja2.pass_context
def _kept(context: Context, value: Any) -> Any:
    """A value that is assigned to a variable, with its size checked."""
    meter_of(context).keep(value)
    return value


@jinja2.pass_context
def _made(context: Context, value: Any) -> Any:
    """A value that an expression has created, with its bytes counted."""
    return meter_of(context).made(value)


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    """The result of the operator `~`, which concatenates texts."""
    meter = meter_of(context)
    if any(type(value) is not str for value in values):
        values = [_as_text(meter, value) for value in values]
    meter.make(0, sum(map(len, values)))
    text: str = meter.made("".join(values))
    return text


def _as_text(meter: Meter, value: Any) -> str:
    """`str(value)`, with ten characters counted for each: a list shows some as `\\U0001f600`."""
    if not isinstance(value, str | int):
        meter.make(10 * meter.size(value, "it joins a value"))
    return str(value)


@jinja2.pass_context
def _compared(context: Context, value: Any) -> Any:
    """A side of a comparison, or a key, with the time to look at it counted."""
    meter = meter_of(context)
    if isinstance(value, str):
        meter.tick(len(value))
    elif isinstance(value, int):
        meter.tick()
    else:
        meter.size(value, "it compares a value")
    return value


# Filters that replace those of Jinja with the same name


@jinja2.pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    plain, old, new = str(text), str(old), str(new)
    chars = len(plain) + plain.count(old) * len(new)
    meter_of(context).make(replaced_bytes(plain, old, new), chars)
    return plain.replace(old, new, -1 if count is None else count)


@jinja2.pass_context
def _join(context: Context, items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    meter = meter_of(context)
    if attribute is not None:
        items = jinja2.filters.sync_do_map(context, items, attribute=attribute)
    texts = [_as_text(meter, item) for item in meter.each(items)]
    chars = sum(map(len, texts)) + len(texts) * len(str(d))
    meter.make(joined_bytes(texts, str(d)), chars)
    return str(d).join(texts)


@jinja2.pass_context
def _format(context: Context, text: Any, *args: Any, **kwargs: Any) -> str:
    account_for_format(meter_of(context), str(text), [*args, *kwargs.values()])
    return str(jinja2.filters.do_format(str(text), *args, **kwargs))


@jinja2.pass_context
def _indent(
    context: Context, text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = str(text)
    spaces = len(width) if isinstance(width, str) else width
    lines = text.count("\n") + 1
    meter_of(context).make(160 * lines, len(text) + lines * spaces)
    return jinja2.filters.do_indent(text, width, first, blank)


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's `tojson`, but like that of transformers, this does not escape HTML, nor, by
    default, characters other than ASCII."""
    meter = meter_of(context)
    # Indented JSON is slower: json then writes it in Python code, item by item, not in C.
    most = MAX_CHARS if indent is None else 1_000_000
    size = meter.size(value, "it makes JSON of a value", most)
    if isinstance(indent, int) and indent > 100:
        raise SecurityError(f"it indents JSON by {indent} spaces")
    if any(len(text) > 100 for text in [indent, *(separators or ())] if isinstance(text, str)):
        raise SecurityError("it puts long texts between the parts of JSON")
    meter.make((12 if ensure_ascii else 6) * size)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
