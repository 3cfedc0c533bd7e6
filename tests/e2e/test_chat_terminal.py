"""`firstlight chat` as people type into it, and as scripts pipe into it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from talking_models import write_talking_model

from firstlight.cli.main import main
from waiting import PATIENCE_SECONDS, wait_until

#: One letter each of what a terminal obeys: colour, bell, return, a C1 control, a turned text.
WILD = "red \x1b[31m\x07\r\x9b2J\u202e ok\tend"
TAMED = "red ⟨U+001B⟩[31m⟨U+0007⟩⟨U+000D⟩⟨U+009B⟩2J⟨U+202E⟩ ok\tend"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "wild": write_talking_model(folder / "wild", WILD, context=128),
        "endless": write_talking_model(folder / "endless", "On and", endless=True, context=1 << 18),
        "base": write_talking_model(folder / "base", " fell down", template=None, context=64),
    }


# Piped


Answer = tuple[int, str, str]
Piped = Callable[..., Answer]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Piped:
    """Runs the command in this process: lines in; exit code, stdout, stderr out."""

    def run(text: str | bytes, *arguments: str | Path) -> Answer:
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        capfdbinary.readouterr()
        exit_code = main(["chat", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return exit_code, out.decode(), err.decode()

    return run


def test_chat_piped_messages_print_only_answers(models: dict[str, Path], piped: Piped) -> None:
    answer = f"{WILD}\n"
    assert piped("hello\nand\r\n\nagain", models["wild"], "--system", "Be kind.") == (
        0,
        answer * 3,
        "",
    )
    assert piped("", models["wild"]) == (0, "", "")
    assert piped(b"\xff\n", models["wild"]) == (0, answer, "")


def test_chat_model_without_template_continues_text(
    models: dict[str, Path], piped: Piped, tmp_path: Path
) -> None:
    lines = ["the stone", " and it", "", f"/save {tmp_path}/chat.json"]
    exit_code, out, err = piped("\n".join(lines), models["base"])
    assert (exit_code, out) == (0, " fell down\n" * 2 + "\n")  # after its last word, it has ended
    assert err == f"6 messages written to {tmp_path}/chat.json\n"
    messages = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [message["content"] for message in messages] == [
        "the stone", " fell down", " and it", " fell down", "", "",
    ]  # fmt: skip
    exit_code, out, err = piped("/system Be kind.\nx", models["base"])
    assert (exit_code, out) == (0, " fell down\n")
    assert "no chat template and therefore no system message" in err
    exit_code, out, err = piped("x", models["base"], "--system", "Be kind.")
    assert (exit_code, out) == (2, "")


def test_chat_long_conversation_drops_oldest_turns(models: dict[str, Path], piped: Piped) -> None:
    text = "question\n" * 12 + "/stats\n" + "too long " * 50 + "\nquestion\n/system\n"
    exit_code, out, err = piped(text, models["wild"], "--system", "Be kind.")
    assert (exit_code, out) == (0, f"{WILD}\n" * 13)
    assert "oldest" not in out
    assert re.search(r"\(the first 1 turn no longer fits? into the context\)", err)
    [left_out] = re.findall(r"left out +(\d+) turns", err)
    assert 0 < int(left_out) < 12
    assert re.search(r"error: the message with the system message has .*: shorten the message", err)
    assert err.rstrip().endswith("system  Be kind.")


def test_chat_answer_filling_context_reports_truncation(piped: Piped, tmp_path: Path) -> None:
    model = write_talking_model(tmp_path / "small", "On and", endless=True, context=64)
    exit_code, _, err = piped("hello\n", model)
    assert exit_code == 0
    assert err == "(answer cut off: the model's context of 64 tokens is full)\n"


def test_chat_commands_print_settings_and_help(
    models: dict[str, Path], piped: Piped, tmp_path: Path
) -> None:
    def said(*lines: str) -> tuple[str, list[str]]:
        exit_code, out, err = piped("\n".join(lines), models["wild"], "--seed", "3")
        assert exit_code == 0
        return out, err.splitlines()

    answer = f"{WILD}\n"
    _, lines = said("/help")
    commands = [line.split()[0] for line in lines if line.startswith("/")]
    assert (
        commands
        == (
            "/help /reset /retry /undo /system /temperature /top-k /top-p /min-p "
            "/repetition-penalty /frequency-penalty /presence-penalty /max-tokens "
            "/seed /settings /stats /save /quit"
        ).split()
    )
    assert said("/temprature 1")[1] == [
        "firstlight: error: unknown command /temprature (did you mean 'temperature'?)"
    ]
    assert said("/qqq")[1] == ["firstlight: error: unknown command /qqq: /help lists the commands"]
    assert said("/temperature 0.5", "/temperature", "/temperature -1", "/top-k 1.5")[1] == [
        "temperature  0.5",
        "temperature  0.5",
        "firstlight: error: temperature must be 0 or above, not -1.0",
        "firstlight: error: /top-k needs a whole number, not '1.5'",
    ]
    assert said("/seed", "/seed none", "/seed 7")[1] == ["seed  3", "seed  none", "seed  7"]
    out, lines = said("/max-tokens 2", "hello", "/stats")
    assert out == "red \n" or out.startswith("red")
    assert lines[:2] == ["max-tokens  2", "(answer cut off after 2 tokens: raise /max-tokens)"]
    assert "last answer  2 tokens (length)" in lines
    assert "seed         3" in lines
    out, lines = said("//hello", "/undo", "/undo", "/retry", "a", "/retry", "/quit", "b")
    assert out == answer * 3
    assert lines == [
        "(removed: /hello)",
        "firstlight: error: there is no message to undo yet",
        "firstlight: error: there is no message to answer again yet",
    ]
    out, lines = said("a", "/system Be kind.", "/save", f"/save {tmp_path}", f"/save {tmp_path}/x")
    assert lines[0] == "system  Be kind."
    assert lines[1].startswith("firstlight: error: /save needs a file name")
    assert lines[2].startswith(f"firstlight: error: {tmp_path} is not a regular file")
    assert json.loads((tmp_path / "x").read_text(encoding="utf-8")) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": WILD},
    ]
    _, lines = said("/system a", "/reset", "/system none", "/settings")
    assert lines[-11:] == [
        "system  none",
        "temperature         0.8",
        "top-k               0",
        "top-p               1.0",
        "min-p               0.0",
        "repetition-penalty  1.0",
        "frequency-penalty   0.0",
        "presence-penalty    0.0",
        "max-tokens          512",
        "seed                3",
        "system              none",
    ]


def test_chat_accepts_multi_line_messages(
    models: dict[str, Path], piped: Piped, tmp_path: Path
) -> None:
    text = 'one\\\ntwo\\\n three\n"""a\n\n/b\nc"""\n"""d"""\n"""\ne\n"""\n'
    for ending in ("f\\", '"""g\nh'):  # the input ends inside a message
        place = tmp_path / "chat.json"
        lines = f"{text}/save {place}\n{ending}"
        assert piped(lines, models["wild"])[:2] == (0, f"{WILD}\n" * 5)
        messages = json.loads(place.read_text(encoding="utf-8"))
        assert [m["content"] for m in messages if m["role"] == "user"] == [
            "one\ntwo\n three", "a\n\n/b\nc", "d", "e",
        ]  # fmt: skip


