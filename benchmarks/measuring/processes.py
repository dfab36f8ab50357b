"""Child processes of the benchmarks."""

import subprocess
import time

import psutil

CUT_OFF = 75
"""Exit code of a command that ended in time without all that it should measure: it goes on when it runs again. It is
EX_TEMPFAIL of sysexits.h."""


def stop_process(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Ask a process to end, and kill it if it has not ended after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started, directly or not."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in user and kernel mode.

    It is read from the process's own clock (`clock_getcpuclockid`), in nanoseconds where `/proc` has hundredths.
    """
    return time.clock_gettime((~pid << 3) | 2)
