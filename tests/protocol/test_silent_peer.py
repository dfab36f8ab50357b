"""Peers that vanish without closing their connection are noticed by libzmq."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tandem.protocol import sockets
from tandem.protocol.sockets import Transport, bind_heartbeat, bind_router, connect_dealer, connect_heartbeat
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


@pytest.mark.parametrize("bind", [bind_router, bind_heartbeat])
def test_both_sides_of_a_silent_link_end_it_and_it_comes_back(
    proxy: SilentProxy, target: int, context: Any, bind: Any
) -> None:
    server = bind(context, f"tcp://127.0.0.1:{target}", PLAIN)
    connect = connect_dealer if bind is bind_router else connect_heartbeat
    client = connect(context, f"tcp://127.0.0.1:{proxy.port}", PLAIN)
    pass_message(server, client, b"before")
    monitors = [sock.get_monitor_socket(zmq.EVENT_DISCONNECTED) for sock in (server, client)]
    proxy.silence()
    for monitor in monitors:
        ended(monitor)
    proxy.resume()
    pass_message(server, client, b"after")
    for sock in (server, client):
        sock.disable_monitor()


def pass_message(server: Any, client: Any, body: bytes) -> None:
    """Send to the server, or from a publisher, until the message arrives."""
    sender, receiver = (client, server) if server.type == zmq.ROUTER else (server, client)
    for _ in range(WAIT_MS // 10):
        sender.send(body)
        while receiver.poll(10):
            if receiver.recv_multipart()[-1] == body:
                return
    raise AssertionError("no message came through")
