"""Python processes of tests, forked from a process that has imported torch and firstlight.

A new interpreter that trains spends about 4 s of processor time on imports, a fork 0.1 s. The
fixture `forked_processes` puts `Popen` in the place of subprocess's: a command
`[sys.executable, ["-P"], "-m" MODULE | "-c" CODE | FILE, ...]` becomes a fork of one server for
each process that tests. Every other command, and one whose environment differs in a variable that
Python or torch reads once, is started as ever.

The fork is a child of the caller, with its own pid, arguments, environment, folder, streams,
signal handlers and `__main__`. What stays of the server: imported modules and the seed of hashes.
Processes that a fork starts are real ones. As in the process that tests, a run has no forecast and
no report. Tests of imports, of start-up and of memory start real
processes themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: As it was before a test put another program in its place.
_PYTHON = sys.executable

#: Beginnings of the names of variables that Python, torch, OpenMP or the dynamic linker read once.
_READ_ONCE = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "GLIBC_"),
    *("LD_", "LC_", "LANG", "TORCH_"),
)
#: Of these, variables that may differ.
_MAY_DIFFER = {
    # torch reads it later.
    "TORCH_EXTENSIONS_DIR",
    # It changes words of torch that no test reads.
    "TORCH_CPP_LOG_LEVEL",
    # The command line sets it, in the process that tests, too. Forks have no threads that wait.
    "GOMP_SPINCOUNT",
    # scikit-learn sets them for Intel's OpenMP, which torch for Linux doesn't use.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    # Ray sets it. Each call of `breakpoint` reads it.
    "PYTHONBREAKPOINT",
    # A fork turns it on itself.
    "PYTHONFAULTHANDLER",
}

_PRELOADED = (
    "numpy.ma",
    "torch._dynamo",
    "firstlight.cli.main",
    "firstlight.training.loop",
    "firstlight.training.run",
    "firstlight.planner.plan.processes",
    "firstlight.parallel.elastic",
)

#: What huggingface_hub and datasets import, which themselves read variables when they are imported.
_PRELOADED_IF_INSTALLED = ("httpx2", "httpx", "truststore", "pandas", "pyarrow.dataset", "aiohttp")

#: The server's environment: one thread, and what `firstlight train` sets before torch is loaded.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

#: Options of Python that name a program; a file has none.
_FORMS = ("-m", "-c")

_PR_SET_CHILD_SUBREAPER = 36

#: Bytes that a fork's command has room for in /proc/PID/cmdline.
_TITLE = 8192

_ADOPTING = threading.Lock()

#: subprocess's own, also while a test has put `Popen` in its place.
RealPopen = subprocess.Popen


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a process of this command is the same, forked from the server."""
    rest = command[2:] if command[1:2] == ["-P"] else command[1:]
    if command[0] != _PYTHON or not rest or (rest[0][:1] == "-" and rest[0] not in _FORMS):
        return False
    return not different_variables(environment)


def different_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of variables that keep a process of this environment from being a fork."""
    names = (environment.keys() | _ENVIRONMENT.keys()) - _MAY_DIFFER
    return sorted(
        name
        for name in names
        if name.startswith(_READ_ONCE) and environment.get(name) != _ENVIRONMENT.get(name)
    )


class _Server:
    """The process that forks, seen from the one that tests: it ends with it."""

    def __init__(self) -> None:
        #: Of a socket, in Linux's abstract namespace: it is gone with the server.
        self.address = f"\0firstlight-forks-{os.getpid()}"
        self._alive, there = socket.socketpair()
        with there:
            self._process = RealPopen(
                [_PYTHON, __file__, str(there.fileno()), self.address[1:], " " * _TITLE],
                env=_ENVIRONMENT,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        # It listens from now on.
        if self._alive.recv(1) != b"!":
            raise RuntimeError(f"the server of forks has ended: {self._process.wait()}")
        atexit.register(self.close)

    def close(self) -> None:
        """End the server. What it has forked goes on."""
        self._alive.close()
        self._process.wait()


@functools.cache
def _address() -> str:
    """The server's; the first call starts it."""
    return _Server().address


