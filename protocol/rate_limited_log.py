"""Rate-limited logging of messages that peers can trigger at will."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

INTERVAL_SECONDS = 10.0


class RateLimitedLog:
    """Log one message of a kind per interval, and count the others.

    By default their number is at the end of the next line of that kind. With `at_interval_end` the last of them is
    logged with their number when the interval ends, which needs a running event loop. Kinds are a bounded set. Used by
    one thread.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_SECONDS,
        at_interval_end: bool = False,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._interval = interval
        self._at_interval_end = at_interval_end
        self._kinds: dict[str, tuple[float, int]] = {}
        """Time of the last line of each kind, and number of messages omitted since."""
        self._last: dict[str, tuple[int, str, tuple[object, ...], dict[str, Any] | None]] = {}
        """Level, template, values and fields of the last omitted message of each kind, until its interval ends."""

    @property
    def num_kinds(self) -> int:
        """Number of kinds in memory; with `at_interval_end`, those with a message within the interval."""
        return len(self._kinds)

    def warning(self, kind: str, template: str, *values: object, extra: dict[str, Any] | None = None) -> None:
        """Log a warning, or count it if one of its kind was logged within the interval.

        extra: the fields of the line, from `with_fields`.
        """
        self._write(logging.WARNING, kind, template, values, extra)

    def info(self, kind: str, template: str, *values: object) -> None:
        """Log a message that reports no fault, with the same limit."""
        self._write(logging.INFO, kind, template, values, None)

    def _write(
        self, level: int, kind: str, template: str, values: tuple[object, ...], extra: dict[str, Any] | None
    ) -> None:
        now = self._clock()
        last, omitted = self._kinds.get(kind, (-math.inf, 0))
        if now - last < self._interval or (self._at_interval_end and kind in self._kinds):
            self._kinds[kind] = last, omitted + 1
            if self._at_interval_end:
                self._last[kind] = level, template, values, extra
            return
        if omitted:
            template, values = template + " (and %d more like it since the last such line)", (*values, omitted)
        self._begin_interval(kind, now)
        self._logger.log(level, template, *values, extra=extra)

    def _begin_interval(self, kind: str, now: float) -> None:
        self._kinds[kind] = now, 0
        if self._at_interval_end:
            asyncio.get_running_loop().call_later(self._interval, self._end_interval, kind)

    def _end_interval(self, kind: str) -> None:
        _, omitted = self._kinds.pop(kind)
        if omitted:
            level, template, values, extra = self._last.pop(kind)
            values = (*values, omitted, self._interval)
            self._logger.log(level, template + " (the last of %d more in %.0f s)", *values, extra=extra)
            self._begin_interval(kind, self._clock())
