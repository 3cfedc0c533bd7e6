"""Load tokenizers in the common file formats, train new ones, and decode streams of token ids.

Files of all formats are loaded as a `Tokenizer`, which wraps the `tokenizers` library. A tokenizer
is always saved as `tokenizer.json` + `tokenizer_config.json`, which transformers can read.

By default, text is never parsed for special tokens: `<|endoftext|>` in a document is encoded as the
ordinary tokens for these characters. Special tokens are also called control tokens in this package.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from firstlight.errors import TokenizerError
from firstlight.tokenizer.formats import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    SPLIT_PATTERNS,
    cut_long,
)
from firstlight.tokenizer.parts import byte_level_split, in_thread, require_unicode
from firstlight.tokenizer.tokenizer import TextStream, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "GPT2_PATTERN",
    "LLAMA3_PATTERN",
    "QWEN2_PATTERN",
    "QWEN35_PATTERN",
    "SPLIT_PATTERNS",
    "TextStream",
    "Tokenizer",
    "train_tokenizer",
]

#: Maximum length in characters of a pre-token during training. The library's run time grows with
#: the square of this length. Without a limit, training on a genome in one line would take hours.
#: The limit is not part of the trained tokenizer, because llama.cpp only supports known split
#: patterns.
_LONGEST_PIECE = 256
#: Approximate number of characters passed to the library at a time.
_BATCH_CHARACTERS = 1 << 18


def require_vocab_size(vocab_size: int, special_tokens: int = 1) -> None:
    """Raise an error if `vocab_size` is too small for a byte-level vocabulary.

    Raises:
        TokenizerError: `vocab_size` is too small.
    """
    smallest = 256 + special_tokens
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {smallest} "
            f"(256 bytes and {special_tokens} special tokens)"
        )


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = GPT2_PATTERN,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, like that of GPT-2 (Sennrich et al. 2016, Radford et al.
    2019).

    Args:
        texts: the corpus, as strings of any length.
        vocab_size: number of tokens, including special tokens and the 256 bytes. The tokenizer has
            fewer tokens if the corpus contains too few pairs to merge.
        pattern: regular expression that splits text into pre-tokens. Merges never cross the
            boundaries of a match. During training only, a match of more than 256 characters is
            split further, so no token is longer than 256 characters.
        special_tokens: special tokens, which get the ids 0, 1, ... The first special token is the
            eos token.

    Raises:
        TokenizerError: `vocab_size` is too small, or the corpus is empty.
        InputError: a string in `texts` contains a lone surrogate, which is not a character.
    """
    require_vocab_size(vocab_size, len(special_tokens))
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = byte_level_split(pattern, rf"[\s\S]{{{_LONGEST_PIECE}}}")
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = 0

    def batches() -> Iterator[list[str]]:
        nonlocal seen
        batch, size = [], 0
        for text in texts:
            require_unicode(text)
            for piece in cut_long(text):
                batch.append(piece)
                size += len(piece)
                if size >= _BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
            seen += len(text)
        yield batch

    _train(backend, trainer, batches())
    if seen == 0:
        raise TokenizerError("the corpus is empty: there is nothing to train a tokenizer on")
    # Remove the limit on the length of pre-tokens after training. Encoding takes nearly linear time
    # without it, and llama.cpp does not support it.
    backend.pre_tokenizer = byte_level_split(pattern)
    return Tokenizer(backend, eos_token=special_tokens[0] if special_tokens else None)


def _train(
    backend: tokenizers.Tokenizer, trainer: trainers.BpeTrainer, batches: Iterator[list[str]]
) -> None:
    """Train `backend` in a separate thread (see `in_thread`). The text is read in the calling
    thread, so that reading a file or dataset can be interrupted.
    """
    waiting: queue.Queue[list[str] | None] = queue.Queue(1)
    stopped = threading.Event()

    def received() -> Iterator[list[str]]:
        while (batch := waiting.get()) is not None:
            if stopped.is_set():
                raise InterruptedError
            yield batch

    training = in_thread(lambda: backend.train_from_iterator(received(), trainer))
    try:
        for batch in itertools.chain(batches, [None]):
            while not training.done():
                with contextlib.suppress(queue.Full):
                    waiting.put(batch, timeout=1)
                    break
            # If the library fails, the future completes early, and the remaining text is not
            # needed.
            if training.done():
                break
    except BaseException:
        # Wake the thread if it is waiting, so that it sees `stopped` and ends. If the queue is
        # full, a batch in the queue wakes it.
        stopped.set()
        with contextlib.suppress(queue.Full):
            waiting.put_nowait([])
        raise
    training.result()
