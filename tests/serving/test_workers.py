"""Threads that read requests: not the event loop's, in turns, and never kept by large bodies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from live import new_direct, request_for
from tiny import PATIENCE

from firstlight.serving.workers import SMALL_BODY_BYTES, Workers

LARGE = SMALL_BODY_BYTES + 1


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.stop()


def test_threads_start_with_the_workers_not_with_the_first_request(workers: Workers) -> None:
    names = {thread.name for thread in threading.enumerate()}
    assert {"firstlight-request_0", "firstlight-small-request_0"} <= names


def occupied(workers: Workers, size: int) -> tuple[threading.Event, Future[bool]]:
    """A job that runs until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return over.wait(PATIENCE)

    future = workers.submit("busy", size, work)
    assert begun.wait(PATIENCE), f"waited {PATIENCE:g} s for a job of size {size} to begin"
    return over, future


def test_clients_take_turns(workers: Workers) -> None:
    over, _ = occupied(workers, LARGE)
    done: list[str] = []
    names = ["many 1", "many 2", "many 3", "one 1", "other 1"]
    futures = [
        workers.submit(name.split()[0], LARGE, lambda name=name: done.append(name))  # type: ignore[misc]
        for name in names
    ]
    over.set()
    for future in futures:
        future.result(PATIENCE)
    assert done == ["many 1", "one 1", "other 1", "many 2", "many 3"]


def test_a_small_body_does_not_wait_for_large_ones_of_its_own_client(workers: Workers) -> None:
    over, _ = occupied(workers, LARGE)
    large = workers.submit("busy", LARGE, lambda: True)
    assert workers.submit("busy", SMALL_BODY_BYTES, lambda: "small").result(PATIENCE) == "small"
    assert not large.done()
    over.set()
    assert large.result(PATIENCE)


def test_cancelled_jobs_are_dropped_and_the_others_fail_at_the_end(workers: Workers) -> None:
    over, busy = occupied(workers, LARGE)
    cancelled, left = (workers.submit("one", LARGE, lambda: True) for _ in range(2))
    assert cancelled.cancel()
    after = workers.submit("other", LARGE, lambda: True)
    assert [job.future for jobs in workers._waiting.values() for job in jobs] == [left, after]
    workers.stop()
    for future in (left, after, workers.submit("late", 1, lambda: True)):
        with pytest.raises(CancelledError):
            future.result(PATIENCE)
    over.set()
    assert busy.result(PATIENCE)


def test_a_job_s_error_is_its_caller_s(workers: Workers) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        workers.submit("one", 1, fail).result(PATIENCE)


def test_a_client_that_leaves_before_its_body_is_read_is_not_waited_for() -> None:
    app = new_direct()
    over, _ = occupied(app.service._workers, LARGE)
    small_over, _ = occupied(app.service._workers, 1)
    request = request_for("/v1/completions", {"prompt": "x"})

    async def leave() -> Any:
        task = asyncio.create_task(app.answer(request))
        while not app.service._preparing:
            await asyncio.sleep(0)
        request.gone.set()
        return await task

    try:
        assert app.run(leave()).status == 499
    finally:
        over.set()
        small_over.set()
        app.close()
    assert app.decoder.prompts == []
