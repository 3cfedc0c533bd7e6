"""Watches what a process does when it opens a hostile file. It imports little, because the child
processes that firstlight starts for such files are watched, too."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType
from typing import Any

import jinja2

import firstlight

#: Events that no opening of a file has a reason for.
_NEVER = (
    *("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty."),
    *("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "winreg."),
    *("pickle.find_class", "os.putenv", "os.kill", "sys.settrace", "sys.setprofile"),
)
_CHANGES = (
    *("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.", "tempfile."),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Writes down everything that a process tries and may not, in a file in `folder`."""

    def __init__(self, folder: str, secret: str) -> None:
        self.folder, self.secret = os.path.realpath(folder), os.path.realpath(secret)
        self.path = os.path.join(self.folder, "forbidden")
        self.watching = False
        # Of Python itself, its libraries, and firstlight: what is imported late is code, too.
        roots = [sys.prefix, sys.base_prefix, os.path.dirname(firstlight.__file__)]
        roots.append(os.path.dirname(os.path.dirname(jinja2.__file__)))
        self.code = tuple(os.path.realpath(root) + os.sep for root in roots)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        self.watching = False
        try:
            problem = self._problem(event, arguments)
            if problem:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(f"{event}: {problem}\n")
        finally:
            self.watching = True

    def _problem(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event.startswith(_NEVER):
            return repr(arguments)[:200]
        if event in ("exec", "compile"):
            source = arguments[0].co_filename if event == "exec" else arguments[1]
            return self._strange_code(str(source))
        if event == "open":
            return self._opening(*arguments)
        if event.startswith(_CHANGES):
            paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
            return next((path for path in paths if not self._inside(path)), "")
        return ""

    def _strange_code(self, source: str) -> str:
        # Jinja compiles what it made of a template, and for its error messages a line to raise
        # them; what a template may do is the sandbox's business.
        if source in ("<template>", "<unknown>") or source.startswith("<frozen"):
            return ""
        if source == "<string>":
            # Libraries make functions of texts of their own: dataclasses, torch.
            frame: FrameType | None = sys._getframe(3)
            while frame is not None and frame.f_code.co_filename == "<string>":
                frame = frame.f_back
            source = "" if frame is None else frame.f_code.co_filename
            if os.path.basename(source) in ("pickle.py", "constructor.py", "yaml.py"):
                return f"a text, by {source}"
        return "" if os.path.realpath(source).startswith(self.code) else source

    def _opening(self, path: Any, mode: Any, flags: int) -> str:
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        real = os.path.realpath(os.fsdecode(path))
        if real == self.secret:
            return f"{real} was opened"
        if not flags & _WRITING or real in ("/dev/null", "/dev/tty"):
            return ""
        follow = not flags & os.O_NOFOLLOW
        return "" if self._inside(path, follow=follow) else f"{real} was opened for writing"

    def _inside(self, given: str | bytes | os.PathLike[str], *, follow: bool = False) -> bool:
        path = os.fsdecode(given)
        folder, name = os.path.split(os.path.abspath(path))
        real = os.path.realpath(path) if follow else os.path.join(os.path.realpath(folder), name)
        return real == self.folder or real.startswith(self.folder + os.sep)

    def found(self) -> list[str]:
        """What was forbidden, of this process and those that `watch_child` was called in."""
        with contextlib.suppress(FileNotFoundError), open(self.path, encoding="utf-8") as file:
            return file.read().splitlines()
        return []


def watch_child(folder: str, secret: str) -> None:
    """In the child process of a `LimitedProcess`: watch it from its start to its end."""
    watch = Watch(folder, secret)
    sys.addaudithook(watch)
    watch.watching = True
