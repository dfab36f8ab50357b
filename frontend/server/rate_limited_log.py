"""Log of what clients can cause as often as they like, bounded in lines."""

import asyncio
import logging
from typing import Any

INTERVAL_SECONDS = 10.0


class RateLimitedLog:
    """Log that writes at most two lines of a kind in an interval.

    The first message of a kind is written at once. Those that follow within `interval` seconds are counted, and the
    last of them is written with their number at its end. Kinds are a bounded set. Needs a running event loop.
    """

    def __init__(self, logger: logging.Logger, interval: float = INTERVAL_SECONDS) -> None:
        self._logger = logger
        self._interval = interval
        self._held: dict[str, tuple[int, str, dict[str, Any]]] = {}
        """Number of the messages withheld, and the last with its fields, of each kind logged within the interval."""

    @property
    def num_kinds(self) -> int:
        """Number of kinds of which there was a message within the interval."""
        return len(self._held)

    def warning(self, kind: str, message: str, extra: dict[str, Any] | None = None) -> None:
        """Log a message, or count it if one of its kind was logged recently.

        extra: the fields of the line, from `with_fields`.
        """
        extra = extra or {}
        if kind in self._held:
            self._held[kind] = (self._held[kind][0] + 1, message, extra)
            return
        self._logger.warning("%s", message, extra=extra)
        self._hold(kind)

    def _hold(self, kind: str) -> None:
        self._held[kind] = (0, "", {})
        asyncio.get_running_loop().call_later(self._interval, self._release, kind)

    def _release(self, kind: str) -> None:
        count, last, extra = self._held.pop(kind)
        if count:
            self._logger.warning("%s (the last of %d more in %.0f s)", last, count, self._interval, extra=extra)
            self._hold(kind)
