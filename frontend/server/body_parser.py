"""HTTP parser that starts at the body of a request.

The headers have been read by another parser.
"""

from collections.abc import Iterable
from typing import Any

import httptools


class _Callbacks:
    """Callbacks of a parser, without those for the headers."""

    def __init__(self, protocol: Any) -> None:
        self.protocol: Any = None
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self.protocol is not None:
            self.protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.protocol is not None:
            self.protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.protocol is not None:
            self.protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.protocol is not None:
            self.protocol.on_headers_complete()


def body_parser(protocol: Any, framing: bytes) -> httptools.HttpRequestParser:
    """Return a parser for a body framed by the headers in `framing`.

    It calls the callbacks of `protocol`.

    """
    callbacks = _Callbacks(protocol)
    parser = httptools.HttpRequestParser(callbacks)
    parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
    callbacks.protocol = protocol
    return parser


def framing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the headers that frame the body of a request; empty without a body."""
    wanted = (b"content-length", b"transfer-encoding")
    found = [(name, value) for name, value in headers if name in wanted]
    if all(name == b"content-length" and not int(value) for name, value in found):
        return b""
    return b"".join([b"%b: %b\r\n" % header for header in found])
