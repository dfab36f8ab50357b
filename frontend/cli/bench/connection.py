"""Minimal HTTP/1.1 client: POST, keep-alive, streamed body.

A general client spends more CPU time per token than the server under test, and would measure itself.
"""

import asyncio
import ssl
from base64 import b64encode
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from tandem.frontend.cli.bench.framing import Chunked, Framing, Sized, UntilClose
from tandem.frontend.cli.server_address import shown_url, unix_path
from tandem.frontend.cli.trust import Trust

READ_BYTES = 1 << 16
_USUAL = Trust()
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Endpoint:
    """Address of a server's completions endpoint."""

    host: str
    port: int
    path: str
    is_tls: bool = False
    api_key: str = ""
    trust: Trust = _USUAL
    uds: str | None = None
    """Path of a Unix socket to connect to instead of host and port."""
    basic: str = ""
    """User name and password of the URL in base64; sent instead of the key, as in httpx."""

    @classmethod
    def parse(cls, url: str, api_key: str = "", trust: Trust = _USUAL) -> "Endpoint":
        """Parse the address of a server. Raises ValueError if it is invalid."""
        if (uds := unix_path(url)) is not None:
            return cls("localhost", 80, "/v1/completions", api_key=api_key, uds=uds)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL must be http://host:port or https://host:port, not {shown_url(url)!r}")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, path, is_tls, api_key, trust, basic=_basic(parts))

    def context(self) -> ssl.SSLContext | None:
        """Build the TLS context of connections to this endpoint.

        None for unencrypted connections.
        """
        return self.trust.context() if self.is_tls else None

    def head(self, length: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        given = f"Basic {self.basic}" if self.basic else f"Bearer {self.api_key}" if self.api_key else ""
        key = f"authorization: {given}\r\n" if given else ""
        return (
            f"POST {self.path} HTTP/1.1\r\nhost: {host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"{key}accept: text/event-stream\r\ncontent-length: {length}\r\n\r\n"
        ).encode()


def _basic(parts: SplitResult) -> str:
    """Return the user name and password of a URL for Basic authentication."""
    if not (parts.username or parts.password):
        return ""
    return b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()).decode()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Parse status and headers, with lowercase names. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"no HTTP/1 response: {first[:40]!r}")
    fields = (line.partition(":") for line in lines if line)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}


def framing_of(headers: dict[str, str]) -> Framing:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Chunked()
    if "content-length" in headers:
        return Sized(int(headers["content-length"]))
    return UntilClose()


class Connection:
    """Connection with one request at a time."""

    def __init__(self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._endpoint, self._reader, self._writer = endpoint, reader, writer
        self._framing: Framing = Sized(0)
        self._keep = True
        self.status = 0

    @classmethod
    async def open(cls, endpoint: Endpoint, context: ssl.SSLContext | None) -> "Connection":
        if endpoint.uds is None:
            streams = await asyncio.open_connection(endpoint.host, endpoint.port, limit=READ_BYTES, ssl=context)
        else:
            streams = await asyncio.open_unix_connection(endpoint.uds, limit=READ_BYTES)
        return cls(endpoint, *streams)

    async def post(self, body: bytes) -> None:
        """Send a request and read the response headers into `status`."""
        self._keep = False
        self._writer.write(self._endpoint.head(len(body)) + body)
        await self._writer.drain()
        head = await self._reader.readuntil(_HEAD_END)
        self.status, headers = parse_head(head[: -len(_HEAD_END)])
        self._framing = framing_of(headers)
        self._keep = headers.get("connection", "").lower() != "close"

    async def read(self) -> bytes | None:
        """Read more of the body, possibly nothing yet; None at its end.

        Raises EOFError if it is truncated.
        """
        if self._framing.done:
            return None
        data = await self._reader.read(READ_BYTES)
        if not data:
            if self._framing.ends_at_eof:
                return None
            raise EOFError("the connection closed inside a response")
        return self._framing.feed(data)

    async def read_all(self) -> bytes:
        pieces = []
        while (data := await self.read()) is not None:
            pieces.append(data)
        return b"".join(pieces)

    @property
    def reusable(self) -> bool:
        return self._keep and self._framing.done and self._framing.clean and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Wait until the connection is closed, ignoring errors of the peer."""
        try:
            await self._writer.wait_closed()
        except OSError:
            return


class ConnectionPool:
    """Idle connections of a process, by endpoint."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._contexts = [endpoint.context() for endpoint in endpoints]
        self._idle: list[list[Connection]] = [[] for _ in endpoints]

    def __len__(self) -> int:
        return sum(map(len, self._idle))

    def endpoint_of(self, index: int) -> int:
        """Choose the endpoint of a request, round-robin by its index."""
        return index % len(self._endpoints)

    async def connect(self, endpoint: int) -> None:
        """Open a connection before its first request."""
        self._idle[endpoint].append(await self._open(endpoint))

    async def post(self, endpoint: int, body: bytes) -> Connection:
        """Send a request and return its connection after the response headers.

        Return the connection with `release`.
        """
        if idle := self._idle[endpoint]:
            connection = idle.pop()
            try:
                await connection.post(body)
                return connection
            except (ConnectionError, EOFError):
                # The server may close an idle connection while a request is in flight: retry once on a new one.
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = await self._open(endpoint)
        try:
            await connection.post(body)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open(self, endpoint: int) -> Connection:
        return await Connection.open(self._endpoints[endpoint], self._contexts[endpoint])

    def release(self, endpoint: int, connection: Connection) -> None:
        if connection.reusable:
            self._idle[endpoint].append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        connections = [connection for idle in self._idle for connection in idle]
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in connections))
