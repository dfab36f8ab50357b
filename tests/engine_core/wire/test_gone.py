"""Frontends that count as gone: silent, or not reading."""

import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.wire import outbox
from tandem.engine_core.wire.disconnects import CHECK_SECONDS, PROBES, Disconnects
from tandem.engine_core.wire.mailbox import CLOSED_SECONDS, ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.commands import LEASE_SECONDS, AnyCommand, Goodbye, Hello, Renew
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Closed, Finished, StepOutput
from tandem.protocol.sockets import bind_router
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in
from tests.support.zmq_context import ipc_context

WAIT_MS = 30_000


def check_silent(gone: dict[bytes, str], client: bytes) -> None:
    """Check that one frontend is gone because its lease has ended."""
    assert gone.keys() == {client} and numbers_in(gone[client]) == [LEASE_SECONDS]


class Wire:
    """A mailbox on a clock of the test's, and frontends without high-water marks of their own."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.context = context
        self.endpoint = endpoint
        self.clock = FakeClock()
        self.router = bind_router(context, endpoint)
        self.wakeup = LoopWaker.open()
        self.disconnects = Disconnects.watch(self.router)
        self.mailbox = ZmqMailbox(self.router, self.wakeup, self.clock, disconnects=self.disconnects)

    def frontend(self, keeps: int = 0) -> tuple[Any, bytes]:
        """Connect a frontend whose own queue holds this many messages."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.rcvhwm = keeps
        dealer.connect(self.endpoint)
        return dealer, self.say(dealer, Hello(1, 1, "x"))

    def say(self, dealer: Any, command: AnyCommand) -> bytes:
        """Send a command and drain it; return its sender's identity."""
        dealer.send(encode(command))
        assert self.router.poll(WAIT_MS), "the command did not arrive"
        ((client, received),) = self.mailbox.drain()
        assert received == command
        return client

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            assert list(self.mailbox.drain()) == []

    def fill(self, client: bytes) -> None:
        """Send output until some of it is kept."""
        while not self.mailbox.has_backlog:
            self.mailbox.add_tokens(client, TokenDelta(list(range(3000)), [7] * 3000))
            assert self.mailbox.flush(1) == {}


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ipc_context() as (context, endpoint):
        wire = Wire(context, endpoint)
        yield wire
        wire.wakeup.close()
        wire.disconnects.close()


def receive(dealer: Any) -> Any:
    assert dealer.poll(WAIT_MS), "nothing arrived"
    return decode_event(dealer.recv())


def test_a_silent_frontend_is_gone_and_one_that_renews_stays(wire: Wire) -> None:
    silent, silent_client = wire.frontend()
    other, other_client = wire.frontend()
    for _ in range(int(LEASE_SECONDS)):
        assert not wire.mailbox.has_backlog
        wire.pass_time(1.0)
        wire.say(other, Renew())
    wire.pass_time(0.5)
    assert wire.mailbox.has_backlog, "the loop flushes and learns of it"
    check_silent(wire.mailbox.flush(1), silent_client)
    assert not wire.mailbox.has_backlog
    event = receive(silent)
    assert isinstance(event, Closed)
    assert numbers_in(event.message) == [LEASE_SECONDS]
    wire.mailbox.add_tokens(other_client, TokenDelta([1], [5]))
    assert wire.mailbox.flush(2) == {}
    assert isinstance(receive(other), StepOutput)


def test_a_frontend_that_dies_without_output_is_gone_before_its_lease_ends(wire: Wire) -> None:
    killed, client = wire.frontend()
    other, other_client = wire.frontend()
    killed.close(linger=0)
    assert wire.disconnects.monitor.poll(WAIT_MS), "libzmq told of no disconnect"
    for _ in range(PROBES):  # the send to it may fail a moment later
        wire.mailbox.wait(0.3)
        wire.clock.advance(CHECK_SECONDS)
        assert list(wire.mailbox.drain()) == []
        if wire.mailbox.has_backlog:
            break
    assert wire.mailbox.flush(1) == {}
    assert list(wire.mailbox.drain()) == []
    gone = wire.mailbox.flush(1)
    assert gone.keys() == {client} and "disconnected" in gone[client]
    wire.pass_time(LEASE_SECONDS - 1.0)
    assert wire.mailbox.flush(2) == {}
    wire.mailbox.add_tokens(other_client, TokenDelta([1], [5]))
    assert wire.mailbox.flush(3) == {}
    outputs = [receive(other)]
    while not outputs[-1].request_ids:
        outputs.append(receive(other))
    assert all(isinstance(output, StepOutput) for output in outputs)
    assert len(outputs) <= PROBES + 1


