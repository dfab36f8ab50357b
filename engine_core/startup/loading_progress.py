"""Progress of loading weights, as heartbeats report it."""

import time
from collections.abc import Callable

from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.events import Phase


class LoadingProgress:
    """Report the share of the weights that is loaded, and the rate since the start.

    `clock` returns monotonic seconds.
    """

    def __init__(self, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status
        self._clock = clock
        self._started = clock()

    def report(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are loaded."""
        seconds = self._clock() - self._started
        rate = f", {done / seconds / GIB:.2f} GiB/s" if seconds > 0 else ""
        self._status.enter(Phase.LOADING, 100 * done // total, f"{done / GIB:.2f} of {total / GIB:.2f} GiB{rate}")
