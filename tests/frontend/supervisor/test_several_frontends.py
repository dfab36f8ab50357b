"""Frontends behind one port as processes, in front of a fake engine core: deaths, hangs, replacements, restarts."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.frontend.conftest import DEADLINE, get, post, until
from tests.support.scrape import value
from tests.support.serving import free_port
from tests.support.stopped_process import is_running
from tests.support.tandem_process import SERVING, Start, Tandem, TandemFolder

FRONTEND, ENGINE = "tandem.frontend", "tandem.engine_core"
HANG_SECONDS = 6
"""More than the few seconds for which a busy machine may hold up a process."""
FLAGS = ("--ops-port", "0", "--drain-timeout", "5", "--hang-timeout", str(HANG_SECONDS))

UNREADABLE_LATER = """
import sys
from pathlib import Path
from tests.fakes.engine import run_as_process
if Path("unreadable").exists():
    print("config.json cannot be read", file=sys.stderr)
    sys.exit(2)
run_as_process(sys.argv)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    """A service with two frontends, which each test leaves whole."""
    folder = TandemFolder(tmp_path_factory.mktemp("several"))
    # Not a port that the system chooses: the last test looks whether anybody listens there.
    service = folder.start(SERVING, "serve", "--port", str(free_port()), "--frontends", "2", *FLAGS)
    url_of(service)
    yield service
    folder.close()


def url_of(service: Tandem) -> str:
    return service.find(r"tandem is ready on (http://\S+) ")[1]


def health(service: Tandem) -> dict[str, Any]:
    body: dict[str, Any] = get(service.ops_url() + "/health").json()
    return body


def restarts(service: Tandem) -> float:
    return value(get(service.ops_url() + "/metrics").text, "tandem_frontend_restarts_total")


def until_all_serve(service: Tandem, count: int = 2) -> list[psutil.Process]:
    """Wait until each slot has one process and serves; return the processes."""
    until(
        lambda: health(service)["frontends_serving"] == count and len(service.children(FRONTEND)) == count,
        f"{count} frontends serve",
    )
    return service.children(FRONTEND)


def complete(url: str, client: httpx.Client | None = None) -> httpx.Response:
    """Send a request over the connections of a client, or one of its own."""
    send = post if client is None else client.post
    return send(url + "/v1/completions", json={"model": "fake-model", "prompt": "one two", "max_tokens": 2})


def test_new_connections_are_served_while_a_frontend_is_dead(service: Tandem) -> None:
    before = restarts(service)
    url, (killed, other) = url_of(service), until_all_serve(service)
    killed.kill()
    until(lambda: health(service)["frontends_serving"] == 1 or restarts(service) > before, "the death is noticed")
    assert [complete(url).status_code for _ in range(16)] == [200] * 16
    processes = until_all_serve(service)
    assert other in processes
    assert killed not in processes
    service.find(r"supervisor ERROR frontend-[01] ended with signal SIGKILL")
    service.find(r"frontend-1 INFO connected to the engine")
    assert restarts(service) == before + 1
    assert len(service.children(ENGINE)) == 1


def counted(service: Tandem, url: str) -> float:
    """Return the completions that a scrape counts, once it is the same on both ports.

    A busy supervisor may not answer a scrape of the service in its time.
    """
    pattern = r'^tandem_http_requests_total\{route="/v1/completions",status="200"\} (\S+)$'
    found: list[list[str]] = []

    def are_equal() -> bool:
        found[:] = [re.findall(pattern, get(base + "/metrics").text, re.MULTILINE) for base in (url, service.ops_url())]
        return found[0] == found[1]

    until(are_equal, "the same on both ports")
    assert len(found[0]) <= 1
    return sum(map(float, found[0]))


def test_metrics_are_the_sums_of_all_frontends_and_survive_them(service: Tandem) -> None:
    url, (ended, _) = url_of(service), until_all_serve(service)
    before = counted(service, url)
    assert [complete(url).status_code for _ in range(20)] == [200] * 20
    until(lambda: counted(service, url) == before + 20, "the reports of all frontends")
    ended.kill()
    until_all_serve(service)
    assert counted(service, url) == before + 20


@pytest.mark.slow
def test_new_connections_are_served_while_a_frontend_hangs_until_it_is_replaced(service: Tandem) -> None:
    url, (hung, other) = url_of(service), until_all_serve(service)
    hung.suspend()
    until(lambda: health(service)["frontends_serving"] == 1, "the silence is noticed")
    assert [complete(url).status_code for _ in range(16)] == [200] * 16
    service.find(rf"frontend-\d, process {hung.pid}, is killed: no beat from it for \d+\.\d s")
    processes = until_all_serve(service)
    assert other in processes
    assert hung not in processes


@pytest.mark.slow
def test_frontends_that_get_sigterm_in_turn_lose_no_request(service: Tandem) -> None:
    url = url_of(service)
    for frontend in until_all_serve(service):
        frontend.send_signal(signal.SIGTERM)
        with httpx.Client(timeout=DEADLINE) as kept:
            while is_running(frontend):
                assert complete(url).status_code == 200
                assert complete(url, kept).status_code == 200
        until_all_serve(service)


