"""A frontend under a supervisor that is the test: beats, the sockets that it accepts from, and its end."""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.config import FrontendConfig
from tandem.frontend.control_channel import (
    Accept,
    Beat,
    Drain,
    FromFrontend,
    Leaving,
    Metrics,
    ToFrontend,
    Totals,
    supervisor_end,
)
from tandem.frontend.listening import listen
from tandem.frontend.metrics.metric_totals import MetricTotals
from tandem.frontend.server.server import build_server
from tandem.protocol.events import Phase
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, post, until
from tests.support.raw_http import RawClient, request

SERVICE = "tandem.frontend.api.service"


class Supervisor:
    """The other end of a frontend's control channel; the frontend has two listening sockets of different ports."""

    def __init__(self, config: FrontendConfig) -> None:
        ours, theirs = socket.socketpair()
        self.listeners = [listen("127.0.0.1", 0) for _ in range(2)]
        self.addresses = [listener.getsockname() for listener in self.listeners]
        self.server = build_server(structs.replace(config, slot=1, supervisor_fd=theirs.detach()))
        copies = [listener.dup() for listener in self.listeners]
        self.thread = threading.Thread(target=self.server.run, args=(copies,), name="server")
        self.messages: list[FromFrontend] = []
        self.is_closed = False
        self._orders: list[Any] = []
        self._sock = ours
        self._loop = asyncio.new_event_loop()
        self._channel: Any = None
        self._reader = threading.Thread(target=self._loop.run_until_complete, args=(self._read(),))

    def start(self) -> "Supervisor":
        self._reader.start()
        self.thread.start()
        return self

    async def _read(self) -> None:
        self._channel = await supervisor_end(self._sock)
        while (message := await self._channel.receive()) is not None:
            self.messages.append(message)
        self.is_closed = True
        self._channel.close()

    def order(self, message: ToFrontend) -> None:
        self._loop.call_soon_threadsafe(self._channel.send, message)

    def disconnect(self) -> None:
        self._loop.call_soon_threadsafe(self._channel.close)

    @property
    def beat(self) -> Beat | None:
        """The newest beat."""
        return next((message for message in reversed(self.messages) if isinstance(message, Beat)), None)

    def says(self, status: str, *slots: int) -> bool:
        beat = self.beat
        return beat is not None and (beat.status, beat.slots) == (status, slots)

    def has_exited(self) -> bool:
        self.thread.join(DEADLINE)
        self._reader.join(DEADLINE)
        return not self.thread.is_alive() and self.is_closed

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        assert self.has_exited()
        self._loop.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def supervisor(config: FrontendConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Start a frontend without an engine, which would wait for one for long."""
    monkeypatch.setattr(f"{SERVICE}.LINK_SECONDS", DEADLINE)
    running = Supervisor(config).start()
    yield running
    running.close()


def serving(supervisor: Supervisor, engine: FakeEngine) -> None:
    engine.start()
    until(lambda: supervisor.says("serving", 1), "it serves from its own slot")


def test_frontend_accepts_once_its_link_is_up(supervisor: Supervisor, engine: FakeEngine) -> None:
    until(lambda: supervisor.says("starting"), "a first beat")
    with RawClient(supervisor.addresses[1]) as early:
        early.send(request("/v1/models"))
        serving(supervisor, engine)
        assert early.reply().status == 200
    assert all(beat.slots == () for beat in supervisor.messages if isinstance(beat, Beat) and beat.status == "starting")


@pytest.mark.parametrize("how", ["loading", "away"])
def test_frontend_serves_its_health_while_the_engine_is_not_ready(
    how: str, config: FrontendConfig, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SERVICE}.LINK_SECONDS", DEADLINE if how == "loading" else 0.01)
    if how == "loading":
        engine.phase = Phase.LOADING
        engine.start()
    running = Supervisor(config).start()
    try:
        until(lambda: running.says("serving", 1))
        with RawClient(running.addresses[1]) as client:
            assert client.send(request("/health/ready")).reply().status == 503
    finally:
        running.close()


def test_slots_are_opened_and_closed_at_run_time(supervisor: Supervisor, engine: FakeEngine) -> None:
    serving(supervisor, engine)
    with RawClient(supervisor.addresses[0]) as waiting, RawClient(supervisor.addresses[1]) as kept:
        waiting.send(request())
        assert kept.send(request()).reply().status == 200
        supervisor.order(Accept((0,)))
        assert waiting.reply().status == 200
        until(lambda: supervisor.says("serving", 0))
        assert kept.send(request()).reply().status == 200, "what was accepted stays"
        with RawClient(supervisor.addresses[1]) as queued:
            queued.send(request())
            supervisor.order(Accept(()))
            until(lambda: supervisor.says("serving"))
            supervisor.order(Accept((1, 0)))
            assert queued.reply().status == 200
        until(lambda: supervisor.says("serving", 0, 1))


def test_slots_that_are_told_before_the_start_hold_from_then_on(supervisor: Supervisor, engine: FakeEngine) -> None:
    until(lambda: supervisor.says("starting"))
    supervisor.order(Accept((0,)))
    engine.start()
    until(lambda: supervisor.says("serving", 0))


def test_beats_count_connections_and_sequences_and_tell_the_lag(supervisor: Supervisor, engine: FakeEngine) -> None:
    serving(supervisor, engine)
    engine.step_seconds = 0.02
    body = b'{"model": "fake-model", "prompt": "one", "max_tokens": 2000, "n": 2, "stream": true}'
    headers = ("content-type: application/json", f"content-length: {len(body)}")
    with RawClient(supervisor.addresses[1]) as client:
        client.send(request("/v1/completions", *headers, method="POST", body=body))
        until(lambda: supervisor.beat == Beat("serving", (1,), 2, 1, supervisor.beat.loop_lag))
    until(lambda: supervisor.beat is not None and supervisor.beat.open_sequences == supervisor.beat.connections == 0)
    assert supervisor.server._loop is not None
    blocked = 0.5
    supervisor.server._loop.call_soon_threadsafe(threading.Event().wait, blocked)
    until(lambda: any(isinstance(beat, Beat) and beat.loop_lag > blocked / 2 for beat in supervisor.messages))


def reported(supervisor: Supervisor, name: str) -> float:
    """Return the newest value of a metric without labels that the frontend has reported."""
    totals, registry = MetricTotals(), CollectorRegistry()
    registry.register(totals)
    for message in list(supervisor.messages):
        if isinstance(message, Metrics):
            totals.update("frontend", message.report)
    return registry.get_sample_value(name) or 0.0


def test_metrics_are_reported_and_a_scrape_gets_the_sums_of_the_supervisor(
    supervisor: Supervisor, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.server.supervised.TOTALS_SECONDS", DEADLINE)
    serving(supervisor, engine)
    host, port = supervisor.addresses[1]
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 7}
    assert post(f"http://{host}:{port}/v1/completions", json=body).status_code == 200
    until(lambda: reported(supervisor, "tandem_frontend_generation_tokens_total") == 7, "a report of the tokens")
    with RawClient(supervisor.addresses[1]) as client:
        client.send(request("/metrics"))
        until(lambda: any(isinstance(message, Metrics) and message.scrape for message in supervisor.messages))
        supervisor.order(Totals(99, "for nobody"))
        supervisor.order(Totals(1, "sums 1\n"))
        reply = client.reply()
    assert (reply.status, reply.body) == (200, b"sums 1\n")


def test_a_scrape_that_the_supervisor_does_not_answer_is_refused_and_sees_no_counter_fall(
    supervisor: Supervisor, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.server.supervised.TOTALS_SECONDS", 0.01)
    serving(supervisor, engine)
    with RawClient(supervisor.addresses[1]) as client:
        reply = client.send(request("/metrics")).reply()
    assert reply.status == 503
    assert b"the supervisor, which adds up the metrics of all frontends, does not answer" in reply.body


def test_signal_asks_for_a_successor_and_serves_on_until_told_to_drain(
    supervisor: Supervisor, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.server.supervised.UNANSWERED_SECONDS", 3600.0)
    monkeypatch.setattr("tandem.frontend.server.server.SUCCESSOR_GRACE_SECONDS", DEADLINE)
    serving(supervisor, engine)
    supervisor.server.handle_exit(signal.SIGTERM, None)
    until(lambda: Leaving() in supervisor.messages)
    host, port = supervisor.addresses[1]
    url = f"http://{host}:{port}"
    assert post(url + "/v1/completions", json={"model": "fake-model", "prompt": "one"}).status_code == 200
    assert supervisor.says("serving", 1)
    with RawClient(supervisor.addresses[1]) as idle:
        assert idle.send(request()).reply().headers.get("connection") is None
        supervisor.order(Drain(0.0, DEADLINE))
        until(lambda: supervisor.says("draining"))
        until(lambda: supervisor.server.connections.grace is not None, "the connections are told")
        assert idle.send(request()).reply().headers["connection"] == "close"
    assert supervisor.has_exited()
    with RawClient(supervisor.addresses[1]) as queued:
        assert queued.send(request()), "nobody was reset: the supervisor has the socket"


def test_frontend_whose_supervisor_does_not_answer_drains_on_its_own(
    supervisor: Supervisor, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.server.supervised.UNANSWERED_SECONDS", 0.01)
    serving(supervisor, engine)
    supervisor.server.handle_exit(signal.SIGTERM, None)
    assert supervisor.has_exited()
    assert not supervisor.server.force_exit


def test_answer_to_a_leaving_frontend_lets_it_serve_on(
    supervisor: Supervisor, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.frontend.server.supervised.UNANSWERED_SECONDS", 3600.0)
    serving(supervisor, engine)
    supervisor.server.handle_exit(signal.SIGTERM, None)
    until(lambda: Leaving() in supervisor.messages)
    supervised = supervisor.server._supervised
    assert supervised is not None
    until(lambda: supervised._unanswered is not None, "it waits for an answer")
    unanswered = supervised._unanswered
    assert unanswered is not None
    supervisor.order(Accept((1,)))
    until(unanswered.cancelled)
    assert supervisor.says("serving", 1)


def test_frontend_without_its_supervisor_exits(supervisor: Supervisor, engine: FakeEngine) -> None:
    serving(supervisor, engine)
    supervisor.disconnect()
    assert supervisor.has_exited()
