"""Notifications to systemd: ready, reloading, stopping, status and watchdog.

It implements sd_notify(3): datagrams of lines to the Unix socket in `NOTIFY_SOCKET`.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
"""Maximum seconds between two status checks."""
_MICROSECONDS = 10**6


class ServiceManager:
    """Socket of a service manager; without one, nothing is sent.

    environ: `NOTIFY_SOCKET`, and `WATCHDOG_USEC` and `WATCHDOG_PID` for the watchdog.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        # A leading @ denotes the zero byte of the abstract namespace.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._watchdog = environ.get("WATCHDOG_USEC", "")
        self._watchdog_pid = environ.get("WATCHDOG_PID", "")
        self._was_ready = False

    @property
    def watchdog_seconds(self) -> float | None:
        """Watchdog timeout in seconds; None if it is disabled."""
        wanted = self._address and self._watchdog.isdecimal() and self._watchdog_pid in ("", str(os.getpid()))
        return int(self._watchdog) / _MICROSECONDS if wanted and int(self._watchdog) else None

    def notify(self, *lines: str) -> None:
        """Send lines such as `READY=1`; errors are ignored."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)

    def reloading(self) -> None:
        """Notify that a reload has started."""
        if self._was_ready:
            self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """Notify that a reload has finished."""
        if self._was_ready:
            self.notify("READY=1")

    def stopping(self) -> None:
        """Notify that the service is stopping."""
        self.notify("STOPPING=1", "STATUS=stopping")

    async def follow(self, status: Callable[[], tuple[bool, str]]) -> None:
        """Send readiness, status and watchdog notifications until cancelled.

        status: returns whether the service is ready, and a description. Readiness is sent once. The watchdog is fed by
        the event loop, so that the manager restarts a supervisor that hangs.
        """
        if not self._address:
            return
        limit = self.watchdog_seconds
        interval = STATUS_SECONDS if limit is None else min(STATUS_SECONDS, limit / 2)
        sent = ""
        while True:
            is_ready, words = status()
            lines: Sequence[str] = ["WATCHDOG=1"] if limit is not None else []
            if words != sent:
                lines = [*lines, f"STATUS={' '.join(words.split())}"]
            if is_ready and not self._was_ready:
                lines = ["READY=1", *lines]
            if lines:
                self.notify(*lines)
            self._was_ready, sent = self._was_ready or is_ready, words
            await asyncio.sleep(interval)
