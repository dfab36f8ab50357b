"""Estimate how long the requests of all frontends stay in an engine's queues."""

import random
import time
from collections.abc import Callable

from tandem.frontend.engine.retry_queue import RetryQueue
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Heartbeat, Limits

_ASSUMED_SEQUENCE_SECONDS = 20.0
"""Assumed seconds that a sequence holds its row, before any overload was observed. If too long, rows stay empty once;
if too short, most clients are refused a second time."""
_ASSUMED_PREFILL_SECONDS = 60.0
"""The same of a full queue of prompt tokens."""


class EngineLoad:
    """Load of an engine from its heartbeats, and the clients refused because of it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, uniform: Callable[[], float] = random.random
    ) -> None:
        """uniform: returns random numbers in [0, 1)."""
        self._sequences = RetryQueue(clock, uniform)
        self._tokens = RetryQueue(clock, uniform)
        self._heartbeat: Heartbeat | None = None
        self._ended = 0

    def observe(self, heartbeat: Heartbeat, limits: Limits | None) -> None:
        """Update the load from a heartbeat, if the limits are known."""
        stats = heartbeat.stats
        failed = stats.requests_failed
        refused = failed.get(ErrorCode.OVERLOADED.value, 0) + failed.get(ErrorCode.RATE_LIMITED.value, 0)
        finished = sum(stats.requests_finished.values()) - stats.requests_finished.get("error", 0)
        ended = finished + sum(failed.values()) - refused
        previous, self._heartbeat = self._heartbeat, heartbeat
        if previous is None or previous.engine_epoch != heartbeat.engine_epoch:
            ended_since = admitted_since = 0
        else:
            ended_since = ended - self._ended
            admitted_since = stats.prompt_tokens - previous.stats.prompt_tokens
        self._ended = ended
        is_full = limits is not None and heartbeat.pending >= limits.max_concurrent
        self._sequences.observe(ended_since, is_full or stats.waiting > 0)
        self._tokens.observe(admitted_since, stats.queued_prompt_tokens > 0)

    def retry_after(self, sequences: int, tokens: int, limits: Limits) -> int:
        """Return the Retry-After of a request refused by the engine, in seconds."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            return 1
        stats, excess = heartbeat.stats, heartbeat.pending + sequences - limits.max_concurrent
        excess_tokens = stats.queued_prompt_tokens + tokens - limits.max_queued_tokens
        if excess <= 0 < excess_tokens:
            return self.retry_after_prefill(min(excess_tokens, stats.queued_prompt_tokens), tokens, limits)
        excess_waiting = stats.waiting + sequences - limits.max_waiting
        return self.retry_after_end(max(excess, excess_waiting), sequences, limits)

    def retry_after_end(self, excess: int, sequences: int, limits: Limits) -> int:
        """Return the Retry-After of a request with this many sequences, in seconds.

        excess: sequences that must finish first.
        """
        assumed = limits.max_rows / _ASSUMED_SEQUENCE_SECONDS
        return self._sequences.refuse(excess, sequences, assumed, self._sharers)

    def retry_after_prefill(self, excess: int, tokens: int, limits: Limits) -> int:
        """Return the Retry-After of a request with this many prompt tokens, in seconds.

        excess: waiting prompt tokens that must be admitted first.
        """
        assumed = limits.max_queued_tokens / _ASSUMED_PREFILL_SECONDS
        return self._tokens.refuse(excess, tokens, assumed, self._sharers)

    @property
    def _sharers(self) -> int:
        return max(self._heartbeat.stats.frontends, 1) if self._heartbeat is not None else 1
