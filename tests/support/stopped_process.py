"""Processes held by SIGSTOP."""

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int) -> int:
    """Stop a process; return its id once every thread has stopped.

    SIGSTOP takes effect when the kernel next schedules the process: on a loaded machine one of its threads may still
    answer a request after `os.kill` has returned.
    """
    os.kill(pid, signal.SIGSTOP)
    while not _is_stopped(pid):
        time.sleep(0.001)
    return pid


def _is_stopped(pid: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}
