"""Constrained decoding: each token is chosen only from the tokens that a JSON Schema allows.

The llguidance library computes the allowed tokens. Some schemas make it use unlimited time and
memory, so it runs in two child processes with limits (see `files.limits`). One process tries out
each new schema before generation starts. The other process tracks the sequences that are being
generated. These sequences therefore never have to wait for a slow new schema.

torch and numpy are imported inside functions, because the child processes do not need them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firstlight.errors import FirstlightError, MissingDependencyError
from firstlight.files.limits import LimitedProcess, LimitExceededError

if TYPE_CHECKING:
    from torch import Tensor

#: CPU time limits for trying out a new schema and for each token, in seconds.
_SCHEMA_SECONDS, _TOKEN_SECONDS = 1.0, 1.0
#: Memory limit of each process in bytes, not including the loaded vocabulary.
_MEMORY = 256 * 2**20
#: Maximum length of a schema in characters, and number of tokens that are generated to try out a
#: new schema.
_LONGEST_SCHEMA, _TRIED_TOKENS = 2**16, 24
#: Maximum number of characters of llguidance's message that are quoted in an error message.
_LONGEST_ERROR = 200


class SchemaError(FirstlightError):
    """Raised if a JSON Schema is not supported, or takes too much time or memory to follow."""


@dataclass(frozen=True)
class Vocabulary:
    """Token vocabulary of a model.

    Attributes:
        tokens: bytes of each token, indexed by id.
        special: ids of control tokens.
        ends: ids of the end-of-text tokens.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]


def can_structure() -> bool:
    """Return True if llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Creates constraints for sequences that share a vocabulary, and manages the two child
    processes.

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
        """Create a constraint that makes a single sequence follow a schema. A new schema is tried
        out first, which takes at most `_SCHEMA_SECONDS`.

        Raises:
            SchemaError: the schema is not supported, or takes too much time or memory.
        """
        text = json.dumps(schema, ensure_ascii=False)
        if len(text) > _LONGEST_SCHEMA:
            raise SchemaError(
                f"the schema has {len(text):,} characters, but the limit is {_LONGEST_SCHEMA:,}: "
                "shorten it"
            )
        problem = self._tried(text)
        if problem is not None:
            raise SchemaError(problem)
        self._following.start()
        return Constraint(self._following, next(self._numbers), text)

    def _try(self, schema: str) -> str | None:
        """Return the reason why a schema can't be followed, or None if it can."""
        request = {"text": 0, "tokens": [], "schema": schema, "walk": _TRIED_TOKENS}
        try:
            self._trying.ask(request, _SCHEMA_SECONDS)
        except SchemaError as error:
            return str(error)
        self._trying.note_end(0)
        return None

    def close(self) -> None:
        """Stop the processes."""
        self._trying.close()
        self._following.close()


class Constraint:
    """Constraint that a schema imposes on the tokens of one sequence.

    Args:
        process: the child process that tracks the sequence.
        number: number that identifies the sequence in this process.
        schema: the schema as JSON.
    """

    def __init__(self, process: _Process, number: int, schema: str) -> None:
        self._process = process
        self._number = number
        self._schema = schema
        self._tokens: list[int] = []
        self._mask: bytes | None = None
        #: Result of `_Process.start` at the time when the sequence was sent to the process, or 0 if
        #: it has not been sent yet.
        self._known_in = 0
        weakref.finalize(self, process.note_end, number)

    def allowed(self, vocab_size: int) -> Tensor:
        """Return a bool mask [V] on the CPU, which is True for the tokens that are allowed next. If
        the sequence can end here, the mask includes the end tokens.
        """
        import numpy as np
        import torch

        if self._mask is None:
            self._follow([])
        assert self._mask is not None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")
        found = torch.zeros(vocab_size, dtype=torch.bool)
        count = min(vocab_size, len(bits))
        found[:count] = torch.from_numpy(bits[:count]).bool()
        return found

    def push(self, token_id: int) -> bool:
        """Add the chosen token. Return True if the sequence is complete, so that no token can
        follow.
        """
        self._tokens.append(token_id)
        return self._follow([token_id])

    def _follow(self, tokens: list[int]) -> bool:
        """Send the new tokens to the child process and set `_mask`. Return True if the sequence is
        complete.
        """
        with self._process.lock:
            request: dict[str, Any] = {"text": self._number, "tokens": tokens}
            if self._known_in != self._process.start():
                # The process does not know the sequence. Either the sequence is new, or the process
                # was restarted after a different schema exceeded a limit.
                request |= {"schema": self._schema, "tokens": self._tokens}
                self._known_in = self._process.start()
            complete, self._mask = self._process.ask(request, _TOKEN_SECONDS)
        return complete


