"""Lanes: threads that compile grammars of about the same cost."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tandem.engine_core.constraints.compile_turns import CompileTurns

NICENESS = 10
"""Priority of threads for slow grammars below that of the engine's others."""
MAX_NICENESS = 19
"""Lowest priority of a thread on Linux."""


class CompileLane:
    """A few threads, and the grammars that wait for one of them.

    A compilation cannot be stopped. One that takes longer than `overrun_seconds` therefore goes on beside the lane's
    threads, of which there are as many as before; at most `spare_threads` do so at a time.
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
        """Keep the sizes of a lane.

        max_seconds: CPU time that a frontend may have measured for a grammar of this lane; niceness: added to that of
        the process.
        """
        self.max_seconds = max_seconds
        self.overrun_seconds = overrun_seconds
        self.spare_threads = spare_threads
        self._pool = ThreadPoolExecutor(num_threads + spare_threads, name, _lower_priority, (niceness,))
        self._turns = CompileTurns(num_threads)
        self._set_aside: set[str] = set()
        """Grammars that are compiled beside the lane's threads."""

    def add(self, key: str, grammar: str) -> None:
        """Let a grammar wait for its turn."""
        self._turns.add(key, grammar)

    def remove(self, grammar: str) -> None:
        """Let a grammar wait no more."""
        self._turns.remove(grammar)

    def take(self) -> str | None:
        """Give a free thread to the grammar whose turn it is, and return that.

        Return None if no thread is free, or no grammar may have it.
        """
        return self._turns.take()

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Call a function on one of the threads."""
        return self._pool.submit(work)

    def end(self, grammar: str) -> None:
        """Take back the thread of a grammar."""
        if grammar in self._set_aside:
            self._set_aside.remove(grammar)
        else:
            self._turns.end(grammar)

    def set_aside(self, grammar: str) -> None:
        """Give the lane another thread in place of a grammar's, if one is left."""
        if grammar not in self._set_aside and len(self._set_aside) < self.spare_threads:
            self._set_aside.add(grammar)
            self._turns.end(grammar)

    def close(self) -> None:
        """Give no more threads; compilations in progress go on."""
        self._turns.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread.

    On Linux it belongs to the thread, not to the process.
    """
    if niceness:
        lowest = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lowest)
