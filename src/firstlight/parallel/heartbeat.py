"""The heartbeat of a rank: it notices ranks that have stopped answering, and if necessary ends this
process.

A process that is killed, stopped or stuck leaves the others in the middle of an exchange, which
ends after the timeout, or never. So each rank has two background threads. The beating thread writes
this rank's heartbeats to the store, and reads those of other ranks. The deciding thread decides
whether a rank has failed; it never waits for the store, whose host may have stopped. Rank 0 watches
all ranks, and all ranks watch rank 0, so that the traffic grows linearly with the number of ranks.

The time without a heartbeat is added up in short intervals of this process' own running time. So a
process that was itself stopped (SIGSTOP), or whose interpreter lock was held for a minute, does not
blame the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore

from firstlight.parallel.rendezvous import RankInfo, failure_of, hosted_by_agent, tell_failure

#: Seconds between two heartbeats, and between two decisions.
_BEAT_SECONDS = 1.0
_DECIDE_SECONDS = 0.25

#: Seconds without a heartbeat after which a rank has failed, once an exchange has failed.
_SUSPICIOUS_SECONDS = 5.0

#: Seconds in which the main thread has to notice a known failure and to unwind. A thread that waits
#: in a collective operation can't: no Python exception reaches it there.
_GRACE_SECONDS = 3.0


class Heartbeat:
    """Watches the ranks of a world; its threads start in the constructor.

    Args:
        store: the store of the ranks.
        own: this process.
        infos: all ranks, in their order.
        timeout_seconds: seconds without a heartbeat after which a rank has failed.

    Attributes:
        failure: the message about the failure that ended the run, which names a rank; None without
            a failure.
    """

    def __init__(
        self, store: PrefixStore, own: RankInfo, infos: Sequence[RankInfo], timeout_seconds: float
    ) -> None:
        self.failure: str | None = None
        # Another connection to the store: calls on one connection wait for each other.
        self._beat_store: PrefixStore = store.clone()  # type: ignore[attr-defined]
        self._store = store
        self._own = own
        self._infos = infos
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._beats: dict[int, bytes] = {}
        self._silent = dict.fromkeys(range(len(infos)), 0.0)
        self._store_silent = 0.0
        self._store_error = ""
        self._suspicious = False
        self._decided = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"firstlight-{work.__name__}", daemon=True)
            for work in (self._beat, self._decide_repeatedly)
        ]
        for thread in self._threads:
            thread.start()

    def blame(self) -> str | None:
        """After a failed exchange: wait until it is known which rank has failed.

        Returns:
            The message about the failure, which names a rank; None if all ranks still answer.
        """
        # From now on this rank watches all ranks with a short limit: any of them may have failed.
        self._suspicious = True
        # The time counts from a rank's last heartbeat, which may have just come.
        self._decided.wait(_SUSPICIOUS_SECONDS + 3 * _BEAT_SECONDS)
        return self.failure

    def report(self, message: str) -> None:
        """Tell the other ranks that this rank has failed."""
        tell_failure(self._store, f"{self._own.name} failed: {message}")

    def stop(self) -> None:
        """Stop both threads: the main thread leaves the group, with or without an error."""
        self._stopped.set()
        for thread in self._threads:
            # A thread that waits for a stopped store can't be joined: it is left as a daemon.
            thread.join(_BEAT_SECONDS)

    def _beat(self) -> None:
        """The beating thread: write this rank's heartbeats, read those of watched ranks."""
        count = 0
        keys = [f"beat/{rank}" for rank in range(len(self._infos))]
        try:
            while True:
                count += 1
                self._beat_store.set(keys[self._own.rank], str(count))
                watched = self._watched()
                values = self._beat_store.multi_get([keys[rank] for rank in watched])
                failure = failure_of(self._beat_store)
                with self._lock:
                    self._store_silent = 0.0
                    for rank, value in zip(watched, values, strict=True):
                        if self._beats.get(rank) != value:
                            self._beats[rank] = value
                            self._silent[rank] = 0.0
                if failure is not None:
                    self._decide(failure)
                    return
                if self._stopped.wait(_BEAT_SECONDS):
                    return
        except RuntimeError as error:
            self._store_error = (str(error).splitlines() or [type(error).__name__])[0]

    def _watched(self) -> list[int]:
        others = [rank for rank in range(len(self._infos)) if rank != self._own.rank]
        return others if self._own.rank == 0 or self._suspicious else [0]

    def _decide_repeatedly(self) -> None:
        """The deciding thread: find failed ranks, and end the process if the main thread does not
        do so in time."""
        before = time.monotonic()
        while not self._stopped.wait(_DECIDE_SECONDS):
            now = time.monotonic()
            # In a longer gap this process itself was stopped, which says nothing about others.
            passed, before = min(now - before, 2 * _DECIDE_SECONDS), now
            if self.failure is None:
                self._count(passed)
                continue
            if not self._stopped.wait(_GRACE_SECONDS):
                _end_process(self.failure)

    def _count(self, passed: float) -> None:
        """Add `passed` seconds to the time without a heartbeat of each watched rank and without an
        answer of the store, and decide whether one of them is over its limit."""
        limit = min(self._timeout, _SUSPICIOUS_SECONDS) if self._suspicious else self._timeout
        with self._lock:
            self._store_silent += passed
            watched = self._watched()
            for rank in watched:
                self._silent[rank] += passed
            silent = max(watched, key=lambda rank: self._silent[rank])
            seconds, store_seconds = self._silent[silent], self._store_silent
        if self._store_error:
            self._decide(f"{self._store_owner()} has gone: {self._store_error}")
        elif store_seconds >= limit:
            self._decide(f"{self._store_owner()} has not answered for {store_seconds:.0f} s")
        elif seconds >= limit:
            info = self._infos[silent]
            self._decide(f"{info.name} (pid {info.pid}) has not answered for {seconds:.0f} s")
            tell_failure(self._store, str(self.failure))

    def _store_owner(self) -> str:
        if hosted_by_agent():
            return "the launcher (torch elastic's store, the rendezvous of the ranks)"
        return f"{self._infos[0].name} (pid {self._infos[0].pid})"

    def _decide(self, failure: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = failure
        self._decided.set()


def _end_process(failure: str) -> None:
    """Write the failure to stderr and end the process at once, because the main thread waits where
    no exception reaches it.

    Writes to the descriptor without Python's stderr object, whose lock the main thread may hold.
    """
    # Show the terminal's cursor again, which the live view of a run hides.
    start = "\n\033[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{start}firstlight: error: {failure}\n".encode(errors="replace"))
    os._exit(1)
