"""Processes that are held by SIGSTOP or have ended."""

import os
import signal
import time
from pathlib import Path

import psutil


def stop_process(pid: int) -> int:
    """Stop a process; return its id once every thread has stopped.

    SIGSTOP takes effect when the kernel next schedules the process: on a loaded machine one of its threads may still
    answer a request after `os.kill` has returned.
    """
    os.kill(pid, signal.SIGSTOP)
    while not _is_stopped(pid):
        time.sleep(0.001)
    return pid


def stop_group(pid: int) -> int:
    """Stop all processes of a group; return its id, that of its leader, once they have stopped."""
    os.killpg(pid, signal.SIGSTOP)
    for member in (pid, *(child.pid for child in psutil.Process(pid).children())):
        while not _is_stopped(member):
            time.sleep(0.001)
    return pid


def is_running(process: psutil.Process) -> bool:
    """Tell whether a process has not ended.

    One that has may be left as a zombie for a while, until its parent, or the system if that has gone, looks at it.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_stopped(pid: int) -> bool:
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
        return False
    return set(states) == {"T"}
