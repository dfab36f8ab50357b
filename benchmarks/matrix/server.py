"""Server process of a configuration, and the readings of its ops port.

Each configuration has a `tandem serve` of its own.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.measuring.processes import stop_process
from benchmarks.measuring.scrape import Scrape
from tests.support.serving import free_port

TANDEM = "import sys; from tandem.frontend.cli.main import main; sys.exit(main())"
"""The console command of the tree that the benchmark runs from, installed or not."""
READY_SECONDS, STOP_SECONDS = 300.0, 30.0
POLL_SECONDS = 0.1
_OF_EVERY_LINE = ("time", "level", "process", "logger", "message")
"""Names of the fields that every line of the log has."""
AGE = "tandem_engine_seconds_since_last_beat"
BEAT_SECONDS = 60.0
"""Longest wait for a heartbeat, in seconds."""


class ServerDiedError(Exception):
    """Error of a server that ended or did not come up.

    The end of the server's log says why.
    """


class Server:
    """Server that runs from entry to exit of the context, and is ready on entry."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self._flags, self._log = flags, log
        self.port, self._ops_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        ports = ["--port", str(self.port), "--ops-port", str(self._ops_port)]
        settings = ["--log-level", "debug", "--log-format", "json"]  # which has them as fields of a line
        started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", TANDEM, "serve", *ports, *settings, *self._flags],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            while self._get(self.port, "/health/ready") is None:
                self._check(started)
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        self.ready_seconds = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _check(self, started: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None and time.monotonic() - started < READY_SECONDS:
            return
        how = "not ready in time" if code is None else f"exited with {code}"
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise ServerDiedError(f"tandem serve {' '.join(self._flags)}: {how}\n{tail}")

    def _stop(self) -> None:
        assert self._process is not None
        stop_process(self._process, STOP_SECONDS)

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._ops_port}/metrics"

    def metrics(self) -> str:
        """Return what Prometheus would scrape; empty if the server does not answer."""
        return self._get(self._ops_port, "/metrics") or ""

    def scrape(self) -> Scrape:
        return Scrape(self.metrics())

    def await_heartbeats(self) -> None:
        """Wait until the metrics have everything that happened before this call.

        That is the second heartbeat from now on: the first may have been under way. Raises ServerDiedError if there is
        none.
        """
        for _ in range(2):
            asked = now = time.monotonic()
            while not (age := self.scrape().value(AGE)) or age >= now - asked:  # 0: no answer
                if now - asked > BEAT_SECONDS:
                    raise ServerDiedError(f"no heartbeat for {BEAT_SECONDS:g} s")
                time.sleep(POLL_SECONDS)
                now = time.monotonic()

    def settings(self) -> dict[str, Any]:
        """Return the settings that the engine logged.

        Raises ValueError if its log does not have them.
        """
        for line in self._log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                fields: dict[str, Any] = json.loads(line)
                if fields["message"] == "settings":
                    return {name: value for name, value in fields.items() if name not in _OF_EVERY_LINE}
        raise ValueError(f"the engine's log states no settings: {self._log}")

    def _get(self, port: int, path: str) -> str | None:
        """Return the body of an answer, or None unless its status is 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
                text: str = reply.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None
