"""Entry point of the command line interface, `firstlight COMMAND ...`. Errors are printed as one
line.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from firstlight.cli.bench import bench_group
from firstlight.cli.compare import compare_command
from firstlight.cli.convert import convert_command
from firstlight.cli.data import data_group
from firstlight.cli.eval import eval_command
from firstlight.cli.generate import chat_command, generate_command, serve_command
from firstlight.cli.info import info_command, report_command
from firstlight.cli.output import discard_stdout, write_out
from firstlight.cli.plan import plan_command
from firstlight.cli.prepare import prepare_command
from firstlight.cli.push import card_command, push_command, push_data_command
from firstlight.cli.tokenizer import tokenizer_group
from firstlight.cli.train import AGAIN, train_command
from firstlight.cli.tune import tune_command
from firstlight.cli.watch import dashboard_command, watch_command
from firstlight.console import visible
from firstlight.errors import FirstlightError, describe_os_error, lacks_memory
from firstlight.hardware import environment

#: Subcommands that generate text and therefore need the environment variables for decoding.
_DECODING = ("generate", "chat", "serve")

_TRAIN_IN_LESS = "lower batch.micro_batch_size or data.seq_len"
_IN_LESS_MEMORY = "or load the model with --dtype bfloat16, on a CPU with --dtype int8"
_GENERATE_IN_LESS = f"lower --max-new-tokens, {_IN_LESS_MEMORY}"
#: Advice that is printed when a command runs out of memory, keyed by subcommand.
_LESS_MEMORY = {
    "train": _TRAIN_IN_LESS,
    "tune": _TRAIN_IN_LESS,
    "plan": _TRAIN_IN_LESS,
    "eval": "lower --batch-size or --seq-len",
    "compare": "lower --batch-size or --seq-len",
    "generate": _GENERATE_IN_LESS,
    "chat": _GENERATE_IN_LESS,
    "serve": f"lower --max-context-tokens or --max-batch-size, {_IN_LESS_MEMORY}",
}

#: Hint that is printed after Ctrl-C, keyed by subcommand.
_AFTER_INTERRUPTION = {
    "train": f": {AGAIN}",
}

#: Address space in bytes that is needed to import torch. With less, torch's C++ code aborts the
#: process.
_LEAST_ADDRESSES = 600_000_000
#: Address-space limit in bytes below which torch can run out of memory even if the model is small.
_FEW_ADDRESSES = 4_000_000_000

#: Prefix of the file name in stack frames of importlib.
_IMPORT_MACHINERY = "<frozen importlib"
#: Substrings of the paths of torch's fake-tensor modules, which `firstlight plan` uses for tracing.
#: C++ code calls functions in these modules, such as `find_torch_dispatch_rule`. If one of these
#: functions raises an exception, the C++ code aborts the process.
_TORCH_INTERNALS = tuple(
    f"{os.sep}torch{os.sep}{name}"
    for name in (
        "_decomp",
        "_library",
        "_meta_registrations",
        "_ops",
        "_prims",
        "_refs",
        "_subclasses",
    )
)

#: Time in seconds after which a signal that was delayed during an import is raised again.
_SOON = 0.001
#: Maximum time in seconds by which a signal is delayed during an import. If the import has not
#: finished by then, the signal ends the process.
_LONGEST_WAIT = 0.5


class Terminated(BaseException):
    """Raised when this process receives a signal to terminate.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def cleaning_up_when_terminated(*, as_json: bool = False, advice: str = "") -> Iterator[None]:
    """Context manager in which SIGTERM, SIGHUP and SIGUSR1 raise `Terminated`, and SIGINT raises
    KeyboardInterrupt.

    Signals that this process already ignores, for example because it was started with nohup, stay
    ignored. The context manager has no effect outside the main thread.

    If a signal arrives while a module is being imported, the exception is raised after the import.
    C++ code that imports modules swallows exceptions, so raising it immediately would leave a
    partially initialised module behind. The exception is also delayed inside torch's fake-tensor
    modules, because C++ code that calls these modules would abort the process. If an import takes a
    long time, as importing torch does, the signal ends the process without an exception.

    Args:
        as_json: True to also print a JSON object with the error if the process ends during an
            import.
        advice: explanation of how to continue, which is printed after "interrupted".
    """
    handlers = _SignalHandlers(as_json, advice)
    handlers.install()
    try:
        yield
    finally:
        handlers.remove()


