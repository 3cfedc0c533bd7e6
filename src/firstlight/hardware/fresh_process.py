"""Run measurements in separate processes, so that the memory use of one measurement does not affect
the next.

    python -m firstlight.hardware.fresh_process MODULE REQUEST

A measurement is a module with a `measure` function that maps a request to a result. The request and
the result are JSON objects. With - as REQUEST, the request is read from stdin.

`ask` starts a new Python process, and `ask_ranks` starts the processes of a distributed run.
`ForkServer` forks a process that has already imported all modules. This saves time, because
importing torch takes longer than running a few steps of a small model.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.hardware.environment import EXPANDABLE_SEGMENTS, TRAINING

#: Value of REQUEST that causes the request to be read from stdin.
_FROM_STDIN = "-"


def training_environment() -> dict[str, str]:
    """Return the environment variables of `firstlight train`. Variables that are already set keep
    their values.
    """
    return TRAINING | os.environ


def plain_environment() -> dict[str, str]:
    """Return the environment variables of this process, excluding those set by firstlight."""
    own = TRAINING | EXPANDABLE_SEGMENTS
    return {k: v for k, v in os.environ.items() if own.get(k) != v}


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run a measurement in a new process.

    If this call is interrupted, for example by Ctrl+C, the process and its child processes are
    killed.

    Args:
        module: name of a module with a `measure` function.
        request: argument of the function, passed as JSON.
        environment: environment variables of the process.
        seconds: time limit for the process, in seconds; None for no limit.

    Returns:
        The JSON object that the process printed as its last line on stdout, or {"error": {"type",
        "message"}} if it failed. The type is the class name of a FirstlightError, "Killed" if a
        signal ended the process, "TimeoutError" if the time limit was reached, or "Failed" for any
        other error.
    """
    (result,) = _ask_all(module, request, [environment], seconds)
    return result


