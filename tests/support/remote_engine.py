"""An engine with a port of its own, and a frontend that reaches it through a proxy."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fakes.scripted_engine import DEFAULT_MODEL, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until


class RemoteEngine(ScriptedServing):
    """An engine on a port, and a frontend that reaches it through a proxy."""

    def __init__(self, log: Path, endpoint: int, proxy: int, script: Script) -> None:
        super().__init__(log, script=script)
        self.endpoint, self.proxy = endpoint, proxy
        self._stack = ExitStack()

    def __enter__(self) -> "RemoteEngine":
        engine = ("engine", "--endpoint", f"tcp://127.0.0.1:{self.endpoint}", "--ops-port", str(self.ops_port))
        frontend = ("frontend", "--endpoint", f"tcp://127.0.0.1:{self.proxy}", "--model-dir", str(DEFAULT_MODEL))
        limits = ("--max-concurrent", "8192", "--max-queued-tokens", "1000000")
        self.process = self._stack.enter_context(self._run(*engine, *limits))
        self._stack.enter_context(self._run(*frontend, *limits, "--port", str(self.port), "--drain-timeout", "0"))
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