class _SignalHandlers:
    """The signal handlers of `cleaning_up_when_terminated`."""

    def __init__(self, as_json: bool, advice: str) -> None:
        self._as_json = as_json
        self._advice = advice
        # The last signal that was delayed during an import, and the time of the first such signal.
        self._waiting: tuple[int, float] | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers if the caller is in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
            signal.SIGUSR1: self._end,
            signal.SIGINT: self._end,
            signal.SIGALRM: self._again,
        }
        for number, handler in handlers.items():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, handler)

    def remove(self) -> None:
        """Restore the handlers that were active before `install`."""
        if signal.SIGALRM in self._before:
            # Stop the timer. Once the handler has been removed, the timer's SIGALRM would end the
            # process.
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in self._before.items():
            signal.signal(number, previous)

    def _end(self, number: int, frame: FrameType | None) -> None:
        # If a different handler for SIGALRM is installed, another part of the program is using the
        # timer, so the signal can't be delayed.
        if signal.SIGALRM in self._before and _swallows_exceptions(frame):
            now = time.monotonic()
            first = self._waiting[1] if self._waiting is not None else now
            if now - first > _LONGEST_WAIT:
                _end_now(number, self._as_json, self._advice)
            self._waiting = number, first
            signal.setitimer(signal.ITIMER_REAL, _SOON)
            return
        self._waiting = None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    def _again(self, _: int, __: FrameType | None) -> None:
        raised = self._waiting
        if raised is None:
            return
        try:
            # Raise the signal again instead of raising its exception here, because a different
            # handler may have been installed in the meantime.
            signal.raise_signal(raised[0])
        finally:
            if self._waiting is raised:  # Otherwise, the signal was delayed again.
                self._waiting = None


def _end_now(number: int, as_json: bool, advice: str) -> None:
    """End the process without unwinding the stack. The error message and the exit code are the same
    as if the signal had raised an exception.
    """
    word = "interrupted" if number == signal.SIGINT else "terminated"
    message = f"{word}{advice}" if number == signal.SIGINT else word
    # Do not use `_fail`, because the signal may have interrupted a write, and Python's streams do
    # not allow nested writes.
    with contextlib.suppress(OSError):
        os.write(2, f"firstlight: error: {message}\n".encode())
    if as_json:
        with contextlib.suppress(OSError):
            os.write(1, _json_error(word.capitalize(), message).encode())
    os._exit(128 + number)


def _swallows_exceptions(frame: FrameType | None) -> bool:
    """Return True if a signal handler must not raise an exception at this point. This is the case
    if the stack frame is part of an import or of torch's fake-tensor modules.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_IMPORT_MACHINERY):
            return True
        if any(part in name for part in _TORCH_INTERNALS):
            return True
        frame = frame.f_back
    return False


#: Text that `firstlight` prints if no subcommand is given.
_FIRST_STEPS = """\
firstlight: from raw text to your own language model. Start with a folder of text:

  firstlight train my_texts/ --budget 30m   train a tokenizer and a model in 30 minutes
  firstlight chat RUN                       chat with the model; RUN is the folder that train prints
  firstlight chat RUN --web                 chat in a browser
  firstlight serve RUN                      OpenAI-compatible HTTP server
  firstlight convert RUN --to gguf --out F  convert the model for llama.cpp and Ollama
  firstlight train recipe.yaml              train with your own settings
  firstlight info                           show what this machine can do

All commands: firstlight --help. Options of a command: firstlight train --help.
"""


class _Verbs(click.Group):
    """Command group that contains all subcommands. If the user gives a file or folder instead of a
    subcommand, the error message suggests the subcommand `train`.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and Path(args[0]).exists():
            raise click.UsageError(
                f"{args[0]} is not a command; to train on it: firstlight train "
                f"{shlex.quote(args[0])}"
            )
        if args[0] == "help" and self.get_command(ctx, "help") is None:
            raise click.UsageError("use firstlight --help or firstlight COMMAND --help")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: firstlight train my_texts/ --budget 30m, then chat, serve, convert.",
)
@click.version_option(package_name="firstlight")
@click.pass_context
def firstlight(ctx: click.Context) -> None:
    """From raw text to your own language model."""
    if ctx.invoked_subcommand is None:
        write_out(_FIRST_STEPS)


for command in (
    data_group,
    tokenizer_group,
    prepare_command,
    plan_command,
    train_command,
    tune_command,
    eval_command,
    compare_command,
    generate_command,
    chat_command,
    serve_command,
    report_command,
    watch_command,
    dashboard_command,
    info_command,
    bench_group,
    convert_command,
    push_command,
    push_data_command,
    card_command,
):
    firstlight.add_command(command)


def main(
    arguments: Sequence[str] | None = None,
    command: click.Command = firstlight,
    program: str = "firstlight",
) -> int:
    """Run the command line.

    Args:
        arguments: command-line arguments. None to use the arguments of this process, in which case
            the process exits after this call.
        command: click command to run. Benchmarks in the source checkout pass their own command.
        program: program name that is shown in the help text.

    Returns:
        The exit code:

        - 0: success
        - 1: error
        - 2: invalid recipe or option
        - 3: the recipe to plan does not fit in memory
        - 75: the run was stopped early and saved a checkpoint
        - 76: the run diverged
        - 128 + n: the command was terminated by signal n (130 after Ctrl-C)
    """
    if arguments is not None:
        return _run(list(arguments), command, program)
    # Exclude all objects from garbage collection at exit, because collecting torch's objects would
    # take a third of a second.
    atexit.register(gc.freeze)
    try:
        exit_code = _run(sys.argv[1:], command, program)
    finally:
        # Ignore SIGINT, because Ctrl-C during Python's shutdown would otherwise print a traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    parts = sys.modules.get("firstlight.tokenizer.parts")
    trackers = sys.modules.get("firstlight.training.trackers")
    if (parts and parts.threads_of_library()) or (trackers and trackers.GIVEN_UP):
        # After a signal, a thread may still be running, or an experiment tracker may hang. Python's
        # shutdown would then wait for the thread or abort the process.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(exit_code)
    return exit_code


