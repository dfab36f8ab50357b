"""Log an engine's progress and throughput."""

import logging
import time
from collections.abc import Callable
from typing import TextIO

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.progress import WIDTH, Progress
from tandem.protocol.events import Heartbeat, Phase

logger = logging.getLogger(__name__)

LOADING_SECONDS = 2.0
"""Seconds between two log lines while the engine loads."""
THROUGHPUT_SECONDS = 10.0
"""Seconds between two log lines while the engine serves."""


class StatusLog:
    """Report the engine's activity at intervals.

    While it loads, log the percentage when it changes; on a terminal, show a progress bar for the weights. While it
    serves, log tokens per second and the load. Nothing is logged for an interval without activity. `clock` returns
    monotonic seconds; `out` is the terminal, stderr by default.
    """

    def __init__(
        self, watch: EngineWatch, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None
    ) -> None:
        self._watch = watch
        self._clock = clock
        self._logged_at = clock()
        self._progress = ""
        """Last progress line; equal ones are not repeated."""
        self._bar = Progress("loading", out=out)
        self._has_bar = False
        self._last: Heartbeat | None = None
        """Heartbeat at the start of the interval; None if the engine did not serve then."""

    def tick(self) -> None:
        """Log a line if its interval has elapsed; call this several times a second."""
        heartbeat, now = self._watch.heartbeat, self._clock()
        if self._draw(heartbeat):
            return
        if heartbeat is None or heartbeat.phase is not Phase.READY:
            self._last = None
            if heartbeat is not None and now - self._logged_at >= LOADING_SECONDS:
                self._logged_at = now
                health = self._watch.health()
                if health.status == "loading" and health.reason != self._progress:
                    self._progress = health.reason
                    logger.info("%s", health.reason)
        elif self._last is None or self._last.engine_epoch != heartbeat.engine_epoch:
            self._last, self._logged_at = heartbeat, now
        elif now - self._logged_at >= THROUGHPUT_SECONDS:
            line = throughput_line(self._last, heartbeat, now - self._logged_at)
            self._last, self._logged_at = heartbeat, now
            if line:
                logger.info("%s", line)

    def _draw(self, heartbeat: Heartbeat | None) -> bool:
        """Draw the progress bar of the weights on a terminal, or remove it afterwards.

        It is removed after loading, because the engine may log to the same terminal. Return True while the bar is
        shown.
        """
        loads = heartbeat is not None and heartbeat.phase is Phase.LOADING and heartbeat.percent < 100
        loads = loads and not self._watch.is_silent
        if heartbeat is not None and loads and self._bar.is_shown:
            filled = WIDTH * heartbeat.percent // 100
            self._bar.show(self._bar.bar(filled, f"{heartbeat.percent:3} %  {heartbeat.detail}"))
            self._has_bar = True
        elif self._has_bar:
            self._bar.clear()
            self._has_bar = False
        return self._has_bar


def throughput_line(before: Heartbeat, after: Heartbeat, seconds: float) -> str:
    """Describe the load between two heartbeats of one engine; "" if it was idle."""
    old, new = before.stats, after.stats
    prompt, generated = new.prompt_tokens - old.prompt_tokens, new.generation_tokens - old.generation_tokens
    if not (prompt or generated or new.running or new.waiting):
        return ""
    kv_usage = 100 * new.pages_used / new.pages_total if new.pages_total else 0.0
    queries = new.prefix_queries - old.prefix_queries
    hits = new.prefix_hits - old.prefix_hits
    hit_rate = f", prefix cache hit rate {100 * hits / queries:.0f} %" if queries else ""
    return (
        f"prompt {prompt / seconds:,.1f} tokens/s, generation {generated / seconds:,.1f} tokens/s, "
        f"running {new.running}, waiting {new.waiting}, KV cache usage {kv_usage:.1f} %{hit_rate}"
    )
