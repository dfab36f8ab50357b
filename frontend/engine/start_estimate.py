"""Estimate when an engine will be ready, from its last start."""

import math

from tandem.frontend.process import FIRST_BACKOFF, LAST_BACKOFF, STEADY_SECONDS
from tandem.protocol.events import Heartbeat, Phase

UNKNOWN_SECONDS = 5
"""Default estimate in seconds, without a previous start or if this one takes longer."""
MAX_SECONDS = 60
"""Maximum estimate in seconds."""
PREPARING = (Phase.STARTING, Phase.LOADING, Phase.WARMING)
"""Phases before an engine is ready."""
_MIN_PERCENT = 5
"""Minimum loading progress for extrapolating the rest."""


class StartEstimate:
    """Estimator of the seconds until an engine is ready.

    It is the remaining time according to the last start. While the engine is silent, or if its first heartbeats were
    missed, it is the remaining time of a restart: the supervisor's pause plus the time from process start to readiness.
    Otherwise it is extrapolated from the progress of this start.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._began_at = 0.0
        """Time of the first heartbeat of this epoch."""
        self._is_whole = False
        """True if that heartbeat was sent at the beginning of the start."""
        self._first_percent = 0
        """Progress in that heartbeat."""
        self._percent: int | None = None
        """Progress of the start; None while the engine is not starting."""
        self._ready_epoch = 0
        self._ready_since = 0.0
        self._ready_at = 0.0
        """Time of the last heartbeat of a ready engine, or of its exit."""
        self._lost_epoch = 0
        self._pause = 0.0
        """Seconds between the exit of the last engine and the start of the next."""
        self._start: float | None = None
        """Seconds from the first heartbeat to readiness, in the last start."""
        self._boot: float | None = None
        """Seconds from the process start to readiness, in the last start."""

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        """Update the estimate from a heartbeat received at this time."""
        self._percent = heartbeat.percent if heartbeat.phase in PREPARING else None
        if heartbeat.engine_epoch != self._epoch:
            self._epoch, self._began_at = heartbeat.engine_epoch, now
            self._is_whole = self._percent is not None and self._percent < _MIN_PERCENT
            self._first_percent = heartbeat.percent
        if heartbeat.phase is not Phase.READY:
            return
        if self._ready_epoch != self._epoch:
            if self._is_whole:
                self._start = now - self._began_at
            if self._ready_epoch:
                self._boot = max(now - self._ready_at - self._pause, 0.0)
            else:
                self._boot = heartbeat.stats.start_seconds or self._start
            self._ready_epoch, self._ready_since = self._epoch, now
        self._ready_at = now

    def lose(self, end: float) -> None:
        """Record the exit of the engine, which may be in the future.

        It may have been silent before its restart began.
        """
        if self._ready_epoch != self._epoch:
            return
        if self._lost_epoch != self._epoch:
            self._lost_epoch = self._epoch
            is_steady = end - self._ready_since > STEADY_SECONDS
            self._pause = FIRST_BACKOFF if is_steady or not self._pause else min(2 * self._pause, LAST_BACKOFF)
        self._ready_at = end

    def seconds(self, now: float) -> int:
        """Estimate the seconds until the engine is ready, between 1 and MAX_SECONDS."""
        left = self._left(now)
        if left is None or left <= 0.0:
            return UNKNOWN_SECONDS
        return min(max(math.ceil(left), 1), MAX_SECONDS)

    def _left(self, now: float) -> float | None:
        """Return the remaining seconds; None if unknown.

        0 or less if the estimate has elapsed.
        """
        elapsed = now - self._began_at
        if self._percent is not None and self._start is not None:
            return self._start - elapsed
        left = None if self._boot is None else self._pause + self._boot - (now - self._ready_at)
        if self._percent is None or (left is not None and left > 0.0):
            return left
        progress = self._percent - self._first_percent
        return max(elapsed * (100 - self._percent) / progress, 1.0) if progress >= _MIN_PERCENT else None