def _run(arguments: list[str], command: click.Command, program: str) -> int:
    """Run the command line, and return the exit code as described for `main`."""
    environment.set_for_command(_environment(arguments[:1]))
    as_json = "--json" in arguments
    again = _AFTER_INTERRUPTION.get(next(iter(arguments), ""), "")
    if 0 < _address_limit() < _LEAST_ADDRESSES and not {"-h", "--help"} & set(arguments):
        message = (
            f"the shell limits the address space to {_address_limit() / 1e9:.2f} GB (ulimit -v), "
            f"but torch alone needs {_LEAST_ADDRESSES / 1e9:.1f} GB: raise the limit"
        )
        return _fail(message, "MemoryError", 1, as_json)
    try:
        with cleaning_up_when_terminated(as_json=as_json, advice=again):
            exit_code: int | None = command.main(
                arguments, prog_name=program, standalone_mode=False
            )
    except FirstlightError as error:
        return _fail(str(error), type(error).__name__, error.exit_code, as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(_usage_error(error, program), "UsageError", 2, as_json)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _fail(f"interrupted{again}", "Interrupted", 130, as_json)
    except Terminated as signal_:
        return _fail("terminated", "Terminated", 128 + signal_.number, as_json)
    except BrokenPipeError:
        # The program that reads stdout has closed the pipe, as `head` does. Discard all further
        # output, including output at exit.
        discard_stdout()
        return 1
    except (MemoryError, OSError, RuntimeError, ImportError, SystemError) as error:
        if lacks_memory(error) or _follows_from_little_memory(error):
            return _fail(_out_of_memory(arguments, error), "MemoryError", 1, as_json)
        if not isinstance(error, OSError):
            raise
        return _fail(describe_os_error(error), "StorageError", 1, as_json)
    return exit_code or 0


def _usage_error(error: click.ClickException, program: str) -> str:
    """Return the message for an error in the command-line arguments. If an argument is missing, the
    message refers to the help text of the command.
    """
    if not isinstance(error, click.MissingParameter):
        return error.format_message()
    path = error.ctx.command_path if error.ctx is not None else program
    return f"{error.format_message().rstrip('.')}: see {path} --help"


def _follows_from_little_memory(error: BaseException) -> bool:
    """Return True if an error was most likely caused by a low address-space limit. The error
    message does not show this, because libraries can fail with any message when the limit is low.
    """
    is_other = isinstance(error, OSError | ModuleNotFoundError)
    return 0 < _address_limit() < _FEW_ADDRESSES and not is_other


def _address_limit() -> int:
    """Return the address-space limit of this process in bytes, as set by `ulimit -v`. Return 0 if
    there is no limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if limit == resource.RLIM_INFINITY else limit


def _out_of_memory(arguments: Sequence[str], error: BaseException) -> str:
    """Return the message for a command that ran out of memory."""
    advice = _LESS_MEMORY.get(next(iter(arguments), ""), "stop other programs, or use less data")
    if limit := _address_limit():
        advice = f"raise the shell's limit of {limit / 1e9:.2f} GB (ulimit -v), or {advice}"
    reason = " ".join(str(error).split())
    return f"out of memory: {advice}" + (f" ({reason[-200:]})" if reason else "")


def _environment(verb: Sequence[str]) -> dict[str, str]:
    """Return the environment variables to set for a subcommand, without those that the user has
    set."""
    if set(verb) & {"train", "plan", "tune", "eval"}:
        # `plan` and `tune` need the same environment variables as training. `plan` measures
        # operators under the same conditions, and `tune` trains models in its trials.
        return environment.for_training()
    return environment.for_generation() if set(verb) & set(_DECODING) else environment.SHORT_SPIN


def _fail(message: str, kind: str, exit_code: int, as_json: bool) -> int:
    """Print an error on stderr as one line. With --json, also print it on stdout as a JSON object.
    Return `exit_code`.
    """
    message = visible(" ".join(message.split()))
    print(f"firstlight: error: {message}", file=sys.stderr)  # noqa: T201
    if as_json:
        write_out(_json_error(kind, message))
    return exit_code


def _json_error(kind: str, message: str) -> str:
    return json.dumps({"error": {"type": kind, "message": message}}) + "\n"


if __name__ == "__main__":
    sys.exit(main())
