"""Which beats the client hears, without an engine or a clock."""

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.engine import client as engine_client
from tandem.frontend.engine.client import STALE_SECONDS, EngineClient
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.streams import ReadySet, TokenStream
from tandem.frontend.metrics import FrontendMetrics
from tandem.protocol.codec import step_output
from tandem.protocol.events import EngineStats, Heartbeat, Phase, Started
from tandem.protocol.sockets import Transport


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Link:
    """Opens nothing."""

    opened: list[int]

    def __init__(self, _context: object, epoch: int, *_: object) -> None:
        self.epoch, self.ready, self.opened_at = epoch, None, 0.0

    def open(self, _endpoint: str, _transport: object, _name: str, now: float) -> None:
        self.opened_at = now
        self.opened.append(self.epoch)

    def close(self) -> None:
        pass


def beat(epoch: int) -> Heartbeat:
    return Heartbeat(epoch, Phase.READY, 100, "", 0, EngineStats())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that links were opened to."""
    Link.opened = []
    monkeypatch.setattr(engine_client, "EngineLink", Link)
    return Link.opened


def client(clock: Clock) -> EngineClient:
    metrics = FrontendMetrics(CollectorRegistry())
    made = EngineClient("ipc:///nowhere", Transport(), "", EngineWatch(5.0, 60.0), metrics, clock)
    made._context = object()  # type: ignore[assignment]
    return made


def test_a_beat_that_outlived_its_engine_opens_no_link(opened: list[int]) -> None:
    clock = Clock()
    frontend = client(clock)
    frontend._on_beat(beat(1))
    assert frontend.health().status == "connecting"
    frontend._on_break("the engine closed the connection")
    clock.now += STALE_SECONDS / 2
    frontend._on_beat(beat(1))
    assert opened == [1]
    assert (frontend.health().status, frontend.health().reason) == ("lost", "the engine closed the connection")
    frontend._on_beat(beat(2))
    assert opened == [1, 2]
    assert frontend.health().status == "connecting"


def test_an_engine_that_beats_on_after_a_broken_connection_is_taken_back(opened: list[int]) -> None:
    clock = Clock()
    frontend = client(clock)
    frontend._on_beat(beat(1))
    frontend._on_break("the engine closed the connection")
    clock.now += STALE_SECONDS
    frontend._on_beat(beat(1))
    assert opened == [1, 1]


def test_the_cached_part_of_a_prompt_is_known_with_the_first_token() -> None:
    frontend = client(Clock())
    stream = TokenStream(7, 0, ReadySet())
    frontend._streams[7] = stream
    output = step_output(1, [7], [42])
    output.started.extend((Started(7, 64), Started(8, 32)))
    frontend._on_step(output)
    assert (stream.cached_tokens, stream.take().tokens) == (64, [42])
