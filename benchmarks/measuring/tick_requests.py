"""Requests of `bench_tick` and the in-thread frontend that sends them."""

import random
import time
from collections.abc import Callable
from typing import Any

import zmq
from msgspec import Struct

from tandem.engine_core.engine import Engine
from tandem.protocol.codec import encode, pack_ids
from tandem.protocol.commands import RENEW_SECONDS, Hello, Renew, Submit
from tandem.protocol.params import SamplingParams
from tandem.protocol.stats import EngineStats
from tandem.protocol.version import PROTOCOL_VERSION

PROMPT, PROMPT_SPREAD = 64, 16
"""Length of the longest prompt in tokens, and number of distinct lengths."""


class Requests(Struct, frozen=True):
    """Concurrent requests."""

    rows: int
    longest: int
    """Tokens of a request that runs for the whole measurement."""
    length: int
    """Output tokens after which a request is replaced; 0 for requests of `longest` tokens."""
    constrained: int
    """Percentage of requests that are constrained."""
    grammar: str
    vocab: int

    def request(self, number: int, tokens: int) -> Submit:
        """Make one request of `max_tokens` tokens with a unique prompt prefix."""
        follows = (number + 1) * self.constrained // 100 > number * self.constrained // 100
        prompt = [number % self.vocab] * (PROMPT - number % PROMPT_SPREAD)
        params = SamplingParams(tokens, ignore_eos=True)
        return Submit(number, pack_ids(prompt), params, self.grammar if follows else None)


class BetweenTicks:
    """Frontend that runs between the ticks of an engine in the same thread.

    It reads messages without decoding them, since only their arrival matters to the engine.
    """

    def __init__(
        self, dealer: Any, stats: EngineStats, requests: Requests, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Initialize the frontend.

        dealer: socket connected to the engine; stats: the engine's, which count finished requests; clock: seconds, for
        the lease.
        """
        self.dealer = dealer
        self.stats = stats
        self.requests = requests
        self.clock = clock
        self.sent = 0
        """Number of requests sent."""
        self._renewed = 0.0

    def begin(self, epoch: int) -> None:
        """Connect to the engine of this epoch, and send a request for each row.

        Requests that end have random lengths, as if they had started at different times.
        """
        self._renewed = self.clock()
        self.dealer.send(encode(Hello(PROTOCOL_VERSION, epoch, "bench")))
        lengths = random.Random(0)
        for _ in range(self.requests.rows):
            self._send(lengths.randint(1, self.requests.length) if self.requests.length else self.requests.longest)

    def turn(self) -> None:
        """Read all messages, renew the lease, and replace finished requests."""
        while True:
            try:
                self.dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
        if self.clock() - self._renewed >= RENEW_SECONDS:
            self._renewed = self.clock()
            self.dealer.send(encode(Renew()))
        if self.requests.length:
            ended = sum(self.stats.requests_finished.values())
            for _ in range(self.requests.rows - (self.sent - ended)):
                self._send(self.requests.length)

    def _send(self, tokens: int) -> None:
        self.dealer.send(encode(self.requests.request(self.sent, tokens)))
        self.sent += 1


def reach_steady_state(engine: Engine, frontend: BetweenTicks) -> None:
    """Tick until the load is in a steady state.

    For requests that end, that is once every row has a new request since the last grammar compilation.
    """
    rows = frontend.requests.rows
    if not frontend.requests.length:
        while engine.stats.running < rows and not engine.stats.requests_failed:
            engine.tick()
            frontend.turn()
        return
    compiled, since = 0, frontend.sent
    while frontend.sent - since < rows:
        engine.tick()
        frontend.turn()
        if engine.compiler.is_busy or sum(engine.stats.compile_time.counts) != compiled:
            compiled, since = sum(engine.stats.compile_time.counts), frontend.sent