def test_a_frontend_that_has_disconnected_is_gone_once_all_that_it_sent_was_read(wire: Wire) -> None:
    """Sends to it fail from the moment that it closes, and its last messages may still wait."""
    leaving, client = wire.frontend()
    # A send to a full queue fails as one to a frontend that reads slowly does, for as long as its messages wait. Only
    # connections that exist take the option: those to come have the limit of the time of the bind.
    wire.router.sndhwm = 0
    leaving.send(encode(Renew()))
    leaving.send(encode(Goodbye()))
    leaving.close(linger=-1)
    assert wire.disconnects.monitor.poll(WAIT_MS), "libzmq told of no disconnect"
    until = time.monotonic() + WAIT_MS / 1000
    while not wire.mailbox._disconnected:
        assert time.monotonic() < until, "sends still reach it"
        wire.mailbox.add_tokens(client, TokenDelta([1], [5]))
        assert wire.mailbox.flush(1) == {}
        time.sleep(0.001)  # libzmq's thread may have to wait for a processor
    busy = wire.mailbox.drain()
    assert next(busy) == (client, Renew())
    busy.close()  # as a loop does that has no more time for commands
    assert wire.mailbox.flush(2) == {}
    assert wire.mailbox.has_backlog, "the loop goes on"
    assert list(wire.mailbox.drain()) == [(client, Goodbye())]
    gone = wire.mailbox.flush(3)
    assert gone.keys() == {client} and "disconnected" in gone[client]
    assert not wire.mailbox.has_backlog
    wire.pass_time(LEASE_SECONDS + CLOSED_SECONDS)
    assert wire.mailbox.flush(4) == {}
    assert (len(wire.mailbox._leases), wire.mailbox._outboxes, wire.mailbox._closed) == (0, {}, {})


def test_a_frontend_that_leaves_a_full_queue_is_gone_once_all_that_it_sent_was_read(wire: Wire) -> None:
    leaving, client = wire.frontend(keeps=1)
    wire.fill(client)
    leaving.send(encode(Goodbye()))
    leaving.close(linger=-1)
    assert wire.disconnects.monitor.poll(WAIT_MS), "libzmq told of no disconnect"
    commands, gone = list(wire.mailbox.drain()), wire.mailbox.flush(1)
    until = time.monotonic() + WAIT_MS / 1000
    while not gone:
        assert time.monotonic() < until, "its output is kept"
        commands += wire.mailbox.drain()
        gone = wire.mailbox.flush(1)
    assert commands == [(client, Goodbye())]
    assert gone.keys() == {client} and "disconnected" in gone[client]
    assert not wire.mailbox.has_backlog


def test_connections_that_close_unread_keep_no_message_from_the_engine(wire: Wire) -> None:
    """As while a model is loaded: nothing reads of them, and libzmq would keep 2,000 by default."""
    dealer, _ = wire.frontend()
    for _ in range(2500):
        with socket.socket(socket.AF_UNIX) as connection:
            # Python's own timeout would not wait for room in the backlog of a listening socket.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", WAIT_MS // 1000, 0))
            connection.connect(wire.endpoint.removeprefix("ipc://"))
    wire.say(dealer, Renew())
    assert wire.disconnects.take_due(CHECK_SECONDS, lambda: [b"f"]) == [b"f"]


def test_a_frontend_is_not_judged_while_its_message_waits(wire: Wire) -> None:
    dealer, _ = wire.frontend()
    dealer.send(encode(Renew()))
    assert wire.router.poll(WAIT_MS)
    wire.clock.advance(1000.0)
    assert [command for _, command in wire.mailbox.drain()] == [Renew()]
    assert not wire.mailbox.has_backlog


