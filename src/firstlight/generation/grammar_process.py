"""The tokens that a JSON Schema allows next, computed by llguidance.

`structured` has this done in child processes (see `files.limits`), because llguidance has no bound
on time and memory for an arbitrary schema.
"""

from __future__ import annotations

import random
from typing import Any

#: One space at most between the parts of an object or array, so that a model can't write endless
#: white space.
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
#: Options that override those in a schema (`x-guidance`). Not `lenient`: keywords that llguidance
#: does not support are errors.
_OPTIONS = {**_SEPARATORS, "whitespace_pattern": None, "lenient": False, "coerce_one_of": False}

#: llguidance's limits for one schema, see its `ParserLimits`.
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
    """The vocabulary, with the attributes that llguidance reads.

    Args:
        tokens: bytes of each token, in hexadecimal, by id. The last is an additional end token,
            which is not in the model's vocabulary.
        special: ids of control tokens, which are not text.
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
        """Token ids of a text, by the longest token at each position. llguidance does not need the
        tokenizer's own ids."""
        content = text.encode() if isinstance(text, str) else text
        found, place = [], 0
        while place < len(content):
            for end in range(min(place + self._longest, len(content)), place, -1):
                if content[place:end] in self._ids:
                    found.append(self._ids[content[place:end]])
                    break
            else:
                end = place + 1  # no token begins here: skip one byte
            place = end
        return found


class Matchers:
    """llguidance's matchers of the texts that follow a schema, by the number of the text.

    Args:
        tokens, special: see `_Vocabulary`.
        ends: ids that end a text.
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
            request: `text`, the number of the text; `tokens`, its new tokens. Optional are
                `schema`, the schema as JSON if the text is new to this process; `walk`, a number of
                tokens to try at random; and `forget`, numbers of texts that have ended.

        Returns:
            `{"error": str}`, or `{"complete": bool, "mask": str}`. The mask of the allowed next
            tokens, in hexadecimal, has one bit for each id, the lowest bit of a byte first; it is
            empty if no token can follow.
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
        # Stopped without being complete: no text satisfies the schema.
        if stopped and not matcher.is_accepting():
            return {"error": "nothing satisfies the schema"}
        return {"complete": stopped, "mask": "" if stopped else mask.hex()}

    def _opened(self, schema: str) -> Any:
        """Create the matcher of a schema."""
        library = self._library
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        limits = library.LLParserLimits(**_LIMITS)
        return library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
