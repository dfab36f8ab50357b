"""A real `tandem serve` whose engine core is scripted: fast to start, as fast as asked, and without a model."""

import tempfile
from pathlib import Path

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

    def clients(self) -> StreamClient:
        """Return a client that can hold thousands of streams."""
        return StreamClient(self.address)
