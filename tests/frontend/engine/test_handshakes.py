"""Handshakes that fail, over real sockets on loopback."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.authenticator import Authenticator
from tandem.engine_core.wire.client_keys import ClientKeys
from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
from tandem.frontend.engine import handshakes
from tandem.frontend.engine.handshakes import REFUSED_KEY, watch_handshakes
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.link import EngineLink
from tandem.frontend.engine.streams import OpenStreams
from tandem.protocol.codec import decode_event
from tandem.protocol.curve import Curve, load_curve, make_client, make_curve
from tandem.protocol.events import Heartbeat
from tandem.protocol.sockets import Transport, bind_router, connect_heartbeat
from tests.support.serving import free_port
from tests.support.zmq_context import KeepingContext

LIMIT = 30.0
"""Seconds after which a wait fails."""


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class KeyedEngine:
    """The heartbeats of an engine that lets in listed keys."""

    def __init__(self, context: Any, folder: Path) -> None:
        make_curve(folder)
        self.folder = folder
        self.context = context
        self.transport = Transport(load_curve(folder))
        self.endpoint = free_endpoint()
        self.key, _ = make_client(folder, "web")
        self.frontend = Transport(load_curve(folder / "frontends" / "web"))
        assert self.transport.curve is not None
        assert self.transport.curve.clients is not None
        keys = ClientKeys(self.transport.curve.clients, self.transport.curve.public)
        self.authenticator = Authenticator(context, keys)
        self.authenticator.start()
        self.publisher = HeartbeatPublisher(context, self.endpoint, self.transport, Status(7, new_stats()), keys)
        self.publisher.start()

    def stop(self) -> None:
        self.publisher.stop()
        self.authenticator.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[KeyedEngine]:
    engine = KeyedEngine(KeepingContext(), tmp_path / "keys")
    yield engine
    engine.stop()


@contextlib.asynccontextmanager
async def watched(engine: KeyedEngine, transport: Transport, health: EngineWatch | None = None) -> Any:
    """Connect a listener to heartbeats, with the watch of its handshakes."""
    context = zmq.asyncio.Context()
    health = health or EngineWatch(5.0, 60.0)
    subscriber = connect_heartbeat(context, engine.endpoint, transport)
    watch = asyncio.create_task(watch_handshakes(subscriber, health.note_failure))
    try:
        yield subscriber
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        subscriber.close()
        context.term()


async def said(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    async with asyncio.timeout(LIMIT):
        while not all(text in caplog.text for text in texts):
            await asyncio.sleep(0.01)


def test_a_refused_key_is_logged_and_tried_again(
    engine: KeyedEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "RETRY_SECONDS", 0.05)
    away = engine.key.with_suffix(".away")
    engine.key.rename(away)

    async def run() -> None:
        health = EngineWatch(5.0, 60.0)
        async with watched(engine, engine.frontend, health) as subscriber:
            await said(caplog, REFUSED_KEY, "a frontend from 127.0.0.1")
            assert (health.health().status, REFUSED_KEY in health.health().reason) == ("waiting", True)
            away.rename(engine.key)
            heartbeat = decode_event(await asyncio.wait_for(subscriber.recv(), LIMIT))
            assert isinstance(heartbeat, Heartbeat)
            health.observe(heartbeat)
            assert REFUSED_KEY not in health.health().reason

    asyncio.run(run())
    assert caplog.text.count(REFUSED_KEY) == 1


def test_the_key_of_another_engine_is_logged_on_both_sides(
    engine: KeyedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    other = Transport(Curve(zmq.curve_keypair()[0]))

    async def run() -> None:
        async with watched(engine, other):
            await said(caplog, "is its engine.key the one in --curve-keys?", "the peer has the key of another engine")

    asyncio.run(run())


def test_a_connection_that_an_engine_closes_as_it_ends_is_no_failed_handshake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    transport = Transport(insecure_tcp=True)

    async def run() -> None:
        context, engine_context, failures = zmq.asyncio.Context(), KeepingContext(), list[str]()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(LIMIT)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        subscriber = connect_heartbeat(context, endpoint, transport)
        watch = asyncio.create_task(watch_handshakes(subscriber, failures.append))
        peer, _ = await asyncio.to_thread(listener.accept)
        listener.close()
        peer.close()
        await said(caplog, "closed a connection before its handshake")
        publisher = HeartbeatPublisher(engine_context, endpoint, transport, Status(7, new_stats()))
        publisher.start()
        await asyncio.wait_for(subscriber.recv(), LIMIT)
        assert not failures and "failed" not in caplog.text
        publisher.stop()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        subscriber.close()
        context.term()
        engine_context.destroy(linger=0)

    asyncio.run(run())


def test_a_link_whose_key_is_refused_breaks_with_the_reason(engine: KeyedEngine) -> None:
    engine.key.unlink()

    async def run() -> str:
        async with asyncio.timeout(LIMIT):
            while "web" in engine.authenticator.keys.names.values():
                await asyncio.sleep(0.01)
        context = zmq.asyncio.Context()
        endpoint = free_endpoint()
        bind_router(engine.context, endpoint, engine.transport)
        broken: asyncio.Queue[str] = asyncio.Queue()
        link = EngineLink(context, 7, OpenStreams(), lambda _: None, broken.put_nowait)
        link.open(endpoint, engine.frontend, "test", 0.0)
        try:
            return await asyncio.wait_for(broken.get(), LIMIT)
        finally:
            link.close()
            context.destroy(linger=0)

    assert asyncio.run(run()) == handshakes.REFUSED_KEY
