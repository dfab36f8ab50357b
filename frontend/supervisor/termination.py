"""Signals of a process that does not serve yet.

SIGTERM is an exception for work that Ctrl-C ends too. Such work then cleans up, and says what it has kept.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that SIGTERM ended, as shells have it."""


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM."""


@contextmanager
def raised_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread, which enters this context, at a SIGTERM."""

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the cleaning up
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ignored_sighup() -> Iterator[None]:
    """Ignore SIGHUP, which asks for a reload, until a handler is installed.

    What it would reload is read at the end of the start. Outside of the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
