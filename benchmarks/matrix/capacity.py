"""Number of concurrent sequences while others wait for memory.

A peak would count sequences that are preempted right after their admission. So we take the mean over the time in which
sequences waited, with the preemptions and rows per step in that time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.matrix.server import Server
from tandem.frontend.cli.bench.workloads import Load
from tandem.frontend.progress import Progress

RUNNING, WAITING = "tandem_num_requests_running", "tandem_num_requests_waiting"
PREEMPTIONS = "tandem_num_preemptions_total"
STEPS, STEP_ROWS = "tandem_engine_step_rows_count", "tandem_engine_step_rows_sum"


@dataclass(frozen=True)
class Reading:
    """Reading of the engine's gauges and counters."""

    at: float
    """Time of the reading, in seconds."""
    running: float
    waiting: float
    preemptions: float
    steps: float
    step_rows: float


class Watch(Progress):
    """Progress display that reads the metrics whenever it is drawn, once per heartbeat."""

    def __init__(self, load: Load, server: Server) -> None:
        super().__init__(load.label, load.total(), load.duration)
        self.readings: list[Reading] = []
        self._server = server

    def draw(self, done: int, seconds: float) -> None:
        found = self._server.scrape()
        values = [found.value(name) for name in (RUNNING, WAITING, PREEMPTIONS, STEPS, STEP_ROWS)]
        self.readings.append(Reading(time.monotonic(), *values))
        super().draw(done, seconds)


def while_waiting(readings: Sequence[Reading]) -> dict[str, float]:
    """Return means over the intervals in which sequences waited at both ends.

    Without such an interval, return only `seconds` and `peak`.
    """
    spans = [(a, b) for a, b in pairwise(readings) if a.waiting > 0 and b.waiting > 0]
    seconds = sum(b.at - a.at for a, b in spans)
    steps = sum(b.steps - a.steps for a, b in spans)
    found = {"seconds": seconds, "peak": max((reading.running for reading in readings), default=0.0)}
    if seconds > 0:
        found["running"] = sum(a.running * (b.at - a.at) for a, b in spans) / seconds
        found["preemptions"] = sum(b.preemptions - a.preemptions for a, b in spans)
    if steps > 0:
        found["step_rows"] = sum(b.step_rows - a.step_rows for a, b in spans) / steps
    return found
