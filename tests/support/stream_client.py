"""Thousands of streams of one process, read straight from their sockets.

They are those of a scripted engine (`tests.fakes.scripted_engine`), whose tokens have one capital letter each, in the
order of the alphabet. Nothing else that a server sends has capital letters, but errors and the end of a stream. So the
tokens in what was read are counted without parsing it, which takes a microsecond, and none can be lost or come twice
unnoticed.
"""

import contextlib
import json
import select
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Any

from msgspec import Struct

from tandem.frontend.listening import raise_file_limit

_NO_LETTERS = bytes(set(range(256)) - set(ascii_uppercase.encode()))
_PERIOD = len(ascii_uppercase)
_LETTERS = ascii_uppercase.encode() * 10_000
READ_BYTES = 65_536
DONE, ERROR, EVENT = b"[DONE]", b'"error"', b"data: {"
_KEPT_BYTES = 2000
"""Bytes at the end of what a stream sent that are kept for its outcome and for messages of tests."""


def completion(max_tokens: int, *, stream: bool = True, **fields: Any) -> bytes:
    """Build the body of a completion that a scripted engine answers with exactly `max_tokens` tokens."""
    body = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "max_tokens": max_tokens}
    return json.dumps(body | {"stream": stream, "ignore_eos": True} | fields).encode()


def request(body: bytes, path: str = "/v1/completions", request_id: str = "", close: bool = True) -> bytes:
    """Build the bytes of a POST."""
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    head += [f"content-length: {len(body)}"]
    head += [f"x-request-id: {request_id}"] if request_id else []
    head += ["connection: close"] if close else []
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Stream:
    """One request and what came of it. Times are those of `time.monotonic`, 0.0 for what has not happened."""

    __slots__ = (
        *("arrivals", "body", "connected", "counts", "ended", "first", "has_letters", "kept", "num_tokens"),
        *("opened", "outcome", "problem", "reads", "request_id", "sock", "status"),
    )

    def __init__(self, request_id: str, body: bytes, has_letters: bool = True) -> None:
        """`has_letters` False counts events instead of the letters of a scripted engine's tokens."""
        self.request_id = request_id
        self.body = body
        self.has_letters = has_letters
        self.sock: socket.socket | None = None
        self.connected = False
        self.reads = True
        """False for a client that never reads."""
        self.opened = self.first = self.ended = 0.0
        self.status = 0
        self.num_tokens = 0
        self.outcome = ""
        """`done`, `error` (an event or a status that says so), or `cut` (ended without either); "" while open."""
        self.problem = ""
        """Token that was not the next one, if one came."""
        self.kept = b""
        self.arrivals = array("d")
        """Times of reads that brought tokens; filled if the client records."""
        self.counts = array("I")
        """Tokens of each of those reads."""

    def take(self, data: bytes) -> int:
        """Count the tokens in what was read; return their number."""
        if not self.status:
            self.kept += data
            if (end := self.kept.find(b"\r\n\r\n")) < 0:
                return 0
            self.status = int(self.kept[9:12])
            data, self.kept = self.kept[end + 4 :], b""
            if self.status != 200:
                self.kept = data
                return 0
        self.kept = (self.kept + data)[-_KEPT_BYTES:] if len(data) < _KEPT_BYTES else data[-_KEPT_BYTES:]
        if not self.has_letters:
            count = data.count(EVENT)
            self.num_tokens += count
            return count
        letters = data.translate(None, _NO_LETTERS)
        if not letters:
            return 0
        place = self.num_tokens % _PERIOD
        if not _LETTERS.startswith(letters, place):
            for mark in (DONE, ERROR):
                letters = data.partition(mark)[0].translate(None, _NO_LETTERS)
                if mark in data and _LETTERS.startswith(letters, place):
                    break
            else:
                letters = data.translate(None, _NO_LETTERS)
                if DONE not in self.kept and ERROR not in self.kept:
                    self.problem = self.problem or f"{letters[:40]!r} after {self.num_tokens} tokens"
                return 0
        self.num_tokens += len(letters)
        return len(letters)

    def end(self, now: float) -> None:
        """Note that the connection has ended."""
        self.ended = now
        if self.status not in (0, 200) or ERROR in self.kept:
            self.outcome = "error"
        else:
            whole = EVENT not in self.kept and self.kept.endswith(b"}")
            self.outcome = "done" if DONE in self.kept or whole else "cut"

    @property
    def message(self) -> str:
        """Text of the error, or the last of what came."""
        return self.kept.decode(errors="replace")


