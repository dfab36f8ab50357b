"""Watch for connections of the ROUTER that close.

libzmq reports disconnects without the peer's identity.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import zmq

CHECK_SECONDS = 0.1
"""Polling interval of the monitor in seconds; a poll costs some microseconds of a tick."""
PROBES = 3
"""Probes after a connection has closed: libzmq may report it just before a send to its frontend fails."""
MAX_PROBED = 128
"""Frontends that are probed at one time, in turns: whoever connects and leaves without end has the loop send this many
messages in CHECK_SECONDS. A frontend among 1,000 is then probed within a second, and its lease ends after five."""


class Disconnects:
    """The connections of one ROUTER, watched for those that close.

    Without this, a killed frontend without output in progress would keep its lease until it expires.
    """

    def __init__(self, router: Any, monitor: Any) -> None:
        """monitor: the socket of the ROUTER's monitor, for EVENT_DISCONNECTED."""
        self.router = router
        self.monitor = monitor
        self._left: dict[bytes, int] = {}
        """Remaining probes of each frontend, in the order of probing."""
        self._check_at = 0.0

    @classmethod
    def watch(cls, router: Any) -> "Disconnects":
        """Watch a bound socket from now on.

        While a model is loaded the monitor is not read. Its queue has no high-water mark: libzmq's thread, which sends
        the heartbeats too, would wait for room in it.
        """
        endpoint = f"inproc://disconnects-{id(router)}"
        router.monitor(endpoint, zmq.EVENT_DISCONNECTED)
        monitor = router.context.socket(zmq.PAIR)
        monitor.rcvhwm = 0
        monitor.connect(endpoint)
        return cls(router, monitor)

    def take_due(self, now: float, clients: Callable[[], Iterable[bytes]]) -> list[bytes]:
        """Return the frontends to probe now, of those that `clients` returns.

        now: seconds. After a connection has closed each of them is returned PROBES times, CHECK_SECONDS apart or more,
        and at most MAX_PROBED together. One that waits for its turn keeps it when another connection closes.
        """
        if now < self._check_at:
            return []
        self._check_at = now + CHECK_SECONDS
        has_closed = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            has_closed = True
        if has_closed:
            for client in clients():
                self._left[client] = PROBES
        due = list(islice(self._left, MAX_PROBED))
        for client in due:
            left = self._left.pop(client) - 1
            if left:
                self._left[client] = left  # behind all others
        return due

    def forget(self, client: bytes) -> None:
        """Probe a frontend that is gone no more."""
        self._left.pop(client, None)

    def close(self) -> None:
        """Stop watching; called before the ROUTER is closed."""
        self.router.disable_monitor()
        self.monitor.close(linger=0)
