"""Security of the wire: allowed endpoints, and which peers can connect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from tandem.protocol.curve import Curve
from tandem.protocol.sockets import (
    Transport,
    bind_heartbeat,
    bind_router,
    connect_dealer,
    connect_heartbeat,
)

WAIT_MS = 60_000
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def keys() -> Transport:
    return Transport(Curve(*zmq.curve_keypair()))


def address(sock: Any) -> str:
    return sock.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")


@contextmanager
def a_failing_handshake(sock: Any) -> Iterator[None]:
    """Wait until a handshake on the socket has failed."""
    monitor = sock.get_monitor_socket()
    try:
        yield
        event = 0
        while event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            assert monitor.poll(WAIT_MS), "no handshake failed"
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    finally:
        sock.disable_monitor()
        monitor.close()


class TestAllowed:
    def test_ipc_needs_no_keys(self) -> None:
        Transport().check("ipc:///anywhere")

    @pytest.mark.parametrize("endpoint", ["inproc://x", "udp://1.2.3.4:5", "engine", "", "TCP://1.2.3.4:5"])
    def test_other_schemes_are_refused(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match=r"ipc://.*tcp://"):
            Transport(insecure_tcp=True).check(endpoint)

    @pytest.mark.parametrize("open_socket", [bind_router, connect_dealer, bind_heartbeat, connect_heartbeat])
    def test_plain_tcp_is_refused(self, context: Any, open_socket: Any) -> None:
        with pytest.raises(ValueError, match=r"--curve-keys\b.*--insecure-tcp\b"):
            open_socket(context, "tcp://127.0.0.1:5599")

    def test_plain_tcp_on_request_logs_one_warning(self, context: Any, caplog: pytest.LogCaptureFixture) -> None:
        transport = Transport(insecure_tcp=True)
        router = bind_router(context, ANY_PORT, transport)
        bind_heartbeat(context, ANY_PORT, transport)
        (record,) = caplog.records
        line = record.getMessage()
        assert record.levelname == "WARNING" and ANY_PORT in line and "--insecure-tcp" in line
        dealer = connect_dealer(context, address(router), transport)
        dealer.send(b"x")
        assert router.poll(WAIT_MS)
        assert router.recv_multipart()[1] == b"x"

    def test_binding_needs_the_secret_key(self, context: Any, keys: Transport) -> None:
        assert keys.curve is not None
        with pytest.raises(ValueError, match=r"engine\.key_secret\b"):
            bind_router(context, ANY_PORT, Transport(Curve(keys.curve.public)))


class TestCurve:
    def test_a_frontend_with_the_public_key_connects(self, context: Any, keys: Transport) -> None:
        assert keys.curve is not None
        router = bind_router(context, ANY_PORT, keys)
        dealer = connect_dealer(context, address(router), Transport(Curve(keys.curve.public)))
        dealer.send(b"there")
        assert router.poll(WAIT_MS)
        identity, body = router.recv_multipart()
        router.send_multipart([identity, body + b" and back"])
        assert dealer.poll(WAIT_MS)
        assert dealer.recv() == b"there and back"

    def test_a_frontend_with_another_key_gets_nothing(self, context: Any, keys: Transport) -> None:
        router = bind_router(context, ANY_PORT, keys)
        with a_failing_handshake(router):
            wrong = connect_dealer(context, address(router), Transport(Curve(zmq.curve_keypair()[0])))
            wrong.send(b"let me in")
        self.only_the_right_one_arrives(context, router, keys)
        assert not wrong.poll(0)

    def test_a_plaintext_frontend_gets_nothing(self, context: Any, keys: Transport) -> None:
        router = bind_router(context, ANY_PORT, keys)
        with a_failing_handshake(router):
            plain = connect_dealer(context, address(router), Transport(insecure_tcp=True))
            plain.send(b"let me in")
        self.only_the_right_one_arrives(context, router, keys)
        assert not plain.poll(0)

    def only_the_right_one_arrives(self, context: Any, router: Any, keys: Transport) -> None:
        right = connect_dealer(context, address(router), keys)
        right.send(b"right")
        assert router.poll(WAIT_MS)
        assert router.recv_multipart()[1] == b"right"
        assert not router.poll(0)

    def test_heartbeats_are_secured_too(self, context: Any, keys: Transport) -> None:
        publisher = bind_heartbeat(context, ANY_PORT, keys)
        with a_failing_handshake(publisher):
            plain = connect_heartbeat(context, address(publisher), Transport(insecure_tcp=True))
        right = connect_heartbeat(context, address(publisher), keys)
        for _ in range(1000):
            publisher.send(b"beat")
            if right.poll(10):
                break
        assert right.recv() == b"beat"
        assert not plain.poll(0)
