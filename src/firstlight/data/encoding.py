"""Encode pieces of documents in their original order: in this process, in several processes on this
machine (`encode_in_order`), or on a Ray cluster (`ray_encoder`).

If a process is killed, it is replaced and its batch is encoded again.

The process that calls `prepare` reads the documents and writes the shards; a Ray cluster only does
the encoding, which is nearly all of the work. The files therefore only need to exist on one
machine, and failures of other machines can't affect the shards. If a process or node is killed, Ray
encodes its blocks again, including finished blocks if their results were lost with the node. Each
node needs firstlight with the `ray` extra, and the same version of `tokenizers` as this machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import platform
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tokenizers

from firstlight.console import say
from firstlight.data.opening import optional
from firstlight.data.shards import TokenArray, token_dtype
from firstlight.errors import ConfigError, DataError
from firstlight.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """A piece of a document to encode.

    Attributes:
        text: text of the piece.
        split: "train" or "val".
        first: True for the first piece of the document in its split.
        last: True for the last piece of the document in its split.
        document: one-based number of the document.
    """

    text: str
    split: str
    first: bool
    last: bool
    document: int


#: Generator of pieces with their tokens, in the order of the pieces.
Encoded: TypeAlias = Generator[tuple[TextPiece, TokenArray], None, None]
#: Function with which an engine encodes pieces. All engines produce the same tokens.
Encode: TypeAlias = Callable[[Iterator[TextPiece]], Encoded]

#: Approximate number of characters per batch. A process gets one batch at a time.
_BATCH_CHARACTERS = 1 << 20
#: Maximum number of attempts per batch. The batch fails when this many processes have been killed
#: while encoding it.
_ATTEMPTS = 3
#: Approximate number of characters per block. Each task on a Ray cluster encodes one block, which
#: takes at least half a second.
_BLOCK_CHARACTERS = 1 << 22
#: Maximum number of blocks to send to a Ray cluster before the oldest of them has been written.
#: `_BLOCKS_PER_CPU` is the limit per processor. `_MAX_BLOCKS` is the limit for the entire cluster,
#: which corresponds to a gigabyte of text.
_BLOCKS_PER_CPU, _MAX_BLOCKS = 4, 256
#: Timeout for connecting to the address of a Ray cluster, in seconds.
_SECONDS_TO_CONNECT = 10.0
_PURPOSE = "preparing with engine ray"
_NO_CLIENT = (
    "preparing through a Ray Client (ray://) is not supported: run prepare on a machine of the "
    "cluster with --ray-address auto, or submit it with `ray job submit`"
)


def batches(pieces: Iterable[TextPiece], characters: int) -> Iterator[list[TextPiece]]:
    """Group consecutive pieces into lists with a total of at least `characters` characters each.
    The last list can be shorter.
    """
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
    """Encode pieces with any number of processes, and yield each piece with its tokens in the
    original order.

    Args:
        pieces: the pieces; only a bounded number of batches is read ahead of the encoding.
        tokenizer: the tokenizer.
        workers: number of processes; 1 encodes in this process.
        max_tokens: number of tokens that the caller needs; None means all of them. A small number
            results in smaller batches and less text read ahead.

    Raises:
        DataError: the tokenizer produces ids beyond its vocabulary, or processes are killed
            repeatedly.
    """
    # There are rarely more tokens than characters, so one batch of this size should be enough.
    characters = min(_BATCH_CHARACTERS, max_tokens or _BATCH_CHARACTERS)
    if workers == 1:
        for batch in batches(pieces, characters):
            yield from zip(batch, encode([p.text for p in batch], tokenizer), strict=True)
        return
    pool = _Processes(tokenizer, workers)
    try:
        for batch in batches(pieces, characters):
            pool.submit(batch)
            # If the queue contains this many batches, all processes are busy, so don't read more of
            # the corpus yet.
            if len(pool) >= 3 * workers:
                yield from pool.oldest()
        while len(pool):
            yield from pool.oldest()
    finally:
        pool.stop()


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> list[TokenArray]:
    """Encode each string using a single thread. Return the token ids of each string in the dtype of
    the shards (see `token_dtype`).

    Raises:
        DataError: an id is beyond the tokenizer's vocabulary.
    """
    # Pass one string per call, because the library would encode several in parallel, and the
    # encoding processes already use all cores.
    ids = (np.array(tokenizer.encode_batch([text])[0], np.int64) for text in texts)
    return [_fitting(array, tokenizer.vocab_size) for array in ids]


def _fitting(ids: npt.NDArray[np.int64], vocab_size: int) -> TokenArray:
    """Convert token ids to the dtype of the shards. Check first that no id is beyond the
    vocabulary, because the conversion could silently change it to a different id.

    Raises:
        DataError: an id is beyond the vocabulary.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(
            f"the tokenizer produced id {ids.max()}, beyond its vocabulary of {vocab_size} "
            "tokens: its files are damaged; download or copy it again"
        )
    return ids.astype(token_dtype(vocab_size))


