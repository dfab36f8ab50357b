"""Load-generating clients, each in a separate process."""

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
"""Timeout for the first token of all streams; 2,048 take a minute on a busy machine with two cores."""
ENDLESS = 900_000
PROBE_SECONDS = 0.05
"""Interval of the probes."""
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
    """Reads of a stream. Times are monotonic seconds."""

    request_id: str
    opened: float
    first: float
    times: "array[float]"
    counts: "array[int]"
    """Tokens of the read at each of `times`."""


class Share(Struct, frozen=True):
    """Measurement of one client."""

    tokens: int
    """Tokens received in the measured time."""
    started: float
    """Start of the measured time in monotonic seconds."""
    cpu: float
    """CPU seconds of the client in it."""
    arrivals: list[Arrivals]


def _stream(address: tuple[str, int], count: int, index: int, tokens: int, has_letters: bool, pipe: Connection) -> None:
    """Hold streams: report when all have started, then count tokens between two messages."""
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
        _read_until_told(client, pipe)  # continues as the background load of the probes
        assert client.num_open == count and not any(s.problem for s in streams), summary(streams)
        pipe.send(Share(tokens, started, cpu, kept))


def _read_until_told(client: StreamClient, pipe: Connection) -> None:
    while not pipe.poll():
        client.poll(0.02)
    pipe.recv()


def _even_shares(count: int, clients: int) -> list[int]:
    """Divide streams or connections among clients, without empty shares."""
    clients = min(clients, count)
    return [count // clients + (index < count % clients) for index in range(clients)]


class StreamLoad:
    """Streams held by several client processes."""

    def __init__(
        self, address: tuple[str, int], streams: int, clients: int, tokens: int = ENDLESS, has_letters: bool = True
    ) -> None:
        """Start the clients.

        tokens: `max_tokens` of each stream; has_letters: False for a real engine.
        """
        self._clients = [
            spawn(_stream, address, share, index, tokens, has_letters)
            for index, share in enumerate(_even_shares(streams, clients))
        ]

    def await_start(self) -> None:
        """Wait until every stream has received a token."""
        for _, pipe in self._clients:
            pipe.recv()

    def mark(self) -> None:
        """Start the measured time, then end it, then end the load; one step per call."""
        for _, pipe in self._clients:
            pipe.send(None)

    def end(self) -> None:
        """End the load at once."""
        for process, _ in self._clients:
            process.terminate()
            process.join()

    def shares(self) -> list[Share]:
        """Return the measurement of each client."""
        found: list[Share] = [pipe.recv() for _, pipe in self._clients]
        for process, _ in self._clients:
            process.join()
        return found


def spawn(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process with one end of a pipe as its last argument; return it with the other end."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _probe(address: tuple[str, int], pipe: Connection) -> None:
    """Send short streams and liveness probes until stopped, then send the latencies of both."""
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
    """Latencies of short requests during a load."""

    first: list[tuple[str, float, float]]
    """Id of each request, when it was sent and when its first token arrived."""
    live: list[float]
    """Latency of `/health/live` on a new connection, in seconds."""


def probe(address: tuple[str, int], seconds: float) -> Probes:
    """Probe for `seconds` from a separate process."""
    process, pipe = spawn(_probe, address)
    time.sleep(seconds)
    pipe.send(None)
    probes = Probes(*pipe.recv())
    process.join()
    return probes


def _repeat(address: tuple[str, int], data: bytes, concurrency: int, pipe: Connection) -> None:
    """Send requests one after another on each connection until stopped, then send the number of replies."""
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
    """Return whether a reply with a content-length is complete."""
    head = reply.find(b"\r\n\r\n")
    if head < 0:
        return False
    start = reply.lower().find(b"content-length:", 0, head)
    length = int(reply[start + 15 : reply.find(b"\r", start)])
    return len(reply) >= head + 4 + length


class RequestLoad:
    """Requests of one kind with one-token replies, one after another on each connection."""

    def __init__(self, address: tuple[str, int], kind: str, connections: int, clients: int = 1) -> None:
        """Start the client processes, and await their first requests."""
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
