"""Thread pools that compile grammars of similar cost, shared fairly between API keys."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tandem.protocol.fair_queue import FairQueue

NICENESS = 10
"""Niceness of threads for slow grammars, relative to the engine's other threads."""
MAX_NICENESS = 19
"""Lowest priority of a thread on Linux."""


class CompileTurns:
    """Grammars waiting for one of a few threads, and those that have one.

    API keys take turns, and no key gets all threads: a compilation cannot be stopped, so one slow grammar per thread
    would otherwise delay all other keys for seconds. Requests without a key are treated as one key that may use all
    threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: FairQueue[str] = FairQueue()
        self._running: dict[str, str] = {}
        """Key of each grammar that has a thread."""

    def add(self, key: str, grammar: str) -> None:
        """Append a grammar to those of a key.

        A grammar that several keys wait for is compiled at the first turn of any of them.
        """
        self._queue.add(key, grammar)

    def remove(self, grammar: str) -> None:
        """Remove a grammar from the queue."""
        self._queue.remove(grammar)

    def take(self) -> str | None:
        """Give a free thread to the next grammar and return it.

        Return None if no thread is free, or if every waiting key has all the threads that it may use.
        """
        if len(self._running) >= self._num_threads:
            return None
        found = self._queue.take(self._may_have_another)
        if found is None:
            return None
        key, grammar = found
        self._queue.charge(key, 1.0)
        self._queue.remove(grammar)
        self._running[grammar] = key
        return grammar

    def end(self, grammar: str) -> None:
        """Release the thread of a grammar."""
        del self._running[grammar]

    def close(self) -> None:
        """Give out no more threads."""
        self._num_threads = 0

    def _may_have_another(self, key: str) -> bool:
        limit = max(self._num_threads - 1, 1) if key else self._num_threads
        return sum(holder == key for holder in self._running.values()) < limit


class CompileLane:
    """Thread pool for grammars up to a limit of CPU time, with its queue.

    A compilation cannot be stopped. One that exceeds `overrun_seconds` is moved to a spare thread, so that the number
    of threads for other grammars stays the same. There are at most `spare_threads` of these.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_seconds: float = float("inf"),
        *,
        spare_threads: int = 0,
        overrun_seconds: float = float("inf"),
        niceness: int = 0,
    ) -> None:
        """Create the threads.

        max_seconds: CPU time, as measured by a frontend, up to which a grammar belongs to this lane; niceness: added
        to the niceness of the process.
        """
        self.max_seconds = max_seconds
        self.overrun_seconds = overrun_seconds
        self.spare_threads = spare_threads
        self._pool = ThreadPoolExecutor(num_threads + spare_threads, name, _lower_priority, (niceness,))
        self._turns = CompileTurns(num_threads)
        self._set_aside: set[str] = set()
        """Grammars on spare threads."""

    def add(self, key: str, grammar: str) -> None:
        """Append a grammar to those of a key."""
        self._turns.add(key, grammar)

    def remove(self, grammar: str) -> None:
        """Remove a grammar from the queue."""
        self._turns.remove(grammar)

    def take(self) -> str | None:
        """Give a free thread to the next grammar and return it; None without either."""
        return self._turns.take()

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Call a function on one of the threads."""
        return self._pool.submit(work)

    def end(self, grammar: str) -> None:
        """Release the thread of a grammar."""
        if grammar in self._set_aside:
            self._set_aside.remove(grammar)
        else:
            self._turns.end(grammar)

    def set_aside(self, grammar: str) -> None:
        """Move a grammar to a spare thread, if there is one left."""
        if grammar not in self._set_aside and len(self._set_aside) < self.spare_threads:
            self._set_aside.add(grammar)
            self._turns.end(grammar)

    def close(self) -> None:
        """Give out no more threads; compilations in progress continue."""
        self._turns.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread.

    On Linux it belongs to the thread, not to the process.
    """
    if niceness:
        lowest = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lowest)
