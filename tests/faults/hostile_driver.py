"""Opens hostile files, each in a forked child of its own, and reports what the children did.

    python hostile_driver.py < CASES.json > REPORTS.json

A case is {"call": one of `_CALLS`, "path": what is opened, "folder": where writing is allowed,
"secret": a file that must not be opened}. A report says how it ended, what it took, and which of
the things that are forbidden were tried. Forking spares the many imports of torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2  # imported before the children are watched, like all below
import torch
import torch._dynamo
import yaml

import firstlight.conversion.foreign
import firstlight.conversion.pickled
import firstlight.tokenizer.chat_template
import firstlight.training.loop
from firstlight.data.corpus import TokenDataset
from firstlight.errors import FirstlightError
from firstlight.evaluation.perplexity import evaluate
from firstlight.generation.engine import load
from firstlight.recipe import load_recipe
from firstlight.tokenizer import Tokenizer

_MEGABYTE = 1 << 20
#: Of memory; more than a case may take, so that what it takes can be told.
_HARD_LIMIT_BYTES = 400 * _MEGABYTE
_HARD_LIMIT_SECONDS = 5


def _chat(path: str) -> object:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    return Tokenizer.from_pretrained(path).apply_chat_template(messages)


def _encode(path: str) -> object:
    tokenizer = Tokenizer.from_pretrained(path)
    # Not a letter that every tokenizer is tried on when it is loaded.
    return [tokenizer.decode(tokenizer.encode(text)) for text in ("zz", "hello", "a" * 40 + "!")]


def _train(path: str, **options: Any) -> object:
    return firstlight.training.loop.train(yaml.safe_load(Path(path).read_text()), **options)


_CALLS: dict[str, Callable[[str], object]] = {
    "load": load,
    "evaluate": lambda path: evaluate(path, device="cpu"),
    "resume": lambda path: _train(path, resume=True),
    "train": _train,
    "dataset": lambda path: TokenDataset(path, "train"),
    "unverified dataset": lambda path: TokenDataset(path, "train", verify=False),
    "recipe": load_recipe,
    "tokenizer": Tokenizer.from_pretrained,
    "chat": _chat,
    "pickled": lambda path: firstlight.conversion.pickled.pickled_tensors(Path(path)),
    "encode": _encode,
    "foreign": lambda path: firstlight.conversion.foreign.read_foreign(Path(path)),
}

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
    """Everything a child tries that it may not."""

    def __init__(self, folder: str, secret: str) -> None:
        self.folder, self.secret = os.path.realpath(folder), os.path.realpath(secret)
        self.found: list[str] = []
        self.watching = False
        # Of Python itself, its libraries, and firstlight: what is imported late is code, too.
        roots = [sys.prefix, sys.base_prefix, str(Path(firstlight.__file__).parent)]
        roots.append(str(Path(jinja2.__file__).parents[1]))
        self.code = tuple(os.path.realpath(root) + os.sep for root in roots)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        self.watching = False
        try:
            problem = self._problem(event, arguments)
            if problem:
                self.found.append(f"{event}: {problem}")
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


def _memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(li.split()[1]) << 10 for li in text.splitlines() if li.startswith(field + ":"))


def attempt(case: dict[str, str]) -> dict[str, Any]:
    """In the child: do it, and say how it went."""
    watch = Watch(case["folder"], case["secret"])
    before, limit = _memory("VmRSS"), _memory("VmData") + _HARD_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (_HARD_LIMIT_SECONDS, resource.RLIM_INFINITY))
    # For what waits without end, as on a pipe; on a busy machine a case's CPU time takes longer.
    signal.alarm(12 * _HARD_LIMIT_SECONDS)
    os.chdir(case["folder"])
    sys.addaudithook(watch)
    error: BaseException | None = None
    watch.watching = True
    start = time.process_time()
    try:
        _CALLS[case["call"]](case["path"])
    except BaseException as caught:  # noqa: BLE001 - Rust's panics are nothing less
        error = caught
    seconds = time.process_time() - start
    watch.watching = False
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    kind = "" if error is None else type(error).__name__
    unexpected = error is not None and not isinstance(error, FirstlightError)
    return {
        "refused": isinstance(error, FirstlightError),
        "error": kind,
        "message": "" if error is None else str(error)[:2000],
        "traceback": "".join(traceback.format_exception(error)[-6:]) if unexpected else "",
        "seconds": seconds,
        "megabytes": max(_memory("VmHWM") - before, 0) / _MEGABYTE,
        "forbidden": watch.found[:5],
    }


def in_child(case: dict[str, str]) -> dict[str, Any]:
    """A child's report; of one that died, how."""
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(readable)
        code = 1
        try:
            report = attempt(case)
            with open(writable, "w", encoding="utf-8") as file:
                json.dump(report, file)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(writable)
    with open(readable, encoding="utf-8", errors="replace") as file:
        text = file.read()
    _, status = os.waitpid(process, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    ended = f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if status & 127 else "died"
    return {"refused": False, "error": ended, "message": "", "traceback": "", "seconds": 99.0,
            "megabytes": 0.0, "forbidden": []}  # fmt: skip


def draw_nothing(run: Path) -> None:
    """In the place of a report's drawing, whose library keeps files elsewhere."""


if __name__ == "__main__":
    setattr(firstlight.training.loop, "draw_report", draw_nothing)  # noqa: B010 - mypy
    torch.set_num_threads(1)
    json.dump([in_child(case) for case in json.load(sys.stdin)], sys.stdout)
