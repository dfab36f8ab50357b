"""Hostile clients and a liveness probe, in separate processes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.frontends.load import spawn
from tests.support.stream_client import StreamClient, answer, completion

IDLE, UNREAD, LEAVING = 3000, 200, 2000
RECEIVE_BUFFER = 4096
START_SECONDS = 180.0
PROBE_SECONDS = 0.1


def _hostile(address: tuple[str, int], tokens: int, has_letters: bool, pipe: Connection) -> None:
    """Hold idle connections, unread answers and streams.

    The first message sent is the number of refused streams. The first message received closes the streams at once, the
    second one the rest.
    """
    with StreamClient(address, has_letters=has_letters, prefix="h") as client:
        client.idle(IDLE)
        client.open(completion(tokens), UNREAD, reads=False, receive_buffer=RECEIVE_BUFFER)
        leaving = client.open(completion(tokens), LEAVING)
        client.until_streaming(leaving, START_SECONDS)
        pipe.send(sum(stream.status not in (0, 200) for stream in leaving))
        while not pipe.poll():
            client.poll(0.02)
        pipe.recv()
        for stream in leaving:
            client.drop(stream)
        pipe.send(None)
        pipe.recv()


def _live(address: tuple[str, int], pipe: Connection) -> None:
    """Request /health/live until stopped, and send the latencies."""
    found: list[float] = []
    while not pipe.poll():
        status, _, seconds = answer(address, "/health/live")
        found.append(seconds if status == 200 else float("inf"))
        time.sleep(PROBE_SECONDS)
    pipe.send(found)


@contextmanager
def live_probe(address: tuple[str, int]) -> Iterator[Callable[[], list[float]]]:
    """Request /health/live from a separate process.

    Yields a function that stops it and returns the latencies in seconds.
    """
    process, pipe = spawn(_live, address)

    def found() -> list[float]:
        pipe.send(None)
        seconds: list[float] = pipe.recv()
        return seconds

    try:
        yield found
    finally:
        process.terminate()
        process.join()


class HostileClients:
    """Context manager that runs both processes."""

    def __init__(self, address: tuple[str, int], tokens: int, has_letters: bool) -> None:
        self._arguments = (address, tokens, has_letters)
        self._live: tuple[Any, Connection]
        self._hostile: tuple[Any, Connection]

    def __enter__(self) -> "HostileClients":
        self._live = spawn(_live, self._arguments[0])
        self._hostile = spawn(_hostile, *self._arguments)
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in (self._hostile, self._live):
            process.terminate()
            process.join()

    def is_settled(self) -> bool:
        """Return whether every stream has started, after which `refused` can be called."""
        return self._hostile[1].poll()

    def refused(self) -> int:
        """Return the number of refused streams."""
        number: int = self._hostile[1].recv()
        return number

    def leave(self) -> None:
        """Close all streams at once, but not the idle connections and unread answers."""
        self._hostile[1].send(None)

    def live(self) -> list[float]:
        """Return the latencies of `/health/live` in seconds."""
        self._live[1].send(None)
        found: list[float] = self._live[1].recv()
        return found
