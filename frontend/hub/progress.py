"""Progress of a download: a progress bar on a terminal, otherwise log lines."""

import logging
import threading
from collections.abc import Callable
from typing import TextIO

from tandem.frontend.progress import WIDTH, Progress

logger = logging.getLogger(__name__)

LOG_PERCENT = 10
"""Percentage of the download between two log lines."""


def size_text(size: float) -> str:
    """Format a number of bytes as the hub's pages do, in powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 100 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"


class DownloadProgress:
    """Thread-safe counts of downloaded bytes and files.

    `clock` returns monotonic seconds.

    """

    def __init__(self, num_files: int, num_bytes: int, clock: Callable[[], float], out: TextIO | None = None) -> None:
        self.num_bytes = num_bytes
        self.bytes_done = 0
        self.files_done = 0
        self._num_files = num_files
        self._clock = clock
        self._started = clock()
        self._bytes_kept = 0
        self._next_percent = LOG_PERCENT
        self._lock = threading.Lock()
        self._bar = Progress("downloading", out=out)

    def add_bytes(self, size: int) -> None:
        """Count received bytes; negative for discarded ones."""
        with self._lock:
            self.bytes_done += size

    def keep_bytes(self, size: int) -> None:
        """Count bytes that were on disk before, which are excluded from the rate."""
        with self._lock:
            self.bytes_done += size
            self._bytes_kept += size

    def add_file(self) -> None:
        """Count a completed file."""
        with self._lock:
            self.files_done += 1

    def show(self) -> None:
        """Draw the bar, or log a line after another tenth."""
        share = self.bytes_done / self.num_bytes if self.num_bytes else 1.0
        if self._bar.is_shown:
            self._bar.show(self._bar.bar(round(WIDTH * min(share, 1.0)), self.text()))
        elif 100 * share >= self._next_percent and share < 1:
            self._next_percent = int(100 * share) // LOG_PERCENT * LOG_PERCENT + LOG_PERCENT
            logger.info("downloaded %s", self.text())

    def clear(self) -> None:
        """Remove the bar."""
        self._bar.clear()

    def text(self) -> str:
        """Describe the progress, the rate and the remaining time."""
        seconds = max(self._clock() - self._started, 1e-3)
        rate = max(self.bytes_done - self._bytes_kept, 0) / seconds
        share = 100 * self.bytes_done // self.num_bytes if self.num_bytes else 100
        left = f", {(self.num_bytes - self.bytes_done) / rate:.0f} s left" if rate and share < 100 else ""
        return (
            f"{share} %, {size_text(self.bytes_done)} of {size_text(self.num_bytes)}, {self.files_done} of "
            f"{self._num_files} files, {size_text(rate)}/s{left}"
        )
