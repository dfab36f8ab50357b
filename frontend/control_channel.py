"""Channel between the supervisor and one frontend process.

It is a socket pair, and each message one line of JSON.
"""

import asyncio
import socket
from typing import Generic, Self, TypeVar

import msgspec
from msgspec import Struct

from tandem.frontend.metrics.reports import Report
from tandem.protocol.logs import LogLevel

BEAT_SECONDS = 0.25
"""Time between two beats of a frontend."""
METRICS_SECONDS = 1.0
"""Time between two reports of a frontend's metrics: what a killed one counted after the last is lost."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""Longest message, in bytes; the other side of a longer one is broken."""
_CLOGGED_BYTES = 64 * 1024
"""Bytes waiting to be sent beyond which the other side does not read."""


class Beat(Struct, frozen=True, tag="beat"):
    """State of a frontend.

    Its event loop sends it, so one that hangs sends none.
    """

    status: str
    """`starting`, `serving` (from its slots) or `draining`."""
    slots: tuple[int, ...] = ()
    """Listening sockets that the process accepts from."""
    open_sequences: int = 0
    connections: int = 0
    loop_lag: float = 0.0
    """Longest delay of the event loop since the last beat, in seconds."""
    engine: tuple[str, str] = ("ready", "")
    """Status of the engine as this frontend sees it, and the reason while it is not `ready`."""


class Leaving(Struct, frozen=True, tag="leaving"):
    """Request of a frontend that got a signal to end.

    It serves on until a successor does and it is told to drain. The supervisor answers at once with `Accept`, so that
    a frontend without an answer knows that it has to drain on its own.
    """


class Metrics(Struct, frozen=True, tag="metrics"):
    """Values of a frontend's metrics.

    They are sent every second, and for each scrape that the frontend answers.
    """

    report: Report
    scrape: int = 0
    """Number of the scrape that waits for the `Totals`; 0 for none."""
    model_name: str = ""
    """Name under which the frontend serves the model; "" before it has heard of an engine."""


class Accept(Struct, frozen=True, tag="accept"):
    """All listening sockets that a frontend accepts from, from now on.

    Before the first such message these are its own slot alone. One that comes before it serves holds from then on.
    """

    slots: tuple[int, ...]


class Drain(Struct, frozen=True, tag="drain"):
    """Order to a frontend to finish what is open and end.

    It is unready at once, accepts requests for `delay` seconds more, then ends what is open after `timeout` seconds.
    """

    delay: float
    timeout: float


class End(Struct, frozen=True, tag="end"):
    """Order to a frontend to end what is open with an error, and exit at once."""


class Totals(Struct, frozen=True, tag="totals"):
    """Metrics of the supervisor and all its processes.

    They are in the text format of Prometheus.
    """

    scrape: int
    text: str


class Reload(Struct, frozen=True, tag="reload"):
    """Order to read API keys and TLS files again, and to log from a level on."""

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
        """True while the other side does not read; a beat is better left out then."""
        return self._writer.transport.get_write_buffer_size() > _CLOGGED_BYTES

    def send(self, message: Outgoing) -> None:
        """Send a message without waiting.

        On a channel that has ended it is dropped.
        """
        if not self._writer.is_closing():
            self._writer.write(self._encoder.encode(message) + b"\n")

    async def receive(self) -> Incoming | None:
        """Wait for the next message.

        None once the other side has closed the channel, or broke its rules.
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
        """Take over one socket of a pair."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_MESSAGE_BYTES)
        return cls(reader, writer, decoder)


FrontendEnd = ControlChannel[ToFrontend, FromFrontend]
SupervisorEnd = ControlChannel[FromFrontend, ToFrontend]


async def frontend_end(sock: socket.socket) -> FrontendEnd:
    """Open the end of a frontend."""
    return await FrontendEnd.open(sock, msgspec.json.Decoder(ToFrontend))


async def supervisor_end(sock: socket.socket) -> SupervisorEnd:
    """Open the end of the supervisor."""
    return await SupervisorEnd.open(sock, msgspec.json.Decoder(FromFrontend))
