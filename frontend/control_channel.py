"""Control channel between the supervisor and a frontend process.

It is a socket pair with one line of JSON per message.
"""

import asyncio
import socket
from typing import Generic, Self, TypeVar

import msgspec
from msgspec import Struct

from tandem.frontend.metrics.reports import Report
from tandem.protocol.logs import LogLevel

BEAT_SECONDS = 0.25
"""Seconds between two heartbeats of a frontend."""
METRICS_SECONDS = 1.0
"""Seconds between two metrics reports of a frontend; counts after the last one are lost if it is killed."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""Maximum bytes of a message; a peer that sends a longer one is broken."""
_CLOGGED_BYTES = 64 * 1024
"""Buffered bytes above which the peer is considered unresponsive."""


class Beat(Struct, frozen=True, tag="beat"):
    """Heartbeat with the state of a frontend.

    It is sent by the event loop, so one that hangs sends none.
    """

    status: str
    """`starting`, `serving` (from its slots) or `draining`."""
    slots: tuple[int, ...] = ()
    """Slots that the process accepts from."""
    open_sequences: int = 0
    connections: int = 0
    loop_lag: float = 0.0
    """Maximum lag of the event loop since the last heartbeat, in seconds."""
    engine: tuple[str, str] = ("ready", "")
    """Engine status seen by this frontend, and the reason while it is not `ready`."""


class Leaving(Struct, frozen=True, tag="leaving"):
    """Request for a successor, from a frontend that received a signal to exit.

    It keeps serving until a successor serves and the supervisor requests a drain. The supervisor responds at once with
    `Accept`; a frontend without a response drains on its own.
    """


class Metrics(Struct, frozen=True, tag="metrics"):
    """Metrics of a frontend.

    Sent every second, and for each scrape that the frontend handles.
    """

    report: Report
    scrape: int = 0
    """Id of the scrape that waits for `Totals`; 0 for none."""
    model_name: str = ""
    """Served model name; "" before an engine was connected."""


class Accept(Struct, frozen=True, tag="accept"):
    """Slots that a frontend must accept from.

    By default this is its own slot alone. A message sent before the frontend serves applies once it does.
    """

    slots: tuple[int, ...]


class Drain(Struct, frozen=True, tag="drain"):
    """Command to finish open requests and exit.

    The frontend reports unready at once, accepts requests for `delay` more seconds, then ends open ones after `timeout`
    seconds.
    """

    delay: float
    timeout: float


class End(Struct, frozen=True, tag="end"):
    """Command to end open requests with an error and exit at once."""


class Totals(Struct, frozen=True, tag="totals"):
    """Metrics of the supervisor and all its processes.

    In Prometheus's text format.
    """

    scrape: int
    text: str


class Reload(Struct, frozen=True, tag="reload"):
    """Command to reload API keys and TLS files, and to set the log level."""

    log_level: LogLevel


FromFrontend = Beat | Leaving | Metrics
ToFrontend = Accept | Drain | End | Totals | Reload
Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Struct)


class ControlChannel(Generic[Incoming, Outgoing]):
    """One end of a channel."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: "msgspec.json.Decoder[Incoming]"
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.json.Encoder()

    @property
    def is_clogged(self) -> bool:
        """True while the peer does not read; heartbeats should be skipped then."""
        return self._writer.transport.get_write_buffer_size() > _CLOGGED_BYTES

    def send(self, message: Outgoing) -> None:
        """Send a message without blocking.

        It is dropped if the channel is closed.
        """
        if not self._writer.is_closing():
            self._writer.write(self._encoder.encode(message) + b"\n")

    async def receive(self) -> Incoming | None:
        """Wait for the next message.

        None once the peer has closed the channel or sent an invalid message.
        """
        try:
            line = await self._reader.readline()
            return self._decoder.decode(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._writer.close()

    @classmethod
    async def open(cls, sock: socket.socket, decoder: "msgspec.json.Decoder[Incoming]") -> Self:
        """Open one end of a channel on a socket of a pair."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_MESSAGE_BYTES)
        return cls(reader, writer, decoder)


FrontendEnd = ControlChannel[ToFrontend, FromFrontend]
SupervisorEnd = ControlChannel[FromFrontend, ToFrontend]


async def frontend_end(sock: socket.socket) -> FrontendEnd:
    """Open a frontend's end."""
    return await FrontendEnd.open(sock, msgspec.json.Decoder(ToFrontend))


async def supervisor_end(sock: socket.socket) -> SupervisorEnd:
    """Open the supervisor's end."""
    return await SupervisorEnd.open(sock, msgspec.json.Decoder(FromFrontend))
