"""Opens hostile files, each in a forked child of its own, and reports what the children did.

    python hostile_driver.py < CASES.json > REPORTS.json

A case is {"call": one of `_CALLS`, "path": what is opened, "folder": where writing is allowed,
"secret": a file that must not be opened}. A report says how it ended, what it took, and which of
the things that are forbidden were tried. Forking spares the many imports of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch  # imported before the children are watched, like all below
import torch._dynamo
import yaml
from hostile_watch import Watch

import firstlight.conversion.foreign.model
import firstlight.conversion.pickled
import firstlight.training.loop
from firstlight.data.corpus import TokenDataset
from firstlight.errors import FirstlightError
from firstlight.evaluation.perplexity import evaluate
from firstlight.files import limits
from firstlight.files.limits import LimitedProcess
from firstlight.generation.engine import load
from firstlight.recipe import load_recipe
from firstlight.tokenizer import Tokenizer, chat_template

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
    "foreign": lambda path: firstlight.conversion.foreign.model.read_foreign(Path(path)),
}


def _watch_limited_processes(watch: Watch) -> list[int]:
    """Allow a `LimitedProcess` to start its child, which is watched itself.

    Returns:
        Bytes of memory that each child took, added when it is ended. A child that has ended by
        itself took no more than its limit.
    """
    code = f"import hostile_watch; hostile_watch.watch_child({watch.folder!r}, {watch.secret!r}); "
    limits._CHILD_CODE = code + limits._CHILD_CODE
    taken: list[int] = []
    start, close = LimitedProcess.start, LimitedProcess.close

    @contextlib.contextmanager
    def unwatched() -> Iterator[None]:
        watching, watch.watching = watch.watching, False
        yield
        watch.watching = watching

    def started(self: LimitedProcess) -> int:
        with unwatched():
            return start(self)

    def closed(self: LimitedProcess) -> None:
        with unwatched():
            if self._process is not None:
                peak = _memory("VmHWM", str(self._process.pid))
                taken.append(peak or self._memory + 40 * _MEGABYTE)
            close(self)

    LimitedProcess.start, LimitedProcess.close = started, closed  # type: ignore[method-assign]
    return taken


def _memory(field: str, process: str = "self") -> int:
    """A field of /proc/PROCESS/status, in bytes; 0 if the process has ended."""
    text = Path(f"/proc/{process}/status").read_text()
    lines = (line for line in text.splitlines() if line.startswith(field + ":"))
    return next((int(line.split()[1]) << 10 for line in lines), 0)


def attempt(case: dict[str, str]) -> dict[str, Any]:
    """In the child: do it, and say how it went."""
    watch = Watch(case["folder"], case["secret"])
    Path(watch.path).unlink(missing_ok=True)
    child_memory = _watch_limited_processes(watch)
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
    chat_template._CHILD.process.close()  # what a child took is known when it has ended
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds += of_children.ru_utime + of_children.ru_stime
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    kind = "" if error is None else type(error).__name__
    unexpected = error is not None and not isinstance(error, FirstlightError)
    return {
        "refused": isinstance(error, FirstlightError),
        "error": kind,
        "message": "" if error is None else str(error)[:2000],
        "traceback": "".join(traceback.format_exception(error)[-6:]) if unexpected else "",
        "seconds": seconds,
        "megabytes": (max(_memory("VmHWM") - before, 0) + max(child_memory, default=0)) / _MEGABYTE,
        "forbidden": watch.found()[:5],
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
