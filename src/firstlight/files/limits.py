"""Process untrusted input in a child process with limits on memory and CPU time.

Some files, such as chat templates, the processing steps in a tokenizer.json and JSON Schemas, are
in effect small programs. The libraries that run them do not limit time or memory, and a library
call can't be interrupted from within its own process. A `LimitedProcess` therefore makes such calls
in a child process, which is killed when a call exceeds a limit and restarted for the next call.

    limit            enforced by
    CPU time         a timer in the child (ITIMER_PROF), whose signal ends the child even inside C
                     code
    elapsed time     a timeout in the parent
    memory           RLIMIT_DATA in the child, and the parent, which checks the child's resident
                     memory while it waits. macOS does not enforce RLIMIT_DATA, so a child on macOS
                     can exceed the limit for up to 0.1 seconds between two checks.

The child runs in a separate session, so Ctrl-C in a terminal does not reach it. The child ends when
its connection is closed, which also happens when the parent is killed.

Requests and responses are JSON rather than pickles, because malicious input may take control of the
child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from firstlight import errors
from firstlight.errors import FirstlightError, describe_os_error

#: The first constant is the interval in seconds at which the child's memory is checked. The second
#: constant is the ratio of a call's timeout to its CPU time limit. It is high because the machine
#: may be busy with other work.
_LOOK_SECONDS, _PATIENCE = 0.1, 20.0
#: CPU time limit for starting a child, in seconds.
_START_SECONDS = 30.0

#: Kind of the message with which a child asks for more time.
_MORE = "more"


class LimitExceededError(FirstlightError):
    """Raised if a call exceeds a limit or terminates the child process. The message states the
    limits.
    """


class LimitedProcess:
    """Calls a function in a child process with limits. Instances can be used by several threads and
    after a fork.

    Args:
        factory: function that creates the function to call, as "module:name". The module should
            have few imports, because they delay the start of the child.
        arguments: arguments of `factory`, as JSON data.
        memory: number of bytes that the child can allocate after `factory` returns.

    Attributes:
        lock: lock that is held during each call.
    """

    def __init__(self, factory: str, arguments: tuple[Any, ...] = (), *, memory: int) -> None:
        self.lock = threading.RLock()
        self._factory = factory
        self._arguments = arguments
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        _ALL.add(self)

    def start(self) -> int:
        """Start the child if it is not running. Return the number of times that the child has been
        started so far.

        Raises:
            FirstlightError: the child could not be started, or the factory raised a
                FirstlightError.
        """
        with self.lock:
            if self._process is None:
                self._connection, theirs = Pipe()
                with theirs:
                    # Use the same module search path as this process, but leave out the current
                    # folder, because modules in it could shadow installed modules.
                    paths = [path for path in sys.path if path]
                    code = f"import sys; sys.path[:] = {paths!r}; " + _CHILD_CODE
                    try:
                        self._process = subprocess.Popen(
                            [sys.executable, "-P", "-c", code, str(theirs.fileno())],
                            pass_fds=[theirs.fileno()],
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                            start_new_session=True,
                            # Disable backtraces of Rust panics. A backtrace would take 50 MB of
                            # memory and is never shown.
                            env={**os.environ, "RUST_BACKTRACE": "0"},
                        )
                    except OSError as error:
                        raise self._cannot_start(describe_os_error(error)) from error
                process = self._process
                self._finalizer = weakref.finalize(self, _end, process, self._connection)
                self._starts += 1
                self._most_resident = sys.maxsize
                try:
                    self._exchange([self._factory, self._arguments, self._memory], _START_SECONDS)
                except LimitExceededError:
                    reason = f"exit code {process.returncode}"
                    raise self._cannot_start(reason) from None
                except BaseException:
                    self.close()
                    raise
                self._most_resident = self._resident() + self._memory
            return self._starts

    def _cannot_start(self, reason: str) -> FirstlightError:
        module = self._factory.partition(":")[0]
        return FirstlightError(
            f"the child process for untrusted files can't start ({reason}): free some memory, or "
            f"run `{sys.executable} -c 'import {module}'` to see the error"
        )

    def call(self, request: Any, *, seconds: float) -> Any:
        """Call the function with `request`, and return the result. The request and the result are
        JSON data.

        Args:
            request: argument of the function.
            seconds: CPU time limit.

        Raises:
            LimitExceededError: the call exceeded a limit or ended the child process.
            FirstlightError: the child could not be started, or the function raised a
                FirstlightError.
        """
        with self.lock:
            self.start()
            return self._exchange(request, seconds)

    def close(self) -> None:
        """Stop the child. The next call starts a new one."""
        with self.lock:
            if self._process is not None:
                self._finalizer()
                self._process = None

    def interrupt(self) -> None:
        """End the child from another thread. The call in progress raises LimitExceededError."""
        if (process := self._process) is not None:
            process.kill()

    def _exchange(self, request: Any, seconds: float) -> Any:
        try:
            # Do not escape non-ASCII characters, because each escape would take six bytes.
            content = json.dumps([request, seconds], ensure_ascii=False)
            self._connection.send_bytes(content.encode("utf-8", "surrogatepass"))
            until = time.monotonic() + _PATIENCE * max(seconds, 1.0)
            kind = _MORE
            while kind == _MORE:
                while not self._connection.poll(_LOOK_SECONDS):
                    if time.monotonic() > until or self._resident() > self._most_resident:
                        raise EOFError
                kind, result = json.loads(
                    self._connection.recv_bytes().decode("utf-8", "surrogatepass")
                )
                if kind == _MORE:
                    until += _PATIENCE * result
        except (OSError, EOFError):
            self.close()
            raise LimitExceededError(
                f"more than {seconds:g} s of CPU time or {self._memory >> 20:,} MiB of memory"
            ) from None
        except BaseException:
            # Stop the child after an exception such as KeyboardInterrupt. Otherwise, its response
            # to this request could be mistaken for the response to the next request.
            self.close()
            raise
        if not kind:
            return result
        error = getattr(errors, kind, None)
        if isinstance(error, type) and issubclass(error, FirstlightError):
            raise error(result)
        raise RuntimeError(f"{self._factory} failed: {kind}: {result}")

    def _resident(self) -> int:
        import psutil

        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self._process.pid).memory_info().rss)
        return 0  # The child has ended. The error is raised when the response is read.

    def forget(self) -> None:
        """Detach from the child in a forked process, because only the process that started the
        child may use it. Otherwise, both processes would communicate with the child, and it would
        outlive the process that started it.
        """
        self.lock = threading.RLock()
        if self._process is not None:
            self._finalizer.detach()
            self._connection.close()
            # Set a return code, so that `subprocess` does not wait for a child that belongs to a
            # different process.
            self._process.returncode = 0
            self._process = None


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


_ALL: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _ALL:
        process.forget()


os.register_at_fork(after_in_child=_forget_all)


# In the child

_CHILD_CODE = "from firstlight.files.limits import serve; serve(int(sys.argv[1]))"


_connections: list[Connection] = []


def allow_more(seconds: float) -> None:
    """Allow the call in progress more CPU time. Called in the child, when it has made progress.

    Args:
        seconds: number of seconds that are added to the CPU time limit.
    """
    if _connections:
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, left + seconds)
        _connections[0].send_bytes(json.dumps([_MORE, seconds]).encode())


def serve(descriptor: int) -> None:
    """Serve requests in the child until the connection is closed.

    Args:
        descriptor: file descriptor of the connection.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Reset the handling of the timer's signal, because the child inherits it from a parent that
    # ignores or blocks this signal.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    connection = Connection(descriptor)
    _connections.append(connection)
    function: Callable[[Any], Any] = _prepare
    while True:
        try:
            content = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        request, seconds = json.loads(content.decode("utf-8", "surrogatepass"))
        # Use a timer, because RLIMIT_CPU has a resolution of one second and limits the total of all
        # calls.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind = ""
        try:
            result: Any = function(request)
        except MemoryError:
            raise  # The memory limit was exceeded, so end this process.
        except Exception as error:  # noqa: BLE001 - the parent raises it
            kind, result = type(error).__name__, str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if function is _prepare and not kind:
            function, result = result, None
        answer = json.dumps([kind, result], ensure_ascii=False)
        connection.send_bytes(answer.encode("utf-8", "surrogatepass"))


def _prepare(request: tuple[str, list[Any], int]) -> Callable[[Any], Any]:
    """Create the function to call, then limit the memory of this process."""
    factory, arguments, memory = request
    module, _, name = factory.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)(*arguments)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + memory, data + memory))
    return function
