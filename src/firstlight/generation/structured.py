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
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from firstlight.errors import FirstlightError, MissingDependencyError
from firstlight.files.limits import LimitedProcess, LimitExceededError

#: Limits: seconds of processor time to try a new schema, and for a token.
_SCHEMA_SECONDS, _TOKEN_SECONDS = 1.0, 1.0
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
        self._process = process
        self._number = number
        self._schema = schema
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
            complete, self._mask = self._process.ask(request, _TOKEN_SECONDS)
        return complete


class _Process:
    """A process that follows texts: see `grammar_process`.

    Args:
        vocabulary: tokens of the model.

    Attributes:
        close: end the process.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [*(token.hex() for token in vocabulary.tokens), b"<end>".hex()]
        special = [*vocabulary.special, len(vocabulary.tokens)]
        self._limited = LimitedProcess(
            "firstlight.generation.grammar_process:Matchers",
            (tokens, special, list(vocabulary.ends)),
            memory=_MEMORY,
        )
        self.close = self._limited.close
        self._forgotten: list[int] = []

    @property
    def lock(self) -> threading.RLock:
        """Lock that is held during a request."""
        return self._limited.lock

    def start(self) -> int:
        """Start the process if it does not run; return the number of starts so far."""
        with _schema_limits():
            return self._limited.start()

    def ask(self, request: dict[str, Any], seconds: float) -> tuple[bool, bytes]:
        """Send a request; return whether the text is complete, and the mask of the tokens that may
        follow (see `grammar_process`).

        Args:
            request: the request.
            seconds: limit of processor time for it.

        Raises:
            SchemaError: the schema is not understood, or takes too much time or memory.
        """
        with self.lock, _schema_limits():
            forgotten, self._forgotten = self._forgotten, []
            found = self._limited.call({**request, "forget": forgotten}, seconds=seconds)
        if "error" in found:
            reason = " ".join(str(found["error"]).replace("<non-verbose/>", "").split())
            raise SchemaError(f"the schema can't be followed: {reason[:_LONGEST_ERROR]}")
        return found["complete"], bytes.fromhex(found["mask"])

    def forget(self, number: int) -> None:
        """Note that a text has ended; the process learns it with the next request."""
        self._forgotten.append(number)


@contextlib.contextmanager
def _schema_limits() -> Iterator[None]:
    try:
        yield
    except LimitExceededError:
        raise SchemaError(
            "the schema takes too much time or memory to follow: simplify it"
        ) from None