class _Worker:
    """A process that encodes text, and the parent's end of the pipe that connects it to the parent.

    The tokenizer is sent through this pipe instead of as an argument of the process. `spawn` writes
    arguments to a different pipe, whose reading end also stays open in the parent. If the new
    process were killed, the parent would therefore block forever when it writes more than the
    pipe's buffer can hold.
    """

    def __init__(self, tokenizer_json: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there,), daemon=True)
        # Close the parent's copy of the child's end of the pipe, so that the pipe is closed when
        # the child ends.
        with there:
            self._process.start()
        self._unsent: list[str] = [tokenizer_json]

    def encode(self, texts: list[str]) -> list[TokenArray]:
        """Return the token ids of each string.

        Raises:
            EOFError, OSError: the process has ended.
            DataError: the tokenizer fails, or returns an id beyond its vocabulary.
        """
        while self._unsent:
            self._end.send(self._unsent.pop())
        self._end.send(texts)
        is_good, result = self._end.recv()
        if not is_good:
            raise result
        tokens: list[TokenArray] = result
        return tokens

    def end(self) -> int:
        """Kill the process if it is running. Return its exit code, which is negative if a signal
        ended it.
        """
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        return -signal.SIGKILL if code is None else code


class _Processes:
    """A pool of encoding processes, and the queue of submitted batches, oldest first.

    For each encoding process, a thread of the parent sends batches and receives tokens. The
    processes do not share pipes or locks. Therefore, if a process is killed at any moment, even
    during startup, only its current batch is lost, and a new process encodes that batch again.
    """

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self._tokenizer_json = tokenizer.backend.to_str()
        self._threads = ThreadPoolExecutor(workers, "encode")
        self._of_thread = threading.local()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._waiting: deque[tuple[list[TextPiece], Future[list[TokenArray]]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, batch: list[TextPiece]) -> None:
        """Add a batch to the queue."""
        texts = [piece.text for piece in batch]
        self._waiting.append((batch, self._threads.submit(self._encode, texts)))

    def oldest(self) -> Iterator[tuple[TextPiece, TokenArray]]:
        """Wait for the oldest batch in the queue and remove it. Yield each piece of the batch with
        its tokens.

        Raises:
            DataError: processes are killed repeatedly or can't start, or a piece can't be encoded
                (see `encode`).
        """
        batch, future = self._waiting.popleft()
        return zip(batch, future.result(), strict=True)

    def stop(self) -> None:
        """Kill the processes and cancel the queued batches."""
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.end()
        self._threads.shutdown(cancel_futures=True)

    def _encode(self, texts: list[str]) -> list[TokenArray]:
        """Encode each string in the process that belongs to this thread. If the process is killed,
        start a new one.
        """
        code = 0
        for attempt in range(1, _ATTEMPTS + 1):
            worker = self._own_worker()
            try:
                return worker.encode(texts)
            except (EOFError, OSError):
                self._of_thread.worker = None
                # If the process exited without a signal, a new process would exit in the same way.
                code = worker.end()
                if self._stopped or code >= 0 or attempt == _ATTEMPTS:
                    break
                say("a tokenizing process was killed: encoding its documents again")
        if code >= 0:
            raise DataError(
                f"a tokenizing process ended with exit code {code}: call prepare under "
                "`if __name__ == '__main__':` in a script, or use --workers 1 to see the error"
            )
        raise DataError(
            "a tokenizing process was killed, most likely because memory ran out: use fewer "
            "--workers"
        )

    def _own_worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            worker = self._of_thread.worker = _Worker(self._tokenizer_json)
            with self._lock:
                self._workers.add(worker)
                # `stop` may have been called while this process was starting.
                if self._stopped:
                    worker.end()
        return worker


def _work(end: Connection) -> None:
    """Run an encoding process: encode batches until the pipe is closed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The terminal sends SIGINT to every process on Ctrl-C, but only the parent should handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        tokenizer = _tokenizer_from_json(end.recv())
        while True:
            texts = end.recv()
            end.send(_answer(texts, tokenizer))


def _answer(texts: list[str], tokenizer: Tokenizer) -> tuple[bool, list[TokenArray] | DataError]:
    """Encode strings. If this succeeds, return (True, token ids of each string). Otherwise, return
    (False, the error to raise in the parent process).
    """
    try:
        return True, encode(texts, tokenizer)
    except DataError as error:
        return False, error
    # Catch BaseException, because a panic in the tokenizers library does not raise a subclass of
    # Exception. Return a new error, because some errors can't be pickled.
    except BaseException as error:  # noqa: BLE001
        return False, DataError(
            f"the tokenizer failed ({type(error).__name__}: {error}): its files may be damaged"
        )


@functools.lru_cache(maxsize=1)
def _tokenizer_from_json(content: str) -> Tokenizer:
    """Create a tokenizer from the result of `Tokenizer.backend.to_str()`. It can encode text, but
    has no bos, eos or chat template.
    """
    return Tokenizer(tokenizers.Tokenizer.from_str(content))


def _exit_with_parent() -> None:
    """End this process when its parent ends, because a parent that is killed by SIGKILL can't stop
    its child processes.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# A Ray cluster


@contextlib.contextmanager
def ray_encoder(tokenizer: Tokenizer, address: str | None) -> Iterator[Encode]:
    """Connect to a Ray cluster for the duration of the `with` block. Yield the function that
    encodes pieces on the cluster.

    Args:
        tokenizer: the tokenizer.
        address: HOST:PORT of a cluster that this machine belongs to. "auto" uses a cluster that is
            already running on this machine. "local" starts a cluster on this machine, and stops it
            at the end of the `with` block. If `address` is None, Ray uses the environment variable
            `RAY_ADDRESS` or, if it is not set, tries "auto" and then "local". If the caller is
            already connected, `address` must be None, and the connection is kept.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: there is no cluster at the address, or the cluster is unusable.
    """
    ray = optional("ray", _PURPOSE, "ray")
    with _quiet(), _connected(ray, address):
        yield functools.partial(_encode_on_ray, tokenizer=tokenizer, ray=ray)


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(
                "this process is already connected to a ray cluster: omit ray_address to use "
                "it, or call ray.shutdown() first"
            )
        if ray.util.client.ray.is_connected():
            raise ConfigError(_NO_CLIENT)
        yield
        return
    try:
        _connect(ray, address)
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address is not None and address.startswith("ray://"):
        raise ConfigError(_NO_CLIENT)
    try:
        if address is not None and address not in ("auto", "local"):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError("it is not auto, local or HOST:PORT")
            # Try to connect first, because Ray waits for minutes if no cluster has this address.
            place = (host.strip("[]"), int(port))
            socket.create_connection(place, timeout=_SECONDS_TO_CONNECT).close()
        with _signal_handlers_kept():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray raises many unrelated exceptions for problems with a cluster.
    except Exception as error:
        raise ConfigError(
            f"the ray cluster at '{address or 'local'}' can't be used ({_reason(error)}): start "
            "one with `ray start --head`, or use --ray-address local to start one for this run"
        ) from error


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that `ray.init` replaces, because Ray's handler would end the
    process immediately without cleanup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """For a Ray cluster started in the `with` block, disable usage statistics and all messages
    about failed blocks after the first one. Environment variables that the user has set are left
    unchanged.
    """
    names = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
    added = {name: value for name, value in names.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _encode_on_ray(pieces: Iterator[TextPiece], tokenizer: Tokenizer, ray: Any) -> Encoded:
    """Yield each piece with its tokens, in the order of the pieces."""
    reference = ray.put(tokenizer.backend.to_str())
    task = ray.remote(_encode_block)
    #: Blocks that are being encoded, each with Ray's reference to its result.
    waiting: deque[tuple[list[TextPiece], Any]] = deque()
    try:
        for block in batches(pieces, _BLOCK_CHARACTERS):
            texts = [piece.text for piece in block]
            waiting.append((block, task.remote(texts, reference, tokenizers.__version__)))
            # Count the processors each time, because the size of a cluster can change.
            processors = int(ray.cluster_resources().get("CPU", 1))
            if len(waiting) >= max(1, min(_BLOCKS_PER_CPU * processors, _MAX_BLOCKS)):
                yield from _oldest(waiting, ray)
        while waiting:
            yield from _oldest(waiting, ray)
    finally:
        # Blocks that are still running are not cancelled, because `ray.cancel` can crash this
        # process. They end when the connection is closed.
        waiting.clear()


def _oldest(
    waiting: deque[tuple[list[TextPiece], Any]], ray: Any
) -> Iterator[tuple[TextPiece, TokenArray]]:
    """Wait for the oldest block in the queue and remove it. Yield each piece of the block with its
    tokens.
    """
    block, reference = waiting[0]
    try:
        is_good, result = ray.get(reference)
    # Many different exceptions are raised for cluster failures and for packages missing on the
    # nodes.
    except Exception as error:
        raise DataError(
            f"the ray cluster failed ({_reason(error)}): check that its nodes are running and "
            "have firstlight[ray] and enough memory for one more process per processor"
        ) from error
    if not is_good:
        raise result
    waiting.popleft()
    return zip(block, result, strict=True)


def _encode_block(
    texts: list[str], tokenizer_json: str, release: str
) -> tuple[bool, list[TokenArray] | DataError]:
    """Encode a block of text on a node of the Ray cluster. The return value has the same form as
    that of `_answer`.

    Args:
        texts: the strings in the block.
        tokenizer_json: the result of `Tokenizer.backend.to_str()`.
        release: the version of `tokenizers` that the node must have.
    """
    if tokenizers.__version__ != release:
        return False, DataError(
            f"node {platform.node()} has tokenizers {tokenizers.__version__}, but this machine "
            f"has {release}, which may split texts differently: install the same version on all "
            "nodes"
        )
    return _answer(texts, _tokenizer_from_json(tokenizer_json))


def _reason(error: Exception) -> str:
    """Return the cause of a Ray error in one line. The message of the error is a traceback from
    another process and begins with the original exception.
    """
    first = str(error).partition("The above exception was the direct cause")[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
