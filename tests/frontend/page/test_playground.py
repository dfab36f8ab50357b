"""Questions, answers and parameters on the page in headless Chromium, in front of a fake engine."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tandem.frontend.config import ChatOptions
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, until
from tests.support.browser import answers, ask, ended, measures, open_page
from tests.support.scripted_server import RAW, prompts, say
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

shared, engine, server = shared_fixtures()


def test_page_holds_a_conversation_by_keyboard(page: "Page", engine: FakeEngine) -> None:
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
    before = "system: be brief\nuser: first\nassistant: <b>one</b> <script>alert(1)</script>\nuser: second\nassistant:"
    assert prompts(engine)[1] == before
    tokens = len(RAW.encode(before).ids)
    assert re.fullmatch(
        rf"{tokens} tokens in, \d+ out · TTFT \d+ ms · [\d.]+ tokens/s · ended by stop", measures(page, 1)
    )
    engine.step_seconds = 0.001
    say(engine, "three")
    ask(page, "third")
    ended(page, 3)
    assert prompts(engine)[2] == f"{before} {'two ' * 40}\nuser: third\nassistant:", "as the model wrote it"
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []
    ask(page, "fourth")
    ended(page, 1)
    assert prompts(engine)[3] == "system: be brief\nuser: fourth\nassistant:"


def test_shift_enter_makes_a_new_line(page: "Page", engine: FakeEngine) -> None:
    box = page.get_by_label("Prompt", exact=True)
    box.fill("one")
    box.press("Shift+Enter")
    page.keyboard.type("two")
    assert engine.submits == []
    page.keyboard.press("Control+Enter")
    ended(page, 1)
    assert prompts(engine) == ["user: one\ntwo\nassistant:"]


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
    assert answers(page)[0].startswith(early)
    until(lambda: engine.num_running == 0, "the engine is told")
    ask(page, "again: ")
    page.locator(".answer").nth(1).filter(has_text="one two").wait_for()
    page.keyboard.press("Escape")
    ended(page, 2)
    until(lambda: engine.num_running == 0, "the engine is told")


def test_a_stopped_answer_shows_its_token_counts(page: "Page", engine: FakeEngine) -> None:
    ids = RAW.encode("one two three four five six " * 200).ids
    engine.script = lambda _: ids
    engine.step_seconds = 0.02
    ask(page, "count")
    page.locator(".answer", has_text="three").wait_for()
    page.get_by_role("button", name="Stop").click()
    ended(page, 1)
    found = re.fullmatch(r"(\d+) tokens in, (\d+) out · TTFT \d+ ms · [\d.]+ tokens/s · stopped", measures(page))
    assert found is not None, measures(page)
    assert int(found[1]) == len(RAW.encode("user: count\nassistant:").ids)
    assert RAW.decode(ids[: int(found[2])]) == answers(page)[0]


def test_a_completion_says_that_it_was_cut(page: "Page", engine: FakeEngine) -> None:
    page.get_by_label("Completion", exact=True).check()
    page.get_by_label("Max tokens").fill("3")
    engine.script = lambda _: RAW.encode("one two three four five six").ids
    ask(page, "count: ")
    ended(page, 1)
    assert measures(page).endswith("cut at max_tokens (3); raise Max tokens for more")
    page.get_by_label("Max tokens").fill("")
    page.get_by_role("button", name="Ask again").click()
    until(lambda: len(engine.submits) == 2, "Retry asks again")
    ended(page, 1)
    assert len(answers(page)) == 1
    assert prompts(engine) == ["count: "] * 2


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
    page.keyboard.press("Enter")
    page.locator(".error", has_text="status: 400").wait_for()
    assert page.locator("#problem").is_hidden()
    say(engine, '{"a": 1}')
    box.fill('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    page.get_by_role("button", name="Ask again").click()
    page.locator(".answer", has_text='{"a": 1}').wait_for()
    assert engine.submits[0].constraint is not None
    assert page.locator(".error").count() == 0
    assert prompts(engine) == ["user: first\nassistant:"]


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
    assert prompts(engine) == ["user: broken\nassistant:"], "a question without an answer is not sent again"


@pytest.fixture
def reasoning(shared: SharedFrontend) -> Iterator[RunningServer]:
    """Run a server that separates reasoning, in front of the same engine."""
    running = RunningServer(replace(shared.config, chat=ChatOptions(reasoning_parser="think"))).start().ready()
    yield running
    running.stop()


def test_page_separates_reasoning_and_does_not_send_it_back(
    browser: "Browser", engine: FakeEngine, reasoning: RunningServer
) -> None:
    with browser.new_context() as context:
        page = open_page(context, reasoning.url)
        say(engine, "<think>which one</think>this one")
        for count in (1, 2):
            ask(page, "first")
            ended(page, count)
        assert page.locator(".reasoning").all_text_contents() == ["which one"] * 2
        assert answers(page) == ["this one"] * 2
        assert prompts(engine)[1] == "user: first\nassistant: this one\nuser: first\nassistant:"
        assert page.complaints == []
