"""A process that says which tokens a JSON Schema allows next; run as a script by `structured`.

A separate process, because the time and the memory that llguidance takes for a stranger's schema
have no bound, and work that takes too much can only be ended from outside. It imports nothing of
firstlight, so that it starts in a fraction of a second.

A request is a line of JSON, and so is its answer, which `mask` bytes follow where it has any. The
first request is the vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

#: One space at most between the parts of an object or array, so that no model writes white space
#: without end.
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
#: A schema's own wishes (`x-guidance`) are overridden: nothing in it may be ignored.
_OPTIONS = {**_SEPARATORS, "whitespace_pattern": None, "lenient": False, "coerce_one_of": False}

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
    """The tokens as llguidance asks for them.

    Args:
        tokens: bytes of each id, in hexadecimal; the last is an end token of no model.
        special: ids of control tokens, which are no text.
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
        """Any ids that are a text: llguidance checks how it could be made of tokens."""
        content = text.encode() if isinstance(text, str) else text
        found, place = [], 0
        while place < len(content):
            for end in range(min(place + self._longest, len(content)), place, -1):
                if content[place:end] in self._ids:
                    found.append(self._ids[content[place:end]])
                    break
            else:
                end = place + 1  # no token has this byte
            place = end
        return found


class Matchers:
    """The texts that follow a schema, by number.

    Args:
        request: `tokens`, `special`, and `ends`: ids that end a text.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        import llguidance

        vocabulary = _Vocabulary(request["tokens"], request["special"])
        ends = [vocabulary.eos_token_id, *request["ends"]]
        count = len(vocabulary.tokens)
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary,  # type: ignore[arg-type]
            n_vocab=count,
            eos_token=ends,
            slices=[],
        )
        self._matchers: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The result of a request, and the mask of the next token, a bit for each id."""
        for number in request.get("forget", ()):
            self._matchers.pop(number, None)
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
            return {"error": matcher.get_error()}, b""
        stopped = matcher.is_stopped()
        # A text that can't go on and is not complete shows that nothing satisfies the schema.
        if stopped and not matcher.is_accepting():
            return {"error": "nothing satisfies the schema"}, b""
        return {"complete": stopped}, b"" if stopped else mask

    def _opened(self, schema: str) -> Any:
        library = self._library
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        limits = library.LLParserLimits(**_LIMITS)
        return library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def _limit_memory(more: int) -> None:
    """Limit this process to this number of bytes more than it has."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    with open("/proc/self/statm" if sys.platform == "linux" else "/dev/null") as file:
        pages = file.read().split()
    used = int(pages[0]) * resource.getpagesize() if pages else 2**32
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def main() -> None:
    """Answer requests until there are no more."""
    requests, answers = sys.stdin.buffer, open(1, "wb", closefd=False)  # noqa: SIM115
    first = json.loads(requests.readline())
    matchers = Matchers(first)
    _limit_memory(first["memory"])
    answers.write(b"{}\n")
    answers.flush()
    for line in requests:
        try:
            found, mask = matchers.answer(json.loads(line))
        except (ValueError, RuntimeError) as error:
            found, mask = {"error": str(error)}, b""
        answers.write(json.dumps({**found, "mask": len(mask)}).encode() + b"\n" + mask)
        answers.flush()


if __name__ == "__main__":
    main()
