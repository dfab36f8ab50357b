"""Connection to one life of the engine.

It has a DEALER socket, a handshake, a lease that it renews, and a monitor that detects a disconnect.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tandem.frontend.engine.handshakes import REFUSED_KEY
from tandem.frontend.engine.streams import OpenStreams
from tandem.frontend.errors import ApiError
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.commands import RENEW_SECONDS, AnyCommand, Goodbye, Hello, Renew
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, Closed, Ready, StepOutput
from tandem.protocol.sockets import MAX_COMMAND_BYTES, Transport, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION

logger = logging.getLogger(__name__)


def encode_command(command: AnyCommand) -> bytes:
    """Encode a command for the engine.

    Raises ApiError 413 for one that the engine's socket does not take: it would close the connection of all requests.
    """
    data = encode(command)
    if len(data) > MAX_COMMAND_BYTES:
        raise ApiError(
            413,
            f"the request has {len(data)} bytes on its way to the engine, which takes at most {MAX_COMMAND_BYTES}; "
            "shorten the prompt, the schema or the grammar",
            None,
            "request_too_large",
        )
    return data


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
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._tasks = [asyncio.create_task(run()) for run in (self._receive, self._watch, self._renew)]
        self.send(Hello(PROTOCOL_VERSION, self.epoch, name))

    def send(self, command: AnyCommand) -> None:
        """Queue a command without waiting.

        On a closed link it is dropped, as it would be on one about to break. Raises ApiError 413 as `encode_command`.
        """
        self.send_encoded(encode_command(command))

    def send_encoded(self, data: bytes) -> None:
        """Queue a command that `encode_command` has encoded."""
        if self._dealer is None or self._dealer.closed:
            return
        # Without a high-water mark a send cannot be refused; DONTWAIT makes pyzmq send at once.
        sent = cast("asyncio.Future[Any]", self._dealer.send(data, zmq.DONTWAIT))
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
                    elif isinstance(event, Closed):
                        self._on_break(event.message)
                        return
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
            message = await recv_monitor_message(self._monitor)
            refused = message["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._on_break(REFUSED_KEY if refused else "the engine closed the connection")

    async def _renew(self) -> None:
        """Renew the lease from the event loop, so that a loop that hangs loses it."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(RENEW_SECONDS)
                if self.ready is not None:
                    self.send(Renew())
