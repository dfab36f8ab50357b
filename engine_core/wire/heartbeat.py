"""Tells whoever listens that this process lives and how far it is."""

import threading
from typing import Any

from tandem.protocol.codec import encode
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.sockets import Transport, bind_heartbeat
from tandem.protocol.stats import EngineStats

INTERVAL_SECONDS = 0.25


class Status:
    """What the next beat says. Written by the loop's thread, read by the heartbeat's; each field is one reference."""

    def __init__(self, epoch: int, stats: EngineStats) -> None:
        self.epoch = epoch
        self.stats = stats
        self.phase = Phase.STARTING
        self.percent = 0
        self.detail = ""

    def enter(self, phase: Phase, percent: int = 0, detail: str = "") -> None:
        self.detail = detail
        self.percent = percent
        self.phase = phase

    def heartbeat(self) -> Heartbeat:
        stats = self.stats
        pending = stats.running + stats.waiting
        return Heartbeat(self.epoch, self.phase, self.percent, self.detail, pending, stats)


class HeartbeatPublisher:
    """A daemon thread with a PUB socket of its own, so that beats go on while a forward or a load runs."""

    def __init__(self, context: Any, endpoint: str, transport: Transport, status: Status) -> None:
        self.context = context
        self.endpoint = endpoint
        self.transport = transport
        self.status = status
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Binds and begins to beat. Raises ValueError if somebody else listens there."""
        publisher = bind_heartbeat(self.context, self.endpoint, self.transport)
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sends a last beat and closes the socket."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, publisher: Any) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            publisher.send(encode(self.status.heartbeat()))
        publisher.send(encode(self.status.heartbeat()))
        publisher.close(linger=200)
