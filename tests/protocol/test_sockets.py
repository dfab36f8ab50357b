"""Endpoints on one host, and the errors that sockets report."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from tandem.protocol.sockets import (
    SEND_HIGH_WATER_MARK,
    bind_heartbeat,
    bind_router,
    connect_dealer,
    connect_heartbeat,
    heartbeat_endpoint,
    prepare_endpoint,
)

WAIT_MS = 60_000
"""Timeout of every poll, reached only when a test fails."""


def receive(sock: Any) -> list[bytes]:
    assert sock.poll(WAIT_MS, zmq.POLLIN), "nothing arrived"
    return list(sock.recv_multipart())


def send_until_error(router: Any, identity: bytes, payload: bytes, endless: bool = False) -> tuple[int, int]:
    """Count the messages that were accepted, and return the error of the next; `endless` retries after EAGAIN.

    Looking for input, as the mailbox does in every drain, is what lets ZMQ let go of a peer that has left.
    """
    sent = 0
    while True:
        if endless:
            assert not router.events & zmq.POLLIN
        try:
            router.send_multipart([identity, sent.to_bytes(4, "big") + payload], zmq.NOBLOCK)
            sent += 1
        except zmq.ZMQError as error:
            if not (endless and error.errno == zmq.EAGAIN):
                return sent, error.errno


def leave_a_dead_socket(path: Path) -> None:
    """Leave what a killed process leaves: a bound socket without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))


