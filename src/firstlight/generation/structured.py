"""Constrained decoding: each token of a text is chosen among the tokens that a JSON Schema allows.

The library llguidance computes the allowed tokens, in two separate processes (`grammar_process`):
the first tries each new schema before its text is begun; the second follows the texts that are
being generated. Running texts therefore never wait for a new schema that takes too long.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from firstlight.errors import FirstlightError, MissingDependencyError

#: Limits: seconds of processor time to try a new schema, seconds of processor time for a token, and
#: seconds of wall-clock time for either (on a busy machine).
_SCHEMA_SECONDS, _TOKEN_SECONDS, _LONGEST_SECONDS = 1.0, 1.0, 20.0
#: Limit of a process' memory, in bytes beyond what it has with the vocabulary loaded.
_MEMORY = 256 * 2**20
#: Greatest number of characters of a schema, and number of tokens that are tried with a new schema.
_LONGEST_SCHEMA, _TRIED_TOKENS = 2**16, 24
#: Greatest number of characters of llguidance's text in an error message.
_LONGEST_ERROR = 200


class SchemaError(FirstlightError):
    """A JSON Schema is not supported, or takes too much time or memory to follow."""


class Constraint(Protocol):
    """Interface of constraints on the tokens of one text."""

    def allowed(self, vocab_size: int) -> Tensor:
        """True for the tokens that may come next, bool [V] on the CPU; for end tokens if the text
        may end here."""

    def push(self, token_id: int) -> bool:
        """Add the token that was chosen; return True if the text is complete, so that no token can
        follow."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: bytes of each token, by id.
        special: ids of control tokens.
        ends: ids that end a text.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]


def can_structure() -> bool:
    """True if llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Creates constraints for texts of one vocabulary, and runs the two processes.

    Args:
        vocabulary: tokens of the model.

    Raises:
        MissingDependencyError: llguidance is not installed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not can_structure():
            raise MissingDependencyError("llguidance", "structured", "JSON by a schema")
        self._trying, self._following = _Process(vocabulary), _Process(vocabulary)
        self._numbers = itertools.count()
        self._tried = functools.lru_cache(maxsize=256)(self._try)

    def constraint(self, schema: dict[str, Any]) -> Constraint:
        """Create the constraint for one text that follows a schema. A new schema is tried first,
        which takes up to `_SCHEMA_SECONDS`.

        Raises:
            SchemaError: the schema is not supported, or takes too much time or memory.
        """
        text = json.dumps(schema, ensure_ascii=False)
        if len(text) > _LONGEST_SCHEMA:
            raise SchemaError(
                f"the schema has {len(text):,} characters, and {_LONGEST_SCHEMA:,} are the limit: "
                "shorten it"
            )
        problem = self._tried(text)
        if problem is not None:
            raise SchemaError(problem)
        self._following.start()
        return _SchemaConstraint(self._following, next(self._numbers), text)

    def _try(self, schema: str) -> str | None:
        """Reason why a schema can't be followed; None if it can."""
        request = {"text": 0, "tokens": [], "schema": schema, "walk": _TRIED_TOKENS}
        try:
            self._trying.ask(request, _SCHEMA_SECONDS)
        except SchemaError as error:
            return str(error)
        self._trying.forget(0)
        return None

    def close(self) -> None:
        """End the processes."""
        self._trying.close()
        self._following.close()


class _SchemaConstraint:
    """Constraint of one text by a schema; see `Constraint`.

    Args:
        process: process that follows the text.
        number: number of the text in that process.
        schema: the schema as JSON.
    """

    def __init__(self, process: _Process, number: int, schema: str) -> None:
        self._process, self._number, self._schema = process, number, schema
        self._tokens: list[int] = []
        self._mask: bytes | None = None
        #: Number of the start of the process that knows the text; 0 if none does.
        self._known_in = 0
        weakref.finalize(self, process.forget, number)

    def allowed(self, vocab_size: int) -> Tensor:
        """See `Constraint`."""
        if self._mask is None:
            self._follow([])
        assert self._mask is not None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")
        found = torch.zeros(vocab_size, dtype=torch.bool)
        count = min(vocab_size, len(bits))
        found[:count] = torch.from_numpy(bits[:count]).bool()
        return found

    def push(self, token_id: int) -> bool:
        """See `Constraint`."""
        self._tokens.append(token_id)
        return self._follow([token_id])

    def _follow(self, tokens: list[int]) -> bool:
        """Tell the process the new tokens and set `_mask`; return True if the text is complete."""
        with self._process.lock:
            request: dict[str, Any] = {"text": self._number, "tokens": tokens}
            if self._known_in != self._process.start():
                # The process does not know the text: it is new, or the process was started again
                # after the schema of another text had taken too much.
                request |= {"schema": self._schema, "tokens": self._tokens}
                self._known_in = self._process.start()
            found, self._mask = self._process.ask(request, _TOKEN_SECONDS)
        return bool(found["complete"])


