"""Ends of commands: the code of an interrupt, and output that cannot be written."""

import errno
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's share of it, that is full."""


def write_out(run: Callable[[], int]) -> int:
    """Run a command, write out what it has printed, and return its exit code.

    The code is 1 if the reader of stdout is gone, or, with a line on stderr, if a disk is full.
    """
    try:
        try:
            return run()
        finally:  # after a parser's exit too
            if sys.stdout is not None:  # as it is where it was closed
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        place = error.filename or "the output"
        print(f"tandem: {place} cannot be written: {error.strerror}; free space there", file=sys.stderr)
        _discard_output()
        return 1


def _discard_output() -> None:
    """Discard what is buffered for stdout.

    It would be tried again at the end of the process.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
