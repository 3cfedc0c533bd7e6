"""The sandbox in which chat templates are rendered: with limits, and out of Python's reach.

A template often comes with a downloaded model, so it is treated as somebody else's program: it
sees plain JSON data and nothing else, can change nothing, and can't reach Python through what it
sees (Jinja's sandbox). Its time, the text it makes and the values it keeps are limited, against
loops in loops, multiplied and doubled strings, lists of themselves, endless macros.

Not covered: a filter mapped over a list of many long texts (`|map('upper')|list`) and `sum` over
many lists can still take much memory or time before a limit is looked at. Who renders templates
of strangers for strangers, as a public server, should also limit the process itself.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from firstlight.errors import InputError, TokenizerError

__all__ = ["check_template", "render"]

#: Characters of a template, of a rendered conversation, and of any one value kept on the way.
MAX_TEMPLATE_CHARS = 1_000_000
MAX_CHARS = 10_000_000
#: Words and signs of a template's program: each takes some 30 microseconds to compile.
MAX_TEMPLATE_TOKENS = 20_000
#: What one item of a list counts for among them.
_CHARS_PER_ITEM = 20
#: Characters that multiplying, replacing, joining and formatting may make in one rendering.
MAX_CHARS_MADE = 100_000_000
#: Bits of a whole number.
MAX_INTEGER_BITS = 100_000
#: Processor time of one rendering; a conversation of a million words takes a tenth.
MAX_SECONDS = 0.7

#: Of Jinja's own, what multiplies text and no chat template needs.
_LEFT_OUT = ("batch", "center", "slice", "urlize", "wordwrap", "xmlattr")


def check_template(template: str) -> None:
    """Refuse a template that doesn't compile.

    Raises:
        TokenizerError: it is too long, or not Jinja; with the line.
    """
    _compiled(template)


def render(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, str],
    *,
    add_generation_prompt: bool = False,
    generation_marks: tuple[str, str] = ("", ""),
) -> str:
    """The text of a conversation, the same that transformers' `apply_chat_template` makes.

    Args:
        template: Jinja.
        messages: plain JSON data, with `role` and `content` in each.
        variables: further names that the template may use: `bos_token` and the like.
        add_generation_prompt: end with the beginning of the assistant's next turn.
        generation_marks: written before and after what `{% generation %}` blocks hold.

    Raises:
        TokenizerError: the template doesn't compile, fails, reaches for what it may not
            have, or goes on too long.
        InputError: the template itself refuses the conversation (`raise_exception`).
    """
    compiled = _compiled(template)
    values: dict[str, Any] = {
        "messages": messages,
        # Templates ask `tools is not none`, which an undefined name would answer with yes.
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **variables,
        _METER: _Meter(),
        _MARKS: generation_marks,
    }
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(values):
            length += len(piece)
            if length > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS:,} characters")
            pieces.append(piece)
    except _RefusalError as error:
        raise InputError(f"the chat template refuses these messages: {error}") from error
    except SecurityError as error:
        raise TokenizerError(f"the chat template does what it may not: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"the chat template fails on these messages: {reason}") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TokenizerError(
            f"the chat template has {len(template):,} characters, "
            f"more than the {MAX_TEMPLATE_CHARS:,} that are read"
        )
    environment = _environment()
    try:
        count = sum(1 for _ in islice(environment.lex(template), MAX_TEMPLATE_TOKENS + 1))
        if count <= MAX_TEMPLATE_TOKENS:
            return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template doesn't compile: line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"the chat template doesn't compile: {reason}") from error
    raise TokenizerError(
        f"the chat template has more than the {MAX_TEMPLATE_TOKENS:,} words and signs that are read"
    )


#: Where a rendering's meter lies among its variables: no template can spell this name.
_METER = " meter"
#: Likewise, the marks of `{% generation %}` blocks.
_MARKS = " marks"


class _RefusalError(TemplateError):
    """The template's own `raise_exception`."""


class _Meter:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self._started = time.thread_time()
        self._made = 0

    def tick(self) -> None:
        """To be called again and again, wherever a template can go round."""
        if time.thread_time() - self._started > MAX_SECONDS:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, chars: int) -> None:
        """To be called before that much text is made at one go."""
        if chars > MAX_CHARS:
            raise SecurityError(f"it makes more than {MAX_CHARS:,} characters at once")
        self._made += max(chars, 0)
        if self._made > MAX_CHARS_MADE:
            raise SecurityError(f"it makes more than {MAX_CHARS_MADE:,} characters on the way")

    def keep(self, value: Any) -> None:
        """To be called with each value that gets a name, so that none can be doubled for ever."""
        size, rest = 0, [value]
        while rest:
            item = rest.pop()
            parts = item if isinstance(item, list | tuple | set | dict) else ()
            size += len(item) if isinstance(item, str | bytes) else _CHARS_PER_ITEM
            size += _CHARS_PER_ITEM * len(parts)
            if size > MAX_CHARS:
                raise SecurityError(f"it keeps a value of more than {MAX_CHARS:,} characters")
            self.tick()
            rest.extend(parts)
            rest.extend(item.values() if isinstance(item, dict) else ())


def _meter(context: Context) -> _Meter:
    return cast(_Meter, context[_METER])