def test_chat_invalid_options_fail_before_loading(
    piped: Piped,
) -> None:
    for arguments, message in (
        (("--port", "80"), "--host and --port are for the web page: add --web"),
        (("--web", "--host", "0.0.0.0"), "the page has no password protection"),
        (("--temperature", "-1"), "temperature must be 0 or above"),
    ):
        exit_code, out, err = piped("", "no/such/model", *arguments)
        assert (exit_code, out) == (2, "")
        assert message in err


# Typed


class Screen:
    """The command in a pseudo-terminal."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        # At Ctrl-C a terminal throws away the output that nobody has read yet; a busy test would
        # then miss the end of an answer.
        settings = termios.tcgetattr(slave)
        settings[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
        # The first terminal that a new session opens controls it.
        attach = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave)]
        self.process = subprocess.Popen(
            [*attach, sys.executable, "-m", "firstlight", "chat", *map(str, arguments)],
            env=environment,
            start_new_session=True,
        )
        self._slave = slave  # open, so that there is a terminal before the command opens it
        self.seen = b""
        self._looked_at = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """What is shown after what was looked at before, up to a text."""
        wanted, deadline = text.encode(), time.monotonic() + PATIENCE_SECONDS
        while (place := self.seen.find(wanted, self._looked_at)) < 0:
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} does not come: {self.seen[-2000:]!r}"
            self.seen += os.read(self._master, 4096)
        before, self._looked_at = self._looked_at, place + len(wanted)
        return self.seen[before : self._looked_at].decode(errors="replace")

    def end(self) -> int:
        """The exit code, once it has ended by itself."""

        def shown() -> bytes:
            if select.select([self._master], [], [], 0)[0]:
                self.seen += os.read(self._master, 4096)
            return self.seen[-2000:]

        wait_until(
            "the end of the chat; its terminal", shown, lambda _: self.process.poll() is not None
        )
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


Opened = Callable[..., Screen]


@pytest.fixture
def opened() -> Iterator[Opened]:
    screens: list[Screen] = []

    def open_screen(*arguments: str | Path) -> Screen:
        screens.append(Screen(*arguments))
        return screens[-1]

    yield open_screen
    for screen in screens:
        screen.close()


#: With Enter: a signal that comes after the prompt is shown and before readline waits for keys is
#: heard with the next key.
CTRL_C = "\x03\n"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"


def test_chat_ctrl_c_stops_answer_and_keeps_partial_text(
    models: dict[str, Path], opened: Opened, tmp_path: Path
) -> None:
    screen = opened(models["endless"], "--max-new-tokens", "200000")
    screen.until("/help lists the commands, Ctrl-D leaves")
    for number in (1, 2):  # the conversation goes on after it
        screen.until("> ")
        screen.type("talk\n")
        screen.until("On andOn and")  # it comes while it is made
        screen.type("\x03")
        screen.until("(stopped)")
        screen.until("> ")
        screen.type("/stats\n")
        screen.until(f"messages     {number}")
        screen.until("tokens (interrupted)")
    screen.until("> ")
    screen.type(f"/save {tmp_path}/chat.json\n")
    screen.until("4 messages written")
    messages = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    shown = screen.seen.decode().replace("^C", "")
    for message in messages[1::2]:
        assert message["content"].startswith("On andOn and")
        assert f"\r{message['content']}\r\n(stopped)" in shown
    screen.until("> ")
    screen.type(CTRL_C)
    assert screen.end() == 0


def test_chat_typed_and_pasted_messages_are_sent_and_answer_cannot_control_terminal(
    models: dict[str, Path], opened: Opened, tmp_path: Path
) -> None:
    screen = opened(models["wild"], "--max-new-tokens", "40")
    screen.until("/help lists the commands, Ctrl-D leaves")
    screen.until("> ")
    screen.type("hello\n")
    screen.until("end")
    screen.until("> ")
    screen.type(f"{PASTE}one\rtwo\r/quit\rthree{PASTED}\n")
    screen.until("end")
    screen.until("> ")
    screen.type('"""a\n')
    screen.until("... ")
    screen.type('b"""\n')
    screen.until("end")
    screen.until("> ")
    screen.type("not sent\\\n")
    screen.until("... ")
    screen.type(CTRL_C)
    screen.until("> ")
    screen.type(f"/save {tmp_path}/chat.json\n")
    screen.until("6 messages written")
    messages = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [m["content"] for m in messages if m["role"] == "user"] == [
        "hello", "one\ntwo\n/quit\nthree", "a\nb",
    ]  # fmt: skip
    screen.until("> ")
    screen.type("\x04")
    assert screen.end() == 0
    for control in ("\x1b[31m", "\x07", "\x9b", "\u202e"):
        assert control.encode() not in screen.seen
    assert screen.seen.count(TAMED.encode()) == 3


@pytest.mark.slow
def test_chat_ending_signal_exits_and_restores_terminal(
    models: dict[str, Path], opened: Opened
) -> None:
    screen = opened(models["wild"])
    screen.until("> ")
    screen.process.send_signal(signal.SIGTERM)
    screen.type("\n")
    screen.until("terminated")
    assert screen.end() == 143
