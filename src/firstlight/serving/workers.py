"""Threads that parse and encode requests.

A large body takes seconds to encode. Two rules keep the requests of others from waiting for it:
clients take turns, and one of the two threads takes only small bodies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

#: Greatest size of a small body, in bytes; it takes milliseconds to encode.
SMALL_BODY_BYTES = 32 * 2**10


@dataclass(eq=False)
class _Job:
    """Work that waits for a thread.

    Attributes:
        size: bytes of the request's body.
        work: the function to call.
        future: future with the result of `work`; cancelled if nobody waits for it any more.
    """

    size: int
    work: Callable[[], Any]
    future: Future[Any]


class Workers:
    """Two threads: one for jobs of any size, and one for small jobs only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Client -> its waiting jobs (at least one); the client whose turn is next comes first.
        self._waiting: dict[str, list[_Job]] = {}
        self._any = ThreadPoolExecutor(1, thread_name_prefix="firstlight-request")
        self._small = ThreadPoolExecutor(1, thread_name_prefix="firstlight-small-request")
        for executor in (self._any, self._small):
            executor.submit(int)  # its thread starts now: there may be no memory for it later
        self._stopped = False

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Args:
            client: name of the client; clients take turns.
            size: bytes of the request's body.
            work: function that is called in a thread.

        Returns:
            Future with the result of `work`. It is cancelled if the threads end before the job's
            turn; cancelling it drops the job.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                future.cancel()
                return future
            # Cancelled jobs are dropped here, too: their bodies would take memory while both
            # threads are busy.
            for name, jobs in list(self._waiting.items()):
                jobs[:] = [job for job in jobs if not job.future.cancelled()]
                if not jobs:
                    del self._waiting[name]
            self._waiting.setdefault(client, []).append(_Job(size, work, future))
            # When the thread is free, it takes the job whose turn it is then, not always this job.
            self._any.submit(self._run_next, None)
            if size <= SMALL_BODY_BYTES:
                self._small.submit(self._run_next, SMALL_BODY_BYTES)
        return future

    def stop(self) -> None:
        """Cancel waiting jobs; each thread ends after its current job."""
        with self._lock:
            self._stopped = True
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for executor in (self._any, self._small):
            executor.shutdown(wait=False, cancel_futures=True)
        for job in left:
            job.future.cancel()

    def _run_next(self, largest: int | None) -> None:
        job = self._take(largest)
        if job is None:
            return  # the other thread has taken the job, or it was cancelled
        try:
            result = job.work()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _take(self, largest: int | None) -> _Job | None:
        """Remove and return the next job of at most `largest` bytes (None is any size); None if
        there is none. The job's client goes to the end of the order of turns."""
        with self._lock:
            for client, jobs in list(self._waiting.items()):
                for job in list(jobs):
                    if largest is not None and job.size > largest:
                        continue
                    jobs.remove(job)
                    if job.future.set_running_or_notify_cancel():
                        del self._waiting[client]
                        if jobs:
                            self._waiting[client] = jobs
                        return job
                if not jobs:
                    del self._waiting[client]
        return None
