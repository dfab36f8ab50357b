"""An engine and a frontend on a tcp endpoint, with keys."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tandem.protocol.curve import make_client, make_curve
from tests.fakes.scripted_engine import DEFAULT_MODEL, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until
from tests.support.stream_client import Summary, completion, summary
from tests.support.tcp_proxy import free_ports


class KeyedServing(ScriptedServing):
    """An engine with keys, and one frontend whose key it knows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "log", script=Script(tokens_per_second=30.0))
        self.folder = folder
        self.endpoint = f"tcp://127.0.0.1:{free_ports(2)}"
        self._stack = ExitStack()

    def __enter__(self) -> "KeyedServing":
        engine = ("engine", "--ops-port", str(self.ops_port), "--curve-keys", str(self.folder / "keys"))
        keys = self.folder / "keys" / "frontends" / "web"
        frontend = ("frontend", "--model-dir", str(DEFAULT_MODEL), "--port", str(self.port), "--curve-keys", str(keys))
        self.process = self._stack.enter_context(self._run(*engine))
        self._stack.enter_context(self._run(*frontend, "--drain-timeout", "0"))
        until(self.ready, f"readiness; the log says:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _run(self, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(self.tandem), *command, "--endpoint", self.endpoint],
                stdout=log, stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(GUARD_SECONDS)


@pytest.mark.slow
def test_a_frontend_is_cut_off_while_its_key_is_away(tmp_path: Path) -> None:
    make_curve(tmp_path / "keys")
    key, _ = make_client(tmp_path / "keys", "web")
    with KeyedServing(tmp_path) as serving, serving.clients() as client:
        streams = client.open(completion(2000), 5)
        client.until_streaming(streams)
        key.rename(key.with_suffix(".away"))
        client.until_ended(streams)
        assert Summary.of(streams) == Summary(done=0, error=5, cut=0, open=0, problems=0), summary(streams)
        until(lambda: serving.said("refused a frontend from 127.0.0.1"), "the engine's line")
        until(lambda: serving.said("the engine refuses this frontend's key"), "the frontend's line")
        assert not serving.ready()
        key.with_suffix(".away").rename(key)
        until(serving.ready, "the frontend is let in again")
        later = client.open(completion(5), 5)
        client.until_ended(later)
        assert Summary.of(later).done == 5, summary(later)
        until(serving.rows_and_pages_are_free, "no rows and pages in use")
