"""An engine and a frontend that were started by commands of their own."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from tests.fakes.scripted_engine import DEFAULT_MODEL, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until


class SeparateServing(ScriptedServing):
    """An engine and a frontend on a tcp endpoint; each has the flags of the link in its own words."""

    def __init__(self, log: Path, script: Script, engine: Sequence[str], frontend: Sequence[str]) -> None:
        super().__init__(log, script=script)
        self._engine_flags, self._frontend_flags = engine, frontend
        self._stack = ExitStack()

    def __enter__(self) -> "SeparateServing":
        engine = ("engine", "--ops-port", str(self.ops_port), *self._engine_flags)
        frontend = ("frontend", "--model-dir", str(DEFAULT_MODEL), "--port", str(self.port), *self._frontend_flags)
        self.process = self._stack.enter_context(self._run(*engine))
        self._stack.enter_context(self._run(*frontend, "--drain-timeout", "0"))
        until(self.ready, f"readiness; the log says:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _run(self, *command: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        return self._start(str(self.tandem), *command)

    @contextmanager
    def _start(self, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(GUARD_SECONDS)


def remote_engine(log: Path, endpoint: int, proxy: int, script: Script) -> SeparateServing:
    """Return an engine on a port, and a frontend that reaches it through a proxy on another."""
    limits = ("--insecure-tcp", "--max-concurrent", "8192", "--max-queued-tokens", "1000000")
    ends = (("--endpoint", f"tcp://127.0.0.1:{port}", *limits) for port in (endpoint, proxy))
    return SeparateServing(log, script, *ends)


def keyed_serving(folder: Path, endpoint: int) -> SeparateServing:
    """Return an engine with the keys in a folder, and a frontend with those of its client "web"."""
    place = ("--endpoint", f"tcp://127.0.0.1:{endpoint}")
    keys = folder / "keys"
    engine, frontend = (*place, "--curve-keys", str(keys)), (*place, "--curve-keys", str(keys / "frontends" / "web"))
    return SeparateServing(folder / "log", Script(tokens_per_second=30.0), engine, frontend)
