"""Simulation of a burst of clients that return when an overloaded server tells them to."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from tandem.frontend.engine.engine_load import EngineLoad
from tandem.protocol.events import Heartbeat, Limits, Phase
from tandem.protocol.stats import EngineStats

BEAT_SECONDS = 0.25
ROUND_TRIP = 0.06
"""Longest time of an answer and the next request together, in seconds."""
SERVICE: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.uniform(0.95, 1.05),
    "exponential": lambda rng: rng.expovariate(1.0),
    "heavy-tailed": lambda rng: math.exp(rng.gauss(-0.5, 1.0)),
}
"""Time for which a sequence holds its row, by distribution, with the mean 1."""


class Outcome(Struct):
    """What became of a burst."""

    retries: int = 0
    refused_retries: int = 0
    most_refusals: int = 0
    """Refusals of the client that was refused most often."""
    started: int = 0
    """Requests of the burst that were accepted."""
    seconds: float = 0.0
    """Time at which the last of them was accepted."""


class Burst:
    """An engine with rows and a queue, behind frontends that refuse what is beyond its limit.

    Requests are computed in the order of their arrival. All of a burst come within 0.2 s. Time is simulated.
    """

    def __init__(self, limits: Limits, mean_seconds: float, service: str, num_frontends: int, seed: int) -> None:
        """mean_seconds: time for which a sequence holds its row."""
        self.limits = limits
        self.now = 0.0
        self.loads = [EngineLoad(lambda: self.now, random.Random(seed + n).random) for n in range(num_frontends)]
        self._mean_seconds = mean_seconds
        self._service = SERVICE[service]
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._queue: deque[None] = deque()
        self._running = self._ended = 0

    def run(self, size: int, horizon: float = 600.0) -> Outcome:
        """Return what became of a burst of this size after `horizon` seconds at most."""
        outcome = Outcome()
        for _ in range(size):
            self._at(self._random.uniform(0.0, 0.2), lambda: self._arrive(outcome, 0))
        self._beat()
        while outcome.started < size and self.now < horizon:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return outcome

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    def _beat(self) -> None:
        stats = EngineStats(running=self._running, waiting=len(self._queue), frontends=len(self.loads))
        stats.requests_finished = {"stop": self._ended}
        for load in self.loads:
            load.observe(Heartbeat(1, Phase.READY, 100, "", self._running + len(self._queue), stats), self.limits)
        self._at(self.now + BEAT_SECONDS, self._beat)

    def _arrive(self, outcome: Outcome, refusals: int) -> None:
        """Let a request arrive with this many refusals before."""
        outcome.retries += refusals > 0
        if self._running + len(self._queue) >= self.limits.max_concurrent:
            outcome.refused_retries += refusals > 0
            outcome.most_refusals = max(outcome.most_refusals, refusals + 1)
            seconds = self._random.choice(self.loads).retry_after(1, 10, self.limits)
            back = self.now + seconds + self._random.uniform(0.0, ROUND_TRIP)
            self._at(back, lambda: self._arrive(outcome, refusals + 1))
            return
        outcome.started, outcome.seconds = outcome.started + 1, self.now
        self._queue.append(None)
        self._start()

    def _start(self) -> None:
        while self._queue and self._running < self.limits.max_rows:
            self._queue.popleft()
            self._running += 1
            self._at(self.now + self._mean_seconds * self._service(self._random), self._end)

    def _end(self) -> None:
        self._running, self._ended = self._running - 1, self._ended + 1
        self._start()
