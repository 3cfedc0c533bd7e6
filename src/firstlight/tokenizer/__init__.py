"""Tokenizers: load the usual kinds of files, train a new tokenizer, stream ids back to text.

Every kind of file becomes a `Tokenizer` around the `tokenizers` library. A tokenizer is always
saved as `tokenizer.json` + `tokenizer_config.json`, which transformers reads.

Text is plain text by default: `<|endoftext|>` in a document becomes the ordinary tokens of these
characters, never the special token. Special tokens are also called control tokens here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from firstlight.errors import TokenizerError
from firstlight.tokenizer.formats import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    SPLIT_PATTERNS,
)
from firstlight.tokenizer.parts import byte_level_split, require_unicode
from firstlight.tokenizer.tokenizer import TextStream, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "GPT2_PATTERN",
    "LLAMA3_PATTERN",
    "QWEN2_PATTERN",
    "SPLIT_PATTERNS",
    "TextStream",
    "Tokenizer",
    "train_tokenizer",
]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = GPT2_PATTERN,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer like GPT-2's (Sennrich et al. 2016, Radford et al. 2019).

    Args:
        texts: the corpus, in texts of any length.
        vocab_size: number of tokens, including special tokens and the 256 bytes. If the corpus has
            too few pairs to merge, the tokenizer has fewer tokens.
        pattern: regular expression that splits texts; no merge crosses the bounds of a match.
        special_tokens: special tokens, with ids 0, 1, ...; the first one is the eos token.

    Raises:
        TokenizerError: `vocab_size` is too small, or the texts are empty.
        InputError: a text has a lone surrogate, which is not a character.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {smallest} "
            f"(256 bytes and {len(special_tokens)} special)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = byte_level_split(pattern)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            require_unicode(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if seen == 0:
        raise TokenizerError("the corpus is empty: there is nothing to train a tokenizer on")
    return Tokenizer(backend, eos_token=special_tokens[0] if special_tokens else None)
