"""The secrets in the environment of each process of a service."""

from pathlib import Path

import psutil
import pytest

from tests.frontend.conftest import post, until
from tests.support.tandem_process import SERVING, Start

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_secret",
    "TANDEM_API_KEY": "api_secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "otel_secret",
    "NOTIFY_SOCKET": "@nowhere",
    "WATCHDOG_USEC": "600000000",
}
GRAMMAR = "tandem.frontend.grammar.worker"
FRONTEND_SECRETS = {"TANDEM_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS"}


def environment(process: psutil.Process) -> set[str]:
    """Return the names of the secrets that the kernel has for a process."""
    words = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    return {word.partition("=")[0] for word in words} & SECRETS.keys()


def test_each_process_of_a_service_has_only_its_own_secrets(tandem: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    flags = ("--port", "0", "--ops-port", "0", "--frontends", "1", "--drain-timeout", "0")
    service = tandem(SERVING, "serve", *flags)
    url = service.url()
    body = {"model": "fake-model", "prompt": "one", "max_tokens": 1, "guided_regex": "a+"}
    post(url + "/v1/completions", json=body, headers={"authorization": "Bearer api_secret"})
    supervisor = psutil.Process(service.process.pid)
    until(lambda: any(GRAMMAR in child.cmdline() for child in supervisor.children(recursive=True)), "a grammar worker")
    seen = set()
    for child in supervisor.children(recursive=True):
        command = child.cmdline()
        seen |= {module for module in ("tandem.engine_core", "tandem.frontend", GRAMMAR) if module in command}
        assert environment(child) == (FRONTEND_SECRETS if "tandem.frontend" in command else set()), command
        assert not any("secret" in word for word in command)
    assert seen == {"tandem.engine_core", "tandem.frontend", GRAMMAR}
