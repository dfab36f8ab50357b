"""Notifications to systemd: ready, reloading, stopping, status and watchdog.

The protocol is that of sd_notify(3): lines of one datagram to the Unix socket that `NOTIFY_SOCKET` names.
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
"""Longest time between two looks at the status."""
_MICROSECONDS = 10**6


class ServiceManager:
    """The socket of a service manager, or of none: then nothing is sent.

    environ: the variables `NOTIFY_SOCKET` and, for the watchdog, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of the abstract namespace.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._watchdog = environ.get("WATCHDOG_USEC", "")
        self._watchdog_pid = environ.get("WATCHDOG_PID", "")
        self._was_ready = False

    @property
    def watchdog_seconds(self) -> float | None:
        """Seconds within which the manager wants a sign of life; None if it wants none."""
        wanted = self._address and self._watchdog.isdecimal() and self._watchdog_pid in ("", str(os.getpid()))
        return int(self._watchdog) / _MICROSECONDS if wanted and int(self._watchdog) else None

    def notify(self, *lines: str) -> None:
        """Send lines such as `READY=1`. A manager that cannot be reached is passed over."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)

    def reloading(self) -> None:
        """Say that a reload begins."""
        if self._was_ready:
            self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """Say that a reload has ended."""
        if self._was_ready:
            self.notify("READY=1")

    def stopping(self) -> None:
        """Say that the service ends."""
        self.notify("STOPPING=1", "STATUS=stopping")

    async def follow(self, status: Callable[[], tuple[bool, str]]) -> None:
        """Tell of readiness, status and life until cancelled.

        status: whether the service is ready, and its state in words. Readiness is told once; the watchdog is fed by the
        event loop, so a supervisor that hangs is restarted by the manager.
        """
        if not self._address:
            return
        limit = self.watchdog_seconds
        interval = STATUS_SECONDS if limit is None else min(STATUS_SECONDS, limit / 2)
        told = ""
        while True:
            is_ready, words = status()
            lines: Sequence[str] = ["WATCHDOG=1"] if limit is not None else []
            if words != told:
                lines = [*lines, f"STATUS={' '.join(words.split())}"]
            if is_ready and not self._was_ready:
                lines = ["READY=1", *lines]
            if lines:
                self.notify(*lines)
            self._was_ready, told = self._was_ready or is_ready, words
            await asyncio.sleep(interval)
