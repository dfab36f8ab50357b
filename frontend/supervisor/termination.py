"""Signal handling of a process that does not serve yet.

SIGTERM raises an exception, so that work which Ctrl-C can interrupt cleans up in the same way.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as in shells."""


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextmanager
def raised_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread, which enters this context, on SIGTERM."""

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ignored_sighup() -> Iterator[None]:
    """Ignore SIGHUP, which asks for a reload, until a handler is installed.

    The files are read at the end of the start anyway. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
