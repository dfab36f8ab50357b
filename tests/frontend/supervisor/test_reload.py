"""A service that reads keys, certificate and log level again on SIGHUP, and tells its service manager."""

import hashlib
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.frontend.listening import listen
from tests.frontend.conftest import DEADLINE, until
from tests.support.certificate import write_certificate
from tests.support.tandem_process import SERVING, Start, Tandem
from tests.support.tandem_with_fake_engine import SCRIPTED

KEY = '[[key]]\nname = "{}"\nsha256 = "{}"\nrights = ["generate"]\n'


def table(name: str) -> str:
    return KEY.format(name, hashlib.sha256(name.encode()).hexdigest())


def certificate(port: int) -> bytes | None:
    """Return the certificate that a new connection has."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as plain,
        context.wrap_socket(plain) as secure,
    ):
        return secure.getpeercert(binary_form=True)


def hang_up(service: Tandem, module: str) -> psutil.Process:
    """Send SIGHUP to the child that runs a module; return it."""
    child = service.child(module)
    until(lambda: "die_with_parent" not in " ".join(child.cmdline()), "the child's own program")
    child.send_signal(signal.SIGHUP)
    return child


@pytest.fixture
def manager(ipc_dir: Path) -> Iterator[socket.socket]:
    """Socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(f"{ipc_dir}/notify")
        found.settimeout(DEADLINE)
        yield found


def test_reload_replaces_what_can_be_used_and_tells_the_service_manager(
    tandem: Start, ipc_dir: Path, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: ipc_dir / name for name in ("old", "new")}
    for folder in files.values():
        folder.mkdir()
    cert, key = write_certificate(files["old"])
    new_cert, new_key = write_certificate(files["new"])
    keys, config = ipc_dir / "keys.toml", ipc_dir / "tandem.toml"
    keys.write_text(table("a"))
    keys.chmod(0o600)
    settings = f'tls-cert = "{cert}"\ntls-key = "{key}"\napi-keys = "{keys}"\nport = 0\nops-port = 0\nfrontends = 1\n'
    config.write_text(settings + "drain-timeout = 0\n")
    told: list[str] = []

    def until_told(line: str) -> None:
        while not any(word.startswith(line) for word in told):
            told.extend(manager.recv(4096).decode().split("\n"))
        told.clear()

    monkeypatch.setenv("NOTIFY_SOCKET", f"{ipc_dir}/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "600000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    service = tandem(SCRIPTED, "serve", "--config", str(config))
    # Only the supervisor reloads; its children are not ended while they start, nor later.
    children = [hang_up(service, module) for module in ("tandem.engine_core", "tandem.frontend")]
    until_told("READY=1")
    port = int(service.find(r"tandem is ready on https://127.0.0.1:(\d+) ")[1])
    before = certificate(port)
    assert before == ssl.PEM_cert_to_DER_cert(cert.read_text())

    def reload() -> None:
        service.process.send_signal(signal.SIGHUP)
        until_told("RELOADING=1")

    # A pair that does not belong together, and a file that is not TOML: everything stays as it was.
    shutil.copy(new_cert, cert)
    config.write_text("log-level = ")
    reload()
    until(
        lambda: "the certificate was not reloaded, that from before stays" in service.output,
        "the broken pair is told of",
    )
    service.find(r"ERROR .*--config was not reloaded, its log level stays file=\S+tandem.toml log_level=info")
    assert certificate(port) == before
    shutil.copy(new_key, key)
    config.write_text(settings + 'log-level = "debug"\n')
    reload()
    service.find(r"tandem.audit: reload: .* log_level=debug")
    service.find(r"engine INFO the log level is debug now")
    service.find(r"the certificate was reloaded tls_cert=\S+cert.pem")
    assert certificate(port) == ssl.PEM_cert_to_DER_cert(new_cert.read_text())
    assert children == [hang_up(service, module) for module in ("tandem.engine_core", "tandem.frontend")]
    children[0].kill()  # the next engine has the same level
    until(lambda: service.output.count("engine INFO the log level is debug now") == 2, "the level of the next engine")
    assert children[1].is_running()
    service.process.send_signal(signal.SIGTERM)
    until_told("STOPPING=1")
    assert service.wait() == 0


@pytest.mark.parametrize("command", ["serve", pytest.param("frontend", marks=pytest.mark.slow)])
def test_a_service_that_downloads_its_model_is_not_ended(
    tandem: Start, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with listen("127.0.0.1", 0) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.settimeout(DEADLINE)
        service = tandem(SERVING, command, "org/model", "--endpoint", "ipc:///nowhere/engine")
        asked, _ = hub.accept()
        with asked:
            service.process.send_signal(signal.SIGHUP)
            assert asked.recv(4096)
    assert service.wait() == 2
    assert "org/model " in service.output and "HF_ENDPOINT" in service.output
