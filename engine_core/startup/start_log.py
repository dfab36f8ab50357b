"""The log of the time and memory that each stage of a start takes."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class StartLog:
    """A log with one line for each stage of a start.

    Each has the time and the allocations since the stage before.
    """

    def __init__(self, clock: Callable[[], float], allocated: Callable[[], int]) -> None:
        """Begin the first stage.

        clock: seconds; allocated: bytes held on the device.
        """
        self.clock = clock
        self.allocated = allocated
        self._time = clock()
        self._bytes = allocated()

    def mark(self, stage: str) -> None:
        """Log the stage that ends now."""
        now, held = self.clock(), self.allocated()
        logger.info("start: %s took %.2f s and %.2f GiB", stage, now - self._time, (held - self._bytes) / 2**30)
        self._time, self._bytes = now, held
