"""Clients that stop reading, on a real server: bounded, given up, and no burden to the others."""

import fcntl
import json
import struct
import termios
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.server.connections import Closed
from tandem.frontend.server.protocol import LimitedProtocol
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, post, until
from tests.frontend.server.test_limits import counted
from tests.support.raw_http import RawClient, request

READERS = 200
NAME = "m" * 20_000
"""A name of the model that makes each event of a stream large, so that few tokens exceed all buffers."""
HIGH_WATER = 64 * 1024
"""Bytes in a connection's own buffer beyond which no more is written to it."""
UNSENT = 64 * 1024
"""Bytes that the system may hold for a client that reads nothing, its overhead included."""
TOKENS = 2000


@pytest.fixture
def build(engine: FakeEngine) -> Iterator[ExitStack]:
    """Close what a test has built, in the end."""
    engine.start()
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, config: FrontendConfig, send_timeout: float) -> RunningServer:
    limits = ConnectionLimits(send_timeout=send_timeout)
    running = RunningServer(structs.replace(config, served_names=("*",), connections=limits))
    stack.callback(running.stop)
    return running.start().ready()


def reader(stack: ExitStack, server: RunningServer) -> RawClient:
    """Connect a client that asks for a long stream and reads nothing of it."""
    client = stack.enter_context(RawClient(server.sock.getsockname(), receive_buffer=4096))
    body = json.dumps({"model": NAME, "prompt": "one", "max_tokens": TOKENS, "stream": True}).encode()
    client.send(request("/v1/completions", f"content-length: {len(body)}", method="POST", body=body))
    return client


def connections(server: RunningServer) -> list[LimitedProtocol]:
    return [each for each in list(server.server.connections._busy) if isinstance(each, LimitedProtocol)]


def in_kernel(connection: LimitedProtocol) -> int:
    """Return the bytes of a connection that the system holds until the client has taken them."""
    descriptor = connection.transport.get_extra_info("socket").fileno()
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0])


def is_stuck(connection: LimitedProtocol) -> bool:
    return connection.flow.write_paused


def test_readers_that_never_read_cost_bounded_memory_and_burden_nobody(
    build: ExitStack, config: FrontendConfig
) -> None:
    server = started(build, config, send_timeout=3600.0)
    for _ in range(READERS):
        reader(build, server)
    until(lambda: sum(map(is_stuck, connections(server))) == READERS, "no more is written to any of them")
    for connection in connections(server):
        assert connection.transport.get_write_buffer_size() <= HIGH_WATER + 2 * len(NAME)
        assert in_kernel(connection) <= UNSENT
    answer = post(server.url + "/v1/completions", json={"model": "fake-model", "prompt": "one", "max_tokens": 20})
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert counted(server, Closed.SEND_TIMEOUT) == 0


def test_a_client_that_stops_reading_is_given_up_and_its_sequence_aborted(
    build: ExitStack, engine: FakeEngine, config: FrontendConfig
) -> None:
    server = started(build, config, send_timeout=1.0)
    engine.step_seconds = 0.01
    stuck = [reader(build, server) for _ in range(5)]
    reading = build.enter_context(RawClient(server.sock.getsockname()))
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": "fake-model", "prompt": "one", "max_tokens": 120, **fields}).encode()
    reading.send(request("/v1/completions", f"content-length: {len(body)}", method="POST", body=body))
    assert b'"completion_tokens":120' in reading.reply().body
    until(lambda: counted(server, Closed.SEND_TIMEOUT) == len(stuck), "they are given up")
    until(lambda: engine.num_running == 0, "their sequences are aborted")
    assert len(engine.aborts) == len(stuck)
    until(lambda: server.server._service.num_responses == 0, "their answers have ended")