def _fork(address: str, request: Mapping[str, Any], files: Sequence[int]) -> int:
    """Have the server start a process, which becomes a child of this one; its pid."""
    words = json.dumps({**request, "parent": os.getpid()}).encode()
    with socket.socket(socket.AF_UNIX) as end, _ADOPTING:
        # The fork's own parent ends at once: who adopts meanwhile is its parent.
        _adopt(True)
        try:
            end.connect(address)
            socket.send_fds(end, [struct.pack("!I", len(words))], list(files))
            end.sendall(words)
            said = end.recv(4, socket.MSG_WAITALL)
        finally:
            _adopt(False)
    if len(said) < 4:
        raise ConnectionError("the server of forks has ended")
    return int(struct.unpack("!I", said)[0])


def _adopt(on: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


class Popen(RealPopen[Any]):
    """subprocess.Popen, of a fork where that is the same; see the module's text."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        # The arguments after these three are the same ones in Python 3.11 to 3.14.
        _, pass_fds, cwd, env, _, _, shell, *others = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *later = others
        command = [os.fsdecode(part) for part in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        plain = executable is None and preexec_fn is None and not shell and command
        if not plain or not can_fork(command, environment):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        start_new_session, process_group = later[-2:]
        streams = [
            own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        try:
            self.pid = _fork(
                _address(),
                {
                    "command": command,
                    "environment": environment,
                    "folder": os.fspath(os.getcwd() if cwd is None else cwd),
                    "session": bool(start_new_session),
                    "group": process_group,
                    "numbers": [0, 1, 2, *pass_fds],
                    "mask": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
                    "ignored": [
                        int(one)
                        for one in signal.valid_signals()
                        if signal.getsignal(one) == signal.SIG_IGN
                    ],
                    "cores": sorted(os.sched_getaffinity(0)),
                },
                [*streams, *pass_fds],
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(  # type: ignore[attr-defined]
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
            )


def _serve(alive: socket.socket, listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, until the process that tests has ended. Returns in the
    forks."""
    while True:
        ready, _, _ = select.select([alive, listener], [], [])
        if alive in ready:
            os._exit(0)
        end = listener.accept()[0]
        head, given, _, _ = socket.recv_fds(end, 4, 64)
        request: dict[str, Any] = json.loads(
            end.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)
        )
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process == 0:
                for one in (alive, listener, end):
                    one.close()
                os.close(reading)
                os.close(writing)
                return request, given
            os.write(writing, struct.pack("!I", process))
            os._exit(0)
        os.close(writing)
        for number in given:
            os.close(number)
        # Once it is gone, its child is the caller's.
        os.waitpid(between, 0)
        with end, contextlib.suppress(ConnectionError):
            end.sendall(os.read(reading, 4))
        os.close(reading)


