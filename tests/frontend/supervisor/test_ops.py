"""What the ops port says of the engine and the frontends."""

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.testclient import TestClient

from tandem.frontend.access.allowed_hosts import AllowedHosts
from tandem.frontend.control_channel import Beat
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.frontends.stall_aware_clock import StallAwareClock
from tandem.frontend.supervisor.ops import FrontendCollector, health, ops_app, ops_server
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.fakes.frontend_child import FakeFrontendChildren

READY = Heartbeat(7, Phase.READY, 100, "", 0, EngineStats())
LOADING = Heartbeat(7, Phase.LOADING, 40, "weights", 0, EngineStats())


def frontends(*serving: bool) -> tuple[Frontends, FakeFrontendChildren]:
    """Make frontends of which these serve."""
    children = FakeFrontendChildren()
    made = Frontends(len(serving), children, 8.0, 25.0, StallAwareClock(FakeClock()))
    made.tick()
    children.of(0).beats("starting")
    made.tick()
    for slot, serves in enumerate(serving):
        children.of(slot).beats("serving" if serves else "starting")
    return made, children


def watch(heartbeat: Heartbeat | None) -> EngineWatch:
    made = EngineWatch(5.0, 60.0, FakeClock())
    if heartbeat is not None:
        made.observe(heartbeat)
    return made


@pytest.mark.parametrize(
    ("heartbeat", "serving", "status"),
    [
        (READY, (True, True), "ready"), (READY, (False, True), "ready"), (READY, (False, False), "no_frontend"),
        (LOADING, (True, True), "loading"), (LOADING, (False, False), "loading"), (None, (True,), "waiting"),
    ],
)  # fmt: skip
def test_service_is_ready_with_its_engine_and_one_frontend(
    heartbeat: Heartbeat | None, serving: tuple[bool, ...], status: str
) -> None:
    body = health(watch(heartbeat), frontends(*serving)[0])
    assert body["status"] == status
    assert (body["frontends"], body["frontends_serving"]) == (len(serving), sum(serving))
    assert bool(body["reason"]) == (status != "ready")


def test_an_engine_alone_says_nothing_of_frontends() -> None:
    assert health(watch(READY), None) == {
        "status": "ready", "reason": "", "epoch": 7, "phase": "ready", "percent": 100, "seconds_since_last_beat": 0.0,
    }  # fmt: skip


def test_frontends_alone_are_ready_while_one_serves() -> None:
    assert health(None, frontends(True, False)[0])["status"] == "ready"
    found = health(None, frontends(False)[0])
    assert "(1)" in found.pop("reason")
    assert found == {"status": "no_frontend", "frontends": 1, "frontends_serving": 0}


def test_frontends_alone_tell_of_their_engine() -> None:
    made, children = frontends(True, True)
    lost, ready = ("lost", "no heartbeat of the engine for 6 s"), ("ready", "")
    for slot in (0, 1):
        children.of(slot).says(Beat("serving", (slot,), engine=lost))
    assert health(None, made) == {
        "status": lost[0], "reason": lost[1], "frontends": 2, "frontends_serving": 2,
    }  # fmt: skip
    children.of(1).says(Beat("serving", (1,), engine=ready))
    assert health(None, made)["status"] == "ready"


def test_routes_of_health_are_those_of_a_frontend() -> None:
    exposition = Exposition((), str)
    for heartbeat, status in ((READY, 200), (LOADING, 503)):
        client = TestClient(ops_app(watch(heartbeat), None, exposition))
        assert {path: client.get(path).status_code for path in ("/health", "/health/ready", "/health/live")} == {
            "/health": status, "/health/ready": status, "/health/live": 200,
        }  # fmt: skip


def test_service_that_is_not_ready_says_when_to_ask_again() -> None:
    exposition = Exposition((), str)
    loading, nobody = watch(LOADING), frontends(False)[0]
    for seen, made, seconds in (
        (loading, None, loading.seconds_until_ready()),
        (watch(READY), nobody, 5),
        (None, nobody, 5),
    ):
        answer = TestClient(ops_app(seen, made, exposition)).get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, str(seconds))
    assert "retry-after" not in TestClient(ops_app(watch(READY), None, exposition)).get("/health").headers


def test_metrics_have_a_series_for_each_slot() -> None:
    made, children = frontends(True, True)
    children.of(1).leaves()
    children.of(1).beats()
    children.of(0).ends(-9)
    registry = CollectorRegistry()
    registry.register(FrontendCollector(made))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'tandem_frontend_up{slot="0"} 0.0',
        'tandem_frontend_up{slot="1"} 1.0',
        *(f'tandem_frontend_restarts_total{{reason="{why}",slot="0"}} 0.0' for why in ("exit", "hang", "replaced")),
        'tandem_frontend_restarts_total{reason="exit",slot="1"} 0.0',
        'tandem_frontend_restarts_total{reason="hang",slot="1"} 0.0',
        'tandem_frontend_restarts_total{reason="replaced",slot="1"} 1.0',
    ]


@pytest.mark.parametrize(
    ("urls", "named"),
    [
        ((), "`tandem frontend`"),
        (("http://127.0.0.1:8000", "http://[::1]:8000"), "http://127.0.0.1:8000 and http://[::1]:8000"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/admin/scheduler"), ("GET", "/v1/models"), ("POST", "/v1/completions")]
)
def test_routes_of_the_api_are_answered_with_its_address(
    urls: tuple[str, ...], named: str, method: str, path: str
) -> None:
    answer = TestClient(ops_app(watch(READY), None, Exposition((), str), urls)).request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert "ops port" in error["message"]
    assert named in error["message"]


def test_malformed_requests_write_nothing_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(sock: socket.socket) -> bytes:
        server = ops_server(watch(READY), None, Exposition([], lambda: ""), AllowedHosts(()))
        serving = asyncio.create_task(server.serve([sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"\x00\r\n\r\n")
        found = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return found

    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert asyncio.run(ask(sock)).startswith(b"HTTP/1.1 400 ")
    assert caplog.messages == []
