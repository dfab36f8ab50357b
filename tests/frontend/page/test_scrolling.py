"""The transcript follows its end while answers arrive, and leaves a reader alone who scrolls up."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tandem.frontend.config import ChatOptions
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, until
from tests.support.browser import ask, ended, open_page
from tests.support.scripted_server import say
from tests.support.shared_frontend import shared_fixtures

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

shared, engine, server = shared_fixtures(lambda config: replace(config, chat=ChatOptions(reasoning_parser="think")))

PHONE = {"width": 375, "height": 667}
DESKTOP = {"width": 1280, "height": 800}

ANSWER = (
    "# Title\n\nSome **words** of a paragraph that fill lines, with \\(a+b\\).\n\n- one\n- two\n\n```python\n"
    + "x = 1\n" * 30
    + "```\n\n| "
    + "wide | " * 20
    + "\n"
    + "|-" * 20
    + "|\n"
    + "|1" * 20
    + "|\n\n![a](http://x.org/y.png)\n\n[b][c]\n\n"
    + "> *d*\n\n" * 6
    + "[c]: http://x.org\n"
)

# An observer that was made after the page's own sees what is painted.
WATCH = """() => {
    const view = document.getElementById("transcript");
    window.below = () => view.scrollHeight - view.scrollTop - view.clientHeight;
    window.painted = [];
    const observer = new ResizeObserver(() => window.painted.push(window.below()));
    [view, ...view.children].forEach((one) => observer.observe(one));
}"""
TOP = "document.getElementById('transcript').scrollTop"
HEIGHT = "document.getElementById('transcript').scrollHeight"


def opened(context: Any, server: RunningServer) -> "Page":
    """Open the page in a state from which a test can ask."""
    page: Page = open_page(context, server.url)
    page.locator("#status", has_text="fake-model").wait_for()
    page.evaluate(WATCH)
    return page


def followed(page: "Page") -> bool:
    """Return whether all that was painted since the last call showed the end, and that was something."""
    painted: list[float] = page.evaluate("window.painted.splice(0)")
    return len(painted) > 0 and max(painted) < 2


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_transcript_follows_each_answer(
    size: dict[str, int], browser: "Browser", server: RunningServer, engine: FakeEngine
) -> None:
    phone = size is PHONE
    with browser.new_context(viewport=size, has_touch=phone, is_mobile=phone) as context:  # type: ignore[arg-type]
        page = opened(context, server)
        engine.step_seconds, engine.tokens_per_step = 0.005, 4
        say(engine, ANSWER)
        for count in (1, 2, 3):
            if count == 3:
                page.reload()
                page.evaluate(WATCH)
                until(lambda: page.evaluate("window.painted.length > 0"))
                assert followed(page), "a conversation that is opened shows its end"
            before = page.evaluate(TOP)
            ask(page, f"question {count}")
            ended(page, count)
            until(lambda: page.evaluate("window.below() < 2"))
            assert followed(page), count
            assert page.evaluate(TOP) > before + 300
        page.set_viewport_size({**size, "height": size["height"] - 250})  # type: ignore[typeddict-item]
        until(lambda: page.evaluate("window.painted.length > 0"))
        assert followed(page), "as when a phone's keyboard opens"
        assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["thinking", "completion"])
def test_the_transcript_follows_thoughts_and_completions(
    mode: str, browser: "Browser", server: RunningServer, engine: FakeEngine
) -> None:
    with browser.new_context(viewport=PHONE) as context:  # type: ignore[arg-type]
        page = opened(context, server)
        engine.step_seconds = 0.002
        say(engine, "<think>" + "so\n\n" * 60 + "</think>" + ANSWER[:200])
        if mode == "completion":
            page.get_by_label("Completion", exact=True).check()
            page.evaluate("document.getElementById('max_tokens').value = '500'")
        ask(page, "first")
        ended(page, 1)
        until(lambda: page.evaluate("window.below() < 2"))
        assert page.evaluate(TOP) > 300
        assert followed(page)


def rested(page: "Page") -> None:
    """Wait until a scroll has come to its end: keys and wheels scroll smoothly."""
    tops = [-1.0, page.evaluate(TOP)]
    while tops[-1] != tops[-2]:
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        tops.append(page.evaluate(TOP))


SCROLLS: dict[str, Callable[["Page"], object]] = {
    "a little": lambda page: page.mouse.wheel(0, -30),
    "by key": lambda page: page.locator("#transcript").press("Home"),
}


@pytest.mark.parametrize("how", SCROLLS)
def test_a_reader_who_scrolls_up_is_left_there_until_they_are_back(how: str, page: "Page", engine: FakeEngine) -> None:
    page.evaluate(WATCH)
    engine.step_seconds = 0.02  # half a minute in all, which outlives what a busy machine does meanwhile
    say(engine, "<think>" + "so\n" * 100 + "</think>" + "```\n" + "x\n" * 650)
    page.get_by_label("Max tokens").fill("1800")
    ask(page, "first")
    until(lambda: page.evaluate(TOP) > 300)
    assert followed(page)
    page.locator("#transcript").hover()
    SCROLLS[how](page)
    until(lambda: page.evaluate("window.below() > 25"))
    rested(page)
    height = page.evaluate(HEIGHT)
    top = page.evaluate(TOP)
    until(lambda: page.evaluate(HEIGHT) > height + 400)
    assert page.evaluate(TOP) == top, "the reader stays"
    page.mouse.wheel(0, 100_000)
    until(lambda: page.evaluate("window.below() < 2"))
    page.evaluate("window.painted = []")
    until(lambda: page.evaluate("window.painted.length > 10"))
    assert followed(page)
    page.keyboard.press("Escape")
    ended(page, 1)
    until(lambda: page.evaluate("window.below() < 2"))
    SCROLLS[how](page)
    until(lambda: page.evaluate("window.below() > 25"))
    rested(page)
    page.evaluate("window.painted = []")
    say(engine, "two")
    ask(page, "second")
    ended(page, 2)
    until(lambda: page.evaluate("window.below() < 2"))
    assert followed(page), "who asks wants to see the answer"


def test_a_question_that_is_edited_stays_in_sight(page: "Page", engine: FakeEngine) -> None:
    say(engine, "```\n" + "x\n" * 14)
    ask(page, "first")
    ended(page, 1)
    page.evaluate(WATCH)
    until(lambda: page.evaluate("window.below() < 2"))
    page.evaluate("window.painted = []")
    page.get_by_role("button", name="Edit question").click()
    until(lambda: page.evaluate("window.painted.length > 0"))
    edited, view = page.get_by_label("Question", exact=True).bounding_box(), page.locator("#transcript").bounding_box()
    assert edited["y"] > view["y"] - 1  # type: ignore[index]