def _become(request: Mapping[str, Any], given: Sequence[int]) -> types.ModuleType:
    """Give this fork all that a new process has; its new `__main__`."""
    while os.getppid() != request["parent"]:
        if not Path(f"/proc/{request['parent']}").exists():
            os._exit(1)
        time.sleep(0.001)
    if request["session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    # First out of the way of the numbers that they get.
    high = [os.dup(one) if one < 64 else one for one in given]
    high = [_above(one) for one in high]
    for one, number in zip(high, request["numbers"], strict=True):
        os.dup2(one, number, inheritable=True)
    for one in {*given, *high} - set(request["numbers"]):
        with contextlib.suppress(OSError):
            os.close(one)
    os.environ.clear()
    os.environ.update(request["environment"])
    ignored = set(request["ignored"]) - {signal.SIGPIPE, signal.SIGXFSZ}
    for known in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ending = signal.SIG_IGN if known in ignored else signal.SIG_DFL
        if known in (signal.SIGPIPE, signal.SIGXFSZ):
            ending = signal.SIG_IGN
        with contextlib.suppress(OSError):  # the threads library's own
            signal.signal(known, ending)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = _text_stream(number, getattr(sys, f"__{name}__"))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request["environment"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    importlib.invalidate_caches()
    sys.orig_argv[:] = request["command"]
    _set_title(" ".join(request["command"]))
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _set_title(title: str) -> None:
    """Put a command where Linux reads /proc/PID/cmdline from, over the server's own."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = title.encode()[: end - start - 2]
    # A last byte that is not 0 means that the text ends with the first 0.
    ctypes.memmove(start, words + bytes(end - start - 1 - len(words)) + b"!", end - start)


def _above(number: int) -> int:
    """A copy above the numbers that a new process may be given."""
    import fcntl

    copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 200)
    os.close(number)
    return copy


def _text_stream(number: int, old: Any) -> io.TextIOWrapper:
    """What Python makes of a file that a process is started with."""
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    buffer = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        newline=None if number == 0 else "\n",
        line_buffering=number == 2 or raw.isatty(),
    )
    stream.mode = "r" if number == 0 else "w"  # type: ignore[misc]
    return stream


def _execute(command: list[str], main: types.ModuleType) -> None:
    """Do what `python COMMAND` does."""
    rest = command[1:]
    unsafe = rest[0] != "-P"
    if not unsafe:
        rest = rest[1:]
    if rest[0] == "-m":
        sys.argv[:] = ["-m", *rest[2:]]
        sys.path[:0] = [os.getcwd()] if unsafe else []
        # Many are preloaded.
        warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
    elif rest[0] == "-c":
        sys.argv[:] = ["-c", *rest[2:]]
        sys.path[:0] = [""] if unsafe else []
        exec(compile(rest[1], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv[:] = rest
        sys.path[:0] = [str(Path(rest[0]).resolve().parent)] if unsafe else []
        main.__dict__["__file__"] = rest[0]
        code = compile(Path(rest[0]).read_bytes(), rest[0], "exec")
        exec(code, main.__dict__)  # noqa: S102


def _nothing(*_: object) -> None:
    """No forecast, and no report."""


def _code_of(command: list[str], main: types.ModuleType) -> int:
    """Do what `python COMMAND` does, and say what Python says at the end; the exit code."""
    try:
        _execute(command, main)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - as Python does
        # Without the frames of this file.
        trace = error.__traceback__
        for _ in range(2):
            trace = trace.tb_next if trace is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> None:
    """End as Python does, but leave objects alone: a fork would have to copy them all first."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout:
                code = code or 120
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"Exception ignored: {type(error).__name__}: {error}\n")
        except (AttributeError, ValueError):  # closed
            pass
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    sys.path.pop(0)
    # The package `benchmarks`, which its tests' conftest.py lets real processes find.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    for _name in _PRELOADED:
        importlib.import_module(_name)
    for _name in _PRELOADED_IF_INSTALLED:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
    # As conftest.py has it in the process that tests: both take longer than most runs here.
    for _name in ("start", "forecast", "advise"):
        setattr(sys.modules["firstlight.planner.plan.processes"].RunForecaster, _name, _nothing)
    sys.modules["firstlight.training.loop"].__dict__["draw_report"] = _nothing
    # What a process measures once, before it decides about bf16 and reports the utilization.
    _device = importlib.import_module("firstlight.hardware.device")
    _cpu = _device.torch.device("cpu")
    _device.bf16_is_faster(_cpu)
    _device.peak_flops(_cpu, _device.torch.float32)
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # each run asks, and Python would count all of them
    gc.enable()
    _alive, _listener = socket.socket(fileno=int(sys.argv[1])), socket.socket(socket.AF_UNIX)
    _listener.bind(f"\0{sys.argv[2]}")
    _listener.listen(64)
    _alive.send(b"!")
    _request, _given = _serve(_alive, _listener)
    _end(_code_of(_request["command"], _become(_request, _given)))
