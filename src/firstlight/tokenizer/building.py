"""Tokenizers that are made rather than read: trained on a corpus, or an older one extended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from firstlight.errors import TokenizerError
from firstlight.tokenizer.formats import TokenizerParts, require_unicode
from firstlight.tokenizer.trial import library_errors, may_panic

__all__ = ["extended_backend", "trained_parts"]


def trained_parts(
    texts: Iterable[str], vocab_size: int, pattern: str, special_tokens: Sequence[str]
) -> TokenizerParts:
    """What `firstlight.tokenizer.train_tokenizer` makes; see there."""
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {smallest} "
            f"(256 bytes and {len(special_tokens)} special)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = 0

    def count(pieces: Iterable[str]) -> Iterator[str]:
        nonlocal seen
        for piece in pieces:
            seen += len(piece)
            require_unicode(piece)
            yield piece

    backend.train_from_iterator(count(texts), trainer)
    if seen == 0:
        raise TokenizerError("the corpus is empty: there is nothing to train a tokenizer on")
    return TokenizerParts(backend, eos_token=special_tokens[0] if special_tokens else None)


def extended_backend(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], first_id: int
) -> tokenizers.Tokenizer:
    """A copy of `backend` with further special tokens, ids `first_id`, `first_id + 1`, ...

    Args:
        backend: takes special tokens in texts as text.
        tokens: the new ones.
        first_id: one more than the highest id so far.

    Raises:
        TokenizerError: a token is empty, given twice or in the vocabulary already; or the ids
            so far have gaps, which the new tokens would fill.
    """
    for number, token in enumerate(tokens):
        _require_new(backend, token)
        if token in tokens[:number]:
            raise TokenizerError(f"the new token '{token}' is given twice")
    extended = tokenizers.Tokenizer.from_str(backend.to_str())
    extended.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    if any(extended.token_to_id(t) != i for i, t in enumerate(tokens, start=first_id)):
        raise TokenizerError(
            f"no token can be added to this tokenizer: not every id below {first_id} has a token"
        )
    return extended


def _require_new(backend: tokenizers.Tokenizer, token: str) -> None:
    if not token:
        raise TokenizerError("a new token is empty")
    require_unicode(token)
    if any(added.content == token for added in backend.get_added_tokens_decoder().values()):
        raise TokenizerError(f"'{token}' is an added token of this tokenizer already")
    # A word may stand in the vocabulary under other letters: Ġthe, ▁the.
    with library_errors(f"the tokenizer can't encode '{token}'", muted=may_panic(backend)):
        ids = backend.encode(token, add_special_tokens=False).ids
        is_word = len(ids) == 1 and backend.decode(ids) == token
    if is_word or backend.token_to_id(token) is not None:
        raise TokenizerError(
            f"'{token}' is an ordinary word of the vocabulary already: "
            "choose one that texts don't hold, such as <|name|>"
        )
