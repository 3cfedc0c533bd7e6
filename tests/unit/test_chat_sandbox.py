"""The sandbox of chat templates: no way out, no endless work, one clear error for each."""

from __future__ import annotations

import threading

import pytest

from firstlight.errors import TokenizerError
from firstlight.tokenizer import chat_meter
from firstlight.tokenizer.chat_sandbox import render
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES

HI = [{"role": "user", "content": "hi"}]


def rendered(template: str, messages: list[dict[str, str]] = HI) -> str:
    return render(template, messages, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages[0]['__class__']['__mro__'] }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ raise_exception.__code__.co_consts }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context.parent }}",
        "{{ dict.__globals__.x }}",
        "{{ strftime_now.__globals__.json }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.pop() }}",
        "{{ messages[0].clear() }}",
    ],
)
def test_the_ways_out_of_the_sandbox_are_shut(template: str) -> None:
    messages = [dict(message) for message in HI]
    with pytest.raises(
        TokenizerError, match=r"does what it may not: (access to attribute|it sets)"
    ):
        rendered(template, messages)
    assert messages == HI


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "it makes more than"),
        ("{{ 10**10 * [1] }}", "it makes more than"),
        ("{{ 'a'.ljust(10**10) }}", "it makes more than"),
        ("{{ '1'.zfill(10**10) }}", "it makes more than"),
        ("{{ '\t\t\t'.expandtabs(10**8) }}", "it makes more than"),
        ("{{ (7).to_bytes(10**10) }}", "it makes more than"),
        ("{{ '%9999999999d' % 1 }}", "it makes more than"),
        ("{{ '%*d' % (10**10, 1) }}", "width that is not in the format"),
        ("{{ '%9999999999d' | format(1) }}", "it makes more than"),
        ("{{ '{:9999999999}'.format(1) }}", "it makes more than"),
        ("{{ '{:{w}}'.format(1, w=10**10) }}", "it makes more than"),
        ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "it makes more than"),
        ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", "it makes more than"),
        ("{{ ('a' * 10**6).join('a' * 10**6) }}", "it makes more than"),
        ("{{ 'aaaaaaaaa' | list | join('b' * 99999999) }}", "it makes more than"),
        ("{{ 'a' | indent(10**10) }}", "it makes more than"),
        ("{{ 'ab'.translate({97: 'x'}) }}", "it calls translate"),
        ("{{ messages | tojson(indent=10**9) }}", "it indents JSON"),
        ("{{ strftime_now('%999999999d') }}", "it formats the time with a width"),
        ("{{ 9 ** (9 ** 9) }}", "it makes a number of more than"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "it writes more than"),
        (
            "{% set x %}{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endset %}",
            "it makes a text of more than",
        ),
        (
            "{% set n = namespace(x='abc') %}"
            "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "it makes more than",
        ),
        (
            "{% set n = namespace(x=[1, 2]) %}"
            "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            # On a slow machine, looking at all of it takes too long before it is too much.
            r"it keeps a value of more than|it takes more than",
        ),
        (
            "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}"
            "{{ f('abc', 99) }}",
            "it makes more than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ lipsum(n=10**9) }}", "'lipsum' is undefined"),
    ],
)
def test_templates_that_eat_memory_are_stopped(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        rendered(template)


def doubling(step: str) -> str:
    """Nested scopes, each holding a value twice as long as the one around it."""
    return "".join(step.format(new=f"v{i + 1}", old=f"v{i}") for i in range(18))


@pytest.mark.parametrize(
    "template",
    [
        doubling("{{% set {new} = {old} ~ {old} %}}"),
        doubling("{{% with {new} = {old} ~ {old} %}}") + "{% endwith %}" * 18,
        doubling("{{% for {new} in [{old} ~ {old}] %}}") + "{% endfor %}" * 18,
        doubling("{{% set {new} = {{'a': {old}, 'b': {old}}} %}}"),
        "{% macro f(x" + doubling(", {new}={old} ~ {old}") + ") %}{{ v18 }}{% endmacro %}{{ f() }}",
    ],
)
def test_no_scope_can_double_a_value_for_ever(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_meter, "MAX_CHARS", 100_000)
    with pytest.raises(
        TokenizerError, match=r"it (keeps a value of|makes) more than 100,000 characters"
    ):
        rendered("{% set v0 = 'abc' %}" + template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_templates_that_go_on_for_ever_are_stopped(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_meter, "MAX_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match=r"it takes more than 0\.05 seconds"):
        rendered(template)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for %}", "doesn't compile: line 1: Expected an expression"),
        ("\n\n{{ x", "doesn't compile: line 3"),
        ("{{ x | nothing }}", "doesn't compile: line 1: No filter named 'nothing'"),
        ("{{ 'a' | center(9) }}", "doesn't compile: line 1: No filter named 'center'"),
        ("{{" + "(" * 7000 + ")" * 7000 + "}}", "doesn't compile: RecursionError"),
        ("x" * 1_000_001, "has 1,000,001 characters, more than the 1,000,000"),
        ("{{ a.b.c }}", "fails on these messages: UndefinedError: 'a' is undefined"),
        ("{{ 1 + 'a' }}", "fails on these messages: TypeError"),
        ("{{ 1 / 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{% include 'x' %}", "fails on these messages: TypeError: no loader"),
    ],
)
def test_a_template_that_is_wrong_is_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        rendered(template)


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 400 + str(i)} for i in range(2000)]
    text = rendered(CHAT_TEMPLATES["chatml"], messages)
    assert text.count("<|im_end|>") == 2000


def test_renderings_in_several_threads_have_a_meter_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_meter, "MAX_BYTES_MADE", 3000)
    template = "{% for i in range(9) %}{{ 'ab' * 50 }}{% endfor %}"
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(rendered(template))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["ab" * 450] * 8
