"""Wait for libzmq's I/O threads, which do not report when they have sent."""

import contextlib
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "ZMQbg/IO"
"""Prefix of the names that libzmq gives to these threads."""
_PAUSE_SECONDS = 0.001
_BLIND_SECONDS = 0.02
"""Wait where the threads cannot be found."""


def await_idle_threads(most: float) -> None:
    """Wait until libzmq has passed earlier sends to the kernel.

    A send wakes the thread of its connection at once, and the thread sleeps again when it has written everything, also
    on a machine where it gets no core for a while. most: maximum wait, in seconds.
    """
    until = time.monotonic() + most
    if not (states := thread_states()):
        time.sleep(_BLIND_SECONDS)
    while any(state != "S" for state in states) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
        states = thread_states()


def thread_states() -> list[str]:
    """Return the kernel's letter for the state of each of libzmq's threads; S sleeps."""
    states = []
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().startswith(_NAME):
                # The name, in parentheses, may hold anything; the state follows it.
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
