"""Encoding on a Ray cluster: text is sent in blocks, and its token ids return in the same order.

The process that calls `prepare` reads the documents and writes the shards; the cluster does the
encoding, which is nearly all of the work. So files need to be visible on one machine only, and
failures of other machines can't change the written files: if a process or node is killed, Ray
encodes its blocks again, even blocks whose ids were ready and are lost with the node.

Ray Data needs all of a dataset at its start. A corpus of any size is therefore encoded as a
sequence of datasets of bounded size. Two datasets are encoded at a time, so that no processor waits
for the next one. Text that is not needed yet stays on the disk.

Each node needs firstlight with its extra `ray`, and the same release of `tokenizers`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import platform
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import numpy as np
import tokenizers

from firstlight.data.encoding import (
    Encode,
    Encoded,
    TextPiece,
    batches,
    encode,
    tokenizer_from_json,
)
from firstlight.data.opening import optional
from firstlight.errors import ConfigError, DataError
from firstlight.tokenizer import Tokenizer

#: Characters that a task encodes, about: half a second or more of work.
_BLOCK_CHARACTERS = 1 << 22
#: Blocks of a dataset: this number for each processor, but not more than `_MAX_BLOCKS` (half a
#: gigabyte of text), which take longer to encode than to read the next ones.
_BLOCKS_PER_CPU, _MAX_BLOCKS = 4, 128
#: Datasets that are encoded at a time: the second keeps processors busy that the first has no more
#: blocks for.
_DATASETS_AT_ONCE = 2
#: Timeout for connecting to a cluster's address.
_SECONDS_TO_ANSWER = 10.0
#: Longest time to wait for a dataset that is being stopped.
_SECONDS_TO_STOP = 5.0

_PURPOSE = "preparing with engine ray"
_NO_CLIENT = (
    "Ray Data does not run through a Ray Client (ray://): prepare on a machine of the cluster, "
    "with --ray-address auto, or have it run there with `ray job submit`"
)


@contextlib.contextmanager
def encoder(tokenizer: Tokenizer, address: str | None) -> Iterator[Encode]:
    """Connect to a Ray cluster until the end of the block; the value is the function that encodes.

    Args:
        tokenizer: the tokenizer.
        address: HOST:PORT of a cluster that this machine belongs to, "auto" (a cluster that runs
            on this machine) or "local" (a cluster that is started here and ends with the block).
            None leaves the choice to Ray (`RAY_ADDRESS`, otherwise "auto", otherwise "local"). If
            the caller is already connected, address must be None, and the connection is kept.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: there is no cluster at the address, or it can't be used.
    """
    ray = optional("ray", _PURPOSE, "ray")
    optional("ray.data", _PURPOSE, "ray")
    with _connected(ray, address), _quiet(ray):
        yield functools.partial(_encode_in_order, tokenizer=tokenizer, ray=ray)


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(
                "this process is connected to a ray cluster already: leave ray_address out to "
                "use it, or call ray.shutdown() first"
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
            # A quick check, because Ray would wait minutes for an address without a cluster.
            place = (host.strip("[]"), int(port))
            socket.create_connection(place, timeout=_SECONDS_TO_ANSWER).close()
        with _signal_handlers_kept(), _no_usage_statistics():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray raises a cluster's problems as errors of many unrelated classes.
    except Exception as error:
        raise ConfigError(
            f"no ray cluster can be used at '{address or 'local'}' ({_reason(error)}): start "
            "one with `ray start --head`, or have one for this run with --ray-address local"
        ) from error


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that `ray.init` replaces: Ray's handler would end the process at
    any moment, without a chance to clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _no_usage_statistics() -> Iterator[None]:
    """Disable Ray's usage statistics for a cluster started in the block, unless the user has set
    the environment variable."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Ray Data without logs and progress bars, and with blocks in their original order."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        logger.setLevel(level)


def _encode_in_order(pieces: Iterator[TextPiece], tokenizer: Tokenizer, ray: Any) -> Encoded:
    """Each piece with its tokens, in the order of the pieces. A few datasets (`window`: their
    blocks) are encoded at a time by threads, each of which waits for one dataset."""
    arguments = {
        "tokenizer": ray.put(tokenizer.backend.to_str()),
        "library": tokenizers.__version__,
    }
    blocks = batches(pieces, _BLOCK_CHARACTERS)
    waiting: deque[tuple[list[list[TextPiece]], AsyncResult[list[Any]]]] = deque()
    stopped = threading.Event()
    # Not a ThreadPoolExecutor: its threads would keep an interrupted process from ending.
    threads = ThreadPool(_DATASETS_AT_ONCE)
    try:
        while window := list(itertools.islice(blocks, _window_size(ray))):
            job = threads.apply_async(_run_dataset, (ray, window, arguments, stopped))
            waiting.append((window, job))
            if len(waiting) > _DATASETS_AT_ONCE:
                yield from _results(waiting)
        while waiting:
            yield from _results(waiting)
    finally:
        stopped.set()
        for _, job in waiting:
            job.wait(_SECONDS_TO_STOP)
        threads.terminate()


