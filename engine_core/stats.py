"""Counters of the engine.

The loop writes them, the heartbeat thread encodes them; nothing else reads them.
"""

from collections.abc import Callable

from tandem.protocol.events import Failure, Finished
from tandem.protocol.stats import EngineStats, Histogram

QUEUE_SECONDS = [
    *(0.001, 0.0015, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0),
]
"""Bucket bounds of the queue time, in seconds.

Each is at most twice the one before, so that a percentile read from them is accurate to a factor of two."""
COMPILE_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
"""Bucket bounds of the compile time of grammars, in seconds."""
STEP_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]
"""Bucket bounds of the number of rows in a step."""
STAGES = ("drain", "plan", "launch", "sample", "collect", "commit", "send")
"""Stages of one tick of the loop, in order."""


def new_stats() -> EngineStats:
    """Return counters at zero, with every label present.

    So a scrape shows every series from the start.
    """
    return EngineStats(
        requests_finished={"stop": 0, "length": 0, "abort": 0},
        stage_seconds=dict.fromkeys(STAGES, 0.0),
        queue_time=Histogram(QUEUE_SECONDS, [0] * (len(QUEUE_SECONDS) + 1)),
        step_rows=Histogram(STEP_ROWS, [0] * (len(STEP_ROWS) + 1)),
        compile_time=Histogram(COMPILE_SECONDS, [0] * (len(COMPILE_SECONDS) + 1)),
    )


def count_outcome(stats: EngineStats, outcome: Finished | Failure) -> None:
    """Count the end of a request by its finish reason or its error code."""
    if isinstance(outcome, Finished):
        stats.requests_finished[outcome.reason] = stats.requests_finished.get(outcome.reason, 0) + 1
    else:
        stats.requests_failed[outcome.code] = stats.requests_failed.get(outcome.code, 0) + 1


class StageClock:
    """Divide the loop's time among its stages.

    Each mark adds the time since the mark before.
    """

    def __init__(self, seconds: dict[str, float], clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.clock = clock
        self._last = 0.0

    def start(self) -> float:
        """Begin a tick; return the time now."""
        self._last = self.clock()
        return self._last

    def mark(self, stage: str) -> float:
        """End a stage; return the time now."""
        now = self.clock()
        self.seconds[stage] += now - self._last
        self._last = now
        return now
