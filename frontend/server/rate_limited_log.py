"""Log of what clients can cause as often as they like, bounded in lines."""

import asyncio
import logging

INTERVAL_SECONDS = 10.0


class RateLimitedLog:
    """Log that writes at most two lines of a kind in an interval.

    The first message of a kind is written at once. Those that follow within `interval` seconds are counted, and the
    last of them is written with their number at its end. Kinds are a bounded set. Needs a running event loop.
    """

    def __init__(self, logger: logging.Logger, interval: float = INTERVAL_SECONDS) -> None:
        self._logger = logger
        self._interval = interval
        self._held: dict[str, tuple[int, str]] = {}
        """Number and last of the messages withheld, of each kind that was logged within the interval."""

    @property
    def num_kinds(self) -> int:
        """Number of kinds of which there was a message within the interval."""
        return len(self._held)

    def warning(self, kind: str, message: str) -> None:
        """Log a message, or count it if one of its kind was logged recently."""
        if kind in self._held:
            self._held[kind] = (self._held[kind][0] + 1, message)
            return
        self._logger.warning("%s", message)
        self._hold(kind)

    def _hold(self, kind: str) -> None:
        self._held[kind] = (0, "")
        asyncio.get_running_loop().call_later(self._interval, self._release, kind)

    def _release(self, kind: str) -> None:
        count, last = self._held.pop(kind)
        if count:
            self._logger.warning("%s (the last of %d more in %.0f s)", last, count, self._interval)
            self._hold(kind)
