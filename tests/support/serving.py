"""A real `tandem serve`: supervisor, engine core and frontend as processes, on free ports of the loopback."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.scrape import value

GUARD_SECONDS = 120.0
"""Seconds after which a test gives up waiting; no test asserts how long something took."""


LOWEST_PORT = 12000


def free_port() -> int:
    """Return a free port that nobody else gets before it is bound, neither from the system nor from this function.

    It is below those that Linux chooses itself, for example for every connection; 32768 where nothing else is set. The
    UDP port of the same number, which no test uses, says to all processes until the end of this one that it is taken.
    """
    chosen = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(chosen.read_text().split()[0]) if chosen.exists() else 32768
    while True:
        # Other processes of tests choose at the same time; Hypothesis repeats the choices of `random`.
        port = LOWEST_PORT + secrets.randbelow(end - LOWEST_PORT) if end > LOWEST_PORT else 0
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as claim, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            claim.bind(("127.0.0.1", found))
            claim.detach()
            return found


def until(condition: Callable[[], Any], what: str, seconds: float = GUARD_SECONDS) -> Any:
    """Wait until a condition is truthy; return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s in vain for {what}")


MAIN = "import sys; from tandem.frontend.cli.main import main; sys.exit(main())"


def write_console_script(folder: Path) -> Path:
    """Write a command `tandem` for environments that have the tree on their path, but no console script."""
    path = folder / "tandem"
    path.write_text(f"#!{sys.executable}\n{MAIN}\n")
    path.chmod(0o755)
    return path


ABORTS = 'tandem_request_success_total{finished_reason="abort"}'
"""Series of the engine: requests that were aborted, one for each of a request's choices."""


class Serving:
    """A server that starts on entry and waits until it is ready; it leaves no process behind."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        tandem: Path | None = None,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`tandem` is the console script, by default that of the tests' environment.

        With `wait` False, entry only starts the server. `environment` adds to this process's own.
        """
        self.wait = wait
        self.environment = {**os.environ, **(environment or {})}
        self.log = log
        self.tandem = tandem or Path(sys.executable).with_name("tandem")
        self.flags = flags
        self.port, self.ops_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Serving":
        ports = ("--port", str(self.port), "--ops-port", str(self.ops_port))
        command = [str(self.tandem), "serve", *ports, *self.flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        if self.wait:
            until(self.ready, f"readiness; the log says:\n{self.log.read_text()}")
            if self.num_frontends > 1:  # one that is ready later would refuse the requests that it gets until then
                until(lambda: self.num_connects >= self.num_frontends, "frontends that know the engine")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(GUARD_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if error is not None:
            print(self.log.read_text())

    def ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"exited with {self.process.returncode}:\n{self.log.read_text()}"
        return self.get("/health/ready")[0] == 200

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Request a path; return status and body, or status 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}{path}", timeout=GUARD_SECONDS) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)

    def metrics(self, port: int | None = None) -> str:
        """Return what a scrape of a port gets, once it gets it: a busy supervisor may not answer one in its time."""
        text = ""

        def is_answered() -> bool:
            nonlocal text
            status, text = self.get("/metrics", port)
            return status == 200

        until(is_answered, "metrics")
        return text

    def engine_metric(self, name: str) -> float:
        """Return the sum of the series of the ops port with a name, or also with the labels given; 0 for none."""
        return value(self.get("/metrics", self.ops_port)[1], name)

    def fresh_engine_metric(self, name: str) -> float:
        """Return a series from a heartbeat sent after this call began, which reflects all earlier answers.

        It is the second that is heard: the first may have been sent before, and read late by a busy supervisor.
        """
        for _ in range(2):
            self._await_heartbeat()
        return self.engine_metric(name)

    def _await_heartbeat(self) -> None:
        asked = time.monotonic()

        def is_fresh() -> bool:
            now = time.monotonic()  # Before the scrape, which takes its time.
            return self.engine_metric("tandem_engine_seconds_since_last_beat") < now - asked

        until(is_fresh, "a heartbeat")

    def rows_and_pages_are_free(self) -> bool:
        """Return True if the engine runs no request and uses no pages, by a heartbeat sent after this call began."""
        running = self.fresh_engine_metric("tandem_num_requests_running")
        return running == 0 and self.engine_metric("tandem_kv_cache_usage_perc") == 0

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def engine(self) -> psutil.Process:
        return self.child("tandem.engine_core")

    def frontends(self) -> list[psutil.Process]:
        """Return the frontends that run now, the oldest first."""
        return sorted(self.children("tandem.frontend"), key=lambda child: child.create_time())

    @property
    def num_frontends(self) -> int:
        """Number of frontends that the flags ask for."""
        return int(self.flags[self.flags.index("--frontends") + 1]) if "--frontends" in self.flags else 1

    @property
    def num_connects(self) -> int:
        """How often frontends have connected to an engine, as they have reported."""
        return int(self.engine_metric("tandem_frontend_engine_connects_total"))

    def num_serving(self) -> int:
        """Return the number of slots whose own frontend serves."""
        text = self.get("/metrics", self.ops_port)[1]
        return len(re.findall(r"^tandem_frontend_up\{[^}]*\} 1\.0$", text, re.MULTILINE))

    def running(self) -> int:
        """Return the number of sequences that hold a row, by a heartbeat sent after this call began."""
        return int(self.fresh_engine_metric("tandem_num_requests_running"))

    def said(self, text: str) -> bool:
        """Return whether the log has a line with this text."""
        return text in self.log.read_text()

    def child(self, module: str) -> psutil.Process:
        """Return the supervisor's child process that runs a module."""
        for child in self.children(module):
            return child
        raise AssertionError(f"no child runs {module}")

    def children(self, module: str, recursive: bool = False) -> list[psutil.Process]:
        """Return the processes that run a module, among the supervisor's children or all its descendants."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive):
            with suppress(psutil.NoSuchProcess):  # a zombie, or gone since it was listed
                if module in child.cmdline():
                    found.append(child)
        return found
