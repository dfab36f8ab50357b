"""Servers of engines that differ from the fixture `engine`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer

StartServer = Callable[[FakeEngine, FrontendConfig], RunningServer]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Return a function that starts an engine and a server in front of it. Both are stopped after the test."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, config: FrontendConfig) -> RunningServer:
            engine.start()
            stack.callback(engine.die)
            server = RunningServer(config).start()
            stack.callback(server.stop)
            return server.ready()

        yield start
