"""Connection to one life of the engine.

It has a DEALER socket, a handshake, and a monitor that detects a disconnect.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tandem.frontend.engine.streams import OpenStreams
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.commands import AnyCommand, Goodbye, Hello
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, Ready, StepOutput
from tandem.protocol.sockets import Transport, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION

logger = logging.getLogger(__name__)


class EngineLink:
    """Connection to the engine of one epoch.

    A lost connection is closed and replaced by a new one with a new identity. Step outputs go to `streams`, other
    events to `on_event`; `on_break` gets the reason when the connection cannot go on. All run in the event loop.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        epoch: int,
        streams: OpenStreams,
        on_event: Callable[[AnyEvent], None],
        on_break: Callable[[str], None],
    ) -> None:
        self._context = context
        self.epoch = epoch
        self.ready: Ready | None = None
        self.opened_at = 0.0
        self._streams = streams
        self._on_event = on_event
        self._on_break = on_break
        self._dealer: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, endpoint: str, transport: Transport, name: str, now: float) -> None:
        """Connect and send a Hello; its answer arrives through `on_event`."""
        self.opened_at = now
        self._dealer = connect_dealer(self._context, endpoint, transport)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self.send(Hello(PROTOCOL_VERSION, self.epoch, name))

    def send(self, command: AnyCommand) -> None:
        """Queue a command without waiting.

        On a closed link it is dropped, as it would be on one about to break.
        """
        if self._dealer is None or self._dealer.closed:
            return
        # Without a high-water mark a send cannot be refused; DONTWAIT makes pyzmq send at once.
        sent = cast("asyncio.Future[Any]", self._dealer.send(encode(command), zmq.DONTWAIT))
        if sent.done() and (error := sent.exception()) is not None:
            self._on_break(f"cannot send to the engine: {error}")

    def close(self, polite: bool = False) -> None:
        """Close the connection and drop what is queued on it.

        A polite close sends a Goodbye first.
        """
        if polite and self.ready is not None:
            self.send(Goodbye())
        for task in self._tasks:
            task.cancel()
        if self._dealer is not None and not self._dealer.closed:
            self._dealer.disable_monitor()
            # A Goodbye gets a moment to be sent; a dead engine must not delay the close for longer.
            self._dealer.close(linger=200 if polite else 0)
        if self._monitor is not None:
            self._monitor.close(linger=0)

    async def _receive(self) -> None:
        assert self._dealer is not None
        with contextlib.suppress(asyncio.CancelledError):
            while not self._dealer.closed:  # an event may have closed this link
                data = await self._dealer.recv()
                try:
                    event = decode_event(data)
                    if isinstance(event, StepOutput):
                        self._streams.deliver(event)
                    else:
                        self._on_event(event)
                except ProtocolError as error:
                    self._on_break(f"the engine sent an unreadable message: {error}")
                    return
                except Exception:  # a bug here must end the streams, not leave them waiting forever
                    logger.exception("an event of the engine could not be handled")
                    self._on_break("an event of the engine could not be handled")
                    return

    async def _watch(self) -> None:
        assert self._monitor is not None
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                message = await recv_monitor_message(self._monitor)
                if message["event"] == zmq.EVENT_DISCONNECTED:
                    self._on_break("the engine closed the connection")
                    return
