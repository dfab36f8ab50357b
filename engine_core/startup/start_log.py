"""The log of the time and memory that each stage of a start takes."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


NOTABLE_SECONDS = 0.5
NOTABLE_GIB = 0.05


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
        """Log the stage that ends now, at level debug if it took little time and memory."""
        now, held = self.clock(), self.allocated()
        seconds, gib = now - self._time, (held - self._bytes) / 2**30
        is_notable = seconds >= NOTABLE_SECONDS or gib >= NOTABLE_GIB
        level = logging.INFO if is_notable else logging.DEBUG
        logger.log(level, "start: %s took %.2f s and %.2f GiB", stage, seconds, gib)
        self._time, self._bytes = now, held
