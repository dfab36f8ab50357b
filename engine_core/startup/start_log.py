"""Where the time and the memory of a start go, a line a stage."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class StartLog:
    """Logs what passed, and what was allocated, since the stage before."""

    def __init__(self, clock: Callable[[], float], allocated: Callable[[], int]) -> None:
        """clock: seconds; allocated: bytes held on the device."""
        self.clock = clock
        self.allocated = allocated
        self._time = clock()
        self._bytes = allocated()

    def mark(self, stage: str) -> None:
        now, held = self.clock(), self.allocated()
        logger.info("start: %s took %.2f s and %.2f GiB", stage, now - self._time, (held - self._bytes) / 2**30)
        self._time, self._bytes = now, held
