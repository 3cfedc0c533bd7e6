"""Render conversations with chat templates, as the text that a model is trained on.

Templates are written in Jinja, in the dialect of Hugging Face's chat templates. They often come
with downloaded models, so they are treated as untrusted programs: a template gets only plain JSON
data and runs in Jinja's sandbox, where it can neither modify the data nor use it to reach Python
objects. All templates except the built-in ones are rendered in a child process with limited time
and memory (see `files.limits`), because nested loops, repeatedly doubled strings and recursive
macros could otherwise use unlimited time and memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firstlight.errors import InputError, TokenizerError
from firstlight.files.atomic import plain_lines, read_file
from firstlight.files.limits import LimitedProcess, LimitExceededError
from firstlight.tokenizer.parts import MAX_TEMPLATE_BYTES

#: Special tokens, other than bos and eos, that each built-in template writes. The templates are
#: stored in the files templates/NAME.jinja:
#:
#:     chatml    OpenAI's ChatML, without a bos before the first turn
#:     hermes    ChatML with tools, as in Hermes 2 Pro and Qwen 2.5; same as chatml without tools
#:     llama2    format of Llama 2 (meta-llama/llama `llama/generation.py`): the system message is
#:               inside the first user turn, [INST] and <<SYS>> are plain text, and turns end with
#:               eos_token
#:     llama3    format of Llama 3 (meta-llama/llama3 `llama/tokenizer.py`, ChatFormat)
#:     alpaca    format of Alpaca (tatsu-lab/stanford_alpaca `train.py`, PROMPT_DICT): plain text,
#:               with eos after each answer; a system message replaces the first two sentences
_REQUIRED_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
}
_FOLDER = Path(__file__).with_name("templates")
#: Built-in templates, keyed by name.
CHAT_TEMPLATES = {
    name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in _REQUIRED_TOKENS
}

#: Maximum number of characters in a template, and in a rendered conversation.
_MAX_TEMPLATE_CHARS, _MAX_CHARS = 1_000_000, 10_000_000
#: Limits of the child process: CPU time for rendering a conversation, in seconds, and memory in
#: bytes. A conversation of a million words takes 0.1 seconds.
_SECONDS, _MEMORY = 1.0, 200 << 20


def required_tokens(name: str) -> tuple[str, ...]:
    """Return the special tokens that the built-in template `name` writes, except bos and eos."""
    return _REQUIRED_TOKENS[name]


def find_template(name: str) -> tuple[str, tuple[str, ...]]:
    """Read a template, which is specified by the name of a built-in template or the path of a file.
    Return the template and the special tokens that it is known to write. For a file, the special
    tokens are unknown, so their tuple is empty.

    Raises:
        InputError: the name is neither a built-in template nor a file, or the file can't be read.
    """
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name], required_tokens(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(f"chat template {name} is neither {', '.join(CHAT_TEMPLATES)} nor a file")
    try:
        return plain_lines(read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")), ()
    except UnicodeDecodeError as error:
        raise InputError(f"chat template {name} is not UTF-8: {error}") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render a conversation as a string, like `apply_chat_template` in transformers.

    Args:
        template: the template, in Jinja.
        messages: objects whose `role` and `content` are strings. They can have additional entries
            of plain JSON, which the template may use.
        variables: additional variables for the template, such as `bos_token`.
        add_generation_prompt: True to end the text with the beginning of the assistant's next turn.

    Raises:
        InputError: the messages are not such objects, or the template rejects them.
        TokenizerError: the template doesn't compile, fails, or performs a forbidden operation.
    """
    plain = plain_messages(messages)
    return render(template, plain, variables, add_generation_prompt=add_generation_prompt)


def check_template(template: str) -> None:
    """Raise an error if a template doesn't compile.

    Raises:
        TokenizerError: the template is too long or is not valid Jinja. The message names the line.
    """
    _within_limits({"template": template}, 1)


