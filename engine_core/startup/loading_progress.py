"""Progress of loading weights, as heartbeats report it."""

import time
from collections.abc import Callable

from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.events import Phase


class LoadingProgress:
    """Report the share of the weights that is loaded, and the rate.

    The rate is measured from the first report on, because allocating pinned memory before it takes seconds. `clock`
    returns monotonic seconds.
    """

    def __init__(self, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status
        self._clock = clock
        self._first: tuple[float, int] | None = None
        """Time of the first report, and the bytes that were done by then."""

    def report(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are loaded."""
        now = self._clock()
        started, before = self._first = self._first or (now, done)
        rate = f", {(done - before) / (now - started) / GIB:.2f} GiB/s" if now > started else ""
        self._status.enter(Phase.LOADING, 100 * done // total, f"{done / GIB:.2f} of {total / GIB:.2f} GiB{rate}")
