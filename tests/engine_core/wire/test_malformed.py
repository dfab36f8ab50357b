"""Hostile messages over real sockets: the engine, its log and its other frontends go on."""

import logging
import resource
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zmq

from tandem.engine_core.wire.leases import MAX_GAP_SECONDS
from tandem.engine_core.wire.mailbox import CLOSED_SECONDS, ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode, pack_ids, runs
from tandem.protocol.commands import LEASE_SECONDS, EndSession, Hello, Submit
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Answer, Finished, Ready, StepOutput
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import bind_router, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.model import VOCAB, reference
from tests.support.malformed_messages import MalformedMessages
from tests.support.recorded_engine import EPOCH, Bench
from tests.support.zmq_context import KeepingContext

WAIT_MS = 30_000
PEERS, BATCH = 3, 50
LAST_CALL = 77
"""Number of the call whose answer says that the engine has read everything."""
KINDS_OF_LINES = 8
"""Most kinds of log lines that a peer can cause."""


class WiredEngine:
    """An engine over fakes, behind a real socket."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.bench = Bench(2)
        self.context = context
        self.endpoint = endpoint
        self.router = bind_router(context, endpoint)
        self.wakeup = LoopWaker.open()
        self.mailbox = ZmqMailbox(self.router, self.wakeup, self.bench.clock)
        self.bench.engine.mailbox = self.mailbox
        self.requests = 0

    def tick_until_read(self) -> None:
        """Tick until nothing is left in the queue, and the engine idles."""
        while self.bench.engine.tick() or self.router.events & zmq.POLLIN:
            self.bench.clock.advance(0.001)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / MAX_GAP_SECONDS) + 1):
            self.bench.clock.advance(MAX_GAP_SECONDS)
            self.tick_until_read()

    def frontend(self) -> Any:
        """Connect a frontend that keeps to the protocol."""
        dealer = connect_dealer(self.context, self.endpoint)
        dealer.send(encode(Hello(PROTOCOL_VERSION, EPOCH, "honest")))
        assert isinstance(self.answer(dealer), Ready)
        return dealer

    def answer(self, dealer: Any) -> Any:
        for _ in range(WAIT_MS):
            self.bench.engine.tick()
            if dealer.poll(1):
                return decode_event(dealer.recv())
        raise AssertionError("no answer")

    def complete(self, dealer: Any) -> None:
        """Check that a request is served, token for token."""
        self.requests += 1
        dealer.send(encode(Submit(self.requests, pack_ids([3, 4, 5]), SamplingParams(6, ignore_eos=True))))
        tokens: list[int] = []
        finished: list[Finished] = []
        while not finished:
            output = self.answer(dealer)
            assert isinstance(output, StepOutput)
            tokens += [token for _, run in runs(output) for token in run]
            finished = output.finished
        assert finished == [Finished(self.requests, FinishReason.LENGTH)]
        assert tokens == reference([3, 4, 5], 6, frozenset())


@pytest.fixture
def engine() -> Iterator[WiredEngine]:
    context = KeepingContext()
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        engine = WiredEngine(context, f"ipc://{folder}/engine")
        yield engine
        engine.wakeup.close()
        context.destroy(linger=0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    # What the Bench itself says goes to the mailbox that was replaced.
    mailbox, control = engine.mailbox, engine.bench.control
    assert (len(mailbox._leases), mailbox._outboxes, mailbox._closed) == (0, {}, {})
    assert (control.clients, control._identities, control._overloaded) == ({}, {}, {})


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
    before = resident_bytes()
    attack(engine, 100_000, 1)
    check_clean(engine)
    assert resident_bytes() - before < 64 * 2**20