def render(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, str],
    *,
    add_generation_prompt: bool = False,
    generation_marks: tuple[str, str] = ("", ""),
) -> str:
    """Render a conversation as a string, like `render_chat`.

    Args:
        template, variables, add_generation_prompt: see `render_chat`.
        messages: the messages, as returned by `plain_messages`.
        generation_marks: two strings to write before and after the content of each generation
            block. The first string is written twice. The number of the message is written between
            the two copies if it is known.

    Raises:
        InputError, TokenizerError: see `render_chat`.
    """
    options = {"add_generation_prompt": add_generation_prompt, _MARKS: generation_marks}
    return render_with_beginnings(template, messages, {**variables, **options}, [])[0]


def render_with_beginnings(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    beginnings: Sequence[tuple[int, bool]],
    probe: tuple[list[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> tuple[str, list[int | None], str | None]:
    """Render a conversation, and also determine the lengths of several beginnings of the
    conversation when rendered on their own.

    Args:
        template: the template, in Jinja.
        messages: the messages, as returned by `plain_messages`.
        variables: additional variables for the template.
        beginnings: the beginnings of the conversation. Each of them is a pair of the number of
            messages and a flag, which is True to add the beginning of the assistant's next turn.
        probe: different messages and variables to render in the same call.

    Returns:
        (text, lengths, text of `probe`). The lengths are the numbers of characters of the rendered
        beginnings. A length is None if the template rejects the beginning, or if the full text does
        not start with it. The text of `probe` is None if the template rejects it.

    Raises:
        InputError, TokenizerError: see `render_chat`.
    """
    request = {
        "template": template,
        "messages": messages,
        "variables": dict(variables),
        "beginnings": beginnings,
        "probe": probe,
    }
    text, lengths, probed = _within_limits(request, 1 + (probe is not None) + len(beginnings))
    return text, lengths, probed


class _Child(threading.local):
    """Child process for rendering templates that are not built in. It is started on first use. Each
    thread has its own process, so that a slow template does not block other threads.
    """

    def __init__(self) -> None:
        self.process = LimitedProcess("firstlight.tokenizer.chat_template:renderer", memory=_MEMORY)


_CHILD = _Child()


def _within_limits(request: dict[str, Any], renderings: int) -> Any:
    """Return the result of `_rendered` for a request. Built-in templates are rendered in this
    process, and all other templates in the child process.

    Args:
        request: see `_rendered`.
        renderings: number of times that the template is rendered, each of which can take up to
            `_SECONDS`.
    """
    template = request["template"]
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise TokenizerError(
            f"the chat template has {len(template):,} characters, more than the limit of "
            f"{_MAX_TEMPLATE_CHARS:,}"
        )
    if template in CHAT_TEMPLATES.values():
        return _rendered(request)
    try:
        return _CHILD.process.call(request, seconds=_SECONDS * renderings)
    except LimitExceededError as error:
        raise TokenizerError(
            f"the chat template takes {error}: use another one (--chat-template, or chat_template "
            "in tokenizer_config.json)"
        ) from error


def chat_pieces(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    special_tokens: Sequence[str],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[str, bool]]:
    """Render a conversation in parts. Yield (text, True if the text is a special token).

    Only the template itself can write special tokens; the same characters in a message are plain
    text. While the template runs, any name of a special token in a message is surrounded by marks.
    The template can therefore find such a name with `in` or `split`, but not with `startswith` or
    `endswith`.

    Args:
        template, messages, variables, add_generation_prompt: see `render_chat`.
        special_tokens: special tokens of the tokenizer.
        continue_final_message, options: see `Tokenizer.encode_chat`.

    Raises:
        InputError, TokenizerError: see `render_chat`.
    """
    plain = [*plain_messages(messages), dict(options)]
    (*marked, own), pattern = protected(plain, special_tokens, template)
    if continue_final_message:
        marked[-1] = _with_end_tag(marked[-1])
    text = render(
        template, marked, {**own, **variables}, add_generation_prompt=add_generation_prompt
    )
    if continue_final_message:
        text = _until_end_tag(text)
    for piece, _, is_special in flagged_pieces(text, bytearray(len(text)), pattern):
        yield piece, is_special


#: Message about a conversation whose last message can't be continued.
_NOT_CONTINUED = (
    "continue_final_message needs a last message with a text that the chat template writes "
    "unchanged: remove continue_final_message, or end with such a message"
)
#: Tag that is added at the end of the message that the model will continue. The rendered text is
#: truncated at this tag. As in transformers, the tag ends with a space, to detect whether the
#: template strips the content.
_END_TAG = "\uf8ffend of the message\uf8ff "


def _with_end_tag(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message with `_END_TAG` at the end of its content.

    Raises:
        InputError: the message has no text.
    """
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise InputError(_NOT_CONTINUED)
    return {**message, "content": content + _END_TAG}


def _until_end_tag(text: str) -> str:
    """Return the text of a conversation up to `_END_TAG`.

    Raises:
        InputError: the template did not write the tag exactly once.
    """
    before, tag, after = text.partition(_END_TAG.strip())
    if not tag or tag in after:
        raise InputError(_NOT_CONTINUED)
    return before if after.startswith(" ") else before.rstrip()


def flagged_pieces(
    text: str, flags: bytearray, pattern: re.Pattern[str]
) -> Iterator[tuple[str, bytearray, bool]]:
    """Split rendered text into special tokens and the parts between them.

    Args:
        text: text rendered from marked messages (see `protected`).
        flags: one byte per character of `text`. The bytes can have any meaning and are only passed
            on.
        pattern: the pattern returned by `protected`.

    Yields:
        (text of the part without marks, flags of its characters, True if it is a special token)
    """
    position = 0
    pending = ""
    own = bytearray()
    for match in pattern.finditer(text):
        pending += text[position : match.start()] + (match["text"] or "")
        own += flags[position : match.start()]
        if match["text"]:
            own += flags[match.start("text") : match.end("text")]
        position = match.end()
        if match["special"]:
            if pending:
                yield pending, own, False
            yield match["special"], flags[match.start() : match.end()], True
            pending, own = "", bytearray()
    pending += text[position:]
    if pending:
        yield pending, own + flags[position:], False


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Return a copy of `messages` as plain JSON data, without entries that are None. The content
    may be None only if the message calls tools.

    Raises:
        InputError: the messages are not a list of objects whose `role` and `content` are strings,
            or are not JSON.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(
            "messages must be a non-empty list of objects with role and content, not "
            f"{_described(messages)}"
        )
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{number}] must be an object with role and content")
        for name in ("role", "content"):
            is_call = name == "content" and message.get(name) is None and message.get("tool_calls")
            if not isinstance(message.get(name), str) and not is_call:
                raise InputError(f"messages[{number}].{name} must be a string")
        try:
            # Give the template a copy made from JSON, because other objects could have dangerous
            # methods.
            own = {k: v for k, v in message.items() if v is not None or k == "content"}
            copy = json.loads(json.dumps(own))
            json.dumps(copy, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"messages[{number}] is not valid Unicode") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages[{number}] is not JSON: {error}") from error
        plain.append(copy)
    return plain


def _described(messages: object) -> str:
    if isinstance(messages, list | tuple):
        return "an empty list"
    return f"a {type(messages).__name__}"


def free_characters(messages: Sequence[Mapping[str, Any]], template: str) -> Iterator[str]:
    """Yield all characters of Unicode's private use area that occur neither in the messages nor in
    the template, in ascending order.
    """
    used = set(template).union(json.dumps(messages, ensure_ascii=False))
    return (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)


def protected(
    messages: list[dict[str, Any]], tokens: Sequence[str], template: str
) -> tuple[list[dict[str, Any]], re.Pattern[str]]:
    """Mark the names of special tokens that occur in messages as plain text. A mark, which is a
    single character, is inserted before and after each name.

    Args:
        messages: the messages, as returned by `plain_messages`.
        tokens: the special tokens.
        template: the chat template.

    Returns:
        (marked messages, pattern). The pattern is applied to the text that the template renders
        from the marked messages. It matches special tokens written by the template (group
        "special"), marked names (group "text"), and single marks that the template has separated
        from their names (neither group).
    """
    free = free_characters(messages, template)
    before, after = next(free), next(free)
    # Longer tokens come first, because a regular expression uses the first alternative that
    # matches. If there are no tokens, the pattern is "(?!)", which never matches.
    names = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
    special = re.compile(names)

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return special.sub(lambda match: f"{before}{match[0]}{after}", value)
        if isinstance(value, list):
            return [mark(item) for item in value]
        if isinstance(value, dict):
            return {mark(key): mark(item) for key, item in value.items()}
        return value

    pattern = rf"{before}(?P<text>{names}){after}|(?P<special>{names})|[{before}{after}]"
    return [mark(message) for message in messages], re.compile(pattern)


# The following functions run in this process for built-in templates, and in the child process for
# all others


def renderer() -> Callable[[dict[str, Any]], Any]:
    """Create the function that runs in the child process."""
    _environment()
    return _rendered


def _rendered(request: dict[str, Any]) -> Any:
    """Return the result of `render_with_beginnings` for the arguments in `request`. If the request
    contains only a template, compile it without rendering it and return None.
    """
    template = _compiled(request["template"])
    if "messages" not in request:
        return None
    messages, variables = request["messages"], request["variables"]
    text = _text(template, messages, variables)
    lengths: list[int | None] = []
    for count, add_generation_prompt in request["beginnings"]:
        options = {**variables, "add_generation_prompt": add_generation_prompt}
        is_whole = count == len(messages) and not add_generation_prompt
        try:
            part = text if is_whole else _text(template, messages[:count], options)
        except (InputError, TokenizerError):  # The template may reject an incomplete conversation.
            lengths.append(None)
        else:
            lengths.append(len(part) if text.startswith(part) else None)
    probed = None
    if request["probe"] is not None:
        changed, changed_variables = request["probe"]
        with contextlib.suppress(InputError, TokenizerError):
            probed = _text(template, changed, changed_variables)
    return text, lengths, probed


def _text(
    template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    # Define these variables even if they are not used, because templates test `tools is not none`,
    # which is true for an undefined variable.
    values = {"tools": None, "documents": None, _MARKS: ("", ""), **variables}
    values |= {"messages": messages, _MESSAGES: messages}
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(values):
            length += len(piece)
            if length > _MAX_CHARS:
                raise SecurityError(f"it writes more than {_MAX_CHARS:,} characters")
            pieces.append(piece)
    except _RefusalError as error:
        raise InputError(f"the chat template refuses these messages: {error}") from error
    except SecurityError as error:
        problem = _one_line(error)
        raise TokenizerError(
            f"the chat template performs a forbidden operation: {problem}"
        ) from error
    except MemoryError:
        raise  # The child process handles this error.
    except Exception as error:
        reason = _one_line(f"{type(error).__name__}: {error}")
        raise TokenizerError(f"the chat template fails on these messages: {reason}") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template doesn't compile: line {error.lineno}: {_one_line(error.message)}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        reason = _one_line(f"{type(error).__name__}: {error}")
        raise TokenizerError(f"the chat template doesn't compile: {reason}") from error


def _one_line(text: Any) -> str:
    """Shorten text from a template for use in a message. The result has at most 300 characters on
    one line, and no control characters, which a terminal could interpret as commands.
    """
    words = "".join(c if c.isprintable() else " " for c in str(text)[:1000]).split()
    return " ".join(words)[:300]


#: Names of the variables that contain the marks for `{% generation %}` blocks and all messages. The
#: names contain a space, so that templates can't access them.
_MARKS, _MESSAGES = " marks", " messages"


class _RefusalError(TemplateError):
    """Raised when the template calls `raise_exception`."""


def _raise_exception(message: Any) -> None:
    raise _RefusalError(_one_line(message))


def _strftime_now(format: str) -> str:  # This argument name is used by transformers.
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise a value as JSON. This replaces Jinja's `tojson` filter: as in transformers, HTML is
    not escaped and, by default, neither are non-ASCII characters.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """Jinja extension for `{% generation %}` blocks, with which templates surround answers. The
    content is rendered as usual, between the `generation_marks` of `render`.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The derived context includes loop variables, such as the message.
        call = self.call_method("_marked", [nodes.DerivedContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _marked(self, context: Context, caller: Macro) -> str:
        before, after = context[_MARKS]
        if not before:
            return str(caller())
        values = [id(value) for value in context.get_all().values()]
        messages = enumerate(context[_MESSAGES])
        answers = (n for n, one in messages if one["role"] == "assistant" and id(one) in values)
        number = next(answers, "")
        return f"{before}{number}{before}{caller()}{after}"


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
