"""Texts that follow a JSON Schema: each next token is chosen among those that the schema allows.

The schema is llguidance's work, in processes of their own (`grammar_process`): one tries each new
schema before its text is begun, another follows the texts, so that no text waits for a schema that
takes too long.
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

#: Seconds of processor time that a schema may take until its first tokens are known, and then a
#: token; seconds by the clock, where the machine has other things to do; bytes of memory.
_SCHEMA_SECONDS, _TOKEN_SECONDS, _LONGEST_SECONDS = 1.0, 1.0, 20.0
_MEMORY = 256 * 2**20
#: A schema's characters, and the tokens that are tried of a new one.
_LONGEST_SCHEMA, _TRIED_TOKENS = 2**16, 24
_LONGEST_ERROR = 200


class SchemaError(FirstlightError):
    """A JSON Schema that can't be followed: not understood, or too much work."""


class Constraint(Protocol):
    """A constraint on the tokens of a text."""

    def allowed(self, vocab_size: int) -> Tensor:
        """Mask of the tokens that may come next, bool [V] on the CPU; end tokens may if the text
        is complete."""

    def push(self, token_id: int) -> bool:
        """Count a token that was chosen; return whether the text is complete, and nothing can come
        after it."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: the bytes of each id.
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
    """Makes the constraints of texts with one vocabulary.

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
        """Constraint that makes one text follow a schema. Takes up to a second for a new schema.

        Raises:
            SchemaError: the schema is not supported.
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
        """Why a schema can't be followed, if so."""
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
    """One text that follows a schema.

    Args:
        process: process that follows it.
        number: number of the text in that process.
        schema: the schema as JSON.
    """

    def __init__(self, process: _Process, number: int, schema: str) -> None:
        self._process, self._number, self._schema = process, number, schema
        self._tokens: list[int] = []
        self._mask: bytes | None = None
        #: The number of the process' start in which the text is known.
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
        with self._process.lock:
            request: dict[str, Any] = {"text": self._number, "tokens": tokens}
            if self._known_in != self._process.start():
                # It is new there, or another text's schema has ended the process.
                request |= {"schema": self._schema, "tokens": self._tokens}
                self._known_in = self._process.start()
            found, self._mask = self._process.ask(request, _TOKEN_SECONDS)
        return bool(found["complete"])


class _Process:
    """`grammar_process`, which is started again after it had to be ended.

    Attributes:
        lock: held while a request is answered.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.lock = threading.RLock()
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._forgotten: list[int] = []
        self._closed = False

    def start(self) -> int:
        """Start the process if it does not run; return the number of starts."""
        with self.lock:
            if self._process is None and not self._closed:
                script = Path(__file__).with_name("grammar_process.py")
                # -P: the modules beside the script are not to be found by their names.
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
        """The answer to a request, and its mask.

        Args:
            seconds: limit of its processor time.

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
        """A text is over."""
        self._forgotten.append(number)

    def close(self) -> None:
        """End it for good."""
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
                with contextlib.suppress(OSError):  # what was not written is not wanted
                    pipe.close()
            self._process = None


class _Reader:
    """Reader of a process's answer, which limits the processor time of the answer.

    Args:
        process: asked once.
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
        """Up to a newline."""
        while b"\n" not in self._held:
            self._more()
        found, _, self._held = self._held.partition(b"\n")
        return found

    def exactly(self, count: int) -> bytes:
        """So many bytes."""
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
