"""Reaction of the engine client to heartbeats and step outputs, without an engine or a real clock."""

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.engine.client import STALE_SECONDS, EngineClient
from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.streams import ReadySet
from tandem.frontend.errors import ApiError
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.protocol.codec import step_output
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Phase, Started
from tandem.protocol.sockets import Transport
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.fakes.engine_link import LIMITS, connect, heartbeat, install


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Epochs of the links that the client opens."""
    return install(monkeypatch)


def client(clock: FakeClock) -> EngineClient:
    metrics = FrontendMetrics(CollectorRegistry())
    made = EngineClient("ipc:///nowhere", Transport(), Fingerprints(), EngineWatch(5.0, 60.0, clock), metrics, clock)
    made._context = object()  # type: ignore[assignment]
    return made


def test_a_stale_heartbeat_of_a_lost_engine_opens_no_link(opened: list[int]) -> None:
    clock = FakeClock()
    frontend = client(clock)
    frontend._on_heartbeat(heartbeat(1))
    assert frontend.health().status == "connecting"
    frontend._on_break("the engine closed the connection")
    clock.now += STALE_SECONDS / 2
    frontend._on_heartbeat(heartbeat(1))
    assert opened == [1]
    assert frontend.health().status == "lost" and "closed" in frontend.health().reason
    frontend._on_heartbeat(heartbeat(2))
    assert opened == [1, 2]
    assert frontend.health().status == "connecting"


def test_heartbeats_long_after_a_broken_connection_open_a_new_link(opened: list[int]) -> None:
    clock = FakeClock()
    frontend = client(clock)
    frontend._on_heartbeat(heartbeat(1))
    frontend._on_break("the engine closed the connection")
    clock.now += STALE_SECONDS
    frontend._on_heartbeat(heartbeat(1))
    assert opened == [1, 1]


def test_cached_tokens_are_known_with_the_first_token() -> None:
    frontend = client(FakeClock())
    stream = frontend._streams.open(7, 0, ReadySet(), 70)
    output = step_output(1, [7], [42])
    output.started.extend((Started(7, 64), Started(8, 32)))
    frontend._streams.deliver(output)
    assert (stream.cached_tokens, stream.take()) == (64, ([42], None, []))


def test_retry_after_follows_the_load_of_all_frontends(opened: list[int]) -> None:
    clock = FakeClock()
    frontend = client(clock)
    assert frontend.retry_after(ErrorCode.OVERLOADED, 1, 10) == 1
    link = connect(frontend, 1, limits=structs.replace(LIMITS, max_concurrent=20))
    for second in range(100):
        stats = EngineStats()
        stats.requests_finished = {"stop": 2 * second}
        frontend._on_heartbeat(structs.replace(heartbeat(1, stats=stats), pending=20))
        clock.advance(1)
    # About two sequences leave in a second, and the times of the second request count from the return of the first.
    assert 4 <= frontend.retry_after(ErrorCode.OVERLOADED, 8, 10) <= 5
    assert 8 <= frontend.retry_after_end(8, 8) <= 10
    assert link.ready is not None and opened == [1]


@pytest.mark.usefixtures("opened")
def test_limits_of_a_frontend_only_lower_those_of_the_engine() -> None:
    frontend = client(FakeClock())
    assert frontend.load_limits(1024, 9) == (1024, 9)
    connect(frontend, 1, limits=structs.replace(LIMITS, max_concurrent=20, max_queued_tokens=500))
    assert frontend.load_limits(1024, 9) == (20, 9)
    assert frontend.load_limits(10, 900) == (10, 500)


@pytest.mark.usefixtures("opened")
def test_retry_after_of_an_engine_that_is_away_is_what_its_start_takes() -> None:
    clock = FakeClock()
    frontend = client(clock)
    frontend._on_heartbeat(heartbeat(1, Phase.STARTING, percent=0))
    clock.advance(20)
    connect(frontend, 1)
    frontend._on_break("the engine closed the connection")
    clock.advance(3)
    assert (frontend.health().status, frontend.seconds_until_ready()) == ("lost", 18), "half a second's pause before"
    with pytest.raises(ApiError) as caught:
        frontend.ready()
    assert (caught.value.status, caught.value.retry_after) == (503, 18)
    frontend._on_heartbeat(heartbeat(2, Phase.LOADING, percent=0))
    clock.advance(5)
    assert (frontend.health().status, frontend.seconds_until_ready()) == ("loading", 15)
    connect(frontend, 2)
    assert frontend.seconds_until_ready() == 1


def test_queued_tokens_count_each_stream_until_its_first_event() -> None:
    frontend = client(FakeClock())
    for request_id, prompt_len in ((1, 10), (2, 5), (3, 7)):
        frontend._streams.open(request_id, 0, ReadySet(), prompt_len)
    assert frontend.queued_tokens == 22
    frontend._streams.deliver(step_output(1, [1], [42]))
    frontend._streams.deliver(step_output(2, [1], [43]))
    assert frontend.queued_tokens == 12
    failed = step_output(3, [], [])
    failed.failures.append(Failure(2, ErrorCode.OVERLOADED, "full"))
    frontend._streams.deliver(failed)
    assert frontend.queued_tokens == 7
    frontend.abort([2, 3, 3])
    assert frontend.queued_tokens == 0
