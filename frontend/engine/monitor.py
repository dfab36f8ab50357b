"""Listen to an engine's heartbeats, without a connection to the engine itself."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq.asyncio

from tandem.frontend.engine.handshakes import watch_handshakes
from tandem.frontend.engine.health import EngineWatch
from tandem.protocol.codec import decode_event
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import Heartbeat

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""Seconds between two checks for silence."""

_MAX_LAG = 1.0
"""Seconds by which a tick may be late before the listener itself counts as stalled."""


class EngineMonitor:
    """Monitor with a callback for each heartbeat of an engine.

    It also calls back at regular ticks, to detect silence. `on_heartbeat` must pass relevant heartbeats on to the
    `EngineWatch`.
    """

    def __init__(
        self, watch: EngineWatch, on_heartbeat: Callable[[Heartbeat], None], on_tick: Callable[[], None]
    ) -> None:
        self._watch = watch
        self._on_heartbeat = on_heartbeat
        self._on_tick = on_tick

    async def run(self, subscriber: zmq.asyncio.Socket) -> None:
        """Listen until cancelled, then close the socket (`connect_heartbeat`)."""
        with contextlib.closing(subscriber):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(subscriber))
                group.create_task(self._tick())
                group.create_task(watch_handshakes(subscriber, self._watch.note_failure))

    async def _listen(self, subscriber: zmq.asyncio.Socket) -> None:
        while True:
            data = await subscriber.recv()
            try:
                event = decode_event(data)
            except ProtocolError as error:
                logger.warning("unreadable heartbeat: %s", error)
                continue
            if isinstance(event, Heartbeat):
                try:
                    self._on_heartbeat(event)
                except Exception:  # an exception must not make a running engine look silent
                    logger.exception("a heartbeat could not be handled")

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        expected = loop.time()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            if now - expected > TICK_SECONDS + _MAX_LAG:
                self._watch.reset_timers()
            expected = now
            try:
                self._on_tick()
            except Exception:  # an exception must not stop the checks
                logger.exception("a check of the engine failed")
