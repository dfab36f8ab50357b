"""Connection to one epoch of the engine.

It consists of a DEALER socket, a handshake, a lease to renew, and a monitor that detects disconnects.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

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
from tandem.protocol.sockets import CONNECTION_EVENTS, MAX_COMMAND_BYTES, Transport, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
"""Messages read per event loop iteration."""

_POLLIN = int(zmq.POLLIN)
"""The flag as an int, since combining the enum is done in Python."""


def encode_command(command: AnyCommand) -> bytes:
    """Encode a command for the engine.

    Raises ApiError 413 for a command above the engine's size limit, which would close the connection of all requests.
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

    A lost connection is closed and replaced by one with a new identity. Step outputs go to `streams`, other events to
    `on_event`; `on_break` is called with the reason when the connection fails. All run in the event loop.
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
        self.identity = b""
        """Unique name of the connection."""
        self._streams = streams
        self._on_event = on_event
        self._on_break = on_break
        self._dealer: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: zmq.Socket[bytes] | None = None
        """Underlying socket of `_dealer`, as its futures cost more than the messages."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_reading = False
        """True if a read is scheduled."""

    def open(self, endpoint: str, transport: Transport, name: str, now: float, lost_identity: bytes = b"") -> None:
        """Connect and send a Hello; the reply arrives via `on_event`.

        lost_identity: identity of the previous link, which the engine may know.
        """
        self.opened_at = now
        self._dealer = connect_dealer(self._context, endpoint, transport)
        identity = self._dealer.identity
        assert isinstance(identity, bytes)
        self.identity = identity
        self._monitor = self._dealer.get_monitor_socket(CONNECTION_EVENTS)
        self._loop = asyncio.get_running_loop()
        self._socket = zmq.Socket.shadow(self._dealer.underlying)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._tasks = [asyncio.create_task(run()) for run in (self._watch, self._renew)]
        self.send(Hello(PROTOCOL_VERSION, self.epoch, name, lost_identity))

    def send(self, command: AnyCommand) -> None:
        """Queue a command without blocking.

        It is dropped on a closed link, as on one about to break. Raises ApiError 413 as `encode_command`.
        """
        self.send_encoded(encode_command(command))

    def send_encoded(self, data: bytes) -> None:
        """Queue a command that `encode_command` has encoded."""
        if self._socket is None or self._dealer is None or self._dealer.closed:
            return
        try:
            self._socket.send(data, zmq.DONTWAIT)  # never fails without a high-water mark
        except zmq.ZMQError as error:
            self._on_break(f"cannot send to the engine: {error}")
        else:
            self._read_soon()

    def close(self, polite: bool = False) -> None:
        """Close the connection and drop queued messages.

        polite: send a Goodbye first.
        """
        if polite and self.ready is not None:
            self.send(Goodbye())
        for task in self._tasks:
            task.cancel()
        if self._dealer is not None and not self._dealer.closed:
            if self._loop is not None and self._socket is not None:
                self._loop.remove_reader(self._socket.fileno())
            self._socket = None
            self._dealer.disable_monitor()
            # Linger briefly for the Goodbye; a dead engine must not delay the close.
            self._dealer.close(linger=200 if polite else 0)
        if self._monitor is not None:
            self._monitor.close(linger=0)

    def _read(self) -> None:
        """Handle the messages that have arrived.

        If there are many, some are left for the next event loop iteration.
        """
        self._is_reading = False
        for _ in range(MESSAGES_PER_TURN):
            if not self._handle_next():
                return
        self._read_soon()

    def _read_all(self) -> None:
        """Handle messages received before the connection was lost.

        They may report that a request has started, which limits its retries.
        """
        while self._handle_next():
            pass

    def _handle_next(self) -> bool:
        """Handle a message, if there is one.

        Return False if there is none, or if the link is closed, possibly by the event itself.
        """
        if self._socket is None or self._socket.closed:
            return False
        if not int(self._socket.get(zmq.EVENTS)) & _POLLIN:  # cheaper than the exception of an empty read
            return False
        self._handle(self._socket.recv(zmq.DONTWAIT))
        return True

    def _read_soon(self) -> None:
        """Read in the next event loop iteration.

        The file descriptor is edge-triggered, and a send may consume its event.
        """
        if not self._is_reading and self._loop is not None:
            self._is_reading = True
            self._loop.call_soon(self._read)

    def _handle(self, data: bytes) -> None:
        try:
            event = decode_event(data)
            if isinstance(event, StepOutput):
                self._streams.deliver(event)
            elif isinstance(event, Closed):
                self._on_break(event.message)
            else:
                self._on_event(event)
        except ProtocolError as error:
            self._on_break(f"the engine sent an unreadable message: {error}")
        except Exception:  # an exception must fail the streams instead of leaving them waiting
            logger.exception("an event of the engine could not be handled")
            self._on_break("an event of the engine could not be handled")

    async def _watch(self) -> None:
        assert self._monitor is not None
        with contextlib.suppress(asyncio.CancelledError):
            reasons: dict[object, str] = {
                zmq.EVENT_DISCONNECTED: "the engine closed the connection",
                zmq.EVENT_HANDSHAKE_FAILED_AUTH: REFUSED_KEY,
            }
            event = None
            while event not in reasons:
                event = (await recv_monitor_message(self._monitor))["event"]
            self._read_all()
            if self._socket is not None:
                self._on_break(reasons[event])

    async def _renew(self) -> None:
        """Renew the lease from the event loop, so that a hung loop loses it."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(RENEW_SECONDS)
                if self.ready is not None:
                    self.send(Renew())
