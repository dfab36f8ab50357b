"""A frontend that is away for longer than its lease, in front of a real engine loop."""

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.streams import ReadySet, TokenStream
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import LEASE_SECONDS, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Phase
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import Transport, heartbeat_endpoint
from tests.support.recorded_engine import EPOCH
from tests.support.refusals import numbers_in
from tests.support.wired_engine import WiredEngine
from tests.support.zmq_context import KeepingContext

LIMIT = 30.0
"""Seconds after which a wait fails."""


class Frontend:
    """A client of the engine, and the ticks of the engine while its event loop runs."""

    def __init__(self, engine: WiredEngine) -> None:
        self.engine = engine
        metrics = FrontendMetrics(CollectorRegistry())
        watch = EngineWatch(20.0, 60.0)
        self.client = EngineClient(engine.endpoint, Transport(), Fingerprints(), watch, metrics)

    async def until(self, condition: Callable[[], object], most: float = inf) -> None:
        """Wait for a condition; the engine rests after this many ticks in which it had work."""
        async with asyncio.timeout(LIMIT):
            while not condition():
                if most > 0:
                    most -= self.engine.bench.engine.tick()
                await asyncio.sleep(0.002)

    def submit(self, max_tokens: int) -> TokenStream:
        params = SamplingParams(max_tokens, ignore_eos=True)
        command = Submit(self.client.next_id(), pack_ids([3, 4, 5]), params)
        return self.client.submit(command, 0, ReadySet())


async def be_away(engine: WiredEngine) -> None:
    """Check what a frontend finds whose event loop stood still, as after SIGSTOP."""
    frontend = Frontend(engine)
    frontend.client.start()
    try:
        await frontend.until(lambda: frontend.client.health().ready)
        stream = frontend.submit(50)
        tokens: list[int] = []
        await frontend.until(lambda: tokens.extend(stream.take()[0]) or tokens, most=10)
        assert engine.bench.scheduler.num_open == 1
        for _ in range(int(2 * LEASE_SECONDS) + 1):
            engine.bench.clock.advance(0.5)
            list(engine.mailbox.drain())
        assert engine.mailbox.has_backlog
        engine.bench.engine.tick()
        engine.bench.finish()
        assert engine.bench.at_rest(), "its rows and pages are free while it is away"

        ends: list[Finished | Failure] = []
        await frontend.until(lambda: ends.extend([end] if (end := stream.take()[1]) is not None else []) or ends)
        assert isinstance(ends[0], Failure)
        assert ends[0].code is ErrorCode.ENGINE_UNAVAILABLE
        assert 5 in numbers_in(ends[0].message)
        assert frontend.client.num_open == 0

        await frontend.until(lambda: frontend.client.health().ready)
        later = frontend.submit(5)
        await frontend.until(lambda: ends.extend([end] if (end := later.take()[1]) is not None else []) or ends[1:])
        assert isinstance(ends[1], Finished)
        assert ends[1].reason is FinishReason.LENGTH
    finally:
        await frontend.client.stop()


def test_a_frontend_that_was_away_ends_its_streams_and_connects_again(ipc_dir: Path) -> None:
    context = KeepingContext()
    engine = WiredEngine(context, f"ipc://{ipc_dir}/engine")
    status = Status(EPOCH, engine.bench.stats)
    status.enter(Phase.READY, 100)
    publisher = HeartbeatPublisher(context, heartbeat_endpoint(engine.endpoint), Transport(), status)
    publisher.start()
    try:
        asyncio.run(be_away(engine))
    finally:
        publisher.stop()
        engine.wakeup.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("stall", [3.0, 1000.0])
def test_a_stalled_engine_keeps_frontends_whose_commands_wait(ipc_dir: Path, stall: float) -> None:
    context = KeepingContext()
    engine = WiredEngine(context, f"ipc://{ipc_dir}/engine")
    try:
        honest = engine.frontend()
        for _ in range(5):
            engine.bench.clock.advance(stall)
            engine.complete(honest)
        assert len(engine.bench.control.clients) == 1
    finally:
        engine.wakeup.close()
        context.destroy(linger=0)