def ask_ranks(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    count: int,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run a measurement in all ranks of a distributed run on this machine.

    Args:
        module: see `ask`.
        request: see `ask`.
        environment: see `ask`. The variables that define each rank are added to it.
        count: number of ranks.
        seconds: see `ask`.

    Returns:
        The result of rank 0, or the error of a rank that failed.
    """
    # torch is imported here, because importing it takes a long time. The store is opened before the
    # ranks start, so that no other program can take its port.
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    run["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    run |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    environments = [
        {**environment, **run, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
    ]
    results = _ask_all(module, request, environments, seconds)
    failed = [result for result in results if "error" in result]
    # Any other error takes precedence over a RankError, which only reports that another rank has
    # ended.
    return min(failed, key=lambda one: one["error"]["type"] == "RankError", default=results[0])


def _ask_all(
    module: str,
    request: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]],
    seconds: float | None,
) -> list[dict[str, Any]]:
    """Run one process per environment, all at the same time. Return their results in the format of
    `ask`.
    """
    with started(module, environments) as processes:
        return results_of(processes, request, seconds)


@contextlib.contextmanager
def started(
    module: str, environments: Sequence[Mapping[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one process per environment. The processes import a module while they wait for their
    requests. When the context exits, the processes and their child processes are killed.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for environment in environments:
            with signals_waiting():
                process = subprocess.Popen(
                    # With -P, modules in the current folder are not imported.
                    [sys.executable, "-P", "-m", __name__, module, _FROM_STDIN],
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",
                    # A separate process group, which will also contain torch.compile's workers.
                    start_new_session=True,
                )
                processes.append(process)
        yield processes
    finally:
        for process in processes:
            # The context manager waits for the process and closes its pipes. The whole process
            # group is killed, because torch.compile's workers would slow down the next run.
            with process:
                end_group(process.pid)


def results_of(
    processes: Sequence[subprocess.Popen[str]], request: Mapping[str, Any], seconds: float | None
) -> list[dict[str, Any]]:
    """Send the same request to processes that have been started. Return their results in the format
    of `ask`.
    """
    end = None if seconds is None else time.monotonic() + seconds
    for process in processes:
        assert process.stdin is not None
        # A process that has already failed does not read its request.
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request))
        process.stdin = None
    try:
        said = [
            process.communicate(timeout=None if end is None else max(0, end - time.monotonic()))
            for process in processes
        ]
    except subprocess.TimeoutExpired:
        return [error_of("TimeoutError", f"took more than {seconds:.0f} s")] * len(processes)
    return [
        _result(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)
    ]


def error_of(kind: str, message: str) -> dict[str, Any]:
    """Return an error result, in the format of `ask`."""
    return {"error": {"type": kind, "message": message}}


def _result(code: int, out: str, err: str) -> dict[str, Any]:
    """Return the result of a process in the format of `ask`, given its exit code, stdout and
    stderr.
    """
    if code:
        return error_of("Failed" if code > 0 else "Killed", last_words(code, err))
    try:
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return error_of("Failed", "the process ended without a result")
    return result


def last_words(code: int, err: str) -> str:
    """Return the reason why a process failed, as a single line. The reason is the signal that
    killed the process, or the last line of its stderr.

    Args:
        code: exit code as in `subprocess`, negative for a signal.
        err: the process's stderr.
    """
    if code == -signal.SIGKILL:
        return "killed by signal 9: most likely out of memory"
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {code}"


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]], request: str) -> None:
    """Run a measurement and write its result, or a FirstlightError, as the last line of stdout.

    Args:
        measure: function that maps the request to the result.
        request: JSON object as text.
    """
    # If memory runs out, Linux should kill this process rather than the calling process, which
    # reports the error.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        result = measure(json.loads(request))
    except FirstlightError as error:
        result = error_of(type(error).__name__, str(error))
    # The result must be the last line of stdout, so redirect stdout before libraries flush their
    # buffers.
    os.write(1, (json.dumps(result) + "\n").encode())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class ForkServer:
    """Runs measurements in forks of a server process that has already imported all modules.

    It supports only measurements on CPUs, because a process with a CUDA context can't be forked.

    Args:
        environment: environment variables of all processes.
        module: name of a module with a `measure` function.
    """

    def __init__(self, environment: Mapping[str, str], module: str) -> None:
        with signals_waiting():
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, module],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        self._unread = b""
        self._is_ready = False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._server:  # Waits for the process and closes its pipes on exit.
            end_group(self._server.pid)

    def ask(self, request: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """Run a measurement in a fork. For the arguments and the result, see the function `ask`."""
        with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            job = {"request": request, "out": str(out), "err": str(err)}
            assert self._server.stdin is not None
            if not self._is_ready:
                # Signals are not delayed during this wait, because the server's imports take
                # several seconds.
                self._line(None)
                self._is_ready = True
            with signals_waiting():
                self._server.stdin.write((json.dumps(job) + "\n").encode())
                self._server.stdin.flush()
                process = int(self._line(None))
            code = None
            try:
                code = int(self._line(seconds))
            except TimeoutError:
                return error_of("TimeoutError", f"took more than {seconds:.0f} s")
            finally:
                end_group(process)
                if code is None:
                    self._line(None)
            said = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
            return _result(code, *said)

    def _line(self, seconds: float | None) -> bytes:
        """Return the server's next line, without the newline at its end.

        Raises:
            TimeoutError: the server has not written a line within `seconds`.
            ChildProcessError: the server has ended.
        """
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
    """Delay the signals SIGINT, SIGTERM and SIGHUP until the context exits, if they have Python
    handlers.

    If a handler raised an exception while a process was being started, the process would never be
    terminated.
    """
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
    """Kill all processes in a process group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _serve(measure: Any) -> None:
    """Write a line to stdout once all modules have been imported. Then fork a process for each line
    read from stdin. Write the id of each process when it starts and its exit code when it ends.
    """
    # Importing the module here saves time in each fork. torch's compiler (_inductor) is not
    # imported, because it starts threads, and a process with threads can't be forked safely.
    importlib.import_module("torch._dynamo")
    os.write(1, b"ready\n")
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            _child(measure, job)
        os.write(1, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _child(measure: Any, job: dict[str, Any]) -> None:
    """Run the measurement that a job describes, then exit the process.

    Args:
        measure: function that maps the request to the result.
        job: a dict with the keys "request", "out" and "err". The last two are paths of files for
            stdout and stderr.
    """
    code = 1
    try:
        # A separate process group, which will also contain torch.compile's workers.
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(job["out"], os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(job["err"], os.O_WRONLY | os.O_CREAT), 2)
        answer(measure, json.dumps(job["request"]))
        code = 0
    finally:
        # `os._exit` does not print the traceback, so print it here.
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _measure = importlib.import_module(sys.argv[1]).measure
    if sys.argv[2:]:
        answer(_measure, sys.stdin.read() if sys.argv[2] == _FROM_STDIN else sys.argv[2])
    else:
        _serve(_measure)
