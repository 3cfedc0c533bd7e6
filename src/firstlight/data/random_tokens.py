"""Random tokens in place of a corpus: `random:TOKENS[:SEED]`, for measurements of speed and memory
that need no text. They are written as a prepared folder, so every command for one accepts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.console import parse_count
from firstlight.data.writer import CorpusWriter
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import new_folder
from firstlight.tokenizer import Tokenizer

PREFIX = "random:"
#: Tokens of a document, its separators included; the last document of a split may be shorter.
_DOCUMENT_TOKENS = 1024


@dataclass(frozen=True)
class RandomTokens:
    """A request for random tokens.

    Attributes:
        name: the input as the user wrote it.
        tokens: number of tokens of both splits together, separators included.
        seed: seed of the random generator.
    """

    name: str
    tokens: int
    seed: int


def requested_tokens(inputs: Sequence[object]) -> RandomTokens | None:
    """The random tokens that the inputs request; None if they request none.

    Raises:
        InputError: random tokens are combined with other inputs, or their number or seed is not a
            number.
    """
    name = next((str(one) for one in inputs if str(one).startswith(PREFIX)), None)
    if name is None:
        return None
    if len(inputs) > 1:
        raise InputError(f"{name} can't be mixed with other inputs: prepare it alone")
    number, _, seed = name.removeprefix(PREFIX).partition(":")
    try:
        tokens = int(parse_count(number))
        if tokens < 1 or not (seed or "0").isdecimal():
            raise ConfigError("no number")
    except ConfigError as error:
        raise InputError(
            f"{name} is not random:TOKENS[:SEED]: write for instance random:10M or random:10M:7"
        ) from error
    return RandomTokens(name, tokens, int(seed or "0"))


def prepare_random(
    drawn: RandomTokens,
    tokenizer: Tokenizer,
    out: Path,
    val_fraction: Fraction,
    overwrite: bool,
    shard_tokens: int,
) -> dict[str, Any]:
    """Write shards of uniformly random tokens, in documents of 1,024 tokens; return the manifest.

    The manifest's bytes of text are the sum of the bytes of each token alone. Control tokens occur
    only between documents.

    Args:
        drawn: number of tokens, and seed.
        tokenizer: the tokenizer, from whose vocabulary the tokens are drawn.
        out: the folder to write.
        val_fraction: share of the tokens that is held out for validation.
        overwrite: replace `out` if it exists.
        shard_tokens: tokens after which the next shard begins.

    Raises:
        StorageError: the disk is full or not writable.
        InputError: the tokenizer has only control tokens.
    """
    vocabulary = set(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    plain = np.array(sorted(vocabulary - tokenizer.special_token_ids), np.int64)
    if not len(plain):
        raise InputError("the tokenizer has no tokens of text: take another one")
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    sizes[plain] = [len(tokenizer.decode([token]).encode()) for token in plain.tolist()]
    held_out = round(drawn.tokens * val_fraction)
    with new_folder(out, replace=overwrite, synced=True) as folder:
        writer = CorpusWriter(folder, tokenizer, shard_tokens)
        with writer.open():
            for number, (split, count) in enumerate(
                (("train", drawn.tokens - held_out), ("val", held_out))
            ):
                generator = np.random.default_rng([drawn.seed, number])
                for document in _documents(count, plain, tokenizer, generator):
                    text_bytes = int(sizes[document].sum())
                    writer.write(split, document.astype(writer.dtype), text_bytes=text_bytes)
        written = sum(count["documents"] for count in writer.counts.values())
        split_by = "document" if held_out else "none"
        return writer.finish(written, val_fraction, split_by, [], random_seed=drawn.seed)


def _documents(
    count: int,
    plain: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
    generator: np.random.Generator,
) -> Iterator[npt.NDArray[np.int64]]:
    """Documents that have `count` tokens together: token ids, int64 [tokens of the document].

    Args:
        count: number of tokens, separators included.
        plain: ids of the vocabulary's tokens that are not control tokens, int64 [ids].
        tokenizer: the tokenizer, for the ids of the separators.
        generator: the random generator, advanced by each document.
    """
    before = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    after = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    while count:
        length = min(count, _DOCUMENT_TOKENS)
        inner = max(length - len(before) - len(after), 0)
        text = plain[generator.integers(len(plain), size=inner)]
        yield np.concatenate([before, text, after]).astype(np.int64)[:length]
        count -= length
