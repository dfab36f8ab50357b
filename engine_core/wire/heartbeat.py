"""Heartbeat of the engine core: proof of life, phase and counters."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.engine_core.wire.client_keys import ClientKeys
from tandem.protocol.codec import encode
from tandem.protocol.events import AdapterList, Heartbeat, PauseFacts, Phase, SwapFacts, WeightFacts
from tandem.protocol.rate_limited_log import RateLimitedLog
from tandem.protocol.sockets import Transport, bind_heartbeat
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.25
"""Time between two heartbeats, in seconds."""
_REBIND_SECONDS = 0.05


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


class Status:
    """Contents of the next heartbeat.

    Written by the loop's thread, read by the publisher's; each field is one reference.
    """

    def __init__(self, epoch: int, stats: EngineStats) -> None:
        self.epoch = epoch
        self.stats = stats
        self.phase = Phase.STARTING
        self.percent = 0
        self.detail = ""
        self.adapters: AdapterList | None = None
        self.weights: WeightFacts | None = None
        self.swap: Callable[[], SwapFacts | None] = lambda: None
        """Returns the state of the swap, from any thread."""
        self.pause: Callable[[], PauseFacts | None] = lambda: None
        """Returns the state of the pause, from any thread."""

    def enter(self, phase: Phase, percent: int = 0, detail: str = "") -> None:
        """Set phase, percent done and detail.

        The phase is set last, so that it never shows with older values.
        """
        self.detail = detail
        self.percent = percent
        self.phase = phase

    def heartbeat(self) -> Heartbeat:
        """Build the heartbeat of this moment."""
        stats = self.stats
        pending = stats.running + stats.waiting
        given = self.epoch, self.phase, self.percent, self.detail, pending, stats, self.adapters, self.weights
        return Heartbeat(*given, self.swap(), self.pause())


class HeartbeatPublisher:
    """A daemon thread that publishes heartbeats on its own PUB socket.

    They go on while a forward pass or a load runs. When a frontend's key is removed the socket is rebound, because
    libzmq cannot close a single connection: the others connect again within a second.
    """

    def __init__(
        self, context: Any, endpoint: str, transport: Transport, status: Status, keys: ClientKeys | None = None
    ) -> None:
        """Bind nothing yet.

        keys: keys of the frontends that may listen; None leaves that to the transport.
        """
        self.context = context
        self.endpoint = endpoint
        self.transport = transport
        self.status = status
        self.keys = keys
        self._handshakes = HandshakeLog()
        self._news: SimpleQueue[None] = SimpleQueue()  # which a signal handler may use too
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and start publishing. Raises ValueError if the endpoint is in use."""
        publisher = bind_heartbeat(self.context, self.endpoint, self.transport)
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="heartbeat", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Have a heartbeat sent at once."""
        self._news.put(None)

    def stop(self) -> None:
        """Send a last heartbeat and close the socket."""
        self._stop.set()
        self.announce()
        if self._thread is not None:
            self._thread.join()

    def _run(self, publisher: Any) -> None:
        self._handshakes.open(publisher)
        names = self.keys.names if self.keys is not None else {}
        while True:
            with suppress(Empty):
                self._news.get(timeout=INTERVAL_SECONDS)
            if self._stop.is_set():
                break
            publisher.send(encode(self.status.heartbeat()))
            self._handshakes.read()
            if self.keys is not None and (current := self.keys.names) is not names:
                if names.keys() - current.keys():
                    publisher = self._bind_anew(publisher)
                names = current
        publisher.send(encode(self.status.heartbeat()))
        self._handshakes.close()
        publisher.close(linger=200)

    def _bind_anew(self, publisher: Any) -> Any:
        """Close a socket and all its connections, and return a new one bound to the same endpoint."""
        self._handshakes.close()
        publisher.close(linger=0)
        while True:
            try:
                publisher = bind_heartbeat(self.context, self.endpoint, self.transport)
                break
            except zmq.ZMQError as error:  # the old one is closed in the background
                logger.debug("%s cannot be bound yet: %s", self.endpoint, error)
                if self._stop.wait(_REBIND_SECONDS):
                    return self.context.socket(zmq.PUB)  # to no listener: the engine is stopping
        self._handshakes.open(publisher)
        return publisher
