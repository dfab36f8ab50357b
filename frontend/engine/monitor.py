"""Listener to an engine's heartbeats, without a connection to the engine itself."""

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
"""Interval at which an engine is checked for silence."""

_MAX_LAG = 1.0
"""Seconds by which a tick may be late before the listener counts as held up."""


class EngineMonitor:
    """Monitor that calls back with each heartbeat of an engine.

    It also calls back at regular ticks, so that the engine's silence is noticed. `on_heartbeat` has to
    pass the heartbeats that count on to the `EngineWatch`, which judges them.
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
                except Exception:  # a bug here must not make a living engine look silent
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
            except Exception:  # a bug here must not stop the checks
                logger.exception("a check of the engine failed")