def _concat(pieces: Iterable[str]) -> str:
    """What a macro or a `set` block has written."""
    pieces = list(pieces)
    if sum(map(len, pieces)) > MAX_CHARS:
        raise SecurityError(f"it makes a text of more than {MAX_CHARS:,} characters")
    return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a meter at every place where a template can go round or grow."""

    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(_concat)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)

        def through(filter_name: str, value: nodes.Node) -> nodes.Filter:
            expression = cast(nodes.Expr, value)
            return nodes.Filter(expression, filter_name, [], [], None, None, lineno=value.lineno)

        for loop in list(tree.find_all(nodes.For)):
            loop.iter = through(" ticking", loop.iter)
        for assignment in list(tree.find_all(nodes.Assign)):
            assignment.node = through(" kept", assignment.node)
        for scope in list(tree.find_all(nodes.With)):
            scope.values = [through(" kept", value) for value in scope.values]
        macros: list[nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.Macro)]
        for macro in [*macros, *tree.find_all(nodes.CallBlock)]:
            macro.defaults = [through(" kept", value) for value in macro.defaults]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            _make_format(_meter(context), left)
        elif isinstance(left, int) and isinstance(right, int):
            a, b = left.bit_length(), right.bit_length()
            bits = {"*": a + b, "**": a * max(right, 0), "%": a}[operator]
            if bits > MAX_INTEGER_BITS:
                raise SecurityError(f"it makes a number of more than {MAX_INTEGER_BITS:,} bits")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                    _meter(context).make(len(sequence) * count)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.keep(args)
        meter.keep(kwargs)
        # The sandbox wraps str.format.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = getattr(method, "__name__", "")
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            _make_by_method(meter, owner, name, [*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)


def _make_by_method(meter: _Meter, owner: Any, name: str, arguments: list[Any]) -> None:
    """Account for what a method of a text or a number is about to make."""
    if name in ("format", "format_map"):
        _make_format(meter, owner)
        meter.make(sum(value for value in arguments if isinstance(value, int)))
    elif name == "replace" and len(arguments) > 1 and type(arguments[0]) is type(owner):
        meter.make(len(owner) + owner.count(arguments[0]) * len(arguments[1]))
    elif name == "join" and arguments:
        meter.make(_joined_length(arguments[0], owner))
    elif name == "expandtabs":
        meter.make(len(owner) * max((v for v in arguments if isinstance(v, int)), default=8))
    elif name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
        meter.make(max((value for value in arguments if isinstance(value, int)), default=0))
    elif name == "translate":
        raise SecurityError("it calls translate, which can make a text far longer")


def _make_format(meter: _Meter, template: str | bytes) -> None:
    """Account for the widths in a format, which need a few digits only to fill the memory."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    if re.search(r"%[^%a-zA-Z]*\*", text):
        raise SecurityError("it formats with a width that is not in the format")
    meter.make(len(text) + sum(int(digits[:12]) for digits in re.findall(r"[0-9]+", text)))


def _joined_length(items: Iterable[Any], separator: str | bytes) -> int:
    return sum(len(separator) + (len(i) if isinstance(i, str | bytes) else 20) for i in items)


# Filters, under Jinja's names and for the compiler's use


@jinja2.pass_context
def _ticking(context: Context, items: Any) -> Iterator[Any]:
    meter = _meter(context)
    meter.keep(items)
    for item in items:
        meter.tick()
        yield item


@jinja2.pass_context
def _kept(context: Context, value: Any) -> Any:
    _meter(context).keep(value)
    return value


@jinja2.pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    plain, old, new = str(text), str(old), str(new)
    _meter(context).make(len(plain) + plain.count(old) * len(new))
    return plain.replace(old, new, -1 if count is None else count)


@jinja2.pass_context
def _join(context: Context, items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        items = jinja2.filters.sync_do_map(context, items, attribute=attribute)
    texts = [str(item) for item in items]
    _meter(context).make(_joined_length(texts, str(d)))
    return str(d).join(texts)


@jinja2.pass_context
def _format(context: Context, text: Any, *args: Any, **kwargs: Any) -> str:
    _make_format(_meter(context), str(text))
    return str(jinja2.filters.do_format(str(text), *args, **kwargs))


@jinja2.pass_context
def _indent(
    context: Context, text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = str(text)
    spaces = len(width) if isinstance(width, str) else width
    _meter(context).make(len(text) + (text.count("\n") + 1) * spaces)
    return jinja2.filters.do_indent(text, width, first, blank)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escapes, letters as they are."""
    if isinstance(indent, int) and indent > 100:
        raise SecurityError(f"it indents JSON by {indent} spaces")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _strftime_now(format: str) -> str:  # the name that transformers gives the argument
    if re.search(r"\d{3}", format):
        raise SecurityError("it formats the time with a width")
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` itself would bring its attributes along."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore and without its contents as text."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets '{name}' on a namespace")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` around what the assistant says: rendered as is,
    between the marks that `render` was given."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _marked(self, context: Context, caller: Macro) -> str:
        before, after = context[_MARKS]
        return f"{before}{caller()}{after}"


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    for name in _LEFT_OUT:
        del environment.filters[name]
    filters: dict[str, Callable[..., Any]] = {
        " ticking": _ticking,
        " kept": _kept,
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "tojson": _to_json,
    }
    environment.filters.update(filters)
    del environment.globals["lipsum"]
    environment.globals.update(
        dict=_dict,
        namespace=_Namespace,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment
