"""The speed of a run beside two busy programs, from the command line and from Python."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_BUSY = Path(__file__).parents[2] / "scripts" / "busy.py"
_STEPS, _SIZE = 100_000, "tiny"
_TRAIN = f"firstlight.train_texts('text.txt', steps={_STEPS}, size={_SIZE!r}, run_dir="
#: Arguments of Python for a run in the folder of that name.
_ENTRIES = {
    "command": [
        *("-m", "firstlight", "train", "text.txt", "--steps", str(_STEPS), "--size", _SIZE),
        *("--run.dir", "command"),
    ],
    "script": ["-c", f"import firstlight; {_TRAIN}'script')"],
    # As in notebooks, whose first cell imports torch.
    "notebook": ["-c", f"import torch; import firstlight; {_TRAIN}'notebook')"],
}
#: Turns of each run, and seconds of a turn.
_TURNS, _TURN_SECONDS = 20, 2.0


@contextlib.contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process in a folder, killed at the end, with the variables of a new shell."""
    ours = ("GOMP_", "OMP_", "FIRSTLIGHT_SPIN")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    with (
        open(folder / "log.txt", "ab") as log,
        subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=variables, stdout=log, stderr=log
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def steps_of(run: Path) -> int:
    """The number of steps of a run so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform != "linux", reason="busy cores are recognised on Linux")
def test_steps_beside_two_busy_programs_are_equal_for_each_entry_point(tmp_path: Path) -> None:
    words = random.Random(0).choices("the cat sat on a mat and saw one red bird".split(), k=40_000)
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    counts = dict.fromkeys(_ENTRIES, 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running([str(_BUSY), "2"], tmp_path))
        processes = {}
        for name, arguments in _ENTRIES.items():
            processes[name] = stack.enter_context(running(arguments, tmp_path))
            while steps_of(tmp_path / name) < 5:
                assert processes[name].poll() is None, (tmp_path / "log.txt").read_text()
                time.sleep(0.2)
            processes[name].send_signal(signal.SIGSTOP)
        # In turns, so that what else the machine does is the same for all.
        for _ in range(_TURNS):
            for name, process in processes.items():
                before = steps_of(tmp_path / name)
                process.send_signal(signal.SIGCONT)
                time.sleep(_TURN_SECONDS)
                process.send_signal(signal.SIGSTOP)
                counts[name] += steps_of(tmp_path / name) - before
    assert counts["script"] == pytest.approx(counts["command"], rel=0.2), counts
    assert counts["notebook"] == pytest.approx(counts["command"], rel=0.2), counts
