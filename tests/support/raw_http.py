"""A client that sends whatever bytes a test wants, and reads what comes back."""

import contextlib
import http.client
import json
import socket
from types import TracebackType
from typing import Any

from msgspec import Struct

SECONDS = 120.0
"""Seconds after which a read gives up; no test asserts how long something took."""


class Reply(Struct, frozen=True):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class RawClient:
    """One connection."""

    def __init__(self, address: tuple[str, int], receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(SECONDS)
        self.socket.connect(address)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> "RawClient":
        """Send bytes; those that the server no longer takes are lost."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)
        return self

    def reply(self) -> Reply:
        """Read one response."""
        status = int(self._file.readline().split()[1])
        headers = {name.lower(): value for name, value in http.client.parse_headers(self._file).items()}
        if "content-length" in headers:
            return Reply(status, headers, self._file.read(int(headers["content-length"])))
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            self._file.readline()
        self._file.readline()
        return Reply(status, headers, body)

    def rest(self) -> bytes:
        """Read until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            return self._file.read()
        return b""


def request(path: str = "/health/live", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    """Encode a request with a Host header."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body
