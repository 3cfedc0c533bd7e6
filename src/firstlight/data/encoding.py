"""Encoding of the pieces of documents on one machine, in order, in this process or several others.

A process that is killed is replaced, and its batch is encoded again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
import tokenizers

from firstlight.console import say
from firstlight.data.shards import TokenArray, token_dtype
from firstlight.errors import DataError
from firstlight.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """A piece of a document that is to be encoded.

    Attributes:
        text: the piece's text.
        split: "train" or "val".
        first: True if the document's text in the split begins with this piece.
        last: True if the document's text in the split ends with this piece.
        document: the document's number, counted from 1.
    """

    text: str
    split: str
    first: bool
    last: bool
    document: int


#: Each piece with its tokens, in the order of the pieces.
Encoded: TypeAlias = Generator[tuple[TextPiece, TokenArray], None, None]
#: The function of an engine that encodes pieces; all engines give the same tokens.
Encode: TypeAlias = Callable[[Iterator[TextPiece]], Encoded]

#: Characters of a batch, about: a process is given one batch at a time.
_BATCH_CHARACTERS = 1 << 20
#: Number of attempts at a batch: after as many killed processes, the batch fails.
_ATTEMPTS = 3
#: Time without the tokens of a batch after which stopped processes are looked for.
_SECONDS_TO_ANSWER = 60.0


def batches(pieces: Iterable[TextPiece], characters: int) -> Iterator[list[TextPiece]]:
    """The pieces in their order, in lists of at least `characters` characters (the last list may
    have fewer)."""
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


def encode_in_order(
    pieces: Iterator[TextPiece],
    tokenizer: Tokenizer,
    workers: int,
    max_tokens: int | None = None,
) -> Encoded:
    """Each piece with its tokens, in the order of the pieces, with any number of processes.

    Args:
        pieces: the pieces; they are read ahead of the encoding by a bounded number of batches.
        tokenizer: the tokenizer.
        workers: number of processes; 1 encodes in this process.
        max_tokens: number of tokens that are needed. If there are few, batches are smaller, so that
            less text is read ahead. None is no limit.

    Raises:
        DataError: the tokenizer gives ids beyond its vocabulary, or processes are killed
            repeatedly.
    """
    # A text rarely has more tokens than characters, so one batch of this size may be enough.
    characters = min(_BATCH_CHARACTERS, max_tokens or _BATCH_CHARACTERS)
    if workers == 1:
        for batch in batches(pieces, characters):
            yield from zip(batch, encode([p.text for p in batch], tokenizer), strict=True)
        return
    pool = _Processes(tokenizer, workers)
    try:
        for batch in batches(pieces, characters):
            pool.submit(batch)
            # Enough batches to keep all processes busy; the rest of the corpus stays on the disk.
            if len(pool) >= 3 * workers:
                yield from pool.oldest()
        while len(pool):
            yield from pool.oldest()
    finally:
        pool.stop()


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> list[TokenArray]:
    """The token ids of each text, in the dtype of the shards (`token_dtype`), in one thread.

    Raises:
        DataError: an id is beyond the tokenizer's vocabulary.
    """
    # With one text in each call the library uses one thread: the processes already use all cores.
    ids = (np.array(tokenizer.encode_batch([text])[0], np.int64) for text in texts)
    return [_fitting(array, tokenizer.vocab_size) for array in ids]


def _fitting(ids: npt.NDArray[np.int64], vocab_size: int) -> TokenArray:
    """The ids in the dtype of the shards, which could silently truncate ids beyond the vocabulary.

    Raises:
        DataError: there is such an id.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"the tokenizer gives id {ids.max()}, beyond its own vocabulary of {vocab_size} "
            "tokens: its files are damaged; load it from where it came from again"
        )
    return ids.astype(token_dtype(vocab_size))


