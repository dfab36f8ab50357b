"""The secrets in the environment of each process of a service, and the end of all with it."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.frontend.conftest import post, until
from tests.support.stopped_process import is_running
from tests.support.tandem_process import SERVING, Start, Tandem

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_secret",
    "TANDEM_API_KEY": "api_secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "otel_secret",
    "NOTIFY_SOCKET": "@nowhere",
    "WATCHDOG_USEC": "600000000",
}
GRAMMAR = "tandem.frontend.grammar.worker"
TEMPLATE = "tandem.frontend.chat.render_worker"
MODULES = {"tandem.engine_core", "tandem.frontend", GRAMMAR, TEMPLATE}
FRONTEND_SECRETS = {"TANDEM_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS"}


def environment(process: psutil.Process) -> set[str]:
    """Return the names of the secrets that the kernel has for a process."""
    words = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    return {word.partition("=")[0] for word in words} & SECRETS.keys()


def processes(service: Tandem) -> dict[str, psutil.Process]:
    """Return the processes below the supervisor by the module that they run, once there is one of each."""
    found: dict[str, psutil.Process] = {}

    def is_complete() -> bool:
        found.clear()
        for child in psutil.Process(service.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                # Before a program of its own it has the parent's environment, less the secrets.
                found.update({module: child for module in MODULES if words[2:4] == ["-m", module]})
        return found.keys() == MODULES

    until(is_complete, "a process of each kind")
    return found


def test_each_process_of_a_service_has_only_its_own_secrets_and_sockets(
    tandem: Start, ipc_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ipc_dir / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    flags = (
        "--port",
        "0",
        "--ops-port",
        "0",
        "--frontends",
        "1",
        "--drain-timeout",
        "0",
        "--chat-template",
        str(template),
    )
    service = tandem(SERVING, "serve", *flags)
    url = service.url()
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 1, "guided_regex": "a+"}
    key = {"authorization": "Bearer api_secret"}
    assert post(url + "/v1/completions", json=body, headers=key).status_code == 200
    chat = {"model": "fake-model", "messages": [{"role": "user", "content": "one"}], "max_tokens": 1}
    assert post(url + "/v1/chat/completions", json=chat, headers=key).status_code == 200
    found = processes(service)
    for module, child in found.items():
        assert environment(child) == (FRONTEND_SECRETS if module == "tandem.frontend" else set()), module
        assert not any("secret" in word for word in child.cmdline())
        listening = [one for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert bool(listening) == (module == "tandem.frontend"), f"{module} would keep {listening} open in a drain"
    # Workers end with the frontend that started them, however it ends, and everything ends with the supervisor.
    found["tandem.frontend"].kill()
    until(lambda: not is_running(found[GRAMMAR]) and not is_running(found[TEMPLATE]), "the end of the workers")
    assert is_running(found["tandem.engine_core"])
    until(lambda: service.children("tandem.frontend"), "the next frontend")
    rest = [found["tandem.engine_core"], *service.children("tandem.frontend")]
    service.process.kill()
    until(lambda: not any(is_running(child) for child in rest), "the end of the service's processes")
