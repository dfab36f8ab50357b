"""Engine counters over a load, read from the server's metrics."""

import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.error import URLError

from benchmarks.measuring.scrape import Scrape

Counters = dict[str, float]
"""Values by name; seconds of a stage under STAGE + its name."""

STAGE = "stage "
STAGES = "tandem_engine_stage_seconds_total"
ENDED, STEPS, STEP_ROWS = "ended", "steps", "step_rows"
NAMES = {
    ENDED: "tandem_request_success_total",
    STEPS: "tandem_engine_step_rows_count",
    STEP_ROWS: "tandem_engine_step_rows_sum",
    "mask_rows": "tandem_mask_rows_total",
    "mask_seconds": "tandem_mask_seconds_total",
    "gpu_busy": "tandem_gpu_busy_seconds_total",
    "gpu_idle": "tandem_gpu_idle_seconds_total",
}
"""Metric names."""
FETCH_SECONDS = 5.0
POLL_SECONDS, MAX_WAIT_SECONDS = 0.05, 5.0
"""Polling interval, and longest wait until the counters include a load's requests; heartbeats carry them several times
a second."""


def fetch(url: str) -> str:
    """Return the text of the metrics. Raises ConnectionError if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as reply:
            text: str = reply.read().decode()
            return text
    except (URLError, TimeoutError, ValueError) as error:
        raise ConnectionError(f"--metrics {url}: {error}; give the address of /metrics on the ops port") from error


def counters(text: str) -> Counters:
    """Parse the counters of an engine.

    Raises ValueError if the text is not an engine's metrics.
    """
    scrape = Scrape(text)
    stages = {STAGE + stage: seconds for stage, seconds in scrape.by_label(STAGES, "stage").items()}
    if not stages:
        raise ValueError(f"the metrics have no {STAGES}; give --metrics the address of /metrics on the ops port")
    return stages | {name: scrape.value(metric) for name, metric in NAMES.items()}


def added(first: Counters, second: Counters, times: int = 1) -> Counters:
    """Add counters, the second ones `times` times."""
    return {name: first.get(name, 0.0) + times * second.get(name, 0.0) for name in first | second}


class EngineReader:
    """Reader of an engine's counters during a load. Nothing else may load the engine."""

    def __init__(
        self,
        fetch: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Initialize with a function that fetches the metrics, a clock in seconds and its sleep."""
        self._fetch = fetch
        self._clock = clock
        self._sleep = sleep

    def read(self) -> Counters:
        return counters(self._fetch())

    def since(self, before: Counters, requests: int) -> Counters:
        """Return the increments since a reading, once they include these requests.

        Raises ConnectionError if they do not within MAX_WAIT_SECONDS.
        """
        until = self._clock() + MAX_WAIT_SECONDS
        while True:
            found = added(self.read(), before, -1)
            if found[ENDED] >= requests:
                return found
            if self._clock() >= until:
                raise ConnectionError(
                    f"{MAX_WAIT_SECONDS:g} s after a load of {requests} requests, --metrics counts the end of "
                    f"{found[ENDED]:.0f}; give the address of the server that got them"
                )
            self._sleep(POLL_SECONDS)


def figures(found: Counters) -> dict[str, Any]:
    """Return the mean microseconds of a step, by stage, and its rows.

    Figures that were not counted are None.
    """
    steps = found[STEPS]
    timed = found["gpu_busy"] + found["gpu_idle"]
    stages = {name.removeprefix(STAGE): seconds for name, seconds in found.items() if name.startswith(STAGE)}
    return {
        "steps": steps,
        "stages_us": {stage: _ratio(1e6 * seconds, steps) for stage, seconds in stages.items()},
        "rows_a_step": _ratio(found[STEP_ROWS], steps),
        "mask_rows_a_step": _ratio(found["mask_rows"], steps),
        "mask_us_a_row": _ratio(1e6 * found["mask_seconds"], found["mask_rows"]),
        "gpu_idle_percent": _ratio(100 * found["gpu_idle"], timed),
    }


def line(found: dict[str, Any]) -> str:
    """Format the `figures` of a load as one line."""
    stages = ", ".join(f"{stage} {_said(us, '.0f')}" for stage, us in found["stages_us"].items())
    return (
        f"{_said(found['rows_a_step'], '.1f')} rows a step, us of it: {stages}; "
        f"masks: {_said(found['mask_rows_a_step'], '.1f')} a step, {_said(found['mask_us_a_row'], '.2f')} us each; "
        f"GPU idle {_said(found['gpu_idle_percent'], '.1f')} %"
    )


def _ratio(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
