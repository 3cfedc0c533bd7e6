"""Fresh processes that have imported everything already: forks of one that did nothing else.

Importing torch takes longer than a few steps of a small model do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class ForkServer:
    """Runs `methods_once` in forks of a process that has imported it. On CPUs: a process that has
    looked at a GPU can't be forked.

    Args:
        environment: of all of them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        with signals_waiting():
            self._server = subprocess.Popen(
                # -P: what lies in the current folder is not imported.
                [sys.executable, "-P", "-m", "firstlight.bench.forked"],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        self._unread = b""

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._server:  # waits for it and closes its pipes
            end_group(self._server.pid)

    def run(self, request: Mapping[str, Any], seconds: float | None) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of one run. Whatever interrupts it ends the process, and
        those that it started.

        Raises:
            TimeoutError: it took longer than `seconds`.
        """
        with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            job = {"request": request, "out": str(out), "err": str(err)}
            assert self._server.stdin is not None
            with signals_waiting():
                self._server.stdin.write((json.dumps(job) + "\n").encode())
                self._server.stdin.flush()
                process = int(self._line(None))
            code = None
            try:
                code = int(self._line(seconds))
            finally:
                end_group(process)
                if code is None:
                    self._line(None)
            said = out.read_text(encoding="utf-8", errors="replace")
            return code, said, err.read_text(encoding="utf-8", errors="replace")

    def _line(self, seconds: float | None) -> bytes:
        """The server's next line."""
        assert self._server.stdout is not None
        end = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not select.select([self._server.stdout], [], [], left)[0]:
                raise TimeoutError
            part = os.read(self._server.stdout.fileno(), 4096)
            if not part:
                raise ChildProcessError("the process that starts the runs has ended")
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return line


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """Inside the block, signals that would raise an exception wait until its end: a process that
    is being started would be lost."""
    arrived: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda got, _: arrived.append(got))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for got in arrived:
        signal.raise_signal(got)


def end_group(group: int) -> None:
    """Kill all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def serve() -> None:
    """For each line of stdin fork a process, and say its number and then its exit code."""
    # Without torch's compiler, which starts threads.
    methods_once = importlib.import_module("firstlight.bench.methods_once")
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            _child(methods_once.main, job)
        os.write(1, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _child(main: Any, job: dict[str, Any]) -> None:
    """Do what a job asks for, and end."""
    code = 1
    try:
        # A group of its own, torch.compile's helpers among them.
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(job["out"], os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(job["err"], os.O_WRONLY | os.O_CREAT), 2)
        main(json.dumps(job["request"]))
        code = 0
    finally:
        # What went wrong is said here: the process ends, whatever it is.
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
