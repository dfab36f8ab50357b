"""A service on a Unix socket and on several hosts, as processes in front of a fake engine core."""

import signal
from pathlib import Path

import httpx
import pytest

from tandem.frontend.cli.main import main
from tests.frontend.conftest import DEADLINE, get, until
from tests.support.tandem_process import SERVING, Start

BASE = "http://localhost"
EVIL = {"host": "evil.example"}
FLAGS = ("--ops-port", "0", "--frontends", "2", "--drain-timeout", "0")


def test_frontends_share_a_unix_socket_beside_other_hosts(
    tandem: Start, ipc_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ipc_dir / "api"
    hosts = ("--host", "127.0.0.1", "--host", "::1", "--port", "0")
    service = tandem(SERVING, "serve", "--uds", str(path), *hosts, *FLAGS)
    found = service.find(r"tandem is ready on (http://127\S+) and (http://\[::1\]\S+) and (http\+unix://\S+) \(model")
    for url in found.groups()[:2]:
        assert get(url + "/health/ready").status_code == 200
        assert get(url + "/health/ready", headers=EVIL).status_code == 421
    assert get(service.ops_url() + "/metrics").status_code == 200
    assert get(service.ops_url() + "/metrics", headers=EVIL).status_code == 421
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url=BASE, timeout=DEADLINE) as http:
        # What a proxy passes on: no browser reaches a Unix socket.
        assert http.get("/health/ready", headers=EVIL).json()["model"] == "fake-model"
        frontend = service.children("tandem.frontend")[0]
        frontend.kill()
        frontend.wait(DEADLINE)
        # No request is lost while one of the two is away.
        assert {http.get("/v1/models", headers={"connection": "close"}).status_code for _ in range(20)} == {200}
    for url in (found[3], f"http+unix://{path}"):
        assert main(["complete", "one", "--url", url, "--max-tokens", "2"]) == 0
    capsys.readouterr()
    # What a killed service leaves is no obstacle to the next.
    service.process.kill()
    service.wait()
    assert path.exists()
    service = tandem(SERVING, "serve", "--uds", str(path), *FLAGS)
    service.find(rf"tandem is ready on {found[3].replace('+', '.')} \(model")
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 0
    until(lambda: not path.exists(), f"{path} is removed within {DEADLINE} s")
