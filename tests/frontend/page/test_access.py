"""The API key, the state of the server and the reference, in headless Chromium."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tandem.frontend.config import FrontendConfig
from tandem.protocol.events import Phase
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get
from tests.support.browser import answers, ask, ended, measures, open_page
from tests.support.scripted_server import prompts, say
from tests.support.serving import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

OtherServer = Callable[[FrontendConfig], RunningServer]


def notice(page: "Page") -> None:
    """Make the page ask for the server's state now, as it does when its tab is shown again."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_page_asks_for_an_api_key_and_sends_it(
    browser: "Browser", engine: FakeEngine, config: FrontendConfig, other_server: OtherServer
) -> None:
    with browser.new_context() as context:
        page = open_page(context, other_server(replace(config, api_keys=("secret",))).url)
        page.locator("#status.bad", has_text="API key").wait_for()
        page.get_by_text("This server needs an API key. Enter the one that you were given").wait_for()
        field = page.get_by_label("API key")
        field.fill("wrong")
        field.press("Enter")
        page.get_by_text("The server does not accept this API key. Check it and enter it again.").wait_for()
        assert field.get_attribute("aria-invalid") == "true"
        field.fill("secret")
        field.blur()
        page.locator("#status", has_text="fake-model").wait_for()
        assert page.locator("#key_box").is_hidden()
        say(engine, "one")
        ask(page, "first")
        ended(page, 1)
        assert answers(page) == ["one"]
        stored = page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }])")
        assert "first" in stored
        assert "secret" not in stored, "the key is not kept"
        page.reload()
        ended(page, 1)
        page.locator("#key_box").wait_for()
        ask(page, "second")
        page.locator(".error", has_text="The server needs an API key. Enter it above, then press Retry.").wait_for()
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use key").click()
        page.locator("#status", has_text="fake-model").wait_for()
        page.get_by_role("button", name="Ask again").click()
        page.locator(".answer").nth(1).filter(has_text="one").wait_for()
        assert page.complaints == []


def test_the_header_says_that_the_engine_is_gone_and_back(page: "Page", engine: FakeEngine) -> None:
    engine.die()
    notice(page)
    page.locator("#status.bad").wait_for()
    assert "fake-model" not in (page.locator("#status").text_content() or "")
    engine.start()
    page.locator("#status:not(.bad)", has_text="fake-model").wait_for()


def test_the_header_says_that_the_server_is_gone_and_back(
    browser: "Browser", engine: FakeEngine, config: FrontendConfig
) -> None:
    engine.start()
    port = free_port()
    first = RunningServer(config, port).start().ready()
    with browser.new_context() as context:
        page = open_page(context, first.url)
        page.locator("#status", has_text="fake-model").wait_for()
        first.stop()
        notice(page)
        page.locator("#status.bad", has_text="The server cannot be reached. Trying again.").wait_for()
        ask(page, "first")
        page.locator(".error", has_text="The server cannot be reached.").wait_for()
        second = RunningServer(config, port).start().ready()
        try:
            page.locator("#status:not(.bad)", has_text="fake-model").wait_for()
            say(engine, "one")
            page.get_by_role("button", name="Ask again").click()
            page.locator(".answer", has_text="one").wait_for()
        finally:
            second.stop()
        assert page.complaints == []


@contextmanager
def models_held(page: "Page") -> "Iterator[None]":
    """Answer nothing that asks for the models until this ends."""
    held: list[Route] = []
    free = False

    def answer(route: "Route") -> None:
        if free:
            route.continue_()
        else:
            held.append(route)

    page.route("**/v1/models", answer)
    yield
    free = True
    for route in held:
        route.continue_()


@pytest.mark.parametrize(("mode", "shown"), [("Chat", ["fake-model", " one"]), ("Completion", ["first one"])])
def test_a_question_asked_before_the_models_are_known_is_answered(
    page: "Page", engine: FakeEngine, mode: str, shown: list[str]
) -> None:
    say(engine, " one")
    page.get_by_role("radio", name=mode).check()
    with models_held(page):
        page.reload()
        ask(page, "first")
        page.get_by_role("button", name="Stop").wait_for()
        assert page.locator("#model option").count() == 0, "the header does not know them either"
    ended(page, 1)
    assert measures(page).endswith("ended by stop")
    assert page.locator("article.reply > :is(h2, .answer)").all_text_contents() == shown
    page.locator("#status", has_text="fake-model").wait_for()


def test_a_question_that_waits_for_the_models_can_be_stopped(page: "Page", engine: FakeEngine) -> None:
    with models_held(page):
        page.reload()
        ask(page, "first")
        page.get_by_role("button", name="Stop").click()
        ended(page, 1)
        assert measures(page) == "stopped"
    page.get_by_role("button", name="Ask again").click()
    page.locator(".measures", has_text="tokens in").wait_for()
    assert prompts(engine) == ["user: first\nassistant:"]


def test_a_question_to_a_loading_server_is_told_how_far_it_is(page: "Page", engine: FakeEngine) -> None:
    engine.die()
    engine.phase, engine.percent, engine.detail = Phase.LOADING, 40, "loading the weights"
    engine.start()
    page.reload()
    page.locator("#status.bad", has_text="loading").wait_for()
    ask(page, "first")
    page.locator(".error", has_text="status: 503").wait_for()


def test_the_reference_shows_every_route_and_its_fields_without_other_hosts(
    browser: "Browser", server: RunningServer
) -> None:
    described = get(server.url + "/openapi.json").json()
    with browser.new_context() as context:
        asked: list[str] = []
        context.on("request", lambda request: asked.append(request.url))
        page = open_page(context, server.url + "/docs")
        page.locator("#status", has_text=described["info"]["version"]).wait_for()
        routes = {f"{method.upper()} {path}" for path, found in described["paths"].items() for method in found}
        heads = page.locator(".route > summary")
        shown = {" ".join(heads.nth(at).inner_text().split()[:2]) for at in range(heads.count())}
        assert shown == routes
        heads.filter(has_text="/v1/chat/completions").click()
        row = page.locator("tr", has_text="Randomness of sampling").locator("visible=true")
        assert "at least 0, at most 2" in row.inner_text()
        assert page.get_by_text("messages (required)").locator("visible=true").count() == 1
        assert all(url.startswith(server.url) for url in asked)
        page.set_viewport_size({"width": 375, "height": 667})
        assert page.evaluate("document.documentElement.scrollWidth") == 375, "a phone need not scroll sideways"
        assert page.complaints == []


def test_the_reference_asks_for_an_api_key(
    browser: "Browser", config: FrontendConfig, other_server: OtherServer
) -> None:
    with browser.new_context() as context:
        page = open_page(context, other_server(replace(config, api_keys=("secret",))).url + "/docs")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use key").click()
        page.locator(".route").first.wait_for()
        assert page.locator("#key_box").is_hidden()
