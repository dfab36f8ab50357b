"""Run a program that is killed when its parent exits.

Usage: `python die_with_parent.py PARENT PROGRAM ARGUMENTS...`, with the process id of the parent. The kernel sends the
signal, however the parent exits (Linux only). The child requests it after exec, because between fork and exec a parent
with threads may hold locks that Python code would wait for.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *argv = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Signals to the process group or to each process of a service are meant for the supervisor, which reloads.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.getppid() != int(parent):  # the parent exited before the call above
        sys.exit(1)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
