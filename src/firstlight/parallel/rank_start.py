"""Script that starts a rank. `elastic.launch` runs it as follows:

    python -I -S rank_start.py FOLDER LAUNCHER_PID COMMAND...

The script first makes the kernel kill this process when its launcher (torch's agent) ends for any
reason. It redirects the output of ranks other than 0 to a file in FOLDER, which the launcher reads
if the rank fails. Finally, it replaces this process with COMMAND. The script imports only the
standard library, because the time that imports take delays the start of every rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

#: Option of Linux's `prctl` that sets the signal to send to this process when its parent ends.
_PR_SET_PDEATHSIG = 1


def become_rank(folder: Path, launcher: int, command: list[str]) -> None:
    """Make the kernel end this process when its launcher ends, redirect the output of this process,
    and run the command.

    Args:
        folder: folder for the output of ranks other than 0.
        launcher: process id of the launcher.
        command: full path of the program, and its arguments. It replaces this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(1)  # The launcher ended before `prctl` was called.
    if (rank := os.environ["RANK"]) != "0":
        said = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(said, stream)
        os.close(said)
    os.execv(command[0], command)


if __name__ == "__main__":
    become_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
