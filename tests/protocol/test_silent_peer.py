"""Peers that vanish without closing their connection are noticed by libzmq."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tandem.protocol import sockets
from tandem.protocol.sockets import (
    UNACKNOWLEDGED_MS,
    Transport,
    bind_heartbeat,
    bind_router,
    connect_dealer,
    connect_heartbeat,
)
from tests.support.tcp_proxy import SilentProxy, free_ports

WAIT_MS = 30_000
PLAIN = Transport(insecure_tcp=True)


@pytest.fixture
def target() -> int:
    return free_ports(2)


@pytest.fixture
def proxy(target: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentProxy]:
    monkeypatch.setattr(sockets, "PING_INTERVAL_MS", 100)
    monkeypatch.setattr(sockets, "PING_TIMEOUT_MS", 400)
    with SilentProxy(target) as proxy:
        yield proxy


def ended(monitor: Any) -> None:
    assert monitor.poll(WAIT_MS), "the connection stays open"


def test_both_sides_of_a_silent_link_end_it_and_it_comes_back(proxy: SilentProxy, target: int, context: Any) -> None:
    server = bind_heartbeat(context, f"tcp://127.0.0.1:{target}", PLAIN)
    client = connect_heartbeat(context, f"tcp://127.0.0.1:{proxy.port}", PLAIN)
    pass_message(server, client, b"before")
    monitors = [sock.get_monitor_socket(zmq.EVENT_DISCONNECTED) for sock in (server, client)]
    proxy.silence()
    for monitor in monitors:
        ended(monitor)
    proxy.resume()
    pass_message(server, client, b"after")
    for sock in (server, client):
        sock.disable_monitor()


def pass_message(publisher: Any, subscriber: Any, body: bytes) -> None:
    """Send until the message arrives."""
    for _ in range(WAIT_MS // 10):
        publisher.send(body)
        while subscriber.poll(10):
            if subscriber.recv_multipart()[-1] == body:
                return
    raise AssertionError("no message came through")


@pytest.mark.parametrize("open_socket", [bind_router, connect_dealer])
def test_a_link_whose_data_is_not_acknowledged_is_closed_by_tcp(context: Any, target: int, open_socket: Any) -> None:
    assert open_socket(context, f"tcp://127.0.0.1:{target}", PLAIN).tcp_maxrt == UNACKNOWLEDGED_MS
