"""The sandbox in which chat templates are rendered: with limits, and without access to Python.

A template often comes with a downloaded model, so it is treated as an untrusted program. It gets
only plain JSON data, can't change the data, and can't reach Python objects through them (Jinja's
sandbox). Its time, the size of its text and the size of its values are limited, because nested
loops, repeatedly doubled strings, lists that contain themselves and recursive macros could take any
time and memory. For the same reason, the input of each operator, filter, test and method whose time
grows with its input is limited (`chat_meter`, `chat_filters`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer.chat_filters import METER, meter_of, metered_filters, metered_tests
from firstlight.tokenizer.chat_meter import (
    MAX_CHARS,
    Meter,
    account_for_method,
    account_for_operator,
    one_line,
)

#: Most characters of a template.
MAX_TEMPLATE_CHARS = 1_000_000
#: Most Jinja tokens of a template, each of which takes about 50 microseconds to compile. The
#: longest templates of published models have 5,000.
MAX_TEMPLATE_TOKENS = 15_000


def check_template(template: str) -> None:
    """Refuse a template that doesn't compile.

    Raises:
        TokenizerError: the template is too long, or invalid Jinja; the message names the line.
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
    """The text of a conversation, the same as from transformers' `apply_chat_template`.

    Args:
        template: the template, in Jinja.
        messages: plain JSON data: objects with `role` and `content`.
        variables: further variables of the template, such as `bos_token`.
        add_generation_prompt: end with the beginning of the assistant's next turn.
        generation_marks: texts to write before and after the content of a `{% generation %}` block.

    Raises:
        TokenizerError: the template doesn't compile, fails, does something that is forbidden, or
            takes too long.
        InputError: the template itself refuses the conversation (`raise_exception`).
    """
    compiled = _compiled(template)
    values: dict[str, Any] = {
        "messages": messages,
        # Templates test `tools is not none`, which is true for an undefined variable.
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **variables,
        METER: Meter(),
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
        problem = one_line(error)
        raise TokenizerError(f"the chat template does what it may not: {problem}") from error
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
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
            f"the chat template doesn't compile: line {error.lineno}: {one_line(error.message)}"
        ) from error
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise TokenizerError(f"the chat template doesn't compile: {reason}") from error
    raise TokenizerError(
        f"the chat template has more than the {MAX_TEMPLATE_TOKENS:,} words and signs that are read"
    )


#: Name of the variable with the marks of `{% generation %}` blocks. The space keeps templates from
#: using it.
_MARKS = " marks"


class _RefusalError(TemplateError):
    """The template called `raise_exception`."""


def _concat(pieces: Iterable[str]) -> str:
    """The text of a macro or a `set` block, within the limit on characters."""
    pieces = list(pieces)
    if sum(map(len, pieces)) > MAX_CHARS:
        raise SecurityError(f"it makes a text of more than {MAX_CHARS:,} characters")
    return "".join(pieces)


class _Metering(NodeTransformer):
    """Changes a template's syntax tree: every expression that can loop, or whose result can be
    large or take long, is passed through one of the filters of `chat_filters` that count it."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                node.iter = _through(" ticking", node.iter)
            case nodes.Assign():
                node.node = _through(" kept", node.node)
            case nodes.AssignBlock():
                # They wrap the block's own filters, of which the innermost gets the block's text.
                for name in (" made", " kept"):
                    node.filter = nodes.Filter(
                        node.filter, name, [], [], None, None, lineno=node.lineno
                    )
            case nodes.With():
                node.values = [_through(" kept", value) for value in node.values]
            case nodes.Macro() | nodes.CallBlock():
                node.defaults = [_through(" kept", value) for value in node.defaults]
            case nodes.Compare():
                _meter_comparison(node)
            case nodes.Concat():
                return _through(" joined", nodes.List(node.nodes, lineno=node.lineno))
            case nodes.List() | nodes.Dict():
                return _through(" made", node)
            case nodes.Tuple() if node.ctx == "load":
                return _through(" made", node)
            case nodes.Getitem() if isinstance(node.arg, nodes.Slice):
                return _through(" made", node)
            case nodes.Getitem() if not isinstance(node.arg, nodes.Const):
                node.arg = _through(" compared", node.arg)
            case nodes.ScopedEvalContextModifier():
                raise TemplateSyntaxError("autoescape is not for chats", node.lineno)
        return node


def _through(name: str, value: nodes.Node) -> nodes.Filter:
    """The expression `value`, passed through the filter `name`."""
    assert isinstance(value, nodes.Expr)
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _meter_comparison(node: nodes.Compare) -> None:
    """Count both sides of a comparison whose time is not bounded by a constant side."""
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    looks = any(operand.op in ("in", "notin") for operand in node.ops)
    if not looks and any(isinstance(side, nodes.Const) for side in sides):
        return  # comparing takes no longer than the constant is
    node.expr = _compared(node.expr)
    for operand in node.ops:
        operand.expr = _compared(operand.expr)


def _compared(value: nodes.Expr) -> nodes.Expr:
    """A side of a comparison, passed through the filter that counts it unless it is constant."""
    items = [value.node] if isinstance(value, nodes.Filter) and value.name == " made" else []
    parts = getattr(items[0], "items", []) if items else [value]
    return value if all(isinstance(p, nodes.Const) for p in parts) else _through(" compared", value)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which operators and calls are counted by the rendering's `Meter`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(_concat)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = meter_of(context)
        account_for_operator(meter, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        meter.tick()
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.keep(args)
        meter.keep(kwargs)
        # Jinja's sandbox wraps str.format; the original method has the text as `__self__`.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | list | tuple | dict | set):
            name = getattr(method, "__name__", "")
            if name == "join" and args:
                # A list, because counting the items would use up an iterator.
                args = (list(meter.each(args[0])), *args[1:])
            account_for_method(meter, owner, name, [*args, *kwargs.values()])
        return meter.made(super().call(context, function, *args, **kwargs))


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    """Count the value of an expression `{{ ... }}` before it is converted to text."""
    if not isinstance(value, str | int | jinja2.Undefined):
        meter = meter_of(context)
        # `repr` may show a character as \U and eight digits, which are ten characters.
        meter.make(10 * meter.size(value, "it writes a value"))
    return value


def _raise_exception(message: Any) -> None:
    raise _RefusalError(one_line(message))


def _strftime_now(format: str) -> str:  # the name that transformers gives the argument
    if re.search(r"\d{3}", format) or len(format) > 1000:
        raise SecurityError("it formats the time with a width")
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The function `dict` of templates; the class itself would give them its attributes."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's `namespace`, without attributes that begin with an underscore. As text, it does not
    show its contents, whose size is not counted."""

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
    """`{% generation %}` blocks, which templates put around an answer: the content is rendered as
    usual, between the `generation_marks` of `render`."""

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
    filters, tests = metered_filters(environment.filters), metered_tests(environment.tests)
    environment.filters.clear()
    environment.filters.update(filters)
    environment.tests.update(tests)
    environment.finalize = _written
    del environment.globals["lipsum"]
    environment.globals.update(
        dict=_dict,
        namespace=_Namespace,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment
