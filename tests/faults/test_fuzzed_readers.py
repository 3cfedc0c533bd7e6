"""Readers of files from strangers, fuzzed: the cases that were found, and a search for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_readers import READERS, read
from scale import FULL

_HERE = Path(__file__).parent
_CORPUS = _HERE / "corpus"
_SECONDS = 60


@pytest.mark.parametrize("reader", READERS)
def test_reader_inputs_found_by_fuzzing_raise_one_line_or_are_read(reader: str) -> None:
    kept = sorted((_CORPUS / reader).iterdir())
    assert kept
    for path in kept:
        read(reader, path.read_bytes())


@pytest.mark.skipif(not FULL, reason="a minute for each reader: make test-faults")
@pytest.mark.parametrize("reader", READERS)
def test_reader_fuzzed_raises_only_its_own_errors(reader: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    done = subprocess.run(
        [sys.executable, _HERE / "fuzz_readers.py", reader, str(_SECONDS), tmp_path,
         _CORPUS / reader],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS + 240,
    )  # fmt: skip
    assert done.returncode == 0, f"keep {tmp_path} in {_CORPUS / reader}: {done.stderr[-3000:]}"