def test_a_supervisor_that_was_stopped_kills_nobody_when_it_goes_on(service: Tandem) -> None:
    supervisor = psutil.Process(service.process.pid)
    before = {process.pid for process in [*until_all_serve(service), service.child(ENGINE)]}
    lines = len(service.lines)
    supervisor.suspend()
    time.sleep(HANG_SECONDS + 1)
    supervisor.resume()
    until(lambda: health(service)["status"] == "ready", "the supervisor hears its engine")
    assert complete(url_of(service)).status_code == 200
    assert {process.pid for process in [*until_all_serve(service), service.child(ENGINE)]} == before
    assert not [line for line in service.lines[lines:] if "is killed" in line]


def test_a_second_server_on_the_port_is_refused(service: Tandem, tandem: Start) -> None:
    port = url_of(service).rpartition(":")[2]
    second = tandem(SERVING, "serve", "--port", port, "--frontends", "2", *FLAGS)
    assert second.wait() == 2
    owner = r"Address already in use, used by \S+ \(process \d+\)"
    second.find(rf"cannot listen on 127\.0\.0\.1:{port} \({owner}\); choose another --port")


def test_a_service_that_is_stopped_refuses_new_connections_and_ends_with_its_engine_last(service: Tandem) -> None:
    """Comes last: it ends the service of this file."""
    host, _, port = url_of(service).removeprefix("http://").rpartition(":")
    until_all_serve(service)
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 0, service.output
    with socket.socket() as client:
        assert client.connect_ex((host, int(port))) != 0
    goodbyes = int((service.folder / "last_words").read_text().removeprefix("goodbyes "))
    assert goodbyes >= 2, "both frontends ended before the engine"
    assert "Traceback" not in service.output


@pytest.mark.slow
def test_an_engine_whose_settings_fail_at_a_restart_is_tried_again(tandem: Start) -> None:
    service = tandem(UNREADABLE_LATER, "serve", "--port", "0", "--frontends", "1", *FLAGS)
    url = url_of(service)
    (service.folder / "unreadable").touch()
    service.child(ENGINE).kill()
    service.find(r"the engine core cannot start with its settings \(exit code 2, see its message above\), with which")
    assert get(url + "/health/ready").status_code == 503
    (service.folder / "unreadable").unlink()
    until(lambda: get(url + "/health/ready").status_code == 200, "the engine is back")
    assert complete(url).status_code == 200


@pytest.mark.slow
def test_a_lone_frontend_that_gets_sigterm_is_replaced_without_losing_a_request(tandem: Start) -> None:
    service = tandem(SERVING, "serve", "--port", "0", "--frontends", "1", *FLAGS)
    url = url_of(service)
    old = service.child(FRONTEND)
    old.send_signal(signal.SIGTERM)
    while is_running(old):
        assert complete(url).status_code == 200
    assert until_all_serve(service, 1) != [old]


@pytest.mark.slow
def test_the_same_command_starts_again_after_its_supervisor_was_killed(tandem: Start, ipc_dir: Path) -> None:
    port, endpoint = str(free_port()), f"ipc://{ipc_dir}/engine"
    flags = ("serve", "--port", port, "--frontends", "2", "--endpoint", endpoint, *FLAGS)
    first = tandem(SERVING, *flags)
    url_of(first)
    left = [Path(argument).parent for argument in first.children(FRONTEND)[0].cmdline() if "tandem-" in argument]
    first.process.kill()
    second = tandem(SERVING, *flags)
    assert complete(url_of(second)).status_code == 200
    assert not [child for child in left if child.name.startswith("tandem-") and child.exists()]


@pytest.mark.slow
def test_frontends_without_an_engine_of_their_own_have_the_same_supervision(
    tandem: Start, ipc_dir: Path, model_dir: Path
) -> None:
    endpoint = f"ipc://{ipc_dir}/engine"
    engine = tandem(SERVING, "engine", "--ops-port", "0", "--endpoint", endpoint)
    engine.find("the engine is ready")
    flags = ("--port", "0", "--frontends", "2", "--endpoint", endpoint, "--model", str(model_dir), *FLAGS)
    service = tandem(SERVING, "frontend", *flags)
    url = service.find(r"tandem frontend is ready on (http://\S+)\n")[1]
    ops = service.find(r"  metrics +(http://\S+)/metrics")[1]
    assert get(ops + "/health").json() == {"status": "ready", "reason": "", "frontends": 2, "frontends_serving": 2}
    service.children(FRONTEND)[0].kill()
    series = 'tandem_frontend_restarts_total{slot="0",reason="exit"}'
    until(lambda: value(get(ops + "/metrics").text, series) == 1, "a restart")
    assert complete(url).status_code == 200
    until(lambda: get(ops + "/health").json()["frontends_serving"] == 2, "both serve again")
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 0
    assert engine.process.poll() is None
