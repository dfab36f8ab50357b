"""Leases of frontends, in the time of the loop."""

import time
from collections import OrderedDict
from collections.abc import Callable

from tandem.protocol.commands import LEASE_SECONDS

MAX_GAP_SECONDS = 1.0
"""Maximum time between two drains that is counted, in seconds."""


class Leases:
    """Last sign of life of each frontend, and those silent for too long.

    Time passes only while the loop drains its mailbox: after a stall, a stopped process or a long load, messages that
    frontends sent meanwhile may still wait in a socket that libzmq has not read either. A gap between two drains
    therefore counts for at most MAX_GAP_SECONDS, and frontends are judged only after a drain that left nothing in the
    queue.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = LEASE_SECONDS) -> None:
        """seconds: silence after which a lease expires."""
        self.now = 0.0
        """Seconds that the loop has drained its mailbox."""
        self._clock = clock
        self._seconds = seconds
        self._last = clock()
        self._heard: OrderedDict[bytes, float] = OrderedDict()
        """Time of the last message of each frontend, oldest first."""

    def advance(self) -> None:
        """Count the time since the last call."""
        now = self._clock()
        self.now += min(max(now - self._last, 0.0), MAX_GAP_SECONDS)
        self._last = now

    def renew(self, client: bytes) -> None:
        """Record a message of a frontend."""
        self._heard[client] = self.now
        self._heard.move_to_end(client)

    def forget(self, client: bytes) -> None:
        """Forget a frontend that is gone for another reason."""
        self._heard.pop(client, None)

    def clients(self) -> list[bytes]:
        """Return all frontends that have a lease."""
        return list(self._heard)

    def take_expired(self) -> list[bytes]:
        """Remove and return the frontends with expired leases.

        Called only when nothing waits in the mailbox's queue.
        """
        expired = []
        while self._heard:
            client, heard = next(iter(self._heard.items()))
            if self.now - heard < self._seconds:
                break
            del self._heard[client]
            expired.append(client)
        return expired

    def __len__(self) -> int:
        return len(self._heard)
