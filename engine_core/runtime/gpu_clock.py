"""How long the device works and how long it waits between two steps, from a sample of steps.

A timed event costs some microseconds on the launch path, so one pair of neighbouring steps in `EVERY` is timed.
"""

from collections.abc import Callable
from typing import Any

from tandem.engine_core.contracts import DeviceTimes

EVERY = 8


class GpuClock:
    """Times step n from its first enqueued work to the end of its sampling, and the gap from there to step n + 1.

    `begin` and `end` are called around what a step enqueues, `read` once the step's results are on the host: by then
    its events, and all before them, have been reached.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        """event: makes a CUDA event with timing."""
        self.times = DeviceTimes()
        self._started, self._ended, self._next = event(), event(), event()
        self._timed = -1
        self._gap = False

    def begin(self, step_id: int, follows: bool) -> None:
        """follows: whether the step before was still in flight or has only just been collected."""
        if step_id % EVERY == 0:
            self._started.record()
            self._timed, self._gap = step_id, False
        elif step_id == self._timed + 1 and follows:
            self._next.record()
            self._gap = True

    def end(self, step_id: int) -> None:
        if step_id == self._timed:
            self._ended.record()

    def read(self, step_id: int) -> None:
        """Called when `step_id` has been collected; the pair is complete with the step after the timed one."""
        if step_id == self._timed + 1 and self._gap:
            self.times.busy += self._started.elapsed_time(self._ended) / 1000
            self.times.idle += max(0.0, self._ended.elapsed_time(self._next)) / 1000
            self.times.steps += 1
            self._gap = False
