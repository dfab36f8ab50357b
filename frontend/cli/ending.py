"""Exit codes of commands, for interrupts and failed output."""

import errno
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130
"""Exit code after an interrupt."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""


def write_out(run: Callable[[], int]) -> int:
    """Run a command, flush its output, and return its exit code.

    The code is 1 if stdout is a closed pipe, or, with a message on stderr, if a disk is full.
    """
    try:
        try:
            return run()
        finally:  # also after the parser exits
            if sys.stdout is not None:  # as if it was closed
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        name = error.filename or "the output"
        print(f"tandem: {name} cannot be written: {error.strerror}; free space there", file=sys.stderr)
        _discard_output()
        return 1


def _discard_output() -> None:
    """Discard buffered output to stdout.

    It would be written again at exit.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