def _window_size(ray: Any) -> int:
    """Number of blocks of the next dataset, from the cluster's current size, which may change."""
    return max(1, min(_BLOCKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)), _MAX_BLOCKS))


def _run_dataset(
    ray: Any, window: list[list[TextPiece]], arguments: dict[str, Any], stopped: threading.Event
) -> list[Any]:
    """Encode the blocks as one dataset.

    Args:
        ray: the module.
        window: the blocks, each a list of pieces.
        arguments: keyword arguments of `_encode_table`.
        stopped: if set, the remaining blocks are dropped.

    Returns:
        the results of `_encode_table`, in the order of the blocks, in the cluster's shared memory
    """
    arrow = optional("pyarrow", _PURPOSE, "ray")
    texts = ([piece.text for piece in block] for block in window)
    tables = [arrow.table({"text": arrow.array(block, arrow.large_string())}) for block in texts]
    # The dataset holds its texts until it is finished: lost ids are encoded from them again.
    dataset = ray.data.from_arrow(tables)
    encoded = dataset.map_batches(
        _encode_table, batch_size=None, batch_format="pyarrow", fn_kwargs=arguments
    )
    results = []
    for table in encoded.iter_batches(batch_size=None, batch_format="pyarrow"):
        if stopped.is_set():
            break
        results.append(table)
    return results


def _encode_table(table: Any, *, tokenizer: Any, library: str) -> Any:
    """Encode a block on a node.

    Args:
        table: the block, with the column "text".
        tokenizer: reference to the result of `Tokenizer.backend.to_str()`.
        library: the required release of `tokenizers`.

    Returns:
        a table with the column "tokens", a list of ids for each text, or "error", one message
    """
    arrow = optional("pyarrow", _PURPOSE, "ray")
    try:
        _require_library(library)
        arrays = encode(table.column("text").to_pylist(), _tokenizer(tokenizer))
    # Returned as data, because an exception would arrive as the text of a traceback.
    except DataError as error:
        return arrow.table({"error": [str(error)]})
    ends = np.cumsum([len(tokens) for tokens in arrays])
    offsets = arrow.array(np.concatenate([[0], ends]), arrow.int64())
    values = arrow.array(np.concatenate(arrays))
    return arrow.table({"tokens": arrow.LargeListArray.from_arrays(offsets, values)})


def _require_library(release: str) -> None:
    if tokenizers.__version__ != release:
        raise DataError(
            f"node {platform.node()} has tokenizers {tokenizers.__version__}, this machine "
            f"{release}, which may split texts otherwise: install the same release on all nodes"
        )


@functools.lru_cache(maxsize=1)
def _tokenizer(reference: Any) -> Tokenizer:
    """The tokenizer on a node; each process builds it once and keeps it."""
    return tokenizer_from_json(optional("ray", _PURPOSE, "ray").get(reference))


def _results(waiting: deque[tuple[list[list[TextPiece]], AsyncResult[list[Any]]]]) -> Encoded:
    """Wait for the oldest dataset, and remove it: each of its pieces with its tokens."""
    window, job = waiting[0]
    try:
        tables = job.get()
    # The cluster, and tasks on nodes that lack a package, fail with errors of many classes.
    except Exception as error:
        raise DataError(
            f"the ray cluster failed ({_reason(error)}): see that its nodes run, and have "
            "firstlight[ray] and memory for one more process on each processor"
        ) from error
    waiting.popleft()
    pieces = itertools.chain.from_iterable(window)
    yield from zip(pieces, _tokens_of(tables), strict=True)


def _tokens_of(tables: list[Any]) -> Iterator[Any]:
    for table in tables:
        if "error" in table.column_names:
            raise DataError(table.column("error")[0].as_py())
        for chunk in table.column("tokens").chunks:
            offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
            for start, stop in itertools.pairwise(offsets.tolist()):
                yield values[start:stop]


def _reason(error: Exception) -> str:
    """One line with the cause of an error. Ray's errors are tracebacks of another process, in which
    the original exception comes first."""
    first = str(error).partition("The above exception was the direct cause")[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
