"""Log of what peers can cause as often as they like, bounded in lines."""

import logging
import time
from collections.abc import Callable

INTERVAL_SECONDS = 10.0


class LimitedLog:
    """Log that writes at most one line of a kind in an interval.

    The next line of a kind then says how many were left out. Kinds are a bounded set. Used by one thread.
    """

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic, interval: float = INTERVAL_SECONDS
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._interval = interval
        self._kinds: dict[str, tuple[float, int]] = {}
        """Time of the last line of each kind, and number of those left out since."""

    def warning(self, kind: str, template: str, *values: object) -> None:
        """Log a warning, or count it if one of its kind was logged lately."""
        self._write(logging.WARNING, kind, template, *values)

    def info(self, kind: str, template: str, *values: object) -> None:
        """Log what is not a fault, in the same way."""
        self._write(logging.INFO, kind, template, *values)

    def _write(self, level: int, kind: str, template: str, *values: object) -> None:
        now = self._clock()
        last, omitted = self._kinds.get(kind, (now - self._interval, 0))
        if now - last < self._interval:
            self._kinds[kind] = last, omitted + 1
            return
        self._kinds[kind] = now, 0
        if omitted:
            template, values = template + " (and %d more like it since the last such line)", (*values, omitted)
        self._logger.log(level, template, *values)
