"""The supervisor's ear: the engine's heartbeat, without a connection to the engine itself."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq.asyncio

from tandem.frontend.engine.health import EngineHealth, EngineWatch
from tandem.protocol.codec import decode_event
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import Heartbeat
from tandem.protocol.sockets import Transport, connect_heartbeat, heartbeat_endpoint

logger = logging.getLogger(__name__)


class EngineMonitor:
    """Remembers the last beat and judges the engine by it."""

    def __init__(
        self,
        endpoint: str,
        transport: Transport,
        watch: EngineWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._watch = watch
        self._clock = clock

    @property
    def beat(self) -> Heartbeat | None:
        return self._watch.beat

    def silence(self) -> float:
        """Seconds since the last beat; 0 before the first."""
        return self._watch.silence(self._clock())

    def health(self) -> EngineHealth:
        return self._watch.health(self._clock())

    def should_restart(self) -> str:
        """Why the engine should be killed, to be started again; nothing while it may recover."""
        return self._watch.should_restart(self._clock())

    def reset_timers(self) -> None:
        """This process was held up: what it missed is not the engine's silence."""
        self._watch.reset_timers(self._clock())

    def forget(self) -> None:
        """The engine's process has ended."""
        self._watch.forget()

    async def listen(self) -> None:
        """Follows the heartbeat until it is cancelled."""
        context = zmq.asyncio.Context()
        try:
            subscriber = connect_heartbeat(context, heartbeat_endpoint(self._endpoint), self._transport)
            with contextlib.closing(subscriber):
                while True:
                    self._take(await subscriber.recv())
        finally:
            context.term()

    async def until_ready(self) -> None:
        """Returns once the engine says that it is ready."""
        while not self.health().ready:
            await asyncio.sleep(0.05)

    def _take(self, data: bytes) -> None:
        try:
            event = decode_event(data)
        except ProtocolError as error:
            logger.warning("unreadable heartbeat: %s", error)
            return
        if isinstance(event, Heartbeat):
            self._watch.observe(event, self._clock())
