"""A frontend in front of a fake engine, shared by the tests of a file, which leave it running."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, until


class SharedFrontend(Struct):
    """A running server and its engine; a start of both, with the process that renders chats, outweighs most tests."""

    config: FrontendConfig
    server: RunningServer
    engine: FakeEngine

    def renewed_engine(self) -> FakeEngine:
        """Return the engine without requests, and as its constructor left it."""
        self.engine.renew()
        until(lambda: self.engine.num_running == 0, "the end of the requests of the test before")
        self.engine.renew()
        return self.engine


@contextmanager
def shared_frontend(
    model_dir: Path,
    configure: Callable[[FrontendConfig], FrontendConfig] = lambda config: config,
    **facts: Any,
) -> Iterator[SharedFrontend]:
    """Run a frontend that is ready, with the settings of the fixture `config` as `configure` changes them.

    `facts` are those of the engine's model.
    """
    folder = Path(tempfile.mkdtemp(prefix="tdm-"))
    endpoint = f"ipc://{folder}/engine"
    config = FrontendConfig(endpoint, model_dir, beat_timeout=60.0, drain_timeout=1.0, log_level="warning")
    engine = FakeEngine(endpoint, **facts).start()
    try:
        config = configure(config)
        server = RunningServer(config).start()
        try:
            yield SharedFrontend(config, server.ready(), engine)
        finally:
            server.stop()
    finally:
        engine.die()
        shutil.rmtree(folder)


def shared_fixtures(
    configure: Callable[[FrontendConfig], FrontendConfig] = lambda config: config,
) -> tuple[Any, Any, Any]:
    """Return fixtures for a file of tests: the frontend that all share, its engine, renewed for each, and its server.

    The file assigns them to `shared`, `engine` and `server`, and has a fixture `model_dir` of its own.
    """

    @pytest.fixture(scope="module")
    def shared(model_dir: Path) -> Iterator[SharedFrontend]:
        with shared_frontend(model_dir, configure) as running:
            yield running

    @pytest.fixture(autouse=True)
    def engine(shared: SharedFrontend) -> FakeEngine:
        return shared.renewed_engine()

    @pytest.fixture
    def server(shared: SharedFrontend) -> RunningServer:
        return shared.server

    return shared, engine, server
