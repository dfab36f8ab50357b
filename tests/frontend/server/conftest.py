"""Servers with settings of a test's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer


@pytest.fixture
def serve(engine: FakeEngine, config: FrontendConfig) -> Iterator[Callable[..., str]]:
    """Return a function that starts a server with changes of the configuration, and returns its URL."""
    with ExitStack() as stack:

        def start(**changes: Any) -> str:
            engine.start()
            server = RunningServer(structs.replace(config, **changes)).start()
            stack.callback(server.stop)
            return server.ready().url

        yield start
