"""The page in headless Chromium, in front of a fake engine."""

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tandem.frontend.config import ChatOptions, FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import DEADLINE, RunningServer, until
from tests.support.scripted_server import RAW, prompts, say, write_chat_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; its package is called chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


# Not of the session: while the driver runs there is an event loop in this thread, which other tests could not bear.
@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: "Browser", server: RunningServer) -> "Iterator[Page]":
    """Yield the loaded page; fail the test for anything its policy blocks or its scripts throw."""
    context = browser.new_context()
    opened = open_page(context, server)
    yield opened
    context.close()
    assert opened.complaints == []  # type: ignore[attr-defined]


def open_page(context: Any, server: RunningServer) -> Any:
    opened = context.new_page()
    opened.set_default_timeout(1000 * DEADLINE)
    opened.complaints = []
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on(
        "console",
        # Refusals of the server are noted there, too.
        lambda message: opened.complaints.append(message.text) if "policy" in message.text.lower() else None,
    )
    opened.goto(server.url)
    return opened


def ask(page: "Page", text: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(text)
    page.keyboard.press("Control+Enter")


def ended(page: "Page", count: int) -> None:
    """Wait until this number of answers has ended."""
    page.locator(".measures").nth(count - 1).wait_for()


def answers(page: "Page") -> list[str]:
    return page.locator(".answer").all_text_contents()


def test_page_holds_a_conversation_by_keyboard(page: "Page", engine: FakeEngine) -> None:
    page.locator("#status", has_text="fake-model").wait_for()
    page.get_by_label("System prompt").fill("be brief")
    say(engine, "<b>one</b> <script>alert(1)</script>")
    ask(page, "first")
    ended(page, 1)
    assert answers(page) == ["<b>one</b> <script>alert(1)</script>"], "text of the model is text"
    engine.step_seconds = 0.02  # an answer that comes all at once has no tokens/s
    say(engine, "two " * 40)
    ask(page, "second")
    ended(page, 2)
    assert answers(page)[1] == "two " * 40
    assert prompts(engine)[1] == (
        "system: be brief\nuser: first\nassistant: <b>one</b> <script>alert(1)</script>\nuser: second\nassistant:"
    )
    tokens = len(RAW.encode(prompts(engine)[1]).ids)
    measures = page.locator(".measures").nth(1).text_content() or ""
    assert re.fullmatch(rf"{tokens} tokens in, \d+ out · TTFT \d+ ms · [\d.]+ tokens/s · ended by stop", measures)
    page.get_by_role("button", name="Clear").click()
    assert answers(page) == []
    ask(page, "third")
    ended(page, 1)
    assert prompts(engine)[2] == "system: be brief\nuser: third\nassistant:"


def test_page_streams_tokens_and_stops_on_request(page: "Page", engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three four five six " * 200).ids
    engine.step_seconds = 0.02
    page.get_by_label("Completion", exact=True).check()
    page.get_by_label("Max tokens").fill("1500")
    ask(page, "count: ")
    page.locator(".answer", has_text="one two").wait_for()
    early = answers(page)[0]
    until(lambda: len(answers(page)[0]) > len(early), "it grows while it is being made")
    assert answers(page)[0].startswith(early)
    assert page.get_by_role("button", name="Send").is_disabled()
    page.get_by_role("button", name="Stop").click()
    ended(page, 1)
    assert (page.locator(".measures").text_content() or "").endswith("stopped")
    assert answers(page)[0].startswith(early)
    until(lambda: engine.num_running == 0, "the engine is told")
    ask(page, "again: ")
    page.locator(".answer").nth(1).filter(has_text="one two").wait_for()
    page.keyboard.press("Escape")
    ended(page, 2)
    until(lambda: engine.num_running == 0, "the engine is told")


def test_page_parameters_become_request_fields(page: "Page", engine: FakeEngine) -> None:
    page.get_by_label("Completion", exact=True).check()
    for label, value in (
        ("Temperature", "0.5"),
        ("Top p", "0.9"),
        ("Max tokens", "7"),
        ("Seed", "11"),
        ("Stop strings, one per line", "never\never"),
    ):
        page.get_by_label(label).fill(value)
    ask(page, "the fox")
    ended(page, 1)
    sampling = engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 7, 11)
    assert prompts(engine) == ["the fox"]


def test_page_schema_constrains_and_an_invalid_one_is_reported(page: "Page", engine: FakeEngine) -> None:
    box = page.get_by_label("JSON schema")
    box.fill('{"type": "object",}')
    ask(page, "first")
    page.locator("#problem", has_text="The JSON schema is not valid JSON").wait_for()
    assert box.get_attribute("aria-invalid") == "true"
    assert engine.submits == []
    box.fill('{"type": "nonsense"}')
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+Enter")
    page.locator(".error", has_text="status: 400").wait_for()
    assert page.locator("#problem").is_hidden()
    assert page.get_by_label("Prompt", exact=True).input_value() == "first", "it can be sent again"
    say(engine, '{"a": 1}')
    box.fill('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+Enter")
    page.locator(".answer", has_text='{"a": 1}').wait_for()
    assert engine.submits[0].constraint is not None


def test_page_shows_errors_in_full(page: "Page", engine: FakeEngine) -> None:
    page.get_by_label("Temperature").fill("3")
    ask(page, "hot")
    page.locator(".error").wait_for()
    assert page.locator(".error").text_content() == (
        "'temperature' must be between 0 and 2, not 3\n"
        "status: 400, type: invalid_request_error, param: temperature, code: invalid_value"
    )
    page.get_by_label("Temperature").fill("")
    say(engine, "on and on " * 200)
    engine.step_seconds = 0.02
    ask(page, "broken")
    page.locator(".answer", has_text="on and").wait_for()
    engine.break_after = 1
    page.locator(".error", has_text="broken by the fake engine").wait_for()
    assert answers(page)[-1].startswith("on and"), "what came before is still there"


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


def test_page_asks_for_an_api_key_and_sends_it(
    browser: "Browser",
    engine: FakeEngine,
    config: FrontendConfig,
    other_server: Callable[[FrontendConfig], RunningServer],
) -> None:
    with browser.new_context() as context:
        page = open_page(context, other_server(replace(config, api_keys=("secret",))))
        page.locator("#status.bad", has_text="API key").wait_for()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").blur()
        page.locator("#status", has_text="fake-model").wait_for()
        say(engine, "one")
        ask(page, "first")
        page.locator(".answer", has_text="one").wait_for()
        assert page.complaints == []


def test_page_separates_reasoning_and_does_not_send_it_back(
    browser: "Browser",
    engine: FakeEngine,
    config: FrontendConfig,
    other_server: Callable[[FrontendConfig], RunningServer],
) -> None:
    with browser.new_context() as context:
        page = open_page(context, other_server(replace(config, chat=ChatOptions(reasoning_parser="think"))))
        say(engine, "<think>which one</think>this one")
        for count in (1, 2):
            ask(page, "first")
            ended(page, count)
        assert page.locator(".reasoning").all_text_contents() == ["which one"] * 2
        assert answers(page) == ["this one"] * 2
        assert prompts(engine)[1] == "user: first\nassistant: this one\nuser: first\nassistant:"
        assert page.complaints == []
