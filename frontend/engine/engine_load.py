"""Rates at which an engine works off the requests of all its frontends."""

import time
from collections.abc import Callable

from tandem.frontend.engine.departures import Departures
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Heartbeat


class EngineLoad:
    """Count of what leaves an engine's queues, from the counters of its heartbeats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._ended = Departures(clock)
        self._prefilled = Departures(clock)
        self._epoch: int | None = None
        self._num_ended = 0
        self._num_prefilled = 0

    def observe(self, heartbeat: Heartbeat) -> None:
        """Count what has left since the last heartbeat of the same life."""
        stats = heartbeat.stats
        failed = stats.requests_failed
        refused = failed.get(ErrorCode.OVERLOADED.value, 0) + failed.get(ErrorCode.RATE_LIMITED.value, 0)
        finished = sum(stats.requests_finished.values()) - stats.requests_finished.get("error", 0)
        ended = finished + sum(failed.values()) - refused
        if heartbeat.engine_epoch == self._epoch:
            self._ended.add(ended - self._num_ended)
            self._prefilled.add(stats.prompt_tokens - self._num_prefilled)
        self._epoch, self._num_ended, self._num_prefilled = heartbeat.engine_epoch, ended, stats.prompt_tokens

    def seconds_until_ended(self, count: int) -> int:
        """Estimate the seconds until this many sequences have ended."""
        return self._ended.seconds_until(count)

    def seconds_until_prefilled(self, tokens: int) -> int:
        """Estimate the seconds until this many waiting prompt tokens have been admitted."""
        return self._prefilled.seconds_until(tokens)
