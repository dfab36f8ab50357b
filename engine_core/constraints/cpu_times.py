"""CPU time of grammars while they are being compiled."""

import threading
import time


class CpuTimes:
    """CPU time of the threads that compile, by grammar.

    A thread must live for as long as its grammar is counted.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, float]] = {}
        """Clock of the thread, and its time at the beginning in seconds."""

    def begin(self, grammar: str) -> None:
        """Count the time of the calling thread for a grammar from now on."""
        self._running[grammar] = (time.pthread_getcpuclockid(threading.get_ident()), time.thread_time())

    def end(self, grammar: str) -> None:
        """Count no more."""
        del self._running[grammar]

    def seconds(self, grammar: str) -> float:
        """Return the CPU time in seconds that a grammar has taken so far.

        Return 0 if it is not being compiled.
        """
        running = self._running.get(grammar)
        return 0.0 if running is None else time.clock_gettime(running[0]) - running[1]
