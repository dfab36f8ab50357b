"""Child processes of the benchmarks."""

import subprocess
import time

import psutil

CUT_OFF = 75
"""Exit code of a command that ran out of time and resumes when run again: EX_TEMPFAIL of sysexits.h."""


def stop_process(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Terminate a process, and kill it after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return the user and kernel time of all threads of a process, in seconds.

    `clock_getcpuclockid` has nanosecond resolution, `/proc` only hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)
