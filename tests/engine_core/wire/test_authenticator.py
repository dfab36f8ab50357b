"""Frontends are let in by their keys, over real sockets on loopback."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire import authenticator
from tandem.engine_core.wire.authenticator import ENDPOINT, Authenticator
from tandem.engine_core.wire.client_keys import ClientKeys
from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.commands import AnyCommand, Hello, Renew
from tandem.protocol.curve import load_curve, make_client, make_curve
from tandem.protocol.events import Closed, StepOutput
from tandem.protocol.sockets import MAX_COMMAND_BYTES, Transport, bind_router, connect_dealer, connect_heartbeat
from tests.support.serving import free_port
from tests.support.zmq_context import KeepingContext

WAIT_MS = 30_000
ANY_PORT = "tcp://127.0.0.1:*"


def address(sock: Any) -> str:
    return str(sock.last_endpoint.decode())


class SecureEngine:
    """The engine's sockets on tcp, with keys in a folder."""

    def __init__(self, context: Any, folder: Path) -> None:
        make_curve(folder)
        self.context = context
        self.folder = folder
        self.transport = Transport(load_curve(folder))
        assert self.transport.curve is not None
        assert self.transport.curve.clients is not None
        keys = ClientKeys(self.transport.curve.clients, self.transport.curve.public)
        self.authenticator = Authenticator(context, keys)
        self.authenticator.start()
        self.router = bind_router(context, ANY_PORT, self.transport)
        self.wakeup = LoopWaker.open()
        self.mailbox = ZmqMailbox(self.router, self.wakeup, authenticator=self.authenticator)
        self.messages: deque[tuple[bytes, AnyCommand]] = deque()

    def frontend(self, name: str) -> Transport:
        """Make the keys of a frontend."""
        return Transport(load_curve(make_client(self.folder, name)[1]))

    def connect(self, transport: Transport) -> Any:
        dealer = connect_dealer(self.context, address(self.router), transport)
        dealer.send(encode(Hello(1, 1, "x")))
        return dealer

    def drained(self) -> tuple[bytes, AnyCommand]:
        """Return the next message, of several that may have arrived at once."""
        if not self.messages:
            assert self.router.poll(WAIT_MS), "nothing arrived"
            self.messages.extend(self.mailbox.drain())
        return self.messages.popleft()

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Drain the mailbox, as the loop does, until the condition holds."""
        for _ in range(WAIT_MS // 10):
            assert list(self.mailbox.drain()) == []
            if condition():
                return
            self.mailbox.wait(0.01)
        raise AssertionError("the condition never came true")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecureEngine]:
    monkeypatch.setattr(authenticator, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(authenticator, "RELOAD_SECONDS", 0.02)
    context = KeepingContext()
    engine = SecureEngine(context, tmp_path / "keys")
    yield engine
    engine.authenticator.stop()
    engine.wakeup.close()
    context.destroy(linger=0)


def unconnected(context: Any, transport: Transport) -> Any:
    """Return a socket whose failures can be watched before it connects."""
    assert transport.curve is not None
    dealer = context.socket(zmq.DEALER)
    pair = transport.curve.client_pair()
    dealer.curve_serverkey = transport.curve.public
    dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
    return dealer


def test_a_listed_frontend_and_the_holder_of_the_engines_keys_are_let_in(engine: SecureEngine) -> None:
    for transport in (engine.frontend("a"), engine.transport):
        dealer = engine.connect(transport)
        client, command = engine.drained()
        assert command == Hello(1, 1, "x")
        engine.mailbox.add_tokens(client, TokenDelta([1], [5]))
        assert engine.mailbox.flush(1) == {}
        assert dealer.poll(WAIT_MS)
        assert isinstance(decode_event(dealer.recv()), StepOutput)


@pytest.mark.parametrize("has_key", [True, False])
def test_a_frontend_that_is_not_listed_is_refused_and_logged(
    engine: SecureEngine, caplog: pytest.LogCaptureFixture, has_key: bool
) -> None:
    transport = engine.frontend("a")
    if not has_key:
        (engine.folder / "frontends" / "a" / "client.key_secret").unlink()
        transport = Transport(load_curve(engine.folder / "frontends" / "a"))
    else:
        assert transport.curve is not None
        key, keys = transport.curve.client_pair().public, engine.authenticator.keys
        engine.wait_until(lambda: key in keys.names)
        (engine.folder / "clients" / "a.key").unlink()
        engine.wait_until(lambda: key not in keys.names)
    dealer = unconnected(engine.context, transport)
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    dealer.connect(address(engine.router))
    assert monitor.poll(WAIT_MS), "the handshake did not fail"
    assert "127.0.0.1" in caplog.text and "--client NAME" in caplog.text
    dealer.disable_monitor()


def test_a_key_that_is_added_lets_its_frontend_in_at_once(engine: SecureEngine) -> None:
    engine.connect(engine.frontend("early"))
    engine.drained()
    engine.connect(engine.frontend("late"))
    assert engine.drained()[1] == Hello(1, 1, "x")


def test_a_key_that_is_removed_ends_its_connection_and_no_other(
    engine: SecureEngine, caplog: pytest.LogCaptureFixture
) -> None:
    removed, other = engine.connect(engine.frontend("removed")), engine.connect(engine.frontend("other"))
    clients = {engine.drained()[0] for _ in range(2)}
    (engine.folder / "clients" / "removed.key").unlink()
    engine.wait_until(lambda: engine.mailbox.has_backlog)
    gone = engine.mailbox.flush(1)
    assert gone.keys() == {removed.identity} and "(removed)" in gone[removed.identity]
    assert removed.poll(WAIT_MS)
    event = decode_event(removed.recv())
    assert isinstance(event, Closed)
    assert gone[removed.identity] in event.message
    removed.send(encode(Hello(1, 1, "again")))
    engine.wait_until(lambda: "ignored a message of a frontend whose key" in caplog.text)
    engine.mailbox.add_tokens(removed.identity, TokenDelta([1], [5]))
    other.send(encode(Renew()))
    assert engine.drained() == (other.identity, Renew())
    engine.mailbox.add_tokens(other.identity, TokenDelta([1], [5]))
    assert engine.mailbox.flush(2) == {}
    assert other.poll(WAIT_MS)
    assert not removed.poll(0)
    assert clients == {removed.identity, other.identity}


def test_a_removed_key_hears_no_more_heartbeats_and_others_do(engine: SecureEngine) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    keys = engine.authenticator.keys
    publisher = HeartbeatPublisher(engine.context, endpoint, engine.transport, Status(7, new_stats()), keys)
    publisher.start()
    try:
        removed = connect_heartbeat(engine.context, endpoint, engine.frontend("removed"))
        other = connect_heartbeat(engine.context, endpoint, engine.frontend("other"))
        for listener in (removed, other):
            assert listener.poll(WAIT_MS), "no heartbeat"
        monitor = removed.get_monitor_socket()  # of `connect_heartbeat`, with its events
        (engine.folder / "clients" / "removed.key").unlink()
        event = None
        while event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert monitor.poll(WAIT_MS), "the listener was not cut off"
            event = parse_monitor_message(monitor.recv_multipart())["event"]
        while removed.poll(0):
            removed.recv()
        while other.poll(0):
            other.recv()
        assert other.poll(WAIT_MS), "no heartbeat for the other"
        assert not removed.poll(0)
        removed.disable_monitor()
    finally:
        publisher.stop()


def kill(thread: threading.Thread) -> None:
    """End a thread at its next bytecode."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1
    thread.join(WAIT_MS / 1000)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_authenticator_ends_the_engine_and_lets_no_frontend_in(engine: SecureEngine) -> None:
    transport = engine.frontend("a")
    assert engine.authenticator._thread is not None
    kill(engine.authenticator._thread)
    with pytest.raises(RuntimeError, match="authenticator"):
        list(engine.mailbox.drain())
    dealer = unconnected(engine.context, transport)
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(address(engine.router))
    # If libzmq has yet to close the dead thread's socket, the handshake waits there until its own limit of 30 s.
    assert monitor.poll(2 * WAIT_MS)
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    dealer.disable_monitor()