class StreamClient:
    """Opens and reads streams of one address."""

    def __init__(
        self, address: tuple[str, int], *, records: bool = False, prefix: str = "s", has_letters: bool = True
    ) -> None:
        """`records` keeps the time of each read; `prefix` begins the ids of its requests.

        `has_letters` False is for engines that are not scripted: events are counted, and no token is checked.
        """
        raise_file_limit()
        self.address = address
        self.streams: list[Stream] = []
        self.num_open = 0
        self.num_tokens = 0
        self._records = records
        self._prefix = prefix
        self._has_letters = has_letters
        self._epoll = select.epoll()
        self._by_fd: dict[int, Stream] = {}

    def __enter__(self) -> "StreamClient":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            self.drop(stream)
        self._epoll.close()

    def open(
        self,
        body: bytes,
        count: int = 1,
        path: str = "/v1/completions",
        *,
        reads: bool = True,
        receive_buffer: int | None = None,
    ) -> list[Stream]:
        """Send the same request on as many new connections; `poll` reads the answers."""
        opened = []
        for _ in range(count):
            name = f"{self._prefix}{len(self.streams)}"
            stream = Stream(name, request(body, path, name), self._has_letters)
            stream.reads = reads
            self.streams.append(stream)
            opened.append(stream)
            self.connect(stream, receive_buffer)
            if len(opened) % 50 == 0:
                self.poll(0.0)
        return opened

    def idle(self, count: int) -> list[Stream]:
        """Connect as many times, and send nothing."""
        idle = [Stream(f"{self._prefix}{len(self.streams) + index}", b"") for index in range(count)]
        self.streams += idle
        for stream in idle:
            self.connect(stream)
        return idle

    def connect(self, stream: Stream, receive_buffer: int | None = None) -> None:
        """Connect without waiting; the request follows when the connection stands."""
        sock = stream.sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        stream.opened = time.monotonic()
        sock.connect_ex(self.address)
        self._by_fd[sock.fileno()] = stream
        self._epoll.register(sock, select.EPOLLOUT)
        self.num_open += 1

    def drop(self, stream: Stream) -> None:
        """Close a connection as a client does that went away. Idempotent."""
        if stream.sock is None:
            return
        self._epoll.unregister(stream.sock)
        del self._by_fd[stream.sock.fileno()]
        stream.sock.close()
        stream.sock = None
        self.num_open -= 1

    def poll(self, seconds: float) -> None:
        """Read what has come, waiting for at most this time for something."""
        for fd, event in self._epoll.poll(seconds):
            stream = self._by_fd.get(fd)
            if stream is None or stream.sock is None:
                continue
            try:
                if not stream.connected:
                    self._send(stream, event)
                else:
                    self._read(stream)
            except BlockingIOError:
                continue
            except OSError:
                stream.end(time.monotonic())
                self.drop(stream)

    def _send(self, stream: Stream, event: int) -> None:
        assert stream.sock is not None
        if error := stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, "not connected")
        if event & select.EPOLLOUT:
            stream.connected = True
            stream.sock.send(stream.body)
            self._epoll.modify(stream.sock, select.EPOLLIN if stream.reads else 0)

    def _read(self, stream: Stream) -> None:
        assert stream.sock is not None
        data = stream.sock.recv(READ_BYTES)
        now = time.monotonic()
        if not data:
            stream.end(now)
            self.drop(stream)
            return
        if count := stream.take(data):
            self.num_tokens += count
            if not stream.first:
                stream.first = now
            if self._records:
                stream.arrivals.append(now)
                stream.counts.append(count)

    def run(self, seconds: float) -> None:
        """Read for a time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def until(self, condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Read until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}: {summary(self.streams)}"
            self.poll(0.02)

    def until_streaming(self, streams: Sequence[Stream], seconds: float = 120.0) -> None:
        """Read until every one of these streams has had a token, or has ended."""
        self.until(lambda: all(s.num_tokens or s.outcome for s in streams), "a first token of each", seconds)

    def until_ended(self, streams: Sequence[Stream], seconds: float = 120.0) -> None:
        """Read until every one of these streams has ended."""
        self.until(lambda: all(s.outcome for s in streams), "the end of each", seconds)


def summary(streams: Sequence[Stream]) -> str:
    """Say how many streams ended how, with an example of each, for messages of tests."""
    found: dict[str, list[Stream]] = {}
    for stream in streams:
        found.setdefault(f"{stream.outcome or 'open'} {stream.status}", []).append(stream)
    lines = [
        f"{len(group)} {kind} with {min(s.num_tokens for s in group)} to {max(s.num_tokens for s in group)} tokens, "
        f"such as {group[0].message[-300:]!r}"
        for kind, group in found.items()
    ]
    return "; ".join([*lines, *[s.problem for s in streams if s.problem][:3]])


def answer(address: tuple[str, int], path: str, seconds: float = 120.0) -> tuple[int, bytes, float]:
    """GET a path on a connection of its own; return status, body and the seconds that it took. 0: no answer."""
    started = time.monotonic()
    data = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=seconds) as sock:
        sock.settimeout(seconds)
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        while piece := sock.recv(READ_BYTES):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head[9:12]) if head else 0, body, time.monotonic() - started


class Summary(Struct, frozen=True):
    """Numbers of streams by their outcome."""

    done: int
    error: int
    cut: int
    open: int
    problems: int
    """Streams in which a token was missing or came twice."""

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "Summary":
        counts = [sum(s.outcome == outcome for s in streams) for outcome in ("done", "error", "cut", "")]
        return cls(*counts, problems=sum(bool(s.problem) for s in streams))