class _Process(LimitedProcess):
    """Child process that tracks sequences and computes the allowed tokens with `Matchers`.

    Args:
        vocabulary: tokens of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [*(token.hex() for token in vocabulary.tokens), b"<end>".hex()]
        special = [*vocabulary.special, len(vocabulary.tokens)]
        super().__init__(
            "firstlight.generation.structured:Matchers",
            (tokens, special, list(vocabulary.ends)),
            memory=_MEMORY,
        )
        self._ended: list[int] = []

    def start(self) -> int:
        """Start the process if it is not running. Return the number of times it has been started so
        far.
        """
        with _schema_limits():
            return super().start()

    def ask(self, request: dict[str, Any], seconds: float) -> tuple[bool, bytes]:
        """Send a request. Return whether the sequence is complete, and the mask of the tokens that
        are allowed next (see `Matchers`).

        Args:
            request: the request.
            seconds: CPU time limit for the request.

        Raises:
            SchemaError: the schema is not supported, or takes too much time or memory.
        """
        with self.lock, _schema_limits():
            ended, self._ended = self._ended, []
            found = self.call({**request, "forget": ended}, seconds=seconds)
        if "error" in found:
            reason = " ".join(str(found["error"]).replace("<non-verbose/>", "").split())
            raise SchemaError(f"the schema can't be followed: {reason[:_LONGEST_ERROR]}")
        return found["complete"], bytes.fromhex(found["mask"])

    def note_end(self, number: int) -> None:
        """Record that a sequence has ended. The process is notified with the next request."""
        self._ended.append(number)


@contextlib.contextmanager
def _schema_limits() -> Iterator[None]:
    try:
        yield
    except LimitExceededError:
        raise SchemaError(
            "the schema takes too much time or memory to follow: simplify it"
        ) from None


#: Allow at most one space between the elements of an object or array, so that a model can't write
#: endless whitespace.
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
#: Options that override the options in a schema (`x-guidance`). `lenient` is off, so that keywords
#: that llguidance does not support raise errors.
_OPTIONS = {**_SEPARATORS, "whitespace_pattern": None, "lenient": False, "coerce_one_of": False}

#: Limits that llguidance applies to one schema (see its `ParserLimits`).
_LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


class _Vocabulary:
    """The vocabulary in the form that llguidance requires.

    Args:
        tokens: hexadecimal bytes of each token, indexed by id. The last one is an additional end
            token that is not in the model's vocabulary.
        special: ids of control tokens, which do not represent text.
    """

    def __init__(self, tokens: list[str], special: list[int]) -> None:
        self.tokens = [bytes.fromhex(token) for token in tokens]
        self.special_token_ids = special
        self.eos_token_id, self.bos_token_id = len(tokens) - 1, None
        self.is_tokenizer_wrapper = True
        controls = set(special)
        plain = [(token, i) for i, token in enumerate(self.tokens) if i not in controls]
        self._ids = {token: i for token, i in reversed(plain) if token}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode text by choosing the longest matching token at each position. llguidance does not
        need the exact ids that the tokenizer would return.
        """
        content = text.encode() if isinstance(text, str) else text
        found, place = [], 0
        while place < len(content):
            for end in range(min(place + self._longest, len(content)), place, -1):
                if content[place:end] in self._ids:
                    found.append(self._ids[content[place:end]])
                    break
            else:
                end = place + 1  # No token matches, so skip one byte.
            place = end
        return found


class Matchers:
    """The llguidance matchers of all sequences that follow a schema, keyed by the numbers of the
    sequences.

    Args:
        tokens, special: tokens of the vocabulary (see `_Vocabulary`).
        ends: ids of the end-of-text tokens.
    """

    def __init__(self, tokens: list[str], special: list[int], ends: list[int]) -> None:
        import llguidance

        vocabulary = _Vocabulary(tokens, special)
        ends = [vocabulary.eos_token_id, *ends]
        count = len(vocabulary.tokens)
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary,  # type: ignore[arg-type]
            n_vocab=count,
            eos_token=ends,
            slices=[],
        )
        self._matchers: dict[int, Any] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request.

        Args:
            request: a dict. `text` is the number of the sequence, and `tokens` contains its new
                tokens. All other keys are optional: `schema` is the schema as JSON, if the sequence
                is new to this process. `walk` is a number of tokens to generate at random. `forget`
                contains the numbers of sequences that have ended.

        Returns:
            `{"error": str}`, or `{"complete": bool, "mask": str}`. The mask has one bit per token
            id, which is set if the token is allowed next. The lowest bit of each byte comes first.
            The mask is encoded in hexadecimal. It is empty if no token can follow.
        """
        for number in request.get("forget", ()):
            self._matchers.pop(number, None)
        try:
            return self._answer(request)
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        number, tokens = request["text"], request["tokens"]
        if "schema" in request:
            self._matchers[number] = self._opened(request["schema"])
        matcher = self._matchers[number]
        if tokens:
            matcher.consume_tokens(tokens)
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        for _ in range(request.get("walk", 0)):
            if not mask or matcher.is_stopped():
                break
            allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
            matcher.consume_token(random.Random(len(mask)).choice(allowed))
            mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        if matcher.is_error():
            del self._matchers[number]
            return {"error": matcher.get_error()}
        stopped = matcher.is_stopped()
        # The matcher stopped before the sequence was complete, so no text satisfies the schema.
        if stopped and not matcher.is_accepting():
            return {"error": "no text satisfies the schema"}
        return {"complete": stopped, "mask": "" if stopped else mask.hex()}

    def _opened(self, schema: str) -> Any:
        """Create the matcher of a schema."""
        library = self._library
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        limits = library.LLParserLimits(**_LIMITS)
        return library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
