"""A browser for all tests of the page, in front of a server with a fake engine."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tandem.frontend.api.page import page_paths
from tandem.frontend.config import FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer
from tests.support.browser import CHROMIUM, open_page
from tests.support.scripted_server import write_chat_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


# Not of the session: while the driver runs there is an event loop in this thread, which other tests could not bear. The
# folder is a package so that a fixture can have its scope.
@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; its package is called chromium")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: "Browser", server: RunningServer) -> "Iterator[Page]":
    """Yield the loaded page; fail the test for anything its policy blocks or its scripts throw."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = open_page(context, server.url)
    opened.locator("#status", has_text="fake-model").wait_for()
    yield opened
    context.close()
    assert opened.complaints == []


@pytest.fixture(scope="module")
def modules(browser: "Browser") -> "Iterator[Page]":
    """Yield a page without a server, whose scripts can import the modules of the playground."""
    served = {path: file for path, file in page_paths().items() if file.suffix == ".js"}

    def answer(route: "Route") -> None:
        file = served.get(urlsplit(route.request.url).path)
        if file is None:
            route.fulfill(body="<!doctype html>", content_type="text/html")
        else:
            route.fulfill(body=file.read_bytes(), content_type="text/javascript")

    with browser.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(1000 * DEADLINE)
        opened.route("**/*", answer)
        opened.goto("http://playground.test/")
        yield opened


@pytest.fixture
def other_server(engine: FakeEngine) -> Iterator[Callable[[FrontendConfig], RunningServer]]:
    """Start a server with a changed configuration."""
    running: list[RunningServer] = []

    def start(config: FrontendConfig) -> RunningServer:
        engine.start()
        running.append(RunningServer(config).start().ready())
        return running[0]

    yield start
    running[0].stop()