@pytest.mark.parametrize("question", [[b"x"], [b"1.0", b"7"], [b"1.0", b"7", b"", b"", b"", b"NULL"], [b""] * 9])
def test_malformed_questions_are_refused(engine: SecureEngine, question: list[bytes]) -> None:
    asker = engine.context.socket(zmq.REQ)
    asker.connect(ENDPOINT)
    asker.send_multipart(question)
    assert asker.poll(WAIT_MS)
    assert asker.recv_multipart()[2] == b"400"
    engine.authenticator.check()


def test_the_largest_command_passes_encrypted(engine: SecureEngine) -> None:
    dealer = engine.connect(engine.frontend("a"))
    engine.drained()
    dealer.send(bytes(MAX_COMMAND_BYTES))
    assert engine.router.poll(WAIT_MS), "the connection was closed"
    assert len(engine.router.recv_multipart()[1]) == MAX_COMMAND_BYTES


class TestClientKeys:
    def test_a_missing_folder_is_reported_with_the_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--client\b.*--curve-any-client\b"):
            ClientKeys(tmp_path / "clients", b"own").load()

    def test_a_bad_file_refuses_the_start_and_later_only_its_frontend(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_curve(tmp_path)
        for name in ("a", "b"):
            make_client(tmp_path, name)
        keys = ClientKeys(tmp_path / "clients", b"own")
        keys.load()
        assert sorted(keys.names.values()) == ["a", "b", keys.names[b"own"]]
        (tmp_path / "clients" / "b.key").write_text("half")
        keys.refresh()
        keys.refresh()
        assert sorted(keys.names.values()) == ["a", keys.names[b"own"]]
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        with pytest.raises(ValueError, match=r"\bb\.key\b"):
            ClientKeys(tmp_path / "clients", b"own").load()

    def test_names_are_the_same_object_until_the_folder_changes(self, tmp_path: Path) -> None:
        make_curve(tmp_path)
        keys = ClientKeys(tmp_path / "clients", b"own")
        keys.load()
        before = keys.names
        keys.refresh()
        assert keys.names is before
        make_client(tmp_path, "a")
        keys.refresh()
        assert keys.names is not before
        (tmp_path / "clients" / "a.key").unlink()
        (tmp_path / "clients").rmdir()
        keys.refresh()
        assert list(keys.names) == [b"own"]
