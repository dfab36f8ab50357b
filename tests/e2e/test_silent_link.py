"""A frontend on another host whose link falls silent without an end: a cable pulled, a host that is gone."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fakes.scripted_engine import DEFAULT_MODEL, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until
from tests.support.stream_client import Summary, completion, summary
from tests.support.tcp_proxy import SilentProxy, free_ports


class RemoteEngine(ScriptedServing):
    """An engine on a port, and a frontend that reaches it through a proxy."""

    def __init__(self, log: Path, endpoint: int, proxy: int) -> None:
        super().__init__(log, script=Script(tokens_per_second=30.0))
        self.endpoint, self.proxy = endpoint, proxy
        self._stack = ExitStack()

    def __enter__(self) -> "RemoteEngine":
        engine = ("engine", "--endpoint", f"tcp://127.0.0.1:{self.endpoint}", "--ops-port", str(self.ops_port))
        frontend = ("frontend", "--endpoint", f"tcp://127.0.0.1:{self.proxy}", "--model-dir", str(DEFAULT_MODEL))
        self.process = self._stack.enter_context(self._run(*engine))
        self._stack.enter_context(self._run(*frontend, "--port", str(self.port), "--drain-timeout", "0"))
        until(self.ready, f"readiness; the log says:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _run(self, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(self.tandem), *command, "--insecure-tcp"],
                stdout=log, stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(GUARD_SECONDS)


def test_silent_link_frees_rows_and_ends_streams_and_comes_back(tmp_path: Path) -> None:
    endpoint = free_ports(2)
    with SilentProxy(endpoint) as proxy, RemoteEngine(tmp_path / "log", endpoint, proxy.port) as remote:
        with remote.clients() as client:
            streams = client.open(completion(2000), 20)
            client.until_streaming(streams)
            assert remote.running() == 20
            proxy.silence()
            client.until(lambda: remote.running() == 0, "rows of the silent frontend")
            client.until_ended(streams)
            assert Summary.of(streams) == Summary(done=0, error=20, cut=0, open=0, problems=0), summary(streams)
            proxy.resume()
            until(remote.ready, "the link")
            later = client.open(completion(10), 20)
            client.until_ended(later)
            assert Summary.of(later).done == 20, summary(later)
        until(remote.rows_and_pages_are_free, "no rows and pages in use")
