"""Encode the pieces of documents on one machine, in their order, in this process or in others.

A process that is killed is replaced, and its batches are encoded again.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tokenizers

from firstlight.console import say
from firstlight.data.shards import TokenArray, token_dtype
from firstlight.errors import DataError
from firstlight.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """One part of a document on its way to the encoder.

    Attributes:
        text: the part's text.
        split: "train" or "val".
        first: the part begins its document's text in the split.
        last: the part ends its document's text in the split.
    """

    text: str
    split: str
    first: bool
    last: bool


#: Each piece with its tokens, in the order of the pieces.
Encoded: TypeAlias = Generator[tuple[TextPiece, TokenArray], None, None]
#: An engine; all engines give the same tokens.
Encode: TypeAlias = Callable[[Iterator[TextPiece]], Encoded]

#: A worker is handed about this many characters at a time.
_BATCH_CHARACTERS = 1 << 20
#: Number of times in a row that processes may be killed before a batch is given up.
_ATTEMPTS = 3


def batches(pieces: Iterable[TextPiece], characters: int) -> Iterator[list[TextPiece]]:
    """The pieces in their order, in lists of at least `characters` (the last may be shorter)."""
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_in_order(pieces: Iterator[TextPiece], tokenizer: Tokenizer, workers: int) -> Encoded:
    """Each piece with its tokens, in the order of the pieces, however many processes work.

    Args:
        workers: 1 encodes in this process.

    Raises:
        DataError: the tokenizer gives ids beyond its vocabulary, or processes are killed again
            and again.
    """
    if workers == 1:
        for batch in batches(pieces, _BATCH_CHARACTERS):
            yield from zip(batch, encode([p.text for p in batch], tokenizer), strict=True)
        return
    pool = _Processes(tokenizer, workers)
    try:
        for batch in batches(pieces, _BATCH_CHARACTERS):
            pool.submit(batch)
            # Enough to keep everyone busy; the rest of the corpus stays on the disk.
            if len(pool) >= 3 * workers:
                yield from pool.oldest()
        while len(pool):
            yield from pool.oldest()
    finally:
        pool.stop()


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> list[TokenArray]:
    """The tokens of each text, in the type of its shards (`token_dtype`), in one thread.

    Raises:
        DataError: an id is beyond the tokenizer's vocabulary.
    """
    # One text a call keeps the library to one thread: the processes already share the cores.
    ids = (np.array(tokenizer.encode_batch([text])[0], np.int64) for text in texts)
    return [_fitting(array, tokenizer.vocab_size) for array in ids]


def _fitting(ids: npt.NDArray[np.int64], vocab_size: int) -> TokenArray:
    """Ids in the type of the shards, which would silently cut off larger ids."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"the tokenizer gives id {ids.max()}, beyond its own vocabulary of {vocab_size} "
            "tokens: its files are damaged; load it from where it came from again"
        )
    return ids.astype(token_dtype(vocab_size))


class _Processes:
    """Processes that encode batches, and the batches that they have, oldest first."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self._start = functools.partial(
            ProcessPoolExecutor,
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer.backend.to_str(),),
        )
        self._pool = self._start()
        self._waiting: deque[tuple[list[TextPiece], Future[list[TokenArray]]]] = deque()
        self._any_done = False

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, batch: list[TextPiece]) -> None:
        """Hand a batch to whoever is free."""
        self._waiting.append((batch, self._submitted(batch)))

    def oldest(self) -> Iterator[tuple[TextPiece, TokenArray]]:
        """Take the oldest batch away, encoded.

        Raises:
            DataError: processes are killed again and again, or before the first batch is done.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            batch, future = self._waiting[0]
            try:
                tokens = future.result()
            except BrokenProcessPool as error:
                self._any_done |= any(_is_done(future) for _, future in self._waiting)
                # Processes that never got as far are not killed by chance.
                if attempt == _ATTEMPTS or not self._any_done:
                    raise DataError(
                        "a tokenizing process was killed, most likely for want of memory: use "
                        "fewer --workers (and call prepare under `if __name__ == '__main__':` in "
                        "a script)"
                    ) from error
                self._replace()
                continue
            self._any_done = True
            self._waiting.popleft()
            return zip(batch, tokens, strict=True)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the processes, whatever they have."""
        self._pool.shutdown(cancel_futures=True)

    def _submitted(self, batch: list[TextPiece]) -> Future[list[TokenArray]]:
        try:
            return self._pool.submit(_encode_in_worker, [piece.text for piece in batch])
        except BrokenProcessPool as error:
            # It comes up when the batch is waited for, as it does for those handed over before.
            broken: Future[list[TokenArray]] = Future()
            broken.set_exception(error)
            return broken

    def _replace(self) -> None:
        """Other processes, which get what the killed ones had not done."""
        say("a tokenizing process was killed: what it had is encoded again")
        self.stop()
        self._pool = self._start()
        self._waiting = deque(
            (batch, future if _is_done(future) else self._submitted(batch))
            for batch, future in self._waiting
        )


def _is_done(future: Future[list[TokenArray]]) -> bool:
    """Whether a batch was encoded, or refused by the encoder: not lost with its process."""
    return (
        future.done()
        and not future.cancelled()
        and not isinstance(future.exception(), BrokenProcessPool)
    )


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer_json: str) -> None:
    global _worker_tokenizer
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of the terminal; the parent alone decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_tokenizer = tokenizer_from_json(tokenizer_json)


def tokenizer_from_json(content: str) -> Tokenizer:
    """The tokenizer of `Tokenizer.backend.to_str()`, as far as encoding texts goes."""
    return Tokenizer(tokenizers.Tokenizer.from_str(content))


def _exit_with_parent() -> None:
    """A parent that is killed outright can't stop its workers: they stop themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> list[TokenArray]:
    return encode(texts, _worker_tokenizer)
