"""Run a program that ends with its parent: `python die_with_parent.py PARENT PROGRAM ARGUMENTS...`.

The kernel kills it when its parent ends, however that ends. This is done in the child's own program rather than between
fork and exec, where a parent with threads may have left locks held that Python code would wait for.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *argv = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the call above
        sys.exit(1)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