def test_a_drain_that_leaves_messages_judges_no_frontend(wire: Wire) -> None:
    _, silent = wire.frontend()
    flooding, _ = wire.frontend()
    for _ in range(20):
        flooding.send(encode(Renew()))
        flooding.send(encode(Renew()))
        assert wire.router.poll(WAIT_MS)
        wire.clock.advance(1.0)
        next(wire.mailbox.drain())
        assert not wire.mailbox.has_backlog
    list(wire.mailbox.drain())
    check_silent(wire.mailbox.flush(1), silent)


def test_output_for_a_frontend_that_is_gone_is_dropped_until_its_next_hello(wire: Wire) -> None:
    """Its aborted requests still end: that is no output of the streams that a resumed frontend has."""
    dealer, client = wire.frontend()
    wire.pass_time(LEASE_SECONDS)
    check_silent(wire.mailbox.flush(1), client)
    assert isinstance(receive(dealer), Closed)
    wire.mailbox.add_outcome(client, Finished(1, FinishReason.ABORT))
    assert wire.mailbox.flush(2) == {}
    wire.say(dealer, Renew())
    wire.mailbox.add_outcome(client, Finished(2, FinishReason.ABORT))
    assert wire.mailbox.flush(3) == {}
    wire.say(dealer, Hello(1, 1, "again"))
    wire.mailbox.add_outcome(client, Finished(3, FinishReason.LENGTH))
    assert wire.mailbox.flush(4) == {}
    event = receive(dealer)
    assert isinstance(event, StepOutput)
    assert event.finished == [Finished(3, FinishReason.LENGTH)]


def test_frontends_that_are_gone_leave_nothing_behind(wire: Wire) -> None:
    dealers = [wire.frontend()[0] for _ in range(5)]
    wire.pass_time(LEASE_SECONDS)
    assert len(wire.mailbox.flush(1)) == len(dealers)
    wire.pass_time(CLOSED_SECONDS)
    assert (len(wire.mailbox._leases), wire.mailbox._outboxes, wire.mailbox._closed) == (0, {}, {})


def test_a_frontend_that_renews_but_does_not_read_is_gone_after_a_while(wire: Wire) -> None:
    dealer, client = wire.frontend(keeps=1)
    other, other_client = wire.frontend()
    wire.fill(client)
    waited = 0.0
    while not (gone := wire.mailbox.flush(1)):
        assert waited <= outbox.MAX_UNSENT_SECONDS
        wire.pass_time(1.0)
        waited += 1.0
        wire.say(dealer, Renew())
        wire.say(other, Renew())
    assert gone.keys() == {client} and numbers_in(gone[client]) == [31, 30]
    wire.mailbox.add_outcome(other_client, Finished(1, FinishReason.STOP))
    assert wire.mailbox.flush(2) == {}
    assert receive(other).finished == [Finished(1, FinishReason.STOP)]
    assert not wire.mailbox.has_backlog


def test_a_frontend_that_reads_slowly_loses_nothing(wire: Wire) -> None:
    """Each message that it takes starts the time afresh."""
    dealer, client = wire.frontend(keeps=1)
    wire.fill(client)
    wire.mailbox.add_outcome(client, Finished(1, FinishReason.STOP))
    finished: list[Finished] = []
    while not finished:
        finished = receive(dealer).finished
        wire.pass_time(0.5)
        wire.say(dealer, Renew())
        assert wire.mailbox.flush(1) == {}
    assert finished == [Finished(1, FinishReason.STOP)]
    assert not wire.mailbox.has_backlog


def test_output_beyond_the_bound_makes_its_frontend_gone(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_UNSENT_BYTES", 2**20)
    _, client = wire.frontend(keeps=1)
    wire.fill(client)
    gone: dict[bytes, str] = {}
    while not gone:
        assert wire.mailbox._outboxes[client].num_bytes <= 2**20
        wire.mailbox.add_tokens(client, TokenDelta(list(range(3000)), [7] * 3000))
        gone = wire.mailbox.flush(1)
    assert gone.keys() == {client} and re.search(r"\b1 MiB\b", gone[client])
    assert wire.mailbox._outboxes == {}
