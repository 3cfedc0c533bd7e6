"""The table of known bugs that `make test-mutants` puts into the source still fits it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scale import FULL

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def mutants() -> Any:
    """The module `scripts/mutants.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_SCRIPTS))
        import mutants  # type: ignore[import-not-found]

        return mutants


def test_mutant_table_entries_apply_to_source(
    mutants: Any, record_property: Callable[[str, object], None]
) -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 30
    for mutant in mutants.MUTANTS:
        mutants.mutated(mutant)
        assert mutant.tests, mutant.name
    tests = {test for mutant in mutants.MUTANTS for test in mutant.tests}
    assert len(tests) >= 30
    record_property("cases", ("bugs of other trainers with a test that notices them", len(tests)))


@pytest.mark.parametrize(
    "change",
    [
        {"old": "a text that is nowhere"},
        {"old": "import"},
        {"new": "      wrongly indented"},
        {"file": "firstlight/nowhere.py"},
        {"tests": ("tests/faults/test_mutants.py::test_that_is_gone",)},
    ],
)
def test_mutant_table_stale_entry_raises(mutants: Any, change: dict[str, Any]) -> None:
    with pytest.raises(mutants.StaleTableError, match=r"times|is not Python|there is no"):
        mutants.mutated(mutants.MUTANTS[0]._replace(**change))


@pytest.mark.skipif(not FULL, reason="`make test-faults` and `make test-mutants` do it")
def test_mutant_runner_catches_bug_and_passes_harmless_change() -> None:
    """The runner itself, on a bug that is quickly tried and on a change that is none."""
    program = (
        "import sys, mutants\n"
        "real = next(m for m in mutants.MUTANTS if m.name == 'warm-up starts at zero')\n"
        "none = real._replace(name='no bug', new=real.old.replace('+ 1', '+ 1 * 1'))\n"
        "mutants.MUTANTS[:] = [real, none]\n"
        "sys.exit(mutants.main([]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_SCRIPTS, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "the source as it is: passes its tests" in done.stdout
    assert "warm-up starts at zero: caught" in done.stdout
    assert "1 of 2 known bugs caught (50 %)" in done.stdout
    assert "not caught: no bug" in done.stdout
