"""Adapters that a frontend knows: the newest list of the newest engine."""

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.engine.adapters import KnownAdapters
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.protocol.commands import Renew
from tandem.protocol.events import AdapterFacts, AdapterList, Answer
from tandem.protocol.sockets import Transport
from tests.fakes.clock import FakeClock
from tests.fakes.engine_link import FakeLink, connect, heartbeat, install


def listed(changes: int, *names: str) -> AdapterList:
    return AdapterList(changes, [AdapterFacts(name, f"/{name}", 1) for name in names])


def test_an_older_list_of_an_engine_changes_nothing() -> None:
    known = KnownAdapters()
    known.observe(1, listed(1, "a"))
    known.observe(1, listed(3, "a", "b"))
    known.observe(1, listed(2, "a", "c"))
    assert "b" in known and "c" not in known
    assert [facts.name for facts in known.all] == ["a", "b"]


def test_another_engine_counts_from_anew() -> None:
    known = KnownAdapters()
    known.observe(1, listed(9, "a"))
    known.observe(2, listed(0, "b"))
    assert "a" not in known and "b" in known
    known.observe(3, None)
    assert known.all == []


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    install(monkeypatch)
    watch, metrics = EngineWatch(5.0, 60.0, FakeClock()), FrontendMetrics(CollectorRegistry())
    made = EngineClient("ipc:///nowhere", Transport(), Fingerprints(), watch, metrics)
    made._context = object()  # type: ignore[assignment]
    return made


def test_the_engine_hears_of_each_list_once_it_is_known(client: EngineClient) -> None:
    link = connect(client, 7)
    for _ in range(2):
        client._on_heartbeat(structs.replace(heartbeat(7), adapters=listed(1, "a")))
    client._on_event(Answer(1, True, adapters=listed(2, "a", "b")))
    client._on_heartbeat(structs.replace(heartbeat(7), adapters=listed(2, "a", "b")))
    assert [command for command in link.sent if isinstance(command, Renew)] == [Renew(1), Renew(2)]
    assert "b" in client.adapters


def test_a_new_connection_begins_with_the_adapters_of_its_engine(client: EngineClient) -> None:
    """A list of before the Hello may be old, and the engine takes this one as known."""
    client._on_heartbeat(structs.replace(heartbeat(7), adapters=listed(1, "a")))
    link = client._link
    assert isinstance(link, FakeLink) and "a" in client.adapters
    link.answer(adapters=listed(2, "b"))
    assert "b" in client.adapters and "a" not in client.adapters
    assert link.sent == []
