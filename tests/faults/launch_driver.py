"""A launcher of a test: `python launch_driver.py OPTIONS COMMAND...`, both as JSON.

Its ranks are forks of it, which spares each of them the import of torch.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from firstlight.console import say
from firstlight.errors import FirstlightError
from firstlight.parallel import rank_start
from firstlight.parallel.elastic import Launch, launch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import forked


def _become_rank(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do in a fork what the command of a rank does: `rank_start`, which then runs a Python file."""
    request = {
        "parent": os.getppid(),
        "session": False,
        "group": None,
        "cores": sorted(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
        "numbers": [0, 1, 2],
        "environment": dict(environment),
        "ignored": [],
        "mask": [],
        "command": list(command),
    }
    # Above these are the launcher's own files, and the pipe by which `Popen` hears of the fork.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # The launcher's own folder is not the rank's to delete.
    atexit._clear()
    main = forked._become(request, [0, 1, 2])
    logging.disable(logging.NOTSET)

    def run(_: str, rank: list[str]) -> NoReturn:
        forked._set_title(" ".join(rank))
        forked._end(forked._code_of(rank, main))
        raise AssertionError("the process has ended")

    os.execv = run  # type: ignore[assignment]
    _, _, _, _, folder, launcher, *rank = command
    rank_start.become_rank(Path(folder), int(launcher), rank)
    raise AssertionError("the process has become another")


class _Popen(forked.RealPopen[Any]):
    """`subprocess.Popen` of a rank that is a fork: it never comes to run the command."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        super().__init__(args, env=env, preexec_fn=lambda: _become_rank(args, env), **options)


if __name__ == "__main__":
    setattr(subprocess_handler, "Popen", _Popen)  # noqa: B010 - mypy
    try:
        options = Launch(**json.loads(sys.argv[1]))
        sys.exit(launch(json.loads(sys.argv[2]), options, ["--resume"]))
    except FirstlightError as error:
        say(f"firstlight: error: {error}")
        sys.exit(error.exit_code)
