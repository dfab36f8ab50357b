"""A real `tandem serve` whose engine core is scripted: fast to start, as fast as asked, and without a model."""

import tempfile
from pathlib import Path

import psutil

from tests.fakes.scripted_engine import Script
from tests.support.serving import Serving
from tests.support.stream_client import StreamClient
from tests.support.tandem_with_fake_engine import SCRIPTED, write_tandem


class ScriptedServing(Serving):
    """A server with a scripted engine, which waits on entry until it is ready.

    It keeps the package that its children run in a folder beside its log.
    """

    def __init__(self, log: Path, *flags: str, script: Script | None = None, wait: bool = True) -> None:
        folder = Path(tempfile.mkdtemp(prefix="scripted-", dir=log.parent))
        environment = {"PYTHONPATH": write_tandem(folder, SCRIPTED), **(script or Script()).environment()}
        super().__init__(log, *flags, wait=wait, environment=environment)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def clients(self, *, records: bool = False) -> StreamClient:
        """Return a client that can hold thousands of streams."""
        return StreamClient(self.address, records=records)

    @property
    def engine(self) -> psutil.Process:
        return self.child("tandem.engine_core")

    def frontends(self) -> list[psutil.Process]:
        """Return the frontends that run now, the oldest first."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if "tandem.frontend" in child.cmdline():
                    found.append(child)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return sorted(found, key=lambda child: child.create_time())

    def running(self) -> int:
        """Return the number of sequences that hold a row, by a heartbeat sent after this call began."""
        return int(self.fresh_engine_metric("tandem_num_requests_running"))

    def said(self, text: str) -> bool:
        """Return whether the log has a line with this text."""
        return text in self.log.read_text()
