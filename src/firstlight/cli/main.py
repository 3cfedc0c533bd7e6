"""The entry point: `firstlight VERB ...`. Every error for people is one line."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence

import click

from firstlight.cli.bench import bench_group
from firstlight.cli.chat import chat_command
from firstlight.cli.convert import convert_command
from firstlight.cli.eval import eval_command
from firstlight.cli.generate import generate_command
from firstlight.cli.info import info_command
from firstlight.cli.output import discard_stdout, write_out
from firstlight.cli.plan import plan_command
from firstlight.cli.prepare import prepare_command
from firstlight.cli.report import report_command
from firstlight.cli.serve import serve_command
from firstlight.cli.termination import Terminated, cleaning_up_when_terminated
from firstlight.cli.tokenizer import tokenizer_group
from firstlight.cli.train import train_command
from firstlight.errors import FirstlightError, describe_os_error
from firstlight.hardware import environment

#: Verbs whose work is the decoding of tokens.
_DECODING = ("generate", "chat", "serve")

_OUT_OF_MEMORY = "out of memory: in training, lower batch.micro_batch_size or data.seq_len"


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: firstlight tokenizer train, prepare, plan, train, eval, chat.",
)
@click.version_option(package_name="firstlight")
def firstlight() -> None:
    """From raw text to your own language model."""


for command in (
    tokenizer_group,
    prepare_command,
    plan_command,
    train_command,
    eval_command,
    generate_command,
    chat_command,
    serve_command,
    report_command,
    info_command,
    bench_group,
    convert_command,
):
    firstlight.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0 done; 1 an error; 2 an invalid recipe or option; 3 a plan of a recipe that does not
    fit; 75 a training run that was stopped early and saved; 76 one that diverged; 130 interrupted;
    129, 138 or 143 terminated by SIGHUP, SIGUSR1 or SIGTERM.
    """
    if arguments is None:
        # The process ends with this: to look for cycles among all that torch imported takes a
        # third of a second.
        atexit.register(gc.freeze)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name, value in _environment(arguments[:1]).items():
        os.environ.setdefault(name, value)
    as_json = "--json" in arguments
    try:
        with cleaning_up_when_terminated():
            exit_code: int | None = firstlight.main(
                arguments, prog_name="firstlight", standalone_mode=False
            )
    except FirstlightError as error:
        return _fail(str(error), type(error).__name__, error.exit_code, as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.MissingParameter as error:
        command = error.ctx.command_path if error.ctx is not None else "firstlight"
        what = error.format_message().rstrip(".")
        return _fail(f"{what}: see {command} --help", "UsageError", 2, as_json)
    except click.ClickException as error:
        return _fail(error.format_message(), "UsageError", 2, as_json)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", "Interrupted", 130, as_json)
    except Terminated as signal_:
        return _fail("terminated", "Terminated", 128 + signal_.number, as_json)
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); say nothing, also not while closing.
        discard_stdout()
        return 1
    except OSError as error:
        return _fail(describe_os_error(error), "StorageError", 1, as_json)
    except MemoryError:
        return _fail(_OUT_OF_MEMORY, "MemoryError", 1, as_json)
    except RuntimeError as error:
        # torch's out-of-memory errors; torch itself may not be imported here.
        words = ("out of memory", "can't allocate memory", "not enough memory")
        if not any(part in str(error).lower() for part in words):
            raise
        return _fail(_OUT_OF_MEMORY, "MemoryError", 1, as_json)
    return exit_code or 0


def _environment(verb: Sequence[str]) -> dict[str, str]:
    """Environment variables of a verb, unless they are set."""
    if set(verb) & {"train", "plan"}:
        # A plan times operators as training runs them.
        return environment.TRAINING
    return environment.for_generation() if set(verb) & set(_DECODING) else environment.SHORT_SPIN


def _fail(message: str, kind: str, exit_code: int, as_json: bool) -> int:
    """Print an error as one line, and with --json as the one object on stdout."""
    message = " ".join(message.split())
    print(f"firstlight: error: {message}", file=sys.stderr)  # noqa: T201
    if as_json:
        write_out(json.dumps({"error": {"type": kind, "message": message}}) + "\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
