"""Watch for connections of the ROUTER that close.

libzmq tells of them, but not whose they were.
"""

from typing import Any

import zmq

CHECK_SECONDS = 0.1
"""Time between two looks at the monitor, in seconds: each costs some microseconds of a tick."""
PROBES = 3
"""Probes after a connection has closed: libzmq may tell of it just before a send to its frontend fails."""


class Disconnects:
    """The connections of one ROUTER, watched for those that close.

    A frontend that is killed, and whose requests get no output, would otherwise keep its lease until that expires.
    """

    def __init__(self, router: Any, monitor: Any) -> None:
        """monitor: the socket of the ROUTER's monitor, for EVENT_DISCONNECTED."""
        self.router = router
        self.monitor = monitor
        self._left = 0
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

    def is_probe_due(self, now: float) -> bool:
        """Return whether each frontend has to be probed now.

        now: seconds. True PROBES times after a connection has closed, CHECK_SECONDS apart.
        """
        if now < self._check_at:
            return False
        self._check_at = now + CHECK_SECONDS
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self._left = PROBES
        if not self._left:
            return False
        self._left -= 1
        return True

    def close(self) -> None:
        """Stop watching; called before the ROUTER is closed."""
        self.router.disable_monitor()
        self.monitor.close(linger=0)