class TestPrepareEndpoint:
    def test_makes_a_private_directory(self, run_dir: Path) -> None:
        prepare_endpoint(f"ipc://{run_dir}/new/engine")
        assert (run_dir / "new").stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
    def test_refuses_a_directory_open_to_others(self, run_dir: Path, mode: int) -> None:
        run_dir.chmod(mode)
        with pytest.raises(ValueError, match=rf"\b{mode:04o}\b") as caught:
            prepare_endpoint(f"ipc://{run_dir}/engine")
        prepare_endpoint(str(caught.value).rpartition(" ")[2])
        assert (run_dir / "tandem").stat().st_mode & 0o777 == 0o700, "the one that it names can be used"

    def test_refuses_a_directory_of_another_user(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = run_dir.stat().st_uid
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.raises(ValueError, match=rf"\b{owner + 1}\b.*\b0700\b.*\b{owner}\b"):
            prepare_endpoint(f"ipc://{run_dir}/engine")

    def test_removes_the_socket_of_a_dead_process(self, run_dir: Path) -> None:
        path = run_dir / "engine"
        leave_a_dead_socket(path)
        assert path.exists()
        prepare_endpoint(f"ipc://{path}")
        assert not path.exists()

    def test_refuses_a_socket_with_a_listener(self, run_dir: Path, context: Any) -> None:
        endpoint = f"ipc://{run_dir}/engine"
        router = bind_router(context, endpoint)
        with pytest.raises(ValueError, match=re.escape(endpoint)):
            prepare_endpoint(endpoint)
        dealer = connect_dealer(context, endpoint)
        dealer.send(b"hello")
        assert receive(router)[1] == b"hello", "the probe left the listener alone"

    def test_refuses_a_file(self, run_dir: Path) -> None:
        path = run_dir / "engine"
        path.write_text("precious")
        with pytest.raises(ValueError, match=re.escape(str(path))):
            prepare_endpoint(f"ipc://{path}")
        assert path.read_text() == "precious"

    def test_reports_a_directory_that_cannot_be_created(self, run_dir: Path) -> None:
        (run_dir / "file").write_text("")
        with pytest.raises(ValueError, match="file"):
            prepare_endpoint(f"ipc://{run_dir}/file/engine")

    @pytest.mark.parametrize("endpoint", ["ipc://@engine", "ipc://*"])
    def test_refuses_sockets_outside_a_private_directory(
        self, endpoint: str, run_dir: Path, context: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An abstract socket has no mode that keeps other users out."""
        monkeypatch.chdir(run_dir)
        with pytest.raises(ValueError, match="endpoint"):
            bind_router(context, endpoint)

    def test_creates_nothing_for_tcp_endpoints(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(run_dir)
        prepare_endpoint("tcp://127.0.0.1:1")
        assert list(run_dir.iterdir()) == []


class TestRouter:
    def test_messages_pass_in_both_directions(self, run_dir: Path, context: Any) -> None:
        router = bind_router(context, f"ipc://{run_dir}/engine")
        dealers = [connect_dealer(context, f"ipc://{run_dir}/engine") for _ in range(2)]
        for number, dealer in enumerate(dealers):
            dealer.send(b"from %d" % number)
        for _ in dealers:
            identity, body = receive(router)
            router.send_multipart([identity, body])
        assert [receive(dealer) for dealer in dealers] == [[b"from 0"], [b"from 1"]]
        assert len({dealer.identity for dealer in dealers}) == 2
        assert not dealers[0].identity.startswith(b"\0"), "zero bytes are reserved for identities that ZMQ makes"

    def test_a_send_to_an_unknown_peer_is_ehostunreach(self, run_dir: Path, context: Any) -> None:
        router = bind_router(context, f"ipc://{run_dir}/engine")
        with pytest.raises(zmq.ZMQError) as caught:
            router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
        assert caught.value.errno == zmq.EHOSTUNREACH

    def test_a_send_to_a_peer_that_left_is_ehostunreach(self, run_dir: Path, context: Any) -> None:
        router = bind_router(context, f"ipc://{run_dir}/engine")
        dealer = connect_dealer(context, f"ipc://{run_dir}/engine")
        dealer.send(b"x")
        identity = receive(router)[0]
        dealer.close()
        assert send_until_error(router, identity, b"x", endless=True)[1] == zmq.EHOSTUNREACH

    def test_a_send_to_a_peer_that_does_not_read_is_eagain(self, run_dir: Path, context: Any) -> None:
        router = bind_router(context, f"ipc://{run_dir}/engine")
        dealer = connect_dealer(context, f"ipc://{run_dir}/engine")
        dealer.send(b"x")
        identity = receive(router)[0]
        sent, error = send_until_error(router, identity, bytes(1 << 16))
        assert error == zmq.EAGAIN
        assert sent >= SEND_HIGH_WATER_MARK
        for number in range(sent):
            assert receive(dealer)[0][:4] == number.to_bytes(4, "big"), "nothing that was taken is lost"

    def test_a_refused_bind_leaves_no_socket_open(self, run_dir: Path, context: Any) -> None:
        run_dir.chmod(0o755)
        with pytest.raises(ValueError, match="0700"):
            bind_router(context, f"ipc://{run_dir}/engine")
        assert all(sock.closed for sock in context.made)

    def test_binds_to_the_socket_of_a_dead_engine(self, run_dir: Path, context: Any) -> None:
        leave_a_dead_socket(run_dir / "engine")
        router = bind_router(context, f"ipc://{run_dir}/engine")
        connect_dealer(context, f"ipc://{run_dir}/engine").send(b"x")
        assert receive(router)[1] == b"x"


class TestHeartbeat:
    def test_a_listener_receives_heartbeats(self, run_dir: Path, context: Any) -> None:
        endpoint = heartbeat_endpoint(f"ipc://{run_dir}/engine")
        publisher = bind_heartbeat(context, endpoint)
        listeners = [connect_heartbeat(context, endpoint) for _ in range(2)]
        heard: set[int] = set()
        for _ in range(1000):
            publisher.send(b"beat")
            heard |= {number for number, listener in enumerate(listeners) if listener.poll(10)}
            if len(heard) == 2:
                break
        assert [receive(listener) for listener in listeners] == [[b"beat"], [b"beat"]]

    @pytest.mark.parametrize(
        ("endpoint", "expected"),
        [
            ("ipc:///run/tandem/engine", "ipc:///run/tandem/engine.beat"),
            ("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5556"),
            ("tcp://[::1]:5555", "tcp://[::1]:5556"),
        ],
    )
    def test_heartbeat_endpoints_derive_from_the_engine_endpoint(self, endpoint: str, expected: str) -> None:
        assert heartbeat_endpoint(endpoint) == expected
