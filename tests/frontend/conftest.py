"""A frontend under a real server on a loopback port, in front of a fake engine, for each test."""

import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tandem.frontend.config import FrontendConfig
from tandem.frontend.listening import listen
from tandem.frontend.server.server import DrainingServer, build_server
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_tokenizer
from tests.support.prompt_uvicorn import prompt_uvicorn

DEADLINE = 120.0
"""Seconds after which a test gives up waiting; no test asserts how long something took."""

# By default httpx builds a TLS context for every call, which takes longer than the call.
_CONTEXT = ssl.create_default_context()
head = partial(httpx.head, verify=_CONTEXT, timeout=DEADLINE)
get = partial(httpx.get, verify=_CONTEXT, timeout=DEADLINE)
post = partial(httpx.post, verify=_CONTEXT, timeout=DEADLINE)
open_stream = partial(httpx.stream, verify=_CONTEXT, timeout=DEADLINE)


def until(condition: Callable[[], object], what: str = "") -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {DEADLINE:.0f} s: {what or condition}"
        time.sleep(0.005)


class RunningServer:
    """A frontend under uvicorn in a thread."""

    def __init__(self, config: FrontendConfig, port: int = 0) -> None:
        self.sock = listen("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.server: DrainingServer = build_server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],), name="server")

    def start(self) -> "RunningServer":
        self.thread.start()
        until(lambda: self.server.started, "the server listens")
        return self

    def ready(self) -> "RunningServer":
        until(lambda: self.server._service.health().ready, "the frontend is ready")
        return self

    def alone(self) -> "RunningServer":
        """Refuse requests at once for want of an engine, instead of waiting 2 s for the first sign of one."""
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(self.server._service.link_awaited.set)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def prompt_servers() -> Iterator[None]:
    with prompt_uvicorn():
        yield


@pytest.fixture
def ipc_dir() -> Iterator[Path]:
    """A private directory with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="tdm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return path


@pytest.fixture
def engine(ipc_dir: Path) -> Iterator[FakeEngine]:
    fake = FakeEngine(f"ipc://{ipc_dir}/engine")
    yield fake
    fake.die()


@pytest.fixture
def config(ipc_dir: Path, model_dir: Path) -> FrontendConfig:
    return FrontendConfig(
        f"ipc://{ipc_dir}/engine", model_dir, beat_timeout=60.0, drain_timeout=1.0, log_level="warning"
    )


@pytest.fixture
def server(engine: FakeEngine, config: FrontendConfig) -> Iterator[RunningServer]:
    """A running server that is ready."""
    engine.start()
    running = RunningServer(config).start().ready()
    yield running
    running.stop()
