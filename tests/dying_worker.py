"""A tokenizing process that is killed: in a module that a new process can import by its name."""

from __future__ import annotations

import os
import signal
from typing import Any

from firstlight.data import encoding


def work_or_die(end: Any) -> None:
    """What a process does that has no memory for one document of the corpus."""
    real = encoding.encode

    def encode(texts: list[str], tokenizer: Any) -> list[Any]:
        if any("fatal" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(texts, tokenizer)

    encoding.encode = encode  # type: ignore[assignment]
    encoding._work(end)
