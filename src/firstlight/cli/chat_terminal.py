"""Conversations of `firstlight chat`, in a terminal or with piped input."""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from firstlight.cli.options import SAMPLING, config_fields
from firstlight.cli.output import show_rows, write_out
from firstlight.console import counted, say
from firstlight.errors import ConfigError, FirstlightError, InputError, nearest
from firstlight.generation.config import SamplingConfig

if TYPE_CHECKING:
    from firstlight.generation.chat import ChatSession

_PROMPT, _MORE = "> ", "... "
_QUOTES = '"""'

#: Fields of SamplingConfig, keyed by the chat commands that change them.
_SETTINGS = {
    **{name.replace("_", "-"): name for name in SAMPLING},
    "max-tokens": "max_new_tokens",
    "seed": "seed",
}
_FIELDS = config_fields(SamplingConfig)

_INPUT_HELP = """\
A line that ends in \\ continues on the next line.
To type a message with several lines, put \"\"\" before and after it.
To begin a message with /, type // instead: //etc.
Ctrl-C stops an answer. At the prompt, Ctrl-C and Ctrl-D leave the chat."""


# Input


class _EndOfInput(Exception):  # noqa: N818
    """Raised at the end of stdin."""


class _Input:
    """Reader for messages from stdin. If readline is installed, users can edit messages while they
    type.

    Args:
        interactive: True if stdin is a terminal.
    """

    def __init__(self, interactive: bool) -> None:
        self._interactive = interactive
        self._edited = interactive and sys.stdout.isatty()
        if self._edited:
            with contextlib.suppress(ImportError):
                import readline

                # Pasted lines are read as one message.
                readline.parse_and_bind("set enable-bracketed-paste on")

    def message(self) -> str:
        """Return the next message, which can have several lines.

        Raises:
            _EndOfInput: there are no more messages.
            KeyboardInterrupt: Ctrl-C was pressed at the prompt or, with piped input, at any time.
        """
        line = self._line(_PROMPT)
        try:
            if line.startswith(_QUOTES):
                return self._quoted(line[len(_QUOTES) :])
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{self._line(_MORE)}"
        except _EndOfInput:
            line = line.removesuffix("\\")
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            write_out("\n")
            return self.message()
        return line

    def _quoted(self, text: str) -> str:
        """Read the rest of a message that begins with three quotation marks. The message ends at
        the next three quotation marks or at the end of the input.
        """
        with contextlib.suppress(_EndOfInput):
            while not text.endswith(_QUOTES):
                text += "\n" + self._line(_MORE)
        return text.removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._edited:
            try:
                return input(prompt)
            except EOFError:
                raise _EndOfInput from None
            except UnicodeDecodeError:
                say("firstlight: error: the message is not UTF-8: type it again")
                return self._line(prompt)
        if self._interactive:
            # Write the prompt to stderr, because stdout may be redirected to a file or another
            # program.
            print(prompt, end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.buffer.readline()
        if not line:
            raise _EndOfInput
        return line.decode("utf-8", errors="replace").rstrip("\r\n")


# The conversation


@dataclass(frozen=True)
class _Command:
    """A command of the form /NAME that users can type in the chat.

    Attributes:
        argument: placeholder for the argument in the list of commands. "" if the command takes no
            argument.
        help: description of the command in the list of commands.
        run: function that executes the command. It is called with the text after the command name.
    """

    argument: str
    help: str
    run: Callable[[str], None]


class Terminal:
    """A conversation in the terminal. Messages are read from stdin, and answers are written to
    stdout. All other output is written to stderr.

    Args:
        session: chat session with the model.
        interactive: True if a user types the messages, False if they are piped in.
    """

    def __init__(self, session: ChatSession, *, interactive: bool) -> None:
        self._session, self._interactive = session, interactive
        self._input = _Input(interactive)
        self._dropped = 0
        self._leaving = False
        settings = {
            name: _Command(
                "[X]",
                re.split(r" \(|\. ", _FIELDS[field].text)[0],
                functools.partial(self._set, name),
            )
            for name, field in _SETTINGS.items()
        }
        self._commands = {
            "help": _Command("", "this list", lambda _: self._help()),
            "reset": _Command("", "start a new conversation", lambda _: self._reset()),
            "retry": _Command("", "answer the last message again", lambda _: self._retry()),
            "undo": _Command("", "remove the last message and its answer", lambda _: self._undo()),
            "system": _Command(
                "[TEXT]", "show or set the system message; none removes it", self._system
            ),
            **settings,
            "settings": _Command("", "show all settings", lambda _: self._show_settings()),
            "stats": _Command(
                "", "show tokens, speed and used context", lambda _: self._show_stats()
            ),
            "save": _Command(
                "FILE", "write the messages as JSON, in the format of OpenAI's API", self._save
            ),
            "quit": _Command("", "leave the chat", lambda _: self._quit()),
        }

    def run(self) -> None:
        """Read and answer messages until the end of the input or until the user leaves."""
        while not self._leaving:
            try:
                message = self._input.message()
            except _EndOfInput:
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                break
            # After an error, the conversation continues.
            try:
                self._take(message)
            except FirstlightError as error:
                say(f"firstlight: error: {error}")
            except KeyboardInterrupt:  # Ctrl-C was pressed before or after an answer.
                if not self._interactive:
                    raise
        else:
            return
        if self._interactive:
            say("")  # Print a line break so that the shell's prompt starts on a new line.

    def _take(self, message: str) -> None:
        if message.startswith("/") and not message.startswith("//"):
            name, _, text = message[1:].partition(" ")
            if name not in self._commands:
                hint = nearest(name, self._commands) or ": /help lists the commands"
                raise ConfigError(f"unknown command /{name}{hint}")
            self._commands[name].run(text.strip())
        elif message.strip() or not self._session.has_template:
            text = message[1:] if message.startswith("//") else message
            self._show(lambda: self._session.answer(text))

    # Answers

    def _show(self, answer: Callable[[], Iterator[str]]) -> None:
        from firstlight.generation.chat import ReasoningText

        pieces, is_thinking = answer(), False
        try:
            with self._stopping_at_interrupt():
                for piece in pieces:
                    if isinstance(piece, ReasoningText) != is_thinking:
                        is_thinking = not is_thinking
                        say("(thinking)" if is_thinking else "\n")
                    if is_thinking:
                        say(piece, end="")
                    else:
                        write_out(piece)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        finally:
            if is_thinking:
                say("")
            write_out("\n")
        self._note()

    @contextlib.contextmanager
    def _stopping_at_interrupt(self) -> Iterator[None]:
        """Context manager for generating an answer. The first Ctrl-C stops generation after the
        current token, and the second Ctrl-C stops it immediately.
        """
        if not self._interactive:
            yield
            return
        pressed = 0

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            pressed += 1
            if pressed > 1:
                raise KeyboardInterrupt
            self._session.stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self) -> None:
        """Print the reason if the answer ended early, and the number of turns if any were dropped
        from the conversation.
        """
        stats = self._session.stats
        assert stats is not None
        full = stats.prompt_tokens + stats.new_tokens >= self._session.context
        if stats.finish_reason == "interrupted":
            say("(stopped)")
        elif stats.finish_reason == "length" and full:
            say(f"(answer cut off: the model's context of {self._session.context} tokens is full)")
        elif stats.finish_reason == "length" and self._session.has_template:
            say(f"(answer cut off after {counted(stats.new_tokens, 'token')}: raise /max-tokens)")
        if stats.dropped > self._dropped:
            noun = "turn" if self._session.has_template else "token"
            say(f"(the first {counted(stats.dropped, noun)} no longer fit into the context)")
        self._dropped = stats.dropped

    # Commands

    def _help(self) -> None:
        show_rows(((f"/{name} {c.argument}", c.help) for name, c in self._commands.items()), say)
        say(_INPUT_HELP)
        if not self._session.has_template:
            say(
                "This model continues your text exactly as typed: "
                "begin with a space for a new word."
            )
            say("Press Enter to let the model continue its own text.")

    def _reset(self) -> None:
        self._session.reset()
        self._dropped = 0

    def _retry(self) -> None:
        self._show(self._session.retry)

    def _undo(self) -> None:
        text = self._session.undo()
        if text is None:
            raise ConfigError("there is no message to undo yet")
        start = text if len(text) <= 60 else f"{text[:57]}..."
        say(f"(removed: {start})")

    def _system(self, text: str) -> None:
        if text:
            self._session.set_system(None if text == "none" else text)
        say(f"system  {self._session.system or 'none'}")

    def _set(self, name: str, text: str) -> None:
        if text:
            self._session.settings = _changed(self._session.settings, name, text)
        say(f"{name}  {_value(self._session.settings, _SETTINGS[name])}")

    def _show_settings(self) -> None:
        settings = self._session.settings
        rows = [(name, _value(settings, field)) for name, field in _SETTINGS.items()]
        show_rows([*rows, ("system", self._session.system or "none")], say)

    def _show_stats(self) -> None:
        session, stats = self._session, self._session.stats
        count = sum(message["role"] == "user" for message in session.messages)
        rows: list[tuple[str, object]] = [("messages", f"{count:,}")]
        if stats is not None:
            used = stats.prompt_tokens + stats.new_tokens
            share = 100 * used / session.context
            first = f"first token after {stats.first_token_seconds:.2f} s"
            rows += [
                ("last prompt", counted(stats.prompt_tokens, "token")),
                ("last answer", f"{counted(stats.new_tokens, 'token')} ({stats.finish_reason})"),
                ("speed", f"{stats.tokens_per_second:.1f} tokens/s, {first}"),
                ("context", f"{used:,} of {session.context:,} tokens used ({share:.0f}%)"),
                ("left out", counted(stats.dropped, "turn" if session.has_template else "token")),
                ("seed", stats.seed),
            ]
        show_rows(rows, say)

    def _save(self, text: str) -> None:
        from firstlight.files.atomic import write_json

        if not text:
            raise ConfigError("/save needs a file name, such as /save chat.json")
        path = Path(text).expanduser()
        if not path.parent.is_dir():
            raise InputError(f"folder {path.parent} does not exist: create it, or choose another")
        write_json(path, self._session.messages)
        say(f"{counted(len(self._session.messages), 'message')} written to {path}")

    def _quit(self) -> None:
        self._leaving = True


def _changed(settings: SamplingConfig, name: str, text: str) -> SamplingConfig:
    """Return a copy of the settings with one value changed by a chat command.

    Args:
        settings: current settings.
        name: name of the chat command, a key of `_SETTINGS`.
        text: the value as typed by the user.

    Raises:
        ConfigError: the value is not a number, or is out of range.
    """
    if name == "seed" and text == "none":
        return replace(settings, seed=None)
    field = _SETTINGS[name]
    kind = _FIELDS[field].kind
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"/{name} needs {what}, not '{text}'") from None
    changes: dict[str, Any] = {field: value}
    return replace(settings, **changes)


def _value(settings: SamplingConfig, field: str) -> str:
    value = getattr(settings, field)
    return "none" if value is None else str(value)
