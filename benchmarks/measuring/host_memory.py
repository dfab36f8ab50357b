"""Anonymous memory of this process and its peak."""

import threading
from pathlib import Path
from types import TracebackType

SAMPLE_SECONDS = 0.01


def anonymous_bytes() -> int:
    """Return the anonymous resident bytes of this process.

    Falls back to all resident bytes where the kernel does not report them separately, as in some sandboxes.
    """
    for path, field in (("smaps_rollup", "Anonymous:"), ("status", "RssAnon:"), ("status", "VmRSS:")):
        file = Path("/proc/self") / path
        for line in file.read_text().splitlines() if file.exists() else ():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self has no memory usage of this process")


class PeakMemory:
    """Context manager that samples anonymous memory in a thread."""

    def __init__(self) -> None:
        self.idle = self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")

    @property
    def growth(self) -> int:
        """Peak in bytes above the memory on entry."""
        return self.peak - self.idle

    def __enter__(self) -> "PeakMemory":
        self.idle = self.peak = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, anonymous_bytes())
