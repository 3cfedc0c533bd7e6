"""Insert known bugs, one at a time, into a copy of the source, and check that their tests fail.

    python scripts/mutants.py           all
    python scripts/mutants.py NAME...   these
    python scripts/mutants.py --check   only check that the table matches the source

The table is `mutant_table.py`. Each mutant's tests run in a separate forked process, which imports
firstlight from the copy. The tests must first pass on the unchanged source. Exits with 1 if fewer
than 95 % of the mutants are caught, or if the table is stale.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutant_table import MUTANTS, Mutant

REPOSITORY = Path(__file__).resolve().parents[1]
SHARE_TO_CATCH = 0.95
#: Time limit of a mutant's tests; a bug may also make them wait forever.
_MAX_SECONDS = 150

#: Exit codes of pytest.
_PASSED, _FAILED = 0, 1


class StaleTableError(Exception):
    """An entry of the table no longer matches the source."""


def mutated(mutant: Mutant) -> str:
    """Return the file of a mutant with its bug.

    Raises:
        StaleTableError: the text to be replaced does not occur exactly once, the result is not
            valid Python, or a test no longer exists.
    """
    path = REPOSITORY / "src" / mutant.file
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    count = content.count(mutant.old)
    if count != 1:
        raise StaleTableError(f"{mutant.name}: {mutant.file} has its text {count} times")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if f"def {name}(" not in (REPOSITORY / file).read_text(encoding="utf-8"):
            raise StaleTableError(f"{mutant.name}: there is no {test}")
    result = content.replace(mutant.old, mutant.new)
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise StaleTableError(f"{mutant.name}: {mutant.file} is not Python: {error}") from None
    return result


@dataclass
class Slot:
    """A copy of the source in which one mutant at a time is tested."""

    folder: Path
    mutant: Mutant | None = None
    pid: int = 0
    started: float = 0.0

    def start(self, mutant: Mutant | None, tests: Sequence[str]) -> None:
        """Insert a bug into the copy, and fork the process that runs the tests."""
        self.mutant, self.started = mutant, time.monotonic()
        if mutant is not None:
            (self.folder / "src" / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                code = _run_tests(self.folder, tests)
            finally:
                # The parent's work must not be repeated here.
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                os._exit(code)

    def finish(self) -> float:
        """Restore the file, and return the seconds that the tests took."""
        if self.mutant is not None:
            original = REPOSITORY / "src" / self.mutant.file
            shutil.copy2(original, self.folder / "src" / self.mutant.file)
        self.pid = 0
        return time.monotonic() - self.started


def _run_tests(folder: Path, tests: Sequence[str]) -> int:
    """Run the tests in a separate process, and return pytest's exit code with firstlight from the
    copy.
    """
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.dont_write_bytecode = True
    # This includes processes started by the tests, because the copies compile to the same names.
    os.environ["PYTHONPATH"] = str(folder / "src")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Tests of CUDA code run as on a machine without a GPU.
    os.environ["FIRSTLIGHT_TEST_DEVICE"] = "cpu"
    sys.path.insert(0, str(folder / "src"))
    os.chdir(REPOSITORY)
    import pytest

    options = ["-x", "-p", "no:cacheprovider", "--timeout", "120", "-m", "not slow"]
    code = int(pytest.main([*options, "--basetemp", str(folder / "tests"), *tests]))
    found = sys.modules["firstlight"].__file__ if "firstlight" in sys.modules else None
    if found is None or not Path(found).is_relative_to(folder):
        print(f"firstlight was imported from {found}")
        return 71
    return code


def _preload() -> None:
    """Import everything that each process would otherwise import, except firstlight and the modules
    that pytest rewrites.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    import jinja2.sandbox  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import rich.progress  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401

    assert "firstlight" not in sys.modules


def _exit_code(slot: Slot, status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def run(mutants: Sequence[Mutant], slots: Sequence[Slot]) -> list[str]:
    """Test the unchanged source and then each mutant; return the names of those not caught."""
    every_test = sorted({test for mutant in mutants for test in mutant.tests})
    waiting: list[tuple[Mutant | None, Sequence[str]]] = [(None, every_test)]
    waiting += [(mutant, mutant.tests) for mutant in mutants]
    survived: list[str] = []
    while waiting or any(slot.pid for slot in slots):
        for slot in slots:
            if not slot.pid and waiting:
                slot.start(*waiting.pop(0))
        time.sleep(0.05)
        for slot in slots:
            if not slot.pid:
                continue
            pid, status = os.waitpid(slot.pid, os.WNOHANG)
            limit = _MAX_SECONDS if slot.mutant is not None else 10 * _MAX_SECONDS
            if not pid and time.monotonic() - slot.started > limit:
                os.kill(slot.pid, signal.SIGKILL)
                continue
            if pid and not _report(slot, _exit_code(slot, status)):
                assert slot.mutant is None or slot.mutant in mutants
                survived.append("" if slot.mutant is None else slot.mutant.name)
    return survived


def _report(slot: Slot, code: int) -> bool:
    """Print the result of a mutant, and return True if it is as expected."""
    mutant, seconds = slot.mutant, slot.finish()
    wanted = _PASSED if mutant is None else _FAILED
    name = "the source as it is" if mutant is None else mutant.name
    words = {_PASSED: "passes its tests", _FAILED: "caught"}
    if mutant is None:
        words[_FAILED] = "FAILS TESTS"
    print(f"{seconds:6.1f} s  {name}: {words.get(code, f'BROKEN (exit code {code})')}", flush=True)
    if code != wanted:
        log = (slot.folder / "log").read_text(encoding="utf-8", errors="replace")
        print("\n".join(f"           {line}" for line in log.splitlines()[-25:]))
    return code == wanted


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    stale = []
    for mutant in MUTANTS:
        try:
            mutated(mutant)
        except StaleTableError as error:
            stale.append(str(error))
    if stale:
        print("stale table:", *stale, sep="\n  ")
        return 1
    if "--check" in arguments:
        return 0
    mutants = [mutant for mutant in MUTANTS if not arguments or mutant.name in arguments]
    if not mutants:
        print(f"no such mutant; there are {', '.join(mutant.name for mutant in MUTANTS)}")
        return 2
    _preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        slots = [Slot(Path(name) / str(number)) for number in range(min(os.cpu_count() or 1, 4))]
        for slot in slots:
            # Includes the compiled files, with their times, so that they stay valid.
            shutil.copytree(REPOSITORY / "src" / "firstlight", slot.folder / "src" / "firstlight")
        survived = run(mutants, slots)
    if "" in survived:
        print("tests fail on the source as it is: what is caught says nothing")
        return 1
    caught = len(mutants) - len(survived)
    print(f"{caught} of {len(mutants)} known bugs caught ({100 * caught / len(mutants):.0f} %)")
    if survived:
        print(f"not caught: {', '.join(survived)}")
    return 0 if caught >= SHARE_TO_CATCH * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
