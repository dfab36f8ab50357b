"""SIGTERM as an exception, for work that Ctrl-C ends too.

Such work then cleans up, and says what it has kept.
"""

import signal
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
