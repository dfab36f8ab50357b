"""Heartbeat of the engine core: proof of life, phase and counters."""

import threading
from typing import Any

from tandem.protocol.codec import encode
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.sockets import Transport, bind_heartbeat
from tandem.protocol.stats import EngineStats

INTERVAL_SECONDS = 0.25
"""Time between two heartbeats, in seconds."""


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
        return Heartbeat(self.epoch, self.phase, self.percent, self.detail, pending, stats)


class HeartbeatPublisher:
    """A daemon thread that publishes heartbeats on its own PUB socket.

    They go on while a forward pass or a load runs.
    """

    def __init__(self, context: Any, endpoint: str, transport: Transport, status: Status) -> None:
        self.context = context
        self.endpoint = endpoint
        self.transport = transport
        self.status = status
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and start publishing. Raises ValueError if the endpoint is in use."""
        publisher = bind_heartbeat(self.context, self.endpoint, self.transport)
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last heartbeat and close the socket."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, publisher: Any) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            publisher.send(encode(self.status.heartbeat()))
        publisher.send(encode(self.status.heartbeat()))
        publisher.close(linger=200)
