"""Clients that load a server, each a process of its own."""

import json
import multiprocessing
import selectors
import socket
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from msgspec import Struct

from tests.support.stream_client import READ_BYTES, StreamClient, answer, completion, request, summary

START_SECONDS = 300.0
"""Longest time in which all streams have their first token; a busy machine of two cores takes a minute for 2,048."""
ENDLESS = 900_000
PROBE_SECONDS = 0.05
"""Time between two probes."""
CHAT = [
    {"role": "system", "content": "You are a helpful assistant that knows Python's standard library."},
    {"role": "user", "content": "What does textwrap.dedent do?"},
    {"role": "assistant", "content": "It removes any common leading whitespace from every line in a text."},
    {"role": "user", "content": "And which function joins two paths?"},
]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "What does textwrap.dedent do?"}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
}
"""Path and body of each kind of request."""


class Arrivals(Struct, frozen=True):
    """Reads of one stream. Times are monotonic seconds."""

    request_id: str
    opened: float
    first: float
    times: "array[float]"
    counts: "array[int]"
    """Tokens of each read, at `times`."""


class Share(Struct, frozen=True):
    """One client's share of a measurement."""

    tokens: int
    """Tokens that came in the measured time."""
    started: float
    """Monotonic seconds at which the measured time began."""
    cpu: float
    """CPU seconds that the client used in it."""
    arrivals: list[Arrivals]


def _stream(address: tuple[str, int], count: int, index: int, tokens: int, has_letters: bool, pipe: Connection) -> None:
    """Hold streams.

    Say when all have begun, then count tokens from one message to the next.
    """
    with StreamClient(address, records=has_letters, prefix=f"c{index}-", has_letters=has_letters) as client:
        streams = client.open(completion(tokens), count)
        client.until_streaming(streams, START_SECONDS)
        assert client.num_open == count, f"streams ended early: {summary(streams)}"
        pipe.send(None)
        _read_until_told(client, pipe)
        tokens, started, cpu = client.num_tokens, time.monotonic(), time.process_time()
        _read_until_told(client, pipe)
        tokens, cpu = client.num_tokens - tokens, time.process_time() - cpu
        kept = [Arrivals(s.request_id, s.opened, s.first, s.arrivals[:], s.counts[:]) for s in streams]
        _read_until_told(client, pipe)  # goes on as the load beside which others are probed
        assert client.num_open == count and not any(s.problem for s in streams), summary(streams)
        pipe.send(Share(tokens, started, cpu, kept))


def _read_until_told(client: StreamClient, pipe: Connection) -> None:
    while not pipe.poll():
        client.poll(0.02)
    pipe.recv()


def _even_shares(count: int, clients: int) -> list[int]:
    """Divide streams or connections among clients; none has an empty share."""
    clients = min(clients, count)
    return [count // clients + (index < count % clients) for index in range(clients)]


class StreamLoad:
    """Streams held by several client processes."""

    def __init__(
        self, address: tuple[str, int], streams: int, clients: int, tokens: int = ENDLESS, has_letters: bool = True
    ) -> None:
        """Start the clients.

        tokens: those that each stream asks for; has_letters: False for an engine that is not scripted.
        """
        self._clients = [
            spawn(_stream, address, share, index, tokens, has_letters)
            for index, share in enumerate(_even_shares(streams, clients))
        ]

    def await_start(self) -> None:
        """Wait until every stream has had a token."""
        for _, pipe in self._clients:
            pipe.recv()

    def mark(self) -> None:
        """Begin, and then end, the measured time; and then end the load."""
        for _, pipe in self._clients:
            pipe.send(None)

    def end(self) -> None:
        """End the load at once."""
        for process, _ in self._clients:
            process.terminate()
            process.join()

    def shares(self) -> list[Share]:
        """Return what each client measured."""
        found: list[Share] = [pipe.recv() for _, pipe in self._clients]
        for process, _ in self._clients:
            process.join()
        return found


def spawn(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process; return it and the pipe whose other end is its last argument."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _probe(address: tuple[str, int], pipe: Connection) -> None:
    """Send short streams and liveness probes until told to stop.

    Then send the figures of both.
    """
    live: list[float] = []
    with StreamClient(address, prefix="p") as client:
        while not pipe.poll():
            client.open(completion(1))
            client.run(PROBE_SECONDS)
            status, _, seconds = answer(address, "/health/live")
            live.append(seconds if status == 200 else float("inf"))
        pipe.recv()
        client.until_ended(client.streams)
        assert all(s.outcome == "done" for s in client.streams), summary(client.streams)
        pipe.send(([(s.request_id, s.opened, s.first) for s in client.streams], live))


class Probes(Struct, frozen=True):
    """Times of short requests beside a load."""

    first: list[tuple[str, float, float]]
    """Id of each request, when it was sent and when its first token came."""
    live: list[float]
    """Seconds to the answer of `/health/live` on a new connection."""


def probe(address: tuple[str, int], seconds: float) -> Probes:
    """Probe for a time from a process of its own."""
    process, pipe = spawn(_probe, address)
    time.sleep(seconds)
    pipe.send(None)
    probes = Probes(*pipe.recv())
    process.join()
    return probes


def _repeat(address: tuple[str, int], data: bytes, concurrency: int, pipe: Connection) -> None:
    """Send one request after another on each of some connections.

    When told to stop, send the number of replies.
    """
    selector = selectors.DefaultSelector()
    for _ in range(concurrency):
        sock = socket.create_connection(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data)
        selector.register(sock, selectors.EVENT_READ, bytearray())
    done = 0
    pipe.send(None)
    while not pipe.poll():
        for key, _ in selector.select(0.02):
            sock, buffer = key.fileobj, key.data
            assert isinstance(sock, socket.socket)
            buffer += sock.recv(READ_BYTES)
            if _is_whole(buffer):
                assert buffer.startswith(b"HTTP/1.1 200 "), bytes(buffer)
                buffer.clear()
                done += 1
                sock.sendall(data)
    pipe.send(done)


def _is_whole(reply: bytearray) -> bool:
    """Return whether a reply with a content-length has come to its end."""
    head = reply.find(b"\r\n\r\n")
    if head < 0:
        return False
    place = reply.lower().find(b"content-length:", 0, head)
    length = int(reply[place + 15 : reply.find(b"\r", place)])
    return len(reply) >= head + 4 + length


class RequestLoad:
    """Requests of one kind, one after another on each connection.

    Their replies have one token.
    """

    def __init__(self, address: tuple[str, int], kind: str, connections: int, clients: int = 1) -> None:
        """Start the clients, one process each, and await their first requests."""
        path, fields = BODIES[kind]
        body = json.dumps(fields | {"model": "tandem-default", "max_tokens": 1}).encode()
        data = request(body, path, close=False)
        self._clients = [spawn(_repeat, address, data, share) for share in _even_shares(connections, clients)]
        for _, pipe in self._clients:
            pipe.recv()

    def stop(self) -> int:
        """End the load; return the number of replies."""
        for _, pipe in self._clients:
            pipe.send(None)
        done = sum(pipe.recv() for _, pipe in self._clients)
        for process, _ in self._clients:
            process.join()
        return done
