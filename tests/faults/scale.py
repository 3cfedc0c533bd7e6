"""Each test of faults draws a sample of its cases; `make test-faults` has it try them all."""

from __future__ import annotations

import os

FULL = os.environ.get("FIRSTLIGHT_FAULTS") == "full"


def cases(sample: int, full: int) -> int:
    """How many cases to try: `full` under `make test-faults`, else `sample`."""
    return full if FULL else sample
