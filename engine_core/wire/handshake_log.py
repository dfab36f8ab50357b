"""Log of handshakes that fail on one of the engine's sockets."""

import logging
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


class HandshakeLog:
    """Log of peers that have another engine's key, no key, or speak something else.

    Keys that are not in the engine's folder are logged by the `Authenticator`. One thread opens the log and reads it.
    """

    def __init__(self) -> None:
        self._log = RateLimitedLog(logger)
        self._monitor: Any = None

    def open(self, sock: Any) -> None:
        """Watch a socket from now on."""
        self._monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

    def read(self) -> None:
        """Log failures since the last call, without blocking."""
        while self._monitor is not None and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._log.warning(
                "handshake",
                "a handshake failed on %s: the peer has the key of another engine, no keys, or another protocol",
                event["endpoint"].decode(errors="replace"),
            )

    def close(self) -> None:
        """Stop watching; called before the socket is closed."""
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None