class _Worker:
    """A process that encodes, and this process's end of the pipe to it.

    The tokenizer is sent through this pipe, not as an argument of the process. `spawn` writes the
    arguments to a pipe whose reading end this process holds, too. Arguments longer than the pipe's
    buffer would therefore block forever if the new process is killed.
    """

    def __init__(self, tokenizer_json: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there,), daemon=True)
        # This process closes its copy of the other end, so that the pipe ends when the child does.
        with there:
            self._process.start()
        self._unsent: list[str] = [tokenizer_json]

    def encode(self, texts: list[str]) -> list[TokenArray]:
        """The tokens of each text.

        Raises:
            EOFError, OSError: the process has ended.
            DataError: the tokenizer fails, or gives an id beyond its vocabulary.
        """
        while self._unsent:
            self._end.send(self._unsent.pop())
        self._end.send(texts)
        is_good, result = self._end.recv()
        if not is_good:
            raise result
        tokens: list[TokenArray] = result
        return tokens

    @property
    def stopped_id(self) -> int | None:
        """The process id if the process is stopped (SIGSTOP), or None. A slow process is not."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED:
                return self._process.pid
        return None

    def end(self) -> int:
        """Kill the process if it is running; return its exit code, negative after a signal."""
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        return -signal.SIGKILL if code is None else code


class _Processes:
    """Processes that encode batches, and the queue of submitted batches, oldest first.

    For each process, one thread of this process sends batches and receives tokens. No two processes
    share a pipe or a lock. So if a process is killed at any moment, even while it starts, only its
    batch is lost, and a new process encodes that batch again.
    """

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self._tokenizer_json = tokenizer.backend.to_str()
        self._threads = ThreadPoolExecutor(workers, "encode")
        self._of_thread = threading.local()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopped = False
        #: Ids of the stopped processes that the user was told about.
        self._named: set[int] = set()
        self._waiting: deque[tuple[list[TextPiece], Future[list[TokenArray]]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, batch: list[TextPiece]) -> None:
        """Add a batch to the queue, for the next free process."""
        texts = [piece.text for piece in batch]
        self._waiting.append((batch, self._threads.submit(self._encode, texts)))

    def oldest(self) -> Iterator[tuple[TextPiece, TokenArray]]:
        """Wait for the oldest batch, and remove it: each of its pieces with its tokens.

        Raises:
            DataError: processes are killed repeatedly, or can't start; or see `encode`.
        """
        batch, future = self._waiting.popleft()
        while not wait([future], _SECONDS_TO_ANSWER).done:
            self._name_stopped()
        return zip(batch, future.result(), strict=True)

    def _name_stopped(self) -> None:
        """Tell the user once about each process that another program has stopped."""
        with self._lock:
            found = [worker.stopped_id for worker in self._workers]
        stopped = {process for process in found if process is not None}
        for process in stopped - self._named:
            say(
                f"tokenizing process {process} is stopped, and prepare waits for it: let it run "
                f"with kill -CONT {process}, or have its documents encoded again by another one "
                f"with kill -KILL {process}"
            )
        self._named = stopped

    def stop(self) -> None:
        """Kill the processes, and drop the batches."""
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.end()
        self._threads.shutdown(cancel_futures=True)

    def _encode(self, texts: list[str]) -> list[TokenArray]:
        """The tokens of each text, from this thread's process or, if it is killed, a new one."""
        code = 0
        for attempt in range(1, _ATTEMPTS + 1):
            worker = self._own_worker()
            try:
                return worker.encode(texts)
            except (EOFError, OSError):
                self._of_thread.worker = None
                # A process that exits by itself, without a signal, would exit again.
                code = worker.end()
                if self._stopped or code >= 0 or attempt == _ATTEMPTS:
                    break
                say("a tokenizing process was killed: its documents are encoded again")
        if code >= 0:
            raise DataError(
                f"a tokenizing process ended with exit code {code}: call prepare under "
                "`if __name__ == '__main__':` in a script, or use --workers 1 to see the error"
            )
        raise DataError(
            "a tokenizing process was killed, most likely for want of memory: use fewer --workers"
        )

    def _own_worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            worker = self._of_thread.worker = _Worker(self._tokenizer_json)
            with self._lock:
                self._workers.add(worker)
                # `stop` may have been called while this process started.
                if self._stopped:
                    worker.end()
        return worker


def _work(end: Connection) -> None:
    """Body of a process: encode batches until the pipe is closed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The terminal sends Ctrl-C's SIGINT to every process; only the parent may react to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        tokenizer = tokenizer_from_json(end.recv())
        while True:
            texts = end.recv()
            end.send(_answer(texts, tokenizer))


def _answer(texts: list[str], tokenizer: Tokenizer) -> tuple[bool, list[TokenArray] | DataError]:
    """(True, tokens of each text), or (False, the error to raise in the parent process)."""
    try:
        return True, encode(texts, tokenizer)
    except DataError as error:
        return False, error
    # BaseException, because a panic of the tokenizers library is not an Exception. The error is
    # replaced, because some errors can't be pickled.
    except BaseException as error:  # noqa: BLE001
        return False, DataError(
            f"the tokenizer failed ({type(error).__name__}: {error}): its files are damaged?"
        )


def tokenizer_from_json(content: str) -> Tokenizer:
    """A tokenizer for encoding texts, from `Tokenizer.backend.to_str()`: without bos, eos and chat
    template."""
    return Tokenizer(tokenizers.Tokenizer.from_str(content))


def _exit_with_parent() -> None:
    """End this process when its parent ends: a parent killed by SIGKILL can't stop its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