class _Process:
    """A `grammar_process`, which is killed if a request takes too much, and then started again.

    Args:
        vocabulary: tokens of the model.

    Attributes:
        lock: lock that is held during a request.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.lock = threading.RLock()
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._forgotten: list[int] = []
        self._closed = False

    def start(self) -> int:
        """Start the process if it does not run; return the number of starts so far."""
        with self.lock:
            if self._process is None and not self._closed:
                script = Path(__file__).with_name("grammar_process.py")
                # -P keeps the script's folder off `sys.path`, where its modules would hide others.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._starts += 1
                vocabulary = self._vocabulary
                first = {
                    "tokens": [*(token.hex() for token in vocabulary.tokens), b"<end>".hex()],
                    "special": [*vocabulary.special, len(vocabulary.tokens)],
                    "ends": list(vocabulary.ends),
                    "memory": _MEMORY,
                }
                self._exchange(first, _LONGEST_SECONDS)
            return self._starts

    def ask(self, request: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """Send a request; return the answer and its mask (see `grammar_process`).

        Args:
            request: the request.
            seconds: limit of processor time for it.

        Raises:
            SchemaError: the schema is not understood, or takes too much time or memory.
        """
        with self.lock:
            self.start()
            forgotten, self._forgotten = self._forgotten, []
            found, mask = self._exchange({**request, "forget": forgotten}, seconds)
        if "error" in found:
            reason = " ".join(str(found["error"]).replace("<non-verbose/>", "").split())
            raise SchemaError(f"the schema can't be followed: {reason[:_LONGEST_ERROR]}")
        return found, mask

    def forget(self, number: int) -> None:
        """Note that a text has ended; the process learns it with the next request."""
        self._forgotten.append(number)

    def close(self) -> None:
        """End the process; it is not started again."""
        with self.lock:
            self._closed = True
            self._end()

    def _exchange(self, request: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        process = self._process
        try:
            if process is None:
                raise EOFError
            assert process.stdin is not None
            reader = _Reader(process, seconds)
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            found = json.loads(reader.line())
            return found, reader.exactly(found.get("mask", 0))
        except (OSError, EOFError, psutil.Error):
            self._end()
            raise SchemaError(
                "the schema takes too much time or memory to follow: simplify it"
            ) from None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # closing writes what is buffered
                    pipe.close()
            self._process = None


class _Reader:
    """Reads one answer of a process, with a limit of processor time and of wall-clock time
    (`_LONGEST_SECONDS`).

    Args:
        process: the process, before it gets the request.
        seconds: limit of processor time.
    """

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        assert process.stdout is not None
        self._file = process.stdout.fileno()
        self._watched = psutil.Process(process.pid)
        self._busy_until = self._busy() + seconds
        self._until = time.monotonic() + _LONGEST_SECONDS
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN | select.POLLHUP)
        self._held = b""

    def _busy(self) -> float:
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def line(self) -> bytes:
        """Read up to the next newline, which is left out.

        Raises:
            TimeoutError: a limit is exceeded.
            EOFError: the process has ended.
        """
        while b"\n" not in self._held:
            self._more()
        found, _, self._held = self._held.partition(b"\n")
        return found

    def exactly(self, count: int) -> bytes:
        """Read `count` bytes; raises like `line`."""
        while len(self._held) < count:
            self._more()
        return self._held

    def _more(self) -> None:
        while not self._poll.poll(100):
            if time.monotonic() > self._until or self._busy() > self._busy_until:
                raise TimeoutError
        content = os.read(self._file, 2**20)
        if not content:
            raise EOFError
        self._held += content
