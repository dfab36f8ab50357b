"""Requests of `bench_tick`, and the frontend that sends them.

It runs in the thread of the engine.
"""

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
"""Tokens of the longest prompt, and the number of lengths up to it."""


class Requests(Struct, frozen=True):
    """Requests that are open at once."""

    rows: int
    longest: int
    """Tokens of a request that outlasts the measurement."""
    length: int
    """Tokens after which a request ends and another follows; 0: all requests have `longest`."""
    constrained: int
    """Percentage of them that follow the grammar."""
    grammar: str
    vocab: int

    def request(self, number: int, tokens: int) -> Submit:
        """Make one request of as many tokens. Its prompt begins like no other's."""
        follows = (number + 1) * self.constrained // 100 > number * self.constrained // 100
        prompt = [number % self.vocab] * (PROMPT - number % PROMPT_SPREAD)
        params = SamplingParams(tokens, ignore_eos=True)
        return Submit(number, pack_ids(prompt), params, self.grammar if follows else None)


class BetweenTicks:
    """Frontend whose turns are between the ticks of an engine in the same thread.

    It reads whatever was sent, without looking into it, as only its arrival matters to the engine.
    """

    def __init__(
        self, dealer: Any, stats: EngineStats, requests: Requests, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep the parts of a frontend.

        dealer: socket that is connected to the engine; stats: those of the engine, which tell how many requests have
        ended; clock: seconds, for the lease.
        """
        self.dealer = dealer
        self.stats = stats
        self.requests = requests
        self.clock = clock
        self.sent = 0
        """Requests sent."""
        self._renewed = 0.0

    def begin(self, epoch: int) -> None:
        """Greet the engine of this epoch, and send a request for each row.

        If requests end, these have lengths at random, as if they had begun at different times.
        """
        self._renewed = self.clock()
        self.dealer.send(encode(Hello(PROTOCOL_VERSION, epoch, "bench")))
        lengths = random.Random(0)
        for _ in range(self.requests.rows):
            self._send(lengths.randint(1, self.requests.length) if self.requests.length else self.requests.longest)

    def turn(self) -> None:
        """Read everything, renew the lease in time, and replace what has ended."""
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


def settle(engine: Engine, frontend: BetweenTicks) -> None:
    """Tick until the requests are those of a server that is busy for long.

    If they end, that is once as many as there are rows have begun since the last compilation: by then each row follows
    a copy of what the compiler wanted to have, and no request is left of the first ones.
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
