"""Encode on a Ray cluster: text goes out in blocks, and its ids come back in the same order.

Documents are read, and shards written, by the process that calls `prepare`; the cluster does
the encoding, which is nearly all of the work. So files need to be visible on one machine only, and
failures of other machines can't change the written files: Ray runs a block again where its process
or its node is killed, also when its ids were ready and are lost with the node.

Ray Data works on datasets that are known from the beginning. A corpus of any size goes
through as one after another of bounded size, of which some are worked on at a time so that no
processor waits for the next. Text that is not needed yet stays on the disk.

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

#: A task encodes about this many characters: half a second or more of work.
_BLOCK_CHARACTERS = 1 << 22
#: Blocks of a dataset: so many for each processor, and no more than half a gigabyte of text,
#: which lasts longer than one process takes to read the next.
_BLOCKS_PER_CPU, _MAX_BLOCKS = 4, 128
#: Datasets that are worked on at a time: the second begins where the first one is running out.
_DATASETS_AT_ONCE = 2
#: Timeout of a connection to a cluster's address.
_SECONDS_TO_ANSWER = 10.0
#: Timeout of a dataset that is no longer waited for.
_SECONDS_TO_STOP = 5.0

_PURPOSE = "preparing with engine ray"
_NO_CLIENT = (
    "Ray Data does not run through a Ray Client (ray://): prepare on a machine of the cluster, "
    "with --ray-address auto, or have it run there with `ray job submit`"
)


@contextlib.contextmanager
def encoder(tokenizer: Tokenizer, address: str | None) -> Iterator[Encode]:
    """Encoding on a Ray cluster, as long as the block lasts.

    Args:
        address: HOST:PORT of a cluster that this machine belongs to, "auto" (one that runs here)
            or "local" (one that is started here and ends with the block). None leaves the
            choice to Ray (`RAY_ADDRESS`, else "auto", else "local"). A connection that the caller
            has is used, and kept.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: there is no cluster at the address.
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
            # Ray would wait minutes for an address at which nobody answers.
            place = (host.strip("[]"), int(port))
            socket.create_connection(place, timeout=_SECONDS_TO_ANSWER).close()
        with _signal_handlers_kept(), _no_usage_statistics():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # A cluster's problems are raised as nearly any kind of error.
    except Exception as error:
        raise ConfigError(
            f"no ray cluster can be used at '{address or 'local'}' ({_reason(error)}): start "
            "one with `ray start --head`, or have one for this run with --ray-address local"
        ) from error


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray would have SIGTERM end the process in the middle of whatever it does."""
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
    """A cluster started here reports to nobody, unless its user has asked for it."""
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
    """Ray Data without its logs and progress bars, and with blocks in their order."""
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
    """Each piece with its tokens, in the order of the pieces."""
    arguments = {
        "tokenizer": ray.put(tokenizer.backend.to_str()),
        "library": tokenizers.__version__,
    }
    blocks = batches(pieces, _BLOCK_CHARACTERS)
    waiting: deque[tuple[list[list[TextPiece]], AsyncResult[list[Any]]]] = deque()
    stopped = threading.Event()
    # Its threads don't keep an interrupted process from ending.
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
    """Number of blocks of a dataset, by the cluster's present size, which may change."""
    return max(1, min(_BLOCKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)), _MAX_BLOCKS))


def _run_dataset(
    ray: Any, window: list[list[TextPiece]], arguments: dict[str, Any], stopped: threading.Event
) -> list[Any]:
    """The encoded tables of a dataset of these blocks, in order; their memory is the cluster's."""
    arrow = optional("pyarrow", _PURPOSE, "ray")
    texts = ([piece.text for piece in block] for block in window)
    tables = [arrow.table({"text": arrow.array(block, arrow.large_string())}) for block in texts]
    # The dataset holds its texts until all is done: lost ids are made from them again.
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
    """On a node: the tokens of each text of a table, or the error that is for people."""
    arrow = optional("pyarrow", _PURPOSE, "ray")
    try:
        _require_library(library)
        arrays = encode(table.column("text").to_pylist(), _tokenizer(tokenizer))
    # As data: an exception would come back as the text of a traceback.
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
    """A process of a node builds it once, and keeps it."""
    return tokenizer_from_json(optional("ray", _PURPOSE, "ray").get(reference))


def _results(waiting: deque[tuple[list[list[TextPiece]], AsyncResult[list[Any]]]]) -> Encoded:
    """Wait for the oldest dataset, and take it away: its pieces with their tokens."""
    window, job = waiting[0]
    try:
        tables = job.get()
    # A cluster fails in many ways, and tasks with whatever their nodes lack.
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
    """The cause's one line: Ray's errors are tracebacks of another process, the cause first."""
    first = str(error).partition("The above exception was the direct cause")[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
