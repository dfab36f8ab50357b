"""Framing of an HTTP/1.1 response body.

No I/O.
"""

import re
from enum import Enum, auto
from typing import Protocol

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")


class Framing(Protocol):
    @property
    def done(self) -> bool:
        """Return True if the body is complete."""

    @property
    def clean(self) -> bool:
        """Return True if no bytes followed the body.

        The connection can then be reused.
        """

    @property
    def ends_at_eof(self) -> bool:
        """Return True if the body ends with the connection."""

    def feed(self, data: bytes) -> bytes: ...


class Sized:
    """Body of `content-length` bytes."""

    ends_at_eof = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0
        self.clean = True

    def feed(self, data: bytes) -> bytes:
        self.clean = len(data) <= self._left
        body = data[: self._left]
        self._left -= len(body)
        self.done = self._left == 0
        return body


class UntilClose:
    """Body that ends when the server closes the connection."""

    ends_at_eof = True
    done = False
    clean = False

    def feed(self, data: bytes) -> bytes:
        return data


class _Next(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()


class Chunked:
    """Body in `transfer-encoding: chunked`, split at any byte.

    Raises ValueError for malformed chunks.
    """

    ends_at_eof = False

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self._next = _Next.SIZE
        self.done = False

    @property
    def clean(self) -> bool:
        return self.done and not self._pending

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes contained in these bytes."""
        buffer, at, body = self._pending + data, 0, []
        while not self.done and at < len(buffer):
            if self._next is _Next.DATA:
                piece = buffer[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._next = _Next.DATA_END
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            self._line(buffer[at:end])
            at = end + 2
        self._pending = buffer[at:]
        return b"".join(body)

    def _line(self, line: bytes) -> None:
        if self._next is _Next.SIZE:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise ValueError(f"no chunk size: {line[:40]!r}")
            self._left = int(size[1], 16)
            self._next = _Next.DATA if self._left else _Next.TRAILER
        elif self._next is _Next.DATA_END:
            if line:
                raise ValueError(f"a chunk is longer than its size: {line[:40]!r}")
            self._next = _Next.SIZE
        elif not line:
            self.done = True
