"""An engine over fakes, behind a real socket, that the test ticks."""

from typing import Any

import zmq

from tandem.engine_core.wire.leases import MAX_GAP_SECONDS
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode, pack_ids, runs
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, Ready, StepOutput
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import bind_router, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.model import reference
from tests.support.recorded_engine import EPOCH, Bench

WAIT_MS = 30_000


class WiredEngine:
    """One engine with a mailbox of its own, on a clock of the test's."""

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
