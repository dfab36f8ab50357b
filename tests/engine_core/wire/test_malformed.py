"""Hostile messages over real sockets: the engine, its log and its other frontends go on."""

import logging
from collections.abc import Iterator
from itertools import islice

import pytest

from tandem.engine_core.wire.mailbox import CLOSED_SECONDS
from tandem.protocol.codec import encode
from tandem.protocol.commands import LEASE_SECONDS, EndSession, Hello
from tandem.protocol.events import Answer
from tandem.protocol.sockets import connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.model import VOCAB
from tests.support.malformed_messages import MalformedMessages
from tests.support.own_memory import own_bytes
from tests.support.recorded_engine import EPOCH
from tests.support.wired_engine import WiredEngine
from tests.support.zmq_context import ipc_context

PEERS, BATCH = 3, 50
LAST_CALL = 77
"""Number of the call whose answer says that the engine has read everything."""
KINDS_OF_LINES = 8
"""Most kinds of log lines that a peer can cause."""


@pytest.fixture
def engine() -> Iterator[WiredEngine]:
    with ipc_context() as (context, endpoint):
        engine = WiredEngine(context, endpoint)
        yield engine
        engine.wakeup.close()


def attack(engine: WiredEngine, messages: int, seed: int) -> None:
    """Send malformed messages, with a well-behaved frontend among the peers."""
    honest = engine.frontend()
    source = iter(MalformedMessages(seed, EPOCH, VOCAB))
    for _ in range(messages // (PEERS * BATCH)):
        peers = [connect_dealer(engine.context, engine.endpoint) for _ in range(PEERS)]
        for peer in peers:
            peer.send(encode(Hello(PROTOCOL_VERSION, EPOCH, "hostile")))
            for frames in islice(source, BATCH):
                peer.send_multipart(frames)
            peer.send(encode(Hello(PROTOCOL_VERSION, EPOCH, "hostile")))
            peer.send(encode(EndSession(LAST_CALL, "none")))
        engine.complete(honest)
        for peer in peers:
            while engine.answer(peer) != Answer(LAST_CALL, False, "session 'none' does not exist"):
                pass
            peer.close(linger=0)
    engine.complete(honest)


def check_clean(engine: WiredEngine) -> None:
    """Check that nothing is left of frontends that are gone, the well-behaved one included."""
    engine.pass_time(LEASE_SECONDS + CLOSED_SECONDS + 2)
    engine.bench.finish()
    assert engine.bench.at_rest()
    # The Bench's own messages go to the mailbox that was replaced.
    mailbox, control = engine.mailbox, engine.bench.control
    assert (len(mailbox._leases), mailbox._outboxes, mailbox._closed) == (0, {}, {})
    assert (control.clients, control._identities, control._refused, control._first_of_group) == ({}, {}, {}, {})


@pytest.mark.parametrize("seed", range(3))
def test_malformed_messages_harm_nothing(engine: WiredEngine, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    attack(engine, 1500, seed)
    check_clean(engine)
    intervals = int((engine.bench.clock.now - 1000.0) / 10.0) + 1
    assert len([record for record in caplog.records if "is gone" not in record.message]) <= KINDS_OF_LINES * intervals
    assert not [record.message for record in caplog.records if "\n" in record.message]
    assert all(len(record.message) < 1000 for record in caplog.records)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_100_000_malformed_messages_leave_no_memory_behind(engine: WiredEngine) -> None:
    attack(engine, 20_000, 0)
    before = own_bytes()
    attack(engine, 100_000, 1)
    check_clean(engine)
    assert own_bytes() - before < 64 * 2**20
